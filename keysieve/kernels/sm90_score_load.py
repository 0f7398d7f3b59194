"""Producers of the scorers: one warp streams key pages, one warp streams queries, weights and lengths.

What differs between the architectures, the kernel that is passed in knows: `boxes` (how a page lies in global and in
shared memory), `copy_page`, `scale_words` (where the 64 scale words of a page stand in a stage) and `put_weights` (the
form in which its consumers read the head weights).

The key warp looks 16 tiles ahead: each lane owns one page of the next batch, finds its request in the prefix table and
loads its page id a whole batch before it is used, however short the requests are. A page id outside the pool is never
handed to the copy engine; the page's scale words become NaN instead, so that its logits do.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from keysieve.device import ptx, sync
from keysieve.device.paged import page_in_pool, table_entry
from keysieve.kernels import schedule, score_trace
from keysieve.kernels.sharding import read_length
from keysieve.spec import PAGE, TILE

BATCH = 16
"""Tiles looked up together: two lanes each."""

PAGES_PER_TILE = TILE // PAGE
NO_PAGE = -1
"""Lane code of a page that the request does not need."""
BAD_PAGE = -2
"""Lane code of a needed page whose id is outside the pool."""
NAN_WORD = 0xFFFFFFFF
"""A scale word that reads as NaN in every format."""


@dataclass(frozen=True)
class Boxes:
    """What the tensor copies move. row_bytes: of a key or query row, 128 or 64, and the width of the swizzle.

    page_rows: rows that one box brings of a page. slot_bytes: shared bytes from one page of the ring to the next.
    page_bytes: all bytes that arrive for a page, whoever copies them.
    """

    row_bytes: int
    page_rows: int
    slot_bytes: int
    page_bytes: int

    def swizzle(self) -> Any:
        """The swizzle of the copy engine and the matrix unit for rows of this width: 16-byte chunks by row number."""
        return cute.make_swizzle({128: 3, 64: 2}[self.row_bytes], 4, 3)

    def tile(self, rows: int) -> Any:
        """`rows` rows as one box lays them out in shared memory."""
        return cute.make_composed_layout(
            self.swizzle(), 0, cute.make_layout((rows, self.row_bytes), stride=(self.row_bytes, 1))
        )


@cute.jit
def look_up(
    shared: Any,
    table: Int64,
    table_stride: Int64,
    pages: Int32,
    flags: Int64,
    requests: Int32,
    tile: Int32,
    last: Int32,
    second: Int32,
    near: Int32,
) -> Any:
    """(request, tile within it, page id or code) of global tile `tile`; `second` picks its second page.

    near: a request at or before the tile's.
    """
    request = Int32(0)
    within = Int32(0)
    code = Int32(NO_PAGE)
    if tile < last:
        request = schedule.find_request(shared.prefix, requests, tile, near)
        before, half = schedule.prefix_word(shared.prefix, request)
        after = schedule.tiles_before(shared.prefix, request + Int32(1))
        within = tile - before
        unneeded = second * half * Int32(tile == after - Int32(1))
        if unneeded == Int32(0):
            code = ptx.load(table_entry(table, request, table_stride, within * Int32(2) + second), Int32)
            if not page_in_pool(code, pages):
                code = Int32(BAD_PAGE)
                ptx.red_global(flags, Uint32(1 << schedule.FLAG_BAD_PAGE), "or")
    return request, within, code


@cute.jit
def stream_keys(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    key_copy: cute.CopyAtom,
    key_pages: cute.Tensor,
    table: Int64,
    table_stride: Int64,
    pages: Int32,
    flags: Int64,
    requests: Int32,
    first: Int32,
    last: Int32,
) -> None:
    """The key warp: tiles first..last-1 into the ring, in order, each with its descriptor (request, tile, sequence)."""
    shape = kernel.shape
    lane = cute.arch.lane_idx()
    second = lane & Int32(1)
    policy = ptx.l2_policy("evict_first")
    source, target = page_views(kernel, shared, key_copy, key_pages)
    stage = Int32(0)
    phase = Int32(1)  # parity 1 passes on a fresh barrier
    sequence = Int32(-1)
    current = Int32(-1)
    near = schedule.find_request_together(shared.prefix, requests, first, lane)
    request, within, code = look_up(
        shared, table, table_stride, pages, flags, requests, first + (lane >> Int32(1)), last, second, near
    )
    first_tile = cute.arch.shuffle_sync(within, Int32(0))
    for begin in cutlass.range(first, last, BATCH, unroll=1):
        ahead = begin + Int32(BATCH) + (lane >> Int32(1))
        near = cute.arch.shuffle_sync(request, Int32(2 * BATCH - 1))
        next_request, next_within, next_code = look_up(
            shared, table, table_stride, pages, flags, requests, ahead, last, second, near
        )
        count = last - begin
        if count > Int32(BATCH):
            count = Int32(BATCH)
        for index in cutlass.range(count, unroll=1):
            owner = cute.arch.shuffle_sync(request, index * Int32(2))
            tile = cute.arch.shuffle_sync(within, index * Int32(2))
            codes = [
                cute.arch.make_warp_uniform(cute.arch.shuffle_sync(code, index * Int32(2) + Int32(page)))
                for page in range(PAGES_PER_TILE)
            ]
            sequence = sequence + Int32(owner != current)
            current = owner
            sync.wait_barrier(shared.key_empty + stage, phase)
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
            score_trace.mark(kernel, shared, score_trace.COPYING, sequence == Int32(0) and tile == first_tile)
            stage = stage + Int32(1)
            if stage == Int32(shape.stages):
                stage = Int32(0)
                phase = phase ^ Int32(1)
        request = next_request
        within = next_within
        code = next_code


# Calls of the kernel's own methods stand in functions: inside a run-time loop the DSL would take the kernel for a value
# that the loop changes.


def copy_page(
    kernel: Any,
    shared: Any,
    key_copy: Any,
    source: Any,
    target: Any,
    page: Int32,
    stage: Int32,
    half: int,
    policy: Int64,
) -> None:
    """Start the copies of pool page `page` into half `half` of a stage; they complete on `key_full[stage]`."""
    kernel.copy_page(shared, key_copy, source, target, page, stage, half, policy)


def scale_words(kernel: Any, shared: Any, slot: Int32) -> Any:
    """Shared address of the 64 scale words of the ring's page `slot`."""
    return kernel.scale_words(shared, slot)


