"""Would catch: left padding that leaks into a row's logits, cache rows that no longer match their
jobs after one leaves, a last token that is lost or an EOS that is dropped, numbers noted for the
wrong token, draws that depend on the batch, one law for a whole domain, a resumed run that
writes other files, a later turn that takes a first one's place; and of slots: a ring that wraps
over a row's own tokens, a row that sees what its slot held before, rotary positions taken from
columns, a row that goes on after its end.

Tolerances: log-sum-exp and logits of a padded batch against one unpadded pass agree to 1e-4
(float32, values of some 10, sums in another order); log-probabilities likewise. Tokens and files
must be equal.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
import torch
from tiny import EOS, VOCAB_SIZE, tiny_model, tiny_target_folder, tiny_tokenizer
from workspace import prompt, tiny_config, workspace, write_prompts

from decode.sampling import law_of
from decode.targets.choices import fast_dtype
from decode.types import Sampling
from kernels.reference import processed_probs
from pipeline import answering, regenerate
from pipeline.answering import speed
from pipeline.answers import INDEX, Answers, AnswerWriter
from pipeline.chat import prompt_ids
from pipeline.follow_ups import with_follow_ups
from pipeline.generation import Generator, Job, Trace
from pipeline.launch import WorkerError, sole_writer
from pipeline.regenerate import Regenerate, balanced
from pipeline.rows import COLUMNS, Row
from pipeline.runtime import Runtime
from pipeline.slots import SlotGenerator
from pipeline.stage import Pipeline, Stage, Workspace

SPLITS = {
    "drafter_train": [prompt(n, d, words=2 + n % 4) for n in range(5) for d in ("code", "chat")],
    "validation": [
        prompt(n, d, words=1 + 3 * n) for n in range(10, 13) for d in ("code", "chat", "odd")
    ],
}


def stage(**changes: object) -> Regenerate:
    settings: dict[str, object] = {
        "laws": {"drafter_train": "alternate", "validation": "both", "mixed": "both"},
        "prompts_per_domain": {"drafter_train": 0, "validation": 2, "mixed": 0},
        "max_new_tokens": {"drafter_train": 9, "validation": 6, "mixed": 6},
        "max_prompt_tokens": 38,
        "temperature": 0.8,
        "top_p": 0.95,
        "batch_size": 3,
        "shard_rows": 4,
        "num_top_logits": 7,
        "engine": "padded",
        "dtype": "float32",
    }
    return Regenerate(**{**settings, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, dict[str, float]]:
    """Target, prompts, answers, metrics."""
    root = tmp_path_factory.mktemp("regenerate")
    target, prompts = tiny_target_folder(root / "target"), write_prompts(root / "prompts", SPLITS)
    metrics = run(stage(), target, prompts, root / "out")
    return target, prompts, root / "out", metrics


# The index says how long each shard took; by this clock, equally long in every run.
VIRTUAL = Runtime(device="cpu", threads=1, clock="virtual")


TOGETHER = replace(VIRTUAL, num_processes=2)
HERE = Path(__file__).parent


def run(
    stage: Regenerate, target: Path, prompts: Path, out: Path, runtime: Runtime = VIRTUAL
) -> dict[str, float]:
    runtime.apply()  # as the pipeline does: sums come in another order with other threads
    given = {"target": tiny_config(target)}, {"prompts": prompts}
    return stage.run(workspace(*given, out, runtime=runtime))


def same_files(one: Path, other: Path) -> bool:
    """Whether two folders hold the same names, and the same bytes under each."""
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def jobs(temperature: float, lengths: tuple[int, ...] = (3, 11, 1, 7, 5)) -> list[Job]:
    return [
        Job(
            f"row {n}",
            [(n * 13 + i) % VOCAB_SIZE for i in range(length)],
            Sampling(temperature=temperature, seed=n),
            4 + 5 * n,
        )
        for n, length in enumerate(lengths)
    ]


class Odd(Stage):
    """Stands where prompts come from."""

    def run(self, workspace: Workspace) -> dict[str, object]:
        raise AssertionError("only located")


def padded(model: torch.nn.Module, eos: frozenset[int], rows: list[Job]) -> list[Trace]:
    return [trace for _, _, trace in Generator(model, eos, 5, 3).stream([rows[:2], rows[2:]])]


def slots(model: torch.nn.Module, eos: frozenset[int], rows: list[Job]) -> list[Trace]:
    """Two slots for five rows, so that slots are filled again; the ring wraps within a row."""
    longest = max(len(job.prompt_ids) + job.max_new_tokens for job in rows)
    generator = SlotGenerator(model, eos, 5, 2, longest)
    found = {(n, place): trace for n, place, trace in generator.stream([rows[:2], rows[2:]])}
    assert len(found) == len(rows)
    return [found[key] for key in sorted(found)]


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model_here() -> torch.nn.Module:
    """On a GPU where there is one: there slots run in a CUDA graph."""
    return tiny_model().to(DEVICE)


ENGINES = pytest.mark.parametrize("answer", [padded, slots])
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 0.9])
Engine = Callable[[torch.nn.Module, frozenset[int], list[Job]], list[Trace]]


@ENGINES
@TEMPERATURES
def test_a_row_is_what_it_would_be_alone(answer: Engine, temperature: float) -> None:
    """Rows of five lengths, each ending at its own time, against each row in a batch of its own."""
    together = answer(model_here(), frozenset({EOS}), jobs(temperature))
    for job, trace in zip(jobs(temperature), together, strict=True):
        (alone,) = Generator(model_here(), frozenset({EOS}), 5, 1).answer([job])
        assert trace.token_ids.tolist() == alone.token_ids.tolist()
        assert trace.finish_reason == alone.finish_reason
        torch.testing.assert_close(trace.lse, alone.lse, atol=1e-4, rtol=0)
    # Rows did leave at different times.
    assert len({len(trace.token_ids) for trace in together}) > 2


@ENGINES
@TEMPERATURES
def test_notes_belong_to_their_tokens(answer: Engine, temperature: float) -> None:
    """One teacher-forced pass over prompt and answer gives the same laws."""
    model, rows = model_here(), jobs(temperature)
    for job, trace in zip(rows, answer(model_here(), frozenset({EOS}), rows), strict=True):
        with torch.no_grad():
            logits = (
                model(torch.tensor([job.prompt_ids + trace.token_ids.tolist()], device=DEVICE))
                .logits[0]
                .cpu()
            )
        logits = logits[len(job.prompt_ids) - 1 : -1]
        probs = processed_probs(logits, *law_of((job.sampling,) * len(logits)))
        chosen = probs.gather(1, trace.token_ids[:, None])[:, 0].log()
        torch.testing.assert_close(trace.logprobs, chosen.float(), atol=1e-4, rtol=0)
        torch.testing.assert_close(trace.lse, logits.logsumexp(-1), atol=1e-4, rtol=0)
        torch.testing.assert_close(
            trace.topk_logits, logits.gather(1, trace.topk_ids), atol=1e-4, rtol=0
        )
        assert torch.equal(trace.topk_ids, logits.topk(5).indices)
        if temperature == 0:
            assert torch.equal(trace.token_ids, trace.topk_ids[:, 0])


@ENGINES
def test_eos_ends_a_row_and_is_kept(answer: Engine) -> None:
    free = answer(model_here(), frozenset(), jobs(0.9))
    eos = int(free[3].token_ids[6])
    ended = answer(model_here(), frozenset({eos}), jobs(0.9))
    for with_eos, without in zip(ended, free, strict=True):
        ids = without.token_ids.tolist()
        stop = ids.index(eos) + 1 if eos in ids else len(ids)
        assert with_eos.token_ids.tolist() == ids[:stop]
        assert (with_eos.finish_reason == "eos") == (eos in ids)


@ENGINES
def test_logits_that_are_no_numbers_are_refused(answer: Engine) -> None:
    model = model_here()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"not finite while answering row \d"):
        answer(model, frozenset({EOS}), jobs(0.0))


def test_slots_refuse_a_model_whose_layers_look_back_a_fixed_way() -> None:
    model = model_here()
    model.config.sliding_window = 8
    with pytest.raises(ValueError, match="engine=padded"):
        SlotGenerator(model, frozenset({EOS}), 5, 2, 20)


def test_both_engines_write_the_same_answers(
    made: tuple[Path, Path, Path, dict[str, float]], tmp_path: Path
) -> None:
    target, prompts, out, _ = made
    run(stage(engine="slots", batch_size=5), target, prompts, tmp_path / "out")
    pairs = zip(Answers(out).rows(), Answers(tmp_path / "out").rows(), strict=True)
    for padded_row, slot_row in pairs:
        assert (padded_row.id, padded_row.law) == (slot_row.id, slot_row.law)
        assert torch.equal(padded_row.token_ids, slot_row.token_ids)
        torch.testing.assert_close(padded_row.lse, slot_row.lse, atol=1e-4, rtol=0)


def test_every_split_gets_its_laws(made: tuple[Path, Path, Path, dict[str, float]]) -> None:
    _, _, out, metrics = made
    train = list(Answers(out).rows(split="drafter_train"))
    for domain in ("code", "chat"):
        laws = [row.law for row in train if row.domain == domain]
        assert sorted(laws) == ["greedy"] * 3 + ["sampled"] * 2
    assert len({row.id for row in train}) == len(train) == 10
    validation = [(row.id, row.law) for row in Answers(out).rows(split="validation")]
    assert len(set(validation)) == len(validation)
    # Two prompts of three domains under two laws, less those that are too long.
    assert len(validation) + metrics["prompts_left_out"] == 12
    assert metrics["num_answers"] == len(train) + len(validation)
    assert metrics["tokens_per_second"] > 0
    assert 0 < metrics["distinct_8gram_share"] <= 1


def test_selection_ignores_the_order_of_the_data() -> None:
    prompts = SPLITS["drafter_train"]
    forwards, backwards = balanced(prompts, 3, 7), balanced(prompts[::-1], 3, 7)
    key = lambda entry: (entry[0], entry[1]["id"])  # noqa: E731
    assert sorted(map(key, forwards)) == sorted(map(key, backwards))
    assert [place for place, _ in forwards] == [0, 0, 1, 1, 2, 2]
    assert sorted(map(key, balanced(prompts, 3, 8))) != sorted(map(key, forwards))


def test_a_killed_run_resumes_with_the_same_files(
    made: tuple[Path, Path, Path, dict[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompts, whole, metrics = made
    calls = 0
    answer = Generator.answer

    def dies(self: Generator, batch: list[Job]) -> object:
        nonlocal calls
        calls += 1
        if calls == 4:  # in the middle of the second shard
            raise KeyboardInterrupt
        return answer(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(regenerate.Generator, "answer", dies)
        with pytest.raises(KeyboardInterrupt):
            run(stage(), target, prompts, tmp_path / "out")
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left == ["answers-00000.safetensors", "index.json"]
    resumed = run(stage(), target, prompts, tmp_path / "out")
    assert resumed == metrics
    assert same_files(whole, tmp_path / "out")


def test_a_resumed_run_refuses_a_truncated_shard(
    made: tuple[Path, Path, Path, dict[str, float]], tmp_path: Path
) -> None:
    target, prompts, whole, _ = made
    shutil.copytree(whole, tmp_path / "out")
    shard = tmp_path / "out" / "answers-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"answers-00001\.safetensors is damaged.*force=true"):
        run(stage(), target, prompts, tmp_path / "out")


def test_settings_that_do_not_fit_are_named(
    made: tuple[Path, Path, Path, dict[str, float]], tmp_path: Path
) -> None:
    target, prompts, _, _ = made
    with pytest.raises(ValueError, match=r"max_new_tokens names the splits \['test'\]"):
        stage(max_new_tokens={"test": 3})
    with pytest.raises(ValueError, match=r"laws\.drafter_train=hot is unknown"):
        stage(laws={"drafter_train": "hot", "validation": "both", "mixed": "both"})
    with pytest.raises(ValueError, match="max_prompt_tokens=1 and"):
        run(stage(max_prompt_tokens=1), target, prompts, tmp_path / "short")
    with pytest.raises(ValueError, match="dtype=float8 is not known"):
        run(stage(dtype="float8"), target, prompts, tmp_path / "dtype")


def test_what_auto_stands_for_is_part_of_the_identity(tmp_path: Path) -> None:
    """Artifacts of two machines with other fast dtypes must not pass for one another."""
    answering = stage(dtype="auto")
    groups = {"target": tiny_config(tiny_target_folder(tmp_path / "target"))}
    line = Pipeline({"regenerate": answering, "prepare": Odd()}, groups, tmp_path, 0, VIRTUAL)
    settings = line.locate("regenerate").identity["settings"]
    assert settings["dtype"] == fast_dtype("cpu")


# ------------------------------------------------------------------------------- several processes

Made = tuple[Path, Path, Path, dict[str, float]]


def test_two_processes_answer_as_one(made: Made, tmp_path: Path) -> None:
    """Shards of two splits under both laws: file by file, index included."""
    target, prompts, whole, alone = made
    metrics = run(stage(), target, prompts, tmp_path / "out", TOGETHER)
    assert len(Answers(whole).shards) >= 5
    assert same_files(whole, tmp_path / "out")
    timed = {"num_processes", "tokens_per_second", "tflops_per_second"}
    assert metrics["num_processes"] == 2
    assert {key for key in alone if alone[key] != metrics[key]} == timed
    # By the virtual clock each shard took one tick, and the first process has half of them.
    num_shards = len(Answers(whole).shards)
    gain = num_shards / ((num_shards + 1) // 2)
    assert metrics["tokens_per_second"] == pytest.approx(gain * alone["tokens_per_second"])


def test_slots_of_two_processes_choose_the_same_tokens(made: Made, tmp_path: Path) -> None:
    target, prompts, whole, _ = made
    run(stage(engine="slots"), target, prompts, tmp_path / "out", TOGETHER)
    for one, other in zip(Answers(whole).rows(), Answers(tmp_path / "out").rows(), strict=True):
        assert (one.id, one.law) == (other.id, other.law)
        assert torch.equal(one.token_ids, other.token_ids)
        torch.testing.assert_close(one.lse, other.lse, atol=1e-4, rtol=0)


def test_later_turns_wait_for_all_processes(made: Made, tmp_path: Path) -> None:
    """The second turn's prompts hold answers that another process gave."""
    target = made[0]
    said = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": None}]
    splits = {"validation": []}
    for n in range(5):
        first = prompt(n, "chat") | {"id": f"talk-{n}/1"}
        asked = [*json.loads(first["messages_json"]), said[1], said[0]]
        later = first | {"id": f"talk-{n}/2", "messages_json": json.dumps(asked)}
        splits["validation"] += [first, later]
    prompts = write_prompts(tmp_path / "prompts", splits)
    talking = stage(prompts_per_domain={"drafter_train": 0, "validation": 0, "mixed": 0})
    one = run(talking, target, prompts, tmp_path / "one")
    two = run(talking, target, prompts, tmp_path / "two", TOGETHER)
    assert one["num_answers"] == two["num_answers"] == 20
    assert same_files(tmp_path / "one", tmp_path / "two")


