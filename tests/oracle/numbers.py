"""Small floats decoded by hand, and rounding to BF16 that is correct for every input."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def e4m3(code: int) -> float:
    """Value of an E4M3 code: sign, 4 exponent bits with bias 7, 3 mantissa bits, no infinities, 0x7F and 0xFF NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e2m1(code: int) -> float:
    """Value of an E2M1 code (4 bits)."""
    magnitude = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7]
    return -magnitude if code & 8 else magnitude


def ue8m0(byte: int) -> float:
    """Value of a UE8M0 byte: a power of two; 0 is 2^-127 and 255 is NaN."""
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


E4M3 = np.array([e4m3(code) for code in range(256)])
E2M1 = np.array([e2m1(code) for code in range(16)])
UE8M0 = np.array([ue8m0(byte) for byte in range(256)])


def bf16_value(bits: int) -> float:
    """Value of a BF16 pattern, as a Python float."""
    sign = -1.0 if bits & 0x8000 else 1.0
    exponent, fraction = bits >> 7 & 0xFF, bits & 0x7F
    if exponent == 255:
        return math.nan if fraction else sign * math.inf
    if exponent == 0:
        return sign * fraction * 2.0**-133
    return sign * (128 + fraction) * 2.0 ** (exponent - 134)


def bf16_bits(value: float) -> int:
    """BF16 pattern of a float: nearest, ties to even, overflow to infinity; NaN gives 0xFFC0. One value, by search.

    The candidates are the two patterns around the value, found by arithmetic on the exponent; nothing here relies on
    another float format.
    """
    if math.isnan(value):
        return 0xFFC0
    sign = 0x8000 if math.copysign(1.0, value) < 0 else 0
    magnitude = abs(value)
    if math.isinf(magnitude):
        return sign | 0x7F80
    exponent = max(math.frexp(magnitude)[1] - 1, -126) if magnitude else -126
    scaled = math.ldexp(magnitude, 7 - exponent)  # exact: a power of two
    whole = math.floor(scaled)
    rest = scaled - whole
    if rest > 0.5 or (rest == 0.5 and whole & 1):
        whole += 1
    bits = whole if exponent == -126 and whole < 128 else ((exponent + 127) << 7) + whole - 128
    return sign | min(bits, 0x7F80)


def bf16_round(values: F64) -> F64:
    """Every element rounded to the nearest BF16 (ties to even), as float64. Exact for any float64 input."""
    mantissa, exponent = np.frexp(values)
    quantum = np.ldexp(1.0, np.maximum(exponent - 8, -133))
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = np.rint(values / quantum) * quantum  # a power of two: the division is exact, rint ties to even
        largest = (2.0 - 2.0**-7) * 2.0**127
        rounded = np.where(np.abs(rounded) > largest, np.copysign(np.inf, values), rounded)
    del mantissa
    return np.where(np.isfinite(values), rounded, values)


def bf16_fma(a: F64, b: F64, c: F64) -> F64:
    """``a * b + c`` of BF16 values with a single rounding to BF16.

    The product of two BF16 is exact in float64. The sum may not be, so its rounding error is recovered and the sum is
    made odd before the last rounding: an inexact float64 sum must not look like an exact half-way case.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        product = a * b
        total = product + c
        virtual = total - product
        error = (product - (total - virtual)) + (c - virtual)
    inexact = np.isfinite(total) & (error != 0)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    odd = np.where(inexact & even, np.nextafter(total, towards), total)
    return bf16_round(odd)


def f32(values: F64) -> F64:
    """Every element rounded to float32 once, as float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32).astype(np.float64)


def bits_of_values(values: F64) -> NDArray[np.uint16]:
    """BF16 patterns of values that already are BF16: -0 as +0, NaN as 0xFFC0 (what the contract stores)."""
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    bits = np.where(values == 0, np.uint16(0), bits)
    return np.where(np.isnan(values), np.uint16(0xFFC0), bits)
