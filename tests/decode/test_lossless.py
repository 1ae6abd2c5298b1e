"""Bugs these tests would catch: a residual that is forgotten, or taken from the wrong row; a number
used for two draws; a draft drawn from another law than the one verified (rounded, without its
temperature, without the penalty on the draft before it); counts that miss the last token; a bonus
from the wrong row; numbers rounded to bfloat16; a policy whose choice leaks the draws; a truncation
applied to one law only.

Every path of chance through the whole decoder is enumerated (tests/fakes.py) and the law of the
texts is compared with the target's own, written in plain Python. Tolerance 1e-9: sums of some
thousand float64 products; the smallest planted bug moves the law by more than 1e-4. Every drafter
differs from the target, and each case asserts that drafts were rejected as well as accepted.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy

import pytest
import torch
from enumeration import Paths, enumerate_texts, sequence_law
from fakes import FakeDrafter, FakeTarget, FakeTokenizer, ScriptedPolicy, bigram

from decode import Sampling, SpeculativeDecoder
from decode.clock import VirtualClock
from decode.costs import Costs
from decode.policies.fixed import FixedConfig
from decode.policies.posterior import PosteriorConfig
from decode.policies.thompson import ThompsonConfig
from decode.policies.ucb1 import Ucb1Config
from decode.types import Drafter, Policy, StepRecord

TARGET = [[4, 2, 2], [2, 4, 2], [1, 1, 6]]
NEAR = [[2, 4, 2], [4, 2, 2], [4, 2, 2]]
FAR = [[1, 1, 6], [0, 2, 6], [6, 1, 1]]
PROMPT = [1, 0]
TOLERANCE = 1e-9
JUST_INSIDE = [1e-5, 1 - 1e-5]  # of a cell: where a rounded law or number shows

LAWS = {
    "plain": Sampling(temperature=1.0),
    "temperature": Sampling(temperature=0.6),
    "top-k": Sampling(temperature=0.8, top_k=2),
    "top-p": Sampling(temperature=1.0, top_p=0.7),
    "min-p": Sampling(temperature=1.3, min_p=0.5),
    "penalty": Sampling(temperature=1.0, repetition_penalty=1.7),
    "all": Sampling(temperature=0.9, top_k=2, top_p=0.95, min_p=0.05, repetition_penalty=1.4),
}


def pool() -> dict[str, FakeDrafter]:
    return {
        "near": FakeDrafter(bigram(NEAR)),
        "far": FakeDrafter(bigram(FAR)),
        "lookup": FakeDrafter(bigram(FAR), chance=False),
    }


def check(
    sampling: Sampling,
    policy: Callable[[], Policy],
    num_tokens: int,
    edge: float,
    drafters: Mapping[str, Drafter] | None = None,
) -> Mapping[str, int]:
    """Assert that the decoder's law of texts is the target's; returns the events that were seen."""
    target = FakeTarget(bigram(TARGET), 3)
    paths = Paths(target, sampling, edge)
    watched = {name: paths.watch(drafter) for name, drafter in (drafters or pool()).items()}

    def run() -> tuple[list[int], list[StepRecord]]:
        decoder = SpeculativeDecoder(target, watched, policy(), noise=paths, clock=VirtualClock())
        result = decoder.generate([PROMPT], num_tokens, sampling)
        assert not decoder.pool.dropped
        return result.token_ids[0], result.records[0]

    law, events = enumerate_texts(paths, run)
    wanted = sequence_law(target, PROMPT, num_tokens, sampling)
    assert sum(law.values()) == pytest.approx(1, abs=TOLERANCE)
    assert set(law) <= set(wanted)
    for text, chance in wanted.items():
        assert law.get(text, 0.0) == pytest.approx(chance, abs=TOLERANCE), text
    return events


@pytest.mark.parametrize("edge", JUST_INSIDE)
@pytest.mark.parametrize("num_draft_tokens", [1, 2])  # 1: steps follow bonus tokens as well
@pytest.mark.parametrize("name", LAWS)
def test_law_is_kept_when_drafting_by_chance(name: str, num_draft_tokens: int, edge: float) -> None:
    script = [("near", num_draft_tokens), ("far", 1)]
    events = check(LAWS[name], lambda: ScriptedPolicy(script), 3, edge)
    wanted = ("rejected", "accepted", f"near {num_draft_tokens}", "far 1")
    assert all(events[kind] for kind in wanted), events


@pytest.mark.parametrize("name", ["plain", "top-p", "penalty", "all"])
def test_law_is_kept_when_drafting_without_chance(name: str) -> None:
    events = check(LAWS[name], lambda: ScriptedPolicy([("lookup", 2)]), 3, JUST_INSIDE[1])
    assert all(events[kind] for kind in ("rejected", "lookup 2")), events


@pytest.mark.parametrize("name", ["plain", "all"])
def test_law_is_kept_with_a_real_language_model_drafting(name: str) -> None:
    """Its cache rolls back after rejections, and what it reports is what it drew from."""
    drafters = {"lm": tiny_lm(vocab_size=3)}
    events = check(LAWS[name], lambda: ScriptedPolicy([("lm", 2)]), 3, JUST_INSIDE[0], drafters)
    assert all(events[kind] for kind in ("rejected", "accepted", "lm 2")), events


def tiny_lm(vocab_size: int) -> Drafter:
    """A random cut of a random Llama whose logits are some units apart."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from drafters.base import BuildContext, TargetParts
    from drafters.lm import LmConfig

    shape = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.6,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(shape).eval()
    tokenizer = FakeTokenizer([bytes([97 + i]) for i in range(vocab_size)])
    config = LmConfig(source=None, layers=[1], num_draft_vocab=0, train_head=False, dtype="auto")
    return config.build(BuildContext(TargetParts(model, tokenizer, vocab_size, "tiny")))


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3])
def test_law_is_kept_for_every_k(num_draft_tokens: int) -> None:
    policy = ScriptedPolicy([("near", num_draft_tokens)])
    events = check(LAWS["plain"], lambda: policy, num_draft_tokens + 1, JUST_INSIDE[0])
    assert events[f"near {num_draft_tokens}" if num_draft_tokens else "off 0"]
    assert bool(events["rejected"]) == bool(num_draft_tokens)


