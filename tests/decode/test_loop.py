"""Bugs these tests would catch: a cache that keeps rejected tokens; a step that reads past the
context or drafts past the end; rows that touch each other through padding, order or noise; a
finished row that is decoded on; a rejection that no policy hears of; seconds that are lost or
counted twice; a failing drafter that stops decoding, changes the text, or complains at every step;
a choice log that does not bring its text back.

The target's logits depend on every token that its row has read (fakes.whole_prefix), so equality of
texts is equality of all that was read. No tolerance but for sums of seconds (float64).
"""

import logging
import random
from collections.abc import Sequence

import pytest
import torch
from fakes import (
    Context,
    FakeDrafter,
    FakeDraftSession,
    FakeTarget,
    ScriptedPolicy,
    whole_prefix,
)

from decode import GenerationResult, Sampling, SpeculativeDecoder
from decode.clock import VirtualClock
from decode.policies.replay import Replay
from decode.types import MAX_DRAFT_TOKENS, DraftProposal, DraftSampler

V = 11
TEXT = whole_prefix(V)
OTHER = whole_prefix(V, sharpness=2.0)
SAMPLED = Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=4)
PROMPTS = [[1], [2, 3], [4, 4, 4, 1, 0], [5, 10]]
SCRIPT = [("often", 3), ("off", 0), ("never", 2), ("often", 16), ("lookup", 5), ("often", 1)]


def often_right(tokens: Sequence[int]) -> torch.Tensor:
    """The target's own logits, but for about every third prefix."""
    return OTHER([*tokens, 1]) if sum(tokens) % 3 == 0 else TEXT(tokens)


def never_right(tokens: Sequence[int]) -> torch.Tensor:
    """Prefers what the target does not."""
    return -TEXT(tokens)


def drafters() -> dict[str, FakeDrafter]:
    return {
        "often": FakeDrafter(often_right),
        "never": FakeDrafter(never_right),
        "lookup": FakeDrafter(often_right, chance=False, most=4),
    }


def target(context: Context = TEXT, **settings: object) -> FakeTarget:
    return FakeTarget(context, V, **settings)  # type: ignore[arg-type]


def speculative(
    script: Sequence[tuple[str, int]] = SCRIPT, **settings: object
) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        target(**settings), drafters(), ScriptedPolicy(script), clock=VirtualClock()
    )


def plain_greedy(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(TEXT(tokens).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 40])
def test_greedy_text_is_the_targets_own(num_tokens: int) -> None:
    result = speculative().generate(PROMPTS, num_tokens)
    assert result.token_ids == [plain_greedy(prompt, num_tokens) for prompt in PROMPTS]
    if num_tokens == 40:
        assert all(m.acceptance_length > 1.2 for m in result.metrics), result.metrics
        assert all(m.num_accepted < m.num_drafted for m in result.metrics)


def test_plain_decoding_is_the_same_loop_without_drafters() -> None:
    result = SpeculativeDecoder(target()).generate(PROMPTS, 9)
    assert result.token_ids == [plain_greedy(prompt, 9) for prompt in PROMPTS]
    assert all(m.num_target_passes == 9 and m.num_drafted == 0 for m in result.metrics)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
@pytest.mark.parametrize("max_rows", [1, 3, 16])
def test_a_row_is_the_same_alone_and_in_any_batch(sampling: Sampling, max_rows: int) -> None:
    """Rows of different lengths end at different steps (EOS 7 too), and others take their place."""
    prompts = [*PROMPTS, [6, 6], [1]]  # one prompt twice: an own stream for each
    together = speculative(eos_token_ids=[7])
    together.max_rows = max_rows
    batch = together.generate(prompts, 30, sampling)
    lengths = {len(ids) for ids in batch.token_ids}
    assert len(lengths) > 1
    for i, prompt in enumerate(prompts[:-1]):
        alone = speculative(eos_token_ids=[7]).generate(prompt, 30, sampling)
        assert alone.token_ids[0] == batch.token_ids[i]
        assert [r.num_accepted for r in alone.records[0]] == [
            r.num_accepted for r in batch.records[i]
        ]
    assert (batch.token_ids[0] == batch.token_ids[-1]) == sampling.greedy


def test_request_ids_key_the_noise() -> None:
    def texts(ids: list[str], seed: int = 4) -> list[list[int]]:
        law = Sampling(temperature=1.5, seed=seed)
        return speculative().generate([[1, 2], [1, 2]], 20, law, request_ids=ids).token_ids

    first, second = texts(["a", "b"])
    assert first != second
    assert texts(["b", "a"]) == [second, first]
    assert texts(["a", "b"], seed=5)[0] != first


