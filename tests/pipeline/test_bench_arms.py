"""Would catch: prefill, or the tokens of the first pass, counted in a way's rate; a peer whose text
is another one than the target's own, by a penalty in the model's settings or a cache that was not
emptied; arrivals that leave out tokens; a peer that is called by another's options; FlashSpec run
on the model that the others use, or past its EOS; its absence taken for something else.

Clocks are made up, so every figure is exact; texts are of a tiny model in float32.
"""

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import EOS, tiny_model, tiny_tokenizer

from decode.clock import VirtualClock
from decode.targets.transformers import TransformersTarget
from pipeline import bench_arms
from pipeline.bench_arms import PEERS, Written, decoder_way, generate_way, own_arm, peer_arms
from pipeline.bench_greedy import own_text

PROMPT = [11, 12, 13, 11, 12, 13, 11, 12]
SECOND = 1.0
FLASHSPEC_MODULES = ("flashspec", "flashspec.engine")
FAKE = """
import torch
class FlashSpecConfig:
    def __init__(self, device, eos_token_ids, sampling):
        self.eos_token_ids = eos_token_ids
class SamplingConfig:
    def __init__(self, temperature):
        assert temperature == 0
class GenerationResult:
    def __init__(self, tokens, most):
        self.n_tokens_generated = len(tokens)
        self.output_ids = torch.tensor([tokens + [-1] * (most - len(tokens))])
class SpeculativeEngine:
    drafter_strategy_reason = "made up"
    def __init__(self, config, drafters, target):
        self.eos, self.target, self.drafters = config.eos_token_ids, target, drafters
    def generate(self, ids, max_new_tokens):
        text = self.target.model.generate(
            ids, do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=list(self.eos))
        return GenerationResult(text[0, ids.shape[1]:].tolist(), max_new_tokens)
"""
FAKE_PARTS = """
MADE = []
class TargetModel:
    def __init__(self, name, device, dtype, model):
        self.model = model
        MADE.append(model)
HuggingFaceDrafter = TargetModel
"""


@pytest.fixture
def target(one_thread: None) -> TransformersTarget:
    return TransformersTarget(tiny_model(), tiny_tokenizer(), "tiny")


class Ticking:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.time = 5.0

    def now(self) -> float:
        return self.time


def test_a_rate_leaves_prefill_and_the_first_pass_out() -> None:
    """A prompt of 100 s, then steps of 2 s: four tokens at once, then three, then two."""
    clock = Ticking()

    def generate(prompts: list[list[int]], max_new_tokens: int) -> Any:
        clock.time += 100 + 3 * 2
        records = [SimpleNamespace(num_emitted=n) for n in (4, 3, 2)]
        metrics = SimpleNamespace(first_token_seconds=102.0, num_target_passes=3)
        return SimpleNamespace(token_ids=[list(range(9))], metrics=[metrics], records=[records])

    decoder: Any = SimpleNamespace(generate=generate, pool=SimpleNamespace(dropped={}))
    written = decoder_way(decoder, clock)([1], 9)
    assert (written.seconds, written.first_seconds, written.num_first) == (4.0, 102.0, 4)
    assert written.rate == 5 / 4
    assert written.num_passes == 3


def test_a_text_that_ended_with_its_first_pass_has_no_rate() -> None:
    assert math.isnan(Written([1, 2], 0.0, 2, 3.0, 1).rate)


def test_our_decoder_on_a_clock_that_ticks(target: TransformersTarget) -> None:
    """What a call reads before, during and after its steps is counted; its first step is not."""
    clock = VirtualClock(SECOND)
    written = own_arm("plain", target, clock).make()(PROMPT, 7)
    assert len(written.token_ids) == written.num_passes == 7
    assert written.num_first == 1
    assert written.first_seconds + written.seconds == clock.readings - 1
    assert 0 < written.first_seconds < written.seconds


def test_a_drafter_that_was_dropped_is_a_failure(target: TransformersTarget) -> None:
    class Broken:
        num_parameters = memory_bytes = 0

        def open(self) -> Any:
            raise RuntimeError("no room")

        def score(self, *_: Any) -> Any:
            raise AssertionError

    way = bench_arms.fixed_arm("broken", Broken(), 2, target, VirtualClock()).make()
    with pytest.raises(ValueError, match=r"a drafter failed: .*no room"):
        way(PROMPT, 4)


