"""Queries of the sm90 MXFP4 scorer: widened once a request by the query warp, and the weights with their factors."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import numerics, packed, ptx, sync
from keysieve.kernels.sm90_mxfp4_config import KEY_BYTES, LEAN, START_BARRIER, product_column, request_column
from keysieve.kernels.sm90_mxfp4_scales import (
    MAGNITUDES,
    NAN_BITS,
    NO_CODES,
    fixed_words,
    place_scales,
    table_words,
    widen_word,
)
from keysieve.kernels.sm90_score_store import select
from keysieve.spec import HEAD_DIM

TOGETHER = 8
"""Columns that a warp widens at a time, four lanes each."""

SMALLEST = 127 - 91
LARGEST = 127 + 96
"""Float32 exponents within which a halved weight times a factor may lie, see `leaves_range`."""


@cute.jit
def write_table(table: Uint32) -> None:
    """The table of widened codes, by one warp."""
    words = table_words()
    with cute.arch.elect_one():
        for i in cutlass.range_constexpr(0, len(words), 4):
            four = [Uint32(word) for word in words[i : i + 4]]
            ptx.store_shared_v4(table + Uint32(4 * i), *four)
    cute.arch.sync_warp()


def rounds_at_once(config: Any) -> int:
    """How often eight columns are loaded before the first are widened: a divisor, and few where that would spill."""
    most = 4 if config.columns < 64 else 2 if config.columns < 128 else 1
    return next(n for n in range(most, 0, -1) if config.columns % (TOGETHER * n) == 0)


def chunk_place(chunk: int, low: Uint32) -> Uint32:
    """Byte offset in a column's 128 bytes of 16-byte chunk `2 s + h`, swizzled by the column's low three bits."""
    return (Uint32(chunk) ^ low) * Uint32(16)


def load_columns(
    config: Any, query: Int64, words: Int64, row: Int32, first: Int32, many: int, lane: Int32
) -> list[Any]:
    """A lane's 16 bytes and its head's scale word of `many` times eight columns, from `first` on."""
    loaded = []
    for part in range(many):
        head = Int64(row) * Int64(config.heads) + Int64(first + Int32(TOGETHER * part) + (lane >> Int32(2)))
        at = query + head * Int64(KEY_BYTES) + Int64(lane & Int32(3)) * Int64(16)
        loaded.append((ptx.load_v4(at), ptx.load(words + head * Int64(4), Uint32)))
    return loaded


@cute.jit
def widen_columns(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    loaded: Any,
    fixed: Any,
    first: Int32,
    stage: Int32,
    lane: Int32,
    mark: Uint32,
) -> Uint32:
    """What `load_columns` brought into a query stage; returns `mark` and the rows with a head that is apart."""
    config = kernel.config
    base = shared.query + Uint32(stage) * Uint32(kernel.places.query_bytes)
    beside = Uint32(stage) * Uint32(kernel.places.weight_bytes)
    block = lane & Int32(3)
    low = Uint32(lane >> Int32(2))
    for part in cutlass.range_constexpr(len(loaded)):
        column = Uint32(first + Int32(TOGETHER * part)) + low
        four, word = loaded[part]
        some = (four[0] | four[1] | four[2] | four[3]) & Uint32(MAGNITUDES)
        zero = select(some == Uint32(0), Uint32(0xFF), Uint32(0)) << (Uint32(block) * Uint32(8))
        zero = zero | Uint32(cute.arch.shuffle_sync_bfly(zero, 1))
        zero = zero | Uint32(cute.arch.shuffle_sync_bfly(zero, 2))
        offsets, factor, apart = place_scales(word, zero)
        offset = (offsets >> (Uint32(block) * Uint32(8))) & Uint32(0xFF)
        lower, upper = packed.load_shared_v2(shared.table + offset)
        held = product_column(config, column)
        target = base + held * Uint32(HEAD_DIM) + Uint32(block) * Uint32(4)
        turn = held & Uint32(7)
        for s in cutlass.range_constexpr(4):
            one, two = widen_word(four[s], lower, upper, fixed)
            ptx.store_shared(target + chunk_place(2 * s, turn), one)
            ptx.store_shared(target + chunk_place(2 * s + 1, turn), two)
        if block == Int32(0):
            codes = select(apart != Int32(0), word, Uint32(NO_CODES))
            ptx.store_shared(shared.factors + beside + column * Uint32(4), factor)
            ptx.store_shared(shared.codes + beside + column * Uint32(4), codes)
        mark = mark | (Uint32(apart) << (column // Uint32(config.heads)))
    return mark


@cute.jit
def widen_queries(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    query: Int64,
    words: Int64,
    weights: Int64,
    row: Int32,
    stage: Int32,
    phase: Int32,
    lane: Int32,
    starts: Int32,
) -> Any:
    """The queries of the request whose first row is `row`, from memory into a query stage when it is free; the whole
    warp. starts: 1 for the block's first, whose stage is free when the producers have met.

    A lane takes 16 bytes, one block of a head. Beside the codes: each head's factor, its scale codes where it is apart,
    and the mark of rows with such a head. Returns the lane's weight if it was asked for beside the queries.
    """
    config = kernel.config
    mark = Uint32(0)
    value = Uint32(0)
    many = rounds_at_once(config)
    if cutlass.const_expr(config.columns <= LEAN):
        loaded = load_columns(config, query, words, row, Int32(0), many, lane)
        value = weight_at(kernel, weights, row, column_of(config, lane))
        cute.arch.sync_warp()  # or the assembler may wait for each in turn
        wait_for_stage(kernel, shared, stage, phase, starts)
        mark = widen_columns(kernel, shared, loaded, fixed_words(shared.table), Int32(0), stage, lane, mark)
    else:
        wait_for_stage(kernel, shared, stage, phase, starts)
        fixed = fixed_words(shared.table)
        for first in cutlass.range(0, config.columns, TOGETHER * many, unroll=1):
            loaded = load_columns(config, query, words, row, first, many, lane)
            mark = widen_columns(kernel, shared, loaded, fixed, first, stage, lane, mark)
    for distance in (1, 2, 4, 8, 16):
        mark = mark | Uint32(cute.arch.shuffle_sync_bfly(mark, distance))
    with cute.arch.elect_one():
        ptx.store_shared(shared.marks + Uint32(stage) * Uint32(4), mark)
    ptx.fence_async_shared()
    cute.arch.sync_warp()
    return value


@cute.jit
def wait_for_stage(kernel: cutlass.Constexpr[Any], shared: Any, stage: Int32, phase: Int32, starts: Int32) -> None:
    """Until a query stage is free: the first is when its barriers and the table of codes are there."""
    if starts != Int32(0):
        write_table(shared.table)  # while the loads are on their way
        cute.arch.barrier(barrier_id=START_BARRIER, number_of_threads=32 * kernel.shape.producer_warps)
    else:
        sync.wait_barrier(shared.query_empty + stage, phase)


def leaves_range(weight: Uint32, product: Uint32) -> Any:
    """Is half a weight times its head's factor, `product`, too small or too large for all that sums of it must hold?

    Within 2^-91 .. 2^96 it is exact, no product with a dot is subnormal, and no sum of them infinite. Weights that are
    zero, infinite or NaN are none of these, nor is any with a factor that is NaN.
    """
    size, plain = product << Uint32(1), weight << Uint32(1)
    outside = (size - Uint32(SMALLEST << 24)) > Uint32((LARGEST - SMALLEST) << 24)
    finite = (plain - Uint32(1)) < Uint32(0xFEFFFFFF)
    return outside & finite & (size <= Uint32(0xFF000000))


def column_of(config: Any, word: Int32) -> Int32:
    """The column whose weight is word `word`, in the order of `halve_weights`."""
    held = ((word >> Int32(4)) * 2 + ((word >> Int32(1)) & 1)) * 8 + ((word >> Int32(2)) & 3) * 2 + (word & 1)
    return Int32(request_column(config, held))


@cute.jit
def weight_at(kernel: cutlass.Constexpr[Any], weights: Int64, row: Int32, column: Int32) -> Uint32:
    """Float32 bits of a column's weight, from memory; zeros past the last column."""
    config = kernel.config
    value = Uint32(0)
    if column < Int32(config.columns):
        at = Int64(row) * Int64(config.heads) + Int64(column)
        if cutlass.const_expr(config.weights == "float32"):
            value = ptx.load(weights + at * Int64(4), Uint32)
        else:
            value = ptx.load_u16(weights + at * Int64(2)) << Uint32(16)
    return value


