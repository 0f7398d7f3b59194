"""A ring of shared-memory stages between one producer warp and consumer warps, guarded by mbarriers.

Arrival counts are derived from the roles, never typed in twice: a `full` barrier expects one arrival (the producer's,
which also announces the bytes that the copy engine will bring), an `empty` barrier one per consumer warp.

    shape = RingShape(stages=6, groups=2, warps=4, stage_bytes=128 * 128 + 128 * 4)
    ring = Ring(shape, full_ptr, empty_ptr)          # Int64 smem arrays of `stages` each
    ring.init()                                      # one thread; then mbarrier_init_fence + block barrier
    producer: stage, phase = ring.producer_start(); ring.wait_empty(stage, phase); ring.announce(stage) [elected];
              issue copies on ring.full_barrier(stage); stage, phase = ring.next(stage, phase)
    consumer: stage, phase = ring.consumer_start(group); ring.wait_full(stage, phase); use; ring.release(stage) [all
              lanes]; stage, phase = ring.next_of_group(stage, phase)

A wait by parity is only right when the barrier is at most one phase behind: the waiter must know that the stage's
previous use has landed. Groups that take turns know it only of their own tiles, and copies land in any order; so the
depth is a multiple of the number of groups, and every stage always belongs to the same group. (With 4 stages and 7
takers a device run delivered tiles before their bytes.)
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Uint32

from keysieve.device import ptx

PRODUCER_ARRIVALS = 1  # announce() is executed by one elected lane of the producer warp


@dataclass(frozen=True)
class RingShape:
    """stages: depth. stage_bytes: bytes copied into a stage each time. warps: of one consumer group, all of which read
    a stage. groups: consumer groups that take turns, the g-th the tiles g, g + groups, ..."""

    stages: int
    stage_bytes: int
    warps: int
    groups: int = 1

    def __post_init__(self) -> None:
        if self.stages < 1 or self.warps < 1 or self.groups < 1:
            raise ValueError(f"{self}: stages, warps and groups are at least 1")
        if self.stages % self.groups:
            raise ValueError(f"{self}: stages must be a multiple of groups, or a group waits on another one's stage")
        if self.stage_bytes % 16 or not 0 < self.stage_bytes < 1 << 20:
            raise ValueError(f"{self}: stage_bytes is a multiple of 16 below 2^20 (the barrier's count)")

    @property
    def barrier_words(self) -> int:
        """64-bit words of shared memory for both sets of barriers."""
        return 2 * self.stages


class Ring:
    """Trace-time handle on the barriers of a ring. `full`, `empty`: shared pointers to Int64 arrays of `stages`."""

    def __init__(self, shape: RingShape, full: Any, empty: Any) -> None:
        self.shape = shape
        self.full = full
        self.empty = empty

    # The handle never changes and its pointers are defined outside every loop and branch that uses it, so dynamic
    # control flow has nothing to carry for it.
    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> "Ring":
        return self

    def init(self) -> None:
        """Initialise every barrier. One thread of the block; then `mbarrier_init_fence` and a block barrier."""
        for stage in range(self.shape.stages):
            cute.arch.mbarrier_init(self.full + stage, PRODUCER_ARRIVALS)
            cute.arch.mbarrier_init(self.empty + stage, self.shape.warps)

    def producer_start(self) -> tuple[Int32, Int32]:
        """First (stage, phase) of the producer: parity 1 passes on a fresh barrier."""
        return Int32(0), Int32(1)

    def consumer_start(self, group: Int32) -> tuple[Int32, Int32]:
        """First (stage, phase) of consumer group `group` (0 when there is one)."""
        return group, Int32(0)

    def next(self, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """The producer's following (stage, phase). Branch-free, so it may stand in any loop."""
        wrap = Int32(stage == Int32(self.shape.stages - 1))
        return (stage + Int32(1)) * (Int32(1) - wrap), phase ^ wrap

    def next_of_group(self, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """A consumer group's following (stage, phase): `groups` stages on. Branch-free."""
        after = stage + Int32(self.shape.groups)
        wrap = Int32(after >= Int32(self.shape.stages))
        return after - wrap * Int32(self.shape.stages), phase ^ wrap

    def wait_empty(self, stage: Int32, phase: Int32) -> None:
        """Producer: wait until the consumers have released `stage`."""
        cute.arch.mbarrier_wait(self.empty + stage, phase)

    def announce(self, stage: Int32, nbytes: Int32 | int | None = None) -> None:
        """Producer, one elected lane: arrive on `stage` and announce the bytes to come (default: stage_bytes)."""
        amount = self.shape.stage_bytes if nbytes is None else nbytes
        cute.arch.mbarrier_arrive_and_expect_tx(self.full + stage, amount)

    def full_barrier(self, stage: Int32) -> Any:
        """Pointer of the barrier that copies into `stage` complete on (for `cute.copy(..., tma_bar_ptr=)`)."""
        return self.full + stage

    def full_address(self, stage: Int32) -> Uint32:
        """The same as a shared address, for `ptx.bulk_load`."""
        return ptx.smem_addr(self.full + stage)

    def wait_full(self, stage: Int32, phase: Int32) -> None:
        """Consumer: wait until the bytes of `stage` have landed."""
        cute.arch.mbarrier_wait(self.full + stage, phase)

    def release(self, stage: Int32) -> None:
        """Consumer warp (all lanes): this warp has read `stage`. Converges the warp, then one lane arrives."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + stage)
