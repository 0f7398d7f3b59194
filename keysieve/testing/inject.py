"""Score injection: cache bytes and a query that make a key's score any value we choose.

A test of selection wants to say "these are the scores" and still go through the whole step: paged bytes, dot products,
ReLU, head weights, key scale, rounding. So the keys are written such that the exact dot product with one fixed probe
query *is* the wanted score. The bytes are made here from the cache layout of the contract alone; nothing of the
library's own quantisers or readers is used, so an error there cannot hide itself.

How, for a score ``s``: even elements of a key answer to the probe's positive head (weight +1), odd ones to its
negative head (weight -1), and every other head is zero.

* ``fp8_fp32``: the answering elements give a dot of exactly 1, so the key's float32 scale is ``|s|``.
* ``fp8_ue8m0``: the eight bits of the BF16 significand of ``s`` are eight powers of two among the answering elements,
  the exponent is the UE8M0 scale.
* ``mxfp4``: the significand is four base-4 digits, one nonzero nibble in each block of 32, the block scales supply the
  powers of four. Scores below 2^-120 answer to a second pair of heads with a small query scale.

Infinities come from overflow of finite bytes; NaN from a NaN code or a NaN scale; zeros in four different ways.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keysieve.spec import HEAD_DIM, IndexerSpec

E4M3_NAN = 0x7F
UE8M0_NAN = 0xFF
UE8M0_ONE = 127
E2M1_DIGIT = (0b0000, 0b0010, 0b0100, 0b0101)
"""E2M1 codes of 0, 1, 2 and 3."""

E2M1_SIX = 0b0111
TINY_GAIN = 8
"""The MXFP4 probe's second pair of heads multiplies by 2^-8, for scores whose block scales would underflow."""

FINITE_BUT_HUGE = 3e38

_CHUNK = 1 << 15
"""Keys encoded at a time, so that a million-key row does not need gigabytes of intermediate tensors. Divisible by 4."""


@dataclass(frozen=True)
class InjectedKeys:
    """Encoded keys in position order, not yet in pages.

    Attributes:
        codes: uint8 ``[keys, 128]`` (E4M3) or ``[keys, 64]`` (two E2M1 a byte).
        scales: uint8 ``[keys, 4]``, the scale word's bytes in memory order.
        logits: bfloat16 ``[keys]``, what the contract says these keys score against :func:`probe_query`
            (-0 as +0, NaN as the canonical NaN).
    """

    codes: Tensor
    scales: Tensor
    logits: Tensor


def canonical_bf16(values: Tensor) -> Tensor:
    """``values`` rounded to BF16, -0 stored as +0 and every NaN as the canonical NaN (bits 0xFFC0)."""
    bits = values.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
    bits = torch.where(bits == 0x8000, 0, bits)
    bits = torch.where((bits & 0x7FFF) > 0x7F80, 0xFFC0, bits)
    return _low16(bits).view(torch.bfloat16)


def _low16(bits: Tensor) -> Tensor:
    """The low 16 bits of int32 ``bits`` as an int16 bit pattern."""
    return torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16)


def bytes_of_int32(words: Tensor) -> Tensor:
    """int32 ``[...]`` as uint8 ``[..., 4]`` in memory order."""
    return words.contiguous().unsqueeze(-1).view(torch.uint8)


def inject_keys(key_format: str, scores: Tensor) -> InjectedKeys:
    """Keys that score ``scores`` against :func:`probe_query`.

    Args:
        key_format: one of the contract's cache formats.
        scores: float32 or bfloat16 ``[keys]``, any value. ``fp8_fp32`` carries float32 scores to the final rounding;
            the other formats round them to BF16 beforehand.
    """
    flat = scores.detach().reshape(-1).to("cpu", torch.float32)
    if key_format not in _ENCODERS:
        raise ValueError(f"no injection for the format {key_format!r}")
    parts = [_ENCODERS[key_format](chunk) for chunk in torch.split(flat, _CHUNK)]
    codes, scales = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    return InjectedKeys(codes, scales, canonical_bf16(flat))


def _zero_style(scores: Tensor) -> Tensor:
    """Which of four ways to reach a zero score, by position, so that every case with zeros meets all of them."""
    return torch.arange(scores.numel()) % 4


def _even_odd(negative: Tensor) -> Tensor:
    """bool ``[keys, 128]``: the elements that answer for a key, even ones for a positive score, odd for a negative."""
    return (torch.arange(HEAD_DIM) % 2 == 1)[None, :] == negative[:, None]


