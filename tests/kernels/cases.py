"""Makers of verification calls, and the contract's own way of comparing two implementations."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kernels.reference import processed_probs
from kernels.types import Verification

# What "the same token" means between two float summation orders (contract of verify).
CDF_SLACK = 1e-6
# Residuals of a drafter's law are taken in float32 where they hold LITTLE of the mass or more. Then
# some 1e-7 of the *emitted* law is misplaced (kernels/residual.py): a CDF that is off by e matters
# as often as a draft is rejected, R, and so e R is what is bounded. Below LITTLE it is float64.
EMITTED_SLACK, LITTLE = 4e-7, 2.0**-12
# The acceptance test works on float32 sums: relative error some 2^-23 for each of both laws.
ACCEPT_SLACK = 1e-6
# float32 log-probabilities of a few tens carry 2e-6; the float32 sums add 1e-7.
LOGPROB_SLACK = 1e-5


@dataclass(frozen=True)
class Case:
    """One call of verify."""

    target_logits: Tensor
    draft_token_ids: Tensor
    draft_logits: Tensor | None
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, verify: Any, **more: Any) -> Verification:
        return verify(
            self.target_logits, self.draft_token_ids, self.draft_logits, **self.options, **more
        )

    def with_options(self, **options: Any) -> "Case":
        return replace(self, options={**self.options, **options})

    def drafts(self, row: int) -> list[int]:
        """Drafts in use, read with plain Python."""
        ids = self.draft_token_ids[row].tolist()
        lengths = self.options.get("num_draft_tokens")
        ids = ids if lengths is None else ids[: int(lengths[row])]
        return ids[: ids.index(-1)] if -1 in ids else ids

    def one_hot(self, row: int) -> bool:
        flags = self.options.get("draft_is_one_hot")
        return self.draft_logits is None if flags is None else bool(flags[row])

    def laws(self, row: int, logits: Tensor, drafts: list[int]) -> Tensor:
        """Processed laws [positions, V], float64, the penalty's counts growing along the drafts."""
        logits = logits[row, : len(drafts) + 1]
        counts = self.options.get("seen_token_counts")
        seen = torch.zeros_like(logits, dtype=torch.bool)
        if counts is not None:
            seen |= counts[row] > 0
        for i, token in enumerate(drafts):
            seen[i + 1 :, token] = True
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        rules = {
            name: self.options[name][row : row + 1].to(logits.device).expand(len(logits))
            for name in names
            if self.options.get(name) is not None
        }
        return processed_probs(logits, **rules, seen=seen)


def make_case(
    seed: int,
    batch: int,
    num_draft: int,
    vocab: int,
    *,
    dtype: torch.dtype = torch.float32,
    draft_dtype: torch.dtype | None = None,
    temperature: float = 1.0,
    closeness: float = 0.7,  # 1: the drafter is the target, so that nearly all is accepted
    one_hot: bool = False,
    device: str = "cpu",
) -> Case:
    """Peaked random laws, drafts drawn from the drafter's, uniforms in float64."""
    generator = torch.Generator().manual_seed(seed)
    target = 2.5 * torch.randn(batch, num_draft + 1, vocab, generator=generator)
    other = 2.5 * torch.randn(batch, num_draft, vocab, generator=generator)
    draft = closeness * target[:, :num_draft] + (1 - closeness) * other
    target, draft = target.to(dtype), draft.to(draft_dtype or dtype)
    flat = draft.float().reshape(-1, vocab) / (temperature or 1)
    if num_draft and temperature:
        ids = torch.multinomial(flat.softmax(-1), 1, generator=generator).view(batch, num_draft)
    else:
        ids = flat.argmax(-1).view(batch, num_draft)
    uniforms = torch.rand(batch, num_draft + 1, dtype=torch.float64, generator=generator)
    options = {
        "temperature": torch.full((batch,), temperature, dtype=torch.float64),
        "uniforms": uniforms.to(device),
    }
    return Case(target.to(device), ids.to(device), None if one_hot else draft.to(device), options)


