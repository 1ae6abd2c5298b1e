"""Would catch: a resumed run that sees other rows, another learning rate or other moments;
gradients normalised per micro-batch instead of per token; loss on prompt tokens; the last
drafter kept instead of the best; a specialist that loses its parent's weights or draft
vocabulary; a target that training changes; history lines that a resumed run repeats.

Tolerances: resumed against uninterrupted, none (bit for bit). Accumulated against one large batch:
1e-5 on the loss; weights after three steps of AdamW at 1e-3 within 2e-6 in the mean (sums in
another order) and 5e-4 at most: AdamW divides by a gradient's size, so an entry whose gradient is
all but zero goes where rounding sends it, and that by no more than half an update.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_regenerate import stage as regenerate_stage
from tiny import VOCAB_SIZE, tiny_target_folder
from workspace import RUNTIME, prompt, tiny_config, workspace, write_prompts

from drafters.lm import LmConfig
from drafters.ngram import NgramConfig
from drafters.training import collate, validation_acceptance
from pipeline import trainer
from pipeline.answers import Answers
from pipeline.build import NamedEntry, build_drafters, load_target
from pipeline.checkpoints import delete_checkpoints
from pipeline.config import Pool, PoolEntry
from pipeline.distill import Distill
from pipeline.finetune import Finetune
from pipeline.training_data import BatchOrder, Rows, rehearsal
from pipeline.validation import acceptance_length, difference_interval

CUT = LmConfig(source=None, layers=[0, -1], num_draft_vocab=60, train_head=True, dtype="float32")
VIRTUAL = dataclasses.replace(RUNTIME, clock="virtual")  # equal runs report equal speeds
COMMON: dict[str, Any] = {
    "num_steps": 7,
    "num_tokens": 0,
    "batch_size": 3,
    "row_tokens": 0,
    "accumulate": 2,
    "learning_rate": 1e-3,
    "warmup_share": 0.2,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "precision": "float32",
    "gradient_checkpointing": False,
    "compile_layers": False,
    "chunk_tokens": 16,
    "max_tokens": 40,
    "drop_loops": False,
    "rehearsal_share": 0.0,
    "checkpoint_every": 2,
    "validate_every": 3,
    "validation_prompts": 2,
    "num_draft_tokens": 3,
}
LEARNED: dict[str, Any] = {
    "mix": {"forward_kl": 1.0, "tv": 0.0},
    "position_weights": "uniform",
    "half_life": 8.0,
    "lk_eta": 3.0,
    "teacher": "recorded",
    "onpolicy_from": 0.5,
    "onpolicy_share": 0.0,
    "onpolicy_tokens": 3,
    "onpolicy_temperature": 1.0,
}
SPLITS = {
    "drafter_train": [
        prompt(n, d, words=2 + n % 4, response=f"w{n} w2 w3")
        for n in range(8)
        for d in ("code", "chat")
    ],
    "validation": [prompt(n, d) for n in range(20, 24) for d in ("code", "chat")],
}


@dataclasses.dataclass(frozen=True)
class World:
    target: Path
    prompts: Path
    answers: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("world")
    target, prompts = tiny_target_folder(root / "target"), write_prompts(root / "prompts", SPLITS)
    return answered(target, prompts, root / "answers", num_top_logits=7)


def answered(target: Path, prompts: Path, out: Path, num_top_logits: int) -> World:
    every = {"drafter_train": 0, "validation": 0, "mixed": 0}
    stage = regenerate_stage(prompts_per_domain=every, shard_rows=8, num_top_logits=num_top_logits)
    stage.run(workspace({"target": tiny_config(target)}, {"prompts": prompts}, out))
    return World(target, prompts, out)


def entry(
    domains: tuple[str, ...] = (), init_from: str | None = None, **changes: Any
) -> NamedEntry:
    drafter = dataclasses.replace(CUT, **changes)
    return NamedEntry(
        "drafter",
        PoolEntry(
            drafter=drafter, trained_by="distill", domains=list(domains), init_from=init_from
        ),
    )


def distill(**changes: Any) -> Distill:
    return Distill(**{**COMMON, **LEARNED, **changes})


def finetune(**changes: Any) -> Finetune:
    return Finetune(**{**COMMON, "text": "answers", **changes})


def train(
    stage: Distill | Finetune,
    world: World,
    out: Path,
    named: NamedEntry | None = None,
    parent: Path | None = None,
) -> dict[str, Any]:
    groups = {"target": tiny_config(world.target), "entry": named or entry()}
    inputs = {"answers": world.answers, "prompts": world.prompts}
    inputs |= {"parent": parent} if parent else {}
    return stage.run(workspace(groups, inputs, out, runtime=VIRTUAL))


def history(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def same_weights(left: Path, right: Path) -> bool:
    a, b = (load_file(folder / "model.safetensors") for folder in (left, right))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_training_lowers_the_loss_and_leaves_a_whole_artifact(world: World, tmp_path: Path) -> None:
    before = (world.target / "model.safetensors").read_bytes()
    metrics = train(distill(num_steps=40, validate_every=20), world, tmp_path)
    lines = history(tmp_path)
    assert [line["step"] for line in lines] == list(range(41))
    assert np.mean([line["loss"] for line in lines[-8:]]) < 0.8 * np.mean(
        [line["loss"] for line in lines[1:9]]
    )
    assert {name.name for name in tmp_path.iterdir()} == {
        "drafter.json",
        "model.safetensors",
        "history.jsonl",
        "validation.json",
        "lint.json",
    }
    assert [line["step"] for line in lines if "acceptance_length" in line] == [0, 20, 40]
    best = max(line["acceptance_length"] for line in lines if "acceptance_length" in line)
    assert metrics["acceptance_length_after"] == pytest.approx(best, abs=1e-9)
    assert metrics["acceptance_length_before"] == pytest.approx(
        lines[0]["acceptance_length"], abs=1e-9
    )
    assert (
        metrics["acceptance_length_gain_low"]
        <= metrics["acceptance_length_gain"]
        <= metrics["acceptance_length_gain_high"]
    )
    assert (world.target / "model.safetensors").read_bytes() == before
    report = json.loads((tmp_path / "validation.json").read_text())
    assert len(report["prompts"]) == 2 * 2 * 2  # domains, prompts, laws
    assert (
        acceptance_length([row["after"] for row in report["prompts"]])
        == metrics["acceptance_length_after"]
    )


def test_the_artifact_is_the_drafter_that_was_measured(world: World, tmp_path: Path) -> None:
    """Loaded through the pool, it has the acceptance that validation.json says."""
    train(distill(num_steps=6), world, tmp_path)
    target = load_target(tiny_config(world.target), RUNTIME)
    pool = Pool(entries={"drafter": entry().entry})
    drafters = build_drafters(pool, target, {"drafter:drafter": tmp_path})
    known = {
        (row["id"], row["law"]): row["after"]
        for row in json.loads((tmp_path / "validation.json").read_text())["prompts"]
    }
    checked = 0
    for answer in Answers(world.answers).rows(split="validation"):
        if (answer.id, answer.law) in known:
            measured = validation_acceptance(drafters["drafter"], [answer], 3)
            # One answer in float64 after another, against batches in float32.
            assert measured.tolist() == [pytest.approx(known[answer.id, answer.law], rel=1e-6)]
            checked += 1
    assert checked == len(known) == 8


class KilledError(Exception):
    pass


@pytest.mark.parametrize("killed_at", [1, 4, 5, 6, 7])
def test_a_killed_run_ends_as_an_uninterrupted_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    """KilledError before, at and between checkpoints (steps 2, 4, 6), by dying inside a step."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    metrics = train(distill(), world, whole)
    step = trainer.Trainer._step

    def dies(self: trainer.Trainer, number: int, feed: Any) -> dict[str, float]:
        if number == killed_at:
            raise KilledError
        return step(self, number, feed)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_step", dies)
        with pytest.raises(KilledError):
            train(distill(), world, parts)
    assert not (parts / "drafter.json").exists()  # half a run leaves nothing that looks whole
    (parts / "history.jsonl").open("a").write(
        '{"step": 5, "lo'
    )  # as a kill in the middle of a line
    assert train(distill(), world, parts) == metrics
    assert same_weights(whole, parts)
    assert (whole / "validation.json").read_bytes() == (parts / "validation.json").read_bytes()
    assert history(whole) == history(parts)


