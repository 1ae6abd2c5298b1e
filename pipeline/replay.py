"""Decoding without a target: policies, arms and oracles on recorded acceptance and measured costs.

Every answer knows, for every drafter, start and depth, the chance that a draft there is accepted
given that those before it were. A step of an arm from start t therefore has a known law of
outcomes, and a known price. Arms are summed exactly over that law; a policy walks one realisation
of it, in which every drafter's chances share the same seeded draws, so that policies differ by
their choices only. At temperature 0 chances are 0 or 1 and every realisation is the same.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from decode.costs import Costs
from decode.types import OFF, Policy, Prior, Request, Sampling, StepRecord

if TYPE_CHECKING:
    import pandas as pd

Arm = tuple[str, int]
PLAIN: Arm = (OFF, 0)
CASES_AT_ONCE = 128


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One recorded answer and what every drafter would have had accepted."""

    prompt_id: str
    split: str
    domain: str
    text: str
    law: str
    sampling: Sampling
    num_prompt_tokens: int
    num_tokens: int  # A
    accept: Mapping[str, np.ndarray]  # drafter -> [A, D]; NaN: no proposal


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the steps of one answer; expectations where an arm was summed over its law."""

    tokens: float
    passes: float
    seconds: float
    draft_seconds: float = 0.0
    steps_off: float = 0.0


def read_cases(frame: "pd.DataFrame", split: str, drafters: Sequence[str]) -> list[Case]:
    """The answers of a split that all `drafters` were scored on, in the order of the file."""
    cases = []
    rows = frame[(frame["split"] == split) & frame["drafter"].isin(drafters)]
    for _, group in rows.groupby(["prompt_id", "law"], sort=False):
        accept = dict(zip(group["drafter"], group["accept"], strict=True))
        if set(accept) != set(drafters) or int(group["num_tokens"].iloc[0]) == 0:
            continue
        first = group.iloc[0]
        cases.append(
            Case(
                prompt_id=str(first["prompt_id"]),
                split=split,
                domain=str(first["domain"]),
                text=str(first["text"]),
                law=str(first["law"]),
                sampling=Sampling(temperature=float(first["temperature"])),
                num_prompt_tokens=int(first["num_prompt_tokens"]),
                num_tokens=int(first["num_tokens"]),
                accept={name: accept[name].astype(np.float64) for name in drafters},
            )
        )
    return cases


# ------------------------------------------------------------------------------------------------ a


def arm_totals(case: Case, costs: Costs, lengths: Sequence[int]) -> dict[Arm, Totals]:
    """What every (drafter, K), and plain decoding, takes for this answer."""
    return arm_tables([case], costs, lengths)[0]


def arm_tables(
    cases: Sequence[Case], costs: Costs, lengths: Sequence[int]
) -> list[dict[Arm, Totals]]:
    """arm_totals of every case, many at once."""
    tables: list[dict[Arm, Totals]] = [{} for _ in cases]
    order = sorted(  # of one law, whose costs they share, and of like lengths: little padding
        range(len(cases)), key=lambda place: (cases[place].sampling.greedy, cases[place].num_tokens)
    )
    for _, places in groupby(order, key=lambda place: cases[place].sampling.greedy):
        alike = list(places)
        for low in range(0, len(alike), CASES_AT_ONCE):
            some = alike[low : low + CASES_AT_ONCE]
            found = _tables([cases[place] for place in some], costs, lengths)
            for place, table in zip(some, found, strict=True):
                tables[place] = table
    return tables


def _tables(cases: Sequence[Case], costs: Costs, lengths: Sequence[int]) -> list[dict[Arm, Totals]]:
    """Of cases under one law."""
    costs = costs.under(cases[0].sampling)
    tables: list[dict[Arm, Totals]] = []
    for case in cases:
        tokens = float(case.num_tokens)
        tables.append({PLAIN: Totals(tokens, tokens, tokens * costs.plain_seconds, 0.0, tokens)})
    for name in cases[0].accept:
        sums = expected_sums([case.accept[name] for case in cases], name, costs, lengths)
        for case, table, of_case in zip(cases, tables, sums, strict=True):
            for length, figures in zip(lengths, of_case.tolist(), strict=True):
                table[(name, length)] = Totals(float(case.num_tokens), *figures)
    return tables


def expected_sums(
    accepts: Sequence[np.ndarray], drafter: str, costs: Costs, lengths: Sequence[int]
) -> np.ndarray:  # [P] of [A, D] -> [P, L, 4]
    """Expected passes, seconds, draft seconds and undrafted steps of each answer, for each K.

    value(t) = own(t) + sum_n P(n accepted at t) value(t + n + 1), from the last token backwards.
    """
    num_tokens = np.array([len(accept) for accept in accepts])  # [P]
    depth, longest = accepts[0].shape[1], int(num_tokens.max())
    most = np.minimum(np.asarray(lengths), depth)  # [L]
    chances = np.zeros((len(accepts), longest, depth + 1))  # the last depth: nothing is drafted
    offered = np.zeros((len(accepts), longest), dtype=int)
    for place, accept in enumerate(accepts):
        chances[place, : len(accept), :depth] = np.nan_to_num(accept, nan=0.0)
        offered[place, : len(accept)] = offered_lengths(accept)
    prices = np.array([costs.step_seconds(drafter, k) for k in range(depth + 1)])
    drafts = np.array([costs.draft(drafter, k) for k in range(depth + 1)])
    own = np.stack([np.ones(depth + 1), prices, drafts, np.arange(depth + 1) == 0], axis=1)
    value = np.zeros((len(accepts), longest + depth + 1, len(most), 4))
    outcomes = np.arange(depth + 1)
    for start in range(longest - 1, -1, -1):
        here = chances[:, start]  # [P, D + 1]
        reach = np.concatenate([np.ones((len(here), 1)), here[:, :-1].cumprod(axis=1)], axis=1)
        drafted = np.minimum(most, offered[:, start, None])  # [P, L]
        ends = outcomes == drafted[..., None]  # all accepted; [P, L, D + 1]
        stops = (outcomes < drafted[..., None]) * (1 - here)[:, None]
        after = value[:, start + 1 : start + depth + 2]  # [P, D + 1, L, 4]
        later = np.einsum("pln,pnlv->plv", reach[:, None] * (ends + stops), after)
        is_inside = start < num_tokens[:, None, None]
        value[:, start] = np.where(is_inside, own[drafted] + later, 0.0)
    return value[:, 0]


def offered_lengths(accept: np.ndarray) -> np.ndarray:  # [A, D] -> [A]
    """Most tokens worth drafting at each start: what is proposed there, and none for the last
    token.
    """
    proposed = (~np.isnan(accept)).cumprod(axis=1).sum(axis=1)
    return np.minimum(proposed, np.arange(len(accept) - 1, -1, -1))


def add(totals: Iterable[Totals]) -> Totals:
    """The sums of several answers."""
    rows = list(totals)
    return Totals(
        *(sum(getattr(row, name) for row in rows) for name in Totals.__dataclass_fields__)
    )


def best_arm(tables: Sequence[Mapping[Arm, Totals]], *, allow_off: bool) -> Arm:
    """The arm with the most tokens per second over all answers; ties go to the shorter draft."""
    arms = [arm for arm in tables[0] if allow_off or arm != PLAIN]
    sums = {arm: add(table[arm] for table in tables) for arm in arms}
    finite = [arm for arm in arms if np.isfinite(sums[arm].seconds)]
    if not finite:
        raise ValueError("no arm has finite costs; run stage=profile force=true")
    return max(finite, key=lambda arm: (sums[arm].tokens / sums[arm].seconds, -arm[1]))


# -------------------------------------------------------------------------------------------- polic


def draws(case: Case, seed: int, repeat: int) -> dict[str, np.ndarray]:
    """Whether each draft is accepted in one realisation: drafter -> [A, D] bool. Greedy: the same
    in all.
    """
    outcomes = {}
    for name, accept in case.accept.items():
        text = f"{seed}/{case.prompt_id}/{case.law}/{repeat}/{name}"
        key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")
        uniforms = np.random.default_rng(key).random(accept.shape)
        outcomes[name] = uniforms < np.nan_to_num(accept, nan=0.0)
    return outcomes


def realised(case: Case, outcomes: Mapping[str, np.ndarray]) -> Case:
    """The case with its chances replaced by what one realisation made of them."""
    accept = {
        name: np.where(np.isnan(chances), np.nan, outcomes[name])
        for name, chances in case.accept.items()
    }
    return replace(case, accept=accept)


def replay(
    case: Case,
    policy: Policy,
    costs: Costs,
    outcomes: Mapping[str, np.ndarray],
    prior: Prior | None = None,
    record: Callable[[StepRecord], None] | None = None,
) -> Totals:
    """One answer decoded by a policy, each step at its measured price."""
    costs = costs.under(case.sampling)
    request_id = f"{case.prompt_id}/{case.law}"
    session = policy.open(
        Request(request_id, case.num_prompt_tokens, case.num_tokens, case.sampling, prior)
    )
    offered = {name: offered_lengths(accept) for name, accept in case.accept.items()}
    start = passes = steps_off = 0
    seconds = draft_seconds = 0.0
    while start < case.num_tokens:
        offers = {name: int(row[start]) for name, row in offered.items()}
        choice = session.choose(offers)
        k = min(choice.num_draft_tokens, offers.get(choice.drafter, 0))
        accepted = int(outcomes[choice.drafter][start, :k].cumprod().sum()) if k else 0
        draft = costs.draft(choice.drafter, k) if k else 0.0
        step = StepRecord(
            request_id=request_id,
            step=passes,
            position=case.num_prompt_tokens + start,
            drafter=choice.drafter if k else OFF,
            source=choice.drafter if k else "",
            num_draft_tokens=k,
            num_drafted=k,
            num_accepted=accepted,
            num_emitted=accepted + 1,
            draft_seconds=draft,
            verify_seconds=costs.verify(k + 1),
            host_seconds=costs.host_seconds,
            reason=choice.reason,
            expected_tokens=choice.expected_tokens,
            expected_seconds=choice.expected_seconds,
        )
        session.learn(step)
        if record is not None:
            record(step)
        start += accepted + 1
        passes += 1
        steps_off += k == 0
        seconds += step.seconds
        draft_seconds += draft
    return Totals(float(case.num_tokens), passes, seconds, draft_seconds, steps_off)
