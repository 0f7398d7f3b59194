"""How far a GPU logit may lie from the exact one: the bound that docs/numerics.md derives."""

from __future__ import annotations

import torch

ACCUMULATOR_BITS = 13
"""Fraction bits below the largest addend that the sm90 FP8 matrix unit keeps when it adds."""

INSTRUCTIONS = 4
"""Matrix instructions a dot of 128 elements is made of, 32 products and the running sum each."""

UNIT = 2.0**-24
"""Half an ulp of float32, relative."""


def dot_bound(bits: int = ACCUMULATOR_BITS) -> float:
    """Worst error of one dot as a multiple of the sum of its products' magnitudes."""
    return INSTRUCTIONS * 33 * 2.0**-bits


def logit_bound(exact: torch.Tensor, magnitude: torch.Tensor, heads: int) -> torch.Tensor:
    """Largest |stored logit - exact logit| that sm90 may show, float64.

    exact: the exact logits. magnitude: |scale| * sum over heads of |weight| * sum over elements of |query * key|.
    """
    roundings = heads // 8 + 4  # multiply-adds of one thread, three additions across, the key's scale
    before = magnitude * (dot_bound() + roundings * UNIT * (1.0 + dot_bound()))
    half_ulp = (exact.abs() + before) * 2.0**-8 + 2.0**-134  # BF16, subnormal logits included
    return before + half_ulp
