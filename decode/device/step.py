"""One step: look up, draft, score, verify, advance; every launch of it, captured as one graph."""

import os

import torch
from torch import Tensor

from decode.device.drafting import ModelDrafting
from decode.device.parts import DeviceModel
from decode.device.plan import Plan
from decode.device.state import DONE, DRAFTED, START, DeviceState
from decode.native.kernel_forward import KernelForward, Step
from kernels.coupled import enqueue as race
from kernels.drafts import keep_found
from kernels.inputs import Inputs
from kernels.launching import collected, compile_all
from kernels.step import advance, begin, present
from kernels.step_state import MODEL, NUM_FIELDS, NUM_MOMENTS, Drafting
from kernels.types import Verification
from kernels.verify import enqueue as verify


class DeviceStep:
    """The launches of a step of one shape. What changes from step to step lies on the device."""

    def __init__(
        self,
        plan: Plan,
        state: DeviceState,
        target: KernelForward,
        vocab_size: int,
        model: DeviceModel | None,
    ) -> None:
        self.plan, self.state = plan, state
        self._target, self._vocab_size, self._model = target, vocab_size, model

    def prepare(self) -> None:
        """Compile, on every core, what the step launches."""
        with collected() as launches:
            self.compute()
        compile_all(launches, self.state.device, os.cpu_count() or 1)

    def compute(self) -> Tensor:
        """Records [B * (NUM_FIELDS + K + 1)] int64 row after row, then the step's moments [4]."""
        plan, state, device = self.plan, self.state, self.state.device
        rows, most = plan.shape.num_rows, plan.shape.most_drafts
        state.mark_on_host(START)
        drafting = Drafting.new(rows, most, device)
        self._look_up(drafting)
        seen = self._seen()
        read, logits = None, None
        if plan.shape.model is not None and self._model is not None:
            read = state.read[plan.shape.model]
            by_model = ModelDrafting(plan, state, self._model, read, self._vocab_size)
            logits = by_model.run(drafting, seen)
        state.mark_on_host(DRAFTED)
        step = Step.unwritten(rows, most + 1, device)
        present(state.slots, plan.asked, drafting, step.token_ids, step.batch, state.stamped)
        scored = self._target.compute(step)
        assert scored is not None
        verification, errors = self._verify(scored.view(rows, most + 1, -1), drafting, logits, seen)
        size = rows * (NUM_FIELDS + most + 1) + NUM_MOMENTS
        records = torch.empty(size, dtype=torch.int64, device=device)
        advance(
            state.slots,
            plan.asked,
            drafting,
            verification.token_ids,
            verification.num_accepted,
            errors,
            state.eos,
            read,
            records,
            state.stamped,
        )
        state.mark_on_host(DONE)
        if state.stamped is None:
            records[-NUM_MOMENTS:] = state.moments
        return records

    def _look_up(self, drafting: Drafting) -> None:
        """Begin, and let each lookup find what follows in the rows that ask it."""
        plan, state, shape = self.plan, self.state, self.plan.shape
        lookups, rows, most = shape.lookups, shape.num_rows, shape.most_drafts
        wanted = torch.empty(len(lookups), rows, dtype=torch.int32, device=state.device)
        begin(state.slots, plan.asked, drafting, wanted, plan.race_words, state.stamped)
        if not lookups:
            return
        from kernels.lookup import look_up

        found = torch.empty(len(lookups), rows, most, dtype=torch.int32, device=state.device)
        num_found = torch.empty_like(wanted)
        for number, lookup in enumerate(lookups):
            look_up(
                state.slots.token_ids,
                state.slots.lengths,
                plan.asked.slots,
                wanted[number],
                lookup.min_ngram,
                lookup.max_ngram,
                lookup.min_match,
                lookup.max_offer,
                found[number],
                num_found[number],
                None if lookup.table is None else lookup.table.on(state.device),
            )
        keep_found(plan.asked, drafting, found, num_found)

    def _seen(self) -> Tensor | None:  # [B, V]
        """How often each token stands in the rows; None where no penalty asks for it."""
        counts = self.state.slots.counts
        if not self.plan.shape.rules.penalty or counts is None:
            return None
        return counts.index_select(0, self.plan.asked.slots)

    def _verify(
        self,
        scored: Tensor,  # [B, K + 1, V]
        drafting: Drafting,
        logits: Tensor | None,  # [B, K, V]
        seen: Tensor | None,
    ) -> tuple[Verification, Tensor]:
        """What is kept, and a flag [B] where the target's logits are no law."""
        plan, rules = self.plan, self.plan.shape.rules
        if rules.gumbel:
            inputs = Inputs.of_target(
                scored,
                drafting.drafts,
                num_draft_tokens=drafting.drafted,
                seen_token_counts=seen,
                **plan.law,  # type: ignore[arg-type]
            )
            return race(inputs, plan.race_words)
        inputs = Inputs(
            scored,
            drafting.drafts,
            logits,
            uniforms=plan.uniforms,
            num_draft_tokens=drafting.drafted,
            draft_is_one_hot=None if logits is None else drafting.sources != MODEL,
            seen_token_counts=seen,
            **plan.law,  # type: ignore[arg-type]
        )
        return verify(inputs, sampled=not rules.greedy)
