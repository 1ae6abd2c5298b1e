"""Does the coupled kernel draw what its reference draws, from the noise that numpy's Philox gives?

Would catch: a counter off by one, a word in another's place, a multiplier mistyped; noise of one
row used for another; a split's border lost; truncated tokens that win; counts that miss the draft
prefix; a row whose result depends on the batch; NaN that goes unseen. Runs in Triton's interpreter
where there is no GPU.
"""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from cases import Case, make_case, with_rules

from kernels import coupled, verify
from kernels.coupled import couple
from kernels.coupled_reference import couple as reference
from kernels.race import arrivals
from kernels.types import Verification

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEYS = [(2**64 - 3, 5), (0, 0), (1 << 63, 2**63 + 11), (12345, 678)]
PLACES = [0, 7, 2**33, 100]


@triton.jit
def arrivals_kernel(words_ptr, out_ptr, BLOCK: tl.constexpr):  # noqa: N803
    split = tl.program_id(0)
    key0 = tl.load(words_ptr).to(tl.uint64, bitcast=True)
    key1 = tl.load(words_ptr + 1).to(tl.uint64, bitcast=True)
    place = tl.load(words_ptr + 2).to(tl.uint64)
    e = coupled.arrivals(split, place, key0, key1, BLOCK)
    tl.store(out_ptr + split * BLOCK + tl.arange(0, BLOCK), e)


@pytest.mark.parametrize("number", range(4))
def test_noise_is_that_of_the_host(number: int) -> None:
    key, place = KEYS[number], PLACES[number]
    out = torch.empty(3 * 64, dtype=torch.float64, device=DEVICE)
    words = coupled.key_words([key], [place]).to(DEVICE)
    arrivals_kernel[(3,)](words, out, BLOCK=64)
    torch.testing.assert_close(out.cpu(), arrivals(key, place, 3 * 64), rtol=1e-12, atol=0)


@triton.jit
def nearly_kernel(words_ptr, out_ptr, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.arange(0, BLOCK)
    words = tl.load(words_ptr + at).to(tl.uint64, bitcast=True)
    tl.store(out_ptr + at, coupled.nearly_arrivals(words))


def test_float32_noise_is_near_at_both_ends_of_the_unit_interval() -> None:
    """Smallest numbers decide; the largest must not vanish, or a sure token would lose."""
    numbers = [1, 2, 3, 2**20, 2**45, 2**49, 2**49 - 1, 2**52, 2**53 - 2**30, 2**53 - 2, 2**53 - 1]
    words = torch.tensor(
        [n << 11 if n < 2**52 else (n << 11) - 2**64 for n in numbers] + [2047] * 5
    )
    out = torch.empty(16, device=DEVICE)
    nearly_kernel[(1,)](words.to(DEVICE), out, BLOCK=16)
    u = torch.tensor(numbers, dtype=torch.float64) * 2.0**-53
    torch.testing.assert_close(out[:11].cpu().double(), -torch.log1p(-u), rtol=1e-5, atol=0)
    assert out[11:].tolist() == [0.0] * 5


def test_near_winners_are_told_apart_in_float64() -> None:
    """Every token of the row would arrive at the same time but for the rounding of its logit."""
    for temperature in (0.3, 0.7, 1.1, 1.9):
        case = make_case(1, 4, 0, 12, temperature=temperature, device=DEVICE)
        for row in range(4):
            e = arrivals(KEYS[row], PLACES[row], 12)
            case.target_logits[row, 0] = (temperature * e.log()).float().to(DEVICE)
        found, wanted = both(case)
        assert_same(found, wanted)


def run(function: Callable[..., Verification], case: Case, **options: object) -> Verification:
    """What the kernel or the reference makes of a case, without its drafters' laws."""
    batch = len(case.target_logits)
    given = {**case.options, **options}
    for name in ("uniforms", "draft_is_one_hot"):
        given.pop(name, None)
    given |= {"keys": KEYS[:batch], "places": PLACES[:batch]}
    return function(case.target_logits, case.draft_token_ids, **given)


def both(case: Case, **options: object) -> tuple[Verification, Verification]:
    return run(couple, case, **options), run(reference, case, **options)


def assert_same(found: Verification, wanted: Verification) -> None:
    assert torch.equal(found.token_ids, wanted.token_ids)
    assert torch.equal(found.num_accepted, wanted.num_accepted)
    torch.testing.assert_close(found.target_logprobs, wanted.target_logprobs, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.draft_logprobs, wanted.draft_logprobs)


def follow(case: Case, **options: object) -> Case:
    """The case with drafts that are right at first: row b's first b of them."""
    case = Case(case.target_logits, case.draft_token_ids.clone(), None, case.options)
    for _ in range(case.draft_token_ids.shape[1]):
        right = run(reference, case, **options).token_ids
        for b in range(len(right)):
            kept = min(b, int((right[b] >= 0).sum()), case.draft_token_ids.shape[1])
            case.draft_token_ids[b, :kept] = right[b, :kept]
    return case


@pytest.mark.parametrize(("batch", "num_draft", "vocab"), [(1, 0, 7), (3, 4, 300), (2, 2, 4099)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes(batch: int, num_draft: int, vocab: int, dtype: torch.dtype) -> None:
    case = follow(make_case(batch, batch, num_draft, vocab, dtype=dtype, device=DEVICE))
    found, wanted = both(case)
    assert_same(found, wanted)
    assert batch == 1 or int(wanted.num_accepted.max()) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.4])
@pytest.mark.parametrize(
    "rules", [["top_k"], ["top_p"], ["min_p"], ["repetition_penalty"], ["top_k", "top_p", "min_p"]]
)
def test_rules(rules: list[str], temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "block_size", lambda vocab: 256)
    case = make_case(5, 2, 2, 300, temperature=temperature, dtype=torch.bfloat16, device=DEVICE)
    case = follow(with_rules(case, *rules))
    found, wanted = both(case)
    assert_same(found, wanted)
    assert int(wanted.num_accepted.max()) > 0


def test_greedy_and_sampled_rows_side_by_side_are_each_as_alone() -> None:
    case = make_case(6, 3, 3, 300, device=DEVICE)
    options = {"temperature": torch.tensor([0.0, 0.7, 1.5]), "top_k": torch.tensor([0, 9, 0])}
    case = follow(case, **options)
    found, wanted = both(case, **options)
    assert_same(found, wanted)
    for b in range(3):
        alone = couple(
            case.target_logits[b : b + 1],
            case.draft_token_ids[b : b + 1],
            keys=KEYS[b : b + 1],
            places=PLACES[b : b + 1],
            **{name: values[b : b + 1] for name, values in options.items()},
        )
        assert torch.equal(alone.token_ids[0], found.token_ids[b])


def test_ties_go_to_the_lowest_id_and_broken_rows_are_named() -> None:
    logits = torch.zeros(1, 2, 300, device=DEVICE)
    nothing = torch.tensor([[-1]], device=DEVICE)
    shared = {"temperature": torch.zeros(1), "keys": KEYS[:1], "places": [0]}
    assert couple(logits, nothing, **shared).token_ids.tolist() == [[0, -1]]
    for value, words in ((float("nan"), "holds NaN"), (float("inf"), "holds NaN or .inf")):
        logits[0, 0, 250] = value
        with pytest.raises(ValueError, match=f"batch row 0, position 0 {words}"):
            couple(logits, nothing, **shared)
    logits[0, 0] = -float("inf")
    with pytest.raises(ValueError, match="-inf for every token"):
        couple(logits, nothing, **shared)
