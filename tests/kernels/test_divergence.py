"""Would catch: a loss or a gradient that is not the one `drafters.losses` defines, for every mix;
columns of a draft vocabulary read at another id; ids beyond the target's logits that count; a row
wider than a block; a weight of another token; logits that are overwritten where no gradient is
wanted; a row of -inf logits that turns into NaN.

Tolerances: float32 against the same formulas in float64 by autograd, 2e-5 absolute on losses of
order 1 to 10 over up to 5,000 columns, gradients 2e-6 (they are at most 1 in size and mostly far
below); bfloat16 gradients are rounded once, 1%.
"""

import pytest
import torch

from drafters.losses import DIVERGENCES, Objective
from drafters.teachers import Teacher
from drafters.vocabulary import columns_of
from kernels.divergence import BLOCK, FACTORS, divergences

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_ROWS = 5


def objective(mix: dict[str, float]) -> Objective:
    return Objective(
        mix=mix, position_weights="uniform", half_life=8.0, num_draft_tokens=3, lk_eta=3.0
    )


def case(
    num_columns: int, num_ids: int, mapped: bool, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Logits of drafter and target, draft ids, and the ids of the tokens that came."""
    generator = torch.Generator().manual_seed(seed)
    teacher = 3 * torch.randn(NUM_ROWS, num_ids, generator=generator)
    ids = None
    if mapped:
        ids = torch.randperm(num_ids, generator=generator)[:num_columns].sort().values
    near = teacher[:, ids] if mapped else teacher[:, :num_columns]
    logits = torch.randn(NUM_ROWS, num_columns, generator=generator)
    logits[:, : near.shape[1]] += near
    logits[1] *= 30  # a law that is all but certain
    came = torch.randint(num_ids, (NUM_ROWS,), generator=generator)
    came[0] = int(logits[0].argmax()) if ids is None else int(ids[logits[0].argmax()])
    return logits, teacher, ids, came


def expected(
    mix: dict[str, float],
    logits: torch.Tensor,
    teacher: torch.Tensor,
    ids: torch.Tensor | None,
    came: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses, gradient) by autograd in float64."""
    leaf = logits.double().requires_grad_()
    columns = columns_of(ids, teacher.shape[1], teacher.device)
    laws = Teacher.full(teacher.double())
    losses = objective(mix).per_token(leaf, came, laws, columns)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), leaf)
    return losses.detach(), gradient


def run(mix, logits, teacher, ids, came, weights):
    columns = columns_of(ids, teacher.shape[1], teacher.device)
    columns = columns.where(columns < logits.shape[1], -1)
    moved = [None if one is None else one.to(DEVICE) for one in (logits.clone(), teacher, ids)]
    found = divergences(
        *moved,
        columns[came].to(DEVICE),
        mix,
        3.0,
        None if weights is None else weights.to(DEVICE),
    )
    return found[0].cpu(), found[1].cpu(), moved[0].cpu()


MIXES = [{name: 1.0} for name in FACTORS] + [
    {"forward_kl": 0.5, "tv": 2.0, "cross_entropy": 0.25},
    {name: 0.1 * place for place, name in enumerate(FACTORS, start=1)},
]


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "+".join(mix))
@pytest.mark.parametrize(
    ("num_columns", "num_ids", "mapped"),
    [(37, 37, False), (40, 37, False), (33, 37, False), (20, 37, True), (BLOCK + 9, 4200, False)],
    ids=["alike", "padded", "narrower", "mapped", "two blocks"],
)
def test_losses_and_gradients_are_those_of_the_definitions(
    mix: dict[str, float], num_columns: int, num_ids: int, mapped: bool
) -> None:
    logits, teacher, ids, came = case(num_columns, num_ids, mapped)
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0, 3.0])
    wanted, slope = expected(mix, logits, teacher, ids, came, weights)
    losses, chances, gradient = run(mix, logits, teacher, ids, came, weights)
    torch.testing.assert_close(losses.double(), wanted, atol=2e-5, rtol=2e-5)
    # tvpp divides by sqrt(b), so that what float32 loses of b where q all but covers p counts more.
    loose = 50 if "tvpp" in mix else 1
    torch.testing.assert_close(gradient.double(), slope, atol=loose * 2e-6, rtol=2e-4)
    if set(mix) <= set(DIVERGENCES):
        tv, _ = expected({"tv": 1.0}, logits, teacher, ids, came, weights)
        torch.testing.assert_close(chances.double(), 1 - tv, atol=2e-6, rtol=2e-6)


def test_without_weights_the_logits_stay() -> None:
    logits, teacher, _, came = case(37, 37, mapped=False)
    wanted, _ = expected({"forward_kl": 1.0}, logits, teacher, None, came, torch.ones(NUM_ROWS))
    losses, _, after = run({"forward_kl": 1.0}, logits, teacher, None, came, None)
    torch.testing.assert_close(losses.double(), wanted, atol=2e-5, rtol=2e-5)
    assert torch.equal(after, logits)


def test_half_precision_is_rounded_once() -> None:
    logits, teacher, _, came = case(300, 300, mapped=False)
    weights = torch.ones(NUM_ROWS)
    half, taught = logits.bfloat16(), teacher.bfloat16()
    mix = {"forward_kl": 1.0, "tv": 1.0}
    wanted, slope = expected(mix, half.float(), taught.float(), None, came, weights)
    losses, _, gradient = run(mix, half, taught, None, came, weights)
    torch.testing.assert_close(losses.double(), wanted, atol=2e-5, rtol=2e-5)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), slope, atol=1e-5, rtol=1e-2)


def test_ids_that_cannot_be_drafted_are_no_numbers_nowhere() -> None:
    logits, teacher, _, came = case(37, 37, mapped=False)
    logits[:, 30:] = teacher[:, 30:] = -torch.inf
    came = came % 30
    mix = {"forward_kl": 1.0, "lk_hybrid": 1.0, "cross_entropy": 1.0}
    losses, chances, gradient = run(mix, logits, teacher, None, came, torch.ones(NUM_ROWS))
    for found in (losses, chances, gradient):
        assert found.isfinite().all()
    assert not gradient[:, 30:].any()


def test_rows_with_strides_and_an_unknown_loss() -> None:
    logits, teacher, _, came = case(37, 37, mapped=False)
    wide = torch.zeros(NUM_ROWS, 64)
    wide[:, :37] = teacher
    one = run({"tv": 1.0}, logits, teacher, None, came, None)
    other = divergences(
        logits.to(DEVICE), wide.to(DEVICE)[:, :37], None, came.to(DEVICE), {"tv": 1.0}, 3.0, None
    )
    assert torch.equal(one[0], other[0].cpu())
    with pytest.raises(ValueError, match="are unknown; use cross_entropy"):
        run({"kl": 1.0}, logits, teacher, None, came, None)
