"""Quantisers against exact rational arithmetic: every code, the scale rules, ties, special values, queries, weights."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import exact_codes as exact
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keysieve import IndexerSpec, KeysieveError
from keysieve import quantize as qz

FORMATS = ("fp8_fp32", "fp8_ue8m0", "mxfp4")
FLOOR_FP4 = Fraction(6) * Fraction(2) ** -126
FLOOR_FP8 = np.float32(1e-4)

finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
magnitude32 = st.floats(min_value=float(np.float32(1e-30)), max_value=float(np.finfo(np.float32).max), width=32)


KEYS = torch.zeros(2, 128)
QUERY = torch.zeros(2, 8, 128)


def spec_of(key_format: str, heads: int = 8) -> IndexerSpec:
    return IndexerSpec(heads=heads, topk=16, key_format=key_format)


@st.composite
def key_rows(draw: st.DrawFn) -> np.ndarray:
    """One float32 [128] key: arbitrary floats, or small integers on one exponent (many exact ties)."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    power = draw(st.integers(-120, 120))
    kind = draw(st.sampled_from(["normal", "ties", "wild"]))
    if kind == "normal":
        return np.ldexp(rng.standard_normal(128), power).astype(np.float32)
    if kind == "ties":
        return np.ldexp(rng.integers(-64, 65, 128) / 8.0, power).astype(np.float32)
    row = rng.standard_normal(128) * np.exp2(rng.integers(-40, 40, 128).astype(np.float64))
    row[draw(st.integers(0, 127))] = draw(finite32)
    return row.astype(np.float32)


# --- element codes -------------------------------------------------------------------------------------------------


def test_every_e4m3_code_decodes_to_its_value():
    decoded = qz.decode_e4m3(torch.arange(256, dtype=torch.uint8))
    for code in range(256):
        if code & 0x7F == 0x7F:
            assert torch.isnan(decoded[code])
        else:
            want = exact.E4M3[code & 0x7F] * (-1 if code & 0x80 else 1)
            assert Fraction(float(decoded[code])) == want
            assert bool(torch.signbit(decoded[code])) == bool(code & 0x80)


def test_every_e2m1_byte_decodes_low_nibble_first():
    decoded = qz.decode_e2m1(torch.arange(256, dtype=torch.uint8).unsqueeze(-1))
    assert decoded.shape == (256, 2)
    for byte in range(256):
        for lane, nibble in enumerate((byte & 15, byte >> 4)):
            assert Fraction(float(decoded[byte, lane])) == exact.E2M1[nibble & 7] * (-1 if nibble & 8 else 1)


def test_every_ue8m0_byte_decodes_zero_and_255_included():
    decoded = qz.decode_ue8m0(torch.arange(256, dtype=torch.uint8))
    for byte in range(255):
        assert Fraction(float(decoded[byte])) == Fraction(2) ** (byte - 127)
    assert torch.isnan(decoded[255])


def test_codes_survive_decode_and_encode():
    e4m3 = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    assert torch.equal(qz.encode_e4m3(qz.decode_e4m3(e4m3)), e4m3)
    every = torch.arange(256, dtype=torch.uint8).unsqueeze(-1)
    assert torch.equal(qz.encode_e2m1(qz.decode_e2m1(every)), every)
    positive = qz.encode_e2m1(qz.decode_e2m1(every), "half_to_zero")
    minus_zero_low, minus_zero_high = every & 15 == 8, every >> 4 == 8
    want = torch.where(minus_zero_low, every & 0xF0, every)
    assert torch.equal(positive, torch.where(minus_zero_high, want & 0x0F, want))


def neighbours(table: list[Fraction]) -> list[float]:
    """Every value, every midpoint, and the float32 just beside each midpoint."""
    points: list[float] = []
    for low, high in pairwise(table):
        middle = exact.f32((low + high) / 2)
        points += [float(low), float(middle)]
        points += [float(np.nextafter(middle, np.float32(to))) for to in (-np.inf, np.inf)]
    top = float(table[-1])
    return [*points, top, float(np.nextafter(np.float32(top), np.float32(np.inf))), top * 1.0357, top * 1.2, 1e30]


def test_e4m3_rounds_to_nearest_even_and_saturates():
    points = neighbours(exact.E4M3)
    codes = qz.encode_e4m3(torch.tensor(points)).tolist()
    minus = qz.encode_e4m3(-torch.tensor(points)).tolist()
    for x, plus_code, minus_code in zip(points, codes, minus, strict=True):
        want = exact.nearest(exact.E4M3, Fraction(x))
        assert (plus_code, minus_code) == (want, want | 0x80), x


