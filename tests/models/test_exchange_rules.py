"""Rules that the exchange's kernels are launched by: division by the interleave, rounds of words, blocks of a row."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keysieve.kernels.exchange_config import HELD, MERGE, ROUNDS, divider, merge_config, rounds_needed
from keysieve.kernels.local_topk_config import CLUSTERS, LOCAL_PUSH, SHARED_KEYS, cluster_for, config_for
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


def test_rows_are_shared_while_blocks_leave_room() -> None:
    assert cluster_for(1, SHARED_KEYS, 132) == 1
    assert cluster_for(1, SHARED_KEYS + 1, 132) == max(CLUSTERS)
    assert cluster_for(64, 1 << 17, 132) == 1
    before = max(CLUSTERS)
    for rows in range(1, 200):
        blocks = cluster_for(rows, 1 << 17, 132)
        assert blocks <= before, "more rows, fewer blocks each"
        assert blocks == 1 or 4 * rows * blocks <= 3 * 132
        before = blocks
    for blocks in CLUSTERS:
        assert config_for(352, 1, True, blocks) in list(LOCAL_PUSH.admitted("sm_90a"))
