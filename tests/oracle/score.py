"""Logits from cache bytes, by the contract's text, for one request and one query row at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracle.numbers import E2M1, E4M3, F64, UE8M0, bf16_fma, bf16_round, bits_of_values, f32

U8 = NDArray[np.uint8]
PAGE = 64


def page_bytes(cache: U8, page: int) -> U8:
    """The bytes of one page in memory order, ``[64 * width]``."""
    return np.ascontiguousarray(cache[page]).reshape(-1)


def gather_keys(cache: U8, table_row: list[int], length: int) -> tuple[U8, U8]:
    """Code bytes ``[length, key_bytes]`` and scale bytes ``[length, 4]`` of a request's keys, in position order.

    A page is planar: the codes of its 64 tokens, then their scale words.
    """
    width = cache.shape[2]
    key_bytes = width - 4
    codes = np.empty((length, key_bytes), np.uint8)
    scales = np.empty((length, 4), np.uint8)
    for first in range(0, length, PAGE):
        count = min(PAGE, length - first)
        page = page_bytes(cache, table_row[first // PAGE])
        codes[first : first + count] = page[: PAGE * key_bytes].reshape(PAGE, key_bytes)[:count]
        scales[first : first + count] = page[PAGE * key_bytes :].reshape(PAGE, 4)[:count]
    return codes, scales


def nibbles(packed: U8) -> U8:
    """Two E2M1 codes a byte, the even element in the low nibble: ``[..., n]`` to ``[..., 2 n]``."""
    out = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    out[..., 0::2] = packed & 15
    out[..., 1::2] = packed >> 4
    return out


def fp8_dots(query: U8, codes: U8) -> F64:
    """float32 dots ``[heads, keys]`` of E4M3 codes; exact in float64, rounded once."""
    q, k = E4M3[query], E4M3[codes]
    nan_heads, nan_keys = np.isnan(q).any(1), np.isnan(k).any(1)
    dots = np.nan_to_num(q) @ np.nan_to_num(k).T  # every partial sum is exact, in any order
    dots[nan_heads] = np.nan
    dots[:, nan_keys] = np.nan
    return f32(dots)


def mxfp4_dots(query: U8, query_scales: U8, codes: U8, scales: U8) -> F64:
    """float32 dots ``[heads, keys]``: each block of 32 exact, the four block sums added in order, rounded once."""
    q, k = E2M1[nibbles(query)], E2M1[nibbles(codes)]
    total = np.zeros((q.shape[0], k.shape[0]))
    with np.errstate(invalid="ignore", over="ignore"):
        for block in range(4):
            part = slice(32 * block, 32 * block + 32)
            scale = UE8M0[query_scales[:, block]][:, None] * UE8M0[scales[:, block]][None, :]
            total = total + (q[:, part] @ k[:, part].T) * scale
    return f32(total)


def relu(dots: F64) -> F64:
    """``max(dot, 0)`` that keeps NaN."""
    return np.where(dots < 0, 0.0, dots)


def heads_fp32(dots: F64, weights: F64) -> F64:
    """Sum over heads in ascending order, multiply then add, every step rounded to float32."""
    total = np.zeros(dots.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):
        for head in range(dots.shape[0]):
            total = f32(total + f32(relu(dots[head]) * weights[head]))
    return total


def heads_bf16(dots: F64, weights: F64) -> F64:
    """Two accumulators of two BF16 lanes: of every eight heads one takes (0,1),(4,5), the other (2,3),(6,7)."""
    values, w = bf16_round(relu(dots)), bf16_round(weights)
    lanes = np.zeros((2, 2, dots.shape[1]))
    for pair in range(dots.shape[0] // 2):
        for half in range(2):
            head = 2 * pair + half
            which = pair % 2
            weight = np.full(dots.shape[1], w[head])
            lanes[which, half] = bf16_fma(values[head], weight, lanes[which, half])
    with np.errstate(invalid="ignore", over="ignore"):
        low = bf16_round(lanes[0, 0] + lanes[1, 0])
        high = bf16_round(lanes[0, 1] + lanes[1, 1])
        return bf16_round(low + high)


def logits(
    key_format: str,
    numerics: str,
    query: U8,
    query_scales: U8 | None,
    weights: F64,
    codes: U8,
    scales: U8,
) -> NDArray[np.uint16]:
    """BF16 bits ``[keys]`` of one query row.

    Args:
        query: codes ``[heads, 128]``, or ``[heads, 64]`` for MXFP4.
        query_scales: MXFP4 only, ``[heads, 4]`` bytes.
        weights: ``[heads]``, float32 values.
    """
    sum_heads = heads_fp32 if numerics == "fp32" else heads_bf16
    if key_format == "mxfp4":
        assert query_scales is not None
        total = sum_heads(mxfp4_dots(query, query_scales, codes, scales), weights)
    else:
        total = sum_heads(fp8_dots(query, codes), weights)
        with np.errstate(invalid="ignore", over="ignore"):
            if key_format == "fp8_ue8m0":
                scale = UE8M0[scales[:, 0]]
            else:
                scale = scales.copy().view(np.float32)[:, 0].astype(np.float64)
            total = f32(scale * total)
    return bits_of_values(bf16_round(total))
