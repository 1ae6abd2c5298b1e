"""Bugs these tests would catch: a place's noise that depends on the step, the draft's length or the
row's number; a drafter that races with another place's arrivals, or with its own; a draft kept
though the target drew another; a token drawn from another law than the target's; counts that miss
the drafts before it; what was truncated winning after all; noise that comes out differently after
an update.

Texts are compared with plain decoding under the same seed, which asks no drafter at all; each case
asserts that drafts were kept and rejected. Laws are compared by chi-square with fixed keys at
p = 1e-6, so nothing here can fail by chance.
"""

from collections.abc import Callable, Sequence
from math import log

import numpy as np
import pytest
import torch
from fakes import FakeDrafter, FakeTarget, ScriptedPolicy, whole_prefix

from decode import Sampling, SpeculativeDecoder
from decode.clock import VirtualClock
from decode.noise import PhiloxNoise
from decode.types import Policy
from kernels.coupled_reference import couple
from kernels.laws import processed_probs
from kernels.race import arrivals, winner

V = 12
WRITTEN_DOWN = [
    0.06554279021693794,
    1.2293068682362263,
    0.32512174316569487,
    0.7679060300245394,
    1.4574123362834366,
]
PROMPT = [1, 0, 5]
LAWS = {
    "plain": Sampling(temperature=1.0, seed=3),
    "truncated": Sampling(temperature=0.8, top_k=6, top_p=0.9, min_p=0.02, seed=4),
    "penalty": Sampling(temperature=1.1, repetition_penalty=1.5, seed=5),
    "greedy": Sampling(),
}
POLICIES: dict[str, Callable[[], Policy | str]] = {
    "near 1": lambda: ScriptedPolicy([("near", 1)]),
    "near 5": lambda: ScriptedPolicy([("near", 5)]),
    "all of them": lambda: ScriptedPolicy([("near", 3), ("far", 2), ("lookup", 4), ("off", 0)]),
    "posterior": lambda: "posterior",
}


