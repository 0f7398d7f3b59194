"""The latency form of the merge: every word of a row's first lists in a register, one pass over them for each step.

A source's pairs go to an equal number of warps, a contiguous run to each, so that order within a list is (warp, round,
lane) and places come from ballots. All of a thread's loads are issued before the first tag is examined. Keys are
counted by their distance from the least one: that range is nearly always narrower than the histogram, whose bins are
then single keys; where it is not, a second histogram splits the threshold's bin. The block finds bins together.

Nothing depends on the order of arrival. Second lists (`exchange_rescue`) are merged by the other form.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from keysieve.device import packed, ptx, report, scan
from keysieve.device.paged import physical_row, table_entry
from keysieve.kernels import exchange_select as choose
from keysieve.kernels import exchange_words as arrival
from keysieve.kernels.exchange_select import FOUND_CUT, FOUND_THRESHOLD, FOUND_TIES, ID_MAX, find_bin
from keysieve.kernels.sharding import local_length

FEW = 128
"""Equal keys up to which they are ranked against each other, a warp for each; more are selected by digits of ids."""

_LOW_BINS = 32


class Share:
    """A thread's share of a row's first lists: trace-time handle."""

    def __init__(self, lists: Any) -> None:
        self.lists = lists
        self.rounds = lists.config.rounds
        self.lane = lists.thread & Int32(31)
        self.warp = lists.thread >> Int32(5)
        self.each = Int32(lists.config.threads // 32) // lists.world  # warps of a source
        self.source = self.warp // self.each
        self.active = self.source < lists.world
        self.used = (lists.pairs + self.each * Int32(32) - Int32(1)) // (self.each * Int32(32))
        self.first = (self.warp - self.source * self.each) * self.used * Int32(32) + self.lane
        self.held = lists.held + Uint32(self.source * lists.pitch) * Uint32(4)

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Share:
        return self

    def pair(self, part: int) -> Int32:
        """Pair of round `part`."""
        return self.first + Int32(32 * part)


@cute.jit
def has(share: Any, part: int) -> Any:
    """Does this thread have a pair in round `part`? (The last one of a source is the signature.)"""
    return share.active and Int32(part) < share.used and share.pair(part) < share.lists.pairs


@cute.jit
def load_tagged(share: Any, slots: Int64, tag: Uint32, max_rows: Int32, row: Int32) -> Any:
    """This thread's pairs as they are now: words and tags, four a round."""
    lists = share.lists
    place = Int32(tag & Uint32(1)) * lists.world + share.source
    slot = slots + (Int64(place) * Int64(max_rows) + Int64(row)) * Int64(lists.pairs) * Int64(16)
    got = [Uint32(0) for _ in range(4 * share.rounds)]
    for part in cutlass.range_constexpr(share.rounds):
        if has(share, part):
            w0, t0, w1, t1 = ptx.load_pair(slot + Int64(share.pair(part)) * Int64(16))
            got[4 * part] = w0
            got[4 * part + 1] = t0
            got[4 * part + 2] = w1
            got[4 * part + 3] = t1
    return got, slot


@cute.jit
def accept(share: Any, wait: Any, got: Any, slot: Int64) -> Any:
    """This thread's words once every tag is the call's; all words are held in shared memory, entries returned."""
    lists = share.lists
    words = [Uint32(0) for _ in range(2 * share.rounds)]
    for part in cutlass.range_constexpr(share.rounds):
        if has(share, part):
            pair = share.pair(part)
            address = slot + Int64(pair) * Int64(16)
            w0, w1 = arrival.wait_pair(
                wait, address, Uint32(share.source), got[4 * part], got[4 * part + 1], got[4 * part + 2],
                got[4 * part + 3],
            )  # fmt: skip
            if pair == lists.pairs - Int32(1):
                if w0 != wait.call or w1 != wait.length * Uint32(Int32(wait.length) > Int32(0)):
                    stage = Uint32(report.STAGE_SIGNATURE)
                    arrival.give_up(wait, Uint32(share.source), wait.tag, wait.tag, stage, w0, w1)
            else:
                w0, w1 = hold(share, pair, w0, w1)
                words[2 * part] = w0
                words[2 * part + 1] = w1
    return words


