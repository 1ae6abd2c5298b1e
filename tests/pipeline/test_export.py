"""Would catch: an export that needs what it does not hold, tensors lost, added or changed on the
way, a whole model with another law than the drafter's, a draft vocabulary that is forgotten, a
router beside the wrong encoder, a target that is not the one exported for, a card with the path of
a private folder, a description that cannot be read back.

Reloaded tensors and priors are equal; logits agree to rounding of float32 (roundtrip.ROUNDING).
"""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny import tiny_encoder_folder, tiny_target_folder
from workspace import RUNTIME, tiny_config, workspace
from world import make_rows

from decode import SpeculativeDecoder
from decode.costs import Costs
from decode.policies.fixed import FixedConfig
from decode.types import Sampling
from drafters.base import BuildContext, target_parts
from drafters.composite import CompositeConfig
from drafters.lm import LmConfig
from drafters.lora import LoraConfig
from drafters.ngram import NgramConfig
from pipeline import export, roundtrip, train_router
from pipeline.acceptance import AcceptanceWriter
from pipeline.build import build_drafters, load_target
from pipeline.config import Pool, PoolEntry
from pipeline.export import Export
from pipeline.exported import DECODER, find_target, open_router, read_export
from pipeline.load import load_drafters
from pipeline.manifest import finish
from pipeline.models import EncoderConfig
from pipeline.train_router import TrainRouter
from router.encoder import SentenceEncoder

CUT = LmConfig(source=None, layers=[0, -1], num_draft_vocab=0, train_head=False, dtype="float32")
SMALL = dataclasses.replace(CUT, layers=[1], num_draft_vocab=31, train_head=True)


LORA = LoraConfig(
    base="small",
    rank=2,
    alpha=4.0,
    target_modules=["all-linear"],
    train_head=True,
    merged=False,
    init_seed=0,
)


def entry(drafter: Any, trained_by: str | None = None) -> PoolEntry:
    return PoolEntry(drafter=drafter, trained_by=trained_by, domains=[], init_from=None)


POOL = Pool(
    entries={
        "ngram": entry(NgramConfig(min_ngram=1, max_ngram=3, max_offer=5)),
        "special": entry(LORA, "distill"),  # before its base
        "merged": entry(dataclasses.replace(LORA, merged=True), "distill"),
        "cut": entry(CUT, "distill"),
        "small": entry(SMALL, "finetune"),
        "both": entry(CompositeConfig(lookup="ngram", model="small", min_match=1)),
    }
)


