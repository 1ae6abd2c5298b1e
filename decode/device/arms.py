"""Which arm each row takes in a step: its policy's choice, and the one model that a step has."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from decode.device.members import Members
from decode.device.parts import DeviceLookup
from decode.device.rows import DeviceRow
from decode.loop import chosen
from decode.pool import Pool
from decode.types import MAX_DRAFT_TOKENS, OFF, Choice, JointPolicy, Sharing


@dataclass(frozen=True, slots=True)
class Arm:
    """A choice, and what it means on the device."""

    choice: Choice
    limit: int  # tokens to draft at most
    lookup: DeviceLookup | None  # is asked first
    model: int | None  # drafts where no lookup matched


SHARING = Sharing(padded=True, drafts_together=True)


def choose_arms(
    rows: Sequence[DeviceRow], joint: JointPolicy | None, pool: Pool, members: Members
) -> list[Arm]:
    """An arm for each row, with one model among them.

    Rows that chose another model than most wait: a lookup of theirs still drafts. The longer they
    have waited, the more they count.
    """
    offers = [_offers(row, pool, members) for row in rows]
    choices = chosen(joint, SHARING, [row.policy for row in rows], offers, pool)
    arms = [_arm(choice, members) for choice in choices]
    votes: Counter[int] = Counter()
    for row, arm in zip(rows, arms, strict=True):
        if arm.model is not None:
            votes[arm.model] += 1 + row.passed_over
    if len(votes) < 2:
        return arms
    model = max(votes, key=lambda number: votes[number])
    taken = []
    for row, arm in zip(rows, arms, strict=True):
        waits = arm.model is not None and arm.model != model
        row.passed_over = row.passed_over + 1 if waits else 0
        taken.append(_without_model(arm) if waits else arm)
    return taken


def _offers(row: DeviceRow, pool: Pool, members: Members) -> dict[str, int]:
    limit = min(row.most_draft_tokens, MAX_DRAFT_TOKENS)
    known = [name for name in members.parts if name in pool.drafters]
    return {name: members.offer(name, len(row.token_ids), limit) for name in known}


def _arm(choice: Choice, members: Members) -> Arm:
    if choice.drafter == OFF:
        return Arm(choice, 0, None, None)
    parts, length = members.parts[choice.drafter], choice.num_draft_tokens
    return Arm(choice, length, parts.lookup, members.model_of(choice.drafter))


def _without_model(arm: Arm) -> Arm:
    if arm.lookup is not None:
        return replace(arm, limit=min(arm.limit, arm.lookup.max_offer), model=None)
    choice = replace(
        arm.choice, drafter=OFF, num_draft_tokens=0, reason="another model drafts in this step"
    )
    return Arm(choice, 0, None, None)
