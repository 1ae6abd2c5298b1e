"""x W^T in two layouts.

`Stacked` keeps rows as Hugging Face has them; modules that are multiplied together lie in one
matrix, and their parameters become views into it, so nothing is held twice. `Blocked` is oneDNN's
own layout, prepared once: PyTorch would otherwise reorder every weight at every product. There the
modules let their weights go, and `restore` gives them back, bit for bit.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  as everywhere
from torch import Tensor, nn

from decode.targets.moving import side_by_side

# Rows that oneDNN lays a weight out for; 2 and 16 are as fast. What it makes for 1 row costs two
# rows 1.7 times as much in float32.
ROWS_HINT = 8
BLOCKED_DTYPES = (torch.float32, torch.bfloat16)


class Product(Protocol):
    """y = x W^T + b, and the same with what comes after it."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:  # [N, in] -> [N, out]
        """y."""

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """y + other."""

    def silu(self, x: Tensor) -> Tensor:
        """y * sigmoid(y)."""

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """y * other."""

    def restore(self) -> None:
        """See to it that the modules hold their weights."""


class Stacked:
    """F.linear over one matrix of all the modules' rows."""

    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        self.bias = stacked_bias(modules)
        weights = [module.weight.detach() for module in modules]
        joined = weights[0] if len(weights) == 1 else side_by_side(weights)
        self.weight = torch.cat(weights) if joined is None else joined
        if joined is None:
            _give(modules, self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x).add_(other)

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(self(x), inplace=True)

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x).mul_(other)

    def restore(self) -> None:
        """They do at all times."""


class Blocked:
    """oneDNN's product over a weight in its own layout, the elementwise part done on the way out.

    With `let_go` the modules' own weights are dropped, else kept beside the copy.
    """

    def __init__(self, modules: Sequence[nn.Linear], let_go: bool = True) -> None:
        # Looked up here, so that a PyTorch without oneDNN can import this file.
        operators: Any = torch.ops.mkldnn
        self._apply = operators._linear_pointwise.default
        self._binary = operators._linear_pointwise.binary
        self.bias = stacked_bias(modules)
        rows = [module.weight.detach() for module in modules]
        weight = rows[0] if len(rows) == 1 else torch.cat(rows)
        self.weight = operators._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
        self._modules = modules if let_go else ()
        for module in self._modules:
            _replace(module, module.weight.detach().to("meta"))

    def __call__(self, x: Tensor) -> Tensor:
        return self._apply(x, self.weight, self.bias, "none", (), "")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self._binary(x, other, self.weight, self.bias, "add")

    def silu(self, x: Tensor) -> Tensor:
        return self._apply(x, self.weight, self.bias, "swish", (), "")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self._binary(x, other, self.weight, self.bias, "mul")

    def restore(self) -> None:
        """Write the weights back, from then on held twice."""
        if self._modules:
            _give(self._modules, self.weight.to_dense())
            self._modules = ()


def blocked_is_possible(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this PyTorch and this processor have oneDNN's products for the type."""
    return (
        device.type == "cpu"
        and dtype in BLOCKED_DTYPES
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def stacked_bias(modules: Sequence[nn.Linear]) -> Tensor | None:
    """All biases in one; zeros for a module that has none among others that do."""
    if all(module.bias is None for module in modules):
        return None
    parts = [
        module.weight.new_zeros(module.out_features) if module.bias is None else module.bias
        for module in modules
    ]
    return torch.cat([part.detach() for part in parts])


def _give(modules: Sequence[nn.Linear], weight: Tensor) -> None:
    """Make each module's parameter a view of its rows."""
    sizes = [module.out_features for module in modules]
    for module, rows in zip(modules, weight.split(sizes), strict=True):
        _replace(module, rows)


def _replace(module: nn.Linear, weight: Tensor) -> None:
    module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
