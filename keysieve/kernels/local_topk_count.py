"""Counting keys and finding the N-th largest, in the block that works on a row of the local top-N.

Histograms lie in shared memory; counts are the same in whatever order threads arrive. A row is the handle of
`local_topk_steps`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import packed, ptx, scan
from keysieve.kernels.local_topk_config import BINS


@cute.jit
def search(histogram: Uint32, want: Int32, lane: Int32) -> Any:
    """Whole warp: (the bin that holds the `want`-th from the top, the number in higher bins, the number in it); (-1, _,
    _) if there are fewer. Lane 0 owns the highest four bins of every 128."""
    tail = histogram + Uint32(4 * BINS - 16) - Uint32(lane) * Uint32(16)
    loaded = [ptx.load_shared_v4(tail - Uint32(512 * index)) for index in range(BINS // 128)]
    fours = [Int32(a + b + c + d) for a, b, c, d in loaded]
    totals = [scan.warp_sum(four) for four in fours]
    chunk = Int32(-1)
    above = Int32(0)
    mine = Int32(0)
    upto = Int32(0)
    for index in cutlass.range_constexpr(BINS // 128):
        reach = upto + totals[index]
        hit = Int32(upto < want) * Int32(reach >= want)
        chunk = chunk + hit * Int32(index + 1)
        above = above + hit * upto
        mine = mine + hit * fours[index]
        upto = reach
    lanes = packed.warp_prefix(mine)
    votes = Uint32(cute.arch.vote_ballot_sync(above + lanes >= want))
    owner = packed.lowest_bit(votes) & Int32(31)
    above = above + Int32(cute.arch.shuffle_sync(lanes - mine, owner))
    digit = Int32(-1)
    inside = Int32(0)
    if chunk >= Int32(0):
        place = histogram + Uint32(4 * BINS - 16) - Uint32(chunk) * Uint32(512) - Uint32(owner) * Uint32(16)
        bins = ptx.load_shared_v4(place)
        digit = Int32(BINS - 1) - chunk * Int32(128) - owner * Int32(4)
        inside = Int32(bins[3])
        for index in cutlass.range_constexpr(3):
            if above + inside < want:
                above = above + inside
                inside = Int32(bins[2 - index])
                digit = digit - Int32(1)
    return digit, above, inside


@cute.jit
def block_search(row: Any, histogram: Uint32, want: Int32) -> Any:
    """`search` by one warp, known to all threads. A block barrier before, and one after."""
    cute.arch.sync_threads()
    if row.thread < Int32(32):
        digit, above, inside = search(histogram, want, row.lane)
        if row.lane == Int32(0):
            ptx.store_shared_v4(row.found, Uint32(digit), Uint32(above), Uint32(inside), Uint32(0))
    cute.arch.sync_threads()
    digit_word, above_word, inside_word, _none = ptx.load_shared_v4(row.found)
    return Int32(digit_word), Int32(above_word), Int32(inside_word)


@cute.jit
def block_find(row: Any, histogram: Uint32, want: Int32) -> Any:
    """(the bin that holds the `want`-th from the top, the number in higher bins), by all threads: (-1, _) if there are
    fewer. A block barrier before, one inside and one after."""
    each = BINS // row.config.threads
    cute.arch.sync_threads()
    lowest = histogram + Uint32(4 * (BINS - each)) - Uint32(row.thread) * Uint32(4 * each)
    counts = [Uint32(0) for _ in range(each)]
    if cutlass.const_expr(each == 2):
        counts[0], counts[1] = packed.load_shared_v2(lowest)
    else:
        counts[0], counts[1], counts[2], counts[3] = ptx.load_shared_v4(lowest)
    return find_counted(row, counts, want)


@cute.jit
def find_counted(row: Any, counts: Any, want: Int32) -> Any:
    """`block_find` from this thread's bins, ascending; thread 0 has the highest ones. Two block barriers."""
    each = BINS // row.config.threads
    mine = Int32(0)
    for part in cutlass.range_constexpr(each):
        mine = mine + Int32(counts[part])
    upto = packed.warp_prefix(mine)
    if row.lane == Int32(31):
        ptx.store_shared(row.sums + Uint32(128) + Uint32(row.warp) * Uint32(4), Uint32(upto))
    cute.arch.sync_threads()
    of_warp = Int32(0)
    if row.lane < Int32(row.config.warps):
        of_warp = Int32(ptx.load_shared(row.sums + Uint32(128) + Uint32(row.lane) * Uint32(4)))
    reach = scan.warp_sum(of_warp * Int32(row.lane < row.warp)) + upto
    above = reach - mine
    if above < want and reach >= want:
        digit = Int32(BINS - 1) - row.thread * Int32(each)
        inside = Int32(counts[each - 1])
        for part in cutlass.range_constexpr(each - 1):
            if above + inside < want:
                above = above + inside
                inside = Int32(counts[each - 2 - part])
                digit = digit - Int32(1)
        packed.store_shared_v2(row.found, Uint32(digit), Uint32(above))
    if row.thread == Int32(row.config.threads - 1) and reach < want:
        packed.store_shared_v2(row.found, Uint32(0xFFFFFFFF), Uint32(reach))
    cute.arch.sync_threads()
    digit_word, above_word = packed.load_shared_v2(row.found)
    return Int32(digit_word), Int32(above_word)


