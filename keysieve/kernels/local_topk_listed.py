"""A row of any length: the keys that reach a bound, through a list in shared memory.

For rows whose vectors' maxima do not fit shared memory. The passes are points 3 and 4 of
`keysieve/models/local_topk.py`; how a row is spread over the threads: `local_topk_steps`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import packed, ptx, scan
from keysieve.kernels import local_topk_count as counting
from keysieve.kernels import local_topk_steps as steps
from keysieve.kernels.local_topk_config import BINS

TOP_BIN = BINS - 1
"""The last bin takes everything from its value on."""


@cute.jit
def count_from(histogram: Uint32, key: Uint32, floor: Uint32, shift: Uint32) -> None:
    if key >= floor:
        ptx.red_shared(
            histogram + packed.min_u32((key - floor) >> shift, Uint32(TOP_BIN)) * Uint32(4), Uint32(1), "add"
        )


@cute.jit
def clear_second(row: Any) -> None:
    """Zero the second histogram; a block barrier must follow."""
    for place in cutlass.range(row.thread, Int32(BINS // 4), row.config.threads, unroll=1):
        ptx.store_shared_v4(row.second + Uint32(place) * Uint32(16), Uint32(0), Uint32(0), Uint32(0), Uint32(0))


@cute.jit
def find_bound(row: Any, words: Any, n: Int32) -> Uint32:
    """A key16 (at least 1) that at least `n` of the row's keys reach: the `n`-th largest of groups' maxima, or the
    lower edge of its bin where not many maxima lie in that. 1 where too few groups hold a key. A group is a run of one
    thread's vectors; there are about 1.5 n of them or more if the row has as many vectors."""
    threads = row.config.threads
    three = n * Int32(3)
    halvings = Int32(three > Int32(2 * threads)) + Int32(three > Int32(4 * threads)) + Int32(three > Int32(8 * threads))
    span = row.rounds >> halvings
    if span < Int32(1):
        span = Int32(1)
    count_maxima(row, words, span, Uint32(0), False)
    digit, above, inside = counting.block_search(row, row.first, n)
    bound = Uint32(1)
    if digit > Int32(0):
        bound = Uint32(digit) << Uint32(5)
        if above + inside > n + (n >> Int32(2)):
            count_maxima(row, words, span, Uint32(digit), True)
            cute.arch.sync_threads()
            behind = (Uint32(31) - Uint32(row.lane)) * Uint32(4)
            upto = packed.warp_prefix(Int32(ptx.load_shared(row.low + behind)))
            votes = Uint32(cute.arch.vote_ballot_sync(above + upto >= n))
            bound = bound | (Uint32(31) - Uint32(packed.lowest_bit(votes) & Int32(31)))
    return bound


@cute.jit
def count_maxima(row: Any, words: Any, span: Int32, digit: Uint32, fine: cutlass.Constexpr[bool]) -> None:
    """Count the groups' maxima by their upper 11 bits, or, `fine`, those with the digit by their lower 5."""
    held = row.config.held
    best = Uint32(0)
    left = span
    for step in cutlass.range_constexpr(held):
        if Int32(step) < row.rounds:
            most = best_of(words[4 * step : 4 * step + 4])
            best, left = count_maximum(row, most, best, left, span, Int32(step), digit, fine)
    for batch in cutlass.range(1, row.batches, unroll=1):
        more = steps.load_batch(row, batch)
        for step in cutlass.range_constexpr(held):
            number = batch * Int32(held) + Int32(step)
            if number < row.rounds:
                most = best_of(more[4 * step : 4 * step + 4])
                best, left = count_maximum(row, most, best, left, span, number, digit, fine)


@cute.jit
def count_maximum(
    row: Any,
    most: Uint32,
    best: Uint32,
    left: Int32,
    span: Int32,
    number: Int32,
    digit: Uint32,
    fine: cutlass.Constexpr[bool],
) -> Any:
    """Take one vector into the running maximum; count that when its group of `span` vectors is complete."""
    best = ptx.max_u16x2(best, most)
    left = left - Int32(1)
    if left == Int32(0) or number + Int32(1) == row.rounds:
        key = ptx.max_u16x2(best, best >> Uint32(16)) & Uint32(0xFFFF)
        if cutlass.const_expr(fine):
            if (key >> Uint32(5)) == digit:
                ptx.red_shared(row.low + (key & Uint32(31)) * Uint32(4), Uint32(1), "add")
        else:
            if key != Uint32(0):
                ptx.red_shared(row.first + (key >> Uint32(5)) * Uint32(4), Uint32(1), "add")
        best = Uint32(0)
        left = span
    return best, left


def best_of(words: Any) -> Uint32:
    """Largest of a vector's lower halves, and of its upper ones."""
    return ptx.max_u16x2(ptx.max_u16x2(words[0], words[1]), ptx.max_u16x2(words[2], words[3]))


