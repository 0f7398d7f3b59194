"""The key warp of the sm90 MXFP4 scorer: which tiles a block scores, in which order.

As `sm90_score_feed.stream_keys`, but that blocks are spread over few requests (`schedule_spread`). Where lengths are
even, a block's first sixteen tiles are home tiles, whose page ids are asked for together with the lengths: it sends for
all of them before it waits for memory again.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import ptx, scan
from keysieve.kernels import schedule, score_trace
from keysieve.kernels import schedule_homes as homes
from keysieve.kernels.schedule_spread import homes_behind, pairs_of, publish_rest, publish_spread
from keysieve.kernels.sm90_mxfp4_send import send_batch, send_home
from keysieve.kernels.sm90_score_config import NO_REQUEST
from keysieve.kernels.sm90_score_feed import PLAN_BARRIER, end_ring, look_up, page_code
from keysieve.kernels.sm90_score_load import BATCH
from keysieve.kernels.sm90_score_send import order_queries


@cute.jit
def start_few(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    sources: Any,
    pages: Int32,
    flags: Int64,
    lens: Any,
    requests: Int32,
    limit: Int32,
    skip: Int32,
    block: Int32,
    blocks: Int32,
    raw: Any,
    page: Int32,
    policy: Int64,
) -> Any:
    """With few requests: the block's first tiles on their way, and the plan for all of the block.

    Returns (tiles sent; of the next batch each lane's tile, page id and whether it is needed, and the number of its
    tiles, 0 if there is none yet; first and last of the range behind it, and the table that numbers it).
    """
    lane = cute.arch.lane_idx()
    request, place, step = shared.over.home_of(block)
    within = place + (lane >> Int32(1)) * step
    each, mine, faults = homes.read_lengths(lens, requests, limit, skip, shared.rest, lane, raw, kernel.config.next_n)
    total = scan.warp_sum(mine)
    tiles, half = schedule.prefix_word(shared.rest, request)
    rounds = homes.home_rounds(total, blocks, kernel.home_rounds)
    needed = Int32((lane >> Int32(1)) < rounds) * Int32(within < tiles)
    sent = pairs_of(needed)
    needed = needed * (Int32(1) - (lane & Int32(1)) * half * Int32(within == tiles - Int32(1)))
    send_home(kernel, shared, sources, page_code(page, needed, pages, flags), request, within, sent, lane, policy)
    share, uneven = publish_spread(shared.prefix, shared.rest, requests, each, mine, total, blocks, lane, shared.over)
    cute.arch.barrier_arrive(barrier_id=PLAN_BARRIER, number_of_threads=kernel.shape.threads)
    score_trace.mark(kernel, shared, score_trace.PLANNED, lane >= Int32(0))
    rest = shared.prefix
    count = Int32(0)
    cursor = Int32(0)
    last = Int32(0)
    if Uint32(cute.arch.vote_ballot_sync(uneven != Int32(0))) == Uint32(0):
        within, needed, count, cursor, last = homes_behind(
            shared.prefix, request, place, step, sent, share, Int32(BATCH), lane
        )
        page = cute.arch.shuffle_sync(page, homes.least(lane + sent * Int32(2), Int32(31)))
    else:
        rest = shared.rest
        cursor, last = publish_rest(
            rest,
            requests,
            each,
            total,
            request,
            place,
            sent,
            rounds,
            block,
            blocks,
            lane,
            kernel.home_rounds,
            shared.over,
        )
    if faults > Int32(0) and block == Int32(0):
        ptx.red_global(flags, Uint32(1 << schedule.FLAG_BAD_LENGTH), "or")
    return sent, within, page, needed, count, cursor, last, rest


@cute.jit
def stream_keys(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    sources: Any,
    table: Int64,
    table_stride: Int64,
    pages: Int32,
    flags: Int64,
    lens: Any,
    requests: Int32,
    limit: Int32,
    skip: Int32,
    capacity: Int32,
    block: Int32,
    blocks: Int32,
    raw: Any,
    page: Int32,
) -> None:
    """The key warp: the block's tiles into the ring, each with its descriptor (request, tile, sequence), and the end.

    With many requests the plan is there; with few it is made here. raw, page: of `ask_ahead`.
    """
    lane = cute.arch.lane_idx()
    policy = ptx.l2_policy("evict_first")
    stage = Int32(0)
    phase = Int32(1)  # parity 1 passes on a fresh barrier
    sequence = Int32(-1)
    current = Int32(-1)
    within = Int32(0)
    needed = Int32(0)
    count = Int32(0)  # tiles of a batch that is looked up already
    rest = shared.prefix
    cursor = Int32(0)
    last = Int32(0)
    request, _place, _step = shared.over.home_of(block)
    led = Int32(requests <= Int32(schedule.few(kernel.config.next_n)))  # the first request needs no order
    if led != Int32(0):
        sequence = Int32(0)
        current = request
        stage, within, page, needed, count, cursor, last, rest = start_few(
            kernel, shared, sources, pages, flags, lens, requests, limit, skip, block, blocks, raw, page, policy
        )
    else:
        cursor, last = schedule.range_of_many(shared.prefix, requests, capacity, block, blocks)
    more = Int32(count > Int32(0)) | Int32(cursor < last)
    while more != Int32(0):
        if count == Int32(0):
            start = cursor
            cursor = homes.least(last, start + Int32(BATCH))
            count = cursor - start
            near = schedule.find_request_together(rest, requests, start, lane)
            tile = start + (lane >> Int32(1))
            request, within, page, needed = look_up(
                shared, rest, table, table_stride, requests, tile, cursor, lane & Int32(1), near
            )
        code = page_code(page, needed, pages, flags)
        current, sequence, stage, phase = send_batch(
            kernel, shared, sources, code, request, within, count, current, sequence, led, stage, phase, lane, policy
        )
        count = Int32(0)
        more = Int32(cursor < last)
    order_queries(shared, sequence + Int32(1) - led, Int32(NO_REQUEST))
    end_ring(kernel, shared, stage, phase)
