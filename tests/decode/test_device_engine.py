"""Bugs these tests would catch: a step on the device that accepts, draws, counts or rolls back
otherwise than decode.loop does; a row that reads another's drafts, slot or numbers; a text that
goes on after EOS, its budget, a stop string or the context; a model that drafts from tokens which
were rejected, or misses some; numbers used twice; a policy that hears nothing, or too much, or of
a step after the end; a host that looks at a step before it has queued the next one; slots that are
never handed back; caches that move while a step still writes where they were.

The loop on the same passes is the yardstick: same uniforms, same text. In the interpreter a launch
takes milliseconds a program: there models have one layer, texts a few tokens, and the passes of the
networks, which have tests of their own, are computed by the kernels' references.
"""

import gc
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import pytest
import torch
from device_drafters import (
    OFFER,
    CompositeDrafter,
    LookupDrafter,
    ModelDrafter,
    forward_by_reference,
)
from fakes import WeighsRows
from native_models import VOCAB_SIZE, build, ids

from decode import Sampling, SpeculativeDecoder
from decode.device import engine as device_engine
from decode.device import steps
from decode.device.engine import DeviceEngine
from decode.device.plan import CATCH_UPS
from decode.loop import Loop
from decode.native import static_cache
from decode.native.kernel_forward import KernelForward
from decode.native.target import NativeTarget
from decode.results import GenerationResult
from decode.types import OFF, Choice, Policy, PolicySession, Request, Sharing, StepRecord
from drafters.base import BuildContext, target_parts
from drafters.composite import CompositeConfig
from drafters.lm import LmConfig
from drafters.ngram import NgramConfig
from drafters.retrieval import RetrievalConfig, RetrievalDrafter
from drafters.retrieval_table import build_table

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPT = [5, 6, 7, 5, 6]
PROMPTS = [PROMPT, [3], ids(7, 2)]


@pytest.fixture(scope="module", autouse=True)
def quick_passes() -> Iterator[None]:
    """Small caches; in the interpreter, passes by reference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static_cache, "FIRST_CAPACITY", 128)
        if DEVICE == "cpu":
            forward_by_reference(patch)
        yield


def tiny(seed: int = 0, **changes: Any) -> Any:
    return build("Llama", seed, **{**SMALL, **changes}).to(DEVICE)


def make_target(**changes: Any) -> NativeTarget:
    return NativeTarget(tiny(**changes), Tokens(), "m", exactness="law", kernels=True)


class Arms:
    """A policy that takes the arms of a list in turn, by row where rows are told apart; it keeps
    what it was offered and shown."""

    def __init__(self, *arms: tuple[str, int], by_row: bool = False) -> None:
        self.arms, self.by_row = arms, by_row
        self.records: list[StepRecord] = []
        self.heard: list[tuple[int, int]] = []  # (steps chosen, steps learnt) at every choice
        self.offers: list[int] = []  # the largest at every choice
        self.opened = 0

    def open(self, request: Request) -> PolicySession:
        self.opened += 1
        return ArmsOfRow(self, self.opened - 1 if self.by_row else 0)


class ArmsOfRow:
    def __init__(self, policy: Arms, first: int) -> None:
        self.policy, self.first = policy, first
        self.chosen = self.learnt = 0

    def choose(self, offers: Mapping[str, int]) -> Choice:
        policy = self.policy
        policy.heard.append((self.chosen, self.learnt))
        policy.offers.append(max(offers.values()))
        turn = self.first if policy.by_row else self.chosen
        self.chosen += 1
        name, wanted = policy.arms[turn % len(policy.arms)]
        k = min(wanted, offers.get(name, 0))
        return Choice(name, k, "arms") if k else Choice(OFF, 0, "nothing offered")

    def learn(self, record: StepRecord) -> None:
        self.learnt += 1
        self.policy.records.append(record)


class JointArms(WeighsRows, Arms):
    """The same by row, for all rows of a step at once."""

    def __init__(self, *arms: tuple[str, int]) -> None:
        WeighsRows.__init__(self)
        Arms.__init__(self, *arms, by_row=True)


def pool(*names: str) -> dict[str, Any]:
    """Drafters by name: `lm` is the target's model itself, `other` unlike it."""
    lookup, model = LookupDrafter(), ModelDrafter(tiny(), VOCAB_SIZE)
    found = {
        "ngram": lambda: lookup,
        "lm": lambda: model,
        "other": lambda: ModelDrafter(tiny(3), VOCAB_SIZE),
        "few": lambda: ModelDrafter(cut_head(tiny(3), 20), VOCAB_SIZE, range(4, 44, 2)),
        "both": lambda: CompositeDrafter(lookup, model, 2),
    }
    return {name: found[name]() for name in names}


