"""The writers' rules in exact rational arithmetic, straight from the bit layouts: the oracle of the quantiser tests.

Nothing here uses torch or keysieve. Values are ``fractions.Fraction``; float32 roundings are made with numpy scalars.
"""

from __future__ import annotations

from bisect import bisect_left
from fractions import Fraction

import numpy as np


def _magnitudes(exponent_bits: int, mantissa_bits: int, bias: int, codes: int) -> list[Fraction]:
    values = []
    for code in range(codes):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        assert exponent < 1 << exponent_bits
        if exponent == 0:
            values.append(Fraction(mantissa, 1 << mantissa_bits) * Fraction(2) ** (1 - bias))
        else:
            values.append((1 + Fraction(mantissa, 1 << mantissa_bits)) * Fraction(2) ** (exponent - bias))
    return values


E4M3 = _magnitudes(4, 3, 7, 127)
"""Value of E4M3 code 0..126; 127 is NaN. There is no infinity: 126 is 448."""

E2M1 = _magnitudes(2, 1, 1, 8)
"""Value of E2M1 code 0..7."""


def nearest(table: list[Fraction], value: Fraction, ties: str = "even") -> int:
    """Code of the table entry nearest to ``value`` >= 0, saturating; ties to the even code or to the smaller value."""
    if value >= table[-1]:
        return len(table) - 1
    above = bisect_left(table, value)
    if table[above] == value:
        return above
    below = above - 1
    down, up = value - table[below], table[above] - value
    if down != up:
        return below if down < up else above
    if ties == "zero":
        return below
    return below if below % 2 == 0 else above


def power_of_two_scale(amax: Fraction, limit: int) -> int:
    """The smallest power k with ``amax / 2**k <= limit``."""
    k = -200
    while amax > limit * Fraction(2) ** k:
        k += 1
    return k


def f32(value: Fraction | float) -> np.float32:
    """A float32 that represents ``value`` exactly."""
    rounded = np.float32(float(value))
    assert Fraction(float(rounded)) == Fraction(value)
    return rounded


def fp8_key(key: list[np.float32], pow2: bool, floor: np.float32) -> tuple[list[int], np.float32]:
    """Codes and float32 scale of one block of finite float32 values."""
    amax = max(max(abs(float(x)) for x in key), float(floor))
    rounded_up = f32(Fraction(2) ** power_of_two_scale(Fraction(amax), 448))
    scale = rounded_up if pow2 else np.float32(amax) / np.float32(448)
    codes = []
    for x in key:
        quotient = Fraction(float(np.float32(x) / scale))  # the contract's quotient is rounded to float32
        codes.append(nearest(E4M3, abs(quotient)) | (0x80 if np.signbit(x) else 0))
    return codes, scale


def mxfp4_block(block: list[np.float32], ties: str, floor: Fraction) -> tuple[list[int], int]:
    """Nibbles and UE8M0 byte of one block of 32 finite float32 values; all of it exact."""
    amax = max(max(abs(Fraction(float(x))) for x in block), floor)
    k = power_of_two_scale(amax, 6)
    nibbles = []
    for x in block:
        code = nearest(E2M1, abs(Fraction(float(x))) / Fraction(2) ** k, ties)
        signed = np.signbit(x) if ties == "even" else x < 0 and code != 0
        nibbles.append(code | (8 if signed else 0))
    return nibbles, k + 127