@cute.jit
def factor_at(kernel: cutlass.Constexpr[Any], shared: Any, column: Int32, stage: Int32) -> Uint32:
    """Float32 bits of its head's factor; zeros past the last column."""
    factor = Uint32(0)
    if column < Int32(kernel.config.columns):
        factors = shared.factors + Uint32(stage) * Uint32(kernel.places.weight_bytes)
        factor = ptx.load_shared(factors + Uint32(column) * Uint32(4))
    return factor


@cute.jit
def scale_weights(
    kernel: cutlass.Constexpr[Any], shared: Any, weights: Int64, row: Int32, stage: Int32, lane: Int32, asked: Uint32
) -> None:
    """Half of each weight (the ReLU is computed doubled) times its head's factor, in the order of `halve_weights`.
    asked: the lane's weight where a lane has one, see `widen_queries`.

    A row is marked as well if one of these `leaves_range`, and the weights of marked rows stand as they are.
    """
    place = shared.weights + Uint32(stage) * Uint32(kernel.places.weight_bytes)
    words = kernel.places.weight_bytes // 4
    special = ptx.load_shared(shared.marks + Uint32(stage) * Uint32(4)) != Uint32(0)
    for start in cutlass.range_constexpr(0, words, 32):
        word = lane + Int32(start)
        column = column_of(kernel.config, word)
        value = asked
        if cutlass.const_expr(kernel.config.columns > LEAN):
            value = weight_at(kernel, weights, row, column)
        factor = factor_at(kernel, shared, column, stage)
        half = numerics.mul(numerics.bits_float(value), cutlass.Float32(0.5))
        half = numerics.mul(half, numerics.bits_float(factor))
        special = special | leaves_range(value, numerics.float_bits(half))
        if word < Int32(words):
            ptx.store_shared(place + Uint32(word) * Uint32(4), numerics.float_bits(half))
    if cute.arch.vote_any_sync(special):
        keep_weights(kernel, shared, weights, row, stage, lane)


