"""A row shared by two blocks of many vectors a thread: a floor guessed from a sample while the keys are on their way.

Point 1 of `keysieve/models/local_topk.py` with another floor. Both blocks look at the same sample of the row, a round
of each warp, before their own keys are there, and guess a value that some more than N keys reach. Vectors that do not
reach it are left out as they arrive. If N keys or more reach the guess, which is counted, not believed, the row's
threshold is not below it: all that is counted, listed and compared from there on are the keys that do
(`local_topk_kept`). They are counted in 254 bins from the guess on, of one value each, or, where the sample says that
the threshold may lie further above, of 2^shift values; then the keys of the bin found are counted once more, value by
value (`local_topk_listed_keys`). If fewer than N keys reach the guess, or the threshold lies above the bins, all keys
are looked at (`local_topk_whole`). Where most of the sample reaches the guess, on a plateau, the sample's commonest
value there is tried as the threshold; if N keys lie above it, it is the floor.

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
from keysieve.kernels import local_topk_listed_keys as listed_keys
from keysieve.kernels import local_topk_steps as steps
from keysieve.kernels import local_topk_whole as whole
from keysieve.kernels import local_topk_window as window
from keysieve.kernels.local_topk_config import MAX_SHIFT, NARROW, SAMPLE_BINS, SAMPLE_STEP

NEGATIVE = 0x8000
"""key16 of negative numbers are below it."""


@cute.jit
def share(row: Any, n: Int32, rank: Int32) -> Any:
    """This block's words of a shared row: (place of the first, their number). A block barrier has to follow."""
    one, asked, wanted, early = row.plan
    words, other = ask(row, one, asked)
    floor, shift, value = guess(row, words, other, wanted, early)
    row.mark(1)
    places = kept.places_of(row)
    done = Int32(0)
    begin = Int32(0)
    count = Int32(0)
    if value > Int32(0):
        kept.land(row, words, asked)
        done, begin, count, above = whole.share_plateau(row, places, Uint32(value), n, rank)
        if done == Int32(0) and above >= n:
            floor = value + Int32(1)
    if floor > Int32(3):
        done, begin, count = share_reaching(row, words, asked, floor, shift, n, rank)
    elif done == Int32(0):
        kept.land(row, words, asked)
    if done == Int32(0):
        begin, count = whole.share(row, places, n, rank)
    return begin, count


@cute.jit
def share_reaching(row: Any, words: Any, asked: Int32, floor: Int32, shift: Int32, n: Int32, rank: Int32) -> Any:
    """(Not 0 if the `n`-th largest key of the row is in one of the bins of 2^shift values from `floor` on; then this
    block's words: place of the first, number)."""
    below = Uint32(floor - Int32(1))
    turn = kept.turn_of(below, floor < Int32(NEGATIVE))
    hits = kept.keep_reaching(row, words, asked, turn)
    row.mark(4)
    two = kept.count_kept(row, hits, turn, shift)
    row.mark(13)
    cute.arch.sync_threads()
    if row.warp == Int32(0):
        kept.send_narrow(row, row.narrow, row.gathered, row.arrivals + Uint32(32), rank)
    listed = listed_keys.list_keys(row, hits, turn, two)
    entries, tails = listed_keys.load_entries(row, listed, turn)
    row.mark(14)
    if row.warp == Int32(0):
        kept.find_narrow(row, row.gathered, row.arrivals + Uint32(32), n, rank, False)
    cute.arch.sync_threads()
    digit_word, above_word, before_above, before_equal = ptx.load_shared_v4(row.found)
    row.mark(6)
    digit = Int32(digit_word)
    begin = Int32(0)
    count = Int32(0)
    if digit > Int32(0):
        threshold = below + Uint32(digit)
        need = n - Int32(above_word)
        above = Int32(before_above)
        equal = Int32(before_equal)
        if shift > Int32(0):
            base = Uint32(floor) + (Uint32(digit - Int32(1)) << Uint32(shift))
            digit_word, above_word, before_above, before_equal = listed_keys.count_bin(
                row, listed, entries, turn, base, shift, need, rank
            )
            threshold = base + digit_word
            need = need - Int32(above_word)
            above = above + Int32(before_above)
            equal = Int32(before_equal)
        if equal > need:
            equal = need
        block = listed_keys.place_entries(row, listed, entries, tails, turn, threshold, need, above, equal)
        own = Int32(Uint32(block) >> Uint32(steps.EQUAL_SHIFT))
        if own > need - equal:
            own = need - equal
        count = Int32(Uint32(block) & Uint32(0xFFFF)) + own
        begin = above + equal
    return digit, begin, count