def test_prompts_go_on_after_the_first_turns_that_were_chosen(made: Made, tmp_path: Path) -> None:
    """Two of five conversations of each domain, all of which would go on."""
    rows = [Row(**row) for row in SPLITS["drafter_train"]]
    more = with_follow_ups(rows, 100, ["w1 w2", "w3"], seed=5)
    splits = {"drafter_train": [{name: getattr(row, name) for name in COLUMNS} for row in more]}
    prompts = write_prompts(tmp_path / "prompts", splits)
    some = {"drafter_train": 2, "validation": 0, "mixed": 0}
    run(stage(prompts_per_domain=some), made[0], prompts, tmp_path / "out")
    answers = {answer.id: answer for answer in Answers(tmp_path / "out").rows()}
    later = [name for name in answers if name.endswith("/2")]
    assert len(later) == len(answers) - len(later) == 4
    tokenizer = tiny_tokenizer()
    for name in later:
        first, second = answers[name.removesuffix("/2")], answers[name]
        messages = [
            {"role": "user", "content": first.text},
            {
                "role": "assistant",
                "content": tokenizer.decode(first.answer_ids, skip_special_tokens=True).strip(),
            },
            {"role": "user", "content": second.text},
        ]
        wanted = prompt_ids(tokenizer, {"messages_json": json.dumps(messages), "text": ""})
        assert second.token_ids[: second.num_prompt_tokens].tolist() == wanted
        assert second.law == first.law


