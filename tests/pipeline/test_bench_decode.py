"""Would catch: a way that fails and takes the run with it, or goes missing unsaid; texts of one
prompt held against those of another; an order in which one way is always the first; a first call,
or a compile, timed with a text; a median or ratio that the texts' own numbers do not give; a
difference from plain decoding that is not counted, or counted as ours where it is a peer's; a row
of a batch that is another one than alone; a table with a figure that the JSON does not hold.

Ways are made up, with known seconds; the two tests at the end run every real one on a tiny model.
"""

import json
import logging
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import LOOKUP, POOL, bench_files, no_bench, suite
from test_export import copy, exported, world  # noqa: F401 (fixtures)
from tiny import tiny_model, tiny_target_folder, tiny_tokenizer
from workspace import prompt, tiny_config, workspace, write_prompts

from decode.clock import VirtualClock
from decode.targets.transformers import TransformersTarget
from drafters.retrieval import RetrievalConfig, RetrievalDrafter
from drafters.retrieval_table import build_table
from pipeline import bench_arms, bench_suites, load_decoder
from pipeline.bench_arms import ASSISTED, COMPILED, EAGER, FLASHSPEC, Arm, Written
from pipeline.bench_arms import LOOKUP as PROMPT_LOOKUP
from pipeline.bench_batch import batch_suite
from pipeline.bench_decode import race, told
from pipeline.bench_prompts import bench_prompts
from pipeline.bench_suites import Parts, exported_arm, own_arms
from pipeline.bench_table import main, placed, rendered, shown
from pipeline.config import Pool
from pipeline.headline import finite
from pipeline.wallclock import PLAIN, EvalPrompt

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [
    EvalPrompt(f"{domain}/{n}", domain, domain, "", (10 + n, 20, 30))
    for n in range(2)
    for domain in ("code", "chat")
]
SECONDS = {PLAIN: [4.0, 8.0, 2.0, 1.0], "fast, K=2": [2.0, 2.0, 2.0, 2.0], COMPILED: [8.0] * 4}
TEXT = [7, 8, 9, 10, 11]


def arm(name: str, order: list[str], texts: dict[int, list[int]] | None = None) -> Arm:
    """Writes TEXT, or another text at some prompts, in its SECONDS; its first calls take ages."""

    def make() -> Any:
        calls = iter(range(-2, 99))

        def write(prompt: list[int], max_new_tokens: int) -> Written:
            number = next(calls)
            if number < 0:
                assert prompt == list(PROMPTS[0].token_ids)
                assert max_new_tokens == (8, 20)[number + 2]
                return Written(TEXT, 1e9, 1, 1e9, 5)
            assert prompt == list(PROMPTS[number].token_ids)
            order.append(name)
            ids = (texts or {}).get(number, TEXT)
            return Written(ids, SECONDS[name][number], 1, 0.5, 5)

        return write

    return Arm(name, make, name != COMPILED)


def broken(name: str, when: int) -> Arm:
    """Fails at that call; 0: when it is made."""

    def make() -> Any:
        calls = iter(range(1, 99))

        def write(prompt: list[int], max_new_tokens: int) -> Written:
            if next(calls) == when:
                raise RuntimeError("out of luck\nand of memory")
            return Written(TEXT, 1.0, 1, 1.0, 5)

        if when == 0:
            raise ImportError("nothing there")
        return write

    return Arm(name, make, False)


def some_race(*more: Arm, texts: dict[int, list[int]] | None = None) -> tuple[Any, list[str]]:
    order: list[str] = []
    arms = [arm(PLAIN, order), arm("fast, K=2", order, texts), arm(COMPILED, order)]
    return race([*arms, *more], PROMPTS, 20, VirtualClock(1.0)), order


@pytest.fixture
def target() -> TransformersTarget:
    return TransformersTarget(tiny_model(), tiny_tokenizer(), "tiny")


