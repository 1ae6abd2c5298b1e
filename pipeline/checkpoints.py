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
from pipeline.team import full, share_of

PREFIX = "checkpoint-"
ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")
PARAMETERS, MOMENTS, STATE = "parameters.safetensors", "moments.safetensors", "state.json"


def save_checkpoint(
    out: Path,
    step: int,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    writes: bool = True,
) -> None:
    """Write the state after `step`, then forget the one before it.

    Where several processes hold shares of it all must call this; only one `writes`.
    """
    parameters = trained(network)
    tensors = {
        PARAMETERS: _whole(parameters, writes),
        MOMENTS: _whole(
            {
                f"{name}/{key}": optimizer.state[parameter][key]
                for name, parameter in parameters.items()
                for key in ADAMW_STATE
            },
            writes,
        ),
    }
    if writes:
        _write(out, step, tensors, state)


def _whole(shares: Mapping[str, Tensor], wanted: bool) -> dict[str, Tensor]:
    """Tensors on the CPU, gathered one after another; nothing is kept where it is not wanted."""
    gathered = {}
    for name, share in shares.items():
        whole = full(share.detach())
        if wanted:
            gathered[name] = whole.cpu().contiguous()
    return gathered


def _write(
    out: Path, step: int, tensors: Mapping[str, dict[str, Tensor]], state: Mapping[str, Any]
) -> None:
    folder = out / f"{PREFIX}{step:08d}"
    partial = out / f"{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, content in tensors.items():
        save_file(content, partial / name)
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
    fused = any(group["fused"] for group in optimizer.param_groups)  # it counts on the device
    for name, parameter in parameters.items():
        parameter.data.copy_(share_of(values[name], parameter.data))
        optimizer.state[parameter] = {
            key: share_of(moments[f"{name}/{key}"], parameter.data).to(parameter.device)
            for key in ADAMW_STATE
            if key != "step"
        }
        count = moments[f"{name}/step"]
        optimizer.state[parameter]["step"] = count.to(parameter.device) if fused else count
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
