"""What the Blackwell scorer's query warp and scale warp write: head weights, and MXFP4 scale words in the unit's order.

The scale words of 128 operand rows are 512 bytes, 16 bytes a tensor-memory lane: word `4 * (r % 32) + r / 32` is row
r's (`sm100_score_words.scale_offset`). The matrix warp copies them to tensor memory, where each takes one 32-bit column
of a lane; its byte i scales elements 32 i .. 32 i + 31 of the row. Written by ordinary stores and read by the matrix
unit, they need a proxy fence before the barrier that hands them over.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from keysieve.device import numerics, ptx
from keysieve.kernels.score_cut import NO_REQUEST
from keysieve.kernels.score_tiles import advance
from keysieve.kernels.sm90_score_math import next_tile
from keysieve.kernels.sm100_score_config import SCALE_BYTES, key_scale_words, query_scale_words
from keysieve.kernels.sm100_score_words import scale_offset

WARP = 32
assert all(
    scale_offset(lane + WARP * quarter) == scale_offset(lane) + 4 * quarter
    for lane in range(WARP)
    for quarter in range(4)
)


@cute.jit
def put_weights(
    kernel: cutlass.Constexpr[Any], shared: Any, weights: Int64, row: Int32, stage: Int32, lane: Int32
) -> None:
    """Head weights of the request whose first row is `row`, column after column, in the form the epilogue reads.

    fp32: float32 words, halved for FP8 (whose ReLU is computed doubled). bf16: two BF16 a word, the even head low,
    float32 weights rounded to nearest even.
    """
    config = kernel.config
    place = shared.weights + Uint32(stage) * Uint32(kernel.places.weight_bytes)
    each = 1 if config.numerics == "fp32" else 2
    words = config.columns // each
    size = 4 if config.weights == "float32" else 2
    base = weights + Int64(row) * Int64(config.heads * size)
    values = []
    for start in cutlass.range_constexpr(0, words, WARP):
        word = lane + Int32(start)
        value = Uint32(0)
        if word < Int32(words):
            value = weight_word(config, base, word)
        values.append(value)
    for start in cutlass.range_constexpr(0, words, WARP):
        if lane + Int32(start) < Int32(words):
            ptx.store_shared(place + Uint32(4 * start) + Uint32(lane) * Uint32(4), values[start // WARP])


def weight_word(config: Any, base: Int64, word: Int32) -> Uint32:
    """Word `word` of a request's weights as the epilogue reads it; base: address of its first weight."""
    if config.weights == "float32":
        if config.numerics == "bf16":
            pair = base + Int64(word) * Int64(8)
            return numerics.bf16x2_bits(ptx.load(pair, Float32), ptx.load(pair + Int64(4), Float32))
        value = ptx.load(base + Int64(word) * Int64(4), Uint32)
    else:
        if config.numerics == "bf16":
            pair = base + Int64(word) * Int64(4)  # aligned to 2 only: a view of the weights may begin anywhere
            return ptx.load_u16(pair) | ptx.load_u16(pair + Int64(2)) << Uint32(16)
        value = ptx.load_u16(base + Int64(word) * Int64(2)) << Uint32(16)
    if config.format.is_fp8:
        return numerics.float_bits(numerics.mul(numerics.bits_float(value), Float32(0.5)))
    return value


@cute.jit
def put_query_scales(
    kernel: cutlass.Constexpr[Any], shared: Any, words: Int64, row: Int32, stage: Int32, lane: Int32
) -> None:
    """MXFP4: scale words of the queries of the request whose first row is `row`: 512 bytes for each product.

    Rows of a product beyond its queries get zero words; their columns are never read.
    """
    config = kernel.config
    base = words + Int64(row) * Int64(4 * config.heads)
    for chunk in cutlass.range_constexpr(len(kernel.chunks)):
        start, rows = kernel.chunks[chunk]
        first, count = start * config.heads, rows * config.heads
        four = []
        for quarter in cutlass.range_constexpr(4):
            column = lane + Int32(WARP * quarter)
            value = Uint32(0)
            if column < Int32(count):
                value = ptx.load(base + Int64(column + Int32(first)) * Int64(4), Uint32)
            four.append(value)
        place = shared.origin + query_scale_words(kernel.places, chunk, Uint32(stage))
        ptx.store_shared_v4(place + scale_offset(Uint32(lane)), four[0], four[1], four[2], four[3])
    ptx.fence_async_shared()


@cute.jit
def arrange_key_scales(kernel: cutlass.Constexpr[Any], shared: Any) -> None:
    """MXFP4, one warp: every tile's 128 scale words from page order into the matrix unit's, until the end."""
    shape = kernel.shape
    lane = cute.arch.lane_idx()
    stage = Int32(0)
    phase = Int32(0)
    owner, _tile, _sequence = next_tile(shared, stage, phase)
    while owner != Int32(NO_REQUEST):
        source = shared.scales + Uint32(stage) * Uint32(SCALE_BYTES) + Uint32(lane) * Uint32(4)
        four = [ptx.load_shared(source + Uint32(4 * WARP * quarter)) for quarter in range(4)]
        target = shared.origin + key_scale_words(kernel.places, Uint32(stage))
        ptx.store_shared_v4(target + scale_offset(Uint32(lane)), four[0], four[1], four[2], four[3])
        ptx.fence_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.scales_ready + stage)
        stage, phase = advance(stage, phase, shape.stages)
        owner, _tile, _sequence = next_tile(shared, stage, phase)
