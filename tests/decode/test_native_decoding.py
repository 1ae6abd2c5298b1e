"""Bugs these tests would catch: text that changes with the backend; a drafter kind that cannot
share a native target's parts, or makes it forget them; a batch whose rows change each other's
text, or that is scored row by row; a sampled law that is not the target's; on a real model, what
is wrong only at real widths.

float32, so greedy texts are equal token for token; a near tie would show as one part of one text.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import family
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from decode import Sampling, SpeculativeDecoder
from decode.clock import VirtualClock
from decode.cost_measurement import quick_costs
from decode.native.forward import Forward
from decode.native.products import blocked_is_possible
from decode.native.target import NativeTarget
from decode.policies.fixed import FixedConfig
from decode.policies.replay import Replay
from decode.resolve import policy_config
from decode.targets.transformers import TransformersTarget
from decode.types import Drafter, Policy, Target
from drafters.base import BuildContext, target_parts
from drafters.composite import CompositeConfig
from drafters.lm import LmConfig
from drafters.lora import LoraConfig
from drafters.ngram import NgramConfig

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9], list(range(40)), [3, 1, 4, 1, 5, 9, 2, 6] * 9]
POLICIES = ("fixed", "posterior", "thompson", "thompson_flat", "ucb1")
NAMES = ("llama", "mistral, window", "qwen2", "qwen3")


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(53)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w52")


def targets(name: str, **settings: Any) -> tuple[NativeTarget, TransformersTarget]:
    ours = NativeTarget(family(name), tokenizer(), name, **{"take": True, **settings})
    return ours, TransformersTarget(family(name), tokenizer(), name)


def pool(target: Any) -> dict[str, Drafter]:
    """One of every kind, the models untrained, so that most drafts are rejected."""
    parts = target_parts(target)
    ngram = NgramConfig(min_ngram=1, max_ngram=3, max_offer=10).build(BuildContext(parts))
    cut = LmConfig(source=None, layers=[0, -1], num_draft_vocab=0, train_head=False, dtype="auto")
    whole = LmConfig(
        source=None, layers=[0, 1, 2], num_draft_vocab=0, train_head=False, dtype="auto"
    )
    lm = cut.build(BuildContext(parts))
    both = CompositeConfig(lookup="ngram", model="lm", min_match=2)
    lora = LoraConfig(
        base="lm",
        rank=2,
        alpha=4.0,
        target_modules=["all-linear"],
        train_head=False,
        merged=False,
        init_seed=0,
    )
    made = {"ngram": ngram, "lm": lm}
    return {
        **made,
        "composite": both.build(BuildContext(parts, parts=made)),
        "lora": lora.build(BuildContext(parts, parts=made)),
        "itself": whole.build(BuildContext(parts)),  # of which all is accepted
    }


def policy(name: str, target: Target, drafters: dict[str, Drafter], drafter: str) -> Policy:
    config: Any = FixedConfig(drafter=drafter, num_draft_tokens=3)
    if name != "fixed":
        config = policy_config(name)
    return config.build(quick_costs(target, drafters, VirtualClock()), list(drafters), 0)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_the_other_backends_for_every_drafter(name: str) -> None:
    ours, theirs = targets(name)
    wanted = SpeculativeDecoder(theirs).generate(PROMPTS, 30).token_ids
    plain = SpeculativeDecoder(ours).generate(PROMPTS, 30)
    assert plain.token_ids == wanted
    assert {m.backend for m in plain.metrics} == {"native"}
    for kind, drafter in pool(ours).items():
        one = {kind: drafter}
        made = SpeculativeDecoder(ours, one, policy("fixed", ours, one, kind))
        result = made.generate(PROMPTS, 30)
        assert result.token_ids == wanted, kind
        assert not made.pool.dropped
        steps = [record for records in result.records for record in records]
        assert sum(step.num_drafted for step in steps) > 0, kind
        assert sum(step.num_accepted for step in steps) > 0 or kind in ("lm", "lora")
    assert SpeculativeDecoder(ours).generate(PROMPTS, 30).token_ids == wanted


@pytest.mark.parametrize("name", POLICIES)
def test_greedy_text_is_the_other_backends_for_every_policy(name: str) -> None:
    ours, theirs = targets("llama")
    wanted = SpeculativeDecoder(theirs).generate(PROMPTS, 30).token_ids
    drafters = pool(ours)
    made = SpeculativeDecoder(ours, drafters, policy(name, ours, drafters, "composite"))
    assert made.generate(PROMPTS, 30).token_ids == wanted
    assert [made.generate([prompt], 30).token_ids[0] for prompt in PROMPTS] == wanted


def test_a_batch_is_scored_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = targets("qwen2")
    passes: list[int] = []
    whole = Forward.__call__

    def counted(self: Forward, rows: Sequence[Any], ids: Sequence[Any], with_logits: bool) -> Any:
        passes.append(len(rows))
        return whole(self, rows, ids, with_logits)

    monkeypatch.setattr(Forward, "__call__", counted)
    SpeculativeDecoder(ours).generate([[1, 2], [3, 4, 5], [6, 7, 8, 9]], 6)
    assert passes[:4] == [1, 1, 1, 3]  # three prompts, then all rows at once


def test_sampled_text_is_the_other_backends_on_the_same_choices() -> None:
    ours, theirs = targets("qwen3")
    law = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=4)
    drafters = pool(ours)
    recorded = SpeculativeDecoder(ours, drafters, policy("ucb1", ours, drafters, "")).generate(
        PROMPTS[:1], 30, law
    )
    replay = Replay(recorded.records[0])
    again = SpeculativeDecoder(theirs, pool(theirs), replay).generate(PROMPTS[:1], 30, law)
    assert again.token_ids == recorded.token_ids


@pytest.mark.skipif(
    not blocked_is_possible(torch.device("cpu"), torch.bfloat16), reason="PyTorch without oneDNN"
)
@pytest.mark.parametrize("name", ["llama, even", "mistral, window", "qwen3"])
def test_bfloat16_text_is_plain_decodings_to_the_bit(name: str) -> None:
    ours = NativeTarget(family(name, torch.bfloat16), tokenizer(), name, take=True)
    if ours.width_dependence is not None:
        pytest.skip(f"this machine: {ours.width_dependence}")
    alone = [SpeculativeDecoder(ours).generate([p], 60).token_ids[0] for p in PROMPTS]
    for kind, drafter in pool(ours).items():
        made = SpeculativeDecoder(
            ours, {kind: drafter}, policy("fixed", ours, {kind: drafter}, kind)
        )
        assert made.generate(PROMPTS, 60).token_ids == alone, kind


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_model(smollm2: Path, dtype: torch.dtype) -> None:
    ours = NativeTarget.from_pretrained(smollm2, dtype=dtype)
    theirs = TransformersTarget.from_pretrained(smollm2, dtype=dtype, device="cpu")
    questions = [
        "Write a Python function that reverses a list, then call it on [1, 2, 3] and on [4, 5].",
        "Repeat this line three times: the quick brown fox jumps over the lazy dog.",
        "What is 17 + 25? Explain each step.",
    ]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    plain = SpeculativeDecoder(ours).generate(prompts, 40).token_ids
    if dtype == torch.float32:
        assert plain == SpeculativeDecoder(theirs).generate(prompts, 40).token_ids
        assert ours.model(torch.tensor([plain[0]])).logits.shape[-1] == ours.vocab_size
    if ours.width_dependence is not None:
        pytest.skip(f"this machine: {ours.width_dependence}")
    drafters: dict[str, Drafter] = {
        "ngram": NgramConfig(min_ngram=1, max_ngram=3, max_offer=10).build(
            BuildContext(target_parts(ours))
        )
    }
    for num_draft_tokens in (3, 8, 16):
        fixed = FixedConfig(drafter="ngram", num_draft_tokens=num_draft_tokens)
        made = SpeculativeDecoder(ours, drafters, fixed.build(None, ["ngram"], 0))
        result = made.generate(prompts, 40)
        assert result.token_ids == plain
        assert any(step.num_accepted for steps in result.records for step in steps)
