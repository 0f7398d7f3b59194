"""Rules that the exchange's kernels are launched by: division by the interleave, rounds of words, blocks of a row."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keysieve.kernels.exchange_config import HELD, MERGE, ROUNDS, divider, merge_config, rounds_needed
from keysieve.kernels.local_topk_config import LOCAL_PUSH, SHAPES, config_for, shape_for
from keysieve.spec import MAX_WORLD, candidate_words, default_topn

WARPS = 16


@settings(max_examples=400, deadline=None)
@given(interleave=st.integers(1, 2**27), index=st.integers(0, 2**27 - 1))
def test_the_factor_divides_by_the_interleave(interleave: int, index: int) -> None:
    packed = divider(interleave)
    factor, shift = packed & 0xFFFFFFFF, packed >> 32
    edge = index // interleave * interleave
    for one in (index, edge, max(edge - 1, 0), min(edge + interleave - 1, 2**27 - 1)):
        assert one * factor < 2**63
        assert one * factor >> shift == one // interleave


FITTING = [(w, k) for w in range(1, MAX_WORLD + 1) for k in (1, 64, 512, 2048)] + [(w, 4096) for w in (2, 4, 8, 16)]


@pytest.mark.parametrize(("world", "topk"), FITTING)
def test_default_lists_fit_the_registers(world: int, topk: int) -> None:
    """Lists of the default N do for every K up to 2,048; shared memory has room for what the registers hold."""
    words = candidate_words(min(default_topn(topk, world), topk), 1)
    config = merge_config(world, words, topk, True)
    assert config in list(MERGE.admitted("sm_90a"))
    assert config.rounds in ROUNDS
    assert -(-(-(-words // 2) + 1) // 32) * world <= WARPS * config.rounds
    assert config.held >= world * (words + 1)


def test_long_lists_are_read_again() -> None:
    config = merge_config(16, candidate_words(4096, 1), 4096, False)
    assert (config.rounds, config.held) == (0, HELD[1])
    assert rounds_needed(16, candidate_words(4096, 1)) > max(ROUNDS)


@pytest.mark.parametrize("keys", [4096, 8192, 8193, 16_384, 16_385, 32_768, 65_536, 1 << 17, 1 << 18, (1 << 18) + 1])
def test_rows_are_shared_while_blocks_leave_room(keys: int) -> None:
    before = max(cluster for cluster, _, _ in SHAPES)
    for rows in range(1, 200):
        shape = shape_for(rows, keys, 132, 352)
        if shape is None:
            before = 1
            continue
        cluster = shape[0]
        assert config_for(352, 1, True, shape).keys >= keys, "the registers hold every row"
        assert config_for(352, 1, True, shape) in list(LOCAL_PUSH.admitted("sm_90a"))
        assert cluster <= before, "more rows, fewer blocks each"
        assert cluster == 1 or rows * cluster <= 132
        assert cluster <= 2 or 4 * rows * cluster <= 3 * 132
        before = cluster


def test_blocks_of_a_row() -> None:
    def blocks(rows: int, keys: int, n: int) -> int | None:
        shape = shape_for(rows, keys, 132, n)
        return None if shape is None else shape[0]

    assert shape_for(1, 4096, 132, 1216) == (1, 512, 2)
    assert [blocks(rows, 16_384, 1216) for rows in (1, 24, 25, 66, 67, 128)] == [4, 4, 2, 2, 1, 1]
    assert [blocks(rows, 65_536, 352) for rows in (1, 12, 13, 25, 67)] == [8, 8, 4, 2, None]
    assert [shape_for(rows, 65_536, 132, 2080) for rows in (25, 66, 67)] == [(2, 1024, 4), (2, 1024, 4), None]
    assert shape_for(25, 65_536, 132, 2080, given=True) is None, "by maxima"
    for n in (352, 2048):
        assert {shape_for(rows, 65_536, 132, n, given) for rows in (25, 66) for given in (False, True)} == {(2, 512, 8)}
    guessing = {shape for shape in SHAPES if config_for(2048, 1, True, shape).guesses}
    assert guessing == {(2, 512, 4), (2, 512, 8)}
    assert not any(config_for(2049, 1, True, shape).guesses for shape in SHAPES)
    eight = {config.n_class for config in LOCAL_PUSH.admitted("sm_90a") if (config.cluster, config.held) == (2, 8)}
    assert eight == {config_for(2048, 1, True).n_class}, "no call of a larger N takes them"
    assert blocks(1, 1 << 19, 352) is None
    assert [blocks(rows, 4096, 1216) for rows in (132, 133, 512)] == [1, None, None]
