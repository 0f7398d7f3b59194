"""The latency form of the merge: a row's words in registers. Here: which thread has which words, and their arrival.

A list is cut into chunks of 64 words, 32 pairs; the chunks of all sources, one source after another, are dealt to the
block's warps in contiguous runs, a chunk a round. So order within a list is (warp, round, lane), and places come from
ballots. All of a thread's loads are issued before the first tag is examined, and addresses and shares are worked out
before there can be any. Where words of a warp are missing one of its lanes polls for all: polling lanes take time from
the push that they wait for. What is selected: `exchange_latency_select`; what becomes of it: `exchange_latency_write`.

Nothing depends on the order of arrival.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from keysieve.device import packed, ptx, report
from keysieve.kernels import exchange_lists as row_lists
from keysieve.kernels import exchange_words as arrival

CHUNK_PAIRS = 32
CHUNK = 2 * CHUNK_PAIRS
"""Words of a chunk: two a lane."""


class Share:
    """A thread's share of a row's lists: trace-time handle.

    sources, pairs: of every round, the source and this thread's pair in its list; a round without work has a source of
    `world` or more. rounds: how many there are at most.
    """

    def __init__(self, lists: Any, sources: Any, pairs: Any, length: Any) -> None:
        self.lists = lists
        self.rounds = len(sources)
        self.lane = lists.thread & Int32(31)
        self.warp = lists.thread >> Int32(5)
        self.sources, self.pairs = sources, pairs
        self.length = length  # entries of a round's list
        self._bits = (lists, sources, pairs, length)

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Share:
        return self

    def index(self, half: int) -> Int32:
        """Index in its list of word `half` of this thread."""
        return self.pairs[half // 2] * Int32(2) + Int32(half % 2)

    @property
    def entries(self) -> Any:
        """Bit h set where word h of this thread is an entry, perhaps an empty one."""
        return entry_bits(*self._bits)

    def has(self, part: int) -> Any:
        """Is there a list in round `part`?"""
        return self.sources[part] < self.lists.world

    def mine(self, part: int) -> Any:
        """Is it this rank's own list?"""
        return self.sources[part] == self.lists.rank


@cute.jit
def entry_bits(lists: Any, sources: Any, pairs: Any, length: Any) -> Uint32:
    """`entries` of a share."""
    entries = Uint32(0)
    for part in cutlass.range_constexpr(len(sources)):
        here = Uint32(sources[part] < lists.world)
        entries = entries | ((here * Uint32(pairs[part] * Int32(2) < length[part])) << Uint32(2 * part))
        entries = entries | ((here * Uint32(pairs[part] * Int32(2) + Int32(1) < length[part])) << Uint32(2 * part + 1))
    return entries


@cute.jit
def deal_first(lists: Any) -> Any:
    """(source, pair) of this thread's rounds among the first lists, all of the same length."""
    warps = lists.config.threads // 32
    per = (lists.pairs + Int32(CHUNK_PAIRS - 1)) >> Int32(5)
    each = (per * lists.world + Int32(warps - 1)) // Int32(warps)
    chunk = (lists.thread >> Int32(5)) * each
    source = chunk // per
    within = chunk - source * per
    sources = [Int32(0) for _ in range(lists.config.rounds)]
    pairs = [Int32(0) for _ in range(lists.config.rounds)]
    for part in cutlass.range_constexpr(lists.config.rounds):
        sources[part] = source
        if Int32(part) >= each:
            sources[part] = lists.world
        pairs[part] = (within << Int32(5)) + (lists.thread & Int32(31))
        within = within + Int32(1)
        if within == per:
            within = Int32(0)
            source = source + Int32(1)
    return sources, pairs


def share_first(lists: Any) -> Share:
    """This thread's share of the first lists."""
    sources, pairs = deal_first(lists)
    return Share(lists, sources, pairs, [lists.n] * lists.config.rounds)


