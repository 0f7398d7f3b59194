"""Kind E, tables: which page and which block a position is in, and what lengths near the limits do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle.step import expected_step

import keysieve as ks
from field.steps import (
    FORMATS,
    assert_fault,
    assert_step,
    check_step,
    chosen,
    distinct_scores,
    indexer_for,
    run_step,
    spec_of,
)
from keysieve.testing import (
    assert_bitwise_equal,
    assert_untouched,
    canonical_bf16,
    guarded_rows,
    inject_keys,
    injected_case,
    make_pool,
    pattern_case,
    slots_of,
    write_tokens,
)


@pytest.mark.parametrize("max_len", [900_000, 163_839, 65])
def test_e1_a_maximum_length_that_no_tile_divides(max_len: int) -> None:
    """A logits buffer rounded up in one place and not in another has the wrong row stride from row 1 on."""
    lengths = [min(length, max_len) for length in (max_len if max_len < 200_000 else 3000, 65, 1, 2100)]
    case = pattern_case(spec_of(topk=64), "gaussian", lengths, seed=max_len)
    check_step(case, indexer_for(case, max_context=max_len))
    arguments = (case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table)
    logits = ks.score(case.spec, *arguments, max_len=max_len)
    assert logits.shape == (4, max_len)
    assert case.logits is not None
    for row, length in enumerate(lengths):
        assert_bitwise_equal(logits[row, :length], case.logits[row][:length], f"logits of row {row}")
        assert bool((logits[row, length:] == -torch.inf).all())


@pytest.mark.slow
def test_e1_a_row_as_long_as_the_odd_maximum() -> None:
    """900,000 keys in an indexer for 900,000."""
    case = pattern_case(spec_of(), "gaussian", [900_000], seed=900)
    check_step(case, indexer_for(case, max_context=900_000))


def test_e2_lengths_that_are_a_column_of_something() -> None:
    """Engines slice lengths out of a larger tensor: any stride, one dimension or two, must read the same values."""
    case = pattern_case(spec_of(topk=32), "gaussian", [[100, 101, 0], [64, 300, 2]], next_n=3, seed=2)
    want = expected_step(case)
    wide = torch.full((6, 5), 77, dtype=torch.int32)
    wide[:, 2] = case.seq_lens
    assert_step(run_step(replace(case, seq_lens=wide[:, 2])), want, "a column")
    assert_step(run_step(replace(case, seq_lens=case.seq_lens.reshape(2, 3))), want, "[requests, next_n]")
    transposed = case.seq_lens.reshape(2, 3).t().contiguous().t()
    assert transposed.stride() == (1, 2)
    assert_step(run_step(replace(case, seq_lens=transposed)), want, "a transposed view")


def test_e2_tables_with_a_row_stride() -> None:
    """Rows of both tables lie anywhere: inside wider tables, overlapping (stride 0), one row reused."""
    case = pattern_case(spec_of(topk=32), "gaussian", [130, 300], seed=20)
    want = expected_step(case)
    for extra in (0, 1, 37):
        width = case.index_table.shape[1]
        index = torch.full((2, width + extra), 0x7FFFFFFF, dtype=torch.int32)
        index[:, :width] = case.index_table
        assert case.kv_table is not None
        kv = torch.full((2, case.kv_table.shape[1] + extra), -9, dtype=torch.int32)
        kv[:, : case.kv_table.shape[1]] = case.kv_table
        sliced = replace(case, index_table=index[:, :width], kv_table=kv[:, : case.kv_table.shape[1]])
        assert_step(run_step(sliced), want, f"row stride {width + extra}")
    one = pattern_case(spec_of(topk=32), "gaussian", [130], seed=21)
    assert one.kv_table is not None
    shared = replace(
        one,
        query=torch.cat([one.query] * 3) if isinstance(one.query, torch.Tensor) else one.query,
        weights=one.weights.expand(3, -1),
        seq_lens=torch.tensor([130, 65, 33], dtype=torch.int32),
        index_table=one.index_table.expand(3, -1),
        kv_table=one.kv_table.expand(3, -1),
        logits=(one.logits or ()) * 3,
    )
    assert shared.index_table.stride(0) == 0
    assert_step(run_step(shared), expected_step(shared), "an expanded table")


@pytest.mark.parametrize("key_format", FORMATS)
def test_e4_every_score_distinct_over_permuted_pages(key_format: str) -> None:
    """A table read per token, or an in-page offset dropped, gives plausible scores of other tokens: no crash."""
    case = injected_case(spec_of(key_format, topk=2048), [distinct_scores(6000, 4)], seed=4)
    assert case.index_table[0, :94].tolist() != sorted(case.index_table[0, :94].tolist())
    check_step(case)
    arguments = (case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table)
    assert case.logits is not None
    assert_bitwise_equal(ks.score(case.spec, *arguments, max_len=6000)[0], case.logits[0], "logits")


@pytest.mark.parametrize("key_format", FORMATS)
def test_e8_page_ids_in_the_top_quarter_of_the_pool(key_format: str) -> None:
    """An offset computed with a stride four times too large only faults above a quarter of the pool.

    The context is compressed four to one, so lengths count entries; every page id lies in the pool's top quarter.
    """
    spec = spec_of(key_format, topk=40)
    tokens = [4 * 500 + 3, 4 * 64, 4 * 65 - 1]
    entries = [count // 4 for count in tokens]
    scores = [distinct_scores(count, count) for count in entries]
    case = injected_case(spec, scores, kv_page=16, block_rows=16)
    pages = 240
    pool = make_pool(spec, pages)
    table = case.index_table.clone()
    for request, count in enumerate(entries):
        needed = -(-count // 64)
        source = case.index_table[request, :needed].long()
        table[request, :needed] = case.index_table[request, :needed] + (pages - case.cache.shape[0])
        pool[table[request, :needed].long()] = case.cache[source]
    moved = replace(case, cache=pool, index_table=table)
    assert all(int(page) >= 3 * pages // 4 for page in table[0, : -(-entries[0] // 64)])
    check_step(moved)


def test_e9_an_engines_block_of_ten_pages() -> None:
    """The engine hands out blocks of 640 tokens, the index cache has pages of 64, the attention cache blocks of 128.

    Deriving one table from another must be injective: 4,096 selected entries are 4,096 different physical rows, and a
    needle is found where it was put.
    """
    spec = spec_of(topk=4096)
    manager_blocks = torch.tensor([5, 2, 9, 0, 7, 3, 8], dtype=torch.int32)  # 7 blocks of 640 tokens
    length = 4300
    scores = distinct_scores(length, 9)
    scores[3333] = 3e38
    index_table = (manager_blocks[:, None] * 10 + torch.arange(10, dtype=torch.int32)).reshape(1, -1)
    kv_table = (manager_blocks[:, None] * 5 + torch.arange(5, dtype=torch.int32)).reshape(1, -1)
    pool = make_pool(spec, 100)
    keys = inject_keys(spec.key_format, scores)
    write_tokens(spec, pool, slots_of(index_table[0], length), keys.codes, keys.scales)
    base = injected_case(spec, [scores])
    case = replace(
        base, cache=pool, index_table=index_table, kv_table=kv_table, kv_page=128, block_rows=128, logits=(keys.logits,)
    )
    out = check_step(case)
    rows = out.rows[0].tolist()
    assert len(set(rows)) == 4096
    assert min(rows) >= 0
    assert max(rows) < 10 * 640
    needle = int(manager_blocks[3333 // 640]) * 640 + 3333 % 640
    assert rows[chosen(out, 0).index(3333)] == needle


@pytest.mark.parametrize("kv_page", [640, 48, 0, -64, 3])
def test_e9_a_block_size_that_is_no_power_of_two_is_refused(kv_page: int) -> None:
    """The attention cache's block must be a power of two: refused by name, before anything is written."""
    case = pattern_case(spec_of(topk=16), "gaussian", [100], seed=9)
    rows = torch.full((1, 16), 7, dtype=torch.int32)
    with assert_untouched(rows=rows), pytest.raises(ks.KeysieveError, match="kv_page"):
        run_step(case, out=rows, kv_page=kv_page, block_rows=max(kv_page, 1))


