"""Would catch: a tail that is dropped without saying so, or counted twice; ids outside the draft
vocabulary that reach the loss; a divergence with its arguments swapped; losses in bfloat16; a
policy gradient of the wrong sign or scale; a constant that is learned through; columns that the
target does not have; mixes that leave a loss out; a bias that is measured on one gradient only.

Tolerance 1e-5: float32 sums over some 40 terms against float64 loops. A tail is 1 minus a float32
sum, so its logarithm may be off by 1e-7 / tail: relative 1e-4 where a tail is part of the law.
"""

import math

import pytest
import torch
from tiny_drafters import objective
from torch import Tensor

from drafters.losses import DIVERGENCES, LOSSES, Laws, Objective, Teacher, cross_entropy
from drafters.truncation import truncation_bias
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


# --------------------------------------------------------------------------- acceptance-minded ones


def gradient_of(name: str, draft: Tensor, teacher: Teacher, columns: Tensor) -> Tensor:
    leaf = draft.clone().requires_grad_()
    return torch.autograd.grad(DIVERGENCES[name](Laws(leaf, teacher, columns)).sum(), leaf)[0]


@pytest.mark.parametrize("ids", [None, IDS])
def test_the_gradient_of_tvpp_is_that_of_tv_by_the_deviation_of_its_reward(
    ids: Tensor | None,
) -> None:
    """By hand: of E_q[-A log q] with A = (r - b) / sqrt(b (1 - b)), the softmax differentiated."""
    draft, full = random_laws(6, V if ids is None else len(ids))
    columns, kept = columns_of(ids, V, CPU), WHOLE if ids is None else ids
    plain = gradient_of("tv", draft, Teacher.full(full), columns)
    found = gradient_of("tvpp", draft, Teacher.full(full), columns)
    for row in range(6):
        p, q = full[row].double().softmax(-1)[kept], draft[row].double().softmax(-1)
        better = (p > q).double()
        chance = float((q * better).sum())
        deviation = max(math.sqrt(chance * (1 - chance)), 1e-15)  # 0 where p is nowhere above q
        wanted = -q * (better - chance) / deviation
        torch.testing.assert_close(found[row].double(), wanted, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(plain[row].double(), wanted * deviation, atol=1e-5, rtol=1e-4)


def test_where_laws_hardly_overlap_only_tv_stands_still() -> None:
    """The target is sure of an id that the drafter gives e^-16: tv moves by some 1e-7."""
    draft, full = torch.zeros(1, 8), torch.zeros(1, 8)
    draft[0, 2], full[0, 5] = 16.0, 40.0
    norms = {
        name: float(gradient_of(name, draft, Teacher.full(full), torch.arange(8)).norm())
        for name in DIVERGENCES
    }
    assert norms["tv"] < 1e-6
    assert norms["tvpp"] > 1e-4
    assert norms["lk_alpha"] > 0.5
    assert norms["lk_hybrid"] > 0.5
    assert norms["forward_kl"] > 0.5


@pytest.mark.parametrize("ids", [None, IDS])
def test_lk_gradients_are_mixtures_of_known_ones(ids: Tensor | None) -> None:
    """Alpha is a constant in the share of lk_hybrid, and the divisor of lk_alpha."""
    draft, full = random_laws(6, V if ids is None else len(ids))
    columns, teacher = columns_of(ids, V, CPU), Teacher.full(full)
    alpha = Laws(draft, teacher, columns).alpha[:, None]
    moved = {
        name: gradient_of(name, draft, teacher, columns)
        for name in ("tv", "forward_kl", "lk_alpha", "lk_hybrid")
    }
    share = (-3 * alpha).exp()
    mixed = share * moved["forward_kl"] + (1 - share) * moved["tv"]
    torch.testing.assert_close(moved["lk_hybrid"], mixed, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(moved["lk_alpha"], moved["tv"] / alpha, atol=1e-5, rtol=1e-5)


def test_columns_that_one_side_lacks_change_nothing() -> None:
    """A head padded further than the target's, or less far: what both know is compared."""
    draft, full = random_laws(4, V)
    full[:, V - 3 :] = -torch.inf  # padding that the target never gives a chance
    columns = columns_of(None, V, CPU)
    padded = torch.cat([draft, torch.full((4, 5), -60.0)], dim=1)
    draft[:, V - 3 :] = -60.0
    padded[:, V - 3 : V] = -60.0
    ids = torch.randint(0, V - 3, (4,))
    for teacher in (Teacher.full(full), truncated(full, 6)):
        for name in DIVERGENCES:
            if name == "reverse_kl":
                continue  # infinite where p is 0, however small q is
            wanted = DIVERGENCES[name](Laws(draft, teacher, columns))
            longer = DIVERGENCES[name](Laws(padded, teacher, columns))
            torch.testing.assert_close(longer, wanted, atol=1e-5, rtol=0, msg=name)
            if teacher.ids is not None:
                continue  # a part of the spread tail is beyond its reach, rightly
            shorter = DIVERGENCES[name](Laws(draft[:, : V - 3], teacher, columns))
            torch.testing.assert_close(shorter, wanted, atol=1e-5, rtol=1e-5, msg=name)
    torch.testing.assert_close(
        cross_entropy(padded, ids, columns), cross_entropy(draft[:, : V - 3], ids, columns)
    )
    assert cross_entropy(draft[:, : V - 3], torch.full((4,), V - 1), columns).tolist() == [0] * 4


# ---------------------------------------------------------------------------------------- objective


def test_a_mix_is_the_weighted_sum_of_its_losses() -> None:
    draft, full = random_laws(5, len(IDS))
    columns, ids = columns_of(IDS, V, CPU), torch.tensor([0, 3, 5, 39, 1])
    laws = Laws(draft, truncated(full, 9), columns, eta=3.0)
    each = {name: divergence(laws) for name, divergence in DIVERGENCES.items()}
    each["cross_entropy"] = cross_entropy(draft, ids, columns)
    factors = {name: 0.1 + i for i, name in enumerate(LOSSES)}
    found = objective(**factors).per_token(draft, ids, truncated(full, 9), columns)
    wanted = sum(factors[name] * each[name] for name in LOSSES)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-6)


def test_only_text_is_needed_where_only_text_is_learned() -> None:
    draft, _ = random_laws(3, V)
    ids, columns = torch.tensor([3, 5, 9]), columns_of(None, V, CPU)
    found = objective("cross_entropy").per_token(draft, ids, None, columns)
    torch.testing.assert_close(found, cross_entropy(draft, ids, columns))
    assert not objective("cross_entropy").needs_teacher
    assert objective("cross_entropy", position_weights="reach").needs_teacher
    assert objective(cross_entropy=0.5, tv=0.5).needs_teacher


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mix": {}}, "must name at least one of cross_entropy"),
        ({"mix": {"kl": 1.0}}, "must name at least one of cross_entropy"),
        ({"mix": {"tv": 0.0}}, "a factor that is not above 0"),
        ({"mix": {"tv": float("nan")}}, "a factor that is not above 0"),
        ({"position_weights": "late"}, "position_weights=late is unknown"),
        ({"half_life": 0.0}, "half_life=0.0 must be above 0"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0 must be above 0"),
        ({"lk_eta": -1.0}, "lk_eta=-1.0 must be at least 0"),
    ],
)
def test_an_objective_that_means_nothing_is_refused(changes: dict, words: str) -> None:
    settings = {
        "mix": {"tv": 1.0},
        "position_weights": "uniform",
        "half_life": 8.0,
        "num_draft_tokens": 4,
        "lk_eta": 3.0,
    }
    with pytest.raises(ValueError, match=words):
        Objective(**{**settings, **changes})


# --------------------------------------------------------------------------------------- truncation


@pytest.mark.parametrize("ids", [None, IDS])
def test_bias_of_a_truncated_teacher_falls_to_nothing(ids: Tensor | None) -> None:
    draft, full = random_laws(60, V if ids is None else len(ids))
    columns = columns_of(ids, V, CPU)
    found = [truncation_bias(draft, full, k, columns) for k in (1, 4, 16, V)]
    for name in DIVERGENCES:
        errors = [bias[name].mean_error for bias in found]
        assert errors[0] > errors[1] > errors[2] > errors[3], name
        assert errors[3] < 1e-6
        cosines = [bias[name].gradient_cosine for bias in found]
        assert cosines[0] < cosines[2] <= cosines[3] + 1e-6, name
        assert cosines[3] == pytest.approx(1, abs=1e-6)
        assert found[3][name].gradient_ratio == pytest.approx(1, abs=1e-5)
        exact = DIVERGENCES[name](Laws(draft, Teacher.full(full), columns)).mean().item()
        assert all(bias[name].mean_loss == pytest.approx(exact, abs=1e-6) for bias in found)