def finished(folder: Path, stage: str) -> Path:
    identity = {"stage": stage, "settings": {"learning_rate": 0.5}, "inputs": {}}
    finish(folder, identity, {"loss": 1.0}, 0.0)
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Groups and inputs: drafters with weights of their own, a router trained on made-up
    acceptance.
    """
    root = tmp_path_factory.mktemp("world")
    config = tiny_config(tiny_target_folder(root / "target"))
    parts = target_parts(load_target(config, RUNTIME))
    inputs, built = {}, {}
    for name in ("cut", "small", "special", "merged"):
        drafter: Any = POOL.entries[name].drafter.build(BuildContext(parts, parts=built))
        built[name] = drafter
        if name == "small":
            drafter.set_draft_vocab(torch.arange(31) * 3)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in drafter.trainable.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        drafter.save(root / name)
        inputs[f"drafter:{name}"] = finished(root / name, "distill")
    folder = tiny_encoder_folder(root / "encoder")
    encoder = EncoderConfig(name_or_path=str(folder), revision=None, wheel=None, wheel_sha256=None)
    policy = FixedConfig(drafter="cut", num_draft_tokens=3)
    groups = {"target": config, "pool": POOL, "encoder": encoder, "policy": policy}
    inputs["acceptance"] = write_acceptance(root / "acceptance")
    inputs["router"] = root / "router"
    settings: dict[str, Any] = {
        "hidden": 8,
        "penalties": [0.1],
        "learning_rate": 0.02,
        "max_steps": 10,
        "patience": 5,
    }
    stage = TrainRouter(**settings, neighbours=[3], num_resamples=20)
    stage.run(workspace(groups, {"acceptance": inputs["acceptance"]}, inputs["router"]))
    finished(inputs["router"], "train_router")
    inputs["costs"] = write_costs(root / "costs")
    return {"groups": groups, "inputs": inputs}


def write_acceptance(folder: Path) -> Path:
    """The two drafters of the made-up world stand for the six of the pool."""
    folder.mkdir()
    stands_for = {"lookup": ("ngram", "both"), "small": ("special", "merged", "cut", "small")}
    with AcceptanceWriter(folder) as writer:
        for row in make_rows(0, informative=True):
            writer.write([{**vars(row), "drafter": name} for name in stands_for[row.drafter]])
    return finished(folder, "collect")


def write_costs(folder: Path) -> Path:
    folder.mkdir()
    tables = {name: {1: 0.001} for name in POOL.entries}
    costs = Costs(key="here", verify_seconds={1: 0.1}, draft_seconds=tables, host_seconds=0.0)
    (folder / "costs.json").write_text(costs.to_json())
    return folder


def run(world: dict[str, Any], out: Path, **changes: Any) -> dict[str, Any]:
    settings = {"license": None, "pretrained": True, "copy_encoder": True, **changes}
    return Export(**settings).run(workspace(world["groups"], world["inputs"], out))


@pytest.fixture(scope="module")
def exported(world: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("exported")
    return out, run(world, out)


@pytest.fixture
def copy(exported: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported[0], tmp_path / "copy"))


def rebuild(folder: Path, target: Any) -> Any:
    """Drafters from decoder.json alone, as load_decoder makes them."""
    return load_drafters(folder, read_export(folder)["drafters"], target)


def test_the_copy_drafts_as_the_original_after_a_move(world: dict[str, Any], copy: Path) -> None:
    target = load_target(world["groups"]["target"], RUNTIME)
    originals = build_drafters(POOL, target, world["inputs"])
    again = rebuild(copy, target)
    assert list(again) == ["ngram", "special", "merged", "cut", "small", "both"]
    assert again["special"].base is again["merged"].base is again["small"]
    ids = list(range(5, 40)) + list(range(5, 20))
    logprobs = torch.full((20,), -1.0)
    for name, drafter in originals.items():
        context = (ids, 30, logprobs, Sampling(temperature=0.8), 4)
        a, b = drafter.score(*context), again[name].score(*context)
        assert torch.allclose(a, b, atol=1e-6, equal_nan=True), name
        assert type(drafter) is type(again[name])
        assert a.isfinite().any(), name


def test_the_whole_models_have_the_drafters_law(world: dict[str, Any], exported: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = load_target(world["groups"]["target"], RUNTIME)
    originals: Any = build_drafters(POOL, target, world["inputs"])
    ids = torch.tensor([[5, 9, 60, 33, 7]])
    for name, layers, num_ids in (("cut", 2, 97), ("small", 1, 31), ("special", 1, 31)):
        folder = exported[0] / "drafters" / name
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.config.num_hidden_layers == layers
        assert len(AutoTokenizer.from_pretrained(folder)) == 97
        ours = roundtrip.drafter_logits(originals[name], ids)
        known = torch.isfinite(ours)
        assert known[0, 0].sum() == num_ids
        with torch.no_grad():
            assert torch.allclose(model(ids).logits[known], ours[known], atol=1e-4)
        assert exported[1][f"{name}_own"] <= 1e-4
        assert exported[1][f"{name}_pretrained"] <= 1e-4


def test_adapters_fit_their_exported_base(world: dict[str, Any], exported: Any) -> None:
    """As PEFT puts them together, with no part of this project."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    target = load_target(world["groups"]["target"], RUNTIME)
    originals: Any = build_drafters(POOL, target, world["inputs"])
    described = read_export(exported[0])["drafters"]
    assert {name for name, facts in described.items() if facts["adapter"]} == {"special", "merged"}
    ids = torch.tensor([[5, 9, 60, 33, 7]])
    laws = {
        name: roundtrip.drafter_logits(originals[name], ids)
        for name in originals
        if name in ("special", "small")
    }
    known = torch.isfinite(laws["special"])
    for name in ("special", "merged"):
        base = AutoModelForCausalLM.from_pretrained(exported[0] / "drafters" / "small")
        model = PeftModel.from_pretrained(base, exported[0] / described[name]["adapter"])
        with torch.no_grad():
            found = model(ids).logits[known]
        assert torch.allclose(found, laws["special"][known], atol=1e-4)
        assert not torch.allclose(found, laws["small"][known], atol=1e-2)
        assert exported[1][f"{name}_adapter"] <= 1e-4


