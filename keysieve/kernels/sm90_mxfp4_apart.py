"""Dots of keys or queries whose block scales lie too far apart for one product: each block by itself, then added.

    dot = sum over blocks b of 2^(key's code b + query's code b - 254) * (the codes' dot of block b)

in ascending b, float32. The codes' dot of a block is exact; a vector that is together has one code four times, its
factor's. A warp does this for its sixteen keys of a page where one of them, or one of the request's rows, is apart;
each row's head sum is then taken from here or from the product, by the key and the row alone.

A dot has all scales in it and a weight none: without its key's factor, or with its head's in the weight, one of them
may leave float32's range where the logit does not. Blocks with scales above 2^64 are summed at 2^-160 of their size, so
that two which are infinite alone, and finite together, are finite.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import numerics, packed, ptx, warp_mma
from keysieve.kernels.sm90_mxfp4_config import product_column
from keysieve.kernels.sm90_mxfp4_scales import NAN_BITS, NO_CODES
from keysieve.kernels.sm90_score_store import select

STEPS = 4
BLOCKS = 4
ONE = 0x3F800000

LARGE = 64
DOWN = 160
"""Scales of a block above 2^LARGE: its dot is summed at 2^-DOWN. What large blocks leave is 2^(LARGE + 1 - 18) at the
least, beside which a sum of small ones that vanishes at that size is nothing."""


def power(exponent: Int32) -> Float32:
    """2^exponent, -127 <= exponent <= 127."""
    normal = Uint32(exponent + Int32(127)) << Uint32(23)
    return numerics.bits_float(Uint32(select(exponent == Int32(-127), Uint32(0x00400000), normal)))


def shifted(value: Float32, exponent: Int32) -> Float32:
    """`value` times 2^`exponent`, -254 <= exponent <= 254, by two factors: rounded once where `value` is a block's dot,
    of which the first factor cuts nothing."""
    half = exponent >> Int32(1)
    return numerics.mul(numerics.mul(value, power(half)), power(exponent - half))


def whole_codes(codes: Uint32, factor: Uint32) -> Uint32:
    """A vector's scales as it is widened: its own codes if it is apart, else its factor's, whose bits `factor` are."""
    return Uint32(select(codes == Uint32(NO_CODES), (factor >> Uint32(23)) * Uint32(0x01010101), codes))


def add_block(sums: Any, value: Float32, key: Uint32, column: Uint32, block: Int32) -> Any:
    """(sum of small blocks, sum of large ones at 2^-DOWN of their size) with `value`, a block's dot, times its scales:
    byte `block` of two words of codes."""
    place = Uint32(block) * Uint32(8)
    exponent = Int32((key >> place) & Uint32(0xFF)) + Int32((column >> place) & Uint32(0xFF)) - Int32(254)
    large = exponent > Int32(LARGE)
    piece = shifted(value, exponent - Int32(select(large, Int32(DOWN), Int32(0))))
    none = Float32(0.0)
    return (
        numerics.add(sums[0], Float32(select(large, none, piece))),
        numerics.add(sums[1], Float32(select(large, piece, none))),
    )


def blocks_dot(sums: Any) -> Float32:
    """The dot of the two sums of `add_block`."""
    low, high = sums
    both = shifted(numerics.add(high, shifted(low, Int32(-DOWN))), Int32(DOWN))
    return Float32(select(high == Float32(0.0), low, both))


def whole_weight(kept: Float32, factor: Uint32, marked: Any) -> Float32:
    """A head's weight from what `scale_weights` keeps: a marked row's as it is, else half of it times the factor."""
    back = select(marked, Int32(0), Int32(128) - Int32(factor >> Uint32(23)))
    return numerics.mul(kept, power(Int32(back)))


def final_factor(factor: Uint32, alone: Any) -> Float32:
    """What a logit is still to be multiplied by: its key's factor, or, where its dots have that (`alone`), 1 or NaN."""
    return numerics.bits_float(Uint32(select(alone & (factor != Uint32(NAN_BITS)), Uint32(ONE), factor)))


