"""Random query, weight and key bytes of every format: finite, full of sign changes, with exact copies for ties."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from keysieve.spec import HEAD_DIM, IndexerSpec
from keysieve.testing.inject import bytes_of_int32


def random_e4m3(shape: tuple[int, ...], gen: Generator) -> Tensor:
    """Random finite E4M3 codes, uint8: both signs, zeros and subnormals included, magnitudes up to 30."""
    magnitude = torch.randint(0, 0x60, shape, generator=gen, dtype=torch.uint8)
    sign = torch.randint(0, 2, shape, generator=gen, dtype=torch.uint8) << 7
    return magnitude | sign


def random_codes(key_format: str, keys: int, gen: Generator, *, copies: float = 0.25) -> tuple[Tensor, Tensor]:
    """Random keys: codes uint8 ``[keys, key_bytes]`` and scale bytes uint8 ``[keys, 4]``.

    A share ``copies`` of the keys repeats the bytes of another key.
    """
    if key_format == "mxfp4":
        codes = torch.randint(0, 256, (keys, HEAD_DIM // 2), generator=gen, dtype=torch.uint8)
        scales = torch.randint(120, 132, (keys, 4), generator=gen, dtype=torch.uint8)
    else:
        codes = random_e4m3((keys, HEAD_DIM), gen)
        if key_format == "fp8_ue8m0":
            scales = torch.randint(115, 130, (keys, 1), generator=gen, dtype=torch.uint8).expand(-1, 4).contiguous()
        else:
            scales = bytes_of_int32((torch.rand(keys, generator=gen) * 0.02 + 1e-4).view(torch.int32))
    if keys:
        source = torch.where(
            torch.rand(keys, generator=gen) < copies, torch.randint(0, keys, (keys,), generator=gen), torch.arange(keys)
        )
        codes, scales = codes[source], scales[source]
    return codes, scales


def random_query(spec: IndexerSpec, rows: int, gen: Generator) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
    """A random query in the spec's format and random float32 head weights ``[rows, heads]`` of both signs.

    In every other row most of the sum cancels: each head of the first half shares its query with one of the second
    half, under opposite and much larger weights, but for one head in four. What is left depends on the order in which
    heads are added, so an order that changes with the shape of a call, or is not the documented one, shows in the
    logits; in plain random sums it would show once in ten thousand.
    """
    weights = torch.randn(rows, spec.heads, generator=gen) * 0.1
    half = spec.heads // 2
    cancel = torch.arange(rows)[1::2, None]
    first = torch.tensor([head for head in range(half) if head % 4 != 3])[None, :]
    # The partner is not simply h + heads / 2: pairs are nested, so that no regular grouping of heads cancels at once.
    partner = spec.heads - 1 - first
    weights[cancel, first] *= 2.0 ** torch.randint(0, 14, (cancel.shape[0], first.shape[1]), generator=gen)
    weights[cancel, partner] = -weights[cancel, first]
    if spec.format.is_fp8:
        query = random_e4m3((rows, spec.heads, HEAD_DIM), gen)
        query[cancel, partner] = query[cancel, first]
        return query.view(torch.float8_e4m3fn), weights
    codes = torch.randint(0, 256, (rows, spec.heads, HEAD_DIM // 2), generator=gen, dtype=torch.uint8)
    scale = torch.randint(120, 132, (rows, spec.heads, 4), generator=gen, dtype=torch.uint8)
    codes[cancel, partner] = codes[cancel, first]
    scale[cancel, partner] = scale[cancel, first]
    return (codes, scale.view(torch.int32).squeeze(-1)), weights
