"""Keys of a row's part that reach a guessed floor: listed, counted, and placed when the threshold is known.

Keys are looked at as BF16 bits, which are ordered as signed numbers as long as one side of a comparison is positive:
only keys that reach a positive guess matter. A warp works on its own run of vectors alone, in its own places of shared
memory, so that index order is (warp, place).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import exchange_cluster, packed, ptx
from keysieve.kernels import local_topk_steps as steps
from keysieve.kernels.local_topk_config import NARROW


def kept_of(row: Any) -> int:
    """Candidates that a lane keeps in registers: a warp has 32 of each, and reads any more again."""
    return 3 if row.config.threads <= 512 else 2


def places_of(row: Any) -> Uint32:
    """This warp's places of vectors."""
    return row.kept + Uint32(row.warp) * Uint32(16 * 32 * row.config.held)


def landed_of(row: Any) -> Uint32:
    """The mbarrier of this warp's vectors."""
    return row.landed + Uint32(row.warp) * Uint32(8)


@dsl_user_op
def prepare(barrier: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Make an mbarrier that one thread arrives at."""
    ptx.asm("mbarrier.init.shared.b64 [$0], 1;", "r", (), (barrier,), loc=loc, ip=ip)


def inside(words: Any, one: Int32, end: Int32) -> list[Any]:
    """The keys of vector `one` that lie below `end`, 0 for the others."""
    return [
        word & packed.inside_mask(one * Int32(8) + Int32(2 * index), Int32(0), end) for index, word in enumerate(words)
    ]


def lane_bin(bins: Any, wanted: Int32) -> Any:
    """Whole warp: (the sum of this lane's bins and of those of the lanes before it; if the `wanted`-th from the top is
    in one of this lane's eight, the last of them the highest, which one; the number in higher bins)."""
    pairs = [bins[2 * i] + bins[2 * i + 1] for i in range(4)]
    upper = pairs[2] + pairs[3]
    mine = pairs[0] + pairs[1] + upper
    upto = packed.warp_prefix(mine)
    above = upto - mine
    more = above + upper < wanted
    place = _select(more, Int32(0), Int32(4))
    above = _select(more, above + upper, above)
    pair = _select(more, pairs[1], pairs[3])
    ones = [_select(more, bins[1], bins[5]), _select(more, bins[3], bins[7])]
    more = above + pair < wanted
    place = _select(more, place, place + Int32(2))
    above = _select(more, above + pair, above)
    one = _select(more, ones[0], ones[1])
    more = above + one < wanted
    place = _select(more, place, place + Int32(1))
    above = _select(more, above + one, above)
    return upto, place, above


def _select(condition: Any, yes: Any, no: Any) -> Any:
    return cutlass.select_(condition, yes, no)


@cute.jit
def keep_reaching(row: Any, sampled: Any, asked: Int32, least: Uint32) -> Int32:
    """List which of this warp's vectors have a key above `least` (in both halves, positive), in index order; returns
    their number. List and vectors are visible to the warp then."""
    below = ptx.lanes_below()
    number = row.numbers + Uint32(row.warp) * Uint32(32 * row.config.held)
    own = places_of(row) + Uint32(row.lane) * Uint32(16)
    hits = _keep(number, largest(sampled), least, below, Uint32(0), Uint32(row.lane))
    land(row, sampled, asked)
    for step in cutlass.range_constexpr(1, row.config.held):
        one = [Uint32(0) for _ in range(4)]
        if Int32(step) < row.rounds and row.start + Int32(32 * step) < row.vectors:
            loaded = ptx.load_shared_v4(own + Uint32(512 * step))
            for word in cutlass.range_constexpr(4):
                one[word] = loaded[word]
        hits = _keep(number, largest(one), least, below, hits, Uint32(row.lane) + Uint32(32 * step))
    cute.arch.sync_warp()
    return Int32(hits)


@cute.jit
def land(row: Any, sampled: Any, asked: Int32) -> None:
    """Until all of this warp's vectors are in their places; keys past the row's end are 0. Visible to the warp."""
    place = places_of(row)
    ptx.store_shared_v4(place + Uint32(row.lane) * Uint32(16), *sampled)
    if asked > Int32(0):
        exchange_cluster.receive(landed_of(row))
        last = (row.end >> Int32(3)) - (row.start - row.lane)  # its place among the warp's, if the row's end cuts it
        cut = (row.end & Int32(7)) != Int32(0) and last >= Int32(32) and last < row.rounds * Int32(32)
        if cut and row.lane == Int32(0):
            where = place + Uint32(last) * Uint32(16)
            made = inside(ptx.load_shared_v4(where), row.end >> Int32(3), row.end)
            ptx.store_shared_v4(where, *made)
    cute.arch.sync_warp()


def largest(words: Any) -> Uint32:
    """The larger key of each half of four words."""
    return max_s16x2(max_s16x2(words[0], words[1]), max_s16x2(words[2], words[3]))


@cute.jit
def load_kept(row: Any, index: Int32, hits: Int32, least: Uint32) -> Any:
    """(Of the warp's listed vector `index`, how far every key lies above `least`, 0 below and beyond the last; its
    place among the warp's)."""
    words = [Uint32(0) for _ in range(4)]
    number = Uint32(0)
    if index < hits:
        number = packed.load_shared_u8(row.numbers + Uint32(row.warp * Int32(32 * row.config.held) + index))
        loaded = ptx.load_shared_v4(places_of(row) + number * Uint32(16))
        for word in cutlass.range_constexpr(4):
            words[word] = loaded[word]
    for word in cutlass.range_constexpr(4):
        words[word] = max_s16x2(words[word], least) - least
    return words, number


@cute.jit
def count_kept(row: Any, hits: Int32, least: Uint32) -> Any:
    """Count the keys of this warp's vectors by their distance from `least`, the last bin taking what lies beyond.
    Returns the distances and the places of this lane's first two vectors."""
    first, number = load_kept(row, row.lane, hits, least)
    count_distances(row, first)
    second = [Uint32(0) for _ in range(4)]
    second_number = Uint32(0)
    if hits > Int32(32):
        loaded, second_number = load_kept(row, row.lane + Int32(32), hits, least)
        for word in cutlass.range_constexpr(4):
            second[word] = loaded[word]
        count_distances(row, second)
    for index in cutlass.range(Int32(64) + row.lane, hits + row.lane, 32, unroll=1):
        more, _number = load_kept(row, index, hits, least)
        count_distances(row, more)
    return first, second, number, second_number


def count_distances(row: Any, distances: Any) -> None:
    for both in distances:
        places = packed.min_u16x2(both, Uint32((NARROW - 1) * 0x10001)) * Uint32(4)
        ptx.red_shared(row.narrow + (places & Uint32(0xFFFF)), Uint32(1), "add")
        ptx.red_shared(row.narrow + (places >> Uint32(16)), Uint32(1), "add")


@cute.jit
def send_narrow(row: Any, rank: Int32) -> None:
    """One warp: this block's counts to both blocks, eight of a lane, lane 0's the highest. They are visible."""
    lowest = row.narrow + (Uint32(NARROW - 8) - Uint32(8) * Uint32(row.lane)) * Uint32(4)
    bins = [*ptx.load_shared_v4(lowest), *ptx.load_shared_v4(lowest + Uint32(16))]
    words = [bins[2 * i] | (bins[2 * i + 1] << Uint32(16)) for i in range(4)]
    place = row.gathered + Uint32(rank) * Uint32(2 * NARROW) + Uint32(row.lane) * Uint32(16)
    for block in cutlass.range_constexpr(row.config.cluster):
        exchange_cluster.send_v4(place, *words, row.arrivals + Uint32(32), Uint32(block))


@cute.jit
def find_narrow(row: Any, n: Int32, rank: Int32) -> None:
    """One warp: when both blocks' counts are there, note (the bin of the `n`-th from the top, or 0 if it is none but
    the first or the last; keys in higher bins; keys in higher bins, and in that one, of the block before this one)."""
    exchange_cluster.receive(row.arrivals + Uint32(32))
    place = row.gathered + Uint32(row.lane) * Uint32(16)
    first = halves(ptx.load_shared_v4(place))
    second = halves(ptx.load_shared_v4(place + Uint32(2 * NARROW)))
    if row.lane == Int32(31):  # bin 0 has what does not reach the guess
        first[0] = Int32(0)
        second[0] = Int32(0)
    reach, digit, above = lane_bin([a + b for a, b in zip(first, second, strict=True)], n)
    # Of the first block, if this is the second, what is above that bin, and in it.
    earlier = Int32(rank > Int32(0))
    before = Int32(0)
    inside = Int32(0)
    for index in cutlass.range_constexpr(8):
        before = before + first[index] * Int32(Int32(index) > digit)
        inside = inside + first[index] * Int32(Int32(index) == digit)
    mine = first[0] + first[1] + first[2] + first[3] + first[4] + first[5] + first[6] + first[7]
    before = (before + packed.warp_prefix(mine) - mine) * earlier
    votes = Uint32(cute.arch.vote_ballot_sync(reach >= n))
    digit = digit + Int32(NARROW - 8) - Int32(8) * row.lane
    digit = digit * Int32(digit < Int32(NARROW - 1)) * Int32(votes != Uint32(0))  # the last is not one value
    if row.lane == (packed.lowest_bit(votes) & Int32(31)):
        ptx.store_shared_v4(row.found, Uint32(digit), Uint32(above), Uint32(before), Uint32(inside * earlier))


def halves(words: Any) -> list[Int32]:
    return [Int32((word >> Uint32(16 * half)) & Uint32(0xFFFF)) for word in words for half in range(2)]


def reaching_keys(distances: Any) -> Uint32:
    """Which of eight keys are above `least`, at the places of `steps.EQUAL_KEYS`."""
    ones = [packed.min_u16x2(both, Uint32(0x00010001)) for both in distances]
    lower = packed.multiply_add(ones[1], Uint32(4), ones[0])
    upper = packed.multiply_add(ones[3], Uint32(4), ones[2])
    return packed.multiply_add(upper, Uint32(16), lower)


@cute.jit
def list_keys(row: Any, hits: Int32, least: Uint32, two: Any) -> Int32:
    """List which keys of this warp's vectors are above `least`: eight times the vector's place and the key's, 16 bits
    an entry, in index order; returns their number. They are visible to the warp."""
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
        distances, third = load_kept(row, index, hits, least)
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
def load_entry(row: Any, index: Int32, listed: Int32) -> Any:
    """(BF16 bits of the warp's listed key `index`, 0 beyond the last; the lower half of its word)."""
    key = Uint32(0)
    tail = Uint32(0)
    if index < listed:
        place = Uint32(row.warp * Int32(256 * row.config.held))
        one = ptx.load_shared_u16(row.ids + (place + Uint32(index)) * Uint32(2))
        key = ptx.load_shared_u16(row.kept + (place + one) * Uint32(2))
        tail = Uint32(0xFFFF) - (Uint32(row.start - row.lane) * Uint32(8) + one)
    return key, tail


@cute.jit
def load_entries(row: Any, listed: Int32) -> Any:
    """The first `kept_of` times 32 of the warp's listed keys, one of each a lane: (bits, the words' lower halves)."""
    entries = [Uint32(0) for _ in range(kept_of(row))]
    tails = [Uint32(0) for _ in range(kept_of(row))]
    for index in cutlass.range_constexpr(kept_of(row)):
        if listed > Int32(32 * index):  # the same in all lanes
            entries[index], tails[index] = load_entry(row, row.lane + Int32(32 * index), listed)
    return entries, tails


@cute.jit
def place_entries(
    row: Any,
    listed: Int32,
    entries: Any,
    tails: Any,
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
        key, _tail = load_entry(row, index, listed)
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
        key, tail = load_entry(row, index, listed)
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
        ptx.store_shared(row.words + slot * Uint32(4), (key << Uint32(16)) | Uint32(0x80000000) | tail)


@dsl_user_op
def max_s16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Lane-wise signed maximum of two 16-bit halves: one instruction on sm_90 and later."""
    return ptx.asm("max.s16x2 $0, $1, $2;", "=r,r,r", (Uint32,), (a, b), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def _keep(
    numbers: Uint32,
    best: Uint32,
    least: Uint32,
    below: Uint32,
    hits: Uint32,
    number: Uint32,
    *,
    loc: Any = None,
    ip: Any = None,
) -> Uint32:
    """Whole warp: store the numbers, a byte each, of which a half of `best` is above `least`, behind the `hits` before
    them; returns how many there are then. No branch."""
    text = (
        "{ .reg .pred p; .reg .b32 t, v, i; max.s16x2 t, $2, $3; setp.ne.u32 p, t, $3;"
        " vote.sync.ballot.b32 v, p, 0xffffffff; and.b32 i, v, $4; popc.b32 i, i; add.u32 i, i, $5;"
        " add.u32 i, i, $1; @p st.shared.u8 [i], $6; popc.b32 v, v; add.u32 $0, $5, v; }"
    )
    args = (numbers, best, least, below, hits, number)
    return ptx.asm(text, "=&r,r,r,r,r,r,r", (Uint32,), args, loc=loc, ip=ip)[0]
