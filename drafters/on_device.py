"""What an LM drafter hands over to draft on the device: its network in the kernels' forward.

The forward works on the network's own tensors and on the target's embedding and head, none of them
copied but for queries, keys and values, whose matrices must lie in one. The networks keep theirs,
since training, scores and files use them at any time.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decode.device.parts import DeviceModel, DeviceParts
from decode.native.architecture import UnsupportedModelError, read_architecture
from decode.native.kernel_forward import KernelForward
from decode.native.products import Stacked, stacked_bias
from decode.native.rope import RopeTable
from decode.native.weights import Layer, Weights, check_modules, take_layer
from drafters.inner import plain_head
from drafters.networks import CutNetwork, DraftNetwork, WholeNetwork
from drafters.readers import bare_linear, laid_out

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A network as the device reads it."""

    parts: DeviceParts
    copied_bytes: int  # of weights beside the network's own; drafters on one base share some


def place(
    network: DraftNetwork, vocab_size: int, num_real_ids: int, max_context: int
) -> Placed | None:
    """The network in the kernels' forward as its weights are now; None, and said, where it has no
    forward there.
    """
    try:
        return _place(network, vocab_size, num_real_ids, max_context)
    except UnsupportedModelError as error:
        log.info("a drafter cannot draft on the device: %s", error)
        return None


def _place(network: DraftNetwork, vocab_size: int, num_real_ids: int, max_context: int) -> Placed:
    source = _source(network)
    architecture = read_architecture(network.model_config, source.model_class)
    check_modules(source.trunk)
    norm = source.trunk.norm.weight.detach()
    found = {(t.dtype, t.device) for t in (norm, source.embedding, source.head)}
    if len(found) > 1:
        raise UnsupportedModelError("its layers, embedding and head are of several types")
    head, draft_ids = answering(source.head, network.draft_ids, vocab_size, num_real_ids)
    layers = [take_layer(layer, together) for layer in source.trunk.layers]
    weights = Weights(source.embedding, layers, norm, head)
    rope = RopeTable(source.trunk.rotary_emb, architecture.head_dim, norm.dtype)
    # A drafter's guesses may follow from the batch; what is verified does not.
    forward = KernelForward(architecture, weights, rope, pinned=False)
    forward.prepare()
    model = DeviceModel(forward, draft_ids, max_context)
    return Placed(DeviceParts(None, model), _copied_bytes(layers, head))


@dataclass(frozen=True)
class _Source:
    """Where a network keeps what the forward needs."""

    model_class: str
    trunk: Any  # layers, norm, rotary_emb
    embedding: Tensor  # [V, H]
    head: Tensor  # [C, H]


def _source(network: DraftNetwork) -> _Source:
    if type(network) is CutNetwork:
        weights = network.embedding_weight(), network.head_weight().detach()
        return _Source(network.donor_class, network.trunk, *weights)
    if type(network) is WholeNetwork and plain_head(network.model):
        embedding = network.model.get_input_embeddings().weight.detach()
        name = type(network.model).__name__
        return _Source(name, network.model.model, embedding, network.head_weight().detach())
    raise UnsupportedModelError(
        f"{type(network).__name__} is no plain network (adapters draft there once they are merged)"
    )


def answering(
    weight: Tensor,  # [columns, H]
    draft_ids: Tensor | None,  # [columns]
    vocab_size: int,
    num_real_ids: int,
) -> tuple[Stacked, Tensor | None]:
    """The head and the target's id of each of its logits (None: all V of them), so that the law is
    that of drafters.vocabulary.widen: -inf where the drafter has none. The rows are not copied.
    """
    if draft_ids is not None:
        return Stacked([bare_linear(weight)]), draft_ids
    if len(weight) < vocab_size:
        known = min(len(weight), num_real_ids)
        head = Stacked([bare_linear(weight[:known])])
        return head, torch.arange(known, device=weight.device)
    head = Stacked([bare_linear(weight[:vocab_size])])
    if num_real_ids < vocab_size:
        head.bias = weight.new_zeros(vocab_size)
        head.bias[num_real_ids:] = -torch.inf
    return head, None


class StackedCopy(Stacked):
    """One matrix of several modules' rows, which stay what they were; holds on to them, so that no
    other tensor can take their place in memory and be mistaken for them.
    """

    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        self.bias = stacked_bias(modules)
        self.weight = torch.cat([module.weight.detach() for module in modules])
        self.sources = [module.weight.detach() for module in modules]
        self.sources += [module.bias.detach() for module in modules if module.bias is not None]


def together(modules: Sequence[nn.Linear]) -> Stacked:
    """The product of these modules as they are now; only several are copied, once for all drafters
    whose weights are the same memory.
    """
    return Stacked(modules) if len(modules) == 1 else laid_out(modules, StackedCopy)


def _copied_bytes(layers: Sequence[Layer], head: Stacked) -> int:
    products = [product for layer in layers for product in layer.products]
    copies = [product.weight for product in products if isinstance(product, StackedCopy)]
    copies += [product.bias for product in [*products, head] if product.bias is not None]
    return sum(tensor.nbytes for tensor in copies)
