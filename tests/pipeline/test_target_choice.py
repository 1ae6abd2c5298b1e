"""What "auto" stands for in a target's config: dtype, backend and exactness.

Would catch: bfloat16 where the processor has none; our own forward on a GPU that is too old or has
no Triton, or for a model that it does not know; a promise of exactness that is dropped in silence,
or made by a backend that cannot keep it; a value that a person gave and that is replaced; an
identity that says "auto", so that two machines share an artifact; a choice that is made again, or
said again, for every stage; a model that is fetched for a stage that does not read it.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tiny import tiny_model, tiny_target_folder
from toys import RUNTIME
from workspace import GPU, tiny_config
from workspace import RUNTIME as CPU

from decode.native.architecture import UnsupportedModelError
from decode.targets import backends, choices
from pipeline.build import load_target
from pipeline.manifest import read_manifest
from pipeline.models import TargetConfig
from pipeline.runtime import Runtime
from pipeline.stage import Pipeline, Stage, Workspace

FOREIGN = {"architectures": ["GPT2LMHeadModel"]}
KNOWN = {"architectures": ["LlamaForCausalLM"]}
Choice = tuple[str, str, str]  # dtype, backend, exactness


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU wherever one is asked for, and processors without bfloat16 unless a test says so."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Runtime, "resolved_device", lambda self: self.device)
    has_bfloat16(monkeypatch, False)
    has_capability(monkeypatch, (9, 0))


def has_capability(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)


def has_bfloat16(monkeypatch: pytest.MonkeyPatch, it_has: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: it_has)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: it_has)


def config(folder: Path, said: Mapping[str, Any] = KNOWN, **given: Any) -> TargetConfig:
    """A target's config whose three choices are "auto" unless given; `said` is its config.json."""
    folder.mkdir(exist_ok=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    shard = len(header).to_bytes(8, "little") + header + b"\0"
    (folder / "model.safetensors").write_bytes(shard)
    (folder / "config.json").write_text(json.dumps(said))
    auto = {"dtype": "auto", "backend": "auto", "exactness": "auto"}
    return replace(tiny_config(folder), **{**auto, **given})


def chosen(config: TargetConfig, runtime: Runtime = CPU) -> Choice:
    found = config.resolved(runtime)
    assert found.resolved(runtime) == found
    return found.dtype, found.backend, found.exactness


@pytest.mark.parametrize(
    ("runtime", "it_has", "said", "expected"),
    [
        (CPU, True, KNOWN, ("bfloat16", "native", "bitwise")),
        (CPU, False, KNOWN, ("float32", "native", "bitwise")),
        (CPU, True, FOREIGN, ("float32", "transformers", "law")),
        (GPU, True, KNOWN, ("bfloat16", "native", "bitwise")),
        (GPU, True, FOREIGN, ("bfloat16", "transformers", "law")),
        (GPU, False, FOREIGN, ("float32", "transformers", "law")),
    ],
)
def test_what_auto_stands_for(tmp_path, monkeypatch, runtime, it_has, said, expected):
    has_bfloat16(monkeypatch, it_has)
    assert chosen(config(tmp_path / "model", said), runtime) == expected


def test_matrix_units_are_enough_for_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert chosen(config(tmp_path / "model"))[0] == "bfloat16"


@pytest.mark.parametrize(
    ("given", "runtime", "expected"),
    [
        ({"dtype": "float32"}, CPU, ("float32", "native", "bitwise")),
        ({"dtype": "float16"}, GPU, ("float16", "native", "bitwise")),
        ({"backend": "transformers"}, GPU, ("bfloat16", "transformers", "law")),
        ({"backend": "transformers"}, CPU, ("float32", "transformers", "law")),
        ({"backend": "native"}, GPU, ("bfloat16", "native", "bitwise")),
        ({"exactness": "law"}, CPU, ("bfloat16", "native", "law")),
        ({"backend": "native", "exactness": "bitwise"}, GPU, ("bfloat16", "native", "bitwise")),
    ],
)
def test_what_was_given_stays(tmp_path, monkeypatch, given, runtime, expected):
    has_bfloat16(monkeypatch, True)
    assert chosen(config(tmp_path / "model", **given), runtime) == expected


REASONS = {
    "GPT2LMHeadModel is none of LlamaForCausalLM": FOREIGN,
    "a model of no named class is none of": {"hidden_size": 4},
    "hidden_act=gelu is not silu": {**KNOWN, "hidden_act": "gelu"},
    "rope_type=longrope is none of": {**KNOWN, "rope_scaling": {"type": "longrope"}},
    "its weights are quantised": {**KNOWN, "quantization_config": {"bits": 4}},
}


@pytest.mark.parametrize("backend", ["auto", "native"])
@pytest.mark.parametrize("reason", REASONS)
def test_another_model_goes_through_transformers_and_it_is_said(tmp_path, caplog, reason, backend):
    target = config(tmp_path / "model", REASONS[reason], backend=backend)
    with caplog.at_level(logging.WARNING):
        assert chosen(target)[1:] == ("transformers", "law")
    (message,) = caplog.messages
    assert "goes through the transformers backend" in message
    assert reason in message


@pytest.mark.parametrize("backend", ["auto", "native"])
@pytest.mark.parametrize(
    ("version", "has_triton", "reason"),
    [
        ((7, 5), True, "a GPU of compute capability 8.0, and this one has 7.5"),
        ((9, 0), False, "the package triton, which is not installed"),
    ],
)
def test_a_device_without_our_kernels_gets_transformers_and_it_is_said(
    tmp_path, monkeypatch, caplog, version, has_triton, reason, backend
):
    has_capability(monkeypatch, version)
    monkeypatch.setattr(choices, "find_spec", lambda name: has_triton or None)
    target = config(tmp_path / "model", backend=backend)
    with caplog.at_level(logging.WARNING):
        assert chosen(target, GPU)[1:] == ("transformers", "law")
    (message,) = caplog.messages
    assert reason in message
    assert chosen(target, CPU)[1] == "native"
    with pytest.raises(ValueError, match="exactness=bitwise is not to be had"):
        replace(target, backend="auto", exactness="bitwise").resolved(GPU)


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "cpu"])
@pytest.mark.parametrize("exactness", ["auto", "law"])
def test_left_to_itself_a_gpu_that_does_not_hold_bitwise_gets_transformers(
    monkeypatch, caplog, name, exactness
):
    def native(*_: Any, must_hold: bool, exactness: str, **__: Any) -> str:
        assert exactness == ("bitwise" if wanted == "auto" else wanted)
        if must_hold:
            raise UnsupportedModelError("it does not hold there")
        return "native"

    wanted = exactness
    monkeypatch.setattr(backends, "NativeTarget", native)
    monkeypatch.setattr(backends, "TransformersTarget", lambda *_: "transformers")
    model = SimpleNamespace(device=torch.device(name))
    for backend in ("auto", "native"):
        caplog.clear()
        made = backends.make_target(
            model, None, "m", backend=backend, exactness=exactness, take=True
        )
        falls_back = (name != "cpu", backend, exactness) == (True, "auto", "auto")
        assert made == ("transformers" if falls_back else "native")
        assert len(caplog.messages) == falls_back


