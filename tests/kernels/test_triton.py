"""Does the Triton kernel answer as the contract allows, at odd shapes and for odd numbers?

Would catch: a border of two splits counted twice or lost; a vocabulary that no block divides;
32-bit or contiguous addressing; a row whose result depends on its neighbours; NaN in rows that
nobody asked for; the lowest of tied maxima missed; a threshold off by one tie; an id of zero mass
at the ends of the unit interval; a residual of rounding noise where both laws are equal.
The comparison is the contract's (cases.py): the drawn id has mass, and its float64 CDF interval,
widened by 1e-6, holds the uniform. Runs in Triton's interpreter where there is no GPU.
"""

from collections.abc import Callable

import pytest
import torch
from cases import Case, assert_same_verification, make_case, with_rules

from kernels import verify as module
from kernels.reference import verify as reference_verify

verify = module.verify
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
JUST_BELOW_ONE = 1 - 2.0**-53

SHAPES = [  # batch, num_draft, vocab
    (1, 0, 7),
    (3, 1, 7),
    (1, 8, 7),
    (3, 5, 1000),
    (1, 3, 4099),
    (3, 2, 4099),
]


@pytest.mark.parametrize(("batch", "num_draft", "vocab"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_dtypes(batch: int, num_draft: int, vocab: int, dtype: torch.dtype) -> None:
    case = make_case(vocab + batch, batch, num_draft, vocab, dtype=dtype, device=DEVICE)
    assert_same_verification(case, case.run(verify))


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize(("batch", "num_draft", "vocab"), [(3, 4, 1000), (1, 2, 4099)])
def test_greedy_ids_are_the_reference_s(
    batch: int, num_draft: int, vocab: int, one_hot: bool
) -> None:
    """bfloat16 logits tie often; a tie across splits must go to the lower id."""
    case = make_case(
        1,
        batch,
        num_draft,
        vocab,
        dtype=torch.bfloat16,
        temperature=0,
        one_hot=one_hot,
        device=DEVICE,
    )
    case.target_logits[0, :, [3, vocab - 1]] = 20.0
    got, want = case.run(verify), case.run(reference_verify)
    assert torch.equal(got.token_ids, want.token_ids)
    assert torch.equal(got.num_accepted, want.num_accepted)
    assert torch.equal(got.target_logprobs, want.target_logprobs)
    assert torch.equal(got.draft_logprobs, want.draft_logprobs)
    mixed = case.options["temperature"].to(DEVICE)  # not known on the host: the general path
    assert torch.equal(case.with_options(temperature=mixed).run(verify).token_ids, want.token_ids)


@pytest.mark.parametrize("rule", ["top_k", "top_p", "min_p", "repetition_penalty"])
def test_each_rule(rule: str) -> None:
    case = with_rules(make_case(2, 3, 2, 300, dtype=torch.bfloat16, device=DEVICE), rule)
    assert_same_verification(case, case.run(verify))


def test_all_rules_and_kinds_of_rows_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "block_size", lambda vocab: 256)
    case = make_case(3, 3, 2, 300, temperature=0.8, draft_dtype=torch.bfloat16, device=DEVICE)
    case = with_rules(case, "top_k", "top_p", "min_p", "repetition_penalty").with_options(
        temperature=torch.tensor([0.8, 1.3, 0.0]),
        num_draft_tokens=torch.tensor([2, 1, 2]),
        draft_is_one_hot=torch.tensor([False, True, False]),
    )
    assert_same_verification(case, case.run(verify))


def test_a_row_alone_is_the_row_in_the_batch() -> None:
    """E5 in small: results are equal bit for bit, whatever stands beside the row."""
    case = with_rules(make_case(4, 3, 3, 300, device=DEVICE), "min_p")
    together = case.run(verify)
    for row in range(3):
        alone = Case(
            case.target_logits[row : row + 1],
            case.draft_token_ids[row : row + 1],
            case.draft_logits[row : row + 1],
            {name: value[row : row + 1] for name, value in case.options.items()},
        ).run(verify)
        for name in ("token_ids", "num_accepted", "target_logprobs", "draft_logprobs"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row]), name


@pytest.mark.parametrize("layout", ["positions first", "vocabulary first", "every second column"])
def test_strides_are_honoured(layout: str) -> None:
    case = with_rules(make_case(5, 3, 2, 1000, device=DEVICE), "repetition_penalty")
    strided = Case(
        _relaid(case.target_logits, layout),
        case.draft_token_ids.t().contiguous().t(),
        _relaid(case.draft_logits, layout),
        {
            **case.options,
            "uniforms": case.options["uniforms"].t().contiguous().t(),
            "seen_token_counts": case.options["seen_token_counts"].t().contiguous().t(),
        },
    )
    assert not strided.target_logits.is_contiguous()
    assert_same_verification(strided, got := strided.run(verify))
    assert torch.equal(got.token_ids, case.run(verify).token_ids)


