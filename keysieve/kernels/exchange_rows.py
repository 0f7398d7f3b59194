"""What a merged row becomes: winners listed in shared memory, this rank's as rows of its cache, all as positions."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import packed, ptx, scan
from keysieve.device.paged import physical_row, table_entry
from keysieve.kernels import exchange_lists as row_lists
from keysieve.kernels.exchange_lists import FOUND_CUT, FOUND_ROW, FOUND_THRESHOLD, ID_MAX


@cute.jit
def draw_row(lists: Any, ticket: Int64, rows: Int32) -> Int32:
    """The next row; blocks that start later get higher ones. The last block puts the counter back to 0."""
    if lists.thread == Int32(0):
        drawn = ptx.atom_global(ticket, Uint32(1), "add")
        if drawn == Uint32(rows - Int32(1)):
            ptx.store(ticket, Uint32(0), "relaxed", "gpu")
        ptx.store_shared(lists.note(FOUND_ROW), drawn)
    cute.arch.sync_threads()
    return Int32(ptx.load_shared(lists.note(FOUND_ROW)))


@cute.jit
def compact(lists: Any) -> None:
    """The winners' ids in `winners`, source by source, ascending in each; `begins[s]`: winners of lower sources.

    Ends with a block barrier.
    """
    threads = lists.config.threads
    thread = lists.thread
    threshold = ptx.load_shared(lists.note(FOUND_THRESHOLD))
    cut = ptx.load_shared(lists.note(FOUND_CUT))
    span = row_lists.longest(lists)
    total = span * lists.world
    before = Int32(0)
    for start in cutlass.range(0, total, threads, unroll=1):
        flat = Int32(start) + thread
        chosen = Int32(0)
        place = Uint32(0)
        source = flat // span
        index = flat - source * span
        if flat < total:
            word = row_lists.read_entry(lists, source, index)
            if word != Uint32(0):
                position = row_lists.id_of(lists, source, index, word)
                if row_lists.is_chosen(lists, source, index, word, threshold, cut):
                    chosen = Int32(1)
                    place = position
        lower, found = scan.block_exclusive(chosen, lists.sums, thread, threads // 32)
        if flat < total and index == Int32(0):
            ptx.store_shared(lists.begins + Uint32(source) * Uint32(4), Uint32(before + lower))
        if chosen != Int32(0):
            ptx.store_shared(lists.winners + Uint32(before + lower) * Uint32(4), place)
        before = before + found
    if thread == Int32(0):
        ptx.store_shared(lists.begins + Uint32(lists.world) * Uint32(4), Uint32(before))
    cute.arch.sync_threads()


def begin_of(lists: Any, source: Int32) -> Int32:
    """Winners of the sources below `source`."""
    return Int32(ptx.load_shared(lists.begins + Uint32(source) * Uint32(4)))


@cute.jit
def write_owned(lists: Any, row: Int32, where: Any, out: Int64, out_stride: Int64, counts: Int64) -> None:
    """This rank's winners: local indices, or rows of its cache; then -1; and how many they are."""
    table, table_stride, next_n, page_log2, block_rows = where
    first = begin_of(lists, lists.rank)
    owned = begin_of(lists, lists.rank + Int32(1)) - first
    target = out + Int64(row) * out_stride * Int64(4)
    request = row
    if next_n > Int32(1):
        request = row // next_n
    stripe = Uint32(lists.interleave) * Uint32(lists.world)
    for index in cutlass.range(lists.thread, lists.k, lists.config.threads, unroll=1):
        value = Int32(-1)
        if index < owned:
            position = ptx.load_shared(lists.winners + Uint32(first + index) * Uint32(4))
            local = position
            if lists.world > Int32(1):
                whole = position // stripe
                within = (position - whole * stripe) % Uint32(lists.interleave)
                local = whole * Uint32(lists.interleave) + within
            value = Int32(local)
            if table != Int64(0):
                entry = ptx.load(table_entry(table, request, table_stride, value >> page_log2), Int32)
                value = physical_row(entry, value, page_log2, block_rows)
        ptx.store(target + Int64(index) * Int64(4), value)
    if lists.thread == Int32(0):
        ptx.store(counts + Int64(row) * Int64(4), owned)


@cute.jit
def write_positions(lists: Any, row: Int32, positions: Int64, stride: Int64) -> None:
    """All winners' global positions, ascending, then -1: a winner's place is the number of smaller ids of all lists.

    A thread looks for the places of all its winners in step, so that their reads overlap.
    """
    threads = lists.config.threads
    target = positions + Int64(row) * stride * Int64(4)
    total = begin_of(lists, lists.world)
    each = lists.config.k_class // threads
    ids = [Uint32(0) for _ in range(each)]
    places = [Int32(0) for _ in range(each)]
    for one in cutlass.range_constexpr(each):
        index = lists.thread + Int32(one * threads)
        if index < total:
            ids[one] = ptx.load_shared(lists.winners + Uint32(index) * Uint32(4))
    for source in cutlass.range(lists.world, unroll=1):
        first = begin_of(lists, Int32(source))
        count = begin_of(lists, Int32(source) + Int32(1)) - first
        step = Int32(0)
        if count > Int32(0):
            step = Int32(1) << Int32(packed.highest_bit(Uint32(count)))
        begin = lists.winners + Uint32(first) * Uint32(4) - Uint32(4)
        found = [Int32(0) for _ in range(each)]  # winners of the source that are known to be smaller
        while step > Int32(0):
            for one in cutlass.range_constexpr(each):
                next_one = found[one] + step
                seen = Uint32(ID_MAX)
                if next_one <= count:
                    seen = ptx.load_shared(begin + Uint32(next_one) * Uint32(4))
                if seen < ids[one]:
                    found[one] = next_one
            step = step >> Int32(1)
        for one in cutlass.range_constexpr(each):
            places[one] = places[one] + found[one]
    for one in cutlass.range_constexpr(each):
        index = lists.thread + Int32(one * threads)
        if index < lists.k:
            value = Int32(ids[one])
            place = places[one]
            if index >= total:
                value = Int32(-1)
                place = index
            ptx.store(target + Int64(place) * Int64(4), value)
