"""Table-driven parts for the decoder: they run in microseconds, and their laws are known."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from decode.types import (
    OFF,
    Choice,
    DraftProposal,
    DraftSampler,
    PolicySession,
    Request,
    Sharing,
    StepRecord,
)

Context = Callable[[Sequence[int]], Tensor]  # tokens read -> raw logits [V]


def bigram(weights: Sequence[Sequence[float]]) -> Context:
    """Raw logits log(weight) after each token; a zero weight is -inf."""
    table = torch.tensor(weights, dtype=torch.float32).log()
    return lambda tokens: table[tokens[-1]]


def whole_prefix(vocab_size: int, sharpness: float = 3.0) -> Context:
    """Pseudo-random logits that depend on every token read: one stale token changes them."""

    def logits(tokens: Sequence[int]) -> Tensor:
        key = 7
        for token in tokens:
            key = (key * 1_000_003 + token + 1) % (1 << 61)
        return torch.randn(vocab_size, generator=torch.Generator().manual_seed(key)) * sharpness

    return logits


class FakeRow:
    """What a row has read."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)


class FakeTarget:
    """A target whose logits are a function of what its row has read."""

    backend = "table"
    device = "cpu"

    def __init__(
        self,
        context: Context,
        vocab_size: int,
        *,
        eos_token_ids: Sequence[int] = (),
        max_context: int = 64,
    ) -> None:
        self.context = context
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_context = max_context
        self.widths: list[int] = []  # of every pass
        self.last_read: list[int] = []  # all that the last row scored had read then

    def open(self) -> FakeRow:
        return FakeRow()

    def prefill(self, session: FakeRow, token_ids: Sequence[int]) -> None:
        session.tokens.extend(token_ids)

    def score(self, sessions: Sequence[FakeRow], token_ids: Sequence[Sequence[int]]) -> Tensor:
        width = max(map(len, token_ids))
        logits = torch.zeros(len(sessions), width, self.vocab_size)
        for b, (session, ids) in enumerate(zip(sessions, token_ids, strict=True)):
            for i, token in enumerate(ids):
                session.tokens.append(token)
                logits[b, i] = self.context(session.tokens)
            assert session.length <= self.max_context
            self.last_read = [*session.tokens]
        self.widths.append(width)
        return logits

    def rollback(self, session: FakeRow, length: int) -> None:
        assert length <= session.length
        del session.tokens[length:]


class FakeDrafter:
    """Guesses from logits of its own; `chance=False` proposes the maximum and reports no law."""

    num_parameters = 0
    memory_bytes = 0

    def __init__(self, context: Context, *, chance: bool = True, most: int = 16) -> None:
        self.context = context
        self.chance = chance
        self.most = most

    def open(self) -> "FakeDraftSession":
        return FakeDraftSession(self)

    def score(self, *arguments: object) -> Tensor:
        raise NotImplementedError("no test asks for it")


class FakeDraftSession:
    """Stateless: the logits of a prefix are a function of it."""

    def __init__(self, drafter: FakeDrafter) -> None:
        self.drafter = drafter

    def offer(self, token_ids: Sequence[int]) -> int:
        return self.drafter.most

    def propose(
        self, token_ids: Sequence[int], num_draft_tokens: int, sampler: DraftSampler
    ) -> DraftProposal:
        tokens, rows = list(token_ids), []
        for _ in range(min(num_draft_tokens, self.drafter.most)):
            rows.append(self.drafter.context(tokens))
            tokens.append(sampler.draw(rows[-1]) if self.drafter.chance else int(rows[-1].argmax()))
        drafted = tokens[len(token_ids) :]
        return DraftProposal(
            drafted, torch.stack(rows) if self.drafter.chance and rows else None, "fake"
        )


class ScriptedPolicy:
    """Takes its choices from a list, over and over; keeps the records it is shown."""

    def __init__(self, choices: Sequence[tuple[str, int]]) -> None:
        self.choices = choices
        self.records: list[StepRecord] = []
        self.offers: list[Mapping[str, int]] = []

    def open(self, request: Request) -> PolicySession:
        return ScriptedSession(self)


class ScriptedSession:
    def __init__(self, policy: ScriptedPolicy) -> None:
        self.policy = policy
        self.step = 0

    def choose(self, offers: Mapping[str, int]) -> Choice:
        self.policy.offers.append(dict(offers))
        name, k = self.policy.choices[self.step % len(self.policy.choices)]
        return Choice(OFF if k == 0 else name, k, "script")

    def learn(self, record: StepRecord) -> None:
        self.step += 1
        self.policy.records.append(record)


class FakeTokenizer:
    """`pieces[i]` is what token i reads as: bytes, so that tokens may split a character."""

    eos_token_id: int | None = None
    chat_template = None

    def __init__(self, pieces: Sequence[bytes], special: Sequence[int] = ()) -> None:
        self.pieces = pieces
        self.special = set(special)

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: object
    ) -> str:
        kept = [t for t in token_ids if not (skip_special_tokens and t in self.special)]
        return b"".join(self.pieces[t] for t in kept).decode("utf-8", errors="replace")

    def get_vocab(self) -> dict[str, int]:
        return {f"{i}:{piece!r}": i for i, piece in enumerate(self.pieces)}


class WeighsRows:
    """What makes a policy a joint one whose rows choose as they would alone; it keeps how many rows
    there were in each step, what they share, and what it was told of the passes.
    """

    def __init__(self) -> None:
        self.together: list[tuple[int, Sharing]] = []
        self.passes: list[tuple[int, int, float]] = []  # rows, positions, seconds

    def choose_together(
        self,
        sessions: Sequence[PolicySession],
        offers: Sequence[Mapping[str, int]],
        sharing: Sharing,
    ) -> list[Choice]:
        self.together.append((len(sessions), sharing))
        return [one.choose(offered) for one, offered in zip(sessions, offers, strict=True)]

    def learn_together(
        self, sessions: Sequence[PolicySession], num_positions: int, seconds: float
    ) -> None:
        self.passes.append((len(sessions), num_positions, seconds))