@pytest.mark.parametrize(("rounding", "ties"), [("half_even", "even"), ("half_to_zero", "zero")])
def test_e2m1_rounds_as_asked_and_saturates(rounding: str, ties: str):
    points = neighbours(exact.E2M1)
    x = torch.tensor(points).unsqueeze(-1)
    low = qz.encode_e2m1(torch.cat((x, -x), dim=-1), rounding).flatten().tolist()
    for point, byte in zip(points, low, strict=True):
        want = exact.nearest(exact.E2M1, Fraction(point), ties)
        sign = 8 if ties == "even" or want else 0
        assert (byte & 15, byte >> 4) == (want, want | sign), point


def test_e4m3_encoding_is_monotone_over_all_bfloat16():
    bits = torch.arange(0, 0x7F81, dtype=torch.int32).to(torch.int16)
    codes = qz.encode_e4m3(bits.view(torch.bfloat16).float()).to(torch.int32)
    assert bool((codes.diff() >= 0).all())
    assert codes[0] == 0
    assert codes[-1] == 126  # infinity saturates


def test_nan_is_one_code():
    assert qz.encode_e4m3(torch.tensor([float("nan"), -float("nan")])).tolist() == [0x7F, 0x7F]


# --- scales --------------------------------------------------------------------------------------------------------


@given(amax=magnitude32, limit=st.sampled_from([448, 6]))
@settings(max_examples=300, deadline=None)
def test_ue8m0_is_the_smallest_power_of_two_that_fits(amax: float, limit: int):
    byte = int(qz.encode_ue8m0_scale(torch.tensor([amax]), float(limit)))
    scale = Fraction(2) ** (byte - 127)
    assert Fraction(amax) / scale <= limit
    assert Fraction(amax) / (scale / 2) > limit


@pytest.mark.parametrize("limit", [448.0, 6.0])
@pytest.mark.parametrize("power", [-120, -23, 0, 1, 100])
def test_ue8m0_boundary_is_inclusive(limit: float, power: int):
    at = np.float32(np.ldexp(limit, power))
    beside = torch.tensor([np.nextafter(at, np.float32(0)), at, np.nextafter(at, np.float32(np.inf))])
    assert (qz.encode_ue8m0_scale(beside, limit).to(torch.int32) - 127).tolist() == [power, power, power + 1]


# --- keys against the exact rules ----------------------------------------------------------------------------------


@given(key=key_rows(), pow2=st.booleans())
@settings(max_examples=60, deadline=None)
def test_fp8_keys_follow_the_exact_rules(key: np.ndarray, pow2: bool):
    spec = spec_of("fp8_fp32")
    codes, scales = qz.quantize_keys(spec, torch.tensor(key)[None], scale_rounding="pow2" if pow2 else "plain")
    want_codes, want_scale = exact.fp8_key(list(key), pow2, FLOOR_FP8)
    assert codes[0].tolist() == want_codes
    assert bytes(scales[0].tolist()) == np.float32(want_scale).tobytes()
    if pow2:
        codes, scales = qz.quantize_keys(spec_of("fp8_ue8m0"), torch.tensor(key)[None])
        power = exact.power_of_two_scale(Fraction(float(want_scale)), 1)
        assert codes[0].tolist() == want_codes
        assert scales[0].tolist() == [power + 127] * 4


@given(key=key_rows(), rounding=st.sampled_from(["half_even", "half_to_zero"]), small=st.booleans())
@settings(max_examples=60, deadline=None)
def test_mxfp4_keys_follow_the_exact_rules(key: np.ndarray, rounding: str, small: bool):
    floor = None if small else 1e-4
    spec = spec_of("mxfp4")
    codes, scales = qz.quantize_keys(spec, torch.tensor(key)[None], fp4_rounding=rounding, amax_floor=floor)
    nibbles: list[int] = []
    for block in range(4):
        want_floor = FLOOR_FP4 if floor is None else Fraction(float(FLOOR_FP8))
        ties = "even" if rounding == "half_even" else "zero"
        part, byte = exact.mxfp4_block(list(key[32 * block : 32 * block + 32]), ties, want_floor)
        nibbles += part
        assert int(scales[0, block]) == byte
    assert codes[0].tolist() == [nibbles[i] | nibbles[i + 1] << 4 for i in range(0, 128, 2)]


