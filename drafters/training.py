"""The mathematics of training a drafter: batches, their loss, and acceptance on validation answers.

The loop around it (optimiser, accumulation, checkpoints) belongs to the pipeline. Losses are sums
over tokens, so that gradients can be normalised per token over any number of batches.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from decode.types import Drafter
from drafters.batches import AnswerLike, Batch, collate
from drafters.chunked import LossesOf, chunked_loss, each_chunk
from drafters.fused import FusedLosses, on_gpu
from drafters.inner import fit_mask, inner_model, only, plain_head
from drafters.losses import (
    DIVERGENCES,
    AnyTeacher,
    Objective,
    Teacher,
    acceptance_chances,
    within,
)
from drafters.networks import DraftNetwork
from drafters.vocabulary import columns_of
from drafters.weights import position_weights, with_mean_one

__all__ = [
    "AnswerLike",
    "Batch",
    "LossModule",
    "collate",
    "expected_passes",
    "teacher_of",
    "validation_acceptance",
]


class LossModule(nn.Module):
    """A network and what it is trained for: every use of a parameter happens inside `forward`.

    At most `chunk_tokens` rows of logits exist at once, the drafter's as the teacher's, where the
    network splits into states and a head (some six float32 copies of [chunk_tokens, C] are the
    peak); elsewhere all logits do.
    """

    def __init__(
        self, network: DraftNetwork, objective: Objective, vocab_size: int, chunk_tokens: int
    ) -> None:
        super().__init__()
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1; try 1024")
        self.network, self.objective = network, objective
        self.vocab_size, self.chunk_tokens = vocab_size, chunk_tokens

    def forward(self, batch: Batch) -> Tensor:
        """Scalar float32: num_tokens times the weighted mean of the loss over predicted tokens.

        Divide by num_tokens, summed over whatever batches share an update. Weights are the
        objective's; those that a batch brings along, brought to mean 1, take their place.
        """
        self._check(batch)
        inputs = (batch.token_ids, batch.mask, batch.predicting, batch.position_ids)
        if not self.network.splits:
            logits = self.network(*inputs)
            weights = self._weights(batch, lambda values_of: values_of(logits.detach(), 0))
            return (self._losses_of(batch)(logits, 0) * weights).sum()
        states, head = self.network.states(*inputs), self.network.head_weight()
        size, fused = self.chunk_tokens, self._fused(batch, states)
        weights = self._weights(batch, lambda of: each_chunk(states, head, of, size), fused)
        gradient_of = None if fused is None else fused.gradient_of
        return chunked_loss(states, head, self._losses_of(batch), weights, size, gradient_of)

    def _fused(self, batch: Batch, states: Tensor) -> FusedLosses | None:
        """The kernel where there is a GPU and it knows all that is asked for; else None."""
        teacher = batch.teacher if self.objective.needs_teacher else None
        if not on_gpu(states) or (teacher is not None and not teacher.complete):
            return None
        columns = within(self._columns(batch), len(self.network.head_weight()))
        return FusedLosses(
            self.objective,
            columns[batch.next_ids],
            self.network.draft_ids,
            teacher,
        )

    def _check(self, batch: Batch) -> None:
        if self.objective.needs_teacher and batch.teacher is None:
            raise ValueError(
                f"mix={self.objective.mix} with position_weights={self.objective.position_weights} "
                "needs the target's law at each token; run stage=regenerate, or put the target in "
                "the loop"
            )
        if batch.draft_logprobs is not None and "cross_entropy" in self.objective.mix:
            raise ValueError(
                "cross_entropy would teach the drafter its own text; leave it out of mix="
                f"{self.objective.mix} where the drafter writes"
            )

    def _columns(self, batch: Batch) -> Tensor:
        return columns_of(self.network.draft_ids, self.vocab_size, batch.token_ids.device)

    def _losses_of(self, batch: Batch) -> LossesOf:
        columns, teacher = self._columns(batch), batch.teacher

        def losses_of(logits: Tensor, low: int) -> Tensor:
            high = low + len(logits)
            laws = teacher.rows(low, high) if teacher is not None and self._needs_laws else None
            return self.objective.per_token(logits, batch.next_ids[low:high], laws, columns)

        return losses_of

    @property
    def _needs_laws(self) -> bool:
        return any(name in DIVERGENCES for name in self.objective.mix)

    def _weights(
        self,
        batch: Batch,
        each: Callable[[LossesOf], Tensor],
        fused: FusedLosses | None = None,
    ) -> Tensor:
        """[N] with mean 1; `each` computes a value of every token from its logits."""
        if batch.weights is not None:
            return with_mean_one(batch.weights)
        chances, columns, teacher = None, self._columns(batch), batch.teacher
        if self.objective.weighs_chances and teacher is not None:

            def chances_of(logits: Tensor, low: int) -> Tensor:
                return acceptance_chances(logits, teacher.rows(low, low + len(logits)), columns)

            chances = each(chances_of if fused is None else fused.chances_of)
        return position_weights(self.objective, batch.owners, chances)


@torch.no_grad()
def teacher_of(model: Any, batch: Batch) -> AnyTeacher:
    """What a causal LM thinks of every predicted token of the batch.

    Lazy, so that no vocabulary-wide row exists yet, where the model's logits are its hidden states
    times a plain head; else all logits of the predicted tokens.
    """
    mask = fit_mask(batch.mask, model.config, next(model.parameters()).dtype)
    inputs = {"attention_mask": mask, "position_ids": batch.position_ids, "use_cache": False}
    if plain_head(model):
        states = inner_model(model)(input_ids=batch.token_ids, **inputs).last_hidden_state
        weight = model.get_output_embeddings().weight
        return Teacher.lazy(only(states, batch.predicting), weight, len(weight))
    # From the first kept column on: what all rows begin with costs no vocabulary-wide logits.
    first = int(batch.keep.any(dim=0).int().argmax())
    size = batch.keep.shape[1] - first
    logits = model(input_ids=batch.token_ids, logits_to_keep=size, **inputs).logits
    return Teacher.full(logits[:, -size:][batch.keep[:, first:]])


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
