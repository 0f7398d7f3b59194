"""Index caches and queries for timing: ordinary values in any key format, and what they stand for exactly."""

from __future__ import annotations

import torch

from keysieve.quantize import decode_scales, quantize_keys, quantize_query
from keysieve.reference.score import E2M1_PAIRS, E4M3
from keysieve.spec import FORMATS, HEAD_DIM, MX_BLOCK, PAGE, IndexerSpec

BASE_PAGES = 4096
"""Pages whose bytes are drawn; a larger pool repeats them."""


def make_pool(pages: int, device: torch.device, key_format: str = "fp8_fp32") -> torch.Tensor:
    """uint8 [pages, 64, width] of Gaussian keys (fp8: with fp32 scales of their own); repeats every 4,096 pages."""
    fmt = FORMATS[key_format]
    generator = torch.Generator(device=device).manual_seed(0)
    base = torch.empty(BASE_PAGES, fmt.page_bytes, dtype=torch.uint8, device=device)
    keys = torch.randn(BASE_PAGES, PAGE * HEAD_DIM, device=device, generator=generator)
    if fmt.is_fp8:
        base[:, : fmt.scale_offset] = keys.to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.rand(BASE_PAGES, PAGE, device=device, generator=generator) * 0.02 + 0.01
        base[:, fmt.scale_offset :] = scales.view(torch.uint8)
    else:
        codes, words = quantize_keys(IndexerSpec(32, 1, key_format), keys.view(-1, HEAD_DIM))
        base[:, : fmt.scale_offset] = codes.view(BASE_PAGES, -1)
        base[:, fmt.scale_offset :] = words.reshape(BASE_PAGES, -1)
    pool = torch.empty(pages, fmt.page_bytes, dtype=torch.uint8, device=device)
    for first in range(0, pages, BASE_PAGES):
        pool[first : first + BASE_PAGES] = base[: min(BASE_PAGES, pages - first)]
    return pool.view(pages, PAGE, -1)


def make_query(
    rows: int, heads: int, device: torch.device, key_format: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gaussian queries: codes and, for MXFP4, their scale words."""
    values = torch.randn(rows, heads, HEAD_DIM, device=device, generator=generator)
    if FORMATS[key_format].is_fp8:
        return values.to(torch.float8_e4m3fn), None
    given, _scale = quantize_query(IndexerSpec(heads, 1, key_format), values)
    assert isinstance(given, tuple)
    return given


def page_values(pages: torch.Tensor, key_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 (keys [tokens, 128], scales [tokens]) of page bytes [n, page bytes]; MXFP4 scales are in the keys."""
    fmt = FORMATS[key_format]
    codes = pages[:, : fmt.scale_offset].reshape(-1, fmt.key_bytes)
    scales = decode_scales(fmt, pages[:, fmt.scale_offset :].reshape(-1, 4)).double()
    if fmt.is_fp8:
        return E4M3.to(codes.device)[codes.int()], scales
    return _block_values(codes, scales), torch.ones(codes.shape[0], dtype=torch.float64, device=codes.device)


def query_values(codes: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
    """float64 [heads, 128] of one row's codes and scale words."""
    if words is None:
        return codes.double()
    scales = decode_scales(FORMATS["mxfp4"], words.contiguous().view(torch.uint8).view(-1, 4)).double()
    return _block_values(codes, scales)


def _block_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_real(E2M1_PAIRS.to(codes.device)[codes.int()]).view(-1, HEAD_DIM // MX_BLOCK, MX_BLOCK)
    return (pairs * scales.unsqueeze(-1)).view(-1, HEAD_DIM)
