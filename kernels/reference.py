r"""The specification of verification: PyTorch, float64 inside, one position after another.

For one row of the batch let p_i be the target's processed law after the draft prefix x_0..x_{i-1},
and q_i the drafter's (kernels/laws.py). Draft x_i is kept iff u_i q_i(x_i) < p_i(x_i). At the first
position n that is not kept, one token is drawn from the residual

    r(v) = max(p_n(v) - q_n(v), 0) / sum_w max(p_n(w) - q_n(w), 0),

and after the last draft from p_n itself, by inverse CDF in token-id order at u_K. What comes out
follows the target's law for any q (arXiv 2211.17192, theorem 1). A one-hot row has
q_i(v) = [v = x_i].
"""

import torch
from torch import Tensor

from kernels.inputs import Inputs
from kernels.laws import inverse_cdf, penalised, processed_probs, unless_neutral
from kernels.types import Verification

__all__ = ["inverse_cdf", "processed_probs", "verify"]

# Two equal laws may differ by rounding, some 1e-15 in all; a residual below this is none.
NO_RESIDUAL = 1e-12


def verify(
    target_logits: Tensor,  # [B, K + 1, V] raw
    draft_token_ids: Tensor,  # [B, K]; the first -1 ends a row's draft
    draft_logits: Tensor | None,  # [B, K, V] raw; None: every row was drafted without chance
    *,
    temperature: Tensor,  # [B]; 0: greedy
    uniforms: Tensor,  # [B, K + 1] in [0, 1); the last one draws the recovered or bonus token
    num_draft_tokens: Tensor | None = None,  # [B]; K
    draft_is_one_hot: Tensor | None = None,  # [B] bool; draft_logits is None
    top_k: Tensor | None = None,  # [B]
    top_p: Tensor | None = None,  # [B]
    min_p: Tensor | None = None,  # [B]
    repetition_penalty: Tensor | None = None,  # [B]
    seen_token_counts: Tensor | None = None,  # [B, V]; None: nothing was seen before the draft
) -> Verification:
    """The tokens that each row keeps, distributed as the target's own.

    Rows of logits beyond a row's draft are never looked at. Raises ValueError for a row in use that
    is no law (NaN, +inf, or -inf throughout), naming it, and for a shape, device or value that
    does not fit.
    """
    inputs = Inputs(
        target_logits,
        draft_token_ids,
        draft_logits,
        temperature,
        uniforms,
        num_draft_tokens,
        draft_is_one_hot,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        seen_token_counts,
    )
    inputs.check_values()
    return _Verifier(inputs).run()


