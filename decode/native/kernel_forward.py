"""The forward in Triton kernels over a static cache, whole passes captured by their buckets.

A pass takes B rows of W tokens each, B and W rounded up to a bucket; rows and tokens that are not
there are padding, of which nothing is kept. What differs from pass to pass lies in one small tensor
of the device. For one layer, with x the residual and n its norm, the launches are

    parts of qkv(n) | heads, rope, cache | attention | its merge | parts of output |
    x += , n = norm | silu(gate(n)) * up(n) | parts of down | x += , n = the next layer's norm.

With exactness "bitwise" all products are ours, whatever the number of rows; "law" leaves those of
many rows to cuBLAS.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F  # noqa: N812  as everywhere
from torch import Tensor

from decode.native.architecture import Architecture
from decode.native.graphs import Graphs
from decode.native.products import Product
from decode.native.rope import RopeTable
from decode.native.static_cache import StaticCache, StaticRow
from decode.native.weights import Layer, Weights
from kernels.decode_attention import decode_attention
from kernels.heads import Batch, HeadNorms, split_heads
from kernels.launching import collected, compile_all
from kernels.norm import add_norm, embed_norm
from kernels.product import gated_product, product, product_parts
from kernels.tiles import ROW_BLOCKS

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 17, 32, 64, 128, 256)  # tokens of a row; more take turns
BATCHES = (1, 2, 4, 8, 16, 32, 64)
MANY_ROWS = 64  # beyond which "law" takes cuBLAS
ALIGNED = 4  # int32 numbers in the 16 bytes that kernels like their pointers to be multiples of


@dataclass(frozen=True)
class Step:
    """A pass of one shape: what it reads, on the device."""

    num_rows: int
    width: int
    inputs: Tensor  # [...] int32

    @classmethod
    def new(cls, num_rows: int, width: int, device: torch.device) -> "Step":
        """One whose rows are all padding."""
        with torch.inference_mode(False):  # so that it can be filled in any mode
            step = cls.unwritten(num_rows, width, device)
            step.inputs.zero_()
        return step

    @classmethod
    def unwritten(cls, num_rows: int, width: int, device: torch.device) -> "Step":
        """One that launches fill, every number of it."""
        numbers = _round_up(num_rows * width) + 3 * _round_up(num_rows)
        return cls(num_rows, width, torch.empty(numbers, dtype=torch.int32, device=device))

    @cached_property
    def token_ids(self) -> Tensor:  # [B * W]
        return self.inputs[: self.num_rows * self.width]

    @cached_property
    def batch(self) -> Batch:
        start, size = _round_up(self.num_rows * self.width), _round_up(self.num_rows)
        slots, positions, widths = (
            self.inputs[start + i * size : start + i * size + self.num_rows] for i in range(3)
        )
        return Batch(slots, positions, widths, self.width)

    def fill(self, rows: Sequence[StaticRow], token_ids: Sequence[Sequence[int]]) -> None:
        """Say what the next pass reads; one copy to the device, which nobody waits for."""
        missing = self.num_rows - len(rows)
        numbers: list[int] = []
        for ids in token_ids:
            numbers += [*ids, *[0] * (self.width - len(ids))]
        numbers += [0] * (_round_up(self.num_rows * self.width) - len(numbers))
        for values in (
            [row.slot for row in rows],
            [row.length for row in rows],
            [len(ids) for ids in token_ids],
        ):
            numbers += [*values, *[0] * (missing + _round_up(self.num_rows) - self.num_rows)]
        pinned = self.inputs.device.type == "cuda"
        given = torch.tensor(numbers, dtype=torch.int32, pin_memory=pinned)
        self.inputs.copy_(given, non_blocking=True)


class KernelForward:
    """Weights, tables, the cache of all rows and the captured passes."""

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        rope: RopeTable,
        pinned: bool,
    ) -> None:
        self.architecture = architecture
        self.weights = weights
        self.rope = rope
        self.pinned = pinned
        device = weights.embedding.device
        self.cache = StaticCache(architecture, weights.embedding.dtype, device)
        self.graphs = Graphs(device)
        self._steps: dict[tuple[int, int], Step] = {}
        self._version = -1

    def open(self) -> StaticRow:
        """A fresh row."""
        return self.cache.open()

    def __call__(
        self, rows: Sequence[StaticRow], token_ids: Sequence[Sequence[int]], with_logits: bool
    ) -> Tensor | None:  # [N, V], rows one after the other
        """Read each row's tokens into its cache; their raw logits, where they are asked for."""
        most_rows, most_tokens = BATCHES[-1], WIDTHS[-1]
        parts: list[list[Tensor]] = [[] for _ in rows]
        for row, ids in zip(rows, token_ids, strict=True):
            row.reserve(len(ids))
        for first in range(0, len(rows), most_rows):
            group = rows[first : first + most_rows]
            longest = max(len(ids) for ids in token_ids[first : first + most_rows])
            for start in range(0, longest, most_tokens):
                pairs = [
                    (number, ids[start : start + most_tokens])
                    for number, ids in enumerate(token_ids[first : first + len(group)], first)
                    if len(ids) > start
                ]
                found = self._pass([rows[n] for n, _ in pairs], [i for _, i in pairs], with_logits)
                for (number, _), part in zip(pairs, found, strict=False):
                    parts[number].append(part.clone())  # the next pass may write over it
        if not with_logits:
            return None
        flat = [part for row in parts for part in row]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def _pass(
        self,
        rows: Sequence[StaticRow],
        token_ids: Sequence[Sequence[int]],
        with_logits: bool,
    ) -> list[Tensor]:
        """The logits of each row's tokens [its width, V], views into what the next pass uses."""
        widths = [len(ids) for ids in token_ids]
        step = self.step(len(rows), max(widths))
        step.fill(rows, token_ids)
        logits = self.run(step, with_logits)
        for row, width in zip(rows, widths, strict=True):
            row.length += width
        if logits is None:
            return []
        by_row = logits.view(step.num_rows, step.width, -1)
        return [by_row[b, :width] for b, width in enumerate(widths)]

    def prepare(self) -> None:
        """Compile, on every core, what passes of any number of rows need, where there is CUDA."""
        device = self.weights.embedding.device
        if device.type != "cuda":
            return
        self.refresh()
        with torch.inference_mode(), collected() as launches:
            for width in ROW_BLOCKS:
                self.compute(self.step(1, width))
        compile_all(launches, device, os.cpu_count() or 1)

    def step(self, num_rows: int, width: int) -> Step:
        """The smallest pass that takes so many rows and tokens."""
        key = bucket(num_rows, BATCHES), bucket(width, WIDTHS)
        if key not in self._steps:
            self._steps[key] = Step.new(*key, self.weights.embedding.device)
        return self._steps[key]

    def run(self, step: Step, with_logits: bool = True) -> Tensor | None:  # [B * W, V]
        """Compute a pass that was filled; what it returns lasts until the next run of any pass."""
        self.refresh()
        key = (step.num_rows, step.width, with_logits)
        return self.graphs.run(key, lambda: self.compute(step, with_logits))

    def refresh(self) -> None:
        """See to it that tables reach as far as the cache and no graph reads where it was."""
        if self._version == self.cache.version:
            return
        self._version = self.cache.version
        self.graphs.clear()
        self.rope.reach(self.cache.capacity)
        half = self.architecture.head_dim // 2
        places = torch.arange(self.cache.capacity, device=self.weights.embedding.device)
        cos, sin = self.rope.at(places)
        self._cos = cos[:, 0, :half].contiguous()
        self._sin = sin[:, 0, half:].contiguous()

    def compute(
        self,
        step: Step,
        with_logits: bool = True,
        only: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor | None:
        """The launches of one pass; with `only` [N] int64 the logits of these tokens alone.

        `wanted` [1] int32: where it is 0 on the device all rows are padding, and no weight is read.
        """
        eps = self.architecture.norm_eps
        layers = self.weights.layers
        residual, normed = embed_norm(
            step.token_ids, self.weights.embedding, layers[0].input_norm, eps
        )
        following = [layer.input_norm for layer in layers[1:]] + [self.weights.norm]
        for number, layer in enumerate(layers):
            query = self._heads(layer, normed, step.batch, number, wanted)
            if number == len(layers) - 1 and not with_logits:
                return None  # its keys and values are kept, and nobody asks what follows
            seen = self._attend(query, step.batch, number)
            parts = self._parts(layer.output, seen, wanted)
            normed = add_norm(parts, layer.output.bias, residual, layer.mlp_norm, eps)
            parts = self._parts(layer.down, self._gated(layer, normed, wanted), wanted)
            normed = add_norm(parts, layer.down.bias, residual, following[number], eps)
        head = self.weights.head
        if only is not None:
            normed = normed.index_select(0, only)
        if self._leaves(normed):
            return F.linear(normed, head.weight, head.bias)
        return product(normed, head.weight, head.bias, wanted=wanted)

    def _heads(
        self, layer: Layer, normed: Tensor, batch: Batch, number: int, wanted: Tensor | None
    ) -> Tensor:
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = HeadNorms(layer.query_norm, layer.key_norm, self.architecture.norm_eps)
        parts = self._parts(layer.qkv, normed, wanted)
        tables = self._cos, self._sin
        return split_heads(parts, layer.qkv.bias, norms, *tables, batch, *self.cache.layer(number))

    def _attend(self, query: Tensor, batch: Batch, number: int) -> Tensor:
        a = self.architecture
        keys, values = self.cache.layer(number)
        return decode_attention(query, keys, values, batch, a.windows[number], a.head_dim**-0.5)

    def _parts(self, weights: Product, x: Tensor, wanted: Tensor | None) -> Tensor:
        if self._leaves(x):
            return F.linear(x, weights.weight)[None]
        return product_parts(x, weights.weight, wanted=wanted)

    def _gated(self, layer: Layer, x: Tensor, wanted: Tensor | None) -> Tensor:
        gate, up = layer.gate, layer.up
        if self._leaves(x):
            return F.silu(F.linear(x, gate.weight, gate.bias)).mul_(F.linear(x, up.weight, up.bias))
        return gated_product(x, gate.weight, up.weight, gate.bias, up.bias, wanted=wanted)

    def _leaves(self, x: Tensor) -> bool:
        """Whether a product of so many rows is left to cuBLAS."""
        return not self.pinned and len(x) > MANY_ROWS


def bucket(number: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds the number."""
    return next(size for size in buckets if size >= number)


def _round_up(number: int) -> int:
    return -(-number // ALIGNED) * ALIGNED
