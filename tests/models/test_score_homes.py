"""The rule of home tiles itself: every tile once, no block above an even share.

`plan` restates the rule; that the device code follows it is held by tests/device/test_schedule_native.py.
"""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch

from keysieve.kernels import sm90_score_host
from keysieve.kernels.sm90_score_config import ScoreConfig

MOST = 4
FEW = 128  # requests up to which blocks have home tiles


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


def test_the_reciprocal_divides_exactly_for_every_block_a_scorer_may_have() -> None:
    """The rule of `schedule_homes.reciprocal`: 2^20 over the requests, rounded up, in 32-bit integers."""
    most = 2 * sm90_score_host.MOST_BLOCKS
    for requests in range(1, FEW + 1):
        over = ((requests + 0xFFFFF) & 0xFFFFFFFF) // requests
        assert most * over < 2**31
        assert all(block * over >> 20 == block // requests for block in range(most + 1)), requests


@pytest.mark.parametrize("blocks", [0, -1, sm90_score_host.MOST_BLOCKS + 1])
@pytest.mark.parametrize("layout", ["compact", "pitched"])
def test_more_blocks_than_the_rule_is_exact_for_are_refused(layout: str, blocks: int) -> None:
    config = ScoreConfig("fp8_fp32", 8, 1, layout, "float32")
    some = torch.zeros(1, 128, dtype=torch.int32)
    buffers = {"logits": some, "flags": some, "blocks": blocks, "max_context": 64}
    if layout == "compact":
        buffers |= {"topk": 0, "tops": some, "starts": some}
    call = getattr(sm90_score_host, f"score_{layout}")
    with pytest.raises(ValueError, match="blocks: "):
        call(lambda *_: None, config, some, some, some, some, some, **buffers)
