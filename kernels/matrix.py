# mypy: disallow-untyped-defs=False
"""What the kernels of the forward share: a product of tiles, rounding, sums of parts.

Triton's interpreter multiplies bfloat16 as integers, float32 in an order that depends on the number
of columns, and cuts off what it should round to bfloat16. There the product is taken in float64,
which leaves no order to see, and rounding is done on the bits.
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def multiply(a, b, total):
    """total + a b in float32, no input rounded on the way."""
    if INTERPRETED:
        total = (total + tl.dot(a.to(tl.float64), b.to(tl.float64))).to(tl.float32)
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def narrow(x, like_ptr):
    """Float32 as the type behind the pointer holds it, rounded to the nearest, ties to even."""
    if INTERPRETED and like_ptr.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 32767 + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(like_ptr.dtype.element_ty)


@triton.jit
def rounded(x, like_ptr):
    """x as the type behind the pointer would hold it, in float32."""
    return narrow(x, like_ptr).to(tl.float32)


@triton.jit
def total_of_parts(parts_ptr, at, mask, stride, SPLIT: tl.constexpr):
    """The parts of a sum, added in their order."""
    total = tl.load(parts_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, SPLIT):
        total += tl.load(parts_ptr + part * stride + at, mask=mask, other=0.0).to(tl.float32)
    return total
