"""Distances between a teacher's law p and a drafter's q, per token, in float32.

D are the ids that the drafter can propose; q is a law over D. The teacher is known by all its V
logits, or by its k largest with the log-sum-exp of all: p_i = exp(logit_i - lse) is exact for every
known id either way (temperature 1, nothing truncated).

forward_kl  S = known ids in D, m = sum of p over S:
            m KL(p/m || q) = sum_S p (log p - log m - log q).
            What lies outside S (the truncated tail, and ids outside D) is left out, and the token
            counts by the mass that is left. All logits known: S = D, nothing is truncated.
others      dense over D: the tail's mass, 1 - (sum over known ids) and 1e-7 at least, is spread
            evenly over the V - k unknown ids; m is the mass of all this in D.
reverse_kl  m KL(q || p/m)
jsd         m (KL(p/m || a) + KL(q || a)) / 2, with a the mean of the two laws
tv          1 - sum_D min(p, q): exactly the chance that a drafted token is rejected
            (arXiv 2211.17192, theorem 3.5). p is not renormalised, so ids outside D count as lost.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_TAIL = 1e-7  # float32 sums do not know less; a tail of zero would be an infinite reverse KL
TINY = 1e-30  # keeps log of an exact zero finite; far below any float32 probability that matters


@dataclass(frozen=True)
class Teacher:
    """The target's law at N positions; `ids` None: `logits` has a column for each of V ids."""

    logits: Tensor  # [N, k] raw, or [N, V]
    lse: Tensor  # [N] log-sum-exp of all V raw logits
    ids: Tensor | None  # [N, k] int64
    vocab_size: int

    @classmethod
    def full(cls, logits: Tensor) -> "Teacher":
        """From all logits [N, V]."""
        return cls(logits, logits.float().logsumexp(-1), None, logits.shape[-1])

    def known(self, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(draft columns [N, k], 0 where outside D; probabilities [N, k]; inside D [N, k] bool)."""
        found = columns.expand(len(self.lse), -1) if self.ids is None else columns[self.ids]
        probs = (self.logits.float() - self.lse.float()[:, None]).exp()
        return found.clamp(min=0), probs, found >= 0

    def dense(self, columns: Tensor, num_columns: int) -> Tensor:  # [N, C]
        """Probabilities of the draft columns, the tail spread evenly; rows sum to the mass in D."""
        found, probs, inside = self.known(columns)
        num_unknown = self.vocab_size - probs.shape[-1]
        tail = (1 - probs.sum(-1, keepdim=True)).clamp(min=LEAST_TAIL) / max(1, num_unknown)
        spread = (
            tail.repeat(1, num_columns) if num_unknown else probs.new_zeros(len(probs), num_columns)
        )
        rows, places = inside.nonzero(as_tuple=True)
        spread[rows, found[rows, places]] = probs[rows, places]
        return spread


def cross_entropy(
    logits: Tensor, token_ids: Tensor, columns: Tensor
) -> Tensor:  # [N, C], [N], [V] -> [N]
    """-log q of the token that came; 0 where the drafter cannot propose it, nor learn to."""
    found = columns[token_ids]
    losses = torch.nn.functional.cross_entropy(logits.float(), found.clamp(min=0), reduction="none")
    return torch.where(found >= 0, losses, 0.0)


def forward_kl(logits: Tensor, teacher: Teacher, columns: Tensor) -> Tensor:  # [N, C] -> [N]
    log_q = logits.float().log_softmax(-1)
    found, probs, inside = teacher.known(columns)
    probs = torch.where(inside, probs, 0.0)
    mass = probs.sum(-1, keepdim=True)
    terms = probs * (
        probs.clamp(min=TINY).log() - mass.clamp(min=TINY).log() - log_q.gather(-1, found)
    )
    return torch.where(inside, terms, 0.0).sum(-1)


def reverse_kl(logits: Tensor, teacher: Teacher, columns: Tensor) -> Tensor:  # [N, C] -> [N]
    log_q = logits.float().log_softmax(-1)
    p, mass = _renormalised(teacher.dense(columns, logits.shape[-1]))
    return mass * (log_q.exp() * (log_q - p.clamp(min=TINY).log())).sum(-1)


def jsd(logits: Tensor, teacher: Teacher, columns: Tensor) -> Tensor:  # [N, C] -> [N]
    log_q = logits.float().log_softmax(-1)
    q = log_q.exp()
    p, mass = _renormalised(teacher.dense(columns, logits.shape[-1]))
    log_mean = ((p + q) / 2).clamp(min=TINY).log()
    to_p = (p * (p.clamp(min=TINY).log() - log_mean)).sum(-1)
    to_q = (q * (log_q - log_mean)).sum(-1)
    return mass * (to_p + to_q) / 2


def tv(logits: Tensor, teacher: Teacher, columns: Tensor) -> Tensor:  # [N, C] -> [N]
    q = logits.float().softmax(-1)
    return 1 - torch.minimum(teacher.dense(columns, logits.shape[-1]), q).sum(-1)


DIVERGENCES: dict[str, Callable[[Tensor, Teacher, Tensor], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tv": tv,
}
LOSSES = ("cross_entropy", *DIVERGENCES)


def _renormalised(probs: Tensor) -> tuple[Tensor, Tensor]:
    mass = probs.sum(-1)
    return probs / mass.clamp(min=TINY)[:, None], mass
