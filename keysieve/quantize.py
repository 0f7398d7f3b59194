"""Quantisers: E4M3, E2M1 and UE8M0 codes, key and query quantisation, and the folding of scales into head weights.

The rules are the writers' rules of the contract (``docs/contract.md``, "Index cache" and "Query and head weights"):

* the largest magnitude of a block is floored, so that an all-zero block gets a finite scale and exactly zero codes;
* UE8M0 scales are the smallest power of two with ``amax / scale <= 448`` (E2M1: ``<= 6``), found exactly;
* float32 scales are the float32 quotient ``amax / 448``;
* a code is the float32 quotient ``x / scale`` rounded to the nearest code, ties to the even code, saturating.

Special values, the same in every format: an infinite element counts as the largest finite float32 of its sign. A NaN
element never influences a scale's size; in FP8 it becomes the code 0x7F (NaN), in MXFP4, which has no NaN codes, its
block gets the scale byte 255 (NaN) and zero codes. Either way every logit of such a key (or query head) is NaN.

Everything is plain torch arithmetic and gives the same bytes on a CPU and on a CUDA device.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from keysieve.checks import refuse, require_choice, require_float, require_tensor
from keysieve.spec import (
    AMAX_FLOOR_FP8,
    AMAX_FLOOR_MXFP4,
    FP4_MAX,
    FP8_MAX,
    HEAD_DIM,
    HEADS,
    MX_BLOCK,
    IndexerSpec,
    KeyFormat,
    require_spec,
)

SCALE_ROUNDINGS: Final = ("plain", "pow2")
"""``"plain"``: ``amax / 448`` in float32; ``"pow2"``: that rounded up to a power of two."""

FP4_ROUNDINGS: Final = ("half_even", "half_to_zero")
"""What E2M1 rounding does with ties: to the even code, or towards zero."""

UE8M0_NAN: Final = 255
_E4M3_NAN: Final = 0x7F
_FLOAT32_MAX: Final = 3.4028234663852886e38
_SMALLEST_FP8_FLOOR: Final = 2.0**-100
_E2M1_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MIDPOINTS: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

# --- element codes -------------------------------------------------------------------------------------------------


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Float32 values of any shape -> E4M3 codes, uint8: nearest, ties to even, saturating at 448; NaN -> 0x7F."""
    codes = x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(torch.isnan(x), torch.full_like(codes, _E4M3_NAN), codes)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """E4M3 codes (uint8) -> float32 of the same shape; 0x7F and 0xFF are NaN."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def encode_e2m1(x: torch.Tensor, rounding: str = "half_even") -> torch.Tensor:
    """Float32 values [..., 2n] -> E2M1 bytes [..., n], uint8, the even element in the low nibble; saturating at 6.

    ``"half_even"`` keeps the sign of a zero, as the hardware conversion does; ``"half_to_zero"`` stores every zero as
    code 0, as the host-side converters of the engines that use it do. E2M1 has no NaN: the caller must not pass one.
    """
    require_choice("rounding", rounding, FP4_ROUNDINGS, "See keysieve.quantize.FP4_ROUNDINGS.")
    absolute = x.abs()
    magnitude = torch.zeros_like(x, dtype=torch.uint8)
    # A code is the number of midpoints exceeded. Comparisons with scalars: a table would have to be copied to the
    # device, which a CUDA graph cannot capture.
    for below, midpoint in enumerate(_E2M1_MIDPOINTS):
        tie_goes_up = rounding == "half_even" and below % 2 == 1
        magnitude += absolute >= midpoint if tie_goes_up else absolute > midpoint
    negative = torch.signbit(x) if rounding == "half_even" else (x < 0) & (magnitude != 0)
    nibbles = magnitude | (negative.to(torch.uint8) << 3)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """E2M1 bytes [..., n] (uint8) -> float32 [..., 2n]."""
    values = torch.tensor(_E2M1_VALUES + tuple(-v for v in _E2M1_VALUES), dtype=torch.float32, device=packed.device)
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return values[nibbles.to(torch.int32)]


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes (uint8) -> float32 ``2**(b - 127)`` of the same shape; 0 is 2**-127, 255 is NaN."""
    exponent = codes.to(torch.int32)
    bits = exponent << 23
    # 2**-127 is subnormal in float32, and an all-ones exponent alone would read as infinity.
    bits = torch.where(exponent == 0, torch.full_like(bits, 0x0040_0000), bits)
    bits = torch.where(exponent == UE8M0_NAN, torch.full_like(bits, 0x7FC0_0000), bits)
    return bits.view(torch.float32)


def encode_ue8m0_scale(amax: torch.Tensor, code_max: float) -> torch.Tensor:
    """Positive finite float32 maxima -> the UE8M0 byte (uint8) of the smallest power of two that fits them.

    "Fits" is ``amax / 2**(b - 127) <= code_max``, ``code_max`` being 448 or 6. It is decided on mantissa and exponent,
    so nothing is rounded. Below the range of the format the byte is 0.
    """
    mantissa, exponent = torch.frexp(amax)
    limit_mantissa, limit_exponent = math.frexp(code_max)
    power = exponent - limit_exponent + (mantissa > limit_mantissa).to(exponent.dtype)
    return (power + 127).clamp(0, UE8M0_NAN - 1).to(torch.uint8)


