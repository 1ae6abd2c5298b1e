"""What an LM drafter's sessions read tokens with: transformers' modules, or our own forward.

Our own forward (decode/native) knows cuts of the Llama family. It works on copies of the network's
matrices, laid out as the processor likes them, so what a drafter owns is there twice once it has
drafted on a CPU: the modules keep theirs, since training, scores and files use those at any time.
What it shares with the target is not copied: the embedding is the target's, and so is a whole head,
in the layout that a native target has made of it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from decode.native.architecture import UnsupportedModelError, read_architecture
from decode.native.cache import CacheRow
from decode.native.forward import Forward
from decode.native.products import Blocked, Product, Stacked, blocked_is_possible
from decode.native.rope import RopeTable
from decode.native.target import PREFILL_CHUNK
from decode.native.weights import Weights, check_modules, take_layer
from drafters.base import TargetParts
from drafters.networks import CutNetwork, DraftNetwork

log = logging.getLogger(__name__)

BACKENDS = ("auto", "transformers")


class RowReader(Protocol):
    """One row's keys and values."""

    def forget(self, num_tokens: int) -> None:
        """Drop that many tokens from the end."""

    def next_logits(self, token_ids: Sequence[int]) -> Tensor:  # [C]
        """Read more tokens; the law of the token after the last."""


class Reader(Protocol):
    """A network as sessions use it."""

    name: str  # "native" or "transformers"
    copied_bytes: int  # of weights beside the network's own; drafters on one base share some

    def open(self) -> RowReader:
        """A fresh row."""


def make_reader(network: DraftNetwork, parts: TargetParts, backend: str = "auto") -> Reader:
    """The fastest reader that there is for this network where it is now."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend} of a drafter is not known; use {', '.join(BACKENDS)}")
    if backend == "auto" and type(network) is CutNetwork:
        weight = network.trunk.norm.weight
        if blocked_is_possible(weight.device, weight.dtype):
            try:
                return NativeReader(network, parts)
            except UnsupportedModelError as error:
                log.info("a drafter on the CPU goes through transformers: %s", error)
    return TransformersReader(network)


class NativeReader:
    """A cut through our own forward, over copies of its matrices as they are now.

    Raises UnsupportedModelError where the cut's family is not known.
    """

    name = "native"

    def __init__(self, network: CutNetwork, parts: TargetParts) -> None:
        architecture = read_architecture(network.model_config, network.donor_class)
        check_modules(network.trunk)
        trunk = network.trunk
        norm = trunk.norm.weight.detach()
        rope = RopeTable(trunk.rotary_emb, architecture.head_dim, norm.dtype)
        layers = [take_layer(layer, laid_out) for layer in trunk.layers]
        copies = [product for layer in layers for product in layer.products]
        head = shared_head(network, parts)
        if head is None:
            head = laid_out([bare_linear(network.head_weight().detach())])
            copies.append(head)
        self.copied_bytes = sum(p.weight.numel() * p.weight.element_size() for p in copies)
        weights = Weights(network.embedding_weight(), layers, norm, head)
        self._forward = Forward(architecture, weights, rope, pinned=False)

    def open(self) -> "NativeRow":
        return NativeRow(self._forward)


class NativeRow:
    """A row of the static cache."""

    def __init__(self, forward: Forward) -> None:
        norm = forward.weights.norm
        self._forward = forward
        self._row = CacheRow(forward.architecture, norm.dtype, norm.device)

    def forget(self, num_tokens: int) -> None:
        self._row.length -= num_tokens

    @torch.inference_mode()  # whatever the caller's mode: it may change from step to step
    def next_logits(self, token_ids: Sequence[int]) -> Tensor:
        last = max(0, len(token_ids) - PREFILL_CHUNK)
        for first in range(0, last, PREFILL_CHUNK):
            chunk = token_ids[first : min(first + PREFILL_CHUNK, last)]
            self._forward([self._row], [chunk], with_logits=False)
        return self._forward.last([self._row], [token_ids[last:]])[0]


class TransformersReader:
    """Any network through its own modules."""

    name = "transformers"
    copied_bytes = 0

    def __init__(self, network: DraftNetwork) -> None:
        self._network = network

    def open(self) -> "ModuleRow":
        return ModuleRow(self._network)


class ModuleRow:
    """A growing cache of transformers."""

    def __init__(self, network: DraftNetwork) -> None:
        from transformers import DynamicCache

        self._network = network
        self._device = next(network.parameters()).device
        # Plain layers even for windowed attention: a sliding cache could not be rolled back.
        self._cache = DynamicCache()

    def forget(self, num_tokens: int) -> None:
        self._cache.crop(-num_tokens)

    def next_logits(self, token_ids: Sequence[int]) -> Tensor:
        read = torch.tensor([list(token_ids)], device=self._device)
        return self._network.next_logits(read, self._cache)


class Watched:
    """Tells whether a network's tensors are still those that they were, in microseconds.

    Seen are tensors that were put in others' places, moved, or changed in place; not a change in
    place through `.data`, which PyTorch does not count.
    """

    def __init__(self, network: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str]] = [
            (tensors, name)
            for module in network.modules()
            for tensors in (module._parameters, module._buffers)
            for name in tensors
        ]
        self._stamp = self._now()

    def unchanged(self) -> bool:
        return self._now() == self._stamp

    def _now(self) -> list[tuple[int, int] | None]:
        return [_stamp(tensors.get(name)) for tensors, name in self._places]


def _stamp(tensor: Tensor | None) -> tuple[int, int] | None:
    if tensor is None:
        return None
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


class Copy(Blocked):
    """A product over a copy; holds on to what it was copied from, so that no other tensor can take
    that place in memory and be mistaken for it.
    """

    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        super().__init__(modules, let_go=False)
        biases = [module.bias for module in modules if module.bias is not None]
        self.sources = [tensor.detach() for tensor in [*(m.weight for m in modules), *biases]]


_copies: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()


def laid_out(
    modules: Sequence[nn.Linear], make: Callable[[Sequence[nn.Linear]], Any] = Copy
) -> Any:
    """The product of these modules as they are now; one for all whose weights are the same memory,
    as those of a base and of what is merged on it.
    """
    tensors = [t for module in modules for t in (module.weight, module.bias)]
    key = make, *(t is not None and (_stamp(t), t.shape, t.dtype) for t in tensors)
    found = _copies.get(key)
    if found is None:
        found = make(modules)
        _copies[key] = found
    return found


def shared_head(network: CutNetwork, parts: TargetParts) -> Product | None:
    """The target's own head where that is what answers, never copied; else None."""
    if not network.shares_head:
        return None
    return Stacked([network.full_head_module]) if parts.head is None else parts.head


def bare_linear(weight: Tensor) -> nn.Linear:  # [out, in]
    """A module of these very rows."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