@dsl_user_op
def anew(value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """`value`, in such a way that what is worked out from it is worked out here: a path that is hardly ever taken shall
    not keep registers all the way to it."""
    return ptx.asm("mov.b32 $0, $1;", "=r,r", (Int32,), (value,), loc=loc, ip=ip)[0]


@cute.jit
def mend_tile(
    kernel: cutlass.Constexpr[Any], products: Any, sums: Any, stage: Int32, query_stage: Int32, lane: Int32
) -> Any:
    """(sums, what their keys' are to be multiplied by) of a tile of one chunk, those of keys and rows that are apart
    formed again.

    Keys are widened anew from the tile, which is still held, lest their registers be kept while sums are formed.
    """
    factor = products.factor
    if products.some:
        rows = kernel.config.next_n
        lane = anew(lane)
        for page in cutlass.range_constexpr(len(products.words)):
            words = products.widened(page, anew(stage))
            found = mended(kernel, products, words, sums[page * rows : (page + 1) * rows], 0, page, query_stage, lane)
            for i in cutlass.range_constexpr(rows):
                sums[page * rows + i] = found[i]
        factor = Uint32(anew(Int32(ONE)))
    return sums, numerics.bits_float(factor)


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
        sums = mended(kernel, products, products.words[page], sums, chunk, page, query_stage, anew(lane))
    return sums


@cute.jit
def mended(
    kernel: cutlass.Constexpr[Any],
    products: Any,
    words: cute.Tensor,
    sums: Any,
    chunk: cutlass.Constexpr[int],
    page: cutlass.Constexpr[int],
    query_stage: Int32,
    lane: Int32,
) -> Any:
    """`sums` (a lane's share per row of the chunk, after the first exchange) with those formed again that must be.

    They come back final, times their keys' factors where they are products': a lane that keeps the page has a row's
    logit, the one that would add to it -0. So two logits of a key may have different factors, and what follows is the
    same for all tiles.
    """
    start, rows = kernel.chunks[chunk]
    mark = ptx.load_shared(products.shared.marks + Uint32(query_stage) * Uint32(4))
    base = lane & Int32(28)
    whole = whole_codes(products.codes, products.factor)
    keys = [Uint32(cute.arch.shuffle_sync(whole, base + Int32(2 * page + r))) for r in range(2)]
    mine = Uint32(cute.arch.shuffle_sync(products.codes, base + Int32(2 * page) + (lane & Int32(1))))
    for row in cutlass.range(rows, unroll=1):
        marked = ((mark >> Uint32(Int32(start) + row)) & Uint32(1)) != Uint32(0)
        two = row_sums(kernel, products.shared, words, keys, Int32(start) + row, marked, query_stage, lane)
        odd = (lane & Int32(1)) != Int32(0)
        kept, sent = select(odd, two[1], two[0]), select(odd, two[0], two[1])
        total = numerics.add(kept, cute.arch.shuffle_sync_bfly(sent, 1))
        alone = (mine != Uint32(NO_CODES)) | marked
        for i in cutlass.range_constexpr(rows):
            sums[i] = Float32(select(alone & (row == Int32(i)), total, sums[i]))
    keeps = ((lane >> Int32(1)) & Int32(1)) == Int32(page)
    for i in cutlass.range_constexpr(rows):
        alone = (products.codes != Uint32(NO_CODES)) | (((mark >> Uint32(start + i)) & Uint32(1)) != Uint32(0))
        total = numerics.add(sums[i], cute.arch.shuffle_sync_bfly(sums[i], 2))
        logit = numerics.mul(total, final_factor(products.factor, alone))
        sums[i] = Float32(select(keeps, logit, Float32(-0.0)))
    return sums


@cute.jit
def row_sums(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    words: cute.Tensor,
    keys: Any,
    row: Int32,
    marked: Any,
    query_stage: Int32,
    lane: Int32,
) -> Any:
    """Head sums of a thread's two keys, over its columns of a row of the request."""
    quad = lane & Int32(3)
    query = shared.query + Uint32(query_stage) * Uint32(kernel.places.query_bytes)
    stage = Uint32(query_stage) * Uint32(kernel.places.weight_bytes)
    part = [Float32(0.0) for _ in range(4)]
    for block in cutlass.range(kernel.config.heads // 8, unroll=1):
        column = Uint32(row * Int32(kernel.config.heads) + block * Int32(8))
        held = Uint32(product_column(kernel.config, column + Uint32(lane >> Int32(2))))
        line = query + held * Uint32(128) + Uint32(quad) * Uint32(4)
        mine = stage + (column + Uint32(quad) * Uint32(2)) * Uint32(4)
        factors = packed.load_shared_v2(shared.factors + mine)
        codes = packed.load_shared_v2(shared.codes + mine)
        scales = [whole_codes(codes[v], factors[v]) for v in range(2)]
        # As `halve_weights` lays them out.
        first = Uint32(product_column(kernel.config, column + Uint32(quad) * Uint32(2)))
        place = stage + ((first >> Uint32(4)) * Uint32(16) + ((first >> Uint32(1)) & Uint32(3)) * Uint32(4)) * Uint32(4)
        place = place + ((first >> Uint32(3)) & Uint32(1)) * Uint32(8)
        two = packed.load_shared_v2(shared.weights + place)
        weight = [whole_weight(numerics.bits_float(two[v]), factors[v], marked) for v in range(2)]
        dots = block_dots(words, line, held, keys, scales, quad)
        for i in cutlass.range_constexpr(4):
            part[i] = numerics.fma(numerics.max_nan(dots[i], Float32(0.0)), weight[i % 2], part[i])
    return numerics.add(part[0], part[1]), numerics.add(part[2], part[3])


@cute.jit
def block_dots(words: cute.Tensor, line: Uint32, held: Uint32, keys: Any, scales: Any, quad: Int32) -> Any:
    """Dots of a thread's two keys and two columns, `2 r + v`. line: shared address of its part of column `held`."""
    depth = []
    for chunk in cutlass.range_constexpr(2 * STEPS):
        depth.append(ptx.load_shared(line + ((held & Uint32(7)) ^ Uint32(chunk)) * Uint32(16)))
    low = [Float32(0.0) for _ in range(4)]
    high = [Float32(0.0) for _ in range(4)]
    for b in cutlass.range(BLOCKS, unroll=1):
        acc = [Float32(0.0) for _ in range(4)]
        for s in cutlass.range_constexpr(STEPS):
            a = [Uint32(select(quad == b, words[4 * s + i], Uint32(0))) for i in range(4)]
            acc = list(warp_mma.product_e4m3(a, depth[2 * s : 2 * s + 2], acc))
        for i in cutlass.range_constexpr(4):
            low[i], high[i] = add_block((low[i], high[i]), acc[i], keys[i // 2], scales[i % 2], b)
    return [blocks_dot((low[i], high[i])) for i in range(4)]
