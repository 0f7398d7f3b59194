"""Device helpers on the CPU against independent NumPy arithmetic, exhaustively where 16 bits decide."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from keysieve import spec

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
native = pytest.importorskip("device_native")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    out = tmp_path_factory.mktemp("native") / "out.npz"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("device_native.py")), str(out)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    with np.load(out) as data:
        return dict(data)


def halves(function: object, words: np.ndarray) -> np.ndarray:
    table = np.array([function(int(x)) for x in range(65536)], dtype=np.uint32)  # type: ignore[operator]  # a callable
    return table[words & 0xFFFF] | (table[words >> 16] << 16)


@pytest.mark.parametrize(("name", "rule"), [("key16", spec.key16), ("bits_of_key16", spec.bits_of_key16)])
def test_key16_is_the_contract_on_every_pattern(found: dict[str, np.ndarray], name: str, rule: object) -> None:
    expected = np.array([rule(int(x)) for x in range(65536)], dtype=np.uint32)  # type: ignore[operator]  # a callable
    np.testing.assert_array_equal(found[name], expected)
    np.testing.assert_array_equal(found[name + "x2"], halves(rule, native.words()))


def test_canonical_bits_on_every_pattern_and_in_both_halves(found: dict[str, np.ndarray]) -> None:
    expected = np.array([spec.canonical_bits(x) for x in range(65536)], dtype=np.uint32)
    np.testing.assert_array_equal(found["canonical16"], expected)
    pairs = halves(spec.canonical_bits, native.words())
    np.testing.assert_array_equal(found["canonical16x2"], pairs)
    np.testing.assert_array_equal(found["canonical_bf16x2"], pairs)


def test_key16_orders_like_the_values(found: dict[str, np.ndarray]) -> None:
    values = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    finite = ~np.isnan(values) & (np.arange(65536) != 0x8000)  # canonical bits only
    order = np.argsort(found["key16"][finite], kind="stable")
    assert (np.diff(values[finite][order]) > 0).all()
    assert found["key16"].min() == 0  # only of a NaN pattern that canonicalising removes
    assert (found["key16"][found["canonical16"]] > 0).all()


def test_halves(found: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(found["low16"], native.words() & 0xFFFF)
    np.testing.assert_array_equal(found["high16"], native.words() >> 16)


def rounded(bits: np.ndarray) -> np.ndarray:
    """BF16 nearest even of float32 bits by exact comparison with both neighbours, NaN as 0x7FFF."""
    low = bits >> 16
    with np.errstate(over="ignore", invalid="ignore"):
        value = bits.view(np.float32).astype(np.float64)
        down = (low << 16).astype(np.uint32).view(np.float32).astype(np.float64)
        infinite_step = np.float64(2.0) ** 128  # the value one step above the largest finite BF16
        high = low + 1
        up = (high << 16).astype(np.uint32).view(np.float32).astype(np.float64)
        up = np.where(np.isinf(up), np.copysign(infinite_step, up), up)
        below, above = np.abs(value - down), np.abs(up - value)
    take_up = (above < below) | ((above == below) & (low & 1 == 1))
    result = np.where(np.isinf(value), low, np.where(take_up, high, low))
    return np.where(np.isnan(value), 0x7FFF, result).astype(np.uint32)


def test_bf16_rounding_is_nearest_even(found: dict[str, np.ndarray]) -> None:
    expected = rounded(native.floats())
    np.testing.assert_array_equal(found["bf16_bits"], expected)
    table = np.array([spec.canonical_bits(x) for x in range(65536)], dtype=np.uint32)
    np.testing.assert_array_equal(found["logit_bits"], table[expected])


def test_bf16_to_float_is_exact(found: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(found["widened"], native.all_bits() << 16)


def test_candidate_words(found: dict[str, np.ndarray]) -> None:
    words = native.words().astype(np.int64)
    index = words >> 3
    expected = ((words & 0xFFFF) << 16) | (0xFFFF - (index & 0xFFFF))
    np.testing.assert_array_equal(found["candidate"].astype(np.int64), expected)
    np.testing.assert_array_equal(found["candidate_index"].astype(np.int64), index)


def same(found: np.ndarray, expected: np.ndarray) -> None:
    """Bitwise equal, any NaN for a NaN."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found[~nan].view(np.uint32), expected[~nan].astype(np.float32).view(np.uint32))


def test_pinned_arithmetic_rounds_where_it_says(found: dict[str, np.ndarray]) -> None:
    a, b, c = native.triples()
    with np.errstate(all="ignore"):
        same(found["mul"], a * b)
        same(found["add"], (a * b) + c)
        fused = found["fma"]
        # In float64 the product is exact; the sum is exact or off by far less than a float32 half-ulp almost always:
        # compare where it is exact (the cancelling half of the data), and require a difference from two roundings.
        exact = a.astype(np.float64) * b.astype(np.float64)
        total = exact + c.astype(np.float64)
        sure = np.isfinite(total) & ((total - exact) == c) & ((total - c) == exact)
        normal = sure & ((np.abs(total) > 1e-30) | (total == 0))
        same(fused[normal], total[normal].astype(np.float32))
        assert normal.sum() > 10_000
        assert (fused != (a * b) + c)[np.isfinite(total)].sum() > 1_000


def test_two_kinds_of_maximum(found: dict[str, np.ndarray]) -> None:
    a, b, _ = native.triples()
    with np.errstate(all="ignore"):
        nan = np.isnan(a) | np.isnan(b)
        assert np.isnan(found["max_nan"][nan]).all()
        same(found["max_nan"][~nan] + 0.0, np.maximum(a, b)[~nan] + np.float32(0.0))
        both = np.isnan(a) & np.isnan(b)
        assert np.isnan(found["max_num"][both]).all()
        same(found["max_num"][~both] + 0.0, np.fmax(a, b)[~both] + np.float32(0.0))


def test_addresses_are_64_bit(found: dict[str, np.ndarray]) -> None:
    base, page, stride, row = native.addresses().T
    np.testing.assert_array_equal(found["page_base"], base + page * stride)
    np.testing.assert_array_equal(found["table_entry"], base + (row * stride + page) * 4)
    assert (page * stride > 1 << 33).any()


def test_physical_rows(found: dict[str, np.ndarray]) -> None:
    block, position, log2, rows = native.blocks().T
    np.testing.assert_array_equal(found["physical_row"], block * rows + position % (1 << log2))


def test_tiles_and_pool_bounds(found: dict[str, np.ndarray]) -> None:
    longest, skip, _, _ = native.lengths().T
    expected = [spec.request_tiles(int(x), int(s)) for x, s in zip(longest, skip, strict=True)]
    np.testing.assert_array_equal(found["tiles"], expected)
    inside = (longest >= 0) & (longest < skip)
    np.testing.assert_array_equal(found["in_pool"], inside.astype(np.int64))