@pytest.mark.parametrize("runtime", [VIRTUAL, TOGETHER], ids=["one", "two"])
def test_shards_that_are_whole_are_kept_whoever_goes_on(
    made: Made, tmp_path: Path, runtime: Runtime
) -> None:
    """As a kill leaves them: the second process was two shards ahead; one shard is half written."""
    target, prompts, whole, metrics = made
    out = shutil.copytree(whole, tmp_path / "out")
    index = json.loads((out / INDEX).read_text())
    lines, index["shards"] = index["shards"], index["shards"][:1]
    (out / INDEX).write_text(json.dumps(index))
    for number in (0, 1, 3):  # the first note was there when its shard came into the index
        note = {"header": index["header"], "shard": lines[number]}
        (out / f"answers-{number:05d}.json").write_text(json.dumps(note))
    for number in (2, *range(4, len(lines))):
        (out / lines[number]["file"]).unlink()
    (out / (lines[2]["file"] + ".partial")).write_bytes(b"half")
    kept = {n: (out / lines[n]["file"]).stat().st_mtime_ns for n in (0, 1, 3)}
    found = run(stage(), target, prompts, out, runtime)
    assert same_files(whole, out)
    assert {n: (out / lines[n]["file"]).stat().st_mtime_ns for n in kept} == kept
    assert found["num_answers"] == metrics["num_answers"]


