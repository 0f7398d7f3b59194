"""Home tiles: the first tiles of a block, whose page ids are asked for together with the lengths.

A block must know all lengths before it knows its range of tiles, and its range before it can ask for a page id: two
memory latencies before the first key moves. So, for few requests, block b is at home in request `b % requests`: of that
request's tiles the first few rounds belong to the blocks at home in it, one each a round, whatever the lengths are. A
block reads the page ids of its home tiles while it reads the lengths, and sends for those tiles that turn out to exist.
What is left of all requests, the rest, is numbered in request order and cut into contiguous ranges such that home and
rest together are equal within one tile.

Home rounds are as many as every block has tiles (`total // blocks`), at most `most`, and one where there are fewer
tiles than blocks: no block gets more than an even share.

The table `rest` has the form of the prefix table: `requests + 1` words, `rest tiles before the request << 1`. The rest
of a request is its last tiles, so tile t of the numbered rest lies `rest before the next request - t` from its end.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from keysieve.device import ptx, scan
from keysieve.kernels import schedule


def reciprocal(requests: Int32) -> Int32:
    """By what `home_of` and `at_home` multiply instead of dividing by few requests: exact for fewer than 2,048 blocks.

    A block's first load waits for it, so whoever launches passes it rather than let every block divide.
    """
    return Int32((Uint32(requests) + Uint32(0xFFFFF)) // Uint32(requests))


def home_of(requests: Int32, block: Int32, blocks: Int32, over: Any = None) -> tuple[Int32, Int32, Int32]:
    """(request, tile, step): home tile i of `block` is tile `tile + i * step` of the request. over: the reciprocal of
    the requests, if it is known."""
    over = reciprocal(requests) if over is None else over
    place = (block * over) >> Int32(20)
    request = block - place * requests
    return request, place, at_home(request, requests, blocks, over)


def at_home(request: Int32, requests: Int32, blocks: Int32, over: Any = None) -> Int32:
    """Blocks below `blocks` that are at home in `request`. over: as for `home_of`."""
    every = (blocks * (reciprocal(requests) if over is None else over)) >> Int32(20)
    return every + Int32(request < blocks - every * requests)


def home_rounds(total: Int32, blocks: Int32, most: int) -> Int32:
    """Rounds of home tiles when there are `total` tiles in all."""
    rounds = Int32(1)
    for more in range(2, most + 1):
        rounds = rounds + Int32(total >= blocks * Int32(more))
    return rounds


def least(a: Int32, b: Int32) -> Int32:
    """The smaller of two."""
    return cutlass.select_(a < b, a, b)


def homes_below(tiles: Int32, there: Int32, step: Int32, rounds: Int32, most: int) -> Int32:
    """Home tiles that the first `there` of a request's `step` blocks have among its `tiles`."""
    count = Int32(0)
    for i in range(most):
        left = tiles - step * Int32(i)
        left = cutlass.select_(left > Int32(0), left, Int32(0)) * Int32(rounds > Int32(i))
        count = count + least(left, there)
    return count


