"""Steps of the exact selection, each a pass of `keysieve/models/select.py`, on the blocks that share a row.

A *stage* selects the `want` best of 16-bit keys, ties to the lower index: stage 0 among a row's maxima, stage 1 among
keys. A block holds a contiguous part of the stage's vectors (8 keys, 16 bytes each). Inside a block a warp owns a
contiguous run of `rounds * 32` vectors and lane l of it vectors l, l + 32, ...: loads are coalesced, and index order is
(warp, round, lane). Between blocks only histograms and counts travel. No atomic's result decides a position.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import packed, ptx, scan
from keysieve.kernels.select_config import SelectConfig, SharedMap

ALL_ONES = 0xFFFFFFFF
EQUAL_LIMIT = 4096  # more equal keys than this in a warp are as good as this many: at most 4096 are taken
EQUAL_SHIFT = 12  # a warp's counts in one word: keys above (at most 4095) below this bit, equal keys from it on


@cute.jit
def mark(base: Uint32, thread: Int32, slot: cutlass.Constexpr[int], config: cutlass.Constexpr[SelectConfig]) -> None:
    """With `config.trace`: note the clock at a step, for one thread of the block (see `dump_marks`)."""
    if cutlass.const_expr(config.trace):
        if thread == Int32(0):
            now = ptx.asm("mov.u32 $0, %clock;", "=r", (Uint32,), ())[0]
            ptx.store_shared(base + Uint32(SharedMap.of(config).total - 64 + 4 * slot), now)


@cute.jit
def dump_marks(base: Uint32, where: Int64, block: Int32, thread: Int32, config: cutlass.Constexpr[SelectConfig]) -> None:
    """With `config.trace`: write this block's 16 marks to u32 `where[block][16]`."""
    if cutlass.const_expr(config.trace):
        if thread == Int32(0):
            for slot in cutlass.range(16, unroll=1):
                value = ptx.load_shared(base + Uint32(SharedMap.of(config).total - 64) + Uint32(slot) * Uint32(4))
                ptx.store(where + Int64(block * Int32(16) + slot) * Int64(4), value)


def _cluster_barrier() -> None:
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def rendezvous(active: Int32, cluster: cutlass.Constexpr[int]) -> None:
    """Barrier of all threads that work on this row (`active` blocks)."""
    if cutlass.const_expr(cluster == 1):
        cute.arch.sync_threads()
    else:
        if active > Int32(1):
            _cluster_barrier()
        else:
            cute.arch.sync_threads()


def count_high(base: Uint32, words: Any) -> None:
    """Count eight keys by their upper 11 bits. base: aligned to the histogram's 8192 bytes."""
    for word in words:
        ptx.red_shared(((word >> Uint32(3)) & Uint32(0x1FFC)) | base, Uint32(1), "add")
        ptx.red_shared(((word >> Uint32(19)) & Uint32(0x1FFC)) | base, Uint32(1), "add")


def count_low(base: Uint32, words: Any, digit: Uint32) -> None:
    """Count, by their lower 5 bits, those of eight keys whose upper 11 bits are `digit`."""
    pattern = (digit << Uint32(5)) | (digit << Uint32(21))
    for word in words:
        rest = word ^ pattern  # a half below 32 is a hit, and its own lower bits
        packed.count_if_below(base, rest & Uint32(0xFFFF), 32)
        packed.count_if_below(base, rest >> Uint32(16), 32)


@cute.jit
def pick_lane(counts: Int32, want: Int32, lane: Int32) -> Any:
    """Lanes hold counts, best first: (the lane in which the running sum reaches `want`, the sum before it)."""
    upto = scan.warp_inclusive(counts, lane)
    votes = Uint32(cute.arch.vote_ballot_sync(upto >= want))
    owner = packed.lowest_bit(votes) & Int32(31)
    return owner, Int32(cute.arch.shuffle_sync(upto - counts, owner))


