"""Inside a causal LM of transformers: its parts, the masks it takes, layers computed twice."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Settings that change logits outside of layers, norm and head: those would not give the law.
LOGIT_CHANGES = ("final_logit_softcapping", "logit_softcapping", "logits_scaling", "logit_scale")


def plain_head(model: Any) -> bool:
    """Whether this causal LM's logits are its inner model's states times a bias-free matrix."""
    head = model.get_output_embeddings()
    scaled = any(getattr(model.config, name, None) not in (None, 1, 1.0) for name in LOGIT_CHANGES)
    plain = isinstance(head, nn.Linear) and head.bias is None and not scaled
    return plain and inner_model(model) is not model


def inner_model(model: Any) -> nn.Module:
    """The part below the head, adapters included; the model itself where it cannot be told."""
    return getattr(model, model.base_model_prefix, model) if model.base_model_prefix else model


def fit_mask(mask: Tensor | None, config: Any, dtype: torch.dtype) -> Tensor | None:
    """A mask as this model's attention takes it; one per row of tokens passes as it is.

    Bool [B, 1, T, T] stays bool for sdpa and becomes a summand for eager attention.
    """
    if mask is None or mask.ndim == 2:
        return mask
    window = getattr(config, "sliding_window", None)
    if window is not None and int(mask.sum(-1).max()) > window:
        raise ValueError(
            f"packed answers of more than sliding_window={window} tokens would see beyond their "
            "window; lower max_tokens, or do not pack"
        )
    kind = config._attn_implementation
    if kind == "sdpa":
        return mask
    if kind != "eager":
        raise ValueError(f"attention {kind} cannot take packed answers; load the model with sdpa")
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def only(values: Tensor, keep: Tensor | None) -> Tensor:
    """Of values [B, T, ...] those kept, [N, ...]; all where None.

    `keep` is bool [B, T], or int64 [N], counted through all rows: then nothing waits for a device.
    """
    if keep is None:
        return values
    return values[keep] if keep.dtype == torch.bool else values.flatten(0, 1)[keep]


def set_checkpointing(model: nn.Module, enabled: bool) -> None:
    """Turn the checkpointing of transformers' layers on or off; see `computed_twice`."""
    layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    if enabled and not layers:
        raise ValueError(
            f"the layers of {type(model).__name__} cannot be checkpointed; turn checkpointing off"
        )
    layer: Any
    for layer in layers:
        layer.gradient_checkpointing = enabled
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


@contextmanager
def computed_twice(model: nn.Module) -> Iterator[None]:
    """Let checkpointed layers checkpoint while gradients are recorded, though in evaluation mode.

    transformers checkpoints in training mode only, where it also drops caches and turns dropout on;
    so just the layers' own flags change, not those of the modules in them, and just for this pass.
    """
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    before = [layer.training for layer in layers]
    try:
        for layer in layers:
            layer.training = torch.is_grad_enabled()
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            layer.training = training


def cut_trunk(donor: nn.Module, layers: list[int], dtype: torch.dtype, copied: bool) -> nn.Module:
    """The donor's inner model with only these layers (none named: all), without its embedding."""
    inner: Any = donor.model
    depth = len(inner.layers)
    if not all(-depth <= layer < depth for layer in layers):
        raise ValueError(
            f"layers={layers} names a layer that the model does not have; "
            f"it has {depth}: 0 to {depth - 1}, or -1 to {-depth} from the end"
        )
    chosen = [layer % depth for layer in layers] or list(range(depth))
    config = copy.deepcopy(inner.config)
    config.num_hidden_layers = len(chosen)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in chosen]
    with torch.device("meta"):  # no memory and no time for weights that are replaced below
        trunk = type(inner)(config)
    for new, layer in zip(trunk.layers, chosen, strict=True):
        _adopt(new, inner.layers[layer], dtype, copied)
    _adopt(trunk.norm, inner.norm, dtype, copied)
    trunk.rotary_emb = copy.deepcopy(inner.rotary_emb)  # its frequencies stay float32
    trunk.embed_tokens = None
    stray = [name for name, tensor in trunk.state_dict().items() if tensor.is_meta]
    assert not stray, f"weights without a donor: {stray}"
    return trunk.eval().requires_grad_(True)


def _adopt(new: nn.Module, old: nn.Module, dtype: torch.dtype, copied: bool) -> None:
    state = old.state_dict()
    new.load_state_dict(
        {name: state[name].detach().to(dtype, copy=copied) for name in state}, assign=True
    )
