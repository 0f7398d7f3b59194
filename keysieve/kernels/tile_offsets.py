"""Prefix sum of tiles over requests (see `tile_offsets_config`), one block of 1,024 threads.

A request of rows with lengths `s` needs `ceil(max(s) / 128)` tiles, or none when that maximum is at most `skip_up_to`
(the compact layout's rule with skip_up_to = topk; 0 scores every request). A row longer than `max_context` counts as
empty and raises a device flag.

Outputs: offsets int32 [requests + 1], exclusive prefix sums, the total last; counts int32 [rows], the keys each row
selects, min(max(len, 0), topk); info int32 [4], see `INFO_*`.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from keysieve.device import paged, ptx, scan, sync
from keysieve.kernels.tile_offsets_config import (
    FLAG_TOO_LONG,
    INFO_EMPTY,
    INFO_REFUSED,
    INFO_SHORT,
    INFO_TILES,
    ITEMS,
    THREADS,
    TileOffsetsConfig,
)
from keysieve.spec import TILE

WARPS = THREADS // 32
LOG2_TILE = TILE.bit_length() - 1
TALLIES = 3  # short, empty and refused rows


class TileOffsets:
    """The jit entry of one configuration."""

    def __init__(self, config: TileOffsetsConfig) -> None:
        self.next_n = config.next_n

    @cute.jit
    def __call__(
        self,
        lens: Int64,
        offsets: Int64,
        counts: Int64,
        info: Int64,
        flags: Int64,
        requests: Int32,
        skip_up_to: Int32,
        topk: Int32,
        max_context: Int32,
        chained: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Addresses of int32 arrays (see the module), then limits; chained: 1 to launch as a programmatic dependent."""
        self.kernel.set_name_prefix(f"tile_offsets_n{self.next_n}")
        self.kernel(lens, offsets, counts, info, flags, requests, skip_up_to, topk, max_context).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=chained
        )

    @cute.kernel
    def kernel(
        self,
        lens: Int64,
        offsets: Int64,
        counts: Int64,
        info: Int64,
        flags: Int64,
        requests: Int32,
        skip_up_to: Int32,
        topk: Int32,
        max_context: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        scratch = ptx.smem_addr(smem.allocate_array(Uint32, WARPS))
        tallies = ptx.smem_addr(smem.allocate_array(Uint32, TALLIES))
        if thread < Int32(TALLIES):
            ptx.store_shared(tallies + Uint32(thread) * Uint32(4), Uint32(0))
        cute.arch.sync_threads()
        ptx.grid_wait()

        tiles = []
        mine = Int32(0)
        for item in cutlass.range_constexpr(ITEMS):
            request = thread * Int32(ITEMS) + Int32(item)
            need = Int32(0)
            if request < requests:
                longest = self.count_rows(lens, counts, flags, tallies, request, topk, max_context)
                need = paged.tiles_of_length(longest, LOG2_TILE, skip_up_to)
            tiles.append(need)
            mine = mine + need
        before, total = scan.block_exclusive(mine, scratch, thread, WARPS)

        for item in cutlass.range_constexpr(ITEMS):
            request = thread * Int32(ITEMS) + Int32(item)
            if request < requests:
                ptx.store(offsets + Int64(request) * Int64(4), before)
            before = before + tiles[item]
        if thread == Int32(0):
            ptx.store(offsets + Int64(requests) * Int64(4), total)
            ptx.store(info + Int64(4 * INFO_TILES), total)
            for word, name in enumerate((INFO_SHORT, INFO_EMPTY, INFO_REFUSED)):
                ptx.store(info + Int64(4 * name), Int32(ptx.load_shared(tallies + Uint32(4 * word))))

    @cute.jit
    def count_rows(
        self,
        lens: Int64,
        counts: Int64,
        flags: Int64,
        tallies: Uint32,
        request: Int32,
        topk: Int32,
        max_context: Int32,
    ) -> Any:
        """Write the counts of a request's rows, tally them, and return the longest length (0 if none)."""
        longest = Int32(0)
        for j in cutlass.range_constexpr(self.next_n):
            row = Int64(request) * Int64(self.next_n) + Int64(j)
            length = ptx.load(lens + row * Int64(4), Int32)
            if length > max_context:
                length = Int32(0)
                ptx.red_shared(tallies + Uint32(8), Uint32(1))
                sync.raise_flag(flags, FLAG_TOO_LONG)
            if length <= Int32(0):
                length = Int32(0)
                ptx.red_shared(tallies + Uint32(4), Uint32(1))
            chosen = length
            if length > topk:
                chosen = topk
            if length > Int32(0) and length <= topk:
                ptx.red_shared(tallies, Uint32(1))
            ptx.store(counts + row * Int64(4), chosen)
            if length > longest:
                longest = length
        return longest


def build(config: TileOffsetsConfig, arch: str) -> tuple[Any, tuple[Any, ...]]:
    """The jit entry and fake arguments of a configuration."""
    del arch  # the same code for every target
    addresses = (Int64(0),) * 5
    scalars = (Int32(0),) * 5
    return TileOffsets(config), (*addresses, *scalars, make_fake_stream())
