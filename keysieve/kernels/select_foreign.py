"""Rows that keysieve did not score: any alignment and any bits, no maxima. Their maxima are computed here.

A row may begin and end inside a 16-byte vector. Those *edge* groups are never read as vectors: threads 0..7 and 8..15
read the keys that exist of the first and of the last group one by one, early, and pass them on through shared memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from keysieve.device import keys, packed, ptx
from keysieve.kernels.select_config import VECTORS, SelectConfig, SharedMap

ABSENT = 0x7FFF
"""Raw bits of a key that does not exist: a NaN, so that it never is a maximum; masked before it could be a key."""

NAN_BITS = 0xFFC0
"""The bits of every NaN in a row of keysieve's own."""


@cute.jit
def is_whole(group: Int32, head: Int32, end: Int32) -> Any:
    """Do all eight keys of the group exist?"""
    return group * Int32(8) >= head and group * Int32(8) + Int32(8) <= end


@cute.jit
def has_edges(head: Int32, end: Int32) -> Any:
    """Does the row begin or end inside a 16-byte vector? The same in all threads."""
    return (head | (end & Int32(7))) != Int32(0)


@cute.jit
def load_edge(address: Int64, head: Int32, end: Int32, groups: Int32, thread: Int32) -> Uint32:
    """Raw bits of one key of an edge group (threads 0..15), `ABSENT` where none exists or is needed."""
    bits = Uint32(ABSENT)
    if thread < Int32(16):
        group = Int32(0)
        if thread >= Int32(8):
            group = groups - Int32(1)
        place = group * Int32(8) + (thread & Int32(7))
        if place >= head and place < end:
            bits = ptx.load_u16(address + Int64(place) * Int64(2))
    return bits


@cute.jit
def load_keys(address: Int64, group: Int32, head: Int32, end: Int32) -> Any:
    """The raw words of a group that is not whole, read key by key; `ABSENT` where no key is."""
    words = []
    for word in cutlass.range_constexpr(4):
        low = Uint32(ABSENT)
        high = Uint32(ABSENT)
        place = group * Int32(8) + Int32(2 * word)
        if place >= head and place < end:
            low = ptx.load_u16(address + Int64(place) * Int64(2))
        place = place + Int32(1)
        if place >= head and place < end:
            high = ptx.load_u16(address + Int64(place) * Int64(2))
        words.append(low | (high << Uint32(16)))
    return words


@cute.jit
def store_edge(base: Uint32, edge: Uint32, thread: Int32, config: cutlass.Constexpr[SelectConfig]) -> None:
    """Pass the edge keys on: `edges` in shared memory. A block barrier must follow before they are read."""
    if thread < Int32(16):
        ptx.store_shared_u16(base + Uint32(SharedMap.of(config).edges) + Uint32(thread) * Uint32(2), edge)


@cute.jit
def show_edge(
    base: Uint32, edge: Uint32, done: Boolean, thread: Int32, config: cutlass.Constexpr[SelectConfig]
) -> None:
    """`store_edge` and its barrier, unless that is `done`: by `fill_tops`, or because the row has no edge groups."""
    if not done:
        store_edge(base, edge, thread, config)
        cute.arch.sync_threads()


@cute.jit
def settle_nans(high: Uint32, words: Any, bits: cutlass.Constexpr[int], thread: Int32) -> Any:
    """After all numbers were counted by their upper `bits` bits at `high`: NaNs, which `settle_bf16x2` made larger than
    any number, become what they are, in the registers and in the histogram. Nothing else falls into their bin, so rows
    without NaNs pay for one look at it. Begins with a block barrier; another must follow before the bins are read.
    """
    last = high + Uint32(4 * (ABSENT >> (16 - bits)))
    cute.arch.sync_threads()
    nans = ptx.load_shared(last)
    if nans != Uint32(0):
        for index in cutlass.range_constexpr(len(words)):
            low = keys.low16(words[index])
            upper = keys.high16(words[index])
            if low == Uint32(ABSENT):
                low = Uint32(NAN_BITS)
            if upper == Uint32(ABSENT):
                upper = Uint32(NAN_BITS)
            words[index] = keys.pack16(low, upper)
        cute.arch.sync_threads()  # everybody has looked
        if thread == Int32(0):
            place = high + Uint32(4 * (NAN_BITS >> (16 - bits)))
            ptx.store_shared(place, ptx.load_shared(place) + nans)
            ptx.store_shared(last, Uint32(0))
    return words


