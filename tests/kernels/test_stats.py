"""Is what launch 1 says about each split the maximum and the sum of weights that are there?

Would catch: a part of a split read twice or not at all; logits past the vocabulary; of two bfloat16
in one register the wrong one, or one that the other leaves bits in; a sum by the rounded scale
where logits are large; NaN that a maximum swallows; tokens penalised at a position before the draft
that makes them seen; a group's maximum that forgets a penalised token; rows that are not used.
Maxima are exact. Sums are of float32: 5e-7 is what rounding of powers up to 16 yields, all alike.
Runs in Triton's interpreter where there is no GPU; both take the same code but for pairs in a
register.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.inputs import Inputs
from kernels.stats import GROUP, Statistics, row_statistics
from kernels.verify import block_size, launch_arguments, truncation_rules

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLACK = 5e-7
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NOT_GIVEN = (
    "num_draft_tokens", "draft_is_one_hot", "top_k", "top_p", "min_p", "repetition_penalty",
    "seen_token_counts",
)  # fmt: skip
INF, NAN = float("inf"), float("nan")


@dataclass
class Rows:
    """One call of launch 1, and the logits that it is about."""

    target: Tensor  # [B, K + 1, V]
    draft: Tensor | None  # [B, K, V]
    ids: Tensor  # [B, K]
    temperature: Tensor  # [B]
    options: dict[str, Tensor]

    def statistics(self) -> Statistics:
        inputs = Inputs(
            self.target,
            self.ids,
            self.draft,
            self.temperature,
            torch.zeros(self.target.shape[:2], dtype=torch.float64, device=DEVICE),
            **(dict.fromkeys(NOT_GIVEN) | self.options),
        )
        call = launch_arguments(inputs)
        return row_statistics(call, self.target.device, truncation_rules(inputs))

    def penalised(self) -> Tensor:
        """float32 of every row [B, rows, V], seen tokens penalised."""
        models = [self.target] if self.draft is None else [self.target, self.draft]
        rows = []
        for model in models:
            for position in range(model.shape[1]):
                rows.append(self._penalised(model[:, position].float(), position))
        return torch.stack(rows, 1)

    def _penalised(self, logits: Tensor, position: int) -> Tensor:
        penalty = self.options.get("repetition_penalty")
        if penalty is None:
            return logits
        counts = self.options.get("seen_token_counts")
        seen = torch.zeros_like(logits, dtype=torch.bool) if counts is None else counts > 0
        seen = seen.scatter(1, self.ids[:, :position], True)
        penalty = penalty.to(logits)[:, None]
        worse = torch.where(logits > 0, logits / penalty, logits * penalty)
        return torch.where(seen, worse, logits)


def assert_right(rows: Rows, found: Statistics) -> None:
    """Raise AssertionError unless all that launch 1 left about rows in use is right."""
    logits = rows.penalised()
    batch, count, vocab = logits.shape
    block = block_size(vocab)
    splits = -(-vocab // block)
    room = torch.full((batch, count, splits * block), -INF, device=DEVICE)
    room[..., :vocab] = logits
    z = room.view(batch, count, splits, block)
    bad = (z.isnan() | (z == INF)).any(-1)
    peak = torch.where(bad, INF, z.nan_to_num(nan=INF, neginf=-INF, posinf=INF).amax(-1))
    assert torch.equal(found.maxima, peak)
    for b in range(batch):
        t = float(rows.temperature[b])
        if t == 0:
            best = z[b].argmax(-1) + block * torch.arange(splits, device=DEVICE)
            keep = ~bad[b] & (peak[b] > -INF)
            assert torch.equal(found.best[b].long()[keep], best[keep])
            continue
        assert found.sums is not None
        sums, fine = found.sums[b], ~bad[b]
        assert bool(sums[~fine].isnan().all())
        behind = z[b].double() - torch.where(peak[b] > -INF, peak[b], 0.0).double()[..., None]
        want = (behind / t).exp().sum(-1)
        torch.testing.assert_close(sums[fine], want[fine], rtol=SLACK, atol=0, check_dtype=False)
        if found.groups is not None:
            group = min(GROUP, block)
            tops = room[b].view(count, -1, group).amax(-1)
            clean = fine.repeat_interleave(block // group, -1)
            assert torch.equal(found.groups[b][clean], tops[clean])
    num_draft = rows.ids.shape[1]
    for row in range(count):
        position = row if row <= num_draft else row - num_draft - 1
        if position < num_draft:
            own = logits[:, row].gather(1, rows.ids[:, position : position + 1])[:, 0]
            assert torch.equal(found.drafted[:, row].nan_to_num(), own.nan_to_num())


def make_rows(
    vocab: int, dtype: torch.dtype, *, shift: float = 0.0, spread: float = 2.5, seed: int = 0
) -> Rows:
    generator = torch.Generator().manual_seed(seed + vocab)
    logits = spread * torch.randn(2, 5, vocab, generator=generator) + shift
    ids = torch.randint(0, vocab, (2, 2), generator=generator)
    logits = logits.to(dtype).to(DEVICE)
    temperature = torch.tensor([0.7, 1.3], dtype=torch.float64)
    return Rows(logits[:, :3].clone(), logits[:, 3:].clone(), ids.to(DEVICE), temperature, {})


def with_rules(rows: Rows, *, share: float, penalty: float, **rules: Any) -> Rows:
    """The rows with a share of the vocabulary seen before, and two drafts alike."""
    vocab = rows.target.shape[-1]
    generator = torch.Generator().manual_seed(vocab)
    counts = (torch.rand(2, vocab, generator=generator) < share).int()
    rows.options = {
        "repetition_penalty": torch.tensor([penalty, 1.0 / penalty], device=DEVICE),
        "seen_token_counts": counts.to(DEVICE),
        **{name: torch.tensor(value, device=DEVICE) for name, value in rules.items()},
    }
    return rows


@pytest.mark.parametrize("vocab", [7, 300, 1000, 20_011])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_rows(vocab: int, dtype: torch.dtype) -> None:
    rows = make_rows(vocab, dtype)
    assert_right(rows, rows.statistics())


@pytest.mark.parametrize(("spread", "shift"), [(0.0, 3.0), (25.0, 0.0), (2.0, -4000.0), (1e-4, 0)])
def test_flat_peaked_and_far_rows(spread: float, shift: float) -> None:
    rows = make_rows(9000, torch.float32, spread=spread, shift=shift)
    assert_right(rows, rows.statistics())


@pytest.mark.parametrize("shift", [1e4, -3e5])
def test_temperatures_that_powers_of_float32_cannot_hold(shift: float) -> None:
    """The first is summed by float32, just so; the second by float64."""
    rows = make_rows(300, torch.float32, shift=shift)
    rows.temperature = torch.tensor([0.95, 1e-3], dtype=torch.float64)
    assert_right(rows, rows.statistics())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rules", [False, True])
def test_infinities_and_nan_tell_on_themselves(dtype: torch.dtype, rules: bool) -> None:
    rows = make_rows(9000, dtype)
    if rules:
        rows = with_rules(rows, share=0.01, penalty=1.5, top_k=[5, 9])
    rows.target[0, 0, :] = -INF
    rows.target[0, 1, 1::3] = -INF
    rows.target[0, 2, 8999] = NAN
    rows.target[1, 0, 5] = NAN
    rows.target[1, 1, 4] = INF
    rows.target[1, 2, :8192] = -INF
    rows.target[1, 2, 8192 + 17] = NAN
    assert_right(rows, rows.statistics())


@pytest.mark.parametrize("known", [True, False])
def test_greedy_rows_get_the_lowest_id(known: bool) -> None:
    rows = make_rows(9000, torch.bfloat16)
    rows.target[0, :, [17, 1025, 8191, 8192, 8999]] = 30.0
    rows.temperature = torch.tensor([0.0, 0.0 if known else 1.0], dtype=torch.float64)
    rows.temperature = rows.temperature if known else rows.temperature.to(DEVICE)
    found = rows.statistics()
    assert (found.sums is None) == known
    assert_right(rows, found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["odd rows", "every second", "vocabulary first"])
def test_strided_logits(dtype: torch.dtype, layout: str) -> None:
    rows = make_rows(8999, dtype)
    for name in ("target", "draft"):
        given = getattr(rows, name)
        if layout == "odd rows":
            room = given.new_empty(*given.shape[:2], 9003)[..., 3:-1]
        elif layout == "every second":
            room = given.new_empty(*given.shape[:2], 2 * 8999)[..., ::2]
        else:
            room = given.new_empty(8999, *given.shape[:2]).permute(1, 2, 0)
        setattr(rows, name, room.copy_(given))
    assert_right(rows, rows.statistics())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_penalties_and_groups(dtype: torch.dtype, share: float) -> None:
    rows = with_rules(make_rows(9000, dtype), share=share, penalty=1.3, top_k=[5, 0])
    rows.ids[0, 1] = rows.ids[0, 0] = 8500
    assert_right(rows, rows.statistics())


@pytest.mark.parametrize(
    "options", [{"top_k": [5, 0]}, {"top_p": [0.9, 1.0]}, {"min_p": [0.1, 0.0]}], ids=str
)
def test_groups_alone(options: dict[str, Any]) -> None:
    rows = make_rows(9000, torch.bfloat16)
    rows.options = {name: torch.tensor(value, device=DEVICE) for name, value in options.items()}
    assert_right(rows, rows.statistics())


def test_a_penalty_alone_and_no_counts() -> None:
    rows = with_rules(make_rows(1000, torch.bfloat16), share=0.1, penalty=0.5)
    assert_right(rows, rows.statistics())
    del rows.options["seen_token_counts"]
    assert_right(rows, rows.statistics())


def test_a_row_alone_is_the_row_in_the_batch() -> None:
    rows = with_rules(make_rows(9000, torch.bfloat16), share=0.01, penalty=1.3, top_k=[5, 7])
    together = rows.statistics()
    for b in range(2):
        one = slice(b, b + 1)
        options = {name: value[one] for name, value in rows.options.items()}
        assert rows.draft is not None
        alone = Rows(
            rows.target[one], rows.draft[one], rows.ids[one], rows.temperature[one], options
        ).statistics()
        for name in ("maxima", "sums", "groups", "drafted"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[b]), name


def test_another_type_of_draft_logits() -> None:
    rows = make_rows(1000, torch.bfloat16)
    assert rows.draft is not None
    rows.draft = rows.draft.float()
    assert_right(rows, rows.statistics())
