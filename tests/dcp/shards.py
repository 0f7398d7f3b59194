"""A whole case as one rank of a context-parallel group sees it, and a step on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import keysieve as ks
from keysieve.reference.dcp_maps import global_positions, local_seq_lens
from keysieve.spec import PAGE
from keysieve.testing import Case, make_pool, scattered_table, slots_of, write_tokens


def shard_case(case: Case, world: int, rank: int, interleave: int, *, sharded: bool = True, kv_page: int = 16) -> Case:
    """This rank's pool, tables and lengths; ``seq_lens`` stay global.

    A sharded pool holds this rank's keys by local index in poisoned pages; a replicated one is the case's own. The KV
    block table is this rank's in both cases, with ids that no other rank uses in the same places.
    """
    gen = torch.Generator().manual_seed(1000 * case.seed + rank)
    longest = case.seq_lens.reshape(case.requests, case.next_n).clamp_min(0).amax(1) if case.rows else case.seq_lens
    local = local_seq_lens(longest, world, rank, interleave).tolist()
    blocks = [-(-n // kv_page) for n in local]
    kv_table = scattered_table(blocks, sum(blocks) + 2, gen)
    placed: dict[str, Any] = {"kv_table": kv_table, "kv_page": kv_page, "block_rows": kv_page + 8}
    if not sharded:
        return replace(case, **placed)
    pages = [-(-n // PAGE) for n in local]
    pool = make_pool(case.spec, sum(pages) + 2)
    table = scattered_table(pages, sum(pages) + 2, gen)
    whole = case.index_cache()
    for request, count in enumerate(local):
        ids = global_positions(torch.arange(count), world, rank, interleave)
        codes, scales = whole.codes(slots_of(case.index_table[request], int(longest[request]))[ids])
        write_tokens(case.spec, pool, slots_of(table[request], count), codes, scales)
    return replace(case, cache=pool, index_table=table, **placed)


def indexer_of(case: Case, dcp: Any = None, **limits: Any) -> ks.DecodeIndexer:
    limits = {"max_rows": max(case.rows, 1), "max_context": case.max_len, "next_n": case.next_n} | limits
    return ks.DecodeIndexer(case.spec, device="cpu", dcp=dcp, **limits)


def step(indexer: ks.DecodeIndexer, case: Case, **options: Any) -> ks.Selection:
    """One call with everything the case has; outputs start poisoned."""
    shape = (case.rows, case.spec.topk)
    out, positions = (torch.full(shape, 0x5A5A5A5A, dtype=torch.int32) for _ in range(2))
    counts = torch.full((case.rows,), 0x5A5A5A5A, dtype=torch.int32)
    return indexer(
        case.query,
        case.index_cache(),
        case.weights,
        case.seq_lens,
        case.index_table,
        positions=positions,
        out=out,
        counts=counts,
        **case.paging(),
        **options,
    )


def plain(selection: ks.Selection) -> tuple[Any, Any, Any]:
    """NumPy copies, which travel between processes as bytes."""
    assert selection.positions is not None
    return selection.rows.numpy().copy(), selection.counts.numpy().copy(), selection.positions.numpy().copy()


def assert_is_tp(case: Case, world: int, interleave: int, selections: list[Any], *, sharded: bool = True) -> None:
    """``selections[r]`` (rows, counts, positions) of every rank are exactly what one rank alone selects.

    ``rows`` are checked as physical rows of the KV tables that :func:`shard_case` gave the ranks.
    """
    alone = step(indexer_of(case), replace(case, kv_table=None))
    assert alone.positions is not None
    expected = alone.positions
    holder = torch.where(expected < 0, -1, expected // interleave % world)
    for rank, selection in enumerate(selections):
        rows, counts, positions = (torch.from_numpy(part) for part in selection)
        assert torch.equal(positions, expected), f"rank {rank}: positions differ"
        assert torch.equal(counts, (holder == rank).sum(1, dtype=torch.int32)), f"rank {rank}: counts differ"
        mine = shard_case(case, world, rank, interleave, sharded=sharded)
        assert mine.kv_table is not None
        for row in range(case.rows):
            won = expected[row][holder[row] == rank].long()
            local = won // (interleave * world) * interleave + won % interleave
            table = mine.kv_table[row // case.next_n].long()
            physical = table[local // mine.kv_page] * mine.block_rows + local % mine.kv_page
            padded = torch.nn.functional.pad(physical, (0, case.spec.topk - won.numel()), value=-1)
            assert torch.equal(rows[row].long(), padded), f"rank {rank}, row {row}: physical rows differ"
