"""Every YAML file of conf/ lists exactly the fields of the class it names, and everything composes.

Would catch: a field without a value; a value that no field reads; a class that is gone; a choice
that does not compose or whose types are wrong; a stage that the menu does not know; a preset that
sets a key that is gone; a path of one machine; a default that lives in code.
"""

from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_module
from hydra.utils import get_class
from omegaconf import OmegaConf

from pipeline.config import typed, typed_pool, typed_settings
from pipeline.stage import Stage

CONF = Path(__file__).parents[2] / "conf"
FILES = sorted(CONF.rglob("*.yaml"))
GROUPS = ("data", "bench", "target", "encoder", "policy", "runtime", "tracking")
CHOICES = [
    f"{path.parent.name}={path.stem}"
    for path in FILES
    if path.parent.name in (*GROUPS, "pool", "experiment")
]
FILL = {  # what a person has to give for these choices
    "data=jsonl": ["data.train=x.jsonl"],
    "bench=files": ["bench.files=x.jsonl"],
    "data=hub": ["data.name_or_path=x/y"],
    "target=local": ["target.name_or_path=x"],
    "encoder=local": ["encoder.name_or_path=x"],
    "experiment=gpu_full": ["data.train=x.jsonl"],
    "experiment=gpu_small": ["data.train=x.jsonl"],
}
DEFAULTS_ALLOWED = {"pipeline.runtime.Runtime", "decode.types.Sampling"}


def compose_with(*overrides: str):
    with initialize_config_module("conf", version_base="1.3"):
        return compose("config", list(overrides))


def leaves(node: object, prefix: str = "") -> list[str]:
    if not isinstance(node, dict):
        return [prefix]
    return [name for key, value in node.items() for name in leaves(value, f"{prefix}.{key}")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_a_file_lists_every_field_of_its_class_and_nothing_else(path):
    node = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if "_target_" not in node:
        assert path.parent.name in ("conf", "pool", "experiment"), "this file names no class"
        return
    cls = get_class(node.pop("_target_"))
    assert set(node) == {field.name for field in fields(cls)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_values_live_in_yaml_only(path):
    node = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if (target := node.get("_target_")) and target not in DEFAULTS_ALLOWED:
        given = [
            field.name
            for field in fields(get_class(target))
            if field.default is not MISSING or field.default_factory is not MISSING
        ]
        assert given == []


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes_to_typed_values(choice):
    config = compose_with(choice, *FILL.get(choice, []))
    for group in GROUPS:
        typed(config[group], group)
    typed_pool(config.pool)
    typed_settings(config)
    for name in config.stages:
        assert isinstance(typed(config.stages[name], f"stages.{name}"), Stage)


def test_every_stage_file_is_composed_and_has_a_line_for_the_menu():
    config = compose_with()
    names = {path.stem for path in (CONF / "stages").glob("*.yaml")}
    assert set(config.stages) == names
    for name in names:
        stage = typed(config.stages[name], f"stages.{name}")
        assert stage.summary, name
        assert type(stage).__module__ == f"pipeline.{name}", "a stage sits in the file of its name"
        assert type(stage).__name__ == "".join(word.title() for word in name.split("_"))


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda p: p.stem)
def test_a_preset_sets_only_keys_that_exist(path):
    preset = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    preset.pop("defaults", None)
    config = compose_with(f"experiment={path.stem}")
    bare = OmegaConf.to_container(compose_with("~experiment"))
    there = leaves(bare)
    gone = [key for key in leaves(preset) if key not in there]
    free = (".stages.compare.best_of.",)  # names that a person chooses
    assert [
        k for k in gone if k.split(".")[1] not in (*GROUPS, "pool") and not k.startswith(free)
    ] == []
    assert config.stage is None


def test_no_file_names_a_machine():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert "/home/" not in text, path
        assert "/work/" not in text, path
