"""Small kernels around the leaves of keysieve/device, so that the leaves can be run, and their code looked at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from leaf_kernels_apart import Chain, Cluster, Flag, Pairs

from keysieve.device import keys, numerics, ptx, ring, scan, sync

THREADS = 256
WARPS = THREADS // 32

# name -> function of three words (Uint32), giving one. Every lane computes one element.
WORD_FUNCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "key16x2": lambda a, *_: keys.key16x2(a),
    "canonical16": lambda a, *_: keys.canonical16(keys.low16(a)),
    "canonical_bf16x2": lambda a, *_: numerics.canonical_bf16x2(a),
    "bf16_bits": lambda a, *_: numerics.bf16_bits(numerics.bits_float(a)),
    "bf16x2_bits": lambda a, b, *_: numerics.bf16x2_bits(numerics.bits_float(a), numerics.bits_float(b)),
    "logit_bits": lambda a, *_: numerics.logit_bits(numerics.bits_float(a)),
    "mul": lambda a, b, *_: float_word(numerics.mul, a, b),
    "mul_then_add": lambda a, b, c: float_word(
        lambda x, y: numerics.add(numerics.mul(x, y), numerics.bits_float(c)), a, b
    ),
    "fma": lambda a, b, c: float_word(lambda x, y: numerics.fma(x, y, numerics.bits_float(c)), a, b),
    "max_nan": lambda a, b, *_: float_word(numerics.max_nan, a, b),
    "max_num": lambda a, b, *_: float_word(numerics.max_num, a, b),
    "fma_bf16x2": numerics.fma_bf16x2,
    "add_bf16x2": lambda a, b, *_: numerics.add_bf16x2(a, b),
    "add_bf16": lambda a, b, *_: numerics.add_bf16(a, b),
    "max_nan_bf16x2": lambda a, b, *_: numerics.max_nan_bf16x2(a, b),
    "max_u16x2": lambda a, b, *_: ptx.max_u16x2(a, b),
    "byte_perm": lambda a, b, c: ptx.byte_perm(a, b, c & Uint32(0x7777)),
}


def float_word(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    return numerics.float_bits(function(numerics.bits_float(a), numerics.bits_float(b)))


class Words:
    """out[f, i] = WORD_FUNCTIONS[f](a[i], b[i], c[i]); one thread an element."""

    @cute.jit
    def __call__(self, a: Int64, b: Int64, c: Int64, out: Int64, n: Int32, stream: cuda.CUstream) -> None:
        blocks = (n + Int32(THREADS - 1)) // Int32(THREADS)
        self.kernel(a, b, c, out, n).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, a: Int64, b: Int64, c: Int64, out: Int64, n: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * Int32(THREADS) + thread
        if i < n:
            at = Int64(i) * Int64(4)
            x, y, z = (ptx.load(base + at, Uint32) for base in (a, b, c))
            for number, function in enumerate(WORD_FUNCTIONS.values()):
                ptx.store(out + (Int64(number) * Int64(n) + Int64(i)) * Int64(4), function(x, y, z))


class Scans:
    """One block: exclusive sums of `values`, ballots, and digit searches in a histogram of `digits`.

    out int32: [0, THREADS) exclusive sums, then the total; then 3 words (digit, above, equal) a rank.
    """

    def __init__(self, bins: int) -> None:
        self.bins = bins

    @cute.jit
    def __call__(
        self, values: Int64, digits: Int64, n: Int32, ranks: Int64, searches: Int32, out: Int64, stream: cuda.CUstream
    ) -> None:
        self.kernel(values, digits, n, ranks, searches, out).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, values: Int64, digits: Int64, n: Int32, ranks: Int64, searches: Int32, out: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        scratch = ptx.smem_addr(smem.allocate_array(Uint32, WARPS))
        bins = ptx.smem_addr(smem.allocate_array(Uint32, self.bins, byte_alignment=16))
        value = ptx.load(values + Int64(thread) * Int64(4), Int32)
        before, total = scan.block_exclusive(value, scratch, thread, WARPS)
        again, _ = scan.block_exclusive(value, scratch, thread, WARPS)  # scratch must be reusable at once
        ptx.store(out + Int64(thread) * Int64(4), before + (again - before))
        if thread == Int32(0):
            ptx.store(out + Int64(4 * THREADS), total)
        scan.clear_words(bins, Int32(self.bins), thread, THREADS)
        cute.arch.sync_threads()
        for i in cutlass.range(thread, n, THREADS, unroll=1):
            scan.histogram_add(bins, ptx.load(digits + Int64(i) * Int64(4), Uint32))
        cute.arch.sync_threads()
        lane = thread % Int32(32)
        if thread < Int32(32):
            for s in cutlass.range(searches, unroll=1):
                rank = ptx.load(ranks + Int64(s) * Int64(4), Int32)
                digit, above, equal = scan.warp_find_digit(bins, rank, lane, self.bins)
                place = out + Int64(4 * (THREADS + 1)) + Int64(s) * Int64(12)
                if lane == Int32(s % Int32(32)):  # any lane has the answer
                    ptx.store(place, digit)
                    ptx.store(place + Int64(4), above)
                    ptx.store(place + Int64(8), equal)


class Rings:
    """Producer warp 0 streams `tiles` tiles of 1 KiB through a ring; `groups` of `warps` warps take turns to copy them
    out, each warp its part of a tile."""

    TILE_BYTES = 1024

    def __init__(self, stages: int, groups: int, warps: int = 1) -> None:
        self.shape = ring.RingShape(stages=stages, stage_bytes=self.TILE_BYTES, warps=warps, groups=groups)

    @cute.jit
    def __call__(self, source: Int64, out: Int64, tiles: Int32, stream: cuda.CUstream) -> None:
        threads = 32 * (1 + self.shape.groups * self.shape.warps)
        self.kernel(source, out, tiles).launch(grid=(1, 1, 1), block=(threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, source: Int64, out: Int64, tiles: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        stages = self.shape.stages
        bars = smem.allocate_array(Int64, self.shape.barrier_words)
        data = ptx.smem_addr(smem.allocate_array(Uint32, stages * self.TILE_BYTES // 4, byte_alignment=128))
        pipe = ring.Ring(self.shape, bars, bars + stages)
        if thread == Int32(0):
            pipe.init()
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp == Int32(0):
            self.produce(pipe, data, source, tiles)
        else:
            self.consume(pipe, data, out, tiles, warp - Int32(1), thread % Int32(32))

    @cute.jit
    def produce(self, pipe: Any, data: Uint32, source: Int64, tiles: Int32) -> None:
        stage, phase = pipe.producer_start()
        for tile in cutlass.range(tiles, unroll=1):
            pipe.wait_empty(stage, phase)
            with cute.arch.elect_one():
                pipe.announce(stage)
                ptx.bulk_load(
                    data + Uint32(stage) * Uint32(self.TILE_BYTES),
                    source + Int64(tile) * Int64(self.TILE_BYTES),
                    Int32(self.TILE_BYTES),
                    pipe.full_address(stage),
                )
            stage, phase = pipe.next(stage, phase)

    @cute.jit
    def consume(self, pipe: Any, data: Uint32, out: Int64, tiles: Int32, consumer: Int32, lane: Int32) -> None:
        warps, groups = self.shape.warps, self.shape.groups
        group, part = consumer // Int32(warps), consumer % Int32(warps)
        stage, phase = pipe.consumer_start(group)
        for tile in cutlass.range(group, tiles, groups, unroll=1):
            pipe.wait_full(stage, phase)
            at = data + Uint32(stage) * Uint32(self.TILE_BYTES)
            place = out + Int64(tile) * Int64(self.TILE_BYTES)
            for i in cutlass.range(part * Int32(32) + lane, self.TILE_BYTES // 16, 32 * warps, unroll=1):
                ptx.store_v4(place + Int64(i) * Int64(16), *ptx.load_shared_v4(at + Uint32(i) * Uint32(16)))
            pipe.release(stage)
            stage, phase = pipe.next_of_group(stage, phase)


class Memory:
    """One block of 64 threads goes through the remaining loads, stores, atomics and votes: `test_memory_leaves`.

    words: u32 [256], read. out: u32 [8, 64], row by row what the comments say. counters: u32 [8], updated.
    """

    THREADS = 64

    @cute.jit
    def __call__(self, words: Int64, out: Int64, counters: Int64, stream: cuda.CUstream) -> None:
        self.kernel(words, out, counters).launch(grid=(1, 1, 1), block=(self.THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, words: Int64, out: Int64, counters: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        bar = smem.allocate_array(Int64, 1)
        data = ptx.smem_addr(smem.allocate_array(Uint32, 256, byte_alignment=128))
        cells = ptx.smem_addr(smem.allocate_array(Uint32, 8))
        if thread == Int32(0):
            cute.arch.mbarrier_init(bar, 1)
            ptx.prefetch_l2(words, Int32(1024))
        scan.clear_words(cells, Int32(8), thread, self.THREADS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if thread == Int32(0):
            cute.arch.mbarrier_arrive_and_expect_tx(bar, 1024)
            ptx.bulk_load(data, words, Int32(1024), ptx.smem_addr(bar), ptx.l2_policy("evict_first"))
        cute.arch.mbarrier_wait(bar, 0)
        self.halves(words, out, data, thread)
        self.counting(words, out, counters, cells, thread)
        self.votes(words, out, thread)
        sync.named_barrier(1, self.THREADS)
        # row 7: a bulk store of words shared memory got, after this thread's own change of one
        ptx.store_shared(
            data + Uint32(thread) * Uint32(4), ptx.load_shared(data + Uint32(thread) * Uint32(4)) ^ Uint32(1)
        )
        ptx.fence_async_shared()
        cute.arch.sync_threads()
        if thread == Int32(0):
            ptx.bulk_store(out + Int64(7 * 256), data, Int32(256))
            ptx.bulk_commit()
            ptx.bulk_wait(0, read=True)
            ptx.bulk_wait()
        ptx.exit_thread()

    @cute.jit
    def halves(self, words: Int64, out: Int64, data: Uint32, thread: Int32) -> None:
        at = Int64(thread) * Int64(4)
        # row 0: the halves of a word swapped, by 16-bit loads from shared and stores to global memory
        shared = data + Uint32(thread) * Uint32(4)
        ptx.store_u16(out + at, ptx.load_shared_u16(shared + Uint32(2)))
        ptx.store_u16(out + at + Int64(2), ptx.load_shared_u16(shared))
        # row 1: the low half from global memory, widened, through a 16-bit cell of shared memory
        ptx.store_shared_u16(data + Uint32(512) + Uint32(thread) * Uint32(2), ptx.load_u16(words + at))
        ptx.store(out + Int64(256) + at, ptx.load_shared_u16(data + Uint32(512) + Uint32(thread) * Uint32(2)))
        # row 2: pairs of words, by 8-byte accesses; the two words of a pair swapped
        if thread < Int32(32):
            pair = Int64(thread) * Int64(8)
            first, second = ptx.load_v2(words + pair)
            ptx.store_v2(out + Int64(512) + pair, second, first)
        # row 3: four words at a time, by each of the hints; reversed within the four
        if thread < Int32(16):
            four = Int64(thread) * Int64(16)
            forms = [ptx.load_v4(words + four, hint) for hint in ("", "nc", "nc.stream", "cg")]
            # f1 + f2 + f3 - 2 f0 is the value where all four agree, and another where one of them differs
            a, b, c, d = (forms[1][i] + forms[2][i] + forms[3][i] - forms[0][i] - forms[0][i] for i in range(4))
            ptx.store_shared_v4(data + Uint32(768) + Uint32(thread) * Uint32(16), d, c, b, a)
            ptx.store_v4(out + Int64(768) + four, *ptx.load_shared_v4(data + Uint32(768) + Uint32(thread) * Uint32(16)))

    @cute.jit
    def counting(self, words: Int64, out: Int64, counters: Int64, cells: Uint32, thread: Int32) -> None:
        word = ptx.load(words + Int64(thread) * Int64(4), Uint32)
        ptx.red_shared(cells, Uint32(1))
        ptx.red_shared(cells + Uint32(4), word, "max")
        ptx.red_shared(cells + Uint32(8), Uint32(1) << Uint32(thread & 31), "or")
        cute.arch.sync_threads()
        # row 4: tickets (a permutation of 64..127, since the cell counts on), then what the cells hold
        ticket = ptx.atom_shared(cells, Uint32(1), "add")
        ptx.store(out + Int64(1024) + Int64(thread) * Int64(4), ticket)
        if thread == Int32(0):
            ptx.store(counters + Int64(16), ptx.load_shared(cells + Uint32(4)))
            ptx.store(counters + Int64(20), ptx.atom_shared(cells + Uint32(8), Uint32(7), "exch"))
            ptx.store(counters + Int64(24), ptx.load_shared(cells + Uint32(8)))
        ptx.red_global(counters, Uint32(3))
        ptx.red_global(counters + Int64(4), word, "max")
        ptx.red_global(counters + Int64(8), Uint32(1) << Uint32(thread & 31), "or", "release")
        ptx.atom_global(counters + Int64(12), Uint32(2), "add", "acq_rel")
        ptx.fence("gpu")

    @cute.jit
    def votes(self, words: Int64, out: Int64, thread: Int32) -> None:
        at = Int64(thread) * Int64(4)
        word = ptx.load(words + at, Uint32)
        below, total = scan.ballot_rank((word & Uint32(1)) == Uint32(1), ptx.lanes_below())
        ptx.store(out + Int64(1280) + at, below * Int32(100) + total)  # row 5
        summed = Uint32(scan.warp_sum(Int32(word & Uint32(0xFFFF))))
        ptx.store(out + Int64(1536) + at, summed ^ scan.warp_max_u32(word))  # row 6


class Contracted:
    """Two floats combined as `a * b + c` with plain operators, to show what the pinned forms are for."""

    @cute.jit
    def __call__(self, a: Int64, b: Int64, c: Int64, out: Int64, stream: cuda.CUstream) -> None:
        self.kernel(a, b, c, out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, a: Int64, b: Int64, c: Int64, out: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        at = Int64(thread) * Int64(4)
        x, y, z = (ptx.load(base + at, Float32) for base in (a, b, c))
        ptx.store(out + at, x * y + z)


ENTRIES: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
    "words": (Words, (*[Int64(0)] * 4, Int32(0))),
    "scans32": (lambda: Scans(32), (Int64(0), Int64(0), Int32(0), Int64(0), Int32(0), Int64(0))),
    "scans256": (lambda: Scans(256), (Int64(0), Int64(0), Int32(0), Int64(0), Int32(0), Int64(0))),
    "scans2048": (lambda: Scans(2048), (Int64(0), Int64(0), Int32(0), Int64(0), Int32(0), Int64(0))),
    "ring3x1x2": (lambda: Rings(3, 1, 2), (Int64(0), Int64(0), Int32(0))),
    "ring4x2x1": (lambda: Rings(4, 2, 1), (Int64(0), Int64(0), Int32(0))),
    "ring7x7x1": (lambda: Rings(7, 7, 1), (Int64(0), Int64(0), Int32(0))),
    "ring6x3x2": (lambda: Rings(6, 3, 2), (Int64(0), Int64(0), Int32(0))),
    "ring1x1x1": (lambda: Rings(1, 1, 1), (Int64(0), Int64(0), Int32(0))),
    "memory": (Memory, (Int64(0),) * 3),
    "cluster": (Cluster, (Int64(0),) * 2),
    "flag": (Flag, (Int64(0), Int64(0), Int64(0), Int32(0), Int64(0))),
    "pairs": (Pairs, (Int64(0), Int64(0), Int32(0), Int32(0), Int64(0), Int64(0))),
    "chain_early": (lambda: Chain(True), (Int64(0), Int64(0), Int32(0), Int64(0))),
    "chain_late": (lambda: Chain(False), (Int64(0), Int64(0), Int32(0), Int64(0))),
    "contracted": (Contracted, (Int64(0),) * 4),
}
"""name -> (maker of the jit entry, its fake arguments without the stream)."""


@functools.cache
def compiled(name: str, arch: str, options: str = "") -> Any:
    """Compile an entry for `arch`; callable with plain ints and a stream handle last. Each is compiled once."""
    make, args = ENTRIES[name]
    return cute.compile(make(), *args, make_fake_stream(), options=f"--enable-tvm-ffi --gpu-arch={arch} {options}")
