"""Steps of the local top-N, each a pass of `keysieve/models/local_topk.py`, in the block that works on a row.

A row's vectors (8 keys, 16 bytes) are spread as in `select`: a warp owns a contiguous run of `rounds * 32` of them and
lane l of it vectors l, l + 32, ..., so that loads are coalesced and index order is (warp, round, lane). The rounds are
walked in batches of `held`; the first batch stays in registers until candidates are listed, others are read again in
every pass. No atomic's result decides a position.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import packed, ptx, scan
from keysieve.kernels.local_topk_config import BINS, LocalMap, LocalTopkConfig

TOP_BIN = BINS - 1
"""The last bin takes everything from its value on."""

EQUAL_SHIFT = 16  # counts of two kinds in one word


def mark(row: Any, slot: int) -> None:
    """With `config.trace`: note the clock at a step, for one thread of the block (see `dump_marks`)."""
    if row.config.trace:
        _mark(row.found + Uint32(64 + 4 * slot), row.thread)


@cute.jit
def _mark(place: Uint32, thread: Int32) -> None:
    if thread == Int32(0):
        ptx.store_shared(place, ptx.asm("mov.u32 $0, %clock;", "=r", (Uint32,), ())[0])


def dump_marks(row: Any, where: Int64, block: Int32) -> None:
    """With `config.trace`: write this block's 16 marks to u32 `where[block][16]`."""
    if row.config.trace:
        _dump_marks(row.found + Uint32(64), where, block, row.thread)


@cute.jit
def _dump_marks(base: Uint32, where: Int64, block: Int32, thread: Int32) -> None:
    if thread == Int32(0):
        for slot in cutlass.range(16, unroll=1):
            value = ptx.load_shared(base + Uint32(slot) * Uint32(4))
            ptx.store(where + Int64(block * Int32(16) + slot) * Int64(4), value)


class Row:
    """A row of `length` keys at byte `address`: trace-time handle of what the steps are addressed by."""

    def __init__(self, config: LocalTopkConfig, base: Uint32, thread: Int32, address: Int64, length: Int32) -> None:
        places = LocalMap.of(config)
        self.config, self.thread, self.address, self.length = config, thread, address, length
        self.lane = thread & Int32(31)
        self.warp = thread >> Int32(5)
        self.vectors = (length + Int32(7)) >> Int32(3)
        self.rounds = (self.vectors + Int32(config.threads - 1)) // Int32(config.threads)
        self.batches = (self.rounds + Int32(config.held - 1)) // Int32(config.held)
        self.start = self.warp * self.rounds * Int32(32) + self.lane
        self.wide = length > Int32(1 << 16)
        self.first = base + Uint32(places.first)
        self.second = base + Uint32(places.second)
        self.low = base + Uint32(places.low)
        self.fine = base + Uint32(places.low + 128)
        self.maxima = base + Uint32(places.maxima)
        self.found = base + Uint32(places.found)
        self.peers = base + Uint32(places.peers)
        self.sums = base + Uint32(places.sums)
        self.words = base + Uint32(places.words)
        self.tops = base + Uint32(places.tops)
        self.list = base + Uint32(places.list)
        self.list_tops = base + Uint32(places.list_tops)

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Row:
        return self


# ------------------------------------------------------------------------------------------------- keys


@cute.jit
def settle(row: Any, raw: Any, one: Int32) -> Any:
    """key16 of vector `one`, 0 where no key is."""
    words = list(raw)
    if cutlass.const_expr(row.config.push):
        for word in cutlass.range_constexpr(4):
            words[word] = packed.key16x2_fast(words[word])
    else:
        words = list(packed.foreign_key16x8(words))
    if one * Int32(8) + Int32(8) > row.length:
        for word in cutlass.range_constexpr(4):
            words[word] = words[word] & packed.inside_mask(one * Int32(8) + Int32(2 * word), Int32(0), row.length)
    return words


