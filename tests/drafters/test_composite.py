"""Would catch: a lookup believed on fewer tokens than asked; a source that does not name the part;
a model's cache that misses the tokens which a lookup proposed; sessions that disturb each other.

Equality is exact: both sides run the same code on the same text.
"""

import pytest
from tiny_drafters import CUT, sampler

from decode.types import Sampling
from drafters.base import BuildContext, TargetParts
from drafters.composite import CompositeConfig, CompositeDrafter
from drafters.lm import LmDrafter
from drafters.ngram import NgramConfig, NgramDrafter

LOOKUP = NgramDrafter(NgramConfig(min_ngram=1, max_ngram=3, max_offer=6))
LONG, SHORT, NONE = [1, 2, 3, 1, 2], [1, 2, 3, 9, 2], [1, 2, 3]


def build(cut: LmDrafter, min_match: int = 2) -> CompositeDrafter:
    config = CompositeConfig(lookup="copy", model="small", min_match=min_match)
    return config.build(BuildContext(cut.parts, parts={"copy": LOOKUP, "small": cut}))


@pytest.mark.parametrize(
    ("text", "min_match", "source"),
    [
        (LONG, 2, "copy"),
        (SHORT, 2, "small"),
        (SHORT, 1, "copy"),
        (SHORT, 0, "copy"),
        (NONE, 0, "small"),
        (LONG, 3, "small"),
    ],
)
def test_the_lookup_is_believed_on_enough_tokens(
    cut: LmDrafter, text: list[int], min_match: int, source: str
) -> None:
    session = build(cut, min_match).open()
    part = {"copy": LOOKUP, "small": cut}[source]
    proposal = session.propose(text, 4, sampler(Sampling()))
    assert proposal.source == source
    assert proposal.token_ids == part.open().propose(text, 4, sampler(Sampling())).token_ids
    assert session.offer(text) == part.open().offer(text)


def test_the_model_catches_up_on_what_the_lookup_proposed(cut: LmDrafter) -> None:
    session = build(cut).open()
    for text in (NONE, LONG, [*LONG, 3, 1, 7], [*LONG, 3, 1, 7, 8, 4]):
        found = session.propose(text, 3, sampler(Sampling()))
        assert found.token_ids == build(cut).open().propose(text, 3, sampler(Sampling())).token_ids


def test_sessions_of_the_pool_can_be_shared(cut: LmDrafter) -> None:
    """The composite and its parts take turns on one row, each as right as on a row of its own."""
    shared = {"copy": LOOKUP.open(), "small": cut.open()}
    session = build(cut).open_shared(shared)
    text = list(NONE)
    for turn in range(6):
        fresh = build(cut).open().propose(text, 3, sampler(Sampling()))
        drafts = session.propose(text, 3, sampler(Sampling()))
        assert drafts == fresh
        text += [*drafts.token_ids[: turn % 3], 40 + turn]
        alone = cut.open().propose(text, 2, sampler(Sampling()))
        assert shared["small"].propose(text, 2, sampler(Sampling())) == alone


def test_it_owns_no_weights(cut: LmDrafter) -> None:
    assert (build(cut).num_parameters, build(cut).memory_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("parts", "min_match", "reason"),
    [
        (["small"], 0, "'copy', which is not among"),
        (["copy"], 0, "'small', which is not among"),
        (["copy", "small"], 4, "min_match=4 is longer than copy looks for"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    cut: LmDrafter, parts: list[str], min_match: int, reason: str
) -> None:
    known = {"copy": LOOKUP, "small": cut}
    config = CompositeConfig(lookup="copy", model="small", min_match=min_match)
    with pytest.raises(ValueError, match=reason):
        config.build(BuildContext(cut.parts, parts={name: known[name] for name in parts}))


def test_a_model_is_no_lookup(cut: LmDrafter, target: TargetParts) -> None:
    config = CompositeConfig(lookup="small", model="small", min_match=0)
    with pytest.raises(ValueError, match="lookup=small is a LmDrafter"):
        config.build(BuildContext(target, parts={"small": CUT.build(BuildContext(target))}))
