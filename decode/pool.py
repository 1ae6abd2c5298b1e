"""The drafters in use: what they offer, what they propose, and what happens when one of them fails.

A drafter can cost time but never a token: whatever goes wrong inside it, or with what it hands
over, takes it out of the pool, is said once, and decoding goes on without it.
"""

import logging
from collections.abc import Mapping, Sequence

from decode.sampling import RowSampler
from decode.types import OFF, Choice, Drafter, DraftProposal, DraftSession

log = logging.getLogger(__name__)

NOTHING = DraftProposal([], None, "")


class Pool:
    """Drafters by name; those that failed are in `dropped`, with the reason."""

    def __init__(self, drafters: Mapping[str, Drafter], vocab_size: int) -> None:
        if OFF in drafters:
            raise ValueError(
                f"a drafter cannot be named {OFF!r}, the choice not to speculate; rename it"
            )
        self.drafters = dict(drafters)
        self.dropped: dict[str, str] = {}
        self._vocab_size = vocab_size

    def open(self) -> dict[str, DraftSession]:
        """A fresh row's state in every drafter."""
        sessions: dict[str, DraftSession] = {}
        parts_first = sorted(self.drafters, key=lambda name: _shares(self.drafters[name]))
        for name in parts_first:
            try:
                sessions[name] = self._open(self.drafters[name], sessions)
            except Exception as error:
                self.drop(name, error)
        return {name: sessions[name] for name in self.drafters}

    def _open(self, drafter: Drafter, sessions: Mapping[str, DraftSession]) -> DraftSession:
        """A drafter made of members of this pool works on their states, so that no token is read
        twice; members are told apart by identity, for names may mislead."""
        if not _shares(drafter):
            return drafter.open()
        parts = {id(part) for part in vars(drafter).values()}
        members = {n: s for n, s in sessions.items() if id(self.drafters[n]) in parts}
        return drafter.open_shared(members)  # type: ignore[attr-defined]

    def offers(
        self, sessions: Mapping[str, DraftSession], token_ids: Sequence[int], limit: int
    ) -> dict[str, int]:
        """Drafter -> most tokens it could propose now, `limit` at most; empty where no drafter is
        left.
        """
        offers = {}
        for name in [name for name in sessions if name in self.drafters]:
            try:
                offers[name] = min(sessions[name].offer(token_ids), limit) if limit else 0
            except Exception as error:
                self.drop(name, error)
        return offers

    def propose(
        self,
        sessions: Mapping[str, DraftSession],
        token_ids: Sequence[int],
        choice: Choice,
        sampler: RowSampler,
    ) -> DraftProposal | None:
        """The chosen drafter's guess; None where it failed and was dropped."""
        if choice.drafter == OFF:
            return NOTHING
        drafter = self.drafters.get(choice.drafter)
        if drafter is None:  # dropped in this step, on another row
            return None
        try:
            proposal = sessions[choice.drafter].propose(token_ids, choice.num_draft_tokens, sampler)
            self._check(proposal, choice.num_draft_tokens, sampler)
        except Exception as error:
            self.drop(choice.drafter, error)
            return None
        # Kinds may be shared and mislead: only a drafter made of others says more than its name.
        source = proposal.source if _shares(drafter) else choice.drafter
        # A one-hot law holds no chance: no row need be read.
        logits = None if sampler.greedy or not proposal.token_ids else proposal.logits
        return DraftProposal(proposal.token_ids, logits, source)

    def _check(self, proposal: DraftProposal, asked: int, sampler: RowSampler) -> None:
        tokens, logits = proposal.token_ids, proposal.logits
        if len(tokens) > asked:
            raise ValueError(f"it proposed {len(tokens)} tokens where {asked} were asked for")
        if not all(isinstance(t, int) and 0 <= t < self._vocab_size for t in tokens):
            raise ValueError(f"it proposed ids outside 0..{self._vocab_size - 1}")
        if sampler.greedy:
            return
        if logits is not None and logits.shape != (len(tokens), self._vocab_size):
            raise ValueError(
                f"its logits have shape {list(logits.shape)}, not {[len(tokens), self._vocab_size]}"
            )
        if sampler.drawn != ([] if logits is None else tokens):
            raise ValueError(
                "its proposal is not what it drew, which would change the law of the output"
            )

    def drop(self, name: str, error: Exception) -> None:
        """Take a drafter out, and say so."""
        self.dropped[name] = f"{type(error).__name__}: {error}"
        del self.drafters[name]
        log.warning("drafter %s failed and is dropped for this run: %s", name, self.dropped[name])
        log.debug("where drafter %s failed", name, exc_info=error)


def _shares(drafter: Drafter) -> bool:
    return hasattr(drafter, "open_shared")
