"""Would catch: rows that a step sees twice or never once answers are packed or dealt to several
processes; a batch of more rows than fit; a plan that depends on who asked before; top logits read
though nobody wants them, or rounded when they are kept; a token budget missed by more than a step;
a drafter that writes in other steps, or other text, after a restart; floating point operations
counted for padding, or twice for what is frozen; a middle of seconds that a resumed run changes.

No tolerance but for losses of packed against padded rows: 1e-4, sums in another order.
"""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_drafter import (
    COMMON,
    CUT,
    KilledError,
    World,
    distill,
    finetune,
    history,
    same_weights,
    train,
    world,  # noqa: F401 (a fixture)
)
from tiny import VOCAB_SIZE, tiny_model
from workspace import RUNTIME, tiny_config

from decode.clock import VirtualClock
from drafters.base import BuildContext, target_parts
from drafters.batches import collate
from drafters.packing import first_fit_decreasing, pack
from pipeline import trainer
from pipeline.answers import Answers
from pipeline.build import load_target
from pipeline.feed import Feed
from pipeline.throughput import StepTimer, Weights, Work, summary
from pipeline.training_data import BatchOrder, Rows, ahead, narrowed

ON_POLICY: dict[str, Any] = {
    "teacher": "model",
    "mix": {"forward_kl": 0.5, "tv": 0.5},
    "onpolicy_share": 0.5,
    "onpolicy_from": 0.3,
}
PACKED: dict[str, Any] = {"row_tokens": 48, "batch_size": 2, "position_weights": "gain"}
LENGTHS = [5 + 7 * n % 40 for n in range(50)]


def rows_of(world: World, max_tokens: int = 40, **options: Any) -> Rows:  # noqa: F811
    return Rows(Answers(world.answers).rows(split="drafter_train"), max_tokens, **options)


def feed_of(rows: Rows, size: int = 1, index: int = 0, **changes: Any) -> Feed:
    settings: dict[str, Any] = {
        "order": BatchOrder(rows.lengths, 3, seed=1),
        "accumulate": 6,
        "vocab_size": VOCAB_SIZE,
        "max_tokens": 40,
        "with_teacher": False,
        "alone": lambda step: False,
        "pinned": False,
    }
    return Feed(rows=rows, size=size, index=index, **{**settings, **changes})


def test_every_epoch_of_packed_batches_holds_every_row_once() -> None:
    order = BatchOrder(LENGTHS, 2, seed=1, row_tokens=64)
    seen: list[int] = []
    ends = []
    for number in range(90):
        batch = order[number]
        assert len(first_fit_decreasing([LENGTHS[row] for row in batch], 64)) <= 2
        seen += batch
        if len(seen) % 50 == 0:
            assert sorted(seen[-50:]) == list(range(50))
            ends.append(number + 1)
    assert len(ends) >= 5
    fill = sum(LENGTHS) / ((ends[0]) * 2 * 64)
    assert fill > 0.8  # the last batch of an epoch is what is left
    fresh = BatchOrder(LENGTHS, 2, seed=1, row_tokens=64)
    assert [fresh[n] for n in (80, 3, 41)] == [order[n] for n in (80, 3, 41)]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_processes_share_the_rows_of_each_step(world: World, size: int) -> None:  # noqa: F811
    rows = rows_of(world)
    alone = feed_of(rows).from_step(2)
    feeds = [feed_of(rows, size, index).from_step(2) for index in range(size)]
    for _ in range(4):
        wanted = {fed.number: fed.batch.token_ids.tolist() for fed in next(alone)}
        dealt = {f.number: f.batch.token_ids.tolist() for feed in feeds for f in next(feed)}
        assert dealt == wanted
    for feed in (alone, *feeds):
        feed.close()


def test_batches_come_in_order_and_errors_where_they_belong() -> None:
    def make(number: int) -> int:
        if number == 7:
            raise ValueError("row 7")
        return number * number

    made = ahead(make, iter(range(1000)))
    assert list(islice(made, 7)) == [n * n for n in range(7)]
    with pytest.raises(ValueError, match="row 7"):
        next(made)
    assert list(ahead(make, [1, 2])) == [1, 4]


def test_rows_are_what_was_answered(world: World) -> None:  # noqa: F811
    """Cut as collate cuts them, so that both lead to one batch."""
    answers = list(Answers(world.answers).rows(split="drafter_train"))
    for limit in (9, 40):
        kept = [a for a in answers if min(len(a.token_ids), limit) > max(a.num_prompt_tokens, 1)]
        rows = rows_of(world, limit, with_teacher=True)
        assert len(rows) == len(kept) > 0
        left, right = (collate(list(each), VOCAB_SIZE, limit) for each in (kept, rows))
        assert torch.equal(left.token_ids, right.token_ids)
        assert torch.equal(left.keep, right.keep)
        assert torch.equal(left.teacher.logits, right.teacher.logits)
        assert torch.equal(left.teacher.ids, right.teacher.ids)
        assert torch.equal(left.teacher.lse, right.teacher.lse)
        assert left.num_tokens == rows.num_predicted.sum()


