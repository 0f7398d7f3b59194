"""Cases whose bytes are written out by hand: a few named codes, one request, pages in order."""

from __future__ import annotations

import torch

import keysieve as ks
from keysieve.testing import Case

ONE, TWO, THREE = 0x38, 0x40, 0x44
MINUS_FIVE = 0xCA
"""E4M3 codes."""


def one_request(spec: ks.IndexerSpec, cache: torch.Tensor, query: object, weights: torch.Tensor, length: int) -> Case:
    """A case of one request whose pages are 0, 1, .. of ``cache``, rows as many as ``weights`` has."""
    rows = weights.shape[0]
    return Case(
        recipe="built by hand",
        seed=0,
        spec=spec,
        next_n=rows,
        query=query,  # type: ignore[arg-type]  # a tensor or the MXFP4 pair
        cache=cache,
        weights=weights,
        seq_lens=torch.full((rows,), length, dtype=torch.int32),
        index_table=torch.arange(cache.shape[0], dtype=torch.int32)[None],
    )


def scores_of(case: Case) -> torch.Tensor:
    """The public ``score`` of a case, bfloat16 ``[rows, max_len]``."""
    arguments = (case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table)
    return ks.score(case.spec, *arguments, max_len=case.max_len)


def fp8_query(rows: list[dict[int, dict[int, int]]], heads: int = 8) -> torch.Tensor:
    """E4M3 codes by row: head -> element -> code."""
    query = torch.zeros(len(rows), heads, 128, dtype=torch.uint8)
    for row, by_head in enumerate(rows):
        for head, elements in by_head.items():
            for element, code in elements.items():
                query[row, head, element] = code
    return query.view(torch.float8_e4m3fn)


def unit_weights(rows: int, *used: int, heads: int = 8) -> torch.Tensor:
    weights = torch.zeros(rows, heads)
    weights[:, list(used)] = 1.0
    return weights
