"""What a model of the Llama family is made of, by its Hugging Face config; or why it is none.

Nothing here knows a device: every native backend shares it.
"""

from dataclasses import dataclass
from typing import Any

FAMILY = {  # class of the causal LM -> its name in words
    "LlamaForCausalLM": "Llama",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen2",
    "Qwen3ForCausalLM": "Qwen3",
}
# Kinds whose angle follows from the position alone. "dynamic" stretches only past the longest
# position of the config, where no row ever is.
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


class UnsupportedModelError(ValueError):
    """The native backend has no forward for this model; the transformers backend may have one."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The numbers that a forward needs beside the weights."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_context: int
    tied: bool  # the head is the embedding
    # by layer: how many last positions it sees, its own included; None: all
    windows: tuple[int | None, ...]

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def group_size(self) -> int:
        """Query heads that share one head of keys and values."""
        return self.num_heads // self.num_kv_heads


def read_architecture(config: Any, model_class: str) -> Architecture:
    """The architecture of a causal LM of this class; UnsupportedModelError where there is none."""
    if model_class not in FAMILY:
        raise UnsupportedModelError(f"{model_class} is none of {', '.join(FAMILY)}")
    if config.hidden_act != "silu":
        raise UnsupportedModelError(f"hidden_act={config.hidden_act} is not silu")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(f"rope_type={kind} is none of {', '.join(ROPE_KINDS)}")
    heads = config.num_attention_heads
    return Architecture(
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        norm_eps=config.rms_norm_eps,
        max_context=config.max_position_embeddings,
        tied=bool(config.tie_word_embeddings),
        windows=_windows(config, model_class),
    )


def _windows(config: Any, model_class: str) -> tuple[int | None, ...]:
    """Sliding windows by layer: Llama has none, Mistral one for all, Qwen says which have it."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if FAMILY[model_class] == "Llama":
        window = None
    if kinds is None or not FAMILY[model_class].startswith("Qwen"):
        return (window,) * config.num_hidden_layers
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(f"layer_types holds {', '.join(sorted(unknown))}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
