"""Would catch: a tail that is dropped without saying so, or counted twice; ids outside the draft
vocabulary that reach the loss; a divergence with its arguments swapped; losses in bfloat16.

Tolerance 1e-5: float32 sums over some 40 terms against float64 loops. A tail is 1 minus a float32
sum, so its logarithm may be off by 1e-7 / tail: relative 1e-4 where a tail is part of the law.
"""

import math

import pytest
import torch
from torch import Tensor

from drafters.losses import DIVERGENCES, Laws, Teacher, cross_entropy
from drafters.vocabulary import columns_of

V = 40
IDS = torch.tensor([0, 3, 4, 7, 8, 11, 15, 16, 23, 29, 31, 37, 39])
WHOLE = torch.arange(V)
CPU = torch.device("cpu")


def random_laws(num: int, columns: int) -> tuple[Tensor, Tensor]:
    """(drafter logits [N, C], teacher logits [N, V]), peaked."""
    torch.manual_seed(0)
    return 2 * torch.randn(num, columns), 3 * torch.randn(num, V)


def truncated(full: Tensor, k: int) -> Teacher:
    best = full.topk(k)
    return Teacher(best.values, full.logsumexp(-1), best.indices, V)


def kl(a: list[float], b: list[float]) -> float:
    return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)


def by_hand(name: str, q: list[float], p: list[float], known: list[float] | None = None) -> float:
    """The definition, over draft columns; `p` sums to the mass m inside the draft vocabulary.

    `known` is p without what a truncated teacher spreads.
    """
    mass, alpha = sum(p), sum(map(min, p, q))
    ratio = [x / mass for x in p]
    mean = [(a + b) / 2 for a, b in zip(ratio, q, strict=True)]
    known = p if known is None else known
    forward = kl([x / max(sum(known), 1e-30) for x in known], q) * sum(known)
    share = math.exp(-3 * alpha)
    return {
        "forward_kl": lambda: forward,
        "reverse_kl": lambda: mass * kl(q, ratio),
        "jsd": lambda: mass * (kl(ratio, mean) + kl(q, mean)) / 2,
        "tv": lambda: 1 - alpha,
        "tvpp": lambda: 1 - alpha,
        "lk_alpha": lambda: -math.log(alpha),
        "lk_hybrid": lambda: share * forward + (1 - share) * (1 - alpha),
    }[name]()


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("ids", [None, IDS])
def test_full_teacher_is_the_definition(name: str, ids: Tensor | None) -> None:
    kept = WHOLE if ids is None else ids
    draft, full = random_laws(5, len(kept))
    found = DIVERGENCES[name](Laws(draft, Teacher.full(full), columns_of(ids, V, CPU)))
    for row in range(5):
        p = full[row].double().softmax(-1)[kept].tolist()
        q = draft[row].double().softmax(-1).tolist()
        assert found[row].item() == pytest.approx(by_hand(name, q, p), abs=1e-5)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("ids", [None, IDS])
def test_all_logits_kept_is_the_full_loss(name: str, ids: Tensor | None) -> None:
    draft, full = random_laws(6, V if ids is None else len(ids))
    columns = columns_of(ids, V, CPU)
    torch.testing.assert_close(
        DIVERGENCES[name](Laws(draft, truncated(full, V), columns)),
        DIVERGENCES[name](Laws(draft, Teacher.full(full), columns)),
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("k", [1, 4, 17])
def test_truncated_teacher_is_what_the_file_says(name: str, ids: Tensor | None, k: int) -> None:
    """forward_kl: known ids in D only. Else: the tail spread evenly over the unknown ids."""
    kept = WHOLE if ids is None else ids
    draft, full = random_laws(5, len(kept))
    found = DIVERGENCES[name](Laws(draft, truncated(full, k), columns_of(ids, V, CPU)))
    for row in range(5):
        probs = full[row].double().softmax(-1)
        known = set(full[row].topk(k).indices.tolist())
        tail = max(1 - sum(probs[i].item() for i in known), 1e-7)
        spread, alone = (
            [probs[i].item() if i in known else rest for i in kept.tolist()]
            for rest in (tail / (V - k), 0.0)
        )
        wanted = by_hand(name, draft[row].double().softmax(-1).tolist(), spread, alone)
        assert found[row].item() == pytest.approx(wanted, abs=1e-5, rel=1e-4)


def test_truncation_error_shrinks_to_nothing() -> None:
    draft, full = random_laws(50, V)
    columns = columns_of(None, V, CPU)
    for name, divergence in DIVERGENCES.items():
        exact = divergence(Laws(draft, Teacher.full(full), columns))
        errors = [
            (divergence(Laws(draft, truncated(full, k), columns)) - exact).abs().mean().item()
            for k in (2, 8, 32, 40)
        ]
        assert errors[0] > errors[-2] > errors[-1] - 1e-6, name
        assert errors[-1] < 1e-5, name


@pytest.mark.parametrize("name", DIVERGENCES)
def test_no_distance_between_equal_laws_and_some_between_others(name: str) -> None:
    draft, full = random_laws(4, V)
    columns = columns_of(None, V, CPU)
    equal = DIVERGENCES[name](Laws(full, Teacher.full(full), columns))
    assert equal.abs().max() < 1e-5
    assert (DIVERGENCES[name](Laws(draft, Teacher.full(full), columns)) > 0.01).all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_are_finite_for_extreme_laws(name: str) -> None:
    """One-hot teachers, certain drafters, and a teacher with no mass in the vocabulary."""
    full = torch.full((3, V), -200.0)
    full[0, 3], full[1, 5], full[2, 1] = 200.0, 200.0, 200.0
    draft = torch.zeros(3, len(IDS))
    draft[:, 0] = 300.0
    draft.requires_grad_()
    for teacher in (Teacher.full(full), truncated(full, 3)):
        loss = DIVERGENCES[name](Laws(draft, teacher, columns_of(IDS, V, CPU)))
        (gradient,) = torch.autograd.grad(loss.sum(), draft)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()


def test_bfloat16_logits_are_measured_in_float32() -> None:
    draft, full = random_laws(4, V)
    half, columns = draft.bfloat16(), columns_of(None, V, CPU)
    for divergence in DIVERGENCES.values():
        found = divergence(Laws(half, Teacher.full(full.bfloat16()), columns))
        assert found.dtype == torch.float32
        exact = divergence(Laws(half.float(), Teacher.full(full.bfloat16().float()), columns))
        torch.testing.assert_close(found, exact, atol=1e-5, rtol=0)


def test_cross_entropy_skips_what_cannot_be_proposed() -> None:
    draft, _ = random_laws(3, len(IDS))
    found = cross_entropy(draft, torch.tensor([3, 5, 39]), columns_of(IDS, V, CPU))
    log_q = draft.double().log_softmax(-1)
    wanted = torch.tensor([-log_q[0, 1], 0.0, -log_q[2, 12]]).float()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
