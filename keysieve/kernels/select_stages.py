"""The two stages of the exact selection over a row's part: among the maxima of its groups, and among keys.

See `select_steps.py` for how a part's vectors are spread over the threads.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import packed, ptx, scan
from keysieve.kernels import select_foreign as foreign
from keysieve.kernels import select_numbers as numbers
from keysieve.kernels import select_steps as steps
from keysieve.kernels import select_stream as stream
from keysieve.kernels import select_threshold as threshold_of
from keysieve.kernels.select_config import VECTORS, SelectConfig, SharedMap


@cute.jit
def share(total: Int32, first: Int32, part: Int32) -> Int32:
    """Units of a part of at most `part` units that begins at `first`."""
    count = total - first
    if count > part:
        count = part
    if count < Int32(0):
        count = Int32(0)
    return count


@cute.jit
def warp_scratch(base: Uint32, thread: Int32, config: cutlass.Constexpr[SelectConfig]) -> Uint32:
    """Shared address of this warp's scratch."""
    return base + Uint32(SharedMap.of(config).scratch) + Uint32(thread >> Int32(5)) * Uint32(config.scratch_bytes)


# ---------------------------------------------------------------------------------------------- loads


@dsl_user_op
def load_group(addr: Int64, *, loc: Any = None, ip: Any = None) -> tuple[Any, ...]:
    """Eight keys or maxima, four words. They are read once: without lines of L1 for them, a gather of scattered groups
    from memory takes a fifth less time, and a part that is read whole a little less."""
    text = "ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];"
    return ptx.asm(text, "=r,=r,=r,=r,l", (Uint32,) * 4, (addr,), loc=loc, ip=ip)


@cute.jit
def share_tops(groups: Int32, rank: Int32, active: Int32, config: cutlass.Constexpr[SelectConfig]) -> Any:
    """This block's part of the row's maxima, in vectors of 8: (the first one, how many)."""
    vectors = (groups + Int32(7)) >> Int32(3)
    part = vectors
    if active > Int32(1):
        part = (vectors + Int32(config.cluster - 1)) // Int32(config.cluster)
    first = rank * part
    return first, share(vectors, first, part)


