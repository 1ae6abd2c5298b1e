"""Would catch: what only the interpreter accepts; a kernel that is compiled anew for another number
of rows or tokens, and so could round otherwise; a launch that is made although it should only be
noted; two launches of one kind compiled twice; weights, places or keys that are asked for only
after the wait; a launch that asks for more shared memory than an H200, A100 or RTX card has.

The compiler needs no GPU to translate for one: see translated.py.
"""

import json
from pathlib import Path

import pytest
import torch
from translated import told_by

from kernels.launching import collected, compile_all
from kernels.norm import embed_norm
from kernels.product import product_parts
from kernels.tiles import TILES

PROGRAM = r"""
import json, sys
import kernels.overlap
from kernels.decode_attention import decode_attention
from kernels.greedy import take_greedy
from kernels.heads import Batch, HeadNorms, split_heads
from kernels.launching import collected, compile_all
from kernels.norm import add_norm, embed_norm
from kernels.product import gated_product, product, product_parts
from kernels.tiles import Tile

kernels.overlap.capability = lambda device: (9, 0)
kernels.overlap.use(sys.argv[1])

def new(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)

def ints(count):
    return new(count, dtype=torch.int32)

def launches(rows, width):
    with collected() as found:
        count, batch = rows * width, Batch(ints(rows), ints(rows), ints(rows), width)
        residual, x = embed_norm(ints(count), new(99, 512), new(512), 1e-6)
        parts = product_parts(x, new(512, 512), Tile(64, 64, 2, 4, 3))
        caches = new(2, 2, 512, 64), new(2, 2, 512, 64)
        norms = HeadNorms(new(64), new(64), 1e-6)
        query = split_heads(parts, new(512), norms, new(512, 32), new(512, 32), batch, *caches)
        decode_attention(query, *caches, batch, None if width > 1 else 7, 0.1)
        x = add_norm(parts, None, residual, new(512), 1e-6)
        gated_product(x, new(300, 512), new(300, 512), new(300), new(300))
        logits = product(x, new(777, 512), tile=Tile(32, 128, 1, 4, 3))
        take_greedy(logits[:rows].contiguous(), ints(rows), ints(rows), ints(rows), ints(rows))
    return found

few, more, cpu = launches(1, 1), launches(3, 5), torch.device("cpu")
numbers = [compile_all(few, cpu, 2), compile_all(few + more, cpu, 2)]
compiled = [one.kernel.warmup(*one.args, grid=one.grid, **one.options) for one in few + more]
numbers.append(len({id(kernel) for kernel in compiled}))  # as Triton itself tells them apart
assembly = [kernel.asm["ptx"] for kernel in compiled[: len(few)]]
print(json.dumps({
    "numbers": numbers,
    "launches": len(few),
    "waits": sum("griddepcontrol.wait" in text for text in assembly),
    "early": [
        one.kernel.__name__ for one, text in zip(few, assembly)
        if "ld.global" in text.partition("griddepcontrol.wait")[0] and "griddepcontrol" in text
    ],
    "late": sum(
        "griddepcontrol.launch" not in text.partition("griddepcontrol.wait")[0] for text in assembly
    ),
    "fetches": sum("prefetch.global.L2" in text for text in assembly),
    "wide": sum("cp.async.cg.shared.global" in text for text in assembly),
}))
"""

SHARED = r"""
import json, sys
import kernels.overlap, kernels.tiles
from kernels.decode_attention import decode_attention
from kernels.heads import Batch
from kernels.launching import collected
from kernels.product import gated_product, product, product_parts

tiles = kernels.tiles
tiles.SHARED_BYTES = int(sys.argv[1])
kernels.overlap.capability = tiles.capability = lambda device: divmod(CAPABILITY, 10)

def new(*shape, dtype=getattr(torch, sys.argv[2])):
    return torch.empty(shape, dtype=dtype)

with collected() as found:
    for kind, num_out, num_in in tiles.TILES[9, 0]:
        x, weight = new(128, num_in), new(num_out, num_in)
        if kind == "gated":
            gated_product(x, weight, weight)
        else:
            (product_parts if kind == "parts" else product)(x, weight)
    row = [new(1, dtype=torch.int32) for _ in range(3)]
    caches = new(1, 2, 256, 128), new(1, 2, 256, 128)
    decode_attention(new(5, 12, 128), *caches, Batch(*row, 5), None, 1.0)
compiled = [one.kernel.warmup(*one.args, grid=one.grid, **one.options) for one in found]
print(json.dumps([kernel.metadata.shared for kernel in compiled]))
"""


@pytest.mark.parametrize("overlap", ["off", "launch", "late"])
def test_everything_compiles_for_a_gpu_once_for_all_widths(overlap: str, tmp_path: Path) -> None:
    told = json.loads(told_by(PROGRAM, tmp_path, overlap))
    assert told["launches"] == 10
    assert told["numbers"] == [10, 10, 10]  # fifteen tokens take what one takes
    assert told["wide"] == 4  # three products and attention: 16 bytes a copy
    assert told["fetches"] == (0 if overlap == "off" else 1)  # keys of earlier tokens
    assert told["waits"] == (0 if overlap == "off" else 10)
    # Products never let others come up before they have waited themselves.
    assert told["late"] == {"off": 10, "launch": 3, "late": 10}[overlap]
    early = ["product_kernel", "split_heads_kernel", "add_norm_kernel"]
    early += ["attend_chunk_kernel", "merge_chunks_kernel"]
    assert set(told["early"]) == (set() if overlap == "off" else set(early))


# What a program may have on an H200, an A100, an RTX 4090 and an RTX 5090, in bytes.
@pytest.mark.parametrize(
    ("capability", "most", "dtype"),
    [
        (90, 232_448, "bfloat16"),
        (80, 166_912, "bfloat16"),
        (89, 101_376, "bfloat16"),
        (89, 101_376, "float32"),
        (120, 101_376, "bfloat16"),
    ],
)
def test_what_is_launched_fits_the_shared_memory(
    capability: int, most: int, dtype: str, tmp_path: Path
) -> None:
    shared = json.loads(told_by(SHARED, tmp_path, str(most), dtype, capability=capability))
    assert len(shared) == len(TILES[9, 0]) + 2
    assert max(shared) <= most, shared


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_launches_are_noted_and_not_made() -> None:
    ids, embedding = torch.zeros(2, dtype=torch.int32), torch.ones(3, 32)
    weight = torch.ones(32)
    with collected() as launches:
        residual, _ = embed_norm(ids, embedding, weight, 1e-6)
        residual.fill_(7.0)
        for _ in range(3):
            product_parts(residual, torch.ones(16, 32))
        product_parts(residual.bfloat16(), torch.ones(16, 32).bfloat16())
    assert len(launches) == 5
    assert bool((residual == 7.0).all())
    assert len({launch.kind() for launch in launches}) == 3
    assert compile_all(launches, torch.device("cpu"), 1) == 3
    made, _ = embed_norm(ids, embedding, weight, 1e-6)
    assert bool((made == 1.0).all())
