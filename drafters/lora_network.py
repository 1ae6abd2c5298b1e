"""A base network with low-rank adapters, beside the base and on the base's own tensors.

Every adapter gets a module tree of its own, made of the base's tensors (no weight is copied) with
PEFT's layers in it. So nothing is ever switched: rows of several adapters and of the base decode in
turn without touching a common state, and an adapter costs its own numbers and some empty modules.
"""

import copy
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drafters.networks import CutNetwork, DraftNetwork

if TYPE_CHECKING:
    from transformers import DynamicCache

ADAPTER = "default"  # PEFT's name of the one adapter that a tree has


class LoraNetwork(DraftNetwork):
    """The base's law, moved by adapters. Only they require gradients; the base's tensors never do.

    `root` is the module whose linear layers can be adapted: the trunk of a cut, or a whole model.
    """

    def __init__(self, base: DraftNetwork) -> None:
        super().__init__()
        self.inner: Any = twin(base)
        self.model_config = base.model_config
        self.register_buffer("draft_ids", base.draft_ids, persistent=False)
        layers = linear_layers(self.inner)
        self.layer_paths = tuple(layers)  # what can be adapted, below the root
        self.transposed = any(not isinstance(layer, nn.Linear) for layer in layers.values())

    @property
    def root(self) -> nn.Module:
        return root_of(self.inner)

    @property
    def path_in_model(self) -> str:
        """Where the root sits in the whole Hugging Face model."""
        return "model." if isinstance(self.inner, CutNetwork) else ""

    def start(self, seed: int) -> None:
        """Give the adapters weights: A at random (the same on every device), B zero, so that the
        law is still the base's.
        """
        generator = torch.Generator().manual_seed(seed)
        for _, layer in adapters(self.root):
            a, b, like = *weights_of(layer), layer.base_layer.weight
            values = torch.empty(a.shape)
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
            layer.lora_A[ADAPTER].weight = nn.Parameter(values.to(like))
            layer.lora_B[ADAPTER].weight = nn.Parameter(torch.zeros(b.shape).to(like))

    def merged(self) -> DraftNetwork:
        """One more tree whose adapted layers have weights of their own: base plus adapter."""
        network = twin(self.inner)
        root = root_of(network)
        for path, layer in list(adapters(root)):
            linear: Any = layer.base_layer
            linear.weight = nn.Parameter(_merged_weight(layer), requires_grad=False)
            parent, _, name = path.rpartition(".")
            setattr(root.get_submodule(parent), name, linear)
        return network.eval()

    def forward(
        self, token_ids: Tensor, attention_mask: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        return self.inner(token_ids, attention_mask, keep)

    def next_logits(self, token_ids: Tensor, cache: "DynamicCache") -> Tensor:
        return self.inner.next_logits(token_ids, cache)

    def own_tensors(self) -> dict[str, Tensor]:
        """The adapters, named as PEFT names them below the root."""
        own = {}
        for path, layer in adapters(self.root):
            own[f"{path}.lora_A.weight"], own[f"{path}.lora_B.weight"] = weights_of(layer)
        return own


def twin(network: DraftNetwork) -> DraftNetwork:
    """A second module tree on the same tensors, none of which asks for a gradient in it."""
    memo: dict[int, Any] = {
        id(tensor): nn.Parameter(tensor.detach(), requires_grad=False)
        for tensor in network.parameters()
    }
    memo |= {id(tensor): tensor.detach() for tensor in network.buffers()}
    inside = {id(module) for module in network.modules()}
    borrowed = [part for part in getattr(network, "_frozen", ()) if id(part) not in inside]
    memo |= {id(part): part for part in borrowed}  # the target's own embedding and head
    return copy.deepcopy(network, memo)


def root_of(network: Any) -> nn.Module:
    """The module of a base network whose layers can be adapted."""
    return network.trunk if isinstance(network, CutNetwork) else network.model


def linear_layers(network: Any) -> dict[str, nn.Module]:
    """What can be adapted, by path below the root: every linear layer but the output head."""
    from transformers.pytorch_utils import Conv1D  # a linear layer that keeps [in, out], as GPT-2

    head = None if isinstance(network, CutNetwork) else network.model.get_output_embeddings()
    return {
        path: module
        for path, module in root_of(network).named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def adapters(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's layers with the paths of the layers that they adapt."""
    for path, module in root.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield path, module


def weights_of(layer: Any) -> tuple[Tensor, Tensor]:  # [rank, in], [out, rank]
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def _merged_weight(layer: Any) -> Tensor:
    """Base plus adapter, rounded once."""
    a, b = (weight.detach().float() for weight in weights_of(layer))
    change = layer.scaling[ADAPTER] * (b @ a)
    base = layer.base_layer.weight.detach()
    return (base.float() + (change.T if layer.fan_in_fan_out else change)).to(base.dtype)
