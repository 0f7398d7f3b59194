"""MXFP4 on Hopper's matrix unit: E2M1 codes and their block scales become BF16, exactly.

A nibble `s e e m`, its bits put at 15, 8, 7 and 6, is the BF16 number `value * 2^-126` (a subnormal for e = 0, as in
E2M1). One multiplication by a power of two gives the scaled value. Its factor would leave BF16's range for large
scales, so it is split there, and the products are kept 2^-5 (keys) and 2^-2 (queries) of their value, which makes every
code with every finite scale an exact BF16 number; the head weights take 2^7 back. A NaN scale gives NaN elements.

A dot is a sum over elements, so both operands may be permuted alike. Thread (row, c) of the keys takes bytes 16 c ..
16 c + 15 of its row: one block, one scale. Word i of the four gives four registers p = 0..3 with elements
`32 c + 8 i + p` and `.. + p + 4`; register p stands in instruction 2 i + p / 2 of eight, at depth `8 (p % 2) + 2 c`.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from keysieve.device import numerics, ptx
from keysieve.kernels.sm90_mxfp4_config import KEY_BYTES, PAGE_SLOT, QUERY_ROW, SCALE_PLACE
from keysieve.kernels.sm90_score_config import PAGES_PER_TILE
from keysieve.kernels.sm90_score_math import Products
from keysieve.kernels.sm90_score_store import select
from keysieve.spec import HEAD_DIM, PAGE

K_STEP = 16
STEPS = HEAD_DIM // K_STEP
KEY_SHIFT = 5
QUERY_SHIFT = 2
WEIGHT_FACTOR = 0.5 * 2.0 ** (KEY_SHIFT + QUERY_SHIFT)
"""What weights are multiplied by: half (the ReLU is computed doubled), and what the operands were scaled down by."""

MINUS_ZERO = 0x80008000
NAN_PAIR = 0x7FC07FC0
MOST = 254
"""Largest exponent field of a finite number."""


def spread(word: Uint32, p: int) -> Uint32:
    """Nibbles p and p + 4 of a word as two BF16 of `value * 2^-126`."""
    sign, size = 12 - 4 * p, 6 - 4 * p
    high = word << Uint32(sign) if sign else word
    low = word << Uint32(size) if size > 0 else word >> Uint32(-size)
    return (high & Uint32(0x80008000)) | (low & Uint32(0x01C001C0))


def factors(code: Uint32, shift: int) -> tuple[Uint32, Uint32, Any]:
    """Two BF16 pairs whose product is `2^(126 + code - 127 - shift)`, and whether the second is not one."""
    field = code + Uint32(126 - shift)
    large = field > Uint32(MOST)
    first = select(large, Uint32(MOST), field) * Uint32(0x00800080)
    second = (select(large, field - Uint32(MOST), Uint32(0)) + Uint32(127)) * Uint32(0x00800080)
    return select(code == Uint32(255), Uint32(NAN_PAIR), first), second, large


def times(a: Uint32, b: Uint32) -> Uint32:
    """Packed BF16 product."""
    return numerics.fma_bf16x2(a, b, Uint32(MINUS_ZERO))


def query_place(i: int, p: int, low: Uint32, columns: int) -> Uint32:
    """Byte offset, from a column's first 128-byte row, of the 16-byte chunk that takes register p of word i.

    Depth 8 * (4 i + p) .. + 7 of `columns` columns: two halves of 64, each with its chunks swizzled by the column's low
    three bits.
    """
    return Uint32(i // 2 * columns * HEAD_DIM) + (Uint32(4 * (i % 2) + p) ^ low) * Uint32(16)


class WideProducts(Products):
    """The matrix products of a tile: keys from registers, widened once for all chunks; queries from shared memory."""

    def __init__(self, kernel: Any, shared: Any, thread: Int32) -> None:
        heads = kernel.config.heads
        local = thread % Int32(128)
        lane = local % Int32(32)
        self.quad = Uint32(lane & Int32(3))
        row = (local // Int32(32)) * Int32(16) + (lane >> Int32(2))
        self.keys = shared.keys + Uint32(row) * Uint32(KEY_BYTES) + self.quad * Uint32(16)
        self.scales = shared.keys + Uint32(SCALE_PLACE) + Uint32(row) * Uint32(4)
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
        self.a = [cute.make_rmem_tensor(shape, BFloat16) for _ in range(PAGES_PER_TILE)]

    def issue(self, chunk: int, page: int, stage: Int32, query_stage: Int32) -> None:
        """Start the product of one page with one chunk: a group of eight instructions."""
        if chunk == 0:
            offset = Uint32(stage * Int32(PAGES_PER_TILE) + Int32(page)) * Uint32(PAGE_SLOT)
            widen_keys(cute.recast_tensor(self.a[page], Uint32), self.keys + offset, self.scales + offset, self.quad)
        acc = self.acc[chunk][page]
        warpgroup.fence()
        for k in range(STEPS):
            mma = self.more[chunk] if k else self.first[chunk]
            cute.gemm(mma, acc, self.a[page][(None, None, k)], self.b[chunk][(None, None, k, query_stage)], acc)
        warpgroup.commit_group()


@cute.jit
def widen_keys(words: cute.Tensor, keys: Uint32, scales: Uint32, quad: Uint32) -> None:
    """A thread's part of a page, rows `row` and `row + 8`, into operand registers.

    Register `4 k + 2 half + r` holds row `row + 8 r` at depth `16 k + 8 half`.
    """
    rest = []
    beyond = Int32(0)
    for r in cutlass.range_constexpr(2):
        code = (ptx.load_shared(scales + Uint32(32 * r)) >> (quad * Uint32(8))) & Uint32(0xFF)
        first, second, large = factors(code, KEY_SHIFT)
        rest.append(second)
        beyond = beyond | Int32(large)
        four = ptx.load_shared_v4(keys + Uint32(8 * KEY_BYTES * r))
        for i in cutlass.range_constexpr(4):
            for p in cutlass.range_constexpr(4):
                words[8 * i + 2 * p + r] = times(spread(four[i], p), first)
    if cute.arch.vote_any_sync(beyond != Int32(0)):
        for r in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(16):
                words[2 * i + r] = times(words[2 * i + r], rest[r])


def query_tiles(shared: Any, places: Any, first_column: int, columns: int, stages: int) -> Any:
    """A chunk's columns of the held queries as the B operand: BF16 (columns, 128, query stages), swizzled."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    tile = cute.tile_to_shape(atom, (columns, HEAD_DIM), order=(0, 1))
    outer = cute.append(tile.outer, cute.make_layout(stages, stride=places.query_bytes // 2))
    place = shared.base + places.query + first_column * QUERY_ROW
    return cute.make_tensor(cute.recast_ptr(place, tile.inner, dtype=BFloat16), outer)


def matrix_op(columns: int, accumulate: bool) -> Any:
    """A 64 x columns x 16 BF16 product, keys in registers, queries in shared memory, float32 accumulators."""
    op = warpgroup.MmaF16BF16Op(
        BFloat16,
        Float32,
        (64, columns, K_STEP),
        warpgroup.OperandSource.RMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    mma = cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    return mma


@cute.jit
def widen_queries(
    kernel: cutlass.Constexpr[Any], shared: Any, query: Int64, words: Int64, row: Int32, stage: Int32, lane: Int32
) -> None:
    """The queries of the request whose first row is `row`, from memory into a query stage; the whole warp.

    A lane takes 16 bytes, one block of a head. The 16-byte chunk `4 i + p` of a column's 256 holds word c of block c.
    """
    heads = kernel.config.heads
    base = shared.query + Uint32(stage) * Uint32(kernel.places.query_bytes)
    block = lane & Int32(3)
    for chunk in cutlass.range_constexpr(len(kernel.chunks)):
        start, rows = kernel.chunks[chunk]
        place = base + Uint32(start * heads * QUERY_ROW) + Uint32(block) * Uint32(4)
        for first in cutlass.range(0, rows * heads, 8, unroll=1):
            column = Int32(first) + (lane >> Int32(2))
            head = Int64(row * Int32(heads) + Int32(start * heads) + column)
            four = ptx.load_v4(query + head * Int64(KEY_BYTES) + Int64(block) * Int64(16))
            word = ptx.load(words + head * Int64(4), Uint32)
            one, two, _large = factors((word >> Uint32(block * Int32(8))) & Uint32(0xFF), QUERY_SHIFT)
            target = place + Uint32(column) * Uint32(HEAD_DIM)
            for i in cutlass.range_constexpr(4):
                for p in cutlass.range_constexpr(4):
                    value = times(times(spread(four[i], p), one), two)
                    ptx.store_shared(target + query_place(i, p, Uint32(lane >> Int32(2)), rows * heads), value)
    ptx.fence_async_shared()
    cute.arch.sync_warp()
