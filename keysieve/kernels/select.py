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

from keysieve.device import packed, ptx, scan
from keysieve.device.paged import physical_row, table_entry
from keysieve.kernels import select_steps as steps
from keysieve.kernels.schedule import FLAG_BAD_LENGTH, FLAG_OVERFLOW, longest_row, tiles_and_half, usable_length
from keysieve.kernels.select_config import SelectConfig, SharedMap

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

        logits, tops: BF16 and uint16, compact layout (`pitch` 0, `capacity` elements), or rows `pitch` apart (`topk`).
        lens: int32 per row. limit: lengths above it make a row empty and raise a flag. table: int32 `[requests, blocks]`
        or 0 (rows are positions); row_request: int32 per row, the table row to use, or 0 (row // next_n). out,
        positions: int32 `[rows, k]`; counts: int32 `[rows]`; flags: u32 word. release: 1 lets the next kernel of a
        programmatic chain start early. overlap: 1 launches this one so that it may start early itself.
        """
        self.kernel(
            logits, tops, pitch, capacity, lens, lens_stride, next_n, k, limit, table, table_stride, row_request,
            page_log2, block_rows, out, out_stride, counts, positions, positions_stride, flags, release,
        ).launch(
            grid=(rows * Int32(self.config.cluster), 1, 1),
            block=(self.config.threads, 1, 1),
            cluster=None if self.config.cluster == 1 else (self.config.cluster, 1, 1),
            smem=self.map.total,
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
        base = ptx.smem_addr(SmemAllocator().allocate_array(Uint32, self.map.total // 4, byte_alignment=128))
        self._trace = flags
        self.mark(thread, 0)
        row = block // Int32(config.cluster)
        rank = block - row * Int32(config.cluster)
        for index in cutlass.range(thread, self.map.cleared // 16, config.threads, unroll=1):
            ptx.store_shared_v4(base + Uint32(index) * Uint32(16), Uint32(0), Uint32(0), Uint32(0), Uint32(0))
        if cutlass.const_expr(config.cluster > 1):
            cute.arch.cluster_arrive()
        ptx.grid_wait()
        if release != Int32(0):
            ptx.grid_launch_dependents()
        if cutlass.const_expr(config.maxima):
            length, start = self.compact_row(base, lens, row, next_n, k, limit, capacity, flags, thread, rank)
        else:
            length, start = self.pitched_row(lens, lens_stride, row, limit, pitch, flags, thread, rank)
        self.mark(thread, 1)
        request = row // next_n
        if row_request != Int64(0):
            request = ptx.load(row_request + Int64(row) * Int64(4), Int32)
        table_row = table
        if table != Int64(0):
            table_row = table_entry(table, request, table_stride, Int32(0))
        out_row = out + Int64(row) * out_stride * Int64(4)
        positions_row = positions
        if positions != Int64(0):
            positions_row = positions + Int64(row) * positions_stride * Int64(4)
        if thread == Int32(0):
            if rank == Int32(0):
                taken = k
                if length < k:
                    taken = length
                ptx.store(counts + Int64(row) * Int64(4), taken)
        if length <= k:
            if rank == Int32(0):
                self.write_all(length, k, table_row, page_log2, block_rows, out_row, positions_row, thread)
        else:
            self.select_row(
                base, logits, tops, start, length, k, table_row, page_log2, block_rows, out_row, positions_row,
                thread, rank,
            )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ row geometry

    @cute.jit
    def compact_row(
        self,
        base: Uint32,
        lens: Int64,
        row: Int32,
        next_n: Int32,
        k: Int32,
        limit: Int32,
        capacity: Int64,
        flags: Int64,
        thread: Int32,
        rank: Int32,
    ) -> Any:
        """(usable length, byte offset of the row's first logit) in the compact layout: tiles of earlier requests are
        summed over the block. A request that does not fit the buffer whole has empty rows and raises a flag."""
        config = self.config
        request = row // next_n
        length = ptx.load(lens + Int64(row) * Int64(4), Int32)
        longest = Int32(0)
        mine = Int32(0)
        for index in cutlass.range(next_n, unroll=1):
            one = usable_length(ptx.load(lens + Int64(request * next_n + index) * Int64(4), Int32), limit)
            if one > longest:
                longest = one
        for other in cutlass.range(thread, request, config.threads, unroll=1):
            most = Int32(0)
            for index in cutlass.range(next_n, unroll=1):
                one = usable_length(ptx.load(lens + Int64(other * next_n + index) * Int64(4), Int32), limit)
                if one > most:
                    most = one
            tiles, _half = tiles_and_half(most, k)
            mine = mine + tiles
        partial = scan.warp_sum(mine)
        lane = thread & Int32(31)
        if lane == Int32(0):
            ptx.store_shared(base + Uint32(self.map.tiles) + Uint32(thread >> Int32(5)) * Uint32(4), Uint32(partial))
        cute.arch.sync_threads()
        value = Int32(0)
        if lane < Int32(config.warps):
            value = Int32(ptx.load_shared(base + Uint32(self.map.tiles) + Uint32(lane) * Uint32(4)))
        before = Int64(Uint32(scan.warp_sum(value)))
        tiles, _half = tiles_and_half(longest, k)
        element = (before * Int64(next_n) + Int64(row - request * next_n) * Int64(tiles)) * Int64(128)
        end = (before + Int64(tiles)) * Int64(next_n) * Int64(128)
        usable = usable_length(length, limit)
        self.complain(length > limit, FLAG_BAD_LENGTH, flags, thread, rank)
        if end > capacity:
            if tiles > Int32(0):
                usable = Int32(0)
                self.complain(end > capacity, FLAG_OVERFLOW, flags, thread, rank)
        return usable, element * Int64(2)

    @cute.jit
    def pitched_row(
        self,
        lens: Int64,
        lens_stride: Int64,
        row: Int32,
        limit: Int32,
        pitch: Int64,
        flags: Int64,
        thread: Int32,
        rank: Int32,
    ) -> Any:
        """(usable length, byte offset of the row's first logit) for rows `pitch` elements apart."""
        length = ptx.load(lens + Int64(row) * lens_stride * Int64(4), Int32)
        self.complain(length > limit, FLAG_BAD_LENGTH, flags, thread, rank)
        cute.arch.sync_threads()  # the cleared histograms
        return usable_length(length, limit), Int64(row) * pitch * Int64(2)

    @cute.jit
    def mark(self, thread: Int32, slot: cutlass.Constexpr[int]) -> None:
        """Trace: the clock at a step, by one thread of the block."""
        if cutlass.const_expr(self.config.trace):
            if thread == Int32(0):
                block, _, _ = cute.arch.block_idx()
                now = ptx.asm("mov.u32 $0, %clock;", "=r", (Int32,), ())[0]
                ptx.store(self._trace + Int64(block * Int32(16) + Int32(slot)) * Int64(4), now)

    @cute.jit
    def complain(self, wrong: Any, bit: cutlass.Constexpr[int], flags: Int64, thread: Int32, rank: Int32) -> None:
        """Raise a device flag once per row."""
        if wrong:
            if thread + rank == Int32(0):
                if flags != Int64(0):
                    ptx.red_global(flags, Uint32(1 << bit), "or", "relaxed", "gpu")

    # ------------------------------------------------------------------------------------------------ outputs

    @cute.jit
    def write_one(
        self,
        slot: Int32,
        position: Int32,
        table_row: Int64,
        page_log2: Int32,
        block_rows: Int32,
        out_row: Int64,
        positions_row: Int64,
    ) -> None:
        """One output slot; position -1 writes -1."""
        physical = position
        if table_row != Int64(0):
            if position >= Int32(0):
                entry = ptx.load(table_row + Int64(position >> page_log2) * Int64(4), Int32)
                physical = physical_row(entry, position, page_log2, block_rows)
        ptx.store(out_row + Int64(slot) * Int64(4), physical)
        if positions_row != Int64(0):
            ptx.store(positions_row + Int64(slot) * Int64(4), position)

    @cute.jit
    def write_all(
        self,
        length: Int32,
        k: Int32,
        table_row: Int64,
        page_log2: Int32,
        block_rows: Int32,
        out_row: Int64,
        positions_row: Int64,
        thread: Int32,
    ) -> None:
        """A short row: every key, then -1."""
        for slot in cutlass.range(thread, k, self.config.threads, unroll=2):
            position = slot
            if slot >= length:
                position = Int32(-1)
            self.write_one(slot, position, table_row, page_log2, block_rows, out_row, positions_row)

    # ------------------------------------------------------------------------------------------------ long rows

    @cute.jit
    def select_row(
        self,
        base: Uint32,
        logits: Int64,
        tops: Int64,
        start: Int64,
        length: Int32,
        k: Int32,
        table_row: Int64,
        page_log2: Int32,
        block_rows: Int32,
        out_row: Int64,
        positions_row: Int64,
        thread: Int32,
        rank: Int32,
    ) -> None:
        """A row of more than K keys, on `active` blocks: all of the cluster's, or the first one alone."""
        config = self.config
        address = logits + start
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
            two_level = part > Int32(config.key_vectors * config.threads)
            first_group = rank * part
            count = self.share(groups, first_group, part)
            words = [Uint32(0) for _ in range(4 * config.key_vectors)]
            if two_level:
                count = self.find_groups(
                    base, address, tops + (start >> Int64(3)), head, end, groups, k, thread, rank, active
                )
                self.mark(thread, 5)
                words = self.load_listed(base, address, head, end, count, thread)
            else:
                words = self.load_direct(address, head, end, first_group, count, thread)
            found, slot = self.find_keys(base, words, count, k, thread, rank, active)
            self.mark(thread, 10)
            picks = base + Uint32(self.map.picks)
            for index in cutlass.range(thread, found, config.threads, unroll=2):
                unit = Int32(ptx.load_shared(picks + Uint32(index) * Uint32(4)))
                group = first_group + (unit >> Int32(3))
                if two_level:
                    group = Int32(ptx.load_shared(base + Uint32(self.map.groups) + Uint32(unit >> Int32(3)) * Uint32(4)))
                position = group * Int32(8) + (unit & Int32(7)) - head
                self.write_one(slot + index, position, table_row, page_log2, block_rows, out_row, positions_row)
            self.mark(thread, 11)

    @cute.jit
    def share(self, total: Int32, first: Int32, part: Int32) -> Int32:
        """Units of a part that begins at `first`."""
        count = total - first
        if count > part:
            count = part
        if count < Int32(0):
            count = Int32(0)
        return count

    @cute.jit
    def index_of(self, round_: Any, rounds: Int32, thread: Int32) -> Int32:
        """Index in the part of the vector that this thread holds in round `round_`."""
        return (thread >> Int32(5)) * rounds * Int32(32) + Int32(round_) * Int32(32) + (thread & Int32(31))

    @cute.jit
    def load_group(self, address: Int64, group: Int32, head: Int32, end: Int32) -> Any:
        """key16 of the eight keys of a group, 0 outside of the row."""
        first = group * Int32(8)
        place = address + Int64(group) * Int64(16)
        words = [Uint32(0) for _ in range(4)]
        whole = first >= head and first + Int32(8) <= end
        if cutlass.const_expr(self.config.maxima):
            loaded = ptx.load_v4(place)
            for index in cutlass.range_constexpr(4):
                words[index] = packed.key16x2_fast(loaded[index])
        else:
            if whole:
                loaded = ptx.load_v4(place)
                for index in cutlass.range_constexpr(4):
                    words[index] = loaded[index]
            else:
                words = self.load_edge(place, first, head, end)
            words = packed.foreign_key16x8(words)
        if not whole:
            for index in cutlass.range_constexpr(4):
                words[index] = words[index] & packed.inside_mask(first + Int32(2 * index), head, end)
        return words

    @cute.jit
    def load_edge(self, place: Int64, first: Int32, head: Int32, end: Int32) -> Any:
        """Raw words of a group that is not wholly inside the row: nothing outside of the row is read."""
        words = [Uint32(0) for _ in range(4)]
        for index in cutlass.range_constexpr(8):
            if first + Int32(index) >= head:
                if first + Int32(index) < end:
                    half = ptx.load_u16(place + Int64(2 * index))
                    words[index // 2] = words[index // 2] | (half << Uint32(16 * (index % 2)))
        return words

    @cute.jit
    def load_direct(self, address: Int64, head: Int32, end: Int32, first: Int32, count: Int32, thread: Int32) -> Any:
        """This thread's vectors of the part [first, first + count) of the row's groups."""
        config = self.config
        rounds = (count + Int32(config.threads - 1)) // Int32(config.threads)
        words = [Uint32(0) for _ in range(4 * config.key_vectors)]
        for step in cutlass.range_constexpr(config.key_vectors):
            index = self.index_of(step, rounds, thread)
            if Int32(step) < rounds:
                if index < count:
                    loaded = self.load_group(address, first + index, head, end)
                    for part in cutlass.range_constexpr(4):
                        words[4 * step + part] = loaded[part]
        return words

    @cute.jit
    def load_listed(self, base: Uint32, address: Int64, head: Int32, end: Int32, count: Int32, thread: Int32) -> Any:
        """This thread's vectors of the groups that were found (shared list `groups`, `count` entries)."""
        config = self.config
        rounds = (count + Int32(config.threads - 1)) // Int32(config.threads)
        words = [Uint32(0) for _ in range(4 * config.key_vectors)]
        for step in cutlass.range_constexpr(config.key_vectors):
            index = self.index_of(step, rounds, thread)
            if Int32(step) < rounds:
                if index < count:
                    group = Int32(ptx.load_shared(base + Uint32(self.map.groups) + Uint32(index) * Uint32(4)))
                    loaded = self.load_group(address, group, head, end)
                    for part in cutlass.range_constexpr(4):
                        words[4 * step + part] = loaded[part]
        return words

    @cute.jit
    def find_keys(
        self, base: Uint32, words: Any, count: Int32, k: Int32, thread: Int32, rank: Int32, active: Int32
    ) -> Any:
        """Stage 1 over `count` vectors held in registers. Leaves the winners' indices (8 * vector + key) of this block
        in the shared list `picks`; returns (their number, the output slot of the first)."""
        config = self.config
        rounds = (count + Int32(config.threads - 1)) // Int32(config.threads)
        lane = thread & Int32(31)
        first = self.index_of(0, rounds, thread)
        for step in cutlass.range_constexpr(config.key_vectors):
            if Int32(step) < rounds:
                if first + Int32(32 * step) < count:
                    steps.count_high(base + Uint32(self.map.high[1]), words[4 * step : 4 * step + 4])
        self.mark(thread, 7)
        digit, above, my_above = steps.find_high(base, k, thread, rank, active, config, 1)
        self.mark(thread, 8)
        for step in cutlass.range_constexpr(config.key_vectors):
            steps.count_low(base + Uint32(self.map.low[1]), words[4 * step : 4 * step + 4], digit)
        low, need, slot = steps.find_low(base, k, above, my_above, thread, rank, active, config, 1)
        self.mark(thread, 9)
        threshold = (digit << Uint32(5)) | low
        greater = [Uint32(0) for _ in range(config.key_vectors)]
        equal = [Uint32(0) for _ in range(config.key_vectors)]
        for step in cutlass.range_constexpr(config.key_vectors):
            greater[step], equal[step] = packed.masks_x8(words[4 * step : 4 * step + 4], threshold)
        scratch = base + Uint32(self.map.scratch) + Uint32(thread >> Int32(5)) * Uint32(512)
        g, e, unit = self.in_order(scratch, greater, equal, first, rounds, lane, config.key_vectors)
        g_before, e_before, _g, _e, g_warp, e_warp = self.lane_offsets(g, e, lane)
        g_base, e_base, g_all, e_all = steps.warp_offsets(
            base + Uint32(self.map.sums[1]), g_warp, e_warp, thread, config.warps
        )
        self.emit(base + Uint32(self.map.picks), g_base + g_before, e_base + e_before, unit, g, e, need)
        cute.arch.sync_threads()
        if e_all > need:
            e_all = need
        return g_all + e_all, slot

    @cute.jit
    def in_order(
        self,
        scratch: Uint32,
        greater: Any,
        equal: Any,
        first: Int32,
        rounds: Int32,
        lane: Int32,
        vectors: cutlass.Constexpr[int],
    ) -> Any:
        """(greater, equal, index of bit 0): per lane a run of neighbouring keys, lanes in index order."""
        g = greater[0]
        e = equal[0]
        unit = first * Int32(8)
        if cutlass.const_expr(vectors > 1):
            if rounds > Int32(1):
                g, e = steps.spread_masks(scratch, greater, equal, lane, vectors)
                unit = (first - lane + lane * Int32(vectors)) * Int32(8)
        return g, e, unit

    @cute.jit
    def lane_offsets(self, greater: Uint32, equal: Uint32, lane: Int32) -> Any:
        """(greater in lower lanes, equal in lower lanes, own greater, own equal, greater in the warp, equal in it)."""
        g = Int32(cute.arch.popc(greater))
        e = Int32(cute.arch.popc(equal))
        upto = scan.warp_inclusive(g | (e << Int32(16)), lane)
        before = upto - (g | (e << Int32(16)))
        total = Int32(cute.arch.shuffle_sync(upto, Int32(31)))
        low = Int32(0xFFFF)
        return before & low, before >> Int32(16), g, e, total & low, total >> Int32(16)

    @cute.jit
    def emit(
        self, out: Uint32, greater_before: Int32, equal_before: Int32, unit: Int32, greater: Uint32, equal: Uint32,
        need: Int32,
    ) -> None:  # fmt: skip
        """List this lane's winners: all of `greater`, and of `equal` while fewer than `need` were listed before."""
        taken = equal_before
        if taken > need:
            taken = need
        steps.emit(out, greater_before + taken, unit, greater, equal, need - taken)

    # ------------------------------------------------------------------------------------------------ groups

    @cute.jit
    def load_tops(
        self,
        scratch: Uint32,
        address: Int64,
        tops_row: Int64,
        head: Int32,
        end: Int32,
        groups: Int32,
        first_vector: Int32,
        round_: Any,
        rounds: Int32,
        count: Int32,
        thread: Int32,
    ) -> Any:
        """The maxima of the eight groups of this thread's vector of round `round_`, 0 past the row. Whole warps."""
        index = self.index_of(round_, rounds, thread)
        lane = thread & Int32(31)
        words = [Uint32(0) for _ in range(4)]
        if cutlass.const_expr(self.config.maxima):
            if index < count:
                vector = first_vector + index
                loaded = ptx.load_v4(tops_row + Int64(vector) * Int64(16))
                for part in cutlass.range_constexpr(4):
                    words[part] = loaded[part]
                if vector * Int32(8) + Int32(8) > groups:
                    for part in cutlass.range_constexpr(4):
                        inside = packed.inside_mask(vector * Int32(8) + Int32(2 * part), Int32(0), groups)
                        words[part] = words[part] & inside
        else:
            # Lane l reads groups l, l + 32, ... of the warp's 256 (coalesced), then the maxima change places.
            stop = (first_vector + count) * Int32(8)
            if stop > groups:
                stop = groups
            group = (first_vector + index - lane) * Int32(8) + lane
            raw = [[Uint32(0x7FFF7FFF) for _ in range(4)] for _ in range(8)]
            for part in cutlass.range_constexpr(8):
                one = group + Int32(32 * part)
                if one * Int32(8) >= head:
                    if one < stop:
                        if one * Int32(8) + Int32(8) <= end:
                            loaded = ptx.load_v4(address + Int64(one) * Int64(16))
                            for word in cutlass.range_constexpr(4):
                                raw[part][word] = loaded[word]
            for part in cutlass.range_constexpr(8):
                one = group + Int32(32 * part)
                top = Uint32(0)
                if one < stop:
                    edge = one * Int32(8) < head or one * Int32(8) + Int32(8) > end
                    if edge:
                        loaded = self.load_edge(address + Int64(one) * Int64(16), one * Int32(8), head, end)
                        for word in cutlass.range_constexpr(4):
                            mask = packed.inside_mask(one * Int32(8) + Int32(2 * word), head, end)
                            raw[part][word] = loaded[word] | ((mask ^ Uint32(steps.ALL_ONES)) & Uint32(0x7FFF7FFF))
                    top = packed.foreign_top(raw[part])
                ptx.store_shared_u16(scratch + Uint32(lane) * Uint32(2) + Uint32(64 * part), top)
            cute.arch.sync_warp()
            loaded = ptx.load_shared_v4(scratch + Uint32(lane) * Uint32(16))
            for part in cutlass.range_constexpr(4):
                words[part] = loaded[part]
            cute.arch.sync_warp()
        return words

    @cute.jit
    def find_groups(
        self,
        base: Uint32,
        address: Int64,
        tops_row: Int64,
        head: Int32,
        end: Int32,
        groups: Int32,
        k: Int32,
        thread: Int32,
        rank: Int32,
        active: Int32,
    ) -> Int32:
        """Stage 0: the K best of the row's groups. Leaves this block's in the shared list `groups`; returns their
        number. Maxima beyond the registers are read again in every pass."""
        config = self.config
        held = config.top_vectors
        lane = thread & Int32(31)
        scratch = base + Uint32(self.map.scratch) + Uint32(thread >> Int32(5)) * Uint32(512)
        high = base + Uint32(self.map.high[0])
        low_bins = base + Uint32(self.map.low[0])
        part = (((groups + Int32(7)) >> Int32(3)) + active - Int32(1)) // active
        first_vector = rank * part
        count = self.share((groups + Int32(7)) >> Int32(3), first_vector, part)
        rounds = (count + Int32(config.threads - 1)) // Int32(config.threads)
        first = self.index_of(0, rounds, thread)
        words = [Uint32(0) for _ in range(4 * held)]
        for step in cutlass.range_constexpr(held):
            if Int32(step) < rounds:
                loaded = self.load_tops(
                    scratch, address, tops_row, head, end, groups, first_vector, step, rounds, count, thread
                )
                for index in cutlass.range_constexpr(4):
                    words[4 * step + index] = loaded[index]
        for step in cutlass.range_constexpr(held):
            if Int32(step) < rounds:
                if first + Int32(32 * step) < count:
                    steps.count_high(high, words[4 * step : 4 * step + 4])
        for step in cutlass.range(held, rounds, unroll=1):
            more = self.load_tops(
                scratch, address, tops_row, head, end, groups, first_vector, step, rounds, count, thread
            )
            if first + step * Int32(32) < count:
                steps.count_high(high, more)
        self.mark(thread, 2)
        digit, above, my_above = steps.find_high(base, k, thread, rank, active, config, 0)
        self.mark(thread, 3)
        for step in cutlass.range_constexpr(held):
            steps.count_low(low_bins, words[4 * step : 4 * step + 4], digit)
        for step in cutlass.range(held, rounds, unroll=1):
            more = self.load_tops(
                scratch, address, tops_row, head, end, groups, first_vector, step, rounds, count, thread
            )
            steps.count_low(low_bins, more, digit)
        low, need, _slot = steps.find_low(base, k, above, my_above, thread, rank, active, config, 0)
        self.mark(thread, 4)
        threshold = (digit << Uint32(5)) | low
        greater = [Uint32(0) for _ in range(held)]
        equal = [Uint32(0) for _ in range(held)]
        for step in cutlass.range_constexpr(held):
            greater[step], equal[step] = packed.masks_x8(words[4 * step : 4 * step + 4], threshold)
        g, e, unit = self.in_order(scratch, greater, equal, first, rounds, lane, held)
        g_before, e_before, _g, _e, g_held, e_held = self.lane_offsets(g, e, lane)
        g_more = Int32(0)
        e_more = Int32(0)
        for step in cutlass.range(held, rounds, unroll=1):
            more = self.load_tops(
                scratch, address, tops_row, head, end, groups, first_vector, step, rounds, count, thread
            )
            above_mask, equal_mask = packed.masks_x8(more, threshold)
            g_more = g_more + Int32(cute.arch.popc(above_mask))
            e_more = e_more + Int32(cute.arch.popc(equal_mask))
        if rounds > Int32(held):
            g_more = scan.warp_sum(g_more)
            e_more = scan.warp_sum(e_more)
        g_base, e_base, g_all, e_all = steps.warp_offsets(
            base + Uint32(self.map.sums[0]), g_held + g_more, e_held + e_more, thread, config.warps
        )
        listed = base + Uint32(self.map.groups)
        offset = first_vector * Int32(8)
        self.emit(listed, g_base + g_before, e_base + e_before, offset + unit, g, e, need)
        g_base = g_base + g_held
        e_base = e_base + e_held
        for step in cutlass.range(held, rounds, unroll=1):
            more = self.load_tops(
                scratch, address, tops_row, head, end, groups, first_vector, step, rounds, count, thread
            )
            above_mask, equal_mask = packed.masks_x8(more, threshold)
            g_before, e_before, _g, _e, g_warp, e_warp = self.lane_offsets(above_mask, equal_mask, lane)
            unit = (first + step * Int32(32)) * Int32(8)
            self.emit(listed, g_base + g_before, e_base + e_before, offset + unit, above_mask, equal_mask, need)
            g_base = g_base + g_warp
            e_base = e_base + e_warp
        cute.arch.sync_threads()
        if e_all > need:
            e_all = need
        return g_all + e_all


def _build(config: SelectConfig) -> tuple[Any, tuple[Any, ...]]:
    i64, i32 = Int64(0), Int32(1)
    args = (
        i64, i64, i64, i64, i64, i64, i32, i32, i32, i32, i64, i64, i64, i32, i32, i64, i64, i64, i64, i64, i64, i32,
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
