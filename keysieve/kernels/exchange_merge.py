"""Merging the candidate rows of all ranks: this rank's winners, and all winners' positions on request.

One block a row. With tagged pairs (`config.tagged`) the block first accepts every half of every pair from all ranks,
then compares signatures; ranks that are saturated by the exact rule offer their local top-K in a second round, inside
this kernel (`exchange_rescue`). The row's epoch is stored when all has been read. Without tags the lists lie in
ordinary memory (`words`), and so do second lists (`second`), if there are any.

The K best by (key16 descending, id ascending), ids being global positions: histogram of the upper 11 bits, histogram of
the lower 5 in the threshold bin, then a cut among the ids of equal keys. Nothing depends on the order of arrival.

Where words come as tagged pairs into registers (`config.early`) the grid dependency is waited for where a block ends,
not where it begins, and the words of this rank are polled for by their tags like everybody's. That is sound because
the kernel in front is the push, which lets this one start behind its own wait for this call's scorer:

* All of its blocks run by then, so none can be kept from starting by blocks of this kernel that poll.
* The scorer is complete, and so is what came before it: the merge of the call before (its reads of slots, its epochs
  and drawn rows, its outputs and whoever read them), and whoever wrote lengths and tables.
* Only the push itself may still run. What it writes are this call's words, and their tags say when they are there; the
  epoch that it reads is stored behind the wait. A second round, which reads logits, waits as well.
* What other kernels wrote is read from L2 (`relaxed`): without a wait, older lines may lie in the first cache.
* No block ends without the wait: what waits for this kernel has waited for the push.

Rows are started in ascending order where that matters (`ordered`): blocks draw their row from a counter, because a
block in the second round waits for the same row's block on another rank.
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
from keysieve.kernels import exchange_latency as latency
from keysieve.kernels import exchange_latency_write as write
from keysieve.kernels import exchange_lists as row_lists
from keysieve.kernels import exchange_rescue as rescue
from keysieve.kernels import exchange_rows as output
from keysieve.kernels import exchange_select as choose
from keysieve.kernels import exchange_words as arrival
from keysieve.kernels.exchange_config import MergeConfig, MergeMap
from keysieve.kernels.exchange_lists import Lists
from keysieve.kernels.flags import FLAG_BAD_LENGTH
from keysieve.kernels.sharding import local_length

SHARED_PERCENT = 60
"""Of a multiprocessor's memory beside its registers, for shared memory: more than two blocks need."""


