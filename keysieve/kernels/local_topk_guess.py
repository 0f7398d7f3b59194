"""A row shared by two blocks of many vectors a thread: a floor guessed from a sample while the keys are on their way.

Point 1 of `keysieve/models/local_topk.py` with another floor. Both blocks look at the same sample of the row, a round
of each warp, before their own keys are there, and guess a value that some more than N keys reach. Vectors that do not
reach it are left out as they arrive. If N keys or more reach the guess, which is counted, not believed, the row's
threshold is not below it: all that is counted, listed and compared from there on are the keys that do
(`local_topk_kept`). If fewer do, or the threshold lies further above than the few bins that the blocks exchange, or is
no positive number, all keys are looked at (`local_topk_whole`).

Keys come to shared memory by a bulk copy a warp, since loads to registers that are asked for together are waited for
together, the sample's too.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import packed, ptx
from keysieve.kernels import local_topk_kept as kept
from keysieve.kernels import local_topk_steps as steps
from keysieve.kernels import local_topk_whole as whole
from keysieve.kernels import local_topk_window as window
from keysieve.kernels.local_topk_config import SAMPLE_STEP


@cute.jit
def share(row: Any, n: Int32, rank: Int32) -> Any:
    """This block's words of a shared row: (place of the first, their number). A block barrier has to follow."""
    one, asked, wanted = row.plan
    words, other = ask(row, one, asked)
    floor = guess(row, words, other, wanted)
    row.mark(1)
    digit = Int32(0)
    begin = Int32(0)
    count = Int32(0)
    if floor > Uint32(3):
        least = (floor - Uint32(1)) * Uint32(0x10001)
        hits = kept.keep_reaching(row, words, asked, least)
        row.mark(4)
        listed_two = kept.count_kept(row, hits, least)
        row.mark(13)
        cute.arch.sync_threads()
        if row.warp == Int32(0):
            kept.send_narrow(row, rank)
        listed = kept.list_keys(row, hits, least, listed_two)
        entries, tails = kept.load_entries(row, listed)
        row.mark(14)
        if row.warp == Int32(0):
            kept.find_narrow(row, n, rank)
        cute.arch.sync_threads()
        digit_word, above_word, before_above, before_equal = ptx.load_shared_v4(row.found)
        row.mark(6)
        digit = Int32(digit_word)
        if digit > Int32(0):
            threshold = floor + Uint32(digit - Int32(1))
            need = n - Int32(above_word)
            equal = Int32(before_equal)
            if equal > need:
                equal = need
            above = Int32(before_above)
            block = kept.place_entries(row, listed, entries, tails, threshold, need, above, equal)
            own = Int32(Uint32(block) >> Uint32(steps.EQUAL_SHIFT))
            if own > need - equal:
                own = need - equal
            count = Int32(Uint32(block) & Uint32(0xFFFF)) + own
            begin = above + equal
    else:
        kept.land(row, words, asked)
    if digit == Int32(0):
        begin, count = whole.share(row, kept.places_of(row), n, rank)
    return begin, count


@cute.jit
def plan(row: Any, n: Int32, rank: Int32) -> Any:
    """What `ask` needs of this block's part of a row, worked out before the logits are there: (the first vector of the
    thread that has this one's place in the other block, -1 if there is none; bytes of this warp's vectors beside the
    sample's; the rank of the guess among the sample's maxima)."""
    threads = row.config.threads
    first = row.share * (Int32(1) - rank)
    end = first + row.share  # the row's first half is whole
    if end > row.whole:
        end = row.whole
    rounds = (end - first + Int32(threads - 1)) // Int32(threads)
    other = first + row.warp * rounds * Int32(32) + row.lane
    if other >= end:
        other = Int32(-1)
    behind = row.start - row.lane + row.rounds * Int32(32)
    if behind > row.vectors:
        behind = row.vectors
    more = behind - (row.start - row.lane) - Int32(32)
    asked = more * Int32(16) * Int32(more > Int32(0))
    each = (row.share + Int32(threads - 1)) // Int32(threads)  # the sample is a round of each warp
    wanted = (n + each - Int32(1)) // each
    wanted = wanted + (wanted >> Int32(4)) + Int32(28)
    return _here(other), _here(asked), _here(wanted)


