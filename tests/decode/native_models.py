"""Small random models of the Llama family in odd shapes, every norm and bias far from 1 and 0."""

from typing import Any

import torch
import transformers

from decode.native.target import NativeTarget
from decode.targets.transformers import TransformersTarget

VOCAB_SIZE = 53
# Six query heads of size 10 on a width of 36: head_dim is not hidden size / heads.
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 700,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "eos_token_id": 52,
    "pad_token_id": 52,
}
SOME_WINDOWS = ["full_attention", "sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, biases, untied, no groups": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "num_key_value_heads": 6,
        },
    ),
    "mistral, window": ("Mistral", {"sliding_window": 7, "num_key_value_heads": 1}),
    "mistral, no window": ("Mistral", {"sliding_window": None, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"num_attention_heads": 6, "head_dim": 6}),
    "qwen2, windows": (
        "Qwen2",
        {
            "head_dim": 6,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": SOME_WINDOWS,
        },
    ),
    "qwen3": ("Qwen3", {}),
    "llama, even": ("Llama", {"hidden_size": 96, "head_dim": 16, "intermediate_size": 160}),
    "qwen3, biases, untied": ("Qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


def build(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A causal LM of that class, nothing in it as it was initialised."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                tensor.normal_(0.0, 0.5)
    return model.to(dtype)


def family(name: str, dtype: torch.dtype = torch.float32) -> Any:
    kind, changes = FAMILIES[name]
    return build(kind, dtype=dtype, **changes)


def ids(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (count,), generator=generator).tolist()


def logits(target: TransformersTarget | NativeTarget, text: list[int], width: int) -> torch.Tensor:
    """What follows each of the last `width` tokens, the rest read as a prompt. [width, V]."""
    row = target.open()
    if len(text) > width:
        target.prefill(row, text[:-width])
    return target.score([row], [text[-width:]])[0]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.double().cpu(), wanted.double().cpu()
    return float((found - wanted).abs().max() / wanted.abs().max())