@cute.jit
def plan(row: Any, n: Int32, rank: Int32) -> Any:
    """What `ask` needs of this block's part of a row, worked out before the logits are there: (the first vector of the
    thread that has this one's place in the other block, -1 if there is none; bytes of this warp's vectors beside the
    sample's; the rank of the guess among the sample's maxima; a rank whose maximum is hardly below the threshold)."""
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
    likely = (n + each - Int32(1)) // each
    wanted = likely + (likely >> Int32(4)) + Int32(28)
    early = likely - (likely >> Int32(3)) - Int32(28)
    if early < Int32(1):
        early = Int32(1)
    return _here(other), _here(asked), _here(wanted), _here(early)


@dsl_user_op
def _here(value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The value, worked out at this place and no later."""
    return ptx.asm("mov.b32 $0, $1;", "=r,r", (Int32,), (value,), loc=loc, ip=ip)[0]


@cute.jit
def ask(row: Any, one: Int32, asked: Int32) -> Any:
    """(The words of this thread's vector in the sample; of vector `one`, the other block's there; `kept.NO_KEYS` past
    the row's end and where no vector is.) All threads ask for the sample before any warp asks for more: it comes first.
    One block barrier."""
    words = [Uint32(kept.NO_KEYS) for _ in range(4)]
    other = [Uint32(kept.NO_KEYS) for _ in range(4)]
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
def guess(row: Any, words: Any, other: Any, wanted: Int32, early: Int32) -> Any:
    """(key16 that the `wanted`-th of the sample's maxima reaches, a multiple of 4; 0 where the sample does not tell, or
    far too many reach that; log2 of the values in a bin, so that the bins from there on reach the `early`-th;
    in the last case the commonest of the maxima about the `wanted`-th, else 0.) From the first vectors of all warps of
    both blocks, the same in both. One block barrier, up to four."""
    best_own = count_sampled(row, words[0:4])
    best_other = count_sampled(row, other)
    best = best_own
    if best_other > best:
        best = best_other
    row.mark(5)
    top = window.block_top(row, best)
    # A lane has eight bins, lane 0 the best one's; every warp looks by itself.
    lowest = Int32((top >> Uint32(SAMPLE_STEP)) & Uint32(0xFFFFFFF8)) - Int32(8) * row.lane
    bins = [Uint32(0) for _ in range(4)]
    if lowest >= Int32(0):
        loaded = ptx.load_shared_v4(row.sample + Uint32(lowest) * Uint32(2))
        for index in cutlass.range_constexpr(4):
            bins[index] = loaded[index]
    upto, bin_of, above, inside = kept.lane_bin(kept.halves(bins), Uint32(wanted))
    votes = Uint32(cute.arch.vote_ballot_sync(upto >= Uint32(wanted)))
    votes_early = Uint32(cute.arch.vote_ballot_sync(upto >= Uint32(early)))
    found = packed.lowest_bit(votes) & Int32(31)
    floor = Int32(cute.arch.shuffle_sync(lowest + bin_of, found))
    reaching = Int32(cute.arch.shuffle_sync(Int32(above + inside), found))
    end = lowest + Int32(8) * (row.lane - packed.lowest_bit(votes_early)) + Int32(8)
    if votes == Uint32(0):  # the same in all warps of both blocks
        floor, end, reaching = search(row, wanted, early)
    value = Int32(0)
    # Three quarters of those that lie below a guess as it should be reach this one: most keys would be listed.
    crowded = Int32(4) * (reaching - wanted) > Int32(3) * (Int32(2 * row.config.threads) - wanted)
    if crowded:
        value = commonest(row, floor, best_own, best_other)
    # 254 bins of one value, two, four ...: bfind of 0 is -1.
    shift = Int32(packed.highest_bit(Uint32(end - floor + Int32(2)) >> Uint32(8 - SAMPLE_STEP))) + Int32(1)
    if shift > Int32(MAX_SHIFT):
        shift = Int32(MAX_SHIFT)
    if crowded:
        floor = Int32(0)
    return floor << Int32(SAMPLE_STEP), shift, value


@cute.jit
def search(row: Any, wanted: Int32, early: Int32) -> Any:
    """Among all of the sample's bins: (the one of the `wanted`-th from the top, 0 if there is none; an upper end for
    that of the `early`-th; maxima that reach the former). A thread sums up 32 bins, the first the highest, and the warp
    of the one that is wanted looks for it. Two block barriers."""
    each = SAMPLE_BINS // row.config.threads
    lowest = Int32(SAMPLE_BINS) - (row.thread + Int32(1)) * Int32(each)
    place = row.sample + Uint32(lowest) * Uint32(2)
    pair = Uint32(0)
    for index in cutlass.range_constexpr(each // 8):
        turned = (Uint32(index) + (Uint32(row.lane) >> Uint32(1))) & Uint32(each // 8 - 1)  # lanes at different banks
        loaded = ptx.load_shared_v4(place + turned * Uint32(16))
        pair = pair + loaded[0] + loaded[1] + loaded[2] + loaded[3]
    mine = Int32((pair & Uint32(0xFFFF)) + (pair >> Uint32(16)))
    upto, _other = window.block_prefix(row, mine, Int32(0), False)
    if upto >= early and upto - mine < early:
        ptx.store_shared(row.found + Uint32(4), Uint32(lowest + Int32(each)))
    votes = Uint32(cute.arch.vote_ballot_sync(upto >= wanted and upto - mine < wanted))
    if votes != Uint32(0):
        source = packed.lowest_bit(votes)
        above = Int32(cute.arch.shuffle_sync(upto - mine, source))
        highest = Int32(cute.arch.shuffle_sync(lowest, source)) + Int32(each - 1) - row.lane
        for chunk in cutlass.range_constexpr(each // 32):
            one = highest - Int32(32 * chunk)
            inside = Int32(ptx.load_shared_u16(row.sample + Uint32(one) * Uint32(2)))
            reach = above + packed.warp_prefix(inside)
            if reach >= wanted and reach - inside < wanted:
                ptx.store_shared(row.found, Uint32(one))
                ptx.store_shared(row.found + Uint32(8), Uint32(reach))
            above = Int32(cute.arch.shuffle_sync(reach, Int32(31)))
    if row.thread == Int32(row.config.threads - 1) and upto < wanted:
        ptx.store_shared(row.found, Uint32(0))
        ptx.store_shared(row.found + Uint32(8), Uint32(0))
    cute.arch.sync_threads()
    floor, end, reaching, _none = ptx.load_shared_v4(row.found)
    return Int32(floor), Int32(end), Int32(reaching)


@cute.jit
def commonest(row: Any, which: Int32, own: Uint32, other: Uint32) -> Int32:
    """Of the maxima in one of the sample's bins the one that most vectors have, the highest such. One block barrier."""
    values = row.again + Uint32(4 * (NARROW + 4))
    for key in (own, other):
        if Int32(key >> Uint32(SAMPLE_STEP)) == which:
            ptx.red_shared(values + ((key & Uint32(3)) << Uint32(2)), Uint32(1), "add")
    cute.arch.sync_threads()
    counts = ptx.load_shared_v4(values)
    most = counts[0]
    place = Int32(0)
    for index in cutlass.range_constexpr(1, 4):
        if counts[index] >= most:
            most = counts[index]
            place = Int32(index)
    return (which << Int32(SAMPLE_STEP)) + place


@cute.jit
def count_sampled(row: Any, words: Any) -> Uint32:
    """Count a vector's largest key and return its key16."""
    best = kept.larger_half(kept.largest(words))
    if best >= Uint32(NEGATIVE):  # none is positive
        best = kept.smaller_half(kept.smallest(words)) ^ Uint32(0x7FFF)
    best = best ^ Uint32(NEGATIVE)
    half = (best >> Uint32(SAMPLE_STEP)) & Uint32(1)
    place = row.sample + ((best >> Uint32(SAMPLE_STEP + 1)) << Uint32(2))
    ptx.red_shared(place, Uint32(1) << (half << Uint32(4)), "add")
    return best
