"""The K best of the lists of all ranks, in shared memory: threshold, cut among equal keys, saturated ranks.

A row's lists are described source by source in shared memory: where a list lies (address 0: in shared memory itself),
bytes from word to word, entries. First lists may be held in shared memory or be read again from the slots or from
ordinary memory; second lists are always read. All threads of the block call these functions together.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from keysieve.device import packed, ptx, scan
from keysieve.kernels.exchange_config import TIES, MergeConfig, MergeMap
from keysieve.kernels.sharding import local_length

BINS = 2048
"""Bins of the larger histogram: four a thread."""

ID_MAX = (1 << 27) - 1
"""Global positions are below 2^26."""

FOUND_THRESHOLD, FOUND_ABOVE, FOUND_EQUAL, FOUND_CUT, FOUND_TIES = range(5)
FOUND_BIN = 8  # .. 10: what `find_bin` tells
FOUND_ROW = 15
"""Words of `found`: threshold key, keys above it, keys equal to it, the largest id that is taken among those, ids
listed so far; and, not cleared, the row that was drawn."""


class Lists:
    """A row's lists: trace-time handle of shared addresses and of the numbers they are addressed by."""

    def __init__(
        self,
        config: MergeConfig,
        base: Uint32,
        thread: Int32,
        world: Int32,
        rank: Int32,
        interleave: Int32,
        n: Int32,
        k: Int32,
        planes: Int32,
        divide: Int64,
    ) -> None:
        places = MergeMap.of(config)
        self.config, self.base, self.thread = config, base, thread
        self.world, self.rank, self.interleave = world, rank, interleave
        self.n, self.k, self.planes = n, k, planes
        self.magic, self.magic_shift = divide & Int64((1 << 32) - 1), divide >> Int64(32)
        self.groups = (n + Int32(31)) >> Int32(5)
        self.words = n + planes * self.groups
        self.pairs = ((self.words + Int32(1)) >> Int32(1)) + Int32(1)
        self.pitch = (self.pairs - Int32(1)) * Int32(2)  # of lists held in shared memory
        self.fits = self.pitch * world <= Int32(config.held)
        self.high = base + Uint32(places.high)
        self.low = base + Uint32(places.low)
        self.found = base + Uint32(places.found)
        self.sums = base + Uint32(places.sums)
        self.counts = base + Uint32(places.begins)  # until winners are counted
        self.rejected = base + Uint32(places.rejected)
        self.begins = base + Uint32(places.begins)
        self.bases = base + Uint32(places.bases)
        self.steps = base + Uint32(places.steps)
        self.ties = base + Uint32(places.ties)
        self.winners = base + Uint32(places.winners)
        self.plane_words = self.winners + Uint32(k) * Uint32(4)  # right behind a second list's entries
        self.held = base + Uint32(places.words)
        self.clocks = base + Uint32(places.clocks)
        self.cleared = places.cleared

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Lists:
        return self

    def note(self, word: int) -> Uint32:
        """Shared address of word `word` of `found`."""
        return self.found + Uint32(4 * word)


def note_clock(lists: Any, step: int) -> None:
    """With `config.trace`: note the clock at a step, as the block's first thread sees it."""
    if lists.config.trace:
        _note_clock(lists.clocks + Uint32(4 * step), lists.thread)


@cute.jit
def _note_clock(place: Uint32, thread: Int32) -> None:
    if thread == Int32(0):
        ptx.store_shared(place, ptx.asm("mov.u32 $0, %clock;", "=r", (Uint32,), ())[0])


@cute.jit
def write_clocks(lists: Any, where: Int64, row: Int32) -> None:
    """The noted clocks to u32 `where[row][16]`."""
    if lists.thread == Int32(0):
        for step in cutlass.range(16, unroll=1):
            value = ptx.load_shared(lists.clocks + Uint32(step) * Uint32(4))
            ptx.store(where + Int64(row * Int32(16) + step) * Int64(4), value)


