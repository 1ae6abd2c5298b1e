"""Would catch: a run that was killed and resumed ending in another table; a torn line of the
journal taken for a cell; methods that decode different prompts, noise or lengths; greedy texts that
differ unnoticed; costs of another machine used; a results file that is no JSON; a report that needs
other files.

The target and cut are tiny, the clock is virtual: every reading takes a millisecond, so that tables
must be equal to the last digit.
"""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_target_folder, tiny_tokenizer
from workspace import prompt, tiny_config, write_prompts
from world import HashEncoder

from decode.policies.named import policy_config
from drafters.lm import LmConfig
from drafters.ngram import NgramConfig
from pipeline import bench, train_router
from pipeline.answers import Answers
from pipeline.bench_evaluation import leaks
from pipeline.benches import SCORED, BenchData
from pipeline.collect import Collect
from pipeline.compare import Compare, means, read_comparison
from pipeline.compose import compose_config
from pipeline.config import Pool, PoolEntry, typed
from pipeline.evaluate import Evaluate
from pipeline.manifest import finish
from pipeline.models import EncoderConfig
from pipeline.profile import Profile
from pipeline.quality.final import final_answer
from pipeline.regenerate import Regenerate
from pipeline.report import as_text
from pipeline.runtime import Runtime
from pipeline.stage import Workspace
from pipeline.train_router import TrainRouter
from pipeline.wallclock import Journal

RUNTIME = Runtime(device="cpu", threads=1, clock="virtual")
SPLITS = ("router_train", "validation", "test", "mixed")
EVALUATE = Evaluate(
    prompts_per_domain={"test": 2, "mixed": 1},
    temperatures={"greedy": 0.0, "sampled": 0.8},
    max_new_tokens=12,
    num_repeats=2,
    draft_lengths=[1, 3, 5],
    replay_prompts_per_domain=0,
    replay_policies=["thompson", "thompson_flat", "ucb1", "router_only"],
    num_resamples=50,
    samples_per_domain=1,
    bench_prompts=1,
    quality=False,
    quality_seconds=5.0,
)
COMPARE = Compare(
    num_draft_tokens=3,
    compare_with=["ngram"],
    best_of={"best": ["ngram", "cut"]},
    num_resamples=50,
)
NO_BENCH = BenchData(
    folder=".",
    files=[],
    turns="all",
    prompts_per_bench=0,
    laws="both",
    max_new_tokens=12,
    max_prompt_tokens=60,
)


