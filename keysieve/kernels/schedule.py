"""Work of a step, cut inside the kernel: lengths -> tiles of each request -> this block's contiguous range of tiles.

The 128-key tiles of all requests are numbered in request order. A request needs `ceil(longest / 128)` tiles, `longest`
being the largest usable length of its rows, or none when that is at most `skip` (tensor parallel: `topk`, its rows
take every key; else 0). A length is usable in 1..limit, `limit` being what the page table and max_context both hold;
any other length makes its row empty, and one above the limit is a fault. `lens` is the address of the lengths, or
`sharding.ShardedLengths` where they are global and a context-parallel rank's own ones are wanted.

The prefix sum lives in shared memory as `requests + 1` words `tiles_before << 1 | half`, where `half` says that the
request's last tile holds keys in its first page only. No host length, no metadata kernel: every block builds the same
table from the same lengths (32,768 of them at most: 131 KB of L2 reads), which costs one load latency and two barriers;
a few requests are one warp's work, which need not wait for any barrier to go on.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import ptx, scan
from keysieve.device.paged import ceil_div_pow2
from keysieve.kernels.flags import FLAG_BAD_LENGTH, FLAG_BAD_PAGE, FLAG_OVERFLOW
from keysieve.kernels.sharding import ShardedLengths, own_length, raw_length
from keysieve.spec import PAGE, TILE

__all__ = [
    "FLAG_BAD_LENGTH",
    "FLAG_BAD_PAGE",
    "FLAG_OVERFLOW",
    "block_range",
    "few",
    "find_request",
    "find_request_together",
    "lengths_of",
    "longest_row",
    "needs_both",
    "prefix_of_many",
    "prefix_word",
    "range_of_many",
    "tiles_and_half",
    "tiles_before",
    "usable_length",
]

LOG2_TILE = 7


def lengths_of(layout: str, lens: Int64, word: Int64) -> Any:
    """What the functions below take as `lens`: the address itself, or, for pitched logits, what reads a rank's own
    lengths from global ones (word: see `sharding_word`)."""
    return ShardedLengths(lens, word) if layout != "compact" else lens


def usable_length(length: Int32, limit: Int32) -> Int32:
    """The keys a row sees: its length if that is in 1..limit, else 0."""
    return length * Int32(length > Int32(0)) * Int32(length <= limit)


@cute.jit
def longest_row(lens: Any, request: Int32, limit: Int32, next_n: cutlass.Constexpr[int]) -> Any:
    """(largest usable length of the request's rows, the number of its lengths above the limit)."""
    return longest_of(lens, raw_lengths(lens, request, next_n), limit)


def raw_lengths(lens: Any, request: Int32, next_n: int) -> list[Any]:
    """What stands in memory for the request's lengths; nothing waits for it yet."""
    base = Int64(request) * Int64(4 * next_n)
    return [raw_length(lens, base + Int64(4 * row)) for row in range(next_n)]


def longest_of(lens: Any, raw: list[Any], limit: Int32) -> tuple[Int32, Int32]:
    """`longest_row` from what `raw_lengths` read."""
    longest = Int32(0)
    faults = Int32(0)
    for word in raw:
        length = own_length(lens, word)
        usable = usable_length(length, limit)
        longest = cutlass.select_(usable > longest, usable, longest)
        faults = faults + Int32(length > limit)
    return longest, faults


def tiles_and_half(longest: Int32, skip: Int32) -> tuple[Int32, Int32]:
    """(tiles of a request, 1 if the second page of its last tile holds no key it needs)."""
    tiles = ceil_div_pow2(longest, LOG2_TILE) * Int32(longest > skip)
    rest = (longest - Int32(1)) & Int32(127)
    return tiles, Int32(rest < Int32(64))


def needs_both(longest: Int32, tile: Int32, skip: Int32) -> Int32:
    """1 if a request whose largest usable length is `longest` needs both pages of its tile `tile`, else 0."""
    return Int32(longest > tile * Int32(TILE) + Int32(PAGE)) & Int32(longest > skip)


def few(next_n: int) -> int:
    """Requests up to which one warp builds the prefix table: a lane takes up to four lengths."""
    return 32 * max(1, 4 // next_n)


@cute.jit
def prefix_of_many(
    lens: Any,
    requests: Int32,
    limit: Int32,
    skip: Int32,
    prefix: Uint32,
    scratch: Uint32,
    thread: Int32,
    next_n: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
) -> Any:
    """Fill the prefix table for any number of requests; all threads of the block call it, and a barrier must follow.

    scratch: shared address of threads / 32 words. Every thread owns a run of neighbours; one block barrier inside.
    Returns this thread's number of lengths above the limit.
    """
    each = (requests + Int32(threads - 1)) // Int32(threads)
    first = thread * each
    last = first + each
    if last > requests:
        last = requests
    mine = Int32(0)
    faults = Int32(0)
    tiles = Int32(0)
    half = Int32(0)
    for request in cutlass.range(first, last, unroll=1):
        longest, bad = longest_row(lens, request, limit, next_n)
        tiles, half = tiles_and_half(longest, skip)
        mine = mine + tiles
        faults = faults + bad
    lane = thread % Int32(32)
    warp = thread // Int32(32)
    upto = scan.warp_inclusive(mine, lane)
    if lane == Int32(31):
        ptx.store_shared(scratch + Uint32(warp) * Uint32(4), Uint32(upto))
    cute.arch.sync_threads()
    sums = Int32(0)  # of lower warps: lane i looks at warp i
    if lane < warp:
        sums = Int32(ptx.load_shared(scratch + Uint32(lane) * Uint32(4)))
    before = upto - mine + scan.warp_sum(sums)
    if each == Int32(1):
        if first < last:  # its one request is still in registers
            _put(prefix, first, before, half)
    else:
        running = before
        for request in cutlass.range(first, last, unroll=1):
            longest, bad = longest_row(lens, request, limit, next_n)
            tiles, half = tiles_and_half(longest, skip)
            _put(prefix, request, running, half)
            running = running + tiles
    if last == requests and first < last:
        _put(prefix, requests, before + mine, Int32(0))
    return faults


def _put(prefix: Uint32, request: Int32, tiles_before: Int32, half: Int32) -> None:
    ptx.store_shared(prefix + Uint32(request) * Uint32(4), Uint32((tiles_before << Int32(1)) | half))


def tiles_before(prefix: Uint32, request: Int32) -> Int32:
    """Tiles of all requests below `request` (`request` may be the number of requests: then all tiles)."""
    return Int32(ptx.load_shared(prefix + Uint32(request) * Uint32(4)) >> Uint32(1))


def prefix_word(prefix: Uint32, request: Int32) -> tuple[Int32, Int32]:
    """(tiles before the request, its half flag)."""
    word = ptx.load_shared(prefix + Uint32(request) * Uint32(4))
    return Int32(word >> Uint32(1)), Int32(word & Uint32(1))


@cute.jit
def block_range(total: Int32, block: Int32, blocks: Int32) -> Any:
    """[first, last) of the tiles that block `block` of `blocks` works on: contiguous, equal within one tile."""
    share = total // blocks
    extra = total - share * blocks
    first = block * share
    if block < extra:
        first = first + block
        share = share + Int32(1)
    else:
        first = first + extra
    return first, first + share


@cute.jit
def range_of_many(prefix: Uint32, requests: Int32, capacity: Int32, block: Int32, blocks: Int32) -> Any:
    """[first, last) of the tiles of a block, from the prefix table; at most `capacity` tiles are worked on in all."""
    usable = tiles_before(prefix, requests)
    if usable > capacity:
        usable = capacity
    first, last = block_range(usable, block, blocks)
    return first, last


@cute.jit
def find_request(prefix: Uint32, requests: Int32, tile: Int32, near: Int32) -> Int32:
    """The request that owns tile `tile` (0 <= tile < all tiles): the last one with tiles_before <= tile.

    near: a request with tiles_before <= tile; answered at once when it is the owner. Lanes may ask for different tiles.
    """
    owner = near
    if tiles_before(prefix, owner + Int32(1)) <= tile:
        owner = Int32(0)
        step = Int32(1) << (Int32(31) - Int32(cute.arch.clz(requests)))
        while step > Int32(0):
            probe = owner + step
            if probe >= requests:  # the last request stands for what lies beyond the table
                probe = requests - Int32(1)
            if tiles_before(prefix, probe) <= tile:
                owner = probe
            step = step >> Int32(1)
    return owner


@cute.jit
def find_request_together(prefix: Uint32, requests: Int32, tile: Int32, lane: Int32) -> Int32:
    """`find_request` for one tile by a whole warp: 32 probes at a time, one round up to 32 requests."""
    low = Int32(0)
    width = requests
    while width > Int32(1):
        step = (width + Int32(31)) >> Int32(5)
        probe = lane * step
        reached = Int32(0)
        if probe < width:
            reached = Int32(tiles_before(prefix, low + probe) <= tile)
        last = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(reached != Int32(0)))) - Int32(1)
        low = low + last * step
        width = width - last * step
        if width > step:
            width = step
    return low
