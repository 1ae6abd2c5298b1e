"""What the launches of a step are called in a profile, and the bytes that each must move.

Counted are weights, keys and values, logits and texts, once each. What one kernel hands to the next
is not: it is small, and never leaves the cache of the device.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from kernels.launching import Launch
from kernels.product import kernel_name

Arguments = Mapping[str, Any]


def launch_name(launch: Launch) -> str:
    """The kernel's name, as the profiler gives it."""
    name: str = launch.kernel.__name__
    if name != "product_kernel":
        return name
    absent = {name: None for name, value in launch.arguments.items() if value is None}
    return kernel_name({**launch.options, **absent})


def launch_bytes(launch: Launch, seen_tokens: float) -> float:
    """Bytes of one launch, where every row has so many verified tokens; 0 for a kernel that reads
    a few numbers.
    """
    count = COUNTED.get(launch.kernel.__name__)
    return 0.0 if count is None else count(launch.arguments, seen_tokens)


def _product(given: Arguments, seen_tokens: float) -> float:
    """Its weights; of the output head the logits too."""
    held = _nbytes(given, "weight_ptr", "second_ptr", "bias_ptr", "second_bias_ptr")
    is_head = not given["PARTS"] and given["second_ptr"] is None
    return held + (_nbytes(given, "out_ptr") if is_head else 0)


def _norm(given: Arguments, seen_tokens: float) -> float:
    """Its weights, and of the first one the tokens' embeddings."""
    rows = 0 if given["ids_ptr"] is None else given["num_rows"]
    embedded = rows * given["SIZE"] * given["source_ptr"].element_size()
    return _nbytes(given, "weight_ptr", "bias_ptr") + embedded


def _heads(given: Arguments, seen_tokens: float) -> float:
    """The new keys and values, which are written."""
    new = 2 * len(given["out_ptr"]) * given["KV_HEADS"] * given["SIZE"]
    return _nbytes(given, "bias_ptr") + new * given["keys_ptr"].element_size()


def _attention(given: Arguments, seen_tokens: float) -> float:
    """Keys and values that the rows see."""
    row = 2 * given["KV_HEADS"] * given["SIZE"] * given["keys_ptr"].element_size()
    return len(given["positions_ptr"]) * min(seen_tokens, given["window"]) * row


def _logits(given: Arguments, seen_tokens: float) -> float:
    """All of them, once."""
    return _nbytes(given, "target_ptr", "draft_ptr", "counts_ptr")


def _resolution(given: Arguments, seen_tokens: float) -> float:
    """One row of the target's and one of the draft's, where tokens are drawn."""
    logits = [given["target_ptr"], given["draft_ptr"]]
    read = [x.nbytes / x.shape[1] for x in logits if x is not None and x.shape[1]]
    return 0.0 if given["sum_ptr"] is None else sum(read)


def _lookup(given: Arguments, seen_tokens: float) -> float:
    """The text of each row."""
    return len(given["slots_ptr"]) * seen_tokens * given["ids_ptr"].element_size()


COUNTED: dict[str, Callable[[Arguments, float], float]] = {
    "product_kernel": _product,
    "add_norm_kernel": _norm,
    "split_heads_kernel": _heads,
    "attend_chunk_kernel": _attention,
    "stats_kernel": _logits,
    "race_kernel": _logits,
    "resolve_kernel": _resolution,
    "lookup_scan_kernel": _lookup,
}


def _nbytes(given: Arguments, *names: str) -> int:
    tensors = [given[name] for name in names]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
