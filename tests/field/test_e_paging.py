"""Kind E: page tables, strides, offsets: where a byte lives, and what happens beside it."""

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
    indexer_for,
    refusal_of,
    run_step,
    spec_of,
)
from keysieve.testing import (
    assert_bitwise_equal,
    assert_untouched,
    bits_of,
    canonical_bf16,
    guarded_rows,
    inject_keys,
    injected_case,
    key_planes,
    make_pool,
    pattern_case,
    random_case,
    relocate,
    slots_of,
    write_tokens,
)

PADDED_PAGE = 38_016


def distinct_scores(length: int, seed: int) -> torch.Tensor:
    """``length`` different BF16 values in random order."""
    keys = 0x0100 + torch.randperm(0xFE00, generator=torch.Generator().manual_seed(seed))[:length]
    return ((torch.where(keys >= 0x8000, keys - 0x8000, 0xFFFF - keys)) << 16).to(torch.int32).view(torch.float32)


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


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("stride", [PADDED_PAGE, None])
def test_e10_appending_to_a_padded_pool_leaves_the_neighbours_alone(key_format: str, stride: int | None) -> None:
    """A writer that assumes dense pages corrupts other requests' state packed between them.

    Pages stand 38,016 bytes apart. Append into scattered slots, then check every byte of the storage that is not one
    of those tokens' own, and that the step finds the appended keys.
    """
    spec = spec_of(key_format, topk=20)
    pages = 7
    pool = make_pool(spec, pages, page_stride=stride, poison="nan")
    whole = torch.as_strided(pool, (pool.untyped_storage().nbytes(),), (1,), 0)
    whole[:] = torch.randint(0, 256, whole.shape, generator=torch.Generator().manual_seed(10), dtype=torch.uint8)
    before = whole.clone()
    table = torch.tensor([[4, 1, 6]], dtype=torch.int32)
    slots = slots_of(table[0], 150)
    keys = torch.randn(150, 128, generator=torch.Generator().manual_seed(11))
    cache = ks.IndexCache(spec, pool)
    cache.append(keys, slots)
    touched = torch.zeros_like(whole, dtype=torch.bool)
    code_plane, scale_plane = key_planes(spec, touched.view(torch.uint8).as_strided(pool.shape, pool.stride(), 0))
    code_plane[slots // 64, slots % 64] = 1
    scale_plane[slots // 64, slots % 64] = 1
    assert_bitwise_equal(whole[~touched], before[~touched], "bytes outside the appended tokens")
    assert int((whole[touched] != before[touched]).sum()) > 150 * 30
    base = random_case(spec, [150], seed=12)
    case = replace(base, cache=pool, index_table=table)
    check_step(case)


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("stride", [16, 512, 29_568])
def test_e10_reading_a_padded_pool(key_format: str, stride: int) -> None:
    """The same keys in a pool with gaps between the pages, poison in the gaps: the same bytes out."""
    spec = spec_of(key_format, topk=30)
    case = random_case(spec, [[200, 201], [66, 0]], next_n=2, seed=13)
    dense = check_step(case)
    padded = relocate(case, 14, page_stride=spec.format.page_bytes + stride)
    out = run_step(padded)
    assert_bitwise_equal(out.rows, dense.rows, "rows")


@pytest.mark.parametrize("offset", [1, 2, 4, 8, 12, 16, 100])
def test_e11_a_pool_that_starts_anywhere(offset: int) -> None:
    """Vector reads truncate an unaligned base address. It works, or it is refused by name; never something else."""
    spec = spec_of(topk=30)
    case = pattern_case(spec, "gaussian", [200, 66], seed=11)
    storage = torch.zeros(case.cache.numel() + offset, dtype=torch.uint8)
    shifted = storage[offset:].view(case.cache.shape)
    shifted.copy_(case.cache)
    refusal = refusal_of(lambda: ks.IndexCache(spec, shifted))
    if refusal is not None:
        assert shifted.data_ptr() % 16, "an aligned pool must be accepted"
        assert "address" in refusal
        assert "16" in refusal
        return
    arguments = (case.weights, case.seq_lens, case.index_table)
    out = indexer_for(case)(case.query, ks.IndexCache(spec, shifted), *arguments, positions=True, **case.paging())
    assert_step(out, expected_step(case), case)


@pytest.mark.parametrize("gap", [1, 8, 15, 17])
def test_e11_a_page_stride_that_16_does_not_divide_is_refused(gap: int) -> None:
    """The contract allows any page stride that is a multiple of 16 bytes, and no other."""
    spec = spec_of()
    pool = make_pool(spec, 3, page_stride=spec.format.page_bytes + gap)
    with pytest.raises(ks.KeysieveError, match="stride"):
        ks.IndexCache(spec, pool)


@pytest.mark.parametrize("key_format", FORMATS)
def test_e12_one_key_past_a_tile_beside_other_winners(key_format: str) -> None:
    """Unmasked stores past a row's end land in the next row: L mod 256 = 1 everywhere, each row its own winner."""
    spec = spec_of(key_format, topk=5)
    lengths = [257, 513, 1025, 257, 769, 1]
    scores = []
    for request, length in enumerate(lengths):
        row = torch.full((length + 300,), -2.0)
        row[length:] = 1e30  # what an unmasked tail would bring
        row[(37 * request) % length] = 100.0 + request
        row[length - 1] = 50.0
        scores.append(row)
    out = check_step(injected_case(spec, scores, lengths=lengths))
    for request, length in enumerate(lengths):
        assert {(37 * request) % length, length - 1} <= set(chosen(out, request))


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
def test_e15_scattered_writes_inside_one_page(key_format: str) -> None:
    """A cache indexed by page and moved by token id: appending single tokens keeps every other token of the page."""
    spec = spec_of(key_format)
    cache = ks.IndexCache.empty(spec, pages=3, device="cpu")
    gen = torch.Generator().manual_seed(15)
    cache.append(torch.randn(192, 128, generator=gen), torch.arange(192))
    before = cache.data.clone()
    slots = torch.tensor([64 + 5, 64 + 63, 64, 64 + 31, -1, 2 * 64 - 2])
    cache.append(torch.randn(6, 128, generator=gen) * 3, slots)
    codes, scales = key_planes(spec, cache.data)
    old_codes, old_scales = key_planes(spec, before)
    kept = torch.ones(3, 64, dtype=torch.bool)
    written = slots[slots >= 0]
    kept[written // 64, written % 64] = False
    assert_bitwise_equal(codes[kept], old_codes[kept], "keys of untouched tokens")
    assert_bitwise_equal(scales[kept], old_scales[kept], "scales of untouched tokens")
    assert bool((codes[~kept] != old_codes[~kept]).any(1).all())


def test_e15_order_of_slots_does_not_matter() -> None:
    """The same tokens appended one by one, backwards or together fill the same bytes."""
    spec = spec_of()
    keys = torch.randn(100, 128, generator=torch.Generator().manual_seed(150))
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(151))[:100]
    caches = [ks.IndexCache.empty(spec, pages=2, device="cpu") for _ in range(3)]
    for cache in caches:
        cache.data.zero_()
    caches[0].append(keys, slots)
    caches[1].append(keys.flip(0), slots.flip(0))
    for token in range(100):
        caches[2].append(keys[token : token + 1], slots[token : token + 1])
    for cache in caches[1:]:
        assert_bitwise_equal(cache.data, caches[0].data, "cache bytes")


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


def test_e_pool_offsets_beyond_2_to_the_31_bytes() -> None:
    """Byte offsets of real pools pass 2^31 and 2^32: a 32-bit product wraps to another page.

    The pool's address range is 5 GB of untouched virtual memory; only the few pages used exist.
    """
    spec = spec_of(topk=16)
    stride = 1 << 26
    pages = 80
    pool = torch.empty((pages - 1) * stride + spec.format.page_bytes, dtype=torch.uint8)
    cache = pool.as_strided((pages, 64, spec.format.width), (stride, spec.format.width, 1))
    table = torch.tensor([[79, 64, 31], [32, 33, 65]], dtype=torch.int32)
    scores = [distinct_scores(190, 1), distinct_scores(170, 2)]
    base = injected_case(spec, scores)
    for request, row in enumerate(table):
        keys = inject_keys(spec.key_format, scores[request])
        write_tokens(spec, cache, slots_of(row, len(scores[request])), keys.codes, keys.scales)
    case = replace(base, cache=cache, index_table=table)
    check_step(case)
    appended = ks.IndexCache(spec, cache)
    appended.append(torch.zeros(1, 128), torch.tensor([79 * 64 + 63]))
    assert bits_of(key_planes(spec, cache)[0][79, 63]).eq(0).all()
