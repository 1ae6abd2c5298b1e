"""Which tile is fastest for each product of a model: candidates timed over all layers' weights.

Every candidate multiplies the weights of all layers behind one another in one graph, so that they
come from memory and not from the cache. What is printed can be put into kernels/tiles.py.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from decode.native.kernel_forward import KernelForward
from kernels.decode_attention import decode_attention
from kernels.heads import Batch
from kernels.product import gated_product, product, product_parts
from kernels.tiles import Attention, Tile, attention_tile, pipeline_bytes, product_tile
from pipeline.bench_command import new_table

log = logging.getLogger(__name__)

BLOCK_N, BLOCK_K = (16, 32, 64, 128), (64, 128, 256)
WARPS, STAGES = (4, 8), (3, 5)
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14)
PROGRAMS = (80, 1100)  # fewer leave the chip empty, more repeat their starts and ends
COMPILERS = 16  # threads
CHUNKS, KEY_BLOCKS, KEY_WARPS = (64, 128, 256), (32, 64, 128), (2, 4, 8)
CONTEXTS = (512, 2048)  # tokens


@dataclass(frozen=True)
class Site:
    """One product of the model: where it stands, and all weights that it multiplies."""

    name: str
    kind: str  # as kernels.tiles names it
    weights: list[tuple[Tensor, ...]]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return self.weights[0][0].shape[0], self.weights[0][0].shape[1]

    @property
    def num_bytes(self) -> int:
        """Of all its weights."""
        return sum(weight.nbytes for weights in self.weights for weight in weights)

    def multiply(self, x: Tensor, weights: tuple[Tensor, ...], tile: Tile) -> None:
        if self.kind == "parts":
            product_parts(x, weights[0], tile)
        elif self.kind == "gated":
            gated_product(x, weights[0], weights[1], tile=tile)
        else:
            product(x, weights[0], tile=tile)


def sites(forward: KernelForward) -> list[Site]:
    """The five products."""
    layers, head = forward.weights.layers, forward.weights.head
    return [
        Site("qkv", "parts", [(layer.qkv.weight,) for layer in layers]),
        Site("output", "parts", [(layer.output.weight,) for layer in layers]),
        Site("gate, up", "gated", [(layer.gate.weight, layer.up.weight) for layer in layers]),
        Site("down", "parts", [(layer.down.weight,) for layer in layers]),
        Site("head", "whole", [(head.weight,)] * 2),
    ]


def candidates(site: Site, itemsize: int) -> Iterator[Tile]:
    """Tiles that fill the chip, share the columns evenly and fit the shared memory."""
    num_out, num_in = site.shape
    num_weights = len(site.weights[0])
    splits = SPLITS if site.kind == "parts" else (1,)
    shared = pipeline_bytes(site.weights[0][0].device)
    for block_n, block_k, split, warps, stages in itertools.product(
        BLOCK_N, BLOCK_K, splits, WARPS, STAGES
    ):
        blocks, programs = num_in / block_k, -(-num_out // block_n) * split
        tile = Tile(block_n, block_k, split, warps, stages)
        fits = num_weights * block_n * block_k * itemsize * stages <= shared
        if (
            fits
            and blocks % split == 0
            and (programs >= PROGRAMS[0] or block_n == BLOCK_N[0])
            and (programs <= PROGRAMS[1] or site.kind == "whole")
            and (warps == WARPS[0] or block_n * num_weights >= 64)
        ):
            yield tile


def sweep(
    forward: KernelForward,
    num_rows: Sequence[int],
    advance: Callable[[], None] = lambda: None,
    most: int | None = None,  # candidates a site, the first ones; None: all
) -> dict[str, Any]:
    """By site: microseconds of one product with every candidate, the best for few rows first."""
    found = {}
    for site in sites(forward):
        found[site.name] = {
            "kind": site.kind,
            "shape": list(site.shape),
            "bytes": site.num_bytes // len(site.weights),
            "tiles": time_site(site, num_rows, most),
        }
        advance()
    return found


@torch.inference_mode()
def time_site(site: Site, num_rows: Sequence[int], most: int | None) -> list[dict[str, Any]]:
    """Every candidate that compiles and fits, fastest first; the pinned one is among them."""
    weight = site.weights[0][0]
    inputs = [
        torch.randn(rows, site.shape[1], device=weight.device).to(weight.dtype) for rows in num_rows
    ]
    pinned = product_tile(site.kind, *site.shape, device=weight.device)
    others = (tile for tile in candidates(site, weight.element_size()) if tile != pinned)
    workers = COMPILERS if weight.is_cuda else 1
    with ThreadPoolExecutor(workers) as pool:
        chosen = [pinned, *others][:most]
        able = list(pool.map(lambda tile: _is_able(site, inputs, tile), chosen))
    timed = [
        {
            "tile": list(astuple(tile)),
            "pinned": tile == pinned,
            "microseconds": [1e6 * _seconds(site, x, tile) / len(site.weights) for x in inputs],
        }
        for tile, is_able in zip(chosen, able, strict=True)
        if is_able
    ]
    return sorted(timed, key=lambda row: row["microseconds"])


def _is_able(site: Site, inputs: Sequence[Tensor], tile: Tile) -> bool:
    """Whether a candidate compiles and fits; it has then been compiled."""
    try:
        with torch.inference_mode():
            for x in inputs:
                site.multiply(x, site.weights[0], tile)
    except Exception as error:  # whatever a compiler raises; the others are still worth timing
        log.info("%s %s: %s", site.name, tile, str(error).strip().splitlines()[:1])
        return False
    return True


def _seconds(site: Site, x: Tensor, tile: Tile) -> float:
    def play() -> None:
        for weights in site.weights:
            site.multiply(x, weights, tile)

    return graph_seconds(play, rounds=5) if x.is_cuda else 0.0


@torch.inference_mode()
def sweep_attention(forward: KernelForward, most: int | None = None) -> list[dict[str, Any]]:
    """Microseconds of one layer's attention by context, for one token of one row and for five."""
    a, device = forward.architecture, forward.weights.embedding.device
    contexts = CONTEXTS if device.type == "cuda" else CONTEXTS[:1]
    forward.cache.reserve(num_tokens=max(contexts) + 8)
    key_bytes = 2 * a.head_dim * forward.weights.embedding.element_size()  # and its value's
    chosen = [
        Attention(*numbers)
        for numbers in itertools.product(CHUNKS, KEY_BLOCKS, KEY_WARPS, STAGES)
        if numbers[0] % numbers[1] == 0
        and numbers[1] * numbers[3] * key_bytes <= pipeline_bytes(device)
    ]
    pinned = attention_tile(device)
    found = []
    for tile in [pinned, *(tile for tile in chosen if tile != pinned)][:most]:
        times = {}
        for context, width in itertools.product(contexts, (1, 5)):
            step = forward.step(1, width)
            row = SimpleNamespace(slot=0, length=context)
            step.fill([row], [[0] * width])  # type: ignore[list-item]
            shape = width, a.num_heads, a.head_dim
            query = torch.randn(shape, device=device).to(forward.weights.embedding.dtype)
            play = partial(_attend_layers, forward, query, step.batch, tile)
            spent = graph_seconds(play, rounds=5) if query.is_cuda else 0.0
            times[f"{width} after {context}"] = 1e6 * spent / a.num_layers
        found.append({"tile": list(astuple(tile)), "pinned": tile == pinned, "microseconds": times})
    return sorted(found, key=lambda row: sum(row["microseconds"].values()))


