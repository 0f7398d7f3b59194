"""A brute force of the contract, for checking every backend against something that shares no code with it.

Written from ``docs/contract.md`` alone, with numpy, integers and Python floats: no torch, and nothing of keysieve,
its constants included. Slow and plain on purpose. Dot products of E4M3 and E2M1 codes are sums of integers, BF16
arithmetic is done on unbounded integers, sorting is Python's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# What an array holds, for the reader: numpy's types of mixed arithmetic are too coarse for a type checker to follow.
Bool: TypeAlias = NDArray[Any]
U8: TypeAlias = NDArray[Any]
U16: TypeAlias = NDArray[Any]
F32: TypeAlias = NDArray[Any]
F64: TypeAlias = NDArray[Any]
I64: TypeAlias = NDArray[Any]

PAGE = 64
KEY_BYTES = {"fp8_fp32": 128, "fp8_ue8m0": 128, "mxfp4": 64}
NAN_BITS = 0xFFC0

# --- codes -> numbers ----------------------------------------------------------------------------------------------


def _e4m3_units() -> I64:
    """E4M3 codes in units of 2**-9; the two NaN codes are 0 here and are told apart by :func:`_e4m3_is_nan`."""
    units = np.zeros(256, dtype=np.int64)
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        magnitude = mantissa if exponent == 0 else (8 + mantissa) << (exponent - 1)
        units[code] = 0 if code & 0x7F == 0x7F else -magnitude if code & 0x80 else magnitude
    return units


E4M3_UNITS = _e4m3_units()
E2M1_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int64)
"""E2M1 nibbles in halves."""

E4M3_MAGNITUDES = [abs(int(u)) * 2.0**-9 for u in E4M3_UNITS[:127]]
E2M1_MAGNITUDES = [int(h) / 2 for h in E2M1_HALVES[:8]]


def _e4m3_is_nan(codes: U8) -> Bool:
    return np.asarray(codes & 0x7F == 0x7F)


def _nibbles(packed: U8) -> U8:
    """[..., n] bytes -> [..., 2n] nibbles, low first."""
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def ue8m0(codes: U8) -> F64:
    """2**(b - 127) as float64; NaN for 255."""
    value = np.ldexp(1.0, codes.astype(np.int64) - 127)
    return np.where(codes == 255, np.nan, value)


# --- cache bytes ---------------------------------------------------------------------------------------------------


def token_bytes(pool: U8, stride: int, key_format: str, slot: int) -> tuple[U8, U8]:
    """Code bytes and scale word bytes of a slot in a pool given as flat bytes with ``stride`` bytes a page."""
    page, token = divmod(slot, PAGE)
    width = KEY_BYTES[key_format]
    codes = page * stride + token * width
    scale = page * stride + PAGE * width + token * 4
    return pool[codes : codes + width], pool[scale : scale + 4]


def gather_keys(pool: U8, stride: int, key_format: str, slots: Sequence[int]) -> tuple[U8, U8]:
    """Codes [n, 128 | 64] and scale bytes [n, 4] of many slots."""
    pairs = [token_bytes(pool, stride, key_format, slot) for slot in slots]
    width = KEY_BYTES[key_format]
    codes = np.array([codes for codes, _ in pairs], dtype=np.uint8).reshape(-1, width)
    return codes, np.array([scale for _, scale in pairs], dtype=np.uint8).reshape(-1, 4)


def key_scales(key_format: str, scales: U8) -> F32:
    """One float32 scale per key (FP8 formats), from scale word bytes [n, 4]."""
    if key_format == "fp8_fp32":
        return np.ascontiguousarray(scales).view("<f4").reshape(-1)
    return ue8m0(scales[:, 0]).astype(np.float32)


def dequantised(key_format: str, codes: U8, scales: U8) -> F32:
    """float32 keys [n, 128]."""
    with np.errstate(all="ignore"):
        if key_format == "mxfp4":
            values = E2M1_HALVES[_nibbles(codes)] / 2.0
            return np.asarray(values * np.repeat(ue8m0(scales), 32, axis=1), dtype=np.float32)
        values = np.asarray(np.where(_e4m3_is_nan(codes), np.nan, E4M3_UNITS[codes] * 2.0**-9), dtype=np.float32)
        scaled: F32 = values * key_scales(key_format, scales)[:, None]
        return scaled


# --- writers -------------------------------------------------------------------------------------------------------


def _nearest(magnitudes: list[float], x: F64, ties_to_zero: bool) -> I64:
    """Index of the nearest of ascending ``magnitudes``, saturating; a tie goes to the even index or to the smaller."""
    table = np.array(magnitudes)
    index = np.zeros(x.shape, dtype=np.int64)
    for low in range(len(table) - 1):
        middle = (table[low] + table[low + 1]) / 2  # exact in float64
        up_at_tie = not ties_to_zero and low % 2 == 1
        index += (x > middle) | ((x == middle) & up_at_tie)
    return index


def power_of_two_scale(amax: F64, code_max: float) -> I64:
    """Smallest power k >= -127 with ``amax <= code_max * 2**k``, tried one after another."""
    power = np.full(amax.shape, -127, dtype=np.int64)
    for k in range(-127, 127):
        power += amax > code_max * 2.0**k
    return power


def _block_amax(x: F32, floor: float) -> F64:
    """Largest magnitude of each row, NaN left out and infinity as the largest float32, at least ``floor``."""
    magnitude = np.where(np.isnan(x), 0, np.minimum(np.abs(x), np.finfo(np.float32).max))
    return np.asarray(np.maximum(magnitude.max(axis=-1), np.float32(floor)), dtype=np.float64)


def _finite(x: F32) -> F32:
    """Infinities as the largest float32; NaN stays."""
    return np.clip(x, -np.finfo(np.float32).max, np.finfo(np.float32).max)


def quantise_fp8(x: F32, power_of_two: bool, floor: float) -> tuple[U8, F32]:
    """E4M3 codes [n, 128] and float32 scales [n] of blocks [n, 128]."""
    amax = _block_amax(x, floor)
    if power_of_two:
        scale = np.ldexp(1.0, power_of_two_scale(amax, 448.0)).astype(np.float32)
    else:
        scale = amax.astype(np.float32) / np.float32(448)
    finite = _finite(x)
    with np.errstate(all="ignore"):
        quotient = np.abs(finite / scale[:, None]).astype(np.float64)
    codes = _nearest(E4M3_MAGNITUDES, quotient, ties_to_zero=False)
    codes = np.where(np.signbit(finite), codes | 0x80, codes)
    return np.where(np.isnan(x), 0x7F, codes).astype(np.uint8), scale


def quantise_mxfp4(x: F32, ties_to_zero: bool, floor: float) -> tuple[U8, U8]:
    """E2M1 pairs [n, 64] and UE8M0 bytes [n, 4] of keys [n, 128]."""
    blocks = x.reshape(-1, 4, 32)
    power = power_of_two_scale(_block_amax(blocks, floor), 6.0)
    broken = np.asarray(np.isnan(blocks).any(axis=-1))
    finite = np.where(broken[..., None], 0.0, _finite(blocks)).astype(np.float64)
    nibbles = _nearest(E2M1_MAGNITUDES, np.abs(finite) * np.ldexp(1.0, -power)[..., None], ties_to_zero)
    minus = np.signbit(finite) & ((nibbles != 0) | (not ties_to_zero))
    nibbles = np.where(minus, nibbles | 8, nibbles).astype(np.uint8).reshape(-1, 64, 2)
    scale = np.where(broken, 255, power + 127).astype(np.uint8)
    return nibbles[..., 0] | nibbles[..., 1] << 4, scale


def quantise_keys(key_format: str, x: F32, power_of_two: bool, ties_to_zero: bool, floor: float) -> tuple[U8, U8]:
    """Code bytes and scale word bytes [n, 4] that a writer must produce."""
    if key_format == "mxfp4":
        return quantise_mxfp4(x, ties_to_zero, floor)
    codes, scale = quantise_fp8(x, power_of_two or key_format == "fp8_ue8m0", floor)
    if key_format == "fp8_fp32":
        return codes, scale.astype("<f4").view(np.uint8).reshape(-1, 4)
    power = np.array([round(math.log2(s)) for s in scale.tolist()], dtype=np.int64)
    return codes, np.repeat((power + 127).astype(np.uint8)[:, None], 4, axis=1)


def fold_weights(w: F32, q_scale: F32 | None, softmax_scale: float) -> F32:
    """``w * q_scale * softmax_scale * heads**-0.5``, left to right in float32."""
    folded = w if q_scale is None else w * q_scale
    return folded * np.float32(softmax_scale) * np.float32(w.shape[-1] ** -0.5)


# --- logits --------------------------------------------------------------------------------------------------------


def dots(key_format: str, query: U8, query_scales: U8 | None, keys: U8, key_scale_bytes: U8) -> F32:
    """Dot products [heads, n], exact (FP8) or exact per block and added in order (MXFP4), rounded once to float32.

    Args:
        query: code bytes [heads, 128 | 64] of one row.
        query_scales: UE8M0 bytes [heads, 4], MXFP4 only.
        keys: code bytes [n, 128 | 64].
        key_scale_bytes: scale word bytes [n, 4]; used by MXFP4 only.
    """
    with np.errstate(all="ignore"):
        if key_format != "mxfp4":
            # Integers in units of 2**-18 whose sums stay below 2**43: float64 adds them exactly in any order.
            exact = E4M3_UNITS[query].astype(np.float64) @ E4M3_UNITS[keys].astype(np.float64).T
            broken_q = np.asarray(_e4m3_is_nan(query).any(axis=1))
            broken_k = np.asarray(_e4m3_is_nan(keys).any(axis=1))
            return np.where(broken_q[:, None] | broken_k[None, :], np.nan, exact * 2.0**-18).astype(np.float32)
        assert query_scales is not None
        q, k = E2M1_HALVES[_nibbles(query)], E2M1_HALVES[_nibbles(keys)]
        q_scale, k_scale = ue8m0(query_scales), ue8m0(key_scale_bytes)
        total = np.zeros((query.shape[0], keys.shape[0]))
        for block in range(4):
            part = slice(32 * block, 32 * block + 32)
            exact = (q[:, part] @ k[:, part].T) / 4.0
            total = total + exact * (q_scale[:, block, None] * k_scale[None, :, block])
        return total.astype(np.float32)


def bf16_bits(x: F32) -> U16:
    """BF16 bits of float32 values, nearest even, as logits are stored: -0 as +0, any NaN as 0xFFC0."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.int64)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    rounded = np.where(np.isnan(x), NAN_BITS, rounded)
    return np.where(rounded == 0x8000, 0, rounded).astype(np.uint16)


