"""What the scorers of all architectures do around their matrix part: plan the work, and report it."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import ptx
from keysieve.kernels import schedule


class Frame:
    """Base of a scorer kernel. config, shape: its configuration and cut.

    `shared` has the shared addresses `prefix` (requests + 1 words) and `scratch` (a word a warp).
    """

    config: Any
    shape: Any

    @cute.jit
    def plan_many(
        self,
        shared: Any,
        lens: Any,
        flags: Int64,
        requests: Int32,
        limit: Int32,
        skip: Int32,
        thread: Int32,
        block: Int32,
    ) -> None:
        """The prefix table by all threads of the block; ends with a block barrier."""
        faults = schedule.prefix_of_many(
            lens,
            requests,
            limit,
            skip,
            shared.prefix,
            shared.scratch,
            thread,
            self.config.next_n,
            self.shape.threads,
        )
        cute.arch.sync_threads()
        if faults > Int32(0) and block == Int32(0):
            ptx.red_global(flags, Uint32(1 << schedule.FLAG_BAD_LENGTH), "or")

    @cute.jit
    def report(self, shared: Any, starts: Int64, flags: Int64, requests: Int32, capacity: Int32, total: Int32) -> None:
        """One warp of block 0: the overflow flag, and the prefix table (int32 [requests + 1]) for the next kernel."""
        lane = cute.arch.lane_idx()
        if total > capacity and lane == Int32(0):
            ptx.red_global(flags, Uint32(1 << schedule.FLAG_OVERFLOW), "or")
        if cutlass.const_expr(not self.shape.trace):  # noqa: SIM102  # a trace-time test, then a run-time one
            if starts != Int64(0):
                for request in cutlass.range(lane, requests + Int32(1), 32, unroll=1):
                    before = schedule.tiles_before(shared.prefix, request)
                    ptx.store(starts + Int64(request) * Int64(4), before)
