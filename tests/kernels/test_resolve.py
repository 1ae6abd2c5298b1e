"""Is the residual exact where float32 sums are not, and does no share of the work show?

Would catch: P and Q of launch 1 taken for exact; a token on the wrong side of equality; a tile
summed twice or never, or with another's logits; a result that depends on how many programs share a
row or on its neighbours in the batch; weights that underflow or overflow at odd temperatures; a
draft that is all the target's mass; a draw from what truncation found that is not the row's; a
penalty rounded otherwise. Runs in Triton's interpreter where there is no GPU.
"""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from cases import LITTLE, Case, assert_same_verification, cdf_slack, make_case, with_rules

from kernels import truncate as truncation
from kernels import verify as module
from kernels.launching import collected
from kernels.rows import penalise
from kernels.sizes import Sizes
from kernels.truncate import Cut, truncate
from kernels.types import Verification

verify = module.verify
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OUTPUTS = ("token_ids", "num_accepted", "target_logprobs", "draft_logprobs")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tiles of a thousand tokens, each of four strips; two splits."""
    monkeypatch.setattr(module, "TILE", 256)
    monkeypatch.setattr(module, "STRIP", 64)
    monkeypatch.setattr(module, "BLOCK", 512)


def assert_equal(one: Verification, other: Verification) -> None:
    for name in OUTPUTS:
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def rejecting(case: Case) -> Case:
    """The case with a first draft that the target cannot say."""
    rows = torch.arange(len(case.target_logits))
    case.target_logits[rows, 0, case.draft_token_ids[:, 0]] = -torch.inf
    case.draft_logits[rows, 0, case.draft_token_ids[:, 0]] = -20.0
    return case


def beside_borders(case: Case, row: int, share: float) -> list[float]:
    """Uniforms just below and above a border of the residual's CDF, a little past the slack."""
    drafts = case.drafts(row)
    target = case.laws(row, case.target_logits, drafts)[0]
    draft = case.laws(row, case.draft_logits, drafts)[0]
    cdf = (target - draft).clamp(min=0).cumsum(-1)
    border = float(cdf[int((cdf < share * cdf[-1]).sum())] / cdf[-1])
    beside = 2 * cdf_slack(target, draft)
    return [border - beside, min(border + beside, 1 - 2.0**-53)]


def residuals(case: Case) -> list[float]:
    """Each row's mass of the residual at position 0."""
    laws = [
        [case.laws(row, logits, case.drafts(row))[0] for logits in _both(case)]
        for row in range(len(case.target_logits))
    ]
    return [float((target - draft).clamp(min=0).sum()) for target, draft in laws]


