"""A model's drafts on the device: a first pass over what it has not read, then token by token.

A draft is drawn as verification assumes: from the processed law of the model's logits, which is
what verifying no drafts at all against these logits yields.
"""

import torch
from torch import Tensor

from decode.device.parts import DeviceModel
from decode.device.plan import Plan
from decode.device.state import DeviceState
from decode.native.kernel_forward import ALIGNED, Step
from kernels.coupled import enqueue as race
from kernels.drafts import catch_up, take
from kernels.inputs import Inputs
from kernels.step_state import Drafting
from kernels.verify import enqueue as draw


class ModelDrafting:
    """The launches by which one model drafts in a step of one shape."""

    def __init__(
        self, plan: Plan, state: DeviceState, model: DeviceModel, read: Tensor, vocab_size: int
    ) -> None:
        self._plan, self._state, self._model, self._read = plan, state, model, read
        self._vocab_size = vocab_size
        self._rules = plan.shape.rules
        # The model's columns are enough where nothing is asked of the target's.
        self._in_columns = self._rules.greedy and not self._rules.penalty

    def run(self, drafting: Drafting, seen: Tensor | None) -> Tensor | None:  # [B, K, V]
        """Draft for the rows that nothing was found for; the raw logits where verification asks."""
        shape, forward = self._plan.shape, self._model.forward
        rows, device = shape.num_rows, self._state.device
        wanted = torch.empty(rows, dtype=torch.int32, device=device)
        first = Step.unwritten(rows, shape.catch_up, device)
        last = torch.zeros(rows, dtype=torch.int64, device=device)  # places, even unwritten
        # Where no row drafts, as when lookups found something for all, weights are not read.
        depths = torch.zeros(shape.model_drafts, ALIGNED, dtype=torch.int32, device=device)
        limit = min(self._model.max_context, forward.architecture.max_context)
        catch_up(
            self._state.slots,
            self._plan.asked,
            drafting,
            self._read,
            wanted,
            first.token_ids,
            first.batch,
            last,
            depths,
            shape.model_drafts,
            limit,
        )
        held = self._held()
        seen = None if seen is None else seen.clone()  # the drafts are seen while drafting only
        following = Step.unwritten(rows, 1, device)
        logits = forward.compute(first, only=last, wanted=depths[0, :1])
        for depth in range(shape.model_drafts):
            assert logits is not None
            drawn, errors = self._draw(logits, depth, held, seen)
            take(
                self._state.slots,
                self._plan.asked,
                drafting,
                depth,
                wanted,
                drawn,
                errors,
                self._model.draft_ids if self._in_columns else None,
                following.token_ids,
                following.batch,
                seen,
            )
            if depth + 1 < shape.model_drafts:
                logits = forward.compute(following, wanted=depths[depth + 1, :1])
        return None if self._rules.greedy or self._rules.gumbel else held

    def _held(self) -> Tensor | None:
        """Where logits are kept in the target's columns; where no draft needs another's, one."""
        if self._in_columns:
            return None
        shape = self._plan.shape
        depths = 1 if self._rules.greedy or self._rules.gumbel else shape.most_drafts
        dtype = self._model.forward.weights.embedding.dtype
        return torch.empty(
            shape.num_rows, depths, self._vocab_size, dtype=dtype, device=self._state.device
        )

    def _draw(
        self, logits: Tensor, depth: int, held: Tensor | None, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Ids [B, 1], and a flag [B] where the logits [B, C] are no law."""
        if held is not None:
            logits = self._widen(logits, held[:, min(depth, held.shape[1] - 1)])
        else:
            logits = logits[:, : self._vocab_size]
        plan = self._plan
        no_drafts = torch.empty(len(logits), 0, dtype=torch.int32, device=logits.device)
        if self._rules.gumbel:
            inputs = Inputs.of_target(
                logits[:, None],
                no_drafts,
                num_draft_tokens=None,
                seen_token_counts=seen,
                **plan.law,  # type: ignore[arg-type]
            )
            words = plan.race_words.clone()
            words[:, 2] += depth
            verification, errors = race(inputs, words)
        else:
            inputs = Inputs(
                logits[:, None],
                no_drafts,
                None,
                uniforms=plan.draft_uniforms(depth),
                num_draft_tokens=None,
                draft_is_one_hot=None,
                seen_token_counts=seen,
                **plan.law,  # type: ignore[arg-type]
            )
            verification, errors = draw(inputs, sampled=not self._rules.greedy)
        return verification.token_ids, errors

    def _widen(self, logits: Tensor, out: Tensor) -> Tensor:  # [B, C] -> [B, V]
        """The logits in the target's columns, -inf where the model has none."""
        ids, columns = self._model.draft_ids, min(logits.shape[1], self._vocab_size)
        if ids is None:
            out[:, :columns].copy_(logits[:, :columns])
            out[:, columns:].fill_(-torch.inf)
        else:
            out.fill_(-torch.inf)
            out.index_copy_(1, ids, logits)
        return out
