"""Would catch: other rows in a step when more processes share it; gradients averaged where they
should be summed; a normaliser that one process counts alone; moments or shares lost in a
checkpoint; a second writer; workers that outlive their parent; an error that only a worker's own
screen shows, or none at all; draws that follow the process instead of the step; the unmeasured
share of a drafter saved as the drafter; members of a portfolio that two processes train, or none.

Tolerances: 2 processes against 1 within 1e-5 on losses and weights, since sums come in another
order; killed and resumed against undisturbed, none (bit for bit), on equally many processes.
"""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from test_portfolio import pool, portfolio
from test_train_drafter import (
    VIRTUAL,
    World,
    distill,
    entry,
    history,
    same_weights,
    train,
    world,  # noqa: F401 (a fixture)
)
from workspace import tiny_config, workspace

from pipeline.build import portfolio_members
from pipeline.launch import WorkerError, launch
from pipeline.runtime import Runtime

HERE = Path(__file__).parent
ON_POLICY: dict[str, Any] = {
    "num_steps": 6,
    "batch_size": 1,
    "accumulate": 4,
    "row_tokens": 64,
    "teacher": "model",
    "mix": {"forward_kl": 0.5, "lk_hybrid": 0.5},
    "position_weights": "reach",
    "onpolicy_share": 0.7,
    "gradient_checkpointing": True,
    "compile_layers": False,
}
PLAIN: dict[str, Any] = {"num_steps": 40, "accumulate": 2}


def together(sharding: str = "ddp", num_processes: int = 2) -> Runtime:
    return replace(VIRTUAL, num_processes=num_processes, sharding=sharding)


def train_with(runtime: Runtime, settings: dict[str, Any], world: World, out: Path) -> Any:  # noqa: F811
    groups = {"target": tiny_config(world.target), "entry": entry()}
    inputs = {"answers": world.answers, "prompts": world.prompts}
    return distill(**settings).run(workspace(groups, inputs, out, runtime=runtime))


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
@pytest.mark.parametrize("settings", [{}, ON_POLICY], ids=["plain", "on-policy"])
def test_two_processes_train_as_one(
    world: World,  # noqa: F811
    tmp_path: Path,
    sharding: str,
    settings: dict[str, Any],
) -> None:
    one = train_with(VIRTUAL, settings, world, tmp_path / "one")
    two = train_with(together(sharding), settings, world, tmp_path / "two")
    assert two["num_processes"] == 2
    assert two["num_tokens"] == one["num_tokens"]
    for name in ("acceptance_length_before", "acceptance_length_after", "best_step"):
        assert two[name] == pytest.approx(one[name], abs=1e-5)
    for left, right in zip(history(tmp_path / "one"), history(tmp_path / "two"), strict=True):
        for curve in ("loss", "grad_norm", "num_tokens", "acceptance_length"):
            assert left.get(curve) == pytest.approx(right.get(curve), abs=1e-5), curve
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-5, rtol=0)
    left_over = {path.name for path in (tmp_path / "two").iterdir()}
    written = {"drafter.json", "model.safetensors"}
    assert left_over == written | {"history.jsonl", "validation.json", "lint.json"}