def target_before(total: Int32, block: Int32, blocks: Int32) -> Int32:
    """Tiles that the blocks below `block` shall have; one each where there are fewer tiles than blocks."""
    share = Int32(Uint32(total) // Uint32(blocks))
    extra = total - share * blocks
    even = block * share + least(block, extra)
    return cutlass.select_(share == Int32(0), block, even)


def clamp(value: Int32, most: Int32) -> Int32:
    """`value` in 0..most."""
    return least(cutlass.select_(value > Int32(0), value, Int32(0)), most)


def _note(rest: Uint32, request: Int32, longest: Int32, skip: Int32) -> Int32:
    tiles, half = schedule.tiles_and_half(longest, skip)
    ptx.store_shared(rest + Uint32(request) * Uint32(4), Uint32((tiles << Int32(1)) | half))
    return tiles


@cute.jit
def read_lengths(
    lens: Any,
    requests: Int32,
    limit: Int32,
    skip: Int32,
    rest: Uint32,
    lane: Int32,
    raw: Any,
    next_n: cutlass.Constexpr[int],
) -> Any:
    """One warp leaves `tiles << 1 | half` of each request in the table `rest`, for `publish` to replace.

    A lane takes a run of neighbours; raw: what stands for the first length of its first, 0 if it has none, or a list of
    that for every request it may have. Returns its (requests a run, tiles, lengths above the limit).
    """
    asked = raw if isinstance(raw, list | tuple) else [raw]
    each = (requests + Int32(31)) >> Int32(5)
    first = lane * each
    last = least(first + each, requests)
    mine = Int32(0)
    faults = Int32(0)
    if first < last:
        words = [asked[0], *schedule.raw_lengths(lens, first, next_n)[1:]]
        longest, faults = schedule.longest_of(lens, words, limit)
        mine = _note(rest, first, longest, skip)
    if cutlass.const_expr(len(asked) == 1):
        for request in cutlass.range(first + Int32(1), last, unroll=1):
            longest, bad = schedule.longest_row(lens, request, limit, next_n)
            mine = mine + _note(rest, request, longest, skip)
            faults = faults + bad
    elif each > Int32(1):
        for i in cutlass.range_constexpr(1, len(asked)):
            if first + Int32(i) < last:
                words = [asked[i], *schedule.raw_lengths(lens, first + Int32(i), next_n)[1:]]
                longest, bad = schedule.longest_of(lens, words, limit)
                mine = mine + _note(rest, first + Int32(i), longest, skip)
                faults = faults + bad
    cute.arch.sync_warp()
    return each, mine, faults


@cute.jit
def publish_prefix(
    prefix: Uint32, rest: Uint32, requests: Int32, each: Int32, mine: Int32, total: Int32, lane: Int32
) -> None:
    """The same warp writes the prefix table, all that others need of the plan; arguments as for `publish`."""
    first_request = lane * each
    last_request = least(first_request + each, requests)
    before = scan.warp_inclusive(mine, lane) - mine
    for request in cutlass.range(first_request, last_request, unroll=1):
        tiles, half = schedule.prefix_word(rest, request)
        ptx.store_shared(prefix + Uint32(request) * Uint32(4), Uint32((before << Int32(1)) | half))
        before = before + tiles
    if lane == Int32(0):
        ptx.store_shared(prefix + Uint32(requests) * Uint32(4), Uint32(total << Int32(1)))
    cute.arch.sync_warp()


@cute.jit
def publish(
    prefix: Uint32,
    rest: Uint32,
    requests: Int32,
    each: Int32,
    mine: Int32,
    total: Int32,
    home_tiles: Int32,
    rounds: Int32,
    block: Int32,
    blocks: Int32,
    lane: Int32,
    most: cutlass.Constexpr[int],
    over: Any = None,
    prefixed: cutlass.Constexpr[bool] = False,
) -> Any:
    """The same warp writes both tables; returns (first, last) of the block's range of the rest.

    prefixed: `publish_prefix` has written the first. The warp may read what it wrote at once; others after a barrier.
    each, mine: as `read_lengths` returned them. total: tiles in all. home_tiles: of this block, `rounds` having been
    granted. over: as for `home_of`.
    """
    first_request = lane * each
    last_request = least(first_request + each, requests)
    rests = Int32(0)
    below = Int32(0)
    for request in cutlass.range(first_request, last_request, unroll=1):
        tiles = schedule.tiles_before(rest, request)
        step = at_home(request, requests, blocks, over)
        rests = rests + tiles - least(tiles, step * rounds)
        below = below + homes_below(tiles, at_home(request, requests, block, over), step, rounds, most)
    before = mine
    if cutlass.const_expr(not prefixed):
        before = scan.warp_inclusive(mine, lane) - mine
    rest_before = scan.warp_inclusive(rests, lane) - rests
    below = scan.warp_sum(below)
    left = scan.warp_sum(rests)
    cute.arch.sync_warp()
    for request in cutlass.range(first_request, last_request, unroll=1):
        tiles, half = schedule.prefix_word(rest, request)
        place = Uint32(request) * Uint32(4)
        if cutlass.const_expr(not prefixed):
            ptx.store_shared(prefix + place, Uint32((before << Int32(1)) | half))
        ptx.store_shared(rest + place, Uint32(rest_before << Int32(1)))
        before = before + tiles
        rest_before = rest_before + tiles - least(tiles, at_home(request, requests, blocks, over) * rounds)
    if lane == Int32(0):
        end = Uint32(requests) * Uint32(4)
        if cutlass.const_expr(not prefixed):
            ptx.store_shared(prefix + end, Uint32(total << Int32(1)))
        ptx.store_shared(rest + end, Uint32(left << Int32(1)))
    cute.arch.sync_warp()
    first = clamp(target_before(total, block, blocks) - below, left)
    last = clamp(target_before(total, block + Int32(1), blocks) - below - home_tiles, left)
    return first, last
