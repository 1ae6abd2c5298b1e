"""Is the output law the target's, exactly? Every draft, every cell of every uniform, in fractions.

Would catch: a residual that is forgotten or not clamped; a bonus drawn from the wrong row; the same
uniform for acceptance and draw; drafts and target processed by different rules; a tie at a
threshold dropped; penalty counts that do not grow along the draft, or are off by one; a one-hot law
treated as the drafter's logits; a CDF read in another order, or across a border of two splits.
No sampling and no tolerance: a right verifier gives the same fractions.
"""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product

import pytest
import torch
from fractions_law import (
    TEMPERATURE,
    World,
    arguments,
    call_options,
    path_law,
    paths,
    processed,
    sequence_law,
)
from torch import Tensor

from kernels.reference import processed_probs
from kernels.reference import verify as reference_verify
from kernels.types import Verification

Verify = Callable[..., Verification]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

TARGET = ((2, 0, 0, -1), (0, 2, -1, 0), (0, -1, 2, 0), (-1, 0, 0, 2))
DRAFT = ((0, 2, 0, -1), (2, 0, 0, -1), (2, 0, -1, 0), (0, 0, -1, 2))  # rejections everywhere
PLAIN = World(TARGET, DRAFT, num_draft=1)
WORLDS = {
    "plain": PLAIN,
    "one-hot": replace(PLAIN, one_hot=True, draft_ids=(1, 0, 2, 3)),
    "top-k with a tie": replace(PLAIN, top_k=2),
    "top-p with a tie": replace(PLAIN, top_p=Fraction(7, 10)),
    "min-p": replace(PLAIN, min_p=Fraction(3, 16)),
    "top-k, then top-p": replace(PLAIN, top_k=3, top_p=Fraction(3, 5)),
    "penalty": replace(PLAIN, penalty=2),
    "penalty and top-k": replace(PLAIN, penalty=2, top_k=2),
}
# In the interpreter a pass costs milliseconds: one-hot rows have one draft, and no drafter's law.
CHEAP = replace(PLAIN, one_hot=True, draft_ids=(1, 0, 2, 3))
TRITON_WORLDS = {
    "plain": PLAIN,
    "min-p": replace(PLAIN, min_p=Fraction(3, 16)),
    "top-k, then top-p": replace(PLAIN, top_k=3, top_p=Fraction(3, 5)),
    "penalty": replace(PLAIN, penalty=2),
    "top-k with a tie": replace(CHEAP, top_k=2),
    "top-p with a tie": replace(CHEAP, top_p=Fraction(7, 10)),
    "penalty and top-k": replace(CHEAP, penalty=2, top_k=2),
}
THREE = tuple(row[:3] for row in TARGET[:3])
DEEP = World(THREE, tuple(row[:3] for row in DRAFT[:3]), num_draft=2)


@pytest.fixture
def triton_verify(monkeypatch: pytest.MonkeyPatch) -> Verify:
    """The kernel with two tokens a split, so that each law lies across splits."""
    from kernels import verify as module

    monkeypatch.setattr(module, "block_size", lambda vocab: 2)
    return partial(verify_there, module.verify)


def verify_there(
    verify: Verify, target: Tensor, ids: Tensor, draft: Tensor | None, **options: Tensor
) -> Verification:
    """The verification on the GPU where there is one, and here what it said."""
    draft = None if draft is None else draft.to(DEVICE)
    for name in ("uniforms", "seen_token_counts"):
        if options.get(name) is not None:
            options[name] = options[name].to(DEVICE)
    out = verify(target.to(DEVICE), ids.to(DEVICE), draft, **options)
    return Verification(*(getattr(out, name).cpu() for name in Verification.__slots__))


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
@pytest.mark.parametrize("num_draft", [1, 2, 3])
def test_reference_keeps_the_law(world: World, num_draft: int) -> None:
    world = replace(world, num_draft=num_draft)
    law = path_law(reference_verify, world, start=0, dtype=torch.float32)
    assert law == sequence_law(world, 0, num_draft + 1)


@pytest.mark.parametrize("world", TRITON_WORLDS.values(), ids=TRITON_WORLDS.keys())
def test_triton_keeps_the_law(world: World, triton_verify: Verify) -> None:
    law = path_law(triton_verify, world, start=0, dtype=torch.bfloat16)
    assert law == sequence_law(world, 0, world.num_draft + 1)


def test_triton_keeps_the_law_of_longer_drafts(triton_verify: Verify) -> None:
    world = replace(DEEP, penalty=2)
    law = path_law(triton_verify, world, start=1, dtype=torch.float32)
    assert law == sequence_law(world, 1, 3)


