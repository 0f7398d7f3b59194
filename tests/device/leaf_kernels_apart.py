"""Small kernels around what several blocks or kernels do with each other: clusters, flags, tagged pairs, chains."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from keysieve.device import ptx, sync

THREADS = 256


class Cluster:
    """Two blocks of a cluster write and count in each other's shared memory; out: u32 [2, 64] and u32 [2]."""

    THREADS = 64

    @cute.jit
    def __call__(self, out: Int64, sums: Int64, stream: cuda.CUstream) -> None:
        self.kernel(out, sums).launch(grid=(2, 1, 1), block=(self.THREADS, 1, 1), cluster=(2, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, out: Int64, sums: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        cells = ptx.smem_addr(smem.allocate_array(Uint32, self.THREADS + 1))
        last = cells + Uint32(4 * self.THREADS)
        if thread == Int32(0):
            ptx.store_shared(last, Uint32(0))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        other = Uint32(1) - Uint32(block)
        cell = cells + Uint32(thread) * Uint32(4)
        ptx.store_cluster(ptx.map_shared(cell, other), Uint32(thread) + Uint32(1000) * Uint32(block))
        ptx.red_cluster(ptx.map_shared(last, other), Uint32(thread))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        # what the other block left here, and, read over there, what this one left
        mine = ptx.load_shared(cell)
        theirs = ptx.load_cluster(ptx.map_shared(cell, other))
        ptx.store(out + (Int64(block) * Int64(self.THREADS) + Int64(thread)) * Int64(4), mine * Uint32(10000) + theirs)
        if thread == Int32(0):
            ptx.store(sums + Int64(block) * Int64(4), ptx.load_shared(last))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


class Flag:
    """Block 1 waits for a word that block 0 publishes with release order, then reads what was written before it."""

    @cute.jit
    def __call__(
        self, flag: Int64, data: Int64, out: Int64, value: Int32, report: Int64, stream: cuda.CUstream
    ) -> None:
        self.kernel(flag, data, out, value, report).launch(grid=(2, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, flag: Int64, data: Int64, out: Int64, value: Int32, report: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        at = Int64(thread) * Int64(4)
        if block == Int32(0):
            ptx.store(data + at, value + thread)
            ptx.fence("gpu")
            cute.arch.sync_threads()
            if thread == Int32(0):
                ptx.store(flag, Uint32(value), "release", "sys")
        else:
            limit = Int64(5_000_000_000)
            sync.wait_word(flag, Uint32(value), limit, report, Uint32(0), Uint32(thread), Uint32(1), Uint32(2))
            ptx.store(out + at, ptx.load(data + at, Int32, "relaxed", "gpu"))


class Pairs:
    """Block 0 sends tagged pairs, block 1 receives them with a bounded wait and writes the words out.

    `send` 0 sends nothing: the receiver's time runs out, it reports and traps.
    """

    @cute.jit
    def __call__(
        self,
        slots: Int64,
        out: Int64,
        tag: Int32,
        send: Int32,
        limit_ns: Int64,
        report: Int64,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel(slots, out, tag, send, limit_ns, report).launch(
            grid=(2, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, slots: Int64, out: Int64, tag: Int32, send: Int32, limit_ns: Int64, report: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        place = slots + Int64(thread) * Int64(16)
        word = Uint32(thread) * Uint32(2654435761) + Uint32(tag)
        if block == Int32(0):
            if send != Int32(0):
                ptx.store_pair(place, word, word ^ Uint32(0xFFFFFFFF), Uint32(tag))
        else:
            if send != Int32(0) or thread == Int32(0):
                w0, w1 = sync.wait_pair(
                    place, Uint32(tag), limit_ns, report, Uint32(3), Uint32(thread), Uint32(5), Uint32(1)
                )
                ptx.store_v2(out + Int64(thread) * Int64(8), w0, w1)


class Chain:
    """Two launches of one entry: a writer that dawdles, and a programmatic dependent that reads after its grid wait."""

    def __init__(self, early: bool) -> None:
        self.early = early

    @cute.jit
    def __call__(self, data: Int64, out: Int64, value: Int32, delay_ns: Int64, stream: cuda.CUstream) -> None:
        self.writer(data, value, delay_ns).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)
        self.reader(data, out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def writer(self, data: Int64, value: Int32, delay_ns: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(self.early):
            ptx.grid_launch_dependents()
        start = ptx.global_ns()
        while ptx.global_ns() - start < delay_ns:
            ptx.nano_sleep(Uint32(200))
        ptx.store(data + Int64(thread) * Int64(4), value + thread)

    @cute.kernel
    def reader(self, data: Int64, out: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        ptx.grid_wait()
        ptx.store(out + Int64(thread) * Int64(4), ptx.load(data + Int64(thread) * Int64(4), Int32))