def remembering(texts: list[list[int]]) -> RetrievalDrafter:
    config = RetrievalConfig(min_ngram=2, max_ngram=3, max_offer=OFFER, longest=3)
    return RetrievalDrafter(config, build_table(texts, 3, 6))


def cut_head(model: Any, size: int) -> Any:
    """The model with fewer columns than the target, which draft_ids name."""
    head = torch.nn.Linear(model.config.hidden_size, size, bias=False, device=DEVICE)
    head.weight = torch.nn.Parameter(model.lm_head.weight[:size].detach().clone())
    model.lm_head = head
    return model


def generate(
    target: NativeTarget,
    drafters: dict[str, Any],
    policy: Policy | None,
    *arguments: Any,
    waits: bool = False,
    **options: Any,
) -> GenerationResult:
    """By the engine, or by the loop on the same passes where it `waits`."""
    coupling = options.pop("coupling", "rejection")
    settings = {k: options.pop(k) for k in ("tokenizer", "max_rows") if k in options}
    decoder = SpeculativeDecoder(target, drafters, policy, coupling=coupling, **settings)
    if waits:
        decoder._runner = lambda: decoder._loop  # type: ignore[method-assign]
    else:
        assert isinstance(decoder._runner(), DeviceEngine)
    return decoder.generate(*arguments, **options)


def told(result: GenerationResult) -> list[list[tuple[Any, ...]]]:
    """What both ways must agree on, step by step. Of a lookup that matches nothing the loop knows
    beforehand, and does not ask it.
    """
    return [
        [
            (r.step, r.position, r.num_drafted and r.drafter, r.num_drafted, r.num_accepted)
            for r in records
        ]
        for records in result.records
    ]


def agree(
    target: NativeTarget,
    names: Sequence[str],
    arms: Sequence[tuple[str, int]],
    *arguments: Any,
    by_row: bool = False,
    **options: Any,
) -> GenerationResult:
    """Generate both ways; texts, endings and steps are the same."""
    drafters = pool(*names)
    ours, theirs = (
        generate(target, drafters, Arms(*arms, by_row=by_row), *arguments, waits=w, **options)
        for w in (False, True)
    )
    assert ours.token_ids == theirs.token_ids
    assert ours.texts == theirs.texts
    assert told(ours) == told(theirs)
    assert [m.finish_reason for m in ours.metrics] == [m.finish_reason for m in theirs.metrics]
    return ours


def counts(result: GenerationResult) -> tuple[int, int]:
    """(accepted, rejected) drafts."""
    steps = [record for records in result.records for record in records]
    accepted = sum(step.num_accepted for step in steps)
    return accepted, sum(step.num_drafted for step in steps) - accepted


@pytest.fixture(scope="module")
def target(quick_passes: None) -> NativeTarget:
    return make_target()


def test_greedy_by_a_lookup_and_plain(target: NativeTarget) -> None:
    result = agree(target, ["ngram"], [("ngram", 3), (OFF, 0)], [[9, 9, 9, 9]], 7)
    assert result.metrics[0].verifier == "triton"
    assert result.metrics[0].acceptance_length >= 1


@pytest.mark.parametrize("name", ["lm", "other", "few"])
def test_greedy_by_a_model(target: NativeTarget, name: str) -> None:
    accepted, rejected = counts(agree(target, [name], [(name, 3)], PROMPT, 7))
    assert accepted if name == "lm" else rejected


def test_a_composite_looks_up_and_else_asks_its_model(target: NativeTarget) -> None:
    drafters = pool("ngram", "lm", "both")
    result, theirs = (
        generate(target, drafters, Arms(("both", 2)), PROMPT, 8, waits=waits)
        for waits in (False, True)
    )
    assert result.token_ids == theirs.token_ids
    assert told(result) == told(theirs)
    sources = {record.source for record in result.records[0] if record.num_drafted}
    assert sources == {"ngram", "lm"}


