"""Would catch: adapters trained on another base than they are used with; a base that training
changes or writes into the artifact; a merged parent that leaves nothing to train; a resumed run
that ends elsewhere; adapters that decode worse than was measured, because something was lost
between training and the pool.

Resumed against uninterrupted: bit for bit. Acceptance measured again through the pool: 1e-6, for it
is measured in batches while training; merged, within 0.05 of a count of passes: products are
rounded otherwise, and a greedy draft may flip at a tie.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_train_drafter import CUT, VIRTUAL, World, distill, finetune, world  # noqa: F401 (a fixture)
from workspace import RUNTIME, tiny_config, workspace

from drafters.lora import LoraConfig
from drafters.training import validation_acceptance
from pipeline import trainer
from pipeline.answers import Answers
from pipeline.build import build_drafters, load_target, named_entry
from pipeline.config import Pool, PoolEntry

LORA = LoraConfig(
    base="generic",
    rank=4,
    alpha=8.0,
    target_modules=["all-linear"],
    train_head=True,
    merged=False,
    init_seed=0,
)


def entry(drafter: Any, domains: tuple[str, ...] = (), init_from: str | None = None) -> PoolEntry:
    return PoolEntry(
        drafter=drafter, trained_by="distill", domains=list(domains), init_from=init_from
    )


def pool(**changes: Any) -> Pool:
    special = dataclasses.replace(LORA, **changes)
    return Pool(
        entries={
            "code": entry(special, ("code",)),
            "more": entry(special, ("code",), init_from="code"),
            "generic": entry(CUT),
        }
    )


def train(world: World, name: str, out: Path, stage: Any, inputs: Any, **changes: Any) -> Any:  # noqa: F811
    groups = {"target": tiny_config(world.target), "entry": named_entry(pool(**changes), name)}
    given = {"answers": world.answers, "prompts": world.prompts, **inputs}
    return stage.run(workspace(groups, given, out, runtime=VIRTUAL))


@pytest.fixture(scope="module")
def generic(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    out = tmp_path_factory.mktemp("generic")
    train(world, "generic", out, distill(num_steps=20, validate_every=20), {})
    return out


def history(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("merged", [False, True])
def test_adapters_are_trained_on_a_trained_base(
    world: World,  # noqa: F811
    generic: Path,
    tmp_path: Path,
    merged: bool,
) -> None:
    before = (generic / "model.safetensors").read_bytes()
    stage = distill(num_steps=40, validate_every=20, learning_rate=5e-3)
    metrics = train(world, "code", tmp_path, stage, {"drafter:generic": generic}, merged=merged)
    losses = [line["loss"] for line in history(tmp_path)[1:]]
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8])
    assert (generic / "model.safetensors").read_bytes() == before
    stored = load_file(tmp_path / "model.safetensors")
    assert all("lora_" in name for name in stored)
    assert metrics["num_parameters"] == sum(tensor.numel() for tensor in stored.values())
    assert metrics["num_rows"] == 8  # of its domain
    base = json.loads((generic / "validation.json").read_text())["metrics"]
    assert metrics["acceptance_length_before"] > 1  # the base's, not a fresh cut's
    assert base["acceptance_length_after"] > 1
    target = load_target(tiny_config(world.target), RUNTIME)
    inputs = {"drafter:generic": generic, "drafter:code": tmp_path}
    drafters: Any = build_drafters(pool(merged=merged), target, inputs, ["code", "generic"])
    known = {
        (row["id"], row["law"]): row["after"]
        for row in json.loads((tmp_path / "validation.json").read_text())["prompts"]
    }
    rows = [a for a in Answers(world.answers).rows(split="validation") if a.domain == "code"]
    found = [
        (validation_acceptance(drafters["code"], [row], 3), known[row.id, row.law])
        for row in rows
        if (row.id, row.law) in known
    ]
    assert len(found) == len(known) == 4
    for measured, wanted in found:
        if merged:
            assert measured[0].tolist() == pytest.approx(wanted, abs=0.05)
        else:
            assert measured[0].tolist() == pytest.approx(wanted, rel=1e-6)  # float64, float32


def test_a_fresh_adapter_has_its_bases_acceptance(
    world: World,  # noqa: F811
    generic: Path,
    tmp_path: Path,
) -> None:
    metrics = train(world, "code", tmp_path, finetune(), {"drafter:generic": generic})
    target = load_target(tiny_config(world.target), RUNTIME)
    base: Any = build_drafters(pool(), target, {"drafter:generic": generic}, ["generic"])
    report = json.loads((tmp_path / "validation.json").read_text())["prompts"]
    wanted = {(row["id"], row["law"]): row["before"] for row in report}
    for row in Answers(world.answers).rows(split="validation"):
        if (row.id, row.law) in wanted:
            measured = validation_acceptance(base["generic"], [row], 3)
            assert measured[0].tolist() == pytest.approx(wanted[row.id, row.law], abs=1e-4)
    assert metrics["acceptance_length_before"] > 1


class KilledError(Exception):
    pass


def test_a_killed_run_ends_as_an_uninterrupted_one(
    world: World,  # noqa: F811
    generic: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = {"drafter:generic": generic}
    metrics = train(world, "code", tmp_path / "whole", distill(), inputs)
    step = trainer.Trainer._step

    def dies(self: trainer.Trainer, number: int, *given: Any) -> dict[str, float]:
        if number == 5:
            raise KilledError
        return step(self, number, *given)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_step", dies)
        with pytest.raises(KilledError):
            train(world, "code", tmp_path / "parts", distill(), inputs)
    assert train(world, "code", tmp_path / "parts", distill(), inputs) == metrics
    whole, parts = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("merged", [False, True])
def test_an_adapter_may_start_from_another(
    world: World,  # noqa: F811
    generic: Path,
    tmp_path: Path,
    merged: bool,
) -> None:
    inputs = {"drafter:generic": generic}
    train(world, "code", tmp_path / "code", distill(), inputs, merged=merged)
    again = {**inputs, "parent": tmp_path / "code"}
    stage = distill(learning_rate=1e-6)
    train(world, "more", tmp_path / "more", stage, again, merged=merged)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("code", "more"))
    for name in a:  # a thousandth of the usual rate: near its parent, not near its start
        torch.testing.assert_close(a[name], b[name], atol=2e-5, rtol=0)
    with pytest.raises(ValueError, match="describes kind 'lm'"):
        train(world, "more", tmp_path / "wrong", stage, {**inputs, "parent": generic})