def put_weights(kernel: Any, shared: Any, weights: Int64, row: Int32, stage: Int32, lane: Int32) -> None:
    """Head weights of the request whose first row is `row`, into a query stage; the whole warp."""
    kernel.put_weights(shared, weights, row, stage, lane)


def page_views(kernel: Any, shared: Any, key_copy: Any, key_pages: Any) -> tuple[Any, Any]:
    """(global pages by id, ring slots by number) as the tensor copy wants them."""
    boxes = kernel.boxes
    slots = kernel.shape.stages * PAGES_PER_TILE
    layout = cute.make_layout((boxes.page_rows, boxes.row_bytes, slots), stride=(boxes.row_bytes, 1, boxes.slot_bytes))
    ring = cute.make_tensor(shared.fp8(kernel.places.keys, boxes.swizzle()), layout)
    pool = cute.local_tile(key_pages, (boxes.page_rows, boxes.row_bytes), (0, 0, None))
    target, source = cpasync.tma_partition(
        key_copy, 0, cute.make_layout(1), cute.group_modes(ring, 0, 2), cute.group_modes(pool, 0, 2)
    )
    return source, target


@cute.jit
def spoil_scales(words: Uint32, lane: Int32) -> None:
    """Make 64 scale words of a ring slot NaN. Later copies into the slot come from the async proxy: fence."""
    for half in cutlass.range_constexpr(2):
        where = words + Uint32(lane * Int32(4) + Int32(PAGE * 2 * half))
        ptx.store_shared(where, Uint32(NAN_WORD))
    ptx.fence_async_shared()
    cute.arch.sync_warp()


@cute.jit
def stream_queries(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    row_copy: cute.CopyAtom,
    query_rows: cute.Tensor,
    weights: Int64,
    lens: Any,
    limit: Int32,
    requests: Int32,
    capacity: Int32,
    first: Int32,
    last: Int32,
) -> None:
    """The query warp: for every request with a tile in first..last-1, its queries, weights and usable lengths."""
    config = kernel.config
    shape = kernel.shape
    lane = cute.arch.lane_idx()
    source, target = row_views(kernel, shared, row_copy, query_rows)
    request = schedule.find_request_together(shared.prefix, requests, first, lane)
    stage = Int32(0)
    phase = Int32(1)
    more = Int32(1)
    while more != Int32(0):
        after = schedule.tiles_before(shared.prefix, request + Int32(1))
        row = request * Int32(config.next_n)
        sync.wait_barrier(shared.query_empty + stage, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(shared.query_full + stage, config.columns * kernel.boxes.row_bytes)
        for part in cutlass.range_constexpr(config.next_n):
            cute.copy(
                row_copy,
                source[(None, row + Int32(part))],
                target[(None, part, stage)],
                tma_bar_ptr=shared.query_full + stage,
            )
        put_weights(kernel, shared, weights, row, stage, lane)
        if lane < Int32(config.next_n):
            length = read_length(lens, Int64(row + lane) * Int64(4))
            usable = schedule.usable_length(length, limit) * Int32(after <= capacity)
            where = shared.lengths + Uint32(stage) * Uint32(32) + Uint32(lane) * Uint32(4)
            ptx.store_shared(where, Uint32(usable))
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.query_full + stage)
        stage = stage + Int32(1)
        if stage == Int32(shape.query_stages):
            stage = Int32(0)
            phase = phase ^ Int32(1)
        more = Int32(after < last)
        if after < last:
            request = schedule.find_request(shared.prefix, requests, after, request + Int32(1))


def widen_rows(kernel: Any, shared: Any, words: Any, query: Any, row: Int32, stage: Int32, lane: Int32) -> None:
    """Where a kernel has queries written by this warp instead of the copy engine: fenced, the warp together."""
    kernel.widen_rows(shared, words, query, row, stage, lane)


def row_views(kernel: Any, shared: Any, row_copy: Any, query_rows: Any) -> tuple[Any, Any]:
    """(global query rows by number, held rows by (row of the request, stage)) as the tensor copy wants them.

    Both as they came where the kernel writes queries itself.
    """
    if hasattr(kernel, "widen_rows"):
        return row_copy, query_rows
    heads, boxes = kernel.config.heads, kernel.boxes
    layout = cute.make_layout(
        (heads, boxes.row_bytes, kernel.config.next_n, kernel.shape.query_stages),
        stride=(boxes.row_bytes, 1, heads * boxes.row_bytes, kernel.places.query_bytes),
    )
    held = cute.make_tensor(shared.fp8(kernel.places.query, boxes.swizzle()), layout)
    rows = cute.local_tile(query_rows, (heads, boxes.row_bytes), (0, 0, None))
    target, source = cpasync.tma_partition(
        row_copy, 0, cute.make_layout(1), cute.group_modes(held, 0, 2), cute.group_modes(rows, 0, 2)
    )
    return source, target