@pytest.mark.parametrize(("settings", "sharding"), [(PLAIN, "ddp"), (ON_POLICY, "fsdp2")])
def test_a_parent_killed_at_any_moment_leaves_nothing_running_and_goes_on(
    world: World,  # noqa: F811
    tmp_path: Path,
    settings: dict[str, Any],
    sharding: str,
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_with(together(sharding), settings, world, whole)
    draw = random.Random(5)
    kill_when_it_has(draw.randint(2, settings["num_steps"] // 2), world, parts, settings, sharding)
    train_with(together(sharding), settings, world, parts)  # at once, while orphans may still live
    assert same_weights(whole, parts)
    assert (whole / "validation.json").read_bytes() == (parts / "validation.json").read_bytes()
    assert history(whole) == history(parts)


def kill_when_it_has(
    num_lines: int,
    world: World,  # noqa: F811
    out: Path,
    settings: dict[str, Any],
    sharding: str,
) -> None:
    """Train in a process of its own, and kill that one when its history has so many lines."""
    job = (together(sharding), settings, world, out)
    code = f"from test_distributed import *; train_with(*{job!r})"
    paths = os.pathsep.join([str(HERE), *sys.path])
    code = f"from pathlib import PosixPath; from test_train_drafter import World; {code}"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}
    )
    lines, began = out / "history.jsonl", time.monotonic()
    while not lines.exists() or len(lines.read_bytes().splitlines()) < num_lines:
        assert process.poll() is None, "the run was over before it was killed"
        assert time.monotonic() - began < 120
        time.sleep(0.001)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    assert not (out / "validation.json").exists()  # nobody went on to the end


def test_a_run_goes_on_with_other_processes(
    world: World,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkpoint holds whole tensors, so shares of it are anybody's."""
    train_with(VIRTUAL, {}, world, tmp_path / "one")
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.trainer.Trainer._finish", _dies)
        with pytest.raises(KeyboardInterrupt):
            train_with(VIRTUAL, {}, world, tmp_path / "two")
    assert list((tmp_path / "two").glob("checkpoint-*"))
    train_with(together("fsdp2"), {}, world, tmp_path / "two")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-5, rtol=0)


def _dies(*arguments: Any) -> None:
    raise KeyboardInterrupt


def test_a_workers_error_is_one_sentence_in_the_parent(
    world: World,  # noqa: F811
    tmp_path: Path,
) -> None:
    wild = {"learning_rate": 1e30, "max_grad_norm": 1e30}
    with pytest.raises(ValueError, match=r"diverged at step \d.*lower learning_rate") as caught:
        train_with(together(), wild, world, tmp_path)
    assert isinstance(caught.value.__cause__, WorkerError)
    assert "trainer.py" in str(caught.value.__cause__)
    assert not (tmp_path / "validation.json").exists()
    with pytest.raises(ValueError, match=r"accumulate=2 .* cannot be dealt to 3 processes alike"):
        train_with(together(num_processes=3), {}, world, tmp_path / "three")


def rank_fails(kind: str) -> None:
    """The second process fails while the first waits for it."""
    if torch.distributed.get_rank() == 1:
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "strange":
            raise StrangeError(1, 2)
        raise FileNotFoundError(2, "gone", "answers")
    torch.distributed.barrier()


class StrangeError(RuntimeError):
    """Cannot be made from its own message, hence not be sent to another process."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("killed", ValueError, "process 2 of 2 was killed by SIGKILL.* lower batch_size"),
        ("strange", RuntimeError, "StrangeError: 1 and 2"),
        ("lost", FileNotFoundError, "answers"),
    ],
)
def test_whoever_fails_first_is_told_of(kind: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        launch(rank_fails, kind, runtime=together())


def test_one_process_is_a_plain_call(world: World, tmp_path: Path) -> None:  # noqa: F811
    assert launch(list, (1, 2), runtime=VIRTUAL) == [1, 2]
    assert not torch.distributed.is_initialized()
    train(distill(num_steps=1), world, tmp_path)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_processes": -1}, "runtime.num_processes=-1 must be 0"),
        ({"sharding": "zero3"}, "runtime.sharding=zero3 is not known; use ddp or fsdp2"),
    ],
)
def test_a_wrong_runtime_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(VIRTUAL, **wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_two_gpus_train_as_one(world: World, tmp_path: Path, sharding: str) -> None:  # noqa: F811
    """bfloat16 is left out: it rounds more than processes differ."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    runtime = replace(VIRTUAL, device="cuda", clock="system")
    train_with(runtime, ON_POLICY, world, tmp_path / "one")
    two = replace(runtime, num_processes=2, sharding=sharding)
    train_with(two, ON_POLICY, world, tmp_path / "two")
    for left, right in zip(history(tmp_path / "one"), history(tmp_path / "two"), strict=True):
        assert left.get("loss") == pytest.approx(right.get("loss"), abs=1e-4)


@pytest.mark.usefixtures("one_thread")
def test_processes_that_each_train_a_member_end_as_one_process(
    world: World,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Bit for bit, since no sum is shared: two rounds of two members, a thread for each process."""
    ended = {}
    for size in (1, 2):
        runtime = replace(VIRTUAL, num_processes=size, threads=1)
        groups = {"target": tiny_config(world.target), "members": portfolio_members(pool())}
        inputs = {"answers": world.answers, "prompts": world.prompts}
        out = tmp_path / str(size)
        ended[size] = portfolio().run(workspace(groups, inputs, out, runtime=runtime))
    assert ended[1] == ended[2]
    for name in ("left", "right"):
        assert same_weights(tmp_path / "1" / name, tmp_path / "2" / name)
        curves = ("loss", "acceptance_length")
        one, two = (
            [{c: line.get(c) for c in curves} for line in history(tmp_path / size / name)]
            for size in "12"
        )
        assert one == two
    assert {path.name for path in (tmp_path / "1").iterdir()} == {
        path.name for path in (tmp_path / "2").iterdir()
    }