@cute.jit
def deal_second(lists: Any, saturated: Uint32) -> Any:
    """(source, pair, entries of its list) of this thread's rounds where saturated ranks have second lists; and how many
    rounds it takes, which may be more than there are registers for."""
    warps = lists.config.threads // 32
    longer = (lists.k + Int32(CHUNK - 1)) >> Int32(6)
    shorter = (lists.n + Int32(CHUNK - 1)) >> Int32(6)
    asked = Int32(cute.arch.popc(saturated))
    each = (asked * longer + (lists.world - asked) * shorter + Int32(warps - 1)) // Int32(warps)
    sources = [lists.world for _ in range(lists.config.second_rounds)]
    pairs = [Int32(0) for _ in range(lists.config.second_rounds)]
    length = [lists.n for _ in range(lists.config.second_rounds)]
    first = Int32(0)
    for source in cutlass.range(lists.world, unroll=1):
        second = (saturated >> Uint32(source)) & Uint32(1)
        chunks = shorter
        entries = lists.n
        if second != Uint32(0):
            chunks = longer
            entries = lists.k
        for part in cutlass.range_constexpr(lists.config.second_rounds):
            within = (lists.thread >> Int32(5)) * each + Int32(part) - first
            if within >= Int32(0) and within < chunks and Int32(part) < each:
                sources[part] = Int32(source)
                pairs[part] = (within << Int32(5)) + (lists.thread & Int32(31))
                length[part] = entries
        first = first + chunks
    return sources, pairs, length, each


# ------------------------------------------------------------------------------------------------- first lists


def slot_pair(share: Any, slots: Int64, parity: Int32, max_rows: Int32, row: Int32, part: int) -> Int64:
    """Address of this thread's pair of a round."""
    lists = share.lists
    slot = (Int64(parity + share.sources[part]) * Int64(max_rows) + Int64(row)) * Int64(lists.pairs)
    return slots + (slot + Int64(share.pairs[part])) * Int64(16)


@cute.jit
def load_tagged(share: Any, slots: Int64, tag: Uint32, max_rows: Int32, row: Int32) -> Any:
    """This thread's pairs as they are now: words and tags, four a round; and a bit for every round that has one."""
    parity = Int32(tag & Uint32(1)) * share.lists.world
    got = [Uint32(0) for _ in range(4 * share.rounds)]
    wanted = Uint32(0)
    for part in cutlass.range_constexpr(share.rounds):
        if share.has(part) and share.pairs[part] < share.lists.pairs:
            wanted = wanted | Uint32(1 << part)
            address = slot_pair(share, slots, parity, max_rows, row, part)
            got[4 * part], got[4 * part + 1], got[4 * part + 2], got[4 * part + 3] = ptx.load_pair(address)
    return got, wanted


@cute.jit
def missing(share: Any, got: Any, wanted: Uint32, tag: Uint32) -> Uint32:
    """The rounds, among the wanted ones, whose tags are not both the call's."""
    left = Uint32(0)
    for part in cutlass.range_constexpr(share.rounds):
        wrong = ((got[4 * part + 1] ^ tag) | (got[4 * part + 3] ^ tag)) != Uint32(0)
        left = left | (Uint32(wrong) << Uint32(part))
    return left & wanted


@cute.jit
def await_one(share: Any, wait: Any, left: Uint32, start: Int64, slots: Int64, max_rows: Int32, row: Int32) -> None:
    """Wait for the first of this thread's missing pairs, or until time is up."""
    parity = Int32(wait.tag & Uint32(1)) * share.lists.world
    address = Int64(0)
    for step in cutlass.range_constexpr(share.rounds):
        part = share.rounds - 1 - step
        if (left & Uint32(1 << part)) != Uint32(0):
            address = slot_pair(share, slots, parity, max_rows, row, part)
    waiting = Boolean(True)
    while waiting:
        _w0, t0, _w1, t1 = ptx.load_pair(address)
        waiting = ((t0 ^ wait.tag) | (t1 ^ wait.tag)) != Uint32(0) and ptx.global_ns() - start <= wait.limit_ns


