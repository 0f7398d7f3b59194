"""FP8 paged indexer logits on Hopper: one persistent kernel, keys streamed once, all rows of a request per product.

    logit[row, key] = bf16( scale[key] * sum over heads of max(query[row, head] . key, 0) * weight[row, head] )

One block per SM, or two smaller ones. Warps 0 .. 4 * groups - 1 are consumers (`sm90_score_math`), one warpgroup per
tile; behind them one warp streams key tiles and one streams queries, weights and lengths (`sm90_score_feed`). The work
is cut by `schedule`. Shared memory is mapped by `sm90_score_config.smem_map`; a page lies there as its 8,448 bytes, 64
rows of keys and two rows of scale words, brought by one tensor copy with the 128-byte swizzle of the matrix unit.

Barriers: `key_full[s]` one arrival (the producer's, with the bytes), `key_empty[s]` one per warp of the warpgroup that
takes the tile; `query_full[s]` two arrivals (announcement of the copy; weights and lengths written), `query_empty[s]`
one per consumer warp. Consumers release every request in order, also those they had no tile of; after its last tile a
warpgroup releases the request it holds, so that the at most `groups - 1` later requests find room.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float8E4M3FN, Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from keysieve.device import ptx
from keysieve.kernels import schedule, score_trace
from keysieve.kernels import schedule_homes as homes
from keysieve.kernels.score_frame import Frame
from keysieve.kernels.sm90_score_config import (
    HOME_ROUNDS,
    ORDERS,
    PAGE_SLOT,
    PITCHED_TOPS,
    ScoreConfig,
    ScoreShape,
    SmemMap,
    chunks_of,
    shape_of,
    smem_map,
)
from keysieve.kernels.sm90_score_early import init_orders
from keysieve.kernels.sm90_score_feed import PLAN_BARRIER, ask_ahead, stream_keys, stream_queries
from keysieve.kernels.sm90_score_load import PAGES_PER_TILE, Boxes
from keysieve.kernels.sm90_score_math import SCALE_OFFSET, Products, Targets, consume
from keysieve.kernels.sm90_score_rows import RowProducts, copy_sets, set_copy, set_views
from keysieve.kernels.sm90_score_store import store_policy
from keysieve.kernels.sm90_score_weights import halve_weights
from keysieve.spec import HEAD_DIM

PAGE_ROWS = 66
"""A page seen as rows of 128 bytes: 64 keys, then 64 scale words in two rows."""

PAGE_BYTES = PAGE_ROWS * HEAD_DIM


class Shared:
    """Trace-time handles into the block's shared memory: addresses (Uint32) and barrier pointers."""

    def __init__(self, base: Any, places: SmemMap, shape: ScoreShape) -> None:
        self.places = places
        self.base = base
        self.trace: Any = None
        self.over: Any = None
        origin = ptx.smem_addr(base)
        self.keys = origin + Uint32(places.keys)
        self.query = origin + Uint32(places.query)
        self.weights = origin + Uint32(places.weights)
        self.lengths = origin + Uint32(places.lengths)
        self.prefix = origin + Uint32(places.prefix)
        self.rest = origin + Uint32(places.rest)
        self.orders = origin + Uint32(places.orders)
        self.descriptors = origin + Uint32(places.descriptors)
        self.scratch = origin + Uint32(places.scratch)
        barriers = cute.recast_ptr(base + places.barriers, dtype=Int64)
        self.key_full = barriers
        self.key_empty = barriers + shape.stages
        self.query_full = barriers + 2 * shape.stages
        self.query_empty = barriers + 2 * shape.stages + shape.query_stages
        self.order_full = barriers + 2 * (shape.stages + shape.query_stages)
        self.order_empty = barriers + 2 * (shape.stages + shape.query_stages) + ORDERS

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> "Shared":
        return self

    def fp8(self, offset: int, swizzle: Any) -> Any:
        """Pointer to E4M3 bytes at `offset`, carrying the swizzle."""
        return cute.recast_ptr(self.base + offset, swizzle, dtype=Float8E4M3FN)


