"""Values and contracts that cross a room boundary.

The consumer owns the contract: the loop says here what targets, drafters, policies and routers
must be, and knows no kind of any of them. Values are frozen and small. Records that reach disk hold
plain numbers.

Letters: B rows (requests in one step), T verified tokens of a row (prompt and output), K drafted
tokens, V target vocabulary. Token ids on the host are lists of int; seconds come from the injected
clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from kernels.types import Verification

__all__ = [
    "OFF",
    "Choice",
    "DraftProposal",
    "DraftSampler",
    "DraftSession",
    "Drafter",
    "Policy",
    "PolicySession",
    "Prior",
    "Request",
    "Router",
    "Sampling",
    "StepRecord",
    "Target",
    "TargetSession",
    "Verification",
]

OFF = "off"  # the choice not to speculate in a step
MAX_DRAFT_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The law that is kept: how raw logits become probabilities, and the seed of the noise.

    Order: repetition penalty, temperature, top-k, top-p, min-p. Temperature 0 is greedy (the lowest
    id wins a tie).
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature={self.temperature} must be 0 (greedy) or a positive number"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (off) or a positive number of tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]; 1 turns it off")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must lie in [0, 1]; 0 turns it off")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty} must be positive; 1 turns it off"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


# ---- target


class TargetSession(Protocol):
    """One row's state inside a target: what has been read, nothing about how it is stored."""

    @property
    def length(self) -> int:
        """Tokens read so far and not rolled back."""


@runtime_checkable
class Target(Protocol):
    """The model whose law is kept, behind prefill / score / roll back."""

    vocab_size: int
    max_context: int  # tokens; positions 0..max_context - 1 exist
    eos_token_ids: frozenset[int]
    backend: str  # "transformers", later "native"

    @property
    def device(self) -> str:
        """Where score() returns its logits, as torch names it."""

    def open(self) -> TargetSession:
        """A fresh row that has read nothing."""

    def prefill(self, session: TargetSession, token_ids: Sequence[int]) -> None:
        """Read a prompt's tokens; their logits are not needed."""

    def score(
        self, sessions: Sequence[TargetSession], token_ids: Sequence[Sequence[int]]
    ) -> Tensor:  # [B, W, V], W = the longest row; shorter rows are padded at the end with zeros
        """Read each row's tokens; [b, i] holds the raw logits of what follows token_ids[b][i]."""

    def rollback(self, session: TargetSession, length: int) -> None:
        """Forget all but the first `length` tokens."""


# ---- drafters


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """What a drafter offers for one step of one row."""

    token_ids: list[int]  # k tokens, 0 <= k <= the number asked for
    # [k, V] raw logits that each token was drawn from; None: chosen without chance
    logits: Tensor | None
    source: str  # the leaf that guessed: a composite names the part it used


class DraftSampler(Protocol):
    """Draws a drafter's tokens for it, so that randomness and the processed law have one home."""

    @property
    def greedy(self) -> bool:
        """True at temperature 0: the law is one-hot, so the proposal's logits may be None."""

    def draw(self, logits: Tensor) -> int:  # [V] raw logits over the target's vocabulary
        """The next draft token, drawn from exactly the law that verification will assume."""


class DraftSession(Protocol):
    """One row's state inside a drafter."""

    def offer(self, token_ids: Sequence[int]) -> int:
        """Most tokens it could propose after these verified tokens (cheap; 0: nothing now)."""

    def propose(
        self, token_ids: Sequence[int], num_draft_tokens: int, sampler: DraftSampler
    ) -> DraftProposal:
        """Guess what follows the verified tokens, after bringing its own cache up to date.

        `token_ids` is the whole row, prompt and output. Between calls it may have grown by any
        number of tokens, and tokens proposed earlier may be missing from it.
        """