@cute.jit
def load_missing(share: Any, wait: Any, got: Any, left: Uint32, slots: Int64, max_rows: Int32, row: Int32) -> Any:
    """`got` with the missing rounds' pairs as they are now."""
    parity = Int32(wait.tag & Uint32(1)) * share.lists.world
    for part in cutlass.range_constexpr(share.rounds):
        if (left & Uint32(1 << part)) != Uint32(0):
            address = slot_pair(share, slots, parity, max_rows, row, part)
            got[4 * part], got[4 * part + 1], got[4 * part + 2], got[4 * part + 3] = ptx.load_pair(address)
    return got


@cute.jit
def accept(
    share: Any, wait: Any, got: Any, wanted: Uint32, slots: Int64, max_rows: Int32, row: Int32, wide: Any
) -> Any:
    """This thread's words once every tag is the call's: entries, 0 for others. wide: all are held in shared memory."""
    lists = share.lists
    left = missing(share, got, wanted, wait.tag)
    stage = Uint32(report.STAGE_WORDS)
    fault = Uint32(0)
    votes = Uint32(cute.arch.vote_ballot_sync(left != Uint32(0)))
    if votes != Uint32(0):
        start = ptx.global_ns()
        late = Boolean(False)
        while votes != Uint32(0) and not late:
            if share.lane == packed.lowest_bit(votes):
                await_one(share, wait, left, start, slots, max_rows, row)
            cute.arch.sync_warp()
            got = load_missing(share, wait, got, left, slots, max_rows, row)
            left = missing(share, got, wanted, wait.tag)
            votes = Uint32(cute.arch.vote_ballot_sync(left != Uint32(0)))
            over = ptx.global_ns() - start > wait.limit_ns
            late = Uint32(cute.arch.vote_ballot_sync(over)) != Uint32(0)
        fault = left
    signed = wait.length * Uint32(Int32(wait.length) > Int32(0))
    for part in cutlass.range_constexpr(share.rounds):
        last = share.pairs[part] == lists.pairs - Int32(1) and (wanted & Uint32(1 << part)) != Uint32(0)
        if last and (got[4 * part] != wait.call or got[4 * part + 2] != signed) and fault == Uint32(0):
            stage = Uint32(report.STAGE_SIGNATURE)
            fault = Uint32(1 << part)
    if fault != Uint32(0):
        complain(share, wait, got, fault, stage)
    words = [got[2 * half] for half in range(2 * share.rounds)]
    if wide:
        hold(share, words)
    return entries_of(share, words)


@cute.jit
def complain(share: Any, wait: Any, got: Any, fault: Uint32, stage: Uint32) -> None:
    """Report the first faulty round, and trap."""
    source = Int32(0)
    seen = Uint32(0)
    w0 = Uint32(0)
    w1 = Uint32(0)
    for step in cutlass.range_constexpr(share.rounds):
        part = share.rounds - 1 - step
        if (fault & Uint32(1 << part)) != Uint32(0):
            source = share.sources[part]
            seen = got[4 * part + 1]
            if seen == wait.tag:
                seen = got[4 * part + 3]
            if stage == Uint32(report.STAGE_SIGNATURE):
                w0 = got[4 * part]
                w1 = got[4 * part + 2]
    arrival.give_up(wait, Uint32(source), wait.tag, seen, stage, w0, w1)


@cute.jit
def hold(share: Any, words: Any) -> None:
    """This thread's words into shared memory, but for signatures."""
    lists = share.lists
    for part in cutlass.range_constexpr(share.rounds):
        if share.has(part) and share.pairs[part] < lists.pairs - Int32(1):
            place = lists.held + Uint32(share.sources[part] * lists.pitch) * Uint32(4)
            place = place + Uint32(share.pairs[part]) * Uint32(8)
            packed.store_shared_v2(place, words[2 * part], words[2 * part + 1])


