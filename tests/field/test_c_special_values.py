"""Kind C: NaN, infinities, zeros, and rows whose tails end anywhere."""

from __future__ import annotations

import pytest
import torch

import keysieve as ks
from field.steps import FORMATS, check_step, chosen, spec_of
from keysieve.testing import assert_bitwise_equal, canonical_bf16, injected_case, pattern_case

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize(("length", "topk"), [(5003, 2048), (5003, 500), (5003, 499), (2049, 2048)])
def test_c2_fewer_finite_keys_than_topk(key_format: str, length: int, topk: int) -> None:
    """-inf is a score like any other: when finite keys run out, the lowest -inf positions follow, never a filler id.

    A selection that pads with -inf itself cannot tell its padding from such keys and hands out ids past the row.
    """
    gen = torch.Generator().manual_seed(length)
    scores = torch.full((length,), -INF)
    finite = torch.randperm(length, generator=gen)[:500]
    scores[finite] = torch.randn(500, generator=gen)
    case = injected_case(spec_of(key_format, topk=topk), [scores, scores[:topk]])
    out = check_step(case)
    assert int(out.positions.max()) < length
    if topk == 2048:
        filler = [p for p in chosen(out, 0) if scores[p] == -INF]
        assert filler == (scores == -INF).nonzero().flatten()[: topk - 500].tolist() or length == 2049


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("pattern", ["special_values", "any_bits", "few_finite"])
def test_c_special_values_at_the_threshold(key_format: str, pattern: str) -> None:
    """NaN below -inf, +inf on top, -0 equal to +0, subnormals in place: any of them may be the threshold."""
    for topk in (1, 40, 100, 333):
        check_step(pattern_case(spec_of(key_format, topk=topk), pattern, [400, 41, 0], seed=topk))


@pytest.mark.parametrize("key_format", FORMATS)
def test_c6_nan_keys_come_last_and_only_when_a_place_is_left(key_format: str) -> None:
    """A NaN logit ranks below -inf: it is taken only after every other key, in position order like any tie."""
    scores = torch.tensor([NAN, -INF, NAN, 1.0, -INF, NAN, -3.0, NAN])
    wanted = {3: [1, 3, 6], 5: [0, 1, 3, 4, 6], 6: [0, 1, 2, 3, 4, 6], 8: list(range(8))}
    for topk, positions in wanted.items():
        out = check_step(injected_case(spec_of(key_format, topk=topk), [scores]))
        assert chosen(out, 0) == positions


@pytest.mark.parametrize("key_format", FORMATS)
def test_c_logits_hold_the_canonical_bits(key_format: str) -> None:
    """-0 is stored as +0 and every NaN as 0xFFC0, so that equal keys are equal bits on every backend."""
    scores = torch.tensor([NAN, -0.0, 0.0, -1e-45, 1e-45, INF, -INF, 0.0, 2.0**-133, -(2.0**-133), NAN, NAN])
    case = injected_case(spec_of(key_format, topk=4), [scores])
    logits = ks.score(case.spec, case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table, 12)
    assert_bitwise_equal(logits[0], canonical_bf16(scores), "logits")


def test_c_foreign_logits_are_made_canonical() -> None:
    """The public top-k gets anyone's bits: -0 ties with +0, and all 254 NaN patterns are the same value."""
    patterns = [0x8000, 0x0000, 0x7FC0, 0xFFFF, 0x7F81, 0xFF81, 0x8000, 0x0000, 0xFF80, 0x0001]
    bits = torch.tensor([b - 0x10000 if b > 0x7FFF else b for b in patterns], dtype=torch.int16)
    row = bits.view(torch.bfloat16)[None]
    lengths = torch.tensor([10], dtype=torch.int32)
    expected = {1: [9], 2: [0, 9], 4: [0, 1, 6, 9], 6: [0, 1, 6, 7, 8, 9], 7: [0, 1, 2, 6, 7, 8, 9]}
    expected[9] = [0, 1, 2, 3, 4, 6, 7, 8, 9]
    for topk, positions in expected.items():
        got, counts = ks.topk(row, lengths, topk)
        assert got[0].tolist() == positions
        assert counts.tolist() == [topk]


@pytest.mark.parametrize("length", [262143, 262145, 262209])
def test_c3_lengths_beside_a_power_of_two(length: int) -> None:
    """A tail of 63, 1 or 65 keys after many full tiles, once read past the last page."""
    case = pattern_case(spec_of(), "gaussian", [length, 65], seed=length)
    check_step(case)


@pytest.mark.parametrize("length", [262143, 262145, 262209])
def test_c3_sixty_four_rows_of_the_public_top_k(length: int) -> None:
    """The full batch of 64 such rows over one buffer whose last row ends where the allocation ends."""
    gen = torch.Generator().manual_seed(length)
    one = torch.randint(-20000, 20000, (length,), generator=gen).to(torch.int16).view(torch.bfloat16)
    scores = one.expand(64, length)  # rows may share memory: a row stride of zero
    lengths = torch.tensor([length - 7 * row for row in range(64)], dtype=torch.int32)
    positions, counts = ks.topk(scores, lengths, 2048)
    assert counts.tolist() == [2048] * 64
    for row in (0, 1, 31, 63):
        alone, _ = ks.topk(one[None, : int(lengths[row])].contiguous(), lengths[row : row + 1], 2048)
        assert_bitwise_equal(alone[0], positions[row], f"row {row}")
        assert int(positions[row].max()) < int(lengths[row])


@pytest.mark.parametrize("key_format", FORMATS)
def test_c_every_tail_of_a_tile(key_format: str) -> None:
    """Each length from 1 to two tiles, all in one batch: every position inside a group, page and tile ends a row.

    A sister row sees a few keys more, and newer keys are better: reading to the end of a group or page picks them up.
    """
    for more in (1, 8, 65):
        lengths = [[length, length + more] for length in range(1, 258)]
        check_step(pattern_case(spec_of(key_format, topk=16), "ascending", lengths, next_n=2, seed=3))
