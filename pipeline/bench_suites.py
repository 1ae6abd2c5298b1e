"""The suites of stage benchmark: what each compares, made from a target, drafters and prompts."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from decode import SpeculativeDecoder
from decode.clock import Clock
from decode.cost_measurement import quick_costs
from decode.costs import Costs
from decode.policies.base import PolicyConfig
from decode.policies.fixed import FixedPolicy
from decode.policies.named import policy_config
from decode.resolve import resolve_drafters
from decode.targets.loading import load_causal_lm
from decode.targets.transformers import TransformersTarget
from decode.types import Drafter, Policy
from drafters.composite import CompositeConfig, CompositeDrafter
from drafters.ngram import NgramDrafter
from drafters.ngram import from_pretrained as load_lookup
from drafters.retrieval import RetrievalDrafter
from pipeline.bench_arms import Arm, fixed_arm, own_arm, peer_arms
from pipeline.bench_batch import batch_suite
from pipeline.bench_decode import race, told
from pipeline.bench_greedy import greedy_suite, greedy_ways
from pipeline.exported import open_router, read_export
from pipeline.load import load_drafters, load_policy
from pipeline.models import TargetConfig
from pipeline.progress import progress
from pipeline.scores import top_two_gap
from pipeline.wallclock import PLAIN, EvalPrompt

if TYPE_CHECKING:
    from pipeline.benchmark import Benchmark

GREEDY_POLICIES = ("posterior", "thompson", "ucb1")


@dataclass(frozen=True)
class Parts:
    """What the suites that decode share."""

    target: Any
    drafters: Mapping[str, Drafter]  # of the pool
    prompts: list[EvalPrompt]
    clock: Clock


def greedy(parts: Parts, asked: "Benchmark") -> dict[str, Any]:
    """Every drafter and policy against the target's own greedy text."""
    # A profile is of the target's own dtype, so costs are measured here.
    costs = quick_costs(parts.target, parts.drafters, parts.clock)
    policies = {name: policy_config(name) for name in GREEDY_POLICIES}
    ways = greedy_ways(parts.target, parts.drafters, policies, costs, asked.num_draft_tokens)
    prompts = [prompt.token_ids for prompt in parts.prompts]
    with progress("benchmark: greedy equality", len(ways) + 1, "ways") as meter:
        rows = greedy_suite(
            parts.target, ways, prompts, asked.max_new_tokens["greedy"], meter.advance
        )
    return {
        "rows": [asdict(row) for row in rows],
        "metrics": {
            "num_texts": sum(row.num_prompts for row in rows),
            "num_different": sum(row.num_prompts - row.num_equal for row in rows),
        },
    }


def decode(parts: Parts, asked: "Benchmark") -> dict[str, Any]:
    """Our ways and theirs, in turn within every prompt."""
    most = asked.max_new_tokens["decode"]
    arms = [*own_arms(parts, asked), *_peers(parts, asked, most)]
    return told(race(arms, parts.prompts, most, parts.clock), parts.target)


def batch(parts: Parts, asked: "Benchmark") -> dict[str, Any]:
    """Plain decoding, every drafter and policies over them, one by one and side by side."""
    target, k = parts.target, asked.num_draft_tokens
    drafters = all_drafters(parts, asked)

    def drafting(name: str, drafter: Drafter, size: int) -> SpeculativeDecoder:
        policy = FixedPolicy(name, k, None)
        return SpeculativeDecoder(target, {name: drafter}, policy, clock=parts.clock, max_rows=size)

    def choosing(build: Callable[[], Policy], size: int) -> SpeculativeDecoder:
        return SpeculativeDecoder(target, drafters, build(), clock=parts.clock, max_rows=size)

    makers: dict[str, Callable[[int], SpeculativeDecoder]] = {
        PLAIN: lambda size: SpeculativeDecoder(target, clock=parts.clock, max_rows=size)
    }
    for name, drafter in drafters.items():
        makers[f"{name}, K={k}"] = partial(drafting, name, drafter)
    for name, build in _policies(parts, asked, drafters).items():
        makers[name] = partial(choosing, build)
    prompts = [list(prompt.token_ids) for prompt in parts.prompts][: max(asked.batch_sizes)]
    sizes = sorted(asked.batch_sizes)
    gap = partial(top_two_gap, target)
    most = asked.max_new_tokens["batch"]
    return batch_suite(makers, prompts, sizes, most, asked.batch_rounds, parts.clock, gap)