# --- blocks --------------------------------------------------------------------------------------------------------


def check_write_options(
    fmt: KeyFormat, scale_rounding: str | None, fp4_rounding: str, amax_floor: float | None
) -> float:
    """The floor to use for ``fmt``; refuses options that the format does not have."""
    choices: tuple[object, ...] = (None, *SCALE_ROUNDINGS)
    if fmt.scale_kind != "fp32":
        choices = (None, "pow2")
    require_choice("scale_rounding", scale_rounding, choices, f"{fmt.name} takes its scales like this.")
    require_choice("fp4_rounding", fp4_rounding, FP4_ROUNDINGS, "It is how E2M1 ties round (mxfp4 only).")
    default, low = (AMAX_FLOOR_FP8, _SMALLEST_FP8_FLOOR) if fmt.is_fp8 else (AMAX_FLOOR_MXFP4, AMAX_FLOOR_MXFP4)
    if amax_floor is None:
        return default
    remedy = f"Use None for the default of {fmt.name}, {default:g}, or 1e-4."
    if not low <= require_float("amax_floor", amax_floor, remedy) <= 1.0:
        refuse("amax_floor", got=amax_floor, accepted=f"None or {low:g}..1", remedy=remedy)
    return float(amax_floor)


def _finite(x: torch.Tensor) -> torch.Tensor:
    """float32 with infinities replaced by the largest finite value; NaN stays."""
    return x.to(torch.float32).clamp(-_FLOAT32_MAX, _FLOAT32_MAX)


def _block_amax(x: torch.Tensor, floor: float) -> torch.Tensor:
    """Largest magnitude over the last dimension, NaN left out, at least ``floor``."""
    magnitude = x.abs()
    return torch.where(torch.isnan(magnitude), torch.zeros_like(magnitude), magnitude).amax(-1).clamp(min=floor)


