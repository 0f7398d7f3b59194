"""A row of more keys than the registers hold: the vectors that hold its N best, by their maxima.

Point 2 of `keysieve/models/local_topk.py`; how a row is spread over the threads: `local_topk_steps`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from keysieve.device import packed, ptx, scan
from keysieve.kernels import local_topk_count as counting
from keysieve.kernels import local_topk_steps as steps


@cute.jit
def find(row: Any, n: Int32) -> None:
    """The words of a row of more keys than the registers hold, from vectors that hold all of its N best."""
    fill_maxima(row)
    row.mark(2)
    count, bound = list_vectors(row, n)
    row.mark(3)
    words, vectors, rounds = load_listed(row, count)
    row.mark(4)
    steps.place_held(row, words, vectors, rounds, count, n, Uint32(0), bound, Boolean(False))


@cute.jit
def fill_maxima(row: Any) -> None:
    """The largest key of every vector to shared memory, counted by its upper 11 bits. The histogram must be clear."""
    held = row.config.held
    behind = row.vectors + row.thread
    if behind < ((row.vectors + Int32(7)) >> Int32(3)) * Int32(8):  # they are looked at by eights
        ptx.store_shared_u16(row.maxima + Uint32(behind) * Uint32(2), Uint32(0))
    for batch in cutlass.range(row.batches, unroll=1):
        raw = [Uint32(0) for _ in range(4 * held)]
        for step in cutlass.range_constexpr(held):
            one = row.start + (batch * Int32(held) + Int32(step)) * Int32(32)
            if batch * Int32(held) + Int32(step) < row.rounds and one < row.vectors:
                loaded = ptx.load_v4(row.address + Int64(one) * Int64(16))
                for word in cutlass.range_constexpr(4):
                    raw[4 * step + word] = loaded[word]
        for step in cutlass.range_constexpr(held):
            one = row.start + (batch * Int32(held) + Int32(step)) * Int32(32)
            if batch * Int32(held) + Int32(step) < row.rounds and one < row.vectors:
                if one * Int32(8) + Int32(8) > row.length:
                    for word in cutlass.range_constexpr(4):
                        inside = packed.inside_mask(one * Int32(8) + Int32(2 * word), Int32(0), row.length)
                        raw[4 * step + word] = raw[4 * step + word] | (inside ^ Uint32(0xFFFFFFFF))  # NaN: no maximum
                key = packed.foreign_top(raw[4 * step : 4 * step + 4])
                ptx.store_shared_u16(row.maxima + Uint32(one) * Uint32(2), key)
                ptx.red_shared(row.first + (key >> Uint32(5)) * Uint32(4), Uint32(1), "add")


@cute.jit
def list_vectors(row: Any, n: Int32) -> Any:
    """List vectors that hold the row's N best keys, in index order, no more than the registers hold: those whose
    maxima reach the bin of the N-th largest, or exactly the N best by (maximum, lower index). Returns (their number, a
    multiple of 8 that N keys reach). The row has at least N vectors. A lane looks at eight neighbouring maxima at a
    time. Ends with a block barrier."""
    eights = (row.vectors + Int32(7)) >> Int32(3)
    rounds = (eights + Int32(row.config.threads - 1)) // Int32(row.config.threads)
    first = row.warp * rounds * Int32(32) + row.lane
    digit, above, inside = counting.block_search(row, row.first, n)
    threshold = (Uint32(digit) << Uint32(5)) - Uint32(1)
    need = Int32(0)
    if above + inside > n + (n >> Int32(1)) or above + inside > Int32(row.config.threads * row.config.held):
        for number in cutlass.range(rounds, unroll=1):
            counting.count_low(row.fine, eight_maxima(row, first + number * Int32(32), eights), Uint32(digit))
        low, between = counting.find_low(row.fine, n - above, row.lane)
        threshold = (Uint32(digit) << Uint32(5)) | low
        need = n - above - between
    total = Int32(0)
    masks = Uint32(0)
    for number in cutlass.range(rounds, unroll=1):
        greater, same = packed.masks_x8(eight_maxima(row, first + number * Int32(32), eights), threshold)
        masks = greater | (same << Uint32(8))
        total = total + steps.counts_of(masks)
    before, all_of = steps.block_offsets(row, scan.warp_sum(total), 0)
    for number in cutlass.range(rounds, unroll=1):
        place = first + number * Int32(32)
        if rounds > Int32(1):
            greater, same = packed.masks_x8(eight_maxima(row, place, eights), threshold)
            masks = greater | (same << Uint32(8))
        mine = steps.counts_of(masks)
        upto = packed.warp_prefix(mine)
        both = Uint32(before + upto - mine)
        taken = Int32(both >> Uint32(steps.EQUAL_SHIFT))
        if taken > need:
            taken = need
        kept = steps.first_bits(masks >> Uint32(8), need - taken)
        slot = Int32(both & Uint32(0xFFFF)) + taken
        packed.store_bits_x8(
            row.list + Uint32(slot) * Uint32(4), Uint32(place * Int32(8)), (masks & Uint32(0xFF)) | kept
        )
        before = before + Int32(cute.arch.shuffle_sync(upto, Int32(31)))
    cute.arch.sync_threads()
    count = all_of & Int32(0xFFFF)
    if need > Int32(0):
        count = n  # by what `need` is; there are as many equal ones
    return count, Uint32(digit) << Uint32(5)


@cute.jit
def eight_maxima(row: Any, place: Int32, eights: Int32) -> Any:
    """Eight neighbouring maxima, 0 past the row."""
    words = [Uint32(0) for _ in range(4)]
    if place < eights:
        loaded = ptx.load_shared_v4(row.maxima + Uint32(place) * Uint32(16))
        for word in cutlass.range_constexpr(4):
            words[word] = loaded[word]
    return words


@cute.jit
def load_listed(row: Any, count: Int32) -> Any:
    """(key16 of this thread's vectors of the list, 0 where no key is; their numbers; the rounds)."""
    held = row.config.held
    rounds = (count + Int32(row.config.threads - 1)) // Int32(row.config.threads)
    first = row.warp * rounds * Int32(32) + row.lane
    words = [Uint32(0) for _ in range(4 * held)]
    vectors = [Int32(0) for _ in range(held)]
    for step in cutlass.range_constexpr(held):
        index = first + Int32(32 * step)
        vectors[step] = row.vectors
        if Int32(step) < rounds and index < count:
            vectors[step] = Int32(ptx.load_shared(row.list + Uint32(index) * Uint32(4)))
    for step in cutlass.range_constexpr(held):
        if vectors[step] < row.vectors:
            loaded = ptx.load_v4(row.address + Int64(vectors[step]) * Int64(16))
            for word in cutlass.range_constexpr(4):
                words[4 * step + word] = loaded[word]
    for step in cutlass.range_constexpr(held):
        if Int32(step) < rounds:
            made = steps.settle(row, words[4 * step : 4 * step + 4], vectors[step])
            for word in cutlass.range_constexpr(4):
                words[4 * step + word] = made[word]
    return words, vectors, rounds
