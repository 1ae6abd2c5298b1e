"""Is speculative greedy text the target's own, token for token, and was anything accepted?

Equality alone proves little: a drafter of which nothing is accepted is equal too. So every row has
its tokens per target pass beside it, and one row drafts with random weights. Where texts differ,
the gap between the target's two largest logits there tells a near tie from a mistake.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from decode import SpeculativeDecoder
from decode.costs import Costs
from decode.policies.base import PolicyConfig
from decode.policies.fixed import FixedConfig
from decode.results import ratio
from decode.targets.transformers import TransformersTarget
from decode.types import Drafter, Policy
from drafters.base import BuildContext, target_parts
from drafters.lm import LmConfig, LmDrafter


@dataclass(frozen=True)
class Difference:
    """Where a text left the target's own."""

    prompt: int
    position: int  # among the new tokens
    expected: int | None  # None: the target's text had ended
    found: int | None
    gap: float  # between the two largest logits of the target's own pass at this position


@dataclass(frozen=True)
class GreedyRow:
    """One way of drafting, over all prompts."""

    name: str
    num_prompts: int
    num_equal: int
    num_tokens: int
    num_drafted: int
    num_accepted: int
    tokens_per_pass: float
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Way:
    """A pool and what chooses from it; the policy is made anew for every suite."""

    drafters: Mapping[str, Drafter]
    policy: Callable[[], Policy]


def greedy_suite(
    target: TransformersTarget,
    ways: Mapping[str, Way],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    advance: Callable[[], None] = lambda: None,
) -> list[GreedyRow]:
    """Every way of drafting against the target's own `generate(do_sample=False)`.

    `advance` is called after each pass over all prompts, `len(ways) + 1` times in all.
    """
    own = [own_text(target, prompt, max_new_tokens) for prompt in prompts]
    advance()
    rows = []
    for name, way in ways.items():
        rows.append(_row(name, way, target, prompts, own, max_new_tokens))
        advance()
    return rows


def own_text(
    target: TransformersTarget, prompt: Sequence[int], max_new_tokens: int, **options: Any
) -> list[int]:
    """What transformers generates greedily from the target, in the target's own dtype.

    A model's own generation settings may penalise repetition, which is not its greedy text.
    """
    ids = torch.tensor([list(prompt)], device=target.device)
    if target.eos_token_ids:
        options["eos_token_id"] = sorted(target.eos_token_ids)
    with torch.inference_mode():
        text = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            repetition_penalty=1.0,
            pad_token_id=min(target.eos_token_ids, default=0),
            **options,
        )
    return text[0, len(prompt) :].tolist()


def greedy_ways(
    target: TransformersTarget,
    drafters: Mapping[str, Drafter],
    policies: Mapping[str, PolicyConfig],
    costs: Costs | None,
    num_draft_tokens: int,
) -> dict[str, Way]:
    """Each drafter alone at a fixed K, random weights, and each policy over the whole pool."""

    def fixed(name: str) -> Callable[[], Policy]:
        config = FixedConfig(drafter=name, num_draft_tokens=num_draft_tokens)
        return lambda: config.build(None, [name], 0)

    def built(config: PolicyConfig) -> Callable[[], Policy]:
        return lambda: config.build(costs, list(drafters), 0)

    alone = {**drafters, "random weights": random_drafter(target)}
    ways = {name: Way({name: drafter}, fixed(name)) for name, drafter in alone.items()}
    return ways | {f"policy {name}": Way(drafters, built(c)) for name, c in policies.items()}


def random_drafter(target: TransformersTarget, seed: int = 0) -> LmDrafter:
    """One layer of the target's shape with random weights: it drafts, and is wrong."""
    config = LmConfig(source=None, layers=[0], num_draft_vocab=0, train_head=False, dtype="auto")
    drafter = config.build(BuildContext(target_parts(target)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in drafter.trainable.own_tensors().values():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise.to(tensor) * 0.1)
    return drafter


def _row(
    name: str,
    way: Way,
    target: TransformersTarget,
    prompts: Sequence[Sequence[int]],
    own: Sequence[list[int]],
    max_new_tokens: int,
) -> GreedyRow:
    decoder = SpeculativeDecoder(target, way.drafters, way.policy())
    result = decoder.generate([list(prompt) for prompt in prompts], max_new_tokens)
    if decoder.pool.dropped:
        raise ValueError(f"{name} dropped a drafter: {decoder.pool.dropped}; mend it and run again")
    pairs = zip(prompts, own, result.token_ids, strict=True)
    found = [_difference(target, i, *pair) for i, pair in enumerate(pairs)]
    differences = tuple(d for d in found if d is not None)
    metrics = result.metrics
    tokens = sum(m.num_new_tokens for m in metrics)
    return GreedyRow(
        name=name,
        num_prompts=len(prompts),
        num_equal=len(prompts) - len(differences),
        num_tokens=tokens,
        num_drafted=sum(m.num_drafted for m in metrics),
        num_accepted=sum(m.num_accepted for m in metrics),
        tokens_per_pass=ratio(tokens, sum(m.num_target_passes for m in metrics)),
        differences=differences,
    )


def _difference(
    target: TransformersTarget, i: int, prompt: Sequence[int], own: list[int], text: list[int]
) -> Difference | None:
    if own == text:
        return None
    pairs = enumerate(zip(own, text, strict=False))
    at = next((n for n, (a, b) in pairs if a != b), min(len(own), len(text)))
    session = target.open()
    read = [*prompt, *own[:at]]
    target.prefill(session, read[:-1])
    top = target.score([session], [read[-1:]])[0, -1].double().topk(2).values
    expected, found = (ids[at] if at < len(ids) else None for ids in (own, text))
    return Difference(i, at, expected, found, float(top[0] - top[1]))