def test_what_a_note_tells_is_checked(made: Made, tmp_path: Path) -> None:
    """Before anything is answered; the first shard, and with it the index, is not there yet."""
    out = shutil.copytree(made[2], tmp_path / "out")
    reader, note = Answers(out), out / "answers-00001.json"
    said = {"header": reader.header, "shard": asdict(reader.shards[1])}
    first, path = (out / shard.file for shard in reader.shards[:2])
    first.unlink()
    (out / INDEX).unlink()
    note.write_text(json.dumps(said))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"answers-00001\.safetensors is damaged.*force=true"):
        run(stage(), *made[:2], out)
    note.write_text(json.dumps(said | {"header": {**reader.header, "dtype": "float16"}}))
    with pytest.raises(ValueError, match=r"answers-00001\.json was begun with .*float16"):
        run(stage(), *made[:2], out)
    note.write_text("{}")
    with pytest.raises(ValueError, match=r"answers-00001\.json is damaged.*force=true"):
        run(stage(), *made[:2], out)
    assert not first.exists()


def test_two_processes_killed_midway_go_on(made: Made, tmp_path: Path) -> None:
    """kill -9 of the parent after three shards; the next run begins while orphans may live."""
    target, prompts, _, _ = made
    small = {"shard_rows": 1, "batch_size": 1}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    metrics = run(stage(**small), target, prompts, whole, TOGETHER)
    kill_when_it_has(3, small, target, prompts, parts)
    there = len(list(parts.glob("*.safetensors")))
    assert 3 <= there < len(list(whole.glob("*.safetensors")))
    assert run(stage(**small), target, prompts, parts, TOGETHER) == metrics
    assert same_files(whole, parts)