def test_an_adapter_that_differs_is_noticed(world: dict[str, Any], copy: Path) -> None:
    target = load_target(world["groups"]["target"], RUNTIME)
    drafter = build_drafters(POOL, target, world["inputs"], ["special"])["special"]
    folder, base = copy / "drafters" / "special" / "adapter", copy / "drafters" / "small"
    assert roundtrip.check_adapter("special", drafter, folder, base, target) <= 1e-4
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "lora_alpha": 5}))
    with pytest.raises(ValueError, match="logits of drafter special came back"):
        roundtrip.check_adapter("special", drafter, folder, base, target)


def test_an_adapter_without_an_exported_base_is_exported_merged_only(
    world: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = load_target(world["groups"]["target"], RUNTIME)
    drafters = build_drafters(POOL, target, world["inputs"], ["special"])
    described: dict[str, Any] = {
        "special": {"pretrained": "drafters/special", "config": {"base": "small"}, "adapter": None},
        "small": {"pretrained": None},
    }
    assert export.export_adapters(described, drafters, target, tmp_path) == {}
    assert described["special"]["adapter"] is None
    assert "its base small is not exported" in caplog.text


def test_the_router_and_its_encoder_travel(world: dict[str, Any], copy: Path) -> None:
    router = open_router(copy, read_export(copy))
    original = train_router.load_router(
        world["inputs"]["router"], SentenceEncoder(Path(world["groups"]["encoder"].name_or_path))
    )
    assert router is not None
    ours = original.prior("def loop", 9, Sampling())
    theirs = router.prior("def loop", 9, Sampling())
    assert theirs.mean == pytest.approx(ours.mean, rel=1e-12)
    assert set(theirs.mean) == set(POOL.entries)
    weights = load_file(copy / "encoder" / "model.safetensors")
    changed = {name: tensor + 0.01 for name, tensor in weights.items()}
    save_file(changed, copy / "encoder" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"the encoder given has digest"):
        open_router(copy, read_export(copy))


def test_without_a_copy_the_encoder_is_found_by_name(world: dict[str, Any], tmp_path: Path) -> None:
    run(world, tmp_path, copy_encoder=False, pretrained=False)
    content = read_export(tmp_path)
    assert content["encoder"] is None
    assert not (tmp_path / "encoder").exists()
    assert open_router(tmp_path, content) is not None
    assert {facts["pretrained"] for facts in content["drafters"].values()} == {None}
    assert {facts["adapter"] for facts in content["drafters"].values()} == {None}
    assert not (tmp_path / "drafters" / "cut" / "model.safetensors").exists()
    assert (tmp_path / "drafters" / "cut" / "own" / "model.safetensors").exists()


def test_the_target_is_found_and_another_is_refused(
    world: dict[str, Any], exported: Any, tmp_path: Path
) -> None:
    described = read_export(exported[0])["target"]
    original = Path(world["groups"]["target"].name_or_path)
    assert find_target(described) == original
    moved = Path(shutil.copytree(original, tmp_path / "moved"))
    assert find_target(described, moved) == moved
    other = tiny_target_folder(tmp_path / "other", seed=9)
    with pytest.raises(ValueError, match="is not the target of this export: its weights differ"):
        find_target(described, other)


def test_cards_hold_front_matter_figures_and_no_private_path(exported: Any, world: Any) -> None:
    folder = exported[0]
    names = ["README.md", "router/README.md", "drafters/cut/README.md", "drafters/small/README.md"]
    private = str(Path(world["groups"]["target"].name_or_path).parent)
    for name in names:
        text = (folder / name).read_text()
        front = yaml.safe_load(text.split("---")[1])
        assert front["license"] == "other", name
        assert "outrider" in front["tags"]
        assert "base_model" not in front  # a local folder is no model of the Hub
        assert private not in text, name
    assert "PEFT" not in (folder / "drafters/cut/README.md").read_text()
    adapter = (folder / "drafters/special/README.md").read_text()
    assert "PEFT adapter of rank 2" in adapter
    assert "whole model of `small`" in " ".join(adapter.split())
    whole = " ".join((folder / "README.md").read_text().split())
    assert "as it was evaluated: dtype float32, backend transformers (" in whole
    assert "exactness law." in whole
    card = (folder / "drafters/cut/README.md").read_text()
    assert '"learning_rate": 0.5' in card
    assert "| cut | 0.000 | code |" in card
    assert "| ngram |" not in card
    assert "-> " not in card
    assert "| test | 90 |" in (folder / "router/README.md").read_text()
    assert Costs.from_json((folder / "costs.json").read_text()).verify(1) == 0.1
    policy = read_export(folder)["policy"]
    assert policy == {
        "_target_": "decode.policies.fixed.FixedConfig",
        "drafter": "cut",
        "num_draft_tokens": 3,
    }


def test_a_license_is_the_targets_unless_told(world: dict[str, Any], tmp_path: Path) -> None:
    assert export.target_license(tmp_path) == "other"
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: 'mit'\n---\nlicense: wrong\n")
    assert export.target_license(tmp_path) == "mit"
    run(world, tmp_path / "out", license="apache-2.0", pretrained=False, copy_encoder=False)
    assert 'license: "apache-2.0"' in (tmp_path / "out" / "README.md").read_text()


def damage(path: Path, change: str) -> None:
    tensors = load_file(path)
    name = next(name for name in tensors if "norm" in name)
    if change == "value":
        tensors[name] = tensors[name] * 1.5
    elif change == "missing":
        del tensors[name]
    else:
        tensors["extra.weight"] = torch.zeros(2)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [("value", "changed by"), ("missing", "missing keys"), ("extra", "unexpected keys")],
)
def test_a_whole_model_that_differs_is_noticed(
    world: dict[str, Any], copy: Path, change: str, sentence: str
) -> None:
    target = load_target(world["groups"]["target"], RUNTIME)
    drafter = build_drafters(POOL, target, world["inputs"], ["cut"])["cut"]
    folder = copy / "drafters" / "cut"
    damage(folder / "model.safetensors", change)
    with pytest.raises(ValueError, match=sentence):
        roundtrip.check_pretrained("cut", drafter, folder, target)