def pool() -> Pool:
    lm = LmConfig(source=None, layers=[0, -1], num_draft_vocab=0, train_head=False, dtype="float32")
    ngram = NgramConfig(min_ngram=1, max_ngram=2, max_offer=5)
    rest: dict[str, Any] = {"trained_by": None, "domains": [], "init_from": None}
    return Pool(
        entries={n: PoolEntry(drafter=d, **rest) for n, d in (("ngram", ngram), ("cut", lm))}
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Everything upstream of evaluate, on the tiny target: (groups, inputs)."""
    root = tmp_path_factory.mktemp("upstream")
    patch = pytest.MonkeyPatch()
    for module in (bench, train_router):
        patch.setattr(module, "SentenceEncoder", lambda folder, device: HashEncoder())
        patch.setattr(module, "resolve_encoder", lambda config: Path("unused"))
    encoder = EncoderConfig(name_or_path="e/e", revision=None, wheel=None, wheel_sha256=None)
    groups = {
        "target": tiny_config(tiny_target_folder(root / "target")),
        "pool": pool(),
        "encoder": encoder,
        "bench": NO_BENCH,
        "policy": policy_config("posterior"),
    }
    domains = ("code", "chat")
    rows = {
        split: [prompt(10 * i + n, d, words=4) for n in range(4) for d in domains]
        for i, split in enumerate(SPLITS)
    }
    inputs = {"prompts": write_prompts(root / "prepare" / "0", rows)}
    settings = {"leak_words": 13, "boilerplate_rows": 20}
    prepared = {"stage": "prepare", "inputs": {}, "settings": settings}
    finish(inputs["prompts"], prepared, {}, time.time())

    def run(name: str, stage: Any, key: str) -> None:
        out = root / name / "0"
        out.mkdir(parents=True)
        stage.run(Workspace(groups, inputs, out, 3, RUNTIME))
        lineage = {name: f"{path.parent.name}/0" for name, path in inputs.items()}
        finish(out, {"stage": name, "inputs": lineage}, {}, time.time() - 2)
        inputs[key] = out

    everywhere = dict.fromkeys(SPLITS, 0)
    run("regenerate", regenerate(everywhere), "answers")
    check: dict[str, Any] = {
        "check_split": "test",
        "check_prompts": 0,
        "check_num_draft_tokens": 3,
    }
    run("collect", Collect(splits=list(SPLITS), max_depth=5, **check), "acceptance")
    run("compare", COMPARE, "comparison")
    run("profile", profile(), "costs")
    run("train_router", router(), "router")
    yield groups, inputs
    patch.undo()


def regenerate(everywhere: dict[str, int]) -> Regenerate:
    return Regenerate(
        laws=dict.fromkeys(everywhere, "both"),
        prompts_per_domain=everywhere,
        max_new_tokens=dict.fromkeys(everywhere, 12),
        max_prompt_tokens=40,
        temperature=0.8,
        top_p=1.0,
        batch_size=8,
        shard_rows=64,
        num_top_logits=4,
        dtype="float32",
        engine="padded",
    )


def profile() -> Profile:
    return Profile(
        widths=[1, 2, 6],
        draft_lengths=[1, 5],
        context_tokens=24,
        num_repeats=2,
        num_contexts=2,
        host_tokens=4,
    )


def router() -> TrainRouter:
    return TrainRouter(
        hidden=8,
        penalties=[0.1],
        learning_rate=0.02,
        max_steps=5,
        patience=5,
        neighbours=[3],
        num_resamples=20,
    )


def evaluate(built: Any, out: Path, stage: Evaluate = EVALUATE) -> dict[str, Any]:
    groups, inputs = built
    out.mkdir(parents=True, exist_ok=True)
    stage.run(Workspace(groups, inputs, out, 3, RUNTIME))
    return json.loads(
        (out / "results.json").read_text(encoding="utf-8"),
        parse_constant=lambda name: pytest.fail(f"{name} is not JSON"),
    )


@pytest.fixture(scope="module")
def done(built: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A whole, uninterrupted run."""
    out = tmp_path_factory.mktemp("evaluate")
    return out, evaluate(built, out)


QUESTIONS = [f"w{n} w{n + 1} w{n + 2}" for n in range(6)]


@pytest.fixture(scope="module")
def benched(built: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With two benchmarks: talk of two turns, and a quiz whose first three answers are right."""
    root, (groups, inputs) = tmp_path_factory.mktemp("benched"), built
    talk = [{"id": n, "domain": "chat", "turns": ["w9 w8", f"w{n}"]} for n in range(3)]
    data = replace(NO_BENCH, folder=str(root), files=["quiz.jsonl", "talk.jsonl"])
    write_lines(root / "talk.jsonl", talk)
    write_lines(root / "quiz.jsonl", [{"id": n, "prompt": q} for n, q in enumerate(QUESTIONS)])
    groups = {**groups, "bench": data}
    prompts, answers, acceptance = root / "prompts", root / "answers", root / "acceptance"
    for folder in (prompts, answers, acceptance):
        folder.mkdir()
    prepare = typed(compose_config([]).stages.prepare, "stages.prepare")
    swapped = {**groups, "data": data, SCORED: data}
    prepare.run(Workspace(swapped, {}, prompts, 3, RUNTIME))
    stage = regenerate({"test": 0}).for_groups(swapped)
    stage.run(Workspace(swapped, {"prompts": prompts}, answers, 3, RUNTIME))
    check: dict[str, Any] = {"check_split": "t", "check_prompts": 1, "check_num_draft_tokens": 3}
    collect = Collect(splits=["test"], max_depth=5, **check).for_groups(swapped)
    collect.run(Workspace(swapped, {"answers": answers}, acceptance, 3, RUNTIME))
    decode = tiny_tokenizer().decode
    said = {a.id: decode(a.answer_ids) for a in Answers(answers).rows(law="greedy")}
    quiz = [
        {"id": n, "prompt": q, "answer": final_answer(said[f"quiz/{n}/1"]) if n < 3 else "-1"}
        for n, q in enumerate(QUESTIONS)
    ]
    write_lines(root / "quiz.jsonl", quiz)
    inputs = {**inputs, "bench_answers": answers, "bench_acceptance": acceptance}
    inputs["comparison"] = root / "comparison"
    inputs["comparison"].mkdir()
    COMPARE.run(Workspace(groups, inputs, inputs["comparison"], 3, RUNTIME))
    for folder in (answers, acceptance, inputs["comparison"]):
        finish(folder, {"stage": folder.name, "inputs": {}}, {}, time.time())
    return groups, inputs


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def graded(benched: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("graded")
    return out, evaluate(benched, out, replace(EVALUATE, quality=True, bench_prompts=4))


def test_benchmarks_stand_beside_the_test_split(
    graded: tuple[Path, dict[str, Any]], done: tuple[Path, dict[str, Any]]
) -> None:
    results, plain = graded[1], done[1]
    own = [row for row in results["wall"] if row["domain"] not in ("quiz", "talk")]
    assert own == plain["wall"]
    assert plain["quality"] == plain["acceptance_by_family"] == []
    rows = [row for row in results["wall"] if row["domain"] == "quiz"]
    assert {row["num_prompts"] for row in rows} == {4}
    assert len(rows) == 2 * 5
    acceptance = {
        (row["drafter"], row["split"], row["domain"], row["law"]): row
        for row in results["acceptance_by_domain"]
    }
    assert {key[1:3] for key in acceptance} == {
        *(("test", "code"), ("test", "chat"), ("mixed", "code"), ("mixed", "chat")),
        *(("quiz", "quiz"), ("talk", "talk")),
    }
    assert {key[0] for key in acceptance} == {"ngram", "cut", "best"}
    assert acceptance["cut", "talk", "talk", "greedy"]["num_prompts"] == 3
    for (drafter, *where), row in acceptance.items():
        assert row["low"] <= row["acceptance_length"] <= row["high"], (drafter, where)
        best = acceptance["best", where[0], where[1], where[2]]
        assert best["acceptance_length"] >= row["acceptance_length"] - 1e-9
    assert {row["drafter"] for row in results["gains"]} == {"cut", "best"}


def test_the_domain_table_agrees_with_the_replayed_grid(done: tuple[Path, dict[str, Any]]) -> None:
    found = {
        (row["drafter"], row["domain"], row["law"]): row["acceptance_length"]
        for row in done[1]["acceptance_by_domain"]
        if row["split"] == "test"
    }
    for row in done[1]["grid"]:
        key = (row["drafter"], row["domain"], row["law"])
        if row["num_draft_tokens"] == 3 and key in found:
            assert found[key] == pytest.approx(row["acceptance_length"])


def test_quality_is_that_of_plain_decoding(graded: tuple[Path, dict[str, Any]]) -> None:
    results = graded[1]
    rows = {(row["method"], row["law"]): row for row in results["quality"]}
    assert rows["recorded", "greedy"]["passed"] == 3
    assert rows["recorded", "greedy"]["num_answers"] == 6
    methods = {"plain", "best fixed", "router only", "policy cold", "policy + router"}
    assert {method for method, _ in rows} == methods | {"recorded"}
    assert len({rows[method, "greedy"]["passed"] for method in methods}) == 1
    assert 0 < rows["plain", "greedy"]["passed"] < 8, "an equality of nothing"
    audit = results["quality_audit"]
    assert audit["is_equal"]
    assert set(audit["compared"].values()) == {8}  # four questions, two repeats
    assert results["sandbox"] == []  # no program was run
    page = (graded[0] / "report.html").read_text(encoding="utf-8")
    assert "All 32 greedy answers of other methods are graded as plain decoding" in page
    for title in ("Acceptance length by task family", "Right answers", "Drafters against one"):
        assert title in page


def test_a_quality_that_moved_is_found(
    benched: Any, graded: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    for name in ("cells.jsonl", "bench_cells.jsonl"):
        shutil.copy(graded[0] / name, tmp_path / name)
    cells = [json.loads(line) for line in (tmp_path / "bench_cells.jsonl").read_text().splitlines()]
    right = {f"quiz/{n}/1" for n in range(3)}
    wrong = next(
        c
        for c in cells
        if c["id"] in right and c["law"] == "greedy" and c["method"] == "best fixed"
    )
    wrong["token_ids"] = wrong["token_ids"][:1]
    write_lines(tmp_path / "bench_cells.jsonl", cells)
    results = evaluate(benched, tmp_path, replace(EVALUATE, quality=True, bench_prompts=4))
    audit = results["quality_audit"]
    assert not audit["is_equal"]
    assert [row["id"] for row in audit["moved"]] == [wrong["id"]]
    assert results["audit"]["different"]["best fixed"] == 1
    assert "graded otherwise" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_what_shares_text_with_a_benchmark_is_counted(benched: Any, tmp_path: Path) -> None:
    groups, _ = benched
    shared = " ".join(f"w{n}" for n in range(40, 60))
    row = {**prompt(900, "chat"), "text": shared}
    prompts = write_prompts(tmp_path / "prompts", {"validation": [row, prompt(901, "chat")]})
    bench_file = replace(groups["bench"], folder=str(tmp_path), files="held.jsonl")
    write_lines(tmp_path / "held.jsonl", [{"id": 0, "prompt": f"please say {shared} once"}])
    settings = {"leak_words": 13, "boilerplate_rows": 20}
    assert leaks(bench_file, prompts, settings) == [
        {"split": "validation", "bench": "held", "num_prompts": 1, "example": shared}
    ]


def test_another_temperature_than_was_recorded_is_refused(built: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sampled was answered at temperature 0\.8"):
        evaluate(built, tmp_path, replace(EVALUATE, temperatures={"sampled": 1.0}))


def test_every_method_decodes_the_same_prompts(done: tuple[Path, dict[str, Any]]) -> None:
    out, results = done
    cells = list(Journal(out / "cells.jsonl").cells.values())
    assert len(cells) == (2 * 2 + 2) * 2 * 2 * 5  # prompts, laws, repeats, methods
    of = {m: {c.key[:3] for c in cells if c.method == m} for m in {c.method for c in cells}}
    assert set(of) == {"plain", "best fixed", "router only", "policy cold", "policy + router"}
    assert len({frozenset(keys) for keys in of.values()}) == 1
    rows = {(r["law"], r["domain"], r["method"]): r for r in results["wall"]}
    assert {key[1] for key in rows} == {"all", "code", "chat", "mixed"}
    for (law, domain, method), row in rows.items():
        if method == "plain":
            assert row["speed_ratio"]["value"] == pytest.approx(1.0)
            assert row["acceptance_length"] == row["break_even_length"] == pytest.approx(1.0)
            assert row["share_of_steps_off"] == 1.0
        else:
            faster = row["acceptance_length"] / row["break_even_length"]
            assert row["speed_ratio"]["value"] == pytest.approx(faster), (law, domain)


def test_greedy_texts_are_plain_decodings_and_drafts_were_accepted(
    done: tuple[Path, dict[str, Any]],
) -> None:
    audit = done[1]["audit"]
    assert set(audit["compared"].values()) == {12}
    assert set(audit["different"].values()) == {0}
    fixed = [row for row in done[1]["wall"] if row["method"] == "best fixed"]
    assert any(row["acceptance_rate"] for row in fixed), "an equality with nothing accepted"


def test_a_planted_difference_is_found_with_its_gap(built: Any, tmp_path: Path, done: Any) -> None:
    shutil.copy(done[0] / "cells.jsonl", tmp_path / "cells.jsonl")
    lines = (tmp_path / "cells.jsonl").read_text().splitlines()
    cells = [json.loads(line) for line in lines]
    wrong = next(c for c in cells if c["law"] == "greedy" and c["method"] == "policy cold")
    wrong["token_ids"][2] += 1
    (tmp_path / "cells.jsonl").write_text("".join(json.dumps(c) + "\n" for c in cells))
    audit = evaluate(built, tmp_path)["audit"]
    assert audit["different"]["policy cold"] == 1
    assert audit["differences"][0]["position"] == 2
    assert audit["differences"][0]["gap"] > 0


@pytest.mark.parametrize("kept", [0, 1, 37])
def test_a_killed_run_ends_in_the_same_table(
    built: Any, done: tuple[Path, dict[str, Any]], tmp_path: Path, kept: int
) -> None:
    """Killed after some cells, in the middle of writing the next."""
    lines = (done[0] / "cells.jsonl").read_text().splitlines(keepends=True)
    text = "".join(lines[:kept]) + lines[kept][: len(lines[kept]) // 2]
    (tmp_path / "cells.jsonl").write_text(text)
    again = evaluate(built, tmp_path)
    assert again == done[1]
    assert (tmp_path / "cells.jsonl").read_text() == (done[0] / "cells.jsonl").read_text()


def test_the_report_stands_alone_and_says_what_to_deploy(
    done: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    out, results = done
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 4  # nothing was trained
    assert "$" not in page.split("</style>")[1]
    assert "<link" not in page
    assert 'src="http' not in page
    assert results["deployment"].endswith(".")
    assert {row["drafter"] for row in results["requirements"]} == {"ngram", "cut"}
    assert [row["law"] for row in results["recommendations"]] == ["greedy", "sampled"]
    stages = [row["stage"] for row in results["stage_seconds"]]
    assert stages == ["prepare", "regenerate", "collect", "compare", "profile", "train_router"]
    assert results["deployment"] in as_text(EVALUATE.shown(out))
    assert {row["policy"] for row in results["replay"]} >= {
        "plain",
        "best fixed",
        "policy cold",
        "policy + population",
        "policy + router",
        "policy + experience",
        "policy + router + experience",
        "thompson + router",
        "thompson_flat",
        "ucb1",
        "router_only + router",
        "oracle: best arm of each prompt",
    }


def test_the_conditions_say_how_the_target_was_computed(done: tuple[Path, dict[str, Any]]) -> None:
    names = ("dtype", "backend", "exactness", "width_dependence")
    found = [done[1]["conditions"][name] for name in names]
    assert found == ["float32", "transformers", "law", None]


def test_samples_are_the_targets_text_and_agree_with_replay(
    built: Any, done: tuple[Path, dict[str, Any]]
) -> None:
    answers = Answers(built[1]["answers"])
    texts = {(a.id, a.law): a.answer_ids.tolist() for a in answers.rows("test")}
    rows = done[1]["samples"]
    assert {(row["domain"], row["law"], row["drafter"]) for row in rows} == {
        (domain, law, drafter)
        for domain in ("code", "chat")
        for law in ("greedy", "sampled")
        for drafter in ("ngram", "cut")
    }
    decode = tiny_tokenizer().decode
    for row in rows:
        assert "".join(text for _, text in row["spans"]) == decode(texts[row["id"], row["law"]])
    fastest = {(r["drafter"], r["law"]): r["num_draft_tokens"] for r in done[1]["requirements"]}
    assert all(fastest[row["drafter"], row["law"]] == row["num_draft_tokens"] for row in rows)


def test_costs_of_another_machine_are_refused(built: Any, tmp_path: Path) -> None:
    groups, inputs = built
    shutil.copytree(inputs["costs"], tmp_path / "costs")
    costs = json.loads((tmp_path / "costs" / "costs.json").read_text())
    (tmp_path / "costs" / "costs.json").write_text(json.dumps({**costs, "key": "elsewhere"}))
    with pytest.raises(ValueError, match=r"elsewhere.*stage=profile"):
        evaluate((groups, {**inputs, "costs": tmp_path / "costs"}), tmp_path / "out")


def test_no_prompt_that_fits_is_one_sentence(built: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_new_tokens=1000"):
        evaluate(built, tmp_path, replace(EVALUATE, max_new_tokens=1000))


def test_what_a_policys_name_stands_for_is_part_of_the_identity() -> None:
    identity = EVALUATE.identity()
    assert identity["replay_policies"]["thompson"]["hazard"] > 0
    assert identity["max_new_tokens"] == 12


def test_a_comparison_says_all_domains_together(benched: Any) -> None:
    """Means over domains are plain; the pooled row counts every answer once."""
    content = read_comparison(benched[1]["comparison"])
    rows = {
        (r["drafter"], r["split"], r["domain"], r["law"]): r for r in content["acceptance_summary"]
    }
    parts = [rows["cut", "test", domain, "greedy"] for domain in ("code", "chat")]
    whole = rows["cut", "test", "all", "greedy"]
    assert whole["tokens"] == sum(part["tokens"] for part in parts)
    assert whole["passes"] == pytest.approx(sum(part["passes"] for part in parts))
    mean = means(content["acceptance_summary"])["acceptance_length_cut_test_greedy"]
    assert mean == pytest.approx(sum(part["acceptance_length"] for part in parts) / 2)
    assert {key[1] for key in rows} == {"test", "mixed", "benchmarks"}
    assert {row["against"] for row in content["gains_summary"]} == {"ngram"}
    text = as_text(COMPARE.shown(benched[1]["comparison"]))
    assert f"{mean:.2f}" in text
    assert "against" in text


def test_a_question_that_benchmarks_ask_twice_counts_once_among_all(benched: Any) -> None:
    content = read_comparison(benched[1]["comparison"])
    assert content["bench_repeats"] == ["talk/1/1", "talk/2/1"]
    said = Answers(benched[1]["bench_answers"]).rows(law="greedy", with_teacher=False)
    tokens = {answer.id: len(answer.logprobs) for answer in said}
    pooled = [
        row["tokens"]
        for row in content["acceptance_summary"]
        if (row["split"], row["domain"], row["law"]) == ("benchmarks", "all", "greedy")
    ]
    twice = tokens["talk/1/1"] + tokens["talk/2/1"]
    assert pooled == [sum(tokens.values()) - twice] * 3
    alone = {
        row["tokens"]
        for row in content["acceptance_by_domain"]
        if (row["split"], row["law"]) == ("talk", "greedy")
    }
    assert alone == {sum(count for name, count in tokens.items() if name.startswith("talk"))}
