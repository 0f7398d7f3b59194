"""Kind A: winners that a selection dropped, invented or overwrote because a shortcut was not exact."""

from __future__ import annotations

import pytest
import torch

from field.steps import FORMATS, assert_same_outputs, check_step, chosen, indexer_for, run_step, spec_of
from keysieve.testing import DIGIT_SPLITS, PATTERNS, injected_case, pattern_case


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("pattern", ["tiny", "huge"])
def test_a5_scores_outside_a_half_floats_range(key_format: str, pattern: str) -> None:
    """A coarse key narrower than BF16's range (a half float) flattens tiny scores and saturates large ones.

    Whole rows lie where a half float is subnormal, or above its largest value; every BF16 step must still count.
    """
    check_step(pattern_case(spec_of(key_format), pattern, [65536], seed=5))


@pytest.mark.parametrize("key_format", FORMATS)
def test_a5_scores_across_the_whole_exponent_range(key_format: str) -> None:
    """The same with every exponent in one row: the winners are told apart at both ends of the range."""
    check_step(pattern_case(spec_of(key_format, topk=512), "any_bits", [20000, 511], seed=50))


@pytest.mark.parametrize("pattern", ["low_bits", "one_bucket", "two_values", "all_equal"])
def test_a6_scores_that_differ_in_the_low_bits_only(pattern: str) -> None:
    """One bin of a first pass holds the whole row, so its candidate list overflows.

    ``low_bits`` are float32 scores with the same leading 22 bits: they are one BF16 value, and position decides.
    """
    check_step(pattern_case(spec_of(), pattern, [65536], seed=6))


@pytest.mark.parametrize("topk", [1, 64, 2048])
@pytest.mark.parametrize("pattern", ["gaussian", "half_tied", "relu_plateau", "all_equal", "few_finite"])
def test_a7_rows_of_exactly_topk_keys_and_one_more(pattern: str, topk: int) -> None:
    """A row of exactly k keys has no bin that crosses k; a row of k + 1 drops exactly one key."""
    check_step(pattern_case(spec_of(topk=topk), pattern, [topk, topk + 1, topk + 2, topk - 1], seed=7))


@pytest.mark.parametrize("topk", [1, 512, 2048])
def test_a7_exactly_topk_keys_in_the_bins_above_all_others(topk: int) -> None:
    """The threshold bin ends exactly at k: nothing below it may be drawn in, nothing above it lost."""
    case = pattern_case(spec_of(topk=topk), "exactly_topk_live", [32768], seed=70)
    out = check_step(case)
    assert case.logits is not None
    assert bool((case.logits[0][chosen(out, 0)] > 0).all())


@pytest.mark.parametrize("previous", ["all_equal", "descending", "any_bits", "three_positives"])
def test_a8_nothing_of_an_earlier_step_steers_a_later_one(previous: str) -> None:
    """A selection seeded with the previous step's result stops early when the hint is wrong.

    There are no hints here; an indexer that has just done an unrelated step (other scores, longer and shorter rows,
    none at all) must give the bytes that a new one gives.
    """
    spec = spec_of(topk=512)
    case = pattern_case(spec, "gaussian", [4000, 513, 9000], seed=8)
    before = pattern_case(spec, previous, [9000, 4000, 0], seed=80)
    used = indexer_for(case, max_context=9000)
    run_step(before, used)
    again = run_step(case, used)
    assert_same_outputs(again, check_step(case), case)


def test_a9_a_full_batch_one_key_longer_than_topk() -> None:
    """64 rows of k + 1 keys: a kernel that searches an empty threshold bin returns ids out of range."""
    case = pattern_case(spec_of(topk=1024), "gaussian", [1025] * 64, seed=9)
    out = check_step(case)
    assert int(out.positions.min()) >= 0
    assert int(out.positions.max()) <= 1024


def test_a9_three_positives_before_a_plateau_of_zeros() -> None:
    """200,000 zeros compete for 2,045 places: every slot is filled, lowest positions first."""
    case = pattern_case(spec_of(), "three_positives", [200_000], seed=90)
    out = check_step(case)
    assert out.counts.tolist() == [2048]
    assert int(out.rows.min()) >= 0


@pytest.mark.parametrize("leading_bits", DIGIT_SPLITS)
@pytest.mark.parametrize("key_format", FORMATS)
def test_a10_ties_at_each_radix_digit(key_format: str, leading_bits: int) -> None:
    """The crowd around the threshold agrees in its first 4, 5, 8, 11 or 13 bits, so any digit may be the crowded one.

    A counter or list carried over between rounds shows when a later round meets more than it has room for.
    """
    case = pattern_case(spec_of(key_format, topk=512), f"digit_ties_{leading_bits}", [12000, 600], seed=leading_bits)
    check_step(case)


def test_a10_nested_clusters() -> None:
    """Clusters inside clusters: every digit leaves most of what is left in one bin, ties included."""
    check_step(pattern_case(spec_of(topk=512), "nested_clusters", [32768, 32767], seed=10))


def test_a10_more_keys_in_one_first_bin_than_any_on_chip_list() -> None:
    """9,407 keys share the top byte with the threshold, the rest lie below; k = 512."""
    gen = torch.Generator().manual_seed(100)
    scores = -torch.rand(32768, generator=gen) - 1
    crowd = torch.randperm(32768, generator=gen)[:9407]
    scores[crowd] = 1.0 + torch.randint(0, 64, (9407,), generator=gen) / 128.0
    check_step(injected_case(spec_of(topk=512), [scores]))


@pytest.mark.parametrize("length", [131072, 131073, 262144])
def test_a12_winners_planted_at_the_start_of_a_long_row(length: int) -> None:
    """Past some length a reduction returned zeros and only the newest keys were chosen."""
    case = pattern_case(spec_of(), "early_winners", [length], seed=length)
    out = check_step(case)
    assert case.logits is not None
    planted = (case.logits[0][:length] == 2.0).nonzero().flatten().tolist()
    assert len(planted) == 16
    assert set(planted) <= set(chosen(out, 0))


@pytest.mark.slow
def test_a12_a_million_keys() -> None:
    """The same at the longest context, where byte offsets of the logits and of the pool grow large."""
    case = pattern_case(spec_of(), "early_winners", [1_048_576], seed=12)
    out = check_step(case)
    assert case.logits is not None
    planted = (case.logits[0][:1_048_576] == 2.0).nonzero().flatten().tolist()
    assert len(planted) == 16
    assert set(planted) <= set(chosen(out, 0))


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_every_pattern_at_ragged_lengths(pattern: str, key_format: str) -> None:
    """All known shapes of trouble at once: each pattern over rows at every edge of page, tile and k."""
    lengths = [[700, 63, 0], [64, 65, 66], [-1, 129, 2], [1200, 1201, 1202]]
    check_step(pattern_case(spec_of(key_format, topk=64), pattern, lengths, next_n=3, seed=13))
