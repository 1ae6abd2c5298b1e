"""One place that says which backend computes a loaded model."""

import logging
from typing import Any

from decode.native.architecture import UnsupportedModelError
from decode.native.target import NativeTarget
from decode.targets.choices import check_choice
from decode.targets.transformers import TransformersTarget

log = logging.getLogger(__name__)


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

    "auto" is native on the CPU. A model that the native backend does not know goes through
    transformers, which a warning says. Typed Any, since stages name the former and use what both
    have.
    """
    check_choice(backend, exactness)
    if backend == "auto" and model.device.type != "cpu":
        backend = "transformers"
    if backend != "transformers":
        try:
            return NativeTarget(model, tokenizer, name_or_path, take=take, exactness=exactness)
        except UnsupportedModelError as error:
            name = name_or_path or type(model).__name__
            log.warning("%s goes through the transformers backend: %s", name, error)
    return TransformersTarget(model, tokenizer, name_or_path)
