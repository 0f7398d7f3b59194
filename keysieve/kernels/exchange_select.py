"""The K best of the lists of all ranks, in shared memory: threshold, cut among equal keys, saturated ranks.

All threads of the block call these functions together.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from keysieve.device import packed, ptx, scan
from keysieve.kernels.exchange_config import TIES
from keysieve.kernels.exchange_lists import (
    BINS,
    FOUND_ABOVE,
    FOUND_BIN,
    FOUND_CUT,
    FOUND_EQUAL,
    FOUND_THRESHOLD,
    FOUND_TIES,
    ID_MAX,
    global_position,
    id_of,
    is_chosen,
    longest,
    read_entry,
)
from keysieve.kernels.sharding import local_length


@cute.jit
def find_bin(lists: Any, want: Int32, top: Uint32) -> Any:
    """(number, keys of higher numbers, keys of it) of the `want`-th largest of the numbers counted in `high`: those
    from `top - 2047` to `top`, each in the bin of its lower 11 bits. top: 3 above a multiple of 4.

    The lowest number where there are fewer. Four bins a thread. Two block barriers, after which the histogram has been
    read.
    """
    lane = lists.thread & Int32(31)
    warp = lists.thread >> Int32(5)
    warps = lists.config.threads // 32
    lowest = top - Uint32(3) - Uint32(lists.thread) * Uint32(4)
    counts = [Uint32(0) for _ in range(4)]
    place = lists.high + (lowest & Uint32(BINS - 1)) * Uint32(4)
    counts[0], counts[1], counts[2], counts[3] = ptx.load_shared_v4(place)
    mine = Int32(counts[0] + counts[1] + counts[2] + counts[3])
    upto = packed.warp_prefix(mine)
    if lane == Int32(31):
        ptx.store_shared(lists.sums + Uint32(warp) * Uint32(4), Uint32(upto))
    cute.arch.sync_threads()
    of_warp = Int32(0)
    if lane < Int32(warps):
        of_warp = Int32(ptx.load_shared(lists.sums + Uint32(lane) * Uint32(4)))
    reach = scan.warp_sum(of_warp * Int32(lane < warp)) + upto
    if reach >= want and reach - mine < want:
        above = reach - mine
        digit = lowest
        equal = counts[0]
        found = Boolean(False)
        for part in cutlass.range_constexpr(4):
            count = Int32(counts[3 - part])
            if not found:
                if above + count >= want:
                    found = Boolean(True)
                    digit = lowest + Uint32(3 - part)
                    equal = Uint32(count)
                else:
                    above = above + count
        ptx.store_shared(lists.note(FOUND_BIN), digit)
        ptx.store_shared(lists.note(FOUND_BIN + 1), Uint32(above))
        ptx.store_shared(lists.note(FOUND_BIN + 2), equal)
    if lists.thread == Int32(lists.config.threads - 1) and reach < want:
        ptx.store_shared(lists.note(FOUND_BIN), lowest)
        ptx.store_shared(lists.note(FOUND_BIN + 1), Uint32(reach) - counts[0])
        ptx.store_shared(lists.note(FOUND_BIN + 2), counts[0])
    cute.arch.sync_threads()
    digit = ptx.load_shared(lists.note(FOUND_BIN))
    above = Int32(ptx.load_shared(lists.note(FOUND_BIN + 1)))
    return digit, above, Int32(ptx.load_shared(lists.note(FOUND_BIN + 2)))


@cute.jit
def select(lists: Any, counted: cutlass.Constexpr[bool]) -> None:
    """Note the threshold key, and the largest id taken among the keys equal to it. Begins and ends with a barrier.

    counted: the histogram of upper bits is complete already.
    """
    threads = lists.config.threads
    span = longest(lists)
    total = span * lists.world
    if cutlass.const_expr(not counted):
        cute.arch.sync_threads()
        for flat in cutlass.range(lists.thread, total, threads, unroll=1):
            source = flat // span
            word = read_entry(lists, source, flat - source * span)
            if word != Uint32(0):
                scan.histogram_add(lists.high, word >> Uint32(21))
    cute.arch.sync_threads()
    lane = lists.thread & Int32(31)
    if cutlass.const_expr(lists.config.rounds > 0):
        digit, above, _same = find_bin(lists, lists.k, Uint32(BINS - 1))
    else:
        if lists.thread < Int32(32):
            digit, above, _equal = scan.warp_find_digit(lists.high, lists.k, lane, 2048)
            if lane == Int32(0):
                ptx.store_shared(lists.note(FOUND_THRESHOLD), Uint32(digit))
                ptx.store_shared(lists.note(FOUND_ABOVE), Uint32(above))
        cute.arch.sync_threads()
        digit = ptx.load_shared(lists.note(FOUND_THRESHOLD))
        above = Int32(ptx.load_shared(lists.note(FOUND_ABOVE)))
    for flat in cutlass.range(lists.thread, total, threads, unroll=1):
        source = flat // span
        word = read_entry(lists, source, flat - source * span)
        if word != Uint32(0) and (word >> Uint32(21)) == digit:
            scan.histogram_add(lists.low, (word >> Uint32(16)) & Uint32(31))
    cute.arch.sync_threads()
    if lists.thread < Int32(32):
        lower, more, equal = scan.warp_find_digit(lists.low, lists.k - above, lane, 32)
        if lane == Int32(0):
            ptx.store_shared(lists.note(FOUND_THRESHOLD), (digit << Uint32(5)) | Uint32(lower))
            ptx.store_shared(lists.note(FOUND_ABOVE), Uint32(above + more))
            ptx.store_shared(lists.note(FOUND_EQUAL), Uint32(equal))
            ptx.store_shared(lists.note(FOUND_CUT), Uint32(ID_MAX))
            ptx.store_shared(lists.note(FOUND_TIES), Uint32(0))
    cute.arch.sync_threads()
    threshold = ptx.load_shared(lists.note(FOUND_THRESHOLD))
    need = lists.k - Int32(ptx.load_shared(lists.note(FOUND_ABOVE)))
    equal = Int32(ptx.load_shared(lists.note(FOUND_EQUAL)))
    if threshold != Uint32(0) and equal > need:
        if equal <= Int32(TIES):
            cut_few(lists, threshold, need, span, total)
        else:
            cut_many(lists, threshold, need, span, total)
    cute.arch.sync_threads()


@cute.jit
def cut_few(lists: Any, threshold: Uint32, need: Int32, span: Int32, total: Int32) -> None:
    """Note the `need`-th smallest id of the keys equal to the threshold, at most TIES: each counts the smaller ones."""
    threads = lists.config.threads
    for flat in cutlass.range(lists.thread, total, threads, unroll=1):
        source = flat // span
        index = flat - source * span
        word = read_entry(lists, source, index)
        if word != Uint32(0) and (word >> Uint32(16)) == threshold:
            place = ptx.atom_shared(lists.note(FOUND_TIES), Uint32(1), "add")
            ptx.store_shared(lists.ties + place * Uint32(4), id_of(lists, source, index, word))
    cute.arch.sync_threads()
    ties = Int32(ptx.load_shared(lists.note(FOUND_TIES)))
    for tie in cutlass.range(lists.thread, ties, threads, unroll=1):
        mine = ptx.load_shared(lists.ties + Uint32(tie) * Uint32(4))
        smaller = Int32(0)
        for other in cutlass.range(ties, unroll=4):
            smaller = smaller + Int32(ptx.load_shared(lists.ties + Uint32(other) * Uint32(4)) < mine)
        if smaller == need - Int32(1):
            ptx.store_shared(lists.note(FOUND_CUT), mine)


@cute.jit
def cut_many(lists: Any, threshold: Uint32, need: Int32, span: Int32, total: Int32) -> None:
    """The same for any number of equal keys: three digits of nine bits of the reversed ids, largest first."""
    threads = lists.config.threads
    lane = lists.thread & Int32(31)
    prefix = Uint32(0)
    left = need
    for step in cutlass.range_constexpr(3):
        shift = 18 - 9 * step
        for place in cutlass.range(lists.thread, 512, threads, unroll=1):
            ptx.store_shared(lists.low + Uint32(place) * Uint32(4), Uint32(0))
        cute.arch.sync_threads()
        for flat in cutlass.range(lists.thread, total, threads, unroll=1):
            source = flat // span
            index = flat - source * span
            word = read_entry(lists, source, index)
            if word != Uint32(0) and (word >> Uint32(16)) == threshold:
                reverse = Uint32(ID_MAX) - id_of(lists, source, index, word)
                if (reverse >> Uint32(shift + 9)) == prefix:
                    scan.histogram_add(lists.low, (reverse >> Uint32(shift)) & Uint32(511))
        cute.arch.sync_threads()
        if lists.thread < Int32(32):
            digit, above, _equal = scan.warp_find_digit(lists.low, left, lane, 512)
            if lane == Int32(0):
                ptx.store_shared(lists.sums, Uint32(digit))
                ptx.store_shared(lists.sums + Uint32(4), Uint32(above))
        cute.arch.sync_threads()
        prefix = (prefix << Uint32(9)) | ptx.load_shared(lists.sums)
        left = left - Int32(ptx.load_shared(lists.sums + Uint32(4)))
        cute.arch.sync_threads()
    if lists.thread == Int32(0):
        ptx.store_shared(lists.note(FOUND_CUT), Uint32(ID_MAX) - prefix)


@cute.jit
def hidden_sources(lists: Any, length: Int32, known: Any) -> Any:
    """(mask of the sources that have more keys than a first list, may a local index have more than 16 bits?).

    length: the row's global length, if it is `known`; else every source may have more. What counts is whether the row
    reaches the global position behind a full list, or of the local index 2^16.
    """
    source = lists.thread & Int32(31)
    after_list = global_position(lists, source, Uint32(lists.n))
    after_half = global_position(lists, Int32(0), Uint32(1 << 16))
    more = lists.n < lists.k and source < lists.world
    wide = Boolean(True)
    if known:
        more = more and Uint32(length) > after_list
        wide = Uint32(length) > after_half
    return Uint32(cute.arch.vote_ballot_sync(more)), wide


@cute.jit
def saturated(lists: Any, length: Int32, known: Any) -> Uint32:
    """Mask of the ranks whose list is full, shorter than their keys, and chosen entirely. One block barrier.

    length: the row's global length, if it is `known`; else a full list is taken for a cut one.
    """
    threshold = ptx.load_shared(lists.note(FOUND_THRESHOLD))
    cut = ptx.load_shared(lists.note(FOUND_CUT))
    span = lists.n
    for flat in cutlass.range(lists.thread, span * lists.world, lists.config.threads, unroll=1):
        source = flat // span
        index = flat - source * span
        word = read_entry(lists, source, index)
        if not is_chosen(lists, source, index, word, threshold, cut):  # an empty entry is not: the list is not full
            ptx.store_shared(lists.rejected + Uint32(source) * Uint32(4), Uint32(1))
    cute.arch.sync_threads()
    mask = Uint32(0)
    for source in cutlass.range(lists.world, unroll=1):
        hidden = Boolean(True)
        if known:
            keys = local_length(length, Uint32(lists.world), Uint32(source), Uint32(lists.interleave))
            hidden = keys > lists.n
        if hidden and ptx.load_shared(lists.rejected + Uint32(source) * Uint32(4)) == Uint32(0):
            mask = mask | (Uint32(1) << Uint32(source))
    return mask
