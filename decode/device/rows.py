"""What the host knows of a row while steps of it are under way."""

from collections import deque
from dataclasses import dataclass, field

from decode.device.steps import Arrival
from decode.native.static_cache import StaticRow
from decode.noise import Noise
from decode.stopping import Stopper
from decode.types import Choice, PolicySession, Request, StepRecord
from kernels.race import Key


@dataclass(frozen=True, slots=True)
class RowStep:
    """A row's part of a step: what was asked of the device."""

    choice: Choice
    limit: int  # tokens to draft at most
    model: int | None  # which model drafts, where no lookup matched
    looks_up: bool


@dataclass(slots=True, eq=False)
class DeviceRow:
    """One request while it is decoded; `token_ids` are those of the steps that were taken in."""

    request: Request
    token_ids: list[int]  # verified, prompt and output
    stopper: Stopper
    noise: Noise
    key: Key  # of Gumbel coupling
    policy: PolicySession | None  # None: no drafters, plain decoding
    target: StaticRow | None  # None: the text has ended
    models: dict[int, StaticRow] = field(default_factory=dict)  # `length`: read for certain
    records: list[StepRecord] = field(default_factory=list)
    under_way: deque[RowStep] = field(default_factory=deque)
    num_queued: int = 0  # steps, over the row's life
    passed_over: int = 0  # steps since its model last drafted, though it was chosen
    prefill_seconds: float = 0.0

    @property
    def goes_on(self) -> bool:
        """Whether the steps under way leave it a token to emit, as far as is known."""
        ended = self.stopper.finish_reason is not None
        return not ended and self.stopper.most_draft_tokens >= len(self.under_way)

    @property
    def most_draft_tokens(self) -> int:
        """Drafts that the next step could use; each step under way emits a token at least."""
        return max(self.stopper.most_draft_tokens - len(self.under_way), 0)

    @property
    def most_tokens(self) -> int:
        """Verified tokens after the steps under way, at most."""
        return len(self.token_ids) + sum(step.limit + 1 for step in self.under_way)

    def most_unread(self, model: int) -> int:
        """Verified tokens that a model lacks after the steps under way, at most."""
        lacks = len(self.token_ids) - self.models[model].length
        for step in self.under_way:
            drafts = step.model == model and not step.looks_up
            lacks = 2 if drafts else lacks + step.limit + 1  # at most the last draft and one more
        return lacks

    def release(self) -> None:
        """Hand its places in all caches back."""
        self.target = None
        self.models.clear()


@dataclass(frozen=True, eq=False)
class QueuedStep:
    """A step under way."""

    rows: list[DeviceRow]
    steps: list[RowStep]
    num_drafts: int  # K, columns of the draft
    continues: bool  # rows of the step before go on, so that time between the two is this one's
    read_ahead: bool  # a model read old tokens first
    arrival: Arrival
