"""Policies by the name of their YAML: values live there and nowhere else."""

import importlib
from importlib.resources import files
from pathlib import Path

import yaml

from decode.policies.base import PolicyConfig


def policy_names() -> list[str]:
    """The policies that conf/policy knows."""
    folder = files("conf") / "policy"
    return sorted(Path(f.name).stem for f in folder.iterdir() if f.name.endswith(".yaml"))


def policy_config(name: str) -> PolicyConfig:
    """The settings of conf/policy/<name>.yaml. Raises ValueError where there is no such policy."""
    if name not in policy_names():
        raise ValueError(f"policy={name} is not known; choose one of {', '.join(policy_names())}")
    text = (files("conf") / "policy" / f"{name}.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    module, _, cls = values.pop("_target_").rpartition(".")
    return getattr(importlib.import_module(module), cls)(**values)