def entries_of(share: Any, words: Any) -> Any:
    """The words that are entries, 0 in place of others."""
    return [word * ((share.entries >> Uint32(half)) & Uint32(1)) for half, word in enumerate(words)]


@cute.jit
def take_plain(share: Any, words_at: Int64, source_stride: Int64, row_stride: Int64, row: Int32) -> Any:
    """This thread's words of lists in ordinary memory, all held; entries are returned as by `accept`."""
    lists = share.lists
    got = [Uint32(0) for _ in range(2 * share.rounds)]
    for half in cutlass.range_constexpr(2 * share.rounds):
        if share.has(half // 2) and share.index(half) < lists.words:
            address = words_at + (Int64(share.sources[half // 2]) * source_stride + Int64(row) * row_stride) * Int64(4)
            got[half] = ptx.load(address + Int64(share.index(half)) * Int64(4), Uint32)
    hold(share, got)
    return entries_of(share, got)


# ------------------------------------------------------------------------------------------------- second lists


@cute.jit
def load_second(share: Any) -> Any:
    """This thread's words of the lists as they are described: second ones from where they arrived."""
    lists = share.lists
    words = [Uint32(0) for _ in range(2 * share.rounds)]
    for part in cutlass.range_constexpr(share.rounds):
        if share.has(part):
            low, high = packed.load_shared_v2(lists.bases + Uint32(share.sources[part]) * Uint32(8))
            if (low | high) == Uint32(0):
                place = lists.held + Uint32(share.sources[part] * lists.pitch) * Uint32(4)
                if share.pairs[part] < lists.pairs - Int32(1):
                    words[2 * part], words[2 * part + 1] = packed.load_shared_v2(
                        place + Uint32(share.pairs[part]) * Uint32(8)
                    )
            else:
                address = Int64(low) | (Int64(high) << Int64(32))
                for side in cutlass.range_constexpr(2):
                    if share.index(2 * part + side) < share.length[part]:
                        at = address + Int64(share.index(2 * part + side)) * Int64(4)
                        words[2 * part + side] = ptx.load(at, Uint32, "relaxed", "sys")
    return entries_of(share, words)


# ------------------------------------------------------------------------------------------------- ids


@cute.jit
def upper_bits(share: Any, wide: Any) -> Any:
    """Index bits 16 and above of this thread's entries: two halves a word, one word a round. wide: are there any? The
    lists' words must be visible."""
    lists = share.lists
    uppers = [Uint32(0) for _ in range(share.rounds)]
    if wide:
        for part in cutlass.range_constexpr(share.rounds):
            index = share.pairs[part] * Int32(2)
            entries = share.length[part]
            if share.has(part) and index < entries:
                groups = (entries + Int32(31)) >> Int32(5)
                for plane in cutlass.range(lists.planes, unroll=1):
                    place = entries + plane * groups + (index >> Int32(5))
                    bits = row_lists.read_word(lists, share.sources[part], place) >> (Uint32(index) & Uint32(31))
                    both = (bits & Uint32(1)) | ((bits & Uint32(2)) << Uint32(15))
                    uppers[part] = uppers[part] | (both << Uint32(plane))
    return uppers


def local_of(word: Uint32, uppers: Any, half: int) -> Uint32:
    """Local index of a live entry. uppers: of `upper_bits`."""
    upper = uppers[half // 2]
    upper = upper & Uint32(0xFFFF0000) if half % 2 else upper << Uint32(16)
    return ((word & Uint32(0xFFFF)) ^ Uint32(0xFFFF)) | upper


def id_of(share: Any, word: Uint32, uppers: Any, half: int) -> Uint32:
    """Global position of a live entry."""
    return row_lists.global_position(share.lists, share.sources[half // 2], local_of(word, uppers, half))
