"""Would catch: acceptance that depends on who shares a batch, on padding or on the order; an answer
that outgrows the context and counts as accepted; a greedy tie that goes to a higher id; a law whose
truncation or penalty is forgotten; ids outside the draft vocabulary that pass for accepted.

The slow path, one answer after another in float64, is the specification. Tolerances: 1e-5, a
softmax in float32; 1e-12 for the passes alone, float64 sums in another order.
"""

import random
from dataclasses import replace

import pytest
import torch
from tiny_drafters import CUT, NUM_REAL_IDS, Answer, answered, make_drafter

from decode.types import Sampling
from drafters import batch_scoring
from drafters.base import BuildContext, TargetParts
from drafters.batch_scoring import batch_acceptance, expected_passes
from drafters.lm import LmDrafter
from drafters.scoring import by_start
from drafters.training import expected_passes as slow_passes
from drafters.training import validation_acceptance

LAWS = [
    Sampling(),
    Sampling(temperature=0.8),
    Sampling(temperature=1.3, seed=4),
    Sampling(temperature=0.7, top_k=9, top_p=0.9),
    Sampling(temperature=1.0, min_p=0.05, repetition_penalty=1.2),
    Sampling(repetition_penalty=1.3),
]


@pytest.fixture(scope="module")
def answers(target: TargetParts) -> list[Answer]:
    """Under each law: usual ones, an empty prompt, nothing after the first token, too long."""
    draw, found = random.Random(0), []
    for place, law in enumerate(LAWS):
        prompts = [[draw.randrange(NUM_REAL_IDS) for _ in range(n)] for n in (3, 8, 1)]
        found += [answered(target, p, 4 + 3 * n, law) for n, p in enumerate(prompts)]
        first = found[-1]
        found.append(replace(first, num_prompt_tokens=0, token_ids=first.token_ids[1:]))
        found.append(replace(first, num_prompt_tokens=0, token_ids=first.token_ids[:1]))
        long = torch.randint(NUM_REAL_IDS, (104,), generator=torch.Generator().manual_seed(place))
        for prompt in (90, 97, 100):  # the context holds 96: some drafts, one, none
            logprobs = torch.full((104 - prompt,), -1.5)
            found.append(Answer(long, prompt, law, logprobs, *(long,) * 3))
    return found


@pytest.mark.parametrize("kind", ["lm", "lora", "vocabulary"])
@pytest.mark.parametrize("batch_tokens", [1, 300, 10**6])
def test_a_batch_is_scored_as_one_answer_after_another(
    target: TargetParts,
    answers: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    batch_tokens: int,
) -> None:
    monkeypatch.setattr(batch_scoring, "BATCH_TOKENS", batch_tokens)
    monkeypatch.setattr(batch_scoring, "CHUNK_TOKENS", 7)
    if kind == "vocabulary":
        drafter = replace(CUT, num_draft_vocab=70).build(BuildContext(target))
    else:
        drafter = make_drafter(kind, target)
    found = batch_acceptance(drafter, answers, 3)
    wanted = validation_acceptance(drafter, answers, 3)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert len({tuple(row) for row in found.tolist()}) > 10  # they do differ


def test_greedy_ties_go_to_the_lowest_id(cut: LmDrafter, target: TargetParts) -> None:
    """A drafter without opinion proposes id 0 everywhere."""
    with torch.no_grad():
        for parameter in cut.trainable.parameters():
            parameter.zero_()
    zeros = Answer(torch.zeros(9).long(), 2, Sampling(), torch.zeros(7), *(torch.zeros(0),) * 3)
    ones = replace(zeros, token_ids=torch.ones(9).long())
    assert batch_acceptance(cut, [zeros, ones], 6).tolist() == [[7, 1], [7, 7]]


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
def test_passes_of_many_answers_are_those_of_each(num_draft_tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    chances = [torch.rand(n, generator=generator) for n in (0, 1, 2, 7, 30)]
    chances += [torch.ones(13), torch.zeros(5), (torch.rand(40, generator=generator) < 0.6).float()]
    found = expected_passes(chances, num_draft_tokens).tolist()
    wanted = [slow_passes(by_start(c, num_draft_tokens).double()) for c in chances]
    assert found == pytest.approx(wanted, abs=1e-12)
    assert expected_passes([], 3).tolist() == []
