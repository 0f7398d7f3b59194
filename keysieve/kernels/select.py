"""Exact top-k of every row: from logits (and their per-8 maxima) to physical rows in ascending position.

One block per row, or a cluster of `config.cluster` blocks. The passes are those of `keysieve/models/select.py`:

* a row of at most K keys takes all of them: no logit is read;
* a row whose part fits the block's registers is selected from directly: histogram of the upper 11 bits, histogram of the
  lower 5 bits in the threshold bin, masks, block scan;
* a longer row first selects, by the same steps, the K best of its groups of 8 keys by their maxima, then among the keys
  of exactly those K groups, which hold all winners. No list can overflow, so there is no second path for rows of many
  equal keys: a plateau costs what any row costs.

Indices are counted from the 16-byte boundary at or below the row's first element ("virtual"): a row that begins in the
middle of a 16-byte vector has `head` < 8 virtual keys that do not exist. The kernel waits for its grid dependency before
its first global read. Nothing global is written but the outputs and the flag word.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from keysieve.device import exchange_cluster, packed, ptx, scan
from keysieve.device.paged import physical_row, table_entry
from keysieve.kernels import select_foreign as foreign
from keysieve.kernels import select_stages as stages
from keysieve.kernels import select_steps as steps
from keysieve.kernels.schedule import FLAG_BAD_LENGTH, FLAG_OVERFLOW, tiles_and_half, usable_length
from keysieve.kernels.select_config import ALIGNMENT, TABLE_WORDS, SelectConfig, SharedMap

MAX_NEXT_N = 8


class Select:
    """The kernel for one configuration; `__call__` is the host entry that is compiled."""

    def __init__(self, config: SelectConfig) -> None:
        self.config = config
        self.map = SharedMap.of(config)

    # ------------------------------------------------------------------------------------------------ entry

    @cute.jit
    def __call__(
        self,
        logits: Int64,
        tops: Int64,
        pitch: Int64,
        capacity: Int64,
        starts: Int64,
        lens: Int64,
        lens_stride: Int64,
        rows: Int32,
        next_n: Int32,
        k: Int32,
        limit: Int32,
        table: Int64,
        table_stride: Int64,
        row_request: Int64,
        page_log2: Int32,
        block_rows: Int32,
        out: Int64,
        out_stride: Int64,
        counts: Int64,
        positions: Int64,
        positions_stride: Int64,
        flags: Int64,
        release: Int32,
        overlap: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch. Addresses are byte addresses (0: absent), strides and pitch are in elements.

        select: logits and tops (BF16, uint16) in the compact layout of `capacity` elements. topk: rows of logits `pitch`
        elements apart; tops is a workspace of `capacity` bytes a row, needed by parts beyond 262,144 keys only.
        starts: int32, tiles before each request (`select`; 0: they are counted here). lens: int32 per row. limit: lengths above it make a row empty and raise a flag. table: int32 `[requests, blocks]`
        or 0 (rows are positions); row_request: int32 per row, the table row to use, or 0 (row // next_n). out,
        positions: int32 `[rows, k]`; counts: int32 `[rows]`; flags: u32 word. release: 1 lets the next kernel of a
        programmatic chain start early. overlap: 1 launches this one so that it may start early itself.
        """
        self.kernel(
            logits, tops, pitch, capacity, starts, lens, lens_stride, next_n, k, limit, table, table_stride, row_request,
            page_log2, block_rows, out, out_stride, counts, positions, positions_stride, flags, release,
        ).launch(
            grid=(rows * Int32(self.config.cluster), 1, 1),
            block=(self.config.threads, 1, 1),
            cluster=None if self.config.cluster == 1 else (self.config.cluster, 1, 1),
            smem=self.config.shared_bytes,
            stream=stream,
            use_pdl=overlap,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ kernel

    @cute.kernel
    def kernel(
        self,
        logits: Int64,
        tops: Int64,
        pitch: Int64,
        capacity: Int64,
        starts: Int64,
        lens: Int64,
        lens_stride: Int64,
        next_n: Int32,
        k: Int32,
        limit: Int32,
        table: Int64,
        table_stride: Int64,
        row_request: Int64,
        page_log2: Int32,
        block_rows: Int32,
        out: Int64,
        out_stride: Int64,
        counts: Int64,
        positions: Int64,
        positions_stride: Int64,
        flags: Int64,
        release: Int32,
    ) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        base = ptx.smem_addr(SmemAllocator().allocate_array(Uint32, config.shared_bytes // 4, byte_alignment=128))
        base = (base + Uint32(ALIGNMENT - 1)) & Uint32(0x100000000 - ALIGNMENT)  # the same in all blocks of a cluster
        steps.mark(base, thread, 0, config)
        row = block // Int32(config.cluster)
        rank = block - row * Int32(config.cluster)
        if cutlass.const_expr(config.cluster > 1):
            self.open_exchange(base, thread)
        ptx.grid_wait()
        fault = Uint32(0)
        if cutlass.const_expr(config.maxima):
            length, start, fault = self.compact_row(base, starts, lens, row, next_n, k, limit, capacity, thread)
            tops_row = tops + (start >> Int64(3))
        else:
            length, start, fault = self.pitched_row(base, lens, lens_stride, row, limit, pitch, thread)
            tops_row = tops + Int64(row) * capacity
        if release != Int32(0):
            ptx.grid_launch_dependents()
        steps.mark(base, thread, 1, config)
        where = (table, table_stride, row_request, next_n, page_log2, block_rows, row)
        target = (out, out_stride, positions, positions_stride)
        if length <= k:
            if rank == Int32(0):
                self.write_all(base, length, k, where, target, thread)
        else:
            self.select_row(base, logits + start, tops_row, length, k, where, target, thread, rank)
        if thread + rank == Int32(0):
            taken = k
            if length < k:
                taken = length
            ptx.store(counts + Int64(row) * Int64(4), taken)
            if fault != Uint32(0) and flags != Int64(0):
                ptx.red_global(flags, fault, "or", "relaxed", "gpu")
        steps.dump_marks(base, flags, block, thread, config)

    @cute.jit
    def open_exchange(self, base: Uint32, thread: Int32) -> None:
        """Arm the mbarriers of what the blocks of the cluster will send to this one, and tell them that it runs."""
        cluster = self.config.cluster
        if thread == Int32(0):
            for stage in cutlass.range_constexpr(2):
                arrival = base + Uint32(self.map.arrivals + 16 * stage)
                exchange_cluster.arm(arrival, cluster * 128)
                exchange_cluster.arm(arrival + Uint32(8), cluster * 132)
            exchange_cluster.publish()
        cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def clear(self, base: Uint32, thread: Int32) -> None:
        """Zero the histograms; a block barrier must follow. Called while the first loads are on their way."""
        for index in cutlass.range_constexpr(-(-self.map.cleared // 16 // self.config.threads)):
            place = thread + Int32(index * self.config.threads)
            if place < Int32(self.map.cleared // 16):
                ptx.store_shared_v4(base + Uint32(place) * Uint32(16), Uint32(0), Uint32(0), Uint32(0), Uint32(0))

    @cute.jit
    def request_of(self, row: Int32, next_n: Int32) -> Int32:
        """row // next_n; a division is worth avoiding."""
        request = row
        if next_n > Int32(1):
            request = row // next_n
        return request

    # ------------------------------------------------------------------------------------------------ row geometry

    @cute.jit
    def compact_row(
        self,
        base: Uint32,
        starts: Int64,
        lens: Int64,
        row: Int32,
        next_n: Int32,
        k: Int32,
        limit: Int32,
        capacity: Int64,
        thread: Int32,
    ) -> Any:
        """(usable length, byte offset of the row's first logit, flags to raise) in the compact layout. A request that
        does not fit the buffer whole has empty rows. The block barrier makes the cleared histograms visible."""
        request = self.request_of(row, next_n)
        length = ptx.load(lens + Int64(row) * Int64(4), Int32)
        before = Int32(0)
        tiles = Int32(0)
        if starts != Int64(0):
            before = ptx.load(starts + Int64(request) * Int64(4), Int32)
            after = ptx.load(starts + Int64(request) * Int64(4) + Int64(4), Int32)
            self.clear(base, thread)
            tiles = after - before
            cute.arch.sync_threads()
        else:
            before, tiles = self.count_tiles(base, lens, length, request, next_n, k, limit, thread)
        tile = Int64(before) * Int64(next_n) + Int64(row - request * next_n) * Int64(tiles)
        usable = usable_length(length, limit)
        fault = Uint32(length > limit) << Uint32(FLAG_BAD_LENGTH)
        if tiles > Int32(0) and Int64(before + tiles) * Int64(128 * next_n) > capacity:
            usable = Int32(0)
            fault = fault | Uint32(1 << FLAG_OVERFLOW)
        return usable, tile * Int64(256), fault

    @cute.jit
    def count_tiles(
        self,
        base: Uint32,
        lens: Int64,
        length: Int32,
        request: Int32,
        next_n: Int32,
        k: Int32,
        limit: Int32,
        thread: Int32,
    ) -> Any:
        """(tiles of all earlier requests, tiles of this one), summed over the block. One block barrier."""
        config = self.config
        self.clear(base, thread)
        mine = Int32(0)
        for other in cutlass.range(thread, request, config.threads, unroll=1):
            its, _half = tiles_and_half(self.longest_row(lens, other, next_n, limit), k)
            mine = mine + its
        longest = usable_length(length, limit)
        if next_n > Int32(1):
            longest = self.longest_row(lens, request, next_n, limit)
        partial = scan.warp_sum(mine)
        lane = thread & Int32(31)
        sums = base + Uint32(self.map.tiles)
        if lane == Int32(0):
            ptx.store_shared(sums + Uint32(thread >> Int32(5)) * Uint32(4), Uint32(partial))
        cute.arch.sync_threads()
        value = Int32(0)
        if lane < Int32(config.warps):
            value = Int32(ptx.load_shared(sums + Uint32(lane) * Uint32(4)))
        tiles, _half = tiles_and_half(longest, k)
        return scan.warp_sum(value), tiles

    @cute.jit
    def longest_row(self, lens: Int64, request: Int32, next_n: Int32, limit: Int32) -> Int32:
        """Largest usable length of a request's rows."""
        longest = Int32(0)
        for index in cutlass.range(next_n, unroll=1):
            one = usable_length(ptx.load(lens + Int64(request * next_n + index) * Int64(4), Int32), limit)
            if one > longest:
                longest = one
        return longest

    @cute.jit
    def pitched_row(
        self,
        base: Uint32,
        lens: Int64,
        lens_stride: Int64,
        row: Int32,
        limit: Int32,
        pitch: Int64,
        thread: Int32,
    ) -> Any:
        """(usable length, byte offset of the row's first logit, flags to raise) for rows `pitch` elements apart. The
        cleared histograms are visible after the next block barrier."""
        length = ptx.load(lens + Int64(row) * lens_stride * Int64(4), Int32)
        self.clear(base, thread)
        fault = Uint32(length > limit) << Uint32(FLAG_BAD_LENGTH)
        return usable_length(length, limit), Int64(row) * pitch * Int64(2), fault

    # ------------------------------------------------------------------------------------------------ outputs

    @cute.jit
    def table_row(self, where: Any) -> Int64:
        """Address of the row's block table, 0 for none."""
        table, table_stride, row_request, next_n, _page_log2, _block_rows, row = where
        address = table
        if table != Int64(0):
            request = self.request_of(row, next_n)
            if row_request != Int64(0):
                request = ptx.load(row_request + Int64(row) * Int64(4), Int32)
            address = table_entry(table, request, table_stride, Int32(0))
        return address

    @cute.jit
    def fetch_table(
        self, base: Uint32, where: Any, head: Int32, end: Int32, first: Int32, count: Int32, thread: Int32
    ) -> Any:
        """Start copying the table entries of the groups [first, first + count) to shared memory, where they fit.

        Returns (the table row to look up in global memory, 0 for none; the first block copied, -1 for none)."""
        page_log2 = where[4]
        address = self.table_row(where)
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
            if blocks <= Int32(TABLE_WORDS):
                first_block = low >> page_log2
                for index in cutlass.range(thread, blocks, self.config.threads, unroll=1):
                    packed.copy_async_word(
                        base + Uint32(self.map.table) + Uint32(index) * Uint32(4),
                        address + Int64(first_block + index) * Int64(4),
                    )
                address = Int64(0)
        return address, first_block

    @cute.jit
    def write_one(
        self,
        base: Uint32,
        slot: Int32,
        position: Int32,
        table_row: Int64,
        first_block: Int32,
        where: Any,
        target: Any,
    ) -> None:
        """One output slot; position -1 writes -1. The table is looked up in shared memory if `first_block` >= 0."""
        page_log2, block_rows, row = where[4], where[5], where[6]
        out, out_stride, positions, positions_stride = target
        physical = position
        if first_block >= Int32(0):
            place = base + Uint32(self.map.table) + Uint32((position >> page_log2) - first_block) * Uint32(4)
            physical = physical_row(Int32(ptx.load_shared(place)), position, page_log2, block_rows)
        if table_row != Int64(0) and position >= Int32(0):
            entry = ptx.load(table_row + Int64(position >> page_log2) * Int64(4), Int32)
            physical = physical_row(entry, position, page_log2, block_rows)
        ptx.store(out + (Int64(row) * out_stride + Int64(slot)) * Int64(4), physical)
        if positions != Int64(0):
            ptx.store(positions + (Int64(row) * positions_stride + Int64(slot)) * Int64(4), position)

    @cute.jit
    def write_all(self, base: Uint32, length: Int32, k: Int32, where: Any, target: Any, thread: Int32) -> None:
        """A short row: every key, then -1."""
        table_row = self.table_row(where)
        for slot in cutlass.range(thread, k, self.config.threads, unroll=4):
            position = slot
            if slot >= length:
                position = Int32(-1)
            self.write_one(base, slot, position, table_row, Int32(-1), where, target)

    # ------------------------------------------------------------------------------------------------ long rows

    @cute.jit
    def select_row(
        self,
        base: Uint32,
        address: Int64,
        tops: Int64,
        length: Int32,
        k: Int32,
        where: Any,
        target: Any,
        thread: Int32,
        rank: Int32,
    ) -> None:
        """A row of more than K keys, on `active` blocks: all of the cluster's, or the first one alone."""
        config = self.config
        head = Int32(0)
        if cutlass.const_expr(not config.maxima):
            head = (Int32(address) & Int32(15)) >> Int32(1)
            address = address - Int64(head) * Int64(2)
        end = head + length
        groups = (end + Int32(7)) >> Int32(3)
        active = Int32(config.cluster)
        if groups <= Int32(config.solo_groups):
            active = Int32(1)
        if rank < active:
            if cutlass.const_expr(config.cluster > 1):
                if active > Int32(1):
                    cute.arch.cluster_wait()  # every block of the cluster runs: its shared memory may be written
            part = (groups + active - Int32(1)) // active
            two_level = part > Int32(config.held_groups)
            if two_level:
                part = ((part + Int32(7)) >> Int32(3)) << Int32(3)  # whole vectors of maxima
            first = rank * part
            count = stages.share(groups, first, part)
            span = count
            edge = Uint32(0)
            if cutlass.const_expr(not config.maxima):
                edge = foreign.load_edge(address, head, end, groups, thread)
            if two_level:
                count = stages.find_groups(
                    base, address, tops, edge, head, end, groups, k, thread, rank, active, config
                )
            loading, words = stages.issue_keys(base, address, head, end, two_level, first, count, thread, config)
            table_row, first_block = self.fetch_table(base, where, head, end, first, span, thread)
            words = stages.settle_keys(base, edge, head, end, two_level, loading, words, count, thread, config)
            found, slot = stages.find_keys(base, words, count, k, thread, rank, active, config)
            picks = base + Uint32(self.map.picks)
            for index in cutlass.range(thread, found, config.threads, unroll=2):
                unit = Int32(ptx.load_shared(picks + Uint32(index) * Uint32(4)))
                group = first + (unit >> Int32(3))
                if two_level:
                    group = Int32(
                        ptx.load_shared(base + Uint32(self.map.groups) + Uint32(unit >> Int32(3)) * Uint32(4))
                    )
                position = group * Int32(8) + (unit & Int32(7)) - head
                self.write_one(base, slot + index, position, table_row, first_block, where, target)
            steps.mark(base, thread, 11, config)


def _build(config: SelectConfig) -> tuple[Any, tuple[Any, ...]]:
    i64, i32 = Int64(0), Int32(1)
    args = (
        i64, i64, i64, i64, i64, i64, i64, i32, i32, i32, i32, i64, i64, i64, i32, i32, i64, i64, i64, i64, i64, i64, i32,
        i32, make_fake_stream(),
    )  # fmt: skip
    return Select(config).__call__, args


def build_select(config: SelectConfig, arch: str) -> tuple[Any, tuple[Any, ...]]:
    """Jit function and fake arguments of `select` (maxima given)."""
    assert config.maxima, arch
    return _build(config)


def build_topk(config: SelectConfig, arch: str) -> tuple[Any, tuple[Any, ...]]:
    """Jit function and fake arguments of `topk` (maxima computed)."""
    assert not config.maxima, arch
    return _build(config)
