"""Logits of MXFP4 on Hopper whose scales lie at the ends of float32's range, without a device.

The kernel's own steps from scale codes to a logit, in float32: dots block by block with all scales inside, weights as
the query warp keeps them, and what is multiplied last. Held to exact arithmetic wherever nothing that the contract
names (dots, their products with weights, sums of those) leaves float32's range.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")

from test_sm90_mxfp4 import E2M1, Word, by_halves, byte_perm

from keysieve.device import numerics, packed, ptx
from keysieve.kernels import sm90_mxfp4_apart as apart
from keysieve.kernels import sm90_mxfp4_query as queries
from keysieve.kernels import sm90_mxfp4_scales as scales
from keysieve.kernels.sm90_mxfp4_config import REACH, TOP

UNIT = Fraction(1, 1 << 24)
HEADS = 8
LIMIT = Fraction(2) ** 127
F32 = np.float32


def float_bits(value: Any) -> Word:
    return Word(int(F32(value).view(np.uint32)))


def bits_float(bits: int) -> np.float32:
    return np.uint32(int(bits)).view(F32)


def fma(a: Any, b: Any, c: Any) -> np.float32:
    return F32(np.float64(a) * np.float64(b) + np.float64(c))


@pytest.fixture(autouse=True)
def registers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Words as 32-bit integers, floats as numpy's float32, which rounds as the device does, subnormals included."""
    for name, function in (("byte_perm", byte_perm), ("max_u16x2", by_halves(max))):
        monkeypatch.setattr(ptx, name, function)
    monkeypatch.setattr(packed, "min_u16x2", by_halves(min))
    for name, function in (("mul", lambda a, b: F32(a) * F32(b)), ("add", lambda a, b: F32(a) + F32(b)), ("fma", fma)):
        monkeypatch.setattr(numerics, name, function)
    monkeypatch.setattr(numerics, "bits_float", bits_float)
    for module in (scales, queries, apart):
        monkeypatch.setattr(module, "Uint32", Word)
        monkeypatch.setattr(module, "Int32", int)
        monkeypatch.setattr(module, "select", lambda condition, yes, no: yes if condition else no)
    monkeypatch.setattr(apart, "Float32", F32)
    with np.errstate(all="ignore"):
        yield


TWICE = np.array([*(int(2 * v) for v in E2M1), *(int(-2 * v) for v in E2M1)])
"""Twice the value of each E2M1 code."""


@dataclass(frozen=True)
class Vector:
    """Four blocks of 32 E2M1 codes [4, 32] with a scale code each."""

    codes: Any
    scales: list[int]


@dataclass(frozen=True)
class Placed:
    """A vector as the kernel has it: the exponents it is widened with, the factor's bits, and its codes (`NO_CODES`:
    together)."""

    codes: Any
    exponents: list[int]
    factor: Word
    apart: Word