def decoder(policy: Policy | str | None, **options: object) -> SpeculativeDecoder:
    target = whole_prefix(V, 2.0)

    def near(tokens: Sequence[int]) -> torch.Tensor:
        return target(tokens) + whole_prefix(V, 0.7)([*tokens, 3])

    pool = {
        "near": FakeDrafter(near),
        "far": FakeDrafter(whole_prefix(V, 1.0)),
        "lookup": FakeDrafter(near, chance=False),
    }
    return SpeculativeDecoder(
        FakeTarget(target, V),
        None if policy is None else pool,
        policy,
        coupling="gumbel",
        clock=VirtualClock(),
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_is_drafted_the_text_is_that_of_plain_decoding(law: str, policy: str) -> None:
    prompts = [[*PROMPT, number] for number in range(8)]
    wanted = decoder(None).generate(prompts, 24, LAWS[law])
    found = decoder(POLICIES[policy]()).generate(prompts, 24, LAWS[law])
    assert found.token_ids == wanted.token_ids
    drafted = sum(record.num_drafted for row in found.records for record in row)
    kept = sum(record.num_accepted for row in found.records for record in row)
    assert 0 < kept < drafted


def test_a_row_reads_the_same_alone_and_in_company() -> None:
    prompts = [[*PROMPT, number] for number in range(6)]
    sampling = LAWS["plain"]
    together = decoder(POLICIES["all of them"]()).generate(prompts, 20, sampling)
    few = decoder(POLICIES["near 5"](), max_rows=2).generate(prompts, 20, sampling)
    alone = [decoder(POLICIES["near 1"]()).generate(prompt, 20, sampling) for prompt in prompts]
    assert together.token_ids == few.token_ids == [one.token_ids[0] for one in alone]
    other = decoder(None).generate(prompts, 20, Sampling(temperature=1.0, seed=33))
    assert other.token_ids != together.token_ids


def test_a_drafter_with_the_targets_own_law_is_never_rejected() -> None:
    """It draws with the arrivals of the very place that it guesses."""
    target = whole_prefix(V, 2.0)
    one = SpeculativeDecoder(
        FakeTarget(target, V),
        {"twin": FakeDrafter(target)},
        ScriptedPolicy([("twin", 4)]),
        coupling="gumbel",
        clock=VirtualClock(),
    )
    for sampling in (LAWS["plain"], LAWS["truncated"], LAWS["penalty"]):
        result = one.generate([PROMPT], 40, sampling)
        assert all(record.num_accepted == record.num_drafted for record in result.records[0])
        assert len(result.records[0]) == 8


@pytest.mark.parametrize("law", ["plain", "truncated", "penalty"])
def test_tokens_follow_the_targets_law_at_every_place_of_a_draft(law: str) -> None:
    """A right draft first, so that the second token is drawn behind it."""
    sampling, trials = LAWS[law], 20_000
    logits = torch.stack([whole_prefix(V, 2.0)([place]) for place in range(2)])
    counts = (torch.arange(V) % 3 == 0).int()
    columns = {
        name: torch.full((trials,), getattr(sampling, name))
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    }
    keys = [PhiloxNoise(7).race_key(str(trial)) for trial in range(trials)]
    shared = {"keys": keys, "places": [9] * trials, "seen_token_counts": counts.expand(trials, V)}
    given = logits.expand(trials, 2, V)
    nothing = torch.full((trials, 1), -1)
    first = couple(given, nothing, **shared, **columns).token_ids[:, 0]
    kept = couple(given, first[:, None], **shared, **columns)
    assert (kept.num_accepted == 1).all()
    assert torch.equal(kept.token_ids[:, 0], first)
    seen = (counts > 0).expand(trials, V).clone()
    assert chi_square(first, processed_probs(given[:, 0], *columns.values(), seen)[0]) < bound(V)
    for token in range(V):
        rows = first == token
        if int(rows.sum()) < 500:
            continue
        now = seen[:1].clone()
        now[0, token] = True
        law_of_next = processed_probs(given[:1, 1], *(c[:1] for c in columns.values()), now)[0]
        assert chi_square(kept.token_ids[rows, 1], law_of_next) < bound(V)


def chi_square(token_ids: torch.Tensor, law: torch.Tensor) -> float:
    """Of the tokens' counts against a law; infinite where an impossible one came out."""
    counts, expected = torch.bincount(token_ids, minlength=V).double(), law * len(token_ids)
    if bool((counts[expected == 0] > 0).any()):
        return float("inf")
    possible = expected > 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


def bound(num: int) -> float:
    """Chi-square of num - 1 degrees of freedom at p = 1e-6 (Laurent and Massart 2000)."""
    x = -log(1e-6)
    return num - 1 + 2 * ((num - 1) * x) ** 0.5 + 2 * x


def test_arrivals_are_the_same_forever_and_differ_by_key_and_place() -> None:
    """Written down once: a text must come out again after an update."""
    first = arrivals((1, 2), 3, 5)
    assert first.tolist() == pytest.approx(WRITTEN_DOWN, rel=1e-13)
    others = [arrivals((1, 2), 4, 5), arrivals((2, 1), 3, 5), arrivals((1, 3), 3, 5)]
    assert len({x for one in [first, *others] for x in one.tolist()}) == 20
    assert arrivals((1, 2), 3, 2).tolist() == first[:2].tolist()
    keys = {PhiloxNoise(seed).race_key(name) for seed in (0, 1) for name in ("a", "b")}
    assert len(keys) == 4


def test_arrivals_are_exponential_and_fine_where_they_win() -> None:
    drawn = np.concatenate([arrivals((5, 6), place, 4096).numpy() for place in range(50)])
    assert (drawn >= 0).all()
    assert drawn.mean() == pytest.approx(1, abs=0.02)
    assert drawn.min() < 1e-4
    counts = np.histogram(np.exp(-drawn), bins=64, range=(0, 1))[0]
    expected = len(drawn) / 64
    assert ((counts - expected) ** 2 / expected).sum() < bound(64)
    assert len(np.unique(drawn)) == len(drawn)


def test_what_has_no_chance_never_wins_and_ties_go_to_the_lower_id() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.0, 1.0]], dtype=torch.float64)
    together = torch.tensor([[0.0, 1.0, 1.0]], dtype=torch.float64)
    assert winner(probs, together).tolist() == [1, 2]


def test_a_broken_row_is_named() -> None:
    logits = torch.zeros(1, 2, V)
    logits[0, 1, 3] = float("nan")
    with pytest.raises(ValueError, match="target_logits of batch row 0, position 1 holds NaN"):
        couple(logits, torch.tensor([[2]]), temperature=torch.ones(1), keys=[(1, 2)], places=[0])
