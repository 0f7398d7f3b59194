"""MXFP4 paged indexer logits on Hopper: the frame of `sm90_score`, with keys widened to E4M3 in registers.

A page lies in the ring as its 4,352 bytes. The query warp widens a request's queries once, into shared memory; nothing
of them is brought by the copy engine. See `sm90_mxfp4_scales` for the numbers.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32
from cutlass.memory import SmemAllocator

from keysieve.device import ptx
from keysieve.kernels import schedule, score_trace
from keysieve.kernels.schedule_spread import spread
from keysieve.kernels.sm90_mxfp4_config import PAGE_SLOT, SCALE_PLACE, WideMap, plain_tiles, shape_of, smem_map
from keysieve.kernels.sm90_mxfp4_consume import consume as consume_late
from keysieve.kernels.sm90_mxfp4_feed import stream_keys, stream_queries
from keysieve.kernels.sm90_mxfp4_math import WideProducts
from keysieve.kernels.sm90_mxfp4_places import place_tiles
from keysieve.kernels.sm90_mxfp4_query import write_table
from keysieve.kernels.sm90_mxfp4_rows import WideRows
from keysieve.kernels.sm90_mxfp4_send import Pages
from keysieve.kernels.sm90_mxfp4_start import make_barriers, meet, plan_few, wait_for_plan
from keysieve.kernels.sm90_score import ScoreKernel, Shared, fake_arguments
from keysieve.kernels.sm90_score_config import HOME_ROUNDS, ScoreConfig, ScoreShape, chunks_of
from keysieve.kernels.sm90_score_load import Boxes
from keysieve.kernels.sm90_score_math import Targets, consume
from keysieve.kernels.sm90_score_store import store_policy
from keysieve.spec import HEAD_DIM


class WideShared(Shared):
    """And the addresses of what `WideMap` adds."""

    def __init__(self, base: Any, places: WideMap, shape: ScoreShape) -> None:
        super().__init__(base, places, shape)
        origin = ptx.smem_addr(base)
        self.table = origin + Uint32(places.table)
        self.factors = origin + Uint32(places.factors)
        self.codes = origin + Uint32(places.codes)
        self.marks = origin + Uint32(places.marks)
        self.area = origin + Uint32(places.area)
        self.landed = cute.recast_ptr(base + places.ready, dtype=Int64)


class Mxfp4Kernel(ScoreKernel):
    """The scorer of one configuration; `entry_mxfp4` is what is compiled and called."""

    def __init__(self, config: ScoreConfig, shape: ScoreShape | None = None) -> None:
        self.config = config
        self.shape = shape_of(config) if shape is None else shape
        self.places = smem_map(config, self.shape)
        self.chunks = chunks_of(config, self.shape)
        self.key_warp = 4 * self.shape.groups
        self.query_warp = self.key_warp + 1
        self.report_warp = self.key_warp + self.shape.producer_warps - 1
        self.home_rounds = min(HOME_ROUNDS, self.shape.stages - 1)
        self.boxes = Boxes(HEAD_DIM, PAGE_SLOT // HEAD_DIM, PAGE_SLOT, PAGE_SLOT)

    @cute.jit
    def entry_mxfp4(
        self,
        words: Int64,
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
        """Launch. words: device address of the queries' scale words; the rest as in `ScoreKernel.entry`."""
        config = self.config
        sources = Pages(keys, page_stride)
        self.kernel.set_name_prefix(f"sm90_mxfp4_h{config.heads}_n{config.next_n}_{config.layout}")
        self.kernel(
            sources,
            words,
            query,
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
            spread(requests, blocks),
        ).launch(
            grid=(blocks, 1, 1),
            block=(self.shape.threads, 1, 1),
            stream=stream,
            use_pdl=use_pdl,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        sources: Any,
        words: Int64,
        query: Int64,
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
        """As `ScoreKernel.kernel`, but that every producer warp begins with what it alone can do."""
        shape = self.shape
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = SmemAllocator().allocate_array(Uint8, self.places.total, byte_alignment=1024)
        shared = WideShared(base, smem_map(self.config, shape), shape)
        shared.trace = starts
        shared.over = over
        score_trace.mark(self, shared, score_trace.START, warp == self.key_warp)
        score_trace.place(self, shared, warp == self.key_warp)
        led = Int32(requests <= Int32(schedule.few(self.config.next_n)))
        ptx.grid_wait()
        ptx.grid_launch_dependents()
        score_trace.mark(self, shared, score_trace.WAITED, warp == self.key_warp)
        lengths = schedule.lengths_of(self.config.layout, lens, tops)
        home = over.home_of(block)
        if led == Int32(0):
            make_barriers(self, shared, warp)
            if warp == self.query_warp:
                write_table(shared.table)
            self.plan_many(shared, lengths, flags, requests, limit, skip, thread, block)
        if warp >= self.key_warp:
            cute.arch.setmaxregister_decrease(shape.registers[0])
            if warp == self.key_warp:
                where = (table, table_stride, pages, flags, lengths, requests, limit, skip, capacity)
                stream_keys(self, shared, sources, *where, block, blocks, home)
            elif warp == self.query_warp:
                stream_queries(self, shared, words, query, weights, lengths, limit, requests, capacity, home)
            elif led != Int32(0):
                if warp == self.report_warp:
                    plan_few(self, shared, flags, lengths, requests, limit, skip, block)
                else:
                    make_barriers(self, shared, Int32(self.query_warp + 1))
                    meet(self)
                wait_for_plan(self)
            if warp == self.report_warp and block == Int32(0):
                total = schedule.tiles_before(shared.prefix, requests)
                self.report(shared, starts, flags, requests, capacity, total)
            self.assist(shared, warp)
        else:
            cute.arch.setmaxregister_increase(shape.registers[1])
            if led != Int32(0):
                wait_for_plan(self)
            policy = store_policy(schedule.tiles_before(shared.prefix, requests), self.config, pitch)
            self.consume(shared, Targets(logits, tops, pitch, policy), thread, led)

    def products(self, shared: Any, thread: Int32) -> Any:
        """Keys come from registers."""
        return WideRows(self, shared, thread) if self.shape.by_rows else WideProducts(self, shared, thread)

    def consume(self, shared: Any, targets: Any, thread: Int32, led: Int32) -> None:
        """The work of a consumer thread: where one product takes all rows, results follow a tile late."""
        run = consume_late if plain_tiles(self.config, self.shape) else consume
        run(self, shared, self.products(shared, thread), targets, thread, led)

    @cute.jit
    def assist(self, shared: Any, warp: Int32) -> None:
        """The last two producer warps work out what the scales of landed tiles say."""
        if warp > self.query_warp:
            place_tiles(self, shared, warp - Int32(self.query_warp + 1))

    def scale_words(self, shared: Any, slot: Int32) -> Uint32:
        """Shared address of the 64 scale words of a page of the ring: behind its keys."""
        return shared.keys + Uint32(slot) * Uint32(PAGE_SLOT) + Uint32(SCALE_PLACE)


def build(config: ScoreConfig, arch: str) -> tuple[Any, tuple[Any, ...]]:
    """The jit function of `config` and its fake arguments."""
    if arch != "sm_90a":
        raise ValueError(f"sm90_mxfp4 for {arch}: its matrix instructions exist on sm_90a alone")
    kernel = Mxfp4Kernel(config)
    return kernel.entry_mxfp4, (Int64(0), *fake_arguments())