def test_a_run_killed_after_its_report_is_only_tidied(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "clean_up", lambda out: None)
        metrics = train(finetune(), world, tmp_path)
    assert list(tmp_path.glob("checkpoint-*"))
    assert train(finetune(), world, tmp_path) == metrics
    assert not list(tmp_path.glob("checkpoint-*")) + list(tmp_path.glob("best-*"))


def test_a_damaged_checkpoint_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(self: trainer.Trainer, state: trainer.State) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_finish", dies)
        with pytest.raises(KilledError):
            train(distill(), world, tmp_path)
    (checkpoint,) = tmp_path.glob("checkpoint-*")  # only the last is kept
    assert checkpoint.name == "checkpoint-00000006"
    file = checkpoint / "moments.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(
        ValueError, match=r"moments\.safetensors is damaged.*delete .*checkpoint-00000006"
    ):
        train(distill(), world, tmp_path)
    delete_checkpoints(tmp_path)
    train(distill(), world, tmp_path)


def test_accumulated_batches_equal_one_large_batch(world: World, tmp_path: Path) -> None:
    """One epoch of all 16 rows a step, as one batch and as six of at most three rows."""
    once, parts = tmp_path / "once", tmp_path / "parts"
    shared = {"num_steps": 3, "validate_every": 3}
    train(distill(batch_size=16, accumulate=1, **shared), world, once)
    train(distill(batch_size=3, accumulate=6, **shared), world, parts)
    for left, right in zip(history(once)[1:], history(parts)[1:], strict=True):
        assert left["loss"] == pytest.approx(right["loss"], abs=1e-5)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-4)
    a, b = (load_file(folder / "model.safetensors") for folder in (once, parts))
    for name in a:
        apart = (a[name].float() - b[name].float()).abs()
        assert apart.mean() < 2e-6
        assert apart.max() < 5e-4


