"""Dots of keys or queries whose block scales lie too far apart for one product: each block by itself, then added.

    dot = sum over blocks b of 2^(key's code b + query's code b - 254) * (the codes' dot of block b)

in ascending b, float32. The codes' dot of a block is exact. A warp does this for its sixteen keys of a page where one
of them, or one of the request's rows, is apart; each row's head sum is then taken from here or from the product, by the
key and the row alone.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import numerics, packed, ptx, warp_mma
from keysieve.kernels.sm90_mxfp4_scales import NO_CODES
from keysieve.kernels.sm90_score_store import select

STEPS = 4
BLOCKS = 4


def power(exponent: Int32) -> Float32:
    """2^exponent, -127 <= exponent <= 127."""
    normal = Uint32(exponent + Int32(127)) << Uint32(23)
    return numerics.bits_float(Uint32(select(exponent == Int32(-127), Uint32(0x00400000), normal)))


def scaled(value: Float32, key: Uint32, column: Uint32, block: Int32, more: Int32) -> Float32:
    """`value` times the scales of a block, byte `block` of two words of codes, and 2^`more`, by two factors."""
    place = Uint32(block) * Uint32(8)
    both = Int32((key >> place) & Uint32(0xFF)) + Int32((column >> place) & Uint32(0xFF))
    exponent = both - Int32(254) + more
    half = exponent >> Int32(1)
    return numerics.mul(numerics.mul(value, power(half)), power(exponent - half))


@dsl_user_op
def anew(value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """`value`, in such a way that what is worked out from it is worked out here: a path that is hardly ever taken shall
    not keep registers all the way to it."""
    return ptx.asm("mov.b32 $0, $1;", "=r,r", (Int32,), (value,), loc=loc, ip=ip)[0]


@cute.jit
def mend_tile(
    kernel: cutlass.Constexpr[Any], products: Any, sums: Any, stage: Int32, query_stage: Int32, lane: Int32
) -> Any:
    """The sums of a tile of one chunk, page by page, those of keys and rows that are apart formed again.

    Keys are widened anew from the tile, which is still held, lest their registers be kept while sums are formed.
    """
    if products.some:
        rows = kernel.config.next_n
        lane = anew(lane)
        for page in cutlass.range_constexpr(len(products.words)):
            place = (products.shared, products.widened(page, anew(stage)), products.codes)
            found = mended(kernel, place, sums[page * rows : (page + 1) * rows], 0, page, query_stage, lane)
            for i in cutlass.range_constexpr(rows):
                sums[page * rows + i] = found[i]
    return sums


@cute.jit
def mend_sums(
    kernel: cutlass.Constexpr[Any],
    products: Any,
    sums: Any,
    chunk: cutlass.Constexpr[int],
    page: cutlass.Constexpr[int],
    query_stage: Int32,
    lane: Int32,
) -> Any:
    """The sums of a page's rows of one chunk, those of keys and rows that are apart formed again."""
    if products.some:
        place = (products.shared, products.words[page], products.codes)
        sums = mended(kernel, place, sums, chunk, page, query_stage, anew(lane))
    return sums


@cute.jit
def mended(
    kernel: cutlass.Constexpr[Any],
    place: Any,
    sums: Any,
    chunk: cutlass.Constexpr[int],
    page: cutlass.Constexpr[int],
    query_stage: Int32,
    lane: Int32,
) -> Any:
    """`sums` (a lane's share per row of the chunk, after the first exchange) with those formed again that must be."""
    shared, words, codes = place
    start, rows = kernel.chunks[chunk]
    mark = ptx.load_shared(shared.marks + Uint32(query_stage) * Uint32(4))
    heads = kernel.config.heads
    base = lane & Int32(28)
    keys = [Uint32(cute.arch.shuffle_sync(codes, base + Int32(2 * page + r))) for r in range(2)]
    mine = Uint32(cute.arch.shuffle_sync(codes, base + Int32(2 * page) + (lane & Int32(1))))
    for row in cutlass.range(rows, unroll=1):
        column = (Int32(start) + row) * Int32(heads)
        whole = row_sums(kernel, shared, words, keys, column, query_stage, lane)
        odd = (lane & Int32(1)) != Int32(0)
        kept, sent = select(odd, whole[1], whole[0]), select(odd, whole[0], whole[1])
        total = numerics.add(kept, cute.arch.shuffle_sync_bfly(sent, 1))
        apart = (mine != Uint32(NO_CODES)) | (((mark >> Uint32(Int32(start) + row)) & Uint32(1)) != Uint32(0))
        for i in cutlass.range_constexpr(rows):
            sums[i] = Float32(select(apart & (row == Int32(i)), total, sums[i]))
    return sums


@cute.jit
def row_sums(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    words: cute.Tensor,
    keys: Any,
    first: Int32,
    query_stage: Int32,
    lane: Int32,
) -> Any:
    """Head sums of a thread's two keys, over its columns of a row; `first` is the row's first column.

    Twice what half of each weight gives, not half weights of twice the dot: that would be infinite from 2^127 on.
    """
    quad = lane & Int32(3)
    query = shared.query + Uint32(query_stage) * Uint32(kernel.places.query_bytes)
    stage = Uint32(query_stage) * Uint32(kernel.places.weight_bytes)
    codes, weights = shared.codes + stage, shared.weights + stage
    part = [Float32(0.0) for _ in range(4)]
    for block in cutlass.range(kernel.config.heads // 8, unroll=1):
        column = Uint32(first + block * Int32(8))
        held = column + Uint32(lane >> Int32(2))
        line = query + held * Uint32(128) + Uint32(quad) * Uint32(4)
        depth = []
        for chunk in cutlass.range_constexpr(2 * STEPS):
            depth.append(ptx.load_shared(line + ((held & Uint32(7)) ^ Uint32(chunk)) * Uint32(16)))
        mine = column + Uint32(quad) * Uint32(2)
        scales = packed.load_shared_v2(codes + mine * Uint32(4))
        # As `halve_weights` lays them out.
        pair, odd = column >> Uint32(4), (column >> Uint32(3)) & Uint32(1)
        two = packed.load_shared_v2(weights + pair * Uint32(64) + Uint32(quad) * Uint32(16) + odd * Uint32(8))
        # Weights have their heads' factors in them; here the dots do, lest one near the largest float become infinite.
        known = packed.load_shared_v2(shared.factors + stage + mine * Uint32(4))
        more = [Int32(word >> Uint32(23)) - Int32(127) for word in known]
        weight = [numerics.mul(numerics.bits_float(two[v]), power(Int32(0) - more[v])) for v in range(2)]
        dots = [Float32(0.0) for _ in range(4)]
        for b in cutlass.range(BLOCKS, unroll=1):
            acc = [Float32(0.0) for _ in range(4)]
            for s in cutlass.range_constexpr(STEPS):
                a = [Uint32(select(quad == b, words[4 * s + i], Uint32(0))) for i in range(4)]
                acc = list(warp_mma.product_e4m3(a, depth[2 * s : 2 * s + 2], acc))
            for i in cutlass.range_constexpr(4):
                dots[i] = numerics.add(dots[i], scaled(acc[i], keys[i // 2], scales[i % 2], b, more[i % 2]))
        for i in cutlass.range_constexpr(4):
            part[i] = numerics.fma(numerics.max_nan(dots[i], Float32(0.0)), weight[i % 2], part[i])
    first, second = numerics.add(part[0], part[1]), numerics.add(part[2], part[3])
    return numerics.add(first, first), numerics.add(second, second)
