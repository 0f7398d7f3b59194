"""The K-th largest key of a row that blocks share: few exchanges of 16-bit counts. Points 7 to 9 of the model.

All blocks send their bins to all, so that each finds the threshold by itself, and knows what the blocks before it hold.

* **Two digits**, whatever the keys are: an octave, sign and exponent, of 512; then the value among the 128 of it.
* **One exchange** where the threshold can be expected near some value: the values above a *floor* are counted one by
  one. Among the keys of listed groups the K-th group's maximum bounds the threshold from below, and mostly by little;
  where few of a row's keys are wanted, it lies within some octaves below the best ones. Blocks may have floors of their
  own and send them along: what lies above the highest one all have counted. If the threshold is not there, it may be
  the value of a plateau, zero (`find_plateau`); else two digits are looked for.

There is a histogram for every fourth warp: few octaves hold most keys, and most keys lie below a floor; what counts in
one place takes its turn. Counts are sent cut at `MOST`: no more than 4,096 keys are wanted, so the threshold lies in
such a bin or above it.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from keysieve.device import exchange_cluster, keys, packed, ptx, scan
from keysieve.kernels import select_foreign as foreign
from keysieve.kernels import select_numbers as numbers
from keysieve.kernels import select_steps as steps
from keysieve.kernels.select_config import COPIES, OCTAVE_BITS, SelectConfig, SharedMap

OCTAVES = 1 << OCTAVE_BITS
VALUES = 1 << (16 - OCTAVE_BITS)

ZERO = 0x8000
"""key16 of zero."""

LONG = 48
"""Keys for each wanted one from which on a shared row's threshold is expected near its best keys."""

ROOM = 128
"""Values above the best number that the bins reach to, so that few blocks have keys beyond them."""

UNKNOWN = 0xFFFFFFFF
"""What is not a number's value."""

MOST = 8191
"""Eight of these fit 16 bits."""

FINDERS = OCTAVES // 4
"""Threads that look at the octaves, four each."""


@cute.jit
def octaves_of(base: Uint32, thread: Int32, config: cutlass.Constexpr[SelectConfig], stage: int) -> Uint32:
    """The histogram of octaves that this thread counts in."""
    copy = Uint32(thread >> Int32(5)) & Uint32(COPIES - 1)
    return base + Uint32(SharedMap.of(config).high[stage]) + copy * Uint32(4 * OCTAVES)


