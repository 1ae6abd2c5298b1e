"""Plain decoding of many prompts at once, with a record of what the target thought at every token.

Prompts of a batch are padded on the left, so that all rows append at the same column; a row that
has ended leaves the batch, and its cache rows with it. The draw at a position depends on (seed,
key, position) alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decode.noise import PhiloxNoise
from decode.sampling import law_of
from decode.types import Sampling
from kernels.reference import inverse_cdf, processed_probs

if TYPE_CHECKING:
    from transformers import DynamicCache


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to answer under one law."""

    key: str  # names the stream of random numbers: no two jobs of a run share it
    prompt_ids: list[int]
    sampling: Sampling
    max_new_tokens: int


@dataclass(slots=True)
class Trace:
    """An answer as it grows: per position a token, its log-probability and the best logits."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    lse: list[float] = field(default_factory=list)
    topk_ids: list[Tensor] = field(default_factory=list)  # each [k]
    topk_logits: list[Tensor] = field(default_factory=list)
    finish_reason: str = "length"


class Generator:
    """A causal LM of transformers, ready to answer batches of jobs."""

    def __init__(
        self, model: torch.nn.Module, eos_token_ids: frozenset[int], num_top_logits: int
    ) -> None:
        self.model = model
        self.eos_token_ids = eos_token_ids
        self.num_top_logits = num_top_logits
        self.device = next(model.parameters()).device

    @torch.inference_mode()
    def answer(self, jobs: Sequence[Job]) -> list[Trace]:
        """Answer one batch; the k-th trace belongs to the k-th job."""
        from transformers import DynamicCache

        traces = [Trace() for _ in jobs]
        live = list(range(len(jobs)))  # jobs whose rows are in the batch, in row order
        ids, mask = self._padded([job.prompt_ids for job in jobs])
        cache = DynamicCache()
        while True:
            logits = self._forward(ids, mask, cache)
            tokens = self._step(logits, [jobs[row] for row in live], [traces[row] for row in live])
            keep = [
                place for place, row in enumerate(live) if not self._ended(jobs[row], traces[row])
            ]
            if not keep:
                return traces
            ids = tokens[:, None]
            if len(keep) < len(live):
                rows = torch.tensor(keep, device=self.device)
                cache.batch_select_indices(rows)
                ids, mask, live = ids[rows], mask[rows], [live[place] for place in keep]
            mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)

    def _padded(self, prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:  # both [B, longest]
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        return ids.to(self.device), mask.to(self.device)

    def _forward(self, ids: Tensor, mask: Tensor, cache: "DynamicCache") -> Tensor:  # [B, V]
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def _step(self, logits: Tensor, jobs: Sequence[Job], traces: Sequence[Trace]) -> Tensor:  # [B]
        """Choose each row's next token and write down what it was chosen from."""
        lse = logits.float().logsumexp(dim=-1)
        if not torch.isfinite(lse).all():
            bad = next(
                job.key
                for job, ok in zip(jobs, torch.isfinite(lse).tolist(), strict=True)
                if not ok
            )
            raise ValueError(
                f"the target's logits are not finite while answering {bad}; try "
                "stages.regenerate.dtype=float32, or save the target's weights again"
            )
        tokens, logprobs = self._choose(logits, jobs, traces)
        best = logits.topk(min(self.num_top_logits, logits.shape[-1]), dim=-1)
        topk_ids, topk_logits = best.indices.int().cpu(), best.values.cpu()
        columns = zip(traces, tokens.tolist(), logprobs.tolist(), lse.tolist(), strict=True)
        for row, (trace, token, logprob, total) in enumerate(columns):
            trace.token_ids.append(token)
            trace.logprobs.append(logprob)
            trace.lse.append(total)
            trace.topk_ids.append(topk_ids[row])
            trace.topk_logits.append(topk_logits[row])
        return tokens

    def _choose(
        self, logits: Tensor, jobs: Sequence[Job], traces: Sequence[Trace]
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B] and their log-probabilities [B] under each row's law.

        A greedy law is one-hot at the lowest id of the maximum, which is what argmax returns: its
        rows need no probabilities over the vocabulary, on a CPU a tenth of the step.
        """
        tokens = logits.argmax(dim=-1)
        logprobs = torch.zeros(len(jobs), dtype=torch.float64, device=logits.device)
        drawn = [row for row, job in enumerate(jobs) if not job.sampling.greedy]
        if drawn:
            rows = torch.tensor(drawn, device=logits.device)
            law = law_of(tuple(jobs[row].sampling for row in drawn))
            probs = processed_probs(logits[rows], *law)
            uniforms = [uniform(jobs[row], len(traces[row].token_ids)) for row in drawn]
            ids = inverse_cdf(
                probs, torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
            )
            tokens[rows] = ids
            logprobs[rows] = probs.gather(1, ids[:, None])[:, 0].log()
        return tokens, logprobs

    def _ended(self, job: Job, trace: Trace) -> bool:
        if trace.token_ids[-1] in self.eos_token_ids:
            trace.finish_reason = "eos"
            return True
        return len(trace.token_ids) >= job.max_new_tokens


def uniform(job: Job, position: int) -> float:
    """The random number of one position: the same in every batch, after every resume."""
    noise = PhiloxNoise(job.sampling.seed)
    return float(noise.uniforms(job.key, position, "verify", 1)[0])
