"""How the scorers' key warp fills the ring: the tiles of a batch, in order, each when its stage is free."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import ptx, sync
from keysieve.kernels import score_trace
from keysieve.kernels.sm90_score_config import ORDERS
from keysieve.kernels.sm90_score_early import is_early
from keysieve.kernels.sm90_score_load import BAD_PAGE, PAGES_PER_TILE, copy_page, scale_words, spoil_scales


@cute.jit
def send_tile(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    key_copy: cute.CopyAtom,
    source: cute.Tensor,
    target: cute.Tensor,
    code: Int32,
    index: Int32,
    owner: Int32,
    tile: Int32,
    sequence: Int32,
    stage: Int32,
    lane: Int32,
    policy: Int64,
) -> None:
    """Fill a free stage: the descriptor (request, tile, sequence) and the copies of the pages in lanes 2 * index .."""
    codes = [
        cute.arch.make_warp_uniform(cute.arch.shuffle_sync(code, index * Int32(PAGES_PER_TILE) + Int32(page)))
        for page in range(PAGES_PER_TILE)
    ]
    nbytes = Int32(0)
    for page in cutlass.range_constexpr(PAGES_PER_TILE):
        nbytes = nbytes + Int32(codes[page] >= Int32(0)) * Int32(kernel.boxes.page_bytes)
        if codes[page] == Int32(BAD_PAGE):
            spoil_scales(scale_words(kernel, shared, stage * PAGES_PER_TILE + page), lane)
    with cute.arch.elect_one():
        place = shared.descriptors + Uint32(stage) * Uint32(16)
        ptx.store_shared_v4(place, Uint32(owner), Uint32(tile), Uint32(sequence), Uint32(0))
        if nbytes > Int32(0):
            cute.arch.mbarrier_arrive_and_expect_tx(shared.key_full + stage, nbytes)
        else:  # no page of the tile is inside the pool
            cute.arch.mbarrier_arrive(shared.key_full + stage)
    for page in cutlass.range_constexpr(PAGES_PER_TILE):
        if codes[page] >= Int32(0):
            copy_page(kernel, shared, key_copy, source, target, codes[page], stage, page, policy)


@cute.jit
def send_each(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    key_copy: cute.CopyAtom,
    source: cute.Tensor,
    target: cute.Tensor,
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
    gone: Any = 0,
) -> Any:
    """Send the first `count` tiles of a batch one by one; lanes 2 i and 2 i + 1 hold tile i's pages (`code`).

    request, within: the lane's tile. current, sequence: the request sent last and its number. stage, phase: of the next
    place in the ring. gone: tiles of the batch that are sent already. Returns the four anew.
    """
    begun = Int32(0)
    if cutlass.const_expr(getattr(kernel, "sends_alike", False)):
        begun, current, sequence, stage, phase = send_alike(
            kernel,
            shared,
            key_copy,
            source,
            target,
            code,
            request,
            within,
            count,
            current,
            sequence,
            led,
            stage,
            phase,
            lane,
            policy,
            gone,
        )
    if cutlass.const_expr(is_early(kernel)):  # noqa: SIM102  # a trace-time test, then a run-time one
        if begun == Int32(0):
            begun = gone
    for index in cutlass.range(begun, count, unroll=1):
        owner = cute.arch.shuffle_sync(request, index * Int32(2))
        tile = cute.arch.shuffle_sync(within, index * Int32(2))
        if owner != current:
            sequence = sequence + Int32(1)
            order_queries(shared, sequence - led, owner)
        current = owner
        sync.wait_barrier(shared.key_empty + stage, phase)
        send_tile(kernel, shared, key_copy, source, target, code, index, owner, tile, sequence, stage, lane, policy)
        score_trace.mark_first(kernel, shared, score_trace.COPYING)
        stage = stage + Int32(1)
        if stage == Int32(kernel.shape.stages):
            stage = Int32(0)
            phase = phase ^ Int32(1)
    return current, sequence, stage, phase


@cute.jit
def send_alike(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    key_copy: cute.CopyAtom,
    source: cute.Tensor,
    target: cute.Tensor,
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
    gone: Any = 0,
) -> Any:
    """What `send_each` does, in half its instructions, for a batch of one request's tiles whose pages are all there.

    Beside consumers that keep the issue slots busy a key warp is soon too slow. Returns (tiles sent: `count` or 0; the
    four anew).
    """
    owner = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(request, 0))
    other = Int32(lane < count * Int32(PAGES_PER_TILE)) & (Int32(request != owner) | Int32(code < Int32(0)))
    apart = cute.arch.make_warp_uniform(Int32(cute.arch.vote_ballot_sync(other != Int32(0))))
    sent = cutlass.select_(apart == Int32(0), count, Int32(0))
    if sent > Int32(0):
        if owner != current:
            sequence = sequence + Int32(1)
            order_queries(shared, sequence - led, owner)
        current = owner
    for index in cutlass.range(gone, sent, unroll=1):
        first = index * Int32(PAGES_PER_TILE)
        tile = cute.arch.shuffle_sync(within, first)
        low = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(code, first))
        high = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(code, first + Int32(1)))
        sync.wait_barrier(shared.key_empty + stage, phase)
        with cute.arch.elect_one():
            place = shared.descriptors + Uint32(stage) * Uint32(16)
            ptx.store_shared_v4(place, Uint32(current), Uint32(tile), Uint32(sequence), Uint32(0))
            cute.arch.mbarrier_arrive_and_expect_tx(shared.key_full + stage, PAGES_PER_TILE * kernel.boxes.page_bytes)
        copy_page(kernel, shared, key_copy, source, target, low, stage, 0, policy)
        copy_page(kernel, shared, key_copy, source, target, high, stage, 1, policy)
        score_trace.mark_first(kernel, shared, score_trace.COPYING)
        stage = stage + Int32(1)
        if stage == Int32(kernel.shape.stages):
            stage = Int32(0)
            phase = phase ^ Int32(1)
    return sent, current, sequence, stage, phase


@cute.jit
def order_queries(shared: Any, number: Int32, request: Int32) -> None:
    """Order number `number` to the query warp: the request that comes next (NO_REQUEST: none any more)."""
    slot = number & Int32(ORDERS - 1)
    sync.wait_barrier(shared.order_empty + slot, ((number // Int32(ORDERS)) & Int32(1)) ^ Int32(1))
    with cute.arch.elect_one():
        ptx.store_shared(shared.orders + Uint32(slot) * Uint32(4), Uint32(request))
        cute.arch.mbarrier_arrive(shared.order_full + slot)
