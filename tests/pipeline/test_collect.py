"""Would catch: acceptance filed under the wrong drafter, law or prompt, a table written in the
wrong order, missing proposals turned into rejections, a check that decodes another law than it
predicts, half a parquet file that looks whole, a drafter that fails in the decoder without
anybody noticing.

Tolerances: a greedy prediction and the decoded length are counts over the same text, hence equal;
sampled ones differ by chance and are only compared in sign of life.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_build import CUT, entry
from test_regenerate import stage as regenerate_stage
from test_train_drafter import distill
from tiny import tiny_target_folder
from workspace import GPU, RUNTIME, prompt, tiny_config, workspace, write_prompts

from drafters.base import BuildContext, target_parts
from drafters.composite import CompositeConfig
from drafters.ngram import NgramConfig
from pipeline import scoring
from pipeline.acceptance import FILE, load_acceptance
from pipeline.answers import Answers
from pipeline.build import NamedEntry, build_drafters, load_target
from pipeline.collect import Collect
from pipeline.config import Pool
from pipeline.scoring import score

POOL = Pool(
    entries={
        "ngram": entry(NgramConfig(min_ngram=1, max_ngram=3, max_offer=5)),
        "cut": entry(CUT, "distill"),
        "full": entry(dataclasses.replace(CUT, layers=[0, 1, 2, 3]), "distill"),
        "both": entry(CompositeConfig(lookup="ngram", model="cut", min_match=1)),
    }
)


def stage(**changes: Any) -> Collect:
    settings: dict[str, Any] = {
        "splits": ["validation", "test"],
        "max_depth": 6,
        "check_split": "validation",
        "check_prompts": 3,
        "check_num_draft_tokens": 4,
    }
    return Collect(**{**settings, **changes})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Groups and inputs of the stage; the drafter "full" is the target itself, by another name."""
    root = tmp_path_factory.mktemp("world")
    splits = {
        name: [
            prompt(n, d, words=2 + n % 5) for n in range(start, start + 3) for d in ("code", "chat")
        ]
        for name, start in (("validation", 0), ("test", 10))
    }
    config = tiny_config(tiny_target_folder(root / "target"))
    prompts = write_prompts(root / "prompts", splits)
    counts = {"validation": 0, "test": 0}
    regenerate_stage(
        laws={"validation": "both", "test": "both"},
        prompts_per_domain=counts,
        max_new_tokens={"validation": 20, "test": 9},
    ).run(workspace({"target": config}, {"prompts": prompts}, root / "answers"))
    parts = target_parts(load_target(config, RUNTIME))
    inputs = {"answers": root / "answers"}
    for name in ("cut", "full"):
        drafter: Any = POOL.entries[name].drafter.build(BuildContext(parts))
        drafter.save(root / name)
        inputs[f"drafter:{name}"] = root / name
    return {"groups": {"target": config, "pool": POOL}, "inputs": inputs}


