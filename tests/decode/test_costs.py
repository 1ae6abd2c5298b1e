"""Bugs these tests would catch: seconds of a width read as those of K; a table that is extrapolated
below zero or whose hole is filled with zeros; costs of another machine taken as this one's; NaN
lost on disk; a slow moment charged to one width; sampled prices used for greedy text; a measurement
that leaves the target's row longer than it was, or asks a session to shrink.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.clock import VirtualClock
from decode.cost_measurement import blended, measure_costs, quick_costs
from decode.costs import Costs, costs_key, interpolate
from decode.types import OFF, DraftProposal, DraftSampler, Sampling

VOCAB = 11
COSTS = Costs(
    key="machine, model",
    verify_seconds={1: 1.0, 5: 1.4, 9: 2.2},
    draft_seconds={"lm": {1: 0.1, 4: 0.4}, "bad": {1: math.nan, 4: 0.4}},
    host_seconds=0.05,
    sampled_verify_seconds={1: 1.5, 9: 3.5},
    sampled_draft_seconds={"lm": {1: 0.2, 4: 0.8}, "bad": {}},
    first_token_seconds={"lm": 0.6, "bad": math.nan},
    memory_bytes={"lm": 100, "bad": 0},
    context_tokens=50,
)


@dataclass
class FakeSession:
    """Counts what was read, and refuses what a real one may not be asked."""

    length: int = 0
    seen: int = 0
    lengths: list[int] = field(default_factory=list)

    def offer(self, token_ids: Sequence[int]) -> int:
        return 16


class Ticking:
    """A clock that only work advances."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


class FakeTarget:
    """A pass over `width` tokens takes 1 + width / 10 seconds; the third pass over 5 tokens has a
    hiccup.
    """

    vocab_size = VOCAB
    max_context = 64
    eos_token_ids = frozenset({0})
    backend = "fake"
    device = "cpu"

    def __init__(self, clock: Ticking) -> None:
        self.clock = clock
        self.rows: list[FakeSession] = []
        self.passes: dict[int, int] = {}

    def open(self) -> FakeSession:
        self.rows.append(FakeSession())
        return self.rows[-1]

    def prefill(self, session: Any, token_ids: Sequence[int]) -> None:
        session.length += len(token_ids)

    def score(self, sessions: Sequence[Any], token_ids: Sequence[Sequence[int]]) -> Tensor:
        width = len(token_ids[0])
        assert sessions[0].length + width <= self.max_context
        sessions[0].length += width
        self.passes[width] = self.passes.get(width, 0) + 1
        hiccup = 9.0 if (width, self.passes[width]) == (5, 3) else 0.0
        self.clock.seconds += 1 + width / 10 + hiccup
        return torch.randn(1, width, VOCAB, generator=torch.Generator().manual_seed(width))

    def rollback(self, session: Any, length: int) -> None:
        session.length = length


class FakeDrafter:
    """Reads a new token in 0.01 seconds and drafts one in 0.1; sampled tokens take twice as
    long.
    """

    num_parameters = 7
    memory_bytes = 28

    def __init__(self, clock: Ticking, silent: bool = False) -> None:
        self.clock, self.silent = clock, silent

    def open(self) -> "FakeDraftSession":
        return FakeDraftSession(self)

    def score(self, *args: Any) -> Tensor:
        raise AssertionError("measuring never scores")


class FakeDraftSession:
    def __init__(self, drafter: FakeDrafter) -> None:
        self.drafter, self.read = drafter, 0

    def offer(self, token_ids: Sequence[int]) -> int:
        return 16

    def propose(
        self, token_ids: Sequence[int], num_draft_tokens: int, sampler: DraftSampler
    ) -> DraftProposal:
        assert len(token_ids) >= self.read, "a row never shrinks"
        self.drafter.clock.seconds += 0.01 * (len(token_ids) - self.read)
        self.read = len(token_ids)
        if self.drafter.silent:
            return DraftProposal([], None, "fake")
        each = 0.1 if sampler.greedy else 0.2
        self.drafter.clock.seconds += each * num_draft_tokens
        return DraftProposal([1] * num_draft_tokens, None, "fake")


