"""Would catch: "no proposal" counted as a rejection, a deep draft counted where drafting never got,
two laws or two splits of one prompt mixed, a drafter's column swapped, a control that is not
shuffled within its law.

Counts are sums of zeros and ones, so they are compared exactly; sums of float32 chances to 1e-6.
"""

import dataclasses

import numpy as np
import pytest
import torch
from world import Row, draw_accept, make_examples, make_rows

from pipeline.train_router import shuffled
from router.examples import collect_examples, count_depths, dispersion

NAN = np.nan


def test_no_proposal_is_neither_trial_nor_rejection():
    accept = np.array([[1, 1, 0], [NAN, NAN, NAN], [0, 1, 1], [1, NAN, NAN]], dtype=np.float32)
    accepted, proposed = count_depths(accept)
    assert proposed.tolist() == [
        3,
        1,
        1,
    ]  # depth 2 is reached from starts 0 and 3; 3 offers nothing
    assert accepted.tolist() == [2, 1, 0]


def test_chances_weigh_what_follows_them():
    accept = np.array([[0.5, 0.25], [1.0, 0.5]], dtype=np.float32)
    accepted, proposed = count_depths(accept)
    assert proposed == pytest.approx([2, 1.5], abs=1e-6)
    assert accepted == pytest.approx([1.5, 0.5 * 0.25 + 0.5], abs=1e-6)


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_odd_lengths_and_a_drafter_that_never_proposes(num_tokens):
    row = make_rows(0, informative=True)[0]
    silent = dataclasses.replace(row, accept=np.full((num_tokens, 3), NAN, np.float32))
    other = dataclasses.replace(
        row, drafter="other", accept=np.ones((num_tokens, 2), dtype=np.float32)
    )
    examples = collect_examples([silent, other])
    assert examples.trials.tolist() == [[0, num_tokens]]
    assert examples.successes.tolist() == [[0, num_tokens]]
    assert torch.isfinite(dispersion(examples)).all()


def test_one_example_for_each_prompt_and_law_whatever_the_order():
    rows = make_rows(1, informative=True)
    first = collect_examples(rows, ("lookup", "small"))
    order = np.random.default_rng(0).permutation(len(rows))
    mixed = collect_examples([rows[i] for i in order], ("lookup", "small"))
    place = {
        key: i
        for i, key in enumerate(zip(mixed.prompt_ids, mixed.temperatures.tolist(), strict=True))
    }
    index = np.array(
        [place[key] for key in zip(first.prompt_ids, first.temperatures.tolist(), strict=True)]
    )
    again = mixed.take(index)
    assert len(first) == len(rows) // 2
    assert torch.equal(first.accepted, again.accepted)
    assert torch.equal(first.proposed, again.proposed)
    assert list(first.texts) == list(again.texts)


def test_a_drafter_outside_the_pool_is_refused():
    with pytest.raises(
        ValueError, match="drafter 'lookup' was collected, but the pool holds small"
    ):
        collect_examples(make_rows(0, informative=True)[:2], ("small",))


def test_runs_of_acceptance_widen_the_noise_and_chances_narrow_it():
    rng = np.random.default_rng(0)
    blank = make_rows(0, informative=True)[0]

    def spread(make) -> float:
        rows = [
            dataclasses.replace(blank, prompt_id=str(i), accept=make().astype(np.float32))
            for i in range(60)
        ]
        return float(dispersion(collect_examples(rows))[0])

    def flips() -> np.ndarray:
        return draw_accept(rng, 0.0, 80, 1, 0.0)

    assert spread(flips) == pytest.approx(1, abs=0.1)  # 4,800 flips: the sd of this figure is 0.03
    assert (
        spread(lambda: np.repeat(flips()[:20], 4, axis=0)) > 2.5
    )  # runs of 4: 4 for endless texts
    assert spread(lambda: 0.5 + 0.2 * (flips() - 0.5)) < 0.25


def test_the_control_keeps_counts_and_laws_but_not_prompts():
    examples = make_examples(0, informative=True).split("router_train")
    control = shuffled(examples, 5)
    assert torch.equal(control.accepted, examples.accepted)
    assert torch.equal(control.temperatures, examples.temperatures)
    assert sorted(control.texts) == sorted(examples.texts)
    assert (control.texts == examples.texts).mean() < 0.1
    for temperature in (0.0, 0.8):
        law = (examples.temperatures == temperature).numpy()
        assert sorted(control.texts[law]) == sorted(examples.texts[law])


def test_row_has_the_fields_that_collect_writes():
    from pipeline.acceptance import SCHEMA

    assert {field.name for field in dataclasses.fields(Row)} == set(SCHEMA.names)
