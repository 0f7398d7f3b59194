"""Maxima of long rows that keysieve did not score, computed while the row streams through shared memory.

Every warp has a ring of its own: bulk copies bring whole groups, so that many chunks are on their way whatever the
registers hold, and no warp waits for another one. Only blocks that share a row do this: they have an SM each, and room.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import exchange_cluster, packed, ptx
from keysieve.kernels import select_foreign as foreign
from keysieve.kernels.select_config import SelectConfig, SharedMap

TRIES = 1 << 22
"""Polls (each may suspend the thread for a while) before a chunk that does not come ends in a trap."""


@dsl_user_op
def init_barrier(barrier: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Make an mbarrier at shared address `barrier` that one `announce` and the bytes it names complete."""
    ptx.asm("mbarrier.init.shared.b64 [$0], 1;", "r", (), (barrier,), loc=loc, ip=ip)


@dsl_user_op
def announce(barrier: Uint32, nbytes: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Arrive, and say how many bytes copies will bring (0: none)."""
    ptx.asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "r,r", (), (barrier, nbytes), loc=loc, ip=ip)


@dsl_user_op
def landed(barrier: Uint32, parity: Int32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """1 if the phase of that parity is complete."""
    text = "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; selp.b32 $0, 1, 0, p; }"
    return ptx.asm(text, "=r,r,r", (Uint32,), (barrier, parity), loc=loc, ip=ip)[0]


@cute.jit
def await_chunk(barrier: Uint32, parity: Int32) -> None:
    """Wait for a chunk. Bounded."""
    done = landed(barrier, parity)
    tries = Int32(0)
    while done == Uint32(0) and tries < Int32(TRIES):
        done = landed(barrier, parity)
        tries = tries + Int32(1)
    if done == Uint32(0):
        ptx.trap()


@cute.jit
def ask(
    place: Uint32, barrier: Uint32, address: Int64, low: Int32, high: Int32, head: Int32, end: Int32, lane: Int32
) -> None:
    """Bring the whole ones of the groups [low, high) to `place`. One lane does it."""
    if lane == Int32(0):
        begin = low
        if head > Int32(0) and begin == Int32(0):
            begin = Int32(1)
        stop = high
        if stop > (end >> Int32(3)):
            stop = end >> Int32(3)
        nbytes = (stop - begin) * Int32(16)
        if nbytes < Int32(0):
            nbytes = Int32(0)
        announce(barrier, nbytes)
        if nbytes > Int32(0):
            ptx.bulk_load(place + Uint32(begin - low) * Uint32(16), address + Int64(begin) * Int64(16), nbytes, barrier)


@cute.jit
def stream_tops(
    base: Uint32,
    address: Int64,
    tops: Int64,
    head: Int32,
    end: Int32,
    begin: Int32,
    stop: Int32,
    spilled: Any,
    thread: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> None:
    """Maxima of the groups [begin, stop): to shared memory in order, or, `spilled`, to `tops`. Those of edge groups are
    nonsense. No barrier."""
    shared = SharedMap.of(config)
    lane = thread & Int32(31)
    warp = thread >> Int32(5)
    size = config.chunk_groups
    depth = config.chunks
    ring = base + Uint32(shared.ring) + Uint32(warp) * Uint32(16 * size * depth)
    barriers = base + Uint32(shared.landings) + Uint32(warp) * Uint32(8 * depth)
    flat = base + Uint32(shared.scratch)
    if lane == Int32(0):
        for index in cutlass.range_constexpr(depth):
            init_barrier(barriers + Uint32(8 * index))
        exchange_cluster.publish()
    cute.arch.sync_warp()
    stride = Int32(size * config.warps)
    low = begin + warp * Int32(size)
    for index in cutlass.range_constexpr(depth):
        first = low + Int32(index) * stride
        if first < stop:
            high = first + Int32(size)
            if high > stop:
                high = stop
            ask(ring + Uint32(16 * size * index), barriers + Uint32(8 * index), address, first, high, head, end, lane)
    slot = Int32(0)
    parity = Int32(0)
    rounds = (stop - low + stride - Int32(1)) // stride
    if stop <= low:
        rounds = Int32(0)
    for _ in cutlass.range(rounds, unroll=1):
        place = ring + Uint32(slot) * Uint32(16 * size)
        barrier = barriers + Uint32(slot) * Uint32(8)
        await_chunk(barrier, parity)
        words = []
        for index in cutlass.range_constexpr(size // 32):
            words.append(ptx.load_shared_v4(place + Uint32(lane) * Uint32(16) + Uint32(512 * index)))
        for index in cutlass.range_constexpr(size // 32):
            group = low + lane + Int32(32 * index)
            top = packed.foreign_top(words[index])
            if group < stop:
                if spilled:
                    ptx.store_u16(tops + Int64(group) * Int64(2), top)
                else:
                    ptx.store_shared_u16(flat + Uint32(group - begin) * Uint32(2), top)
        cute.arch.sync_warp()
        first = low + Int32(depth) * stride
        if first < stop:
            high = first + Int32(size)
            if high > stop:
                high = stop
            ask(place, barrier, address, first, high, head, end, lane)
        low = low + stride
        slot = slot + Int32(1)
        if slot == Int32(depth):
            slot = Int32(0)
            parity = parity ^ Int32(1)


@cute.jit
def put_top(
    base: Uint32,
    tops: Int64,
    begin: Int32,
    stop: Int32,
    group: Int32,
    top: Uint32,
    spilled: Any,
    config: cutlass.Constexpr[SelectConfig],
) -> None:
    """Put the maximum of any one group where it belongs, if it is one of the block's part."""
    if group >= begin and group < stop:
        if spilled:
            ptx.store_u16(tops + Int64(group) * Int64(2), top)
        else:
            flat = base + Uint32(SharedMap.of(config).scratch)
            ptx.store_shared_u16(flat + Uint32(group - begin) * Uint32(2), top)


@cute.jit
def settle_edges(
    base: Uint32,
    tops: Int64,
    edge: Uint32,
    head: Int32,
    end: Int32,
    groups: Int32,
    begin: Int32,
    stop: Int32,
    spilled: Any,
    thread: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> None:
    """After the maxima of the block's part [begin, stop) were computed: those of edge groups. Ends with a block
    barrier."""
    if foreign.has_edges(head, end):
        foreign.store_edge(base, edge, thread, config)
        best = foreign.edge_top(edge, thread)
        cute.arch.sync_threads()
        if thread == Int32(0) and not foreign.is_whole(Int32(0), head, end):
            put_top(base, tops, begin, stop, Int32(0), best, spilled, config)
        if thread == Int32(8) and groups > Int32(1) and not foreign.is_whole(groups - Int32(1), head, end):
            put_top(base, tops, begin, stop, groups - Int32(1), best, spilled, config)
    cute.arch.sync_threads()
