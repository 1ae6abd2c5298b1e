"""What every kind must keep, for each drafter that has a YAML.

Would catch: a drafter that reports other logits than it drew from; one that draws from a law of
another history (stale cache, a draft token that was rejected and is still read); one that offers
less than it proposes; a score that is not what decoding accepts; a score that counts "no proposal"
as a rejection.

Tolerances: 1e-4 on logits is float32 rounding between one wide and several narrow passes (seen:
3e-6). Chi-square rejects below p = 1e-4; seeds are fixed, so a pass stays a pass.
"""

import random

import pytest
import torch
from scipy import stats
from tiny_drafters import (
    NUM_REAL_IDS,
    VOCAB_SIZE,
    YAML,
    answered,
    make_drafter,
    sampler,
    tiny_model,
    tiny_tokenizer,
)
from torch import Tensor

from decode.sampling import law_of
from decode.types import MAX_DRAFT_TOKENS, Drafter, Sampling
from drafters.base import TargetParts
from kernels.reference import processed_probs

GREEDY = Sampling()
LAWS = [
    Sampling(temperature=0.8),
    Sampling(temperature=1.5, top_k=5),
    Sampling(temperature=1.0, top_p=0.7, min_p=0.05),
]
MATCHING = [5, 6, 7, 9, 5, 6, 7]  # a lookup of any length up to three matches
NEW = [5, 6, 7, 9, 11]  # nothing occurs twice


def network_rows(drafter: Drafter, context: list[int], following: list[int]) -> Tensor | None:
    """Logits [len(following), V] that an independent pass over the whole text gives."""
    model = getattr(drafter, "model", drafter)
    if not hasattr(model, "trainable"):
        return None
    with torch.no_grad():
        rows = model.trainable(torch.tensor([context + following]))
    return model.widen(rows[0, len(context) - 1 : -1])


@pytest.mark.parametrize("context", [MATCHING, NEW, [3]])
@pytest.mark.parametrize("asked", [0, 1, 5, MAX_DRAFT_TOKENS])
def test_proposes_at_most_what_it_offers_and_what_is_asked(
    drafter: Drafter, context: list[int], asked: int
) -> None:
    session = drafter.open()
    offer = session.offer(context)
    proposal = session.propose(context, asked, sampler(GREEDY))
    assert len(proposal.token_ids) == min(offer, asked)
    assert all(0 <= token < NUM_REAL_IDS for token in proposal.token_ids)


