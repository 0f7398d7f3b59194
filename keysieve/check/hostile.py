"""Cases whose scores are hard to compute: cancellation, wide exponents, ties of every rounding, special bytes.

The patterns of :mod:`keysieve.testing` are hostile to selections; these are hostile to arithmetic. With ordinary random
numbers a sum taken in the wrong order or rounded twice changes a BF16 logit once in tens of thousands of keys; here it
does in nearly every case.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Generator, Tensor

from keysieve.spec import HEAD_DIM, IndexerSpec
from keysieve.testing import Case, random_case, slots_of, write_tokens

_HALF = HEAD_DIM // 2


def _chance(shape: tuple[int, ...], probability: float, gen: Generator) -> Tensor:
    return torch.rand(shape, generator=gen) < probability


def _bytes(low: int, high: int, shape: tuple[int, ...], gen: Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=gen, dtype=torch.int32).to(torch.uint8)


def _e4m3(shape: tuple[int, ...], gen: Generator, nan: float) -> Tensor:
    """E4M3 codes of all magnitudes; NaN codes with that chance per vector."""
    codes = _bytes(0, 256, shape, gen)
    codes = torch.where(codes & 0x7F == 0x7F, codes & 0x80, codes)
    broken = _chance((*shape[:-1], 1), nan, gen) & _chance(shape, 0.05, gen)
    return torch.where(broken, torch.full_like(codes, 0x7F), codes)


def _mirrored_fp8(codes: Tensor, which: Tensor, sign: int) -> Tensor:
    """The second half of the chosen vectors repeats the first, with ``sign`` 0x80 negated, but for four elements."""
    turned = codes.clone()
    turned[..., _HALF : HEAD_DIM - 4] = codes[..., : _HALF - 4] ^ sign
    return torch.where(which, turned, codes)


def _mirrored_fp4(codes: Tensor, which: Tensor, sign: int) -> Tensor:
    """Block 1 of the chosen vectors repeats block 0, with ``sign`` 0x88 negated."""
    turned = codes.clone()
    turned[..., 16:32] = codes[..., 0:16] ^ sign
    return torch.where(which, turned, codes)


def _fp8_scales(key_format: str, n: int, gen: Generator) -> Tensor:
    """Scale word bytes [n, 4], now and then a special value."""
    special = _chance((n, 1), 0.03, gen)
    if key_format == "fp8_ue8m0":
        odd = torch.tensor([0, 1, 254, 255], dtype=torch.uint8)[torch.randint(0, 4, (n, 1), generator=gen)]
        return torch.where(special, odd, _bytes(100, 150, (n, 1), gen)).expand(-1, 4).contiguous()
    values = torch.rand(n, 1, generator=gen) * torch.exp2(torch.randint(-20, 8, (n, 1), generator=gen).float())
    odd_values = torch.tensor([0.0, float("nan"), float("inf"), 3e38, 1e-45, 2.0**-126, -1.0])
    values = torch.where(special, odd_values[torch.randint(0, 7, (n, 1), generator=gen)], values)
    return values.contiguous().view(torch.uint8)


def _mx_scales(shape: tuple[int, ...], gen: Generator, special: float) -> Tensor:
    """UE8M0 bytes [..., 4]: blocks 0 and 1 share a large scale, so that what they cancel to is met by small blocks."""
    scales = _bytes(110, 140, (*shape, 4), gen)
    apart = _chance((*shape, 1), 0.5, gen)
    large = _bytes(140, 160, (*shape, 1), gen).expand(*shape, 2)
    small = _bytes(95, 125, (*shape, 2), gen)
    scales = torch.where(apart, torch.cat((large, small), dim=-1), scales)
    odd = torch.tensor([0, 1, 254, 255], dtype=torch.uint8)[torch.randint(0, 4, (*shape, 4), generator=gen)]
    return torch.where(_chance((*shape, 4), special, gen), odd, scales)


def hostile_keys(spec: IndexerSpec, n: int, gen: Generator) -> tuple[Tensor, Tensor]:
    """Codes and scale word bytes of ``n`` keys."""
    cancel = _chance((n, 1), 0.5, gen)
    if spec.format.is_fp8:
        codes = _mirrored_fp8(_e4m3((n, HEAD_DIM), gen, 0.02), cancel, 0x80)
        return codes, _fp8_scales(spec.key_format, n, gen)
    codes = _bytes(0, 256, (n, HEAD_DIM // 2), gen)
    return _mirrored_fp4(codes, cancel, 0x88), _mx_scales((n,), gen, 0.01)


def hostile_query(spec: IndexerSpec, rows: int, gen: Generator) -> Tensor | tuple[Tensor, Tensor]:
    """A query most of whose heads repeat their first half, so that mirrored keys cancel; some repeat a neighbour."""
    heads = spec.heads
    mirror = _chance((rows, heads, 1), 0.8, gen)
    twin = _chance((rows, heads, 1), 0.5, gen)
    twin[:, 0::2] = False
    if spec.format.is_fp8:
        codes = _mirrored_fp8(_e4m3((rows, heads, HEAD_DIM), gen, 0.02), mirror, 0)
        return torch.where(twin, codes.roll(1, 1), codes).view(torch.float8_e4m3fn)
    codes = _mirrored_fp4(_bytes(0, 256, (rows, heads, HEAD_DIM // 2), gen), mirror, 0)
    scales = _mx_scales((rows, heads), gen, 0.002)
    codes = torch.where(twin, codes.roll(1, 1), codes)
    scales = torch.where(twin, scales.roll(1, 1), scales)
    return codes, scales.contiguous().view(torch.int32).squeeze(-1)


def hostile_weights(kind: str, rows: int, heads: int, gen: Generator) -> Tensor:
    """float32 [rows, heads]: opposite twins (heads cancel), wide exponents (roundings meet), or special values."""
    weights = torch.randn(rows, heads, generator=gen)
    if kind == "twins":
        weights[:, 1::2] = -weights[:, 0::2] * (1 + 2.0**-14 * torch.randn(rows, heads // 2, generator=gen))
    if kind == "wide":
        weights *= torch.exp2(torch.randint(-45, 1, (rows, heads), generator=gen).float())
    if kind == "special":
        values = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e38, 1e-40])
        pick = values[torch.randint(0, len(values), (rows, heads), generator=gen)]
        weights = torch.where(_chance((rows, heads), 0.03, gen), pick, weights)
    return weights


def hostile_case(spec: IndexerSpec, lengths: list[list[int]], next_n: int, seed: int, page_stride: int | None) -> Case:
    """A case on scattered, poisoned pages whose bytes are hostile to arithmetic.

    Args:
        spec: the indexer.
        lengths: ``seq_lens`` as [requests][next_n].
        next_n: rows per request.
        seed: fixes all of it.
        page_stride: bytes from page to page, or None for dense.
    """
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    case = random_case(spec, lengths, next_n=next_n, seed=seed, page_stride=page_stride)
    for request, row in enumerate(lengths):
        n = max(0, *row)
        codes, scales = hostile_keys(spec, n, gen)
        write_tokens(spec, case.cache, slots_of(case.index_table[request], n), codes, scales)
    kind = rng.choice(["normal", "twins", "twins", "wide", "wide", "special"])
    return replace(
        case,
        recipe=f"hostile_case({spec!r}, {lengths!r}, {next_n}, {seed}, {page_stride})",
        query=hostile_query(spec, case.rows, gen),
        weights=hostile_weights(kind, case.rows, spec.heads, gen),
    )
