"""Where a scorer's time goes: stamps of one block's way, for tuning builds only (`trace` in the kernel's shape).

A traced build writes int64 [blocks, 8, 2] (cycles of the SM, global nanoseconds) to the address of `starts` instead of
the prefix table. Marks: 0 start, 1 grid wait over, 2 range known, 3 first copies issued, 4 first tile landed, 5 last
tile of consumer group 0 done.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from keysieve.device import ptx

START, WAITED, PLANNED, COPYING, LANDED, DONE = range(6)
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