def _relaid(logits: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "positions first":
        return logits.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "vocabulary first":
        return logits.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    return torch.stack([logits, torch.full_like(logits, 50.0)], -1).flatten(-2)[..., ::2]


def test_rows_beyond_the_draft_are_never_looked_at() -> None:
    case = make_case(6, 3, 4, 1000, device=DEVICE).with_options(
        num_draft_tokens=torch.tensor([1, 4, 0])
    )
    case.draft_token_ids[1, 2] = -1  # row 1 ends here, whatever follows
    for row, length in enumerate([1, 2, 0]):
        case.target_logits[row, length + 1 :] = float("nan")
        case.draft_logits[row, length:] = float("nan")
        case.draft_token_ids[row, length + 1 :] = 10**9
    for implementation in (verify, reference_verify):
        assert_same_verification(case, case.run(implementation))


def test_one_hot_rows_need_no_readable_draft_logits() -> None:
    case = make_case(7, 3, 2, 300, device=DEVICE)
    case.draft_logits[1] = float("nan")
    case = case.with_options(draft_is_one_hot=torch.tensor([False, True, False]))
    for implementation in (verify, reference_verify):
        assert_same_verification(case, case.run(implementation))


@pytest.mark.parametrize("uniform", [0.0, JUST_BELOW_ONE])
@pytest.mark.parametrize("implementation", [verify, reference_verify])
def test_the_ends_of_the_unit_interval(uniform: float, implementation: Callable) -> None:
    """First and last ids have no mass here: a CDF read carelessly would pick them."""
    case = make_case(8, 3, 2, 300, device=DEVICE)
    case.target_logits[..., :3] = -float("inf")
    case.target_logits[..., -40:] = -float("inf")
    case.options["uniforms"][:] = uniform
    assert_same_verification(case, case.run(implementation))


@pytest.mark.parametrize("implementation", [verify, reference_verify])
def test_equal_laws_accept_everything(implementation: Callable) -> None:
    """u q < p holds for every u < 1 when both probabilities are computed alike."""
    case = make_case(9, 3, 4, 1000, closeness=1.0, device=DEVICE)
    case.options["uniforms"][:] = JUST_BELOW_ONE
    assert case.run(implementation).num_accepted.tolist() == [4, 4, 4]


@pytest.mark.parametrize("implementation", [verify, reference_verify])
def test_zero_residual_draws_from_the_target(implementation: Callable) -> None:
    """Equal laws, and a draft that neither could have made: rejected, with an empty residual."""
    case = make_case(10, 3, 2, 300, closeness=1.0, device=DEVICE)
    case.target_logits[:, 0, 5] = case.draft_logits[:, 0, 5] = -float("inf")
    case.draft_token_ids[:, 0] = 5
    out = case.run(implementation)
    assert out.num_accepted.tolist() == [0, 0, 0]
    assert_same_verification(case, out)


@pytest.mark.parametrize("implementation", [verify, reference_verify])
def test_a_nearly_equal_drafter(implementation: Callable) -> None:
    """The residual is 1e-4 of the mass: float32 probabilities would misplace its CDF by 1e-3."""
    case = make_case(11, 3, 1, 1000, closeness=1.0, device=DEVICE)
    noise = torch.randn(case.draft_logits.shape, generator=torch.Generator().manual_seed(1))
    case.draft_logits.add_(1e-4 * noise.to(DEVICE))
    impossible = case.draft_token_ids[:, 0].tolist()
    case.target_logits[torch.arange(3), 0, impossible] = -float("inf")  # so that all are rejected
    case.draft_logits[torch.arange(3), 0, impossible] = -12.0
    assert_same_verification(case, case.run(implementation))


@pytest.mark.parametrize("rule", ["top_k", "top_p"])
@pytest.mark.parametrize("implementation", [verify, reference_verify])
def test_ties_at_a_threshold_are_kept(rule: str, implementation: Callable) -> None:
    """Five tokens share the place where the rule cuts; each of them comes up where it should."""
    kept = {3: 0.0, 7: 2.0, 100: 0.0, 150: 0.0, 200: 0.0, 290: 2.0, 299: 0.0}
    logits = torch.full((300,), -3.0, dtype=torch.bfloat16)
    logits[list(kept)] = torch.tensor(list(kept.values()), dtype=torch.bfloat16)
    weights = torch.tensor(list(kept.values()), dtype=torch.float64).exp()
    borders = weights.cumsum(0) - weights / 2
    # Inside the mass of the five, after that of the two: at the third of a descending order.
    reach = (2 * weights.max() + 0.5) / logits.double().exp().sum()
    case = Case(
        logits.expand(7, 1, 300).to(DEVICE),
        torch.zeros(7, 0, dtype=torch.int64, device=DEVICE),
        None,
        {
            "temperature": torch.ones(7),
            "uniforms": (borders / weights.sum())[:, None].to(DEVICE),
            rule: {"top_k": torch.tensor(3), "top_p": reach}[rule].expand(7),
        },
    )
    assert case.run(implementation).token_ids.flatten().tolist() == list(kept)


def test_uniforms_in_float32() -> None:
    case = make_case(12, 3, 2, 300, device=DEVICE)
    case = case.with_options(uniforms=case.options["uniforms"].float())
    assert_same_verification(case, case.run(verify))


def test_unchecked_calls_give_the_same() -> None:
    case = make_case(13, 1, 2, 300, device=DEVICE)
    assert torch.equal(case.run(verify, check=False).token_ids, case.run(verify).token_ids)