@given(key=key_rows(), key_format=st.sampled_from(FORMATS))
@settings(max_examples=60, deadline=None)
def test_dequantised_key_is_code_times_scale_and_close(key: np.ndarray, key_format: str):
    spec = spec_of(key_format)
    codes, scales = qz.quantize_keys(spec, torch.tensor(key)[None])
    back = qz.dequantize_keys(spec, codes, scales)[0].numpy()
    for start in range(0, 128, 32):
        block, got = key[start : start + 32].astype(np.float64), back[start : start + 32].astype(np.float64)
        amax = np.abs(key if key_format != "mxfp4" else block).max()
        # Half a step of the top binade, or of the subnormal range, whichever is coarser; the floor bounds the rest.
        step = amax / 4 if key_format == "mxfp4" else amax / 16
        assert np.abs(got - block).max() <= step * (1 + 1e-6) + 1e-6 * (key_format != "mxfp4")


def test_bfloat16_keys_are_taken_exactly_and_strided_keys_too():
    keys = torch.randn(20, 256, generator=torch.Generator().manual_seed(0)).bfloat16()[:, ::2]
    for key_format in FORMATS:
        spec = spec_of(key_format)
        dense = qz.quantize_keys(spec, keys.float().contiguous())
        for got, want in zip(qz.quantize_keys(spec, keys), dense, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("key_format", FORMATS)
def test_zero_key_has_a_finite_scale_and_zero_codes(key_format: str):
    spec = spec_of(key_format)
    codes, scales = qz.quantize_keys(spec, torch.zeros(1, 128))
    assert not codes.any()
    assert not qz.dequantize_keys(spec, codes, scales).any()
    scale = qz.decode_scales(spec.format, scales)
    assert bool(torch.isfinite(scale).all())
    want = {"fp8_fp32": float(FLOOR_FP8 / np.float32(448)), "fp8_ue8m0": 2.0**-22, "mxfp4": 2.0**-126}[key_format]
    assert torch.equal(scale, torch.full_like(scale, want))


@pytest.mark.parametrize("key_format", FORMATS)
def test_a_nan_element_makes_its_key_nan_and_no_other(key_format: str):
    spec = spec_of(key_format)
    keys = torch.ones(3, 128)
    keys[1, 40] = float("nan")
    back = qz.dequantize_keys(spec, *qz.quantize_keys(spec, keys))
    assert bool(torch.isnan(back[1, 40]))
    assert bool(torch.isnan(back[1].sum()))
    assert torch.equal(back[0], torch.ones(128))
    assert torch.equal(back[2], torch.ones(128))
    if key_format == "mxfp4":
        assert torch.equal(torch.isnan(back[1]), torch.arange(128) // 32 == 1)  # the whole block, no other
    else:
        assert int(torch.isnan(back[1]).sum()) == 1


@pytest.mark.parametrize("key_format", FORMATS)
def test_infinities_count_as_the_largest_float(key_format: str):
    spec = spec_of(key_format)
    keys = torch.zeros(1, 128)
    keys[0, 0], keys[0, 1] = float("inf"), -float("inf")
    finite = torch.nan_to_num(keys)
    for got, want in zip(qz.quantize_keys(spec, keys), qz.quantize_keys(spec, finite), strict=True):
        assert torch.equal(got, want)
    back = qz.dequantize_keys(spec, *qz.quantize_keys(spec, keys))
    assert bool(torch.isfinite(qz.decode_scales(spec.format, qz.quantize_keys(spec, keys)[1])).all())
    assert back[0, 0] > 3e38
    assert back[0, 1] < -3e38


def test_ue8m0_words_are_read_by_their_lowest_byte():
    words = torch.tensor([[127, 1, 2, 3]], dtype=torch.uint8)
    assert qz.decode_scales(spec_of("fp8_ue8m0").format, words).tolist() == [1.0]


# --- queries and weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_fp8_query_uses_the_key_rule_per_head(heads: int):
    q = torch.randn(3, heads, 128, generator=torch.Generator().manual_seed(heads)) * 3
    for rounding in ("pow2", "plain"):
        codes, scale = qz.quantize_query(spec_of("fp8_ue8m0", heads), q, scale_rounding=rounding)
        assert isinstance(codes, torch.Tensor)
        assert codes.dtype == torch.float8_e4m3fn
        assert codes.shape == (3, heads, 128)
        assert scale is not None
        assert scale.shape == (3, heads)
        assert scale.dtype == torch.float32
        key_codes, words = qz.quantize_keys(spec_of("fp8_fp32"), q.reshape(-1, 128), scale_rounding=rounding)
        assert torch.equal(codes.view(torch.uint8).reshape(-1, 128), key_codes)
        assert torch.equal(scale.reshape(-1, 1).view(torch.uint8), words)
    default = qz.quantize_query(spec_of("fp8_fp32", heads), q)[1]
    assert default is not None
    assert bool((torch.frexp(default).mantissa == 0.5).all()), "the default query scale is a power of two"


def test_mxfp4_query_is_bytes_and_words_with_nothing_to_fold():
    q = torch.randn(3, 16, 128, generator=torch.Generator().manual_seed(1))
    (packed, words), scale = qz.quantize_query(spec_of("mxfp4", 16), q, fp4_rounding="half_to_zero")
    assert scale is None
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 16, 64)
    assert words.dtype == torch.int32
    assert words.shape == (3, 16)
    codes, scales = qz.quantize_keys(spec_of("mxfp4"), q.reshape(-1, 128), fp4_rounding="half_to_zero")
    assert torch.equal(packed.reshape(-1, 64), codes)
    # byte i of a word scales elements 32 i ..: little endian
    for word, four in zip(words.flatten().tolist(), scales.tolist(), strict=True):
        assert word & 0xFFFFFFFF == four[0] | four[1] << 8 | four[2] << 16 | four[3] << 24


def test_fold_weights_multiplies_in_the_fixed_order():
    rng = np.random.default_rng(3)
    for heads in (8, 16, 32, 64):
        w = rng.standard_normal((50, heads)).astype(np.float32)
        q_scale = rng.random((50, heads)).astype(np.float32)
        softmax_scale = 0.0883883461356163  # not a float32
        want = ((w * q_scale) * np.float32(softmax_scale)) * np.float32(heads**-0.5)
        got = qz.fold_weights(torch.tensor(w), torch.tensor(q_scale), softmax_scale)
        assert np.array_equal(got.numpy(), want)
        other = w * (q_scale * np.float32(softmax_scale) * np.float32(heads**-0.5))
        assert not np.array_equal(other, want), "the case must tell the orders apart"


def test_fold_weights_takes_strided_and_bfloat16_weights_and_leaves_them_alone():
    wide = torch.randn(6, 64, generator=torch.Generator().manual_seed(4))
    before = wide.clone()
    strided, scale = wide[:, 3:64:2][:, :8], torch.rand(6, 8)
    got = qz.fold_weights(strided, scale, 0.5)
    assert torch.equal(got, qz.fold_weights(strided.contiguous(), scale, 0.5))
    assert torch.equal(wide, before)
    assert got.is_contiguous()
    half = qz.fold_weights(strided.bfloat16(), None, 0.5)
    assert half.dtype == torch.float32
    assert torch.equal(half, strided.bfloat16().float() * 0.5 * 8**-0.5)


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: qz.quantize_keys(spec_of("fp8_fp32"), torch.zeros(2, 64)), ["keys", "float32[2, 64]", "128"]),
        (lambda: qz.quantize_keys(spec_of("fp8_fp32"), torch.zeros(2, 128, dtype=torch.float16)), ["keys", "float16"]),
        (lambda: qz.quantize_keys(spec_of("fp8_ue8m0"), KEYS, scale_rounding="plain"), ["scale_rounding"]),
        (lambda: qz.quantize_keys(spec_of("mxfp4"), KEYS, fp4_rounding="up"), ["fp4_rounding", "'up'"]),
        (lambda: qz.quantize_keys(spec_of("mxfp4"), KEYS, amax_floor=0.0), ["amax_floor", "0.0"]),
        (lambda: qz.quantize_query(spec_of("fp8_fp32", 8), torch.zeros(2, 16, 128)), ["q", "[2, 16, 128]", "8"]),
        (lambda: qz.quantize_query(spec_of("mxfp4"), QUERY, scale_rounding="plain"), ["scale_rounding"]),
        (lambda: qz.fold_weights(torch.zeros(2, 12), None, 1.0), ["w.shape[-1]", "12"]),
        (lambda: qz.fold_weights(torch.zeros(2, 8), torch.zeros(2, 16), 1.0), ["q_scale", "[2, 16]"]),
    ],
)
def test_refusals_name_the_argument_and_what_was_got(call, names):
    with pytest.raises(KeysieveError) as error:
        call()
    for name in names:
        assert name in str(error.value)
