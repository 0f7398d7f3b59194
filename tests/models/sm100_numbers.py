"""Float32 and BF16 arithmetic for models of device code: exact formulas, one rounding an operation."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np


def rounded(value: Fraction, bits: int, least: int) -> Fraction:
    """To nearest even with `bits` significant bits, the last place never below 2**least."""
    if value == 0:
        return value
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent  # floor of the logarithm
    unit = Fraction(2) ** max(exponent - bits + 1, least)
    return round(value / unit) * unit  # Python rounds halves to even


def f32(value: Fraction) -> np.float32:
    return np.float32(float(rounded(value, 24, -149)))


NAN = 0x7FFF  # what conversion to BF16 and BF16 arithmetic answer for NaN


def bf16(value: Any) -> int:
    """BF16 bits of a finite number (float or Fraction), or of NaN."""
    if is_nan(value):
        return NAN
    exact = rounded(Fraction(float(value)) if not isinstance(value, Fraction) else value, 8, -133)
    return int(np.float32(float(exact)).view(np.uint32)) >> 16


def is_nan(value: Any) -> bool:
    return not isinstance(value, Fraction) and bool(np.isnan(float(value)))


def single(formula: Callable[..., Fraction], *values: Any) -> np.float32:
    """The formula in exact arithmetic, rounded to float32 once. NaN where an operand is one."""
    if any(is_nan(value) for value in values):
        return np.float32(np.nan)
    return f32(formula(*(Fraction(float(value)) for value in values)))


def half(formula: Callable[..., Fraction], *values: int) -> int:
    """The same on BF16 bits."""
    numbers = [np.uint32(bits << 16).view(np.float32) for bits in values]
    return NAN if any(map(is_nan, numbers)) else bf16(formula(*(Fraction(float(x)) for x in numbers)))


def halves(word: int) -> tuple[int, int]:
    return word & 0xFFFF, word >> 16 & 0xFFFF


class Numerics:
    """keysieve.device.numerics in exact arithmetic with one rounding an operation; NaN goes through, no infinities."""

    mul = staticmethod(lambda a, b: single(lambda x, y: x * y, a, b))
    add = staticmethod(lambda a, b: single(lambda x, y: x + y, a, b))
    fma = staticmethod(lambda a, b, c: single(lambda x, y, z: x * y + z, a, b, c))
    max_nan = staticmethod(lambda a, b: np.maximum(np.float32(a), np.float32(b)))
    max_num = staticmethod(lambda a, b: np.fmax(np.float32(a), np.float32(b)))
    twice_relu = staticmethod(lambda a: np.float32(2) * np.maximum(np.float32(a), np.float32(0)))
    float_bits = staticmethod(lambda a: int(np.float32(a).view(np.uint32)))
    bits_float = staticmethod(lambda bits: np.uint32(bits).view(np.float32))
    bf16_to_float = staticmethod(lambda bits: np.uint32(bits << 16).view(np.float32))
    bf16x2_bits = staticmethod(lambda low, high: bf16(low) | bf16(high) << 16)

    @staticmethod
    def relu_bf16x2(low: Any, high: Any) -> int:
        return bf16(np.maximum(low, np.float32(0))) | bf16(np.maximum(high, np.float32(0))) << 16

    @staticmethod
    def fma_bf16x2(a: int, b: int, c: int) -> int:
        three = zip(halves(a), halves(b), halves(c), strict=True)
        low, high = (half(lambda x, y, z: x * y + z, *values) for values in three)
        return low | high << 16

    @staticmethod
    def add_bf16x2(a: int, b: int) -> int:
        low, high = (Numerics.add_bf16(x, y) for x, y in zip(halves(a), halves(b), strict=True))
        return low | high << 16

    @staticmethod
    def add_bf16(a: int, b: int) -> int:
        return half(lambda x, y: x + y, a & 0xFFFF, b & 0xFFFF)