def _quantize_fp8(x: torch.Tensor, pow2: bool, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., 128] -> codes uint8 [..., 128] and float32 scales [...]."""
    x = _finite(x)
    amax = _block_amax(x, floor)
    # A tensor as divisor: on a CUDA device torch turns division by a number into a product with its reciprocal.
    scale = decode_ue8m0(encode_ue8m0_scale(amax, FP8_MAX)) if pow2 else amax / torch.full_like(amax, FP8_MAX)
    return encode_e4m3(x / scale.unsqueeze(-1)), scale


def _quantize_mxfp4(x: torch.Tensor, rounding: str, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., 128] -> codes uint8 [..., 64] and UE8M0 bytes uint8 [..., 4]."""
    blocks = _finite(x).reshape(*x.shape[:-1], HEAD_DIM // MX_BLOCK, MX_BLOCK)
    broken = torch.isnan(blocks).any(-1)
    scale_bytes = encode_ue8m0_scale(_block_amax(blocks, floor), FP4_MAX)
    scaled = blocks / decode_ue8m0(scale_bytes).unsqueeze(-1)
    scaled = torch.where(broken.unsqueeze(-1), torch.zeros_like(scaled), scaled)
    scale_bytes = torch.where(broken, torch.full_like(scale_bytes, UE8M0_NAN), scale_bytes)
    return encode_e2m1(scaled.flatten(-2), rounding), scale_bytes


# --- keys, queries, weights ----------------------------------------------------------------------------------------


@torch.no_grad()
def quantize_keys(
    spec: IndexerSpec,
    keys: torch.Tensor,
    *,
    scale_rounding: str | None = None,
    fp4_rounding: str = "half_even",
    amax_floor: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indexer keys -> the bytes of a cache in ``spec.key_format``; no rotation of any kind is applied.

    Args:
        spec: the indexer whose cache is written.
        keys: float32 or bfloat16 [tokens, 128], any strides.
        scale_rounding: ``fp8_fp32`` only: ``"plain"`` (default) or ``"pow2"``, the byte-portable choice.
        fp4_rounding: ``mxfp4`` only: ``"half_even"`` (default) or ``"half_to_zero"``.
        amax_floor: smallest block maximum assumed; None: 1e-4 (FP8) or 6 * 2**-126 (MXFP4, where 1e-4 is usual too).

    Returns:
        codes uint8 [tokens, 128 (FP8) | 64 (MXFP4)] and the scale words as bytes, uint8 [tokens, 4].

    Raises:
        KeysieveError: wrong shape, dtype or option.
    """
    fmt = require_spec(spec).format
    floor = check_write_options(fmt, scale_rounding, fp4_rounding, amax_floor)
    require_tensor("keys", keys, dtypes=(torch.float32, torch.bfloat16), shape=(None, HEAD_DIM))
    if fmt.scale_kind == "ue8m0x4":
        return _quantize_mxfp4(keys, fp4_rounding, floor)
    pow2 = fmt.scale_kind == "ue8m0" or scale_rounding == "pow2"
    codes, scale = _quantize_fp8(keys, pow2, floor)
    bits = scale.contiguous().view(torch.int32).unsqueeze(-1)
    if fmt.scale_kind == "ue8m0":
        return codes, (bits >> 23).to(torch.uint8).expand(-1, 4)  # a power of two's exponent field is its UE8M0 byte
    return codes, bits.view(torch.uint8)


@torch.no_grad()
def dequantize_keys(spec: IndexerSpec, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Cache bytes -> float32 keys.

    Args:
        spec: the indexer whose cache the bytes are from.
        codes: uint8 [..., 128 (FP8) | 64 (MXFP4)].
        scales: uint8 [..., 4], as :func:`quantize_keys` returns them.

    Returns:
        float32 [..., 128], each element one float32 product of code and scale.
    """
    fmt = spec.format
    scale = decode_scales(fmt, scales)
    if fmt.is_fp8:
        return decode_e4m3(codes) * scale.unsqueeze(-1)
    values = decode_e2m1(codes).reshape(*codes.shape[:-1], HEAD_DIM // MX_BLOCK, MX_BLOCK)
    return (values * scale.unsqueeze(-1)).flatten(-2)


def decode_scales(fmt: KeyFormat, scales: torch.Tensor) -> torch.Tensor:
    """Scale words as bytes, uint8 [..., 4] -> float32 [...] (FP8) or [..., 4], one per block of 32 (MXFP4).

    Of an ``fp8_ue8m0`` word the lowest byte is read; writers make all four equal.
    """
    if fmt.scale_kind == "fp32":
        return scales.contiguous().view(torch.float32).squeeze(-1)
    return decode_ue8m0(scales[..., 0] if fmt.scale_kind == "ue8m0" else scales)


@torch.no_grad()
def quantize_query(
    spec: IndexerSpec,
    q: torch.Tensor,
    *,
    scale_rounding: str = "pow2",
    fp4_rounding: str = "half_even",
    amax_floor: float | None = None,
) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
    """Indexer queries -> what the scorer takes.

    Args:
        spec: the indexer; its key format decides between FP8 and MXFP4.
        q: float32 or bfloat16 [rows, heads, 128], any strides.
        scale_rounding: FP8: ``"pow2"`` (default), or ``"plain"`` for ``amax / 448``.
        fp4_rounding, amax_floor: as for :func:`quantize_keys`.

    Returns:
        FP8: (float8_e4m3fn [rows, heads, 128], float32 [rows, heads] scales to fold into the weights);
        MXFP4: ((uint8 [rows, heads, 64], int32 words [rows, heads]), None): nothing is left to fold.

    Raises:
        KeysieveError: wrong shape, dtype or option.
    """
    fmt = require_spec(spec).format
    require_choice("scale_rounding", scale_rounding, SCALE_ROUNDINGS, "See keysieve.quantize.SCALE_ROUNDINGS.")
    floor = check_write_options(fmt, None, fp4_rounding, amax_floor)
    require_tensor("q", q, dtypes=(torch.float32, torch.bfloat16), shape=(None, spec.heads, HEAD_DIM))
    if fmt.is_fp8:
        codes, scale = _quantize_fp8(q, scale_rounding == "pow2", floor)
        return codes.view(torch.float8_e4m3fn), scale
    require_choice("scale_rounding", scale_rounding, ("pow2",), "MXFP4 scales are powers of two.")
    packed, scale_bytes = _quantize_mxfp4(q, fp4_rounding, floor)
    return (packed, scale_bytes.contiguous().view(torch.int32).squeeze(-1)), None


@torch.no_grad()
def fold_weights(w: torch.Tensor, q_scale: torch.Tensor | None, softmax_scale: float) -> torch.Tensor:
    """Head weights with everything folded in: ``w * q_scale * softmax_scale * heads**-0.5``, in that order, float32.

    Each of the products is rounded to float32; ``softmax_scale`` and ``heads**-0.5`` are rounded to float32 first.

    Args:
        w: float32 or bfloat16 [rows, heads], any strides; heads (its last dimension) one of 8, 16, 32, 64.
        q_scale: float32 [rows, heads] from :func:`quantize_query`, or None (MXFP4): no factor.
        softmax_scale: the attention's softmax scale (``head_dim**-0.5`` in the published models).

    Returns:
        float32 [rows, heads], contiguous, never a view of ``w``.

    Raises:
        KeysieveError: wrong shape or dtype.
    """
    remedy = "Pass the attention's softmax scale, head_dim**-0.5 in the published models."
    factor = require_float("softmax_scale", softmax_scale, remedy)
    require_tensor("w", w, dtypes=(torch.float32, torch.bfloat16), shape=(None, None))
    heads = w.shape[-1]
    require_choice("w.shape[-1]", heads, HEADS, "Pass the weights as [rows, heads], padded with zero heads.")
    folded = torch.empty(w.shape, dtype=torch.float32, device=w.device).copy_(w)
    if q_scale is not None:
        require_tensor("q_scale", q_scale, dtypes=(torch.float32,), shape=tuple(w.shape), device=w.device)
        folded = folded.mul_(q_scale)
    return folded.mul_(factor).mul_(heads**-0.5)
