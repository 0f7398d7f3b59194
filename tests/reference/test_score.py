"""Logits of the reference: exact dots, the documented order of the sums, and what may not change a bit."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.numbers import E2M1, E4M3
from oracle.step import expected_logits

from keysieve.inputs import check_step
from keysieve.quantize import decode_ue8m0
from keysieve.reference import score
from keysieve.reference.faults import Faults
from keysieve.spec import FORMATS, IndexerSpec
from keysieve.testing import Case, assert_bitwise_equal, assert_untouched, draw_case, random_case

module: Any = sys.modules["keysieve.reference.score"]  # the package's `score` is the function
BOTH = pytest.mark.parametrize("numerics", ["fp32", "bf16"])
EVERY_FORMAT = pytest.mark.parametrize("key_format", list(FORMATS))


def logits_of(case: Case, max_len: int | None = None, **changes: Any) -> torch.Tensor:
    """Scores of a case, with some of its fields changed."""
    c = dataclasses.replace(case, **changes)
    return score(c.spec, c.query, c.index_cache(), c.weights, c.seq_lens, c.index_table, max_len)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# --- the dot ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["anything", "largest", "cancelling"])
def test_e4m3_dots_are_the_exact_sum_rounded_once(kind: str) -> None:
    """Against 64-bit integer arithmetic: E4M3 values in units of 2^-9, products in units of 2^-18."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randint(0, 256, (64, 128), generator=generator, dtype=torch.uint8)
    keys = torch.randint(0, 256, (300, 128), generator=generator, dtype=torch.uint8)
    if kind == "largest":
        query, keys = query | 0x70, keys | 0x70  # 128 .. 448
    for codes in (query, keys):
        codes[(codes & 0x7F) == 0x7F] = 0x7E
    if kind == "cancelling":
        keys[:, 64:] = keys[:, :64] ^ 0x80  # the second half takes the first away again, but for one element
        query[:, 64:] = query[:, :64]
        keys[:, 127] = 1
    units = (E4M3[query.numpy()] * 512).astype(np.int64), (E4M3[keys.numpy()] * 512).astype(np.int64)
    exact = units[0] @ units[1].T
    want = exact.astype(np.float32) * np.float32(2.0**-18)
    if kind != "largest":  # a float32 product would be noticed
        in_float32 = E4M3[query.numpy()].astype(np.float32) @ E4M3[keys.numpy()].astype(np.float32).T
        assert np.any(in_float32 != want)
    values = [module.decode_codes(codes, None) for codes in (query, keys)]
    got = module.exact_dots(FORMATS["fp8_fp32"], *values)
    np.testing.assert_array_equal(got.numpy().view(np.uint32), want.view(np.uint32))


def rounded(exact: Fraction, bits: int) -> Fraction:
    """``exact`` to the nearest number of ``bits`` significant bits, ties to even (exponents unlimited)."""
    if exact == 0:
        return exact
    spacing = Fraction(2) ** (abs(exact).numerator.bit_length() - abs(exact).denominator.bit_length() - bits - 1)
    while abs(exact) >= spacing * 2**bits:
        spacing *= 2
    return round(exact / spacing) * spacing


def test_mxfp4_dots_add_exact_block_sums_in_order() -> None:
    generator = torch.Generator().manual_seed(4)
    codes = [torch.randint(0, 256, (n, 64), generator=generator, dtype=torch.uint8) for n in (5, 40)]
    scales = [torch.randint(90, 160, (n, 4), generator=generator, dtype=torch.uint8) for n in (5, 40)]
    # In half of the dots the first two blocks cancel, and are so much larger that in another order they alone are left.
    codes[0][:, 16:32] = codes[0][:, :16] ^ 0x88
    codes[1][::2, 16:32] = codes[1][::2, :16]
    for scale in scales:
        scale[:, :2] = 160
    nibbles = [np.stack([c.numpy() & 15, c.numpy() >> 4], -1).reshape(len(c), 128) for c in codes]
    values = [module.decode_codes(c, decode_ue8m0(s)) for c, s in zip(codes, scales, strict=True)]
    got = module.exact_dots(FORMATS["mxfp4"], *values)
    order_matters = 0
    for m in range(5):
        for n in range(40):
            sums = []
            for block in range(4):
                part = slice(32 * block, 32 * block + 32)
                dot = sum(
                    Fraction(float(E2M1[a])) * Fraction(float(E2M1[b]))
                    for a, b in zip(nibbles[0][m, part], nibbles[1][n, part], strict=True)
                )
                power = int(scales[0][m, block]) + int(scales[1][n, block]) - 254
                sums.append(dot * Fraction(2) ** power)
            total = Fraction(0)
            for s in sums:
                total = rounded(total + s, 53)
            backwards = Fraction(0)
            for s in reversed(sums):
                backwards = rounded(backwards + s, 53)
            order_matters += rounded(backwards, 24) != rounded(total, 24)
            assert Fraction(float(got[m, n])) == rounded(total, 24)
    assert order_matters > 50  # the test would notice another order


