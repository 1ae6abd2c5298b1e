"""Who gets which prompt: the drafter that needs the fewest target passes, but nobody starves."""

import hashlib
from collections.abc import Sequence

import numpy as np


def by_label(
    ids: Sequence[str], domains: Sequence[str], wanted: Sequence[Sequence[str]]
) -> np.ndarray:
    """[prompts] int: a member whose `wanted` domains name the prompt's, dealt by hash of its id.

    A member without domains wants all; prompts that nobody wants are dealt among all members.
    """
    everyone = list(range(len(wanted)))
    chosen = np.empty(len(ids), dtype=np.int64)
    for place, (name, domain) in enumerate(zip(ids, domains, strict=True)):
        takers = [m for m in everyone if not wanted[m] or domain in wanted[m]] or everyone
        chosen[place] = takers[_number(name) % len(takers)]
    return chosen


def by_passes(passes: np.ndarray, smallest: int) -> np.ndarray:
    """[prompts] int: the member with the fewest of `passes` [members, prompts]; ties: the first.

    A member with fewer than `smallest` prompts is given those on which it loses the least, by the
    ratio of passes, from members that can spare them.
    """
    chosen = passes.argmin(axis=0)
    counts = np.bincount(chosen, minlength=len(passes))
    for member in np.argsort(counts, kind="stable"):
        loss = passes[member] / passes.min(axis=0)
        for prompt in np.argsort(loss, kind="stable"):
            if counts[member] >= smallest:
                break
            giver = chosen[prompt]
            if giver != member and counts[giver] > smallest:
                chosen[prompt] = member
                counts[giver] -= 1
                counts[member] += 1
    return chosen


def summed(names: Sequence[str], values: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Distinct names in their first order, and the sums of `values` [..., n] over equal ones."""
    order = {name: place for place, name in enumerate(dict.fromkeys(names))}
    sums = np.zeros((len(order), *values.shape[:-1]))
    np.add.at(sums, [order[name] for name in names], np.moveaxis(values, -1, 0))
    return list(order), np.moveaxis(sums, 0, -1)


def _number(name: str) -> int:
    """The same on every machine, and like a random one."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