@pytest.mark.parametrize("sampling", LAWS)
@pytest.mark.parametrize("context", [MATCHING, NEW])
def test_reports_the_rows_it_drew_from(
    drafter: Drafter, sampling: Sampling, context: list[int]
) -> None:
    spy = sampler(sampling, torch.Generator().manual_seed(1))
    proposal = drafter.open().propose(context, 4, spy)
    if proposal.logits is None:
        assert spy.drawn == []
        return
    assert proposal.token_ids == spy.drawn
    assert torch.equal(proposal.logits, torch.stack(spy.rows))
    expected = network_rows(drafter, context, proposal.token_ids)
    torch.testing.assert_close(proposal.logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("sampling", LAWS)
def test_proposals_follow_the_law_of_an_independent_pass(
    drafter: Drafter, sampling: Sampling
) -> None:
    """Both the first token and, after the commonest first token, the second."""
    session, generator = drafter.open(), torch.Generator().manual_seed(3)
    pairs = []
    for _ in range(500):
        proposal = session.propose(NEW, 2, sampler(sampling, generator))
        if proposal.logits is None:
            assert proposal.token_ids == []  # a lookup finds nothing here
            return
        pairs.append(proposal.token_ids)
    firsts = torch.tensor([pair[0] for pair in pairs])
    common = int(firsts.mode().values)
    seconds = torch.tensor([second for first, second in pairs if first == common])
    laws = processed_probs(network_rows(drafter, NEW, [common, 0]), *law_of((sampling,) * 2), None)
    assert_follows(firsts, laws[0])
    assert_follows(seconds, laws[1])


def assert_follows(drawn: Tensor, law: Tensor) -> None:
    """Chi-square over ids, those expected fewer than five times taken together."""
    counts = torch.bincount(drawn, minlength=VOCAB_SIZE).double()
    assert counts[law == 0].sum() == 0
    expected = law * len(drawn)
    common = expected >= 5
    seen = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    if wanted[-1] < 1:
        assert seen[-1] <= 8  # Poisson of mean below 1 exceeds 8 once in a million
        seen, wanted = seen[:-1], wanted[:-1]
    if len(wanted) > 1:
        wanted *= seen.sum() / wanted.sum()
        assert stats.chisquare(seen.numpy(), wanted.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("seed", range(6))
def test_after_any_history_it_guesses_as_a_fresh_row_would(drafter: Drafter, seed: int) -> None:
    """Growth by any number of tokens, drafts kept or not, rollback, and another text altogether."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    session, text = drafter.open(), [chance.randrange(12) for _ in range(6)]
    for _ in range(12):
        law = chance.choice([GREEDY, LAWS[0]])
        proposal = session.propose(text, chance.randrange(6), sampler(law, generator))
        text = next_text(chance, text, proposal.token_ids)
        mine, fresh = sampler(GREEDY), sampler(GREEDY)
        assert session.offer(text) == drafter.open().offer(text)
        assert (
            session.propose(text, 3, mine).token_ids
            == drafter.open().propose(text, 3, fresh).token_ids
        )
        for ours, theirs in zip(mine.rows, fresh.rows, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def next_text(chance: random.Random, text: list[int], drafts: list[int]) -> list[int]:
    kind = chance.choice(["accept some", "accept all", "grow", "roll back", "change", "same"])
    if kind == "accept some":
        return text + drafts[: chance.randrange(len(drafts) + 1)] + [chance.randrange(12)]
    if kind == "accept all":
        return text + drafts
    if kind == "grow":
        return text + [chance.randrange(12) for _ in range(chance.randrange(1, 5))]
    if kind == "roll back":
        return text[: chance.randrange(1, len(text) + 1)]
    if kind == "change":
        return [chance.randrange(12) for _ in range(chance.randrange(1, 9))]
    return text


@pytest.mark.parametrize("prompt", [MATCHING, NEW, [3]])
def test_greedy_score_is_what_decoding_accepts(
    drafter: Drafter, target: TargetParts, prompt: list[int]
) -> None:
    answer = answered(target, prompt, 24, GREEDY)
    tokens = answer.token_ids.tolist()
    accept = drafter.score(tokens, len(prompt), answer.logprobs, GREEDY, 4)
    assert accept.shape == (24, 4)
    assert accept.dtype == torch.float32
    session = drafter.open()
    for start in range(24):
        here = len(prompt) + start
        drafts = session.propose(tokens[:here], 4, sampler(GREEDY)).token_ids
        assert not accept[start, len(drafts) :].isfinite().any()
        for depth, draft in enumerate(drafts[: 24 - start]):
            assert accept[start, depth] == float(draft == tokens[here + depth])
            if draft != tokens[here + depth]:
                break
        assert accept[start, 24 - start :].isnan().all()


@pytest.mark.parametrize("sampling", LAWS)
def test_sampled_score_is_the_ratio_of_laws(
    drafter: Drafter, target: TargetParts, sampling: Sampling
) -> None:
    """Against one fresh session per start and depth, fed the realised tokens."""
    answer = answered(target, NEW, 10, sampling)
    tokens = answer.token_ids.tolist()
    accept = drafter.score(tokens, len(NEW), answer.logprobs, sampling, 3)
    for start in range(10):
        drafts = drafter.open().propose(tokens[: len(NEW) + start], 3, sampler(GREEDY))
        for depth in range(min(3, 10 - start)):
            here = len(NEW) + start + depth
            found = accept[start, depth].item()
            if drafts.source in ("ngram", "retrieval") or not drafts.token_ids:
                wanted = [float(tokens[here] == d) for d in drafts.token_ids[depth : depth + 1]]
                assert [found] == wanted or (not wanted and found != found)
                continue
            row = network_rows(drafter, tokens[:here], [0])
            draft_prob = processed_probs(row, *law_of((sampling,)), None)[0, tokens[here]]
            ratio = draft_prob / answer.logprobs[here - len(NEW)].double().exp()
            assert found == pytest.approx(min(1.0, float(ratio)), abs=1e-4)


def test_every_kind_has_a_file() -> None:
    """The parametrisation is not empty, and building by name works without a fixture."""
    parts = TargetParts(tiny_model(seed=5), tiny_tokenizer(), VOCAB_SIZE, "tiny")
    assert {"ngram", "retrieval", "lm", "lora", "composite"} <= set(YAML)
    assert all(make_drafter(name, parts).num_parameters >= 0 for name in YAML)
