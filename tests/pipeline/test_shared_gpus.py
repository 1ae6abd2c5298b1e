"""Would catch: two ranks of nccl on one GPU; a process on a GPU that is not there, or all of them
on the first; a group bound to a GPU though gloo was chosen, or none bound for nccl; processes that
take steps together let onto one GPU; sums that gloo is given on a GPU, or that end on the CPU; a
barrier that names a GPU by the number of the process; members that end otherwise because their
processes share a GPU.

Tolerances: on a GPU 1e-4 on losses, since gradients are added up there in any order.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_portfolio import pool, portfolio
from test_train_drafter import VIRTUAL, World, distill, entry, history, world
from torch import distributed
from workspace import tiny_config, workspace

from pipeline import launch as launching
from pipeline.build import portfolio_members
from pipeline.launch import backend_and_gpu, launch
from pipeline.runtime import Runtime
from pipeline.team import Team

__all__ = ["world"]  # a fixture

CUDA = replace(VIRTUAL, device="cuda", clock="system")
SeeGpus = Callable[[int], None]


@pytest.fixture
def see_gpus(monkeypatch: pytest.MonkeyPatch) -> SeeGpus:
    """Let torch see so many GPUs."""

    def see(count: int) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)

    return see


@pytest.mark.parametrize(
    ("size", "gpus", "backend", "chosen"),
    [
        (2, 2, "nccl", [0, 1]),
        (3, 8, "nccl", [0, 1, 2]),
        (2, 1, "gloo", [0, 0]),
        (5, 2, "gloo", [0, 1, 0, 1, 0]),
        (6, 4, "gloo", [0, 1, 2, 3, 0, 1]),
    ],
)
def test_gpus_are_dealt_in_turn_and_shared_without_nccl(
    see_gpus: SeeGpus, size: int, gpus: int, backend: str, chosen: list[int]
) -> None:
    see_gpus(gpus)
    found = [backend_and_gpu(rank, size, CUDA) for rank in range(size)]
    assert found == [(backend, gpu) for gpu in chosen]
    on_cpu = replace(CUDA, device="cpu")
    assert [backend_and_gpu(rank, size, on_cpu) for rank in range(size)] == [("gloo", None)] * size


def test_processes_share_the_cores(see_gpus: SeeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight at most beside a GPU, and what was asked for is for all of them together."""
    see_gpus(2)
    monkeypatch.setattr("pipeline.runtime.num_cores", lambda: 32)
    each = {size: replace(CUDA, threads=0).num_threads(size) for size in (1, 2, 6, 40)}
    assert each == {1: 8, 2: 8, 6: 5, 40: 1}
    assert replace(CUDA, threads=12).num_threads(6) == 2
    assert replace(CUDA, device="cpu", threads=0).num_threads(6) == 5


@pytest.mark.parametrize(("size", "bound"), [(2, torch.device("cuda", 1)), (4, None)])
def test_a_group_that_shares_gpus_is_bound_to_none(
    see_gpus: SeeGpus,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    bound: torch.device | None,
) -> None:
    calls: dict[str, Any] = {}
    see_gpus(2)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.setattr("torch.cuda.set_device", lambda gpu: calls.update(gpu=gpu))
    monkeypatch.setattr(distributed, "TCPStore", lambda *args, **options: None)
    monkeypatch.setattr(
        distributed,
        "init_process_group",
        lambda backend, **options: calls.update(options, backend=backend),
    )
    launching._join_group(size - 1, size, 1, CUDA)
    assert calls["gpu"] == 1
    assert calls["device_id"] == bound
    assert calls["backend"] == ("gloo" if bound is None else "nccl")
    # Whoever chooses a GPU by these chooses the same one.
    assert int(os.environ["LOCAL_RANK"]) % 2 == calls["gpu"]


def test_more_processes_than_gpus_only_where_they_may_share(see_gpus: SeeGpus) -> None:
    see_gpus(2)
    many = replace(CUDA, num_processes=6)
    assert many.resolved_processes(share_gpus=True) == 6
    with pytest.raises(ValueError, match=r"num_processes=6, but torch sees 2 GPUs; use .*=0"):
        many.resolved_processes()
    for share in (False, True):
        assert replace(CUDA, num_processes=0).resolved_processes(share) == 2
        assert replace(CUDA, num_processes=1).resolved_processes(share) == 1


