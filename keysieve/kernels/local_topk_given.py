"""A row of more keys than the registers hold, whose vectors' maxima the scorer has written: what holds its N best.

Point 2 of `keysieve/models/local_topk.py`. Maxima that the block's registers hold stay there, and the bound is looked
for in the bins below the best one; others, and where that finds none, go to shared memory and are looked at as if the
block had found them itself (`local_topk_long`).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from keysieve.device import packed, ptx
from keysieve.kernels import local_topk_long as long
from keysieve.kernels import local_topk_steps as steps
from keysieve.kernels import local_topk_window as window
from keysieve.kernels.local_topk_config import BINS

FINE = 4
"""log2 of the values in a bin of maxima that registers hold."""

EIGHTS = 1024
"""Eights of maxima of a row up to which threads keep them in registers: of 65,536 keys."""


@cute.jit
def find(row: Any, tops: Int64, n: Int32) -> None:
    """The words of a row of more keys than the registers hold. tops: address of its maxima."""
    count, bound, top = list_vectors(row, tops, n)
    row.mark(3)
    words, vectors, rounds = long.load_listed(row, count)
    row.mark(4)
    steps.place_held(row, words, vectors, rounds, count, n, top, bound, Boolean(False))


@cute.jit
def list_vectors(row: Any, tops: Int64, n: Int32) -> Any:
    """List vectors that hold the row's N best keys, in index order; returns (their number, a multiple of 8 that N keys
    reach, the row's largest key or 0 if that is not known). tops: address of the row's maxima, key16 of every 8 keys.
    Ends with a block barrier."""
    each = max(1, EIGHTS // row.config.threads)  # neighbouring eights of a thread
    eights = (row.vectors + Int32(7)) >> Int32(3)
    top = Uint32(0)
    bound = Uint32(0)
    count = Int32(0)
    listed = Boolean(False)
    if eights <= Int32(row.config.threads * each):
        words = []
        best = Uint32(0)
        for index in cutlass.range_constexpr(each):
            words += load_eight(row, tops, row.thread * Int32(each) + Int32(index), eights)
        for word in words:
            best = ptx.max_u16x2(best, word)
        count_fine(row, words)
        best = ptx.max_u16x2(best, best >> Uint32(16)) & Uint32(0xFFFF)
        row.mark(1)
        top = window.block_top(row, best)
        bound = find_fine(row, top, n)
        row.mark(2)
        least = (bound - Uint32(1)) * Uint32(0x10001)
        masks = [steps.compare_x8("lt", *words[4 * i : 4 * i + 4], least) for i in range(each)]
        mine = Int32(0)
        for mask in masks:
            mine = mine + Int32(cute.arch.popc(mask))
        upto = packed.warp_prefix(mine)
        before, found = steps.block_offsets(row, Int32(cute.arch.shuffle_sync(upto, Int32(31))), 1)
        if bound != Uint32(0) and found <= Int32(row.config.threads * row.config.held):
            listed = Boolean(True)
            count = found
            place = row.list + Uint32(before + upto - mine) * Uint32(4)
            for index in cutlass.range_constexpr(each):
                number = Uint32(row.thread * Int32(8 * each) + Int32(8 * index))
                packed.store_bits_x8(place, number, masks[index])
                place = place + Uint32(4) * Uint32(cute.arch.popc(masks[index]))
        else:
            for place in cutlass.range(row.thread, Int32(BINS // 4), row.config.threads, unroll=1):
                ptx.store_shared_v4(row.first + Uint32(place) * Uint32(16), Uint32(0), Uint32(0), Uint32(0), Uint32(0))
            for index in cutlass.range_constexpr(each):
                place = row.maxima + Uint32(row.thread * Int32(each) + Int32(index)) * Uint32(16)
                ptx.store_shared_v4(place, *words[4 * index : 4 * index + 4])
        cute.arch.sync_threads()
        if not listed:
            count_eights(row, words)
    else:
        copy_maxima(row, tops, eights)
    if not listed:
        top = Uint32(0)
        count, bound = long.list_vectors(row, n)
    return count, bound, top


@cute.jit
def load_eight(row: Any, tops: Int64, place: Int32, eights: Int32) -> Any:
    """Eight neighbouring maxima, 0 past the row."""
    words = [Uint32(0) for _ in range(4)]
    if place < eights:
        loaded = ptx.load_v4(tops + Int64(place) * Int64(16))
        for word in cutlass.range_constexpr(4):
            words[word] = loaded[word]
        if place * Int32(8) + Int32(8) > row.vectors:
            for word in cutlass.range_constexpr(4):
                inside = packed.inside_mask(place * Int32(8) + Int32(2 * word), Int32(0), row.vectors)
                words[word] = words[word] & inside
    return words


def count_fine(row: Any, words: Any) -> None:
    """Count maxima by the upper 12 bits; those of negative numbers fall into bin 0, which nobody looks at."""
    for word in words:
        word = ptx.max_u16x2(word, Uint32(0x80008000))
        for shift in (2, 18):
            place = (word >> Uint32(shift)) & Uint32(0x1FFC)
            ptx.red_shared(row.first + place, Uint32(1), "add")


@cute.jit
def find_fine(row: Any, top: Uint32, n: Int32) -> Uint32:
    """The lower edge of the bin of the `n`-th largest maximum, a multiple of 16, if it is one of the 64 from the best
    one's down, and not bin 0; else 0. Every warp looks by itself, a lane at two bins."""
    first = Int32(top >> Uint32(FINE)) - Int32(BINS) - Int32(2) * row.lane
    upper = Int32(0)
    lower = Int32(0)
    if first >= Int32(1):
        upper = Int32(ptx.load_shared(row.first + Uint32(first) * Uint32(4)))
    if first >= Int32(2):
        lower = Int32(ptx.load_shared(row.first + Uint32(first) * Uint32(4) - Uint32(4)))
    upto = packed.warp_prefix(upper + lower)
    votes = Uint32(cute.arch.vote_ballot_sync(upto >= n))
    bound = Uint32(0)
    if votes != Uint32(0):
        mine = first - Int32(upto - lower < n)
        mine = Int32(cute.arch.shuffle_sync(mine, packed.lowest_bit(votes) & Int32(31)))
        bound = Uint32(mine + Int32(BINS)) << Uint32(FINE)
    return bound


def count_eights(row: Any, words: Any) -> None:
    """Count maxima by their upper 11 bits."""
    for word in words:
        window.count_top(row, word & Uint32(0xFFFF))
        window.count_top(row, word >> Uint32(16))


@cute.jit
def copy_maxima(row: Any, tops: Int64, eights: Int32) -> None:
    """The row's maxima to shared memory, counted by their upper 11 bits. The histogram must be clear."""
    held = row.config.held
    each = Int32(row.config.threads)
    for batch in cutlass.range((eights + each * Int32(held) - Int32(1)) // (each * Int32(held)), unroll=1):
        first = batch * each * Int32(held) + row.thread
        words = [Uint32(0) for _ in range(4 * held)]
        for step in cutlass.range_constexpr(held):
            loaded = load_eight(row, tops, first + Int32(step) * each, eights)
            for word in cutlass.range_constexpr(4):
                words[4 * step + word] = loaded[word]
        for step in cutlass.range_constexpr(held):
            place = first + Int32(step) * each
            if place < eights:
                ptx.store_shared_v4(row.maxima + Uint32(place) * Uint32(16), *words[4 * step : 4 * step + 4])
                count_eights(row, words[4 * step : 4 * step + 4])