@runtime_checkable
class Drafter(Protocol):
    """The thing that guesses; knows the target's vocabulary and nothing of verification."""

    num_parameters: int  # of its own, shared tensors not counted
    memory_bytes: int  # of its own weights

    def open(self) -> DraftSession:
        """A fresh row."""

    def score(
        self,
        token_ids: Sequence[int],  # prompt and answer, T tokens
        num_prompt_tokens: int,
        target_logprobs: Tensor,  # [T - num_prompt_tokens] under the target's processed law
        sampling: Sampling,
        max_depth: int,
    ) -> Tensor:  # [T - num_prompt_tokens, max_depth] float32
        """Chance that each depth's draft is accepted, had drafting begun at each answer token.

        Entry [t, d] is conditional on the d drafts before it being accepted: greedy, 1 where the
        drafter's guess equals the answer's token t + d and else 0; sampling, min(1, draft_prob /
        target_prob) of the realised token (arXiv 2510.20064). NaN: no proposal there (not a
        rejection), or past the end.
        """


# ---- policies


@dataclass(frozen=True, slots=True)
class Prior:
    """Belief about each drafter before the first token of one prompt is drafted.

    Acceptance is the chance that a drafted token is accepted given that those before it were, at
    depth 1; `depth_offsets[name][k]` is what depth k + 1 adds to its logit. All values are on the
    logit scale.
    """

    mean: Mapping[str, float]
    sd: Mapping[str, float]
    population_mean: Mapping[str, float]
    population_sd: Mapping[str, float]
    depth_offsets: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    source: str = "population"  # "router" where the prompt was looked at
    # Chance that a drafter proposes anything when it is asked, where that is not known beforehand.
    match_chance: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """What a policy knows of a row when it starts."""

    request_id: str
    num_prompt_tokens: int
    max_new_tokens: int
    sampling: Sampling
    prior: Prior | None
    # Drafters whose offers say what they may propose, and who may then propose nothing at all.
    unsure: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    """An arm for one step, and why; expected values are NaN where a policy has none."""

    drafter: str  # a name in the pool, or OFF
    num_draft_tokens: int  # 0 exactly when drafter is OFF
    reason: str  # "fixed", "prior", "data", "explore", "cost", "company", "nothing offered", ...
    expected_tokens: float = float("nan")
    expected_seconds: float = float("nan")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One decoding step of one row, as policies learn from it and logs keep it."""

    request_id: str
    step: int
    position: int  # verified tokens before the step, prompt included
    drafter: str
    source: str  # who guessed: the drafter, or the part that a composite used; a name in the pool
    num_draft_tokens: int  # asked for
    num_drafted: int  # proposed
    num_accepted: int
    num_emitted: int  # accepted + 1, or fewer where the text ended
    draft_seconds: float
    verify_seconds: float  # target pass and verification
    host_seconds: float  # the rest of the step
    reason: str
    expected_tokens: float
    expected_seconds: float

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.host_seconds


class PolicySession(Protocol):
    """One row's belief."""

    def choose(self, offers: Mapping[str, int]) -> Choice:
        """Pick from what is on offer: drafter name -> most tokens it could propose now.

        The choice is made before a token is drawn, from verified tokens and past records only;
        therefore it cannot bias the output (arXiv 2505.15141, proposition 3.1).
        """

    def learn(self, record: StepRecord) -> None:
        """Take in what happened, rejections included."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """What rows that are decoded side by side share; a target whose rows do has it as `sharing`."""

    padded: bool  # the target's pass computes each row as wide as the widest; else what is drafted
    drafts_together: bool  # a model drafts for all rows at once; else for one after another


@runtime_checkable
class Policy(Protocol):
    """Chooses an arm (drafter, K) or OFF for every step; memory across rows is its own affair."""

    def open(self, request: Request) -> PolicySession:
        """A fresh row."""


@runtime_checkable
class JointPolicy(Policy, Protocol):
    """A policy that weighs rows, sessions of its own, against each other where they share a pass of
    the target.
    """

    def choose_together(
        self,
        sessions: Sequence[PolicySession],
        offers: Sequence[Mapping[str, int]],
        sharing: Sharing,
    ) -> list[Choice]:
        """As PolicySession.choose for each of the rows of one step, which are two or more."""

    def learn_together(
        self, sessions: Sequence[PolicySession], num_positions: int, seconds: float
    ) -> None:
        """Take in what the target's pass took, verification included: over so many positions in
        all rows, each as wide as the widest where passes are padded.
        """


@runtime_checkable
class Router(Protocol):
    """What was learned before decoding: a prompt's text -> a prior over the pool."""

    def prior(self, text: str, num_prompt_tokens: int, sampling: Sampling) -> Prior:
        """The belief for one prompt; `text` is what the person wrote, without a chat template."""