def test_the_kinds_that_are_deployed_draft_on_the_device(target: NativeTarget) -> None:
    parts = target_parts(target)
    cut = LmConfig(source=None, layers=[0], num_draft_vocab=0, train_head=False, dtype="auto")
    members: dict[str, Any] = {
        "ngram": NgramConfig(min_ngram=1, max_ngram=3, max_offer=4).build(BuildContext(parts)),
        "lm": cut.build(BuildContext(parts)),
    }
    both = CompositeConfig(lookup="ngram", model="lm", min_match=2)
    drafters = {**members, "both": both.build(BuildContext(parts, parts=members))}
    policy = Arms(("both", 3), ("ngram", 2), ("lm", 2))
    result = generate(target, drafters, policy, PROMPTS, 7)
    assert result.token_ids == [generate(target, {}, None, p, 7).token_ids[0] for p in PROMPTS]
    steps = [record for records in result.records for record in records if record.num_drafted]
    assert {record.source for record in steps if record.drafter == "both"} >= {"ngram"}
    assert {record.source for record in steps} == {"ngram", "lm"}
    assert counts(result)[0]


def test_lookups_with_tables_of_their_own_draft_side_by_side(target: NativeTarget) -> None:
    """One that has read what the target will write, one that has read something else, and none."""
    written = [generate(target, {}, None, prompt, 8).token_ids[0] for prompt in PROMPTS]
    right = remembering([p + text for p, text in zip(PROMPTS, written, strict=True)])
    wrong = remembering([[token, *ids(5, token)] for token in {t for w in written for t in w}])
    lookup = LookupDrafter(2, 3, 2)
    results = []
    for waits in (False, True):
        policy = Arms(("right", 3), ("wrong", 2), ("ngram", 3), by_row=True)
        drafters = {"right": right, "wrong": wrong, "ngram": lookup}
        results.append(generate(target, drafters, policy, PROMPTS, 8, waits=waits))
    ours, theirs = results
    assert ours.token_ids == theirs.token_ids == written
    assert told(ours) == told(theirs)
    accepted = [sum(record.num_accepted for record in records) for records in ours.records]
    assert accepted[0] >= 4
    assert sum(record.num_drafted for record in ours.records[1]) > accepted[1]


@pytest.mark.parametrize("seed", [0, 1])
def test_rejection_draws_what_the_loop_draws(target: NativeTarget, seed: int) -> None:
    law = Sampling(temperature=1.3, seed=seed)
    arms = [("other", 2), ("ngram", 3), ("few", 1)]
    result = agree(target, ["other", "ngram", "few"], arms, PROMPT, 9, law)
    assert counts(result)[1]


def test_gumbel_coupling_keeps_one_text(target: NativeTarget) -> None:
    law = Sampling(temperature=0.9, seed=4)
    texts = []
    for name in ("other", "lm", "few"):
        result = agree(target, [name], [(name, 2)], PROMPT, 6, law, coupling="gumbel")
        texts.append(result.token_ids)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("coupling", ["rejection", "gumbel"])
def test_all_processors_with_penalty_counts(target: NativeTarget, coupling: str) -> None:
    law = Sampling(temperature=1.2, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.4, seed=1)
    arms = [("lm", 2), ("few", 1)]
    result = agree(target, ["lm", "few"], arms, PROMPT, 5, law, coupling=coupling)
    drafts = [(r.drafter, r.num_drafted, r.num_accepted) for r in result.records[0]]
    assert drafts[0] == ("lm", 2, 2)  # one law, one draw: the draft's own tokens are seen too
    assert drafts[1][:2] == ("few", 1)


def test_a_penalty_is_greedys_affair_too(target: NativeTarget) -> None:
    law = Sampling(repetition_penalty=3.0)
    result = agree(target, ["lm", "ngram"], [("lm", 3), ("ngram", 2)], PROMPT, 8, law)
    steps = [record for record in result.records[0] if record.drafter == "lm"]
    assert all(record.num_accepted == record.num_drafted > 0 for record in steps)
    assert result.token_ids != generate(target, {}, None, PROMPT, 8).token_ids


