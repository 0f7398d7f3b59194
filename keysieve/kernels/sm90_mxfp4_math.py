"""MXFP4 on Hopper's FP8 matrix unit: keys are widened into operand registers, queries into shared memory.

A dot is a sum over elements, so both operands may be permuted alike. Thread (row, c) of the keys takes bytes 16 c ..
16 c + 15 of its row: one block, one scale. Word s of the four gives two registers of four E4M3 numbers, elements
`32 c + 8 s + 4 h + 0..3` for h = 0, 1, which stand in instruction s of four at depth `16 h + 4 c` ... The queries lie
in shared memory at the same depths.

The lane that ends with a key (see `sm90_score_math`: bit 0 of the lane r, bit 1 the page) works out its scales, and the
quad exchanges them: word `offsets` of a lane has a byte for each of the quad's four keys, of the lane's block.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from keysieve.device import numerics, packed, ptx
from keysieve.kernels.sm90_mxfp4_apart import mend_sums
from keysieve.kernels.sm90_mxfp4_config import KEY_BYTES, PAGE_SLOT, SCALE_PLACE
from keysieve.kernels.sm90_mxfp4_scales import (
    NO_CODES,
    factor_bits,
    fixed_words,
    offsets_from,
    place_scales,
    spread_of,
    widen_word,
    within_reach,
    zero_blocks,
)
from keysieve.kernels.sm90_score_config import PAGES_PER_TILE
from keysieve.kernels.sm90_score_math import K_STEP, Products, query_tiles
from keysieve.kernels.sm90_score_store import select
from keysieve.spec import HEAD_DIM, PAGE

STEPS = HEAD_DIM // K_STEP


class WideProducts(Products):
    """The matrix products of a tile: keys from registers, widened once for all chunks; queries from shared memory."""

    def __init__(self, kernel: Any, shared: Any, thread: Int32) -> None:
        heads = kernel.config.heads
        local = thread % Int32(128)
        lane = local % Int32(32)
        quad = lane & Int32(3)
        warp = local // Int32(32)
        row = warp * Int32(16) + (lane >> Int32(2))
        self.shared = shared
        self.fixed = fixed_words(shared.table)
        self.swaps = swap_selectors(lane)
        self.keys = shared.keys + Uint32(row) * Uint32(KEY_BYTES) + Uint32(quad) * Uint32(16)
        own = row + (quad & Int32(1)) * Int32(8)
        page = Uint32(quad >> Int32(1)) * Uint32(PAGE_SLOT)
        self.own_key = shared.keys + page + Uint32(own) * Uint32(KEY_BYTES)
        self.own_scales = shared.keys + page + Uint32(SCALE_PLACE) + Uint32(own) * Uint32(4)
        self.first: list[Any] = []
        self.more: list[Any] = []
        self.b: list[Any] = []
        self.acc: list[list[Any]] = []
        pool: dict[int, list[Any]] = {}
        for start, rows in kernel.chunks:
            columns = rows * heads
            begin, more = matrix_op(columns, False), matrix_op(columns, True)
            mine = begin.get_slice(local)
            held = query_tiles(shared, kernel.places, start * heads, columns, kernel.shape.query_stages)
            self.b.append(begin.make_fragment_B(mine.partition_B(held)))
            self.first.append(begin)
            self.more.append(more)
            if columns not in pool:
                shape = begin.partition_shape_C((PAGE, columns))
                pool[columns] = [cute.make_rmem_tensor(shape, Float32) for _ in range(kernel.shape.ahead)]
            self.acc.append([pool[columns][page % kernel.shape.ahead] for page in range(PAGES_PER_TILE)])
        shape = self.first[0].partition_shape_A((PAGE, HEAD_DIM))
        self.a = [cute.make_rmem_tensor(shape, Float8E4M3FN) for _ in range(PAGES_PER_TILE)]
        self.words = [cute.recast_tensor(a, Uint32) for a in self.a]

    def start(self, stage: Int32, query_stage: Int32) -> None:
        """Scales of a tile: what its keys are widened with, and the factor of the lane's own."""
        slot = Uint32(stage) * Uint32(PAGES_PER_TILE * PAGE_SLOT)
        self.offsets, self.factor, self.codes, self.some = tile_scales(
            self.own_scales + slot, self.own_key + slot, self.swaps
        )
        self.mark = ptx.load_shared(self.shared.marks + Uint32(query_stage) * Uint32(4))

    def key_scale(self, config: Any, place: Uint32) -> Float32:
        """The factor of the lane's key of the tile."""
        del config, place
        return numerics.bits_float(self.factor)

    def issue(self, chunk: int, page: int, stage: Int32, query_stage: Int32) -> None:
        """Start the product of one page with one chunk: a group of four instructions."""
        if chunk == 0:
            keys = self.keys + Uint32(stage * Int32(PAGES_PER_TILE) + Int32(page)) * Uint32(PAGE_SLOT)
            widen_keys(self.words[page], keys, self.shared.table, self.offsets, self.fixed, page)
        acc = self.acc[chunk][page]
        warpgroup.fence()
        for k in range(STEPS):
            mma = self.more[chunk] if k else self.first[chunk]
            cute.gemm(mma, acc, self.a[page][(None, None, k)], self.b[chunk][(None, None, k, query_stage)], acc)
        warpgroup.commit_group()

    def mend(self, kernel: Any, sums: list[Float32], chunk: int, page: int, query_stage: Int32, lane: Int32) -> Any:
        """The sums of a page, those of keys and rows that are apart formed again."""
        place = (self.shared, self.words[page], self.codes, self.some, self.mark)
        return mend_sums(kernel, place, sums, chunk, page, query_stage, lane)


