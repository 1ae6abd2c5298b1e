"""How much each answer token counts: weights with mean 1 over a batch.

Let a_j be the chance that the token drafted at place j of an answer is accepted, and
A(s, i) = a_s a_{s+1} ... a_{i-1} the chance that a draft that starts at place s is still alive when
it gets to i. A draft of K tokens that starts at s emits, the target's own token included,

    E_s = 1 + sum over n = s .. s + K - 1 of A(s, n + 1)        (as far as the answer goes)

decay   w_i = 2^(-i / half_life). A long answer then weighs at most half_life / ln 2 tokens, so the
        beginnings that all answers have are not outvoted by the few long ones.
reach   w_i = sum over s = i - K + 1 .. i of A(s, i): in how many of the drafts that could get to
        i, starting at each place once, token i is tried at all.
gain    w_i = sum over s of dE_s / da_i
            = sum over s of A(s, i) (1 + sum over n = i + 1 .. s + K - 1 of A(i + 1, n + 1)):
        reach times what still follows within the same draft. With tv, whose gradient is -da_i, the
        loss then has exactly the gradient of the mean of -E_s over all starts.

The a_j are constants: nothing is learned through the weights (compare arXiv 2605.18810, which
weighs the places within one block by the same derivative).
"""

import torch
from torch import Tensor

from drafters.losses import Objective


def position_weights(
    objective: Objective,
    owners: Tensor,  # [N] the answer of each token; one answer's tokens stand together
    chances: Tensor | None,  # [N] acceptance; None where the objective needs none
) -> Tensor:  # [N] float32, mean 1
    """The objective's weights of the predicted tokens."""
    if objective.position_weights == "decay":
        weights = torch.exp2(-places(owners) / objective.half_life)
    elif objective.weighs_chances:
        assert chances is not None, "reach and gain follow from acceptance"
        whole = objective.position_weights == "gain"
        weights = draft_weights(chances.float(), owners, objective.num_draft_tokens, whole)
    else:
        weights = torch.ones(len(owners), device=owners.device)
    return with_mean_one(weights)


def with_mean_one(weights: Tensor) -> Tensor:
    """The same proportions; weights that are all zero stay so."""
    return weights / weights.mean().clamp(min=1e-30) if len(weights) else weights


def places(owners: Tensor) -> Tensor:  # [N] int64
    """How many tokens of the same answer come before each one."""
    order = torch.arange(len(owners), device=owners.device)
    begins = torch.ones_like(owners, dtype=torch.bool)
    begins[1:] = owners[1:] != owners[:-1]
    return order - order.where(begins, 0).cummax(0).values


def draft_weights(
    chances: Tensor,  # [N]
    owners: Tensor,  # [N]
    num_draft_tokens: int,
    whole_gain: bool,  # False: "reach"; True: "gain"
) -> Tensor:  # [N]
    """The sums over starts of the formulas above, not yet normalised."""
    place = places(owners)
    alive = torch.ones_like(chances)  # A(i - depth, i), 0 where no draft of this answer starts
    total = torch.zeros_like(chances)
    follows = run_lengths(chances, owners, num_draft_tokens) if whole_gain else None
    for depth in range(num_draft_tokens):
        alive = alive.where(place >= depth, 0.0)
        left = num_draft_tokens - 1 - depth  # tokens of this draft that come after i
        total = total + (alive if follows is None else alive * follows[left])
        alive = _shifted(alive * chances, 1)
    return total


def run_lengths(chances: Tensor, owners: Tensor, most: int) -> list[Tensor]:
    """[m]: 1 + A(i + 1, i + 2) + ... of m factors at most, at each place i, for m below `most`."""
    last = torch.ones_like(owners, dtype=torch.bool)
    last[:-1] = owners[1:] != owners[:-1]
    found = [torch.ones_like(chances)]
    for _ in range(most - 1):
        found.append(1 + _shifted(chances * found[-1], -1).where(~last, 0.0))
    return found


def _shifted(values: Tensor, by: int) -> Tensor:
    """Each value `by` places later; what comes in from outside belongs to no answer."""
    return values.roll(by)