def count_values(base: Uint32, words: Any, digit: Uint32, thread: Int32, stage: int) -> None:
    """Count, by the other bits of key16, those of eight keys whose octave is `digit`; keys of other octaves in bins
    behind, which nobody reads."""
    pattern = (digit << Uint32(16 - OCTAVE_BITS)) * Uint32(0x10001)
    if stage == 1:
        pattern = pattern ^ numbers.flip(digit >= Uint32(OCTAVES // 2))
    spare = (Uint32(VALUES) + (Uint32(thread) & Uint32(VALUES - 1))) * Uint32(0x10001)
    for word in words:
        bins = packed.min_u16x2(word ^ pattern, spare)
        ptx.red_shared(base + (bins & Uint32(0xFFFF)) * Uint32(4), Uint32(1), "add")
        ptx.red_shared(base + (bins >> Uint32(14)), Uint32(1), "add")


def count_near(histogram: Uint32, words: Any, floor: Int32) -> None:
    """Count eight numbers by how far they lie above `floor`, a positive number's bits: 0 for what does not, NaNs among
    that, and the last bin takes what lies beyond."""
    both = Uint32(floor) * Uint32(0x10001)
    # 4 * distance + the lower half of the bins' address, in both halves at once: what a half borrows is given back
    start = (histogram & Uint32(0xFFFF)) * Uint32(0x10001) - both * Uint32(4)
    last = both + Uint32((OCTAVES - 1) * 0x10001)
    for word in words:
        places = packed.min_u16x2(packed.max_bf16x2(word, both), last) * Uint32(4) + start
        ptx.red_shared(ptx.byte_perm(places, histogram, Uint32(0x7610)), Uint32(1), "add")
        ptx.red_shared(ptx.byte_perm(places, histogram, Uint32(0x7632)), Uint32(1), "add")


def _pack(low: Uint32, high: Uint32) -> Uint32:
    low, high = packed.min_u32(low, Uint32(MOST)), packed.min_u32(high, Uint32(MOST))
    return ptx.byte_perm(low, high, Uint32(0x5410))


def _unpack(pair: Any, first: Any, second: Any) -> list[Int32]:
    """Four 16-bit counts of two words, in the order that the selectors give."""
    words = ptx.byte_perm(pair[0], pair[1], first), ptx.byte_perm(pair[0], pair[1], second)
    return [Int32(half) for word in words for half in (word & Uint32(0xFFFF), word >> Uint32(16))]


def _gather(place: Uint32, pitch: int, rank: Int32, cluster: int) -> Any:
    """Four counts in two words: the sums over all blocks, and over those before this one."""
    total = [Uint32(0), Uint32(0)]
    before = [Uint32(0), Uint32(0)]
    for peer in range(cluster):
        its = packed.load_shared_v2(place + Uint32(pitch * peer))
        earlier = Uint32(Int32(peer) < rank)
        for half in range(2):
            total[half] = total[half] + its[half]
            before[half] = before[half] + its[half] * earlier
    return total, before


DESCENDING = (0x5476, 0x1032)
ASCENDING = (0x3210, 0x7654)


@cute.jit
def find_digit(
    base: Uint32,
    want: Int32,
    thread: Int32,
    rank: Int32,
    config: cutlass.Constexpr[SelectConfig],
    stage: cutlass.Constexpr[int],
    floor: Any = None,
) -> Any:
    """After all keys were counted by their octaves, or above a `floor`: (the octave of the `want`-th key, or its value,
    `UNKNOWN` if it cannot be told; keys in higher ones in the row; the same in the blocks before this one; in that one,
    in the blocks before this one). The same in all threads. Three block barriers."""
    near = cutlass.const_expr(floor is not None)
    shared = SharedMap.of(config)
    lane = thread & Int32(31)
    warp = thread >> Int32(5)
    found = base + Uint32(shared.found[stage])
    sums = base + Uint32(shared.sums[stage])
    totals = [Int32(0) for _ in range(4)]
    befores = [Int32(0) for _ in range(4)]
    mine = Int32(0)
    mine_before = Int32(0)
    upto = Int32(0)
    upto_before = Int32(0)
    limit = Int32(OCTAVES - 1)  # the last bin has more than one value
    cute.arch.sync_threads()
    if thread < Int32(FINDERS):
        signed = stage == 1 and not near
        first = Int32(OCTAVES - 4) - thread * Int32(4)
        orders = [Uint32(order) for order in DESCENDING]
        if cutlass.const_expr(signed):  # positive numbers from the largest down, then negative ones
            first = Int32(OCTAVES // 2 - 4) - thread * Int32(4)
            if first < Int32(0):
                first = thread * Int32(4)
                orders = [Uint32(order) for order in ASCENDING]
        if cutlass.const_expr(config.cluster == 1):
            four = _sum_copies(base + Uint32(shared.high[stage]) + Uint32(first) * Uint32(4))
            totals = [Int32(one) for one in reversed(four)]
        else:
            arrival = base + Uint32(shared.arrivals + (32 if near else 16 * stage))
            octaves = base + Uint32(shared.octaves[1 if near else 0])
            four = _sum_copies(base + Uint32(shared.high[stage]) + Uint32(thread) * Uint32(16))
            low, high = _pack(four[0], four[1]), _pack(four[2], four[3])
            slot = octaves + Uint32(rank) * Uint32(2 * OCTAVES) + Uint32(thread) * Uint32(8)
            for peer in cutlass.range_constexpr(config.cluster):
                exchange_cluster.send_v2(slot, low, high, arrival, Uint32(peer))
            if cutlass.const_expr(near):
                floors = base + Uint32(shared.floors)
                if thread < Int32(config.cluster):
                    exchange_cluster.send(floors + Uint32(rank) * Uint32(4), Uint32(floor), arrival, Uint32(thread))
            exchange_cluster.receive(arrival)
            if cutlass.const_expr(near):
                total, before, floor, limit = _gather_near(octaves, floors, first, rank, lane, config.cluster)
            else:
                total, before = _gather(octaves + Uint32(first) * Uint32(2), 2 * OCTAVES, rank, config.cluster)
            totals = _unpack(total, *orders)
            befores = _unpack(before, *orders)
        mine = totals[0] + totals[1] + totals[2] + totals[3]
        mine_before = befores[0] + befores[1] + befores[2] + befores[3]
        upto = packed.warp_prefix(mine)
        if cutlass.const_expr(config.cluster > 1):
            upto_before = packed.warp_prefix(mine_before)
        if lane == Int32(31):
            packed.store_shared_v2(sums + Uint32(warp) * Uint32(8), Uint32(upto), Uint32(upto_before))
    cute.arch.sync_threads()
    if thread < Int32(FINDERS):
        above = upto - mine
        above_before = upto_before - mine_before
        for other in cutlass.range_constexpr(FINDERS // 32 - 1):
            its, its_before = packed.load_shared_v2(sums + Uint32(8 * other))
            counts = Int32(Int32(other) < warp)
            above = above + Int32(its) * counts
            above_before = above_before + Int32(its_before) * counts
        if above < want and above + mine >= want:
            digit = Int32(OCTAVES - 1) - thread * Int32(4)
            equal = befores[0]
            going = Int32(1)
            for index in cutlass.range_constexpr(3):
                going = going * Int32(above + totals[index] < want)
                above = above + totals[index] * going
                above_before = above_before + befores[index] * going
                equal = equal + (befores[index + 1] - equal) * going
                digit = digit - going
            value = Uint32(digit)
            if cutlass.const_expr(near):
                value = Uint32(digit + floor)
                if digit == Int32(0) or digit >= limit:
                    value = Uint32(UNKNOWN)
            ptx.store_shared_v4(found, value, Uint32(above), Uint32(above_before), Uint32(equal))
    cute.arch.sync_threads()
    digit_word, above_word, before_word, equal_word = ptx.load_shared_v4(found)
    return digit_word, Int32(above_word), Int32(before_word), Int32(equal_word)


@cute.jit
def _gather_near(
    bins: Uint32, floors: Uint32, first: Int32, rank: Int32, lane: Int32, cluster: cutlass.Constexpr[int]
) -> Any:
    """Four counts in two words as `_gather` gives them, above the highest floor; that floor; and the bin from which on
    they say nothing: some block has keys beyond its own bins, which end there."""
    total = [Uint32(0), Uint32(0)]
    before = [Uint32(0), Uint32(0)]
    peer = Uint32(lane) & Uint32(cluster - 1)
    its = ptx.load_shared(floors + peer * Uint32(4))
    beyond = ptx.load_shared_u16(bins + peer * Uint32(2 * OCTAVES) + Uint32(2 * OCTAVES - 2))
    floor = Int32(scan.warp_max_u32(its))
    shift = (Uint32(floor) - its) * Uint32(beyond != Uint32(0))
    limit = Int32(OCTAVES - 1) - Int32(scan.warp_max_u32(shift))
    for peer in cutlass.range_constexpr(cluster):
        shift = floor - Int32(ptx.load_shared(floors + Uint32(4 * peer)))
        place = packed.min_u32(Uint32(first + shift), Uint32(OCTAVES - 4))
        its = packed.load_shared_v2(bins + Uint32(2 * OCTAVES * peer) + place * Uint32(2))
        inside = Uint32(first + shift <= Int32(OCTAVES - 4))
        earlier = inside * Uint32(Int32(peer) < rank)
        for half in cutlass.range_constexpr(2):
            total[half] = total[half] + its[half] * inside
            before[half] = before[half] + its[half] * earlier
    return total, before, floor, limit


@cute.jit
def floor_of(base: Uint32, words: Any, thread: Int32, config: cutlass.Constexpr[SelectConfig]) -> Int32:
    """A floor for numbers of which nothing is known: what lies below the best number of a block, but for those of one
    warp, by less than the bins reach. A multiple of 4. One block barrier."""
    lane = thread & Int32(31)
    most = _largest(words)
    most = packed.max_bf16x2(packed.max_bf16x2(most, most >> Uint32(16)), Uint32(0)) & Uint32(0xFFFF)
    most = scan.warp_max_u32(most)
    sums = base + Uint32(SharedMap.of(config).sums[0])
    if lane == Int32(0):
        ptx.store_shared(sums + Uint32(thread >> Int32(5)) * Uint32(4), most)
    cute.arch.sync_threads()
    other = Uint32(0)
    if lane < Int32(config.warps):
        other = ptx.load_shared(sums + Uint32(lane) * Uint32(4))
    best = scan.warp_max_u32((other << Uint32(5)) | Uint32(lane))
    if (best & Uint32(31)) == Uint32(lane):
        other = Uint32(0)
    floor = (Int32(scan.warp_max_u32(other)) & Int32(-4)) - Int32(OCTAVES - ROOM)
    if floor < Int32(0):
        floor = Int32(0)
    return floor


def _largest(words: Any) -> Uint32:
    best = list(words)
    while len(best) > 1:
        best = [packed.max_bf16x2(best[2 * i], best[2 * i + 1]) for i in range(len(best) // 2)]
    return best[0]


def _sum_copies(place: Uint32) -> list[Uint32]:
    copies = [ptx.load_shared_v4(place + Uint32(4 * OCTAVES * copy)) for copy in range(COPIES)]
    return [sum(its[1:], start=its[0]) for its in zip(*copies, strict=True)]


@cute.jit
def settle(want: Int32, above: Int32, above_before: Int32, equal_before: Int32) -> Any:
    """(equal keys that this block takes at most, selected keys in the blocks before it), from what lies above the
    threshold in the row, and above it and at it in the blocks before this one."""
    need = want - above
    if equal_before > need:
        equal_before = need
    return need - equal_before, above_before + equal_before


@cute.jit
def find_plateau(
    base: Uint32,
    above: Int32,
    same: Int32,
    want: Int32,
    thread: Int32,
    rank: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> Any:
    """Is the `want`-th key of the row the value above which, and at which, this thread holds `above` and `same` keys?
    (1 or 0; equal keys this block takes at most; selected keys in the blocks before it.) One block barrier."""
    shared = SharedMap.of(config)
    lane = thread & Int32(31)
    both = scan.warp_sum(above | (same << Int32(16)))  # a block has at most 32,768 keys
    sums = base + Uint32(shared.sums[1])
    arrival = base + Uint32(shared.arrivals + 40)
    if lane == Int32(0):
        ptx.store_shared(sums + Uint32(thread >> Int32(5)) * Uint32(4), Uint32(both))
    cute.arch.sync_threads()
    if thread < Int32(32):
        mine = Int32(0)
        if lane < Int32(config.warps):
            mine = Int32(ptx.load_shared(sums + Uint32(lane) * Uint32(4)))
        mine = scan.warp_sum(mine)
        if lane < Int32(config.cluster):
            slot = base + Uint32(shared.floors + 32) + Uint32(rank) * Uint32(4)
            exchange_cluster.send(slot, Uint32(mine), arrival, Uint32(lane))
    exchange_cluster.receive(arrival)
    its = Uint32(0)
    if lane < Int32(config.cluster):
        its = ptx.load_shared(base + Uint32(shared.floors + 32) + Uint32(lane) * Uint32(4))
    its_above = Int32(its & Uint32(0xFFFF))
    its_same = Int32(its >> Uint32(16))
    earlier = Int32(lane < rank)
    above = scan.warp_sum(its_above)
    same = scan.warp_sum(its_same)
    need, slot = settle(want, above, scan.warp_sum(its_above * earlier), scan.warp_sum(its_same * earlier))
    return Int32(above < want) * Int32(above + same >= want), need, slot


@cute.jit
def clear(base: Uint32, thread: Int32, config: cutlass.Constexpr[SelectConfig]) -> None:
    """Zero the second stage's histograms of octaves. A block barrier must follow."""
    for index in cutlass.range_constexpr(-(-COPIES * OCTAVES // 4 // config.threads)):
        place = base + Uint32(SharedMap.of(config).high[1] + 16 * config.threads * index) + Uint32(thread) * Uint32(16)
        if thread + Int32(index * config.threads) < Int32(COPIES * OCTAVES // 4):
            ptx.store_shared_v4(place, Uint32(0), Uint32(0), Uint32(0), Uint32(0))


@cute.jit
def find_value(
    base: Uint32,
    want: Int32,
    above: Int32,
    above_before: Int32,
    thread: Int32,
    rank: Int32,
    config: cutlass.Constexpr[SelectConfig],
    stage: cutlass.Constexpr[int],
) -> Any:
    """After the keys of the threshold's octave were counted: (lower bits of the threshold, equal keys this block takes
    at most, selected keys in the blocks before this one). The same in all threads. Begins with a block barrier."""
    shared = SharedMap.of(config)
    lane = thread & Int32(31)
    warp = thread >> Int32(5)
    arrival = base + Uint32(shared.arrivals + 16 * stage + 8)
    values = base + Uint32(shared.values[stage])
    cute.arch.sync_threads()
    if warp < Int32(config.cluster) and lane < Int32(VALUES // 8):
        place = base + Uint32(shared.low[stage]) + Uint32(lane) * Uint32(32)
        bins = [*ptx.load_shared_v4(place), *ptx.load_shared_v4(place + Uint32(16))]
        words = [_pack(bins[2 * i], bins[2 * i + 1]) for i in range(4)]
        slot = values + Uint32(rank) * Uint32(2 * VALUES) + Uint32(lane) * Uint32(16)
        exchange_cluster.send_v4(slot, *words, arrival, Uint32(warp))
    exchange_cluster.receive(arrival)
    want = want - above
    total, before = _gather(
        values + Uint32(2 * VALUES - 8) - Uint32(lane) * Uint32(8), 2 * VALUES, rank, config.cluster
    )
    totals = _unpack(total, Uint32(DESCENDING[0]), Uint32(DESCENDING[1]))
    befores = _unpack(before, Uint32(DESCENDING[0]), Uint32(DESCENDING[1]))
    mine = totals[0] + totals[1] + totals[2] + totals[3]
    upto = packed.warp_prefix(mine)
    owner = packed.lowest_bit(Uint32(cute.arch.vote_ballot_sync(upto >= want))) & Int32(31)
    # What each lane would say, were it the owner.
    between = upto - mine
    rest = VALUES - 1 - 4 * lane
    partial = Int32(0)
    equal = befores[0]
    going = Int32(1)
    for index in cutlass.range_constexpr(3):
        going = going * Int32(between + totals[index] < want)
        between = between + totals[index] * going
        partial = partial + befores[index] * going
        rest = rest - going
        equal = equal + (befores[index + 1] - equal) * going
    earlier = (befores[0] + befores[1] + befores[2] + befores[3]) * Int32(lane < owner)
    earlier = scan.warp_sum(earlier + partial * Int32(lane == owner))
    need = want - Int32(cute.arch.shuffle_sync(between, owner))
    equal = Int32(cute.arch.shuffle_sync(equal, owner))
    rest = Int32(cute.arch.shuffle_sync(rest, owner))
    quota, slot = settle(want, want - need, above_before + earlier, equal)
    return Uint32(rest), quota, slot


@cute.jit
def settle_nans(
    base: Uint32,
    words: Any,
    thread: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> Any:
    """As `select_foreign.settle_nans`: NaNs share the octave of infinities until they become what they are. Begins with
    a block barrier; another must follow before the bins are read."""
    high = base + Uint32(SharedMap.of(config).high[1])
    some = Uint32(0)
    cute.arch.sync_threads()
    for copy in cutlass.range_constexpr(COPIES):
        some = some | ptx.load_shared(high + Uint32(4 * OCTAVES * copy + 4 * (foreign.ABSENT >> (16 - OCTAVE_BITS))))
    if some != Uint32(0):
        cute.arch.sync_threads()  # everybody has looked
        nans = Uint32(0)
        for index in cutlass.range_constexpr(len(words)):
            low = keys.low16(words[index])
            upper = keys.high16(words[index])
            if low == Uint32(foreign.ABSENT):
                low = Uint32(foreign.NAN_BITS)
                nans = nans + Uint32(1)
            if upper == Uint32(foreign.ABSENT):
                upper = Uint32(foreign.NAN_BITS)
                nans = nans + Uint32(1)
            words[index] = keys.pack16(low, upper)
        if nans != Uint32(0):
            mine = octaves_of(base, thread, config, 1)
            ptx.red_shared(mine + Uint32(4 * (foreign.NAN_BITS >> (16 - OCTAVE_BITS))), nans, "add")
            ptx.red_shared(mine + Uint32(4 * (foreign.ABSENT >> (16 - OCTAVE_BITS))), Uint32(0) - nans, "add")
    return words


def threshold_of(digit: Uint32, rest: Uint32) -> Uint32:
    """key16 of the threshold."""
    return (digit << Uint32(16 - OCTAVE_BITS)) | rest


def count_octaves(histogram: Uint32, words: Any) -> None:
    """Count eight keys or numbers by their octaves, in `octaves_of`."""
    steps.count_high(histogram, words, OCTAVE_BITS)
