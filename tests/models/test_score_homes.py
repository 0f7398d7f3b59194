"""The rule of home tiles itself: every tile once, no block above an even share.

`plan` restates the rule; that the device code follows it is held by tests/device/test_schedule_native.py.
"""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

MOST = 4


def plan(tiles: list[int], blocks: int) -> list[list[tuple[int, int]]]:
    """(request, tile) of every block in its order, by the rules of `schedule_homes`."""
    requests, total = len(tiles), sum(tiles)
    rounds = max(1, min(MOST, total // blocks))
    home = []
    for block in range(blocks):
        request, place = block % requests, block // requests
        step = len(range(request, blocks, requests))
        numbers = [place + r * step for r in range(rounds)]
        home.append([(request, tile) for tile in numbers if tile < tiles[request]])
    taken = [min(count, rounds * len(range(r, blocks, requests))) for r, count in enumerate(tiles)]
    rest = [(r, tile) for r, count in enumerate(tiles) for tile in range(taken[r], count)]
    share, extra = divmod(total, blocks)
    targets = [share + (b < extra) if share else 1 for b in range(blocks)]
    ends = list(accumulate(target - len(mine) for target, mine in zip(targets, home, strict=True)))
    cuts = [0, *(min(max(end, 0), len(rest)) for end in ends)]
    return [mine + rest[cuts[b] : cuts[b + 1]] for b, mine in enumerate(home)]


@pytest.mark.parametrize("seed", range(4))
def test_every_tile_once_and_no_block_above_an_even_share(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(150):
        requests, blocks = draw.choice([1, 2, 3, 8, 31, 64, 128]), draw.choice([1, 2, 7, 64, 131, 132, 200])
        tiles = [draw.choice([0, 0, 1, 2, draw.randint(0, 60), draw.randint(0, 400)]) for _ in range(requests)]
        done = plan(tiles, blocks)
        assert sorted(tile for mine in done for tile in mine) == [
            (r, tile) for r, count in enumerate(tiles) for tile in range(count)
        ]
        assert max(map(len, done)) <= -(-sum(tiles) // blocks)
