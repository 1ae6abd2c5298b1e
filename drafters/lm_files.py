"""An LM drafter on disk, in two layouts.

"own": what training made and nothing else; the target gives the rest back. Small, for this project.
"pretrained": a whole Hugging Face model for any other program. With a draft vocabulary its head has
the drafter's rows at the draft ids and its donor's rows elsewhere; `d2t` in draft_vocab.safetensors
lists the draft ids themselves, ascending (not offsets), so that both laws can be told apart.
"""

import copy
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from drafters.checkpoint import (
    WEIGHTS,
    read_description,
    read_tensors,
    save_drafter,
    write_tensors,
)
from drafters.networks import CutNetwork

if TYPE_CHECKING:
    from drafters.lm import LmDrafter

OWN = "own"
PRETRAINED = "pretrained"
DRAFT_VOCAB = "draft_vocab.safetensors"
FIXED = ("source", "layers", "num_draft_vocab", "train_head")  # settings that shape the tensors


def save_lm(drafter: "LmDrafter", folder: Path) -> None:
    """Write the "own" layout."""
    save_drafter(folder, "lm", _facts(drafter, OWN), drafter.trainable.own_tensors())


def load_lm(drafter: "LmDrafter", folder: Path) -> None:
    """Put what the "own" layout holds into a drafter that was built with the same settings."""
    description = read_description(folder, "lm")
    ours = _facts(drafter, OWN)
    theirs = {**description, **description.get("config", {})}
    for name, value in {**ours, **{key: ours["config"][key] for key in FIXED}}.items():
        if name != "config" and theirs.get(name) != value:
            raise ValueError(
                f"{folder} holds a drafter with {name}={theirs.get(name)}, but {name}={value} is "
                "needed here; use the settings and the target that it was trained with"
            )
    tensors = read_tensors(folder, description)
    own = drafter.trainable.own_tensors()
    if wrong := {n for n in own.keys() | tensors.keys() if _shape(own, n) != _shape(tensors, n)}:
        raise ValueError(
            f"{folder} does not fit this drafter (tensor {min(wrong)} differs in shape or is "
            "missing); use the settings and the target that it was trained with"
        )
    if "draft_ids" in tensors:
        drafter.set_draft_vocab(tensors["draft_ids"])
        own = drafter.trainable.own_tensors()
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def export_lm(drafter: "LmDrafter", folder: Path) -> None:
    """Write the "pretrained" layout; drafter.json comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    network: Any = drafter.trainable
    drafter.parts.tokenizer.save_pretrained(folder)
    if isinstance(network, CutNetwork):
        _write_model(network, folder)
        if generation := getattr(drafter.parts.model, "generation_config", None):
            generation.save_pretrained(folder)
    else:
        network.model.save_pretrained(folder)
    if drafter.draft_ids is not None:
        write_tensors(folder / DRAFT_VOCAB, {"d2t": drafter.draft_ids})
    save_drafter(folder, "lm", _facts(drafter, PRETRAINED))


def read_draft_vocab(folder: Path) -> Tensor | None:
    """The draft ids of a "pretrained" layout; None where it has its whole vocabulary."""
    path = folder / DRAFT_VOCAB
    return load_file(path)["d2t"] if path.exists() else None


def _write_model(network: CutNetwork, folder: Path) -> None:
    config = copy.deepcopy(network.model_config)
    config.architectures = [network.donor_class]
    config.tie_word_embeddings = False  # the head has rows of its own
    config.dtype = network.dtype
    config.save_pretrained(folder)
    trunk = {f"model.{name}": tensor for name, tensor in network.trunk.state_dict().items()}
    embedding = network.embedding_weight().to(network.dtype)
    ends = {"model.embed_tokens.weight": embedding, "lm_head.weight": network.full_head_weight()}
    write_tensors(folder / WEIGHTS, {**trunk, **ends})


def _facts(drafter: "LmDrafter", layout: str) -> dict[str, Any]:
    config = asdict(drafter.config)
    return {"layout": layout, "config": config, "vocab_size": drafter.vocab_size}


def _shape(tensors: dict[str, Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None