def test_a_choice_log_brings_the_sampled_text_back() -> None:
    rng = random.Random(0)
    script = [(rng.choice(["often", "never", "lookup"]), rng.randrange(5)) for _ in range(97)]
    recorded = speculative(script).generate(PROMPTS, 40, SAMPLED)
    log = [record for row in recorded.records for record in row]
    rng.shuffle(log)
    replayed = SpeculativeDecoder(target(), drafters(), Replay(log)).generate(PROMPTS, 40, SAMPLED)
    assert replayed.token_ids == recorded.token_ids
    assert speculative(script[::-1]).generate(PROMPTS, 40, SAMPLED).token_ids != recorded.token_ids
    with pytest.raises(ValueError, match="holds no request"):
        SpeculativeDecoder(target(), drafters(), Replay(log)).generate([[9]], 4, SAMPLED)


def test_two_runs_under_a_virtual_clock_are_equal_to_the_last_number() -> None:
    def run() -> GenerationResult:
        return speculative().generate(PROMPTS, 25, SAMPLED)

    assert run() == run()


@pytest.mark.parametrize("max_context", [4, 8, 19])
def test_nothing_is_read_past_the_context_nor_drafted_past_the_end(max_context: int) -> None:
    decoder = speculative([("often", 16)], max_context=max_context)  # the fake asserts the context
    result = decoder.generate([[1, 2]], 64)
    assert result.token_ids[0] == plain_greedy([1, 2], max_context - 2)
    assert result.metrics[0].finish_reason == "context"
    for record in result.records[0]:
        assert record.num_draft_tokens <= max(max_context - record.position - 1, 0)
        assert record.num_emitted == record.num_accepted + 1


def test_drafts_are_cut_to_the_offer_the_end_and_sixteen() -> None:
    decoder = speculative([("lookup", 99), ("often", 99)])
    records = decoder.generate([[1, 2]], 40).records[0]
    assert {r.num_draft_tokens for r in records if r.drafter == "lookup"} <= {1, 2, 3, 4}
    assert max(r.num_draft_tokens for r in records) == MAX_DRAFT_TOKENS
    left = 40
    for record in records:
        assert record.num_draft_tokens <= left - 1
        left -= record.num_emitted
    assert left == 0


def test_the_policy_hears_of_every_step_rejections_included() -> None:
    policy = ScriptedPolicy([("never", 3)])
    decoder = SpeculativeDecoder(target(), drafters(), policy, clock=VirtualClock())
    result = decoder.generate([[3, 1]], 12)
    assert policy.records == result.records[0]
    rejected = [r for r in policy.records if r.num_accepted < r.num_drafted]
    assert len(rejected) >= 9
    assert [r.step for r in policy.records] == list(range(len(policy.records)))
    assert policy.offers[0] == {"often": 11, "never": 11, "lookup": 4}  # what still fits the text


def test_seconds_and_counts_add_up() -> None:
    clock = VirtualClock(tick=1.0)
    decoder = SpeculativeDecoder(target(), drafters(), ScriptedPolicy(SCRIPT), clock=clock)
    result = decoder.generate([[3, 1]], 20)
    m, records = result.metrics[0], result.records[0]
    assert m.draft_seconds == len(records)  # one lap each
    assert m.verify_seconds == len(records)
    assert (
        m.host_seconds == 3 * len(records) - 1
    )  # the last step's learning follows the last record
    assert m.decode_seconds == m.draft_seconds + m.verify_seconds + m.host_seconds
    assert m.first_token_seconds == m.prefill_seconds + records[0].seconds == 1 + 4
    assert m.num_new_tokens == sum(r.num_emitted for r in records) == 20
    assert m.acceptance_length == 20 / m.num_target_passes == 20 / len(records)
    assert m.acceptance_rate == m.num_accepted / m.num_drafted
    assert m.tokens_per_second == 20 / m.decode_seconds
    assert m.p50_token_seconds <= m.p95_token_seconds <= 5
    assert (m.verifier, m.backend, m.finish_reason) == ("reference", "table", "length")


# --------------------------------------------------------------------------- drafters that fail


class Broken(FakeDrafter):
    """Fails in one way, from its second proposal on."""

    def __init__(self, way: str) -> None:
        super().__init__(often_right)
        self.way = way
        self.proposals = 0

    def open(self) -> "BrokenSession":
        return BrokenSession(self)


class BrokenSession(FakeDraftSession):
    drafter: Broken

    def propose(
        self, token_ids: Sequence[int], num_draft_tokens: int, sampler: DraftSampler
    ) -> DraftProposal:
        self.drafter.proposals += 1
        good = super().propose(token_ids, num_draft_tokens, sampler)
        if self.drafter.proposals < 2:
            return good
        return getattr(self, self.drafter.way)(good, sampler)

    def raises(self, good: DraftProposal, sampler: DraftSampler) -> DraftProposal:
        raise RuntimeError("out of memory")

    def too_many(self, good: DraftProposal, sampler: DraftSampler) -> DraftProposal:
        return DraftProposal([*good.token_ids, 0], None, "")

    def unknown_id(self, good: DraftProposal, sampler: DraftSampler) -> DraftProposal:
        return DraftProposal([V], None, "")

    def negative_id(self, good: DraftProposal, sampler: DraftSampler) -> DraftProposal:
        return DraftProposal([-1], None, "")

    def wrong_shape(self, good: DraftProposal, sampler: DraftSampler) -> DraftProposal:
        return DraftProposal(good.token_ids, torch.zeros(len(good.token_ids), V - 1), "")

    def other_tokens(self, good: DraftProposal, sampler: DraftSampler) -> DraftProposal:
        return DraftProposal([(t + 1) % V for t in good.token_ids], good.logits, "")

    def hidden_draws(self, good: DraftProposal, sampler: DraftSampler) -> DraftProposal:
        return DraftProposal(good.token_ids, None, "")

    def not_a_number(self, good: DraftProposal, sampler: DraftSampler) -> DraftProposal:
        sampler.draw(torch.full((V,), torch.nan))
        return good