def test_ways_take_turns_and_their_numbers_are_those_of_their_texts(
    target: TransformersTarget,
) -> None:
    result, order = some_race()
    names = [PLAIN, "fast, K=2", COMPILED]
    assert order == [names[(turn + place) % 3] for turn in range(4) for place in range(3)]
    content = told(result, target)
    rows = {(row["arm"], row["group"]): row for row in content["rows"]}
    assert set(rows) == {(name, group) for name in names for group in ("all", "code", "chat")}
    assert rows[PLAIN, "all"]["tokens_per_second"] == median([1.0, 0.5, 2.0, 4.0])
    fast = rows["fast, K=2", "all"]
    assert fast["tokens_per_second"] == 2.0
    assert fast["over_plain"]["value"] == median([2.0, 4.0, 1.0, 0.5])
    assert fast["over_compiled"]["value"] == 4.0
    assert rows["fast, K=2", "chat"]["over_plain"]["value"] == median([4.0, 0.5])
    assert fast["first_call_seconds"] == 1.0  # one reading before, one after
    assert fast["tokens_per_pass"] == 1.0
    assert [t["seconds"] for t in content["texts"] if t["arm"] == PLAIN] == SECONDS[PLAIN]
    best = content["best"]
    assert (best["code"]["ours"]["arm"], best["all"]["theirs"]["arm"]) == ("fast, K=2", COMPILED)


def test_texts_that_part_from_plain_decodings_are_counted_with_their_gap(
    target: TransformersTarget,
) -> None:
    result, _ = some_race(texts={1: [7, 8, 12, 10, 11], 3: TEXT[:4]})
    content = told(result, target)
    audit = content["audit"]
    assert audit["own_texts_different"] == 2
    assert audit["own_tokens_compared"] == 4 * len(TEXT)  # not a peer's
    places = [(d["id"], d["position"]) for d in audit["differences"]]
    assert places == [(PROMPTS[1].id, 2), (PROMPTS[3].id, 4)]
    assert all(d["gap"] > 0 for d in audit["differences"])
    rows = {(row["arm"], row["group"]): row["equal_texts"] for row in content["rows"]}
    assert (rows["fast, K=2", "all"], rows["fast, K=2", "chat"], rows[PLAIN, "all"]) == (2, 0, 4)


@pytest.mark.parametrize("when", [0, 1, 2, 4])
def test_a_way_that_fails_is_said_and_the_others_go_on(
    target: TransformersTarget, when: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        result, _ = some_race(broken("peer", when))
    why = "ImportError: nothing there" if when == 0 else "RuntimeError: out of luck"
    content = told(result, target)
    assert content["failures"] == {"peer": why}
    assert caplog.text.count(f"peer failed and is left out: {why}") == 1
    assert content["metrics"]["num_failed"] == 1
    rows = {(row["arm"], row["group"]): row for row in content["rows"]}
    assert rows[PLAIN, "all"]["num_texts"] == 4
    assert (("peer", "all") in rows) == (when > 2)  # it had written a text
    if when > 2:
        assert rows["peer", "all"]["num_texts"] == 1
        assert sum(text.get("failed", False) for text in content["texts"]) == 3


def test_without_plain_decoding_nothing_can_be_said() -> None:
    with pytest.raises(ValueError, match="plain decoding is what the others are measured by"):
        race([broken("peer", 9)], PROMPTS, 20, VirtualClock())
    with pytest.raises(RuntimeError, match="out of luck"):
        race([broken(PLAIN, 1)], PROMPTS, 20, VirtualClock())


def test_benchmarks_are_asked_in_turn_by_their_first_turns(tmp_path: Path) -> None:
    data, tokenizer = bench_files(tmp_path), tiny_tokenizer()
    found = bench_prompts(data, {"humaneval": 2, "gsm8k": 1, "mt_bench": 4}, tokenizer)
    assert [p.split for p in found] == ["humaneval", "gsm8k", "humaneval"]
    assert [p.domain for p in found] == ["humaneval", "gsm8k", "humaneval"]
    more = bench_prompts(data, {"humaneval": 2, "gsm8k": 1}, tokenizer, at_least=8)
    assert len(more) == len({p.id for p in more}) == 8
    assert {p.id for p in found} <= {p.id for p in more}
    with pytest.raises(ValueError, match=r"counts mt_bench, but .* has humaneval"):
        bench_prompts(data, {"mt_bench": 1}, tokenizer)


class Decoder:
    """Two seconds a prompt and one for each call; a text that the batch size may change."""

    def __init__(self, size: int, clock: Any, spoiled: bool) -> None:
        self.size, self.clock, self.spoiled = size, clock, spoiled
        self.pool = SimpleNamespace(dropped={})

    def generate(self, prompts: list[list[int]], max_new_tokens: int) -> Any:
        self.clock.time += 2.0 * len(prompts) + 1.0
        texts = [ids[:2] for ids in prompts]
        if self.spoiled and self.size == 2:
            texts[-1] = [99, 99]
        metrics = [SimpleNamespace(prefill_seconds=2.0) for _ in prompts]
        return SimpleNamespace(token_ids=texts, metrics=metrics)


def test_batches_are_held_against_one_by_one() -> None:
    clock: Any = SimpleNamespace(time=0.0)
    clock.now = lambda: clock.time
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]

    def refused(size: int) -> Any:
        raise RuntimeError("too many rows")

    makers: dict[str, Any] = {
        PLAIN: lambda size: Decoder(size, clock, False),
        "spoiled, K=3": lambda size: Decoder(size, clock, True),
        "refused, K=3": refused,
    }
    content = batch_suite(makers, prompts, [1, 2], 20, 2, clock, lambda ids: float(sum(ids)))
    rows = {(row["arm"], row["batch"]): row for row in content["rows"]}
    assert len(rows) == 4
    assert rows[PLAIN, 2]["seconds"] == 2.0  # of both rounds
    assert rows[PLAIN, 2]["tokens_per_second"] == 6.0
    assert [rows[key]["equal_to_alone"] for key in rows] == [3, 3, 3, 2]
    assert rows["spoiled, K=3", 2]["equal_to_plain"] == 2
    assert content["metrics"]["num_different"] == 1
    (case,) = content["differences"]
    assert case == {"arm": "spoiled, K=3", "batch": 2, "request": 2, "position": 0, "gap": 30.0}
    assert content["failures"]["refused, K=3, 1 rows"] == "RuntimeError: too many rows"
    assert content["metrics"]["num_failed"] == 2


