"""Pools, page tables and poison: everything around the keys that must not matter.

A pool starts as poison (NaN bytes, or keys that would beat every real one) and only the tokens a case owns are written
over it, so spare pages, unused tokens of a last page and the gaps between pages all stay poisoned. Table columns that
no row needs hold ids that would fault or point at poison.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Generator, Tensor

from keysieve.spec import PAGE, IndexerSpec
from keysieve.testing.inject import inject_keys

POISONS: Final = ("winner", "nan", "mixed")
OUT_OF_RANGE_IDS: Final = (0x7FFFFFFF, -1, -0x80000000, 1 << 24)


def make_pool(spec: IndexerSpec, pages: int, *, page_stride: int | None = None, poison: str = "mixed") -> Tensor:
    """A poisoned cache, uint8 ``[pages, 64, width]``, whose last page ends where its allocation ends.

    Args:
        spec: gives the page's bytes.
        pages: pages in the pool.
        page_stride: bytes from page to page (default: dense); what lies between is poisoned as well.
        poison: ``"winner"`` (keys that would be selected first), ``"nan"``, or ``"mixed"`` (page by page).
    """
    form = spec.format
    stride = form.page_bytes if page_stride is None else page_stride
    storage = torch.full((max(pages - 1, 0) * stride + form.page_bytes * (pages > 0),), 0xFF, dtype=torch.uint8)
    pool = torch.as_strided(storage, (pages, PAGE, form.width), (stride, form.width, 1))
    if poison == "nan" or not pages:
        return pool
    best = inject_keys(spec.key_format, torch.full((PAGE,), 3e38))
    page = torch.cat([best.codes.reshape(-1), best.scales.reshape(-1)]).view(PAGE, form.width)
    pool[:: 1 if poison == "winner" else 2] = page
    return pool


def key_planes(spec: IndexerSpec, pool: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a pool's two planes: codes ``[pages, 64, key_bytes]`` and scale words ``[pages, 64, 4]``, uint8."""
    form = spec.format
    stride, start = pool.stride(0), pool.storage_offset()
    codes = torch.as_strided(pool, (pool.shape[0], PAGE, form.key_bytes), (stride, form.key_bytes, 1), start)
    scales = torch.as_strided(pool, (pool.shape[0], PAGE, 4), (stride, 4, 1), start + PAGE * form.key_bytes)
    return codes, scales


def write_tokens(spec: IndexerSpec, pool: Tensor, slots: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write encoded keys into slots (``page * 64 + token``, int64 ``[keys]``) and touch nothing else."""
    code_plane, scale_plane = key_planes(spec, pool)
    page, token = slots // PAGE, slots % PAGE
    code_plane[page, token] = codes.to(pool.device)
    scale_plane[page, token] = scales.to(pool.device)


def slots_of(table_row: Tensor, length: int) -> Tensor:
    """Slots of positions ``0..length-1`` of a request, int64 ``[length]``."""
    position = torch.arange(length, device=table_row.device)
    return table_row.to(torch.int64)[position // PAGE] * PAGE + position % PAGE


def scattered_table(
    blocks: list[int],
    pool: int,
    gen: Generator,
    *,
    columns: int | None = None,
    spare: str = "out_of_range",
    row_stride: int | None = None,
) -> Tensor:
    """A block table whose ids are a random choice of the pool, every id used at most once.

    Args:
        blocks: how many columns each request really needs.
        pool: ids 0..pool-1 exist.
        columns: width of the table (default: the most any request needs plus two).
        spare: what unneeded columns hold: ``"out_of_range"`` ids, ``"unused"`` ids of the pool, or ``"zero"``.
        row_stride: elements from row to row (default: the width, plus three to be ragged).

    Returns:
        int32 ``[requests, columns]`` with unit column stride.
    """
    width = max(blocks, default=0) + 2 if columns is None else columns
    stride = width + 3 if row_stride is None else row_stride
    ids = torch.randperm(pool, generator=gen)
    storage = torch.tensor(OUT_OF_RANGE_IDS, dtype=torch.int32).repeat(len(blocks) * stride // 4 + width + 1)
    table = torch.as_strided(storage, (len(blocks), width), (stride, 1))
    used = sum(blocks)
    if used > pool:
        raise ValueError(f"the requests need {used} blocks, the pool has {pool}")
    if spare == "zero":
        table.zero_()
    elif spare == "unused":
        rest = ids[used:] if used < pool else ids[:1]
        table.copy_(rest[torch.randint(0, rest.numel(), (len(blocks), width), generator=gen)])
    start = 0
    for request, count in enumerate(blocks):
        table[request, :count] = ids[start : start + count].to(torch.int32)
        start += count
    return table


def ragged_lengths(requests: int, next_n: int, limit: int, topk: int, gen: Generator) -> list[list[int]]:
    """Lengths ``[requests][next_n]`` around every edge a row can have: empty, page, tile, ``topk``, the limit.

    Rows of a request usually grow by one (drafts); sometimes they are unrelated and hold padding in the middle.
    """
    edges = [-1, 0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257, topk - 1, topk, topk + 1]
    edges += [2 * topk, 8 * topk - 1, 8 * topk + 1, limit - 1, limit]
    edges = [edge for edge in edges if edge <= limit]

    def below(count: int) -> int:
        return int(torch.randint(0, count, (1,), generator=gen))

    def one() -> int:
        return edges[below(len(edges))] if below(3) else below(limit + 1)

    lengths = []
    for _ in range(requests):
        last = one()
        if below(4):
            lengths.append([max(last - next_n + 1 + row, 0) if last > 0 else last for row in range(next_n)])
        else:
            lengths.append([one() for _ in range(next_n)])
    return lengths
