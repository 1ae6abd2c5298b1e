"""A loaded model moves to its device as one allocation.

There the allocator rounds every tensor up to whole megabytes, which for matrices of 26.3 MB comes
to a fifteenth of them; and where queries, keys and values are later put into one matrix it keeps
the holes that they leave. So all parameters get views of one tensor, those three side by side.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

TOGETHER = ("q_proj", "k_proj", "v_proj")  # are multiplied together
ALIGNED = 256  # bytes, as the allocator has it


def moved(model: Any, device: str | torch.device) -> Any:
    """The model on that device, its buffers included."""
    device = torch.device(device)
    parameters = list(model.parameters())
    are_there = all(p.device.type == device.type for p in parameters)
    if device.type == "cuda" and not are_there and len({p.dtype for p in parameters}) == 1:
        gather(model, device)
    return model.to(device)


@torch.no_grad()
def gather(model: Any, device: torch.device) -> None:
    """Give the model's parameters, all of one type, views of one tensor on the device."""
    groups = list(_groups(model))
    dtype = groups[0][0].dtype
    unit = ALIGNED // dtype.itemsize
    sizes = [sum(p.numel() for p in group) for group in groups]
    with torch.inference_mode(False):  # they may be trained, whoever loads them
        total = sum(-(-size // unit) * unit for size in sizes)
        all_of_them, start = torch.empty(total, dtype=dtype, device=device), 0
        for group, size in zip(groups, sizes, strict=True):
            place = all_of_them[start : start + size]
            for parameter, part in zip(group, place.split([p.numel() for p in group]), strict=True):
                view = part.view(parameter.shape)
                view.copy_(parameter.detach())
                parameter.data = view
            start += -(-size // unit) * unit


def _groups(model: Any) -> Iterator[list[nn.Parameter]]:
    """Every parameter once, in groups that lie side by side."""
    seen: set[int] = set()
    for module in model.modules():
        parts = [getattr(module, name, None) for name in TOGETHER]
        weights = [part.weight for part in parts if type(part) is nn.Linear]
        if len(weights) == len(parts) and (group := _unseen(weights, seen)):
            yield group
    for parameter in model.parameters():
        if group := _unseen([parameter], seen):
            yield group


def _unseen(parameters: list[Any], seen: set[int]) -> list[nn.Parameter]:
    fresh = [parameter for parameter in parameters if id(parameter) not in seen]
    seen.update(id(parameter) for parameter in fresh)
    return fresh


def side_by_side(tensors: list[Tensor]) -> Tensor | None:
    """The matrix of all rows of these matrices, where they lie behind one another in memory."""
    first, end = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.shape[1:] != first.shape[1:]:
            return None
        if tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        if tensor.storage_offset() != end:
            return None
        end += tensor.numel()
    shape = sum(len(tensor) for tensor in tensors), *first.shape[1:]
    return first.as_strided(shape, first.stride(), first.storage_offset())