class Merge:
    """The kernel for one configuration; `__call__` is the host entry that is compiled."""

    def __init__(self, config: MergeConfig) -> None:
        self.config = config
        self.map = MergeMap.of(config)

    @cute.jit
    def __call__(
        self,
        peers: Int64,
        slots: Int64,
        recv: Int64,
        arrived: Int64,
        max_rows: Int32,
        recv_pitch: Int32,
        rescued: Int32,
        epoch: Int64,
        seq2: Int64,
        ticket: Int64,
        words: Int64,
        second: Int64,
        source_stride: Int64,
        row_stride: Int64,
        second_source_stride: Int64,
        second_row_stride: Int64,
        logits: Int64,
        pitch: Int64,
        lens: Int64,
        rows: Int32,
        next_n: Int32,
        limit: Int32,
        local_limit: Int32,
        k: Int32,
        n: Int32,
        planes: Int32,
        world: Int32,
        rank: Int32,
        interleave: Int32,
        divide: Int64,
        site: Int32,
        table: Int64,
        table_stride: Int64,
        page_log2: Int32,
        block_rows: Int32,
        out: Int64,
        out_stride: Int64,
        counts: Int64,
        positions: Int64,
        positions_stride: Int64,
        flags: Int64,
        report: Int64,
        timeout_ns: Int64,
        ordered: Int32,
        release: Int32,
        overlap: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch. Addresses are byte addresses (0: absent), strides and pitches are in elements.

        Tagged: peers, int64 per rank, the blocks' addresses; slots, recv, arrived: offsets in a block; recv_pitch:
        words from second list to second list, of which a row has `rescued`; epoch u32 and seq2 int64 per row; ticket:
        u32 `[64]`; logits: this rank's canonical BF16 rows, `pitch` apart. Untagged: words, second: int32 lists, their
        strides from source to source and from row to row.
        lens: int32 per row, global lengths (0: unknown, untagged only). limit, local_limit: a row whose global or local
        length is above them has been pushed as an empty one. table .. positions_stride: as for `select`. report: 64
        bytes of host memory; timeout_ns: the longest wait. ordered: 1 draws rows from the counter.
        """
        kind = "tagged" if self.config.tagged else "plain"
        form = f"_r{self.config.rounds}" if self.config.rounds else ""
        form += "_trace" if self.config.trace else ""
        self.kernel.set_name_prefix(f"exchange_merge_{kind}_k{self.config.k_class}_w{self.config.held}{form}")
        self.kernel(
            peers, slots, recv, arrived, max_rows, recv_pitch, rescued, epoch, seq2, ticket, words, second,
            source_stride, row_stride, second_source_stride, second_row_stride, logits, pitch, lens, rows, next_n,
            limit, local_limit, k, n, planes, world, rank, interleave, divide, site, table, table_stride, page_log2,
            block_rows, out, out_stride, counts, positions, positions_stride, flags, report, timeout_ns, ordered,
            release,
        ).launch(
            grid=(rows, 1, 1),
            block=(self.config.threads, 1, 1),
            smem=self.config.shared_bytes,
            stream=stream,
            use_pdl=overlap,
            min_blocks_per_mp=self.config.resident,
            preferred_smem_carveout=SHARED_PERCENT,  # stated: else the compiler asks a device
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        peers: Int64,
        slots: Int64,
        recv: Int64,
        arrived: Int64,
        max_rows: Int32,
        recv_pitch: Int32,
        rescued: Int32,
        epoch: Int64,
        seq2: Int64,
        ticket: Int64,
        words: Int64,
        second: Int64,
        source_stride: Int64,
        row_stride: Int64,
        second_source_stride: Int64,
        second_row_stride: Int64,
        logits: Int64,
        pitch: Int64,
        lens: Int64,
        rows: Int32,
        next_n: Int32,
        limit: Int32,
        local_limit: Int32,
        k: Int32,
        n: Int32,
        planes: Int32,
        world: Int32,
        rank: Int32,
        interleave: Int32,
        divide: Int64,
        site: Int32,
        table: Int64,
        table_stride: Int64,
        page_log2: Int32,
        block_rows: Int32,
        out: Int64,
        out_stride: Int64,
        counts: Int64,
        positions: Int64,
        positions_stride: Int64,
        flags: Int64,
        report: Int64,
        timeout_ns: Int64,
        ordered: Int32,
        release: Int32,
    ) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        base = ptx.smem_addr(SmemAllocator().allocate_array(Uint32, config.shared_bytes // 4, byte_alignment=128))
        lists = Lists(config, base, thread, world, rank, interleave, n, k, planes, divide)
        row_lists.note_clock(lists, 0)
        row_lists.clear(lists)
        mine = Int64(0)
        if cutlass.const_expr(config.tagged):
            mine = ptx.load(peers + Int64(rank) * Int64(8), Int64)  # never changes
        if cutlass.const_expr(config.rounds > 0):
            row_lists.hold_all(lists)
            share = latency.share_first(lists)
            cute.arch.sync_threads()  # a thread counts its words as soon as it has them: the histogram is clear by then
        if cutlass.const_expr(not config.early):
            ptx.grid_wait()
        row_lists.note_clock(lists, 1)
        if ordered != Int32(0):
            row = output.draw_row(lists, ticket, rows)
        length = Int32(0)
        if lens != Int64(0):
            length = ptx.load(lens + Int64(row) * Int64(4), Int32, "relaxed")
        tag = Uint32(0)
        if cutlass.const_expr(config.tagged):
            tag = ptx.load(epoch + Int64(row) * Int64(4), Uint32, "relaxed") + Uint32(1)
        call = (Uint32(rows) << Uint32(16)) | Uint32(site)
        wait = arrival.Wait(report, timeout_ns, ticket, Uint32(rank), Uint32(row), tag, call, Uint32(length))
        usable = length * Int32(length > Int32(0)) * Int32(length <= limit)
        known = lens != Int64(0)
        place = (row, usable, known, (table, table_stride, next_n, page_log2, block_rows))
        target = (out, out_stride, counts, positions)
        around = (mine, peers, slots, recv, arrived, max_rows, recv_pitch, rescued, seq2, logits, pitch)
        plain = (words, source_stride, row_stride, second, second_source_stride, second_row_stride)
        if cutlass.const_expr(config.rounds > 0):
            merge_latency(lists, share, wait, place, target, around, plain)
        else:
            merge_flat(lists, wait, place, target, around, plain)
        row_lists.note_clock(lists, 9)
        if positions != Int64(0):
            if cutlass.const_expr(config.rounds > 0):
                cute.arch.sync_threads()
            output.write_positions(lists, row, positions, positions_stride)
        finish(lists, wait, usable, (limit, local_limit), row, epoch, flags)
        if release != Int32(0):
            cute.arch.sync_threads()
            ptx.grid_launch_dependents()


@cute.jit
def finish(lists: Any, wait: Any, usable: Int32, limits: Any, row: Int32, epoch: Int64, flags: Int64) -> None:
    """Count the row's call, and flag a length that no rank, or this one, could serve.

    Behind the last slot's acceptance by all threads lie block barriers already.
    """
    limit, local_limit = limits
    length = Int32(wait.length)
    row_lists.note_clock(lists, 10)
    if cutlass.const_expr(lists.config.early):
        ptx.grid_wait()
    if lists.thread == Int32(0):  # noqa: SIM102  # a run-time test, then a trace-time one
        if cutlass.const_expr(lists.config.tagged):
            ptx.store(epoch + Int64(row) * Int64(4), wait.tag)
            if cutlass.const_expr(not lists.config.trace) and flags != Int64(0):
                owned = local_length(usable, Uint32(lists.world), Uint32(lists.rank), Uint32(lists.interleave))
                if length > limit or owned > local_limit:
                    ptx.red_global(flags, Uint32(1 << FLAG_BAD_LENGTH), "or", "relaxed", "gpu")
    if cutlass.const_expr(lists.config.trace):
        row_lists.note_clock(lists, 11)
        row_lists.write_clocks(lists, flags, row)


@cute.jit
def merge_latency(lists: Any, share: Any, wait: Any, place: Any, target: Any, around: Any, plain: Any) -> None:
    """A row whose words fit the block's registers."""
    row, usable, known, where = place
    out, out_stride, counts, _positions = target
    mine, _peers, slots, _recv, _arrived, max_rows = around[:6]
    if cutlass.const_expr(lists.config.tagged):
        write.fill(lists, row, out, out_stride)
        hidden, wide = choose.hidden_sources(lists, usable, known)
        got, wanted = latency.load_tagged(share, mine + slots, wait.tag, max_rows, row)
        row_lists.note_clock(lists, 2)
        entered = latency.accept(share, wait, got, wanted, mine + slots, max_rows, row, wide)
        row_lists.note_clock(lists, 3)
    else:
        entered = latency.take_plain(share, *plain[:3], row)
        write.fill(lists, row, out, out_stride)
        hidden, wide = choose.hidden_sources(lists, usable, known)
    top = usable
    if not known:
        top = Int32(row_lists.ID_MAX)
    asked = write.merge_row(share, entered, top, hidden, wide, row, where, target, False)
    if asked != Uint32(0):
        if cutlass.const_expr(lists.config.tagged):  # noqa: SIM102  # a trace-time test, then a run-time one
            if not wide:
                latency.hold(share, entered)
        ask_again(lists, wait, asked, place, around, plain)
        sources, pairs, entries, rounds = latency.deal_second(lists, asked)
        row_lists.clear(lists)
        cute.arch.sync_threads()
        if rounds <= Int32(lists.config.second_rounds):
            again = latency.Share(lists, sources, pairs, entries)
            second = latency.load_second(again)
            write.merge_row(again, second, top, Uint32(0), wide, row, where, target, True)
        else:
            choose.select(lists, False)
            output.compact(lists)
            output.write_owned(lists, row, where, out, out_stride, counts)


@cute.jit
def merge_flat(lists: Any, wait: Any, place: Any, target: Any, around: Any, plain: Any) -> None:
    """A row of any number of words."""
    row, usable, known, where = place
    out, out_stride, counts, _positions = target
    mine, _peers, slots, _recv, _arrived, max_rows = around[:6]
    if cutlass.const_expr(lists.config.tagged):
        arrival.accept(lists, wait, mine + slots, max_rows, row)
    else:
        row_lists.list_plain(lists, *plain[:3], row)
    choose.select(lists, cutlass.const_expr(lists.config.tagged))
    if lists.n < lists.k:
        asked = choose.saturated(lists, usable, known)
        if asked != Uint32(0):
            ask_again(lists, wait, asked, place, around, plain)
            row_lists.clear(lists)
            choose.select(lists, False)
    output.compact(lists)
    output.write_owned(lists, row, where, out, out_stride, counts)


@cute.jit
def ask_again(lists: Any, wait: Any, asked: Uint32, place: Any, around: Any, plain: Any) -> None:
    """Second lists of the ranks in the mask, exchanged or in ordinary memory, in place of their first ones."""
    row, usable, _known, _where = place
    _mine, peers, _slots, recv, arrived, max_rows, recv_pitch, rescued, seq2, logits, pitch = around
    if cutlass.const_expr(lists.config.tagged):
        if cutlass.const_expr(lists.config.early):
            ptx.grid_wait()
        local = local_length(usable, Uint32(lists.world), Uint32(lists.rank), Uint32(lists.interleave))
        address = logits + Int64(row) * pitch * Int64(2)
        rescue.second_round(
            lists, wait, asked, address, local, peers, recv, arrived, max_rows, recv_pitch, rescued, seq2, row
        )
    else:
        row_lists.list_second(lists, asked, *plain[3:], row)


def build(config: MergeConfig, arch: str) -> tuple[Any, tuple[Any, ...]]:
    """Jit function and fake arguments."""
    del arch
    i64, i32 = Int64(0), Int32(1)
    args = (
        *([i64] * 4), *([i32] * 3), *([i64] * 12), *([i32] * 10), i64, i32, i64, i64, i32, i32, *([i64] * 8), i32, i32,
        i32,        make_fake_stream(),
    )  # fmt: skip
    return Merge(config).__call__, args
