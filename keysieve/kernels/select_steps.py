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
from keysieve.kernels import select_numbers as numbers
from keysieve.kernels.select_config import VECTORS, SelectConfig, SharedMap

EQUAL_LIMIT = 4096  # more equal keys than this in a warp are as good as this many: at most 4096 are taken
EQUAL_SHIFT = 13  # a warp's counts in one word: keys above (at most 4096) below this bit, equal keys from it on


def mark(base: Uint32, thread: Int32, slot: int, config: SelectConfig) -> None:
    """With `config.trace`: note the clock at a step, for one thread of the block (see `dump_marks`)."""
    if config.trace:
        _mark(base + Uint32(SharedMap.of(config).total - 64 + 4 * slot), thread)


@cute.jit
def _mark(place: Uint32, thread: Int32) -> None:
    if thread == Int32(0):
        ptx.store_shared(place, ptx.asm("mov.u32 $0, %clock;", "=r", (Uint32,), ())[0])


def dump_marks(base: Uint32, where: Int64, block: Int32, thread: Int32, config: SelectConfig) -> None:
    """With `config.trace`: write this block's 16 marks to u32 `where[block][16]`."""
    if config.trace:
        _dump_marks(base + Uint32(SharedMap.of(config).total - 64), where, block, thread)


@cute.jit
def _dump_marks(base: Uint32, where: Int64, block: Int32, thread: Int32) -> None:
    if thread == Int32(0):
        for slot in cutlass.range(16, unroll=1):
            value = ptx.load_shared(base + Uint32(slot) * Uint32(4))
            ptx.store(where + Int64(block * Int32(16) + slot) * Int64(4), value)


@cute.jit
def await_cluster(active: Int32) -> None:
    """For a shared row: wait until every block of the cluster runs, so that its shared memory may be written."""
    if active > Int32(1):
        cute.arch.cluster_wait()


def count_high(base: Uint32, words: Any, bits: int) -> None:
    """Count eight keys by their upper `bits` bits. base: aligned to the histogram's 4 << bits bytes."""
    mask = ((1 << bits) - 1) << 2
    for word in words:
        ptx.red_shared(((word >> Uint32(14 - bits)) & Uint32(mask)) | base, Uint32(1), "add")
        ptx.red_shared(((word >> Uint32(30 - bits)) & Uint32(mask)) | base, Uint32(1), "add")


def count_low(base: Uint32, words: Any, digit: Uint32, lane: Int32, bits: int, stage: int) -> None:
    """Count, by the other bits of key16, those of eight keys whose upper `bits` (11 or 12) bits of key16 are `digit`.

    Keys of other digits are counted too, in bins behind that nobody reads: no branch, and mostly a bin for each lane.
    All bins are below 64: shifted by 14, a word of two of them is 4 times the upper one.
    """
    pattern = (digit << Uint32(16 - bits)) * Uint32(0x10001)
    if stage == 1:
        pattern = pattern ^ numbers.flip(digit >= Uint32(1 << (bits - 1)))
    spare = (Uint32(lane) + Uint32(1 << (16 - bits))) * Uint32(0x10001)
    for word in words:
        # a half of the difference below 2 ** (16 - bits) is a hit, and its own lower bits
        bins = packed.min_u16x2(word ^ pattern, spare)
        ptx.red_shared(base + (bins & Uint32(63)) * Uint32(4), Uint32(1), "add")
        ptx.red_shared(base + (bins >> Uint32(14)), Uint32(1), "add")


@cute.jit
def pick_lane(counts: Int32, want: Int32) -> Any:
    """Lanes hold counts, best first: (the lane in which the running sum reaches `want`, the sum before it)."""
    upto = packed.warp_prefix(counts)
    votes = Uint32(cute.arch.vote_ballot_sync(upto >= want))
    owner = packed.lowest_bit(votes) & Int32(31)
    return owner, Int32(cute.arch.shuffle_sync(upto - counts, owner))


