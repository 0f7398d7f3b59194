"""A row shared by the blocks of a cluster, each of which holds its part of the vectors in registers.

The steps are those of a row that one block holds. The blocks tell each other their largest key, then their counts of
the values below it, then how many keys they have above and at the threshold; with the same sums every block finds the
same threshold, and knows where its words begin. Counts are 16-bit: a block holds at most 32,768 keys. What is sent
counts itself in at the receiver (`device/exchange_cluster`): there is no barrier of the cluster but the one that shows
that all its blocks run, and, where indices have more than 16 bits, one behind their planes.

Where the N best keys are spread over too many values (`find_held`) the first block takes the row alone.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from keysieve.device import exchange_cluster, ptx, scan
from keysieve.kernels import local_topk_count as counting
from keysieve.kernels import local_topk_listed as listed
from keysieve.kernels import local_topk_steps as steps
from keysieve.kernels.local_topk_config import BINS, LocalMap, LocalTopkConfig
from keysieve.kernels.local_topk_steps import Row

SHARED_KEYS = 8192
"""Rows of more keys are shared: below, the trips between blocks cost more than they spare."""

_TOPS, _COUNTS, _TOTALS = 0, 8, 16
"""Mbarriers of the three exchanges, in bytes from the first."""


@cute.jit
def open_cluster(base: Uint32, thread: Int32, config: cutlass.Constexpr[LocalTopkConfig]) -> None:
    """Arm the mbarriers of what the blocks of the cluster will send to this one, and tell them that it runs."""
    if thread == Int32(0):
        arrivals = base + Uint32(LocalMap.of(config).arrivals)
        exchange_cluster.arm(arrivals + Uint32(_TOPS), 4 * config.cluster)
        exchange_cluster.arm(arrivals + Uint32(_COUNTS), 2 * BINS * config.cluster)
        exchange_cluster.arm(arrivals + Uint32(_TOTALS), 4 * config.cluster)
        exchange_cluster.publish()
    cute.arch.cluster_arrive_relaxed()


@cute.jit
def is_shared(row: Any, n: Int32) -> Any:
    """Do all blocks of the cluster work on this row?"""
    room = row.config.cluster * row.config.threads * row.config.held
    return row.length > n and row.length > Int32(SHARED_KEYS) and row.vectors <= Int32(room)


def part_of(row: Any, base: Uint32, rank: Int32) -> Row:
    """Block `rank`'s part of the row."""
    share = (row.vectors + Int32(row.config.cluster - 1)) // Int32(row.config.cluster)
    first = share * rank
    left = row.vectors - first
    left = left * Int32(left > Int32(0))
    count = share - (share - left) * Int32(share > left)
    return Row(row.config, base, row.thread, row.address, row.length, first, count)


@cute.jit
def tell(row: Any, place: Uint32, value: Uint32, rank: Int32, arrival: Uint32) -> None:
    """This block's word to the same array of every block of the cluster, at its own number."""
    if row.thread < Int32(row.config.cluster):
        exchange_cluster.send(place + Uint32(rank) * Uint32(4), value, arrival, Uint32(row.thread))


@cute.jit
def hear(row: Any, place: Uint32, arrival: Uint32) -> Uint32:
    """What lane l's block has told; 0 in lanes beyond the cluster."""
    exchange_cluster.receive(arrival)
    word = Uint32(0)
    if row.lane < Int32(row.config.cluster):
        word = ptx.load_shared(place + Uint32(row.lane) * Uint32(4))
    return word


