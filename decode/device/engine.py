"""The loop of decode.loop with the host one step behind: it queues step n + 1, then reads step n.

A step is one captured graph (decode.device.step). The host sends what it decided in one copy and
gets the records in another; it waits for the records of step n while step n + 1 runs. A policy's
choice for step n + 1 therefore knows the results through n - 1. Verified tokens, rollback, EOS and
budgets are the device's affair; stop strings are the host's, which drops what came after one.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from decode.clock import Clock
from decode.device.arms import Arm, choose_arms
from decode.device.members import Members
from decode.device.parts import DeviceParts
from decode.device.plan import CATCH_UPS, RowPlan, Rules, Shape
from decode.device.records import RowResult, draft_shares, make_record, row_results, step_seconds
from decode.device.rows import DeviceRow, QueuedStep, RowStep
from decode.device.shared import shared_steps
from decode.native.kernel_forward import BATCHES, WIDTHS, bucket
from decode.native.static_cache import StaticRow
from decode.native.target import NativeTarget
from decode.noise import Noise
from decode.pool import Pool
from decode.sampling import NO_LAW
from decode.stopping import Stopper
from decode.types import MAX_DRAFT_TOKENS, JointPolicy, Policy, Request
from kernels.step_state import READING

MOST_ROWS = BATCHES[-1]
NUM_DRAFTS = [width - 1 for width in WIDTHS if width <= MAX_DRAFT_TOKENS + 1]


class DeviceEngine:
    """Decodes rows step by step, as decode.loop.Loop does; rows may join and leave between."""

    most_rows = MOST_ROWS
    verifier_name = "triton"

    def __init__(
        self,
        target: NativeTarget,
        pool: Pool,
        parts: dict[str, DeviceParts],
        policy: Policy | None,
        clock: Clock,
        coupling: str,
    ) -> None:
        assert target.kernel_forward is not None
        self.target, self.pool, self.policy, self.parts = target, pool, policy, parts
        self.joint = policy if isinstance(policy, JointPolicy) else None
        self.members = Members.of(parts)
        self.gumbel = coupling == "gumbel"
        self.forward = target.kernel_forward
        self._shared = shared_steps(target, self.members.models, clock)
        self.state, self.steps = self._shared.state, self._shared.steps
        self._under_way: deque[QueuedStep] = deque()
        self._ended: int | None = None  # when the last step that was taken in had ended

    def serves(self, parts: Mapping[str, DeviceParts]) -> bool:
        """Whether it was made of these parts; of fewer, where a drafter has been dropped."""
        return all(self.parts.get(name) is part for name, part in parts.items())

    @torch.inference_mode()
    def open(
        self, request: Request, prompt: Sequence[int], stopper: Stopper, noise: Noise
    ) -> DeviceRow:
        """A row whose prompt is being read, all but its last token."""
        request = replace(request, unsure=self.members.unsure)
        place = self.forward.open()
        place.reserve(len(prompt))
        counted = request.sampling.repetition_penalty != 1
        self.state.fit(counted)
        self.state.mark_prompt(place.slot, end=False)
        if len(prompt) > 1:
            self.target.prefill(place, prompt[:-1])
        self.state.admit(place.slot, prompt, stopper.most_draft_tokens + 1, counted)
        self.state.mark_prompt(place.slot, end=True)
        return DeviceRow(
            request=request,
            token_ids=list(prompt),
            stopper=stopper,
            noise=noise,
            key=noise.race_key(request.request_id) if self.gumbel else (0, 0),
            policy=None if self.policy is None else self.policy.open(request),
            target=place,
        )

    @torch.inference_mode()
    def step(self, rows: Sequence[DeviceRow]) -> None:
        """Queue a step for the rows that go on, and take in the one before it."""
        rows = [row for row in rows if row.goes_on]
        if rows:
            self._queue(rows)
        if self._under_way and (len(self._under_way) > 1 or not rows):
            self._take_in(self._under_way.popleft())

    def _queue(self, rows: list[DeviceRow]) -> None:
        arms = choose_arms(rows, self.joint, self.pool, self.members)
        self._make_room(rows, arms)
        read_ahead = self._read_ahead(rows, arms)
        ending = all(row.most_draft_tokens < MAX_DRAFT_TOKENS for row in rows)
        shape = self.steps.fitting(self._shape(rows, arms), ending)
        plans = [self._plan(row, arm, shape) for row, arm in zip(rows, arms, strict=True)]
        arrival = self.steps.queue(shape, plans)
        steps, continues = [], any(row.under_way for row in rows)
        for row, arm in zip(rows, arms, strict=True):
            steps.append(RowStep(arm.choice, arm.limit, arm.model, arm.lookup is not None))
            row.under_way.append(steps[-1])
            row.num_queued += 1
        self._under_way.append(
            QueuedStep(rows, steps, shape.most_drafts, continues, read_ahead, arrival)
        )

    def _make_room(self, rows: Sequence[DeviceRow], arms: Sequence[Arm]) -> None:
        """Have caches and state reach as far as this step may write."""
        longest = max(row.most_tokens for row in rows) + MAX_DRAFT_TOKENS + 1
        self.forward.cache.reserve(num_tokens=min(longest, self.target.max_context))
        self.state.fit(any(row.request.sampling.repetition_penalty != 1 for row in rows))
        for row, arm in zip(rows, arms, strict=True):
            if arm.model is not None:
                forward = self.members.models[arm.model].forward
                if arm.model not in row.models:
                    row.models[arm.model] = forward.open()
                most = forward.architecture.max_context
                forward.cache.reserve(num_tokens=min(longest, most))

    def _read_ahead(self, rows: Sequence[DeviceRow], arms: Sequence[Arm]) -> bool:
        """Let the model read what is too much for its first pass, as far as the host knows it."""
        places: list[StaticRow] = []
        tokens: list[list[int]] = []
        for row, arm in zip(rows, arms, strict=True):
            if arm.model is None or row.most_unread(arm.model) <= CATCH_UPS[-1]:
                continue
            model, place = self.members.models[arm.model], row.models[arm.model]
            unread = row.token_ids[place.length : -1]
            if unread and len(row.token_ids) <= model.max_context:
                places.append(place)
                tokens.append(unread)
        if not places:
            return False
        self.state.mark(READING)
        model.forward(places, tokens, with_logits=False)
        return True

    def _shape(self, rows: Sequence[DeviceRow], arms: Sequence[Arm]) -> Shape:
        """The shape of a step that holds all arms."""
        pairs = [(row, arm) for row, arm in zip(rows, arms, strict=True) if arm.model is not None]
        unread = [row.most_unread(arm.model) for row, arm in pairs if arm.model is not None]
        lookups = {arm.lookup for arm in arms if arm.lookup is not None}
        return Shape(
            num_rows=bucket(len(rows), BATCHES),
            most_drafts=bucket(max(arm.limit for arm in arms), NUM_DRAFTS),
            model=pairs[0][1].model if pairs else None,
            model_drafts=max((arm.limit for _, arm in pairs), default=0),
            catch_up=bucket(min(max(unread), CATCH_UPS[-1]), CATCH_UPS) if pairs else 0,
            lookups=tuple(sorted(lookups, key=repr)),
            rules=Rules.of([row.request.sampling for row in rows], self.gumbel),
        )

    def _plan(self, row: DeviceRow, arm: Arm, shape: Shape) -> RowPlan:
        law, request_id = row.request.sampling, row.request.request_id
        by_chance = not law.greedy and not self.gumbel
        place = None if arm.model is None else row.models[arm.model]
        assert row.target is not None
        return RowPlan(
            slot=row.target.slot,
            sampling=law,
            limit=arm.limit,
            lookup=-1 if arm.lookup is None else shape.lookups.index(arm.lookup),
            by_model=place is not None,
            model_slot=0 if place is None else place.slot,
            read=0 if place is None else place.length,
            uniforms=row.noise.uniforms(request_id, row.num_queued, "verify", shape.most_drafts + 1)
            if by_chance
            else (),
            draft_uniforms=row.noise.uniforms(request_id, row.num_queued, "draft", arm.limit)
            if by_chance and place is not None
            else (),
            key=row.key,
        )

    def _take_in(self, step: QueuedStep) -> None:
        """Give each row what a step emitted, and its policy the record."""
        numbers = step.arrival.wait()
        results = row_results(step, numbers)
        seconds, self._ended = step_seconds(step, numbers, results, self._ended)
        count, shares = len(step.rows), draft_shares(step.steps, seconds.draft)
        spare = seconds.draft if not any(shares) else 0.0  # nobody drafted: all is the target's
        if count > 1 and self.joint is not None:
            sessions = [row.policy for row in step.rows if row.policy is not None]
            positions = count * (step.num_drafts + 1)
            self.joint.learn_together(sessions, positions, seconds.verify + spare)
        for row, one, result, share in zip(step.rows, step.steps, results, shares, strict=True):
            row.under_way.popleft()
            if row.stopper.finish_reason is not None:
                continue  # it ended in the step before, when this one was queued already
            self._check(row, one, result)
            if not row.records:
                row.prefill_seconds = result.prefill_seconds
            if one.model is not None and result.model_read is not None and row.models:
                place = row.models[one.model]
                place.length = max(place.length, result.model_read)
            token_ids = result.token_ids
            kept = token_ids[: row.stopper.push(token_ids)]
            row.token_ids.extend(kept)
            record = make_record(
                row,
                one,
                result,
                len(kept),
                self.members,
                share,
                (seconds.verify + spare) / count,
                seconds.host / count,
            )
            row.records.append(record)
            if row.policy is not None:
                row.policy.learn(record)
            if row.stopper.finish_reason is not None:
                row.release()

    def _check(self, row: DeviceRow, step: RowStep, result: RowResult) -> None:
        """Raise where the target's law is none, and drop a drafter whose law is none."""
        if result.broken:
            raise ValueError(
                f"the target's logits for request {row.request.request_id} hold NaN or +inf, or "
                "are -inf throughout; check the model's weights and its dtype"
            )
        assert result.token_ids, "a row that goes on gets a token a step"
        if result.failed and step.choice.drafter in self.pool.drafters:
            self.pool.drop(step.choice.drafter, ValueError(NO_LAW))
