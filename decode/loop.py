"""The algorithm, on one screen: choose, propose, score, verify, advance, learn.

A row always keeps one verified token that the target has not read yet. A step feeds the target that
token and the drafts after it, in one pass, and gets one row of logits more than there are drafts:
each draft is accepted or rejected by the rule of `verify`, and one more token comes from the first
row that was not used up.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from decode.clock import Clock
from decode.noise import Noise
from decode.pool import Pool
from decode.sampling import RowSampler, count_more, count_tokens, seen_tokens
from decode.stopping import Stopper
from decode.types import (
    MAX_DRAFT_TOKENS,
    OFF,
    Choice,
    DraftProposal,
    DraftSession,
    JointPolicy,
    Policy,
    PolicySession,
    Request,
    Sharing,
    StepRecord,
    Target,
    TargetSession,
    Verification,
)
from decode.verification import Draft, Place, Verifier, verify_drafts
from kernels.race import arrivals

PLAIN = Choice(OFF, 0, "no drafters")


@dataclass(slots=True)
class Row:
    """One request while it is decoded; rows share nothing that could change another's text."""

    request: Request
    token_ids: list[int]  # verified, prompt and output
    stopper: Stopper
    noise: Noise
    target: TargetSession
    drafts: dict[str, DraftSession]
    policy: PolicySession | None  # None: no drafters, plain decoding
    counts: Tensor | None  # [V] how often each token stands in token_ids; None without a penalty
    prefill_seconds: float
    records: list[StepRecord] = field(default_factory=list)
    draft_seconds: float = 0.0  # of the step under way


class Loop:
    """Decodes rows step by step. Holds no row, so that rows may join and leave between steps."""

    most_rows = sys.maxsize

    def __init__(
        self,
        target: Target,
        pool: Pool,
        policy: Policy | None,
        verifier: Verifier,
        clock: Clock,
        coupling: str = "rejection",
    ) -> None:
        self.target = target
        self.pool = pool
        self.policy = policy
        self.verifier = verifier
        self.coupling = coupling
        self.sharing: Sharing | None = getattr(target, "sharing", None)
        self.joint = policy if isinstance(policy, JointPolicy) else None
        self.watch = Stopwatch(clock, target.device)
        self.host_seconds = 0.0  # since the last record was written
        self.verify_seconds = 0.0

    @property
    def verifier_name(self) -> str:
        return self.verifier.name

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> None:
        """Add at least one token to every row; no row's result depends on the others."""
        choices = self.choose(rows)
        proposals = self.propose(rows, choices)
        logits = self.score(rows, proposals)
        verification = self.verify(rows, proposals, logits)
        emitted = self.advance(rows, verification)
        self.learn(rows, choices, proposals, verification, emitted)

    def choose(self, rows: Sequence[Row]) -> list[Choice]:
        """An arm for each row, from its verified tokens and past records only."""
        self.watch.start()
        offers = [self._offers(row) for row in rows]
        sessions = [row.policy for row in rows]
        choices = chosen(self.joint, self.sharing, sessions, offers, self.pool)
        self.host_seconds += self.watch.lap()
        return choices

    def propose(self, rows: Sequence[Row], choices: list[Choice]) -> list[DraftProposal]:
        """The chosen drafters' guesses. A drafter that fails leaves its row to plain decoding."""
        proposals = []
        for b, (row, choice) in enumerate(zip(rows, choices, strict=True)):
            proposal = self.pool.propose(row.drafts, row.token_ids, choice, self._sampler(row))
            if proposal is None:
                choices[b] = replace(
                    choice, drafter=OFF, num_draft_tokens=0, reason="drafter dropped"
                )
            proposals.append(proposal or DraftProposal([], None, ""))
            row.draft_seconds = self.watch.lap()
        return proposals

    def score(
        self, rows: Sequence[Row], proposals: Sequence[DraftProposal]
    ) -> Tensor:  # [B, K + 1, V]
        """The target's raw logits after the last verified token and after each draft."""
        reads = [[row.token_ids[-1], *p.token_ids] for row, p in zip(rows, proposals, strict=True)]
        return self.target.score([row.target for row in rows], reads)

    def verify(
        self, rows: Sequence[Row], proposals: Sequence[DraftProposal], logits: Tensor
    ) -> Verification:
        """Accepted drafts and one more token for each row, so drawn that the law is kept."""
        drafts = [
            Draft(
                proposal,
                row.request.sampling,
                self._chance(row, 1 + len(proposal.token_ids)),
                row.counts,
            )
            for row, proposal in zip(rows, proposals, strict=True)
        ]
        return verify_drafts(self.verifier, logits, drafts)

    def advance(self, rows: Sequence[Row], verification: Verification) -> list[int]:
        """Append what was emitted, up to where the text ends; how many tokens each row took."""
        emitted = [[t for t in ids if t >= 0] for ids in verification.token_ids.tolist()]
        self.verify_seconds = self.watch.lap()  # the line above waited for the device
        taken = []
        for row, token_ids in zip(rows, emitted, strict=True):
            kept = token_ids[: row.stopper.push(token_ids)]
            row.token_ids.extend(kept)
            if row.counts is not None:
                count_more(row.counts, kept)
            self.target.rollback(row.target, len(row.token_ids) - 1)
            taken.append(len(kept))
        self.host_seconds += self.watch.lap()
        return taken

    def learn(
        self,
        rows: Sequence[Row],
        choices: Sequence[Choice],
        proposals: Sequence[DraftProposal],
        verification: Verification,
        emitted: Sequence[int],
    ) -> None:
        """Write each row's record and hand it to its policy, rejections included."""
        accepted = verification.num_accepted.tolist()
        host_seconds, self.host_seconds = self.host_seconds / len(rows), 0.0
        for b, row in enumerate(rows):
            record = StepRecord(
                request_id=row.request.request_id,
                step=len(row.records),
                position=len(row.token_ids) - emitted[b],
                drafter=choices[b].drafter,
                source=proposals[b].source,
                num_draft_tokens=choices[b].num_draft_tokens,
                num_drafted=len(proposals[b].token_ids),
                num_accepted=accepted[b],
                num_emitted=emitted[b],
                draft_seconds=row.draft_seconds,
                verify_seconds=self.verify_seconds / len(rows),
                host_seconds=host_seconds,
                reason=choices[b].reason,
                expected_tokens=choices[b].expected_tokens,
                expected_seconds=choices[b].expected_seconds,
            )
            row.records.append(record)
            if row.policy is not None:
                row.policy.learn(record)
        self._learn_pass(rows, proposals)
        self.host_seconds = self.watch.lap()  # learning is paid for by the next step

    def _learn_pass(self, rows: Sequence[Row], proposals: Sequence[DraftProposal]) -> None:
        """Tell a policy that weighs rows what the pass took that they shared."""
        if self.joint is None or self.sharing is None or len(rows) < 2:
            return
        widths = [1 + len(proposal.token_ids) for proposal in proposals]
        positions = len(rows) * max(widths) if self.sharing.padded else sum(widths)
        sessions = [row.policy for row in rows if row.policy is not None]
        self.joint.learn_together(sessions, positions, self.verify_seconds)

    @torch.inference_mode()
    def open(self, request: Request, prompt: Sequence[int], stopper: Stopper, noise: Noise) -> Row:
        """A row whose prompt is read, all but its last token."""
        self.watch.start()
        session = self.target.open()
        if len(prompt) > 1:
            self.target.prefill(session, prompt[:-1])
        return Row(
            request=request,
            token_ids=list(prompt),
            stopper=stopper,
            noise=noise,
            target=session,
            drafts=self.pool.open(),
            policy=None if self.policy is None else self.policy.open(request),
            counts=count_tokens(
                request.sampling, prompt, self.target.vocab_size, self.target.device
            ),
            prefill_seconds=self.watch.lap(),
        )

    def _offers(self, row: Row) -> dict[str, int]:
        limit = min(row.stopper.most_draft_tokens, MAX_DRAFT_TOKENS)
        return self.pool.offers(row.drafts, row.token_ids, limit)

    def _chance(self, row: Row, count: int) -> Sequence[float] | Place:
        """What verification draws a row's tokens with."""
        request_id = row.request.request_id
        if self.coupling == "gumbel":
            return Place(row.noise.race_key(request_id), len(row.token_ids))
        return row.noise.uniforms(request_id, len(row.records), "verify", count)

    def _sampler(self, row: Row) -> RowSampler:
        request_id = row.request.request_id

        def uniform(depth: int) -> float:
            return row.noise.uniforms(request_id, len(row.records), "draft", depth + 1)[depth]

        def race(depth: int) -> Tensor:
            key, place = row.noise.race_key(request_id), len(row.token_ids) + depth
            return arrivals(key, place, self.target.vocab_size)

        seen = seen_tokens(row.counts)
        by_race = race if self.coupling == "gumbel" else None
        return RowSampler(row.request.sampling, uniform, seen, by_race)


