"""A row shared by the blocks of a cluster, each of which holds its part of the vectors in registers.

The steps are those of a row that one block holds; the blocks tell each other their counts (`local_topk_window`), and
with the same sums every block finds the same threshold, and knows where its words begin. What is sent counts itself in
at the receiver (`device/exchange_cluster`): there is no barrier of the cluster but the one that shows that all its
blocks run, and, where indices have more than 16 bits, one behind their planes.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from keysieve.device import exchange_cluster, ptx
from keysieve.kernels import local_topk_guess as guess
from keysieve.kernels import local_topk_kept as kept
from keysieve.kernels import local_topk_sift as sift
from keysieve.kernels import local_topk_steps as steps
from keysieve.kernels import local_topk_window as window
from keysieve.kernels.local_topk_config import NARROW, WINDOW, LocalMap, LocalTopkConfig
from keysieve.kernels.local_topk_steps import Row


@cute.jit
def open_cluster(base: Uint32, thread: Int32, config: cutlass.Constexpr[LocalTopkConfig]) -> None:
    """Arm the mbarriers of what the blocks of the cluster will send to this one, and tell them that it runs."""
    if thread == Int32(0):
        for attempt in cutlass.range_constexpr(3):
            arrival = base + Uint32(LocalMap.of(config).arrivals + 8 * attempt)
            exchange_cluster.arm(arrival, (2 * WINDOW + 4) * config.cluster)
        exchange_cluster.arm(base + Uint32(LocalMap.of(config).arrivals + 24), 132 * config.cluster)
        if cutlass.const_expr(config.guesses):
            for count in cutlass.range_constexpr(2):
                arrival = base + Uint32(LocalMap.of(config).arrivals + 32 + 8 * count)
                exchange_cluster.arm(arrival, 2 * NARROW * config.cluster)
            exchange_cluster.arm(base + Uint32(LocalMap.of(config).arrivals + 48), 4 * config.cluster)
        exchange_cluster.publish()
    if cutlass.const_expr(config.guesses):  # noqa: SIM102  # a trace-time test, then a run-time one
        if (thread & Int32(31)) == Int32(0):
            kept.prepare(base + Uint32(LocalMap.of(config).landed) + Uint32(thread >> Int32(5)) * Uint32(8))
            exchange_cluster.publish()
    cute.arch.cluster_arrive_relaxed()


@cute.jit
def is_shared(row: Any, n: Int32) -> Any:
    """Do all blocks of the cluster work on this row?"""
    fits = row.length > n and row.length > Int32(row.config.solo_keys)
    if cutlass.const_expr(row.config.longer):
        fits = fits and row.vectors <= Int32(row.config.keys // 8)
    return fits


def part_of(row: Any, base: Uint32, n: Int32, rank: Int32) -> Row:
    """Block `rank`'s part of the row."""
    share = (row.vectors + Int32(row.config.cluster - 1)) // Int32(row.config.cluster)
    first = share * rank
    left = row.vectors - first
    left = left * Int32(left > Int32(0))
    count = share - (share - left) * Int32(share > left)
    part = Row(row.config, base, row.thread, row.address, row.length, first, count)
    part.share = share
    if row.config.guesses:
        part.plan = guess.plan(part, n, rank)
    return part


@cute.jit
def write_shared_planes(row: Any, n: Int32, planes: Int32, begin: Int32, count: Int32) -> None:
    """The index planes of this block's entries, into those of the cluster's last block. Begins with a block barrier,
    and ends with one of the cluster."""
    cute.arch.sync_threads()
    groups = (n + Int32(31)) >> Int32(5)
    last = row.config.cluster - 1
    first = begin & Int32(-32)
    end = (begin + count + Int32(31)) & Int32(-32)
    for entry in cutlass.range(first + row.thread, end, row.config.threads, unroll=1):
        upper = Uint32(0)
        if entry >= begin and entry < begin + count:
            upper = ptx.load_shared_u16(row.tops + Uint32(entry) * Uint32(2))
        for plane in cutlass.range(planes, unroll=1):
            votes = Uint32(cute.arch.vote_ballot_sync(((upper >> Uint32(plane)) & Uint32(1)) != Uint32(0)))
            if row.lane == Int32(0) and votes != Uint32(0):
                place = row.words + Uint32(n + plane * groups + (entry >> Int32(5))) * Uint32(4)
                ptx.red_cluster(ptx.map_shared(place, Uint32(last)), votes, "or")
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def share_row(row: Any, n: Int32, planes: Int32, rank: Int32) -> Any:
    """This block's words of a shared row: (place of the first, their number); the last block has the planes as well. A
    block barrier has to follow."""
    begin = Int32(0)
    count = Int32(0)
    if cutlass.const_expr(row.config.guesses):
        begin, count = guess.share(row, n, rank)
    else:
        begin, count = share_held(row, n, planes, rank)
    return begin, count


@cute.jit
def share_held(row: Any, n: Int32, planes: Int32, rank: Int32) -> Any:
    """This block's words of a shared row: (place of the first, their number); the last block has the planes as well. A
    block barrier has to follow."""
    words, vectors, rounds, held, top, bound, bounded = sift.gather(row, n, rank, True)
    steps.mark(row, 4)
    tops = window.vector_tops(row, words, rounds, held) if row.config.squeezes else None
    threshold, need, above, equal = window.find(row, words, rounds, held, n, top, bound, bounded, rank, True, tops)
    steps.mark(row, 6)
    if equal > need:
        equal = need
    if cutlass.const_expr(row.config.squeezes):
        words, vectors, rounds, held = sift.squeeze(row, words, vectors, tops, rounds, held, threshold)
        steps.mark(row, 1)
    block = steps.place_chosen(row, words, vectors, rounds, held, threshold, need, above, equal)
    own = Int32(Uint32(block) >> Uint32(steps.EQUAL_SHIFT))
    if own > need - equal:
        own = need - equal
    count = Int32(Uint32(block) & Uint32(0xFFFF)) + own
    if row.wide:
        write_shared_planes(row, n, planes, above + equal, count)
    return above + equal, count
