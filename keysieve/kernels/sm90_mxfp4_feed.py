"""The key warp of the sm90 MXFP4 scorer: which tiles a block scores, in which order.

As `sm90_score_feed.stream_keys`, but that blocks are spread over few requests (`schedule_spread`). Where lengths are
even, a block's first sixteen tiles are home tiles, whose page ids are asked for together with the lengths: it sends for
all of them before it waits for memory again.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import ptx, scan, sync
from keysieve.kernels import schedule, score_trace
from keysieve.kernels import schedule_homes as homes
from keysieve.kernels.schedule_spread import homes_behind, pairs_of, publish_rest
from keysieve.kernels.sharding import raw_length
from keysieve.kernels.sm90_mxfp4_config import QUERY_BARRIER
from keysieve.kernels.sm90_mxfp4_query import scale_weights, widen_queries
from keysieve.kernels.sm90_mxfp4_send import send_batch, send_home
from keysieve.kernels.sm90_mxfp4_start import (
    ask_lengths,
    ask_pages,
    count_lengths,
    meet,
    note_all,
    uneven_lengths,
    wait_for_plan,
)
from keysieve.kernels.sm90_score_config import NO_REQUEST
from keysieve.kernels.sm90_score_feed import end_ring, look_up, next_order, page_code, tell_lengths
from keysieve.kernels.sm90_score_load import BATCH
from keysieve.kernels.sm90_score_send import order_queries


@cute.jit
def start_few(
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
    block: Int32,
    blocks: Int32,
    home: Any,
    policy: Int64,
) -> Any:
    """With few requests: the block's first tiles on their way, and the plan for all of the block.

    The first waits for its own request's length and page ids alone; a block has it whatever the other lengths are.
    Returns (tiles sent; of the next batch each lane's tile, page id and whether it is needed, and the number of its
    tiles, 0 if there is none yet; first and last of the range behind it, and the table that numbers it).
    """
    lane = cute.arch.lane_idx()
    request, place, step = home
    own = schedule.raw_lengths(lens, request, kernel.config.next_n)
    page = ask_pages(table, table_stride, limit, request, place, step, lane)
    each, asked = ask_lengths(lens, requests, lane, kernel.config.next_n)
    meet(kernel)
    longest, _faults = schedule.longest_of(lens, own, limit)
    tiles, half = schedule.tiles_and_half(longest, skip)
    within = place + (lane >> Int32(1)) * step
    needed = Int32(within < tiles) * (Int32(1) - (lane & Int32(1)) * half * Int32(within == tiles - Int32(1)))
    code = page_code(page, needed, pages, flags)
    first = Int32(place < tiles)
    send_home(kernel, shared, sources, code, request, within, Int32(0), first, lane, policy)
    counted, mine, _faults = count_lengths(lens, asked, limit, skip)
    total = scan.warp_sum(mine)
    rounds = homes.home_rounds(total, blocks, kernel.home_rounds)
    sent = pairs_of(Int32((lane >> Int32(1)) < rounds) * Int32(within < tiles))
    send_home(kernel, shared, sources, code, request, within, first, sent, lane, policy)
    share = Int32(Uint32(total) // Uint32(blocks))
    share = share + Int32(share * blocks < total)
    uneven = uneven_lengths(requests, each, counted, share, blocks, lane, shared.over)
    wait_for_plan(kernel)
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
        note_all(rest, requests, each, counted, None, lane)
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
    home: Any,
) -> None:
    """The key warp: the block's tiles into the ring, each with its descriptor (request, tile, sequence), and the end.

    With many requests the plan is there; with few it is made here. home: (request, tile, step) of the block.
    """
    lane = cute.arch.lane_idx()
    policy = ptx.l2_policy("evict_first")
    stage = Int32(0)
    phase = Int32(1)  # parity 1 passes on a fresh barrier
    sequence = Int32(-1)
    current = Int32(-1)
    within = Int32(0)
    page = Int32(0)
    needed = Int32(0)
    count = Int32(0)  # tiles of a batch that is looked up already
    rest = shared.prefix
    cursor = Int32(0)
    last = Int32(0)
    request = home[0]
    led = Int32(requests <= Int32(schedule.few(kernel.config.next_n)))  # the first request needs no order
    if led != Int32(0):
        sequence = Int32(0)
        current = request
        stage, within, page, needed, count, cursor, last, rest = start_few(
            kernel,
            shared,
            sources,
            table,
            table_stride,
            pages,
            flags,
            lens,
            requests,
            limit,
            skip,
            block,
            blocks,
            home,
            policy,
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


@cute.jit
def stream_queries(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    words: Int64,
    query: Int64,
    weights: Int64,
    lens: Any,
    limit: Int32,
    requests: Int32,
    capacity: Int32,
    home: Any,
) -> None:
    """The query warp: queries, weights and usable lengths of the requests that the key warp orders.

    All that a request wants of memory is asked for together, before its stage is known to be free. With few requests
    the block's home request is the first, and is asked for before anything else.
    """
    config = kernel.config
    lane = cute.arch.lane_idx()
    request = home[0]
    led = Int32(requests <= Int32(schedule.few(config.next_n)))  # the first request needs no order
    waiting = led
    sequence = Int32(0)
    if waiting == Int32(0):
        request = next_order(shared, Int32(0))
    stage = Int32(0)
    phase = Int32(1)
    while request >= Int32(0):
        row = request * Int32(config.next_n)
        length = Int32(0)
        if lane < Int32(config.next_n):
            length = raw_length(lens, Int64(row + lane) * Int64(4))
        value = widen_queries(kernel, shared, query, words, weights, row, stage, phase, lane, waiting)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.query_full + stage)
        scale_weights(kernel, shared, weights, row, stage, lane, value)
        if waiting != Int32(0):
            cute.arch.barrier(barrier_id=QUERY_BARRIER, number_of_threads=64)
            waiting = Int32(0)
        tell_lengths(kernel, shared, request, length, limit, capacity, stage, lane, lens)
        stage = stage + Int32(1)
        if stage == Int32(kernel.shape.query_stages):
            stage = Int32(0)
            phase = phase ^ Int32(1)
        sequence = sequence + Int32(1)
        request = next_order(shared, sequence - led)
    if sequence == Int32(1):  # if the block has no tile, nobody has waited for these queries
        sync.wait_barrier(shared.query_full, Int32(0))
