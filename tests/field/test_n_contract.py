"""Kind N: reports that were about the contract: no forced positions, logical ids that can be checked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle.step import expected_step

import keysieve as ks
from field.steps import FORMATS, assert_step, check_step, chosen, run_step, spec_of
from keysieve.testing import assert_bitwise_equal, draw_case, injected_case, pattern_case, random_case


@pytest.mark.parametrize("key_format", FORMATS)
def test_n1_no_position_is_forced_into_the_selection(key_format: str) -> None:
    """First and newest keys (attention sinks, the local window) are chosen by score alone.

    Worst scores at both ends: neither end appears among the selected, at any length past k.
    """
    spec = spec_of(key_format, topk=64)
    for length in (65 + 80, 1000, 4097):
        scores = 1.0 + torch.rand(length, generator=torch.Generator().manual_seed(length))
        scores[:40] = 0.0
        scores[-40:] = -1.0
        out = check_step(injected_case(spec, [scores]))
        assert min(chosen(out, 0)) >= 40
        assert max(chosen(out, 0)) < length - 40


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
@pytest.mark.parametrize("key_format", FORMATS)
def test_n1_the_reference_is_public_and_agrees(key_format: str, numerics: str) -> None:
    """A user who doubts the kernel scores and selects the same bytes with ``keysieve.reference`` and compares bits."""
    spec = spec_of(key_format, heads=16, topk=50, numerics=numerics)
    case = random_case(spec, [[300, 301], [51, 64]], next_n=2, seed=1)
    out = check_step(case, numerics=numerics)
    arguments = (case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table)
    logits = ks.reference.score(spec, *arguments, max_len=320)
    assert_bitwise_equal(logits, ks.score(spec, *arguments, max_len=320), "logits")
    positions, counts = ks.reference.topk(logits, case.seq_lens, 50)
    assert_bitwise_equal(positions, out.positions, "positions")
    assert_bitwise_equal(counts, out.counts, "counts")


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize(("kv_page", "block_rows"), [(64, 64), (16, 16), (128, 192), (1, 1), (256, 256)])
def test_n2_positions_agree_with_physical_rows(key_format: str, kv_page: int, block_rows: int) -> None:
    """Trainers want logical ids: entry i of positions maps to entry i of rows, -1 exactly where rows has -1.

    Asking for positions changes no row; without a block table the rows are the positions.
    """
    case = pattern_case(
        spec_of(key_format, topk=100),
        "half_tied",
        [[400, 99, 0], [130, 131, 132]],
        next_n=3,
        seed=2,
        kv_page=kv_page,
        block_rows=block_rows,
    )
    out = check_step(case)
    assert case.kv_table is not None
    for row in range(case.rows):
        for position, physical in zip(out.positions[row].tolist(), out.rows[row].tolist(), strict=True):
            if position < 0:
                assert (position, physical) == (-1, -1)
                continue
            block = int(case.kv_table[row // 3, position // kv_page])
            assert physical == block * block_rows + position % kv_page
    silent = run_step(case, positions=False)
    assert silent.positions is None
    assert_bitwise_equal(silent.rows, out.rows, "rows without positions")
    plain = run_step(replace(case, kv_table=None))
    assert_bitwise_equal(plain.rows, out.positions, "rows without a block table")


@pytest.mark.parametrize("seed", range(12))
def test_n2_the_public_top_k_with_a_block_table(seed: int) -> None:
    """``topk`` converts to physical rows by the same rule, for rows that it is told the request of."""
    case = draw_case(100 + seed, max_context=900, max_requests=4)
    arguments = (case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table)
    logits = ks.score(case.spec, *arguments, max_len=case.max_len)
    want = expected_step(case)
    rows, counts = ks.topk(logits, case.seq_lens, case.spec.topk, **case.paging())
    assert_bitwise_equal(rows, want.rows, case)
    assert_bitwise_equal(counts, want.counts, case)
    order = torch.randperm(case.rows, generator=torch.Generator().manual_seed(seed))
    request = (order // case.next_n).to(torch.int32)
    rows, _ = ks.topk(logits[order], case.seq_lens[order], case.spec.topk, row_request=request, **case.paging())
    assert_bitwise_equal(rows, want.rows[order], "rows of shuffled rows")


def test_n2_the_caller_may_give_the_positions_buffer() -> None:
    """``positions=`` takes a buffer, of any row stride, and returns it filled."""
    case = pattern_case(spec_of(topk=33), "gaussian", [200, 20], seed=3)
    wide = torch.full((2, 50), 9, dtype=torch.int32)
    out = run_step(case, positions=wide[:, 4:37])
    assert_step(out, expected_step(case), case)
    assert_bitwise_equal(wide[:, 4:37], expected_step(case).positions, "the caller's buffer")
    assert bool((wide[:, :4] == 9).all())
    assert bool((wide[:, 37:] == 9).all())
