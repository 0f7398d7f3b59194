"""Parts of a case as cases of their own: for showing that results do not depend on how rows are batched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from keysieve.spec import PAGE
from keysieve.testing.cases import Case
from keysieve.testing.paging import make_pool, scattered_table


def take_requests(case: Case, requests: Sequence[int], *, rows: Sequence[int] | None = None) -> Case:
    """The named requests of a case, in that order, over the same cache.

    Args:
        case: where they come from.
        requests: indices of requests; repeats are allowed.
        rows: one query row for each of ``requests`` (indices of the whole case's rows), which makes a case of
            ``next_n`` 1 with the block table expanded per row; default: all rows of each request.
    """
    request_index = torch.tensor(requests, dtype=torch.int64)
    if rows is None:
        row_index = (request_index[:, None] * case.next_n + torch.arange(case.next_n)).reshape(-1)
    else:
        row_index = torch.tensor(rows, dtype=torch.int64)
    query = case.query
    return replace(
        case,
        recipe=f"take_requests({case.recipe}, {list(requests)!r}, rows={None if rows is None else list(rows)!r})",
        next_n=case.next_n if rows is None else 1,
        query=(query[0][row_index], query[1][row_index]) if isinstance(query, tuple) else _rows(query, row_index),
        weights=case.weights[row_index],
        seq_lens=case.seq_lens[row_index],
        index_table=case.index_table[request_index],
        kv_table=None if case.kv_table is None else case.kv_table[request_index],
        logits=None if case.logits is None else tuple(case.logits[request] for request in requests),
    )


def _rows(codes: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of E4M3 codes, taken as bytes: torch 2.9 cannot index them on a CPU."""
    return codes.view(torch.uint8)[index].view(codes.dtype)


def relocate(case: Case, seed: int, *, spare_pages: int = 5, page_stride: int | None = None) -> Case:
    """The same requests with every page moved: another pool, other page ids, other poison, the same keys.

    Pages two requests share become a copy for each.
    """
    gen = torch.Generator().manual_seed(seed)
    longest = case.seq_lens.reshape(case.requests, case.next_n).clamp(min=0).amax(1).tolist() if case.rows else []
    needed = [-(-int(length) // PAGE) for length in longest]
    pages = sum(needed) + spare_pages
    pool = make_pool(case.spec, pages, page_stride=page_stride)
    table = scattered_table(needed, pages, gen)
    for request, count in enumerate(needed):
        source, target = case.index_table[request, :count].long(), table[request, :count].long()
        pool[target] = case.cache[source]
    return replace(case, recipe=f"relocate({case.recipe}, {seed})", cache=pool, index_table=table)
