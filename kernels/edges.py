# mypy: disallow-untyped-defs=False
"""Which groups of a row hold its largest logits: a value that enough of their maxima reach.

Values are looked for by their order_key, four counted from at once, from guesses that are nearly
always right: what takes time is that threads meet.
"""

import triton
import triton.language as tl

from kernels.accept import two_sums
from kernels.matrix import INTERPRETED
from kernels.rows import key_value, order_key

BOTTOM = tl.constexpr(-2139095040)  # the key of the least float32 above -inf
UNKNOWN = tl.constexpr(65535)  # more than there are groups


@triton.jit
def _largest_four(a, b, c, d, more_a, more_b, more_c, more_d):
    return (
        tl.maximum(a, more_a), tl.maximum(b, more_b), tl.maximum(c, more_c), tl.maximum(d, more_d),
    )  # fmt: skip


@triton.jit
def four_maxima(a, b, c, d):
    """Maxima of four vectors, for the time of one."""
    if INTERPRETED:
        return tl.max(a, axis=0), tl.max(b, axis=0), tl.max(c, axis=0), tl.max(d, axis=0)
    return tl.reduce((a, b, c, d), 0, _largest_four)


@triton.jit
def two_counts(tops, live, lower, upper):
    """How many of (fewer than 65536) values reach the values of two keys, in 16 bits each."""
    upper_ones = (live & (tops >= key_value(upper.to(tl.int32)))).to(tl.int32) << 16
    return (live & (tops >= key_value(lower.to(tl.int32)))).to(tl.int32) + upper_ones


@triton.jit
def closer(key, count, most, low, beyond, high, reached):
    """Both ends of a search, one of them moved to a key that `count` reach, where it is nearer."""
    few, many = (count <= most) & (key < high), (count > most) & (key > low)
    low, beyond = tl.where(many, key, low), tl.where(many, count, beyond)
    return low, beyond, tl.where(few, key, high), tl.where(few, count, reached)


@triton.jit
def narrowed(tops, live, a, b, c, d, most, low, beyond, high, reached):
    """Both ends of a search after four more keys, each counted from at once."""
    ab, cd = two_sums(two_counts(tops, live, a, b), two_counts(tops, live, c, d))
    low, beyond, high, reached = closer(a, ab & 65535, most, low, beyond, high, reached)
    low, beyond, high, reached = closer(b, ab >> 16, most, low, beyond, high, reached)
    low, beyond, high, reached = closer(c, cd & 65535, most, low, beyond, high, reached)
    return closer(d, cd >> 16, most, low, beyond, high, reached)


@triton.jit
def key_from(value, high):
    """The key of a value, from BOTTOM to `high`."""
    return tl.minimum(tl.maximum(order_key(value).to(tl.int64), BOTTOM), high)


@triton.jit
def one_where_reached(a, b):
    """float32 of a >= b, one instruction each; sums of these are exact."""
    if INTERPRETED:
        return (a >= b).to(tl.float32)
    return tl.inline_asm_elementwise(
        "set.ge.f32.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def columns_that_hold(groups, COLUMNS: tl.constexpr):
    """In how many columns so many largest groups lie, if any group may lie in any of them."""
    return ((1.0 - tl.exp(-groups / COLUMNS)) * COLUMNS + 0.5).to(tl.int32)


@triton.jit
def group_edge(
    tops, live, peak, enough, most, CAP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """A key that `enough` of `tops` reach, `most` if ties allow, CAP at most, and how many do.

    The n-th largest of the columns' maxima is reached by n groups at least. Neighbours lie in
    different columns, so that by and large it is reached by n + n^2 / (2 COLUMNS) and a few more:
    four such guesses leave little to search.
    """
    columns = tl.max(tl.reshape(tops, (GROUPS // COLUMNS, COLUMNS)), axis=0)
    rank = tl.sum(one_where_reached(columns[:, None], columns[None, :]), axis=0)
    spread = tl.minimum(most - enough, enough // 4 + 4).to(tl.float32)
    groups = enough.to(tl.float32)
    low = tl.full((), BOTTOM, tl.int64)
    high = order_key(peak).to(tl.int64) + 1
    reached = tl.full((), 0, tl.int32)  # by `high`; never more than `most`
    beyond = tl.full((), UNKNOWN, tl.int32)  # reach `low`
    none = -float("inf")
    a, b, c, d = four_maxima(
        tl.where(rank >= enough, columns, none),
        tl.where(rank >= columns_that_hold(groups + 0.7 * spread, COLUMNS), columns, none),
        tl.where(rank >= columns_that_hold(groups + 0.4 * spread, COLUMNS), columns, none),
        tl.where(rank >= columns_that_hold(groups + 0.1 * spread, COLUMNS), columns, none),
    )
    a, b, c, d = key_from(a, high), key_from(b, high), key_from(c, high), key_from(d, high)
    low, beyond, high, reached = narrowed(tops, live, a, b, c, d, most, low, beyond, high, reached)
    while (high - low > 1) & (reached < enough):
        step, end = tl.maximum((high - low) // 5, 1), high
        first = low
        low, beyond, high, reached = narrowed(
            tops, live, first + step, tl.minimum(first + 2 * step, end),
            tl.minimum(first + 3 * step, end), tl.minimum(first + 4 * step, end),
            most, low, beyond, high, reached,
        )  # fmt: skip
    if (reached < enough) & (beyond <= CAP):  # a tie lies across `most`
        high = low
        reached = beyond
    return high.to(tl.int32), reached