def test_rows_of_a_batch_are_each_as_if_alone(target: NativeTarget) -> None:
    arms = [("both", 3), ("ngram", 2), ("lm", 1)]
    names = ["ngram", "lm", "both"]
    together = agree(target, names, arms, PROMPTS, 7, by_row=True)
    alone = [generate(target, {}, None, prompt, 7).token_ids[0] for prompt in PROMPTS]
    assert together.token_ids == alone
    lengths = {len(records) for records in together.records}
    assert len(lengths) > 1  # ragged: rows end in different steps


def test_drawn_rows_of_a_batch_are_each_as_if_alone(target: NativeTarget) -> None:
    law = Sampling(temperature=1.1, seed=5)
    names = [f"request {n}" for n in range(3)]
    arms = [("other", 2), ("ngram", 3), (OFF, 0)]
    together = agree(
        target, ["other", "ngram"], arms, PROMPTS, 5, law, by_row=True, request_ids=names
    )
    for prompt, name, arm, found in zip(PROMPTS, names, arms, together.token_ids, strict=True):
        drafters, policy = pool("other", "ngram"), Arms(arm)
        alone = generate(target, drafters, policy, [prompt], 5, law, request_ids=[name])
        assert alone.token_ids[0] == found


def test_rows_of_a_batch_are_weighed_together(target: NativeTarget) -> None:
    """A row that drafts nothing pays for a pass as wide as that of the row that drafts most."""
    policy = JointArms(("lm", 2), ("off", 0), ("lm", 4))
    prompts = [[*PROMPT, number] for number in range(3)]
    done = generate(target, pool("lm"), policy, prompts, 12)
    assert done.token_ids == generate(target, {}, None, prompts, 12).token_ids
    assert policy.together[0] == (3, Sharing(padded=True, drafts_together=True))
    assert policy.passes[0][:2] == (3, 3 * 5)
    assert all(rows > 1 and seconds > 0 for rows, _, seconds in policy.passes)
    longest = max(len(records) for records in done.records)
    assert len(policy.passes) == len(policy.together) < longest + 2
    alone = JointArms(("lm", 2))
    generate(target, pool("lm"), alone, PROMPT, 12)
    assert not [*alone.together, *alone.passes]


@pytest.mark.skipif(DEVICE == "cuda", reason="captured passes are not called again")
def test_one_pass_of_the_target_a_step_whatever_the_batch(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[bool] = []
    whole = KernelForward.compute

    def counted(self: KernelForward, step: Any, with_logits: bool = True, **given: Any) -> Any:
        if self is target.kernel_forward and with_logits:
            passes.append(True)
        return whole(self, step, with_logits, **given)

    monkeypatch.setattr(KernelForward, "compute", counted)
    result = generate(target, pool("lm"), Arms(("lm", 2)), PROMPTS, 6)
    longest = max(len(records) for records in result.records)
    assert longest <= len(passes) <= longest + 1  # one may have been queued past an unseen end
    passes.clear()
    generate(target, {}, None, PROMPTS, 4)
    assert len(passes) == 4  # an end that can be foreseen


def test_the_host_queues_a_step_before_it_reads_the_one_before(target: NativeTarget) -> None:
    policy = Arms(("ngram", 2))
    result = generate(target, pool("ngram"), policy, PROMPT, 6)
    learnt = [learnt for chosen, learnt in policy.heard]
    assert policy.heard[0] == (0, 0)
    assert all(learnt == max(chosen - 1, 0) for chosen, learnt in policy.heard)
    assert learnt[-1] > 0
    # Every step emits a token at least, seen or not; the last one needs no draft.
    assert all(offer <= max(6 - 1 - step, 0) for step, offer in enumerate(policy.offers))
    assert policy.records == result.records[0]


@pytest.mark.parametrize("waits", [False, True])
def test_only_on_the_device_a_lookup_may_be_asked_in_vain(
    target: NativeTarget, waits: bool
) -> None:
    """There it is known too late whether it matches, and the record says that it did not."""
    requests: list[Request] = []

    class Noting(Arms):
        def open(self, request: Request) -> PolicySession:
            requests.append(request)
            return super().open(request)

    policy = Noting(("ngram", 2))
    generate(target, pool("ngram", "lm", "both"), policy, [3, 9, 27], 4, waits=waits)
    assert [request.unsure for request in requests] == [set() if waits else {"ngram"}]
    missed = [r for r in policy.records if r.drafter == "ngram" and not r.num_drafted]
    assert bool(missed) != waits
    assert all(record.num_draft_tokens > 0 for record in missed)


class Tokens:
    """Token i reads as one letter."""

    eos_token_id = None
    chat_template = None

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)

    def get_vocab(self) -> dict[str, int]:
        return {self.decode([token]): token for token in range(VOCAB_SIZE)}


