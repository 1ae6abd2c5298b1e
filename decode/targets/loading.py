"""Causal LMs and tokenizers from Hugging Face files: whole, or one sentence says why not.

Here and wherever else it is not needed to define something, transformers is imported when it is
first used: that takes a second, which a menu or a typing error should not cost.
"""

from typing import Any

import torch

# What transformers raises where files are missing, damaged, unknown or do not fit one another.
TROUBLES = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError)


def load_causal_lm(name: str, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """The model on the CPU. Only safetensors are read, and none of its tensors is made up.

    Raises ValueError where no causal LM can be loaded or a tensor is missing.
    """
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except TROUBLES as error:
        raise ValueError(
            f"no causal LM could be loaded from {name} ({_reason(error)}); give a model folder "
            "with config.json, safetensors and tokenizer, or a Hub name"
        ) from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"{name} lacks the tensor {missing[0]}{more}, which would be random numbers; "
            "download or save the model again"
        )
    return model


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer; raises ValueError where its files are missing or damaged."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except TROUBLES as error:
        raise ValueError(
            f"no tokenizer could be loaded from {name} ({_reason(error)}); put tokenizer.json and "
            "tokenizer_config.json beside the weights"
        ) from error


def _reason(error: Exception) -> str:
    """The first line of a library's message, of which there may be many."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".: ")