@cute.jit
def block_top(row: Any, words: Any) -> Uint32:
    """The largest key of the block's registers. One block barrier."""
    most = Uint32(0)
    for word in words:
        most = ptx.max_u16x2(most, word)
    most = ptx.max_u16x2(most, most >> Uint32(16)) & Uint32(0xFFFF)
    most = scan.warp_max_u32(most)
    if row.lane == Int32(0):
        ptx.store_shared(row.sums + Uint32(row.warp) * Uint32(4), most)
    cute.arch.sync_threads()
    most = Uint32(0)
    if row.lane < Int32(row.config.warps):
        most = ptx.load_shared(row.sums + Uint32(row.lane) * Uint32(4))
    return scan.warp_max_u32(most)


def count_near(histogram: Uint32, words: Any, floor: Uint32) -> None:
    """Count, by their distance from `floor`, those of eight keys that reach it; none is BINS or more above it."""
    base = histogram - floor * Uint32(4)
    for word in words:
        _count_reaching(base, word & Uint32(0xFFFF), floor)
        _count_reaching(base, word >> Uint32(16), floor)


@dsl_user_op
def _count_reaching(base: Uint32, key: Uint32, floor: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Count `key` if it is at least `floor`: no branch."""
    text = (
        "{ .reg .pred p; .reg .b32 a; setp.ge.u32 p, $1, $2; mad.lo.u32 a, $1, 4, $0; @p red.shared.add.u32 [a], 1; }"
    )
    ptx.asm(text, "r,r,r", (), (base, key, floor), loc=loc, ip=ip)


@cute.jit
def find_low(histogram: Uint32, want: Int32, lane: Int32) -> Any:
    """After 32 bins were counted: (the bin of the `want`-th from the top, the number above it). A block barrier; then
    every warp looks by itself."""
    cute.arch.sync_threads()
    upto = packed.warp_prefix(Int32(ptx.load_shared(histogram + (Uint32(31) - Uint32(lane)) * Uint32(4))))
    votes = Uint32(cute.arch.vote_ballot_sync(upto >= want))
    owner = packed.lowest_bit(votes) & Int32(31)
    before = Int32(cute.arch.shuffle_sync(upto, (owner - Int32(1)) & Int32(31))) * Int32(owner > Int32(0))
    return Uint32(31) - Uint32(owner), before


def count_high(histogram: Uint32, words: Any) -> None:
    """Count eight keys by their upper 11 bits."""
    for word in words:
        ptx.red_shared(histogram + ((word >> Uint32(3)) & Uint32(0x1FFC)), Uint32(1), "add")
        ptx.red_shared(histogram + ((word >> Uint32(19)) & Uint32(0x1FFC)), Uint32(1), "add")


def count_low(histogram: Uint32, words: Any, digit: Uint32) -> None:
    """Count, by their lower 5 bits, those of eight keys whose upper 11 bits are `digit`."""
    pattern = (digit << Uint32(5)) | (digit << Uint32(21))
    for word in words:
        rest = word ^ pattern  # a half below 32 is a hit, and its own lower bits
        _count_below(histogram, rest & Uint32(0xFFFF))
        _count_below(histogram, rest >> Uint32(16))


@dsl_user_op
def _count_below(histogram: Uint32, low: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Count `low` if it is below 32: no branch."""
    text = (
        "{ .reg .pred p; .reg .b32 a; setp.lt.u32 p, $1, 32; mad.lo.u32 a, $1, 4, $0; @p red.shared.add.u32 [a], 1; }"
    )
    ptx.asm(text, "r,r", (), (histogram, low), loc=loc, ip=ip)


@cute.jit
def find_held(row: Any, words: Any, rounds: Int32, n: Int32) -> Any:
    """(the `n`-th largest key of the registers, how many keys equal to it are taken). The second histogram and `low`
    are clear, or will be at the first barrier.

    The N best keys mostly lie less than BINS values below the best one: sixteen octaves, for positive logits. Where
    they do not, upper and lower bits are counted one after the other."""
    held = row.config.held
    top = block_top(row, words)
    row.mark(5)
    floor = Uint32(1)
    if top >= Uint32(BINS):
        floor = top - Uint32(BINS - 1)
    for step in cutlass.range_constexpr(held):
        if Int32(step) < rounds:
            count_near(row.second, words[4 * step : 4 * step + 4], floor)
    digit, above = block_find(row, row.second, n)
    threshold = floor + Uint32(digit)
    need = n - above
    if digit < Int32(0):
        for place in cutlass.range(row.thread, Int32(BINS // 4), row.config.threads, unroll=1):
            ptx.store_shared_v4(row.second + Uint32(place) * Uint32(16), Uint32(0), Uint32(0), Uint32(0), Uint32(0))
        cute.arch.sync_threads()
        for step in cutlass.range_constexpr(held):
            if Int32(step) < rounds:
                count_high(row.second, words[4 * step : 4 * step + 4])
        digit, above = block_find(row, row.second, n)
        for step in cutlass.range_constexpr(held):
            if Int32(step) < rounds:
                count_low(row.low, words[4 * step : 4 * step + 4], Uint32(digit))
        low, between = find_low(row.low, n - above, row.lane)
        threshold = (Uint32(digit) << Uint32(5)) | low
        need = n - above - between
    return threshold, need