def test_code_that_comes_with_a_model_is_not_passed_over(tmp_path):
    said = {**KNOWN, "auto_map": {"AutoModelForCausalLM": "modeling_own.LlamaForCausalLM"}}
    assert chosen(config(tmp_path / "model", said, trust_remote_code=True))[1] == "transformers"
    assert chosen(config(tmp_path / "model", said))[1] == "native"  # where it is not run


@pytest.mark.parametrize(("said", "runtime"), [(FOREIGN, CPU), (FOREIGN, GPU)])
def test_a_promise_that_cannot_be_kept_is_refused(tmp_path, said, runtime):
    with pytest.raises(ValueError, match="exactness=bitwise is not to be had of transformers"):
        config(tmp_path / "model", said, exactness="bitwise").resolved(runtime)


def test_the_identity_names_what_was_chosen(tmp_path, monkeypatch):
    target = config(tmp_path / "model")
    with pytest.raises(AssertionError):
        target.identity()
    known = target.resolved(CPU).identity()
    assert known == config(tmp_path / "model").resolved(CPU).identity()
    given = {"dtype": "float32", "backend": "native", "exactness": "bitwise"}
    assert known == config(tmp_path / "model", **given).identity()
    assert "auto" not in json.dumps(known)
    has_bfloat16(monkeypatch, True)
    assert known != target.resolved(CPU).identity()
    there = {"dtype": "bfloat16", "backend": "native", "exactness": "bitwise"}
    assert target.resolved(GPU).identity() == config(tmp_path / "model", **there).identity()


def test_a_tiny_target_is_loaded_as_chosen(tmp_path):
    folder = tiny_target_folder(tmp_path)
    auto = replace(tiny_config(folder), dtype="auto", backend="auto", exactness="auto")
    target: Any = load_target(auto, CPU)
    assert (target.backend, target.exactness, target.dtype) == ("native", "bitwise", torch.float32)
    whole = load_target(auto, CPU, whole=True)
    assert whole.backend == "transformers"
    weights = tiny_model().state_dict()
    assert all(torch.equal(weights[name], w) for name, w in whole.model.state_dict().items())


@dataclass(frozen=True)
class Group:
    """Something to choose, which counts how often it is asked."""

    choice: str
    asked: list[int] = field(default_factory=list, hash=False, compare=False)

    def resolved(self, runtime: Runtime) -> "Group":
        self.asked.append(1)
        return replace(self, choice=f"on {runtime.device}")

    def identity(self) -> dict[str, Any]:
        return {"choice": self.choice}


@dataclass(frozen=True, kw_only=True)
class Reader(Stage):
    reads: ClassVar[tuple[str, ...]] = ("target",)

    def run(self, workspace: Workspace) -> dict[str, Any]:
        return {"choice": workspace.groups["target"].choice}


@dataclass(frozen=True, kw_only=True)
class Other(Stage):
    def run(self, workspace: Workspace) -> dict[str, Any]:
        return {"groups": len(workspace.groups)}


def test_stages_read_what_was_chosen_once(tmp_path):
    group = Group("auto")
    stages = {"reader": Reader(), "other": Other()}
    pipeline = Pipeline(
        stages=stages, groups={"target": group}, root=tmp_path, seed=0, runtime=RUNTIME
    )
    pipeline.run("other")
    assert group.asked == []
    manifest = read_manifest(pipeline.run("reader"))
    assert manifest["metrics"] == {"choice": "on cpu"}
    assert manifest["identity"]["groups"] == {"target": {"choice": "on cpu"}}
    assert pipeline.locate("reader").finished
    assert group.asked == [1]
