"""Would catch: a table of other texts than the target's answers, of prompts, of other domains, of
the answers that acceptance is measured on; a limit that the table exceeds or that draws other
answers each time; loops that are memorised although they are to be left out; shares of n-grams
counted wrongly; acceptance filed as before that is after; a half-written folder that counts as
finished; an entry that another stage cannot read.

Tolerances: none; shares and lengths are quotients of counts.
"""

import dataclasses
import json
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_lint import rewritten
from test_train_drafter import CUT, VIRTUAL, World, world  # noqa: F401 (a fixture)
from tiny import tiny_overrides
from toys import RUNTIME
from workspace import tiny_config, workspace

from decode import SpeculativeDecoder
from decode.policies.fixed import FixedPolicy
from decode.types import OFF, Sampling
from drafters.base import BuildContext, target_parts
from drafters.ngram import NgramConfig
from drafters.retrieval import RetrievalConfig, from_pretrained
from drafters.retrieval_table import Table, build_table
from pipeline import __main__ as cli
from pipeline import memorise, roundtrip
from pipeline.answers import Answers, AnswerWriter
from pipeline.build import NamedEntry, drafter_needs, load_target, select_entry
from pipeline.compose import compose_config
from pipeline.config import ConfigError, Pool, PoolEntry, typed, typed_pool
from pipeline.load import load_decoder
from pipeline.manifest import MANIFEST, finish, read_manifest
from pipeline.memorise import Memorise, bits_for, kept_shares
from pipeline.scoring import passes_of, score_all
from pipeline.stage import Pipeline, Stage
from pipeline.validation import acceptance_length, validation_answers

SETTINGS: dict[str, Any] = {
    "bits": 12,
    "max_tokens": 0,
    "drop_loops": False,
    "validation_prompts": 2,
    "num_draft_tokens": 5,
}
REMEMBERS: Any = dataclasses.replace(
    typed(compose_config(["pool=recall"]).pool.entries.retrieval.drafter, "drafter"), longest=3
)


def stage(**changes: Any) -> Memorise:
    return Memorise(**{**SETTINGS, **changes})


def entry(*domains: str, **changes: Any) -> NamedEntry:
    settings: dict[str, Any] = {"drafter": REMEMBERS, "trained_by": "memorise", "init_from": None}
    return NamedEntry("recall", PoolEntry(**{**settings, **changes}, domains=list(domains)))


def run(made: Memorise, world: World, out: Path, named: NamedEntry | None = None) -> dict[str, Any]:  # noqa: F811
    groups = {"target": tiny_config(world.target), "entry": named or entry()}
    return made.run(workspace(groups, {"answers": world.answers}, out, runtime=VIRTUAL))


def remembered(out: Path) -> list[list[int]]:
    """The texts of a table, by the -1 between them."""
    texts: list[list[int]] = []
    for token in load_file(out / "table.safetensors")["texts"].tolist():
        texts.append([]) if token < 0 else texts[-1].append(token)
    return [text for text in texts if text]


def answers(world: World, *domains: str) -> list[list[int]]:  # noqa: F811
    rows = Answers(world.answers).rows(split="drafter_train", with_teacher=False)
    return [row.answer_ids.tolist() for row in rows if not domains or row.domain in domains]


def counting(world: World, out: Path) -> World:  # noqa: F811
    """The world with answers that count upwards, in every split."""
    reader, starts = Answers(world.answers), cycle(range(20, 70, 10))
    writer = AnswerWriter(out, reader.laws, num_top_logits=7, dtype="float32")
    for shard in reader.shards:
        answers = list(reader._open(shard, with_teacher=True))
        for row, first in zip(answers, starts, strict=False):
            ids = row.token_ids[row.num_prompt_tokens :]
            ids.copy_(torch.arange(first, first + len(ids)))
        writer.write(shard.split, answers, torch.float32, 1.0)
    return dataclasses.replace(world, answers=out)


