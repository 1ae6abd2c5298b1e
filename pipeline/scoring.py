"""What the drafters of a pool make of many answers: what `drafter.score` says of each, in batches.

A drafter with a network reads many answers at once, on its device; a part of a composite that is in
the pool itself is scored once for both.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from decode.types import MAX_DRAFT_TOKENS, Drafter
from drafters.batch_scoring import batch_chances
from drafters.composite import CompositeDrafter
from drafters.network_drafter import NetworkDrafter
from drafters.scoring import by_start
from pipeline.answers import Answer

CHUNK = 512  # answers whose passes are counted at once


def score_all(
    drafters: Mapping[str, Drafter], answers: Sequence[Answer], max_depth: int
) -> dict[str, list[Tensor]]:
    """[A, max_depth] of every answer, by drafter; NaN: no proposal."""
    known: dict[int, list[Tensor]] = {}
    return {name: _tables(one, answers, max_depth, known) for name, one in drafters.items()}


def _tables(
    drafter: Drafter, answers: Sequence[Answer], max_depth: int, known: dict[int, list[Tensor]]
) -> list[Tensor]:
    if id(drafter) not in known:
        if isinstance(drafter, NetworkDrafter):
            known[id(drafter)] = [
                _limited(by_start(chances, max_depth))
                for chances in batch_chances(drafter, answers)
            ]
        elif isinstance(drafter, CompositeDrafter):
            lookup = _tables(drafter.lookup, answers, max_depth, known)
            model = _tables(drafter.model, answers, max_depth, known)
            known[id(drafter)] = [
                torch.where(
                    drafter.believed(answer.token_ids.tolist(), answer.num_prompt_tokens)[:, None],
                    found,
                    guessed,
                )
                for answer, found, guessed in zip(answers, lookup, model, strict=True)
            ]
        else:
            known[id(drafter)] = [score(drafter, answer, max_depth) for answer in answers]
    return known[id(drafter)]


def _limited(table: Tensor) -> Tensor:
    table[:, MAX_DRAFT_TOKENS:] = torch.nan
    return table


def score(drafter: Drafter, answer: Answer, max_depth: int) -> Tensor:  # [A, max_depth]
    """The drafter's chances on one answer."""
    return drafter.score(
        answer.token_ids.tolist(),
        answer.num_prompt_tokens,
        answer.logprobs,
        answer.sampling,
        max_depth,
    )


def passes_of(tables: Sequence[np.ndarray], num_draft_tokens: int) -> np.ndarray:  # -> [answers]
    """Expected target passes that emit each answer, of its acceptance [A, D] by start and depth.

    As `drafters.training.expected_passes` has it, for all answers step by step: begins[:, t] is the
    chance that a pass starts at token t, and r accepted drafts move it to t + r + 1.
    """
    order = np.argsort([len(table) for table in tables], kind="stable")  # little padding
    passes = np.zeros(len(tables))
    for low in range(0, len(order), CHUNK):
        places = order[low : low + CHUNK]
        passes[places] = _passes([tables[place] for place in places], num_draft_tokens)
    return passes


def _passes(tables: Sequence[np.ndarray], num_draft_tokens: int) -> np.ndarray:
    lengths = np.array([len(table) for table in tables])
    longest = int(lengths.max(initial=0))
    depth = min(num_draft_tokens, max((table.shape[1] for table in tables), default=0))
    chances = np.zeros((len(tables), longest, depth + 1))  # the last column: no more drafts
    for place, table in enumerate(tables):
        chances[place, : len(table), :depth] = np.nan_to_num(table[:, :depth], nan=0.0)
    begins = np.zeros((len(tables), longest + depth + 1))
    begins[:, 0] = 1
    total = np.zeros(len(tables))
    for start in range(longest):
        total += begins[:, start] * (start < lengths)
        alive = np.cumprod(chances[:, start], axis=1)  # chance that drafts 0..d are all accepted
        reach = np.concatenate([np.ones((len(tables), 1)), alive[:, :-1]], axis=1)
        ends = begins[:, start, None] * (reach - alive)
        begins[:, start + 1 : start + depth + 2] += ends
    return total
