"""Bugs these tests would catch: a draft drawn from another law than the one verified; the penalty
off by one token along the draft; one number for two draws; rounding in the drawing; counts that
forget the prompt; a NaN that becomes a token.

The law is compared with the slow one of tests/enumeration.py: numbers just inside each cell of its
CDF must give that cell's token, 1e-6 of the cell's width from its border; laws agree to 1e-12.
"""

import pytest
import torch
from enumeration import slow_law
from fakes import whole_prefix

from decode import Sampling
from decode.sampling import RowSampler, count_tokens, law_of, seen_tokens
from decode.types import MAX_DRAFT_TOKENS

V = 13
LAWS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3, top_k=5),
    Sampling(temperature=2.0, top_p=0.6, min_p=0.1),
    Sampling(temperature=0.7, top_k=6, top_p=0.9, repetition_penalty=1.8),
]


def sampler(sampling: Sampling, uniforms: list[float], prompt: list[int]) -> RowSampler:
    counts = count_tokens(sampling, prompt, V, "cpu")
    return RowSampler(sampling, lambda depth: uniforms[depth], seen_tokens(counts))


@pytest.mark.parametrize("sampling", LAWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_follow_the_law_at_every_depth(sampling: Sampling, dtype: torch.dtype) -> None:
    """Logits may come in bfloat16; they are not rounded again."""
    context, prompt = whole_prefix(V), [2, 2, 5]
    tokens, uniforms = list(prompt), []
    for _ in range(4):
        logits = context(tokens).to(dtype)
        law = slow_law(logits, sampling, tokens)
        edges = torch.tensor([0.0, *law], dtype=torch.float64).cumsum(0).tolist()
        drawn = None
        for token in range(V):
            if law[token] == 0:
                continue
            for inside in (1e-6, 0.5, 1 - 1e-6):
                u = edges[token] + inside * law[token]
                row = sampler(sampling, [*uniforms, u], prompt)
                for i, earlier in enumerate(tokens[len(prompt) :]):
                    assert (
                        row.draw(context([*prompt, *tokens[len(prompt) :][:i]]).to(dtype))
                        == earlier
                    )
                assert row.draw(logits) == token
                drawn = (token, u)
        assert drawn is not None
        tokens.append(drawn[0])
        uniforms.append(drawn[1])


def test_greedy_takes_the_lowest_maximum_after_the_penalty() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0])
    assert RowSampler(Sampling(), lambda depth: 1 / 0, None).draw(logits) == 1
    row = RowSampler(Sampling(repetition_penalty=2.0), lambda d: 1 / 0, torch.zeros(4).bool())
    assert [row.draw(logits) for _ in range(4)] == [1, 2, 3, 1]  # 3/2 and 2/2 against the rest
    assert row.drawn == [1, 2, 3, 1]


def test_each_draw_spends_its_own_number() -> None:
    asked: list[int] = []

    def uniform(depth: int) -> float:
        asked.append(depth)
        return 0.5

    row = RowSampler(Sampling(temperature=1.0), uniform, None)
    for _ in range(MAX_DRAFT_TOKENS):
        row.draw(torch.zeros(V))
    assert asked == list(range(MAX_DRAFT_TOKENS))
    with pytest.raises(ValueError, match="more than 16"):
        row.draw(torch.zeros(V))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=1.3), *LAWS[:1]])
@pytest.mark.parametrize("bad", [torch.full((V,), torch.nan), torch.full((V,), -torch.inf)])
def test_rows_that_are_no_law_are_refused(sampling: Sampling, bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="no law"):
        sampler(sampling, [0.5], [1]).draw(bad)


def test_counts_hold_the_prompt_and_samplers_do_not_change_them() -> None:
    counts = count_tokens(Sampling(repetition_penalty=1.1), [3, 3, 0], 5, "cpu")
    assert counts is not None
    assert counts.tolist() == [1, 0, 0, 2, 0]
    assert count_tokens(Sampling(), [3], 5, "cpu") is None
    seen = seen_tokens(counts)
    RowSampler(Sampling(repetition_penalty=1.1), lambda depth: 0.0, seen).draw(torch.arange(5.0))
    assert counts.tolist() == [1, 0, 0, 2, 0]


def test_rows_keep_their_own_parameters() -> None:
    law = law_of((LAWS[0], LAWS[3]))
    assert law.temperature.tolist() == [1.0, 0.7]
    assert law.top_k.tolist() == [0, 6]
    assert law.repetition_penalty.tolist() == [1.0, 1.8]


@pytest.mark.parametrize("sampling", LAWS)
def test_ids_without_mass_change_no_draw(sampling: Sampling) -> None:
    """A draft vocabulary: the few ids that have a law, among all of them, ties included."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.full((4 * V,), -torch.inf)
    ids = torch.randperm(4 * V, generator=generator)[:V].sort().values
    logits[ids] = torch.randn(V, generator=generator).mul(4).round() / 4
    prompt = ids[[9, 9, 6]].tolist()  # the likeliest: a penalty moves the law
    law = slow_law(logits, sampling, prompt)
    assert 1 < sum(p > 0 for p in law) <= V
    edges = torch.tensor([0.0, *law], dtype=torch.float64).cumsum(0).tolist()
    for token in (token for token, p in enumerate(law) if p):
        for inside in (1e-6, 0.5, 1 - 1e-6):
            counts = count_tokens(sampling, prompt, 4 * V, "cpu")
            u = edges[token] + inside * law[token]
            row = RowSampler(sampling, lambda depth, u=u: u, seen_tokens(counts))
            assert row.draw(logits) == token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_nan_among_numbers_is_refused_and_a_tie_goes_to_the_lowest(dtype: torch.dtype) -> None:
    logits = torch.full((50,), -torch.inf, dtype=dtype)
    logits[[7, 20, 31]] = torch.tensor([1.0, 3.0, 3.0], dtype=dtype)
    assert RowSampler(Sampling(), lambda depth: 1 / 0, None).draw(logits) == 20
    for bad in (torch.nan, torch.inf):
        logits[40] = bad
        for law in (Sampling(), Sampling(temperature=1.0)):
            with pytest.raises(ValueError, match="no law"):
                RowSampler(law, lambda depth: 0.5, None).draw(logits)
