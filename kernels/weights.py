# mypy: disallow-untyped-defs=False
r"""Weights exp((z - M) / T) of a row of logits, as every verification kernel computes them.

With c = log2(e) / T a weight is 2^t, t = (z - M) c. In float64, 2^t = 2^n 2^f with n = round(t) and
|f| <= 1/2; 2^f is a polynomial of degree 9 that is 1 at f = 0 (relative error below 4e-14), a third
of the library's exp and free of its division. Weights of 2^-995 and less are nothing.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
ROUNDER = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52: what is added to it becomes whole
LEAST = tl.constexpr(690.0)  # logits this many temperatures below the largest have no weight
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the least float32 above -inf
# (2^f - 1) / f through its values at the nine Chebyshev points of [-1/2, 1/2].
C1, C2, C3 = (
    tl.constexpr(c) for c in (0.6931471805599453, 0.2402265069581299, 0.055504108664760424)
)
C4, C5, C6 = (
    tl.constexpr(c) for c in (0.009618129159402558, 0.0013333558179043112, 0.00015403455852453838)
)
C7, C8, C9 = (
    tl.constexpr(c) for c in (1.525268684626772e-05, 1.3255224878668817e-06, 1.0203121063391729e-07)
)


@triton.jit
def exp2_double(t):
    """2^t for float64 t in [-1000, 1000]; anything elsewhere."""
    rounded = t + ROUNDER
    f = t - (rounded - ROUNDER)
    p = C8 + f * C9
    p = C7 + f * p
    p = C6 + f * p
    p = C5 + f * p
    p = C4 + f * p
    p = C3 + f * p
    p = C2 + f * p
    p = C1 + f * p
    p = 1.0 + f * p
    # The lowest bits of the sum are n: shifted to where a float64 keeps its exponent.
    bits = p.to(tl.int64, bitcast=True) + (rounded.to(tl.int64, bitcast=True) << 52)
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def powers_of(temperature):
    """c of a row: a weight is 2^((z - M) c)."""
    return LOG2_E / temperature


@triton.jit
def lowest_of(peak, temperature, threshold):
    """float32 below which a logit has no weight: left out by truncation, or too far down."""
    far = (peak.to(tl.float64) - LEAST * temperature).to(tl.float32)
    return tl.maximum(tl.maximum(far, threshold), LOWEST)


@triton.jit
def weights(x, peak, lowest, scale):
    """2^((x - peak) scale) in float64 for float32 x at or above `lowest`, else 0."""
    t = (x.to(tl.float64) - peak.to(tl.float64)) * scale
    return tl.where(x >= lowest, exp2_double(t), 0.0)
