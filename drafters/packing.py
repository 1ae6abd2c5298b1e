"""Several answers in a row: short answers do not pay for the longest one of their batch.

Each answer keeps its own positions and sees itself only, so loss and gradients are those of the
padded batch. Answers are neither split nor left out; which row one goes to depends on lengths only.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from drafters.batches import AnswerLike, Batch, first_predicted, stored_teacher


def pack(
    answers: Sequence[AnswerLike],
    vocab_size: int,
    max_tokens: int,
    row_tokens: int,
    with_teacher: bool = True,
) -> Batch:
    """As few rows as first-fit finds, of at most `row_tokens` each, on the CPU.

    Answers are cut after `max_tokens` tokens. Predicted tokens come in the order of the rows.
    """
    lengths = [min(len(answer.token_ids), max_tokens) for answer in answers]
    rows = [[answers[i] for i in row] for row in first_fit_decreasing(lengths, row_tokens)]
    texts = [[answer.token_ids[:max_tokens].long() for answer in row] for row in rows]
    kept = [[_predicting(answer, max_tokens) for answer in row] for row in rows]
    segments = [[torch.full_like(text, i) for i, text in enumerate(row)] for row in texts]
    token_ids, keep, segment_ids = _padded(texts), _padded(kept), _padded(segments, filler=-1)
    counts = [int(places.sum()) for places in chain(*kept)]
    return Batch(
        token_ids=token_ids,
        attention_mask=(segment_ids >= 0).long(),
        keep=keep,
        next_ids=token_ids.roll(-1, dims=1)[keep],
        teacher=stored_teacher(list(chain(*rows)), counts, vocab_size) if with_teacher else None,
        position_ids=_padded([[torch.arange(len(text)) for text in row] for row in texts]),
        segments=segment_ids,
        places=keep.flatten().nonzero()[:, 0],
    )


def first_fit_decreasing(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Rows of indices, longest first (the earlier of two alike), each put where it first fits."""
    if lengths and max(lengths) > row_tokens:
        raise ValueError(
            f"an answer of {max(lengths)} tokens does not fit row_tokens={row_tokens}; "
            "raise it, or lower max_tokens"
        )
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, left in enumerate(room) if left >= lengths[index]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def _predicting(answer: AnswerLike, max_tokens: int) -> Tensor:  # [T] bool
    """The places that predict a token of the answer: not the last, which a stranger follows."""
    places = torch.arange(min(len(answer.token_ids), max_tokens))
    return (places >= first_predicted(answer) - 1) & (places < len(places) - 1)


def _padded(rows: list[list[Tensor]], filler: int = 0) -> Tensor:
    joined = [torch.cat(row) for row in rows]
    return nn.utils.rnn.pad_sequence(joined, batch_first=True, padding_value=filler)
