# mypy: disallow-untyped-defs=False
r"""What a table says that follows a row's last tokens: the part of kernels/lookup.py for rows whose
own text holds nothing. kernels/ngram_table.py has the table and its slots.

For n = 1 .. LONGEST the slots are computed from the row's last tokens, and all places are asked for
at once; then, at once too, the n tokens in front of each place and the K behind it. The longest n
whose tokens agree is taken.
"""

import triton
import triton.language as tl

from kernels import ngram_table

FIRST = tl.constexpr(ngram_table.FIRST)
FACTOR = tl.constexpr(ngram_table.FACTOR)
MASK = tl.constexpr(ngram_table.MASK)
HASH_BITS = tl.constexpr(32)


@triton.jit
def probe(text_ptr, length, places_ptr, LONGEST: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr):
    """The place [N] of the last 1, ..., LONGEST tokens; 0: none."""
    n = tl.arange(0, N) + 1
    total = tl.zeros([N], dtype=tl.int64)
    factor = tl.full([], FIRST, dtype=tl.int64)
    for j in tl.static_range(1, LONGEST + 1):
        last = tl.load(text_ptr + length - j, mask=j <= length, other=0).to(tl.int64)
        total += tl.where(n >= j, last * factor, 0)
        factor = (factor * FACTOR) & MASK
    slot = (total & MASK) >> (HASH_BITS - BITS)
    at = ((n - 1).to(tl.int64) << BITS) + slot
    return tl.load(places_ptr + at, mask=(n <= LONGEST) & (n <= length), other=0)


@triton.jit
def recall(
    text_ptr, length, texts_ptr, num_texts, place, most,
    FEWEST: tl.constexpr, LONGEST: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tokens [BLOCK] and how many of them, at most `most`, are proposed; -1 from there on."""
    n = tl.arange(0, N) + 1
    i = tl.arange(0, BLOCK)
    there = place >= n
    behind = place[:, None] + i[None, :]
    inside = there[:, None] & (behind < num_texts) & (i < most)[None, :]
    following = tl.load(texts_ptr + behind, mask=inside, other=-1)
    agrees = there
    for j in tl.static_range(1, LONGEST + 1):
        last = tl.load(text_ptr + length - j, mask=j <= length, other=-1)
        seen = tl.load(texts_ptr + place - j, mask=there & (n >= j), other=-2)
        agrees = agrees & ((n < j) | (seen == last))
    matched = tl.max(tl.where(agrees & (n >= FEWEST), n, 0), axis=0)
    # One row of it and zeros; tokens of another length's place never mix with these.
    token = tl.sum(tl.where((n == matched)[:, None], following, 0), axis=0)
    size = tl.min(tl.where((token < 0) | (i >= most), i, BLOCK), axis=0)
    size = tl.where(matched > 0, size, 0)
    return tl.where(i < size, token, -1), size
