"""Producers of the Hopper scorer: one warp streams key pages, one warp streams queries, weights and lengths.

The key warp decides the order of the block's tiles. With few requests it starts on the block's home tiles while it
plans for all (`schedule_homes`), and goes on with the block's range of the rest. A request's queries are ordered from
the query warp when the first of its tiles is sent for. Three kinds of rings: tiles, orders, queries.

A page id outside the pool is never handed to the copy engine; the page's scale words become NaN instead, so that its
logits do.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import ptx, scan, sync
from keysieve.device.paged import page_in_pool, table_entry
from keysieve.kernels import schedule, score_trace
from keysieve.kernels import schedule_homes as homes
from keysieve.kernels.sharding import own_length, raw_length, read_length
from keysieve.kernels.sm90_score_config import NO_REQUEST, ORDERS
from keysieve.kernels.sm90_score_early import init_orders, is_early, more_lengths, send_first
from keysieve.kernels.sm90_score_load import (
    BAD_PAGE,
    BATCH,
    NO_PAGE,
    copy_queries,
    page_views,
    put_weights,
    row_views,
)
from keysieve.kernels.sm90_score_send import order_queries as order_queries
from keysieve.kernels.sm90_score_send import send_each
from keysieve.spec import PAGE

PLAN_BARRIER = 1
"""Named barrier at which a block waits for the plan that its key warp makes of few requests."""


@cute.jit
def look_up(
    shared: Any,
    rest: Uint32,
    table: Int64,
    table_stride: Int64,
    requests: Int32,
    tile: Int32,
    last: Int32,
    second: Int32,
    near: Int32,
) -> Any:
    """(request, tile within it, page id, 1 if the page is needed) of tile `tile` of the numbering that `rest` holds.

    `second` picks its second page. near: a request at or before the tile's. The page id is still on its way.
    """
    request = near
    within = Int32(0)
    page = Int32(0)
    needed = Int32(0)
    if tile < last:
        request = schedule.find_request(rest, requests, tile, near)
        end = schedule.tiles_before(rest, request + Int32(1))
        before, half = schedule.prefix_word(shared.prefix, request)
        within = schedule.tiles_before(shared.prefix, request + Int32(1)) - before - (end - tile)
        needed = Int32(1) - second * half * Int32(tile == end - Int32(1))
        if needed != Int32(0):
            page = ptx.load(table_entry(table, request, table_stride, within * Int32(2) + second), Int32)
    return request, within, page, needed


@cute.jit
def page_code(page: Int32, needed: Int32, pages: Int32, flags: Int64) -> Int32:
    """The page id, or NO_PAGE, or BAD_PAGE (which raises the flag)."""
    code = Int32(NO_PAGE)
    if needed != Int32(0):
        code = page
        if not page_in_pool(page, pages):
            code = Int32(BAD_PAGE)
            ptx.red_global(flags, Uint32(1 << schedule.FLAG_BAD_PAGE), "or")
    return code


@cute.jit
def next_order(shared: Any, number: Int32) -> Int32:
    """The request of order number `number`."""
    slot = number & Int32(ORDERS - 1)
    sync.wait_barrier(shared.order_full + slot, (number // Int32(ORDERS)) & Int32(1))
    request = Int32(ptx.load_shared(shared.orders + Uint32(slot) * Uint32(4)))
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(shared.order_empty + slot)
    return request


@cute.jit
def ask_ahead(
    kernel: cutlass.Constexpr[Any],
    lens: Any,
    table: Int64,
    table_stride: Int64,
    requests: Int32,
    limit: Int32,
    block: Int32,
    blocks: Int32,
    over: Any = None,
) -> Any:
    """With few requests, before anything else: (the first length of the lane's first request, as it stands in memory;
    the page ids of the block's home tiles, two lanes a tile). Nothing waits for them yet.

    Where a cut is `early`, in place of the first: (the first length of each of the lane's requests, the lengths of the
    block's home request)."""
    next_n = kernel.config.next_n
    lane = cute.arch.lane_idx()
    mine = lane * ((requests + Int32(31)) >> Int32(5))
    raw = Int32(0)
    if mine < requests:
        raw = raw_length(lens, Int64(mine) * Int64(4 * next_n))
    request, place, step = homes.home_of(requests, block, blocks, over)
    page = Int32(0)
    column = (place + (lane >> Int32(1)) * step) * Int32(2) + (lane & Int32(1))
    if lane < Int32(2 * kernel.home_rounds) and column < (limit + Int32(PAGE - 1)) >> Int32(6):
        page = ptx.load(table_entry(table, request, table_stride, column), Int32)
    if cutlass.const_expr(is_early(kernel)):
        own = schedule.raw_lengths(lens, request, next_n)
        raw = (more_lengths(lens, requests, mine, raw, next_n), own)
    return raw, page


@cute.jit
def send_tiles(
    kernel: cutlass.Constexpr[Any], shared: Any, key_copy: Any, source: Any, target: Any, batch: Any, gone: Int32
) -> Any:
    """Send for a batch of tiles, in the way of the kernel. gone: how many of them are sent already where `early`."""
    if cutlass.const_expr(is_early(kernel)):
        sent = send_each(kernel, shared, key_copy, source, target, *batch, gone)
    else:
        sent = send_each(kernel, shared, key_copy, source, target, *batch)
    return sent


@cute.jit
def publish_plan(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    requests: Int32,
    each: Int32,
    mine: Int32,
    total: Int32,
    count: Int32,
    rounds: Int32,
    block: Int32,
    blocks: Int32,
    lane: Int32,
    faults: Int32,
    flags: Int64,
) -> Any:
    """The plan of few requests for the block's other warps (a cut that is `early` has told them already), and faults
    among the lengths for the host: the block's range of the tiles that are at home nowhere."""
    cursor, last = homes.publish(
        shared.prefix,
        shared.rest,
        requests,
        each,
        mine,
        total,
        count,
        rounds,
        block,
        blocks,
        lane,
        kernel.home_rounds,
        shared.over,
        is_early(kernel),
    )
    if cutlass.const_expr(not is_early(kernel)):
        cute.arch.barrier_arrive(barrier_id=PLAN_BARRIER, number_of_threads=kernel.shape.threads)
        score_trace.mark(kernel, shared, score_trace.PLANNED, lane >= Int32(0))
    if faults > Int32(0) and block == Int32(0):
        ptx.red_global(flags, Uint32(1 << schedule.FLAG_BAD_LENGTH), "or")
    return cursor, last


@cute.jit
def end_ring(kernel: cutlass.Constexpr[Any], shared: Any, stage: Int32, phase: Int32) -> None:
    """A descriptor without a request for each group of consumers: there are no more tiles."""
    for _group in cutlass.range(kernel.shape.groups, unroll=1):
        sync.wait_barrier(shared.key_empty + stage, phase)
        with cute.arch.elect_one():
            where = shared.descriptors + Uint32(stage) * Uint32(16)
            ptx.store_shared(where, Uint32(Int32(NO_REQUEST)))
            cute.arch.mbarrier_arrive(shared.key_full + stage)
        stage = stage + Int32(1)
        if stage == Int32(kernel.shape.stages):
            stage = Int32(0)
            phase = phase ^ Int32(1)


@cute.jit
def stream_keys(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    key_copy: Any,
    key_pages: Any,
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
    shape = kernel.shape
    lane = cute.arch.lane_idx()
    second = lane & Int32(1)
    policy = ptx.l2_policy("evict_first")
    source, target = page_views(kernel, shared, key_copy, key_pages)
    gone = Int32(0)  # tiles of the batch that are sent already
    stage = Int32(0)
    phase = Int32(1)  # parity 1 passes on a fresh barrier
    sequence = Int32(-1)
    current = Int32(-1)
    within = Int32(0)
    needed = Int32(0)
    count = Int32(0)
    rest = shared.prefix
    each = Int32(0)
    mine = Int32(0)
    total = Int32(0)
    rounds = Int32(0)
    faults = Int32(0)
    cursor = Int32(0)
    last = Int32(0)
    request, place, step = homes.home_of(requests, block, blocks, shared.over)
    led = Int32(requests <= Int32(schedule.few(kernel.config.next_n)))  # the first request needs no order
    waiting = led
    if waiting != Int32(0):
        rest = shared.rest
        sequence = Int32(0)
        current = request
        within = place + (lane >> Int32(1)) * step
        asked = raw
        if cutlass.const_expr(is_early(kernel)):
            asked, own = raw
            gone = send_first(
                kernel, shared, key_copy, source, target, own, page, request, place, pages, limit, skip, policy, lens
            )
            stage = gone
            with cute.arch.elect_one():
                init_orders(shared)
        each, mine, faults = homes.read_lengths(
            lens, requests, limit, skip, shared.rest, lane, asked, kernel.config.next_n
        )
        total = scan.warp_sum(mine)
        if cutlass.const_expr(is_early(kernel)):
            homes.publish_prefix(shared.prefix, shared.rest, requests, each, mine, total, lane)
            cute.arch.barrier_arrive(barrier_id=PLAN_BARRIER, number_of_threads=shape.threads)
            score_trace.mark(kernel, shared, score_trace.PLANNED, lane >= Int32(0))
        tiles, half = schedule.prefix_word(shared.rest, request)
        rounds = homes.home_rounds(total, blocks, kernel.home_rounds)
        count = homes.homes_below(tiles - place, Int32(1), step, rounds, kernel.home_rounds)
        needed = Int32(1) - second * half * Int32(within == tiles - Int32(1))
        needed = needed * Int32((lane >> Int32(1)) < count)
    else:
        cursor, last = schedule.range_of_many(shared.prefix, requests, capacity, block, blocks)
    more = Int32(1)
    while more != Int32(0):
        code = page_code(page, needed, pages, flags)
        batch = (code, request, within, count, current, sequence, led, stage, phase, lane, policy)
        current, sequence, stage, phase = send_tiles(kernel, shared, key_copy, source, target, batch, gone)
        gone = Int32(0)
        if waiting != Int32(0):
            cursor, last = publish_plan(
                kernel, shared, requests, each, mine, total, count, rounds, block, blocks, lane, faults, flags
            )
            waiting = Int32(0)
        start = cursor
        end = homes.least(last, cursor + Int32(BATCH))
        cursor = end
        count = end - start
        more = Int32(count > Int32(0))
        if count > Int32(0):
            near = schedule.find_request_together(rest, requests, start, lane)
            request, within, page, needed = look_up(
                shared, rest, table, table_stride, requests, start + (lane >> Int32(1)), end, second, near
            )
    order_queries(shared, sequence + Int32(1) - led, Int32(NO_REQUEST))
    end_ring(kernel, shared, stage, phase)


@cute.jit
def stream_queries(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    row_copy: Any,
    query_rows: Any,
    weights: Int64,
    lens: Any,
    limit: Int32,
    requests: Int32,
    capacity: Int32,
    block: Int32,
    blocks: Int32,
) -> None:
    """The query warp: queries, weights and usable lengths of the requests that the key warp orders.

    With few requests the block's home request is the first, and is asked for before the plan is there.
    """
    config = kernel.config
    shape = kernel.shape
    lane = cute.arch.lane_idx()
    source, target = row_views(kernel, shared, row_copy, query_rows)
    request, _place, _step = homes.home_of(requests, block, blocks, shared.over)
    led = Int32(requests <= Int32(schedule.few(config.next_n)))  # the first request needs no order
    waiting = led
    sequence = Int32(0)
    if waiting == Int32(0):
        request = next_order(shared, Int32(0))
    stage = Int32(0)
    phase = Int32(1)
    while request >= Int32(0):
        row = request * Int32(config.next_n)
        sync.wait_barrier(shared.query_empty + stage, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(shared.query_full + stage, config.columns * kernel.boxes.row_bytes)
        copy_queries(kernel, row_copy, source, target, request, stage, shared.query_full + stage)
        length = Int32(0)
        if lane < Int32(config.next_n):
            length = read_length(lens, Int64(row + lane) * Int64(4))
        put_weights(kernel, shared, weights, row, stage, lane)
        if waiting != Int32(0):
            cute.arch.barrier(barrier_id=PLAN_BARRIER, number_of_threads=shape.threads)
            waiting = Int32(0)
        tell_lengths(kernel, shared, request, length, limit, capacity, stage, lane)
        stage = stage + Int32(1)
        if stage == Int32(shape.query_stages):
            stage = Int32(0)
            phase = phase ^ Int32(1)
        sequence = sequence + Int32(1)
        request = next_order(shared, sequence - led)
    if sequence == Int32(1):  # if the block has no tile, nobody has waited for these queries
        sync.wait_barrier(shared.query_full, Int32(0))


@cute.jit
def tell_lengths(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    request: Int32,
    length: Int32,
    limit: Int32,
    capacity: Int32,
    stage: Int32,
    lane: Int32,
    lens: Any = None,
) -> None:
    """A request's usable lengths, of which a lane has that of row `lane`, into its query stage, which is complete with
    them. The plan is there. lens: where the lengths came from, if they are `raw_length`'s."""
    after = schedule.tiles_before(shared.prefix, request + Int32(1))
    if lane < Int32(kernel.config.next_n):
        own = length if lens is None else own_length(lens, length)
        usable = schedule.usable_length(own, limit) * Int32(after <= capacity)
        where = shared.lengths + Uint32(stage) * Uint32(32) + Uint32(lane) * Uint32(4)
        ptx.store_shared(where, Uint32(usable))
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(shared.query_full + stage)