@cute.jit
def list_reaching(row: Any, words: Any, bound: Uint32) -> Int32:
    """List all keys that reach `bound`, in index order, if there is room for them; returns how many they are. Ends with
    a block barrier only if they were listed."""
    held = row.config.held
    masks = [Uint32(0) for _ in range(held)]
    count = Int32(0)
    for step in cutlass.range_constexpr(held):
        if Int32(step) < row.rounds:
            masks[step] = reach_x8(words[4 * step : 4 * step + 4], bound)
            count = count + Int32(cute.arch.popc(masks[step]))
    for batch in cutlass.range(1, row.batches, unroll=1):
        more = steps.load_batch(row, batch)
        for step in cutlass.range_constexpr(held):
            if batch * Int32(held) + Int32(step) < row.rounds:
                count = count + Int32(cute.arch.popc(reach_x8(more[4 * step : 4 * step + 4], bound)))
    place, total = steps.block_offsets(row, scan.warp_sum(count), 0)
    if total <= Int32(row.config.listed):
        for step in cutlass.range_constexpr(held):
            if Int32(step) < row.rounds:
                place = list_vector(row, words[4 * step : 4 * step + 4], masks[step], place, Int32(step))
        for batch in cutlass.range(1, row.batches, unroll=1):
            more = steps.load_batch(row, batch)
            for step in cutlass.range_constexpr(held):
                if batch * Int32(held) + Int32(step) < row.rounds:
                    mask = reach_x8(more[4 * step : 4 * step + 4], bound)
                    number = batch * Int32(held) + Int32(step)
                    place = list_vector(row, more[4 * step : 4 * step + 4], mask, place, number)
        cute.arch.sync_threads()
    return total


@cute.jit
def list_vector(row: Any, words: Any, mask: Uint32, place: Int32, number: Int32) -> Int32:
    """List the keys of a round's vectors that are in the masks, from entry `place` on; returns the entry behind."""
    count = Int32(cute.arch.popc(mask))
    upto = packed.warp_prefix(count)
    put(row, words, mask, place + upto - count, number)
    return place + Int32(cute.arch.shuffle_sync(upto, Int32(31)))


@cute.jit
def put(row: Any, words: Any, mask: Uint32, place: Int32, number: Int32) -> None:
    """List this lane's keys that are in the mask, as words, from entry `place` on."""
    chosen = steps.key_places(mask)
    steps.put_keys(row, words, chosen, place, row.start + number * Int32(32), row.list, row.list_tops, row.wide)


def reach_x8(words: Any, bound: Uint32) -> Uint32:
    """Bit i set where key i is at least `bound` (at least 1), i = 0..7."""
    return _reach_x8(*words, Uint32(0) - (bound << Uint32(16)))