def test_a_step_scores_one_token_more_than_it_drafts() -> None:
    assert COSTS.step_seconds("lm", 4) == pytest.approx(0.4 + 1.4 + 0.05)
    assert COSTS.step_seconds("lm", 2) == pytest.approx(0.2 + (1.0 + 2 * 0.1) + 0.05)
    assert COSTS.step_seconds(OFF, 0) == COSTS.step_seconds("lm", 0) == COSTS.plain_seconds
    assert COSTS.break_even_length("lm", 4) == pytest.approx(1.85 / 1.05)


def test_interpolation_between_below_and_above() -> None:
    table = {2: 4.0, 4: 2.0, 8: 6.0}
    assert [interpolate(table, size) for size in (1, 2, 3, 6, 8, 10)] == [4, 4, 3, 4, 6, 8]
    assert interpolate({1: 3.0, 2: 1.0}, 9) == 1.0  # a falling end is not continued below zero
    assert interpolate({3: 2.0}, 9) == 2.0
    assert math.isnan(interpolate({}, 1))
    assert math.isnan(interpolate({1: math.nan, 4: 0.4}, 2))


def test_a_hole_stays_a_hole_and_an_unknown_drafter_is_named() -> None:
    assert math.isnan(COSTS.step_seconds("bad", 2))
    with pytest.raises(ValueError, match=r"'other'.*stage=profile"):
        COSTS.step_seconds("other", 2)


def test_sampled_costs_are_apart() -> None:
    sampled = COSTS.under(Sampling(temperature=0.8))
    assert sampled.step_seconds("lm", 4) == pytest.approx(0.8 + 2.5 + 0.05)
    assert COSTS.under(Sampling()) is COSTS
    old = replace(COSTS, sampled_verify_seconds={}, sampled_draft_seconds={})
    assert old.under(Sampling(temperature=0.8)) is old


def test_catching_up_is_linear_in_what_was_missed() -> None:
    assert COSTS.catch_up_seconds("lm", 50) == pytest.approx(0.5)
    assert COSTS.catch_up_seconds("lm", 5) == pytest.approx(0.05)
    assert COSTS.catch_up_seconds("bad", 50) == 0


def test_json_brings_back_the_same_costs_and_is_plain() -> None:
    text = COSTS.to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    again = Costs.from_json(text, key="machine, model")
    assert repr(again) == repr(COSTS)  # NaN has no equal


def test_costs_of_another_machine_are_refused() -> None:
    with pytest.raises(ValueError, match=r"another machine.*stage=profile"):
        Costs.from_json(COSTS.to_json(), key="another machine")
    with pytest.raises(ValueError, match="another version"):
        Costs.from_json(json.dumps({**json.loads(COSTS.to_json()), "schema": 0}))


def test_measuring_finds_what_the_fakes_take() -> None:
    clock = Ticking()
    target = FakeTarget(clock)
    drafters = {"lm": FakeDrafter(clock), "silent": FakeDrafter(clock, silent=True)}
    costs = measure_costs(target, drafters, clock, [2, 5], [1, 4], context_tokens=40, repeats=5)
    assert costs.verify_seconds == pytest.approx({1: 1.1, 2: 1.2, 5: 1.5})  # median: no hiccup
    assert costs.draft_seconds["lm"] == pytest.approx({1: 0.12, 4: 0.42})  # two new tokens read
    assert costs.sampled_draft_seconds["lm"] == pytest.approx({1: 0.22, 4: 0.82})
    assert costs.first_token_seconds["lm"] == pytest.approx(0.5)
    assert all(math.isnan(seconds) for seconds in costs.draft_seconds["silent"].values())
    assert costs.memory_bytes == {"lm": 28, "silent": 28}
    assert target.rows[0].length == 39  # rolled back
    assert set(target.passes.values()) == {6}  # interleaved: as many of each, the first to warm up