def kill_when_it_has(
    num_shards: int, small: dict[str, int], target: Path, prompts: Path, out: Path
) -> None:
    """Answer in a process of its own, and kill that one when so many shards are whole."""
    job = f"run(stage(**{small!r}), {target!r}, {prompts!r}, {out!r}, TOGETHER)"
    code = f"from pathlib import PosixPath; from test_regenerate import *; {job}"
    paths = os.pathsep.join([str(HERE), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}
    )
    began = time.monotonic()
    while len(list(out.glob("*.safetensors"))) < num_shards:
        assert process.poll() is None, "the run was over before it was killed"
        assert time.monotonic() - began < 120
        time.sleep(0.001)
    assert len(psutil.Process(process.pid).children(recursive=True)) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(("law", "top_p"), [("greedy", 1.0), ("sampled", 0.9)])
def test_a_refused_target_leaves_nothing_behind(
    made: Made, tmp_path: Path, law: str, top_p: float
) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    model.save_pretrained(shutil.copytree(made[0], tmp_path / "target"))
    only = stage(laws=dict.fromkeys(stage().laws, law), top_p=top_p)
    with pytest.raises(ValueError, match="not finite while answering"):
        run(only, tmp_path / "target", made[1], tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())


def test_an_error_of_the_second_process_ends_the_first(made: Made, tmp_path: Path) -> None:
    """The first would wait for its shard for ever."""
    out = tmp_path / "out"
    (out / "answers-00001.safetensors").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match="answers-00001") as caught:
        run(stage(), *made[:2], out, TOGETHER)
    assert isinstance(caught.value.__cause__, WorkerError)


