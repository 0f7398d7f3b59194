"""Exact top-k of every row: from logits (and their per-8 maxima) to physical rows in ascending position.

One block per row, or a cluster of `config.cluster` blocks. The passes are those of `keysieve/models/select.py`:

* a row of at most K keys takes all of them: no logit is read;
* a row whose part fits the block's registers is selected from directly: histogram of the upper 11 bits, histogram of
  the lower 5 bits in the threshold bin, masks, block scan; of a shared row, other digits (`select_shared.py`);
* a longer row first selects, by the same steps, the K best of its groups of 8 keys by their maxima, then among the keys
  of exactly those K groups, which hold all winners. No list can overflow, so there is no second path for rows of many
  equal keys: a plateau costs what any row costs.

Indices are counted from the 16-byte boundary at or below the row's first element ("virtual"): a row that begins in the
middle of a 16-byte vector has `head` < 8 virtual keys that do not exist. The kernel waits for its grid dependency
before its first global read, behind a scorer (`scored`) before its first read of anything but the lengths: the scorer
lets it start only after its own wait, so what was complete before the scorer is complete then. Every block waits
before it ends, so that whoever waits for this kernel waits for the one in front as well. Nothing global is written but
the outputs and the flag word, and nothing before the wait.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from keysieve.device import ptx
from keysieve.kernels import select_foreign as foreign
from keysieve.kernels import select_rows as places
from keysieve.kernels import select_shared as split
from keysieve.kernels import select_stages as stages
from keysieve.kernels import select_steps as steps
from keysieve.kernels.select_config import SelectConfig, SharedMap

DROP_ROWS = 35840
"""Tile rows (288 bytes of results each) above which a step's results are dropped from L2: of so many the scorer asks L2
to keep all (`KEPT_ROWS`), so that they are overwritten before anything writes them to memory."""


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
        scored: Int32,
        overlap: Int32,
        shared: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch. Addresses are byte addresses (0: absent), strides and pitch are in elements.

        select: logits and tops (BF16, uint16) in the compact layout of `capacity` elements; starts: int32, tiles before
        each request, or 0: they are counted here. topk: rows of logits `pitch` elements apart; tops is a workspace of
        `capacity` bytes a row, used by parts whose maxima exceed the registers only, or filled by the kernel in front.
        lens: int32 per row. limit: lengths above it make a row empty and raise a flag. table: int32 `[requests,
        blocks]` or 0 (rows are positions); row_request: int32 per row, the table row to use, or 0 (row // next_n). out,
        positions: int32 `[rows, k]`; counts: int32 `[rows]`; flags: u32 word. release: bit 0 lets the next kernel of
        a programmatic chain start early; bit 1 says that logits and maxima are written before they are read again:
        those of a large step are dropped from L2. scored (select): 0, or with starts = 0 the limit of lengths that the
        scorer counted tiles with, which says besides that the lengths were complete before the kernel in front (that
        scorer) started: they are then read before the grid dependency. overlap: 1 launches this kernel so that it may
        start early. shared: bytes of shared memory a block is given, at least the configuration's; more than half of an
        SM's keeps other blocks off the SM.
        """
        kind = "select" if self.config.maxima else "topk"
        self.kernel.set_name_prefix(f"{kind}_k{self.config.k_class}_c{self.config.cluster}_t{self.config.threads}")
        self.kernel(
            logits, tops, pitch, capacity, starts, lens, lens_stride, next_n, k, limit, table, table_stride,
            row_request, page_log2, block_rows, out, out_stride, counts, positions, positions_stride, flags, release,
            scored,
        ).launch(
            grid=(rows * Int32(self.config.cluster), 1, 1),
            block=(self.config.threads, 1, 1),
            cluster=None if self.config.cluster == 1 else (self.config.cluster, 1, 1),
            smem=shared,
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
        scored: Int32,
    ) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        base = ptx.smem_addr(SmemAllocator().allocate_array(Uint32, config.shared_bytes // 4, byte_alignment=128))
        base = (base + Uint32(config.alignment - 1)) & Uint32(
            0x100000000 - config.alignment
        )  # the same in all blocks of a cluster
        steps.mark(base, thread, 0, config)
        row = block // Int32(config.cluster)
        rank = block - row * Int32(config.cluster)
        if cutlass.const_expr(config.cluster > 1):
            places.open_exchange(base, thread, config)
        fault = Uint32(0)
        if cutlass.const_expr(config.maxima):
            if scored == Int32(0):
                ptx.grid_wait()
            length, start, fault = places.compact_row(
                base, starts, lens, row, next_n, k, limit, scored, capacity, thread, config
            )
            tops_row = tops + (start >> Int64(3))
        else:
            if cutlass.const_expr(not config.given):
                ptx.grid_wait()
            length, start, fault = places.pitched_row(base, lens, lens_stride, row, limit, pitch, thread, config)
            tops_row = tops + Int64(row) * capacity
        steps.mark(base, thread, 1, config)
        where = (table, table_stride, row_request, next_n, page_log2, block_rows, row)
        target = (out, out_stride, positions, positions_stride)
        if length <= k:
            places.enter(release, config)
            if rank == Int32(0):
                places.write_all(base, length, k, where, target, thread, config)
        else:
            self.select_row(base, logits + start, tops_row, length, k, where, target, thread, rank, release)
        if thread + rank == Int32(0):
            taken = k
            if length < k:
                taken = length
            ptx.store(counts + Int64(row) * Int64(4), taken)
            if fault != Uint32(0) and flags != Int64(0):
                ptx.red_global(flags, fault, "or", "relaxed", "gpu")
        steps.dump_marks(base, flags, block, thread, config)

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
        release: Int32,
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
        if rank >= active:
            places.enter(release, config)
        else:
            part = groups
            if active > Int32(1):
                part = (groups + Int32(config.cluster - 1)) // Int32(config.cluster)
            two_level = part > Int32(config.held_groups)
            if two_level:
                part = ((part + Int32(7)) >> Int32(3)) << Int32(3)  # whole vectors of maxima
            first = rank * part
            count = stages.share(groups, first, part)
            table_row, first_block = places.fetch_table(base, where, head, end, first, count, thread, config)
            if cutlass.const_expr(config.cluster > 1):
                steps.await_cluster(active)
            # What the loads need is there before the wait: keys of a part that fits, else the maxima.
            origin, start, units = address, first, count
            if two_level:
                start, units = stages.share_tops(groups, rank, active, config)
                origin = tops
            ahead = units
            if cutlass.const_expr(not config.maxima):  # nobody's maxima are there yet
                ahead = units * (Int32(1) - Int32(two_level))
            loading = stages.plan_loads(base, False, start, ahead, thread, config)
            if where[4] >= Int32(0):  # always; without a branch the assembler moves all of that behind the wait
                places.enter(release, config)
            words = stages.issue_loads(origin, head, end, loading, config)
            if cutlass.const_expr(not config.maxima):
                cute.arch.sync_threads()  # all have cleared their bins; `select` knows that since it has lengths
            steps.mark(base, thread, 12, config)
            edge = Uint32(0)
            if cutlass.const_expr(not config.maxima):
                edge = foreign.load_edge(address, head, end, groups, thread)
            bound = Int32(0)
            if two_level:
                count, bound = stages.find_groups(
                    base,
                    address,
                    tops,
                    edge,
                    head,
                    end,
                    groups,
                    k,
                    thread,
                    rank,
                    start,
                    units,
                    words,
                    config,
                )
                loading = stages.plan_loads(base, True, first, count, thread, config)
                words = stages.issue_loads(address, head, end, loading, config)
            near = bound > Int32(split.ZERO)
            if cutlass.const_expr(config.cluster > 1):  # noqa: SIM102  # a trace-time test, then a run-time one
                if active > Int32(1) and not two_level:
                    near = length >= k * Int32(split.LONG)
            words = stages.settle_keys(base, edge, head, end, two_level, loading, words, count, thread, config)
            found, slot = stages.find_keys(base, words, count, k, bound, near, thread, rank, active, config)
            picks = base + Uint32(self.map.picks)
            listed = base + Uint32(self.map.groups)
            policy = places.output_policy(k, config)
            for index in cutlass.range(thread, found, config.threads, unroll=2):
                unit = Int32(ptx.load_shared(picks + Uint32(index) * Uint32(4)))
                group = first + (unit >> Int32(3))
                if two_level:
                    group = Int32(ptx.load_shared(listed + Uint32(unit >> Int32(3)) * Uint32(4)))
                position = group * Int32(8) + (unit & Int32(7)) - head
                places.write_one(base, slot + index, position, table_row, first_block, where, target, policy, config)
            steps.mark(base, thread, 11, config)
            if cutlass.const_expr(config.maxima):
                self.drop_row(address, tops, length, first, part, groups, thread, release)

    @cute.jit
    def drop_row(
        self,
        address: Int64,
        tops: Int64,
        length: Int32,
        first: Int32,
        part: Int32,
        groups: Int32,
        thread: Int32,
        release: Int32,
    ) -> None:
        """Results that nothing reads any more leave L2 unwritten, if that was asked for and there are many of them."""
        config = self.config
        blocks, _, _ = cute.arch.grid_dim()
        many = blocks * (length >> Int32(7)) > Int32(DROP_ROWS * config.cluster)  # were all rows as long
        if release & Int32(2) != Int32(0) and many:  # all of the block's loads came before its last barrier
            last = first + part
            if last > groups:
                last = groups
            places.drop_lines(address, Int64(first) * Int64(16), Int64(last) * Int64(16), thread, config)
            places.drop_lines(tops, Int64(first) * Int64(2), Int64(last) * Int64(2), thread, config)


def _build(config: SelectConfig) -> tuple[Any, tuple[Any, ...]]:
    i64, i32 = Int64(0), Int32(1)
    args = (
        i64, i64, i64, i64, i64, i64, i64, i32, i32, i32, i32, i64, i64, i64, i32, i32, i64, i64, i64, i64, i64, i64,
        i32, i32, i32, i32, make_fake_stream(),
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
