"""Warp and block scans, histograms, digit search. Counts are Int32; shared memory is addressed by `Uint32` bytes.

No result depends on the order in which threads arrive: histograms only add, positions come from scans.
All lanes of a warp call the warp functions together; all threads of the block (or of the stated group) the block ones.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from keysieve.device import ptx

WARP = 32


@cute.jit
def warp_inclusive(value: Int32, lane: Int32) -> Int32:
    """Sum over lanes 0..lane of `value`."""
    total = value
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(total, 1 << step, mask_and_clamp=0)
        if lane >= Int32(1 << step):
            total = total + other
    return total


@cute.jit
def warp_sum(value: Int32) -> Int32:
    """Sum over the warp, in every lane (one instruction on sm_80 and later)."""
    return Int32(cute.arch.warp_redux_sync(value, "add"))


@cute.jit
def warp_max_u32(value: Uint32) -> Uint32:
    """Unsigned maximum over the warp, in every lane."""
    return Uint32(cute.arch.warp_redux_sync(value, "umax"))


@cute.jit
def ballot_rank(flag: Any, below: Uint32) -> Any:
    """(number of set flags in lanes below this one, number in the warp). below: `ptx.lanes_below()`."""
    votes = Uint32(cute.arch.vote_ballot_sync(flag))
    return Int32(cute.arch.popc(votes & below)), Int32(cute.arch.popc(votes))


@cute.jit
def block_exclusive(value: Int32, scratch: Uint32, thread: Int32, warps: cutlass.Constexpr[int]) -> Any:
    """(sum of `value` over lower threads, sum over the block), for a block of `warps` warps (at most 32).

    scratch: shared address of `warps` words. Holds two block barriers; scratch may be reused after the next barrier.
    """
    lane = thread % Int32(WARP)
    warp = thread // Int32(WARP)
    inclusive = warp_inclusive(value, lane)
    if lane == Int32(WARP - 1):
        ptx.store_shared(scratch + Uint32(warp) * Uint32(4), Uint32(inclusive))
    cute.arch.sync_threads()
    # Every warp scans the warps' totals by itself: one barrier fewer than letting one warp do it.
    total_of = Int32(0)
    if lane < Int32(warps):
        total_of = Int32(ptx.load_shared(scratch + Uint32(lane) * Uint32(4)))
    warp_totals = warp_inclusive(total_of, lane)
    before = cute.arch.shuffle_sync(warp_totals, (warp + Int32(WARP - 1)) % Int32(WARP))
    if warp == Int32(0):
        before = Int32(0)
    block_total = cute.arch.shuffle_sync(warp_totals, Int32(WARP - 1))
    cute.arch.sync_threads()
    return before + inclusive - value, block_total


@cute.jit
def clear_words(base: Uint32, words: Int32, thread: Int32, threads: cutlass.Constexpr[int]) -> None:
    """Zero `words` 32-bit words of shared memory at `base`, strided over `threads` threads. No barrier inside."""
    for index in cutlass.range(thread, words, threads, unroll=1):
        ptx.store_shared(base + Uint32(index) * Uint32(4), Uint32(0))


def histogram_add(base: Uint32, digit: Uint32) -> None:
    """Count one key in bin `digit` of a shared histogram of 32-bit counters."""
    ptx.red_shared(base + digit * Uint32(4), Uint32(1), "add")


@cute.jit
def warp_find_digit(base: Uint32, rank: Int32, lane: Int32, bins: cutlass.Constexpr[int]) -> Any:
    """Search a histogram from the top bin down for the bin that holds the `rank`-th largest key (rank from 1).

    base: shared address of `bins` counters (a multiple of 32), 16-byte aligned. One warp calls it; every lane gets
    (digit, above, equal): the bin, the keys in higher bins (< rank), and the keys in it (above + equal >= rank).
    When the histogram holds fewer than `rank` keys (rank < 1 likewise) the result is (0, total - h[0], h[0]).

    Each lane owns bins / 32 neighbouring bins, lane 0 the highest; a scan over lanes finds the lane, a walk the bin.
    """
    each = bins // WARP
    first = Int32(bins) - (lane + Int32(1)) * Int32(each)  # lowest bin of this lane's run
    mine = Int32(0)
    for index in cutlass.range(each, unroll=4):
        mine = mine + Int32(ptx.load_shared(base + Uint32(first + index) * Uint32(4)))
    upto = warp_inclusive(mine, lane)
    holds = upto >= rank
    votes = Uint32(cute.arch.vote_ballot_sync(holds))
    owner = Int32(WARP - 1)  # nobody: the lowest bin answers
    if votes != Uint32(0):
        owner = Int32(cute.arch.popc((votes - Uint32(1)) & (votes ^ Uint32(0xFFFFFFFF))))  # lowest set bit
    above = Int32(cute.arch.shuffle_sync(upto - mine, owner))
    top = Int32(bins) - owner * Int32(each) - Int32(1)
    # The owner's bins, highest first, one per lane and round: found when the running count reaches the rank.
    digit = Int32(0)
    equal = Int32(0)
    found = Int32(0)
    for start in cutlass.range(0, each, WARP, unroll=1):
        index = start + lane
        count = Int32(0)
        if index < Int32(each):
            count = Int32(ptx.load_shared(base + Uint32(top - index) * Uint32(4)))
        reach = warp_inclusive(count, lane) + above
        hits = Uint32(cute.arch.vote_ballot_sync(reach >= rank and index < Int32(each)))
        last = start + Int32(WARP) >= Int32(each)
        pick = Int32(cute.arch.popc((hits - Uint32(1)) & (hits ^ Uint32(0xFFFFFFFF))))
        take = hits != Uint32(0)
        if hits == Uint32(0) and last:  # fewer keys than the rank: bin 0
            pick = Int32(each) - Int32(1) - start
            take = True
        if found == Int32(0):
            if take:
                digit = top - start - pick
                equal = Int32(cute.arch.shuffle_sync(count, pick))
                above = Int32(cute.arch.shuffle_sync(reach - count, pick))
                found = Int32(1)
            else:
                above = Int32(cute.arch.shuffle_sync(reach, Int32(WARP - 1)))
    return digit, above, equal
