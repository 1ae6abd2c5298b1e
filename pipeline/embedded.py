"""The project's own prompts as a data source, with prompts of two domains and other wordings."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

from pipeline.digests import combined, digest
from pipeline.prompts import DOMAINS, MIXED, Family, expand, load_families
from pipeline.rows import Row, make_row, normalise


@dataclass(frozen=True, kw_only=True)
class EmbeddedData:
    """Templates that come with the project, filled in the same way for the same seed."""

    domains: list[str]
    prompts_per_family: int

    def __post_init__(self) -> None:
        if unknown := [name for name in self.domains if name not in DOMAINS]:
            raise ValueError(f"data.domains names {unknown[0]}; use some of {', '.join(DOMAINS)}")
        if not self.domains:
            raise ValueError(f"data.domains is empty; use some of {', '.join(DOMAINS)}")
        if self.prompts_per_family < 1:
            raise ValueError(
                f"data.prompts_per_family={self.prompts_per_family} must be at least 1"
            )

    def load(self, seed: int) -> dict[str, list[Row]]:
        """Rows to be split, and the splits that only this source has."""
        families = [family for domain in self.domains for family in load_families(domain)]
        mixed = [
            family for family in load_families(MIXED) if set(family.domains) <= set(self.domains)
        ]
        return {
            "train": [row for family in families for row in self._rows(family, seed)],
            "mixed": [row for family in mixed for row in self._rows(family, seed)],
            "paraphrase": [row for family in families for row in self._paraphrases(family, seed)],
        }

    def identity(self) -> dict[str, Any]:
        folder = resources.files("pipeline.prompts")
        parts = []
        for name in (*self.domains, MIXED):
            with resources.as_file(folder.joinpath(f"{name}.yaml")) as path:
                parts.append((name, digest(path)))
        settings = {"domains": self.domains, "prompts_per_family": self.prompts_per_family}
        return {"kind": "embedded", **settings, "content": combined(parts)}

    def _rows(self, family: Family, seed: int) -> Iterator[Row]:
        for expansion in expand(family, seed, self.prompts_per_family):
            yield _row(expansion.text, family)

    def _paraphrases(self, family: Family, seed: int) -> Iterator[Row]:
        """Every other wording; prepare keeps those of the families that are held out for tests."""
        for expansion in expand(family, seed, self.prompts_per_family):
            for text in expansion.paraphrases:
                yield _row(text, family)


def _row(text: str, family: Family) -> Row:
    text = normalise(text)
    messages = [{"role": "user", "content": text}]
    return make_row(
        text=text, messages=messages, response=None, domain=family.domain, family=family.name
    )
