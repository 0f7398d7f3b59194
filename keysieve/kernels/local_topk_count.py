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
def find_low(histogram: Uint32, want: Int32, lane: Int32) -> Any:
    """After 32 bins were counted: (the bin of the `want`-th from the top, the number above it). A block barrier; then
    every warp looks by itself."""
    cute.arch.sync_threads()
    upto = packed.warp_prefix(Int32(ptx.load_shared(histogram + (Uint32(31) - Uint32(lane)) * Uint32(4))))
    votes = Uint32(cute.arch.vote_ballot_sync(upto >= want))
    owner = packed.lowest_bit(votes) & Int32(31)
    before = Int32(cute.arch.shuffle_sync(upto, (owner - Int32(1)) & Int32(31))) * Int32(owner > Int32(0))
    return Uint32(31) - Uint32(owner), before


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
