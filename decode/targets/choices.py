"""What there is to choose between, and what "auto" stands for; no model is loaded here."""

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from decode.native.architecture import UnsupportedModelError, read_architecture

log = logging.getLogger(__name__)

AUTO = "auto"
BACKENDS = (AUTO, "native", "transformers")
EXACTNESS = ("bitwise", "law")
CAPABILITY = (8, 0)  # of a GPU whose matrix units multiply what the kernels ask of them
UNSAID = {  # stand for what a config.json leaves to its class; no choice depends on them
    "hidden_size": 1,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "rms_norm_eps": 0.0,
    "max_position_embeddings": 1,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def check_choice(backend: str, exactness: str) -> None:
    """Raise ValueError, in one sentence, where there is no such choice."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend} is not known; use {', '.join(BACKENDS)}")
    if exactness not in (AUTO, *EXACTNESS):
        choices = f"{AUTO}, {' or '.join(EXACTNESS)}"
        raise ValueError(f"exactness={exactness} is not known; use {choices}")
    if backend == "transformers" and exactness == "bitwise":
        raise ValueError(
            "exactness=bitwise is not to be had of transformers; use backend=native, or "
            "exactness=auto"
        )


def fast_dtype(device: str) -> str:
    """The dtype in which this hardware multiplies fastest and with float32's range."""
    import torch

    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    capable = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if capable else "float32"


def usual_backend(device: str) -> str:
    """What "auto" is for a model of the native family, where nothing stands against it."""
    return "native" if device.startswith(("cpu", "cuda")) else "transformers"


def usual_exactness(backend: str) -> str:
    """The most that a backend promises."""
    return "bitwise" if backend == "native" else "law"


def warn_of_transformers(name: str, reason: object) -> None:
    """Say that another backend computes a model than the one that was meant to."""
    log.warning("%s goes through the transformers backend: %s", name, reason)


def device_obstacle(device: str) -> str | None:
    """Why the native backend cannot compute on this device; None where it can."""
    if not device.startswith("cuda"):
        return None
    if find_spec("triton") is None:
        return "its kernels need the package triton, which is not installed"
    import torch

    found = torch.cuda.get_device_capability(torch.device(device))
    if found >= CAPABILITY:
        return None
    least, there = (".".join(map(str, version)) for version in (CAPABILITY, found))
    return f"its kernels need a GPU of compute capability {least}, and this one has {there}"


def native_obstacle(config: Mapping[str, Any]) -> str | None:
    """Why a model is none for the native backend, by its config.json; None where nothing says so.

    What only the loaded model shows, such as wrapped matrices, make_target finds later.
    """
    if config.get("quantization_config"):
        return "its weights are quantised"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    known = SimpleNamespace(**{**UNSAID, **config, "rope_parameters": {**rope, "rope_type": kind}})
    try:
        read_architecture(known, (config.get("architectures") or ["a model of no named class"])[0])
    except UnsupportedModelError as error:
        return str(error)
    return None