@pytest.mark.parametrize("lengths", [(0, 1, 2, 3), (3, 0, 2, 1)])
def test_ragged_rows_are_each_as_if_alone(lengths: tuple[int, ...]) -> None:
    """Every path of a batch whose rows end early, by count or by -1, equals its own call."""
    world = replace(PLAIN, num_draft=3, penalty=2)
    walked = paths(world, 0)[::7]
    target, ids, draft = arguments(world, 0, walked, torch.float32)
    options = call_options(world, 0, walked)
    asked = torch.tensor(lengths).repeat(len(ids))[: len(ids)]
    marked = torch.where(torch.arange(3) == asked[:, None], -1, ids)
    for kind in ({"num_draft_tokens": asked}, {}):
        out = reference_verify(target, ids if kind else marked, draft, **options, **kind)
        for k in range(4):
            rows = asked == k
            mine = {name: value[rows] for name, value in options.items()}
            mine["uniforms"] = torch.cat([mine["uniforms"][:, :k], mine["uniforms"][:, 3:]], 1)
            alone = reference_verify(target[rows, : k + 1], ids[rows, :k], draft[rows, :k], **mine)
            assert torch.equal(out.token_ids[rows, : k + 1], alone.token_ids)
            assert torch.equal(out.num_accepted[rows], alone.num_accepted)
            assert bool((out.token_ids[rows, k + 1 :] == -1).all())


def test_uniform_grid_over_power_of_two_tables() -> None:
    """The classic form: 24 points for each uniform, borders known to nobody, error zero."""
    target = torch.tensor([[4, 2, 2], [2, 4, 2], [1, 1, 6]]) / 8
    draft = torch.tensor([[2, 4, 2], [4, 2, 2], [4, 2, 2]]) / 8
    law, pair = _grid_law(reference_verify, target, draft)
    assert torch.equal(law, target[0].double())
    assert torch.equal(pair, target[0, :, None].double() * target.double())


def test_a_forgotten_residual_is_seen() -> None:
    """The checks above can fail: a verifier that resamples from the target after a rejection."""

    def broken(target_logits: Tensor, ids: Tensor, draft_logits: Tensor, **rest: Tensor):
        out = reference_verify(target_logits, ids, draft_logits, **rest)
        row = torch.arange(len(ids))
        alone = reference_verify(
            target_logits[row, out.num_accepted][:, None],
            ids[:, :0],
            None,
            temperature=rest["temperature"],
            uniforms=rest["uniforms"][:, -1:],
        )
        out.token_ids[row, out.num_accepted] = alone.token_ids[:, 0]
        return out

    target = torch.tensor([[4, 2, 2], [2, 4, 2], [1, 1, 6]]) / 8
    law, _ = _grid_law(broken, target, torch.tensor([[2, 4, 2], [4, 2, 2], [4, 2, 2]]) / 8)
    assert (law - target[0].double()).abs().max() > 0.05


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_processed_probs_are_the_fractions(world: World) -> None:
    """float64 weights of whole powers of two: off by the rounding of exp and of one sum."""
    for row, seen in product(range(4), ([0], [1, 3], [0, 2])):
        mask = torch.zeros(1, 4, dtype=torch.bool)
        mask[0, seen] = True
        law = processed_probs(
            torch.tensor([TARGET[row]], dtype=torch.float32),
            torch.tensor([TEMPERATURE], dtype=torch.float64),
            torch.tensor([world.top_k]),
            torch.tensor([float(world.top_p)]),
            torch.tensor([float(world.min_p)]),
            torch.tensor([float(world.penalty)]),
            mask,
        )
        fractions = processed(world, TARGET[row], set(seen))
        want = torch.tensor([[float(p) for p in fractions]], dtype=torch.float64)
        torch.testing.assert_close(law, want, rtol=0, atol=1e-14)


def _grid_law(verify: Verify, target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """Laws of the first token and of the first two, over all 3^2 drafts and a grid of uniforms."""
    grid = (torch.arange(24, dtype=torch.float64) + 0.5) / 24
    uniforms = torch.cartesian_prod(grid, grid, grid)
    count = len(uniforms)
    law, pair = torch.zeros(3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    run = partial(verify, temperature=torch.ones(count), uniforms=uniforms)
    for a, b in product(range(3), repeat=2):
        weight = float(draft[0, a] * draft[a, b])
        ids = torch.tensor([[a, b]]).expand(count, 2)
        rows = target[[0, a, b]].double().log().expand(count, 3, 3)
        out = run(rows, ids, draft[[0, a]].double().log().expand(count, 2, 3)).token_ids
        law += weight * torch.bincount(out[:, 0], minlength=3).double() / count
        both = out[:, 1] >= 0
        codes = out[both, 0] * 3 + out[both, 1]
        pair += weight * torch.bincount(codes, minlength=9).view(3, 3).double() / count
        alone = torch.bincount(out[~both, 0], minlength=3).double() / count
        pair += weight * alone[:, None] * target.double()
    return law, pair
