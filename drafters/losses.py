"""What training minimises: distances between a teacher's law p and a drafter's q, per token.

In float32. D are the ids that the drafter can propose; q is a law over D. The teacher is known by
all its V logits, or by its k largest with the log-sum-exp of all.

cross_entropy  -log q of the token that came; 0 where the drafter cannot propose it, nor learn to.
forward_kl  S = known ids in D, m = sum of p over S:
            m KL(p/m || q) = sum_S p (log p - log m - log q).
            What lies outside S (the truncated tail, and ids outside D) is left out, and the token
            counts by the mass that is left. All logits known: S = D, nothing is truncated.
others      dense over D: the tail's mass, 1 - (sum over known ids) and 1e-7 at least, is spread
            evenly over the V - k unknown ids; m is the mass of all this in D.
reverse_kl  m KL(q || p/m)
jsd         m (KL(p/m || a) + KL(q || a)) / 2, with a the mean of the two laws
tv          1 - alpha, with alpha = sum_D min(p, q): exactly the chance that a drafted token is
            accepted (arXiv 2211.17192, theorem 3.5). p is not renormalised, so ids outside D
            count as lost. Its gradient vanishes where the laws hardly overlap.
lk_alpha    -log alpha: the gradient of tv divided by alpha (arXiv 2602.23881).
lk_hybrid   lambda forward_kl + (1 - lambda) tv, lambda = exp(-eta alpha), alpha a constant:
            KL while the laws hardly overlap, tv afterwards (arXiv 2602.23881; here token by token).
tvpp        The value of tv with another gradient (TVD++, arXiv 2403.00858). The gradient of tv is
            a policy gradient, E_q[-r grad log q], with the reward r(x) = [p(x) > q(x)]; here the
            reward is replaced by its advantage (r - b) / sqrt(b (1 - b)), b = E_q[r], mean and
            deviation over the drafter's own law at the token. The expectation is taken over all
            of D, nothing is drawn. The mean changes nothing then; the deviation lifts a gradient
            that would shrink as b, when q has no mass where p exceeds it, to sqrt(b).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from drafters.teachers import AnyTeacher, LazyTeacher, Teacher, wide

__all__ = [
    "DIVERGENCES",
    "LOSSES",
    "AnyTeacher",
    "Laws",
    "LazyTeacher",
    "Objective",
    "Teacher",
    "acceptance_chances",
    "cross_entropy",
]

TINY = 1e-30  # keeps log of an exact zero finite; far below any float32 probability that matters
POSITION_WEIGHTS = ("uniform", "decay", "reach", "gain")


class Laws:
    """Both laws at N positions, each form computed once, when a loss first asks for it."""

    def __init__(
        self,
        logits: Tensor,  # [N, C]
        teacher: Teacher,
        columns: Tensor,  # [V] the draft column of each id, or -1
        eta: float = 3.0,  # of lk_hybrid
    ) -> None:
        self.logits, self.teacher, self.eta = wide(logits), teacher, eta
        self.columns = within(columns, logits.shape[-1])

    @cached_property
    def log_q(self) -> Tensor:  # [N, C]
        return self.logits.log_softmax(-1)

    @cached_property
    def q(self) -> Tensor:  # [N, C]
        return self.log_q.exp()

    @cached_property
    def p(self) -> Tensor:  # [N, C], sums to the mass in D
        return self.teacher.dense(self.columns, self.logits.shape[-1])

    @cached_property
    def mass(self) -> Tensor:  # [N]
        return self.p.sum(-1)

    @cached_property
    def renormalised(self) -> Tensor:  # [N, C]
        return self.p / self.mass.clamp(min=TINY)[:, None]

    @cached_property
    def alpha(self) -> Tensor:  # [N]
        """The chance that a token drawn from q is accepted."""
        return torch.minimum(self.p, self.q).sum(-1)


def cross_entropy(
    logits: Tensor, token_ids: Tensor, columns: Tensor
) -> Tensor:  # [N, C], [N], [V] -> [N]
    found = within(columns, logits.shape[-1])[token_ids]
    losses = torch.nn.functional.cross_entropy(wide(logits), found.clamp(min=0), reduction="none")
    return torch.where(found >= 0, losses, 0.0)


def forward_kl(laws: Laws) -> Tensor:  # [N]
    if laws.teacher.ids is None:  # S = D
        log_p = laws.renormalised.clamp(min=TINY).log()
        return (laws.p * (log_p - laws.log_q)).sum(-1)
    found, probs, inside = laws.teacher.known(laws.columns)
    probs = torch.where(inside, probs, 0.0)
    mass = probs.sum(-1, keepdim=True)
    log_p = probs.clamp(min=TINY).log() - mass.clamp(min=TINY).log()
    return torch.where(inside, probs * (log_p - laws.log_q.gather(-1, found)), 0.0).sum(-1)


def reverse_kl(laws: Laws) -> Tensor:  # [N]
    log_p = laws.renormalised.clamp(min=TINY).log()
    return laws.mass * (laws.q * (laws.log_q - log_p)).sum(-1)


def jsd(laws: Laws) -> Tensor:  # [N]
    p = laws.renormalised
    log_mean = ((p + laws.q) / 2).clamp(min=TINY).log()
    to_p = (p * (p.clamp(min=TINY).log() - log_mean)).sum(-1)
    to_q = (laws.q * (laws.log_q - log_mean)).sum(-1)
    return laws.mass * (to_p + to_q) / 2


def tv(laws: Laws) -> Tensor:  # [N]
    return 1 - laws.alpha


def lk_alpha(laws: Laws) -> Tensor:  # [N]
    return -laws.alpha.clamp(min=TINY).log()


def lk_hybrid(laws: Laws) -> Tensor:  # [N]
    share = (-laws.eta * laws.alpha.detach()).exp()
    return share * forward_kl(laws) + (1 - share) * tv(laws)


def tvpp(laws: Laws) -> Tensor:  # [N]
    q = laws.q.detach()
    reward = (laws.p > q).to(q.dtype)
    mean = (q * reward).sum(-1, keepdim=True)
    deviation = (mean * (1 - mean)).clamp(min=TINY).sqrt()
    score = -(q * (reward - mean) / deviation * laws.log_q).sum(-1)
    return tv(laws).detach() + score - score.detach()


DIVERGENCES: dict[str, Callable[[Laws], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tv": tv,
    "tvpp": tvpp,
    "lk_alpha": lk_alpha,
    "lk_hybrid": lk_hybrid,
}
LOSSES = ("cross_entropy", *DIVERGENCES)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A weighted sum of losses (the list above), and how much each token counts.

    The weights of tokens have mean 1 over a batch (drafters/weights.py has their formulas):
    uniform  every token counts alike;
    decay    by its place in the answer, half as much every `half_life` tokens;
    reach    by how often a draft of `num_draft_tokens` is still alive when it gets there;
    gain     by what its acceptance adds to the tokens emitted per target pass.
    """

    mix: dict[str, float]  # loss -> its factor, above 0
    position_weights: str  # one of POSITION_WEIGHTS
    half_life: float  # answer tokens; of "decay"
    num_draft_tokens: int  # K; of "reach" and "gain"
    lk_eta: float  # how fast lk_hybrid turns from KL to TV as acceptance rises; 3 in the paper

    def __post_init__(self) -> None:
        unknown = [name for name in self.mix if name not in LOSSES]
        if unknown or not self.mix:
            raise ValueError(
                f"mix={dict(self.mix)} must name at least one of {', '.join(LOSSES)}, and no other"
            )
        if not all(0 < factor < float("inf") for factor in self.mix.values()):
            raise ValueError(f"mix={dict(self.mix)} has a factor that is not above 0; leave it out")
        if self.position_weights not in POSITION_WEIGHTS:
            raise ValueError(
                f"position_weights={self.position_weights} is unknown; use one of "
                f"{', '.join(POSITION_WEIGHTS)}"
            )
        for name in ("half_life", "num_draft_tokens"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if not self.lk_eta >= 0:
            raise ValueError(f"lk_eta={self.lk_eta} must be at least 0")

    @property
    def weighs_chances(self) -> bool:
        """Whether a token's weight follows from acceptance chances."""
        return self.position_weights in ("reach", "gain")

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's law must be known, not only its text."""
        return self.weighs_chances or any(name in DIVERGENCES for name in self.mix)

    def per_token(
        self, logits: Tensor, next_ids: Tensor, teacher: Teacher | None, columns: Tensor
    ) -> Tensor:  # [N, C], [N], N laws, [V] -> [N]
        """The weighted sum of losses at each token."""
        total = logits.new_zeros(len(logits), dtype=wide(logits[:0]).dtype)
        laws = None if teacher is None else Laws(logits, teacher, columns, self.lk_eta)
        for name, factor in self.mix.items():
            if name == "cross_entropy":
                total = total + factor * cross_entropy(logits, next_ids, columns)
            else:
                assert laws is not None, f"{name} needs a teacher"
                total = total + factor * DIVERGENCES[name](laws)
        return total


def acceptance_chances(logits: Tensor, teacher: Teacher, columns: Tensor) -> Tensor:  # [N]
    """The chance that the token drafted at each position is accepted, at temperature 1."""
    return Laws(logits, teacher, columns).alpha


def within(columns: Tensor, num_columns: int) -> Tensor:  # [V]
    """The draft column of each id, -1 where the drafter has fewer columns than that."""
    return columns.where(columns < num_columns, -1)
