"""The start of a block of the MXFP4 scorer with few requests: what its first tile waits for, and who does it.

Instructions that no warp of a multiprocessor has executed yet are what its first two microseconds go to, four to seven
cycles each. So the four producer warps share out what is to be done, and none waits for more than it needs: the key
warp asks for its request's length, its page ids and all lengths, and sends for the first tile as soon as the first two
are there; the query warp asks for the request's queries, scales, weights and length, and writes the table of codes
while they come; one scale warp makes the barriers of keys and orders, the other those of queries and the plan.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import ptx, scan
from keysieve.device.paged import table_entry
from keysieve.kernels import schedule
from keysieve.kernels.sm90_mxfp4_config import QUERY_BARRIER, START_BARRIER
from keysieve.kernels.sm90_score_config import ORDERS
from keysieve.kernels.sm90_score_feed import PLAN_BARRIER
from keysieve.kernels.sm90_score_load import BATCH
from keysieve.spec import PAGE


@cute.jit
def meet(kernel: cutlass.Constexpr[Any]) -> None:
    """The producer warps come together: the barriers and the table of codes are there."""
    cute.arch.barrier(barrier_id=START_BARRIER, number_of_threads=32 * kernel.shape.producer_warps)


@cute.jit
def wait_for_plan(kernel: cutlass.Constexpr[Any]) -> None:
    """All warps but the query warp, which is the last that needs the plan: nobody waits for it."""
    cute.arch.barrier(barrier_id=PLAN_BARRIER, number_of_threads=kernel.shape.threads - 32)


@cute.jit
def make_barriers(kernel: cutlass.Constexpr[Any], shared: Any, warp: Int32) -> None:
    """All barriers, by the two scale warps; a barrier must follow."""
    shape = kernel.shape
    if warp == Int32(kernel.query_warp + 1):
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(shape.stages):
                cute.arch.mbarrier_init(shared.key_full + stage, 1)
            for stage in cutlass.range_constexpr(shape.stages):
                cute.arch.mbarrier_init(shared.key_empty + stage, 4)
            for slot in cutlass.range_constexpr(ORDERS):
                cute.arch.mbarrier_init(shared.order_full + slot, 1)
                cute.arch.mbarrier_init(shared.order_empty + slot, 1)
        cute.arch.mbarrier_init_fence()
    if warp == Int32(kernel.query_warp + 2):
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(shape.stages):
                cute.arch.mbarrier_init(shared.landed + stage, 1)
            for stage in cutlass.range_constexpr(shape.query_stages):
                cute.arch.mbarrier_init(shared.query_full + stage, 2)
                cute.arch.mbarrier_init(shared.query_empty + stage, 4 * shape.groups)
        cute.arch.mbarrier_init_fence()


@cute.jit
def ask_pages(
    table: Int64,
    table_stride: Int64,
    limit: Int32,
    request: Int32,
    place: Int32,
    step: Int32,
    lane: Int32,
) -> Int32:
    """The page ids of a block's first sixteen home tiles, two lanes a tile. Nothing waits for them yet."""
    column = (place + (lane >> Int32(1)) * step) * Int32(2) + (lane & Int32(1))
    page = Int32(0)
    if lane < Int32(2 * BATCH) and column < (limit + Int32(PAGE - 1)) >> Int32(6):
        page = ptx.load(table_entry(table, request, table_stride, column), Int32)
    return page


@cute.jit
def ask_lengths(lens: Any, requests: Int32, lane: Int32, next_n: cutlass.Constexpr[int]) -> Any:
    """(requests a lane, what stands in memory for the lengths of each of them; nothing waits for it yet).

    A lane has a run of neighbours; the lengths of those that it does not have are 0.
    """
    each = (requests + Int32(31)) >> Int32(5)
    first = lane * each
    asked = [[Int32(0) for _ in range(next_n)] for _ in range(schedule.few(next_n) // 32)]
    if first < requests:
        asked[0] = schedule.raw_lengths(lens, first, next_n)
    if cutlass.const_expr(len(asked) > 1):  # noqa: SIM102  # a trace-time test, then a run-time one
        if requests > Int32(32):
            for i in cutlass.range_constexpr(1, len(asked)):
                if Int32(i) < each and first + Int32(i) < requests:
                    asked[i] = schedule.raw_lengths(lens, first + Int32(i), next_n)
    return each, asked


def count_lengths(lens: Any, asked: Any, limit: Int32, skip: Int32) -> Any:
    """((tiles, half) of each of a lane's requests, its tiles, its lengths above the limit)."""
    counted = []
    mine = Int32(0)
    faults = Int32(0)
    for raw in asked:
        longest, bad = schedule.longest_of(lens, raw, limit)
        counted.append(schedule.tiles_and_half(longest, skip))
        mine = mine + counted[-1][0]
        faults = faults + bad
    return counted, mine, faults


@cute.jit
def note(table: Uint32, requests: Int32, each: Int32, first: Int32, number: Int32, tiles: Int32, half: Int32) -> None:
    """`tiles << 1 | half` of a lane's request `number` into a table, if it has one."""
    request = first + number
    if number < each and request < requests:
        ptx.store_shared(table + Uint32(request) * Uint32(4), Uint32((tiles << Int32(1)) | half))


def note_all(table: Uint32, requests: Int32, each: Int32, counted: Any, before: Any, lane: Int32) -> None:
    """The same of all of them; before: None, or the tiles before the lane's first, to which theirs are added up."""
    first = lane * each
    for i, (tiles, half) in enumerate(counted):
        note(table, requests, each, first, Int32(i), tiles if before is None else before, half)
        before = None if before is None else before + tiles


@cute.jit
def plan_few(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    flags: Int64,
    lens: Any,
    requests: Int32,
    limit: Int32,
    skip: Int32,
    block: Int32,
) -> None:
    """The prefix table, all that other warps need of the plan of few requests, by one warp beside the key warp, which
    needs nothing of it for its first tiles."""
    lane = cute.arch.lane_idx()
    each, asked = ask_lengths(lens, requests, lane, kernel.config.next_n)
    make_barriers(kernel, shared, Int32(kernel.query_warp + 2))
    meet(kernel)
    counted, mine, faults = count_lengths(lens, asked, limit, skip)
    upto = scan.warp_inclusive(mine, lane)
    note_all(shared.prefix, requests, each, counted, upto - mine, lane)
    if lane == Int32(31):
        ptx.store_shared(shared.prefix + Uint32(requests) * Uint32(4), Uint32(upto << Int32(1)))
    if faults > Int32(0) and block == Int32(0):
        ptx.red_global(flags, Uint32(1 << schedule.FLAG_BAD_LENGTH), "or")
    cute.arch.sync_warp()
    cute.arch.barrier_arrive(barrier_id=QUERY_BARRIER, number_of_threads=64)


def uneven_lengths(
    requests: Int32, each: Int32, counted: Any, share: Int32, blocks: Int32, lane: Int32, spread: Any
) -> Int32:
    """Not 0 where one of the lane's requests has more tiles than `share` for each block at home in it, or there are
    more requests than blocks. spread: a `schedule_spread.Spread`."""
    uneven = Int32(requests > blocks)
    request = lane * each
    first = spread.first(request)
    for i, (tiles, _half) in enumerate(counted):
        behind = spread.first(request + Int32(i + 1))
        uneven = uneven | (Int32(tiles > share * (behind - first)) & Int32(Int32(i) < each))
        first = behind
    return uneven
