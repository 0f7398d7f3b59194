"""How the MXFP4 scorer's key warp sends tiles: lane by lane, two lanes a tile, as many tiles at once as have room.

A page is 4,352 bytes in one piece and lies in the ring as in memory, so that a plain bulk copy brings it and any lane
can start one. A tile sent by the warp as one costs it 62 instructions, most of them dependent, about 460 cycles: the
bytes of a tile take as long. Here waiting, descriptors and announcements are one pass for all tiles that have room, and
a copy is a turn of nine instructions.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import ptx, sync
from keysieve.kernels import score_trace
from keysieve.kernels.sm90_score_feed import order_queries
from keysieve.kernels.sm90_score_load import BAD_PAGE, PAGES_PER_TILE, scale_words, spoil_scales

AT_ONCE = 3
"""Most tiles sent together: behind a whole ring at once the loads of queries and page ids are late. The tiles' requests
are ordered first, and their ring takes that many while consumers hold the oldest queries for the first of them."""

EVEN_LANES = 0x55555555


class Pages:
    """Where a pool's pages lie: byte address of the first, bytes from one to the next."""

    def __init__(self, keys: Int64, stride: Int64) -> None:
        self.keys = keys
        self.stride = stride

    def __extract_mlir_values__(self) -> list[Any]:
        return [value for number in vars(self).values() for value in cutlass.extract_mlir_values(number)]

    def __new_from_mlir_values__(self, values: list[Any]) -> "Pages":
        numbers = zip(vars(self).values(), values, strict=True)
        return Pages(*(cutlass.new_from_mlir_values(number, [value]) for number, value in numbers))


def lowest_lane(lanes: Uint32) -> Int32:
    """The lowest of a set of lanes that is not empty."""
    return Int32(cute.arch.popc(lanes ^ (lanes - Uint32(1)))) - Int32(1)


def without_lowest(lanes: Uint32) -> Uint32:
    """The set without it."""
    return lanes & (lanes - Uint32(1))


def tiles_in_a_row(room: Uint32) -> Int32:
    """How many tiles, two lanes each, have room from the first on, before the first that has none; not all sixteen."""
    return Int32(cute.arch.popc((room ^ (room + Uint32(1))) >> Uint32(1))) >> Int32(1)


def number_of(sequence: Int32, firsts: Uint32, lane: Int32) -> Int32:
    """Number of the request of the lane's tile, after the `sequence`-th: requests begin in the lanes `firsts`."""
    return sequence + Int32(cute.arch.popc(firsts & (Uint32(0xFFFFFFFF) >> (Uint32(31) - Uint32(lane)))))


@cute.jit
def order_changes(shared: Any, firsts: Uint32, number: Int32, request: Int32) -> None:
    """Order the queries of the requests that begin in the lanes `firsts` (even ones), each lane's as `number`."""
    left = firsts
    while left != Uint32(0):
        lane = lowest_lane(left)
        order_queries(shared, cute.arch.shuffle_sync(number, lane), cute.arch.shuffle_sync(request, lane))
        left = without_lowest(left)


@cute.jit
def spoil_pages(kernel: cutlass.Constexpr[Any], shared: Any, bad: Uint32, slot: Int32, lane: Int32) -> None:
    """Make the scales of the ring slots of the lanes `bad` NaN."""
    left = bad
    while left != Uint32(0):
        which = lowest_lane(left)
        spoil_scales(scale_words(kernel, shared, cute.arch.shuffle_sync(slot, which)), lane)
        left = without_lowest(left)


@cute.jit
def send_home(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    pages: Any,
    code: Int32,
    request: Int32,
    within: Int32,
    first: Int32,
    count: Int32,
    lane: Int32,
    policy: Int64,
) -> None:
    """Of the block's first `count` tiles, all of `request`, those behind the first `first`, two lanes a tile, into a
    ring that nothing else has been sent to.

    What `send_batch` does with them, by few instructions: everybody waits for these, and none is in a cache yet.
    """
    pair = lane >> Int32(1)
    here = (pair < count) & (pair >= first)
    other = cute.arch.shuffle_sync_bfly(code, 1)
    bad = Uint32(cute.arch.vote_ballot_sync(here & (code == Int32(BAD_PAGE))))
    if bad != Uint32(0):
        spoil_pages(kernel, shared, bad, lane, lane)
    full = shared.key_full + pair
    if here & ((lane & Int32(1)) == Int32(0)):
        nbytes = (Int32(code >= Int32(0)) + Int32(other >= Int32(0))) * Int32(kernel.boxes.page_bytes)
        descriptor = shared.descriptors + Uint32(pair) * Uint32(16)
        ptx.store_shared_v4(descriptor, Uint32(request), Uint32(within), Uint32(0), Uint32(0))
        cute.arch.mbarrier_arrive_and_expect_tx(full, nbytes)
    cute.arch.sync_warp()
    if here & (code >= Int32(0)):
        target = shared.keys + Uint32(lane) * Uint32(kernel.boxes.slot_bytes)
        source = pages.keys + Int64(code) * pages.stride
        ptx.bulk_load(target, source, Int32(kernel.boxes.page_bytes), ptx.smem_addr(full), policy)
    cute.arch.sync_warp()
    score_trace.mark(kernel, shared, score_trace.COPYING, first == Int32(0))


