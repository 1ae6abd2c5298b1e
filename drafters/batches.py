"""Batches of answers to learn from: what is read, what is predicted, what the target thought of it.

N counts the predicted tokens of a batch, in row-major order. The rows are padded at the end; a row
holds one answer (collate), or several one after another (drafters/packing.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from decode.types import Sampling
from drafters.inner import only
from drafters.teachers import AnyTeacher, Teacher


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


@dataclass(frozen=True)
class Batch:
    """Padded rows of answers."""

    token_ids: Tensor  # [B, T] int64, padded at the end with 0
    attention_mask: Tensor  # [B, T] int64, 1 at tokens
    keep: Tensor  # [B, T] bool: position i predicts token i + 1, which belongs to the answer
    next_ids: Tensor  # [N] int64
    teacher: AnyTeacher | None  # None: no stored law, cross-entropy only
    position_ids: Tensor | None = None  # [B, T] the place in its own answer; None: in the row
    segments: Tensor | None = None  # [B, T] which answer of its row, -1 padding; None: one a row
    weights: Tensor | None = None  # [N] of predicted tokens; None: as the objective has it
    places: Tensor | None = None  # [N] where `keep` is true, counted through all rows, if known
    draft_logprobs: Tensor | None = None  # [N] where the drafter wrote the text: under its own law

    @property
    def num_tokens(self) -> int:
        """Answer tokens predicted: what a loss is normalised by."""
        return len(self.next_ids)

    @property
    def mask(self) -> Tensor | None:
        """What `DraftNetwork` takes as attention_mask: [B, 1, T, T] bool where rows are packed.

        One answer a row needs none: padding stands behind all that is predicted, and without a
        mask attention runs through the fastest kernels.
        """
        if self.segments is None:
            return None
        queries, keys = self.segments[:, :, None], self.segments[:, None, :]
        together = ((queries == keys) & (keys >= 0)).tril()
        itself = torch.eye(together.shape[1], dtype=torch.bool, device=together.device)
        return (together | itself)[:, None]  # padding sees itself: an empty row would be NaN

    @property
    def predicting(self) -> Tensor:
        """The kept positions in the cheaper of two forms; what a network takes as `keep`."""
        return self.keep if self.places is None else self.places

    @property
    def owners(self) -> Tensor:  # [N] int64
        """A number for the answer that each predicted token belongs to."""
        segments = torch.zeros_like(self.token_ids) if self.segments is None else self.segments
        rows = torch.arange(len(segments), device=segments.device)[:, None] * segments.shape[1]
        return only(rows + segments, self.predicting)


def collate(
    answers: Sequence[AnswerLike], vocab_size: int, max_tokens: int, with_teacher: bool = True
) -> Batch:
    """Pad answers, cut after `max_tokens` tokens, into a batch on the CPU."""
    rows = [answer.token_ids[:max_tokens].long() for answer in answers]
    lengths = torch.tensor([len(row) for row in rows])
    firsts = torch.tensor([first_predicted(answer) for answer in answers])
    token_ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    places = torch.arange(token_ids.shape[1])[None]
    keep = (places >= firsts[:, None] - 1) & (places < lengths[:, None] - 1)
    counts = keep.sum(1).tolist()
    return Batch(
        token_ids=token_ids,
        attention_mask=(places < lengths[:, None]).long(),
        keep=keep,
        next_ids=token_ids.roll(-1, dims=1)[keep],
        places=keep.flatten().nonzero()[:, 0],
        teacher=stored_teacher(answers, counts, vocab_size) if with_teacher else None,
    )


def first_predicted(answer: AnswerLike) -> int:
    """The place of its first token that something is read before."""
    return max(answer.num_prompt_tokens, 1)


def stored_teacher(
    answers: Sequence[AnswerLike], counts: Sequence[int], vocab_size: int
) -> Teacher:
    """The recorded laws of the first so many predicted tokens of each answer."""
    ids, logits, lse = [], [], []
    for answer, count in zip(answers, counts, strict=True):
        low = first_predicted(answer) - answer.num_prompt_tokens  # 1 after an empty prompt
        ids.append(answer.topk_ids[low : low + count].long())
        logits.append(answer.topk_logits[low : low + count].float())
        lse.append(answer.lse[low : low + count].float())
    return Teacher(torch.cat(logits), torch.cat(lse), torch.cat(ids), vocab_size)


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """The batch on another device."""
    moved: dict[str, Any] = {
        name: value.to(device)
        for name, value in vars(batch).items()
        if isinstance(value, (Tensor, AnyTeacher))
    }
    return replace(batch, **moved)