def test_relu_and_head_sum_keep_nan_at_every_lane() -> None:
    for keys in (1, 7, 16, 33):
        for at in range(keys):
            dots = torch.ones(8, 1, keys)
            dots[5, 0, at] = torch.nan
            weights = torch.zeros(8, 1)
            assert module.head_sum_fp32(dots.clone(), weights).isnan().nonzero().tolist() == [[0, at]]
            lanes = module.head_sum_bf16(dots.clone(), weights.to(torch.bfloat16))
            assert lanes.isnan().nonzero().tolist() == [[0, at]]


def test_fp32_head_sum_rounds_every_product_and_every_sum_in_ascending_order() -> None:
    generator = torch.Generator().manual_seed(7)
    for heads in (8, 16, 32, 64):
        dots = torch.randn(heads, 2, 70, generator=generator) * 100
        weights = torch.randn(heads, 2, generator=generator)
        total = np.zeros((2, 70), np.float32)
        with_fma = np.zeros((2, 70))
        for h in range(heads):
            relu = np.maximum(dots[h].numpy(), np.float32(0))
            total = total + relu * weights[h].numpy()[:, None]
            exact = relu.astype(np.float64) * weights[h].numpy().astype(np.float64)[:, None]
            with_fma = (with_fma + exact).astype(np.float32).astype(np.float64)
        assert total.dtype == np.float32
        assert np.any(total != with_fma.astype(np.float32))  # contraction would show
        backwards = module.head_sum_fp32(dots.flip(0), weights.flip(0)).numpy()
        assert np.any(total != backwards)  # and so would another order
        np.testing.assert_array_equal(module.head_sum_fp32(dots.clone(), weights).numpy(), total)


# --- the whole logit -------------------------------------------------------------------------------------------------


@BOTH
@EVERY_FORMAT
@settings(max_examples=25)
@given(seed=st.integers(0, 2**31 - 1))
def test_logits_have_the_bits_of_the_brute_force(key_format: str, numerics: str, seed: int) -> None:
    case = draw_case(seed, key_format=key_format, numerics=numerics, max_context=400, max_requests=3)
    with assert_untouched(cache=case.cache, table=case.index_table, weights=case.weights):
        got = logits_of(case, case.max_len)
    plain = dataclasses.replace(case, logits=None)
    assert_bitwise_equal(got, expected_logits(plain, case.max_len, numerics), case)


@BOTH
@EVERY_FORMAT
def test_bytes_of_every_kind(key_format: str, numerics: str) -> None:
    """All code bytes and all scale bytes, NaN among them, and float32 scales of every kind."""
    spec = IndexerSpec(heads=8, topk=4, key_format=key_format, numerics=numerics)
    case = random_case(spec, [640, 640], seed=11)
    pool = torch.randint(0, 256, case.cache.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(12))
    case = dataclasses.replace(case, cache=pool)
    got = logits_of(case)
    assert_bitwise_equal(got, expected_logits(case, 640, numerics), case)
    assert bool(got.isnan().any())


@BOTH
def test_special_weights_and_scales(numerics: str) -> None:
    spec = IndexerSpec(heads=8, topk=4, key_format="fp8_fp32", numerics=numerics)
    case = random_case(spec, [200] * 6, seed=13)
    weights = case.weights.clone()
    weights[0, 3], weights[1, 3], weights[2, 3] = torch.inf, -torch.inf, torch.nan
    weights[3] = -0.0
    weights[4] *= 1e-38
    weights[5] *= 1e37
    changed = dataclasses.replace(case, weights=weights)
    got = logits_of(changed)
    assert_bitwise_equal(got, expected_logits(changed, 200, numerics), changed)
    assert not bool((got.view(torch.int16) == -0x8000).any())  # no -0 is stored
    assert set((got.view(torch.int16)[got.isnan()].to(torch.int32) & 0xFFFF).tolist()) == {0xFFC0}


@BOTH
def test_bfloat16_weights_are_taken_as_their_value(numerics: str) -> None:
    spec = IndexerSpec(heads=16, topk=4, numerics=numerics)
    case = random_case(spec, [100, 300], seed=14)
    weights = case.weights.to(torch.bfloat16)
    assert_bitwise_equal(logits_of(case, weights=weights), logits_of(case, weights=weights.to(torch.float32)))


def test_minus_infinity_past_a_row_and_padding_rows() -> None:
    case = random_case(IndexerSpec(heads=8, topk=4), [[70, 0, 64], [-3, 129, 1]], next_n=3, seed=15)
    got = logits_of(case)
    assert got.shape == (6, 129)
    for row, length in zip(got, case.lengths, strict=True):
        assert bool((row[max(length, 0) :] == -torch.inf).all())
        assert bool(row[: max(length, 0)].isfinite().all())
    wider = logits_of(case, max_len=500)
    assert torch.equal(wider[:, :129], got)
    assert bool((wider[:, 129:] == -torch.inf).all())
    assert logits_of(case, seq_lens=torch.zeros(6, dtype=torch.int32)).shape == (6, 0)


# --- what may not change a bit ---------------------------------------------------------------------------------------