class _Verifier:
    """One call: walks the positions, and at each one only the rows that are still undecided."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        batch, num_draft, _ = inputs.sizes
        self.device = inputs.target_logits.device
        self.temperature = inputs.temperature.to(self.device)
        self.all_greedy = bool((self.temperature == 0).all())
        self.lengths = inputs.draft_lengths()
        self.one_hot = inputs.one_hot()
        self.uniforms = inputs.uniforms.double()
        self.penalties = unless_neutral(inputs.repetition_penalty, 1)
        self.seen = None
        if self.penalties is not None:
            counts = inputs.seen_token_counts
            nothing = torch.zeros(batch, inputs.sizes[2], dtype=torch.bool, device=self.device)
            self.seen = nothing if counts is None else counts > 0
        self.found = Verification.blank(batch, num_draft + 1, self.device)

    def run(self) -> Verification:
        rows = torch.arange(len(self.lengths), device=self.device)
        for position in range(self.inputs.sizes[1] + 1):
            rows = self._step(rows, position)
            if len(rows) == 0:
                break
        return self.found

    def _step(self, rows: Tensor, position: int) -> Tensor:
        """Decide one position of the rows given; returns those whose draft goes on."""
        drafted = position < self.lengths[rows]
        drafts = self._drafts(rows, position)
        if self.all_greedy:
            token_ids, target_probs, draft_probs = self._greedy(rows, drafted, drafts, position)
            accepted = drafted & (token_ids == drafts)
        else:
            target = self._law(self.inputs.target_logits, rows, position)
            draft = self._draft_law(rows, drafted, drafts, position)
            draft_probs, target_probs = _at(draft, drafts), _at(target, drafts)
            accepted = drafted & (self.uniforms[rows, position] * draft_probs < target_probs)
            token_ids = drafts
            if not bool(accepted.all()):
                drawn = inverse_cdf(_residual(target, draft), self.uniforms[rows, -1])
                token_ids = torch.where(accepted, drafts, drawn)
            draft_probs, target_probs = _at(draft, token_ids), _at(target, token_ids)
        self.found.token_ids[rows, position] = token_ids
        self.found.num_accepted[rows] += accepted
        self.found.target_logprobs[rows, position] = target_probs.log().float()
        draft_logprobs = torch.where(drafted, draft_probs, 1).log()  # no draft at a bonus token
        self.found.draft_logprobs[rows, position] = draft_logprobs.float()
        if self.seen is not None:
            self.seen[rows[accepted], drafts[accepted]] = True  # counts grow along the draft prefix
        return rows[accepted]

    def _greedy(
        self, rows: Tensor, drafted: Tensor, drafts: Tensor, position: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The target's argmax and its mass under both one-hot laws, without building either."""
        token_ids = self._argmax(self.inputs.target_logits, rows, position)
        proposed = drafts
        asks = drafted & ~self.one_hot[rows]
        if bool(asks.any()):
            assert self.inputs.draft_logits is not None
            proposed = drafts.masked_scatter(
                asks, self._argmax(self.inputs.draft_logits, rows[asks], position)
            )
        ones = torch.ones(len(rows), dtype=torch.float64, device=self.device)
        return token_ids, ones, (token_ids == proposed).double()

    def _argmax(self, logits: Tensor, rows: Tensor, position: int) -> Tensor:
        return penalised(_rows_at(logits, rows, position), *self._penalty(rows)).argmax(-1)

    def _law(self, logits: Tensor, rows: Tensor, position: int) -> Tensor:
        given = self.inputs
        top_k, top_p, min_p = (
            None if x is None else x[rows.to(x.device)]
            for x in (given.top_k, given.top_p, given.min_p)
        )
        return processed_probs(
            _rows_at(logits, rows, position),
            self.temperature[rows],
            top_k,
            top_p,
            min_p,
            *self._penalty(rows),
        )

    def _draft_law(self, rows: Tensor, drafted: Tensor, drafts: Tensor, position: int) -> Tensor:
        """The laws [N, V] of the drafts; zero where nothing was drafted."""
        asks = drafted & ~self.one_hot[rows]
        if bool(asks.all()):
            assert self.inputs.draft_logits is not None
            return self._law(self.inputs.draft_logits, rows, position)
        law = torch.zeros(len(rows), self.inputs.sizes[2], dtype=torch.float64, device=self.device)
        law.scatter_(-1, drafts[:, None], drafted.double()[:, None])
        if bool(asks.any()):
            assert self.inputs.draft_logits is not None
            law[asks] = self._law(self.inputs.draft_logits, rows[asks], position)
        return law

    def _drafts(self, rows: Tensor, position: int) -> Tensor:
        """Draft ids [N] at a position; any valid id where nothing was drafted."""
        if position == self.inputs.sizes[1]:
            return torch.zeros_like(rows)
        drafted = position < self.lengths[rows]
        return self.inputs.draft_token_ids[rows, position].long().masked_fill(~drafted, 0)

    def _penalty(self, rows: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self.seen is None or self.penalties is None:
            return None, None
        return self.penalties[rows.to(self.penalties.device)], self.seen[rows]


def _residual(target: Tensor, draft: Tensor) -> Tensor:
    """What the target has beyond the drafter [N, V], unnormalised; its own law where nothing."""
    residual = (target - draft).clamp_(min=0)
    return torch.where(residual.sum(-1, keepdim=True) > NO_RESIDUAL, residual, target)


def _at(law: Tensor, token_ids: Tensor) -> Tensor:
    return law.gather(-1, token_ids[:, None])[:, 0]


def _rows_at(logits: Tensor, rows: Tensor, position: int) -> Tensor:
    """[N, V]; a view where every row is wanted."""
    return logits[:, position] if len(rows) == len(logits) else logits[rows, position]