@cute.jit
def hold(share: Any, pair: Int32, w0: Uint32, w1: Uint32) -> Any:
    """A pair's words into shared memory; those that are entries of the list are returned, others as 0."""
    packed.store_shared_v2(share.held + Uint32(pair) * Uint32(8), w0, w1)
    index = pair * Int32(2)
    return w0 * Uint32(index < share.lists.n), w1 * Uint32(index + Int32(1) < share.lists.n)


@cute.jit
def take_plain(share: Any, words_at: Int64, source_stride: Int64, row_stride: Int64, row: Int32) -> Any:
    """This thread's words of lists in ordinary memory, held and returned as by `accept`."""
    lists = share.lists
    address = words_at + (Int64(share.source) * source_stride + Int64(row) * row_stride) * Int64(4)
    got = [Uint32(0) for _ in range(2 * share.rounds)]
    for half in cutlass.range_constexpr(2 * share.rounds):
        word = share.pair(half // 2) * Int32(2) + Int32(half % 2)
        if has(share, half // 2) and word < lists.words:
            got[half] = ptx.load(address + Int64(word) * Int64(4), Uint32)
    for part in cutlass.range_constexpr(share.rounds):
        if has(share, part) and share.pair(part) < lists.pairs - Int32(1):
            got[2 * part], got[2 * part + 1] = hold(share, share.pair(part), got[2 * part], got[2 * part + 1])
        else:
            got[2 * part] = Uint32(0)
            got[2 * part + 1] = Uint32(0)
    return got


@cute.jit
def upper_of(share: Any, half: int) -> Uint32:
    """Index bits 16 and above of entry `half` of this thread, in place."""
    lists = share.lists
    index = share.pair(half // 2) * Int32(2) + Int32(half % 2)
    upper = Uint32(0)
    for plane in cutlass.range(lists.planes, unroll=1):
        place = lists.n + plane * lists.groups + (index >> Int32(5))
        bits = ptx.load_shared(share.held + Uint32(place) * Uint32(4))
        upper = upper | (((bits >> (Uint32(index) & Uint32(31))) & Uint32(1)) << (Uint32(16) + Uint32(plane)))
    return upper


@cute.jit
def local_of(share: Any, word: Uint32, half: int) -> Uint32:
    """Local index of a live entry."""
    return (Uint32(0xFFFF) - (word & Uint32(0xFFFF))) | upper_of(share, half)


@cute.jit
def id_of(share: Any, word: Uint32, half: int) -> Uint32:
    """Global position of a live entry."""
    lists = share.lists
    return choose.global_position(lists, share.source, local_of(share, word, half))


@cute.jit
def look_up(share: Any, words: Any, where: Any, row: Int32) -> Any:
    """What an entry of this rank's own list becomes: local index, or row of the cache. Loads only are issued here."""
    table, table_stride, next_n, page_log2, _block_rows = where
    request = row
    if next_n > Int32(1):
        request = row // next_n
    entries = [Int32(0) for _ in range(2 * share.rounds)]
    if share.source == share.lists.rank and table != Int64(0):
        for half in cutlass.range_constexpr(2 * share.rounds):
            if words[half] != Uint32(0):
                local = Int32(local_of(share, words[half], half))
                entries[half] = ptx.load(table_entry(table, request, table_stride, local >> page_log2), Int32)
    return entries


@cute.jit
def find_threshold(share: Any, words: Any) -> Any:
    """(threshold key, keys of it that are taken, keys equal to it): threshold 0 takes everything.

    The first barrier also shows all held words.
    """
    lists = share.lists
    most = Uint32(0)  # largest key, and 0xFFFF less the smallest
    live = Int32(0)
    for half in cutlass.range_constexpr(2 * share.rounds):
        key = words[half] >> Uint32(16)
        both = (key | ((Uint32(0xFFFF) - key) << Uint32(16))) * Uint32(key != Uint32(0))
        most = ptx.max_u16x2(most, both)
        live = live + Int32(key != Uint32(0))
    top = scan.warp_max_u32(most & Uint32(0xFFFF))
    bottom = scan.warp_max_u32(most >> Uint32(16))
    live = scan.warp_sum(live)
    if share.lane == Int32(0):
        ptx.store_shared(lists.sums + Uint32(share.warp) * Uint32(4), top | (bottom << Uint32(16)))
        ptx.store_shared(lists.counts + Uint32(share.warp) * Uint32(4), Uint32(live))
    cute.arch.sync_threads()
    both = Uint32(0)
    live = Int32(0)
    if share.lane < Int32(lists.config.threads // 32):
        both = ptx.load_shared(lists.sums + Uint32(share.lane) * Uint32(4))
        live = Int32(ptx.load_shared(lists.counts + Uint32(share.lane) * Uint32(4)))
    top = scan.warp_max_u32(both & Uint32(0xFFFF))
    bottom = Uint32(0xFFFF) - scan.warp_max_u32(both >> Uint32(16))
    live = scan.warp_sum(live)
    threshold = Uint32(0)
    need = Int32(0)
    equal = Int32(0)
    if live > lists.k:
        threshold, need, equal = search(share, words, top, bottom)
    return threshold, need, equal


@cute.jit
def search(share: Any, words: Any, top: Uint32, bottom: Uint32) -> Any:
    """`find_threshold` where more than K entries are live; top, bottom: their largest and smallest key."""
    lists = share.lists
    shift = Uint32(0)
    span = (top - bottom) >> Uint32(11)
    if span != Uint32(0):
        shift = ptx_bits(span)
    for half in cutlass.range_constexpr(2 * share.rounds):
        if words[half] != Uint32(0):
            scan.histogram_add(lists.high, ((words[half] >> Uint32(16)) - bottom) >> shift)
    cute.arch.sync_threads()
    digit, above, equal = find_bin(lists, lists.k)
    threshold = bottom + (digit << shift)
    need = lists.k - above
    if shift != Uint32(0):
        for half in cutlass.range_constexpr(2 * share.rounds):
            distance = (words[half] >> Uint32(16)) - bottom
            if words[half] != Uint32(0) and (distance >> shift) == digit:
                scan.histogram_add(lists.low, distance - (digit << shift))
        cute.arch.sync_threads()
        bin_of_lane = Int32(_LOW_BINS - 1) - share.lane
        count = Int32(ptx.load_shared(lists.low + Uint32(bin_of_lane) * Uint32(4)))
        upto = packed.warp_prefix(count)
        votes = Uint32(cute.arch.vote_ballot_sync(upto >= need))
        owner = packed.lowest_bit(votes)
        equal = Int32(cute.arch.shuffle_sync(count, owner))
        need = need - (Int32(cute.arch.shuffle_sync(upto, owner)) - equal)
        threshold = threshold + Uint32(Int32(_LOW_BINS - 1) - owner)
    return threshold, need, equal


def ptx_bits(value: Uint32) -> Uint32:
    """Bits of a value above 0."""
    return packed.highest_bit(value) + Uint32(1)


@cute.jit
def find_cut(share: Any, words: Any, threshold: Uint32, need: Int32, equal: Int32, length: Int32) -> Uint32:
    """The largest id taken among the keys equal to the threshold. length: above every id."""
    cut = Uint32(ID_MAX)
    if equal > need:
        if equal <= Int32(FEW):
            rank_few(share, words, threshold, need)
        else:
            digit_many(share, words, threshold, need, length)
        cute.arch.sync_threads()
        cut = ptx.load_shared(share.lists.note(FOUND_CUT))
    return cut


@cute.jit
def rank_few(share: Any, words: Any, threshold: Uint32, need: Int32) -> None:
    """Note the `need`-th smallest of at most FEW ids: a warp counts the smaller ones of each."""
    lists = share.lists
    for half in cutlass.range_constexpr(2 * share.rounds):
        if (words[half] >> Uint32(16)) == threshold:
            place = ptx.atom_shared(lists.note(FOUND_TIES), Uint32(1), "add")
            ptx.store_shared(lists.ties + place * Uint32(4), id_of(share, words[half], half))
    cute.arch.sync_threads()
    ties = Int32(ptx.load_shared(lists.note(FOUND_TIES)))
    others = [Uint32(ID_MAX) for _ in range(FEW // 32)]
    for part in cutlass.range_constexpr(FEW // 32):
        if share.lane + Int32(32 * part) < ties:
            others[part] = ptx.load_shared(lists.ties + Uint32(share.lane + Int32(32 * part)) * Uint32(4))
    for tie in cutlass.range(share.warp, ties, lists.config.threads // 32, unroll=1):
        mine = ptx.load_shared(lists.ties + Uint32(tie) * Uint32(4))
        smaller = Int32(0)
        for part in cutlass.range_constexpr(FEW // 32):
            smaller = smaller + Int32(cute.arch.popc(cute.arch.vote_ballot_sync(others[part] < mine)))
        if smaller == need - Int32(1) and share.lane == Int32(0):
            ptx.store_shared(lists.note(FOUND_CUT), mine)


@cute.jit
def digit_many(share: Any, words: Any, threshold: Uint32, need: Int32, length: Int32) -> None:
    """Note the `need`-th smallest of any number of ids below `length`: digits of 11 bits, the highest first."""
    lists = share.lists
    ids = [Uint32(ID_MAX) for _ in range(2 * share.rounds)]
    for half in cutlass.range_constexpr(2 * share.rounds):
        if (words[half] >> Uint32(16)) == threshold:
            ids[half] = id_of(share, words[half], half)
    shift = Uint32(0)
    if (length >> Int32(11)) != Int32(0):
        shift = ptx_bits(Uint32(length) >> Uint32(11))
    prefix = Uint32(0)
    before = shift + Uint32(11)
    left = need
    searching = Boolean(True)
    while searching:
        cute.arch.sync_threads()
        choose.clear_high(lists)
        cute.arch.sync_threads()
        for half in cutlass.range_constexpr(2 * share.rounds):
            if ids[half] != Uint32(ID_MAX) and (ids[half] >> before) == prefix:
                digit = (ids[half] >> shift) & ((Uint32(1) << (before - shift)) - Uint32(1))
                scan.histogram_add(lists.high, Uint32(2047) - digit)  # the largest bin is found first
        cute.arch.sync_threads()
        reverse, above, _equal = find_bin(lists, left)
        left = left - above
        prefix = (prefix << (before - shift)) | (Uint32(2047) - reverse)
        searching = shift != Uint32(0)
        before = shift
        lower = Int32(shift) - Int32(11)
        shift = Uint32(lower * Int32(lower > Int32(0)))
    if lists.thread == Int32(0):
        ptx.store_shared(lists.note(FOUND_CUT), prefix)


@cute.jit
def mark(share: Any, words: Any, threshold: Uint32, cut: Uint32) -> Any:
    """Bit h set where this thread's entry h is chosen."""
    chosen = Uint32(0)
    for half in cutlass.range_constexpr(2 * share.rounds):
        key = words[half] >> Uint32(16)
        taken = Uint32(key > threshold)
        if key == threshold and key != Uint32(0):
            taken = Uint32(1)
            if cut != Uint32(ID_MAX):
                taken = Uint32(id_of(share, words[half], half) <= cut)
        chosen = chosen | (taken << Uint32(half))
    return chosen


@cute.jit
def count_sources(share: Any, chosen: Uint32) -> Any:
    """(chosen entries of the block's warps before this one, winners below a source, winners of it). One block barrier.

    The second and third are lane s's for source s, the third 0 for lanes beyond the sources. The counts lie where
    nobody reads any more: without a search there is no other barrier between those of `find_threshold` and these.
    """
    lists = share.lists
    mine = scan.warp_sum(Int32(cute.arch.popc(chosen)))
    if share.lane == Int32(0):
        ptx.store_shared(lists.rejected + Uint32(share.warp) * Uint32(4), Uint32(mine))
    cute.arch.sync_threads()
    count = Int32(0)
    if share.lane < Int32(lists.config.threads // 32):
        count = Int32(ptx.load_shared(lists.rejected + Uint32(share.lane) * Uint32(4)))
    upto = packed.warp_prefix(count)
    before = Int32(cute.arch.shuffle_sync(upto - count, share.warp))
    begin = share.lane * share.each
    lowest = Int32(cute.arch.shuffle_sync(upto - count, begin & Int32(31)))
    end = Int32(cute.arch.shuffle_sync(upto, (begin + share.each - Int32(1)) & Int32(31)))
    return before, lowest, (end - lowest) * Int32(share.lane < lists.world)


@cute.jit
def saturated(share: Any, of_source: Int32, length: Int32, known: Any) -> Uint32:
    """Mask of the ranks whose list is full, shorter than their keys, and chosen entirely; see `choose.saturated`."""
    lists = share.lists
    full = of_source == lists.n and share.lane < lists.world
    if known:
        keys = local_length(length, Uint32(lists.world), Uint32(share.lane), Uint32(lists.interleave))
        full = full and keys > lists.n
    return Uint32(cute.arch.vote_ballot_sync(full))


@cute.jit
def write(
    share: Any, words: Any, entries: Any, chosen: Uint32, places: Any, row: Int32, where: Any, target: Any
) -> None:
    """This rank's winners to `out`, their number to `counts`; all winners listed if positions are wanted.

    places: of `count_sources`. The rest of the row has been filled with -1.
    """
    table, _table_stride, _next_n, page_log2, block_rows = where
    out, out_stride, counts, positions = target
    lists = share.lists
    before, lowest, of_source = places
    first = Int32(cute.arch.shuffle_sync(lowest, lists.rank))
    owned = Int32(cute.arch.shuffle_sync(of_source, lists.rank))
    below = ptx.lanes_below()
    line = out + Int64(row) * out_stride * Int64(4)
    if share.source == lists.rank or positions != Int64(0):
        place = before
        for part in cutlass.range_constexpr(share.rounds):
            even = (chosen >> Uint32(2 * part)) & Uint32(1)
            odd = (chosen >> Uint32(2 * part + 1)) & Uint32(1)
            evens = Uint32(cute.arch.vote_ballot_sync(even != Uint32(0)))
            odds = Uint32(cute.arch.vote_ballot_sync(odd != Uint32(0)))
            spot = place + Int32(cute.arch.popc(evens & below)) + Int32(cute.arch.popc(odds & below))
            for side in cutlass.range_constexpr(2):
                half = 2 * part + side
                if ((chosen >> Uint32(half)) & Uint32(1)) != Uint32(0):
                    local = local_of(share, words[half], half)
                    if share.source == lists.rank:
                        value = Int32(local)
                        if table != Int64(0):
                            value = physical_row(entries[half], value, page_log2, block_rows)
                        ptx.store(line + Int64(spot - first) * Int64(4), value)
                    if positions != Int64(0):
                        position = choose.global_position(lists, share.source, local)
                        ptx.store_shared(lists.winners + Uint32(spot) * Uint32(4), position)
                    spot = spot + Int32(1)
            place = place + Int32(cute.arch.popc(evens)) + Int32(cute.arch.popc(odds))
    if lists.thread < lists.world:
        ptx.store_shared(lists.begins + Uint32(lists.thread) * Uint32(4), Uint32(lowest))
    total = Int32(cute.arch.shuffle_sync(lowest + of_source, lists.world - Int32(1)))
    if lists.thread == Int32(0):
        ptx.store_shared(lists.begins + Uint32(lists.world) * Uint32(4), Uint32(total))
        ptx.store(counts + Int64(row) * Int64(4), owned)


@cute.jit
def fill(lists: Any, row: Int32, out: Int64, out_stride: Int64) -> None:
    """-1 into the whole row of `out`: while words are on their way."""
    line = out + Int64(row) * out_stride * Int64(4)
    for index in cutlass.range(lists.thread, lists.k, lists.config.threads, unroll=4):
        ptx.store(line + Int64(index) * Int64(4), Int32(-1))


@cute.jit
def merge_row(share: Any, words: Any, length: Int32, known: Any, row: Int32, where: Any, target: Any) -> Uint32:
    """Write the row from this thread's words, unless ranks are saturated: their mask, and the threshold is noted.

    length: the row's global length, if it is `known`. The result is followed by a block barrier where it is not 0.
    """
    lists = share.lists
    threshold, need, equal = find_threshold(share, words)
    entries = look_up(share, words, where, row)
    top = length
    if not known:
        top = Int32(ID_MAX)
    cut = find_cut(share, words, threshold, need, equal, top)
    chosen = mark(share, words, threshold, cut)
    places = count_sources(share, chosen)
    asked = Uint32(0)
    if lists.n < lists.k:
        asked = saturated(share, places[2], length, known)
    if asked == Uint32(0):
        write(share, words, entries, chosen, places, row, where, target)
    else:
        if lists.thread == Int32(0):
            ptx.store_shared(lists.note(FOUND_THRESHOLD), threshold)
        cute.arch.sync_threads()
    return asked