def chosen(
    joint: JointPolicy | None,  # the rows' policy, where it weighs rows against each other
    sharing: Sharing | None,
    sessions: Sequence[PolicySession | None],
    offers: Sequence[Mapping[str, int]],
    pool: Pool,
) -> list[Choice]:
    """An arm for each row of a step; plain decoding without a policy, or anything on offer."""
    choices = [PLAIN] * len(sessions)
    asked = [
        (b, session, offered)
        for b, (session, offered) in enumerate(zip(sessions, offers, strict=True))
        if session is not None and offered
    ]
    if joint is not None and sharing is not None and len(asked) > 1:
        _, some, theirs = zip(*asked, strict=True)
        found = joint.choose_together(some, theirs, sharing)
    else:
        found = [session.choose(offered) for _, session, offered in asked]
    for (b, _, offered), choice in zip(asked, found, strict=True):
        choices[b] = fitted(choice, offered, pool)
    return choices


def fitted(choice: Choice, offers: Mapping[str, int], pool: Pool) -> Choice:
    """A policy's choice, cut to what is on offer; ValueError for a drafter that is none."""
    if choice.drafter == OFF:
        return choice
    if choice.drafter not in offers and choice.drafter not in pool.dropped:
        raise ValueError(
            f"the policy chose drafter {choice.drafter!r}, which is not in the pool "
            f"({', '.join(offers)}); build the policy for these drafters"
        )
    length = min(choice.num_draft_tokens, offers.get(choice.drafter, 0))
    if length == 0:
        return replace(choice, drafter=OFF, num_draft_tokens=0, reason="nothing offered")
    return replace(choice, num_draft_tokens=length)


class Stopwatch:
    """Seconds between readings of the injected clock; the device's work is done at each one."""

    def __init__(self, clock: Clock, device: str) -> None:
        self._clock = clock
        self._device = torch.device(device)
        self._mark = 0.0

    def start(self) -> None:
        self._mark = self._now()

    def lap(self) -> float:
        """Seconds since the last reading."""
        before, self._mark = self._mark, self._now()
        return self._mark - before

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock.now()
