"""The generators do what they say: injected bytes really score the wanted values, poison lies where it should."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from keysieve import IndexerSpec
from keysieve.testing import (
    PATTERNS,
    assert_bitwise_equal,
    assert_untouched,
    canonical_bf16,
    draw_case,
    guarded_rows,
    inject_keys,
    injected_case,
    key_planes,
    make_pool,
    pattern_case,
    random_case,
    scores_of_key16,
)
from oracle.score import gather_keys
from oracle.select import key16
from oracle.step import expected_logits, injected_bits, row_bits

FORMATS = ("fp8_fp32", "fp8_ue8m0", "mxfp4")


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_injected_bytes_score_what_was_asked(key_format: str, numerics: str, pattern: str) -> None:
    spec = IndexerSpec(heads=8, topk=32, key_format=key_format)
    case = pattern_case(spec, pattern, [130, 1, 0, 65], next_n=2, seed=11)
    for row in range(case.rows):
        got, want = row_bits(case, row, numerics), injected_bits(case, row)
        np.testing.assert_array_equal(got, want, err_msg=f"{case} row {row}")


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("key_format", FORMATS)
def test_every_bf16_pattern_can_be_injected(key_format: str, heads: int) -> None:
    every = (torch.arange(1 << 16) << 16).to(torch.int32).view(torch.float32)
    spec = IndexerSpec(heads=heads, topk=32, key_format=key_format)
    chunk = every[torch.randperm(every.numel(), generator=torch.Generator().manual_seed(heads))[:8192]]
    keys = inject_keys(key_format, chunk)
    assert_bitwise_equal(keys.logits, canonical_bf16(chunk), "logits as stated")
    case = injected_case(spec, [chunk], next_n=2)
    for row in range(2):
        np.testing.assert_array_equal(row_bits(case, row), injected_bits(case, row))


def test_zero_scores_are_made_in_all_four_ways() -> None:
    for key_format in FORMATS:
        keys = inject_keys(key_format, torch.zeros(8))
        assert len({bytes(row.tolist()) for row in torch.cat([keys.codes, keys.scales], 1)}) >= 3
        assert keys.logits.view(torch.int16).eq(0).all()


def test_scores_of_key16_inverts_key16() -> None:
    keys = torch.arange(0x7F, 0xFF81)
    bits = scores_of_key16(keys).to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
    assert [key16(b) for b in bits.tolist()] == keys.tolist()


@pytest.mark.parametrize("key_format", FORMATS)
def test_poison_surrounds_the_keys(key_format: str) -> None:
    """Spare pages, the tail of a last page and the gap between pages hold winners or NaN, never harmless zeros."""
    spec = IndexerSpec(heads=8, topk=4, key_format=key_format)
    stride = spec.format.page_bytes + 256
    case = pattern_case(spec, "gaussian", [70], seed=2, page_stride=stride, poison="winner")
    used = case.index_table[0, :2].tolist()
    spare = next(page for page in range(case.cache.shape[0]) if page not in used)
    codes, scales = key_planes(spec, case.cache)
    best = inject_keys(key_format, torch.full((64,), 3e38))
    assert_bitwise_equal(codes[spare], best.codes, "a spare page's keys")
    assert_bitwise_equal(scales[used[1], 63], best.scales[63], "the tail of the last page")
    gap = torch.as_strided(case.cache, (256,), (1,), spec.format.page_bytes)
    assert gap.eq(0xFF).all()
    nan_pool = make_pool(spec, 2, poison="nan")
    _, scales = gather_keys(nan_pool.numpy(), [0], 64)
    assert (scales == 0xFF).all()


def test_cases_repeat_from_their_seed_and_print_their_recipe() -> None:
    for seed in range(6):
        first, again = draw_case(seed), draw_case(seed)
        assert_bitwise_equal(first.cache, again.cache, first)
        assert_bitwise_equal(first.index_table, again.index_table, first)
        assert first.lengths == again.lengths
        assert f"draw_case({seed}" in repr(first)
        rebuilt = eval(repr(first).split("#")[0], {"draw_case": draw_case})
        assert_bitwise_equal(rebuilt.cache, first.cache, first)
    case = pattern_case(IndexerSpec(heads=8, topk=8), "all_equal", [9], seed=4)
    rebuilt = eval(repr(case).split("#")[0], {"pattern_case": pattern_case, "IndexerSpec": IndexerSpec})
    assert_bitwise_equal(rebuilt.cache, case.cache, case)


@pytest.mark.parametrize("key_format", FORMATS)
def test_cases_of_nothing_can_be_made(key_format: str) -> None:
    """No requests, or requests without keys: generators must not stumble where the library may not either."""
    spec = IndexerSpec(heads=8, topk=8, key_format=key_format)
    for case in (random_case(spec, []), pattern_case(spec, "gaussian", []), random_case(spec, [0, -1], next_n=3)):
        assert case.query[0].shape[0] == case.rows if isinstance(case.query, tuple) else True
        assert case.weights.shape == (case.rows, 8)
        assert case.seq_lens.dtype == case.index_table.dtype == torch.int32
        assert case.max_len == 1
    for pattern in PATTERNS:
        assert pattern_case(spec, pattern, [0, 1, 2], seed=1).rows == 3


def test_moving_a_case_keeps_its_strides() -> None:
    spec = IndexerSpec(heads=8, topk=8)
    case = pattern_case(spec, "gaussian", [100, 3], seed=4, page_stride=spec.format.page_bytes + 64)
    moved = case.to("cpu")
    assert moved.cache.stride() == case.cache.stride()
    assert moved.index_table.stride() == case.index_table.stride()
    assert_bitwise_equal(moved.cache, case.cache, "cache")
    assert_bitwise_equal(expected_logits(moved, 100), expected_logits(case, 100), "logits")


def test_bitwise_comparison_sees_signs_and_payloads() -> None:
    zero, minus = torch.tensor([0.0]), torch.tensor([-0.0])
    with pytest.raises(AssertionError, match=r"1 of 1 elements differ.*\n.*0x00000000.*0x80000000"):
        assert_bitwise_equal(zero, minus, "zeros")
    nan = torch.tensor([float("nan")])
    assert_bitwise_equal(nan, nan.clone(), "equal payloads")
    with pytest.raises(AssertionError, match=r"expected torch\.int32"):
        assert_bitwise_equal(zero, torch.tensor([0], dtype=torch.int32), "dtypes")
    with pytest.raises(AssertionError, match=r"in rows \[1\]"):
        assert_bitwise_equal(torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [1.0, 0.0]]), "rows")


def test_guards_see_every_stray_byte() -> None:
    guarded = guarded_rows(3, 5)
    guarded.view.fill_(7)
    guarded.assert_canaries()
    guarded.storage[guarded.storage.numel() - 1] = 0
    with pytest.raises(AssertionError, match="canary"):
        guarded.assert_canaries()
    padded = torch.zeros(4, 10)
    with pytest.raises(AssertionError, match="storage of rows"), assert_untouched(rows=padded[:, :5]):
        padded[3, 9] = 1.0