def placed(vector: Vector) -> Placed:
    word = Word(sum(code << 8 * i for i, code in enumerate(vector.scales)))
    zero = Word(sum(0xFF << 8 * i for i in range(4) if not TWICE[vector.codes[i]].any()))
    offsets, factor, far = scales.place_scales(word, zero)
    exponents = [(int(offsets) >> 8 * i & 255) // 8 + TOP - REACH for i in range(4)]
    return Placed(vector.codes, exponents, factor, word if far else Word(scales.NO_CODES))


def quarters(key: Any, query: Any) -> list[int]:
    """Four times the dots of two vectors' codes, block by block."""
    return [int(n) for n in (TWICE[key.codes] * TWICE[query.codes]).sum(1)]


def block_dots(key: Placed, query: Placed) -> list[np.float32]:
    """What one product of each block gives: exact."""
    exponents = [a + b - 2 for a, b in zip(key.exponents, query.exponents, strict=True)]
    found = [F32(n * 2.0**e) for n, e in zip(quarters(key, query), exponents, strict=True)]
    assert all(n * 2.0**e == f for n, e, f in zip(quarters(key, query), exponents, found, strict=True))
    return found


def kept_weights(row: list[Placed], weights: list[np.float32]) -> tuple[bool, list[np.float32]]:
    """`scale_weights`: (is the row marked, what is kept)."""
    halves = [F32(w) * F32(0.5) * bits_float(q.factor) for w, q in zip(weights, row, strict=True)]
    marked = any(q.apart != scales.NO_CODES for q in row) or any(
        queries.leaves_range(float_bits(w), float_bits(half)) for w, half in zip(weights, halves, strict=True)
    )
    if not marked:
        return False, halves
    nan = scales.NAN_BITS
    return True, [bits_float(nan) if q.factor == nan else F32(w) for w, q in zip(weights, row, strict=True)]


def relu(value: np.float32) -> np.float32:
    return value if value > 0 or np.isnan(value) else F32(0)


def logit(key: Placed, row: list[Placed], weights: list[np.float32], factor_last: bool = False) -> np.float32:
    """A logit before BF16. factor_last: as it would be if dots had no factor of their key in them."""
    marked, kept = kept_weights(row, weights)
    alone = marked or key.apart != scales.NO_CODES
    total = F32(0)
    own = apart.whole_codes(key.apart, key.factor)
    if factor_last and key.apart == scales.NO_CODES:
        own = key.apart
    for query, weight in zip(row, kept, strict=True):
        blocks = block_dots(key, query)
        if alone:
            sums = (F32(0), F32(0))
            for b in range(4):
                sums = apart.add_block(sums, blocks[b], own, apart.whole_codes(query.apart, query.factor), b)
            dot, weight = apart.blocks_dot(sums), apart.whole_weight(weight, query.factor, marked)
        else:
            dot = F32(2) * F32(sum(map(float, blocks)))
        total = fma(relu(dot), weight, total)
    return F32(numerics.mul(total, apart.final_factor(key.factor, alone and not factor_last)))


@dataclass(frozen=True)
class Exact:
    """A logit; the magnitude that roundings are relative to; the largest of dots and of that; sum of |weights|."""

    logit: Fraction
    magnitude: Fraction
    most: Fraction
    weights: Fraction


def exact_logit(key: Vector, row: list[Vector], weights: list[np.float32]) -> Exact:
    total = magnitude = most = Fraction(0)
    for query, weight in zip(row, weights, strict=True):
        w = Fraction(float(weight))
        sizes = [Fraction(2) ** (a + b - 256) for a, b in zip(key.scales, query.scales, strict=True)]
        dot = sum((n * size for n, size in zip(quarters(key, query), sizes, strict=True)), Fraction(0))
        terms = np.abs(TWICE[key.codes] * TWICE[query.codes]).sum(1)
        total += max(dot, Fraction(0)) * w
        magnitude += sum((int(n) * size for n, size in zip(terms, sizes, strict=True)), Fraction(0)) * abs(w)
        most = max(most, abs(dot))
    return Exact(total, magnitude, max(most, magnitude), sum((abs(Fraction(float(w))) for w in weights), Fraction(0)))


def draw_scales(draw: random.Random) -> list[int]:
    kind = draw.choice(("ordinary", "ordinary", "low", "high", "any", "one"))
    if kind == "ordinary":
        return [draw.randrange(110, 140) for _ in range(4)]
    if kind == "low":
        return [draw.randrange(0, 12) for _ in range(4)]
    if kind == "high":
        return [draw.randrange(235, 255) for _ in range(4)]
    if kind == "any":
        return [draw.randrange(255) for _ in range(4)]
    near = draw.choice((87, 90, 127, 160, 167))
    found = [min(167, max(87, near + draw.randrange(-7, 7))) for _ in range(4)]
    if draw.random() < 0.3:
        found[draw.randrange(4)] = draw.choice((0, 1, 254))
    return found


def draw_vector(draw: random.Random) -> Vector:
    codes = np.array([[draw.randrange(16) if draw.random() < 0.5 else 0 for _ in range(32)] for _ in range(4)])
    if draw.random() < 0.2:
        codes[draw.randrange(4)] = 0
    if draw.random() < 0.3:  # two blocks that may cancel
        codes[1] = codes[0] ^ 8
    return Vector(codes, draw_scales(draw))


def draw_weights(draw: random.Random, largest: int) -> list[np.float32]:
    """`largest`: so that some weights bring the logit back into the range that its dots leave nearly."""
    exponent = draw.choice((0, 0, -10, -60, -100, -126, -140, 80, 110, largest, largest))
    exponent = max(-140, min(126, exponent))
    draw_sign = [draw.choice((1, 1, -1)) for _ in range(HEADS)]
    found = [F32(s * (1 + draw.random()) * 2.0**exponent) for s in draw_sign]
    if draw.random() < 0.2:
        found[draw.randrange(HEADS)] = F32(draw.choice((0.0, 1.0, 2.0**-149, 3.0e38)))
    return found


def test_far_scales_give_what_the_contract_gives() -> None:
    draw = random.Random(11)
    checked = alone = sooner = 0
    for turn in range(2000):
        key = draw_vector(draw)
        row = [draw_vector(draw)] * HEADS if draw.random() < 0.3 else [draw_vector(draw) for _ in range(HEADS)]
        reach = max(key.scales) + max(max(q.scales) for q in row) - 254
        weights = draw_weights(draw, -reach + draw.randrange(-8, 100))
        exact = exact_logit(key, row, weights)
        if exact.most >= LIMIT:
            continue
        k, r = placed(key), [placed(q) for q in row]
        got = logit(k, r, weights)
        # Each dot is float32, subnormal ones included: four blocks and their sums, a unit of 2^-149 each at the most.
        bound = exact.magnitude * (HEADS + 12) * UNIT + (exact.weights * 8 + HEADS + 2) * Fraction(2) ** -149
        assert np.isfinite(got), f"turn {turn}: {got}, exact {float(exact.logit)}"
        assert abs(Fraction(float(got)) - exact.logit) <= bound, f"turn {turn}: {got}, exact {float(exact.logit)}"
        checked += 1
        alone += kept_weights(r, weights)[0] or k.apart != scales.NO_CODES
        sooner += not np.isfinite(logit(k, r, weights, factor_last=True))
    assert checked > 700
    assert alone > 350
    assert sooner > 5, "no draw reaches where a factor applied last is too late"


def one(sign: int = 1) -> list[int]:
    return [2 if sign > 0 else 10] + [0] * 31


def test_a_factor_applied_last_is_too_late() -> None:
    """A query scale of 2^127 and a key that is together, with a factor of 2^-40: infinite if that came last."""
    key = Vector(np.array([one()] * 4), [93] * 4)
    row = [placed(Vector(np.array([one()] * 4), [254, 100, 100, 100]))] * HEADS
    weights = [F32(1)] * HEADS
    assert logit(placed(key), row, weights) == F32(HEADS * 2.0**93)
    assert np.isinf(logit(placed(key), row, weights, factor_last=True))


def test_blocks_that_cancel_are_not_infinite_on_the_way() -> None:
    key = Vector(np.array([one(), one(-1), one(), one()]), [200, 200, 127, 127])
    row = [placed(Vector(np.array([one()] * 4), [254, 254, 127, 128]))] * HEADS
    got = logit(placed(key), row, [F32(0.5)] * HEADS)
    assert got == F32(HEADS * 0.5 * 3), "large blocks leave nothing: the small ones, exactly"


def test_a_weight_beyond_what_its_factor_leaves() -> None:
    """Weights times factors of heads would overflow, or vanish; sums of products would as well. The logits do not."""
    codes = np.array([one()] * 4)
    for weight, query_code, key_code in ((2.0**100, 160, 87), (2.0**-130, 90, 165), (2.0**-149, 127, 167)):
        key, row = Vector(codes, [key_code] * 4), [Vector(codes, [query_code] * 4)] * HEADS
        got = logit(placed(key), [placed(q) for q in row], [F32(weight)] * HEADS)
        assert got == F32(HEADS * 4 * weight * 2.0 ** (query_code + key_code - 254))


def test_weights_are_kept_where_sums_of_them_hold() -> None:
    """What stays multiplied by its factor is exact, and neither vanishes nor overflows beside any dot; no row goes the
    long way for a weight that is zero, infinite or NaN."""
    draw = random.Random(12)
    kept = 0
    for _ in range(4000):
        weight = F32(draw.choice((-1, 1)) * (1 + draw.random()) * 2.0 ** draw.randrange(-149, 128))
        factor = F32(2.0 ** draw.randrange(-46, 35))
        half = weight * F32(0.5) * factor
        if queries.leaves_range(float_bits(weight), float_bits(half)):
            assert weight != 0
            assert np.isfinite(weight)
            continue
        kept += 1
        assert Fraction(float(half)) * 2 == Fraction(float(weight)) * Fraction(float(factor))
        assert weight == 0 or Fraction(2) ** -91 <= abs(Fraction(float(half))) <= Fraction(2) ** 96
        back = apart.whole_weight(half, float_bits(factor), False)
        assert back == weight
    assert kept > 1000
    for special in (0.0, -0.0, float("inf"), float("-inf"), float("nan")):
        for power in (2.0**-46, 2.0**34, float("nan")):
            half = F32(special) * F32(0.5) * F32(power)
            assert not queries.leaves_range(float_bits(special), float_bits(half))
    assert not queries.leaves_range(float_bits(F32(1e38)), Word(scales.NAN_BITS)), "a row that is NaN anyway"


def test_shifting_rounds_once() -> None:
    """A block's dot times its scales: the first of the two factors cuts nothing."""
    draw = random.Random(13)
    for _ in range(3000):
        dot = draw.randrange(-(1 << 13), 1 << 13) * Fraction(2) ** draw.randrange(-18, 11)
        exponent = draw.randrange(-254, 255)
        got = apart.shifted(F32(float(dot)), exponent)
        want = dot * Fraction(2) ** exponent
        nearest = F32(float(want)) if abs(want) < Fraction(2) ** 200 else F32("inf") * (1 if want > 0 else -1)
        assert got == nearest, (dot, exponent)


def test_nan_scales_stay_nan() -> None:
    """In a row or key that is apart as well, whatever its weights."""
    draw = random.Random(14)
    for _ in range(200):
        key, row = draw_vector(draw), [draw_vector(draw) for _ in range(HEADS)]
        weights = draw_weights(draw, 0)
        broken = Vector(key.codes, [255, *key.scales[1:]])
        assert np.isnan(logit(placed(broken), [placed(q) for q in row], weights))
        at = draw.randrange(HEADS)
        bad = [Vector(q.codes, [*q.scales[:3], 255]) if h == at else q for h, q in enumerate(row)]
        assert np.isnan(logit(placed(key), [placed(q) for q in bad], weights))