def test_eos_inside_a_draft_ends_the_text(target: NativeTarget) -> None:
    plain = generate(target, {}, None, PROMPTS, 8).token_ids
    eos = plain[0][3]
    ending = make_target(eos_token_id=eos)
    assert ending.eos_token_ids == {eos}
    result = agree(ending, ["lm"], [("lm", 4)], PROMPTS, 8)
    assert result.token_ids[0] == plain[0][:4]
    assert result.metrics[0].finish_reason == "eos"


def test_a_stop_string_cuts_what_the_device_wrote_after_it(target: NativeTarget) -> None:
    plain = generate(target, {}, None, PROMPT, 8).token_ids[0]
    stop = Tokens().decode(plain[2:4])
    arms = [("lm", 1)]
    result = agree(target, ["lm"], arms, [PROMPT, [3]], 8, stop=stop, tokenizer=Tokens())
    assert [m.finish_reason for m in result.metrics] == ["stop", "length"]
    assert stop not in result.texts[0]
    assert result.token_ids[0] == plain[: len(result.token_ids[0])]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_budgets_are_kept_to_the_token(target: NativeTarget, most: int) -> None:
    result = agree(target, ["lm"], [("lm", 4)], [PROMPT, [3]], most)
    assert [len(text) for text in result.token_ids] == [most, most]


def test_the_context_ends() -> None:
    result = agree(
        make_target(max_position_embeddings=11), ["lm"], [("lm", 4)], [PROMPT, ids(9)], 20
    )
    assert [m.finish_reason for m in result.metrics] == ["context", "context"]
    assert [len(text) for text in result.token_ids] == [6, 2]


def test_a_drafters_context_ends_before_the_targets(target: NativeTarget) -> None:
    short = ModelDrafter(tiny(3, max_position_embeddings=7), VOCAB_SIZE)
    policy = Arms(("short", 3))
    ours = generate(target, {"short": short}, policy, PROMPT, 8)
    theirs = generate(target, {"short": short}, Arms(("short", 3)), PROMPT, 8, waits=True)
    assert policy.offers[0] == 3
    assert ours.token_ids == theirs.token_ids
    drafted = [[record.num_drafted for record in r.records[0]] for r in (ours, theirs)]
    assert drafted[0] == drafted[1]
    assert drafted[0][0] == 3
    assert drafted[0][-1] == 0