@cute.jit
def load_batch(row: Any, batch: Int32) -> Any:
    """key16 of this thread's vectors of a batch, 0 where no key is."""
    held = row.config.held
    words = [Uint32(0) for _ in range(4 * held)]
    for step in cutlass.range_constexpr(held):
        one = row.start + (batch * Int32(held) + Int32(step)) * Int32(32)
        if batch * Int32(held) + Int32(step) < row.rounds and one < row.vectors:
            loaded = ptx.load_v4(row.address + Int64(one) * Int64(16))
            for word in cutlass.range_constexpr(4):
                words[4 * step + word] = loaded[word]
    for step in cutlass.range_constexpr(held):
        if batch * Int32(held) + Int32(step) < row.rounds:
            one = row.start + (batch * Int32(held) + Int32(step)) * Int32(32)
            made = settle(row, words[4 * step : 4 * step + 4], one)
            for word in cutlass.range_constexpr(4):
                words[4 * step + word] = made[word]
    return words


# ------------------------------------------------------------------------------------------------- histograms


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


# ------------------------------------------------------------------------------------------------- bound


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
    digit, above, inside = block_search(row, row.first, n)
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
        more = load_batch(row, batch)
        for step in cutlass.range_constexpr(held):
            number = batch * Int32(held) + Int32(step)
            if number < row.rounds:
                most = best_of(more[4 * step : 4 * step + 4])
                best, left = count_maximum(row, most, best, left, span, number, digit, fine)


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


def best_of(words: Any) -> Uint32:
    """Largest of a vector's lower halves, and of its upper ones."""
    return ptx.max_u16x2(ptx.max_u16x2(words[0], words[1]), ptx.max_u16x2(words[2], words[3]))


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


# ------------------------------------------------------------------------------------------------- candidates


@cute.jit
def block_offsets(row: Any, mine: Int32, scan_index: cutlass.Constexpr[int]) -> Any:
    """(sum of `mine` over the warps before, over the block); `mine` is a warp's own, the same in all its lanes. One
    block barrier."""
    sums = row.sums + Uint32(128 * scan_index)
    if row.lane == Int32(0):
        ptx.store_shared(sums + Uint32(row.warp) * Uint32(4), Uint32(mine))
    cute.arch.sync_threads()
    value = Int32(0)
    if row.lane < Int32(row.config.warps):
        value = Int32(ptx.load_shared(sums + Uint32(row.lane) * Uint32(4)))
    return scan.warp_sum(value * Int32(row.lane < row.warp)), scan.warp_sum(value)


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
        more = load_batch(row, batch)
        for step in cutlass.range_constexpr(held):
            if batch * Int32(held) + Int32(step) < row.rounds:
                count = count + Int32(cute.arch.popc(reach_x8(more[4 * step : 4 * step + 4], bound)))
    place, total = block_offsets(row, scan.warp_sum(count), 0)
    if total <= Int32(row.config.listed):
        for step in cutlass.range_constexpr(held):
            if Int32(step) < row.rounds:
                place = list_vector(row, words[4 * step : 4 * step + 4], masks[step], place, Int32(step))
        for batch in cutlass.range(1, row.batches, unroll=1):
            more = load_batch(row, batch)
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
    put_keys(row, words, mask, place, row.start + number * Int32(32), row.list, row.list_tops)


@cute.jit
def put_keys(row: Any, words: Any, mask: Uint32, place: Int32, one: Int32, target: Uint32, tops: Uint32) -> None:
    """Store those keys of vector `one` that are in the mask, as words, from entry `place` of `target` on."""
    tail = Uint32(0xFFFF) - (Uint32(one * Int32(8)) & Uint32(0xFFFF))
    left = mask
    entry = Uint32(place) + Uint32(cute.arch.popc(mask))
    while left != Uint32(0):  # from the highest down: finding it takes one instruction
        bit = packed.highest_bit(left)
        entry = entry - Uint32(1)
        ptx.store_shared(target + entry * Uint32(4), (key_of(words, bit) << Uint32(16)) | (tail - bit))
        if row.wide:
            ptx.store_shared_u16(tops + entry * Uint32(2), Uint32(one >> Int32(13)))
        left = left ^ (Uint32(1) << bit)


