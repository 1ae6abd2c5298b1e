"""A LoRA drafter on disk: its adapters and a fingerprint of the base that they belong to.

"own": drafter.json and the adapters, for this project. "adapter": what PEFT loads onto the base's
export. Merged into a whole Hugging Face model it is an lm drafter like any other (lm_files).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafters.checkpoint import (
    DESCRIPTION,
    copy_tensors,
    read_description,
    read_tensors,
    require_same_settings,
    require_same_shapes,
    save_drafter,
    write_tensors,
)
from drafters.lm_files import OWN
from drafters.lora_network import HEAD, LoraNetwork

if TYPE_CHECKING:
    from drafters.lora import LoraDrafter

IN_MODEL = "base_model.model."  # PEFT's path of the model that it wraps
ROUNDED = (torch.bfloat16, torch.float16)
FIXED = (
    "rank",
    "alpha",
    "target_modules",
    "train_head",
)  # settings that shape or scale the tensors
PEFT_SETTINGS, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def save_lora(drafter: "LoraDrafter", folder: Path) -> None:
    """Write the "own" layout."""
    facts = {**_facts(drafter), "base_digest": drafter.base_digest}
    save_drafter(folder, "lora", facts, drafter.adapted.own_tensors())


def load_lora(drafter: "LoraDrafter", folder: Path) -> None:
    """Put the adapters of the "own" layout into a drafter built with the same settings and base."""
    description = read_description(folder, "lora")
    require_same_settings(folder, description, _facts(drafter), FIXED)
    digest, ours = description.get("base_digest") or {}, drafter.base_digest
    dtype = next(drafter.base.trainable.parameters()).dtype
    rounded = "float16" if dtype == torch.float16 else "bfloat16"
    if digest.get(rounded) != ours[rounded]:
        raise ValueError(
            f"{folder} holds adapters for other weights than those of {drafter.config.base} here; "
            "use the base that they were trained on, or train them again"
        )
    tensors = read_tensors(folder, description)
    own = drafter.adapted.own_tensors()
    require_same_shapes(folder, own, tensors)
    copy_tensors(own, tensors)


def fingerprint(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Digests of the weights rounded to two dtypes.

    A base is trained in float32 and may decode in 16 bits. Rounded to bfloat16, float32 and
    bfloat16 copies of it are equal; float16 is rounded otherwise and has a digest of its own.
    Changes below that rounding pass.
    """
    return {str(dtype).removeprefix("torch."): _digest(tensors, dtype) for dtype in ROUNDED}


def _digest(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        if tensor.is_floating_point():
            tensor = tensor.to(dtype).view(torch.int16)
        digest.update(f"{name} {list(tensor.shape)} ".encode())
        digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()


def base_folder(folder: Path, base: str) -> Path:
    """Where the base lies, seen from the adapters: as exports have it, or side by side."""
    places = (folder.parent.parent / base / OWN, folder.parent / base)
    for place in places:
        if (place / DESCRIPTION).exists():
            return place
    raise ValueError(
        f"{folder} holds adapters for {base}, which is neither in {places[0]} nor in {places[1]}; "
        "put the base drafter's folder there"
    )


def write_adapter(network: LoraNetwork, settings: Any, vocab_size: int, folder: Path) -> None:
    """PEFT's settings, and the tensors as PEFT names them in a whole model."""
    settings.save_pretrained(str(folder))
    path = folder / PEFT_SETTINGS
    content = json.loads(path.read_text(encoding="utf-8"))
    content["target_modules"].sort()  # PEFT keeps a set, whose order differs between processes
    path.write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")
    tensors = {}
    for name, tensor in network.own_tensors().items():
        if not name.startswith(HEAD):
            tensors[f"{IN_MODEL}{network.path_in_model}{name}"] = tensor
            continue
        if name.endswith("lora_B.weight") and network.draft_ids is not None:
            tensor = _spread(tensor.detach(), network.draft_ids, vocab_size)
        tensors[f"{IN_MODEL}{name}"] = tensor
    write_tensors(folder / PEFT_WEIGHTS, tensors)


def _spread(rows: Tensor, draft_ids: Tensor, vocab_size: int) -> Tensor:
    """The rows at the draft ids of a whole head; zero, hence the base's law, elsewhere."""
    whole = rows.new_zeros(vocab_size, rows.shape[1])
    whole[draft_ids] = rows
    return whole


def _facts(drafter: "LoraDrafter") -> dict[str, object]:
    return {"layout": OWN, "config": asdict(drafter.config), "vocab_size": drafter.vocab_size}