@cute.jit
def find_high(
    base: Uint32,
    want: Int32,
    thread: Int32,
    rank: Int32,
    active: Int32,
    config: cutlass.Constexpr[SelectConfig],
    stage: cutlass.Constexpr[int],
) -> Any:
    """After all keys were counted by their upper bits: (digit of the `want`-th key, keys above it in the row, keys
    above it in this block). Every warp finds the same values. Begins with a block barrier."""
    shared = SharedMap.of(config)
    lane = thread & Int32(31)
    warp = thread >> Int32(5)
    histogram = base + Uint32(shared.high[stage])
    chunks = base + Uint32(shared.chunks[stage])
    cute.arch.sync_threads()
    each = 32 // config.warps
    for index in cutlass.range_constexpr(each):
        chunk = warp * Int32(each) + Int32(index)
        first, second = packed.load_shared_v2(histogram + Uint32(chunk) * Uint32(256) + Uint32(lane) * Uint32(8))
        total = scan.warp_sum(Int32(first + second))
        slot = chunks + Uint32(rank) * Uint32(128) + Uint32(chunk) * Uint32(4)
        if cutlass.const_expr(config.cluster == 1):
            if lane == Int32(0):
                ptx.store_shared(slot, Uint32(total))
        else:
            if lane < active:
                ptx.store_cluster(ptx.map_shared(slot, Uint32(lane)), Uint32(total))
    rendezvous(active, config.cluster)
    behind = Uint32(31) - Uint32(lane)
    mine = Int32(ptx.load_shared(chunks + Uint32(rank) * Uint32(128) + behind * Uint32(4)))
    total = mine
    if cutlass.const_expr(config.cluster > 1):
        if active > Int32(1):
            total = Int32(0)
            for peer in cutlass.range_constexpr(config.cluster):
                total = total + Int32(ptx.load_shared(chunks + Uint32(128 * peer) + behind * Uint32(4)))
    owner, above = pick_lane(total, want, lane)
    chunk = Int32(31) - owner
    place = Uint32(chunk) * Uint32(256) + (Uint32(248) - Uint32(lane) * Uint32(8))
    below, upper = packed.load_shared_v2(histogram + place)
    my_upper = Int32(upper)
    my_lower = Int32(below)
    all_upper = my_upper
    all_lower = my_lower
    if cutlass.const_expr(config.cluster > 1):
        if active > Int32(1):
            bins = base + Uint32(shared.bins[stage])
            for peer in cutlass.range(warp, active, config.warps, unroll=1):
                far = ptx.map_shared(histogram + place, Uint32(peer))
                a, b = packed.load_cluster_v2(far)
                packed.store_shared_v2(bins + Uint32(peer) * Uint32(256) + Uint32(lane) * Uint32(8), a, b)
            cute.arch.sync_threads()
            all_upper = Int32(0)
            all_lower = Int32(0)
            for peer in cutlass.range_constexpr(config.cluster):
                a, b = packed.load_shared_v2(bins + Uint32(256 * peer) + Uint32(lane) * Uint32(8))
                all_lower = all_lower + Int32(a)
                all_upper = all_upper + Int32(b)
    lane_found, before = pick_lane(all_upper + all_lower, want - above, lane)
    above = above + before
    in_upper = Int32(cute.arch.shuffle_sync(all_upper, lane_found))
    lower = Int32(above + in_upper < want)
    above = above + in_upper * lower
    digit = chunk * Int32(64) + Int32(63) - lane_found * Int32(2) - lower
    my_above = Int32(0)
    if cutlass.const_expr(config.cluster > 1):
        if active > Int32(1):
            part = mine * Int32(lane < owner)
            part = part + (my_upper + my_lower) * Int32(lane < lane_found)
            part = part + my_upper * lower * Int32(lane == lane_found)
            my_above = scan.warp_sum(part)
    return Uint32(digit), above, my_above


@cute.jit
def find_low(
    base: Uint32,
    want: Int32,
    above: Int32,
    my_above: Int32,
    thread: Int32,
    rank: Int32,
    active: Int32,
    config: cutlass.Constexpr[SelectConfig],
    stage: cutlass.Constexpr[int],
) -> Any:
    """After the keys in the threshold bin were counted: (lower 5 bits of the threshold, equal keys this block takes at
    most, selected keys in the blocks before this one). Begins with a block barrier."""
    shared = SharedMap.of(config)
    lane = thread & Int32(31)
    warp = thread >> Int32(5)
    histogram = base + Uint32(shared.low[stage])
    behind = (Uint32(31) - Uint32(lane)) * Uint32(4)
    cute.arch.sync_threads()
    mine = Int32(ptx.load_shared(histogram + behind))
    total = mine
    earlier = Int32(0)
    earlier_above = Int32(0)
    if cutlass.const_expr(config.cluster > 1):
        if active > Int32(1):
            lows = base + Uint32(shared.lows[stage])
            for peer in cutlass.range(warp, active, config.warps, unroll=1):
                far = ptx.map_shared(lows + Uint32(rank) * Uint32(160), Uint32(peer))
                ptx.store_cluster(far + behind, Uint32(mine))
                if lane == Int32(0):
                    ptx.store_cluster(far + Uint32(128), Uint32(my_above))
            _cluster_barrier()
            total = Int32(0)
            for peer in cutlass.range_constexpr(config.cluster):
                its = lows + Uint32(160 * peer)
                count = Int32(ptx.load_shared(its + behind))
                more = Int32(ptx.load_shared(its + Uint32(128)))
                before = Int32(Int32(peer) < rank)
                total = total + count
                earlier = earlier + count * before
                earlier_above = earlier_above + more * before
    owner, between = pick_lane(total, want - above, lane)
    need = want - above - between
    slot = Int32(0)
    if cutlass.const_expr(config.cluster > 1):
        if active > Int32(1):
            earlier_above = earlier_above + scan.warp_sum(earlier * Int32(lane < owner))
            earlier_equal = Int32(cute.arch.shuffle_sync(earlier, owner))
            if earlier_equal > need:
                earlier_equal = need
            slot = earlier_above + earlier_equal
            need = need - earlier_equal
    return Uint32(31) - Uint32(owner), need, slot