def test_an_own_tensor_that_differs_is_noticed(world: dict[str, Any]) -> None:
    target = load_target(world["groups"]["target"], RUNTIME)
    drafter, other = (
        build_drafters(POOL, target, world["inputs"], ["small"])["small"] for _ in "ab"
    )
    assert roundtrip.check_drafter("small", drafter, other, target) == 0
    with torch.no_grad():
        other.trainable.head[3, 3] += 1e-3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="tensor head of drafter small came back"):
        roundtrip.check_drafter("small", drafter, other, target)
    other.set_draft_vocab(torch.arange(31))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="of drafter small came back"):
        roundtrip.check_drafter("small", drafter, other, target)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: c.update(schema_version=2), "has schema_version=2, this version reads 1"),
        (lambda c: c.pop("policy"), "lacks the key policy"),
        (lambda c: c.update(costs="gone.json"), "gone.json is missing, which decoder.json names"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(copy: Path, change: Any, sentence: str) -> None:
    content = json.loads((copy / DECODER).read_text())
    change(content)
    (copy / DECODER).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=sentence):
        read_export(copy)


def test_what_is_no_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"it has no decoder.json; run stage=export first"):
        read_export(tmp_path)
    (tmp_path / DECODER).write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        read_export(tmp_path)


def test_the_stage_asks_for_all_it_reads_and_its_yaml_lists_its_fields() -> None:
    stage = Export(license=None, pretrained=True, copy_encoder=True)
    needs = stage.needs({"pool": POOL})
    trained = {f"drafter:{name}" for name in ("cut", "small", "special", "merged")}
    assert set(needs) == {"router", "acceptance", "costs"} | trained
    path = Path(export.__file__).parents[1] / "conf" / "stages" / "export.yaml"
    values = yaml.safe_load(path.read_text())
    assert values.pop("_target_") == "pipeline.export.Export"
    assert set(values) == {field.name for field in dataclasses.fields(Export)}


ALONE = """
import json, sys
from pipeline import load_decoder
decoder = load_decoder(sys.argv[1], target=sys.argv[2], device="cpu")
result = decoder.generate(["w3 w4 w5 w3 w4", "w9"], max_new_tokens=12)
drafted = [record.num_drafted for row in result.records for record in row]
prior = decoder.router.prior("w3 w4", 5, __import__("decode").Sampling())
print(json.dumps({"ids": result.token_ids, "drafted": sum(drafted), "source": prior.source}))
"""


def test_a_new_process_decodes_from_the_folder_alone(
    world: dict[str, Any], copy: Path, tmp_path: Path
) -> None:
    original = Path(world["groups"]["target"].name_or_path)
    moved = Path(shutil.copytree(original, tmp_path / "moved"))
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(copy), str(moved)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["source"] == "router"
    assert said["drafted"] > 0
    target = load_target(world["groups"]["target"], RUNTIME)
    plain = SpeculativeDecoder(target).generate(["w3 w4 w5 w3 w4", "w9"], max_new_tokens=12)
    assert [list(map(int, ids)) for ids in plain.token_ids] == said["ids"]
