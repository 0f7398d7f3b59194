"""Where a scorer's time goes: stamps of one block's way, for tuning builds only (`trace` in the kernel's shape).

A traced build writes int64 [blocks, 8, 2] (cycles of the SM, global nanoseconds) to the address of `starts` instead of
the prefix table. Marks: 0 start, 1 grid wait over, 2 range known, 3 first copies issued, 4 first tile landed, 5 last
tile of consumer group 0 done, 6 its last request's queries and weights there, 7 its last tile's last product done.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from keysieve.device import ptx

START, WAITED, PLANNED, COPYING, LANDED, DONE, QUERIED, MULTIPLIED = range(8)
BLOCK_BYTES = 128


def traced(kernel: Any) -> bool:
    """Is this a traced build?"""
    return bool(getattr(kernel.shape, "trace", False))


@cute.jit
def mark(kernel: cutlass.Constexpr[Any], shared: Any, number: cutlass.Constexpr[int], here: Any) -> None:
    """Stamp `number` by one lane of the warps for which `here` holds; nothing in builds that are not traced."""
    if cutlass.const_expr(traced(kernel)):  # noqa: SIM102  # a trace-time test, then a run-time one
        if here:
            block, _, _ = cute.arch.block_idx()
            place = shared.trace + Int64(block) * Int64(BLOCK_BYTES) + Int64(16 * number)
            with cute.arch.elect_one():
                ptx.store(place, ptx.clock())
                ptx.store(place + Int64(8), ptx.global_ns())


@cute.jit
def mark_first(kernel: cutlass.Constexpr[Any], shared: Any, number: cutlass.Constexpr[int]) -> None:
    """`mark` that keeps what is there: the trace must have been zeroed. By a whole warp."""
    if cutlass.const_expr(traced(kernel)):
        block, _, _ = cute.arch.block_idx()
        seen = ptx.load(shared.trace + Int64(block) * Int64(BLOCK_BYTES) + Int64(16 * number), Int64, "volatile")
        mark(kernel, shared, number, seen == Int64(0))


TICKS = 1 << 16
"""Byte offset of the ticks behind the marks: int64 [4 blocks, 4 groups, 64 tiles, 4], cycles."""


@cute.jit
def tick(kernel: cutlass.Constexpr[Any], shared: Any, number: cutlass.Constexpr[int], tile: Any, group: Any) -> None:
    """Stamp step `number` (0 products start, 1 first done, 2 last done, 3 stored) of a tile of blocks 0 to 3."""
    if cutlass.const_expr(traced(kernel)):
        block, _, _ = cute.arch.block_idx()
        if block < Int32(4):
            place = ((block * Int32(4) + group) * Int32(64) + (tile & Int32(63))) * Int32(4) + Int32(number)
            with cute.arch.elect_one():
                ptx.store(shared.trace + Int64(TICKS) + Int64(place) * Int64(8), ptx.clock())


PLACES = 1 << 15
"""Byte offset of the blocks' SM numbers, int64 [blocks]."""


@cute.jit
def place(kernel: cutlass.Constexpr[Any], shared: Any, here: Any) -> None:
    """Note the SM of the block."""
    if cutlass.const_expr(traced(kernel)):  # noqa: SIM102  # a trace-time test, then a run-time one
        if here:
            block, _, _ = cute.arch.block_idx()
            with cute.arch.elect_one():
                ptx.store(shared.trace + Int64(PLACES) + Int64(block) * Int64(8), Int64(ptx.sm_number()))