def test_who_takes_steps_together_shares_no_gpu(
    world: World, tmp_path: Path, see_gpus: SeeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before anything is started; six members take no step together but with fsdp2."""
    see_gpus(2)
    monkeypatch.setattr(distributed, "TCPStore", lambda *a, **options: pytest.fail("started"))
    sentence = r"runtime.num_processes=6, but torch sees 2 GPUs"
    answers = {"answers": world.answers, "prompts": world.prompts}
    one = {"target": tiny_config(world.target), "entry": entry()}
    members = {"target": tiny_config(world.target), "members": portfolio_members(pool())}
    six = replace(CUDA, num_processes=6)
    for stage, groups, sharding in (
        (distill(accumulate=6), one, "ddp"),
        (distill(accumulate=6), one, "fsdp2"),
        (portfolio(accumulate=6), members, "fsdp2"),
    ):
        runtime = replace(six, sharding=sharding)
        with pytest.raises(ValueError, match=sentence):
            stage.run(workspace(groups, answers, tmp_path, runtime=runtime))
    asked: list[Any] = []
    monkeypatch.setattr(
        "pipeline.train_drafter.launch", lambda *args, **options: asked.append(options) or {}
    )
    portfolio(accumulate=1).run(workspace(members, answers, tmp_path, runtime=six))
    distill(accumulate=2).run(
        workspace(one, answers, tmp_path, runtime=replace(CUDA, num_processes=2))
    )
    assert [options["share_gpus"] for options in asked] == [True, False]


@pytest.mark.parametrize(("backend", "where"), [("gloo", "cpu"), ("nccl", "meta")])
def test_gloo_adds_up_on_the_cpu_and_the_sum_comes_back(
    monkeypatch: pytest.MonkeyPatch, backend: str, where: str
) -> None:
    """A device without values stands for the GPU."""
    team: Any = SimpleNamespace(size=2, device=torch.device("meta"))
    seen: list[str] = []
    monkeypatch.setattr(distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(distributed, "all_reduce", lambda values: seen.append(values.device.type))
    assert Team.sum(team, torch.ones(3)).device.type == "meta"
    assert seen == [where]
    team.size = 1
    assert Team.sum(team, torch.ones(3)).device.type == "meta"
    assert seen == [where]


def test_a_team_waits_without_naming_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "barrier", lambda *args, **named: calls.append((args, named)))
    Team.wait(SimpleNamespace(size=2))  # type: ignore[arg-type]
    assert calls == [((), {})]


# ------------------------------------------------------------------------------------ on GPUs


def found_there() -> list[dict[str, Any]]:
    """What each process of a launch finds about itself."""
    team = Team("cuda", "ddp")
    total = team.sum(torch.tensor([team.index + 1.0], dtype=torch.float64))
    on_gpu = team.sum(torch.full((2,), 1.0, device=team.device))
    team.wait()
    gpus = range(torch.cuda.device_count())
    mine = {
        "backend": distributed.get_backend(),
        "device": str(team.device),
        "current": torch.cuda.current_device(),
        "contexts": [gpu for gpu in gpus if torch._C._cuda_hasPrimaryContext(gpu)],
        "sums": (total.item(), on_gpu.tolist()),
        "sums_on": {str(total.device), str(on_gpu.device)},
    }
    found: list[Any] = [None] * team.size
    distributed.all_gather_object(found, mine)
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_processes_that_share_gpus_stay_on_their_own() -> None:
    gpus = torch.cuda.device_count()
    size = gpus + 1
    found = launch(found_there, runtime=replace(CUDA, num_processes=size), share_gpus=True)
    for rank, one in enumerate(found):
        gpu = rank % gpus
        assert one["backend"] == "gloo"
        assert (one["device"], one["current"], one["contexts"]) == (f"cuda:{gpu}", gpu, [gpu])
        assert one["sums"] == (size * (size + 1) / 2, [size, size])
        assert one["sums_on"] == {f"cuda:{gpu}"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_members_that_share_a_gpu_end_as_one_process(world: World, tmp_path: Path) -> None:
    """One round, whose shares are labels: those of later ones hang on what was measured."""
    ended = {}
    for size in (1, torch.cuda.device_count() + 1):
        groups = {"target": tiny_config(world.target), "members": portfolio_members(pool())}
        inputs = {"answers": world.answers, "prompts": world.prompts}
        runtime: Runtime = replace(CUDA, num_processes=size)
        stage = portfolio(accumulate=1, num_rounds=1, begin_with="labels")
        out = tmp_path / str(size)
        ended[out] = stage.run(workspace(groups, inputs, out, runtime=runtime))
    (alone, one), (shared, other) = ended.items()
    assert one.keys() == other.keys()
    for name in ("left", "right"):
        for line, same in zip(history(alone / name), history(shared / name), strict=True):
            assert line.get("loss") == pytest.approx(same.get("loss"), abs=1e-4)
    assert {path.name for path in alone.iterdir()} == {path.name for path in shared.iterdir()}
