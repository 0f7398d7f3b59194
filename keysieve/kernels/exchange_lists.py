"""A row's lists of all ranks: where they lie, what of them is in shared memory, how entries are read.

They are described source by source in shared memory: where a list lies (address 0: in shared memory itself), bytes from
word to word, entries. First lists may be held in shared memory or be read again from the slots or from ordinary memory.
All threads of the block call these functions together.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from keysieve.device import ptx
from keysieve.kernels.exchange_config import MergeConfig, MergeMap

BINS = 2048
"""Bins of the larger histogram: four a thread."""

ID_MAX = (1 << 27) - 1
"""Global positions are below 2^26."""

FOUND_THRESHOLD, FOUND_ABOVE, FOUND_EQUAL, FOUND_CUT, FOUND_TIES = range(5)
FOUND_NONE = 5  # what has no key is counted here
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
