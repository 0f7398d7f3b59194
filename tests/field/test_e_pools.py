"""Kind E, pools: strides, offsets, gaps and neighbours: where a byte lives, and what happens beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle.step import expected_step

import keysieve as ks
from field.steps import (
    FORMATS,
    assert_step,
    check_step,
    chosen,
    distinct_scores,
    indexer_for,
    refusal_of,
    run_step,
    spec_of,
)
from keysieve.testing import (
    assert_bitwise_equal,
    bits_of,
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
