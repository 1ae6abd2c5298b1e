"""Bugs these tests would catch: rows that draft as if each were alone, and so slow each other down;
rows that give up though drafting pays; padding priced as if it were free, or charged where nothing
is padded; a row's sure drafts cut before another's doubtful ones; one hiccup, or the first pass of
a size, believed for ever; a rest that never ends, or ends with every row; positions that are not
those of the pass; a policy that is asked row by row though it weighs them, or weighs one alone.

Worlds are seeded, and their passes take what `pass_seconds` says: hardly more for a few positions,
as where weights are read, then in proportion.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from fakes import FakeDrafter, FakeTarget, WeighsRows, whole_prefix

from decode import Sampling, SpeculativeDecoder
from decode.clock import VirtualClock
from decode.costs import Costs
from decode.policies.base import NOTHING_OFFERED, off
from decode.policies.company import (
    AWAIT,
    FIRST_REST,
    LONGEST_REST,
    PLAIN_PASSES,
    REASON,
    Company,
    Cuts,
    PassSeconds,
    Wish,
    packed_cuts,
    padded_cuts,
)
from decode.policies.named import policy_config
from decode.types import (
    MAX_DRAFT_TOKENS,
    OFF,
    Choice,
    JointPolicy,
    Policy,
    PolicySession,
    Request,
    Sharing,
    StepRecord,
)

PROFILE = {1: 1.0, 2: 1.01, 5: 1.04, 17: 1.16}
PADDED, PACKED = Sharing(padded=True, drafts_together=True), Sharing(False, False)
TEXT_TOKENS = 200


def pass_seconds(positions: float) -> float:
    return 1 + 0.01 * positions + 0.02 * max(positions - 40, 0)


def wish(length: int, chance: float, price: float = 0.0) -> Wish:
    """A draft whose every token is accepted by this chance, and takes so many seconds."""
    survival = chance ** np.arange(1, MAX_DRAFT_TOKENS + 1)
    tokens = np.append(1.0, 1 + survival.cumsum())
    choice = Choice("d", length, "data") if length else off("cost")
    return Wish(choice, tokens, price * np.arange(MAX_DRAFT_TOKENS + 1.0))


WISHES = [wish(3, 0.9, 0.02), wish(0, 0.5), wish(4, 0.3, 0.02), wish(2, 0.6, 0.02)]

# ------------------------------------------------------------------------------------------- passes


def test_before_any_pass_the_profile_is_continued_in_a_line() -> None:
    seconds = PassSeconds(PROFILE, 0.05)
    np.testing.assert_allclose(
        seconds(1, np.array([0, 1, 4, 16, 116])), [1, 1.01, 1.04, 1.16, 2.16]
    )
    np.testing.assert_allclose(seconds(11, np.array([0, 10])), [1.1, 1.2])


@pytest.mark.parametrize("rest", [{17: 0.9}, {17: float("nan")}, {}])
def test_a_profile_that_falls_or_ends_is_taken_for_flat(rest: dict[int, float]) -> None:
    found = PassSeconds({1: 1.0, **rest}, 0.05)(64, np.array([0, 500]))
    np.testing.assert_allclose(found, [1.0, 1.0])


def machine(num_rows: int, drafted: int) -> float:
    return 0.8 + 0.2 * num_rows + 0.05 * drafted


def taught(*sizes: tuple[int, int], times: int = 1, slower: float = 1.0) -> PassSeconds:
    seconds = PassSeconds(PROFILE, 0.05)
    for num_rows, drafted in sizes * times:
        seconds.observe(num_rows, drafted, slower * machine(num_rows, drafted))
    return seconds


def test_passes_say_what_rows_and_drafts_take() -> None:
    seconds = taught((16, 0), (16, 32), (8, 16), (8, 0), (4, 12), times=10)
    for size in ((16, 0), (16, 16), (16, 64), (12, 0), (4, 4)):
        assert float(seconds(size[0], np.array([size[1]]))[0]) == pytest.approx(
            machine(*size), rel=0.03
        )


def test_a_few_passes_are_enough_beside_as_many_rows() -> None:
    seconds = taught((16, 0), (16, 0), (16, 32))
    np.testing.assert_allclose(seconds(16, np.array([0, 16, 32])), [4.0, 4.8, 5.6], rtol=0.05)


def test_what_passes_do_not_show_stays_as_it_was() -> None:
    seconds = taught((16, 0), (16, 32), (4, 0), times=5)
    random = np.random.default_rng(0)
    worst = 0.0
    for _ in range(500):
        drafted = int(random.integers(30, 35))
        seconds.observe(16, drafted, machine(16, drafted) * random.normal(1, 0.1))
        found = seconds(16, np.array([0, 32, 64]))
        worst = max(worst, float(np.abs(found / [4.0, 5.6, 7.2] - 1).max()))
    assert worst < 0.15


def test_a_machine_that_gets_slower_is_followed() -> None:
    seconds = taught((16, 0), (16, 32), times=100)
    for _ in range(30):
        for drafted in (0, 32):
            seconds.observe(16, drafted, 2 * machine(16, drafted))
    np.testing.assert_allclose(seconds(16, np.array([0, 32])), [8.0, 11.2], rtol=0.1)


@pytest.mark.parametrize("odd", [1e9, float("inf"), float("nan"), 0.0, -1.0])
def test_one_odd_pass_is_no_trend(odd: float) -> None:
    seconds = taught((16, 0), (16, 32), times=20)
    seconds.observe(16, 32, odd)
    after = seconds(16, np.array([0, 32]))
    assert (after > 0.85 * np.array([4.0, 5.6])).all()
    assert (after < 1.4 * np.array([4.0, 5.6])).all()


# --------------------------------------------------------------------------------------------- cuts


def test_padded_cuts_count_every_row_as_wide_as_the_widest() -> None:
    cuts = padded_cuts(WISHES, PADDED)
    assert cuts.drafted.tolist() == [0, 4, 8, 12, 16]
    assert [cuts.lengths(c).tolist() for c in range(5)] == [
        [0, 0, 0, 0],
        [1, 0, 1, 1],
        [2, 0, 2, 2],
        [3, 0, 3, 2],
        [3, 0, 4, 2],
    ]
    np.testing.assert_allclose(cuts.tokens[[0, 1]], [4, 4 + 0.9 + 0.3 + 0.6])
    np.testing.assert_allclose(cuts.draft_seconds, [0, 0.02, 0.04, 0.06, 0.08])
    apart = padded_cuts(WISHES, replace(PADDED, drafts_together=False))
    np.testing.assert_allclose(apart.draft_seconds, np.array([0, 0.06, 0.12, 0.16, 0.18]) / 4)


def test_packed_cuts_take_the_likeliest_tokens_first() -> None:
    cuts = packed_cuts(WISHES)
    assert [cuts.lengths(c).tolist() for c in range(6)] == [
        [0, 0, 0, 0],
        [1, 0, 0, 0],  # 0.9
        [2, 0, 0, 0],  # 0.81
        [3, 0, 0, 0],  # 0.729
        [3, 0, 0, 1],  # 0.6
        [3, 0, 0, 2],  # 0.36
    ]
    np.testing.assert_array_equal(cuts.drafted, np.arange(10))
    np.testing.assert_allclose(cuts.draft_seconds, 0.02 / 4 * np.arange(10))


def best_rate(cuts: Cuts, seconds: Callable[[np.ndarray], np.ndarray]) -> float:
    return float((cuts.tokens / (seconds(cuts.drafted) + cuts.draft_seconds)).max())


@pytest.mark.parametrize("price", [0.001, 0.01, 0.05, 0.2, 1.0])
def test_no_way_to_cut_packed_rows_is_better(price: float) -> None:
    """All 60 tried."""
    best = 0.0
    for lengths in product(*(range(one.choice.num_draft_tokens + 1) for one in WISHES)):
        pairs = list(zip(WISHES, lengths, strict=True))
        tokens = sum(one.tokens[k] for one, k in pairs)
        drafting = sum(one.draft_seconds[k] for one, k in pairs) / 4
        best = max(best, tokens / (1 + price * (4 + sum(lengths)) + drafting))
    found = best_rate(packed_cuts(WISHES), lambda drafted: 1 + price * (4 + drafted))
    assert found == pytest.approx(best)


# ------------------------------------------------------------------------------------------ company


def company(price: float, rest: int, num_rows: int) -> Company:
    """Passes take one second and so much a position; the plain ones that come first have been."""
    profile = {1: 1 + price, 17: 1 + 17 * price}
    found = Company(PassSeconds(profile, 0.05), rest)
    for _ in range(PLAIN_PASSES):
        assert found.rests(num_rows)
        found.observe(num_rows, num_rows, 1 + price * num_rows)
    return found


def settled(price: float, sharing: Sharing, wishes: Sequence[Wish] = WISHES) -> list[int]:
    one = company(price, 8, len(wishes))
    assert not one.rests(len(wishes))
    return [choice.num_draft_tokens for choice in one.settle(wishes, sharing)]


def test_the_first_passes_of_about_so_many_rows_are_plain() -> None:
    one = company(0.01, 8, 8)
    assert not one.rests(8)
    one.observe(16, 16, 9.0)  # the first warms up, and is not learnt from
    assert float(one.seconds(16, np.array([0.0]))[0]) == pytest.approx(1.16, rel=0.01)
    assert one.rests(16)


def test_the_dearer_a_position_the_less_is_drafted() -> None:
    free = [wish(one.choice.num_draft_tokens, 0.1 + 0.2 * n) for n, one in enumerate(WISHES)]
    assert settled(0.0, PADDED, free) == settled(0.0, PACKED, free) == [3, 0, 4, 2]
    assert settled(10.0, PADDED, free) == settled(10.0, PACKED, free) == [0, 0, 0, 0]
    some = [sum(settled(price, PADDED, free)) for price in (0.0, 0.05, 0.2, 10.0)]
    assert some == sorted(some, reverse=True)
    # One row that drafts well pays for its own positions, and not for those of the others.
    one = [wish(2, 0.95), *[wish(2, 0.05)] * 7]
    assert settled(0.3, PACKED, one) == [2, *[0] * 7]
    assert settled(0.3, PADDED, one) == [0] * 8


def test_a_choice_that_is_cut_says_so() -> None:
    choices = company(0.2, 8, 4).settle(
        [wish(1, 0.9), wish(9, 0.6), wish(5, 0.01), wish(0, 0.5)], PACKED
    )
    assert choices[0] == wish(1, 0.9).choice
    assert choices[1].reason == REASON
    assert 0 < choices[1].num_draft_tokens < 9
    length = choices[1].num_draft_tokens
    assert choices[1].expected_tokens == pytest.approx(sum(0.6**k for k in range(length + 1)))
    assert (choices[2].drafter, choices[2].reason) == (OFF, REASON)
    assert choices[3] == wish(0, 0.5).choice


def test_where_nothing_pays_rows_rest_and_one_step_tries_again() -> None:
    one, wishes = company(1.0, 8, 8), [wish(3, 0.4)] * 8
    told = ""
    for _ in range(420):
        if told.count("p") == 6:
            break
        if one.rests(8):
            told += "r"
            continue
        choices = one.settle(wishes, PADDED)
        told += "o" if choices[0].drafter == OFF else choices[0].reason[0]
    rests = [len(rest) for rest in re.findall("or+", told)]
    assert [rest - 1 for rest in rests] == [2, 4, 8, 16, 32, 64, 64, 64]
    assert FIRST_REST == 2
    assert LONGEST_REST * 8 == 64
    # From rests of eight steps on each is followed by a step that tries again, and an answer to it.
    tries = "p" + "r" * AWAIT
    assert re.fullmatch(f"or+or+(or+{tries})+or+p", told)


def test_a_rest_ends_where_rows_are_half_or_twice_as_many() -> None:
    one, wishes = company(1.0, 50, 8), [wish(3, 0.4)] * 8
    for num_rows in (4, 7):
        for _ in range(PLAIN_PASSES):
            one.observe(num_rows, num_rows, 1.0 + num_rows)
    for _ in range(4):
        if not one.rests(8):
            one.settle(wishes, PADDED)
    assert [one.rests(n) for n in (7, 15, 5)] == [True] * 3
    assert not one.rests(4)
    one.settle(wishes[:4], PADDED)
    assert [one.rests(n) for n in (7, 8)] == [True, False]


def test_rows_that_had_nothing_to_draft_do_not_rest() -> None:
    one = company(1.0, 50, 8)
    for reason, rests in ((NOTHING_OFFERED, False), ("cost", True)):
        assert not one.rests(8)
        one.settle([Wish(off(reason), wish(0, 0.5).tokens, np.zeros(17))] * 8, PADDED)
        assert one.rests(8) == rests


def test_without_probes_nobody_rests() -> None:
    one, wishes = company(1.0, 0, 8), [wish(3, 0.4)] * 8
    for _ in range(60):
        assert not one.rests(8)
        assert all(choice.drafter == OFF for choice in one.settle(wishes, PADDED))


# -------------------------------------------------------------------------------------------- world


@dataclass
class Crowd:
    """Texts that are decoded so many at a time; rows differ in what is accepted."""

    num_rows: int
    sharing: Sharing
    price: float = 0.0  # seconds in which a token is drafted, for one row or for all
    tokens: int = 0
    seconds: float = 0.0
    widest: list[int] = field(default_factory=list)

    def run(self, choose: Callable[[list[Any]], list[Choice]], policy: Policy | None) -> float:
        """Tokens per second of three texts a row."""
        random = np.random.default_rng(0)
        waiting = [(str(n), random.beta(3, 4)) for n in range(3 * self.num_rows)]
        rows: list[dict[str, Any]] = []
        while waiting or rows:
            while waiting and len(rows) < self.num_rows:
                name, chance = waiting.pop()
                request = Request(name, 20, TEXT_TOKENS, Sampling(), None)
                session = None if policy is None else policy.open(request)
                rows.append({"session": session, "chance": chance, "left": TEXT_TOKENS})
            self._step(rows, choose([row["session"] for row in rows]), policy, random)
            rows = [row for row in rows if row["left"] > 0]
        return self.tokens / self.seconds

    def _step(
        self,
        rows: list[dict[str, Any]],
        choices: list[Choice],
        policy: Policy | None,
        random: np.random.Generator,
    ) -> None:
        widths = [choice.num_draft_tokens + 1 for choice in choices]
        positions = len(rows) * max(widths) if self.sharing.padded else sum(widths)
        seconds = pass_seconds(positions) * random.normal(1, 0.03)
        drafts = [self.price * (width - 1) for width in widths]
        if self.sharing.drafts_together:
            drafts = [max(drafts) / max(sum(map(bool, drafts)), 1) if one else 0 for one in drafts]
        self.seconds += seconds + sum(drafts)
        self.widest.append(max(widths))
        for row, choice, spent in zip(rows, choices, drafts, strict=True):
            k = choice.num_draft_tokens
            accepted = int(np.cumprod(random.random(k) < row["chance"]).sum())
            row["left"] -= accepted + 1
            self.tokens += accepted + 1
            if row["session"] is not None:
                row["session"].learn(seen(choice, accepted, spent, seconds / len(rows)))
        if isinstance(policy, JointPolicy) and len(rows) > 1:
            sessions = [row["session"] for row in rows]
            policy.learn_together(sessions, positions, seconds)


def seen(choice: Choice, accepted: int, draft: float, verify: float) -> StepRecord:
    k, by = choice.num_draft_tokens, choice.drafter if choice.num_draft_tokens else ""
    return StepRecord(
        "r", 0, 20, choice.drafter, by, k, k, accepted, accepted + 1, draft, verify, 0.0, "", 0, 0
    )


def posterior(price: float = 0.0) -> Any:
    costs = Costs(
        key="test",
        verify_seconds={width: pass_seconds(width) for width in (1, 2, 5, 17)},
        draft_seconds={"d": {1: price, 16: 16 * price}},
        host_seconds=0.0,
    )
    return policy_config("posterior").build(costs, ["d"], 0)


@pytest.mark.parametrize("sharing", [PADDED, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize("num_rows", [2, 8, 24, 64])
def test_together_rows_do_as_well_as_the_best_length_for_all(
    num_rows: int, sharing: Sharing
) -> None:
    """As if alone, 64 rows make a seventh (padded) or a third of it."""

    def fixed(k: int) -> float:
        choice = Choice("d", k, "fixed") if k else off("fixed")
        return Crowd(num_rows, sharing).run(lambda rows: [choice] * len(rows), None)

    def together(rows: list[Any]) -> list[Choice]:
        return policy.choose_together(rows, [{"d": 16}] * len(rows), sharing)

    def alone(rows: list[Any]) -> list[Choice]:
        return [row.choose({"d": 16}) for row in rows]

    policy = posterior()
    found, best = Crowd(num_rows, sharing).run(together, policy), max(map(fixed, range(9)))
    assert found > 0.93 * best
    if num_rows >= 24:
        assert Crowd(num_rows, sharing).run(alone, posterior()) < 0.6 * found


@pytest.mark.parametrize("sharing", [PADDED, PACKED], ids=["together", "apart"])
@pytest.mark.parametrize("num_rows", [2, 8, 24])
def test_what_drafts_take_counts_for_all_rows(num_rows: int, sharing: Sharing) -> None:
    """A model that drafts for all rows at once is cheap for many; one row after another, dear."""
    price = 0.06

    def fixed(k: int) -> float:
        choice = Choice("d", k, "fixed") if k else off("fixed")
        return Crowd(num_rows, sharing, price).run(lambda rows: [choice] * len(rows), None)

    policy = posterior(price)
    found = Crowd(num_rows, sharing, price).run(
        lambda rows: policy.choose_together(rows, [{"d": 16}] * len(rows), sharing), policy
    )
    assert found > 0.9 * max(map(fixed, range(9)))


@pytest.mark.parametrize("together", [True, False])
def test_a_row_prices_steps_in_which_all_do_as_it_does(together: bool) -> None:
    """Records tell its share of them; one that is left alone prices steps of its own."""
    policy = posterior(0.06)
    rows = [policy.open(Request(name, 20, 50, Sampling(), None)) for name in "abcd"]
    alone = rows[0].pricing.seconds()
    sharing = Sharing(padded=True, drafts_together=together)
    choice = Choice("d", 4, "data")
    for _ in range(50):
        policy.choose_together(rows, [{"d": 16}] * 4, sharing)
        rows[0].learn(seen(choice, 1, 0.24 / 4 if together else 0.24, pass_seconds(5) / 4))
    drafting = rows[0].pricing.seconds() - rows[0].pricing.prices.target
    np.testing.assert_allclose(drafting[0, 4], 0.24 if together else 4 * 0.24)
    rows[0].choose({"d": 16})
    np.testing.assert_allclose(rows[0].pricing.seconds(), alone)


def test_rows_without_a_belief_choose_for_themselves() -> None:
    config = replace(policy_config("thompson"), structured=False)
    policy = config.build(posterior().prices.costs, ["d"], 0)
    assert not isinstance(policy, JointPolicy)
    law = whole_prefix(12, 2.0)
    target = FakeTarget(law, 12)
    target.sharing = PADDED  # type: ignore[attr-defined]
    decoder = SpeculativeDecoder(target, {"d": FakeDrafter(law)}, policy, clock=VirtualClock())
    records = decoder.generate(PROMPTS, 9).records
    assert all(row[0].reason == "explore" for row in records)


# -------------------------------------------------------------------------------------------- loops


class Asked(WeighsRows):
    """Drafts as many tokens as the row's number."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = self.asked = 0

    @property
    def alone(self) -> int:
        """Choices of rows that were asked by themselves."""
        return self.asked - sum(rows for rows, _ in self.together)

    def open(self, request: Request) -> PolicySession:
        self.opened += 1
        return AskedRow(self, self.opened)