@dsl_user_op
def _reach_x8(a: Uint32, b: Uint32, c: Uint32, d: Uint32, minus: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The same from `2^32 - (bound << 16)`: the carry out of the comparing addition is shifted into the mask."""
    lines = ["{ .reg .b32 t; mov.b32 $0, 0;"]
    for operand in ("$4", "$3", "$2", "$1"):
        lines.append(f"add.cc.u32 t, {operand}, $5; addc.u32 $0, $0, $0;")
        lines.append(f"shl.b32 t, {operand}, 16; add.cc.u32 t, t, $5; addc.u32 $0, $0, $0;")
    text = " ".join([*lines, "}"])
    return ptx.asm(text, "=&r,r,r,r,r,r", (Uint32,), (a, b, c, d, minus), pure=True, loc=loc, ip=ip)[0]


@cute.jit
def load_entries(row: Any, count: Int32) -> Any:
    """This thread's words of a list of `count` entries, 0 past it; a warp owns a contiguous run. Returns (the words,
    rounds, index of the first)."""
    share = row.config.share
    rounds = (count + Int32(row.config.threads - 1)) // Int32(row.config.threads)
    start = row.warp * rounds * Int32(32) + row.lane
    entries = [Uint32(0) for _ in range(share)]
    for step in cutlass.range_constexpr(share):
        one = start + Int32(32 * step)
        if Int32(step) < rounds and one < count:
            entries[step] = ptx.load_shared(row.list + Uint32(one) * Uint32(4))
    return entries, rounds, start


@cute.jit
def find_threshold(row: Any, words: Any, n: Int32, bound: Uint32, whole: cutlass.Constexpr[bool]) -> Any:
    """(the `n`-th largest key, how many keys equal to it are taken), among the entries in `words` or, `whole`, among
    all keys of the row. At least `n` of them reach `bound`.

    One histogram of the 2,048 values from the bound on is mostly enough. Where the threshold lies beyond, the upper 11
    bits are looked at, then the values from there on."""
    floor = bound
    shift = Uint32(0)
    if bound == Uint32(1):
        floor = Uint32(0)
        shift = Uint32(5)
    threshold = Uint32(0)
    need = Int32(0)
    searching = Boolean(True)
    dirty = Boolean(False)
    while searching:
        if dirty:
            clear_second(row)
            cute.arch.sync_threads()
        count_all(row, words, floor, shift, whole)
        digit, above, _inside = counting.block_search(row, row.second, n)
        dirty = Boolean(True)
        if shift != Uint32(0):
            floor = Uint32(digit) << Uint32(5)
            shift = Uint32(0)
        else:
            if digit < Int32(TOP_BIN):
                threshold = floor + Uint32(digit)
                need = n - above
                searching = Boolean(False)
            else:
                floor = Uint32(0)
                shift = Uint32(5)
    return threshold, need


@cute.jit
def count_all(row: Any, words: Any, floor: Uint32, shift: Uint32, whole: cutlass.Constexpr[bool]) -> None:
    """Count keys by their distance from `floor`: those of list entries (upper halves), or of all vectors."""
    if cutlass.const_expr(whole):
        for batch in cutlass.range(row.batches, unroll=1):
            more = steps.load_batch(row, batch)
            for word in cutlass.range_constexpr(4 * row.config.held):
                if more[word] != Uint32(0):
                    count_from(row.second, more[word] & Uint32(0xFFFF), floor, shift)
                    count_from(row.second, more[word] >> Uint32(16), floor, shift)
    else:
        for entry in cutlass.range_constexpr(row.config.share):
            if words[entry] != Uint32(0):
                count_from(row.second, words[entry] >> Uint32(16), floor, shift)


@cute.jit
def list_chosen(row: Any, threshold: Uint32, need: Int32) -> None:
    """List the row's keys above `threshold` and the first `need` equal to it, in index order. Ends with a block
    barrier."""
    held = row.config.held
    above = Int32(0)
    equal = Int32(0)
    for batch in cutlass.range(row.batches, unroll=1):
        more = steps.load_batch(row, batch)
        for step in cutlass.range_constexpr(held):
            greater, same = packed.masks_x8(more[4 * step : 4 * step + 4], threshold)
            above = above + Int32(cute.arch.popc(greater))
            equal = equal + Int32(cute.arch.popc(same))
    above_before, _all = steps.block_offsets(row, scan.warp_sum(above), 0)
    equal_before, _all_equal = steps.block_offsets(row, scan.warp_sum(equal), 1)
    for batch in cutlass.range(row.batches, unroll=1):
        more = steps.load_batch(row, batch)
        for step in cutlass.range_constexpr(held):
            number = batch * Int32(held) + Int32(step)
            if number < row.rounds:
                greater, same = packed.masks_x8(more[4 * step : 4 * step + 4], threshold)
                mine = Int32(cute.arch.popc(greater)) | (Int32(cute.arch.popc(same)) << Int32(steps.EQUAL_SHIFT))
                upto = packed.warp_prefix(mine)
                earlier = upto - mine
                greater_place = above_before + (earlier & Int32(0xFFFF))
                equal_place = equal_before + (earlier >> Int32(steps.EQUAL_SHIFT))
                taken = equal_place
                if taken > need:
                    taken = need
                kept = steps.first_bits(same, need - taken)
                put(row, more[4 * step : 4 * step + 4], greater | kept, greater_place + taken, number)
                total = Int32(cute.arch.shuffle_sync(upto, Int32(31)))
                above_before = above_before + (total & Int32(0xFFFF))
                equal_before = equal_before + (total >> Int32(steps.EQUAL_SHIFT))
    cute.arch.sync_threads()


@cute.jit
def place_entries(row: Any, entries: Any, rounds: Int32, start: Int32, threshold: Uint32, need: Int32) -> None:
    """Copy the chosen entries of the list, in order, to the row's words: keys above `threshold`, and the first `need`
    equal to it. One block barrier."""
    below = ptx.lanes_below()
    share = row.config.share
    greater = [Uint32(0) for _ in range(share)]
    same = [Uint32(0) for _ in range(share)]
    mine = Int32(0)
    for step in cutlass.range_constexpr(share):
        if Int32(step) < rounds:
            key = entries[step] >> Uint32(16)
            greater[step] = Uint32(cute.arch.vote_ballot_sync(key > threshold))
            same[step] = Uint32(cute.arch.vote_ballot_sync(key == threshold))
            mine = mine + Int32(cute.arch.popc(greater[step]))
            mine = mine + (Int32(cute.arch.popc(same[step])) << Int32(steps.EQUAL_SHIFT))
    before, _all = steps.block_offsets(row, mine, 1)
    above = before & Int32(0xFFFF)
    equal = before >> Int32(steps.EQUAL_SHIFT)
    for step in cutlass.range_constexpr(share):
        if Int32(step) < rounds:
            key = entries[step] >> Uint32(16)
            rank = equal + Int32(cute.arch.popc(same[step] & below))
            taken = rank
            if taken > need:
                taken = need
            slot = above + Int32(cute.arch.popc(greater[step] & below)) + taken
            if key > threshold or (key == threshold and rank < need):
                ptx.store_shared(row.words + Uint32(slot) * Uint32(4), entries[step])
                if row.wide:
                    one = Uint32(start + Int32(32 * step))
                    upper = ptx.load_shared_u16(row.list_tops + one * Uint32(2))
                    ptx.store_shared_u16(row.tops + Uint32(slot) * Uint32(2), upper)
            above = above + Int32(cute.arch.popc(greater[step]))
            equal = equal + Int32(cute.arch.popc(same[step]))
