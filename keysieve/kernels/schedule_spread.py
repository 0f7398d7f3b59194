"""Home tiles of blocks that are spread over the requests, and the plan of few requests that goes with them.

As `schedule_homes`, but that block b is at home in request `b * requests // blocks`: neighbours are at home in the same
request or in the next, in the order in which the rest is numbered. So a block's range of the rest lies in or near its
home request where requests are about as long as each other, and its queries, which are there already, serve for it.

Where no request has more tiles than an even share (`total / blocks`, rounded up) for each block at home in it, all of a
request's tiles belong to these: such lengths are *even*, no tile is left over, and a block needs nothing of the plan.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import ptx, scan
from keysieve.kernels import schedule
from keysieve.kernels.schedule_homes import clamp, homes_below, least, target_before


class Spread:
    """A launch's requests and blocks, with what divides by them; in the place of `schedule_homes.reciprocal`.

    The first block at home in a request is `ceil(request * blocks / requests)`. Two reciprocals of 31 bits, rounded up:
    exact for quotients of numbers below 2^18 by up to 2^10.
    """

    def __init__(self, requests_over: Int32, blocks_over: Int32, requests: Int32, blocks: Int32) -> None:
        self.requests_over = requests_over
        self.blocks_over = blocks_over
        self.requests = requests
        self.blocks = blocks

    def __extract_mlir_values__(self) -> list[Any]:
        return [value for number in vars(self).values() for value in cutlass.extract_mlir_values(number)]

    def __new_from_mlir_values__(self, values: list[Any]) -> "Spread":
        numbers = zip(vars(self).values(), values, strict=True)
        return Spread(*(cutlass.new_from_mlir_values(number, [value]) for number, value in numbers))

    def first(self, request: Int32) -> Int32:
        """The first block at home in `request` or behind it."""
        return quotient(request * self.blocks + self.requests - Int32(1), self.requests_over)

    def home_of(self, block: Int32) -> tuple[Int32, Int32, Int32]:
        """(request, tile, step): home tile i of `block` is tile `tile + i * step` of the request."""
        request = quotient(block * self.requests, self.blocks_over)
        first = self.first(request)
        return request, block - first, self.first(request + Int32(1)) - first


def spread(requests: Int32, blocks: Int32) -> Spread:
    """For a launch of so many blocks; whoever launches makes it, as every block would divide otherwise."""
    return Spread(reciprocal31(requests), reciprocal31(blocks), requests, blocks)


def reciprocal31(number: Int32) -> Int32:
    """2^31 / number, rounded up; as the bits of an unsigned number."""
    return Int32((Uint32(0x80000000) + Uint32(number) - Uint32(1)) // Uint32(number))


def quotient(number: Int32, over: Int32) -> Int32:
    """`number`, not negative, by what `over` is the reciprocal of."""
    return Int32((Int64(Uint32(number)) * Int64(Uint32(over))) >> Int64(31))


@cute.jit
def publish_rest(
    rest: Uint32,
    requests: Int32,
    each: Int32,
    total: Int32,
    home: Int32,
    place: Int32,
    home_tiles: Int32,
    rounds: Int32,
    block: Int32,
    blocks: Int32,
    lane: Int32,
    most: cutlass.Constexpr[int],
    homes: Any,
) -> Any:
    """Where lengths are not even, the table of the rest, by the same warp; it alone reads it.

    Returns (first, last) of the block's range of the rest. home, place: of the block, as `home_of` has them.
    home_tiles: of this block, `rounds` having been granted, `most` at most.
    """
    first_request = lane * each
    last_request = least(first_request + each, requests)
    rests = Int32(0)
    below = Int32(0)
    start = homes.first(first_request)
    first = start
    for request in cutlass.range(first_request, last_request, unroll=1):
        tiles = schedule.tiles_before(rest, request)
        behind = homes.first(request + Int32(1))
        step = behind - first
        first = behind
        rests = rests + tiles - least(tiles, step * rounds)
        there = cutlass.select_(request < home, step, place * Int32(request == home))
        below = below + homes_below(tiles, there, step, rounds, most)
    rest_before = scan.warp_inclusive(rests, lane) - rests
    below = scan.warp_sum(below)
    left = scan.warp_sum(rests)
    first = start
    for request in cutlass.range(first_request, last_request, unroll=1):
        tiles = schedule.tiles_before(rest, request)
        behind = homes.first(request + Int32(1))
        ptx.store_shared(rest + Uint32(request) * Uint32(4), Uint32(rest_before << Int32(1)))
        rest_before = rest_before + tiles - least(tiles, (behind - first) * rounds)
        first = behind
    if lane == Int32(0):
        ptx.store_shared(rest + Uint32(requests) * Uint32(4), Uint32(left << Int32(1)))
    cute.arch.sync_warp()
    cursor = clamp(target_before(total, block, blocks) - below, left)
    last = clamp(target_before(total, block + Int32(1), blocks) - below - home_tiles, left)
    return cursor, last


@cute.jit
def homes_behind(
    prefix: Uint32, home: Int32, place: Int32, step: Int32, sent: Int32, share: Int32, most: Int32, lane: Int32
) -> Any:
    """Where lengths are even: a block's home tiles behind the first `sent`, two lanes each, and what is behind those.

    A block has `share` tiles at most. The first `most` of them are home tiles, one each a round; behind the rounds its
    tiles are one run. Returns (the lane's tile; 1 if the block has it and the lane's page of it holds a key, else 0;
    the number of these tiles; first and last of the run, in the numbering of the prefix table).
    """
    before, half = schedule.prefix_word(prefix, home)
    end = schedule.tiles_before(prefix, home + Int32(1))
    rounds = least(share, most)
    number = sent + (lane >> Int32(1))
    tile = place + number * step
    there = Int32(number < rounds) * Int32(tile < end - before)
    needed = there * (Int32(1) - (lane & Int32(1)) * half * Int32(tile == end - before - Int32(1)))
    run = share - rounds
    first = least(before + rounds * step + place * run, end)
    return tile, needed, pairs_of(there), first, least(first + run, end)


def pairs_of(flag: Int32) -> Int32:
    """Pairs of lanes with a flag that is 1 in both of them or 0."""
    return Int32(cute.arch.popc(cute.arch.vote_ballot_sync(flag != Int32(0)))) >> Int32(1)