CONDITIONS = {
    "suite": "decode",
    "target": "some-model",
    "dtype": "bfloat16",
    "backend": "native",
    "exactness": "bitwise",
    "device": "cuda",
    "hardware": {"cpu": "a CPU", "gpu": "a GPU"},
    "packages": {"torch": "2.11", "transformers": "5.17"},
    "max_new_tokens": 256,
    "commit": "0123456789" * 4,
    "diff_sha256": None,
}


def test_the_table_comes_from_the_json_alone(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    target: TransformersTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SECONDS, "fast, K=4", [4.0] * 4)
    order: list[str] = []
    result, _ = some_race(arm("fast, K=4", order), broken("peer", 0))
    counts = {"num_prompts": {"humaneval": 2, "mt_bench": 2}}
    content = finite({"conditions": CONDITIONS, **counts, **told(result, target)})
    path, readme, picture = (tmp_path / name for name in ("a.json", "README.md", "a.png"))
    path.write_text(json.dumps(content))
    readme.write_text("before\n<!-- table: a -->\nold\n<!-- end -->\nafter <!-- end -->\n")
    main([str(path), "--plot", str(picture)])
    printed = capsys.readouterr().out
    assert printed == rendered(content)
    line = next(line for line in printed.splitlines() if line.startswith("| fast"))
    code, chat = ("2 (1.50x)", "2 (2.25x)")  # of 4/2 and 2/2, of 8/2 and 1/2
    assert line.startswith(f"| fast, K=2 | {code} | {chat} | 1.50x [")
    assert "| 4.00x [4.00, 4.00] | 1.00 | 4 of 4 | 1.0 |" in line
    assert "fast, K=4" not in printed  # K=2 is faster
    assert shown(content["rows"], every=True) == [PLAIN, "fast, K=2", COMPILED, "fast, K=4"]
    assert "Left out: peer (ImportError: nothing there)." in printed
    assert "some-model in bfloat16, native backend (bitwise)" in printed
    assert "prompts of humaneval (2), mt_bench (2), greedy, at most 256 new tokens" in printed
    assert "a GPU, torch 2.11, transformers 5.17, commit 0123456." in printed
    main([str(path), "--into", str(readme)])
    assert readme.read_text() == (
        f"before\n<!-- table: a -->\n{printed}<!-- end -->\nafter <!-- end -->\n"
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="there is no line <!-- table: b -->"):
        placed("text", "b", printed)
    with pytest.raises(ValueError, match="suite kernels has no table"):
        rendered({"conditions": {"suite": "kernels"}})


def remembering(folder: Path) -> Path:
    """A retrieval drafter on disk."""
    config = RetrievalConfig(min_ngram=1, max_ngram=3, max_offer=10, longest=2)
    folder.mkdir()
    RetrievalDrafter(config, build_table([[5, 6, 7, 8]], 2, 4)).save(folder)
    return folder


