"""BF16 arithmetic, exactly: fused multiply-add with one rounding, and the head sum of ``numerics="bf16"``.

torch has no BF16 fma on the CPU, and computing in a wider type and rounding twice is not the same: the first rounding
may land on a midpoint of the second. The classical remedy is *round to odd*: when the wide result is inexact and its
last bit is 0, step it to the neighbour on the side of the exact value. A later rounding to nearest even, to a type at
least two bits narrower, then gives what one rounding would have given.
"""

from __future__ import annotations

import torch

_SUMS = 4
"""Sums in flight: two BF16x2 accumulators; heads 0, 4, 8.. go to the first, 1, 5, .. to the second and so on."""


def _to_odd_float32(value: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """float32 of ``value + error`` rounded to odd; float64 ``error`` is at most half an ulp of ``value``."""
    near = value.to(torch.float32)
    rest = value - near.to(torch.float64)  # exact: both have at most 53 bits and are neighbours
    rest = torch.where(rest == 0, error, rest)
    bits = near.view(torch.int32)
    # A finite sum that rounds to infinity has rest = -inf or +inf: the step leads back to the largest finite value.
    inexact = (rest != 0) & ~rest.isnan() & ((bits & 1) == 0)
    outward = (rest > 0) == (bits >= 0)
    step = torch.where(outward, 1, -1).to(torch.int32)
    return (bits + step * inexact).view(torch.float32)


def fma_bf16(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """bfloat16 ``a * b + c`` of bfloat16 tensors that broadcast, rounded once to nearest even, subnormals kept."""
    # 8 by 8 bits and exponents far inside float64's: the product is exact.
    product = a.to(torch.float64) * b.to(torch.float64)
    addend = c.to(torch.float64)
    total = product + addend
    # Knuth's two-sum: total + error is the exact sum. Infinities give a NaN error, which means "no correction".
    back = total - product
    error = (product - (total - back)) + (addend - back)
    return _to_odd_float32(total, error).to(torch.bfloat16)


def head_sum_bf16(dots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """float32 ``[n, keys]`` (of BF16 values): the weighted sum of ``max(dot, 0)`` over heads, as Blackwell sums it.

    Every ``max(dot, 0)`` is rounded to BF16. Two BF16x2 accumulators take the heads in order by fma: the first takes
    head pairs (0,1) and (4,5) of every 8, the second (2,3) and (6,7). They are added as BF16x2, then low + high half.

    Args:
        dots: float32 ``[heads, n, keys]``; a NaN makes the sum NaN.
        weights: bfloat16 ``[heads, n]``.
    """
    relu = dots.clamp_min(0.0).to(torch.bfloat16)
    sums = torch.zeros(_SUMS, *dots.shape[1:], dtype=torch.bfloat16, device=dots.device)
    for h in range(0, dots.shape[0], _SUMS):
        sums = fma_bf16(relu[h : h + _SUMS], weights[h : h + _SUMS, :, None], sums)
    # The sum of two BF16 fits float32 to within an innocuous double rounding (24 >= 2 * 8 + 2 bits).
    low, high = sums[0] + sums[2], sums[1] + sums[3]
    return (low + high).to(torch.float32)
