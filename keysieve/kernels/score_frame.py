"""What the scorers of all architectures do around their matrix part: plan the work, and report it."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import ptx
from keysieve.kernels import schedule


class Work:
    """What a step asks of a scorer, as one argument of its kernel: device byte addresses (0 where unused) and numbers.

    table_stride: entries between table rows. pitch: elements between rows of pitched logits. tops: for pitched logits,
    which have none, the sharding word in their place. pages: of the pool. limit: longest usable length. skip: requests
    whose longest row is at most this are not scored. capacity: tiles the compact buffer holds for every row of a
    request. over: `schedule_homes.reciprocal` of the requests.
    """

    def __init__(
        self,
        weights: Int64,
        lens: Int64,
        table: Int64,
        logits: Int64,
        tops: Int64,
        starts: Int64,
        flags: Int64,
        table_stride: Int64,
        pitch: Int64,
        pages: Int32,
        requests: Int32,
        limit: Int32,
        skip: Int32,
        capacity: Int32,
        over: Int32,
    ) -> None:
        self.weights = weights
        self.lens = lens
        self.table = table
        self.logits = logits
        self.tops = tops
        self.starts = starts
        self.flags = flags
        self.table_stride = table_stride
        self.pitch = pitch
        self.pages = pages
        self.requests = requests
        self.limit = limit
        self.skip = skip
        self.capacity = capacity
        self.over = over

    def __extract_mlir_values__(self) -> list[Any]:
        return [value for number in vars(self).values() for value in cutlass.extract_mlir_values(number)]

    def __new_from_mlir_values__(self, values: list[Any]) -> "Work":
        numbers = zip(vars(self).values(), values, strict=True)
        return Work(*(cutlass.new_from_mlir_values(number, [value]) for number, value in numbers))


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