@dsl_user_op
def _here(value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The value, worked out at this place and no later."""
    return ptx.asm("mov.b32 $0, $1;", "=r,r", (Int32,), (value,), loc=loc, ip=ip)[0]


@cute.jit
def ask(row: Any, one: Int32, asked: Int32) -> Any:
    """(The words of this thread's vector in the sample; of vector `one`, the other block's there; keys past the row's
    end as 0, 0 where no vector is.) All threads ask for the sample before any warp asks for more: it comes first. One
    block barrier."""
    words = [Uint32(0) for _ in range(4)]
    other = [Uint32(0) for _ in range(4)]
    if row.start < row.vectors:
        loaded = ptx.load_v4(row.address + Int64(row.start) * Int64(16))
        for word in cutlass.range_constexpr(4):
            words[word] = loaded[word]
    if one >= Int32(0):
        loaded = ptx.load_v4(row.address + Int64(one) * Int64(16))
        for word in cutlass.range_constexpr(4):
            other[word] = loaded[word]
    cute.arch.sync_threads()
    if row.lane == Int32(0) and asked > Int32(0):
        _expect(kept.landed_of(row), asked)
        source = row.address + Int64(row.start + Int32(32)) * Int64(16)
        ptx.bulk_load(kept.places_of(row) + Uint32(512), source, asked, kept.landed_of(row))
    if one * Int32(8) + Int32(8) > row.length:
        other = kept.inside(other, one, row.length)
    if row.start * Int32(8) + Int32(8) > row.end:
        words = kept.inside(words, row.start, row.end)
    return words, other


@dsl_user_op
def _expect(barrier: Uint32, nbytes: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Arrive at an mbarrier and announce bytes."""
    text = "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$0], $1;"
    ptx.asm(text, "r,r", (), (barrier, nbytes), loc=loc, ip=ip)


@cute.jit
def guess(row: Any, words: Any, other: Any, wanted: Int32) -> Uint32:
    """BF16 bits that the `wanted`-th of the sample's maxima reaches, a multiple of 4; 0 where the sample does not
    tell. From the first vectors of all warps of both blocks, the same in both. One block barrier."""
    best = count_sampled(row, words[0:4])
    best_other = count_sampled(row, other)
    if best_other > best:
        best = best_other
    row.mark(5)
    top = window.block_top(row, best)
    # A lane has eight bins, lane 0 the best one's; every warp looks by itself.
    lowest = Int32((top >> Uint32(SAMPLE_STEP)) & Uint32(0xFFFFFFF8)) - Int32(8) * row.lane
    bins = [Uint32(0) for _ in range(8)]
    if lowest >= Int32(0):
        loaded = ptx.load_shared_v4(row.sample + Uint32(lowest) * Uint32(4))
        loaded_upper = ptx.load_shared_v4(row.sample + Uint32(lowest) * Uint32(4) + Uint32(16))
        for index in cutlass.range_constexpr(4):
            bins[index] = loaded[index]
            bins[4 + index] = loaded_upper[index]
    upto, bin_of, _above = kept.lane_bin([Int32(word) for word in bins], wanted)
    votes = Uint32(cute.arch.vote_ballot_sync(upto >= wanted))
    floor = Int32(cute.arch.shuffle_sync(lowest + bin_of, packed.lowest_bit(votes) & Int32(31))) << Int32(SAMPLE_STEP)
    if votes == Uint32(0):
        floor = Int32(0)
    return Uint32(floor)


@cute.jit
def count_sampled(row: Any, words: Any) -> Uint32:
    """Count a vector's largest key, 0 for one that is not positive, and return it."""
    best = kept.largest(words)
    best = kept.max_s16x2(kept.max_s16x2(best, best >> Uint32(16)), Uint32(0)) & Uint32(0xFFFF)
    ptx.red_shared(row.sample + ((best >> Uint32(SAMPLE_STEP)) << Uint32(2)), Uint32(1), "add")
    return best
