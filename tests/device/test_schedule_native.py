"""The scorer's cut of the work, as the device computes it, against the contract's rule in Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from keysieve import spec

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
native = pytest.importorskip("schedule_native")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    out = tmp_path_factory.mktemp("schedule") / "out.npz"
    script = Path(__file__).with_name("schedule_native.py")
    done = subprocess.run(
        [sys.executable, str(script), str(out)], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    with np.load(out) as data:
        return dict(data)


def test_ranges_are_contiguous_equal_and_complete(found: dict[str, np.ndarray]) -> None:
    cuts, ranges = native.cuts(), found["ranges"]
    by_cut = {tuple(map(int, cut)): tuple(map(int, pair)) for cut, pair in zip(cuts, ranges, strict=True)}
    for (tiles, block, blocks), (first, last) in by_cut.items():
        assert last - first in (tiles // blocks, -(-tiles // blocks))
        if block == 0:
            assert first == 0
        if block == blocks - 1:
            assert last == tiles
        after = by_cut.get((tiles, block + 1, blocks))
        assert after is None or after[0] == last


def test_tiles_follow_the_contract(found: dict[str, np.ndarray]) -> None:
    for (length, limit, skip), (tiles, half) in zip(native.lengths().tolist(), found["tiles"].tolist(), strict=True):
        usable = length if 0 < length <= limit else 0
        assert tiles == spec.request_tiles(usable, skip or None), (length, limit, skip)
        if tiles:
            pages = -(-usable // spec.PAGE)
            assert half == pages % 2, (length, limit, skip)


def test_a_tile_needs_both_pages_where_a_key_lies_in_the_second(found: dict[str, np.ndarray]) -> None:
    """By the contract's tiles: a tile that exists needs both, but the last one of an odd number of pages."""
    for (longest, tile, skip), (both, _) in zip(native.firsts().tolist(), found["both"].tolist(), strict=True):
        tiles, pages = spec.request_tiles(longest, skip or None), -(-longest // spec.PAGE)
        assert both == (tile < tiles and not (tile == tiles - 1 and pages % 2)), (longest, tile, skip)


def test_home_tiles_follow_their_definition(found: dict[str, np.ndarray]) -> None:
    """Each number against what it stands for, counted out."""
    for case, got in zip(native.shares().tolist(), found["shares"].tolist(), strict=True):
        requests, block, blocks, total, tiles = case
        request = block % requests
        at_home = [b for b in range(blocks) if b % requests == request]
        rounds = max(1, min(native.MOST, total // blocks))
        homes = {b: [i + r * len(at_home) for r in range(rounds)] for i, b in enumerate(at_home)}
        exist = {b: sum(tile < tiles for tile in numbers) for b, numbers in homes.items()}
        below = [b for b in at_home if b < block]
        share, extra = divmod(total, blocks)
        target = block * share + min(block, extra) if share else block
        place = homes[block][0]
        other = sum(b % requests == tiles % requests for b in range(blocks))
        mine = sum(exist[b] for b in below)
        want = [request, place, len(at_home), rounds, len(below), mine, exist[block], target, other]
        assert got == want, case


def test_spread_blocks_follow_their_definition(found: dict[str, np.ndarray]) -> None:
    for case, got in zip(native.spreads().tolist(), found["spreads"].tolist(), strict=True):
        requests, block, blocks, other = case
        home = [b * requests // blocks for b in range(blocks)]
        first = sum(h < other for h in home)
        assert got == [home[block], block - home.index(home[block]), home.count(home[block]), first], case
