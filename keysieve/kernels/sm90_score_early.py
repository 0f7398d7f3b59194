"""The start of a block with few requests where a cut is `early`: a tile is sent for before all lengths are known.

A request's first round of tiles belongs to the blocks at home in it whatever the other lengths are (`schedule_homes`).
So a block's first tile waits for its own request's lengths and two page ids, nothing else; the barriers that it does
not need, the sum of all lengths and the plan are made while it is on its way, and what others need of the plan, the
prefix table, before the block's other home tiles are sent for.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import ptx
from keysieve.device.paged import page_in_pool
from keysieve.kernels import schedule
from keysieve.kernels.sharding import raw_length
from keysieve.kernels.sm90_score_config import ORDERS
from keysieve.kernels.sm90_score_load import PAGES_PER_TILE, copy_page


def is_early(kernel: Any) -> bool:
    """Does a block with few requests send for its first tile before it knows all their lengths?"""
    return bool(getattr(kernel.shape, "early", False))


@cute.jit
def more_lengths(lens: Any, requests: Int32, mine: Int32, raw: Int32, next_n: cutlass.Constexpr[int]) -> Any:
    """The first length of each request that the lane may have (`mine` is its first, whose length is `raw`), else 0."""
    raws = [raw, *(Int32(0) for _ in range(schedule.few(next_n) // 32 - 1))]
    if cutlass.const_expr(len(raws) > 1):  # noqa: SIM102  # a trace-time test, then a run-time one
        if requests > Int32(32):
            each = (requests + Int32(31)) >> Int32(5)
            for i in cutlass.range_constexpr(1, len(raws)):
                if Int32(i) < each and mine + Int32(i) < requests:
                    raws[i] = raw_length(lens, Int64(mine + Int32(i)) * Int64(4 * next_n))
    return raws


@cute.jit
def send_first(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    key_copy: Any,
    source: Any,
    target: Any,
    own: Any,
    page: Int32,
    request: Int32,
    place: Int32,
    pages: Int32,
    limit: Int32,
    skip: Int32,
    policy: Int64,
    lens: Any,
) -> Int32:
    """Send for the block's first home tile, `place` of `request`, if both its pages are needed and there; 1 if so.

    own: the request's lengths as they stand in memory. page: the tile's page ids, in lanes 0 and 1. The ring is fresh.
    """
    longest, _faults = schedule.longest_of(lens, own, limit)
    low = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(page, 0))
    high = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(page, 1))
    gone = Int32(0)
    both = schedule.needs_both(longest, place, skip)
    if both != Int32(0) and page_in_pool(low, pages) and page_in_pool(high, pages):
        with cute.arch.elect_one():
            ptx.store_shared_v4(shared.descriptors, Uint32(request), Uint32(place), Uint32(0), Uint32(0))
            cute.arch.mbarrier_arrive_and_expect_tx(shared.key_full, PAGES_PER_TILE * kernel.boxes.page_bytes)
        copy_page(kernel, shared, key_copy, source, target, low, Int32(0), 0, policy)
        copy_page(kernel, shared, key_copy, source, target, high, Int32(0), 1, policy)
        gone = Int32(1)
    return gone


@cute.jit
def init_orders(shared: Any) -> None:
    """Make the barriers of the orders, by one lane of the key warp: it orders queries before anything has made it wait
    for the query warp, which uses them behind a barrier of the block."""
    for slot in cutlass.range_constexpr(ORDERS):
        cute.arch.mbarrier_init(shared.order_full + slot, 1)
        cute.arch.mbarrier_init(shared.order_empty + slot, 1)