def test_a_model_reads_what_it_missed(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many tokens before the step, few in its first pass, rejected ones again."""
    monkeypatch.setattr(device_engine, "CATCH_UPS", (2, 8))
    arms = [("lm", 1), ("other", 2), (OFF, 0), (OFF, 0), (OFF, 0), ("lm", 2), ("other", 1)]
    result = agree(target, ["lm", "other"], arms, [ids(20, 7)], 12)
    accepted, rejected = counts(result)
    assert accepted
    assert rejected
    assert all(r.num_accepted == r.num_drafted for r in result.records[0] if r.drafter == "lm")


def test_rows_that_chose_another_model_wait_their_turn(target: NativeTarget) -> None:
    arms = [("lm", 1), ("other", 1), ("other", 1)]
    policy = Arms(*arms, by_row=True)
    result = generate(target, pool("lm", "other"), policy, PROMPTS, 6)
    assert result.token_ids == [generate(target, {}, None, p, 6).token_ids[0] for p in PROMPTS]
    drafting = [
        {records[step].drafter for records in result.records if step < len(records)} - {OFF}
        for step in range(4)
    ]
    assert drafting[0] == {"other"}
    assert {"lm"} in drafting
    assert {"lm", "other"} not in drafting


def test_requests_wait_for_places_which_are_handed_back(target: NativeTarget) -> None:
    assert target.kernel_forward is not None
    cache = target.kernel_forward.cache
    prompts = [ids(2 + n % 3, n) for n in range(5)]
    result = generate(target, pool("lm"), Arms(("lm", 2)), prompts, 3, max_rows=2)
    assert result.token_ids == [generate(target, {}, None, p, 3).token_ids[0] for p in prompts]
    assert counts(result)[1] == 0  # the drafter is the target: it starts anew in every place
    gc.collect()
    assert sorted(cache._free) == list(range(cache.num_rows))
    assert cache.num_rows <= 4


def test_caches_that_grow_leave_no_step_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [ids(60, 3), ids(118, 4)]
    wanted = [generate(make_target(), {}, None, prompt, 14).token_ids[0] for prompt in prompts]
    target = make_target()
    assert target.kernel_forward is not None
    decoder = SpeculativeDecoder(target, pool("ngram", "lm"), Arms(("lm", 3), ("ngram", 2)))
    engine = decoder._runner()
    assert isinstance(engine, DeviceEngine)
    cleared: list[int] = []
    whole = engine.steps.graphs.clear

    def noted() -> None:
        cleared.append(engine.state.slots.token_ids.shape[1])
        whole()

    monkeypatch.setattr(engine.steps.graphs, "clear", noted)
    assert [decoder.generate(prompt, 14).token_ids[0] for prompt in prompts] == wanted
    assert target.kernel_forward.cache.capacity == 256
    assert cleared == [128, 256]


def test_a_stream_is_the_text(target: NativeTarget) -> None:
    decoder = SpeculativeDecoder(
        target, pool("lm"), Arms(("lm", 2)), tokenizer=Tokens(), max_rows=2
    )
    whole = decoder.generate(PROMPT, 7)
    one, other = (decoder.stream(prompt, 7) for prompt in (PROMPT, [3]))
    turns = list(zip_longest(one, other))
    chunks = [chunk for chunk, _ in turns if chunk is not None]
    assert [t for chunk in chunks for t in chunk.token_ids] == whole.token_ids[0]
    assert "".join(chunk.text for chunk in chunks) == whole.texts[0]
    assert chunks[-1].metrics is not None
    assert sum(len(chunk.token_ids) for _, chunk in turns if chunk is not None) == 7


def test_a_drafter_without_a_law_is_dropped(
    target: NativeTarget, caplog: pytest.LogCaptureFixture
) -> None:
    for law in (Sampling(), Sampling(temperature=1.0)):
        drafters = pool("other", "ngram")
        drafters["other"].native.kernel_forward.weights.norm.fill_(torch.nan)
        policy = Arms(("other", 2), ("other", 2), ("ngram", 2))
        decoder = SpeculativeDecoder(target, drafters, policy)
        with caplog.at_level(logging.WARNING):
            result = decoder.generate(PROMPT, 6, law)
        assert "other" not in decoder.drafters
        assert "drafter other failed" in caplog.text
        assert len(result.token_ids[0]) == 6
        if law.greedy:
            assert result.token_ids == generate(target, {}, None, PROMPT, 6).token_ids


def test_a_target_without_a_law_is_an_error() -> None:
    target = make_target()
    assert target.kernel_forward is not None
    target.kernel_forward.weights.norm.fill_(torch.nan)
    with pytest.raises(ValueError, match="hold NaN"):
        generate(target, {}, None, PROMPT, 4)


def test_a_drafter_of_the_host_takes_the_loop(
    target: NativeTarget, caplog: pytest.LogCaptureFixture
) -> None:
    drafters = pool("ngram")
    drafters["ngram"].on_device = lambda: None
    decoder = SpeculativeDecoder(target, drafters, Arms(("ngram", OFFER)))
    with caplog.at_level(logging.INFO):
        assert isinstance(decoder._runner(), Loop)
        assert isinstance(decoder._runner(), Loop)
    assert caplog.text.count("ngram cannot draft on the device") == 1


def test_near_the_end_a_captured_step_that_is_too_large_will_do(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = SpeculativeDecoder(target, pool("other"), Arms(("other", 3)))
    engine = decoder._runner()
    assert isinstance(engine, DeviceEngine)
    decoder.generate(PROMPT, 9)
    large = {shape for shape in engine.steps.by_shape if shape.model_drafts == 3}
    used, whole = set(), engine.steps._step
    monkeypatch.setattr(engine.steps.graphs, "captured", lambda shape: shape in large or None)
    monkeypatch.setattr(engine.steps, "_step", lambda shape: used.add(shape) or whole(shape))
    wanted = generate(target, {}, None, [4, 5], 9).token_ids
    assert decoder.generate([4, 5], 9).token_ids == wanted
    assert used <= large


def test_a_shape_is_captured_once_it_has_been_wanted_often(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "PATIENCE", 2)
    decoder = SpeculativeDecoder(target, pool("other"), Arms(("other", 3)))
    engine = decoder._runner()
    assert isinstance(engine, DeviceEngine)
    decoder.generate(PROMPT, 9)
    shapes = engine.steps.by_shape
    some = max(shapes, key=lambda shape: (shape.model_drafts, shape.catch_up))
    known = replace(some, catch_up=CATCH_UPS[-1])
    shapes[known] = shapes[some]
    captured = {known}
    monkeypatch.setattr(engine.steps.graphs, "captured", lambda shape: shape in captured)
    smaller = replace(known, model_drafts=2)
    fitting = engine.steps.fitting
    assert [fitting(smaller, ending=False) for _ in range(3)] == [known, known, smaller]
    assert fitting(smaller, ending=True) == known
    missed = replace(known, catch_up=CATCH_UPS[1])
    assert [fitting(missed, ending=False) for _ in range(3)] == [known, known, missed]
    captured.add(smaller)
    assert fitting(smaller, ending=False) == smaller
    far = [
        replace(known, model=None, model_drafts=0, catch_up=0),  # the model would be in the way
        replace(known, most_drafts=0, model_drafts=0),
        replace(known, catch_up=CATCH_UPS[0]),  # every step of a fixed arm would read too much
        replace(known, model_drafts=known.model_drafts + 1),  # is not held
    ]
    assert [fitting(shape, ending=False) for shape in far] == far


def test_what_a_step_launches_is_known_without_a_step(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(self: KernelForward, step: Any, only: Any = None, **_: Any) -> torch.Tensor:
        count = step.num_rows * step.width if only is None else len(only)
        return torch.zeros(count, len(self.weights.head.weight), device=DEVICE)

    decoder = SpeculativeDecoder(target, pool("ngram", "few"), Arms(("few", 2), ("ngram", 2)))
    engine = decoder._runner()
    assert isinstance(engine, DeviceEngine)
    wanted = decoder.generate(PROMPT, 6, Sampling(repetition_penalty=1.2)).token_ids
    before = [tensor.clone() for tensor in engine.state.changes]
    with monkeypatch.context() as patch:
        patch.setattr(KernelForward, "compute", nothing)
        for step in engine.steps.by_shape.values():
            step.prepare()
    assert all(map(torch.equal, engine.state.changes, before))
    assert decoder.generate(PROMPT, 6, Sampling(repetition_penalty=1.2)).token_ids == wanted


def test_seconds_are_those_of_the_steps(target: NativeTarget) -> None:
    arms = Arms(("other", 2), (OFF, 0))
    result = generate(target, pool("other"), arms, [PROMPT, [3]], 6)
    for records, metrics in zip(result.records, result.metrics, strict=True):
        assert metrics.prefill_seconds > 0
        for record in records:
            assert record.verify_seconds > 0
            assert (record.draft_seconds > 0) == (record.drafter == "other")
            assert record.host_seconds >= 0


def test_time_between_two_calls_is_no_steps(target: NativeTarget) -> None:
    decoder = SpeculativeDecoder(target, pool("lm"), Arms(("lm", 3)))
    engine = decoder._runner()
    assert isinstance(engine, DeviceEngine)
    decoder.generate(PROMPT, 10)  # the last two come sooner than one a step
    assert engine._under_way  # queued past an end that could not be foreseen
    time.sleep(0.2)
    assert decoder.generate(PROMPT, 9).records[0][0].host_seconds == 0