def _both(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    assert case.draft_logits is not None
    return case.target_logits, case.draft_logits


def assert_borders(case: Case) -> None:
    """Each row's draw at borders of its CDF, where three times the slack gives another token."""
    for share in (0.2, 0.4, 0.6):
        pairs = [beside_borders(case, row, share) for row in range(len(case.target_logits))]
        for uniforms in zip(*pairs, strict=True):
            case.options["uniforms"][:, -1] = torch.tensor(uniforms, dtype=torch.float64)
            assert_same_verification(case, case.run(verify))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("noise", [1e-2, 1e-4, 1e-6])
def test_nearly_equal_laws(noise: float) -> None:
    """A residual of a millionth of the mass still has an exact CDF; a larger one is float32's."""
    case = make_case(1, 2, 1, 1000, closeness=1.0, temperature=0.6, device=DEVICE)
    wobble = torch.randn(case.draft_logits.shape, generator=torch.Generator().manual_seed(2))
    case.draft_logits.copy_(case.draft_logits * (1 + noise * wobble.to(DEVICE)) + 3.0)
    case = rejecting(case)
    assert all((mass < LITTLE) == (noise == 1e-6) for mass in residuals(case))
    assert_borders(case)


@pytest.mark.usefixtures("small_tiles")
def test_most_of_the_mass_is_equal() -> None:
    """One token holds nearly all of both laws: on which side it falls must not blur the others."""
    case = make_case(2, 3, 1, 1000, closeness=1.0, device=DEVICE)
    case.draft_token_ids[:] = 3
    case.target_logits[:, 0, 500] = case.draft_logits[:, 0, 500] = 25.0
    case.draft_logits[:, 0, :400] -= 0.3
    case.draft_logits[:, 0, 600:] += 0.3
    assert_borders(rejecting(case))


@pytest.mark.usefixtures("small_tiles")
def test_equal_laws_of_shifted_logits_have_no_residual() -> None:
    case = make_case(3, 3, 1, 1000, closeness=1.0, device=DEVICE)
    case.target_logits.copy_((case.target_logits * 1024).round() / 1024)
    case.draft_logits.copy_(case.target_logits[:, :1] + 3.0)
    case.draft_token_ids[:] = 7
    case.target_logits[:, 0, 7] = case.draft_logits[:, 0, 7] = -torch.inf
    assert_same_verification(case, case.run(verify))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("rules", [(), ("top_k", "top_p", "min_p", "repetition_penalty")])
def test_shares_of_the_work_do_not_show(
    rules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = with_rules(make_case(4, 2, 1, 1000, dtype=torch.bfloat16, device=DEVICE), *rules)
    together = case.run(verify)
    for programs, ahead in ((1, 0), (1, 1), (2, 1), (5, 0)):
        chosen = Sizes(programs=programs * 2, ahead=ahead)
        monkeypatch.setattr(module, "sizes", lambda _, chosen=chosen: chosen)
        assert_equal(together, case.run(verify))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_permuted_batch_gives_the_permuted_result(dtype: torch.dtype) -> None:
    rules = ("top_k", "top_p", "min_p", "repetition_penalty")
    case = with_rules(make_case(5, 6, 3, 500, dtype=dtype, device=DEVICE), *rules)
    case = case.with_options(
        temperature=torch.tensor([0.8, 0.0, 1.3, 0.2, 1.0, 5.0], dtype=torch.float64),
        draft_is_one_hot=torch.tensor([False, True, True, False, False, False]),
        num_draft_tokens=torch.tensor([3, 3, 2, 0, 1, 3]),
    )
    together, order = case.run(verify), torch.tensor([4, 2, 5, 0, 3, 1])
    moved = Case(
        case.target_logits[order],
        case.draft_token_ids[order],
        case.draft_logits[order],
        {name: values[order] for name, values in case.options.items()},
    ).run(verify)
    for name in OUTPUTS:
        assert torch.equal(getattr(moved, name), getattr(together, name)[order]), name
    assert_same_verification(case, together)


@pytest.mark.parametrize("temperature", [1e-30, 1e-4, 0.05, 30.0, 1e6, 1e30])
def test_odd_temperatures(temperature: float) -> None:
    case = make_case(6, 3, 2, 1000, device=DEVICE)
    case.target_logits[0] *= 1000.0
    case.target_logits[1, :, ::2] = -torch.inf
    case = case.with_options(temperature=torch.full((3,), temperature, dtype=torch.float64))
    assert_same_verification(case, case.run(verify))


@pytest.mark.parametrize("lift", [0.0, 3e4, -3e4])
@pytest.mark.parametrize("masked", [-1e9, -1e30, -3.38e38, -torch.inf])
def test_masks_of_any_kind(masked: float, lift: float) -> None:
    """Half of each row out of the question; logits far from zero, whose powers do not fit."""
    case = make_case(10, 4, 2, 1000, device=DEVICE)
    for logits in (case.target_logits, case.draft_logits):
        logits.add_(lift)
        logits[..., 128:256] = masked
        logits[..., ::2] = masked
    assert_same_verification(case, case.run(verify))


def test_rows_of_one_token() -> None:
    """The target's whole mass on one id: accepted when drafted, drawn when not."""
    case = make_case(7, 3, 2, 1000, device=DEVICE)
    case.target_logits[:] = -torch.inf
    case.target_logits[..., 640] = 2.0
    case.draft_token_ids[0] = 640
    out = case.run(verify)
    assert out.token_ids[:, 0].tolist() == [640, 640, 640]
    assert out.num_accepted.tolist() == [2, 0, 0]
    assert_same_verification(case, out)


def test_a_sure_draft_that_is_nearly_all_of_the_law() -> None:
    """One-hot: the residual is the target without the draft, a ten-thousandth of its mass."""
    case = make_case(8, 4, 1, 1000, one_hot=True, device=DEVICE)
    case.target_logits[:, 0].clamp_(max=3.0)
    case.target_logits[torch.arange(4), 0, case.draft_token_ids[:, 0]] = 18.0
    case.options["uniforms"][:, 0] = 1 - 2.0**-53
    out = case.run(verify)
    assert out.num_accepted.tolist() == [0, 0, 0, 0]
    assert_same_verification(case, out)


def test_what_a_call_uses_may_be_said_for_parameters_on_the_device() -> None:
    """As in a graph: the neutral values are there, and their launches are not."""
    case = make_case(9, 3, 2, 1000, dtype=torch.bfloat16, device=DEVICE)
    neutral = {
        "top_k": torch.zeros(3, dtype=torch.int64),
        "top_p": torch.ones(3, dtype=torch.float64),
        "min_p": torch.zeros(3, dtype=torch.float64),
        "repetition_penalty": torch.ones(3, dtype=torch.float64),
        "seen_token_counts": torch.ones(3, 1000, dtype=torch.int32),
    }
    given = {name: values.to(DEVICE) for name, values in (case.options | neutral).items()}
    case = Case(case.target_logits, case.draft_token_ids, case.draft_logits, given)
    off = dict.fromkeys(("top_k", "top_p", "min_p", "repetition_penalty"), False)
    with collected() as launches:
        case.run(verify, check=False, uses=module.Uses(**off))
    assert [one.kernel.__name__ for one in launches] == ["stats_kernel", "resolve_kernel"]
    assert launches[0].args[15] is None  # no penalty is read
    assert_equal(case.run(verify, uses=module.Uses(**off)), case.run(verify))
    greedy = case.with_options(temperature=torch.zeros(3, dtype=torch.float64, device=DEVICE))
    assert_equal(greedy.run(verify, uses=module.Uses(sampling=False, **off)), greedy.run(verify))


RULES = ("top_k", "top_p", "min_p", "repetition_penalty")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("one_hot", [False, True])
def test_the_few_that_truncation_found_draw_as_the_whole_row(
    one_hot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for candidates, cut decides nothing: the row is searched and walked instead."""
    case = with_rules(make_case(8, 6, 2, 1000, dtype=torch.bfloat16, one_hot=one_hot), *RULES)
    case = on_device(case).with_options(top_k=torch.tensor([5, 9, 11, 11, 9, 5]))
    found, kept = [], []

    def noted(*args: Any) -> Cut:
        found.append(truncate(*args))
        return found[-1]

    monkeypatch.setattr(module, "truncate", noted)
    for room in (512, 1):
        monkeypatch.setattr(truncation, "CANDIDATES", room)
        kept.append(case.run(verify))
        assert_same_verification(case, kept[-1])
    few, many = kept
    assert bool((found[0].counts[:, 0] > 0).all())
    assert bool((found[1].counts[:, 0] == -1).all())
    assert torch.equal(few.token_ids, many.token_ids)
    assert torch.equal(few.num_accepted, many.num_accepted)
    torch.testing.assert_close(few.target_logprobs, many.target_logprobs)
    torch.testing.assert_close(few.draft_logprobs, many.draft_logprobs)


def on_device(case: Case) -> Case:
    draft = None if case.draft_logits is None else case.draft_logits.to(DEVICE)
    options = {
        name: value.to(DEVICE) if name in ("uniforms", "seen_token_counts") else value
        for name, value in case.options.items()
    }
    return Case(case.target_logits.to(DEVICE), case.draft_token_ids.to(DEVICE), draft, options)


@triton.jit
def penalise_kernel(x_ptr, penalty_ptr, out_ptr, SIZE: tl.constexpr):  # noqa: N803
    i = tl.arange(0, SIZE)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, penalise(x, i >= 0, tl.load(penalty_ptr)))


@pytest.mark.parametrize("penalty", [1.1, 0.7, 3.0, 1.0000001])
def test_a_penalised_logit_is_that_of_float32_division(penalty: float) -> None:
    """To the bit, since ties at a threshold follow from it; multiplying by 1 / penalty is not."""
    generator = torch.Generator().manual_seed(9)
    x = 10 * torch.randn(4096, generator=generator)
    x[:2] = torch.tensor([-torch.inf, 0.0])
    given, out = torch.tensor([penalty]), torch.empty(4096, device=DEVICE)
    penalise_kernel[(1,)](x.to(DEVICE), given.to(DEVICE), out, SIZE=4096)
    assert torch.equal(out.cpu(), torch.where(x > 0, x / given, x * given))