@cute.jit
def clear(lists: Any) -> None:
    """Zero the histograms and what is noted of sources; a block barrier must follow."""
    for index in cutlass.range(lists.thread, Int32(lists.cleared // 16), lists.config.threads, unroll=1):
        ptx.store_shared_v4(lists.base + Uint32(index) * Uint32(16), Uint32(0), Uint32(0), Uint32(0), Uint32(0))
    if lists.thread < Int32(8):
        ptx.store_shared(lists.found + Uint32(lists.thread) * Uint32(4), Uint32(0))
    if lists.thread < Int32(16):
        ptx.store_shared(lists.rejected + Uint32(lists.thread) * Uint32(4), Uint32(0))


@cute.jit
def clear_high(lists: Any) -> None:
    """Zero the larger histogram; a block barrier must follow."""
    for index in cutlass.range(lists.thread, Int32(BINS // 4), lists.config.threads, unroll=1):
        ptx.store_shared_v4(lists.high + Uint32(index) * Uint32(16), Uint32(0), Uint32(0), Uint32(0), Uint32(0))


@cute.jit
def find_bin(lists: Any, want: Int32) -> Any:
    """(bin, keys in higher bins, keys in it) of the `want`-th largest key counted in `high`.

    Bin 0 where there are fewer. Four bins a thread. Two block barriers, after which the histogram has been read.
    """
    lane = lists.thread & Int32(31)
    warp = lists.thread >> Int32(5)
    warps = lists.config.threads // 32
    lowest = Uint32(BINS - 4) - Uint32(lists.thread) * Uint32(4)
    counts = [Uint32(0) for _ in range(4)]
    counts[0], counts[1], counts[2], counts[3] = ptx.load_shared_v4(lists.high + lowest * Uint32(4))
    mine = Int32(counts[0] + counts[1] + counts[2] + counts[3])
    upto = packed.warp_prefix(mine)
    if lane == Int32(31):
        ptx.store_shared(lists.sums + Uint32(warp) * Uint32(4), Uint32(upto))
    cute.arch.sync_threads()
    of_warp = Int32(0)
    if lane < Int32(warps):
        of_warp = Int32(ptx.load_shared(lists.sums + Uint32(lane) * Uint32(4)))
    reach = scan.warp_sum(of_warp * Int32(lane < warp)) + upto
    if reach >= want and reach - mine < want:
        above = reach - mine
        digit = lowest
        equal = counts[0]
        found = Boolean(False)
        for part in cutlass.range_constexpr(4):
            count = Int32(counts[3 - part])
            if not found:
                if above + count >= want:
                    found = Boolean(True)
                    digit = lowest + Uint32(3 - part)
                    equal = Uint32(count)
                else:
                    above = above + count
        ptx.store_shared(lists.note(FOUND_BIN), digit)
        ptx.store_shared(lists.note(FOUND_BIN + 1), Uint32(above))
        ptx.store_shared(lists.note(FOUND_BIN + 2), equal)
    if lowest == Uint32(0) and reach < want:
        ptx.store_shared(lists.note(FOUND_BIN), Uint32(0))
        ptx.store_shared(lists.note(FOUND_BIN + 1), Uint32(reach) - counts[0])
        ptx.store_shared(lists.note(FOUND_BIN + 2), counts[0])
    cute.arch.sync_threads()
    digit = ptx.load_shared(lists.note(FOUND_BIN))
    above = Int32(ptx.load_shared(lists.note(FOUND_BIN + 1)))
    return digit, above, Int32(ptx.load_shared(lists.note(FOUND_BIN + 2)))


# ------------------------------------------------------------------------------------------------- where lists lie


@cute.jit
def describe(lists: Any, source: Int32, address: Int64, step: Int32, entries: Int32) -> None:
    """One thread: where a source's list lies. address 0: held in shared memory. step: bytes from word to word."""
    place = lists.bases + Uint32(source) * Uint32(8)
    ptx.store_shared(place, Uint32(address & Int64(0xFFFFFFFF)))
    ptx.store_shared(place + Uint32(4), Uint32((address >> Int64(32)) & Int64(0xFFFFFFFF)))
    ptx.store_shared(lists.steps + Uint32(source) * Uint32(4), Uint32(step) | (Uint32(entries) << Uint32(8)))


@cute.jit
def hold_all(lists: Any) -> None:
    """All first lists are held in shared memory; a block barrier must follow."""
    if lists.thread < lists.world:
        describe(lists, lists.thread, Int64(0), Int32(8), lists.n)


@cute.jit
def list_plain(lists: Any, words: Int64, source_stride: Int64, row_stride: Int64, row: Int32) -> None:
    """First lists in ordinary memory. Block barriers before and after, so that `clear` is seen."""
    if lists.thread < lists.world:
        place = words + (Int64(lists.thread) * source_stride + Int64(row) * row_stride) * Int64(4)
        describe(lists, lists.thread, place, Int32(4), lists.n)
    cute.arch.sync_threads()


@cute.jit
def list_second(
    lists: Any, saturated: Uint32, second: Int64, source_stride: Int64, row_stride: Int64, row: Int32
) -> None:
    """Second lists in ordinary memory in place of the saturated ranks' first ones, where there are any."""
    cute.arch.sync_threads()
    mine = (saturated >> Uint32(lists.thread & Int32(31))) & Uint32(1)
    if lists.thread < lists.world and mine != Uint32(0) and second != Int64(0):
        place = second + (Int64(lists.thread) * source_stride + Int64(row) * row_stride) * Int64(4)
        describe(lists, lists.thread, place, Int32(4), lists.k)
    cute.arch.sync_threads()


# ------------------------------------------------------------------------------------------------- reading entries


@cute.jit
def read_word(lists: Any, source: Int32, index: Int32) -> Uint32:
    """Word `index` of a source's list."""
    place = lists.bases + Uint32(source) * Uint32(8)
    low, high = ptx.load_shared(place), ptx.load_shared(place + Uint32(4))
    word = Uint32(0)
    if (low | high) == Uint32(0):
        word = ptx.load_shared(lists.held + Uint32(source * lists.pitch + index) * Uint32(4))
    else:
        step = ptx.load_shared(lists.steps + Uint32(source) * Uint32(4)) & Uint32(0xFF)
        address = Int64(low) | (Int64(high) << Int64(32))
        word = ptx.load(address + Int64(Uint32(index) * step), Uint32, "relaxed", "sys")
    return word


@cute.jit
def entries_of(lists: Any, source: Int32) -> Int32:
    """Entries of a source's list, empty ones included."""
    return Int32(ptx.load_shared(lists.steps + Uint32(source) * Uint32(4)) >> Uint32(8))


@cute.jit
def longest(lists: Any) -> Int32:
    """Entries of the longest list."""
    span = Int32(0)
    for source in cutlass.range(lists.world, unroll=1):
        entries = entries_of(lists, source)
        if entries > span:
            span = entries
    return span


@cute.jit
def read_entry(lists: Any, source: Int32, index: Int32) -> Uint32:
    """First word of an entry, 0 for an empty one or beyond the list's end."""
    word = Uint32(0)
    if index < entries_of(lists, source):
        word = read_word(lists, source, index)
    return word


@cute.jit
def id_of(lists: Any, source: Int32, index: Int32, word: Uint32) -> Uint32:
    """Global position of a live entry."""
    entries = entries_of(lists, source)
    groups = (entries + Int32(31)) >> Int32(5)
    local = Uint32(0xFFFF) - (word & Uint32(0xFFFF))
    for plane in cutlass.range(lists.planes, unroll=1):
        bits = read_word(lists, source, entries + plane * groups + (index >> Int32(5)))
        bit = (bits >> (Uint32(index) & Uint32(31))) & Uint32(1)
        local = local | (bit << (Uint32(16) + Uint32(plane)))
    return global_position(lists, source, local)


@cute.jit
def global_position(lists: Any, source: Int32, local: Uint32) -> Uint32:
    """Global position of local index `local` of a source."""
    position = local
    if lists.world > Int32(1):
        interleave = Uint32(lists.interleave)
        whole = stripe_of(lists, local)
        within = local - whole * interleave
        position = (whole * Uint32(lists.world) + Uint32(source)) * interleave + within
    return position


def stripe_of(lists: Any, local: Uint32) -> Uint32:
    """`local // interleave`, by multiplication: see `exchange_config.divider`."""
    product = Int64(local) * lists.magic
    return Uint32((product >> lists.magic_shift) & Int64(0xFFFFFFFF))


@cute.jit
def is_chosen(lists: Any, source: Int32, index: Int32, word: Uint32, threshold: Uint32, cut: Uint32) -> Boolean:
    """Is a live entry (`word` is its first word, 0 for an empty one) among the K best?"""
    key = word >> Uint32(16)
    taken = key > threshold
    if key == threshold and key != Uint32(0):
        taken = Boolean(True)
        if cut != Uint32(ID_MAX):
            taken = id_of(lists, source, index, word) <= cut
    return taken


# ------------------------------------------------------------------------------------------------- selecting


@cute.jit
def select(lists: Any, counted: cutlass.Constexpr[bool]) -> None:
    """Note the threshold key, and the largest id taken among the keys equal to it. Begins and ends with a barrier.

    counted: the histogram of upper bits is complete already.
    """
    threads = lists.config.threads
    span = longest(lists)
    total = span * lists.world
    if cutlass.const_expr(not counted):
        cute.arch.sync_threads()
        for flat in cutlass.range(lists.thread, total, threads, unroll=1):
            source = flat // span
            word = read_entry(lists, source, flat - source * span)
            if word != Uint32(0):
                scan.histogram_add(lists.high, word >> Uint32(21))
    cute.arch.sync_threads()
    lane = lists.thread & Int32(31)
    if cutlass.const_expr(lists.config.rounds > 0):
        digit, above, _same = find_bin(lists, lists.k)
    else:
        if lists.thread < Int32(32):
            digit, above, _equal = scan.warp_find_digit(lists.high, lists.k, lane, 2048)
            if lane == Int32(0):
                ptx.store_shared(lists.note(FOUND_THRESHOLD), Uint32(digit))
                ptx.store_shared(lists.note(FOUND_ABOVE), Uint32(above))
        cute.arch.sync_threads()
        digit = ptx.load_shared(lists.note(FOUND_THRESHOLD))
        above = Int32(ptx.load_shared(lists.note(FOUND_ABOVE)))
    for flat in cutlass.range(lists.thread, total, threads, unroll=1):
        source = flat // span
        word = read_entry(lists, source, flat - source * span)
        if word != Uint32(0) and (word >> Uint32(21)) == digit:
            scan.histogram_add(lists.low, (word >> Uint32(16)) & Uint32(31))
    cute.arch.sync_threads()
    if lists.thread < Int32(32):
        lower, more, equal = scan.warp_find_digit(lists.low, lists.k - above, lane, 32)
        if lane == Int32(0):
            ptx.store_shared(lists.note(FOUND_THRESHOLD), (digit << Uint32(5)) | Uint32(lower))
            ptx.store_shared(lists.note(FOUND_ABOVE), Uint32(above + more))
            ptx.store_shared(lists.note(FOUND_EQUAL), Uint32(equal))
            ptx.store_shared(lists.note(FOUND_CUT), Uint32(ID_MAX))
            ptx.store_shared(lists.note(FOUND_TIES), Uint32(0))
    cute.arch.sync_threads()
    threshold = ptx.load_shared(lists.note(FOUND_THRESHOLD))
    need = lists.k - Int32(ptx.load_shared(lists.note(FOUND_ABOVE)))
    equal = Int32(ptx.load_shared(lists.note(FOUND_EQUAL)))
    if threshold != Uint32(0) and equal > need:
        if equal <= Int32(TIES):
            cut_few(lists, threshold, need, span, total)
        else:
            cut_many(lists, threshold, need, span, total)
    cute.arch.sync_threads()


@cute.jit
def cut_few(lists: Any, threshold: Uint32, need: Int32, span: Int32, total: Int32) -> None:
    """Note the `need`-th smallest id of the keys equal to the threshold, at most TIES: each counts the smaller ones."""
    threads = lists.config.threads
    for flat in cutlass.range(lists.thread, total, threads, unroll=1):
        source = flat // span
        index = flat - source * span
        word = read_entry(lists, source, index)
        if word != Uint32(0) and (word >> Uint32(16)) == threshold:
            place = ptx.atom_shared(lists.note(FOUND_TIES), Uint32(1), "add")
            ptx.store_shared(lists.ties + place * Uint32(4), id_of(lists, source, index, word))
    cute.arch.sync_threads()
    ties = Int32(ptx.load_shared(lists.note(FOUND_TIES)))
    for tie in cutlass.range(lists.thread, ties, threads, unroll=1):
        mine = ptx.load_shared(lists.ties + Uint32(tie) * Uint32(4))
        smaller = Int32(0)
        for other in cutlass.range(ties, unroll=4):
            smaller = smaller + Int32(ptx.load_shared(lists.ties + Uint32(other) * Uint32(4)) < mine)
        if smaller == need - Int32(1):
            ptx.store_shared(lists.note(FOUND_CUT), mine)


@cute.jit
def cut_many(lists: Any, threshold: Uint32, need: Int32, span: Int32, total: Int32) -> None:
    """The same for any number of equal keys: three digits of nine bits of the reversed ids, largest first."""
    threads = lists.config.threads
    lane = lists.thread & Int32(31)
    prefix = Uint32(0)
    left = need
    for step in cutlass.range_constexpr(3):
        shift = 18 - 9 * step
        for place in cutlass.range(lists.thread, 512, threads, unroll=1):
            ptx.store_shared(lists.low + Uint32(place) * Uint32(4), Uint32(0))
        cute.arch.sync_threads()
        for flat in cutlass.range(lists.thread, total, threads, unroll=1):
            source = flat // span
            index = flat - source * span
            word = read_entry(lists, source, index)
            if word != Uint32(0) and (word >> Uint32(16)) == threshold:
                reverse = Uint32(ID_MAX) - id_of(lists, source, index, word)
                if (reverse >> Uint32(shift + 9)) == prefix:
                    scan.histogram_add(lists.low, (reverse >> Uint32(shift)) & Uint32(511))
        cute.arch.sync_threads()
        if lists.thread < Int32(32):
            digit, above, _equal = scan.warp_find_digit(lists.low, left, lane, 512)
            if lane == Int32(0):
                ptx.store_shared(lists.sums, Uint32(digit))
                ptx.store_shared(lists.sums + Uint32(4), Uint32(above))
        cute.arch.sync_threads()
        prefix = (prefix << Uint32(9)) | ptx.load_shared(lists.sums)
        left = left - Int32(ptx.load_shared(lists.sums + Uint32(4)))
        cute.arch.sync_threads()
    if lists.thread == Int32(0):
        ptx.store_shared(lists.note(FOUND_CUT), Uint32(ID_MAX) - prefix)


@cute.jit
def hidden_sources(lists: Any, length: Int32, known: Any) -> Any:
    """(mask of the sources that have more keys than a first list, may a local index have more than 16 bits?).

    length: the row's global length, if it is `known`; else every source may have more.
    """
    world, source = Uint32(lists.world), lists.thread & Int32(31)
    more = lists.n < lists.k and source < lists.world
    wide = Boolean(True)
    if known:
        keys = local_length(length, world, Uint32(source), Uint32(lists.interleave))
        more = more and keys > lists.n
        wide = Int32(cute.arch.shuffle_sync(keys, 0)) > Int32(1 << 16)  # no rank has more than the first one
    return Uint32(cute.arch.vote_ballot_sync(more)), wide


@cute.jit
def saturated(lists: Any, length: Int32, known: Any) -> Uint32:
    """Mask of the ranks whose list is full, shorter than their keys, and chosen entirely. One block barrier.

    length: the row's global length, if it is `known`; else a full list is taken for a cut one.
    """
    threshold = ptx.load_shared(lists.note(FOUND_THRESHOLD))
    cut = ptx.load_shared(lists.note(FOUND_CUT))
    span = lists.n
    for flat in cutlass.range(lists.thread, span * lists.world, lists.config.threads, unroll=1):
        source = flat // span
        index = flat - source * span
        word = read_entry(lists, source, index)
        if not is_chosen(lists, source, index, word, threshold, cut):  # an empty entry is not: the list is not full
            ptx.store_shared(lists.rejected + Uint32(source) * Uint32(4), Uint32(1))
    cute.arch.sync_threads()
    mask = Uint32(0)
    for source in cutlass.range(lists.world, unroll=1):
        hidden = Boolean(True)
        if known:
            keys = local_length(length, Uint32(lists.world), Uint32(source), Uint32(lists.interleave))
            hidden = keys > lists.n
        if hidden and ptx.load_shared(lists.rejected + Uint32(source) * Uint32(4)) == Uint32(0):
            mask = mask | (Uint32(1) << Uint32(source))
    return mask
