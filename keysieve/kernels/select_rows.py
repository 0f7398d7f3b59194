"""Where a row's logits lie, and where its results go: the selection kernels' dealings with global memory but for keys.

`where` is (table, table stride, row_request, next_n, log2 of kv_page, block_rows, row), `target` is (out, its row
stride, positions, its row stride): addresses in bytes with 0 for absent, strides in elements.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import exchange_cluster, packed, ptx, scan
from keysieve.device.paged import physical_row, table_entry
from keysieve.kernels.schedule import FLAG_BAD_LENGTH, FLAG_OVERFLOW, tiles_and_half, usable_length
from keysieve.kernels.select_config import OCTAVE_BITS, SelectConfig, SharedMap

KEPT_WORDS = 368640
"""Physical rows (four bytes each) that L2 is asked to keep: an eighth of the 11.25 MiB that an H200's driver sets aside
for what is asked to stay, of which the scorer's results have the rest."""


@cute.jit
def open_exchange(base: Uint32, thread: Int32, config: cutlass.Constexpr[SelectConfig]) -> None:
    """Arm the mbarriers of what the blocks of the cluster will send to this one, and tell them that it runs."""
    cluster = config.cluster
    if thread == Int32(0):
        for stage in cutlass.range_constexpr(2):
            arrival = base + Uint32(SharedMap.of(config).arrivals + 16 * stage)
            exchange_cluster.arm(arrival, cluster * (2 << OCTAVE_BITS))
            exchange_cluster.arm(arrival + Uint32(8), cluster * (2 << (16 - OCTAVE_BITS)))
        exchange_cluster.arm(base + Uint32(SharedMap.of(config).arrivals + 32), cluster * ((2 << OCTAVE_BITS) + 4))
        exchange_cluster.arm(base + Uint32(SharedMap.of(config).arrivals + 40), cluster * 4)
        exchange_cluster.publish()
    cute.arch.cluster_arrive_relaxed()