def test_a_writer_of_an_earlier_launch_is_waited_for(tmp_path: Path) -> None:
    """Its second process lives on; this launch has one process."""
    out, entered = tmp_path / "out", threading.Event()

    def write() -> None:
        with sole_writer(out, VIRTUAL):
            entered.set()

    with VIRTUAL.lock(tmp_path / "out.writer-1.lock"):
        thread = threading.Thread(target=write)
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(20)
    thread.join()


def test_what_an_earlier_launch_had_begun_to_write_is_gone(tmp_path: Path) -> None:
    """It went on after the next run looked: a shard, under the name that safetensors gives what
    it has not renamed yet, and the note of another."""
    out = tmp_path / "out"
    out.mkdir()
    begun = [out / "answers-00007.json.26719.partial", out / ".tmpOlPEcy"]
    writer = VIRTUAL.lock(tmp_path / "out.writer-1.lock")
    writer.__enter__()
    for path in begun:
        path.write_text("{")
    writer.__exit__(None, None, None)
    with sole_writer(out, VIRTUAL):
        assert not any(path.exists() for path in begun)


# ------------------------------------------------------------------------------------------- speed


def test_operations_are_those_of_the_texts_by_hand(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three shards of one text each: 4 layers, 32 wide, 2 of 4 heads for keys and values."""
    row = next(Answers(made[2]).rows())
    writer = AnswerWriter(tmp_path, {row.law: row.sampling}, num_top_logits=0, dtype="float32")
    for num_prompt, num_answer, seconds in ((3, 2, 1.0), (1, 1, 2.0), (5, 4, 4.0)):
        some = replace(
            row,
            token_ids=torch.arange(num_prompt + num_answer),
            num_prompt_tokens=num_prompt,
            **{name: torch.zeros(num_answer) for name in ("logprobs", "lse")},
            **{name: torch.zeros(num_answer, 0) for name in ("topk_ids", "topk_logits")},
        )
        writer.write("validation", [some], torch.float32, seconds)
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    num_read, num_answer = 4 + 1 + 8, 2 + 1 + 4
    pairs = (1 + 2 + 3 + 4) + 1 + (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8)
    flops = 2 * 4 * layer * num_read + 2 * 97 * 32 * num_answer + 4 * (4 * 4 * 8) * pairs
    found = speed(tmp_path, tiny_model(), VIRTUAL)
    assert found["tflops_per_second"] == pytest.approx(flops / 7 / 1e12)
    assert found["tokens_per_second"] == 1
    assert found["flop_utilisation"] is None
    monkeypatch.setattr(Runtime, "device_peak_flops", lambda self: 1e6)
    assert speed(tmp_path, tiny_model(), VIRTUAL)["flop_utilisation"] == pytest.approx(
        flops / 7 / 1e6
    )
    # Two processes: the first answers shards 0 and 2 in 5 seconds, the other is done after 2.
    monkeypatch.setattr(answering, "rank_and_size", lambda: (0, 2))
    found = speed(tmp_path, tiny_model(), VIRTUAL)
    assert found["tokens_per_second"] == pytest.approx(7 / 5)
    assert found["flop_utilisation"] == pytest.approx(flops / 5 / 2e6)


@pytest.mark.gpu
def test_two_gpus_answer_as_one(made: Made, tmp_path: Path) -> None:
    """In slots, where neighbours differ: tokens, not bits. Float32, so that no tie is near."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    alone = replace(VIRTUAL, device="cuda", clock="system")
    run(stage(engine="slots"), *made[:2], tmp_path / "one", alone)
    found = run(stage(engine="slots"), *made[:2], tmp_path / "two", replace(alone, num_processes=2))
    assert found["num_processes"] == 2
    for one, other in zip(
        Answers(tmp_path / "one").rows(), Answers(tmp_path / "two").rows(), strict=True
    ):
        assert (one.id, one.law) == (other.id, other.law)
        assert torch.equal(one.token_ids, other.token_ids)
