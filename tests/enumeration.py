"""The exact law of a decoder's texts, by walking every path that chance can take.

`Paths` knows, from the laws in play and a slow law of its own, at which numbers the outcome of each
draw may change; it tries one number in each cell between them and weighs it with the cell's width.
A decoder that is right is constant on every cell, so the weights of its texts add up to its exact
law: no sampling, and no tolerance beyond float64 rounding.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from fakes import FakeTarget
from torch import Tensor

from decode.types import Drafter, DraftProposal, DraftSampler, DraftSession, Sampling, StepRecord

Law = list[float]


def slow_law(logits: Tensor, sampling: Sampling, seen: Sequence[int]) -> Law:
    """The processed law, written once more in plain Python, from the words of the contract."""
    raw = [float(x) for x in logits.tolist()]
    for token in set(seen):
        penalty = sampling.repetition_penalty
        raw[token] = raw[token] / penalty if raw[token] > 0 else raw[token] * penalty
    if sampling.temperature == 0:
        best = raw.index(max(raw))
        return [float(i == best) for i in range(len(raw))]
    top = max(raw)
    mass = [math.exp((x - top) / sampling.temperature) for x in raw]
    if sampling.top_k:
        edge = sorted(mass, reverse=True)[min(sampling.top_k, len(mass)) - 1]
        mass = [m if m >= edge else 0.0 for m in mass]
    if sampling.top_p < 1:
        total, reached = sum(mass), 0.0
        for edge in sorted(mass, reverse=True):
            reached += edge / total
            if reached >= sampling.top_p - 1e-12:
                break
        mass = [m if m >= edge else 0.0 for m in mass]
    mass = [m if m >= sampling.min_p * max(mass) else 0.0 for m in mass]
    return [m / sum(mass) for m in mass]


def sequence_law(
    target: FakeTarget, prompt: Sequence[int], num_tokens: int, sampling: Sampling
) -> dict[tuple[int, ...], float]:
    """Chance of every text of `num_tokens` tokens under the target alone."""
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for text, chance in laws.items():
            prefix = [*prompt, *text]
            for token, p in enumerate(slow_law(target.context(prefix), sampling, prefix)):
                if p > 0:
                    longer[(*text, token)] = chance * p
        laws = longer
    return laws


# -------------------------------------------------------------------------- every path of chance


class Paths:
    """Noise that tries every cell of every draw, one run of the decoder after another.

    `edge` 0..1 says where in each cell the number lies: near its ends a law or a number that was
    rounded shows, because it moves the border past it.
    """

    def __init__(self, target: FakeTarget, sampling: Sampling, edge: float) -> None:
        self.target = target
        self.sampling = sampling
        self.edge = edge
        self.script: list[int] = []
        self.weight = 1.0
        self._sizes: list[int] = []
        self._drawn: dict[tuple[str, int, str], list[float]] = {}
        self._draft: list[Law] = []  # of this step, one a draw

    def runs(self) -> Iterator[None]:
        """Yields once per path; the body runs the decoder and reads `weight`."""
        while True:
            self.weight, self._sizes, self._drawn = 1.0, [], {}
            self._draft = []
            yield
            self.script = self.script[: len(self._sizes)]
            while self.script and self.script[-1] == self._sizes[len(self.script) - 1] - 1:
                self.script.pop()
            if not self.script:
                return
            self.script[-1] += 1

    def watch(self, drafter: Drafter) -> "Watched":
        """The same drafter; each row of logits it draws from is seen here first."""
        return Watched(drafter, self)

    def drafting(self, logits: Tensor, prefix: Sequence[int]) -> None:
        """A drafter is about to draw the token after `prefix`."""
        self._draft.append(slow_law(logits, self.sampling, prefix))

    def uniforms(self, request_id: str, step: int, domain: str, count: int) -> list[float]:
        values = self._drawn.setdefault((request_id, step, domain), [])
        if domain == "draft":
            while len(values) < count:
                values.append(self._pick(cumulative(self._draft[-1])))
        elif not values:
            values.extend(self._verify_draws(count - 1))
            self._draft = []
        return values[:count]

    def race_key(self, request_id: str) -> tuple[int, int]:
        raise AssertionError("a race has too many paths; see test_coupling.py")

    def _verify_draws(self, num_drafted: int) -> list[float]:
        """The number of the last draw, then one for each draft; what is never looked at is not
        varied.
        """
        read = self.target.last_read
        start = len(read) - num_drafted
        accepts: list[float] = []
        residual: Law | None = None
        for i in range(num_drafted):
            prefix, token = read[: start + i], read[start + i]
            p = slow_law(self.target.context(prefix), self.sampling, prefix)
            one_hot = [float(other == token) for other in range(len(p))]
            q = self._draft[i] if self._draft else one_hot
            ratio = min(1.0, p[token] / q[token]) if q[token] else 1.0
            if residual is not None:
                accepts.append(0.5)
                continue
            accepts.append(self._pick([ratio]))
            if accepts[-1] >= ratio:
                residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        if residual is None:
            residual = slow_law(self.target.context(read), self.sampling, read)
        return [self._pick(cumulative(residual)), *accepts]

    def _pick(self, borders: Sequence[float]) -> float:
        ends = sorted({0.0, 1.0, *(min(max(b, 0.0), 1.0) for b in borders)})
        cells = [(a, b) for a, b in pairwise(ends) if b - a > 1e-9]
        depth = len(self._sizes)
        if depth == len(self.script):
            self.script.append(0)
        self._sizes.append(len(cells))
        low, high = cells[self.script[depth]]
        self.weight *= high - low
        return low + self.edge * (high - low)


class Watched:
    """A drafter whose draws are announced to `paths`."""

    def __init__(self, drafter: Drafter, paths: Paths) -> None:
        self.drafter, self.paths = drafter, paths
        self.num_parameters = self.memory_bytes = 0
        self.score = drafter.score

    def open(self) -> "WatchedSession":
        return WatchedSession(self.drafter.open(), self.paths)


class WatchedSession:
    def __init__(self, session: DraftSession, paths: Paths) -> None:
        self.offer = session.offer
        self.session, self.paths = session, paths

    def propose(
        self, token_ids: Sequence[int], num_draft_tokens: int, sampler: DraftSampler
    ) -> DraftProposal:
        announced = AnnouncedSampler(sampler, self.paths, token_ids)
        return self.session.propose(token_ids, num_draft_tokens, announced)


class AnnouncedSampler:
    def __init__(self, sampler: DraftSampler, paths: Paths, token_ids: Sequence[int]) -> None:
        self.greedy = sampler.greedy
        self.sampler, self.paths, self.tokens = sampler, paths, list(token_ids)

    def draw(self, logits: Tensor) -> int:
        self.paths.drafting(logits.clone(), self.tokens)
        self.tokens.append(self.sampler.draw(logits))
        return self.tokens[-1]


def cumulative(law: Law) -> Law:
    """Where an inverse CDF in token-id order changes its answer."""
    total, sums = sum(law), []
    for p in law[:-1]:
        sums.append((sums[-1] if sums else 0.0) + p / total)
    return sums


def enumerate_texts(
    paths: Paths, run: Callable[[], tuple[list[int], list[StepRecord]]]
) -> tuple[dict[tuple[int, ...], float], Counter[str]]:
    """Chance of every text that `run` returns, and how often each kind of event was seen on the
    way.
    """
    law: dict[tuple[int, ...], float] = defaultdict(float)
    events: Counter[str] = Counter()
    for _ in paths.runs():
        text, records = run()
        law[tuple(text)] += paths.weight
        for record in records:
            events[f"{record.drafter} {record.num_drafted}"] += 1
            events["rejected"] += record.num_accepted < record.num_drafted
            events["accepted"] += record.num_accepted > 0
    return law, events