WAYS = [name for name in vars(BrokenSession) if not name.startswith("_") and name != "propose"]
ONLY_BY_CHANCE = {"wrong_shape", "other_tokens", "hidden_draws"}  # greedy drafts have no law
CASES = [(way, SAMPLED) for way in WAYS]
CASES += [(way, Sampling()) for way in WAYS if way not in ONLY_BY_CHANCE]


@pytest.mark.parametrize(("way", "sampling"), CASES)
def test_a_failing_drafter_is_dropped_once_and_the_text_goes_on(
    way: str, sampling: Sampling, caplog: pytest.LogCaptureFixture
) -> None:
    both = {"broken": Broken(way), "often": FakeDrafter(often_right)}
    script = [("broken", 3), ("often", 2)]
    decoder = SpeculativeDecoder(target(), both, ScriptedPolicy(script), clock=VirtualClock())
    with caplog.at_level(logging.WARNING):
        result = decoder.generate(PROMPTS[:2], 20, sampling)
    assert [len(ids) for ids in result.token_ids] == [20, 20]
    assert list(decoder.drafters) == ["often"]
    assert list(decoder.pool.dropped) == ["broken"]
    assert len([r for r in caplog.records if "dropped" in r.message]) == 1
    assert all(r.drafter != "broken" for row in result.records for r in row[2:])
    assert any(r.drafter == "often" and r.num_accepted for row in result.records for r in row)
    if sampling.greedy:
        assert result.token_ids == [plain_greedy(prompt, 20) for prompt in PROMPTS[:2]]


def test_a_drafter_that_cannot_even_open_or_offer_is_dropped() -> None:
    class NoRow(FakeDrafter):
        def open(self) -> FakeDraftSession:
            raise OSError("no file")

    class NoOffer(FakeDrafter):
        def open(self) -> FakeDraftSession:
            session = super().open()
            session.offer = lambda token_ids: 1 // 0  # type: ignore[method-assign]
            return session

    pool = {"row": NoRow(often_right), "offer": NoOffer(often_right)}
    decoder = SpeculativeDecoder(target(), pool, ScriptedPolicy([("row", 2), ("offer", 2)]))
    assert decoder.generate([[1]], 6).token_ids == [plain_greedy([1], 6)]
    assert set(decoder.pool.dropped) == {"row", "offer"}


def test_a_drafter_made_of_others_works_on_their_states() -> None:
    opened: list[FakeDraftSession] = []
    given: list[object] = []

    class Counting(FakeDrafter):
        def open(self) -> FakeDraftSession:
            opened.append(super().open())
            return opened[-1]

    class Made(FakeDrafter):
        def __init__(self, part: FakeDrafter) -> None:
            super().__init__(often_right)
            self.part = part

        def open_shared(self, sessions: dict[str, FakeDraftSession]) -> FakeDraftSession:
            given.append(sessions)
            return sessions.get("part") or self.part.open()

    part = Counting(often_right)
    pool = {"made": Made(part), "part": part, "stranger": Made(Counting(often_right))}
    decoder = SpeculativeDecoder(target(), pool, ScriptedPolicy([("made", 2), ("part", 2)]))
    assert decoder.generate([[1]], 9).token_ids == [plain_greedy([1], 9)]
    assert given == [{"part": opened[0]}, {}]
    assert len(opened) == 2


def test_logits_that_are_no_numbers_end_in_one_sentence() -> None:
    def poisoned(tokens: Sequence[int]) -> torch.Tensor:
        return TEXT(tokens) if len(tokens) < 6 else torch.full((V,), torch.nan)

    for sampling in (Sampling(), SAMPLED):
        decoder = SpeculativeDecoder(target(poisoned), drafters(), ScriptedPolicy(SCRIPT))
        with pytest.raises(ValueError, match="NaN") as caught:
            decoder.generate([[1, 2]], 20, sampling)
        assert "\n" not in str(caught.value)


def test_a_policy_for_other_drafters_is_refused() -> None:
    with pytest.raises(ValueError, match="'elsewhere'"):
        speculative([("elsewhere", 2)]).generate([[1]], 5)
