"""The two producer warps, whose source Blackwell shares with Hopper, executed with the rest of the Blackwell scorer.

Several blocks are run one after another: home tiles and ranges of the rest must make up the whole, each tile once.
"""

from __future__ import annotations

import numpy as np
import pytest
import sm100_unit
import torch
from sm100_block import (
    EVERY_LANE,
    FLAGS_AT,
    GARBAGE,
    LENS_AT,
    Case,
    Device,
    by_reference,
    make_case,
    name,
)
from sm100_source import KERNELS

from keysieve.kernels.flags import FLAG_BAD_LENGTH, FLAG_BAD_PAGE
from keysieve.kernels.sharding_word import sharding_word
from keysieve.kernels.sm100_score_config import ScoreConfig, ScoreShape, shape_of
from keysieve.reference.dcp_maps import local_seq_lens
from keysieve.spec import CANONICAL_NAN, PAGE, TILE

FP8 = ScoreConfig("fp8_fp32", "bf16", 8, 1, "pitched", "float32")
MX = ScoreConfig("mxfp4", "bf16", 8, 4, "pitched", "float32")
SMALL = ScoreShape(3, 2, 128, 2)


def scored(case: Case, shape: ScoreShape, blocks: int) -> tuple[np.ndarray, list[int]]:
    """(logits of all blocks, -1 where none was stored, tiles of each block)."""
    rows, keys = len(case.query), max(case.tiles) * TILE
    whole = np.full((rows, keys), -1)
    work = []
    for block in range(blocks):
        device = Device(case, shape, block, (0,), block=block, blocks=blocks)
        got = device.run()
        assert not ((whole >= 0) & (got >= 0)).any(), "a logit is stored by one block"
        whole = np.maximum(whole, got)
        work.append(device.unit.counts["products"] // (len(device.kernel.chunks) * case.config.steps))
        assert FLAGS_AT not in device.unit.memory
    return whole, work


CUTS = {
    "more requests than blocks, some empty": (FP8, (0, 7, 1, 0, 3), 3),
    "more blocks than requests": (FP8, (3, 11), 5),
    "blocks without a tile": (FP8, (2,), 3),
    "home tiles alone": (MX, (2, 2, 1), 3),
    "home requests without a tile": (MX, (0, 0, 9, 0), 2),
    "many requests": (MX, tuple([1, 0, 2] * 11), 2),
}


@pytest.mark.parametrize("cut", CUTS)
def test_blocks_share_the_tiles_out(cut: str) -> None:
    """Every logit by one block, with the bits of the cpu backend; no block has more than an even share."""
    config, tiles, blocks = CUTS[cut]
    case = make_case(config, tiles, seed=len(cut))
    got, work = scored(case, SMALL, blocks)
    columns = np.arange(got.shape[1]) % 32 == 0
    np.testing.assert_array_equal(got[:, columns], by_reference(case)[:, columns])
    assert sum(work) == sum(tiles)
    assert max(work) <= -(-sum(tiles) // blocks)


@pytest.mark.parametrize("config", [FP8, MX], ids=name)
def test_a_page_outside_the_pool(config: ScoreConfig) -> None:
    """It is not fetched: its keys' logits are NaN, all others as without it, and the flag is raised."""
    case = make_case(config, (2, 1), seed=4)
    case.lengths[0] = 2 * TILE
    case.table[0, 3] = case.table[0, 2]  # made valid first, whatever the length was
    case.table[0, 1] = len(case.pages)
    device = Device(case, shape_of(config), 0, EVERY_LANE)
    got = device.run()
    assert device.unit.memory[FLAGS_AT] == 1 << FLAG_BAD_PAGE
    assert (got[: config.next_n, PAGE:TILE] == CANONICAL_NAN).all()
    case.table[0, 1] = case.table[0, 0]
    wanted = by_reference(case)
    wanted[: config.next_n, PAGE:TILE] = CANONICAL_NAN
    np.testing.assert_array_equal(got, wanted)


def test_a_tile_without_a_valid_page() -> None:
    """Nothing is announced to the tile's barrier, and nothing is waited for."""
    case = make_case(FP8, (3,), seed=2)
    case.lengths[:] = 3 * TILE
    case.table[0] = [0, 1, GARBAGE, -5, 4, 5]
    got = Device(case, SMALL, 0, (0,)).run()
    assert (got[0, TILE : 2 * TILE : 32] == CANONICAL_NAN).all()
    assert (got[0, 2 * TILE :: 32] != CANONICAL_NAN).all()


def test_a_length_above_the_limit_makes_its_row_empty() -> None:
    case = make_case(MX, (2, 2), seed=8)
    wanted = by_reference(case)
    wanted[MX.next_n + 1] = -1
    device = Device(case, SMALL, 0, (0,))
    longer = case.lengths.astype(np.int32)
    longer[1, 1] = 4 * PAGE + 1
    device._put_global(LENS_AT, longer)
    got = device.run()
    columns = np.arange(got.shape[1]) % 32 == 0
    np.testing.assert_array_equal(got[:, columns], wanted[:, columns])
    assert device.unit.memory[FLAGS_AT] == 1 << FLAG_BAD_LENGTH


def test_global_lengths_are_read_as_a_rank_s_own() -> None:
    """Context parallel: what is scored is what the documented map says of the lengths in memory."""
    whole = torch.tensor([[700], [64], [511]], dtype=torch.int32)
    local = local_seq_lens(whole, world=2, rank=1, interleave=64)
    tiles = tuple(int(n) for n in -(-local[:, 0] // TILE))
    assert tiles == (3, 0, 2)
    case = make_case(FP8, tiles, seed=9)
    case.lengths = local.numpy().astype(np.int64)
    case.table[0, :6] = [0, 3, 2, 5, 4, 1]
    case.table[2, :4] = [8, 7, 6, 9]
    device = Device(case, SMALL, 0, (0,))
    device.sharding = sharding_word(2, 1, 64, 1024)
    device._put_global(LENS_AT, whole.numpy())
    got = device.run()
    wanted = by_reference(case)
    np.testing.assert_array_equal(got[:, ::32], wanted[:, ::32])
    assert (got[0, ::32] >= 0).any()


def test_requests_beyond_the_capacity_are_not_stored() -> None:
    """Whole requests: the one that does not fit any more, and those behind it."""
    case = make_case(FP8, (1, 2, 1), seed=6)
    device = Device(case, SMALL, 0, (0,))
    device.capacity = 2
    got = device.run()
    assert (got[0, ::32] >= 0).any()
    assert (got[1:] == -1).all()


FAULTS = {
    "every tile of the first request": ("Uint32(sequence), Uint32(0))", "Uint32(0), Uint32(0))"),
    "scale words of the tile's first page": (
        "self.scale_words(shared, slot),\n",
        "self.scale_words(shared, stage * PAGES_PER_TILE),\n",
    ),
    "scale words of another page": ("page_base(shared.scale_source, page,", "page_base(shared.scale_source, page ^ 1,"),
    "home tiles counted from the end": (
        "within = place + (lane",
        "within = tiles_before(shared.rest, request) - 1 - place - (lane",
    ),
    "the rest begins too early": ("total, block, blocks) - below, left)", "total, block, blocks), left)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_model_notices_what_producers_do(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault, put into the source, changes bits or trips the model."""
    monkeypatch.setattr(sm100_unit, "DEADLINE", 3.0)
    old, new = FAULTS[fault]
    sources = [path.read_text() for path in KERNELS.glob("*.py")]
    assert any(old in source for source in sources), "the source no longer has the text that this fault changes"
    case = make_case(FP8, (5, 3), seed=5)
    wanted = by_reference(case)
    columns = np.arange(wanted.shape[1]) % 32 == 0
    whole = np.full_like(wanted, -1)
    try:
        for block in range(2):
            got = Device(case, SMALL, 0, (0,), ((old, new),), block, 2).run()
            assert not ((whole >= 0) & (got >= 0)).any()
            whole = np.maximum(whole, got)
    except (AssertionError, TimeoutError, KeyError):
        return
    assert (whole[:, columns] != wanted[:, columns]).any()
