"""Paged indexer logits on Blackwell (sm_100a, sm_103a): tcgen05 products, sums in tensor memory.

Compiled and inspected, not run: no device of this kind has been at hand.

    logit[row, key] = bf16( scale[key] * sum over heads of max(query[row, head] . key, 0) * weight[row, head] )

The frame is the Hopper scorer's: one persistent block per SM, work cut by `schedule`, the same producers
(`sm90_score_feed`), the same stores. What is Blackwell's own:

* a page comes as a tensor copy of its 64 key rows, so that two pages make one operand of 128 rows, and a bulk copy of
  its 64 scale words beside it;
* one warp issues all products (`sm100_score_math.multiply`); two warpgroups read the sums (`finish`);
* MXFP4: block-scaled products; one warp puts the keys' scale words in the unit's order (`sm100_score_feed`).

Warps 0..7: two epilogue groups; 8: keys; 9: queries; 10: products; 11: barriers, tensor memory, scale words.

Barriers and their arrivals, a phase:
  key_full       the key warp's (with the bytes)
  key_empty      the commit of the tile's products, and a warp's each time a group has read the tile's words: once per
                 product, four warps
  scales_ready   (MXFP4) the scale warp's
  query_full     the query warp's two: the announced copy; weights, lengths and scale words written
  query_empty    the commit when the matrix warp goes on to the next request, and every epilogue warp's
  order_full     the key warp's: which request comes next
  order_empty    the query warp's
  sum_full       the commit of the product
  sum_empty      the four warps of the group that the accumulator belongs to
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float8E4M3FN, Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from keysieve.device import ptx, tcgen05
from keysieve.device.paged import page_base
from keysieve.kernels import schedule, sm100_score_feed
from keysieve.kernels import schedule_homes as homes
from keysieve.kernels.score_cut import HOME_ROUNDS, ORDERS, PAGES_PER_TILE, chunks_of
from keysieve.kernels.score_frame import Frame, Work
from keysieve.kernels.sm90_score_feed import PLAN_BARRIER, ask_ahead, stream_keys, stream_queries
from keysieve.kernels.sm90_score_load import Boxes
from keysieve.kernels.sm90_score_math import Targets
from keysieve.kernels.sm100_score_config import (
    ARCHS,
    GROUPS,
    KEY_WARP,
    MATRIX_WARP,
    QUERY_WARP,
    SETUP_WARP,
    WARPS,
    ScoreConfig,
    ScoreShape,
    SmemMap,
    shape_of,
    smem_map,
    tensor_map,
)
from keysieve.kernels.sm100_score_math import finish, multiply
from keysieve.spec import PAGE


class Shared:
    """Trace-time handles: addresses (Uint32) and barriers in shared memory, and where the copies' sources lie.

    scale_source: address of page 0's scale words. query_words: of the queries' scale words (MXFP4).
    """

    def __init__(
        self, base: Any, places: SmemMap, shape: ScoreShape, keys: Int64, page_stride: Int64, query_words: Int64
    ) -> None:
        self.base = base
        self.over: Any = None
        origin = ptx.smem_addr(base)
        self.origin = origin
        self.scales = origin + Uint32(places.scales)
        self.weights = origin + Uint32(places.weights)
        self.lengths = origin + Uint32(places.lengths)
        self.prefix = origin + Uint32(places.prefix)
        self.rest = origin + Uint32(places.rest)
        self.orders = origin + Uint32(places.orders)
        self.descriptors = origin + Uint32(places.descriptors)
        self.scratch = origin + Uint32(places.scratch)
        self.tensor = origin + Uint32(places.tensor)
        barriers = cute.recast_ptr(base + places.barriers, dtype=Int64)
        self.key_full = barriers
        self.key_empty = self.key_full + shape.stages
        self.scales_ready = self.key_empty + shape.stages
        self.query_full = self.scales_ready + shape.stages
        self.query_empty = self.query_full + shape.query_stages
        self.sum_full = self.query_empty + shape.query_stages
        self.sum_empty = self.sum_full + shape.accumulators
        self.order_full = self.sum_empty + shape.accumulators
        self.order_empty = self.order_full + ORDERS
        self.scale_source = keys
        self.page_stride = page_stride
        self.query_words = query_words

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> "Shared":
        return self

    def fp8(self, offset: int, swizzle: Any) -> Any:
        """Pointer to bytes at `offset` (E4M3 codes, or pairs of E2M1 codes as such), carrying the swizzle."""
        return cute.recast_ptr(self.base + offset, swizzle, dtype=Float8E4M3FN)


class ScoreKernel(Frame):
    """The scorer of one configuration; `entry` is what is compiled and called. The work is planned and reported as on
    Hopper (`score_frame`)."""

    def __init__(self, config: ScoreConfig, shape: ScoreShape | None = None) -> None:
        self.config = config
        self.shape = shape_of(config) if shape is None else shape
        self.places = smem_map(config, self.shape)
        self.tensor = tensor_map(config, self.shape)
        self.chunks = chunks_of(config, self.shape)
        self.home_rounds = min(HOME_ROUNDS, self.shape.stages - 1)
        self.boxes = Boxes(config.row_bytes, PAGE, PAGE * config.row_bytes, config.format.page_bytes)

    @cute.jit
    def entry(
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
        """Launch. words: address of the queries' scale words (MXFP4, else 0). keys, query: addresses of the pool and of
        the queries' codes. page_stride: bytes between pages. blocks: the grid. For the others see `Work`, for what
        they point to `sm90_score_host`."""
        config, boxes = self.config, self.boxes
        width = config.row_bytes
        pool = cute.make_tensor(
            cute.make_ptr(Float8E4M3FN, keys, AddressSpace.gmem, assumed_align=16),
            cute.make_layout((PAGE, width, pages), stride=(width, 1, cute.assume(page_stride, divby=16))),
        )
        rows = cute.make_tensor(
            cute.make_ptr(Float8E4M3FN, query, AddressSpace.gmem, assumed_align=16),
            cute.make_layout((config.heads, width, requests * config.next_n), stride=(width, 1, config.heads * width)),
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        key_copy, key_pages = cpasync.make_tiled_tma_atom(load, pool, boxes.tile(PAGE), (PAGE, width))
        row_copy, query_rows = cpasync.make_tiled_tma_atom(load, rows, boxes.tile(config.heads), (config.heads, width))
        self.kernel.set_name_prefix(
            f"sm100_score_{config.key_format}_{config.numerics}_h{config.heads}_n{config.next_n}_{config.layout}"
        )
        self.kernel(
            key_copy,
            key_pages,
            row_copy,
            query_rows,
            words,
            keys,
            page_stride,
            Work(
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
            ),
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
        key_copy: cute.CopyAtom,
        key_pages: cute.Tensor,
        row_copy: cute.CopyAtom,
        query_rows: cute.Tensor,
        words: Int64,
        keys: Int64,
        page_stride: Int64,
        work: Work,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = SmemAllocator().allocate_array(Uint8, self.places.total, byte_alignment=1024)
        scale_source = keys + Int64(self.config.format.scale_offset)
        shared = Shared(base, self.places, self.shape, scale_source, page_stride, words)
        shared.over = work.over
        self.begin(shared, key_copy, row_copy, warp)
        ptx.grid_wait()
        ptx.grid_launch_dependents()
        lengths = schedule.lengths_of(self.config.layout, work.lens, work.tops)
        # The key warp plans for few requests while it sends for keys, and the others wait for it.
        led = Int32(work.requests <= Int32(schedule.few(self.config.next_n)))
        if led == Int32(0):
            self.plan_many(shared, lengths, work.flags, work.requests, work.limit, work.skip, thread, block)
        if warp == Int32(KEY_WARP):
            raw = Int32(0)
            page = Int32(0)
            if led != Int32(0):
                raw, page = ask_ahead(
                    self, lengths, work.table, work.table_stride, work.requests, work.limit, block, blocks, work.over
                )
            stream_keys(
                self,
                shared,
                key_copy,
                key_pages,
                work.table,
                work.table_stride,
                work.pages,
                work.flags,
                lengths,
                work.requests,
                work.limit,
                work.skip,
                work.capacity,
                block,
                blocks,
                raw,
                page,
            )
        elif warp == Int32(QUERY_WARP):
            stream_queries(
                self,
                shared,
                row_copy,
                query_rows,
                work.weights,
                lengths,
                work.limit,
                work.requests,
                work.capacity,
                block,
                blocks,
            )
        else:
            if led != Int32(0):
                cute.arch.barrier(barrier_id=PLAN_BARRIER, number_of_threads=self.shape.threads)
            if warp < Int32(KEY_WARP):
                finish(self, shared, Targets(work.logits, work.tops, work.pitch), thread)
            if warp == Int32(MATRIX_WARP):
                multiply(self, shared)
            if warp == Int32(SETUP_WARP):
                if cutlass.const_expr(not self.config.format.is_fp8):
                    sm100_score_feed.arrange_key_scales(self, shared)
                if block == Int32(0):
                    total = schedule.tiles_before(shared.prefix, work.requests)
                    self.report(shared, work.starts, work.flags, work.requests, work.capacity, total)
        self.end(shared, warp)

    @cute.jit
    def begin(self, shared: Any, key_copy: cute.CopyAtom, row_copy: cute.CopyAtom, warp: Int32) -> None:
        """Barriers, tensor memory and descriptors; touches no data of an earlier kernel. The plan's barrier publishes.

        With few requests the key warp and the query warp go on before it, so each makes the barriers that it is the
        first to use: orders come from the key warp, and are read behind the plan's barrier.
        """
        shape = self.shape
        if warp == Int32(KEY_WARP):
            cpasync.prefetch_descriptor(key_copy)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(shape.stages):
                    cute.arch.mbarrier_init(shared.key_full + stage, 1)
                    cute.arch.mbarrier_init(shared.key_empty + stage, 1 + WARPS * len(self.chunks))
                    cute.arch.mbarrier_init(shared.scales_ready + stage, 1)
                for slot in cutlass.range_constexpr(ORDERS):
                    cute.arch.mbarrier_init(shared.order_full + slot, 1)
                    cute.arch.mbarrier_init(shared.order_empty + slot, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
        if warp == Int32(QUERY_WARP):
            cpasync.prefetch_descriptor(row_copy)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(shape.query_stages):
                    cute.arch.mbarrier_init(shared.query_full + stage, 2)
                    cute.arch.mbarrier_init(shared.query_empty + stage, 1 + WARPS * GROUPS)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
        if warp == Int32(SETUP_WARP):
            with cute.arch.elect_one():
                for slot in cutlass.range_constexpr(shape.accumulators):
                    cute.arch.mbarrier_init(shared.sum_full + slot, 1)
                    cute.arch.mbarrier_init(shared.sum_empty + slot, WARPS)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
            tcgen05.alloc(shared.tensor, self.tensor.columns)
            tcgen05.relinquish()

    @cute.jit
    def end(self, shared: Any, warp: Int32) -> None:
        """Give tensor memory back when every warp is done with it. Every product was committed, waited for and read."""
        cute.arch.sync_warp()
        tcgen05.fence_before()
        cute.arch.sync_threads()
        if warp == Int32(SETUP_WARP):
            tcgen05.fence_after()
            tcgen05.dealloc(ptx.load_shared(shared.tensor), self.tensor.columns)

    def copy_page(
        self, shared: Any, key_copy: Any, source: Any, target: Any, page: Int32, stage: Int32, half: int, policy: Any
    ) -> None:
        """A box of 64 key rows (the copy elects a lane itself), and the 64 scale words by a bulk copy of one lane."""
        hint = {"cache_policy": policy} if self.shape.evict_first else {}
        slot = stage * PAGES_PER_TILE + half
        barrier = shared.key_full + stage
        cute.copy(key_copy, source[(None, page)], target[(None, slot)], tma_bar_ptr=barrier, **hint)
        address = page_base(shared.scale_source, page, shared.page_stride)
        with cute.arch.elect_one():
            ptx.bulk_load(
                self.scale_words(shared, slot),
                address,
                Int32(4 * PAGE),
                ptx.smem_addr(barrier),
                policy if self.shape.evict_first else None,
            )

    def scale_words(self, shared: Any, slot: Int32) -> Uint32:
        """Shared address of the 64 scale words of a page of the ring."""
        return shared.scales + Uint32(slot) * Uint32(4 * PAGE)

    def put_weights(self, shared: Any, weights: Int64, row: Int32, stage: Int32, lane: Int32) -> None:
        """Head weights, and MXFP4 scale words, of the request whose first row is `row`, into a query stage."""
        sm100_score_feed.put_weights(self, shared, weights, row, stage, lane)
        if not self.config.format.is_fp8:
            sm100_score_feed.put_query_scales(self, shared, shared.query_words, row, stage, lane)


def build(config: ScoreConfig, arch: str) -> tuple[Any, tuple[Any, ...]]:
    """The jit function of `config` and its fake arguments."""
    if arch not in ARCHS:
        raise ValueError(f"sm100_score for {arch}: its matrix instructions exist on {', '.join(ARCHS)}")
    return ScoreKernel(config).entry, fake_arguments()


def fake_arguments() -> tuple[Any, ...]:
    """Arguments of `ScoreKernel.entry` to compile with: ten addresses, three strides, seven numbers, a stream."""
    return (*(Int64(0) for _ in range(13)), *(Int32(1) for _ in range(7)), make_fake_stream())
