"""Physical rows: where in the attention KV cache a key position lies."""

from __future__ import annotations

import torch

from keysieve.spec import PAGE


def physical_rows(
    positions: torch.Tensor,
    kv_table: torch.Tensor,
    *,
    kv_page: int | None = None,
    block_rows: int | None = None,
    row_request: torch.Tensor | None = None,
) -> torch.Tensor:
    """int32, the shape of ``positions``: ``kv_table[r, pos // kv_page] * block_rows + pos % kv_page``.

    Only the columns that a position needs are read.

    Args:
        positions: integer ``[rows, n]``, key positions; a negative entry stays -1.
        kv_table: int32 ``[requests, blocks]``, any row stride: the block ids of every request.
        kv_page: tokens per block of the attention cache, a power of two; default 64.
        block_rows: rows a block spans in the cache view; default ``kv_page`` (blocks lie back to back).
        row_request: integer ``[rows]``, the table row of every row; default ``row // (rows / requests)``.
    """
    rows, requests = positions.shape[0], kv_table.shape[0]
    page = PAGE if kv_page is None else kv_page
    if positions.numel() == 0 or kv_table.numel() == 0:
        return torch.full_like(positions, -1, dtype=torch.int32)
    if row_request is None:
        row_request = torch.arange(rows, device=positions.device) // max(1, rows // requests)
    wide = positions.to(torch.int64)
    blocks = kv_table[row_request.to(torch.int64)[:, None], wide.clamp_min(0) // page].to(torch.int64)
    placed = blocks * (page if block_rows is None else block_rows) + wide % page
    return torch.where(wide < 0, -1, placed).to(torch.int32)