@pytest.fixture(scope="module")
def made(world: World, tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: F811
    out = tmp_path_factory.mktemp("made")
    return out, run(stage(), world, out)


def test_the_table_holds_the_targets_training_answers(world: World, made: Any) -> None:  # noqa: F811
    out, metrics = made
    assert remembered(out) == answers(world)
    laws = {row.law for row in Answers(world.answers).rows(split="drafter_train")}
    assert laws == {"greedy", "sampled"}
    assert metrics["num_texts"] == metrics["lint_rows"] == 16
    assert metrics["num_tokens"] == sum(map(len, answers(world)))
    table = load_file(out / "table.safetensors")
    assert metrics["table_bytes"] == 4 * (table["texts"].numel() + 3 * 2**12)
    assert metrics["build_seconds"] > 0
    assert json.loads((out / "drafter.json").read_text())["kind"] == "retrieval"
    assert (out / "lint.json").exists()


def test_only_the_entrys_domains_are_remembered_and_measured(
    world: World,  # noqa: F811
    tmp_path: Path,
) -> None:
    run(stage(), world, tmp_path, entry("code"))
    assert remembered(tmp_path) == answers(world, "code") != answers(world)
    prompts = json.loads((tmp_path / "validation.json").read_text())["prompts"]
    assert {prompt["domain"] for prompt in prompts} == {"code"}


def test_acceptance_is_that_of_lookup_before_and_of_the_table_after(
    world: World,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Of answers that count upwards, each from one of five tokens on, the table knows nearly all;
    no text has a token twice.
    """
    world, out = counting(world, tmp_path / "answers"), tmp_path / "out"
    metrics = run(stage(), world, out)
    chosen = validation_answers(world.answers, [], 2)
    parts = target_parts(load_target(tiny_config(world.target), VIRTUAL))
    plain = {name: getattr(REMEMBERS, name) for name in ("min_ngram", "max_ngram", "max_offer")}
    drafters = {
        "before": NgramConfig(**plain).build(BuildContext(parts)),
        "after": REMEMBERS.build(BuildContext(parts, out)),
    }
    for name, tables in score_all(drafters, chosen, 5).items():
        passes = passes_of([table.numpy() for table in tables], 5)
        for law in ("greedy", "sampled", None):
            rows = [
                (len(answer.logprobs), count)
                for answer, count in zip(chosen, passes, strict=True)
                if law in (None, answer.law)
            ]
            key = f"acceptance_length_{law}_{name}" if law else f"acceptance_length_{name}"
            assert metrics[key] == pytest.approx(acceptance_length(rows), rel=1e-12)
    assert metrics["acceptance_length_after"] > 1.5 > metrics["acceptance_length_before"] >= 1
    assert metrics["acceptance_length_gain_low"] > 0


def test_a_limit_draws_whole_answers_by_their_hash(world: World) -> None:  # noqa: F811
    rows = list(Answers(world.answers).rows(split="drafter_train", with_teacher=False))
    whole = stage().texts(rows, "recall")
    some, more = (stage(max_tokens=limit).texts(rows, "recall") for limit in (50, 100))
    for texts, limit in ((some, 50), (more, 100)):
        assert 0 < sum(map(len, texts)) <= limit < sum(map(len, whole))
        assert limit - sum(map(len, texts)) < max(map(len, whole))
    listed = [[text.tolist() for text in texts] for texts in (some, more, whole)]
    for fewer, others in ((listed[0], listed[1]), (listed[1], listed[2])):
        rest = iter(others)  # a larger limit only adds, and order is kept
        assert all(text in rest for text in fewer)
    assert listed[1] != listed[2][: len(listed[1])]
    backwards = stage(max_tokens=50).texts(rows[::-1], "recall")
    assert sorted(text.tolist() for text in backwards) == sorted(listed[0])


def test_loops_are_left_out_where_asked(
    world: World,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers here have 9 tokens, too few to loop: another rule stands in for the real one."""
    looping = rewritten(world, tmp_path / "answers", lambda ids: ids.fill_(7))
    monkeypatch.setattr("pipeline.lint.loops", lambda text: bool((text == 7).all()))
    every = run(stage(), looping, tmp_path / "every")
    fewer = run(stage(drop_loops=True), looping, tmp_path / "fewer")
    dropped = Answers(looping.answers).shards[0].num_rows
    assert (every["num_texts"], every["lint_loops_dropped"]) == (16, 0)
    assert (fewer["num_texts"], fewer["lint_loops_dropped"]) == (16 - dropped, dropped)
    assert {7} not in [set(text) for text in remembered(tmp_path / "fewer")]


def kept_by_hand(table: Table, texts: list[list[int]]) -> list[float]:
    """Of the distinct n-grams with a next token, those that some place of their length follows."""
    held, shares = table.texts.tolist(), []
    for n, places in enumerate(table.places.tolist(), start=1):
        grams = {tuple(t[i : i + n]) for t in texts for i in range(len(t) - n)}
        kept = {tuple(held[place - n : place]) for place in places if place}
        assert kept <= grams
        shares.append(len(kept) / max(1, len(grams)))
    return shares


def test_there_are_as_many_slots_as_tokens() -> None:
    sizes = {1: 1, 2: 1, 3: 2, 1024: 10, 1025: 11, 5_000_000: 23, 10**9: 24}
    assert {size: bits_for(size) for size in sizes} == sizes
    assert compose_config(["pool=recall"]).stages.memorise.bits is None


@pytest.mark.parametrize("bits", [1, 4, 7, 12])
def test_the_share_of_n_grams_that_kept_their_slot(bits: int) -> None:
    random = np.random.default_rng(bits)
    texts = [random.integers(0, 11, size).tolist() for size in (1, 2, 3, 40, 5, 80)]
    table = build_table(texts, 4, bits)
    shares = kept_shares(table)
    assert shares == kept_by_hand(table, texts)
    assert shares[3] < 1 if bits < 7 else shares[0] == 1


def test_texts_without_n_grams_have_shares_too() -> None:
    assert kept_shares(build_table([[3], [5]], 2, 3)) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"bits": 0}, "stages.memorise.bits=0 must lie between 1 and"),
        ({"num_draft_tokens": 17}, "num_draft_tokens=17 must lie between 1 and 16"),
        ({"max_tokens": -1}, "max_tokens=-1 must be 0 .all. or more"),
        ({"validation_prompts": 0}, "validation_prompts=0 at least 1"),
    ],
)
def test_settings_that_cannot_work_are_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        stage(**changes)