def bf16_floats(x: F32) -> F32:
    """float32 values rounded to BF16, nearest even; signs of zero and infinities kept."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return np.where(np.isnan(x), np.nan, rounded.astype(np.uint32).view(np.float32)).astype(np.float32)


_UNIT = 280
"""Exact BF16 sums are held as integers in units of 2**-280: products of two BF16 values are multiples of 2**-266."""


def _to_units(x: float) -> int:
    numerator, denominator = x.as_integer_ratio()
    return (numerator << _UNIT) // denominator


def _round_units(value: int) -> float:
    """The integer ``value * 2**-280`` rounded to BF16: 8 significant bits, subnormals down to 2**-133, ties to even."""
    magnitude = abs(value)
    step = max(magnitude.bit_length() - 8, _UNIT - 133)  # log2 of the distance between neighbours, in units
    quotient, rest = magnitude >> step, magnitude & ((1 << step) - 1)
    half = 1 << (step - 1)
    if rest > half or (rest == half and quotient & 1):
        quotient += 1
    if quotient << step >= 1 << (128 + _UNIT):
        return math.inf if value > 0 else -math.inf
    result = math.ldexp(quotient, step - _UNIT)
    return result if value >= 0 else -result


def bf16_fma(a: float, b: float, c: float) -> float:
    """``a * b + c`` of BF16 values, rounded once to BF16."""
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c  # an infinity or a NaN: Python's floats know the rules
    return _round_units(_to_units(a * b) + _to_units(c))


def _bf16_head_sum(relu: list[float], weights: list[float]) -> float:
    """The head sum of numerics "bf16" for one key: four chains of fma, then three additions."""
    chains = [0.0, 0.0, 0.0, 0.0]  # low and high half of the first accumulator, low and high half of the second
    for head, (x, w) in enumerate(zip(relu, weights, strict=True)):
        chain = head % 4
        chains[chain] = bf16_fma(x, w, chains[chain])
    low = bf16_fma(chains[0], 1.0, chains[2])
    high = bf16_fma(chains[1], 1.0, chains[3])
    return bf16_fma(low, 1.0, high)


def logits(
    key_format: str,
    numerics: str,
    query: U8,
    query_scales: U8 | None,
    weights: F32,
    keys: U8,
    key_scale_bytes: U8,
) -> U16:
    """BF16 bits [n] of one row's logits over n keys.

    Args:
        numerics: ``"fp32"`` (ascending heads, multiply then add) or ``"bf16"``.
        query, query_scales, keys, key_scale_bytes: as in :func:`dots`.
        weights: float32 [heads] (BF16 weights widened).
    """
    dot = dots(key_format, query, query_scales, keys, key_scale_bytes)
    scale = np.float32(1) if key_format == "mxfp4" else key_scales(key_format, key_scale_bytes)
    relu = np.where(dot > 0, dot, np.where(np.isnan(dot), dot, np.float32(0))).astype(np.float32)
    with np.errstate(all="ignore"):
        if numerics == "fp32":
            total = relu[0] * weights[0]
            for head in range(1, relu.shape[0]):
                total = total + relu[head] * weights[head]
        else:
            columns, w = bf16_floats(relu).T.tolist(), bf16_floats(weights).tolist()
            total = np.array([_bf16_head_sum(column, w) for column in columns], dtype=np.float32)
        return bf16_bits((total * scale).astype(np.float32))


def real_logits(
    key_format: str, query: U8, query_scales: U8 | None, weights: F32, keys: U8, key_scale_bytes: U8
) -> tuple[F64, F64, F64, Bool]:
    """One row's logits over n keys in float64, for holding a computation with rounding in its dots to a bound.

    Returns the logits; the magnitude that errors are relative to, ``|scale| * sum_h |w_h| * sum_d |q_hd * k_d|``, block
    scales included (MXFP4); the largest step, which bounds whatever is met on the way (dots, head sums, logits; NaN
    or infinity where that is not finite); and where a NaN among the inputs makes the logit NaN.

    Args:
        query, query_scales, weights, keys, key_scale_bytes: as in :func:`logits`.
    """
    with np.errstate(all="ignore"):
        if key_format == "mxfp4":
            assert query_scales is not None
            q = E2M1_HALVES[_nibbles(query)] / 2.0 * np.repeat(ue8m0(query_scales), 32, axis=1)
            k = E2M1_HALVES[_nibbles(keys)] / 2.0 * np.repeat(ue8m0(key_scale_bytes), 32, axis=1)
            scale = np.ones(len(keys))
        else:
            q = np.where(_e4m3_is_nan(query), np.nan, E4M3_UNITS[query] * 2.0**-9)
            k = np.where(_e4m3_is_nan(keys), np.nan, E4M3_UNITS[keys] * 2.0**-9)
            scale = key_scales(key_format, key_scale_bytes).astype(np.float64)
        dot, wide = q @ k.T, weights.astype(np.float64)
        value = scale * (wide @ np.where(dot < 0, 0.0, dot))
        products = np.abs(q) @ np.abs(k).T
        sums = np.abs(wide) @ products
        magnitude = np.abs(scale) * sums
        largest = np.maximum(np.maximum(sums, magnitude), products.max(axis=0))
        nan = np.isnan(products).any(axis=0) | np.isnan(scale) | np.isnan(wide).any()
        return value, magnitude, largest, nan


# --- selection -----------------------------------------------------------------------------------------------------


def key16(bits: U16) -> I64:
    """Order-preserving image of BF16 bits of any origin."""
    wide = bits.astype(np.int64)
    wide = np.where(wide & 0x7FFF > 0x7F80, NAN_BITS, np.where(wide == 0x8000, 0, wide))
    return np.where(wide >= 0x8000, wide ^ 0xFFFF, wide ^ 0x8000)


def select(bits: U16, k: int) -> list[int]:
    """Positions of the first ``k`` keys by (key16 descending, position ascending), ascending."""
    order = key16(bits).tolist()
    return sorted(sorted(range(len(order)), key=lambda i: (-order[i], i))[:k])


def physical(positions: Sequence[int], table_row: Sequence[int], kv_page: int, block_rows: int) -> list[int]:
    """Physical rows of positions."""
    return [table_row[p // kv_page] * block_rows + p % kv_page for p in positions]


def candidate_row(bits: U16, n: int, planes: int) -> list[int]:
    """A rank's candidate row (unsigned 32-bit words) of ``n`` entries from its logits by local index."""
    order = key16(bits).tolist()
    chosen = select(bits, n)
    words = [order[local] << 16 | 0xFFFF - (local & 0xFFFF) for local in chosen] + [0] * (n - len(chosen))
    for plane in range(planes):
        masks = [0] * -(-n // 32)
        for j, local in enumerate(chosen):
            masks[j // 32] |= (local >> (16 + plane) & 1) << (j % 32)
        words += masks
    return words


def owned_positions(length: int, world: int, rank: int, interleave: int) -> list[int]:
    """Global positions below ``length`` that lie on ``rank``, ascending: its local indices in order."""
    return [g for g in range(length) if g // interleave % world == rank]


def difference(name: str, got: NDArray[Any], want: NDArray[Any]) -> str | None:
    """None if both arrays are equal in shape and in every bit, else where they first differ."""
    if got.shape != want.shape:
        return f"{name}: shape {list(got.shape)}, expected {list(want.shape)}"
    differ = np.argwhere(got != want)
    if not len(differ):
        return None
    first = tuple(int(i) for i in differ[0])
    return f"{name}{list(first)}: got {got[first]}, expected {want[first]} ({len(differ)} of {got.size} differ)"
