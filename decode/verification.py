"""Which code verifies, and how the rows of one step are laid out for it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from decode.sampling import law_of
from decode.types import DraftProposal, Sampling, Verification
from kernels.race import Key

log = logging.getLogger(__name__)

_said: set[str] = set()  # what was logged once already


@dataclass(frozen=True, slots=True)
class Verifier:
    """A `verify` and the name under which tables show it."""

    name: str  # "triton" or "reference"
    verify: Callable[..., Verification]  # rejection coupling
    couple: Callable[..., Verification]  # Gumbel coupling


def select_verifier(device: str) -> Verifier:
    """The Triton kernel on CUDA and nothing else there; elsewhere the reference, said once."""
    kind = torch.device(device).type
    if kind == "cuda":
        if find_spec("triton") is None:
            raise ValueError(
                f"verification on {device} needs Triton; install it with: pip install triton"
            )
        from kernels.coupled import couple as triton_couple
        from kernels.verify import verify as triton_verify

        return Verifier("triton", triton_verify, triton_couple)
    from kernels.coupled_reference import couple as reference_couple
    from kernels.reference import verify as reference_verify

    if kind not in _said:
        _said.add(kind)
        log.info("target on %s: kernels.reference verifies (the Triton kernel needs CUDA)", kind)
    return Verifier("reference", reference_verify, reference_couple)


@dataclass(frozen=True, slots=True)
class Place:
    """Gumbel coupling's chance: a request's key, and where the row's next token stands."""

    key: Key
    place: int


@dataclass(frozen=True, slots=True)
class Draft:
    """One row of one step, as verification sees it."""

    proposal: DraftProposal
    sampling: Sampling
    # num_drafted + 1 uniforms, that of the recovered or bonus token first; or a place
    chance: Sequence[float] | Place
    counts: Tensor | None  # [V] tokens seen so far; None where no penalty asks for it


def verify_drafts(verifier: Verifier, logits: Tensor, drafts: Sequence[Draft]) -> Verification:
    """Verify B ragged drafts against the target's raw logits [B, K + 1, V], padded to one shape.

    All of one coupling. A row's result does not depend on the padding: its draws are its own, and
    rows of logits past its draft are never looked at.
    """
    device, vocab_size = logits.device, logits.shape[-1]
    lengths = [len(draft.proposal.token_ids) for draft in drafts]
    width = max(lengths)
    token_ids = [_padded(d.proposal.token_ids, width, -1) for d in drafts]
    law = law_of(tuple(draft.sampling for draft in drafts))
    shared: dict[str, Any] = {
        "num_draft_tokens": torch.tensor(lengths, dtype=torch.int64),
        "seen_token_counts": _counts(drafts, vocab_size, device),
        **law._asdict(),
    }
    ids = torch.tensor(token_ids, dtype=torch.int64, device=device)
    coupled = [draft.chance for draft in drafts if isinstance(draft.chance, Place)]
    if coupled:
        keys, places = [chance.key for chance in coupled], [chance.place for chance in coupled]
        return verifier.couple(logits, ids, keys=keys, places=places, **shared)
    uniforms = [
        [*_padded(d.chance[1:], width, 0.0), d.chance[0]]
        for d in drafts
        if not isinstance(d.chance, Place)
    ]
    one_hot = [draft.proposal.logits is None for draft in drafts]
    return verifier.verify(
        logits,
        ids,
        _draft_logits(drafts, width, logits),
        uniforms=torch.tensor(uniforms, dtype=torch.float64, device=device),
        draft_is_one_hot=torch.tensor(one_hot, dtype=torch.bool),
        **shared,
    )


def _padded(values: Sequence[Any], width: int, filler: Any) -> list[Any]:
    return [*values, *[filler] * (width - len(values))]


def _draft_logits(drafts: Sequence[Draft], width: int, like: Tensor) -> Tensor | None:  # [B, K, V]
    rows = [draft.proposal.logits for draft in drafts]
    if all(row is None for row in rows):
        return None
    if len(rows) == 1 and rows[0] is not None:
        return rows[0][None].to(like.device)
    kinds = [row.dtype for row in rows if row is not None]
    kind = reduce(torch.promote_types, kinds)  # widened, never rounded
    out = torch.zeros(len(rows), width, like.shape[-1], dtype=kind, device=like.device)
    for b, row in enumerate(rows):
        if row is not None:
            out[b, : len(row)] = row
    return out


def _counts(
    drafts: Sequence[Draft], vocab_size: int, device: torch.device
) -> Tensor | None:  # [B, V]
    if all(draft.counts is None for draft in drafts):
        return None
    nothing = torch.zeros(vocab_size, dtype=torch.int32, device=device)
    return torch.stack([nothing if draft.counts is None else draft.counts for draft in drafts])
