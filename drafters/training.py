"""The mathematics of training a drafter: batches, their loss, and acceptance on validation answers.

The loop around it (optimiser, accumulation, checkpoints) belongs to the pipeline. Losses come as a
sum and a count, so that gradients can be normalised per token over any number of batches.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from decode.types import Drafter, Sampling
from drafters.losses import DIVERGENCES, LOSSES, Teacher, cross_entropy
from drafters.vocabulary import columns_of


class AnswerLike(Protocol):
    """P prompt tokens and the target's A answer tokens, as the answers artifact keeps them."""

    @property
    def token_ids(self) -> Tensor: ...  # [P + A] int64
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def logprobs(self) -> Tensor: ...  # [A] of each answer token under its law
    @property
    def lse(self) -> Tensor: ...  # [A] of the raw logits
    @property
    def topk_ids(self) -> Tensor: ...  # [A, k]
    @property
    def topk_logits(self) -> Tensor: ...  # [A, k] raw


class Trainable(Protocol):
    """A network that training optimises; LmDrafter.trainable is one."""

    draft_ids: Tensor | None  # [C] ids of the draft columns; None: column c is id c

    def __call__(
        self, token_ids: Tensor, attention_mask: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:  # [B, T] right-padded, keep [B, T] bool of N true entries -> [N, C]
        """Teacher-forced logits at the kept positions, in row-major order."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the optimiser may change: nothing that the target shares."""


@dataclass(frozen=True)
class Batch:
    """Padded answers. N counts the answer tokens that are predicted, in row-major order."""

    token_ids: Tensor  # [B, T] int64, padded at the end with 0
    attention_mask: Tensor  # [B, T] int64, 1 at tokens
    keep: Tensor  # [B, T] bool: position i predicts token i + 1, which belongs to the answer
    next_ids: Tensor  # [N] int64
    teacher: Teacher | None  # None: no stored law, cross-entropy only

    @property
    def num_tokens(self) -> int:
        """Answer tokens predicted: what a loss is normalised by."""
        return len(self.next_ids)


@dataclass(frozen=True)
class LossSum:
    """A loss summed over tokens, to be divided by a count that may span several batches."""

    total: Tensor  # scalar float32, differentiable
    num_tokens: int

    @property
    def mean(self) -> Tensor:
        return self.total / max(1, self.num_tokens)


def collate(
    answers: Sequence[AnswerLike], vocab_size: int, max_tokens: int, with_teacher: bool = True
) -> Batch:
    """Pad answers, cut after `max_tokens` tokens, into a batch on the CPU."""
    rows = [answer.token_ids[:max_tokens].long() for answer in answers]
    lengths = torch.tensor([len(row) for row in rows])
    firsts = torch.tensor([max(answer.num_prompt_tokens, 1) for answer in answers])
    token_ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    places = torch.arange(token_ids.shape[1])[None]
    keep = (places >= firsts[:, None] - 1) & (places < lengths[:, None] - 1)
    return Batch(
        token_ids=token_ids,
        attention_mask=(places < lengths[:, None]).long(),
        keep=keep,
        next_ids=token_ids.roll(-1, dims=1)[keep],
        teacher=_stored_teacher(answers, keep, vocab_size) if with_teacher else None,
    )


def _stored_teacher(answers: Sequence[AnswerLike], keep: Tensor, vocab_size: int) -> Teacher:
    """The recorded laws of exactly the kept tokens."""
    ids, logits, lse = [], [], []
    for answer, kept in zip(answers, keep.sum(1).tolist(), strict=True):
        low = max(
            1 - answer.num_prompt_tokens, 0
        )  # an empty prompt leaves the first token unpredicted
        ids.append(answer.topk_ids[low : low + kept].long())
        logits.append(answer.topk_logits[low : low + kept].float())
        lse.append(answer.lse[low : low + kept].float())
    return Teacher(torch.cat(logits), torch.cat(lse), torch.cat(ids), vocab_size)


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """The batch on another device."""
    teacher = batch.teacher
    if teacher is not None:
        ids = None if teacher.ids is None else teacher.ids.to(device)
        teacher = Teacher(
            teacher.logits.to(device), teacher.lse.to(device), ids, teacher.vocab_size
        )
    ids, mask, keep, next_ids = (
        t.to(device) for t in (batch.token_ids, batch.attention_mask, batch.keep, batch.next_ids)
    )
    return Batch(ids, mask, keep, next_ids, teacher)


def training_loss(network: Trainable, batch: Batch, loss: str, vocab_size: int) -> LossSum:
    """The named loss (one of LOSSES) summed over the batch's answer tokens.

    Every predicted token counts in the normaliser. One that the drafter cannot propose adds nothing
    to cross-entropy; what a divergence makes of such ids is said in drafters/losses.py.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss={loss} is not known; choose one of {', '.join(LOSSES)}")
    logits = network(batch.token_ids, batch.attention_mask, batch.keep)
    columns = columns_of(network.draft_ids, vocab_size, logits.device)
    if loss == "cross_entropy":
        return LossSum(cross_entropy(logits, batch.next_ids, columns).sum(), batch.num_tokens)
    if batch.teacher is None:
        raise ValueError(
            f"loss={loss} needs the target's recorded logits; run stage=regenerate first"
        )
    return LossSum(DIVERGENCES[loss](logits, batch.teacher, columns).sum(), batch.num_tokens)


def validation_acceptance(
    drafter: Drafter, answers: Iterable[AnswerLike], num_draft_tokens: int
) -> Tensor:  # [prompts, 2] float64: tokens emitted, target passes
    """What decoding each recorded answer takes; acceptance_length = sum of tokens / sum of passes.

    Greedy answers: exactly the passes that decoding them takes, were the text to end there.
    Sampled ones: the expected number of passes, given the text that came.
    """
    return (
        torch.tensor([_tokens_and_passes(drafter, answer, num_draft_tokens) for answer in answers])
        .double()
        .reshape(-1, 2)
    )


def _tokens_and_passes(
    drafter: Drafter, answer: AnswerLike, num_draft_tokens: int
) -> tuple[float, float]:
    accept = drafter.score(
        answer.token_ids.tolist(),
        answer.num_prompt_tokens,
        answer.logprobs,
        answer.sampling,
        num_draft_tokens,
    )
    return float(len(accept)), expected_passes(accept)


def expected_passes(accept: Tensor) -> float:  # [A, D], NaN: no proposal
    """Target passes that emit A tokens, from acceptance by start and depth.

    begins[t] is the chance that a pass starts at token t; r accepted drafts move it to t + r + 1.
    """
    chances = accept.nan_to_num(0.0).tolist()
    begins = [1.0] + [0.0] * (len(chances) - 1)
    for start, row in enumerate(chances):
        alive = begins[start]  # chance of standing here with every draft so far accepted
        for depth in range(len(row) + 1):
            chance = row[depth] if depth < len(row) else 0.0
            if start + depth + 1 < len(chances):
                begins[start + depth + 1] += alive * (1 - chance)
            alive *= chance
            if alive == 0:
                break
    return sum(begins) if chances else 0.0