@cute.jit
def find_high(
    base: Uint32,
    want: Int32,
    thread: Int32,
    config: cutlass.Constexpr[SelectConfig],
    stage: cutlass.Constexpr[int],
) -> Any:
    """After all of a block's keys were counted by their upper bits: (digit of the `want`-th key; keys above its bin;
    keys in the bin). The same in all threads: a thread owns neighbouring bins, the first one the highest. Three block
    barriers."""
    shared = SharedMap.of(config)
    lane = thread & Int32(31)
    warp = thread >> Int32(5)
    bits = config.high_bits(stage)
    each = (1 << bits) // config.threads
    sums = base + Uint32(shared.chunks[stage])
    cute.arch.sync_threads()
    place = base + Uint32(shared.high[stage] + (4 << bits) - 4 * each) - Uint32(thread) * Uint32(4 * each)
    bins = []
    if cutlass.const_expr(stage == 1):
        bins = numbers.number_bins(base + Uint32(shared.high[stage]), thread, each, bits)
    else:
        bins = numbers.bins_at(place, each)
    mine = bins[0]
    for index in cutlass.range_constexpr(1, each):
        mine = mine + bins[index]
    upto = packed.warp_prefix(mine)
    if lane == Int32(31):
        ptx.store_shared(sums + Uint32(warp) * Uint32(4), Uint32(upto))
    cute.arch.sync_threads()
    before = Int32(0)
    if lane < warp:
        before = Int32(ptx.load_shared(sums + Uint32(lane) * Uint32(4)))
    before = scan.warp_sum(before) + upto - mine
    found = base + Uint32(shared.found[stage])
    if before < want and before + mine >= want:
        digit = Int32((1 << bits) - 1) - thread * Int32(each)
        reach = before + bins[0]
        above = before
        inside = bins[0]
        for index in cutlass.range_constexpr(1, each):
            if reach < want:
                digit = digit - Int32(1)
                above = reach
                inside = bins[index]
            reach = reach + bins[index]
        packed.store_shared_v2(found, Uint32(digit | (above << Int32(bits))), Uint32(inside))
    cute.arch.sync_threads()
    word, inside_word = packed.load_shared_v2(found)
    return word & Uint32((1 << bits) - 1), Int32(word >> Uint32(bits)), Int32(inside_word)


@cute.jit
def find_low(
    base: Uint32,
    want: Int32,
    above: Int32,
    thread: Int32,
    config: cutlass.Constexpr[SelectConfig],
    stage: cutlass.Constexpr[int],
) -> Any:
    """After the keys in the threshold bin were counted: (lower bits of the threshold, equal keys that are taken). The
    same in all threads. Begins with a block barrier."""
    shared = SharedMap.of(config)
    lane = thread & Int32(31)
    histogram = base + Uint32(shared.low[stage])
    behind = (Uint32(31) - Uint32(lane)) * Uint32(4)
    cute.arch.sync_threads()
    total = Int32(ptx.load_shared(histogram + behind))
    total = total * Int32(lane >= Int32(32 - (1 << (16 - config.high_bits(stage)))))  # the other bins are spare
    owner, between = pick_lane(total, want - above)
    return Uint32(31) - Uint32(owner), want - above - between


@cute.jit
def spread_masks(scratch: Uint32, greater: Any, equal: Any, lane: Int32, rounds: Int32) -> Any:
    """Turn one mask byte per (round, lane) into, per lane, the bytes of neighbouring vectors in index order.

    scratch: 512 bytes of this warp. At most 4 rounds. Returns (greater, equal, vectors a lane got: 2 or 4).
    """
    for index in cutlass.range_constexpr(VECTORS):
        place = scratch + Uint32(lane) + Uint32(32 * index)
        packed.store_shared_u8(place, greater[index])
        packed.store_shared_u8(place + Uint32(256), equal[index])
    cute.arch.sync_warp()
    width = Int32(2)
    place = scratch + Uint32(lane) * Uint32(2)
    above = ptx.load_shared_u16(place)
    same = ptx.load_shared_u16(place + Uint32(256))
    if rounds > Int32(2):
        width = Int32(4)
        place = scratch + Uint32(lane) * Uint32(4)
        above = ptx.load_shared(place)
        same = ptx.load_shared(place + Uint32(256))
    cute.arch.sync_warp()
    return above, same, width


@cute.jit
def lane_offsets(greater: Uint32, equal: Uint32) -> Any:
    """Set bits of two masks (at most 32 a lane): (greater in lower lanes, equal in lower lanes, greater in the warp,
    equal in the warp)."""
    mine = Int32(cute.arch.popc(greater)) | (Int32(cute.arch.popc(equal)) << Int32(16))
    upto = packed.warp_prefix(mine)
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
    short: Any,
) -> None:
    """List this lane's winners (8 bits if `short`, else up to 32) in shared memory: the indices `unit + i` of the set
    bits of `greater`, and of those of `equal` while fewer than `need` equal ones were listed before; ascending, at the
    place that the counts before give."""
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
    place = out + Uint32(greater_before + taken) * Uint32(4)
    if short:
        packed.store_bits_x8(place, Uint32(unit), left)
        left = Uint32(0)
    place = place + Uint32(cute.arch.popc(left)) * Uint32(4)
    while left != Uint32(0):  # from the highest down: finding it takes one instruction
        bit = packed.highest_bit(left)
        place = place - Uint32(4)
        ptx.store_shared(place, Uint32(unit) + bit)
        left = left ^ (Uint32(1) << bit)


@cute.jit
def warp_offsets(sums: Uint32, above: Int32, equal: Int32, thread: Int32, warps: cutlass.Constexpr[int]) -> Any:
    """Block scan of the warps' counts (the same in all lanes): (above before, equal before, above in all, equal in
    all); equal counts are cut at 4096 a warp. One block barrier."""
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
    before = scan.warp_sum(value * Int32(lane < warp))
    total = scan.warp_sum(value)
    low = Int32((1 << EQUAL_SHIFT) - 1)
    return before & low, before >> Int32(EQUAL_SHIFT), total & low, total >> Int32(EQUAL_SHIFT)
