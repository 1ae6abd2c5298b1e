"""A drafter on disk: drafter.json (what it is, and its weights' digest) and its tensors, in
model.safetensors unless a kind names another file.

Each file appears whole or not at all, the description last; a pair that does not belong together
is refused.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

DESCRIPTION = "drafter.json"
WEIGHTS = "model.safetensors"
FORMAT_VERSION = 1


def save_drafter(
    folder: Path,
    kind: str,
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    file: str = WEIGHTS,
) -> None:
    """Write a drafter of this kind; `facts` is what its loader needs to know, as plain values."""
    folder.mkdir(parents=True, exist_ok=True)
    description: dict[str, Any] = {"format_version": FORMAT_VERSION, "kind": kind, **facts}
    if tensors is not None:
        write_tensors(folder / file, tensors)
        description["weights_sha256"] = _sha256(folder / file)
    partial = folder / (DESCRIPTION + ".partial")
    partial.write_text(json.dumps(description, indent=2, ensure_ascii=False), encoding="utf-8")
    _commit(partial, folder / DESCRIPTION)


def read_description(folder: Path, kind: str) -> dict[str, Any]:
    """What drafter.json says, which must be of this kind and of a format that is understood."""
    path = folder / DESCRIPTION
    if not path.exists():
        raise ValueError(
            f"{path} does not exist; {folder} holds no finished drafter: train or export it again"
        )
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}); delete {folder} and make the drafter again"
        ) from error
    if not isinstance(description, dict):
        raise ValueError(f"{path} describes nothing; delete {folder} and make the drafter again")
    found = (description.get("kind"), description.get("format_version"))
    if found != (kind, FORMAT_VERSION):
        raise ValueError(
            f"{path} describes kind {found[0]!r} in format {found[1]!r}, but {kind!r} in format "
            f"{FORMAT_VERSION} is needed here; name the folder of a matching drafter"
        )
    return description


def read_tensors(
    folder: Path, description: Mapping[str, Any], file: str = WEIGHTS
) -> dict[str, Tensor]:
    """The weights that belong to the description, on the CPU."""
    path = folder / file
    if not path.exists():
        raise ValueError(f"{path} does not exist; make the drafter in {folder} again")
    if _sha256(path) != description.get("weights_sha256"):
        raise ValueError(
            f"{path} differs from the digest in {DESCRIPTION} (damaged, truncated or replaced); "
            f"delete {folder} and make the drafter again"
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a safetensors file ({error}); make the drafter again"
        ) from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write safetensors so that a reader sees the old file or the new one, never half of it."""
    partial = path.with_name(path.name + ".partial")
    owned = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(owned, partial, metadata={"format": "pt"})
    _commit(partial, path)


def require_same_settings(
    folder: Path, description: Mapping[str, Any], ours: Mapping[str, Any], fixed: Iterable[str]
) -> None:
    """Refuse a description with other facts, or other values of the fixed settings, than ours."""
    theirs = {**description, **description.get("config", {})}
    wanted = {name: value for name, value in ours.items() if name != "config"}
    for name, value in {**wanted, **{key: ours["config"][key] for key in fixed}}.items():
        if theirs.get(name) != value:
            raise ValueError(
                f"{folder} holds a drafter with {name}={theirs.get(name)}, but {name}={value} is "
                "needed here; use the settings and the target that it was trained with"
            )


def require_same_shapes(
    folder: Path, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> None:
    """Refuse tensors that are not, name by name, of the shapes of ours."""
    a, b = ({name: t.shape for name, t in tensors.items()} for tensors in (ours, theirs))
    if wrong := {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}:
        raise ValueError(
            f"{folder} does not fit this drafter (tensor {min(wrong)} differs in shape or is "
            "missing); use the settings and the target that it was trained with"
        )


@torch.no_grad()
def copy_tensors(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Overwrite each tensor with the one of its name."""
    for name, tensor in into.items():
        tensor.copy_(tensors[name])


def _commit(partial: Path, path: Path) -> None:
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
