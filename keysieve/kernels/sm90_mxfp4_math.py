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
from keysieve.kernels.sm90_mxfp4_config import AREA, KEY_BYTES, PAGE_SLOT, side_by_side
from keysieve.kernels.sm90_mxfp4_places import CODES, FACTORS
from keysieve.kernels.sm90_mxfp4_scales import NO_CODES, fixed_words, widen_word
from keysieve.kernels.sm90_score_config import PAGES_PER_TILE
from keysieve.kernels.sm90_score_math import K_STEP, Products, query_tiles
from keysieve.kernels.sm90_score_store import select
from keysieve.spec import GROUP, HEAD_DIM, PAGE

STEPS = HEAD_DIM // K_STEP


class WideProducts(Products):
    """The matrix products of a tile: keys from registers, widened once for all chunks; queries from shared memory."""

    def place_keys(self, kernel: Any, shared: Any, thread: Int32) -> None:
        """Where the thread's part of a tile lies, and what is said of it."""
        local = thread % Int32(128)
        lane = local % Int32(32)
        quad = lane & Int32(3)
        warp = local // Int32(32)
        row = warp * Int32(16) + (lane >> Int32(2))
        self.shared = shared
        self.fixed = fixed_words(shared.table)
        self.keys = shared.keys + Uint32(row) * Uint32(KEY_BYTES) + Uint32(quad) * Uint32(16)
        own = (quad >> Int32(1)) * Int32(PAGE) + row + (quad & Int32(1)) * Int32(8)
        self.row_place = shared.area + Uint32(row) * Uint32(4) + Uint32(quad)
        self.own_place = shared.area + Uint32(own) * Uint32(4)
        self.lane_place = shared.area + Uint32(row) * Uint32(4)
        pair = Uint32((quad & Int32(1)) * Int32(PAGE) + row) * Uint32(4)
        if side_by_side(kernel.config):  # through a lane exchange, lest it be worked out anew for every tile
            pair = Uint32(cute.arch.shuffle_sync(pair, lane))
        self.pair_place = shared.area + pair
        self.mark: Any = None

    def __init__(self, kernel: Any, shared: Any, thread: Int32) -> None:
        heads = kernel.config.heads
        local = thread % Int32(128)
        self.place_keys(kernel, shared, thread)
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

    def read_mark(self, query_stage: Int32) -> Uint32:
        """The rows of a request that are apart."""
        return ptx.load_shared(self.shared.marks + Uint32(query_stage) * Uint32(4))

    def begin(self, query_stage: Int32) -> None:
        """What holds for all tiles of a request."""
        self.mark = self.read_mark(query_stage)

    def start(self, stage: Int32, query_stage: Int32) -> None:
        """Scales of a tile: what its keys are widened with, and the factor of the lane's own."""
        area = Uint32(stage) * Uint32(AREA)
        self.offsets = self.read_offsets(stage)
        self.factor = ptx.load_shared(self.own_place + area + Uint32(FACTORS))
        self.codes = ptx.load_shared(self.own_place + area + Uint32(CODES))
        mark = self.read_mark(query_stage) if self.mark is None else self.mark
        self.some = cute.arch.vote_any_sync(((self.codes ^ Uint32(NO_CODES)) | mark) != Uint32(0))

    def start_plain(self, stage: Int32) -> None:
        """The same of a tile with nothing apart."""
        self.offsets = self.read_offsets(stage)
        self.factor = ptx.load_shared(self.own_place + Uint32(stage) * Uint32(AREA) + Uint32(FACTORS))

    def start_pair(self, stage: Int32) -> None:
        """The same where rows lie side by side: the factors of the lane's two keys."""
        self.offsets = self.read_offsets(stage)
        self.read_factors(stage)

    def read_factors(self, stage: Int32) -> None:
        """The factors of a lane's two keys where rows lie side by side."""
        place = self.pair_place + Uint32(stage) * Uint32(AREA) + Uint32(FACTORS)
        self.factors = [ptx.load_shared(place + Uint32(4 * GROUP * r)) for r in range(2)]

    def key_scale(self, config: Any, place: Uint32) -> Float32:
        """What the sums of the lane's key are multiplied by: its factor, or where `mended` has done that 1."""
        del config, place
        return numerics.bits_float(Uint32(select(self.some, Uint32(0x3F800000), self.factor)))

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

    def widened(self, page: int, stage: Int32) -> Any:
        """A page's operand registers once more."""
        words = cute.make_rmem_tensor(4 * STEPS, Uint32)
        keys = self.keys + Uint32(stage * Int32(PAGES_PER_TILE) + Int32(page)) * Uint32(PAGE_SLOT)
        widen_keys(words, keys, self.shared.table, self.read_offsets(stage), self.fixed, page)
        return words

    def read_offsets(self, stage: Int32) -> list[Uint32]:
        """Table offsets of a thread's part of a tile: of its two rows of each page."""
        area = self.row_place + Uint32(stage) * Uint32(AREA)
        places = [4 * PAGE * page + 32 * r for page in range(PAGES_PER_TILE) for r in range(2)]
        return [packed.load_shared_u8(area + Uint32(place)) for place in places]

    def mend(self, kernel: Any, sums: list[Float32], chunk: int, page: int, query_stage: Int32, lane: Int32) -> Any:
        """The sums of a page, those of keys and rows that are apart formed again."""
        return mend_sums(kernel, self, sums, chunk, page, query_stage, lane)


@cute.jit
def widen_keys(
    words: cute.Tensor, keys: Uint32, table: Uint32, offsets: Any, fixed: Any, page: cutlass.Constexpr[int]
) -> None:
    """A thread's part of a page, rows `row` and `row + 8`, into operand registers.

    Register `4 s + 2 h + r` holds row `row + 8 r` at depth `32 s + 16 h`.
    """
    for r in cutlass.range_constexpr(2):
        four = ptx.load_shared_v4(keys + Uint32(8 * KEY_BYTES * r))
        low, high = packed.load_shared_v2(table + offsets[2 * page + r])
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
