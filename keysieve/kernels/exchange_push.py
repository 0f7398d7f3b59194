"""Candidate rows from the positions of a rank's best keys, pushed to every rank's slots as tagged pairs.

One block a row. It waits for its grid dependency before its first global read; the row's epoch is read once. Every pair
of the row is pushed, padding and signature included, for an empty row as well: the merge waits for all of them.

The words are also written to ordinary memory where that is asked for (`words`), and nothing is pushed without `peers`.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from keysieve.device import keys, ptx
from keysieve.kernels.exchange_config import PushConfig


class Push:
    """The kernel for one configuration; `__call__` is the host entry that is compiled."""

    def __init__(self, config: PushConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        logits: Int64,
        pitch: Int64,
        positions: Int64,
        positions_stride: Int64,
        lens: Int64,
        rows: Int32,
        n: Int32,
        planes: Int32,
        words: Int64,
        words_stride: Int64,
        peers: Int64,
        slots: Int64,
        max_rows: Int32,
        world: Int32,
        rank: Int32,
        epoch: Int64,
        site: Int32,
        release: Int32,
        overlap: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch. Addresses are byte addresses (0: absent), strides and pitch are in elements.

        logits: canonical BF16 rows, `pitch` apart. positions: int32 `[rows, n]`, ascending local indices, then -1.
        lens: int32 per row, global lengths, for the signature. words: int32 `[rows, n + planes * ceil(n / 32)]`, rows
        `words_stride` apart. peers: int64 per rank, the blocks' addresses; slots: offset of the slots in a block.
        epoch: u32 per row. release, overlap: see `select`.
        """
        self.kernel.set_name_prefix("exchange_push")
        self.kernel(
            logits, pitch, positions, positions_stride, lens, rows, n, planes, words, words_stride, peers, slots,
            max_rows, world, rank, epoch, site, release,
        ).launch(
            grid=(rows, 1, 1),
            block=(self.config.threads, 1, 1),
            smem=self.config.shared_bytes,
            stream=stream,
            use_pdl=overlap,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        logits: Int64,
        pitch: Int64,
        positions: Int64,
        positions_stride: Int64,
        lens: Int64,
        rows: Int32,
        n: Int32,
        planes: Int32,
        words: Int64,
        words_stride: Int64,
        peers: Int64,
        slots: Int64,
        max_rows: Int32,
        world: Int32,
        rank: Int32,
        epoch: Int64,
        site: Int32,
        release: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        base = ptx.smem_addr(SmemAllocator().allocate_array(Uint32, self.config.shared_bytes // 4, byte_alignment=128))
        ptx.grid_wait()
        if release != Int32(0):
            ptx.grid_launch_dependents()
        tag = Uint32(0)
        if peers != Int64(0):
            tag = ptx.load(epoch + Int64(row) * Int64(4), Uint32) + Uint32(1)
        length = ptx.load(lens + Int64(row) * Int64(4), Int32)
        count = self.gather(base, logits, pitch, positions, positions_stride, row, n, planes, thread)
        cute.arch.sync_threads()
        if words != Int64(0):
            for word in cutlass.range(thread, count, self.config.threads, unroll=1):
                value = ptx.load_shared(base + Uint32(word) * Uint32(4))
                ptx.store(words + (Int64(row) * words_stride + Int64(word)) * Int64(4), value)
        if peers != Int64(0):
            signature = (Uint32(rows) << Uint32(16)) | Uint32(site)
            seen = Uint32(length * Int32(length > Int32(0)))
            pairs = ((count + Int32(1)) >> Int32(1)) + Int32(1)
            place = Int32(tag & Uint32(1)) * world + rank
            slot = slots + (Int64(place) * Int64(max_rows) + Int64(row)) * Int64(pairs) * Int64(16)
            for pair in cutlass.range(thread, pairs, self.config.threads, unroll=1):
                first, second = signature, seen
                if pair < pairs - Int32(1):
                    first = ptx.load_shared(base + Uint32(pair) * Uint32(8))
                    second = ptx.load_shared(base + Uint32(pair) * Uint32(8) + Uint32(4))
                # Another rank first for every rank: links are used in both directions from the start.
                target = rank
                for _step in cutlass.range(world, unroll=1):
                    target = target + Int32(1)
                    if target == world:
                        target = Int32(0)
                    block = ptx.load(peers + Int64(target) * Int64(8), Int64)
                    ptx.store_pair(block + slot + Int64(pair) * Int64(16), first, second, tag)

    @cute.jit
    def gather(
        self,
        base: Uint32,
        logits: Int64,
        pitch: Int64,
        positions: Int64,
        positions_stride: Int64,
        row: Int32,
        n: Int32,
        planes: Int32,
        thread: Int32,
    ) -> Int32:
        """The row's words in shared memory, one word of padding behind them; returns how many they are."""
        groups = (n + Int32(31)) >> Int32(5)
        count = n + planes * groups
        if thread == Int32(0):
            ptx.store_shared(base + Uint32(count) * Uint32(4), Uint32(0))
        listed = positions + Int64(row) * positions_stride * Int64(4)
        source = logits + Int64(row) * pitch * Int64(2)
        lane = thread & Int32(31)
        # Whole warps: a word of a plane is a vote.
        for entry in cutlass.range(thread, groups * Int32(32), self.config.threads, unroll=1):
            index = Int32(-1)
            if entry < n:
                index = ptx.load(listed + Int64(entry) * Int64(4), Int32)
            word = Uint32(0)
            if index >= Int32(0):
                word = keys.candidate_word(keys.key16(ptx.load_u16(source + Int64(index) * Int64(2))), index)
            if entry < n:
                ptx.store_shared(base + Uint32(entry) * Uint32(4), word)
            upper = Uint32(index * Int32(index >= Int32(0))) >> Uint32(16)
            for plane in cutlass.range(planes, unroll=1):
                votes = Uint32(cute.arch.vote_ballot_sync(((upper >> Uint32(plane)) & Uint32(1)) != Uint32(0)))
                if lane == Int32(0):
                    place = n + plane * groups + (entry >> Int32(5))
                    ptx.store_shared(base + Uint32(place) * Uint32(4), votes)
        return count


def build(config: PushConfig, arch: str) -> tuple[Any, tuple[Any, ...]]:
    """Jit function and fake arguments."""
    del arch
    i64, i32 = Int64(0), Int32(1)
    args = (
        i64, i64, i64, i64, i64, i32, i32, i32, i64, i64, i64, i64, i32, i32, i32, i64, i32, i32, i32,
        make_fake_stream(),
    )  # fmt: skip
    return Push(config).__call__, args
