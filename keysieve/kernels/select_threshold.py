"""The threshold of a stage: of a row that one block works on, by two digits (`select_steps.py`), or of a shared one."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import packed, ptx
from keysieve.kernels import select_foreign as foreign
from keysieve.kernels import select_numbers as numbers
from keysieve.kernels import select_shared as shared_row
from keysieve.kernels import select_steps as steps
from keysieve.kernels.select_config import VECTORS, SelectConfig, SharedMap


@cute.jit
def rounds_of(count: Int32, config: cutlass.Constexpr[SelectConfig]) -> Int32:
    """Vectors a thread holds when a block holds `count`."""
    return (count + Int32(config.threads - 1)) // Int32(config.threads)


@cute.jit
def first_index(rounds: Int32, thread: Int32) -> Int32:
    """Index in the part of the thread's vector of round 0; round r is 32 r further."""
    return (thread >> Int32(5)) * rounds * Int32(32) + (thread & Int32(31))


@cute.jit
def has_round(step: cutlass.Constexpr[int], first: Int32, count: Int32, rounds: Int32, thread: Int32) -> Any:
    """Does this warp hold any vector in round `step`? The same in all its lanes."""
    return Int32(step) < rounds and first - (thread & Int32(31)) + Int32(32 * step) < count


@cute.jit
def more_tops(tops: Int64, first_vector: Int32, index: Int32, count: Int32, groups: Int32) -> Any:
    """One vector of maxima beyond the registers, 0 past the row and past the part."""
    words = [Uint32(0) for _ in range(4)]
    if index < count:
        group = (first_vector + index) * Int32(8)
        loaded = ptx.load_v4(tops + Int64(first_vector + index) * Int64(16))
        for word in cutlass.range_constexpr(4):
            words[word] = loaded[word] & packed.inside_mask(group + Int32(2 * word), Int32(0), groups)
    return words


