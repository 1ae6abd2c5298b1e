"""A base network with low-rank adapters, beside the base and on the base's own tensors.

Every adapter gets a module tree of its own, made of the base's tensors (no weight is copied) with
PEFT's layers in it. So nothing is ever switched: rows of several adapters and of the base decode in
turn without touching a common state, and an adapter costs its own numbers and some empty modules.
"""

import copy
import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from drafters.networks import CutNetwork, DraftNetwork, WholeNetwork

ADAPTER = "default"  # PEFT's name of the one adapter that a tree has
HEAD = "lm_head"  # of the adapters of an output head, as PEFT would name them

Network = TypeVar("Network", bound=DraftNetwork)


class LoraNetwork(DraftNetwork):
    """A base's law, moved by adapters. Only they require gradients; the base's tensors never do."""

    layer_paths: tuple[str, ...]  # what can be adapted, below the root
    transposed: bool  # those layers keep [in, out], as GPT-2's
    path_in_model: str  # where the root sits in the whole Hugging Face model

    @property
    @abstractmethod
    def root(self) -> nn.Module:
        """The module whose linear layers are adapted."""

    @abstractmethod
    def merged(self) -> DraftNetwork:
        """One more tree whose adapted layers have weights of their own: base plus adapter."""

    def start(self, seed: int) -> None:
        """Give the adapters weights: A at random (the same on every device), B zero, so that the
        law is still the base's.
        """
        generator = torch.Generator().manual_seed(seed)
        for _, layer in adapters(self.root):
            a, b = weights_of(layer)
            a, b = first_weights(a.shape, b.shape, layer.base_layer.weight, generator)
            layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight = a, b

    def own_tensors(self) -> dict[str, Tensor]:
        """The adapters, named as PEFT names them below the root."""
        own: dict[str, Tensor] = {}
        for path, layer in adapters(self.root):
            own[f"{path}.lora_A.weight"], own[f"{path}.lora_B.weight"] = weights_of(layer)
        return own


class LoraCut(LoraNetwork, CutNetwork):
    """A cut with adapters in its trunk and, where asked for, on its head."""

    path_in_model = "model."
    head_rank: int  # 0: the head is not adapted
    head_scale: float
    head_a: nn.Parameter  # [rank, H]
    head_b: nn.Parameter  # [C, rank]

    @property
    def root(self) -> nn.Module:
        return self.trunk

    def start(self, seed: int) -> None:
        super().start(seed)
        if self.head_rank:
            num_columns, width = super().head_weight().shape
            a, b = (self.head_rank, width), (num_columns, self.head_rank)
            generator = torch.Generator().manual_seed(seed)
            self.head_a, self.head_b = first_weights(a, b, self.trunk.norm.weight, generator)

    def head_weight(self) -> Tensor:
        rows = super().head_weight()
        if not self.head_rank:
            return rows
        return moved(rows, self.head_a, self.head_b, self.head_scale)

    def own_tensors(self) -> dict[str, Tensor]:
        own = super().own_tensors()
        if self.head_rank:
            own |= {f"{HEAD}.lora_A.weight": self.head_a, f"{HEAD}.lora_B.weight": self.head_b}
        return own

    def merged(self) -> CutNetwork:
        network = twin(self, CutNetwork)
        merge_layers(network.trunk)
        if self.head_rank:
            del network.head_a, network.head_b
            network.head = nn.Parameter(self.head_weight().detach(), requires_grad=False)
        return network.eval()

    def _project(self, states: Tensor) -> Tensor:
        if not self.head_rank:
            return super()._project(states)
        rows = super().head_weight()  # as they are: the sum with B A would be made at every token
        change = linear(linear(states.to(self.head_a.dtype), self.head_a), self.head_b)
        return linear(states.to(rows.dtype), rows) + self.head_scale * change


class LoraWhole(LoraNetwork, WholeNetwork):
    """A whole model with adapters in all but its output head."""

    path_in_model = ""

    @property
    def root(self) -> nn.Module:
        return self.model

    def merged(self) -> WholeNetwork:
        network = twin(self, WholeNetwork)
        merge_layers(network.model)
        return network.eval()


def on_top_of(base: DraftNetwork, head_rank: int, head_scale: float) -> LoraNetwork:
    """A tree on the base's tensors, ready to have PEFT's layers put in and then to start()."""
    from transformers.pytorch_utils import Conv1D  # a linear layer that keeps [in, out]

    network: LoraNetwork
    head: Any = None
    if isinstance(base, CutNetwork):
        network = twin(base, LoraCut)
        network.head_rank, network.head_scale = head_rank, head_scale
    else:
        if head_rank:
            raise ValueError(
                f"train_head=true cannot be had on a whole {base.model_config.model_type} model; "
                "set train_head=false, or choose a base that is a cut"
            )
        network = twin(base, LoraWhole)
        head = network.model.get_output_embeddings()
    layers = {
        path: module
        for path, module in network.root.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    network.layer_paths = tuple(layers)
    network.transposed = any(isinstance(layer, Conv1D) for layer in layers.values())
    return network


def twin(network: DraftNetwork, kind: type[Network]) -> Network:
    """A second module tree on the same tensors, none of which asks for a gradient in it.

    `kind` is its class, which must add nothing to a module's state (all of it is in __dict__).
    """
    memo: dict[int, Any] = {
        id(tensor): nn.Parameter(tensor.detach(), requires_grad=False)
        for tensor in network.parameters()
    }
    memo |= {id(tensor): tensor.detach() for tensor in network.buffers()}
    inside = {id(module) for module in network.modules()}
    borrowed = [part for part in getattr(network, "_frozen", ()) if id(part) not in inside]
    memo |= {id(part): part for part in borrowed}  # the target's own embedding and head
    other = kind.__new__(kind)
    other.__dict__.update(copy.deepcopy(network.__dict__, memo))
    return other


def adapters(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's layers with the paths of the layers that they adapt."""
    for path, module in root.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield path, module


def weights_of(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:  # [rank, in], [out, rank]
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def first_weights(
    a: tuple[int, ...], b: tuple[int, ...], like: Tensor, generator: torch.Generator
) -> tuple[nn.Parameter, nn.Parameter]:
    """A as nn.Linear begins, drawn on the CPU in float32; B zero."""
    values = torch.empty(a)
    nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    return nn.Parameter(values.to(like)), nn.Parameter(torch.zeros(b).to(like))


def merge_layers(root: nn.Module) -> None:
    """Put plain layers, with the adapters added to weights of their own, back in their places."""
    for path, layer in list(adapters(root)):
        plain: Any = layer.base_layer
        plain.weight = nn.Parameter(_merged_weight(layer), requires_grad=False)
        parent, _, name = path.rpartition(".")
        setattr(root.get_submodule(parent), name, plain)


def _merged_weight(layer: Any) -> Tensor:
    base = layer.base_layer.weight.detach()
    a, b = (weight.detach() for weight in weights_of(layer))
    if layer.fan_in_fan_out:
        return moved(base.T, a, b, layer.scaling[ADAPTER]).T.contiguous()
    return moved(base, a, b, layer.scaling[ADAPTER])


def moved(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Base plus adapter, rounded once, to the adapter's precision."""
    return (weight.float() + scale * (b.float() @ a.float())).to(a.dtype)