class ScoreKernel(Frame):
    """The scorer of one configuration; `entry` is what is compiled and called."""

    sends_alike = True
    """Its key warp sends batches of one request in a loop of their own, see `sm90_score_send`."""

    def __init__(self, config: ScoreConfig, shape: ScoreShape | None = None) -> None:
        self.config = config
        self.shape = shape_of(config) if shape is None else shape
        self.places = smem_map(config, self.shape)
        self.chunks = chunks_of(config, self.shape)
        self.key_warp = 4 * self.shape.groups
        self.query_warp = self.key_warp + 1
        self.report_warp = self.key_warp + self.shape.producer_warps - 1
        self.home_rounds = min(HOME_ROUNDS, self.shape.stages - 1)
        self.boxes = Boxes(HEAD_DIM, PAGE_ROWS, PAGE_SLOT, PAGE_BYTES)

    @cute.jit
    def entry(
        self,
        keys: Int64,
        query: Int64,
        weights: Int64,
        lens: Int64,
        table: Int64,
        logits: Int64,
        tops: Int64,
        starts: Int64,
        flags: Int64,
        page_stride: Int64,
        table_stride: Int64,
        pitch: Int64,
        pages: Int32,
        requests: Int32,
        limit: Int32,
        skip: Int32,
        capacity: Int32,
        blocks: Int32,
        use_pdl: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch. Addresses are device byte addresses (0 where unused), see `sm90_score_host` for what they point to.

        page_stride: bytes between pages. table_stride: entries between table rows. pitch: elements between rows of
        pitched logits, or the tile rows of compact ones that L2 is asked to keep. pages: of the pool. limit: longest
        usable length. skip: requests whose longest row is at most this are not scored. capacity: tiles the compact
        buffer holds for every row of a request. blocks: of the grid, were there one a multiprocessor. tops: for
        pitched logits the sharding word in their place. starts: tiles before each request, for the next kernel; for
        pitched logits their maxima, if they have any.
        """
        config = self.config
        stride = cute.assume(page_stride, divby=16)
        pool = cute.make_tensor(
            cute.make_ptr(Float8E4M3FN, keys, AddressSpace.gmem, assumed_align=16),
            cute.make_layout((PAGE_ROWS, HEAD_DIM, pages), stride=(HEAD_DIM, 1, stride)),
        )
        rows = cute.make_tensor(
            cute.make_ptr(Float8E4M3FN, query, AddressSpace.gmem, assumed_align=16),
            cute.make_layout(
                (config.heads, HEAD_DIM, requests * config.next_n), stride=(HEAD_DIM, 1, config.heads * HEAD_DIM)
            ),
        )
        page_box, row_box = self.boxes.tile(PAGE_ROWS), self.boxes.tile(config.heads)
        load = cpasync.CopyBulkTensorTileG2SOp()
        key_copy, key_pages = cpasync.make_tiled_tma_atom(load, pool, page_box, (PAGE_ROWS, HEAD_DIM))
        row_copy, query_rows = cpasync.make_tiled_tma_atom(load, rows, row_box, (config.heads, HEAD_DIM))
        if cutlass.const_expr(self.shape.by_rows):
            row_copy, query_rows = set_copy(load, rows.iterator, requests * config.next_n, config.heads)
        self.kernel.set_name_prefix(f"sm90_score_h{config.heads}_n{config.next_n}_{config.layout}")
        self.kernel(
            key_copy,
            key_pages,
            row_copy,
            query_rows,
            weights,
            lens,
            table,
            logits,
            tops,
            starts,
            flags,
            table_stride,
            pitch,
            pages,
            requests,
            limit,
            skip,
            capacity,
            homes.reciprocal(requests),
        ).launch(
            grid=(blocks * Int32(self.shape.per_sm), 1, 1),
            block=(self.shape.threads, 1, 1),
            stream=stream,
            use_pdl=use_pdl,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        key_copy: Any,
        key_pages: Any,
        row_copy: Any,
        query_rows: Any,
        weights: Int64,
        lens: Int64,
        table: Int64,
        logits: Int64,
        tops: Int64,
        starts: Int64,
        flags: Int64,
        table_stride: Int64,
        pitch: Int64,
        pages: Int32,
        requests: Int32,
        limit: Int32,
        skip: Int32,
        capacity: Int32,
        over: Any,
    ) -> None:
        shape = self.shape
        maxima = self.config.layout == PITCHED_TOPS
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = SmemAllocator().allocate_array(Uint8, self.places.total, byte_alignment=1024)
        shared = Shared(base, self.places, shape)
        shared.trace = starts
        shared.over = over
        score_trace.mark(self, shared, score_trace.START, warp == self.key_warp)
        score_trace.place(self, shared, warp == self.key_warp)
        led = Int32(requests <= Int32(schedule.few(self.config.next_n)))
        ptx.grid_wait()
        ptx.grid_launch_dependents()
        score_trace.mark(self, shared, score_trace.WAITED, warp == self.key_warp)
        lengths = schedule.lengths_of(self.config.layout, lens, tops)
        raw = Int32(0)
        if cutlass.const_expr(shape.early):
            raw = (
                [Int32(0) for _ in range(schedule.few(self.config.next_n) // 32)],
                [Int32(0) for _ in range(self.config.next_n)],
            )
        page = Int32(0)
        if warp == self.key_warp and led != Int32(0):
            raw, page = ask_ahead(self, lengths, table, table_stride, requests, limit, block, blocks, over)
        self.begin(shared, key_copy, row_copy, warp)
        if led == Int32(0):
            if cutlass.const_expr(shape.early):  # noqa: SIM102  # a trace-time test, then a run-time one
                if warp == self.key_warp:
                    with cute.arch.elect_one():
                        init_orders(shared)
            self.plan_many(shared, lengths, flags, requests, limit, skip, thread, block)
        if warp >= self.key_warp:
            if cutlass.const_expr(shape.registers[0] > 0):
                cute.arch.setmaxregister_decrease(shape.registers[0])
            if warp == self.key_warp:
                stream_keys(
                    self,
                    shared,
                    key_copy,
                    key_pages,
                    table,
                    table_stride,
                    pages,
                    flags,
                    lengths,
                    requests,
                    limit,
                    skip,
                    capacity,
                    block,
                    blocks,
                    raw,
                    page,
                )
            elif warp == self.query_warp:
                stream_queries(
                    self, shared, row_copy, query_rows, weights, lengths, limit, requests, capacity, block, blocks
                )
            elif led != Int32(0):
                cute.arch.barrier(barrier_id=PLAN_BARRIER, number_of_threads=shape.threads)
            if warp == self.report_warp and block == Int32(0):
                total = schedule.tiles_before(shared.prefix, requests)
                self.report(shared, Int64(0) if maxima else starts, flags, requests, capacity, total)
        else:
            if cutlass.const_expr(shape.registers[0] > 0):
                cute.arch.setmaxregister_increase(shape.registers[1])
            if led != Int32(0):
                cute.arch.barrier(barrier_id=PLAN_BARRIER, number_of_threads=shape.threads)
            policy = store_policy(schedule.tiles_before(shared.prefix, requests), self.config, pitch)
            targets = Targets(logits, starts if maxima else tops, pitch, policy)
            self.consume(shared, targets, thread, led)

    @cute.jit
    def begin(self, shared: Any, key_copy: Any, row_copy: Any, warp: Int32) -> None:
        """Barriers and descriptors, while the first loads are on their way; the plan's barrier publishes them."""
        shape = self.shape
        if warp == self.key_warp:
            cpasync.prefetch_descriptor(key_copy)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(shape.stages):
                    cute.arch.mbarrier_init(shared.key_full + stage, 1)
                    cute.arch.mbarrier_init(shared.key_empty + stage, 4)
                if cutlass.const_expr(not shape.early):
                    init_orders(shared)
            cute.arch.mbarrier_init_fence()
        if warp == self.query_warp:
            cpasync.prefetch_descriptor(row_copy)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(shape.query_stages):
                    cute.arch.mbarrier_init(shared.query_full + stage, 2)
                    cute.arch.mbarrier_init(shared.query_empty + stage, 4 * shape.groups)
            cute.arch.mbarrier_init_fence()

    def products(self, shared: Any, thread: Int32) -> Any:
        """The matrix products of a consumer thread."""
        return RowProducts(self, shared, thread) if self.shape.by_rows else Products(self, shared, thread)

    def set_views(self, shared: Any, row_copy: Any, query_rows: Any) -> Any:
        """Queries as their copy takes them where a cut is `by_rows`."""
        return set_views(self, shared, row_copy, query_rows)

    def copy_sets(self, row_copy: Any, source: Any, target: Any, request: Int32, stage: Int32, barrier: Any) -> None:
        """Start the copies of a request's queries where a cut is `by_rows`."""
        copy_sets(self, row_copy, source, target, request, stage, barrier)

    def consume(self, shared: Any, targets: Any, thread: Int32, led: Int32) -> None:
        """The work of a consumer thread."""
        consume(self, shared, self.products(shared, thread), targets, thread, led)

    def copy_page(
        self, shared: Any, key_copy: Any, source: Any, target: Any, page: Int32, stage: Int32, half: int, policy: Any
    ) -> None:
        """One box brings keys and scale words; the copy elects a lane itself."""
        hint = {"cache_policy": policy} if self.shape.evict_first else {}
        slot = stage * PAGES_PER_TILE + half
        cute.copy(key_copy, source[(None, page)], target[(None, slot)], tma_bar_ptr=shared.key_full + stage, **hint)

    def scale_words(self, shared: Any, slot: Int32) -> Uint32:
        """Shared address of the 64 scale words of a page of the ring: behind its keys."""
        return shared.keys + Uint32(slot) * Uint32(PAGE_SLOT) + Uint32(SCALE_OFFSET)

    def put_weights(self, shared: Any, weights: Int64, row: Int32, stage: Int32, lane: Int32) -> None:
        """Head weights of the request whose first row is `row`, into a query stage."""
        place = shared.weights + Uint32(stage) * Uint32(self.places.weight_bytes)
        halve_weights(self.config, place, weights, row, lane, by_rows=self.shape.by_rows)


def build(config: ScoreConfig, arch: str) -> tuple[Any, tuple[Any, ...]]:
    """The jit function of `config` and its fake arguments."""
    if arch != "sm_90a":
        raise ValueError(f"sm90_score for {arch}: its matrix instructions exist on sm_90a alone")
    kernel = ScoreKernel(config)
    return kernel.entry, fake_arguments()


def fake_arguments() -> tuple[Any, ...]:
    """Arguments of `ScoreKernel.entry` to compile with: nine addresses, three strides, seven numbers, a stream."""
    return (*(Int64(0) for _ in range(12)), *(Int32(1) for _ in range(7)), make_fake_stream())