@cute.jit
def key_of(words: Any, bit: Uint32) -> Uint32:
    """Key `bit` (0..7) of a vector in registers; the upper half holds something."""
    first = words[0]
    second = words[2]
    if (bit & Uint32(2)) != Uint32(0):
        first = words[1]
        second = words[3]
    if (bit & Uint32(4)) != Uint32(0):
        first = second
    return first >> ((bit & Uint32(1)) << Uint32(4))


# ------------------------------------------------------------------------------------------------- threshold


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
        digit, above, _inside = block_search(row, row.second, n)
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
            more = load_batch(row, batch)
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
        more = load_batch(row, batch)
        for step in cutlass.range_constexpr(held):
            greater, same = packed.masks_x8(more[4 * step : 4 * step + 4], threshold)
            above = above + Int32(cute.arch.popc(greater))
            equal = equal + Int32(cute.arch.popc(same))
    above_before, _all = block_offsets(row, scan.warp_sum(above), 0)
    equal_before, _all_equal = block_offsets(row, scan.warp_sum(equal), 1)
    for batch in cutlass.range(row.batches, unroll=1):
        more = load_batch(row, batch)
        for step in cutlass.range_constexpr(held):
            number = batch * Int32(held) + Int32(step)
            if number < row.rounds:
                greater, same = packed.masks_x8(more[4 * step : 4 * step + 4], threshold)
                mine = Int32(cute.arch.popc(greater)) | (Int32(cute.arch.popc(same)) << Int32(EQUAL_SHIFT))
                upto = packed.warp_prefix(mine)
                earlier = upto - mine
                greater_place = above_before + (earlier & Int32(0xFFFF))
                equal_place = equal_before + (earlier >> Int32(EQUAL_SHIFT))
                taken = equal_place
                if taken > need:
                    taken = need
                kept = first_bits(same, need - taken)
                put(row, more[4 * step : 4 * step + 4], greater | kept, greater_place + taken, number)
                total = Int32(cute.arch.shuffle_sync(upto, Int32(31)))
                above_before = above_before + (total & Int32(0xFFFF))
                equal_before = equal_before + (total >> Int32(EQUAL_SHIFT))
    cute.arch.sync_threads()


@cute.jit
def first_bits(mask: Uint32, count: Int32) -> Uint32:
    """The lowest `count` (0 or more) set bits of the mask."""
    extra = Int32(cute.arch.popc(mask)) - count
    while extra > Int32(0) and mask != Uint32(0):
        mask = mask ^ (Uint32(1) << packed.highest_bit(mask))
        extra = extra - Int32(1)
    return mask


# ------------------------------------------------------------------------------------------------- short rows


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
def find_low(histogram: Uint32, want: Int32, lane: Int32) -> Any:
    """After 32 bins were counted: (the bin of the `want`-th from the top, the number above it). A block barrier; then
    every warp looks by itself."""
    cute.arch.sync_threads()
    upto = packed.warp_prefix(Int32(ptx.load_shared(histogram + (Uint32(31) - Uint32(lane)) * Uint32(4))))
    votes = Uint32(cute.arch.vote_ballot_sync(upto >= want))
    owner = packed.lowest_bit(votes) & Int32(31)
    before = Int32(cute.arch.shuffle_sync(upto, (owner - Int32(1)) & Int32(31))) * Int32(owner > Int32(0))
    return Uint32(31) - Uint32(owner), before