def with_rules(case: Case, *names: str) -> Case:
    """The case with the rules named, another value in each row; some rows ask for none."""
    batch, _, vocab = case.target_logits.shape
    row = torch.arange(batch)
    rules: dict[str, Tensor] = {
        "top_k": torch.tensor([5, 0, 40])[row % 3],
        "top_p": torch.tensor([0.9, 0.7, 1.0], dtype=torch.float64)[row % 3],
        "min_p": torch.tensor([0.02, 0.0, 0.1], dtype=torch.float64)[row % 3],
        "repetition_penalty": torch.tensor([1.3, 0.8, 1.0])[row % 3],
    }
    options = {name: rules[name] for name in names}
    if "repetition_penalty" in names:
        generator = torch.Generator().manual_seed(0)
        counts = torch.randint(0, 5, (batch, vocab), generator=generator).sub(3).clamp(min=0)
        options["seen_token_counts"] = counts.int().to(case.target_logits.device)
    return case.with_options(**options)


def assert_same_verification(case: Case, got: Verification) -> None:
    """Raise AssertionError unless `got` is an answer that the contract of verify allows."""
    batch, width, _ = case.target_logits.shape
    assert got.token_ids.shape == got.target_logprobs.shape == (batch, width)
    assert got.token_ids.dtype == got.num_accepted.dtype == torch.int64
    for row in range(batch):
        _assert_row(case, row, got)


def _assert_row(case: Case, row: int, got: Verification) -> None:
    drafts, n = case.drafts(row), int(got.num_accepted[row])
    ids = got.token_ids[row].tolist()
    where = f"row {row}, drafts {drafts}, got {ids}, accepted {n}"
    assert 0 <= n <= len(drafts), where
    assert ids[:n] == drafts[:n], where
    assert ids[n + 1 :] == [-1] * (len(ids) - n - 1), where
    target = case.laws(row, case.target_logits, drafts)
    draft = torch.zeros_like(target)  # nothing is drafted at the bonus position
    if case.one_hot(row):
        draft[torch.arange(len(drafts)), drafts] = 1
    elif drafts:
        assert case.draft_logits is not None
        draft[:-1] = case.laws(row, case.draft_logits, drafts)[: len(drafts)]
    uniforms = case.options["uniforms"][row].double()
    greedy = float(case.options["temperature"][row]) == 0
    for i, token in enumerate(drafts[: n + 1]):
        bound, p = float(uniforms[i] * draft[i, token]), float(target[i, token])
        if greedy or abs(bound - p) > ACCEPT_SLACK * p:
            assert (i < n) == (bound < p), f"{where}: position {i}, u q = {bound}, p = {p}"
    _assert_drawn(target[n], draft[n], float(uniforms[-1]), ids[n], where)
    emitted = torch.arange(n + 1), torch.tensor(ids[: n + 1])
    _assert_logprobs(got.target_logprobs[row], target[emitted].log(), where)
    draft_probs = draft[emitted]
    if n == len(drafts):
        draft_probs[n] = 1  # a bonus token had no draft
    _assert_logprobs(got.draft_logprobs[row], draft_probs.log(), where)


def cdf_slack(target: Tensor, draft: Tensor) -> float:
    """How far the CDF of the residual of two laws may be off."""
    mass = float((target - draft).clamp(min=0).sum())
    made_by_a_law = 0 < float(draft.max()) < 1
    allowed = EMITTED_SLACK / mass if made_by_a_law and mass >= LITTLE else 0.0
    return max(CDF_SLACK, allowed)


def _assert_drawn(target: Tensor, draft: Tensor, uniform: float, token: int, where: str) -> None:
    slack = cdf_slack(target, draft)
    residual = (target - draft).clamp(min=0)
    if float(residual.sum()) <= 1e-12:
        residual = target
    cumulative = residual.cumsum(-1) / residual.sum()
    above = float(cumulative[token])
    below = above - float(residual[token] / residual.sum())
    assert 0 <= token < len(target), where
    assert float(residual[token]) > 0, f"{where}: an id without mass"
    assert below - slack <= uniform <= above + slack, f"{where}: {below}, {uniform}, {above}"


def _assert_logprobs(got: Tensor, emitted: Tensor, where: str) -> None:
    want = torch.zeros_like(got, dtype=torch.float64)
    want[: len(emitted)] = emitted
    torch.testing.assert_close(
        got.double(), want, rtol=0, atol=LOGPROB_SLACK, msg=lambda text: f"{where}: {text}"
    )
