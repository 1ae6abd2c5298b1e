"""The embedded prompts: families of templates, their other wordings, and how they are filled.

One YAML file a domain. A file is a list of families; the header of each file states the rule:

- `template` and both `paraphrases` hold placeholders `{{name}}`. A single brace is plain text, so
  that code and JSON need no escape.
- `slots` maps a name to its values; slots vary independently. `cases` is a list of mappings whose
  names are filled together (a code snippet and the change it needs). A family has either or both;
  with both, every case meets every combination of the slots.
- Every scalar is text: `9:30`, `1.10` and `no` stay as they are written.

A family is the unit of every split: two of its expansions never land on different sides.
"""

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import yaml

DOMAINS = ("code", "chat", "reasoning")
MIXED = "mixed"

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_KEYS = {"family", "template", "paraphrases", "slots", "cases", "domains", "broken"}
# The base loader turns every scalar into text: no dates, no base-60 clock times, no booleans.
_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)

Filling = dict[str, str]


@dataclass(frozen=True)
class Family:
    """One template with its other wordings and every way to fill them."""

    name: str
    domain: str  # the file it came from: one of DOMAINS, or MIXED
    domains: tuple[str, ...]  # what a prompt moves through: (domain,), or two of them when mixed
    template: str
    paraphrases: tuple[str, ...]
    fillings: tuple[Filling, ...]  # in the file's order
    broken: bool  # its code is meant not to compile


class Expansion(NamedTuple):
    """A filled template and the same request in the family's other wordings."""

    text: str
    paraphrases: tuple[str, ...]


def load_families(domain: str) -> list[Family]:
    """Return the families of one domain (`code`, `chat`, `reasoning` or `mixed`), in file order.

    Raises ValueError for an unknown domain and for a family that breaks the rule above.
    """
    return list(_families(domain))


def expand(family: Family, seed: int, limit: int | None = None) -> list[Expansion]:
    """Return up to `limit` distinct expansions (None: all), always the same for the same seed.

    The order is a shuffle keyed by the seed and the family's name, so a smaller limit is a prefix
    of a larger one and a family's prompts do not change when another family does.
    """
    fillings = list(family.fillings)
    random.Random(f"{seed}:{family.name}").shuffle(fillings)
    return [
        Expansion(fill(family.template, f), tuple(fill(p, f) for p in family.paraphrases))
        for f in fillings[:limit]
    ]


def fill(template: str, filling: Filling) -> str:
    """Return the template with every `{{name}}` replaced, stripped at both ends."""
    return _PLACEHOLDER.sub(lambda match: filling[match[1]], template).strip()


def placeholders(template: str) -> set[str]:
    """Return the names between double braces."""
    return set(_PLACEHOLDER.findall(template))


@cache
def _families(domain: str) -> tuple[Family, ...]:
    if domain not in (*DOMAINS, MIXED):
        known = ", ".join((*DOMAINS, MIXED))
        raise ValueError(f"there are no embedded prompts for domain {domain!r}: use one of {known}")
    source = resources.files(__package__).joinpath(f"{domain}.yaml").read_text(encoding="utf-8")
    return parse_families(source, domain)


def parse_families(source: str, domain: str) -> tuple[Family, ...]:
    """Return the families of a YAML text; raise ValueError, naming the family that is wrong."""
    entries = yaml.load(source, Loader=_LOADER)
    if not isinstance(entries, list):
        raise ValueError(f"prompts of domain {domain!r} must be a YAML list of families")
    families = tuple(_family(entry, domain) for entry in entries)
    names = [family.name for family in families]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"family names must be unique in {domain!r}: rename one of {twice}")
    return families


def _family(entry: dict[str, Any], domain: str) -> Family:
    name = entry.get("family", "(no name)")
    if unknown := sorted(set(entry) - _KEYS):
        raise ValueError(f"family {name!r} has unknown keys {unknown}: use {sorted(_KEYS)}")
    if missing := sorted({"family", "template", "paraphrases"} - set(entry)):
        raise ValueError(f"family {name!r} of domain {domain!r} lacks {missing}: add them")
    if (domain == MIXED) != ("domains" in entry):
        raise ValueError(f"family {name!r}: `domains` is for mixed families, and they need it")
    family = Family(
        name=name,
        domain=domain,
        domains=tuple(entry.get("domains", (domain,))),
        template=entry["template"],
        paraphrases=tuple(entry["paraphrases"]),
        fillings=tuple(_fillings(entry.get("cases"), entry.get("slots"))),
        broken=entry.get("broken") == "true",
    )
    _check(family)
    return family


def _fillings(cases: list[Filling] | None, slots: dict[str, list[str]] | None) -> Iterator[Filling]:
    names = list(slots or {})
    for case in cases or [{}]:
        for values in itertools.product(*(slots or {}).values()):
            filling = case | dict(zip(names, values, strict=True))
            # A block scalar ends in a newline, which would part a code fence from its code.
            yield {name: value.rstrip("\n") for name, value in filling.items()}


def _check(family: Family) -> None:
    """Raise ValueError unless every wording uses exactly the names that every filling gives."""
    for wording in (family.template, *family.paraphrases):
        for filling in family.fillings:
            if (used := placeholders(wording)) != set(filling):
                odd = sorted(used ^ set(filling))
                raise ValueError(
                    f"family {family.name!r}: wording and values disagree on {odd}, "
                    f"so add the placeholder or the value ({wording[:40]!r}...)"
                )
