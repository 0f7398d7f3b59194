"""Kind D: rows of any length beside each other, any k, padding, strided outputs, mismatched counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle.step import expected_step

import keysieve as ks
from field.steps import (
    FORMATS,
    UNSET,
    assert_same_outputs,
    assert_step,
    check_step,
    chosen,
    indexer_for,
    poisoned,
    run_step,
    spec_of,
)
from keysieve.testing import (
    assert_bitwise_equal,
    assert_untouched,
    draw_case,
    guarded_rows,
    injected_case,
    pattern_case,
    random_case,
    take_requests,
)


@pytest.mark.parametrize("key_format", FORMATS)
def test_d2_a_pool_of_one_page(key_format: str) -> None:
    """At start-up an engine offers 64 tokens and k = 2,048: all L keys, then -1, for every L."""
    spec = spec_of(key_format)
    scores = torch.randn(64, generator=torch.Generator().manual_seed(2))
    indexer = ks.DecodeIndexer(spec, max_rows=1, max_context=64, next_n=1, device="cpu", backend="cpu")
    for length in range(1, 65):
        case = injected_case(spec, [scores], lengths=[length], spare_pages=0)
        assert case.cache.shape[0] == 1
        out = check_step(case, indexer)
        assert chosen(out, 0) == list(range(length))


def test_d3_a_table_narrower_than_the_bound() -> None:
    """The table covers 4,096 tokens, the indexer is built for 131,072: columns past the table are not read."""
    case = pattern_case(spec_of(topk=512), "gaussian", [4096, 4096], seed=3)
    narrow = case.index_table[:, :64]
    kv_narrow = case.kv_table[:, :64] if case.kv_table is not None else None
    case = replace(case, index_table=narrow, kv_table=kv_narrow)
    check_step(case, indexer_for(case, max_context=131072))
    arguments = (case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table)
    logits = ks.score(case.spec, *arguments, max_len=131072)
    assert logits.shape == (2, 131072)
    assert bool((logits[:, 4096:] == -torch.inf).all())


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("topk", [4, 2048])
def test_d5_zero_length_rows_between_long_ones(key_format: str, topk: int) -> None:
    """A row with nothing to score must neither stall the work split nor shift its neighbours."""
    lengths = [0, 5000, 0, 0, 70000, 0]
    out = check_step(pattern_case(spec_of(key_format, topk=topk), "gaussian", lengths, seed=5))
    assert out.counts.tolist() == [0, topk, 0, 0, topk, 0]


def test_d5_nothing_but_empty_rows() -> None:
    """All rows empty, zero or negative: counts 0, everything -1."""
    case = pattern_case(spec_of(topk=7), "gaussian", [[0, -1], [-5, 0], [-0x80000000, 0]], next_n=2, seed=5)
    out = check_step(case)
    assert out.counts.tolist() == [0] * 6
    assert bool((out.rows == -1).all())
    assert bool((out.positions == -1).all())


@pytest.mark.parametrize("key_format", FORMATS)
def test_d6_an_empty_batch(key_format: str) -> None:
    """No requests at all: empty results of the right shape, and outputs that stay untouched."""
    spec = spec_of(key_format, topk=16)
    case = take_requests(random_case(spec, [100, 50], seed=6), [])
    assert case.rows == 0
    out = run_step(case)
    assert out.rows.shape == (0, 16)
    assert out.counts.shape == (0,)
    assert out.positions.shape == (0, 16)
    assert out.rows.dtype == out.counts.dtype == out.positions.dtype == torch.int32
    arguments = (case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table)
    assert ks.score(spec, *arguments, max_len=64).shape == (0, 64)
    positions, counts = ks.topk(torch.empty(0, 64, dtype=torch.bfloat16), torch.empty(0, dtype=torch.int32), 16)
    assert positions.shape == (0, 16)
    assert counts.shape == (0,)


@pytest.mark.parametrize("topk", [1, 2, 31, 33, 511, 512, 513, 705, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096])
def test_d7_d8_any_topk(topk: int) -> None:
    """Odd k, k beside powers of two, k = 1,024 that used to be slow or wrong: one contract for all of them."""
    case = pattern_case(spec_of(topk=topk), "half_tied", [5000, topk, topk + 1, 3], seed=topk)
    check_step(case)
    out = run_step(replace(case, kv_table=None))
    assert_bitwise_equal(out.rows, out.positions, "rows without a block table")


@pytest.mark.parametrize("topk", [7, 1024, 2048])
@pytest.mark.parametrize("pattern", ["gaussian", "three_positives", "all_equal"])
def test_d9_every_slot_is_written(pattern: str, topk: int) -> None:
    """Outputs full of poison before the call: no slot may keep it, whatever the row's length."""
    case = pattern_case(spec_of(topk=topk), pattern, [5000, 0, topk // 2, topk + 1, -3], seed=9)
    rows, positions = poisoned(case.rows, topk), poisoned(case.rows, topk)
    out = run_step(case, out=rows, positions=positions)
    assert_step(out, expected_step(case), case)
    assert not bool((rows == UNSET).any())
    assert not bool((positions == UNSET).any())
    assert out.rows.data_ptr() == rows.data_ptr()
    assert out.positions.data_ptr() == positions.data_ptr()


@pytest.mark.parametrize("topk", [1, 5, 64, 513, 2048])
def test_d10_strided_outputs_keep_their_surroundings(topk: int) -> None:
    """Vector stores beyond a strided view: canaries between the rows, before the first and after the last stay."""
    case = pattern_case(spec_of(topk=topk), "gaussian", [3000, topk, topk + 1, 0], seed=10)
    rows, positions = guarded_rows(case.rows, topk), guarded_rows(case.rows, topk, stride=topk + 1)
    out = run_step(case, out=rows.view, positions=positions.view)
    rows.assert_canaries()
    positions.assert_canaries()
    assert_step(out, expected_step(case), case)
    assert_bitwise_equal(rows.view, out.rows, "the caller's view")


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("length", [64, 65, 128, 129, 1, 63])
def test_d10_the_last_page_ends_the_allocation(key_format: str, length: int) -> None:
    """The pool's last byte is the allocation's last byte and the row lives on that page: nothing behind it is read."""
    spec = spec_of(key_format, topk=16)
    scores = torch.randn(length, generator=torch.Generator().manual_seed(length))
    for seed in range(20):
        case = injected_case(spec, [scores], seed=seed, spare_pages=0)
        if int(case.index_table[0, (length - 1) // 64]) == case.cache.shape[0] - 1:
            break
    assert case.cache.untyped_storage().nbytes() == case.cache.shape[0] * spec.format.page_bytes
    check_step(case)


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("poison", ["winner", "nan", "mixed"])
def test_d11_stale_keys_past_the_length_never_win(key_format: str, poison: str) -> None:
    """Keys at L and later are left over from before and would win: no row sees them, in its page or the next."""
    spec = spec_of(key_format, topk=50)
    scores = torch.cat([torch.randn(200, generator=torch.Generator().manual_seed(11)), torch.full((200,), 1e30)])
    lengths = [[200, 199, 150, 1], [200, 128, 129, 0]]
    case = injected_case(spec, [scores, scores], next_n=4, lengths=lengths, poison=poison)
    out = check_step(case)
    for row, length in enumerate(case.lengths):
        assert max(chosen(out, row), default=-1) < max(length, 1)


@pytest.mark.parametrize("key_format", FORMATS)
def test_d12_requests_with_fewer_drafts_are_padded(key_format: str) -> None:
    """q_lens [4, 1, 0, 4, 2] padded to four rows: real rows as in an unpadded run, padding rows empty.

    Wherever the padding stands: at the end of a request's rows, at its start, in the middle.
    """
    spec = spec_of(key_format, topk=64)
    real = [[300, 301, 302, 303], [500], [], [64, 65, 66, 67], [900, 901]]
    for place in ("end", "start", "middle"):
        padded = []
        for rows in real:
            pad = [0] * (4 - len(rows))
            at = {"end": len(rows), "start": 0, "middle": len(rows) // 2}[place]
            padded.append(rows[:at] + pad + rows[at:])
        case = random_case(spec, padded, next_n=4, seed=12)
        out = check_step(case)
        real_rows = [row for row, length in enumerate(case.lengths) if length > 0]
        unpadded = take_requests(case, [row // 4 for row in real_rows], rows=real_rows)
        alone = run_step(unpadded)
        assert_bitwise_equal(out.rows[real_rows], alone.rows, f"rows, padding at the {place}")
        assert_bitwise_equal(out.counts[real_rows], alone.counts, f"counts, padding at the {place}")
        pads = [row for row in range(case.rows) if row not in real_rows]
        assert out.counts[pads].tolist() == [0] * len(pads)
        assert bool((out.rows[pads] == -1).all())


@pytest.mark.parametrize("shown", [5, 7, 0, 12])
def test_d13_lengths_for_another_number_of_rows_are_refused(shown: int) -> None:
    """An idle rank's lengths belong to other rows than its query: refused before anything is written."""
    case = pattern_case(spec_of(topk=16), "gaussian", [300, 200, 100], next_n=2, seed=13)
    wrong = replace(case, seq_lens=torch.full((shown,), 50, dtype=torch.int32))
    rows = poisoned(case.rows, 16)
    with assert_untouched(rows=rows, cache=case.cache), pytest.raises(ks.KeysieveError, match="seq_lens"):
        run_step(wrong, indexer_for(case, max_rows=16), out=rows)


@pytest.mark.parametrize("seed", range(40))
def test_d_anything_drawn_from_a_seed(seed: int) -> None:
    """Random shapes, formats, patterns, strides, poison and lengths at once, as the check command fuzzes."""
    check_step(draw_case(seed, max_context=2500, max_requests=4))


def test_d_a_larger_indexer_gives_the_same_bytes() -> None:
    """Capacity is not part of the answer: more rows, a longer context, other prepared next_n."""
    case = pattern_case(spec_of(topk=100), "half_tied", [[400, 401]] * 3, next_n=2, seed=14)
    tight = check_step(case)
    roomy = run_step(case, indexer_for(case, max_rows=333, max_context=100_001, next_n=(1, 2, 5)))
    assert_same_outputs(roomy, tight, case)