def _fp8_zero_codes(codes: Tensor, zero: Tensor, style: Tensor, negative: Tensor) -> Tensor:
    """Codes of keys that score zero: no elements, negative dots under both heads, or a dot with the zero head only."""
    answering = _even_odd(negative)
    minus_one = torch.full_like(codes, 0xB8)
    codes = torch.where((zero & (style == 0))[:, None], torch.zeros_like(codes), codes)
    return torch.where((zero & (style == 1))[:, None], torch.where(answering, minus_one, codes * 0), codes)


def _inject_fp8_fp32(scores: Tensor) -> tuple[Tensor, Tensor]:
    nan, infinite, zero = scores.isnan(), scores.isinf(), scores == 0
    style = _zero_style(scores)
    odd_position = torch.arange(scores.numel()) % 2 == 1
    # Style 2: a zero scale. Style 3: the smallest negative score, which rounds to -0 and must be stored as +0.
    negative = torch.signbit(scores) & ~nan | (zero & (style == 3))
    answering = _even_odd(negative) & (torch.arange(HEAD_DIM) // 2 % 8 == 7)[None, :]
    codes = torch.where(answering, 0x38, 0).to(torch.uint8)  # 1.0 in eight elements; the probe has 1/8 in each
    codes = torch.where(infinite[:, None] & answering, torch.full_like(codes, 0x40), codes)  # 2.0: overflows
    codes = torch.where((nan & odd_position)[:, None] & answering, torch.full_like(codes, E4M3_NAN), codes)
    codes = _fp8_zero_codes(codes, zero, style, negative)
    scale = scores.abs()
    scale = torch.where(infinite, torch.full_like(scale, FINITE_BUT_HUGE), scale)
    scale = torch.where(nan & odd_position, torch.ones_like(scale), scale)
    scale = torch.where(zero & (style < 2), torch.full_like(scale, 1.5), scale)
    scale = torch.where(zero & (style == 3), torch.full_like(scale, 2.0**-149), scale)
    return codes, bytes_of_int32(scale.view(torch.int32))


def _split_bf16(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Significand (0..255, the hidden bit included) and biased exponent (1..255) of BF16 ``scores``, both int64."""
    bits = scores.view(torch.int16).to(torch.int64) & 0x7FFF
    exponent, fraction = bits >> 7, bits & 0x7F
    return torch.where(exponent > 0, fraction | 0x80, fraction), exponent.clamp(min=1)


def _inject_fp8_ue8m0(values: Tensor) -> tuple[Tensor, Tensor]:
    scores = values.to(torch.bfloat16)
    nan, infinite, zero = scores.isnan(), scores.isinf(), scores == 0
    style = _zero_style(scores)
    odd_position = torch.arange(scores.numel()) % 2 == 1
    negative = torch.signbit(scores) & ~nan | (zero & (style >= 2))
    significand, exponent = _split_bf16(scores)
    # Zero, styles 2 and 3: -2^-9 * 2^-127, which rounds to -0.
    significand = torch.where(infinite | nan, torch.full_like(significand, 128), significand)
    bit = torch.arange(HEAD_DIM) // 2 % 8
    wanted = (significand[:, None] >> bit[None, :] & 1).bool() & _even_odd(negative)
    # E4M3 of 2^(bit - 7): bit 0 is the subnormal 4 * 2^-9, the others are normal.
    power = torch.where(bit == 0, 0x04, (bit - 7 + 7) << 3).to(torch.uint8)
    codes = torch.where(wanted, power[None, :], torch.zeros_like(power)[None, :])
    codes = torch.where(infinite[:, None] & wanted, torch.full_like(codes, 0x78), codes)  # 256
    codes = torch.where((nan & odd_position)[:, None] & wanted, torch.full_like(codes, E4M3_NAN), codes)
    smallest = torch.where(_even_odd(negative) & (bit == 7)[None, :], 0x01, 0).to(torch.uint8)
    codes = torch.where((zero & (style >= 2))[:, None], smallest, codes)
    codes = _fp8_zero_codes(codes, zero, style, negative)
    byte = exponent.clone()  # value = (significand * 2^-7) * 2^(exponent - 127)
    byte = torch.where(infinite, 254, byte)
    byte = torch.where(nan, torch.where(odd_position, UE8M0_ONE, UE8M0_NAN), byte)
    byte = torch.where(zero, torch.where(style >= 2, 0, UE8M0_ONE), byte)
    return codes, byte.to(torch.uint8)[:, None].expand(-1, 4).contiguous()


def _inject_mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    scores = values.to(torch.bfloat16)
    keys = scores.numel()
    nan, infinite, zero = scores.isnan(), scores.isinf(), scores == 0
    style = _zero_style(scores)
    negative = torch.signbit(scores) & ~nan | (zero & (style >= 2))
    significand, exponent = _split_bf16(scores)
    tiny = (exponent < 7) & ~zero
    token, block = torch.arange(keys)[:, None], torch.arange(4)[None, :]
    digit = significand[:, None] >> (2 * block) & 3
    nibble = torch.tensor(E2M1_DIGIT)[digit]
    nibble = torch.where(infinite[:, None], E2M1_SIX, nibble)
    nibble = torch.where(nan[:, None], E2M1_DIGIT[1], nibble)
    # Style 1: negative elements under the answering head. Styles 0, 2, 3: no elements, whatever the scales.
    nibble = torch.where(zero[:, None], torch.where(style[:, None] == 1, 0b1010, 0), nibble)
    # Which of a block's 32 elements is nonzero wanders with the token; its remainder by 4 says which head answers.
    lane = negative.to(torch.int64) + 2 * tiny
    element = 32 * block + 4 * ((5 * token + 3 * block) % 8) + lane[:, None]
    nibbles = torch.zeros(keys, HEAD_DIM, dtype=torch.uint8).scatter_(1, element, nibble.to(torch.uint8))
    codes = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    # value = sum over blocks of digit * 4^block * 2^(exponent - 134)
    byte = exponent[:, None] - 7 + 2 * block + TINY_GAIN * tiny[:, None]
    byte = torch.where(infinite[:, None], 254, byte)
    byte = torch.where(nan[:, None], torch.where(block == token % 4, UE8M0_NAN, UE8M0_ONE), byte)
    byte = torch.where(zero[:, None], torch.where(style[:, None] == 2, 0, UE8M0_ONE), byte)
    return codes, byte.to(torch.uint8)


_ENCODERS = {"fp8_fp32": _inject_fp8_fp32, "fp8_ue8m0": _inject_fp8_ue8m0, "mxfp4": _inject_mxfp4}


@dataclass(frozen=True)
class Probe:
    """What reads injected keys.

    Attributes:
        query: float8_e4m3fn ``[rows, heads, 128]``; for MXFP4 the pair (uint8 ``[rows, heads, 64]``, int32
            ``[rows, heads]``).
        weights: float32 ``[rows, heads]``.
    """

    query: Tensor | tuple[Tensor, Tensor]
    weights: Tensor


def probe_query(spec: IndexerSpec, rows: int, first_row: int = 0) -> Probe:
    """The query and head weights under which injected keys score what they were made for.

    The answering heads differ from row to row (row ``t`` uses heads ``t``, ``t + heads/2``, .. modulo ``heads``), so a
    head that is dropped or read twice shows in some row. ``first_row`` continues that numbering.
    """
    heads = spec.heads
    row = torch.arange(first_row, first_row + rows)
    weights = torch.zeros(rows, heads, dtype=torch.float32)
    at = torch.arange(rows)
    lanes = [(row + lane * heads // 4) % heads for lane in range(4)]  # positive, negative, tiny positive, tiny negative
    for lane, sign in ((0, 1.0), (1, -1.0), (2, 1.0), (3, -1.0)):
        weights[at, lanes[lane]] = sign
    if spec.format.is_fp8:
        # E4M3 of 1/8 on the elements the head listens to: even (positive) or odd (negative).
        query = torch.zeros(rows, heads, HEAD_DIM, dtype=torch.uint8)
        query[at, lanes[0], 0::2] = 0x20
        query[at, lanes[1], 1::2] = 0x20
        weights[at, lanes[2]] = weights[at, lanes[3]] = 0.0
        return Probe(query.view(torch.float8_e4m3fn), weights)
    nibbles = torch.zeros(rows, heads, HEAD_DIM, dtype=torch.uint8)
    scale = torch.full((rows, heads), UE8M0_ONE, dtype=torch.int32)
    for lane in range(4):
        nibbles[at[:, None], lanes[lane][:, None], torch.arange(lane, HEAD_DIM, 4)[None, :]] = E2M1_DIGIT[1]
    scale[at, lanes[2]] = scale[at, lanes[3]] = UE8M0_ONE - TINY_GAIN
    return Probe((nibbles[..., 0::2] | nibbles[..., 1::2] << 4, scale * 0x01010101), weights)
