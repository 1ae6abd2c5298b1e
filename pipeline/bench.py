"""The finished parts that an evaluation compares, and the methods and policies made of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from decode.costs import Costs, costs_key
from decode.policies.base import PolicyConfig
from decode.policies.fixed import FixedConfig
from decode.policies.router_only import RouterOnlyConfig
from decode.targets.transformers import TransformersTarget
from decode.types import Drafter, Policy, Prior, Router, Sampling
from pipeline.acceptance import load_acceptance
from pipeline.build import build_drafters, load_target
from pipeline.leaderboard import Player
from pipeline.models import resolve_encoder
from pipeline.profile import read_costs
from pipeline.replay import Arm, Case, arm_tables, best_arm, read_cases
from pipeline.scores import Resampling
from pipeline.stage import Workspace
from pipeline.wallclock import PLAIN, Method
from router.checkpoint import load_population, load_router
from router.encoder import SentenceEncoder

if TYPE_CHECKING:
    import pandas as pd

BEST_FIXED, ROUTER_ONLY = "best fixed", "router only"
COLD, ROUTED = "policy cold", "policy + router"


@dataclass(frozen=True)
class Bench:
    """The finished parts that are compared."""

    target: TransformersTarget
    drafters: Mapping[str, Drafter]
    costs: Costs
    router: Router
    population: Router
    policy: PolicyConfig
    frame: "pd.DataFrame"
    fixed: Mapping[str, Arm]  # law -> the arm chosen on router_train
    draft_lengths: Sequence[int]
    resampling: Resampling
    seed: int

    def cases(self, split: str) -> list[Case]:
        """Recorded answers of a split."""
        return read_cases(self.frame, split, list(self.drafters))

    def built(self, config: PolicyConfig) -> Callable[[], Policy]:
        """What makes a policy that remembers nothing, over this pool and these costs."""
        return lambda: config.build(self.costs, list(self.drafters), self.seed)

    def methods(self, law: str) -> list[Method]:
        """Plain decoding first, then one part more at a time."""
        drafter, k = self.fixed[law]
        fixed = FixedConfig(drafter=drafter, num_draft_tokens=k)
        routed = RouterOnlyConfig(draft_lengths=list(self.draft_lengths))
        return [
            Method(PLAIN, None),
            Method(BEST_FIXED, self.built(fixed), None, f"{drafter} K={k}"),
            Method(ROUTER_ONLY, self.built(routed), self.router),
            Method(COLD, self.built(self.policy)),
            Method(ROUTED, self.built(self.policy), self.router),
        ]

    def players(self, rivals: Mapping[str, PolicyConfig]) -> list[Player]:
        """The policy and its rivals, each with every prior that changes what it chooses, and the
        policy as it learns from one answer to the next.
        """
        priors = {
            " cold": lambda case: None,
            " + population": self._prior(self.population),
            " + router": self._prior(self.router),
        }
        players = []
        for name, config in {"policy": self.policy, **rivals}.items():
            wanted = priors if config.uses_prior else {"": priors[" cold"]}
            for suffix, prior in wanted.items():
                if isinstance(config, RouterOnlyConfig) and suffix == " cold":
                    continue  # without a prior there is nothing to choose by
                players.append(Player(name + suffix, self.built(config), prior))
        if self.policy.learns_from_texts:
            for suffix in ("", " + router") if self.policy.uses_prior else ("",):
                learning = partial(_same, self.built(self.policy)())  # one for all answers
                prior = priors[suffix or " cold"]
                players.append(Player(f"policy{suffix} + experience", learning, prior))
        return players

    def _prior(self, router: Router) -> Callable[[Case], Prior | None]:
        @cache
        def prior(text: str, num_prompt_tokens: int, sampling: Sampling) -> Prior:
            return router.prior(text, num_prompt_tokens, sampling)

        return lambda case: prior(case.text, case.num_prompt_tokens, case.sampling)


def _same(policy: Policy) -> Policy:
    return policy


def open_bench(
    workspace: Workspace, laws: Sequence[str], lengths: Sequence[int], num_resamples: int
) -> Bench:
    """Load every part, each checked against the others, and choose the fixed arms."""
    pool, names = workspace.groups["pool"], list(workspace.groups["pool"].entries)
    target = load_target(workspace.groups["target"], workspace.runtime)
    encoder = SentenceEncoder(
        resolve_encoder(workspace.groups["encoder"]), workspace.runtime.resolved_device()
    )
    costs = read_costs(workspace.inputs["costs"], costs_key(target))
    frame = load_acceptance(workspace.inputs["acceptance"])
    return Bench(
        target=target,
        drafters=build_drafters(pool, target, workspace.inputs),
        costs=costs,
        router=load_router(workspace.inputs["router"], encoder, names),
        population=load_population(workspace.inputs["router"], names),
        policy=workspace.groups["policy"],
        frame=frame,
        fixed=choose_fixed(read_cases(frame, "router_train", names), costs, laws, lengths),
        draft_lengths=lengths,
        resampling=Resampling(num_resamples, workspace.seed),
        seed=workspace.seed,
    )


def choose_fixed(
    cases: Sequence[Case], costs: Costs, laws: Sequence[str], lengths: Sequence[int]
) -> dict[str, Arm]:
    """For each law the drafting arm that replays fastest on these answers, be it slower than
    plain.
    """
    chosen = {}
    for law in laws:
        tables = arm_tables([case for case in cases if case.law == law], costs, lengths)
        if not tables:
            raise ValueError(
                f"the acceptance artifact holds no answers of split router_train under law {law}; "
                "add the split to stages.collect.splits and the law to stages.regenerate.laws"
            )
        chosen[law] = best_arm(tables, allow_off=False)
    return chosen