@cute.jit
def send_counts(row: Any, rank: Int32, arrival: Uint32) -> None:
    """This block's histogram to all blocks, eight bins a store. The histogram is complete and visible."""
    if row.thread < Int32(BINS // 8):
        low = ptx.load_shared_v4(row.second + Uint32(row.thread) * Uint32(32))
        high = ptx.load_shared_v4(row.second + Uint32(row.thread) * Uint32(32) + Uint32(16))
        halves = [*low, *high]
        words = [halves[2 * i] | (halves[2 * i + 1] << Uint32(16)) for i in range(4)]
        place = row.maxima + Uint32(rank) * Uint32(2 * BINS) + Uint32(row.thread) * Uint32(16)
        for block in cutlass.range_constexpr(row.config.cluster):
            exchange_cluster.send_v4(place, *words, arrival, Uint32(block))


@cute.jit
def find_shared(row: Any, words: Any, n: Int32, rank: Int32) -> Any:
    """(threshold, how many keys equal to it are taken) in the whole row; (0, _) where it was not found."""
    arrivals = row.maxima_end + Uint32(128)
    top = counting.block_top(row, words)
    steps.mark(row, 5)
    cute.arch.cluster_wait()
    tell(row, row.maxima_end, top, rank, arrivals + Uint32(_TOPS))
    top = scan.warp_max_u32(hear(row, row.maxima_end, arrivals + Uint32(_TOPS)))
    floor = Uint32(1)
    if top >= Uint32(BINS):
        floor = top - Uint32(BINS - 1)
    for step in cutlass.range_constexpr(row.config.held):
        if Int32(step) < row.rounds:
            counting.count_near(row.second, words[4 * step : 4 * step + 4], floor)
    cute.arch.sync_threads()
    send_counts(row, rank, arrivals + Uint32(_COUNTS))
    exchange_cluster.receive(arrivals + Uint32(_COUNTS))
    each = BINS // row.config.threads
    counts = [Uint32(0) for _ in range(each)]
    lowest = row.maxima + Uint32(2 * (BINS - each)) - Uint32(row.thread) * Uint32(2 * each)
    for block in cutlass.range_constexpr(row.config.cluster):
        for pair in cutlass.range_constexpr(each // 2):
            two = ptx.load_shared(lowest + Uint32(2 * BINS * block + 4 * pair))
            counts[2 * pair] = counts[2 * pair] + (two & Uint32(0xFFFF))
            counts[2 * pair + 1] = counts[2 * pair + 1] + (two >> Uint32(16))
    digit, above = counting.find_counted(row, counts, n)
    threshold = (floor + Uint32(digit)) * Uint32(digit >= Int32(0))
    return threshold, n - above


@cute.jit
def place_shared(row: Any, words: Any, threshold: Uint32, need: Int32, rank: Int32) -> Any:
    """This block's words, at their places in the row; returns the first one's place and their number."""
    told = row.maxima_end + Uint32(64)
    arrival = row.maxima_end + Uint32(128 + _TOTALS)
    vectors = [row.start + Int32(32 * step) for step in range(row.config.held)]
    masks, total = steps.mask_held(row, words, row.rounds, threshold)
    before, block = steps.block_offsets(row, scan.warp_sum(total), 0)
    tell(row, told, Uint32(block), rank, arrival)
    word = hear(row, told, arrival)
    lower = Int32(row.lane < rank)
    greater = scan.warp_sum(Int32(word & Uint32(0xFFFF)) * lower)
    equal = scan.warp_sum(Int32(word >> Uint32(16)) * lower)
    if equal > need:
        equal = need
    own = Int32(Uint32(block) >> Uint32(16))
    if own > need - equal:
        own = need - equal
    steps.mark(row, 7)
    before = before + greater + (equal << Int32(steps.EQUAL_SHIFT))
    steps.place_masked(row, words, masks, vectors, row.rounds, before, need)
    return greater + equal, Int32(Uint32(block) & Uint32(0xFFFF)) + own


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
    """This block's words of a shared row: (place of the first, their number); the last block has the planes as well.
    (0, -1): the first block has to take the row alone. Ends with a block barrier."""
    begin = Int32(0)
    count = Int32(-1)
    words = steps.load_batch(row, Int32(0))
    steps.mark(row, 4)
    threshold, need = find_shared(row, words, n, rank)
    steps.mark(row, 6)
    if threshold != Uint32(0):
        begin, count = place_shared(row, words, threshold, need, rank)
        if row.wide:
            write_shared_planes(row, n, planes, begin, count)
    else:
        listed.clear_second(row)
    cute.arch.sync_threads()
    return begin, count