def test_every_way_runs_through_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_arms, "find_spec", lambda name: None)
    folder, other = (tiny_target_folder(tmp_path / name, n) for n, name in enumerate("ab"))
    groups = {"target": tiny_config(folder), "pool": POOL, "bench": bench_files(tmp_path)}
    stage = suite(
        "decode",
        drafters={"small": str(other), "memory": str(remembering(tmp_path / "memory"))},
        composite_min_match=2,
        policies=["posterior"],
        peers=["eager", "compiled", "assisted", "lookup", "flashspec"],
        assistant=str(other),
    )
    metrics = stage.run(workspace(groups, {}, tmp_path / "out"))
    path = tmp_path / "out" / "decode.json"
    content = json.loads(path.read_text())
    drafters = ["ngram", "cut", "small", "memory", "lookup, else small", "memory, else small"]
    names = [PLAIN, *(f"{name}, K={k}" for name in drafters for k in (1, 3)), "policy posterior"]
    names += [EAGER, COMPILED, ASSISTED, PROMPT_LOOKUP]
    rows = {row["arm"]: row for row in content["rows"] if row["group"] == "all"}
    assert list(rows) == names
    assert list(content["failures"]) == [FLASHSPEC]
    assert all(row["equal_texts"] == row["num_texts"] == 3 for row in rows.values())
    assert content["audit"]["own_texts_different"] == 0
    assert metrics["num_failed"] == 1
    assert content["num_prompts"] == {"humaneval": 2, "gsm8k": 1}
    assert str(tmp_path) not in path.read_text()
    capsys.readouterr()
    main([str(path)])
    assert capsys.readouterr().out == rendered(content)


@pytest.mark.parametrize("on_benches", [True, False])
def test_batches_run_through_the_stage(tmp_path: Path, on_benches: bool) -> None:
    folder = tiny_target_folder(tmp_path / "target")
    bench = bench_files(tmp_path) if on_benches else no_bench()
    groups = {"target": tiny_config(folder), "pool": Pool(entries=LOOKUP), "bench": bench}
    rows = [prompt(n, "code", words=3 + n) for n in range(5)]
    inputs = {} if on_benches else {"data": write_prompts(tmp_path / "data", {"test": rows})}
    stage = suite("batch", batch_sizes=[1, 3], policies=["posterior"])
    metrics = stage.run(workspace(groups, inputs, tmp_path / "out"))
    assert (metrics["num_different"], metrics["num_failed"]) == (0, 0)
    content = json.loads((tmp_path / "out" / "batch.json").read_text())
    assert [(row["arm"], row["batch"]) for row in content["rows"]] == [
        (name, size) for size in (1, 3) for name in (PLAIN, "ngram, K=3", "policy posterior")
    ]
    assert len(set(content["prompt_lengths"])) > 1
    assert all(row["num_texts"] == 3 == row["equal_to_plain"] for row in content["rows"])
    line = next(line for line in rendered(content).splitlines() if line.startswith("| plain"))
    assert "(1.00x of batch 1) |" in line
    assert line.endswith("| 6 of 6 |")
    policy = next(row for row in content["rows"] if row["arm"] == "policy posterior")
    assert f"({policy['over_plain']:.2f}x) |" in rendered(content)


def test_the_forward_suite_runs_on_a_cpu(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path / "target")
    groups = {"target": tiny_config(folder), "pool": POOL, "bench": no_bench()}
    metrics = suite("forward").run(workspace(groups, {}, tmp_path / "out"))
    assert set(metrics) == {
        "transformers generate",
        "transformers",
        "native, law",
        "native, bitwise",
    }
    assert (tmp_path / "out" / "forward.json").exists()


def test_an_export_is_raced_as_it_is_deployed(
    copy: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = load_decoder(copy).target
    parts = Parts(target, {}, [], VirtualClock())
    way = exported_arm(copy, parts).make()
    plain = own_arms(parts, suite("decode"))[0].make()
    assert way([9, 60, 33], 12).token_ids == plain([9, 60, 33], 12).token_ids
    monkeypatch.setattr(bench_suites, "own_arm", lambda *given: given)
    given: Any = exported_arm(copy, parts)
    _, _, _, drafters, build, router = given
    loaded = load_decoder(copy)
    assert list(drafters) == list(loaded.drafters)
    assert type(build()) is type(loaded.policy)
    assert router is not None
