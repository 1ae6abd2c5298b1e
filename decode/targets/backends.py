"""One place that says which backend computes a loaded model."""

from typing import Any

from decode.native.architecture import UnsupportedModelError
from decode.native.target import NativeTarget
from decode.targets.choices import (
    AUTO,
    check_choice,
    device_obstacle,
    usual_backend,
    usual_exactness,
    warn_of_transformers,
)
from decode.targets.transformers import TransformersTarget


def make_target(
    model: Any,
    tokenizer: Any | None,
    name_or_path: str = "",
    *,
    backend: str,
    exactness: str,
    take: bool,  # the model is ours alone, so that its weights may be laid out anew
) -> Any:
    """A TransformersTarget or a NativeTarget over a transformers model.

    Backend "auto" is native on the CPU and on CUDA; exactness "auto" is the most that the backend
    promises. A model that the native backend does not know goes through transformers, which a
    warning says, unless exactness "bitwise" was asked for: then ValueError. So does one on CUDA
    that was left to "auto" in both and does not keep what "bitwise" promises. Typed Any, since
    stages name the former and use what both have.
    """
    device = str(model.device)
    must_hold = device.startswith("cuda") and backend == exactness == AUTO
    if backend == AUTO:
        backend = usual_backend(device)
    check_choice(backend, exactness)
    if backend != "transformers":
        kept = usual_exactness(backend) if exactness == AUTO else exactness
        try:
            if obstacle := device_obstacle(device):
                raise UnsupportedModelError(obstacle)
            return NativeTarget(
                model, tokenizer, name_or_path, take=take, exactness=kept, must_hold=must_hold
            )
        except UnsupportedModelError as error:
            name = name_or_path or type(model).__name__
            if exactness == "bitwise":
                raise ValueError(
                    f"exactness=bitwise is not to be had for {name}: {error}; ask for "
                    "backend=transformers and exactness=law"
                ) from error
            warn_of_transformers(name, error)
    return TransformersTarget(model, tokenizer, name_or_path)
