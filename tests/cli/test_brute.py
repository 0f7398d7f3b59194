"""The shipped brute force against facts worked out by hand: it must not owe its answers to the code it checks."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy as np
import pytest

from keysieve.check import brute


def test_it_shares_no_code_with_what_it_checks() -> None:
    tree = ast.parse(Path(brute.__file__).read_text())
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not {name for name in imported if name.split(".")[0] in ("keysieve", "torch")}


def test_codes_by_hand() -> None:
    value = {0x00: 0.0, 0x01: 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x39: 1.125, 0x7E: 448.0, 0xB8: -1.0, 0xFE: -448.0}
    for code, expected in value.items():
        assert brute.E4M3_UNITS[code] * 2.0**-9 == expected
    assert [h / 2 for h in brute.E2M1_HALVES[:8]] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert brute.ue8m0(np.array([0, 127, 254], dtype=np.uint8)).tolist() == [2.0**-127, 1.0, 2.0**127]
    assert math.isnan(brute.ue8m0(np.array([255], dtype=np.uint8))[0])


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        (1.0, 1.0, 2.0**-8, 1.0),  # a tie to even
        (1.0, 1.0, 2.0**-8 + 2.0**-15, 1.0 + 2.0**-7),  # just above the tie
        (1.0, 1.015625, 2.0**-8, 1.015625),  # a tie to even: 1 + 2/128 stays
        (1.0, 1.0078125, 2.0**-8, 1.015625),  # a tie to even: 1 + 1/128 goes up
        (37 / 32, 7 / 8, 2.0**-30, 1.015625),  # 259/256 is a tie, the tiny addend decides; float32 would lose it
        (37 / 32, 7 / 8, -(2.0**-30), 1.0078125),
        (2.0**-70, 2.0**-64, 0.0, 0.0),  # half the smallest subnormal, 2**-133: to even
        (2.0**-70, 1.5 * 2.0**-64, 0.0, 2.0**-133),
        (3.3895313892515355e38, 1.0, 3.3895313892515355e38, math.inf),
        (math.inf, 0.0, 1.0, math.nan),
    ],
)
def test_bf16_fma_by_hand(a: float, b: float, c: float, expected: float) -> None:
    got = brute.bf16_fma(a, b, c)
    assert got == expected or (math.isnan(expected) and math.isnan(got))
    assert brute.bf16_fma(-a, b, -c) == -expected or math.isnan(expected)


def test_selection_by_hand() -> None:
    #       1.0     -0      0     NaN    -inf    1.0    inf   payload NaN
    bits = [0x3F80, 0x8000, 0x0, 0xFFC0, 0xFF80, 0x3F80, 0x7F80, 0x7F81]
    row = np.array(bits, dtype=np.uint16)
    assert brute.key16(row).tolist() == [0xBF80, 0x8000, 0x8000, 0x3F, 0x7F, 0xBF80, 0xFF80, 0x3F]
    in_order = [6, 0, 5, 1, 2, 4, 3, 7]
    for k in range(1, 10):
        assert brute.select(row, k) == sorted(in_order[:k])
    assert brute.candidate_row(row, 3, 2) == [0xBF80FFFF, 0xBF80FFFA, 0xFF80FFF9, 0, 0]


def test_candidate_planes_by_hand() -> None:
    row = np.zeros(140000, dtype=np.uint16)
    row[[5, 65536 + 7, 131072 + 9]] = 0x3F80
    words = brute.candidate_row(row, 3, 2)
    assert [w & 0xFFFF for w in words[:3]] == [0xFFFF - 5, 0xFFFF - 7, 0xFFFF - 9]
    assert words[3:] == [0b010, 0b100]


def test_who_owns_what_by_hand() -> None:
    assert brute.owned_positions(10, 2, 0, 2) == [0, 1, 4, 5, 8, 9]
    assert brute.owned_positions(10, 2, 1, 2) == [2, 3, 6, 7]


def test_heads_are_rectified_and_summed() -> None:
    """Head 1 has dot +3, head 2 dot -5, weights 1: the score is 3, not -2."""
    query = np.zeros((8, 128), dtype=np.uint8)
    query[0, 0], query[1, 0] = 0x44, 0xCA  # 3, -5
    key = np.zeros((1, 128), dtype=np.uint8)
    key[0, 0] = 0x38
    one = np.array([[0, 0, 0x80, 0x3F]], dtype=np.uint8)
    for numerics in ("fp32", "bf16"):
        bits = brute.logits("fp8_fp32", numerics, query, None, np.ones(8, dtype=np.float32), key, one)
        assert bits.tolist() == [0x4040]