@cute.jit
def send_batch(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    pages: Any,
    code: Int32,
    request: Int32,
    within: Int32,
    count: Int32,
    current: Int32,
    sequence: Int32,
    led: Int32,
    stage: Int32,
    phase: Int32,
    lane: Int32,
    policy: Int64,
) -> Any:
    """Send the first `count` tiles of a batch; lanes 2 i and 2 i + 1 hold tile i's pages (`code`, see `page_code`).

    request, within: the lane's tile. current, sequence: the request sent last and its number. stage, phase: of the next
    free place in the ring. Returns the four anew.
    """
    stages = kernel.shape.stages
    pair = lane >> Int32(1)
    half = lane & Int32(1)
    before = cute.arch.shuffle_sync_up(request, 2)
    if pair == Int32(0):
        before = current
    fresh = Uint32(cute.arch.vote_ballot_sync((request != before) & (pair < count))) & Uint32(EVEN_LANES)
    number = number_of(sequence, fresh, lane)
    other = cute.arch.shuffle_sync_bfly(code, 1)
    nbytes = (Int32(code >= Int32(0)) + Int32(other >= Int32(0))) * Int32(kernel.boxes.page_bytes)
    source = pages.keys + Int64(code) * pages.stride
    sent = Int32(0)
    while sent < count:
        ahead = pair - sent
        place = stage + ahead
        wrapped = Int32(place >= Int32(stages))
        place = place - wrapped * Int32(stages)
        barrier = shared.key_empty + place
        free = Int32(0)
        sync.wait_barrier(shared.key_empty + stage, phase)
        if (ahead >= Int32(0)) & (ahead < Int32(min(AT_ONCE, stages))) & (pair < count):
            free = Int32(cute.arch.mbarrier_test_wait(barrier, phase ^ wrapped))
        room = Uint32(cute.arch.vote_ballot_sync(free != Int32(0))) >> Uint32(sent * Int32(2))
        tiles = tiles_in_a_row(room)
        here = (ahead >= Int32(0)) & (ahead < tiles)
        mine = Uint32(cute.arch.vote_ballot_sync(here))
        order_changes(shared, fresh & mine, number - led, request)
        slot = place * Int32(PAGES_PER_TILE) + half
        bad = Uint32(cute.arch.vote_ballot_sync(here & (code == Int32(BAD_PAGE))))
        if bad != Uint32(0):
            spoil_pages(kernel, shared, bad, slot, lane)
        if here & (half == Int32(0)):
            descriptor = shared.descriptors + Uint32(place) * Uint32(16)
            ptx.store_shared_v4(descriptor, Uint32(request), Uint32(within), Uint32(number), Uint32(0))
            cute.arch.mbarrier_arrive_and_expect_tx(shared.key_full + place, nbytes)
        cute.arch.sync_warp()
        if here & (code >= Int32(0)):
            target = shared.keys + Uint32(slot) * Uint32(kernel.boxes.slot_bytes)
            full = ptx.smem_addr(shared.key_full + place)
            ptx.bulk_load(target, source, Int32(kernel.boxes.page_bytes), full, policy)
        cute.arch.sync_warp()
        sent = sent + tiles
        stage = stage + tiles
        if stage >= Int32(stages):
            stage = stage - Int32(stages)
            phase = phase ^ Int32(1)
    if count > Int32(0):
        last = count * Int32(2) - Int32(2)
        current = cute.arch.shuffle_sync(request, last)
        sequence = cute.arch.shuffle_sync(number, last)
    return current, sequence, stage, phase