@cute.jit
def edge_words(base: Uint32, group: Int32, config: cutlass.Constexpr[SelectConfig]) -> Any:
    """The raw words of an edge group."""
    place = base + Uint32(SharedMap.of(config).edges)
    if group > Int32(0):
        place = place + Uint32(16)
    return ptx.load_shared_v4(place)


@cute.jit
def edge_top(edge: Uint32, thread: Int32) -> Uint32:
    """The maximum of the row's first group in threads 0..7, of its last one in threads 8..15, from `load_edge`."""
    best = Uint32(0)
    if thread < Int32(32):
        best = packed.foreign_top([edge | Uint32(ABSENT << 16), *[Uint32(ABSENT * 0x10001)] * 3])
        for step in cutlass.range_constexpr(3):
            other = Uint32(cute.arch.shuffle_sync_bfly(best, 1 << step))
            if other > best:
                best = other
    return best


@cute.jit
def store_top(
    base: Uint32,
    tops: Int64,
    first_vector: Int32,
    count: Int32,
    rounds: Int32,
    group: Int32,
    top: Uint32,
    config: cutlass.Constexpr[SelectConfig],
) -> None:
    """Put the maximum of any one group of this block's part where its owner will look for it."""
    local = group - first_vector * Int32(8)
    vector = local >> Int32(3)
    if local >= Int32(0) and vector < count:
        warp = vector // (rounds * Int32(32))
        within = vector - warp * rounds * Int32(32)
        byte = Uint32(within & Int32(31)) * Uint32(16) + Uint32(local & Int32(7)) * Uint32(2)
        step = within >> Int32(5)
        if step < Int32(VECTORS):
            scratch = base + Uint32(SharedMap.of(config).scratch) + Uint32(warp) * Uint32(config.scratch_bytes)
            ptx.store_shared_u16(scratch + Uint32(step) * Uint32(512) + byte, top)
        else:
            ptx.store_u16(tops + Int64(group) * Int64(2), top)


@cute.jit
def fill_tops(
    base: Uint32,
    address: Int64,
    tops: Int64,
    edge: Uint32,
    head: Int32,
    end: Int32,
    groups: Int32,
    first_vector: Int32,
    count: Int32,
    rounds: Int32,
    thread: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> None:
    """Compute the maxima of this block's part: those of the first rounds into the warps' scratch, where the registers
    will take them from; the rest into `tops`, this row's part of the workspace. Ends with a block barrier.

    Lane l reads groups l, l + 32, ... of its warp's 256 a round: coalesced, eight 16-byte loads in flight a thread.
    """
    lane = thread & Int32(31)
    warp = thread >> Int32(5)
    scratch = base + Uint32(SharedMap.of(config).scratch) + Uint32(warp) * Uint32(config.scratch_bytes)
    stop = (first_vector + count) * Int32(8)
    if stop > groups:
        stop = groups
    for step in cutlass.range(rounds, unroll=1):
        group = (first_vector + (warp * rounds + step) * Int32(32)) * Int32(8) + lane
        if group - lane < stop:
            raw = [Uint32(ABSENT * 0x10001) for _ in range(32)]
            for part in cutlass.range_constexpr(8):
                one = group + Int32(32 * part)
                if one < stop and is_whole(one, head, end):
                    loaded = ptx.load_v4(address + Int64(one) * Int64(16), "nc.stream")
                    for word in cutlass.range_constexpr(4):
                        raw[4 * part + word] = loaded[word]
            for part in cutlass.range_constexpr(8):
                one = group + Int32(32 * part)
                top = Uint32(0)
                if one < stop:
                    top = packed.foreign_top(raw[4 * part : 4 * part + 4])
                if step < Int32(VECTORS):
                    place = scratch + Uint32(step) * Uint32(512) + Uint32(lane) * Uint32(2) + Uint32(64 * part)
                    ptx.store_shared_u16(place, top)
                else:
                    if one < stop:
                        ptx.store_u16(tops + Int64(one) * Int64(2), top)
    store_edge(base, edge, thread, config)
    best = edge_top(edge, thread)
    cute.arch.sync_threads()
    if thread == Int32(0) and not is_whole(Int32(0), head, end):
        store_top(base, tops, first_vector, count, rounds, Int32(0), best, config)
    if thread == Int32(8) and groups > Int32(1) and not is_whole(groups - Int32(1), head, end):
        store_top(base, tops, first_vector, count, rounds, groups - Int32(1), best, config)
    cute.arch.sync_threads()
