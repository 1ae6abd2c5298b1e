"""Would catch: chances that leak from one answer into the next, or from a later token into an
earlier one where only what comes before counts; a product one factor short; a draft that starts
before the answer or runs past its end; weights that change the size of the loss; a gain that is not
the derivative it claims to be.

Tolerance 1e-5: float32 sums of at most 20 terms against float64 loops; 1e-10 in float64.
"""

import math
import random

import pytest
import torch
from tiny_drafters import objective
from torch import Tensor

from drafters.weights import draft_weights, places, position_weights, with_mean_one

LENGTHS = [5, 1, 8, 2]
OWNERS = torch.tensor([7 * i for i, length in enumerate(LENGTHS) for _ in range(length)])
CHANCES = torch.tensor([random.Random(i).random() for i in range(sum(LENGTHS))]).double()


def emitted(chances: Tensor, depth: int) -> Tensor:
    """The mean over answers' starts, summed, of the tokens that a pass emits."""
    total = chances.new_zeros(())
    for answer in chances.split(LENGTHS):
        for start in range(len(answer)):
            alive, run = chances.new_ones(()), chances.new_ones(())
            for chance in answer[start : start + depth]:
                alive = alive * chance
                run = run + alive
            total = total + run
    return total


@pytest.mark.parametrize("depth", [1, 2, 3, 8, 20])
def test_reach_is_how_often_a_draft_is_still_alive(depth: int) -> None:
    found = draft_weights(CHANCES, OWNERS, depth, whole_gain=False)
    wanted = [
        sum(math.prod(answer[start:i]) for start in range(max(0, i - depth + 1), i + 1))
        for answer in map(Tensor.tolist, CHANCES.split(LENGTHS))
        for i in range(len(answer))
    ]
    torch.testing.assert_close(found, torch.tensor(wanted).double(), atol=1e-6, rtol=0)
    assert found[[0, 5, 6, 14]].tolist() == [1, 1, 1, 1]  # first tokens of the answers


@pytest.mark.parametrize("depth", [1, 2, 3, 8, 20])
def test_gain_is_the_derivative_of_the_tokens_per_pass(depth: int) -> None:
    leaf = CHANCES.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(emitted(leaf, depth), leaf)
    found = draft_weights(CHANCES, OWNERS, depth, whole_gain=True)
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)


def test_certain_and_impossible_tokens() -> None:
    ones, owners = torch.ones(6), torch.zeros(6).long()
    assert draft_weights(ones, owners, 3, False).tolist() == [1, 2, 3, 3, 3, 3]
    assert draft_weights(ones, owners, 3, True).tolist() == [3, 5, 6, 6, 5, 3]
    assert draft_weights(0 * ones, owners, 3, False).tolist() == [1] * 6
    assert draft_weights(0 * ones, owners, 3, True).tolist() == [1] * 6


@pytest.mark.parametrize("kind", ["uniform", "decay", "reach", "gain"])
def test_the_mean_weight_is_one(kind: str) -> None:
    how = objective("tv", position_weights=kind)
    found = position_weights(how, OWNERS, CHANCES if how.weighs_chances else None)
    assert found.shape == OWNERS.shape
    assert found.mean().item() == pytest.approx(1, abs=1e-6)
    empty = position_weights(how, OWNERS[:0], CHANCES[:0])
    assert empty.shape == (0,)


def test_decay_halves_by_place_in_the_answer() -> None:
    assert places(OWNERS).tolist() == [i for length in LENGTHS for i in range(length)]
    found = position_weights(objective("tv", position_weights="decay"), OWNERS, None)
    torch.testing.assert_close(found[10], found[6] / 2)  # four places later, the half-life
    torch.testing.assert_close(found[[0, 5, 6, 14]], found[:1].expand(4))


def test_weights_of_nothing_stay_nothing() -> None:
    assert with_mean_one(torch.zeros(3)).tolist() == [0, 0, 0]
