"""Bugs these tests would catch on a real model: a cache, position or mask that is wrong only at
real widths; a drafter or policy that changes greedy text; an EOS that `generate` sees and the loop
does not; a stream that breaks real tokens; an equality that holds because nothing was ever
accepted.

float32 on the CPU, so texts must be equal token for token (DESIGN: E2). Should a near tie ever
break it, the assertion shows the gap between the two largest logits.
"""

import sys
from pathlib import Path

import pytest
import torch

from decode import Sampling, SpeculativeDecoder
from decode.clock import SystemClock
from decode.cost_measurement import quick_costs
from decode.policies.replay import Replay
from decode.resolve import policy_config
from decode.targets.transformers import TransformersTarget
from drafters.base import BuildContext, target_parts
from drafters.composite import CompositeConfig
from drafters.lm import LmConfig
from drafters.ngram import NgramConfig
from pipeline.bench_greedy import GreedyRow, greedy_suite, greedy_ways

pytestmark = pytest.mark.slow

PROMPTS = [
    "Write a Python function that reverses a list, then call it on [1, 2, 3] and on [4, 5].",
    "Repeat this line three times: the quick brown fox jumps over the lazy dog.",
    "What is 17 + 25? Explain each step.",
    "Name three rivers in Europe.",
    "Übersetze ins Englische: Guten Morgen, wie geht es dir? \N{GRINNING FACE}",
    'Copy this JSON and add a field: {"name": "a", "size": 3, "tags": ["x", "y"]}',
]
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def target(smollm2: Path) -> TransformersTarget:
    return TransformersTarget.from_pretrained(smollm2, dtype=torch.float32, device="cpu")


def chat_ids(target: TransformersTarget, prompt: str) -> list[int]:
    messages = [{"role": "user", "content": prompt}]
    text = target.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    return list(target.tokenizer(text, add_special_tokens=False).input_ids)


def told(row: GreedyRow) -> str:
    return (
        f"{row.name}: {row.num_equal} of {row.num_prompts} equal, {row.tokens_per_pass:.2f} tokens "
        f"per pass, {row.num_accepted} of {row.num_drafted} drafts accepted"
    )


def test_greedy_text_is_the_targets_own_for_every_drafter_and_policy(
    target: TransformersTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = target_parts(target)
    ngram = NgramConfig(min_ngram=1, max_ngram=3, max_offer=10).build(BuildContext(parts))
    cut = LmConfig(source=None, layers=[0, 29], num_draft_vocab=0, train_head=False, dtype="auto")
    lm = cut.build(BuildContext(parts))
    composite = CompositeConfig(lookup="ngram", model="lm", min_match=2)
    both = composite.build(BuildContext(parts, parts={"ngram": ngram, "lm": lm}))
    drafters = {"ngram": ngram, "lm": lm, "composite": both}
    policies = {name: policy_config(name) for name in ("posterior", "thompson", "ucb1")}
    costs = quick_costs(target, drafters, SystemClock())
    ways = greedy_ways(target, drafters, policies, costs, num_draft_tokens=4)
    prompts = [chat_ids(target, prompt) for prompt in PROMPTS]
    rows = {row.name: row for row in greedy_suite(target, ways, prompts, NUM_TOKENS)}
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(map(told, rows.values())) + "\n")
    assert all(row.num_equal == len(PROMPTS) for row in rows.values()), rows
    assert rows["ngram"].tokens_per_pass > 1
    assert rows["composite"].tokens_per_pass > 1
    assert rows["random weights"].num_drafted > NUM_TOKENS


def test_streamed_text_of_real_tokens_joins_to_the_generated_one(
    target: TransformersTarget,
) -> None:
    law = Sampling(temperature=1.0, top_p=0.95, seed=11)
    prompt = [{"role": "user", "content": "Write a line of emoji, then a line of Japanese."}]
    recorded = SpeculativeDecoder(target, {"ngram": "ngram"}, "ucb1").generate(prompt, 24, law)
    replay = Replay(recorded.records[0])
    decoder = SpeculativeDecoder(target, {"ngram": "ngram"}, replay)
    chunks = list(decoder.stream(prompt, 24, law))
    assert [t for chunk in chunks for t in chunk.token_ids] == recorded.token_ids[0]
    assert "".join(chunk.text for chunk in chunks) == recorded.texts[0]
