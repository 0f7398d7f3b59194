"""The largest key of every group of 8 keys of a long row that keysieve did not score, by blocks on all SMs.

It runs in front of a `topk` kernel with `given` maxima. A cluster that reads a million-key row by itself takes in what
eight SMs can, some 28 bytes a cycle each; here every SM reads a chunk. The kernel behind may start as soon as every
block here has started, so that its own start overlaps with this one's work; it waits before it reads a maximum.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream

from keysieve.device import packed, ptx
from keysieve.kernels import select_foreign as foreign
from keysieve.kernels.schedule import usable_length
from keysieve.kernels.select_config import TOPS_VECTORS, TopsConfig


class Tops:
    """The kernel for one configuration; `__call__` is the host entry that is compiled."""

    def __init__(self, config: TopsConfig) -> None:
        self.config = config

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
        chunks: Int32,
        limit: Int32,
        overlap: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch `chunks` blocks for each of `rows` rows. Addresses are byte addresses, strides and pitch in elements.

        tops: workspace, `capacity` bytes a row: uint16 maxima, the first of the group that holds the row's first key.
        lens: int32 per row; limit: a longer row is empty, and its maxima are not written. Keys up to `limit` are read
        before the row's length is known: this is for a single row. overlap: 1 launches this kernel so that it may start
        early.
        """
        self.kernel.set_name_prefix("topk_tops")
        self.kernel(logits, tops, pitch, capacity, lens, lens_stride, limit).launch(
            grid=(chunks, rows, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            use_pdl=overlap,
        )

    @cute.kernel
    def kernel(
        self,
        logits: Int64,
        tops: Int64,
        pitch: Int64,
        capacity: Int64,
        lens: Int64,
        lens_stride: Int64,
        limit: Int32,
    ) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        chunk, row, _ = cute.arch.block_idx()
        ptx.grid_wait()
        ptx.grid_launch_dependents()
        address = logits + Int64(row) * pitch * Int64(2)
        head = (Int32(address) & Int32(15)) >> Int32(1)
        address = address - Int64(head) * Int64(2)
        length = ptx.load(lens + Int64(row) * lens_stride * Int64(4), Int32)
        stop = head + limit
        first = chunk * Int32(config.groups) + thread
        raw = [Uint32(foreign.ABSENT * 0x10001) for _ in range(4 * TOPS_VECTORS)]
        for step in cutlass.range_constexpr(TOPS_VECTORS):
            group = first + Int32(config.threads * step)
            if foreign.is_whole(group, head, stop):
                loaded = ptx.load_v4(address + Int64(group) * Int64(16), "nc.stream")
                for word in cutlass.range_constexpr(4):
                    raw[4 * step + word] = loaded[word]
            if group * Int32(8) < stop and not foreign.is_whole(group, head, stop):
                keys = foreign.load_keys(address, group, head, stop)
                for word in cutlass.range_constexpr(4):
                    raw[4 * step + word] = keys[word]
        end = head + usable_length(length, limit)
        for step in cutlass.range_constexpr(TOPS_VECTORS):
            group = first + Int32(config.threads * step)
            if group * Int32(8) < end:
                if group * Int32(8) + Int32(8) > end:
                    for word in cutlass.range_constexpr(4):
                        inside = packed.inside_mask(group * Int32(8) + Int32(2 * word), Int32(0), end)
                        absent = Uint32(foreign.ABSENT * 0x10001)
                        raw[4 * step + word] = (raw[4 * step + word] & inside) | (
                            absent & (inside ^ Uint32(0xFFFFFFFF))
                        )
                top = packed.foreign_top(raw[4 * step : 4 * step + 4])
                ptx.store_u16(tops + Int64(row) * capacity + Int64(group) * Int64(2), top)


def build_tops(config: TopsConfig, arch: str) -> tuple[Any, tuple[Any, ...]]:
    """Jit function and fake arguments."""
    del arch
    i64, i32 = Int64(0), Int32(1)
    return Tops(config).__call__, (i64, i64, i64, i64, i64, i64, i32, i32, i32, i32, make_fake_stream())
