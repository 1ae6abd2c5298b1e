"""Training state on disk: parameters and optimizer moments as safetensors, the rest as JSON.

A checkpoint is a folder that appears under its name when it is whole; only the last one is kept.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.digests import sha256
from pipeline.files import write_json

PREFIX = "checkpoint-"
ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")
PARAMETERS, MOMENTS, STATE = "parameters.safetensors", "moments.safetensors", "state.json"


def save_checkpoint(
    out: Path,
    step: int,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
) -> None:
    """Write the state after `step`, then forget the one before it."""
    folder = out / f"{PREFIX}{step:08d}"
    partial = out / f"{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    parameters = trained(network)
    tensors = {
        PARAMETERS: parameters,
        MOMENTS: {
            f"{name}/{key}": optimizer.state[parameter][key]
            for name, parameter in parameters.items()
            for key in ADAMW_STATE
        },
    }
    for name, content in tensors.items():
        save_file(
            {key: value.detach().cpu().contiguous() for key, value in content.items()},
            partial / name,
        )
        with (partial / name).open("rb") as file:
            os.fsync(file.fileno())
    digests = {name: sha256(partial / name) for name in tensors}
    write_json(partial / STATE, {"step": step, "sha256": digests, **state})
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)
    for old in _folders(out):
        if old != folder:
            shutil.rmtree(old)


def load_checkpoint(
    out: Path, network: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any] | None:
    """Put the last checkpoint, if any, into network and optimizer and return its state."""
    folders = _folders(out)
    if not folders:
        return None
    folder = folders[-1]
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    for name, digest in state["sha256"].items():
        if sha256(folder / name) != digest:
            raise ValueError(
                f"{folder / name} is damaged: its sha256 is not the one in {STATE}; "
                f"delete {folder} to train from the start"
            )
    values, moments = load_file(folder / PARAMETERS), load_file(folder / MOMENTS)
    parameters = trained(network)
    assert set(values) == set(parameters), (
        "a checkpoint belongs to one identity, hence to one network"
    )
    for name, parameter in parameters.items():
        parameter.data.copy_(values[name])
        optimizer.state[parameter] = {
            key: moments[f"{name}/{key}"].to("cpu" if key == "step" else parameter.device)
            for key in ADAMW_STATE
        }
    return state


def delete_checkpoints(out: Path) -> None:
    """Forget all training state; what was trained stays."""
    for folder in [*_folders(out), *out.glob(f"{PREFIX}*.partial")]:
        shutil.rmtree(folder)


def trained(network: nn.Module) -> dict[str, Tensor]:
    """The parameters that training changes, by name."""
    return {name: value for name, value in network.named_parameters() if value.requires_grad}


def _folders(out: Path) -> list[Path]:
    return sorted(path for path in out.glob(f"{PREFIX}*") if path.suffix != ".partial")
