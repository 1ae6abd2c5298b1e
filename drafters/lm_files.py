"""An LM drafter on disk, in two layouts.

"own": what training made and nothing else; the target gives the rest back. Small, for this project.
"pretrained": a whole Hugging Face model for any other program. With a draft vocabulary its head has
the drafter's rows at the draft ids and its donor's rows elsewhere; `d2t` in draft_vocab.safetensors
lists the draft ids themselves, ascending (not offsets), so that both laws can be told apart.
"""

import copy
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import Tensor

from drafters.base import TargetParts
from drafters.checkpoint import (
    WEIGHTS,
    copy_tensors,
    read_description,
    read_tensors,
    require_same_settings,
    require_same_shapes,
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
    save_drafter(folder, "lm", lm_facts(drafter, OWN), drafter.trainable.own_tensors())


def load_lm(drafter: "LmDrafter", folder: Path) -> None:
    """Put what the "own" layout holds into a drafter that was built with the same settings."""
    description = read_description(folder, "lm")
    require_same_settings(folder, description, lm_facts(drafter, OWN), FIXED)
    tensors = read_tensors(folder, description)
    require_same_shapes(folder, drafter.trainable.own_tensors(), tensors)
    if "draft_ids" in tensors:
        drafter.set_draft_vocab(tensors["draft_ids"])
    copy_tensors(drafter.trainable.own_tensors(), tensors)


def export_lm(network: Any, parts: TargetParts, facts: Mapping[str, Any], folder: Path) -> None:
    """Write the "pretrained" layout of a network; drafter.json, with these facts, comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    parts.tokenizer.save_pretrained(folder)
    if isinstance(network, CutNetwork):
        _write_model(network, folder)
        if generation := getattr(parts.model, "generation_config", None):
            generation.save_pretrained(folder)
    else:
        network.model.save_pretrained(folder)
    if network.draft_ids is not None:
        write_tensors(folder / DRAFT_VOCAB, {"d2t": network.draft_ids})
    save_drafter(folder, "lm", facts)


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


def lm_facts(drafter: "LmDrafter", layout: str) -> dict[str, Any]:
    """What drafter.json says of an LM drafter beside its kind."""
    config = asdict(drafter.config)
    return {"layout": layout, "config": config, "vocab_size": drafter.vocab_size}
