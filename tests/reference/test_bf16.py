"""The BF16 fma against rational arithmetic: one rounding, wherever the bits are."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.numbers import bf16_bits, bf16_value

from keysieve.reference.bf16 import fma_bf16, head_sum_bf16

FINITE = st.integers(0, 0x7F7F).flatmap(lambda m: st.sampled_from((m, m | 0x8000)))


def nearest(exact: Fraction) -> float:
    """The BF16 nearest to a rational, ties to even: spacing by spacing, no float arithmetic."""
    magnitude = abs(exact)
    spacing = Fraction(2) ** -133
    while magnitude >= spacing * 256:
        spacing *= 2
    count, rest = divmod(magnitude, spacing)
    if rest * 2 > spacing or (rest * 2 == spacing and count % 2):
        count += 1
    value = count * spacing
    result = math.inf if value >= Fraction(2) ** 128 else float(value)
    return -result if exact < 0 else result


def as_tensor(*patterns: int) -> torch.Tensor:
    return torch.tensor(patterns).to(torch.int16).view(torch.bfloat16)


def as_bf16(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


def fma(a: int, b: int, c: int) -> float:
    return float(fma_bf16(as_tensor(a), as_tensor(b), as_tensor(c)))


@settings(max_examples=600)
@given(FINITE, FINITE, FINITE)
def test_fma_rounds_once(a: int, b: int, c: int) -> None:
    exact = Fraction(bf16_value(a)) * Fraction(bf16_value(b)) + Fraction(bf16_value(c))
    assert fma(a, b, c) == nearest(exact)


@settings(max_examples=600)
@given(st.integers(0x80, 0xFF), st.integers(0x80, 0xFF), st.integers(-12, 60), FINITE, st.booleans())
def test_fma_rounds_once_where_two_roundings_differ(a: int, b: int, apart: int, tiny: int, opposite: bool) -> None:
    """A product of 16 significant bits, often half-way between two BF16, and an addend far below it."""
    left, right = bf16_bits(float(a)), bf16_bits(float(b))
    addend = bf16_bits(math.ldexp(bf16_value(tiny & 0x7F | 0x3F80), 7 - apart)) | (0x8000 if opposite else 0)
    exact = Fraction(a) * b + Fraction(bf16_value(addend))
    assert fma(left, right, addend) == nearest(exact)


@pytest.mark.parametrize(
    ("a", "b", "c", "want"),
    [
        (1.0 + 2.0**-7, 1.0 + 2.0**-7, 0.0, 1.015625),
        (0.5, 2.0**-7, 1.0, 1.0),  # 1 + 2^-8: a true tie goes to even
        (0.5, 3 * 2.0**-7, 1.0, 1.015625),  # 1 + 3 * 2^-8: a true tie goes to even, upwards
        (2.0**100, 2.0**100, -math.inf, -math.inf),
        (2.0**127, 2.0, 0.0, math.inf),
        (2.0**127, 1.0, 2.0**127, math.inf),
        (2.0**-133, 0.5, 0.0, 0.0),  # half the smallest subnormal, a tie: to even
        (2.0**-133, 0.75, 0.0, 2.0**-133),
        (2.0**-120, 2.0**-120, 2.0**-133, 2.0**-133),
        (-(2.0**-120), 2.0**-120, 0.0, 0.0),
    ],
)
def test_fma_at_edges(a: float, b: float, c: float, want: float) -> None:
    left, right, addend = (torch.tensor([x], dtype=torch.bfloat16) for x in (a, b, c))
    assert float(fma_bf16(left, right, addend)) == want


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        (math.nan, 1.0, 1.0),
        (0.0, math.nan, 1.0),
        (1.0, 1.0, math.nan),
        (math.inf, 0.0, 1.0),
        (math.inf, 1.0, -math.inf),
    ],
)
def test_fma_makes_nan_where_ieee_does(a: float, b: float, c: float) -> None:
    assert math.isnan(float(fma_bf16(*(torch.tensor([x], dtype=torch.bfloat16) for x in (a, b, c)))))


def test_a_halfway_product_and_an_addend_below_float64() -> None:
    """Products half-way between two BF16, and an addend that float64 loses: it alone decides the rounding."""
    pairs = [(a, b) for a in range(0x80, 0x100) for b in range(a, 0x100)]
    spacing = {pair: 1 << ((pair[0] * pair[1]).bit_length() - 8) for pair in pairs}
    halfway = [pair for pair in pairs if pair[0] * pair[1] % spacing[pair] == spacing[pair] // 2]
    assert len(halfway) > 20
    left, right = (as_bf16([float(pair[i]) for pair in halfway]) for i in (0, 1))
    for c in (2.0**-60, -(2.0**-60)):
        got = fma_bf16(left, right, as_bf16([c] * len(halfway))).tolist()
        assert got == [nearest(Fraction(a * b) + Fraction(c)) for a, b in halfway]


def test_heads_go_to_the_lanes_that_blackwell_gives_them() -> None:
    """In lane sums of 256 + many small terms, an order or lane that differs changes what is rounded away."""
    generator = torch.Generator().manual_seed(1)
    for heads in (8, 16, 32, 64):
        dots = torch.randn(heads, 2, 33, generator=generator) * torch.logspace(-1, 2, heads)[:, None, None]
        weights = torch.randn(heads, 2, generator=generator).to(torch.bfloat16)
        got = head_sum_bf16(dots.clone(), weights)
        relu = dots.clamp_min(0).to(torch.bfloat16)
        for row in range(2):
            for key in range(33):
                lanes = [0.0] * 4  # first accumulator low, high; second low, high
                for h in range(heads):
                    product = Fraction(float(relu[h, row, key])) * Fraction(float(weights[h, row]))
                    lanes[h % 4] = nearest(product + Fraction(lanes[h % 4]))
                low = nearest(Fraction(lanes[0]) + Fraction(lanes[2]))
                high = nearest(Fraction(lanes[1]) + Fraction(lanes[3]))
                want = nearest(Fraction(low) + Fraction(high))
                assert float(got[row, key]) == want