@cute.jit
def place_held(row: Any, words: Any, vectors: Any, rounds: Int32, n: Int32) -> None:
    """The row's words from the vectors in registers, which hold its N best: histograms of their keys, then each thread
    places its own. vectors: their numbers, ascending in the order (warp, round, lane)."""
    held = row.config.held
    for step in cutlass.range_constexpr(held):
        if Int32(step) < rounds:
            count_high(row.second, words[4 * step : 4 * step + 4])
    digit, above, _inside = block_search(row, row.second, n)
    mark(row, 5)
    for step in cutlass.range_constexpr(held):
        if Int32(step) < rounds:
            count_low(row.low, words[4 * step : 4 * step + 4], Uint32(digit))
    low, between = find_low(row.low, n - above, row.lane)
    threshold = (Uint32(digit) << Uint32(5)) | low
    need = n - above - between
    mark(row, 6)
    masks = [Uint32(0) for _ in range(held)]  # of keys above the threshold, and, shifted by 8, equal to it
    total = Int32(0)
    for step in cutlass.range_constexpr(held):
        if Int32(step) < rounds:
            greater, same = packed.masks_x8(words[4 * step : 4 * step + 4], threshold)
            masks[step] = greater | (same << Uint32(8))
            total = total + counts_of(masks[step])
    before, _all = block_offsets(row, scan.warp_sum(total), 0)
    mark(row, 7)
    for step in cutlass.range_constexpr(held):
        if Int32(step) < rounds:
            mine = counts_of(masks[step])
            upto = packed.warp_prefix(mine)
            both = Uint32(before + upto - mine)
            taken = Int32(both >> Uint32(EQUAL_SHIFT))
            if taken > need:
                taken = need
            kept = first_bits(masks[step] >> Uint32(8), need - taken)
            chosen = (masks[step] & Uint32(0xFF)) | kept
            slot = Int32(both & Uint32(0xFFFF)) + taken
            put_keys(row, words[4 * step : 4 * step + 4], chosen, slot, vectors[step], row.words, row.tops)
            before = before + Int32(cute.arch.shuffle_sync(upto, Int32(31)))


def counts_of(masks: Uint32) -> Int32:
    """Counts of the two masks of `place_held`, the second one shifted by `EQUAL_SHIFT`."""
    equal = Int32(cute.arch.popc(masks >> Uint32(8)))
    return Int32(cute.arch.popc(masks & Uint32(0xFF))) | (equal << Int32(EQUAL_SHIFT))


# ------------------------------------------------------------------------------------------------- long rows


@cute.jit
def fill_maxima(row: Any) -> None:
    """The largest key of every vector to shared memory, counted by its upper 11 bits. The histogram must be clear."""
    held = row.config.held
    for batch in cutlass.range(row.batches, unroll=1):
        raw = [Uint32(0) for _ in range(4 * held)]
        for step in cutlass.range_constexpr(held):
            one = row.start + (batch * Int32(held) + Int32(step)) * Int32(32)
            if batch * Int32(held) + Int32(step) < row.rounds and one < row.vectors:
                loaded = ptx.load_v4(row.address + Int64(one) * Int64(16))
                for word in cutlass.range_constexpr(4):
                    raw[4 * step + word] = loaded[word]
        for step in cutlass.range_constexpr(held):
            one = row.start + (batch * Int32(held) + Int32(step)) * Int32(32)
            if batch * Int32(held) + Int32(step) < row.rounds and one < row.vectors:
                if one * Int32(8) + Int32(8) > row.length:
                    for word in cutlass.range_constexpr(4):
                        inside = packed.inside_mask(one * Int32(8) + Int32(2 * word), Int32(0), row.length)
                        raw[4 * step + word] = raw[4 * step + word] | (inside ^ Uint32(0xFFFFFFFF))  # NaN: no maximum
                key = packed.foreign_top(raw[4 * step : 4 * step + 4])
                ptx.store_shared_u16(row.maxima + Uint32(one) * Uint32(2), key)
                ptx.red_shared(row.first + (key >> Uint32(5)) * Uint32(4), Uint32(1), "add")


@cute.jit
def maximum(row: Any, one: Int32) -> Uint32:
    """The largest key of a vector, 0 past the row."""
    key = Uint32(0)
    if one < row.vectors:
        key = ptx.load_shared_u16(row.maxima + Uint32(one) * Uint32(2))
    return key