@pytest.mark.parametrize(("kv_page", "block_rows"), [(1, 1), (16, 16), (16, 64), (64, 100), (128, 128), (4096, 4097)])
def test_e9_physical_rows_for_every_block_geometry(kv_page: int, block_rows: int) -> None:
    """``kv_table[r, pos // kv_page] * block_rows + pos % kv_page`` for small, large and padded blocks."""
    case = pattern_case(
        spec_of(topk=200), "gaussian", [[900, 901], [130, 0]], next_n=2, seed=90, kv_page=kv_page, block_rows=block_rows
    )
    check_step(case)


def test_e9_a_table_of_first_rows() -> None:
    """``block_rows`` 1 with a table of each block's first row is the same formula: blocks may start at any row."""
    case = pattern_case(spec_of(topk=200), "gaussian", [900, 130], seed=91, kv_page=64)
    assert case.kv_table is not None
    starts = replace(case, kv_table=torch.where(case.kv_table < 1000, case.kv_table * 100 + 7, 0), block_rows=1)
    check_step(starts)


@pytest.mark.parametrize("last", [202_752, 1000, 64, 65])
def test_e13_drafts_that_end_at_the_maximum(last: int) -> None:
    """Four rows whose last sees exactly max_context keys, and a table with exactly the columns that takes."""
    lengths = [[max(last - 3 + row, 1) for row in range(4)]]
    case = pattern_case(spec_of(topk=256), "gaussian", lengths, next_n=4, seed=last)
    columns = -(-last // 64)
    assert case.kv_table is not None
    case = replace(case, index_table=case.index_table[:, :columns], kv_table=case.kv_table[:, :columns])
    check_step(case, indexer_for(case, max_context=last))


@pytest.mark.parametrize("topk", [32, 640])
@pytest.mark.parametrize("beyond", ["index_table", "max_context", "kv_table"])
def test_e13_drafts_past_the_table_or_the_maximum(beyond: str, topk: int) -> None:
    """202,752 + 2 with a table for 202,752 (scaled down): that row is empty, its neighbours are not harmed.

    No host can see this under a graph, so no call is refused for it: the next host check reports row and length.
    """
    case = pattern_case(spec_of(topk=topk), "gaussian", [[638, 639, 640, 641], [100, 101, 102, 103]], next_n=4, seed=13)
    assert case.kv_table is not None
    want = expected_step(replace(case, seq_lens=case.seq_lens * (case.seq_lens <= 640)))
    if beyond == "index_table":
        case = replace(case, index_table=case.index_table[:, :10])
    if beyond == "kv_table":
        case = replace(case, kv_table=case.kv_table[:, :10])
    indexer = indexer_for(case, max_context=640 if beyond == "max_context" else 704)
    rows, positions = guarded_rows(8, topk), guarded_rows(8, topk)
    with assert_untouched(cache=case.cache):
        out = run_step(case, indexer, out=rows.view, positions=positions.view)
    assert_step(out, want, "rows, the long one empty")
    rows.assert_canaries()
    positions.assert_canaries()
    assert_fault(indexer, "row 3", "641", "640")
    shorter = replace(case, seq_lens=case.seq_lens.clamp(max=640))
    check_step(shorter, indexer)
    indexer.check()


def test_e13_score_past_the_table_or_its_width() -> None:
    """The public score leaves such a row empty too (all -inf), and says so."""
    case = pattern_case(spec_of(), "gaussian", [641, 100], seed=13)
    assert case.logits is not None
    for table, max_len in ((case.index_table[:, :10], 704), (case.index_table, 640)):
        arguments = (case.query, case.index_cache(), case.weights, case.seq_lens, table)
        with pytest.warns(ks.DeviceFaultWarning, match=r"row 0.*641"):
            logits = ks.score(case.spec, *arguments, max_len=max_len)
        assert bool((logits[0] == -torch.inf).all())
        assert_bitwise_equal(logits[1, :100], case.logits[1][:100], "the other row")


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("page", [8, 9, 1 << 20, 0x7FFFFFFF, -1, -0x80000000])
def test_e_an_impossible_page_id_in_a_needed_column(key_format: str, page: int) -> None:
    """An id outside the pool of eight pages reads nothing: its keys score NaN, no other key or request changes."""
    spec = spec_of(key_format, topk=170)
    case = pattern_case(spec, "gaussian", [200, 200], seed=16, spare_pages=0)
    assert case.cache.shape[0] == 8
    table = case.index_table.clone()
    table[0, 1] = page
    scores = [request.clone() for request in case.logits or ()]
    scores[0][64:128] = float("nan")
    broken = replace(case, index_table=table, logits=tuple(scores))
    indexer = indexer_for(broken)
    check_step(broken, indexer)
    assert_fault(indexer, "index_table", "column 1", str(page))
    arguments = (case.query, case.index_cache(), case.weights, case.seq_lens, table)
    with pytest.warns(ks.DeviceFaultWarning, match="index_table"):
        logits = ks.score(spec, *arguments, max_len=200)
    assert_bitwise_equal(logits[0], canonical_bf16(scores[0][:200]), "logits")


@pytest.mark.parametrize("key_format", FORMATS)
def test_e16_rows_map_to_their_own_requests_pages_only(key_format: str) -> None:
    """A local id past the request's own length, or a batch offset added twice, aliases another request's blocks."""
    spec = spec_of(key_format, topk=100)
    case = pattern_case(spec, "all_equal", [[100, 90], [1000, 65]], next_n=2, seed=16)
    out = check_step(case)
    assert case.kv_table is not None
    for row in range(4):
        length = case.lengths[row]
        own = set(case.kv_table[row // 2, : -(-length // 64)].tolist())
        rows = out.rows[row, : int(out.counts[row])]
        assert {int(block) for block in (rows // 64).tolist()} <= own


@pytest.mark.parametrize("key_format", FORMATS)
def test_e2_tables_expanded_per_row_with_lengths_per_request(key_format: str) -> None:
    """Lengths ``[requests, next_n]`` say that rows belong together; a table with a row per query row then means next_n.

    The same tables with 1-D lengths mean one request per row. Both give the same bytes.
    """
    case = pattern_case(spec_of(key_format, topk=32), "gaussian", [[100, 101, 0], [64, 300, 2]], next_n=3, seed=22)
    want = expected_step(case)
    assert case.kv_table is not None
    index, kv = case.index_table.repeat_interleave(3, 0), case.kv_table.repeat_interleave(3, 0)
    grouped = replace(case, seq_lens=case.seq_lens.reshape(2, 3))
    for index_table in (index, case.index_table):
        for kv_table in (kv, case.kv_table):
            arguments = (case.query, case.index_cache(), case.weights, grouped.seq_lens, index_table)
            paging = {**case.paging(), "kv_table": kv_table}
            indexer = ks.DecodeIndexer(case.spec, max_rows=6, max_context=300, next_n=3, device="cpu", backend="cpu")
            assert_step(indexer(*arguments, positions=True, **paging), want, "a table per row, lengths per request")
    flat = ks.DecodeIndexer(case.spec, max_rows=6, max_context=300, next_n=1, device="cpu", backend="cpu")
    arguments = (case.query, case.index_cache(), case.weights, case.seq_lens, index)
    assert_step(flat(*arguments, positions=True, **case.paging() | {"kv_table": kv}), want, "a request per row")
