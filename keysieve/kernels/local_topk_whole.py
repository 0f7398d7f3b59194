"""A row shared by two blocks whose floor could not be guessed, or is a plateau: all keys, from shared memory.

The end of point 1 of `keysieve/models/local_topk.py`: keys are counted by their upper 10 bits, then value by value
from the digit found on. Where most of the sample shows one value, as rows do that have fewer than N positive keys and
zeros else, it is tried as the threshold first: the keys above it and equal to it are counted anyway before they are
placed. Nothing is kept in registers: rows of this kind are seldom, and others want few.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from keysieve.device import exchange_cluster, packed, ptx, scan
from keysieve.kernels import local_topk_steps as steps
from keysieve.kernels import local_topk_window as window

COARSE = 6
"""Bits that the first digit leaves out."""


@cute.jit
def share(row: Any, places: Uint32, n: Int32, rank: Int32) -> Any:
    """This block's words of a shared row: (place of the first, their number). places: of this warp's vectors, which
    have landed and are visible to it. Begins with a block barrier; one has to follow."""
    floor = Uint32(0)
    shift = Uint32(COARSE)
    digit = Int32(0)
    above = Int32(0)
    before_above = Int32(0)
    before_equal = Int32(0)
    threshold = Uint32(0)
    for attempt in cutlass.range(1, 3, unroll=1):
        cute.arch.sync_threads()
        window.clear(row)
        cute.arch.sync_threads()
        for step in cutlass.range(row.rounds, unroll=1):
            window.count_from(row.second, load_keys(row, places, step), floor, shift)
        _same, digit, above, before_above, before_equal = window.find_bin(row, floor, n, rank, attempt, True)
        threshold = floor + Uint32(digit)
        floor = Uint32(0)
        if digit > Int32(0):
            floor = (Uint32(digit) << Uint32(COARSE)) - Uint32(8)
        shift = Uint32(0)
    row.mark(6)
    need = n - above
    equal = before_equal
    if equal > need:
        equal = need
    before, block = count_codes(row, places, threshold)
    place(row, places, threshold, need, before + before_above + (equal << Int32(steps.EQUAL_SHIFT)))
    own = Int32(Uint32(block) >> Uint32(steps.EQUAL_SHIFT))
    if own > need - equal:
        own = need - equal
    return before_above + equal, Int32(Uint32(block) & Uint32(0xFFFF)) + own


@cute.jit
def load_keys(row: Any, places: Uint32, step: Int32) -> Any:
    """key16 of this lane's vector of round `step`, 0 where no key is."""
    one = row.start + step * Int32(32)
    words = [Uint32(0) for _ in range(4)]
    if one < row.vectors:
        loaded = ptx.load_shared_v4(places + Uint32(step) * Uint32(512) + Uint32(row.lane) * Uint32(16))
        made = steps.settle(row, loaded, one)
        for word in cutlass.range_constexpr(4):
            words[word] = made[word]
    return words


@cute.jit
def share_plateau(row: Any, places: Uint32, value: Uint32, n: Int32, rank: Int32) -> Any:
    """(1 if `value` is the `n`-th largest key of the row, and then this block's words: place of the first, number;
    keys of the row above it). places: as for `share`. One block barrier, and one has to follow."""
    before, block = count_codes(row, places, value)
    totals = row.floors + Uint32(64)
    arrival = row.arrivals + Uint32(48)
    if row.thread < Int32(row.config.cluster):
        exchange_cluster.send(totals + Uint32(rank) * Uint32(4), Uint32(block), arrival, Uint32(row.thread))
    exchange_cluster.receive(arrival)
    first, second = packed.load_shared_v2(totals)
    above = Int32((first & Uint32(0xFFFF)) + (second & Uint32(0xFFFF)))
    need = n - above
    holds = Int32(need > Int32(0) and need <= Int32((first >> Uint32(16)) + (second >> Uint32(16))))
    begin = Int32(0)
    count = Int32(0)
    if holds > Int32(0):
        begin = Int32(first & Uint32(0xFFFF)) * Int32(rank > Int32(0))
        equal = Int32(first >> Uint32(16)) * Int32(rank > Int32(0))
        if equal > need:
            equal = need
        place(row, places, value, need, before + begin + (equal << Int32(steps.EQUAL_SHIFT)))
        begin = begin + equal
        own = Int32(Uint32(block) >> Uint32(16))
        if own > need - equal:
            own = need - equal
        count = Int32(Uint32(block) & Uint32(0xFFFF)) + own
    return holds, begin, count, above


@cute.jit
def count_codes(row: Any, places: Uint32, threshold: Uint32) -> Any:
    """(Of the block's keys before this warp's, of all: how many are above the threshold, and equal to it, shifted). One
    block barrier."""
    mine = Uint32(0)
    for step in cutlass.range(row.rounds, unroll=1):
        mine = mine + steps.byte_counts(steps.codes_x8(load_keys(row, places, step), threshold))
    before, block = steps.block_offsets(row, scan.warp_sum(Int32(counts_of(mine))), 0)
    row.mark(7)
    return before, block


@cute.jit
def place(row: Any, places: Uint32, threshold: Uint32, need: Int32, before: Int32) -> None:
    """Place this warp's keys above the threshold, and equal ones until `need` of the row are. before: of either, what
    comes before the warp's in the row; of the equal ones no more than matter."""
    for step in cutlass.range(row.rounds, unroll=1):
        words = load_keys(row, places, step)
        mask = steps.codes_x8(words, threshold)
        count = Int32(counts_of(steps.byte_counts(mask)))
        upto = packed.warp_prefix(count)
        both = Uint32(before + upto - count)
        taken = Int32(both >> Uint32(steps.EQUAL_SHIFT))
        if taken > need:
            taken = need
        kept = steps.first_keys(mask & Uint32(steps.EQUAL_KEYS), need - taken)
        chosen = ((mask >> Uint32(1)) & Uint32(steps.EQUAL_KEYS)) | kept
        slot = Int32(both & Uint32(0xFFFF)) + taken
        put_keys(row, words, chosen, slot, row.start + step * Int32(32))
        before = before + Int32(cute.arch.shuffle_sync(upto, Int32(31)))
    row.mark(15)


def counts_of(counts: Uint32) -> Uint32:
    """Two counts of a byte each, the second shifted by EQUAL_SHIFT instead of 8."""
    return steps.wide_counts(counts) & Uint32(0x00FF00FF)


@cute.jit
def put_keys(row: Any, words: Any, mask: Uint32, place: Int32, one: Int32) -> None:
    """Store those keys of vector `one` that are in the mask (at the places of `EQUAL_KEYS`), as words, from entry
    `place` on."""
    tail = Uint32(0xFFFF) - Uint32(one * Int32(8))
    left = steps.key_order(mask)
    entry = row.words + (Uint32(place) + Uint32(cute.arch.popc(mask))) * Uint32(4)
    while left != Uint32(0):  # from the highest down: finding it takes one instruction
        bit = packed.highest_bit(left)
        entry = entry - Uint32(4)
        ptx.store_shared(entry, (steps.key_of(words, bit) << Uint32(16)) | (tail - bit))
        left = left ^ (Uint32(1) << bit)