def test_the_draft_vocabulary_follows_the_answers_and_passes_to_specialists(
    world: World, tmp_path: Path
) -> None:
    train(distill(), world, tmp_path / "generic")
    ids = load_file(tmp_path / "generic" / "model.safetensors")["draft_ids"].tolist()
    counts = torch.zeros(VOCAB_SIZE)
    for answer in Answers(world.answers).rows(split="drafter_train"):
        counts += torch.bincount(answer.answer_ids, minlength=VOCAB_SIZE)
    left_out = [token for token in range(VOCAB_SIZE) if token not in ids]
    assert len(ids) == 60
    assert max(counts[left_out]) <= min(
        counts[token] for token in ids if token >= 5
    )  # 0..4: special
    named = entry(domains=("code",), init_from="generic")
    metrics = train(
        finetune(learning_rate=1e-5), world, tmp_path / "code", named, tmp_path / "generic"
    )
    theirs, ours = (load_file(tmp_path / n / "model.safetensors") for n in ("generic", "code"))
    assert torch.equal(theirs["draft_ids"], ours["draft_ids"])
    assert metrics["num_rows"] == 8  # of its domain only
    for name in theirs:  # a hundredth of the usual rate: near its parent, not near the target
        torch.testing.assert_close(ours[name], theirs[name], atol=2e-4, rtol=0)
    report = json.loads((tmp_path / "code" / "validation.json").read_text())
    assert {row["domain"] for row in report["prompts"]} == {"code"}


def test_the_target_in_the_loop_teaches_what_was_recorded(world: World, tmp_path: Path) -> None:
    """With all logits recorded both teachers are the same law, at every kept position."""
    whole = answered(world.target, world.prompts, tmp_path / "answers", num_top_logits=VOCAB_SIZE)
    for teacher in ("recorded", "model"):
        train(distill(num_steps=2, teacher=teacher), whole, tmp_path / teacher)
    pairs = zip(history(tmp_path / "recorded")[1:], history(tmp_path / "model")[1:], strict=True)
    for recorded, model in pairs:
        assert recorded["loss"] == pytest.approx(model["loss"], abs=1e-4)
        assert recorded["grad_norm"] == pytest.approx(model["grad_norm"], rel=1e-3)


@pytest.mark.parametrize(("stage", "text"), [("distill", ""), ("finetune", "dataset")])
def test_a_specialist_rehearses_the_others_prompts(world: World, stage: str, text: str) -> None:
    """A quarter beside eight prompts of its own; none for who wants all, or rehearses none."""
    inputs = {"answers": world.answers, "prompts": world.prompts}

    def learned(*domains: str, share: float) -> list[Any]:
        made = distill(rehearsal_share=share) if stage == "distill" else None
        made = made or finetune(text=text, rehearsal_share=share)
        groups = {"target": tiny_config(world.target), "entry": entry(domains)}
        space = workspace(groups, inputs, world.answers.parent / "unused")
        return list(made.rows(space, load_target(groups["target"], VIRTUAL)))

    everything = learned(share=0.25)
    own = learned("code", share=0.0)
    assert 0 < len(own) < len(everything)
    assert len(learned(share=0.9)) == len(everything)
    assert len(own) < len(learned("code", share=0.25)) < len(everything)
    assert len(learned("code", share=0.75)) == len(everything)  # more than there are