def test_who_guesses_now_and_then_is_priced_alike_at_every_length() -> None:
    """Free lookups and a model of 0.1 a token, half of the proposals each: at every length half of
    what the model takes, though one median over both is 0 at one length and 0.4 at the other.
    """
    found = {
        ("lookup", 1): [0.0, 0.0, 0.0],
        ("model", 1): [0.1],
        ("lookup", 4): [0.0],
        ("model", 4): [0.4, 0.4, 9.0],
    }
    assert blended([found], [1, 4]) == pytest.approx({1: 0.05, 4: 0.2})
    del found[("model", 1)], found[("lookup", 4)]  # a length at which a part was never asked
    assert blended([found], [1, 4]) == pytest.approx({1: 0.2, 4: 0.2})
    assert all(math.isnan(seconds) for seconds in blended([{}], [1, 4]).values())


def test_a_composite_is_measured_by_part() -> None:
    """Lookup at every other length of the row, which not every K meets as often."""
    clock = Ticking()

    class Now(FakeDrafter):
        def open(self) -> "NowAndThen":
            return NowAndThen(self)

    class NowAndThen(FakeDraftSession):
        def propose(
            self, token_ids: Sequence[int], num_draft_tokens: int, sampler: DraftSampler
        ) -> DraftProposal:
            if len(token_ids) % 4 == 1:
                return DraftProposal([1], None, "lookup")
            self.read = len(token_ids)
            return super().propose(token_ids, num_draft_tokens, sampler)

    costs = measure_costs(FakeTarget(clock), {"both": Now(clock)}, clock, [2], [1, 4, 8], 41, 7)
    table = costs.draft_seconds["both"]
    share = table[1] / 0.1
    assert 0.1 < share < 0.9
    assert table == pytest.approx({k: share * 0.1 * k for k in (1, 4, 8)})


def test_widths_past_the_context_are_left_out() -> None:
    clock = Ticking()
    costs = measure_costs(FakeTarget(clock), {}, clock, [8, 16], [1], context_tokens=56, repeats=1)
    assert set(costs.verify_seconds) == {1, 8}


def test_real_text_is_cut_to_the_context() -> None:
    clock = Ticking()
    rows = [[1, 2, 3] * 20, [4]]
    costs = measure_costs(
        FakeTarget(clock), {"lm": FakeDrafter(clock)}, clock, [2], [1], 30, 2, contexts=rows
    )
    assert costs.context_tokens == 30


def test_a_virtual_clock_gives_finite_positive_costs() -> None:
    """With a clock that ticks at every reading, a full run can be repeated exactly."""

    def measured() -> Costs:
        clock = Ticking()
        drafters = {"lm": FakeDrafter(clock)}
        return quick_costs(FakeTarget(clock), drafters, VirtualClock())

    assert measured() == measured()
    assert measured().step_seconds("lm", 16) > 0


def test_the_key_tells_models_apart() -> None:
    target = FakeTarget(Ticking())
    key = costs_key(target)
    target.vocab_size = VOCAB + 1
    assert costs_key(target) != key


def test_a_busy_machine_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Busy(FakeTarget):
        def score(self, sessions: Sequence[Any], token_ids: Sequence[Sequence[int]]) -> Tensor:
            self.clock.seconds += 5.0 * (sum(self.passes.values()) % 3 > 0)
            return super().score(sessions, token_ids)

    clock = Ticking()
    measure_costs(FakeTarget(clock), {}, clock, [2, 5], [1], context_tokens=40, repeats=5)
    assert not caplog.messages
    measure_costs(Busy(clock), {}, clock, [2], [1], context_tokens=40, repeats=5)
    assert "busy" in caplog.messages[0]
