"""Waiting for what peers push: the tagged pairs of a row, their signatures, and the flags of second lists.

Every wait is bounded. The thread whose time is up claims the report, writes it, and traps: the host turns it into an
exception.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from keysieve.device import ptx, report, scan, sync
from keysieve.kernels import exchange_lists as row_lists

CLAIM_WORD = 63
"""Word of the ticket array that says how far the report is; the thread that makes it CLAIMED reports."""

CLAIMED, WRITTEN = 1, 2
"""Somebody reports; the report is there, visible to the host. Memory begins as 0, and the claim only grows."""

REPORT_NS = 50_000_000
"""How long the others wait for the report before they trap all the same."""

_BATCH = 2
"""Pairs of a thread whose loads are issued together."""


class Wait:
    """Who waits, for which call, how long: trace-time handle for reports."""

    def __init__(
        self,
        where: Int64,
        limit_ns: Int64,
        ticket: Int64,
        rank: Uint32,
        row: Uint32,
        tag: Uint32,
        call: Uint32,
        length: Uint32,
    ) -> None:
        self.where, self.limit_ns, self.claim = where, limit_ns, ticket + Int64(4 * CLAIM_WORD)
        self.rank, self.row, self.tag, self.call, self.length = rank, row, tag, call, length

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Wait:
        return self


@cute.jit
def give_up(
    wait: Any, source: Uint32, expected: Uint32, seen: Uint32, stage: Uint32, their_call: Uint32, their_length: Uint32
) -> None:
    """Report, if nobody else has, and trap: not before the report is written, as a trap ends what others still do."""
    if ptx.atom_global(wait.claim, Uint32(CLAIMED), "max") == Uint32(0):
        more = {
            report.WORD_CALL: wait.call,
            report.WORD_THEIR_CALL: their_call,
            report.WORD_LENGTH: wait.length,
            report.WORD_THEIR_LENGTH: their_length,
            report.WORD_TAG: wait.tag,
        }
        sync.write_report(wait.where, wait.rank, wait.row, source, expected, seen, stage, more)
        ptx.atom_global(wait.claim, Uint32(WRITTEN), "max")
    else:
        start = ptx.global_ns()  # a sleep may end at once, whatever its length
        claim = Uint32(CLAIMED)
        while claim != Uint32(WRITTEN) and ptx.global_ns() - start < Int64(REPORT_NS):
            claim = ptx.atom_global(wait.claim, Uint32(CLAIMED), "max")
    ptx.trap()


@cute.jit
def wait_pair(wait: Any, address: Int64, source: Uint32, w0: Uint32, t0: Uint32, w1: Uint32, t1: Uint32) -> Any:
    """The words of a pair once both its tags are the call's; w0 .. t1: what a first look gave."""
    tag = wait.tag
    if ((t0 ^ tag) | (t1 ^ tag)) != Uint32(0):
        start = ptx.global_ns()
        late = Boolean(False)
        while ((t0 ^ tag) | (t1 ^ tag)) != Uint32(0) and not late:
            w0, t0, w1, t1 = ptx.load_pair(address)
            late = ptx.global_ns() - start > wait.limit_ns
        if ((t0 ^ tag) | (t1 ^ tag)) != Uint32(0):
            seen = t0
            if t0 == tag:
                seen = t1
            give_up(wait, source, tag, seen, Uint32(report.STAGE_WORDS), Uint32(0), Uint32(0))
    return w0, w1


@cute.jit
def accept(lists: Any, wait: Any, slots: Int64, max_rows: Int32, row: Int32) -> None:
    """Accept every half of every pair from all ranks; hold the words if they fit; count their upper bits.

    slots: address of this rank's slots. Begins with a block barrier (histograms are clear) and ends with one.
    """
    threads = lists.config.threads
    parity = Int32(wait.tag & Uint32(1)) * lists.world
    slot_bytes = Int64(lists.pairs) * Int64(16)
    if lists.thread < lists.world:
        place = Int64(0)
        if not lists.fits:
            place = slots + (Int64(parity + lists.thread) * Int64(max_rows) + Int64(row)) * slot_bytes
        row_lists.describe(lists, lists.thread, place, Int32(8), lists.n)
    cute.arch.sync_threads()
    total = lists.pairs * lists.world
    for first in cutlass.range(lists.thread, total, threads * _BATCH, unroll=1):
        got = [(Uint32(0), Uint32(0), Uint32(0), Uint32(0)) for _ in range(_BATCH)]
        for part in cutlass.range_constexpr(_BATCH):
            flat = first + Int32(part * threads)
            if flat < total:
                got[part] = ptx.load_pair(pair_address(lists, slots, parity, max_rows, row, flat))
        for part in cutlass.range_constexpr(_BATCH):
            flat = first + Int32(part * threads)
            if flat < total:
                source = flat // lists.pairs
                pair = flat - source * lists.pairs
                address = pair_address(lists, slots, parity, max_rows, row, flat)
                w0, w1 = wait_pair(wait, address, Uint32(source), *got[part])
                if pair == lists.pairs - Int32(1):
                    if w0 != wait.call or w1 != wait.length * Uint32(Int32(wait.length) > Int32(0)):
                        give_up(wait, Uint32(source), wait.tag, wait.tag, Uint32(report.STAGE_SIGNATURE), w0, w1)
                else:
                    take(lists, source, pair * Int32(2), w0, w1)
    cute.arch.sync_threads()


@cute.jit
def pair_address(lists: Any, slots: Int64, parity: Int32, max_rows: Int32, row: Int32, flat: Int32) -> Int64:
    """Where pair `flat` of the row, counted over all sources, lies."""
    source = flat // lists.pairs
    pair = flat - source * lists.pairs
    slot = (Int64(parity + source) * Int64(max_rows) + Int64(row)) * Int64(lists.pairs)
    return slots + (slot + Int64(pair)) * Int64(16)


@cute.jit
def take(lists: Any, source: Int32, index: Int32, w0: Uint32, w1: Uint32) -> None:
    """Words `index` and `index + 1` of a source: held, and their upper bits counted if they are entries."""
    if lists.fits:
        place = lists.held + Uint32(source * lists.pitch + index) * Uint32(4)
        ptx.store_shared(place, w0)
        ptx.store_shared(place + Uint32(4), w1)
    if index < lists.n and w0 != Uint32(0):
        scan.histogram_add(lists.high, w0 >> Uint32(21))
    if index + Int32(1) < lists.n and w1 != Uint32(0):
        scan.histogram_add(lists.high, w1 >> Uint32(21))


@cute.jit
def wait_flag(wait: Any, address: Int64, number: Int64, source: Uint32) -> None:
    """Until the 64-bit flag at `address` is `number` or more (acquire, system scope): the list is then readable."""
    seen = ptx.load(address, Int64, "acquire", "sys")
    if seen < number:
        start = ptx.global_ns()
        late = Boolean(False)
        while seen < number and not late:
            seen = ptx.load(address, Int64, "acquire", "sys")
            late = ptx.global_ns() - start > wait.limit_ns
        if seen < number:
            low = Int64(0xFFFFFFFF)
            stage = Uint32(report.STAGE_FLAG)
            give_up(wait, source, Uint32(number & low), Uint32(seen & low), stage, Uint32(0), Uint32(0))
