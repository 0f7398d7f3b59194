"""A row of more keys than the registers hold: the vectors that hold its N best, by their maxima.

Point 2 of `keysieve/models/local_topk.py`; how a row is spread over the threads: `local_topk_steps`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import packed, ptx
from keysieve.kernels import local_topk_steps as steps


@cute.jit
def fill_maxima(row: Any) -> None:
    """The largest key of every vector to shared memory, counted by its upper 11 bits. The histogram must be clear."""
    held = row.config.held
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
def list_vectors(row: Any, n: Int32) -> Int32:
    """List vectors that hold the row's N best keys, in index order, no more than the registers hold: those whose
    maxima reach the bin of the N-th largest, or exactly the N best by (maximum, lower index). Returns their number. The
    row has at least N vectors. Ends with a block barrier."""
    digit, above, inside = steps.block_search(row, row.first, n)
    threshold = (Uint32(digit) << Uint32(5)) - Uint32(1)
    need = Int32(0)
    if above + inside > n + (n >> Int32(1)) or above + inside > Int32(row.config.threads * row.config.held):
        for number in cutlass.range(row.rounds, unroll=4):
            key = maximum(row, row.start + number * Int32(32))
            if (key >> Uint32(5)) == Uint32(digit):
                ptx.red_shared(row.fine + (key & Uint32(31)) * Uint32(4), Uint32(1), "add")
        low, between = steps.find_low(row.fine, n - above, row.lane)
        threshold = (Uint32(digit) << Uint32(5)) | low
        need = n - above - between
    greater = Int32(0)
    equal = Int32(0)
    for number in cutlass.range(row.rounds, unroll=4):
        key = maximum(row, row.start + number * Int32(32))
        greater = greater + Int32(cute.arch.popc(Uint32(cute.arch.vote_ballot_sync(key > threshold))))
        equal = equal + Int32(cute.arch.popc(Uint32(cute.arch.vote_ballot_sync(key == threshold))))
    equal_before = Int32(0)
    equals = Int32(0)
    if need > Int32(0):
        equal_before, equals = steps.block_offsets(row, equal, 1)
    greater_before, count = steps.block_offsets(row, greater, 0)
    if equals > need:
        equals = need
    below = ptx.lanes_below()
    for number in cutlass.range(row.rounds, unroll=4):
        one = row.start + number * Int32(32)
        key = maximum(row, one)
        more = Uint32(cute.arch.vote_ballot_sync(key > threshold))
        same = Uint32(cute.arch.vote_ballot_sync(key == threshold))
        rank = equal_before + Int32(cute.arch.popc(same & below))
        taken = rank
        if taken > need:
            taken = need
        if key > threshold or (key == threshold and rank < need):
            place = greater_before + Int32(cute.arch.popc(more & below)) + taken
            ptx.store_shared(row.list + Uint32(place) * Uint32(4), Uint32(one))
        greater_before = greater_before + Int32(cute.arch.popc(more))
        equal_before = equal_before + Int32(cute.arch.popc(same))
    cute.arch.sync_threads()
    return count + equals


@cute.jit
def maximum(row: Any, one: Int32) -> Uint32:
    """The largest key of a vector, 0 past the row."""
    key = Uint32(0)
    if one < row.vectors:
        key = ptx.load_shared_u16(row.maxima + Uint32(one) * Uint32(2))
    return key


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
