"""Keys of a row's part that reach a guessed floor: listed, and placed when the threshold is known."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from keysieve.device import packed, ptx
from keysieve.kernels import local_topk_kept as kept
from keysieve.kernels import local_topk_steps as steps
from keysieve.kernels.local_topk_config import NARROW


def kept_of(row: Any) -> int:
    """Keys that a lane keeps in registers: a warp has 32 of each, and reads any more again."""
    return 3 if row.config.threads <= 512 else 2


def reaching_keys(distances: Any) -> Uint32:
    """Which of eight keys reach the floor, at the places of `steps.EQUAL_KEYS`."""
    ones = [packed.min_u16x2(both, Uint32(0x00010001)) for both in distances]
    lower = packed.multiply_add(ones[1], Uint32(4), ones[0])
    upper = packed.multiply_add(ones[3], Uint32(4), ones[2])
    return packed.multiply_add(upper, Uint32(16), lower)


@cute.jit
def list_keys(row: Any, hits: Int32, turn: Any, two: Any) -> Int32:
    """List which keys of this warp's vectors reach the floor: eight times the vector's place and the key's, 16 bits an
    entry, in index order; returns their number. They are visible to the warp."""
    first, second, number, second_number = two
    masks = [reaching_keys(first), reaching_keys(second)]
    mine = Int32(cute.arch.popc(masks[0])) | (Int32(cute.arch.popc(masks[1])) << Int32(16))
    upto = packed.warp_prefix(mine)
    all_of = Int32(cute.arch.shuffle_sync(upto, Int32(31)))
    listed = all_of & Int32(0xFFFF)
    list_bits(row, masks[0], upto & Int32(0xFFFF), number)
    list_bits(row, masks[1], listed + (upto >> Int32(16)), second_number)
    listed = listed + (all_of >> Int32(16))
    for index in cutlass.range(Int32(64) + row.lane, hits + row.lane, 32, unroll=1):
        distances, third = kept.load_kept(row, index, hits, turn)
        mask = reaching_keys(distances)
        more = packed.warp_prefix(Int32(cute.arch.popc(mask)))
        list_bits(row, mask, listed + more, third)
        listed = listed + Int32(cute.arch.shuffle_sync(more, Int32(31)))
    cute.arch.sync_warp()
    return listed


@cute.jit
def list_bits(row: Any, mask: Uint32, end: Int32, number: Uint32) -> None:
    """List the keys of vector `number` whose bits are set, so that the last one is entry `end - 1` of the warp."""
    left = steps.key_order(mask)
    place = row.ids + Uint32(row.warp * Int32(256 * row.config.held) + end) * Uint32(2)
    while left != Uint32(0):
        bit = packed.highest_bit(left)
        place = place - Uint32(2)
        ptx.store_shared_u16(place, number * Uint32(8) + bit)
        left = left ^ (Uint32(1) << bit)


@cute.jit
def load_entry(row: Any, index: Int32, listed: Int32, turn: Any) -> Any:
    """(key16 of the warp's listed key `index`, 0 beyond the last; the lower half of its word)."""
    _least, _minus, negative = turn
    key = Uint32(0)
    tail = Uint32(0)
    if index < listed:
        place = Uint32(row.warp * Int32(256 * row.config.held))
        one = ptx.load_shared_u16(row.ids + (place + Uint32(index)) * Uint32(2))
        key = ptx.load_shared_u16(row.kept + (place + one) * Uint32(2)) ^ Uint32(0x8000)
        if negative != Int32(0) and key < Uint32(0x8000):
            key = key ^ Uint32(0x7FFF)
        tail = Uint32(0xFFFF) - (Uint32(row.start - row.lane) * Uint32(8) + one)
    return key, tail


@cute.jit
def load_entries(row: Any, listed: Int32, turn: Any) -> Any:
    """The first `kept_of` times 32 of the warp's listed keys, one of each a lane: (key16, the words' lower halves)."""
    entries = [Uint32(0) for _ in range(kept_of(row))]
    tails = [Uint32(0) for _ in range(kept_of(row))]
    for index in cutlass.range_constexpr(kept_of(row)):
        if listed > Int32(32 * index):  # the same in all lanes
            entries[index], tails[index] = load_entry(row, row.lane + Int32(32 * index), listed, turn)
    return entries, tails


@cute.jit
def count_bin(
    row: Any, listed: Int32, entries: Any, turn: Any, base: Uint32, shift: Int32, need: Int32, rank: Int32
) -> Any:
    """Of the listed keys from `base` on, fewer than 2^shift above it: (how far the `need`-th from the top lies above
    it; keys above that one; keys above it, and equal to it, of the block before this one). There are so many. Two block
    barriers."""
    width = Uint32(1) << Uint32(shift)
    for index in cutlass.range_constexpr(kept_of(row)):
        count_near(row.again, entries[index], base, width)
    for index in cutlass.range(Int32(32 * kept_of(row)) + row.lane, listed, 32, unroll=1):
        key, _tail = load_entry(row, index, listed, turn)
        count_near(row.again, key, base, width)
    cute.arch.sync_threads()
    if row.warp == Int32(0):
        arrival = row.arrivals + Uint32(40)
        kept.send_narrow(row, row.again, row.received, arrival, rank)
        kept.find_narrow(row, row.received, arrival, need, rank, True)
    cute.arch.sync_threads()
    return ptx.load_shared_v4(row.found)


def count_near(narrow: Uint32, key: Uint32, base: Uint32, width: Uint32) -> None:
    """Count a key by its distance from `base` if that is less than `width`; any other behind all bins."""
    distance = key - base
    place = cutlass.select_(distance < width, distance, Uint32(NARROW))
    ptx.red_shared(narrow + place * Uint32(4), Uint32(1), "add")


@cute.jit
def place_entries(
    row: Any,
    listed: Int32,
    entries: Any,
    tails: Any,
    turn: Any,
    threshold: Uint32,
    need: Int32,
    above: Int32,
    equal: Int32,
) -> Int32:
    """Place the listed keys above the threshold, and equal ones until `need` of the row are; of either, `above` and
    `equal` come before this block's. Returns this block's counts, the equal ones shifted. One block barrier."""
    below = ptx.lanes_below()
    greater = [Uint32(0) for _ in range(kept_of(row))]
    same = [Uint32(0) for _ in range(kept_of(row))]
    total = Int32(0)
    for index in cutlass.range_constexpr(kept_of(row)):
        if listed > Int32(32 * index):
            greater[index] = Uint32(cute.arch.vote_ballot_sync(entries[index] > threshold))
            same[index] = Uint32(cute.arch.vote_ballot_sync(entries[index] == threshold))
            total = total + both_counts(greater[index], same[index])
    for index in cutlass.range(Int32(32 * kept_of(row)) + row.lane, listed + row.lane, 32, unroll=1):
        key, _tail = load_entry(row, index, listed, turn)
        more = Uint32(cute.arch.vote_ballot_sync(key > threshold))
        equals = Uint32(cute.arch.vote_ballot_sync(key == threshold))
        total = total + both_counts(more, equals)
    before, block = steps.block_offsets(row, total, 0)
    row.mark(7)
    before = before + above + (equal << Int32(steps.EQUAL_SHIFT))
    for index in cutlass.range_constexpr(kept_of(row)):
        if listed > Int32(32 * index):
            earlier = before + both_counts(greater[index] & below, same[index] & below)
            place_entry(row, entries[index], tails[index], threshold, need, earlier)
            before = before + both_counts(greater[index], same[index])
    for index in cutlass.range(Int32(32 * kept_of(row)) + row.lane, listed + row.lane, 32, unroll=1):
        key, tail = load_entry(row, index, listed, turn)
        more = Uint32(cute.arch.vote_ballot_sync(key > threshold))
        equals = Uint32(cute.arch.vote_ballot_sync(key == threshold))
        place_entry(row, key, tail, threshold, need, before + both_counts(more & below, equals & below))
        before = before + both_counts(more, equals)
    row.mark(15)
    return block


def both_counts(greater: Uint32, same: Uint32) -> Int32:
    return Int32(cute.arch.popc(greater)) | (Int32(cute.arch.popc(same)) << Int32(steps.EQUAL_SHIFT))


@cute.jit
def place_entry(row: Any, key: Uint32, tail: Uint32, threshold: Uint32, need: Int32, before: Int32) -> None:
    """Place this lane's key if it is taken; before: counts of the row's earlier ones."""
    both = Uint32(before)
    taken = Int32(both >> Uint32(steps.EQUAL_SHIFT))
    wanted = key > threshold or (key == threshold and taken < need)
    if taken > need:
        taken = need
    if wanted:
        slot = (both & Uint32(0xFFFF)) + Uint32(taken)
        ptx.store_shared(row.words + slot * Uint32(4), (key << Uint32(16)) | tail)
