"""Would catch: a key after the token's own or before its window, keys of another row or of padding,
heads of one group given another's keys; a chunk left out, added twice, or read before it was
written; sums whose order follows the number of tokens, of rows or of turns; heads whose size is no
power of two.

Tolerances: float32 against float64 over at most 90 keys, 1e-5; bfloat16 keeps 8 bits of weights and
result, 3e-2 on values of unit size. Bits: equal, whatever is computed beside.
"""

import pytest
import torch
from torch import Tensor

from kernels import decode_attention as kernel
from kernels.decode_attention import attention_reference, decode_attention
from kernels.heads import Batch
from kernels.tiles import Attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = Attention(chunk=32, block=16, num_warps=4, num_stages=2)
CAPACITY = 320  # ten chunks, of which one program adds eight at once


def random(dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def batch(slots: list[int], positions: list[int], widths: list[int], width: int) -> Batch:
    rows = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (slots, positions, widths))
    return Batch(*rows, width)


def states(dtype: torch.dtype, kv: int, size: int, slots: int = 4) -> tuple[Tensor, Tensor]:
    return random(dtype, slots, kv, CAPACITY, size, seed=2), random(
        dtype, slots, kv, CAPACITY, size, seed=3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize(("heads", "kv", "size"), [(6, 2, 10), (4, 4, 16), (9, 1, 32)])
def test_tokens_see_what_came_before_them(
    heads: int, kv: int, size: int, window: int | None, dtype: torch.dtype
) -> None:
    rows = batch([2, 0, 3, 1], [0, 61, 29, CAPACITY - 1], [5, 1, 4, 1], 5)
    query = random(dtype, 20, heads, size, seed=1)
    keys, values = states(dtype, kv, size)
    wanted = attention_reference(query, keys, values, rows, window, 0.3)
    slots, positions, there = rows.places()
    for slot in range(4):  # what others left there
        end = int(positions[there & (slots == slot)].max()) + 1
        keys[slot, :, end:], values[slot, :, end:] = 1e4, torch.nan
    found = decode_attention(query, keys, values, rows, window, 0.3, TILE).view_as(wanted)
    loose = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found[there], wanted[there], atol=loose, rtol=loose)
    assert not bool(found[~there].any())


@pytest.mark.parametrize("window", [None, 40])
def test_a_token_does_not_know_its_neighbours(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, first = torch.bfloat16, 60
    some = [0, 4, 5, 7, 16]  # on both sides of a chunk's end, and in two tiles
    query = random(dtype, 17, 6, 16, seed=1)
    keys, values = states(dtype, 2, 16)
    settings = (window, 0.3, TILE)
    alone = torch.cat(
        [
            decode_attention(
                query[i : i + 1], keys, values, batch([1], [first + i], [1], 1), *settings
            )
            for i in some
        ]
    )
    whole = decode_attention(query, keys, values, batch([1], [first], [17], 17), *settings)
    assert torch.equal(whole[some], alone)
    rows = batch([1], [first], [3], 3)
    assert torch.equal(decode_attention(query[:3], keys, values, rows, *settings), whole[:3])
    # Rows beside it, of another length, with padding; and computed in turns.
    rows = batch([0, 1, 3], [200, first + 5, 3], [6, 5, 1], 6)
    mixed = random(dtype, 18, 6, 16, seed=5)
    mixed[6:11] = query[5:10]
    for workspace in (1 << 26, 20_000):  # all at once; four tokens of a row at once
        monkeypatch.setattr(kernel, "WORKSPACE_BYTES", workspace)
        found = decode_attention(mixed, keys, values, rows, *settings)
        assert torch.equal(found[6:11], whole[5:10]), workspace


def test_the_capacity_of_the_cache_does_not_matter() -> None:
    query = random(torch.bfloat16, 3, 4, 16, seed=1)
    keys, values = states(torch.bfloat16, 2, 16)
    rows = batch([1], [70], [3], 3)
    short = [cache[:, :, :96].contiguous() for cache in (keys, values)]
    found = [
        decode_attention(query, *caches, rows, None, 0.3, TILE)
        for caches in ((keys, values), short)
    ]
    assert torch.equal(*found)
