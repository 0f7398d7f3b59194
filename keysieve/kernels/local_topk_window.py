"""The N-th largest key of a row that a block, or a cluster of them, holds in registers: one histogram, one exchange.

Point 1 of `keysieve/models/local_topk.py`. A block counts its keys above a *floor* value by value; no key lies more
than 1,023 values above it. The floor is at least that of the window below the block's best key, and where the block
holds enough vectors, it lies just below the bin of the N-th largest of their maxima: N keys reach that, so the row's
threshold does, and few others. Blocks that share a row choose their floors by themselves and send them with their
counts; only what lies above the highest floor is looked at, which all of them have counted.

Where the threshold is not above the highest floor, all keys are counted by their upper 10 bits, then value by value
from the digit found on. Keys that do not count fall into bin 0, which nobody looks at: a predicated atomic would become
a branch.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import exchange_cluster, packed, ptx, scan
from keysieve.kernels.local_topk_config import WINDOW

_COARSE = 6
"""Bits that the coarse digit leaves out."""

STEP = 5
"""log2 of the values in a bin of maxima."""


@cute.jit
def find(
    row: Any,
    words: Any,
    rounds: Int32,
    count: Int32,
    n: Int32,
    top: Uint32,
    bound: Uint32,
    bounded: Any,
    rank: Int32,
    shared: cutlass.Constexpr[bool],
    tops: Any = None,
) -> Any:
    """(the `n`-th largest key of the row; how many keys equal to it are taken; keys above it, and equal to it, in the
    blocks before this one).

    rounds, count: of the vectors that a thread, the block holds in `words`. top: the block's largest key, 0 if that is
    not known. bound: a multiple of 8 that N keys reach, 0 where none is known. bounded: look for one among this block's
    maxima. The histograms are clear, or will be at the first barrier. shared: by all blocks of the cluster. tops: of
    the vectors, if they are known.
    """
    if top == Uint32(0):
        if cutlass.const_expr(tops is None):
            top, bound = find_top(row, vector_tops(row, words, rounds, count), rounds, count, n, bound, bounded)
        else:
            top, bound = find_top(row, tops, rounds, count, n, bound, bounded)
    floor = Uint32(0)
    if top >= Uint32(WINDOW):
        floor = (top | Uint32(7)) - Uint32(WINDOW - 1)
    if bound > floor + Uint32(8):
        floor = bound - Uint32(8)
    row.mark(5)
    for step in cutlass.range_constexpr(row.config.held):
        if has_round(row, step, rounds, count):
            count_near(row.second, words[4 * step : 4 * step + 4], floor)
    row.mark(13)
    floor, digit, above, before_above, before_equal = find_bin(row, floor, n, rank, Int32(0), shared)
    threshold = floor + Uint32(digit)
    if digit < Int32(0):
        floor = Uint32(0)
        shift = Uint32(_COARSE)
        for attempt in cutlass.range(1, 3, unroll=1):
            clear(row)
            cute.arch.sync_threads()
            for step in cutlass.range_constexpr(row.config.held):
                if has_round(row, step, rounds, count):
                    count_from(row.second, words[4 * step : 4 * step + 4], floor, shift)
            _same, digit, above, before_above, before_equal = find_bin(row, floor, n, rank, attempt, shared)
            threshold = floor + Uint32(digit)
            floor = Uint32(0)
            if digit > Int32(0):
                floor = (Uint32(digit) << Uint32(_COARSE)) - Uint32(8)
            shift = Uint32(0)
    return threshold, n - above, before_above, before_equal


@cute.jit
def vector_tops(row: Any, words: Any, rounds: Int32, count: Int32) -> Any:
    """The largest key of each vector that this thread holds."""
    tops = [Uint32(0) for _ in range(row.config.held)]
    for step in cutlass.range_constexpr(row.config.held):
        if has_round(row, step, rounds, count):
            best = ptx.max_u16x2(
                ptx.max_u16x2(words[4 * step], words[4 * step + 1]),
                ptx.max_u16x2(words[4 * step + 2], words[4 * step + 3]),
            )
            tops[step] = ptx.max_u16x2(best, best >> Uint32(16)) & Uint32(0xFFFF)
    return tops


@cute.jit
def find_top(row: Any, tops: Any, rounds: Int32, count: Int32, n: Int32, bound: Uint32, bounded: Any) -> Any:
    """(the block's largest key; a multiple of 8 that `n` keys reach: the lower edge of the bin of the `n`-th largest of
    the vectors' maxima if `bounded`, or what is known). One block barrier."""
    most = Uint32(0)
    for step in cutlass.range_constexpr(row.config.held):
        if has_round(row, step, rounds, count):
            if bounded:
                count_top(row, tops[step])
            most = _max_u32(most, tops[step])
    top = block_top(row, most)
    if bounded:
        # Every warp looks by itself.
        upto = packed.warp_prefix(bin_below(row, top))
        bound = bound_of(top, upto, n, bound)
    return top, bound


@cute.jit
def find_top_shared(row: Any, most: Uint32, n: Int32, rank: Int32) -> Any:
    """After this block's maxima were counted, of which a thread knows the largest, in every block of the cluster: (the
    block's largest key; a bound as in `find_top`, from the maxima of the whole row). One block barrier."""
    cluster = row.config.cluster
    arrival = row.arrivals + Uint32(24)
    top = block_top(row, most)
    if row.warp == Int32(0):
        mine = Uint32(bin_below(row, top))
        place = row.bins + Uint32(rank) * Uint32(144)
        for block in cutlass.range_constexpr(cluster):
            exchange_cluster.send(place + Uint32(row.lane) * Uint32(4), mine, arrival, Uint32(block))
        if row.lane < Int32(cluster):
            exchange_cluster.send(place + Uint32(128), top, arrival, Uint32(row.lane))
    exchange_cluster.receive(arrival)
    tops = [ptx.load_shared(row.bins + Uint32(144 * block + 128)) for block in range(cluster)]
    best = tops[0]
    for block in cutlass.range_constexpr(1, cluster):
        best = _max_u32(best, tops[block])
    total = Int32(0)
    for block in cutlass.range_constexpr(cluster):
        index = row.lane - Int32(best >> Uint32(STEP)) + Int32(tops[block] >> Uint32(STEP))
        if index >= Int32(0):
            total = total + Int32(ptx.load_shared(row.bins + Uint32(144 * block) + Uint32(index) * Uint32(4)))
    return top, bound_of(best, packed.warp_prefix(total), n, Uint32(0))


def count_top(row: Any, best: Uint32) -> None:
    """Count a vector's maximum."""
    ptx.red_shared(row.first + (best >> Uint32(STEP)) * Uint32(4), Uint32(1), "add")


@cute.jit
def block_top(row: Any, most: Uint32) -> Uint32:
    """The block's largest key, from what each thread knows of. One block barrier."""
    most = scan.warp_max_u32(most)
    if row.lane == Int32(0):
        ptx.store_shared(row.sums + Uint32(row.warp) * Uint32(4), most)
    cute.arch.sync_threads()
    top = Uint32(0)
    if row.lane < Int32(row.config.warps):
        top = ptx.load_shared(row.sums + Uint32(row.lane) * Uint32(4))
    return scan.warp_max_u32(top)


@cute.jit
def bin_below(row: Any, top: Uint32) -> Int32:
    """Maxima in the bin that lies as many below the best one's as this lane's number."""
    mine = Int32(top >> Uint32(STEP)) - row.lane
    inside = Int32(0)
    if mine >= Int32(0):
        inside = Int32(ptx.load_shared(row.first + Uint32(mine) * Uint32(4)))
    return inside


@cute.jit
def bound_of(top: Uint32, upto: Int32, n: Int32, bound: Uint32) -> Uint32:
    """The lower edge of the bin of the `n`-th largest maximum, from the sums of the lanes' bins; if it is not in one of
    them, what is known."""
    votes = Uint32(cute.arch.vote_ballot_sync(upto >= n))
    if votes != Uint32(0):
        bound = ((top >> Uint32(STEP)) - Uint32(packed.lowest_bit(votes))) << Uint32(STEP)
    return bound


@cute.jit
def has_round(row: Any, step: cutlass.Constexpr[int], rounds: Int32, count: Int32) -> Any:
    """Does this warp hold any of the block's `count` vectors in round `step`? The same in all its lanes."""
    return Int32(step) < rounds and row.warp * rounds * Int32(32) + Int32(32 * step) < count


@cute.jit
def find_bin(row: Any, floor: Uint32, n: Int32, rank: Int32, attempt: Int32, shared: cutlass.Constexpr[bool]) -> Any:
    """After keys were counted above `floor`: (what the bins found count from; the bin that holds the `n`-th from the
    top, -1 if there are fewer; keys in higher bins; keys in higher bins, and in that one, of the blocks before this
    one). Three block barriers."""
    each = WINDOW // row.config.threads
    cute.arch.sync_threads()
    totals = [Int32(0) for _ in range(each)]  # the lowest bin first; the first thread has the highest bins
    before = [Int32(0) for _ in range(each)]
    lowest = Int32(WINDOW - each) - row.thread * Int32(each)
    if cutlass.const_expr(shared):
        send_counts(row, floor, rank, attempt)
        floor, totals, before = gather_counts(row, lowest, rank, attempt)
        row.mark(14)
    else:
        place = row.second + Uint32(lowest) * Uint32(4)
        if cutlass.const_expr(each == 1):
            totals = [Int32(ptx.load_shared(place))]
        elif cutlass.const_expr(each == 2):
            pair = packed.load_shared_v2(place)
            totals = [Int32(pair[0]), Int32(pair[1])]
        else:
            four = ptx.load_shared_v4(place)
            totals = [Int32(four[0]), Int32(four[1]), Int32(four[2]), Int32(four[3])]
    if lowest == Int32(0):  # not counted
        totals[0] = Int32(0)
        before[0] = Int32(0)
    mine = totals[0]
    mine_before = before[0]
    for index in cutlass.range_constexpr(1, each):
        mine = mine + totals[index]
        mine_before = mine_before + before[index]
    if cutlass.const_expr(row.config.keys <= 1 << 15):
        reach, reach_before = block_prefix_pair(row, mine, mine_before)
    else:
        reach, reach_before = block_prefix(row, mine, mine_before, shared)
    above = reach - mine
    above_before = reach_before - mine_before
    if above < n and reach >= n:
        digit = lowest + Int32(each - 1)
        inside = totals[each - 1]
        inside_before = before[each - 1]
        for index in cutlass.range_constexpr(each - 1):
            if above + inside < n:
                above = above + inside
                above_before = above_before + inside_before
                inside = totals[each - 2 - index]
                inside_before = before[each - 2 - index]
                digit = digit - Int32(1)
        ptx.store_shared_v4(row.found, Uint32(digit), Uint32(above), Uint32(above_before), Uint32(inside_before))
    if row.thread == Int32(row.config.threads - 1) and reach < n:
        ptx.store_shared_v4(row.found, Uint32(0xFFFFFFFF), Uint32(0), Uint32(0), Uint32(0))
    cute.arch.sync_threads()
    digit_word, above_word, above_before_word, inside_before_word = ptx.load_shared_v4(row.found)
    return floor, Int32(digit_word), Int32(above_word), Int32(above_before_word), Int32(inside_before_word)


@cute.jit
def block_prefix(row: Any, mine: Int32, other: Int32, both: cutlass.Constexpr[bool]) -> Any:
    """Sums of `mine` and, if wanted, of `other` over the threads up to this one. One block barrier."""
    upto = packed.warp_prefix(mine)
    upto_other = Int32(0)
    if cutlass.const_expr(both):
        upto_other = packed.warp_prefix(other)
    if row.lane == Int32(31):
        packed.store_shared_v2(row.pair_sums + Uint32(row.warp) * Uint32(8), Uint32(upto), Uint32(upto_other))
    cute.arch.sync_threads()
    of_warp = Int32(0)
    of_warp_other = Int32(0)
    if row.lane < row.warp:
        word, word_other = packed.load_shared_v2(row.pair_sums + Uint32(row.lane) * Uint32(8))
        of_warp = Int32(word)
        of_warp_other = Int32(word_other)
    upto = upto + scan.warp_sum(of_warp)
    if cutlass.const_expr(both):
        upto_other = upto_other + scan.warp_sum(of_warp_other)
    return upto, upto_other


@cute.jit
def block_prefix_pair(row: Any, mine: Int32, other: Int32) -> Any:
    """`block_prefix` of both, whose sums are below 2^16: in one word."""
    upto = packed.warp_prefix(mine | (other << Int32(16)))
    if row.lane == Int32(31):
        ptx.store_shared(row.pair_sums + Uint32(row.warp) * Uint32(4), Uint32(upto))
    cute.arch.sync_threads()
    of_warp = Int32(0)
    if row.lane < row.warp:
        of_warp = Int32(ptx.load_shared(row.pair_sums + Uint32(row.lane) * Uint32(4)))
    sums = Uint32(upto + scan.warp_sum(of_warp))
    return Int32(sums & Uint32(0xFFFF)), Int32(sums >> Uint32(16))


def _buffer(row: Any, attempt: Int32) -> Uint32:
    """Where all blocks' counts of a histogram come to: two places in turn. Who sends the third has heard all of the
    second, so nobody reads the first any more."""
    return row.received + Uint32(attempt & Int32(1)) * Uint32(2 * WINDOW * row.config.cluster)


@cute.jit
def send_counts(row: Any, floor: Uint32, rank: Int32, attempt: Int32) -> None:
    """This block's histogram and floor to all blocks, eight 16-bit counts a store. It is complete and visible. A block
    holds at most 32,768 keys."""
    cluster = row.config.cluster
    arrival = row.arrivals + Uint32(attempt) * Uint32(8)
    if row.thread < Int32(WINDOW // 8):
        low = ptx.load_shared_v4(row.second + Uint32(row.thread) * Uint32(32))
        high = ptx.load_shared_v4(row.second + Uint32(row.thread) * Uint32(32) + Uint32(16))
        halves = [*low, *high]
        words = [halves[2 * i] | (halves[2 * i + 1] << Uint32(16)) for i in range(4)]
        place = _buffer(row, attempt) + Uint32(rank) * Uint32(2 * WINDOW) + Uint32(row.thread) * Uint32(16)
        for block in cutlass.range_constexpr(cluster):
            exchange_cluster.send_v4(place, *words, arrival, Uint32(block))
    if row.thread >= Int32(row.config.threads - cluster):
        target = Uint32(row.config.threads - 1) - Uint32(row.thread)
        place = row.floors + Uint32(attempt) * Uint32(4 * cluster) + Uint32(rank) * Uint32(4)
        exchange_cluster.send(place, floor, arrival, target)


@cute.jit
def gather_counts(row: Any, lowest: Int32, rank: Int32, attempt: Int32) -> Any:
    """(the highest floor; of the bins `lowest` ... from there on, the sums over all blocks; over those before this
    one)."""
    each = WINDOW // row.config.threads
    cluster = row.config.cluster
    totals = [Int32(0) for _ in range(each)]
    before = [Int32(0) for _ in range(each)]
    exchange_cluster.receive(row.arrivals + Uint32(attempt) * Uint32(8))
    places = row.floors + Uint32(attempt) * Uint32(4 * cluster)
    floors = [ptx.load_shared(places + Uint32(4 * block)) for block in range(cluster)]
    floor = floors[0]
    for block in cutlass.range_constexpr(1, cluster):
        floor = _max_u32(floor, floors[block])
    buffer = _buffer(row, attempt)
    for block in cutlass.range_constexpr(cluster):
        first = lowest + Int32(floor - floors[block])
        counts = [Int32(0) for _ in range(each)]
        if first <= Int32(WINDOW - each):
            place = buffer + Uint32(2 * WINDOW * block) + Uint32(first) * Uint32(2)
            if cutlass.const_expr(each == 1):
                counts[0] = Int32(ptx.load_shared_u16(place))
            else:
                for half in cutlass.range_constexpr(each // 2):
                    pair = ptx.load_shared(place + Uint32(4 * half))
                    counts[2 * half] = Int32(pair & Uint32(0xFFFF))
                    counts[2 * half + 1] = Int32(pair >> Uint32(16))
        earlier = Int32(Int32(block) < rank)
        for index in cutlass.range_constexpr(each):
            totals[index] = totals[index] + counts[index]
            before[index] = before[index] + counts[index] * earlier
    return floor, totals, before


@dsl_user_op
def _max_u32(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    return ptx.asm("max.u32 $0, $1, $2;", "=r,r,r", (Uint32,), (a, b), pure=True, loc=loc, ip=ip)[0]


@cute.jit
def clear(row: Any) -> None:
    """Zero the histogram of keys; a block barrier must follow."""
    for place in cutlass.range(row.thread, Int32(WINDOW // 4), row.config.threads, unroll=1):
        ptx.store_shared_v4(row.second + Uint32(place) * Uint32(16), Uint32(0), Uint32(0), Uint32(0), Uint32(0))


def count_near(histogram: Uint32, words: Any, floor: Uint32) -> None:
    """Count eight keys by their distance from `floor`, 0 below; none is WINDOW or more above it."""
    for distances in _distances(words, floor):
        places = distances * Uint32(4)  # of both keys: a distance has ten bits
        ptx.red_shared(histogram + (places & Uint32(0xFFFF)), Uint32(1), "add")
        ptx.red_shared(histogram + (places >> Uint32(16)), Uint32(1), "add")


def count_from(histogram: Uint32, words: Any, floor: Uint32, shift: Uint32) -> None:
    """Count eight keys by their distance from `floor`, 0 below, shifted to the right; the last bin takes what lies
    beyond."""
    for distances in _distances(words, floor):
        for distance in (distances & Uint32(0xFFFF), distances >> Uint32(16)):
            place = packed.min_u32(distance >> shift, Uint32(WINDOW - 1)) * Uint32(4)
            ptx.red_shared(histogram + place, Uint32(1), "add")


def _distances(words: Any, floor: Uint32) -> list[Uint32]:
    """Of two keys a word."""
    both = floor * Uint32(0x10001)
    return [ptx.max_u16x2(word, both) - both for word in words]