def test_top_logits_are_read_when_wanted_and_never_rounded(world: World) -> None:  # noqa: F811
    answers = Answers(world.answers)
    for full, bare in zip(answers.rows(), answers.rows(with_teacher=False), strict=True):
        assert bare.topk_ids.shape == bare.topk_logits.shape == (len(full.lse), 0)
        assert torch.equal(full.token_ids, bare.token_ids)
        assert torch.equal(full.logprobs, bare.logprobs)
    exact = torch.tensor([1.0, 1.5, -3.0])
    assert narrowed(exact).dtype == torch.bfloat16
    assert narrowed(exact + 1e-3).dtype == torch.float32


@pytest.mark.parametrize("budget", [1, 100, 1000])
def test_training_stops_at_the_token_budget(
    world: World,  # noqa: F811
    tmp_path: Path,
    budget: int,
) -> None:
    metrics = train(finetune(num_steps=0, num_tokens=budget), world, tmp_path)
    lines = history(tmp_path)
    assert metrics["num_tokens"] == lines[-1]["num_tokens"] >= budget
    assert len(lines) == 2 or lines[-2]["num_tokens"] < budget
    assert metrics["num_steps"] == len(lines) - 1
    kept = json.loads((tmp_path / "validation.json").read_text())["metrics"]
    assert kept.items() <= metrics.items()


def test_packed_rows_teach_what_padded_ones_do(world: World, tmp_path: Path) -> None:  # noqa: F811
    """One epoch of all 16 answers a step."""
    shared = {"num_steps": 3, "accumulate": 1, "teacher": "model"}
    padded = distill(batch_size=16, **shared)
    packed = distill(batch_size=16, row_tokens=64, **shared)
    rows = rows_of(world)
    assert len(pack(list(rows), VOCAB_SIZE, 40, 64, False).token_ids) < 16  # some row holds two
    train(padded, world, tmp_path / "padded")
    train(packed, world, tmp_path / "packed")
    for left, right in zip(
        history(tmp_path / "padded")[1:], history(tmp_path / "packed")[1:], strict=True
    ):
        assert left["num_tokens"] == right["num_tokens"]
        assert left["loss"] == pytest.approx(right["loss"], abs=1e-4)
        assert left["tflops_per_second"] == pytest.approx(right["tflops_per_second"])


