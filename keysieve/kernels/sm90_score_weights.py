"""Head weights as the sm90 scorer's consumers read them: halved, in the order of the accumulator columns."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import numerics, ptx
from keysieve.kernels.sm90_score_config import PART, SET


def column_by_rows(word: Any, chunk: int, heads: int) -> Any:
    """Which `row * heads + head` a word of a chunk stands for where lanes have rows: lane `quad` reads those of its
    own row, head after head (see `sm90_score_rows`). A Python integer or a kernel's."""
    rows, part = divmod(chunk, heads // PART)
    row = SET * rows + ((word >> 2) & 3)
    return row * heads + PART * part + ((word >> 4) & (PART // 4 - 1)) * 4 + (word & 3)


@cute.jit
def halve_weights(
    config: cutlass.Constexpr[Any],
    place: Uint32,
    weights: Int64,
    row: Int32,
    lane: Int32,
    factor: cutlass.Constexpr[float] = 0.5,
    by_rows: cutlass.Constexpr[bool] = False,
) -> None:
    """Write half (`factor`) of each weight (the ReLU is computed doubled) as a consumer thread reads four.

    Word `16 * pair + 4 * quad + 2 * odd + v` holds column `8 * (2 * pair + odd) + 2 * quad + v`: the accumulator
    columns of lane quad position `quad` in two neighbouring blocks of eight. Padding words are zero. by_rows: columns
    are in the order of `sm90_score_rows`.
    """
    columns = config.columns
    words = -(-columns // 16) * 16
    size = 4 if config.weights == "float32" else 2
    base = weights + Int64(row) * Int64(config.heads * size)
    values = []
    for start in cutlass.range_constexpr(0, words, 32):
        word = lane + Int32(start)
        column = ((word >> Int32(4)) * 2 + ((word >> Int32(1)) & 1)) * 8 + ((word >> Int32(2)) & 3) * 2 + (word & 1)
        if cutlass.const_expr(by_rows):
            column = column_by_rows(word, start // (SET * PART), config.heads)
        value = Uint32(0)
        if column < Int32(columns):
            if cutlass.const_expr(size == 4):
                value = ptx.load(base + Int64(column) * Int64(4), Uint32)
            else:
                value = ptx.load_u16(base + Int64(column) * Int64(2)) << Uint32(16)
        values.append(value)
    for start in cutlass.range_constexpr(0, words, 32):
        half = numerics.mul(numerics.bits_float(values[start // 32]), cutlass.Float32(factor))
        if lane + Int32(start) < Int32(words):
            ptx.store_shared(place + Uint32(4 * start) + Uint32(lane) * Uint32(4), numerics.float_bits(half))
