"""MXFP4 on Hopper, without a device: the kernel's own bit arithmetic and placement, executed as plain integers."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")

from keysieve.kernels import sm90_mxfp4_math as wide

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.fixture(autouse=True)
def plain_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions under test only shift, mask, add and choose: Python's integers do as well."""
    monkeypatch.setattr(wide, "Uint32", int)
    monkeypatch.setattr(wide, "select", lambda condition, yes, no: yes if condition else no)


def e2m1(code: int) -> float:
    return -E2M1[code & 7] if code & 8 else E2M1[code & 7]


def bf16(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    return value


def rounded(value: float) -> float:
    """`value` if BF16 holds it exactly; fails otherwise."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    assert bits & 0xFFFF == 0
    assert bf16(bits >> 16) == value, "not a BF16 number"
    return value


def halves(word: int) -> tuple[float, float]:
    return bf16(word & 0xFFFF), bf16(word >> 16 & 0xFFFF)


def test_nibbles() -> None:
    """Every nibble at every place becomes its value times 2^-126, whatever stands beside it."""
    draw = random.Random(1)
    for _ in range(500):
        word = draw.getrandbits(32)
        for p in range(4):
            low, high = halves(wide.spread(word, p))
            assert low == e2m1(word >> 4 * p & 15) * 2.0**-126
            assert high == e2m1(word >> 4 * (p + 4) & 15) * 2.0**-126


@pytest.mark.parametrize("shift", [wide.KEY_SHIFT, wide.QUERY_SHIFT])
def test_every_code_with_every_scale_is_exact(shift: int) -> None:
    for scale in range(255):
        first, second, split = wide.factors(scale, shift)
        assert halves(first)[0] == halves(first)[1]
        assert split or halves(second) == (1.0, 1.0), "the second product may be left out"
        for code in E2M1:
            once = rounded(code * 2.0**-126 * halves(first)[0])
            assert rounded(once * halves(second)[0]) == code * 2.0 ** (scale - 127 - shift)


def test_nan_scale() -> None:
    first, _second, _split = wide.factors(255, wide.KEY_SHIFT)
    assert all(value != value for value in halves(first))


def test_weights_take_back_what_operands_were_scaled_down_by() -> None:
    assert wide.WEIGHT_FACTOR * 2.0 * 2.0**-wide.KEY_SHIFT * 2.0**-wide.QUERY_SHIFT == 1.0


@pytest.mark.parametrize("columns", [8, 24, 64])
def test_keys_and_queries_meet_at_the_same_depth(columns: int) -> None:
    """Elements by operand register, as the instruction defines them, against elements by swizzled shared memory."""
    held: dict[tuple[int, int], Any] = {}
    for column in range(columns):
        for block in range(4):
            for i in range(4):
                for p in range(4):
                    at = column * 128 + 4 * block + wide.query_place(i, p, column % 8, columns)
                    for half in range(2):
                        place = at + 2 * half
                        assert (place, 0) not in held
                        held[place, 0] = (column, 32 * block + 8 * i + p + 4 * half)
    assert len(held) == columns * 128
    for column in range(columns):
        for block in range(4):  # the thread's place in its quad
            for register in range(32):  # `widen_keys`: words[8 i + 2 p + r]
                i, p = register // 8, register // 2 % 4
                step, upper = register // 4, register // 2 % 2  # the operand: registers 4 k + 2 upper + r of step k
                for half in range(2):
                    depth = 16 * step + 8 * upper + 2 * block + half
                    line = depth // 64 * columns * 128 + column * 128
                    place = line + ((depth % 64 // 8) ^ (column % 8)) * 16 + depth % 8 * 2
                    assert held[place, 0] == (column, 32 * block + 8 * i + p + 4 * half)