@pytest.mark.parametrize("settings", [PACKED, ON_POLICY, {**ON_POLICY, **PACKED}])
@pytest.mark.parametrize("killed_at", [3, 6])
def test_a_killed_run_ends_as_an_uninterrupted_one(
    world: World,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    killed_at: int,
) -> None:
    stage = distill(**settings)
    metrics = train(stage, world, tmp_path / "whole")
    learn = trainer.Trainer._learn
    calls: list[int] = []

    def dies(self: trainer.Trainer, *given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 * killed_at:  # between the micro-batches of a step
            raise KilledError
        return learn(self, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_learn", dies)
        with pytest.raises(KilledError):
            train(stage, world, tmp_path / "parts")
    assert train(stage, world, tmp_path / "parts") == metrics
    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    assert history(tmp_path / "whole") == history(tmp_path / "parts")


def test_the_drafter_writes_in_the_steps_that_are_its_own(
    world: World,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = distill(**{**ON_POLICY, "onpolicy_from": 0.5}, num_steps=10)
    assert [n for n in range(1, 11) if stage.is_on_policy(n, 10)] == [7, 9]
    every = replace(stage, onpolicy_share=1.0)
    assert [n for n in range(1, 11) if every.is_on_policy(n, 10)] == [6, 7, 8, 9, 10]
    assert not any(distill().is_on_policy(n, 10) for n in range(1, 11))
    written = []
    write = type(stage).write

    def watched(*given: Any) -> Any:
        batch = write(*given)
        assert batch.num_tokens <= 3 * len(batch.token_ids)
        written.append(batch.token_ids.tolist())
        return batch

    monkeypatch.setattr(type(stage), "write", watched)
    train(stage, world, tmp_path / "once")
    train(stage, world, tmp_path / "again")
    assert len(written) == 8  # two steps of two micro-batches, twice
    assert written[:4] == written[4:]
    assert written[0] != written[1] != written[2]


def test_text_must_fit_the_context(world: World, tmp_path: Path) -> None:  # noqa: F811
    stage = distill(**{**ON_POLICY, "onpolicy_tokens": 120})
    with pytest.raises(ValueError, match="do not fit a context of 128; lower max_tokens to 8"):
        train(stage, world, tmp_path)


def test_a_law_that_nobody_recorded_is_not_learned(world: World) -> None:  # noqa: F811
    answers = list(Answers(world.answers).rows(split="drafter_train", with_teacher=False))
    with pytest.raises(ValueError, match=r"kept without top logits.*set teacher=model"):
        distill().gather(answers, "drafter")
    assert len(distill(teacher="model").gather(answers, "drafter")) == 16
    assert len(finetune().gather(answers, "drafter")) == 16


def test_operations_are_those_of_the_formula(world: World) -> None:  # noqa: F811
    """Of the tiny target, by hand: 4 layers, 32 wide, 2 of 4 heads for keys and values."""
    model = tiny_model()
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    target = Weights.of_model(model)
    assert (target.linear, target.head) == (4 * layer, 97 * 32)
    assert target.attention == 4 * 4 * 8
    whole = load_target(tiny_config(world.target), RUNTIME)
    cut = CUT.build(BuildContext(target_parts(whole)))
    drafter = Weights.of_drafter(cut.trainable)
    assert (drafter.linear, drafter.head, drafter.linear_frozen) == (2 * layer, 60 * 32, 0)
    assert drafter.head_frozen == 0
    frozen = replace(CUT, train_head=False).build(BuildContext(target_parts(whole)))
    spared = Weights.of_drafter(frozen.trainable)
    work = Work(num_read=10, num_predicted=4, num_pairs=55)
    forward = 2 * (2 * layer * 10 + 60 * 32 * 4) + 4 * 2 * 32 * 55
    assert drafter.training_flops(work) == 3 * forward
    assert spared.training_flops(work) == 3 * forward - 2 * 60 * 32 * 4


def test_padding_is_no_work(world: World) -> None:  # noqa: F811
    rows = list(rows_of(world))
    lengths = [len(row.token_ids) for row in rows]
    wanted = Work(
        num_read=sum(lengths),
        num_predicted=sum(len(row.token_ids) - row.num_prompt_tokens for row in rows),
        num_pairs=sum(n * (n + 1) // 2 for n in lengths),
    )
    assert Work.of(collate(rows, VOCAB_SIZE, 40, False)) == wanted
    assert Work.of(pack(rows, VOCAB_SIZE, 40, 64, False)) == wanted


def test_speeds_are_middles_over_steps_and_no_peak_is_guessed() -> None:
    timer = StepTimer(VirtualClock(), on_gpu=False)
    timer.start()
    for phase in ("forward", "backward", "forward"):
        with timer.phase(phase):
            pass
    seconds = timer.read()
    tick = 2**-10
    assert seconds["step_seconds"] == 7 * tick
    assert seconds["seconds/forward"] == 2 * tick
    assert seconds["seconds/optimizer"] == 0
    lines = [
        {**seconds, "tokens_per_second": n, "answer_tokens_per_second": n, "tflops_per_second": n}
        for n in (1.0, 2.0, 600.0)
    ]
    bare = summary([{"step": 0.0}, *lines], 2, None)
    assert bare["tokens_per_second"] == 2
    assert "flop_utilisation" not in bare
    assert summary(lines, 2, 10e12)["flop_utilisation"] == pytest.approx(2 / 20)
    assert summary([{"step": 0.0}], 1, None) == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_tokens": 5}, "num_steps=7 and num_tokens=5 must be one positive number and a 0"),
        ({"num_steps": 0}, "num_steps=0 and num_tokens=0 must be one positive"),
        ({"num_steps": -3}, "num_steps=-3 and"),
        ({"row_tokens": 39}, "row_tokens=39 must be 0 .* or at least max_tokens=40"),
        ({"chunk_tokens": 0}, "chunk_tokens=0 must be at least 1"),
        ({"onpolicy_share": 0.5}, "onpolicy_share=0.5 needs teacher=model"),
        ({"onpolicy_share": 1.5}, "must lie between 0 and 1"),
        ({"onpolicy_tokens": 0}, "onpolicy_tokens=0 must be at least 1"),
        (
            {**ON_POLICY, "mix": {"cross_entropy": 1.0}},
            "would teach the drafter its own text by cross_entropy",
        ),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        distill(**changes)


def test_auto_precision_is_resolved_in_the_identity() -> None:
    assert distill(precision="auto").resolved(RUNTIME).precision in ("float32", "bfloat16")
    assert distill().resolved(RUNTIME).precision == COMMON["precision"]