def test_entries_that_cannot_remember_are_refused_before_any_work() -> None:
    cut, started = entry(drafter=CUT), entry(init_from="generic")
    for named, sentence in (
        (cut, r"pool\.entries\.recall\.drafter is a LmConfig, which has no table"),
        (started, r"init_from=generic: a table starts from nothing"),
    ):
        with pytest.raises(ValueError, match=sentence):
            stage().needs({"entry": named})


def test_nothing_to_memorise_is_said(world: World, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=r"nothing for recall to memorise.*raise max_tokens=1"):
        run(stage(max_tokens=1), world, tmp_path)
    with pytest.raises(ValueError, match=r"nothing for recall to memorise.*entry's domains$"):
        stage().texts([], "recall")
    assert not list(tmp_path.iterdir())


def test_an_entry_may_remember_otherwise_than_the_others() -> None:
    other = entry(overrides={"bits": 9, "max_tokens": 500})
    changed = stage().for_groups({"entry": other})
    assert (changed.bits, changed.max_tokens, changed.validation_prompts) == (9, 500, 2)
    with pytest.raises(ConfigError, match=r"overrides\.bit is not a key"):
        stage().for_groups({"entry": entry(overrides={"bit": 9})})


def test_the_pool_asks_for_the_table_wherever_it_is_a_part() -> None:
    pool = typed_pool(compose_config(["pool=recall"]).pool)
    assert isinstance(pool.entries["retrieval"].drafter, RetrievalConfig)
    needs = drafter_needs(pool, ["composite"])
    assert {name: need.stage for name, need in needs.items()} == {
        "drafter:retrieval": "memorise",
        "drafter:generic": "distill",
    }
    assert select_entry(pool, None, "memorise").name == "retrieval"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given(Stage):
    """Answers that are there already."""

    def run(self, workspace: Any) -> dict[str, Any]:
        return {}