@BOTH
@EVERY_FORMAT
@pytest.mark.usefixtures("threads")
def test_same_bits_for_any_thread_count(key_format: str, numerics: str) -> None:
    spec = IndexerSpec(heads=32, topk=4, key_format=key_format, numerics=numerics)
    case = random_case(spec, [5000, 2049], next_n=2, seed=16)
    torch.set_num_threads(1)
    alone = logits_of(case)
    for count in (2, 3, 8):
        torch.set_num_threads(count)
        assert_bitwise_equal(logits_of(case), alone, f"{count} threads")


@BOTH
@EVERY_FORMAT
def test_batch_invariance(key_format: str, numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row alone, in a batch, as one of several rows of a request, and in chunks of any size."""
    spec = IndexerSpec(heads=16, topk=4, key_format=key_format, numerics=numerics)
    case = random_case(spec, [[300, 299, 301, 7], [65, 0, 500, 128]], next_n=4, seed=17)
    together = logits_of(case, max_len=500)
    for chunk in (64, 128, 320):
        monkeypatch.setattr(module, "CPU_CHUNK_KEYS", chunk)
        assert_bitwise_equal(logits_of(case, max_len=500), together, f"chunks of {chunk} keys")
    for row in range(case.rows):
        one = slice(row, row + 1)
        query = tuple(q[one] for q in case.query) if isinstance(case.query, tuple) else case.query[one]
        table = case.index_table[row // 4 : row // 4 + 1]
        alone = score(spec, query, case.index_cache(), case.weights[one], case.seq_lens[one], table, max_len=500)
        assert_bitwise_equal(alone, together[one], f"row {row} alone")


def test_page_placement_and_strides_do_not_matter() -> None:
    spec = IndexerSpec(heads=8, topk=4)
    dense = random_case(spec, [333, 64], seed=18)
    logits = logits_of(dense)
    for stride, poison in ((spec.format.page_bytes + 16, "nan"), (38016, "winner")):
        other = random_case(spec, [333, 64], seed=18, page_stride=stride, poison=poison)
        assert_bitwise_equal(logits_of(other), logits)
    expanded = dense.index_table.repeat_interleave(1, 0)
    assert_bitwise_equal(logits_of(dense, index_table=expanded), logits)


# --- what a device would flag ----------------------------------------------------------------------------------------


def scored_with_faults(case: Case, max_len: int | None = None) -> tuple[torch.Tensor, str]:
    faults = Faults()
    args = (case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table, max_len)
    return score(case.spec, *args, faults=faults), str(faults)


@pytest.mark.parametrize("page", [-1, 2**31 - 1, -(2**31), "pages"])
def test_a_page_outside_the_pool_gives_nan_and_a_report(page: int | str) -> None:
    case = random_case(IndexerSpec(heads=8, topk=4), [[200, 64, 130]], next_n=3, seed=19)
    clean, report = scored_with_faults(case)
    assert report == ""
    table = case.index_table.clone()
    table[0, 1] = case.cache.shape[0] if page == "pages" else page
    broken, report = scored_with_faults(dataclasses.replace(case, index_table=table))
    assert "column 1" in report
    for t, length in enumerate(case.lengths):
        bad = slice(64, min(length, 128)) if length > 64 else slice(0, 0)
        assert set((broken[t, bad].view(torch.int16).to(torch.int32) & 0xFFFF).tolist()) <= {0xFFC0}
        assert torch.equal(broken[t, :64], clean[t, :64])
        assert torch.equal(broken[t, 128:], clean[t, 128:])
    assert bool(broken[0, 64:128].isnan().all())


def test_an_empty_pool_is_outside_altogether() -> None:
    case = random_case(IndexerSpec(heads=8, topk=4), [100], seed=20)
    logits, report = scored_with_faults(dataclasses.replace(case, cache=case.cache[:0]))
    assert bool(logits.isnan().all())
    assert "outside" in report


def test_a_row_longer_than_its_table_or_max_len_is_empty_and_reported() -> None:
    case = random_case(IndexerSpec(heads=8, topk=4), [100, 300, 50], seed=21)
    narrow = dataclasses.replace(case, index_table=case.index_table[:, :2])
    logits, report = scored_with_faults(narrow, 400)
    assert bool((logits[1] == -torch.inf).all())
    assert torch.equal(logits[0], logits_of(case, 400)[0])
    assert "row 1" in report
    assert "index_table" in report
    logits, report = scored_with_faults(case, 100)
    assert bool((logits[1] == -torch.inf).all())
    assert bool(logits[0].isfinite().all())
    assert "max_len" in report


def test_only_the_first_faults_are_spelled_out() -> None:
    case = random_case(IndexerSpec(heads=8, topk=4), [200] * 20, seed=22)
    _, report = scored_with_faults(dataclasses.replace(case, index_table=case.index_table[:, :1]))
    assert "row 0:" in report
    assert report.endswith("(and 12 more)")


def test_a_step_remembers_its_shape() -> None:
    case = random_case(IndexerSpec(heads=8, topk=4), [[9, 9], [9, 9], [9, 9]], next_n=2, seed=23)
    step = check_step(case.spec, case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table)
    assert (step.rows, step.requests, step.next_n) == (6, 3, 2)