@cute.jit
def keep_weights(
    kernel: cutlass.Constexpr[Any], shared: Any, weights: Int64, row: Int32, stage: Int32, lane: Int32
) -> None:
    """Mark the rows with a weight that `leaves_range`, and put the weights of all marked rows as they are."""
    place = shared.weights + Uint32(stage) * Uint32(kernel.places.weight_bytes)
    where = shared.marks + Uint32(stage) * Uint32(4)
    words = kernel.places.weight_bytes // 4
    mark = ptx.load_shared(where)
    for word in cutlass.range(lane, Int32(words), Int32(32), unroll=1):
        column = column_of(kernel.config, word)
        value = weight_at(kernel, weights, row, column)
        factor = factor_at(kernel, shared, column, stage)
        half = numerics.bits_float(ptx.load_shared(place + Uint32(word) * Uint32(4)))
        if leaves_range(value, numerics.float_bits(half)):
            mark = mark | (Uint32(1) << (Uint32(column) // Uint32(kernel.config.heads)))
    for distance in (1, 2, 4, 8, 16):
        mark = mark | Uint32(cute.arch.shuffle_sync_bfly(mark, distance))
    for word in cutlass.range(lane, Int32(words), Int32(32), unroll=1):
        column = column_of(kernel.config, word)
        value = weight_at(kernel, weights, row, column)
        factor = factor_at(kernel, shared, column, stage)
        if ((mark >> (Uint32(column) // Uint32(kernel.config.heads))) & Uint32(1)) != Uint32(0):
            kept = select(factor == Uint32(NAN_BITS), factor, value)
            ptx.store_shared(place + Uint32(word) * Uint32(4), Uint32(kept))
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        ptx.store_shared(where, mark)