@cute.jit
def plan_loads(
    base: Uint32,
    listed: cutlass.Constexpr[bool],
    first: Int32,
    count: Int32,
    thread: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> Any:
    """Which vectors this thread holds, -1 for none: of the part [first, first + count), or of the `count` groups in the
    shared list (`listed`)."""
    rounds = threshold_of.rounds_of(count, config)
    index = threshold_of.first_index(rounds, thread)
    places = [Int32(-1) for _ in range(VECTORS)]
    for step in cutlass.range_constexpr(VECTORS):
        one = index + Int32(32 * step)
        if Int32(step) < rounds and one < count:
            place = first + one
            if cutlass.const_expr(listed):
                group = base + Uint32(SharedMap.of(config).groups) + Uint32(one) * Uint32(4)
                place = Int32(ptx.load_shared(group))
            places[step] = place
    return places


@cute.jit
def issue_loads(
    address: Int64, head: Int32, end: Int32, places: Any, config: cutlass.Constexpr[SelectConfig]
) -> list[Uint32]:
    """Begin to load the vectors `places` from `address`, 0 for none and for a foreign row's edge groups; nothing waits
    for their words yet."""
    words = [Uint32(0) for _ in range(4 * VECTORS)]
    for step in cutlass.range_constexpr(VECTORS):
        readable = places[step] >= Int32(0)
        if cutlass.const_expr(not config.maxima):
            readable = readable and foreign.is_whole(places[step], head, end)
        if readable:
            loaded = load_group(address + Int64(places[step]) * Int64(16))
            for word in cutlass.range_constexpr(4):
                words[4 * step + word] = loaded[word]
    return words


# ---------------------------------------------------------------------------------------------- keys


@cute.jit
def settle_keys(
    base: Uint32,
    edge: Uint32,
    head: Int32,
    end: Int32,
    listed: Boolean,
    groups: Any,
    words: Any,
    count: Int32,
    thread: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> Any:
    """This thread's numbers from what `issue_loads` returned: BF16 bits, all ones where no key is; in place of foreign
    NaNs what is larger than any number, for `settle_nans` to find."""
    rounds = threshold_of.rounds_of(count, config)
    index = threshold_of.first_index(rounds, thread)
    if cutlass.const_expr(not config.maxima):
        done = not foreign.has_edges(head, end)
        if cutlass.const_expr(not config.given):
            done = listed or done
        foreign.show_edge(base, edge, done, thread, config)
    for step in cutlass.range_constexpr(VECTORS):
        if threshold_of.has_round(step, index, count, rounds, thread):
            whole = foreign.is_whole(groups[step], head, end)
            if cutlass.const_expr(not config.maxima):
                if groups[step] >= Int32(0) and not whole:
                    loaded = foreign.edge_words(base, groups[step], config)
                    for word in cutlass.range_constexpr(4):
                        words[4 * step + word] = loaded[word]
                for word in cutlass.range_constexpr(4):  # NaNs are left to `settle_nans`
                    words[4 * step + word] = packed.settle_bf16x2(words[4 * step + word])
            if not whole:  # an edge group, or none
                for word in cutlass.range_constexpr(4):
                    inside = packed.inside_mask(groups[step] * Int32(8) + Int32(2 * word), head, end)
                    words[4 * step + word] = words[4 * step + word] | (inside ^ Uint32(0xFFFFFFFF))
    return words


@cute.jit
def find_keys(
    base: Uint32,
    words: Any,
    count: Int32,
    k: Int32,
    bound: Int32,
    near: Boolean,
    thread: Int32,
    rank: Int32,
    active: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> Any:
    """Stage 1 over `count` vectors held in registers. Leaves the winners' indices (8 * vector + key) of this block in
    the shared list `picks`; returns (their number, the output slot of the first). Ends with a block barrier."""
    shared = SharedMap.of(config)
    rounds = threshold_of.rounds_of(count, config)
    first = threshold_of.first_index(rounds, thread)
    steps.mark(base, thread, 6, config)
    threshold = Uint32(0)
    need = Int32(0)
    slot = Int32(0)
    known = Int32(0)
    if cutlass.const_expr(config.cluster > 1 or config.threads == 512):  # noqa: SIM102  # a trace-time test, then a run-time one
        if near:
            known, threshold, need, slot = threshold_of.find_key_near(
                base, words, count, k, bound, rounds, first, thread, rank, config
            )
    if known == Int32(0):
        if cutlass.const_expr(config.cluster == 1):
            words, threshold, need = threshold_of.find_key_alone(base, words, count, k, rounds, first, thread, config)
        else:
            if active > Int32(1):
                words, threshold, need, slot = threshold_of.find_key_shared(
                    base, words, count, k, rounds, first, thread, rank, config
                )
            else:
                words, threshold, need = threshold_of.find_key_alone(
                    base, words, count, k, rounds, first, thread, config
                )
    steps.mark(base, thread, 9, config)
    g, e, unit = masks_in_order(base, words, threshold, count, rounds, thread, config, 1)
    g_before, e_before, g_warp, e_warp = steps.lane_offsets(g, e)
    g_base, e_base, g_all, e_all = steps.warp_offsets(
        base + Uint32(shared.sums[1]), g_warp, e_warp, thread, config.warps
    )
    steps.emit(base + Uint32(shared.picks), g_base + g_before, e_base + e_before, unit, g, e, need, rounds <= Int32(1))
    packed.copy_async_wait()  # the block table's entries
    cute.arch.sync_threads()
    steps.mark(base, thread, 10, config)
    if e_all > need:
        e_all = need
    return g_all + e_all, slot


@cute.jit
def masks_in_order(
    base: Uint32,
    words: Any,
    threshold: Uint32,
    count: Int32,
    rounds: Int32,
    thread: Int32,
    config: cutlass.Constexpr[SelectConfig],
    stage: cutlass.Constexpr[int],
) -> Any:
    """(mask of keys above the threshold, mask of keys equal to it, index of bit 0): per lane a run of neighbouring
    indices, lanes in index order."""
    lane = thread & Int32(31)
    first = threshold_of.first_index(rounds, thread)
    greater = [Uint32(0) for _ in range(VECTORS)]
    equal = [Uint32(0) for _ in range(VECTORS)]
    if cutlass.const_expr(stage == 0):
        for step in cutlass.range_constexpr(VECTORS):
            if threshold_of.has_round(step, first, count, rounds, thread):
                greater[step], equal[step] = packed.masks_x8(words[4 * step : 4 * step + 4], threshold)
    else:
        if threshold > Uint32(packed.KEY16_NAN):
            bits = numbers.bits_of(threshold)
            for step in cutlass.range_constexpr(VECTORS):
                if threshold_of.has_round(step, first, count, rounds, thread):
                    greater[step], equal[step] = numbers.number_masks(words[4 * step : 4 * step + 4], bits)
        else:  # NaNs are wanted, which no comparison of numbers finds
            for step in cutlass.range_constexpr(VECTORS):
                if threshold_of.has_round(step, first, count, rounds, thread):
                    its = [packed.key16x2_fast(word) for word in words[4 * step : 4 * step + 4]]
                    greater[step], equal[step] = packed.masks_x8(its, threshold)
    g = greater[0]
    e = equal[0]
    unit = first * Int32(8)
    if rounds > Int32(1):
        g, e, width = steps.spread_masks(warp_scratch(base, thread, config), greater, equal, lane, rounds)
        unit = (first - lane + lane * width) * Int32(8)
    return g, e, unit


# ---------------------------------------------------------------------------------------------- groups


@cute.jit
def hold_tops(
    base: Uint32,
    tops: Int64,
    first_vector: Int32,
    count: Int32,
    rounds: Int32,
    thread: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> list[Uint32]:
    """The maxima of a foreign row that this thread keeps in registers. All loads are issued before one is looked at."""
    held = VECTORS
    index = threshold_of.first_index(rounds, thread)
    words = [Uint32(0) for _ in range(4 * held)]
    for step in cutlass.range_constexpr(held):
        one = index + Int32(32 * step)
        if Int32(step) < rounds and one < count:
            if cutlass.const_expr(config.streamed):
                if rounds > Int32(held):
                    far = ptx.load_v4(tops + Int64(first_vector + one) * Int64(16))
                    for word in cutlass.range_constexpr(4):
                        words[4 * step + word] = far[word]
                else:
                    near = ptx.load_shared_v4(base + Uint32(SharedMap.of(config).scratch) + Uint32(one) * Uint32(16))
                    for word in cutlass.range_constexpr(4):
                        words[4 * step + word] = near[word]
            elif cutlass.const_expr(config.given):
                loaded = ptx.load_v4(tops + Int64(first_vector + one) * Int64(16))
                for word in cutlass.range_constexpr(4):
                    words[4 * step + word] = loaded[word]
            else:
                place = warp_scratch(base, thread, config) + Uint32(thread & Int32(31)) * Uint32(16)
                loaded = ptx.load_shared_v4(place + Uint32(512 * step))
                for word in cutlass.range_constexpr(4):
                    words[4 * step + word] = loaded[word]
    return words


@cute.jit
def within_row(words: list[Uint32], first_vector: Int32, rounds: Int32, groups: Int32, thread: Int32) -> list[Uint32]:
    """The held maxima, 0 past the row."""
    index = threshold_of.first_index(rounds, thread)
    for step in cutlass.range_constexpr(VECTORS):
        group = (first_vector + index + Int32(32 * step)) * Int32(8)
        if group + Int32(8) > groups:
            for word in cutlass.range_constexpr(4):
                inside = packed.inside_mask(group + Int32(2 * word), Int32(0), groups)
                words[4 * step + word] = words[4 * step + word] & inside
    return words


@cute.jit
def find_groups(
    base: Uint32,
    address: Int64,
    tops: Int64,
    edge: Uint32,
    head: Int32,
    end: Int32,
    groups: Int32,
    k: Int32,
    thread: Int32,
    rank: Int32,
    first_vector: Int32,
    count: Int32,
    words: list[Uint32],
    config: cutlass.Constexpr[SelectConfig],
) -> Any:
    """Stage 0: the K best of the row's groups, whose maxima are `count` vectors from `first_vector` on in this block;
    `words`: those that a thread holds, where they were given. Leaves this block's best in the shared list `groups`;
    returns (their number, a key16 that the maxima of K groups reach).

    Where the groups whose tops reach the threshold's bin all fit the next stage's registers, they all are taken, more
    than K: the best K are among them, and the second digit is not looked for. Maxima beyond the registers are read
    again in every pass. Ends with a block barrier.
    """
    shared = SharedMap.of(config)
    held = VECTORS
    rounds = threshold_of.rounds_of(count, config)
    first = threshold_of.first_index(rounds, thread)
    if cutlass.const_expr(config.streamed):
        begin = first_vector * Int32(8)
        stop = begin + count * Int32(8)
        if stop > groups:
            stop = groups
        spilled = rounds > Int32(VECTORS)
        stream.stream_tops(base, address, tops, head, end, begin, stop, spilled, thread, config)
        stream.settle_edges(base, tops, edge, head, end, groups, begin, stop, spilled, thread, config)
    elif cutlass.const_expr(not config.maxima and not config.given):
        foreign.fill_tops(base, address, tops, edge, head, end, groups, first_vector, count, rounds, thread, config)
    if cutlass.const_expr(not config.maxima):
        words = hold_tops(base, tops, first_vector, count, rounds, thread, config)
    words = within_row(words, first_vector, rounds, groups, thread)
    steps.mark(base, thread, 2, config)
    threshold = Uint32(0)
    need = Int32(0)
    if cutlass.const_expr(config.cluster == 1):
        threshold, need = threshold_of.find_top_alone(
            base, tops, first_vector, groups, words, count, k, rounds, first, thread, config
        )
    else:  # an unshared row of such a configuration is short
        threshold, need = threshold_of.find_top_shared(
            base, tops, first_vector, groups, words, count, k, rounds, first, thread, rank, config
        )
    steps.mark(base, thread, 4, config)
    g, e, unit = masks_in_order(base, words, threshold, count, rounds, thread, config, 0)
    g_before, e_before, g_held, e_held = steps.lane_offsets(g, e)
    g_more = Int32(0)
    e_more = Int32(0)
    if rounds > Int32(held):
        for step in cutlass.range(held, rounds, unroll=1):
            more = threshold_of.more_tops(tops, first_vector, first + step * Int32(32), count, groups)
            above_mask, equal_mask = packed.masks_x8(more, threshold)
            g_more = g_more + Int32(cute.arch.popc(above_mask))
            e_more = e_more + Int32(cute.arch.popc(equal_mask))
        g_more = scan.warp_sum(g_more)
        e_more = scan.warp_sum(e_more)
    g_base, e_base, g_all, e_all = steps.warp_offsets(
        base + Uint32(shared.sums[0]), g_held + g_more, e_held + e_more, thread, config.warps
    )
    listed = base + Uint32(shared.groups)
    offset = first_vector * Int32(8)
    steps.emit(listed, g_base + g_before, e_base + e_before, offset + unit, g, e, need, rounds <= Int32(1))
    g_base = g_base + g_held
    e_base = e_base + e_held
    for step in cutlass.range(held, rounds, unroll=1):
        more = threshold_of.more_tops(tops, first_vector, first + step * Int32(32), count, groups)
        above_mask, equal_mask = packed.masks_x8(more, threshold)
        g_before, e_before, g_warp, e_warp = steps.lane_offsets(above_mask, equal_mask)
        unit = offset + (first + step * Int32(32)) * Int32(8)
        steps.emit(listed, g_base + g_before, e_base + e_before, unit, above_mask, equal_mask, need, True)
        g_base = g_base + g_warp
        e_base = e_base + e_warp
    cute.arch.sync_threads()
    steps.mark(base, thread, 5, config)
    if e_all > need:
        e_all = need
    return g_all + e_all, Int32(threshold)