@pytest.fixture(scope="module")
def collected(world: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("collected")
    return out, stage().run(workspace(world["groups"], world["inputs"], out))


def test_every_answer_and_drafter_has_its_row(world: dict[str, Any], collected: Any) -> None:
    frame = load_acceptance(collected[0])
    answers = list(Answers(world["inputs"]["answers"]).rows())
    keys = frame[["prompt_id", "law", "drafter"]].apply(tuple, axis=1)
    wanted = {(a.id, a.law, name) for a in answers for name in POOL.entries}
    assert set(keys) == wanted
    assert len(frame) == len(wanted) == 12 * 2 * 4
    assert set(frame["split"]) == {"validation", "test"}


def test_a_row_holds_what_its_drafter_scores(world: dict[str, Any], collected: Any) -> None:
    frame = load_acceptance(collected[0]).set_index(["prompt_id", "law", "drafter"])
    target = load_target(world["groups"]["target"], RUNTIME)
    drafters = build_drafters(POOL, target, world["inputs"])
    for answer in Answers(world["inputs"]["answers"]).rows(domain="chat"):
        for name, drafter in drafters.items():
            row = frame.loc[(answer.id, answer.law, name)]
            assert row["accept"].shape == (len(answer.logprobs), 6) == (row["num_tokens"], 6)
            alone = score(drafter, answer, 6).numpy()
            np.testing.assert_allclose(row["accept"], alone, atol=1e-5)
            assert row["text"] == answer.text
            assert row["temperature"] == answer.sampling.temperature
            assert row["num_prompt_tokens"] == answer.num_prompt_tokens


def test_no_proposal_is_no_rejection(collected: Any) -> None:
    frame = load_acceptance(collected[0])
    lookup = np.concatenate([row.ravel() for row in frame[frame.drafter == "ngram"]["accept"]])
    assert np.isnan(lookup).any()
    assert (lookup == 0).any()
    whole = frame[frame.drafter == "full"]["accept"]
    assert all(
        np.nan_to_num(row, nan=1).min() > 0.999 for row in whole
    )  # the target accepts itself


def test_the_decoder_confirms_the_estimate(collected: Any) -> None:
    metrics = collected[1]
    for name in POOL.entries:
        foretold = metrics[f"predicted_acceptance_length_{name}_greedy"]
        assert metrics[f"decoded_acceptance_length_{name}_greedy"] == pytest.approx(foretold)
        assert metrics[f"acceptance_length_error_{name}_greedy"] == pytest.approx(0)
        assert 1 <= metrics[f"decoded_acceptance_length_{name}_sampled"] <= 5
    assert metrics["decoded_acceptance_length_full_greedy"] > 3.5
    assert 1 < metrics["decoded_acceptance_length_cut_sampled"] < 3  # rejections did happen
    assert metrics["acceptance_length_both_greedy"] >= 1


def test_a_failed_run_leaves_no_file(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def dies(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt
        return score(*arguments)

    monkeypatch.setattr(scoring, "score", dies)
    with pytest.raises(KeyboardInterrupt):
        stage().run(workspace(world["groups"], world["inputs"], tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_drafter_that_fails_while_decoding_is_said(
    world: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any) -> Any:
        raise RuntimeError("no session today")

    monkeypatch.setattr("drafters.ngram.NgramDrafter.open", broken)
    with pytest.raises(
        ValueError, match=r"drafter ngram failed while decoding: .*no session today"
    ):
        stage().run(workspace(world["groups"], world["inputs"], tmp_path))


def test_damage_is_named(collected: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run stage=collect first"):
        load_acceptance(tmp_path)
    whole = (collected[0] / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"acceptance\.parquet is damaged"):
        load_acceptance(tmp_path)


def test_settings_that_do_not_fit(world: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="check_num_draft_tokens=9 must lie between 1 and max_depth=6"
    ):
        stage(check_num_draft_tokens=9)
    with pytest.raises(
        ValueError, match=r"no answers in the splits mixed; add them to stages\.regenerate"
    ):
        stage(splits=["mixed"]).run(workspace(world["groups"], world["inputs"], tmp_path))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_answers_training_and_acceptance_on_a_gpu(tmp_path: Path) -> None:
    """The same chain of stages with everything on the device; a killed run resumes there too."""
    splits = {
        name: [prompt(n, d, words=2 + n % 5) for n in range(start, start + 6) for d in ("a", "b")]
        for name, start in (("drafter_train", 0), ("validation", 10))
    }
    config = tiny_config(tiny_target_folder(tmp_path / "target"))
    prompts = write_prompts(tmp_path / "prompts", splits)
    groups = {"target": config, "pool": POOL, "entry": NamedEntry("cut", POOL.entries["cut"])}

    def run(stage: Any, out: str, **inputs: Path) -> dict[str, Any]:
        return stage.run(workspace(groups, inputs, tmp_path / out, runtime=GPU))

    for dtype, out in (("float32", "answers"), ("auto", "fast")):
        answering = regenerate_stage(
            laws={"drafter_train": "alternate", "validation": "both"},
            prompts_per_domain={"drafter_train": 0, "validation": 0},
            max_new_tokens={"drafter_train": 20, "validation": 20},
            dtype=dtype,
        )
        assert run(answering, out, prompts=prompts)["num_answers"] == 36
    answers = tmp_path / "answers"
    for precision in ("float32", "auto"):
        for teacher in ("recorded", "model"):
            out = f"{precision}-{teacher}"
            metrics = run(distill(teacher=teacher, precision=precision), out, answers=answers)
            assert metrics["num_rows"] == 12
    trained = tmp_path / "float32-recorded"
    inputs = {"answers": answers, "drafter:cut": trained, "drafter:full": trained}
    pool = Pool(entries={n: e for n, e in POOL.entries.items() if n != "full"})
    groups["pool"] = pool
    metrics = run(stage(splits=["validation"]), "collected", **inputs)
    for name in pool.entries:
        decoded = metrics[f"decoded_acceptance_length_{name}_greedy"]
        assert decoded == pytest.approx(metrics[f"predicted_acceptance_length_{name}_greedy"])
