"""What a stage is given, made by hand: a tiny target, prompts as prepare leaves them, a runtime."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict

from pipeline.models import TargetConfig
from pipeline.runtime import Runtime
from pipeline.stage import Workspace

RUNTIME = Runtime(device="cpu", threads=1, clock="system")
GPU = Runtime(device="cuda", threads=1, clock="system")


def tiny_config(folder: Path) -> TargetConfig:
    return TargetConfig(
        name_or_path=str(folder),
        revision=None,
        wheel=None,
        wheel_sha256=None,
        dtype="float32",
        trust_remote_code=False,
        backend="transformers",
        exactness="law",
    )


def prompt(number: int, domain: str, words: int = 3, response: str | None = None) -> dict[str, Any]:
    text = " ".join(f"w{(number * 7 + place) % 92}" for place in range(words))
    return {
        "id": f"{domain}-{number}",
        "domain": domain,
        "family": f"{domain}-family-{number % 2}",
        "text": text,
        "messages_json": json.dumps([{"role": "user", "content": text}]),
        "response": response,
    }


def write_prompts(folder: Path, splits: Mapping[str, list[dict[str, Any]]]) -> Path:
    """A finished prepare artifact, as far as readers look."""
    DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk(
        str(folder / "datasets")
    )
    return folder


def workspace(
    groups: Mapping[str, Any],
    inputs: Mapping[str, Path],
    out: Path,
    seed: int = 3,
    runtime: Runtime = RUNTIME,
) -> Workspace:
    out.mkdir(parents=True, exist_ok=True)
    return Workspace(groups, inputs, out, seed, runtime)