@cute.jit
def tile_scales(scales: Uint32, key: Uint32, swaps: Any) -> Any:
    """(table offsets of the quad's keys; of the lane's key: factor bits, and the scale codes if it is apart, else of
    ones; is any key of the warp apart). scales, key: shared addresses of the lane's key's four scales and of its codes.
    """
    codes = ptx.load_shared(scales)
    largest, smallest = spread_of(codes)
    together = within_reach(largest, smallest)
    offsets = offsets_from(codes, largest)
    factor = factor_bits(largest)
    kept = Uint32(NO_CODES)
    some = Int32(0)
    if Int32(cute.arch.vote_all_sync(together)) == Int32(0):
        offsets, factor, apart = place_scales(codes, zero_blocks(key))
        kept = Uint32(select(apart != Int32(0), codes, Uint32(NO_CODES)))
        some = Int32(cute.arch.vote_any_sync(apart != Int32(0)))
    return swap_quad(offsets, swaps), factor, kept, some


def swap_selectors(lane: Int32) -> tuple[Uint32, Uint32]:
    """What a lane picks in the two steps of `swap_quad`."""
    odd = (lane & Int32(1)) != Int32(0)
    upper = (lane & Int32(2)) != Int32(0)
    return Uint32(select(odd, Uint32(0x3715), Uint32(0x6240))), Uint32(select(upper, Uint32(0x3276), Uint32(0x5410)))


def swap_quad(word: Uint32, swaps: tuple[Uint32, Uint32]) -> Uint32:
    """Four bytes across the four lanes of a quad: byte i of lane c becomes byte c of lane i."""
    for distance, selector in zip((1, 2), swaps, strict=True):
        other = Uint32(cute.arch.shuffle_sync_bfly(word, distance))
        word = ptx.byte_perm(word, other, selector)
    return word


@cute.jit
def widen_keys(
    words: cute.Tensor, keys: Uint32, table: Uint32, offsets: Uint32, fixed: Any, page: cutlass.Constexpr[int]
) -> None:
    """A thread's part of a page, rows `row` and `row + 8`, into operand registers.

    Register `4 s + 2 h + r` holds row `row + 8 r` at depth `32 s + 16 h`.
    """
    for r in cutlass.range_constexpr(2):
        four = ptx.load_shared_v4(keys + Uint32(8 * KEY_BYTES * r))
        offset = ptx.byte_perm(offsets, Uint32(0), Uint32(0x4440 | (2 * page + r)))
        low, high = packed.load_shared_v2(table + offset)
        for s in cutlass.range_constexpr(STEPS):
            words[4 * s + r], words[4 * s + 2 + r] = widen_word(four[s], low, high, fixed)


def matrix_op(columns: int, accumulate: bool) -> Any:
    """A 64 x columns x 32 E4M3 product, keys in registers, queries in shared memory, float32 accumulators."""
    op = warpgroup.MmaF8Op(
        Float8E4M3FN,
        Float8E4M3FN,
        Float32,
        (64, columns, K_STEP),
        warpgroup.OperandSource.RMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    mma = cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    return mma