@cute.jit
def clear(base: Uint32, thread: Int32, config: cutlass.Constexpr[SelectConfig]) -> None:
    """Zero the histograms; a block barrier must follow. Called while the first loads are on their way."""
    for index in cutlass.range_constexpr(-(-SharedMap.of(config).cleared // 16 // config.threads)):
        place = thread + Int32(index * config.threads)
        if place < Int32(SharedMap.of(config).cleared // 16):
            ptx.store_shared_v4(base + Uint32(place) * Uint32(16), Uint32(0), Uint32(0), Uint32(0), Uint32(0))


@cute.jit
def request_of(row: Int32, next_n: Int32) -> Int32:
    """row // next_n; a division is worth avoiding."""
    request = row
    if next_n > Int32(1):
        request = row // next_n
    return request


@cute.jit
def enter(release: Int32, config: cutlass.Constexpr[SelectConfig]) -> None:
    """Wait for the kernel in front, if that was not done at the start; then, if asked to, let the next one start."""
    if cutlass.const_expr(config.maxima or config.given):
        ptx.grid_wait()
    if release & Int32(1) != Int32(0):
        ptx.grid_launch_dependents()


@cute.jit
def drop_lines(base: Int64, start: Int64, end: Int64, thread: Int32, config: cutlass.Constexpr[SelectConfig]) -> None:
    """Drop what has been read and nobody reads again: the whole lines of bytes [start, end) behind `base`, which would
    otherwise be written to memory, between the keys that the next step reads."""
    low = (base + start + Int64(127)) & Int64(-128)
    lines = Int32((base + end - low) >> Int64(7))
    for line in cutlass.range(thread, lines, config.threads, unroll=2):
        ptx.discard_line(low + Int64(line) * Int64(128))


# ---------------------------------------------------------------------------------------------- row geometry


@cute.jit
def compact_row(
    base: Uint32,
    starts: Int64,
    lens: Int64,
    row: Int32,
    next_n: Int32,
    k: Int32,
    limit: Int32,
    scored: Int32,
    capacity: Int64,
    thread: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> Any:
    """(usable length, byte offset of the row's first logit, flags to raise) in the compact layout. A request that
    does not fit the buffer whole has empty rows. The block barrier makes the cleared histograms visible.

    Behind a scorer (`scored`) lengths are read before the grid dependency, past L1 and by one warp: were every warp to
    ask for the same word, the requests of a full chip would queue for a thousand cycles at one slice of L2.
    """
    request = request_of(row, next_n)
    length = Int32(0)
    if scored == Int32(0):
        length = ptx.load(lens + Int64(row) * Int64(4), Int32)
    elif thread < Int32(32):
        length = ptx.load(lens + Int64(row) * Int64(4), Int32, "relaxed")
    before = Int32(0)
    tiles = Int32(0)
    if starts != Int64(0):
        before = ptx.load(starts + Int64(request) * Int64(4), Int32)
        after = ptx.load(starts + Int64(request) * Int64(4) + Int64(4), Int32)
        clear(base, thread, config)
        tiles = after - before
        cute.arch.sync_threads()
    else:
        counted = limit
        if scored != Int32(0):
            counted = scored
        length, before, tiles = count_tiles(base, lens, length, request, next_n, k, counted, thread, config)
    tile = Int64(before) * Int64(next_n) + Int64(row - request * next_n) * Int64(tiles)
    usable = usable_length(length, limit)
    fault = Uint32(length > limit) << Uint32(FLAG_BAD_LENGTH)
    if tiles > Int32(0) and Int64(before + tiles) * Int64(128 * next_n) > capacity:
        usable = Int32(0)
        fault = fault | Uint32(1 << FLAG_OVERFLOW)
    return usable, tile * Int64(256), fault


@cute.jit
def count_tiles(
    base: Uint32,
    lens: Int64,
    length: Int32,
    request: Int32,
    next_n: Int32,
    k: Int32,
    limit: Int32,
    thread: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> Any:
    """(the row's length, which warp 0 has read; tiles of all earlier requests, summed over the block; tiles of this
    one). One block barrier."""
    clear(base, thread, config)
    mine = Int32(0)
    for other in cutlass.range(thread, request, config.threads, unroll=1):
        its, _half = tiles_and_half(longest_row(lens, other, next_n, limit), k)
        mine = mine + its
    longest = usable_length(length, limit)
    if next_n > Int32(1) and thread < Int32(32):
        longest = longest_row(lens, request, next_n, limit)
    partial = scan.warp_sum(mine)
    lane = thread & Int32(31)
    shared = SharedMap.of(config)
    sums = base + Uint32(shared.tiles)
    if lane == Int32(0):
        ptx.store_shared(sums + Uint32(thread >> Int32(5)) * Uint32(4), Uint32(partial))
    if thread == Int32(0):
        packed.store_shared_v2(base + Uint32(shared.found[0]), Uint32(length), Uint32(longest))
    cute.arch.sync_threads()
    value = Int32(0)
    if lane < Int32(config.warps):
        value = Int32(ptx.load_shared(sums + Uint32(lane) * Uint32(4)))
    words = packed.load_shared_v2(base + Uint32(shared.found[0]))
    tiles, _half = tiles_and_half(Int32(words[1]), k)
    return Int32(words[0]), scan.warp_sum(value), tiles


@cute.jit
def longest_row(lens: Int64, request: Int32, next_n: Int32, limit: Int32) -> Int32:
    """Largest usable length of a request's rows."""
    longest = Int32(0)
    for index in cutlass.range(next_n, unroll=1):
        one = usable_length(ptx.load(lens + Int64(request * next_n + index) * Int64(4), Int32, "relaxed"), limit)
        if one > longest:
            longest = one
    return longest


@cute.jit
def pitched_row(
    base: Uint32,
    lens: Int64,
    lens_stride: Int64,
    row: Int32,
    limit: Int32,
    pitch: Int64,
    thread: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> Any:
    """(usable length, byte offset of the row's first logit, flags to raise) for rows `pitch` elements apart. The
    cleared histograms are visible after the next block barrier."""
    length = ptx.load(lens + Int64(row) * lens_stride * Int64(4), Int32)
    clear(base, thread, config)
    fault = Uint32(length > limit) << Uint32(FLAG_BAD_LENGTH)
    return usable_length(length, limit), Int64(row) * pitch * Int64(2), fault


# ---------------------------------------------------------------------------------------------- outputs


@cute.jit
def table_address(where: Any) -> Int64:
    """Address of the row's block table, 0 for none."""
    table, table_stride, row_request, next_n, _page_log2, _block_rows, row = where
    address = table
    if table != Int64(0):
        request = request_of(row, next_n)
        if row_request != Int64(0):
            request = ptx.load(row_request + Int64(row) * Int64(4), Int32)
        address = table_entry(table, request, table_stride, Int32(0))
    return address


@cute.jit
def fetch_table(
    base: Uint32,
    where: Any,
    head: Int32,
    end: Int32,
    first: Int32,
    count: Int32,
    thread: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> Any:
    """Start copying the table entries of the groups [first, first + count) to shared memory, where they fit.

    Returns (the table row to look up in global memory, 0 for none; the first block copied, -1 for none)."""
    page_log2 = where[4]
    address = table_address(where)
    first_block = Int32(-1)
    if address != Int64(0):
        low = first * Int32(8) - head
        if low < Int32(0):
            low = Int32(0)
        high = (first + count) * Int32(8)
        if high > end:
            high = end
        high = high - head - Int32(1)
        blocks = (high >> page_log2) - (low >> page_log2) + Int32(1)
        if blocks <= Int32(config.table_words):
            first_block = low >> page_log2
            for index in cutlass.range(thread, blocks, config.threads, unroll=1):
                packed.copy_async_word(
                    base + Uint32(SharedMap.of(config).table) + Uint32(index) * Uint32(4),
                    address + Int64(first_block + index) * Int64(4),
                )
            address = Int64(0)
    return address, first_block


@dsl_user_op
def store_kept(addr: Int64, value: Int32, policy: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """A 32-bit word to global memory under an L2 policy."""
    ptx.asm("st.global.L2::cache_hint.b32 [$0], $1, $2;", "l,r,l", (), (addr, value, policy), loc=loc, ip=ip)


@cute.jit
def output_policy(k: Int32, config: cutlass.Constexpr[SelectConfig]) -> Int64:
    """L2's policy for the physical rows behind a scorer: asked to stay where all of them fit beside the results that it
    asks to stay. The next kernel reads them, and the next step writes there: were they written to memory in between,
    that would come between the keys."""
    blocks, _, _ = cute.arch.grid_dim()
    fits = blocks * k <= Int32(KEPT_WORDS * config.cluster)
    return cutlass.select_(fits, ptx.l2_policy("evict_last"), ptx.l2_policy("evict_normal"))


@cute.jit
def write_one(
    base: Uint32,
    slot: Int32,
    position: Int32,
    table_row: Int64,
    first_block: Int32,
    where: Any,
    target: Any,
    policy: Int64,
    config: cutlass.Constexpr[SelectConfig],
) -> None:
    """One output slot; position -1 writes -1. The table is looked up in shared memory if `first_block` >= 0."""
    page_log2, block_rows, row = where[4], where[5], where[6]
    out, out_stride, positions, positions_stride = target
    physical = position
    if first_block >= Int32(0):
        place = base + Uint32(SharedMap.of(config).table) + Uint32((position >> page_log2) - first_block) * Uint32(4)
        physical = physical_row(Int32(ptx.load_shared(place)), position, page_log2, block_rows)
    if table_row != Int64(0) and position >= Int32(0):
        entry = ptx.load(table_row + Int64(position >> page_log2) * Int64(4), Int32)
        physical = physical_row(entry, position, page_log2, block_rows)
    place_out = out + (Int64(row) * out_stride + Int64(slot)) * Int64(4)
    if cutlass.const_expr(config.maxima):
        store_kept(place_out, physical, policy)
    else:
        ptx.store(place_out, physical)
    if positions != Int64(0):
        ptx.store(positions + (Int64(row) * positions_stride + Int64(slot)) * Int64(4), position)


@cute.jit
def write_all(
    base: Uint32,
    length: Int32,
    k: Int32,
    where: Any,
    target: Any,
    thread: Int32,
    config: cutlass.Constexpr[SelectConfig],
) -> None:
    """A short row: every key, then -1."""
    table_row = table_address(where)
    policy = output_policy(k, config)
    for slot in cutlass.range(thread, k, config.threads, unroll=4):
        position = slot
        if slot >= length:
            position = Int32(-1)
        write_one(base, slot, position, table_row, Int32(-1), where, target, policy, config)
