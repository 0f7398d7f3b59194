"""The brute force checks itself: against exact rational arithmetic and against torch's own conversions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from oracle.numbers import E4M3, bf16_bits, bf16_fma, bf16_round, bf16_value, bits_of_values, e2m1
from oracle.select import canonical, key16, select


def nearest_bf16(exact: Fraction) -> float:
    """The BF16 nearest to a rational, ties to the even pattern, by looking at every neighbour of a first guess."""
    if exact == 0:
        return 0.0
    guess = bf16_bits(float(exact)) & 0x7FFF
    best: tuple[Fraction, int, int] | None = None
    for bits in range(max(guess - 2, 0), min(guess + 3, 0x7F80)):
        distance = abs(Fraction(bf16_value(bits)) - abs(exact))
        if best is None or (distance, bits & 1) < best[:2]:
            best = (distance, bits & 1, bits)
    assert best is not None
    half_way_to_infinity = Fraction(511, 256) * 2**127
    if abs(exact) >= half_way_to_infinity:
        return math.copysign(math.inf, exact)
    return math.copysign(bf16_value(best[2]), exact)


def test_e4m3_decoding_agrees_with_torch_on_all_codes() -> None:
    torch_values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(E4M3, torch_values)


def test_e2m1_values() -> None:
    assert [e2m1(code) for code in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [e2m1(code) for code in range(9, 16)] == [-0.5, -1, -1.5, -2, -3, -4, -6]


def test_bf16_values_agree_with_torch_on_all_patterns() -> None:
    patterns = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).double().numpy()
    mine = np.array([bf16_value(bits) for bits in range(1 << 16)])
    np.testing.assert_array_equal(mine, patterns)


def edge_values() -> np.ndarray:
    """Values at, next to and between BF16 patterns, the whole range of float64 exponents that matter included."""
    rng = np.random.default_rng(5)
    patterns = np.array([bf16_value(int(bits)) for bits in rng.integers(0, 0x7F80, 400)] + [0.0, 2.0**-133, 2.0**-134])
    following = np.array([bf16_value(bf16_bits(float(value)) + 1) for value in patterns])
    following = np.where(np.isfinite(following), following, 2.0**128)
    middle = (patterns + following) / 2
    values = np.concatenate([patterns, middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf)])
    return np.concatenate([values, -values, 2.0 ** rng.uniform(-140, 130, 500)])


def test_both_roundings_to_bf16_agree_with_rational_arithmetic() -> None:
    values = edge_values()
    rounded = bf16_round(values)
    for value, got in zip(values.tolist(), rounded.tolist(), strict=True):
        want = nearest_bf16(Fraction(value))
        assert got == want, value
        assert bf16_value(bf16_bits(value)) == want, value


def test_special_values_round_to_themselves() -> None:
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0])
    assert bits_of_values(bf16_round(special)).tolist() == [0xFFC0, 0x7F80, 0xFF80, 0, 0]
    assert [bf16_bits(v) for v in (math.nan, math.inf, -math.inf, 0.0)] == [0xFFC0, 0x7F80, 0xFF80, 0]


def test_fma_rounds_once() -> None:
    """Half-way products with an addend far below them: a second rounding would lose the addend."""
    rng = np.random.default_rng(7)
    a = np.array([bf16_value(int(bits)) for bits in rng.integers(0x3C00, 0x4200, 3000)])
    b = np.array([bf16_value(int(bits)) for bits in rng.integers(0x3C00, 0x4200, 3000)])
    c = np.array([bf16_value(int(bits)) for bits in rng.integers(0x0001, 0x4200, 3000)])
    c *= rng.choice([-1.0, 1.0], 3000)
    got = bf16_fma(a, b, c)
    twice = bf16_round(a * b + c)
    for x, y, z, value in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        assert value == nearest_bf16(Fraction(x) * Fraction(y) + Fraction(z))
    assert (got != twice).any()  # the inputs do tell one rounding from two


def test_key16_orders_every_pattern() -> None:
    """NaN below -inf, -0 equal to +0, everything else by value; 0 is nobody's image."""
    patterns = [bits for bits in range(1 << 16) if canonical(bits) == bits]
    images = {bits: key16(bits) for bits in patterns}
    assert len(set(images.values())) == len(patterns)
    assert 0 not in images.values()
    assert images[0xFFC0] == 0x003F
    assert images[0xFF80] == 0x007F
    real = sorted((bits for bits in patterns if bits != 0xFFC0), key=bf16_value)
    ordered = [images[bits] for bits in real]
    assert ordered == sorted(ordered)
    assert images[0xFFC0] < min(ordered)


@pytest.mark.parametrize("length", [100, 5000])
def test_both_ways_to_select_are_the_definition(length: int) -> None:
    rng = np.random.default_rng(length)
    bits = rng.integers(0x3F80, 0x3F90, length).astype(np.uint16)
    chosen = select(bits, 64)
    threshold = sorted((key16(int(b)) for b in bits), reverse=True)[63]
    above = [i for i in range(length) if key16(int(bits[i])) > threshold]
    tied = [i for i in range(length) if key16(int(bits[i])) == threshold]
    assert chosen == sorted(above + tied[: 64 - len(above)])
