"""What replay says: the whole drafter x K grid, every policy, and the oracles, on recorded
acceptance.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decode.costs import Costs
from decode.results import ratio
from decode.types import Policy, Prior
from pipeline.intervals import Interval, ratio_of_rates
from pipeline.replay import (
    PLAIN,
    Arm,
    Case,
    Totals,
    add,
    arm_tables,
    best_arm,
    draws,
    realised,
    replay,
)
from pipeline.scores import ALL, HEADLINE_SPLIT, Resampling
from pipeline.training_data import lot

BEST_FIXED = "best fixed"
ORACLE_ARM = "oracle: best arm of each prompt"
HINDSIGHT = "oracle: best fixed arm of this split"

KNOWN, UNSEEN = 0, 1  # realisations: what oracles choose on, and what everything is scored on

PriorOf = Callable[[Case], Prior | None]


@dataclass(frozen=True, slots=True, eq=False)
class Player:
    """A policy with the prior that it is given."""

    name: str
    make_policy: Callable[[], Policy]
    prior: PriorOf


def limited(cases: Sequence[Case], per_domain: int) -> list[Case]:
    """The first `per_domain` prompts of each domain, under every law; 0: all."""
    known: dict[str, set[str]] = {}
    chosen = []
    for case in cases:
        ids = known.setdefault(case.domain, set())
        if not per_domain or len(ids) < per_domain or case.prompt_id in ids:
            ids.add(case.prompt_id)
            chosen.append(case)
    return chosen


def groups(cases: Sequence[Case]) -> dict[tuple[str, str], list[Case]]:
    """(law, domain) -> cases, as the scoreboard groups cells."""
    found: dict[tuple[str, str], list[Case]] = {}
    for law in dict.fromkeys(case.law for case in cases):
        members = [case for case in cases if case.law == law]
        headline = [case for case in members if case.split == HEADLINE_SPLIT]
        if headline:
            found[(law, ALL)] = headline
        for case in members:
            name = case.domain if case.split == HEADLINE_SPLIT else case.split
            found.setdefault((law, name), []).append(case)
    return found


def grid(
    cases: Sequence[Case], costs: Costs, lengths: Sequence[int], resampling: Resampling
) -> list[dict[str, Any]]:
    """Every (drafter, K) by law and domain: acceptance_length, break-even length, predicted
    speed.
    """
    rows = []
    found = arm_tables(cases, costs, lengths)
    tables = {id(case): table for case, table in zip(cases, found, strict=True)}
    for (law, domain), members in groups(cases).items():
        own = [tables[id(case)] for case in members]
        plain = [table[PLAIN] for table in own]
        for arm in own[0]:
            sums = [table[arm] for table in own]
            total, base = add(sums), add(plain)
            rows.append(
                {
                    "law": law,
                    "domain": domain,
                    "drafter": arm[0],
                    "num_draft_tokens": arm[1],
                    "acceptance_length": ratio(total.tokens, total.passes),
                    "tokens_per_second": ratio(total.tokens, total.seconds),
                    "break_even_length": ratio(
                        ratio(total.seconds, total.passes), ratio(base.seconds, base.passes)
                    ),
                    "share_of_steps_off": ratio(total.steps_off, total.passes),
                    "speed_ratio": _speed(sums, plain, resampling).plain(),
                }
            )
    return rows


def play(
    cases: Sequence[Case],
    players: Sequence[Player],
    fixed: Mapping[str, Arm],  # by law, chosen on other prompts
    costs: Costs,
    lengths: Sequence[int],
    resampling: Resampling,
) -> list[dict[str, Any]]:
    """Every policy and oracle by law and domain, each against plain decoding and the best fixed
    arm.

    Answers come in an order that mixes domains, for players that learn from one to the next. An
    oracle's arm is chosen on one realisation of the acceptances and scored on another, on which
    the policies play too. At temperature 0 the two are equal: there the oracle is exact hindsight.
    """
    tables = _tables(cases, costs, lengths, resampling.seed)
    totals: dict[str, dict[int, Totals]] = {}
    for case in sorted(cases, key=lambda case: lot(f"replay:{case.prompt_id}:{case.law}")):
        known, unseen = tables[id(case)]
        held = {
            "plain": unseen[PLAIN],
            BEST_FIXED: unseen[fixed[case.law]],
            ORACLE_ARM: unseen[best_arm([known], allow_off=True)],
        }
        outcomes = draws(case, resampling.seed, UNSEEN)
        for player in players:
            held[player.name] = replay(
                case, player.make_policy(), costs, outcomes, player.prior(case)
            )
        for name, total in held.items():
            totals.setdefault(name, {})[id(case)] = total
    rows = []
    for (law, domain), members in groups(cases).items():
        ours = {name: [held[id(case)] for case in members] for name, held in totals.items()}
        arm = best_arm([tables[id(case)][0] for case in members], allow_off=True)
        ours[HINDSIGHT] = [tables[id(case)][1][arm] for case in members]
        rows += [
            {"law": law, "domain": domain, "policy": name, **_row(name, ours, resampling)}
            for name in ours
        ]
    return rows


def _tables(
    cases: Sequence[Case], costs: Costs, lengths: Sequence[int], seed: int
) -> dict[int, tuple[dict[Arm, Totals], dict[Arm, Totals]]]:
    """Every arm of each case on the realisation that oracles choose on, and on the one that all are
    scored on.
    """
    known, unseen = (
        arm_tables([realised(case, draws(case, seed, repeat)) for case in cases], costs, lengths)
        for repeat in (KNOWN, UNSEEN)
    )
    places = map(id, cases)
    return {place: (one, other) for place, one, other in zip(places, known, unseen, strict=True)}


def _row(name: str, ours: Mapping[str, list[Totals]], resampling: Resampling) -> dict[str, Any]:
    total = add(ours[name])
    rates = {key: ratio(add(ours[key]).tokens, add(ours[key]).seconds) for key in ours}
    to_oracle = rates[ORACLE_ARM] - rates[BEST_FIXED]
    return {
        "tokens_per_second": rates[name],
        "acceptance_length": ratio(total.tokens, total.passes),
        "share_of_steps_off": ratio(total.steps_off, total.passes),
        "speed_ratio": _speed(ours[name], ours["plain"], resampling).plain(),
        "ratio_to_best_fixed": _speed(ours[name], ours[BEST_FIXED], resampling).plain(),
        "oracle_gap_closed": ratio(rates[name] - rates[BEST_FIXED], max(to_oracle, 0.0)),
    }


def _speed(ours: Sequence[Totals], base: Sequence[Totals], resampling: Resampling) -> Interval:
    return ratio_of_rates(
        [total.tokens for total in ours],
        [total.seconds for total in ours],
        [total.tokens for total in base],
        [total.seconds for total in base],
        resampling.num_resamples,
        resampling.seed,
    )
