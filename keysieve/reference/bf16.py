"""BF16 arithmetic, exactly: fused multiply-add with one rounding, and the head sum of ``numerics="bf16"``.

torch has no BF16 fma on the CPU, and computing in a wider type and rounding again is not the same: the first rounding
may land on a point half-way between two BF16 that the exact value is beside. Rounding is monotonic and every half-way
point is a float32, so that is the only way in which a second rounding goes wrong; such elements are found by their low
bits and stepped off the half-way point to the side of the exact value.
"""

from __future__ import annotations

import torch

_SUMS = 4
"""Sums in flight: two BF16x2 accumulators; heads 0, 4, 8.. go to the first, 1, 5, .. to the second and so on."""

_HALFWAY = 0x8000
"""The low 16 bits of a float32 that is half-way between two BF16."""


def fma_bf16(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """bfloat16 ``a * b + c`` of bfloat16 tensors that broadcast, rounded once to nearest even, subnormals kept."""
    # 8 by 8 bits and exponents far inside float64's: the product is exact, the sum may not be.
    product = a.to(torch.float64) * b.to(torch.float64)
    total = product + c.to(torch.float64)
    near = total.to(torch.float32)
    at = torch.nonzero((near.view(torch.int32) & 0xFFFF) == _HALFWAY, as_tuple=True)
    if at[0].numel():
        near[at] = _off_halfway(near[at], total[at], product.expand_as(total)[at], c.expand_as(total)[at])
    return near.to(torch.bfloat16)


def _off_halfway(near: torch.Tensor, total: torch.Tensor, product: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """float32 ``near`` (a rounded ``total``) moved one step towards ``product + addend`` unless it is just that."""
    # Knuth's two-sum: total + error is the exact sum. It counts only where float32 took nothing away.
    back = total - product
    error = (product - (total - back)) + (addend.to(torch.float64) - back)
    rest = total - near.to(torch.float64)
    rest = torch.where(rest == 0, error, rest)
    outward = torch.where((rest > 0) == (near > 0), 1, -1).to(torch.int32)
    return (near.view(torch.int32) + torch.where(rest == 0, 0, outward)).view(torch.float32)


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