COSTS = Costs(
    key="a table",
    verify_seconds={1: 1.0, 17: 1.1},
    draft_seconds={name: {1: 0.1, 16: 1.6} for name in ("near", "far", "lookup")},
    host_seconds=0.0,
)
BELIEF = {
    "draft_lengths": [1, 2, 3],
    "population_share": 0.2,
    "population_spread": 1.4,
    "hazard": 0.3,
    "likelihood_power": 1.0,
    "rate_memory": 0.03,
    "cost_memory": 0.0,
    "switch_horizon": 12.0,
    "explore_horizon": 1.5,
    "experience": 4,
    "probe_every": 1,
}
POLICIES = {
    "fixed": FixedConfig(drafter="far", num_draft_tokens=2),
    "ucb1": Ucb1Config(draft_lengths=[1, 2], exploration=1.0, reward_cap=4.0, persist=True),
    "thompson": ThompsonConfig(**BELIEF, structured=True, spread=1.0, reward_cap=4.0),
    "thompson flat": ThompsonConfig(**BELIEF, structured=False, spread=1.0, reward_cap=4.0),
    "posterior": PosteriorConfig(**BELIEF),
}


@pytest.mark.parametrize("name", POLICIES)
def test_law_is_kept_whatever_the_policy_learns(name: str) -> None:
    """Each path starts from a policy that has seen some text, so that choices depend on draws."""
    arms: set[str] = set()
    for num_warm_tokens in (1, 3, 6, 9, 14, 20):
        warm = POLICIES[name].build(COSTS, ["near", "far", "lookup"], seed=num_warm_tokens)
        warm_up(warm, num_warm_tokens)
        sampling = Sampling(temperature=0.9, top_p=0.9)
        events = check(sampling, lambda policy=warm: deepcopy(policy), 3, JUST_INSIDE[1])
        assert events["rejected"]
        arms |= {event for event in events if event[-1].isdigit()}
    assert len(arms) >= 2, arms  # its K depends at least on the room that is left


def warm_up(policy: Policy, num_tokens: int) -> None:
    decoder = SpeculativeDecoder(
        FakeTarget(bigram(TARGET), 3), pool(), policy, clock=VirtualClock()
    )
    decoder.generate([PROMPT], num_tokens, Sampling(temperature=1.0, seed=5))
