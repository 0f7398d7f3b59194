"""The rule of home tiles itself: every tile once, no block above an even share.

`plan` restates the rule; that the device code follows it is held by tests/device/test_schedule_native.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
import torch

from keysieve.kernels import sm90_score_host
from keysieve.kernels.sm90_score_config import ScoreConfig

MOST = 4
AT_ONCE = 16  # home rounds at most where lengths are even
Plan = Callable[[list[int], int], list[list[tuple[int, int]]]]
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
    return home_and_rest(tiles, blocks, home, taken)


def home_and_rest(
    tiles: list[int], blocks: int, home: list[list[tuple[int, int]]], taken: list[int]
) -> list[list[tuple[int, int]]]:
    """Home tiles, and behind them a range of the rest each; taken: home tiles of each request."""
    rest = [(r, tile) for r, count in enumerate(tiles) for tile in range(taken[r], count)]
    share, extra = divmod(sum(tiles), blocks)
    targets = [share + (b < extra) if share else 1 for b in range(blocks)]
    ends = list(accumulate(target - len(mine) for target, mine in zip(targets, home, strict=True)))
    cuts = [0, *(min(max(end, 0), len(rest)) for end in ends)]
    return [mine + rest[cuts[b] : cuts[b + 1]] for b, mine in enumerate(home)]


def plan_spread(tiles: list[int], blocks: int) -> list[list[tuple[int, int]]]:
    """The same by the rules of `schedule_spread`."""
    requests, total = len(tiles), sum(tiles)
    homes = [block * requests // blocks for block in range(blocks)]
    firsts = [homes.index(request) for request in homes]
    steps = [homes.count(request) for request in range(requests)]
    share = -(-total // blocks)
    even = requests <= blocks and all(count <= share * step for count, step in zip(tiles, steps, strict=True))
    rounds = min(share, AT_ONCE) if even else max(1, min(MOST, total // blocks))
    home = []
    for block, request in enumerate(homes):
        numbers = [block - firsts[block] + r * steps[request] for r in range(rounds)]
        home.append([(request, tile) for tile in numbers if tile < tiles[request]])
    taken = [min(count, rounds * step) for count, step in zip(tiles, steps, strict=True)]
    if even:
        run = share - rounds
        starts = [taken[request] + run * (block - firsts[block]) for block, request in enumerate(homes)]
        return [
            mine + [(homes[b], tile) for tile in range(starts[b], min(starts[b] + run, tiles[homes[b]]))]
            for b, mine in enumerate(home)
        ]
    return home_and_rest(tiles, blocks, home, taken)


@pytest.mark.parametrize("rule", [plan, plan_spread])
@pytest.mark.parametrize("seed", range(4))
def test_every_tile_once_and_no_block_above_an_even_share(seed: int, rule: Plan) -> None:
    draw = random.Random(seed)
    for _ in range(150):
        requests, blocks = draw.choice([1, 2, 3, 8, 31, 64, 128]), draw.choice([1, 2, 7, 64, 131, 132, 200])
        alike = draw.choice([8, 32, 33, 64])
        some = [0, 0, 1, 2, draw.randint(0, 60), draw.randint(0, 400)] if draw.random() < 0.7 else [alike, alike - 1]
        tiles = [draw.choice(some) for _ in range(requests)]
        done = rule(tiles, blocks)
        assert sorted(tile for mine in done for tile in mine) == [
            (r, tile) for r, count in enumerate(tiles) for tile in range(count)
        ]
        assert max(map(len, done)) <= -(-sum(tiles) // blocks)


@pytest.mark.parametrize(("requests", "tiles"), [(128, 32), (32, 32), (66, 64), (1, 32), (64, 16)])
def test_blocks_of_even_lengths_keep_to_a_request(requests: int, tiles: int) -> None:
    done = plan_spread([tiles] * requests, 132)
    assert all(len({request for request, _ in mine}) <= 1 for mine in done)


@pytest.mark.parametrize(("requests", "tiles", "most"), [(8, 1024, 7), (64, 512, 65)])
def test_spread_blocks_seldom_change_their_request(requests: int, tiles: int, most: int) -> None:
    """Changes of request of all 132 blocks, where lengths are alike and not even."""
    changes = [sum(a[0] != b[0] for a, b in pairwise(mine)) for mine in plan_spread([tiles] * requests, 132)]
    assert sum(changes) <= most


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
