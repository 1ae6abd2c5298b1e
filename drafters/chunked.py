"""A loss over hidden states and a head that never holds the logits of all tokens at once.

For N tokens and C columns the logits are N C numbers, and autograd keeps several copies: 8,192
tokens of a 152,000-id vocabulary are 5 GB each. Here each chunk's logits, its loss and both of its
gradients are computed at once, in the forward pass, and only the gradients stay: [N, H] for the
states and [C, H] for the head. The backward pass scales them; nothing is computed twice.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# (logits [n, C] of the tokens low to low + n - 1, low) -> losses [n]
LossesOf = Callable[[Tensor, int], Tensor]
# (logits [n, C], weights [n], low) -> (sum of the weighted losses, its gradient by the logits,
# which may lie where the logits did)
GradientOf = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def chunked_loss(
    states: Tensor,  # [N, H]
    weight: Tensor,  # [C, H]
    losses_of: LossesOf,
    token_weights: Tensor,  # [N]
    chunk_tokens: int,
    gradient_of: GradientOf | None = None,  # None: autograd of losses_of
) -> Tensor:
    """Scalar: the weighted sum of losses of logits = states @ weight.T, differentiable in both.

    `losses_of` must treat each token by itself, and gets logits in the precision of the products
    (autocast's where it is on), so it computes in float32 by itself.
    """
    if gradient_of is None:
        gradient_of = partial(_with_gradient, losses_of)
    learn = torch.is_grad_enabled()
    wanted = (learn and states.requires_grad, learn and weight.requires_grad)
    return _ChunkedLoss.apply(
        states, weight, losses_of, token_weights, chunk_tokens, wanted, gradient_of
    )


@torch.no_grad()
def each_chunk(
    states: Tensor, weight: Tensor, values_of: LossesOf, chunk_tokens: int
) -> Tensor:  # [N]
    """The same walk for values that nothing is learned from."""
    states, weight = _same_precision(states, weight)
    with torch.autocast(states.device.type, enabled=False):
        values = [
            values_of(states[low : low + chunk_tokens] @ weight.T, low)
            for low in range(0, len(states), chunk_tokens)
        ]
    return torch.cat(values) if values else states.new_zeros(0)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        losses_of: LossesOf,
        token_weights: Tensor,
        chunk_tokens: int,
        wanted: tuple[bool, bool],
        gradient_of: GradientOf,
    ) -> Tensor:
        rows, matrix = _same_precision(states, weight)
        state_grads = torch.empty_like(rows) if wanted[0] else None
        # Summed over chunks in float32: bfloat16 would round the small ones away.
        weight_grad = _zeros_for_sum(matrix) if wanted[1] else None
        total = token_weights.new_zeros((), dtype=_sum_dtype(matrix))
        with torch.autocast(rows.device.type, enabled=False):
            for low in range(0, len(rows), chunk_tokens):
                chunk = slice(low, low + chunk_tokens)
                logits = rows[chunk] @ matrix.T
                if not any(wanted):
                    total += (losses_of(logits, low) * token_weights[chunk]).sum()
                    continue
                loss, gradient = gradient_of(logits, token_weights[chunk], low)
                total += loss
                if state_grads is not None:
                    state_grads[chunk] = gradient @ matrix
                if weight_grad is not None:
                    weight_grad += gradient.T @ rows[chunk]
        ctx.grads = (
            None if state_grads is None else state_grads.to(states.dtype),
            None if weight_grad is None else weight_grad.to(weight.dtype),
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        states, weight = (
            None if gradient is None else gradient * upstream.to(gradient.dtype)
            for gradient in ctx.grads
        )
        return states, weight, None, None, None, None, None


def _with_gradient(
    losses_of: LossesOf, logits: Tensor, token_weights: Tensor, low: int
) -> tuple[Tensor, Tensor]:
    """(sum of the chunk's weighted losses, its gradient by the logits [n, C]), by autograd."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        loss = (losses_of(leaf, low) * token_weights).sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def _same_precision(states: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the precision that their product has: autocast's, or else the weight's."""
    kind = weight.device.type
    low = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64
    dtype = torch.get_autocast_dtype(kind) if low else weight.dtype
    return states.detach().to(dtype), weight.detach().to(dtype)


def _sum_dtype(matrix: Tensor) -> torch.dtype:
    return torch.float64 if matrix.dtype == torch.float64 else torch.float32


def _zeros_for_sum(matrix: Tensor) -> Tensor:
    return torch.zeros_like(matrix, dtype=_sum_dtype(matrix))