def _attend_layers(forward: KernelForward, query: Tensor, batch: Batch, tile: Attention) -> None:
    scale = forward.architecture.head_dim**-0.5
    for number in range(forward.architecture.num_layers):
        decode_attention(query, *forward.cache.layer(number), batch, None, scale, tile)


def attention_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """The best and the pinned choice of chunks, blocks, warps and stages."""
    names = list(found[0]["microseconds"])
    table = new_table("attention of a layer, us", "chunks", *names)
    for row in [*found[:5], *(row for row in found[5:] if row["pinned"])]:
        label = f"Attention{tuple(row['tile'])}" + (" pinned" if row["pinned"] else "")
        table.add_row(label, *(f"{row['microseconds'][name]:.2f}" for name in names))
    return table


def graph_seconds(play: Callable[[], Any], rounds: int, inner: int = 3) -> float:
    """Median seconds of one run of what can be captured."""
    play()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        play()
    graph.replay()
    return median(replay_seconds(graph, inner) for _ in range(rounds))


def replay_seconds(graph: Any, inner: int) -> float:
    """Seconds of one replay, by the device's own clock, over `inner` behind one another."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(inner):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3 / inner


def sweep_table(found: Mapping[str, Any], num_rows: Sequence[int]) -> Table:
    """The best of each site, for each number of rows, beside the pinned one."""
    heads = [f"us at {rows}" for rows in num_rows]
    table = new_table("products", "product", "tile", *heads, "TB/s", "chosen for")
    for name, site in found.items():
        where = f"{name} {tuple(site['shape'])}"
        for label, row in _shown(site["tiles"], num_rows):
            seconds = row["microseconds"][0] / 1e6
            rate = f"{site['bytes'] / seconds / 1e12:.2f}" if seconds else "-"
            times = [f"{spent:.2f}" for spent in row["microseconds"]]
            table.add_row(where, f"Tile{tuple(row['tile'])}", *times, rate, label)
    return table


def _shown(
    rows: Sequence[Mapping[str, Any]], num_rows: Sequence[int]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for place, count in enumerate(num_rows):
        for row in sorted(rows, key=lambda row: row["microseconds"][place])[:3]:
            yield f"{count} rows", row
    for row in sorted(rows, key=lambda row: sum(row["microseconds"]))[:2]:
        yield "their sum", row
    for row in rows:
        if row["pinned"]:
            yield "pinned", row


def pinned_lines(found: Mapping[str, Any]) -> list[str]:
    """The best of each site as kernels/tiles.py would have them."""
    return [
        f'("{site["kind"]}", {site["shape"][0]}, {site["shape"][1]}): '
        f"Tile{tuple(site['tiles'][0]['tile'])},"
        for site in found.values()
    ]