class AskedRow:
    def __init__(self, policy: Asked, number: int) -> None:
        self.policy, self.number = policy, number

    def choose(self, offers: Mapping[str, int]) -> Choice:
        self.policy.asked += 1
        k = min(self.number, offers.get("d", 0))
        return Choice("d", k, "asked") if k else off("nothing offered")

    def learn(self, record: StepRecord) -> None:
        pass


PROMPTS = [[1, 2], [1, 3], [1, 4]]


def asked(sharing: Sharing | None) -> tuple[Asked, list[list[StepRecord]]]:
    """What the loop asks over a target whose rows share that; the text is the target's."""
    law = whole_prefix(12, 2.0)
    target, policy = FakeTarget(law, 12), Asked()
    target.sharing = sharing  # type: ignore[attr-defined]
    decoder = SpeculativeDecoder(target, {"d": FakeDrafter(law)}, policy, clock=VirtualClock())
    done = decoder.generate(PROMPTS, 9)
    plain = SpeculativeDecoder(FakeTarget(law, 12), clock=VirtualClock())
    assert done.token_ids == plain.generate(PROMPTS, 9).token_ids
    return policy, done.records


@pytest.mark.parametrize("sharing", [PADDED, PACKED], ids=["padded", "packed"])
def test_the_loop_asks_for_all_rows_and_says_what_the_pass_held(sharing: Sharing) -> None:
    policy, records = asked(sharing)
    assert policy.together[0] == (3, sharing)
    widths = [1 + row[0].num_drafted for row in records]
    assert widths == [2, 3, 4]
    assert policy.passes[0][:2] == (3, 3 * max(widths) if sharing.padded else sum(widths))
    assert all(seconds > 0 for _, _, seconds in policy.passes)
    assert policy.alone  # the last row of all ends alone
    assert len(policy.passes) == len(policy.together) == len(max(records, key=len)) - policy.alone


def test_rows_that_share_no_pass_choose_for_themselves() -> None:
    policy, records = asked(None)
    assert not [*policy.together, *policy.passes]
    assert policy.alone == sum(map(len, records))