def test_transformers_tells_when_tokens_come(target: TransformersTarget) -> None:
    """Readings: the call, the prompt, then one a token."""
    written = generate_way(target, VirtualClock(SECOND))(PROMPT, 7)
    assert (written.first_seconds, written.seconds) == (2.0, 6.0)
    assert written.rate == 1.0


@pytest.mark.parametrize("name", ["eager", "compiled", "assisted", "lookup"])
def test_a_peer_writes_the_targets_own_text_every_time(
    target: TransformersTarget, name: str
) -> None:
    own = TransformersTarget(tiny_model(), tiny_tokenizer(), "tiny")
    target.model.generation_config.repetition_penalty = 5.0  # is not its greedy text
    (arm,) = peer_arms([name], target, lambda: tiny_model(seed=1), VirtualClock(SECOND), 40)
    assert (arm.name, arm.is_ours) == (PEERS[name], False)
    way = arm.make()
    for prompt in (PROMPT, PROMPT[:3], PROMPT):
        written = way(prompt, 9)
        assert written.token_ids == own_text(own, prompt, 9)
        assert written.num_passes is not None
        assert written.num_passes <= len(written.token_ids)


def test_lookup_and_assistant_are_used(target: TransformersTarget) -> None:
    def passes(name: str) -> int | None:
        clock: Any = VirtualClock(SECOND)
        (arm,) = peer_arms([name], target, tiny_model, clock, 40)
        return arm.make()(PROMPT, 12).num_passes

    assert passes("eager") == 12
    assistant_passes = passes("assisted")  # its assistant is the target itself
    assert assistant_passes is not None
    assert assistant_passes < 12


def test_a_text_ends_at_any_of_the_targets_ends(target: TransformersTarget) -> None:
    whole = own_text(target, PROMPT, 9)
    target.eos_token_ids = frozenset({EOS, whole[4]})
    assert own_text(target, PROMPT, 9) == whole[: whole.index(whole[4]) + 1]


@pytest.fixture
def fake_flashspec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package of that name, with as much of its API as is used."""
    (tmp_path / "flashspec").mkdir()
    (tmp_path / "flashspec" / "__init__.py").write_text(FAKE)
    (tmp_path / "flashspec" / "engine.py").write_text(FAKE_PARTS)
    info = tmp_path / "flashspec-0.3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashspec\nVersion: 0.3.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    real = {name: sys.modules.pop(name, None) for name in FLASHSPEC_MODULES}
    yield importlib.import_module("flashspec.engine")
    for name, module in real.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module


def flashspec(target: TransformersTarget, clock: Any, assistant: Callable[[], Any]) -> Any:
    (arm,) = peer_arms(["flashspec"], target, assistant, clock, 40)
    return arm.make()


def test_flashspec_works_on_copies_and_its_prompt_is_taken_off(
    target: TransformersTarget, fake_flashspec: Any
) -> None:
    target.model._compiled_call = lambda: None
    way = flashspec(target, VirtualClock(SECOND), tiny_model)
    written = way(PROMPT, 9)
    assert written.token_ids == own_text(target, PROMPT, 9)
    # A call takes one tick; the one for a single token stands for the prompt.
    assert (written.seconds, written.first_seconds, written.num_first) == (0.0, 1.0, 1)
    made = fake_flashspec.MADE[0]
    assert made is not target.model
    assert not hasattr(made, "_compiled_call")
    assert hasattr(target.model, "_compiled_call")
    whole = list(written.token_ids)
    target.eos_token_ids = frozenset({whole[3]})
    ended = flashspec(target, VirtualClock(), tiny_model)(PROMPT, 9).token_ids
    assert ended == whole[: whole.index(whole[3]) + 1]


def test_without_flashspec_that_is_what_is_said(
    target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_arms, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="flashspec is not installed"):
        flashspec(target, VirtualClock(), tiny_model)