def test_rehearsed_prompts_are_the_share_that_was_asked_for() -> None:
    chosen = rehearsal(3000, 9000, 0.25)
    assert sum(chosen(f"prompt {n}") for n in range(9000)) == pytest.approx(1000, rel=0.1)
    assert not any(map(rehearsal(3000, 9000, 0.0), map(str, range(100))))
    assert all(map(rehearsal(10, 2, 0.5), map(str, range(2))))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_text_of_the_data_set(world: World, tmp_path: Path, precision: str) -> None:
    metrics = train(finetune(text="dataset", precision=precision), world, tmp_path)
    assert metrics["num_rows"] == 16
    assert history(tmp_path)[-1]["loss"] < history(tmp_path)[1]["loss"]


def test_rows_are_cut_and_prompts_carry_no_loss(world: World) -> None:
    answers = list(Answers(world.answers).rows(split="drafter_train"))
    rows = list(Rows(answers, max_tokens=8))
    batch = collate(rows, VOCAB_SIZE, 8)
    assert batch.token_ids.shape[1] <= 8
    assert batch.num_tokens == sum(len(r.token_ids) - r.num_prompt_tokens for r in rows)
    assert batch.num_tokens == sum(Rows(answers, max_tokens=8).num_predicted)
    assert len(Rows(answers, max_tokens=2)) == 0


def test_every_epoch_holds_every_row_once() -> None:
    lengths = [5 + 7 * n % 40 for n in range(50)]
    order = BatchOrder(lengths, 4, seed=1)
    epochs = [[row for m in range(13) for row in order[e * 13 + m]] for e in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    fresh = BatchOrder(lengths, 4, seed=1)
    assert [fresh[m] for m in (30, 2, 17)] == [
        order[m] for m in (30, 2, 17)
    ]  # in any order of asking
    assert [BatchOrder(lengths, 4, seed=2)[m] for m in range(13)] != [order[m] for m in range(13)]
    widths = [
        max(lengths[r] for r in order[m]) - min(lengths[r] for r in order[m]) for m in range(13)
    ]
    assert np.mean(widths) < 6  # rows of a batch have like lengths; at random it would be some 24


def test_learning_rate_rises_and_falls(world: World, tmp_path: Path) -> None:
    train(distill(num_steps=10), world, tmp_path)
    rates = [line["learning_rate"] for line in history(tmp_path)[1:]]
    assert rates[:2] == [pytest.approx(5e-4), pytest.approx(1e-3)]
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert 0 < rates[-1] < 1e-4


def test_intervals_pair_the_prompts() -> None:
    """Prompts differ tenfold while each gains the same: an unpaired interval would hold zero."""
    before = [[100.0, 100 / (1 + n % 10)] for n in range(40)]
    after = [[tokens, passes / 1.1] for tokens, passes in before]
    low, high = difference_interval(before, after, seed=0)
    assert 0 < low < acceptance_length(after) - acceptance_length(before) < high
    assert difference_interval(before, before, seed=0) == (0, 0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: distill(mix={"kl": 1.0}).objective, "must name at least one of cross_entropy"),
        (lambda: distill(teacher="book"), "teacher=book is unknown; use one of recorded, model"),
        (lambda: finetune(text="web"), "text=web is unknown; use one of answers, dataset"),
        (lambda: distill(precision="int8"), "precision=int8 is unknown"),
        (lambda: distill(accumulate=0), "accumulate=0 must be at least 1"),
    ],
)
def test_settings_that_do_not_fit(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_what_cannot_be_trained_is_said(world: World, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to train drafter on; run stage=regenerate"):
        train(distill(), world, tmp_path / "a", entry(domains=("law",)))
    ngram = NgramConfig(min_ngram=1, max_ngram=3, max_offer=4)
    lookup = PoolEntry(drafter=ngram, trained_by="distill", domains=[], init_from=None)
    with pytest.raises(
        ValueError, match="learns nothing from training; set its trained_by to null"
    ):
        train(distill(), world, tmp_path / "b", NamedEntry("lookup", lookup))
    with pytest.raises(ValueError, match=r"diverged at step .*lower learning_rate"):
        train(distill(learning_rate=1e30, max_grad_norm=1e30), world, tmp_path / "c")


def test_compiled_layers_learn_the_same(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is captured and run as it stands: a compiler of C++ may not be there."""
    compile_ = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **how: compile_(self, backend="eager", **how)
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    changes: dict[str, Any] = {"num_steps": 4, "teacher": "model"}
    train(distill(**changes), world, tmp_path / "plain")
    train(distill(**changes, compile_layers=True), world, tmp_path / "compiled")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= 6  # by kind of pass, and not by layer or by size of a batch
    plain, compiled = (history(tmp_path / name) for name in ("plain", "compiled"))
    for one, other in zip(plain[1:], compiled[1:], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