def forward(config: TargetConfig, device: str, asked: "Benchmark") -> dict[str, Any]:
    """One pass of the target and plain decoding: on CUDA our kernels, launch by launch, beside
    transformers compiled; on a CPU our forward beside transformers'.
    """
    name, dtype = str(config.resolve()), config.dtype
    if device == "cuda":
        from pipeline.bench_engine import BATCHES, WIDTHS, measure

        exactness = "law" if config.exactness == "law" else "bitwise"
        found = measure(
            name,
            dtype=dtype,
            device=device,
            exactness=exactness,
            widths=WIDTHS,
            batches=BATCHES,
            context_tokens=asked.context_tokens,
            rounds=asked.rounds,
            num_prompts=asked.rounds,
            max_new_tokens=asked.max_new_tokens["forward"],
            skip=(),
        )
        rates = {way: row["tokens_per_second"] for way, row in found["texts"].items()}
    else:
        from pipeline.bench_forward import compare

        found = compare(
            name,
            dtype=dtype,
            device=device,
            exactness=("law", "bitwise"),
            rounds=asked.rounds,
            max_new_tokens=asked.max_new_tokens["forward"],
            context_tokens=asked.context_tokens,
        )
        rates = {way: row["tokens_per_second"] for way, row in found["plain"].items()}
    return {"figures": found, "metrics": rates}


def own_arms(parts: Parts, asked: "Benchmark") -> list[Arm]:
    """Plain, every drafter at every K, policies over them all, and what an export deploys."""
    target, clock, drafters = parts.target, parts.clock, all_drafters(parts, asked)
    arms = [own_arm(PLAIN, target, clock)]
    arms += [
        fixed_arm(name, drafter, k, target, clock)
        for name, drafter in drafters.items()
        for k in asked.draft_lengths
    ]

    arms += [
        own_arm(name, target, clock, drafters, build)
        for name, build in _policies(parts, asked, drafters).items()
    ]
    return arms if asked.exported is None else [*arms, exported_arm(Path(asked.exported), parts)]


def _policies(
    parts: Parts, asked: "Benchmark", drafters: Mapping[str, Drafter]
) -> dict[str, Callable[[], Policy]]:
    """What builds each policy that is asked for, over all drafters; costs are measured once."""

    @cache
    def costs() -> Costs:
        return quick_costs(parts.target, drafters, parts.clock)

    def build(config: PolicyConfig) -> Policy:
        return config.build(costs() if config.needs_costs else None, list(drafters), 0)

    return {f"policy {name}": partial(build, policy_config(name)) for name in asked.policies}


def all_drafters(parts: Parts, asked: "Benchmark") -> dict[str, Drafter]:
    """The pool's, those that are named beside it, and each model of these behind each lookup."""
    named = resolve_drafters(asked.drafters, parts.target)
    drafters = {**parts.drafters, **named}
    if asked.composite_min_match is None:
        return drafters
    plain = (d for d in drafters.values() if type(d) is NgramDrafter)
    lookups = {"lookup": next(plain, None) or load_lookup("ngram", parts.target)}
    lookups |= {name: d for name, d in drafters.items() if isinstance(d, RetrievalDrafter)}
    for model, drafter in named.items():
        if isinstance(drafter, NgramDrafter):
            continue
        for name, lookup in lookups.items():
            config = CompositeConfig(lookup=name, model=model, min_match=asked.composite_min_match)
            drafters[f"{name}, else {model}"] = CompositeDrafter(config, lookup, drafter)
    return drafters


def exported_arm(folder: Path, parts: Parts) -> Arm:
    """An export's drafters under its policy and router."""
    content = read_export(folder)
    drafters = load_drafters(folder, content["drafters"], parts.target)
    build = partial(load_policy, folder, content, parts.target, drafters, parts.clock)
    router = open_router(folder, content, parts.target.device)
    return own_arm("policy + router", parts.target, parts.clock, drafters, build, router)


def _peers(parts: Parts, asked: "Benchmark", max_new_tokens: int) -> list[Arm]:
    target = parts.target
    theirs = TransformersTarget(target.model, target.tokenizer, target.name_or_path)
    dtype = next(target.model.parameters()).dtype

    @cache
    def assistant() -> Any:
        if asked.assistant is None:
            raise ValueError("no assistant is named; set stages.benchmark.assistant=FOLDER")
        return load_causal_lm(asked.assistant, dtype).to(torch.device(target.device)).eval()

    longest = max(len(prompt.token_ids) for prompt in parts.prompts)
    return peer_arms(asked.peers, theirs, assistant, parts.clock, longest + max_new_tokens)
