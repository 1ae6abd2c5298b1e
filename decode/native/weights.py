"""The weights of a loaded transformers model, laid out for the native forward.

They are taken over layer by layer, so that no more than one layer is ever there twice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decode.native.architecture import UnsupportedModelError
from decode.native.products import Blocked, Product, Stacked

LAYOUTS = ("stacked", "blocked")


@dataclass(frozen=True)
class Layer:
    """One block of the model."""

    input_norm: Tensor  # [hidden size]
    qkv: Product
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None
    output: Product
    mlp_norm: Tensor
    gate: Product
    up: Product
    down: Product

    @property
    def products(self) -> tuple[Product, ...]:
        return (self.qkv, self.output, self.gate, self.up, self.down)


@dataclass(frozen=True)
class Weights:
    """All of them."""

    embedding: Tensor  # [V, hidden size], the module's own, of any type
    layers: Sequence[Layer]
    norm: Tensor  # its type is that of the activations
    head: Product  # of any type

    def products(self) -> Iterator[Product]:
        for layer in self.layers:
            yield from layer.products
        yield self.head

    def restore(self) -> None:
        """See to it that the model they were taken from is whole."""
        with torch.inference_mode(False):  # it may be trained, whoever asks for it first
            for product in self.products():
                product.restore()

    def num_bytes(self, model: Any) -> int:
        """Of the products' weights and of what the model holds beside them."""
        held = [product.weight for product in self.products()]
        held += [p.detach() for p in model.parameters() if not p.is_meta]
        storages = {_storage_key(tensor): tensor for tensor in held}
        return sum(_storage_bytes(tensor) for tensor in storages.values())


def take_weights(model: Any, layout: str) -> Weights:
    """Lay out a model's weights. "stacked" leaves the model whole; "blocked" empties its linear
    modules, but for a head that is the embedding too and so is there twice.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout} is not known; use {' or '.join(LAYOUTS)}")
    check_modules(model)
    make: Callable[..., Product] = Blocked if layout == "blocked" else Stacked
    inner, head = model.model, model.lm_head
    shared = head.weight is inner.embed_tokens.weight
    return Weights(
        embedding=inner.embed_tokens.weight.detach(),
        layers=[take_layer(layer, make) for layer in inner.layers],
        norm=inner.norm.weight.detach(),
        head=Blocked([head], let_go=not shared) if layout == "blocked" else Stacked([head]),
    )


def check_modules(model: Any) -> None:
    """UnsupportedModelError where a matrix is wrapped, quantised or spread over devices."""
    odd = {
        type(module).__name__
        for module in model.modules()
        if isinstance(module, nn.Linear) or hasattr(module, "in_features")
        if type(module) is not nn.Linear
    }
    devices = {(p.device, p.dtype) for p in model.parameters()}
    if odd or len(devices) > 1:
        what = f"modules of class {', '.join(sorted(odd))}" if odd else "several devices or dtypes"
        raise UnsupportedModelError(f"{type(model).__name__} has {what}, not plain matrices")


@torch.no_grad()
def take_layer(layer: Any, make: Callable[..., Product]) -> Layer:
    """One of transformers' layers; `make` lays out modules that are multiplied together."""
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (None if norm is None else norm.weight.detach() for norm in norms)
    return Layer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=make([attention.q_proj, attention.k_proj, attention.v_proj]),
        query_norm=query_norm,
        key_norm=key_norm,
        output=make([attention.o_proj]),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate=make([mlp.gate_proj]),
        up=make([mlp.up_proj]),
        down=make([mlp.down_proj]),
    )


def _storage_key(tensor: Tensor) -> int:
    if tensor.layout is torch.strided:
        return tensor.untyped_storage().data_ptr()
    return id(tensor)


def _storage_bytes(tensor: Tensor) -> int:
    if tensor.layout is torch.strided:
        return tensor.untyped_storage().nbytes()
    return tensor.numel() * tensor.element_size()
