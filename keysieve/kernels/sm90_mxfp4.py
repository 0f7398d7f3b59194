"""MXFP4 paged indexer logits on Hopper: the frame of `sm90_score`, with keys widened to E4M3 in registers.

A page lies in the ring as its 4,352 bytes. The query warp widens a request's queries once, into shared memory; nothing
of them is brought by the copy engine. See `sm90_mxfp4_scales` for the numbers.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import ptx
from keysieve.kernels.schedule_spread import spread
from keysieve.kernels.sm90_mxfp4_config import PAGE_SLOT, SCALE_PLACE, WideMap, plain_tiles, shape_of, smem_map
from keysieve.kernels.sm90_mxfp4_consume import consume as consume_late
from keysieve.kernels.sm90_mxfp4_feed import stream_keys
from keysieve.kernels.sm90_mxfp4_math import WideProducts
from keysieve.kernels.sm90_mxfp4_places import place_tiles
from keysieve.kernels.sm90_mxfp4_query import scale_weights, widen_queries, write_table
from keysieve.kernels.sm90_mxfp4_rows import WideRows
from keysieve.kernels.sm90_mxfp4_send import Pages
from keysieve.kernels.sm90_score import ScoreKernel, Shared, fake_arguments
from keysieve.kernels.sm90_score_config import HOME_ROUNDS, ScoreConfig, ScoreShape, chunks_of
from keysieve.kernels.sm90_score_load import Boxes
from keysieve.kernels.sm90_score_math import consume
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

    asks_all = True

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
            pages,
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

    def shared_memory(self, base: Any) -> Any:
        """Handles into the block's shared memory."""
        return WideShared(base, smem_map(self.config, self.shape), self.shape)

    @cute.jit
    def begin(self, shared: Any, key_copy: Any, row_copy: Any, warp: Int32) -> None:
        """Barriers, descriptors, and the table of widened codes, which the query warp is the first to read."""
        ScoreKernel.begin(self, shared, key_copy, row_copy, warp)
        if warp == self.query_warp:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.shape.stages):
                    cute.arch.mbarrier_init(shared.landed + stage, 1)
            cute.arch.mbarrier_init_fence()
            write_table(shared.table)

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

    def stream_keys(self, shared: Any, sources: Any, pages: Any, *arguments: Any) -> None:
        """The work of the key warp."""
        del pages
        stream_keys(self, shared, sources, *arguments)

    def home_of(self, requests: Int32, block: Int32, blocks: Int32, over: Any) -> tuple[Int32, Int32, Int32]:
        """Blocks are spread: `over` is a `schedule_spread.Spread`, and knows both numbers."""
        del requests, blocks
        home: tuple[Int32, Int32, Int32] = over.home_of(block)
        return home

    def prefetch_pages(self, key_copy: Any) -> None:
        """Pages have no descriptor."""

    def prefetch_rows(self, row_copy: Any) -> None:
        """Queries have no descriptor."""

    def scale_words(self, shared: Any, slot: Int32) -> Uint32:
        """Shared address of the 64 scale words of a page of the ring: behind its keys."""
        return shared.keys + Uint32(slot) * Uint32(PAGE_SLOT) + Uint32(SCALE_PLACE)

    def widen_rows(self, shared: Any, words: Int64, query: Int64, row: Int32, stage: Int32, lane: Int32) -> None:
        """Queries of the request whose first row is `row`, into a query stage."""
        widen_queries(self, shared, query, words, row, stage, lane)

    def put_weights(self, shared: Any, weights: Int64, row: Int32, stage: Int32, lane: Int32) -> None:
        """Head weights of the request whose first row is `row`, into a query stage."""
        scale_weights(self, shared, weights, row, stage, lane)


def build(config: ScoreConfig, arch: str) -> tuple[Any, tuple[Any, ...]]:
    """The jit function of `config` and its fake arguments."""
    if arch != "sm_90a":
        raise ValueError(f"sm90_mxfp4 for {arch}: its matrix instructions exist on sm_90a alone")
    kernel = Mxfp4Kernel(config)
    return kernel.entry_mxfp4, (Int64(0), *fake_arguments())