@cute.jit
def find_key_near(
    base: Uint32,
    words: Any,
    count: Int32,
    k: Int32,
    bound: Int32,
    rounds: Int32,
    first: Int32,
    thread: Int32,
    rank: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> Any:
    """By one histogram: (1 if that gives the threshold, 0 if not; the threshold; equal keys that this block takes at
    most; selected keys in the blocks before it). bound: of listed groups, a positive number's key16 that K of them
    reach, not 511 values or more below the threshold, or this fails; 0 for a long shared row, of which nothing is
    known."""
    octaves = shared_row.octaves_of(base, thread, config, 1)
    floor = bound - Int32(shared_row.ZERO + 1)
    if cutlass.const_expr(config.cluster > 1):  # noqa: SIM102  # a trace-time test, then a run-time one
        if bound == Int32(0):
            floor = shared_row.floor_of(base, words, thread, config)
    for step in cutlass.range_constexpr(VECTORS):
        if Int32(step) < rounds and first + Int32(32 * step) < count:
            shared_row.count_near(octaves, words[4 * step : 4 * step + 4], floor)
    steps.mark(base, thread, 7, config)
    value, above, above_before, equal = shared_row.find_digit(base, k, thread, rank, config, 1, floor)
    need, slot = shared_row.settle(k, above, above_before, equal)
    known = Int32(value != Uint32(shared_row.UNKNOWN))
    threshold = value + Uint32(shared_row.ZERO)
    if known == Int32(0):
        if cutlass.const_expr(config.cluster > 1):  # noqa: SIM102  # a trace-time test, then a run-time one
            if bound == Int32(0):
                above = Int32(0)
                equal = Int32(0)
                threshold = Uint32(shared_row.ZERO)
                for step in cutlass.range_constexpr(VECTORS):
                    if Int32(step) < rounds and first + Int32(32 * step) < count:
                        higher, same = numbers.number_masks(words[4 * step : 4 * step + 4], Uint32(0))
                        above = above + Int32(cute.arch.popc(higher))
                        equal = equal + Int32(cute.arch.popc(same))
                known, need, slot = shared_row.find_plateau(base, above, equal, k, thread, rank, config)
        shared_row.clear(base, thread, config)
        cute.arch.sync_threads()
    return known, threshold, need, slot


@cute.jit
def find_key_alone(
    base: Uint32,
    words: Any,
    count: Int32,
    k: Int32,
    rounds: Int32,
    first: Int32,
    thread: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> Any:
    """Of a row that one block works on: (the words, with NaNs where they belong; the threshold; equal keys taken)."""
    places = SharedMap.of(config)
    bits = config.high_bits(1)
    for step in cutlass.range_constexpr(VECTORS):
        if Int32(step) < rounds and first + Int32(32 * step) < count:
            steps.count_high(base + Uint32(places.high[1]), words[4 * step : 4 * step + 4], bits)
    if cutlass.const_expr(not config.maxima):
        words = foreign.settle_nans(base + Uint32(places.high[1]), words, bits, thread)
    steps.mark(base, thread, 7, config)
    digit, above, _inside = steps.find_high(base, k, thread, config, 1)
    steps.mark(base, thread, 8, config)
    low_bins = base + Uint32(places.low[1])
    for step in cutlass.range_constexpr(VECTORS):
        if has_round(step, first, count, rounds, thread):
            steps.count_low(low_bins, words[4 * step : 4 * step + 4], digit, thread & Int32(31), bits, 1)
    low, need = steps.find_low(base, k, above, thread, config, 1)
    return words, (digit << Uint32(16 - bits)) | low, need


@cute.jit
def find_key_shared(
    base: Uint32,
    words: Any,
    count: Int32,
    k: Int32,
    rounds: Int32,
    first: Int32,
    thread: Int32,
    rank: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> Any:
    """Of a shared row: (the words, with NaNs where they belong; the threshold; equal keys that this block takes at
    most; selected keys in the blocks before it)."""
    places = SharedMap.of(config)
    octaves = shared_row.octaves_of(base, thread, config, 1)
    for step in cutlass.range_constexpr(VECTORS):
        if Int32(step) < rounds and first + Int32(32 * step) < count:
            shared_row.count_octaves(octaves, words[4 * step : 4 * step + 4])
    if cutlass.const_expr(not config.maxima):
        words = shared_row.settle_nans(base, words, thread, config)
    steps.mark(base, thread, 7, config)
    digit, above, above_before, _equal = shared_row.find_digit(base, k, thread, rank, config, 1)
    steps.mark(base, thread, 8, config)
    low_bins = base + Uint32(places.low[1])
    for step in cutlass.range_constexpr(VECTORS):
        if has_round(step, first, count, rounds, thread):
            shared_row.count_values(low_bins, words[4 * step : 4 * step + 4], digit, thread, 1)
    rest, need, slot = shared_row.find_value(base, k, above, above_before, thread, rank, config, 1)
    return words, shared_row.threshold_of(digit, rest), need, slot


@cute.jit
def find_top_alone(
    base: Uint32,
    tops: Int64,
    first_vector: Int32,
    groups: Int32,
    words: list[Uint32],
    count: Int32,
    k: Int32,
    rounds: Int32,
    first: Int32,
    thread: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> Any:
    """Of a row that one block works on: (the threshold among the maxima, equal ones taken). Everything above one below
    the threshold's bin, should it fit the next stage's registers."""
    places = SharedMap.of(config)
    bits = config.high_bits(0)
    high = base + Uint32(places.high[0])
    for step in cutlass.range_constexpr(VECTORS):
        if Int32(step) < rounds and first + Int32(32 * step) < count:
            steps.count_high(high, words[4 * step : 4 * step + 4], bits)
    for step in cutlass.range(VECTORS, rounds, unroll=1):
        if first + step * Int32(32) < count:
            steps.count_high(high, more_tops(tops, first_vector, first + step * Int32(32), count, groups), bits)
    steps.mark(base, thread, 3, config)
    digit, above, inside = steps.find_high(base, k, thread, config, 0)
    threshold = (digit << Uint32(16 - bits)) - Uint32(1)
    need = Int32(0)
    if above + inside > Int32(config.held_groups):
        lane = thread & Int32(31)
        low_bins = base + Uint32(places.low[0])
        for step in cutlass.range_constexpr(VECTORS):
            if has_round(step, first, count, rounds, thread):
                steps.count_low(low_bins, words[4 * step : 4 * step + 4], digit, lane, bits, 0)
        for step in cutlass.range(VECTORS, rounds, unroll=1):
            more = more_tops(tops, first_vector, first + step * Int32(32), count, groups)
            steps.count_low(low_bins, more, digit, lane, bits, 0)
        low, need = steps.find_low(base, k, above, thread, config, 0)
        threshold = (digit << Uint32(16 - bits)) | low
    return threshold, need


@cute.jit
def find_top_shared(
    base: Uint32,
    tops: Int64,
    first_vector: Int32,
    groups: Int32,
    words: list[Uint32],
    count: Int32,
    k: Int32,
    rounds: Int32,
    first: Int32,
    thread: Int32,
    rank: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> Any:
    """Of a shared row: (the threshold among the maxima, equal ones that this block takes at most)."""
    octaves = shared_row.octaves_of(base, thread, config, 0)
    for step in cutlass.range_constexpr(VECTORS):
        if Int32(step) < rounds and first + Int32(32 * step) < count:
            shared_row.count_octaves(octaves, words[4 * step : 4 * step + 4])
    for step in cutlass.range(VECTORS, rounds, unroll=1):
        if first + step * Int32(32) < count:
            shared_row.count_octaves(octaves, more_tops(tops, first_vector, first + step * Int32(32), count, groups))
    steps.mark(base, thread, 3, config)
    digit, above, above_before, _equal = shared_row.find_digit(base, k, thread, rank, config, 0)
    low_bins = base + Uint32(SharedMap.of(config).low[0])
    for step in cutlass.range_constexpr(VECTORS):
        if has_round(step, first, count, rounds, thread):
            shared_row.count_values(low_bins, words[4 * step : 4 * step + 4], digit, thread, 0)
    for step in cutlass.range(VECTORS, rounds, unroll=1):
        more = more_tops(tops, first_vector, first + step * Int32(32), count, groups)
        shared_row.count_values(low_bins, more, digit, thread, 0)
    rest, need, _slot = shared_row.find_value(base, k, above, above_before, thread, rank, config, 0)
    return shared_row.threshold_of(digit, rest), need