@cute.jit
def spread_masks(
    scratch: Uint32, greater: Any, equal: Any, lane: Int32, vectors: cutlass.Constexpr[int]
) -> Any:
    """Turn one mask byte per (round, lane) into, per lane, the bytes of `vectors` neighbouring vectors in index order.

    scratch: 512 bytes of this warp. Returns (greater, equal) words of `8 * vectors` bits (vectors <= 4).
    """
    above = greater[0]
    same = equal[0]
    if cutlass.const_expr(vectors > 1):
        for index in cutlass.range_constexpr(vectors):
            place = scratch + Uint32(lane) + Uint32(32 * index)
            packed.store_shared_u8(place, greater[index])
            packed.store_shared_u8(place + Uint32(256), equal[index])
        cute.arch.sync_warp()
        place = scratch + Uint32(lane) * Uint32(vectors)
        if cutlass.const_expr(vectors == 4):
            above = ptx.load_shared(place)
            same = ptx.load_shared(place + Uint32(256))
        else:
            above = packed.load_shared_u8(place) | (packed.load_shared_u8(place + Uint32(1)) << Uint32(8))
            place = place + Uint32(256)
            same = packed.load_shared_u8(place) | (packed.load_shared_u8(place + Uint32(1)) << Uint32(8))
        cute.arch.sync_warp()
    return above, same


@cute.jit
def lane_offsets(greater: Uint32, equal: Uint32, lane: Int32) -> Any:
    """Set bits of two masks (at most 32 a lane): (greater in lower lanes, equal in lower lanes, greater in the warp,
    equal in the warp)."""
    mine = Int32(cute.arch.popc(greater)) | (Int32(cute.arch.popc(equal)) << Int32(16))
    upto = scan.warp_inclusive(mine, lane)
    before = upto - mine
    total = Int32(cute.arch.shuffle_sync(upto, Int32(31)))
    low = Int32(0xFFFF)
    return before & low, before >> Int32(16), total & low, total >> Int32(16)


@cute.jit
def emit(
    out: Uint32,
    greater_before: Int32,
    equal_before: Int32,
    unit: Int32,
    greater: Uint32,
    equal: Uint32,
    need: Int32,
) -> None:
    """List this lane's winners in shared memory: the indices `unit + i` of the set bits of `greater`, and of those of
    `equal` while fewer than `need` equal ones were listed before; ascending, at the place that the counts before give."""
    taken = equal_before
    if taken > need:
        taken = need
    quota = need - taken
    extra = Int32(cute.arch.popc(equal)) - quota
    if quota == Int32(0):
        equal = Uint32(0)
        extra = Int32(0)
    while extra > Int32(0):  # at most one lane of the row: it gives up its last equal keys
        equal = equal & (Uint32(0x7FFFFFFF) >> Uint32(cute.arch.clz(Int32(equal))))
        extra = extra - Int32(1)
    left = greater | equal
    place = out + Uint32(greater_before + taken + Int32(cute.arch.popc(left))) * Uint32(4)
    while left != Uint32(0):  # from the highest down: finding it takes one instruction
        bit = packed.highest_bit(left)
        place = place - Uint32(4)
        ptx.store_shared(place, Uint32(unit) + bit)
        left = left ^ (Uint32(1) << bit)


@cute.jit
def warp_offsets(sums: Uint32, above: Int32, equal: Int32, thread: Int32, warps: cutlass.Constexpr[int]) -> Any:
    """Block scan of the warps' counts (the same in all lanes): (above before, equal before, above in all, equal in all);
    equal counts are cut at 4096 a warp. One block barrier."""
    lane = thread & Int32(31)
    warp = thread >> Int32(5)
    if equal > Int32(EQUAL_LIMIT):
        equal = Int32(EQUAL_LIMIT)
    if lane == Int32(0):
        ptx.store_shared(sums + Uint32(warp) * Uint32(4), Uint32(above | (equal << Int32(EQUAL_SHIFT))))
    cute.arch.sync_threads()
    value = Int32(0)
    if lane < Int32(warps):
        value = Int32(ptx.load_shared(sums + Uint32(lane) * Uint32(4)))
    upto = scan.warp_inclusive(value, lane)
    before = Int32(cute.arch.shuffle_sync(upto - value, warp))
    total = Int32(cute.arch.shuffle_sync(upto, Int32(31)))
    low = Int32((1 << EQUAL_SHIFT) - 1)
    return before & low, before >> Int32(EQUAL_SHIFT), total & low, total >> Int32(EQUAL_SHIFT)