@cute.jit
def list_vectors(row: Any, n: Int32) -> Int32:
    """List vectors that hold the row's N best keys, in index order, no more than the registers hold: those whose
    maxima reach the bin of the N-th largest, or exactly the N best by (maximum, lower index). Returns their number. The
    row has at least N vectors. Ends with a block barrier."""
    digit, above, inside = block_search(row, row.first, n)
    threshold = (Uint32(digit) << Uint32(5)) - Uint32(1)
    need = Int32(0)
    if above + inside > n + (n >> Int32(1)) or above + inside > Int32(row.config.threads * row.config.held):
        for number in cutlass.range(row.rounds, unroll=4):
            key = maximum(row, row.start + number * Int32(32))
            if (key >> Uint32(5)) == Uint32(digit):
                ptx.red_shared(row.fine + (key & Uint32(31)) * Uint32(4), Uint32(1), "add")
        low, between = find_low(row.fine, n - above, row.lane)
        threshold = (Uint32(digit) << Uint32(5)) | low
        need = n - above - between
    greater = Int32(0)
    equal = Int32(0)
    for number in cutlass.range(row.rounds, unroll=4):
        key = maximum(row, row.start + number * Int32(32))
        greater = greater + Int32(cute.arch.popc(Uint32(cute.arch.vote_ballot_sync(key > threshold))))
        equal = equal + Int32(cute.arch.popc(Uint32(cute.arch.vote_ballot_sync(key == threshold))))
    equal_before = Int32(0)
    equals = Int32(0)
    if need > Int32(0):
        equal_before, equals = block_offsets(row, equal, 1)
    greater_before, count = block_offsets(row, greater, 0)
    if equals > need:
        equals = need
    below = ptx.lanes_below()
    for number in cutlass.range(row.rounds, unroll=4):
        one = row.start + number * Int32(32)
        key = maximum(row, one)
        more = Uint32(cute.arch.vote_ballot_sync(key > threshold))
        same = Uint32(cute.arch.vote_ballot_sync(key == threshold))
        rank = equal_before + Int32(cute.arch.popc(same & below))
        taken = rank
        if taken > need:
            taken = need
        if key > threshold or (key == threshold and rank < need):
            place = greater_before + Int32(cute.arch.popc(more & below)) + taken
            ptx.store_shared(row.list + Uint32(place) * Uint32(4), Uint32(one))
        greater_before = greater_before + Int32(cute.arch.popc(more))
        equal_before = equal_before + Int32(cute.arch.popc(same))
    cute.arch.sync_threads()
    return count + equals


@cute.jit
def load_listed(row: Any, count: Int32) -> Any:
    """(key16 of this thread's vectors of the list, 0 where no key is; their numbers; the rounds)."""
    held = row.config.held
    rounds = (count + Int32(row.config.threads - 1)) // Int32(row.config.threads)
    first = row.warp * rounds * Int32(32) + row.lane
    words = [Uint32(0) for _ in range(4 * held)]
    vectors = [Int32(0) for _ in range(held)]
    for step in cutlass.range_constexpr(held):
        index = first + Int32(32 * step)
        vectors[step] = row.vectors
        if Int32(step) < rounds and index < count:
            vectors[step] = Int32(ptx.load_shared(row.list + Uint32(index) * Uint32(4)))
    for step in cutlass.range_constexpr(held):
        if vectors[step] < row.vectors:
            loaded = ptx.load_v4(row.address + Int64(vectors[step]) * Int64(16))
            for word in cutlass.range_constexpr(4):
                words[4 * step + word] = loaded[word]
    for step in cutlass.range_constexpr(held):
        if Int32(step) < rounds:
            made = settle(row, words[4 * step : 4 * step + 4], vectors[step])
            for word in cutlass.range_constexpr(4):
                words[4 * step + word] = made[word]
    return words, vectors, rounds


# ------------------------------------------------------------------------------------------------- entries


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
            mine = mine + (Int32(cute.arch.popc(same[step])) << Int32(EQUAL_SHIFT))
    before, _all = block_offsets(row, mine, 1)
    above = before & Int32(0xFFFF)
    equal = before >> Int32(EQUAL_SHIFT)
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