def test_a_failed_run_leaves_nothing_and_the_next_one_is_whole(
    world: World,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    named = entry()
    groups = {
        "target": tiny_config(world.target),
        "entry": named,
        "pool": Pool(entries={"recall": named.entry}),
    }
    stages = {"regenerate": Given(), "memorise": stage()}
    pipeline = Pipeline(
        stages=stages, groups=groups, root=tmp_path / "root", seed=0, runtime=RUNTIME
    )
    folder = pipeline.run("regenerate")
    (folder / MANIFEST).unlink()
    for file in world.answers.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    finish(folder, pipeline.locate("regenerate").identity, {}, 0.0)
    out = pipeline.locate("memorise").folder
    with monkeypatch.context() as patch:
        patch.setattr(memorise, "write_report", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pipeline.run("memorise")
    assert not out.exists()
    (out / "rest").mkdir(parents=True)  # as a killed process leaves it
    assert pipeline.run("memorise") == out
    assert not (out / "rest").exists()
    assert read_manifest(out)["metrics"]["num_texts"] == 16
    stamp = (out / MANIFEST).stat().st_mtime_ns
    assert pipeline.run("memorise") == out
    assert (out / MANIFEST).stat().st_mtime_ns == stamp


def test_an_export_that_changed_the_table_is_noticed(world: World, made: Any) -> None:  # noqa: F811
    target = load_target(tiny_config(world.target), VIRTUAL)
    ours, again = (REMEMBERS.build(BuildContext(target_parts(target), made[0])) for _ in range(2))
    assert roundtrip.check_drafter("recall", ours, again, target) == 0
    again.table.places[0, int(again.table.places[0].argmax())] = 0
    with pytest.raises(ValueError, match="the table of drafter recall came back"):
        roundtrip.check_drafter("recall", ours, again, target)


def test_every_stage_can_work_with_a_table(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole job on the tiny target: prompts to an export that decodes in plain text's words."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cli, "set_up_logging", lambda debug: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    root = tmp_path / "root"
    overrides = [o for o in tiny_overrides(tmp_path / "tiny") if ".code." not in o]
    overrides += ["pool=recall", "tracking=disabled", "runtime.threads=1", "runtime.clock=virtual"]
    overrides += ["stages.memorise.bits=10", f"root={root}"]
    assert cli.main([*overrides, "stage=compare", "build_missing=true"]) == 0
    (compared,) = root.glob("compare/*/comparison.json")
    rows = json.loads(compared.read_text())["acceptance_summary"]
    names = ["ngram", "retrieval", "generic", "composite"]
    assert list(dict.fromkeys(row["drafter"] for row in rows)) == names
    assert cli.main([*overrides, "stage=all"]) == 0
    (table,) = root.glob("memorise/*/")
    metrics = read_manifest(table)["metrics"]
    assert {"acceptance_length_greedy_before", "acceptance_length_sampled_after"} < set(metrics)
    (results,) = root.glob("evaluate/*/results.json")
    trained = json.loads(results.read_text())["training"]
    assert [row["drafter"] for row in trained] == ["retrieval", "generic"]
    (export,) = root.glob("export/*/")
    own = export / "drafters" / "retrieval" / "own"
    for file in ("table.safetensors", "drafter.json"):
        assert (own / file).read_bytes() == (table / file).read_bytes()
    card = " ".join((export / "drafters" / "retrieval" / "README.md").read_text().split())
    assert "The table holds the target's answers word for word" in card
    decoder = load_decoder(export, device="cpu")
    plain = FixedPolicy(OFF, 0, None)
    asked = (["w3 w9 w27", "w5 w50"], 12, Sampling())
    texts = decoder.generate(*asked).token_ids
    assert texts == load_decoder(export, device="cpu", policy=plain).generate(*asked).token_ids
    assert cli.main([*overrides, "stage=decode", "stages.decode.prompt=w1 w2"]) == 0
    alone = SpeculativeDecoder(
        decoder.target, {"recall": from_pretrained(str(own), decoder.target)}
    )
    assert alone.generate(*asked).token_ids == texts
