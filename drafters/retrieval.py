"""Lookup with a memory: where a row's own text holds nothing, what most often follows in a corpus.

The rule. Whatever `drafters.ngram` finds in the row itself is proposed. Where it finds nothing, the
longest of the last `longest`, ..., 1 tokens that the table knows are looked up there, and what
stands behind them in the corpus is proposed, up to the end of its text.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters.base import BuildContext
from drafters.checkpoint import read_description, save_drafter
from drafters.ngram import Guess, NgramConfig, NgramDrafter, NgramIndex
from drafters.retrieval_table import TABLE, Table, read_table
from kernels.ngram_table import MOST_TOKENS

if TYPE_CHECKING:
    from decode.device.parts import DeviceLookup

KIND = "retrieval"


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig(NgramConfig):
    """Lookup in prompt and output, and else in a table of a corpus."""

    longest: int  # tokens of the longest n-gram in the table

    def __post_init__(self) -> None:
        NgramConfig.__post_init__(self)
        if not 1 <= self.longest <= MOST_TOKENS:
            raise ValueError(f"longest={self.longest} must lie between 1 and {MOST_TOKENS}")

    def build(self, context: BuildContext) -> "RetrievalDrafter":
        """With the table in the folder `context.weights`; without one it is a lookup alone."""
        if context.weights is None:
            return RetrievalDrafter(self, None)
        description = read_description(context.weights, KIND)
        table = _table_in(context.weights, description, context.target.vocab_size)
        return RetrievalDrafter(self, table)


class RetrievalDrafter(NgramDrafter):
    """A lookup drafter that goes on where lookup alone is silent."""

    kind = KIND

    def __init__(self, config: RetrievalConfig, table: Table | None) -> None:
        if table is not None and table.longest != config.longest:
            raise ValueError(
                f"the table holds n-grams of up to {table.longest} tokens, but "
                f"longest={config.longest}; set it to {table.longest}, or build the table again"
            )
        super().__init__(config)
        self.table = table
        self.memory_bytes = 0 if table is None else table.num_bytes

    def guess(self, index: NgramIndex, num_tokens: int) -> Guess:
        found = super().guess(index, num_tokens)
        if found.num_matched or self.table is None:
            return found
        matched, place = self.table.find(index.tokens)
        size = min(num_tokens, self.config.max_offer) if matched else 0
        return Guess(matched, self.table.following(place, size))

    def device_lookup(self, min_match: int) -> "DeviceLookup":
        """The numbers of both rules, and the table; the composite's `min_match` holds for both."""
        from decode.device.parts import DeviceLookup

        if self.table is None:
            return super().device_lookup(min_match)
        low, high, offer = self.config.min_ngram, self.config.max_ngram, self.config.max_offer
        return DeviceLookup(low, high, offer, max(1, min_match), self.table)

    def save(self, folder: Path) -> None:
        """Write drafter.json and, where there is a table, table.safetensors."""
        tensors = None
        if self.table is not None:
            tensors = {"texts": self.table.texts, "places": self.table.places}
        save_drafter(folder, KIND, {"config": asdict(self.config)}, tensors, TABLE)


def from_pretrained(name_or_path: str, target: Any) -> RetrievalDrafter:
    """What save() wrote, for a target that knows all its tokens."""
    folder = Path(name_or_path)
    description = read_description(folder, KIND)
    config = description.get("config")
    settings = {setting.name for setting in fields(RetrievalConfig)}
    if not isinstance(config, dict) or set(config) != settings:
        raise ValueError(
            f"{folder} describes a retrieval drafter with other settings than are known here "
            f"({', '.join(sorted(settings))}); build it again"
        )
    table = _table_in(folder, description, target.vocab_size)
    return RetrievalDrafter(RetrievalConfig(**config), table)


def _table_in(folder: Path, description: Mapping[str, Any], vocab_size: int) -> Table | None:
    """None where the drafter was saved without one."""
    if "weights_sha256" not in description:
        return None
    return read_table(folder, description, vocab_size)
