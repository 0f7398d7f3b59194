"""Bounded spins, and device flags. Nothing here waits for ever.

A spin polls until a value appears or the global timer passes a limit; on expiry it writes a report (`report.py`) and
traps. The limit is a run-time argument (nanoseconds), so that tests can use a short one.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from keysieve.device import ptx, report


def write_report(
    where: Int64,
    rank: Uint32,
    row: Uint32,
    source: Uint32,
    expected: Uint32,
    seen: Uint32,
    stage: Uint32,
    more: dict[int, Uint32] | None = None,
) -> None:
    """Write a spin report at global address `where` (64 bytes, host-visible): fields first, the magic word last.

    more: further words by their number in `report`. Where several threads may report, one of them claims the place
    first: a reader gets one thread's words or a mixture otherwise.
    """
    fields = {
        report.WORD_RANK: rank,
        report.WORD_ROW: row,
        report.WORD_SOURCE: source,
        report.WORD_EXPECTED: expected,
        report.WORD_SEEN: seen,
        report.WORD_STAGE: stage,
        **(more or {}),
    }
    for word, value in fields.items():
        ptx.store(where + Int64(4 * word), value, "relaxed", "sys")
    ptx.store(where, Uint32(report.REPORT_MAGIC), "release", "sys")
    ptx.fence("sys")


@cute.jit
def wait_word(
    addr: Int64,
    expected: Uint32,
    limit_ns: Int64,
    where: Int64,
    rank: Uint32,
    row: Uint32,
    source: Uint32,
    stage: Uint32,
) -> None:
    """Poll the u32 at `addr` (acquire, system scope) until it equals `expected`; after `limit_ns` report and trap."""
    seen = ptx.load(addr, Uint32, "acquire", "sys")
    if seen != expected:
        start = ptx.global_ns()
        late = Boolean(False)
        while seen != expected and not late:
            seen = ptx.load(addr, Uint32, "acquire", "sys")
            late = ptx.global_ns() - start > limit_ns
        if seen != expected:
            write_report(where, rank, row, source, expected, seen, stage)
            ptx.trap()


@cute.jit
def wait_pair(
    addr: Int64,
    tag: Uint32,
    limit_ns: Int64,
    where: Int64,
    rank: Uint32,
    row: Uint32,
    source: Uint32,
    stage: Uint32,
) -> Any:
    """Poll a tagged pair until both its tags equal `tag`; returns its two words. After `limit_ns` report and trap."""
    w0, t0, w1, t1 = ptx.load_pair(addr)
    if ((t0 ^ tag) | (t1 ^ tag)) != Uint32(0):
        start = ptx.global_ns()
        late = Boolean(False)
        while ((t0 ^ tag) | (t1 ^ tag)) != Uint32(0) and not late:
            w0, t0, w1, t1 = ptx.load_pair(addr)
            late = ptx.global_ns() - start > limit_ns
        if ((t0 ^ tag) | (t1 ^ tag)) != Uint32(0):
            seen = t0
            if t0 == tag:
                seen = t1
            write_report(where, rank, row, source, tag, seen, stage)
            ptx.trap()
    return w0, w1


def raise_flag(flags: Int64, bit: int) -> None:
    """Set bit `bit` (a Python number) of the u32 device flag word: the next host check reports it."""
    ptx.red_global(flags, Uint32(1 << bit), "or", "relaxed", "gpu")


def elect_lane() -> Any:
    """`with elect_lane():` runs its body in one lane of a converged warp."""
    return cute.arch.elect_one()


def warp_converge() -> None:
    """Reconverge the warp before an .aligned instruction (matrix unit, tensor-memory load, register reallocation)."""
    cute.arch.sync_warp()


def named_barrier(number: int, threads: int) -> None:
    """Barrier `number` (1..15; 0 is the block's) among `threads` threads, a multiple of 32."""
    if not 0 < number < 16 or threads % 32 or threads <= 0:
        raise ValueError(f"named_barrier({number}, {threads}): number 1..15, threads a positive multiple of 32")
    cute.arch.barrier(barrier_id=Int32(number), number_of_threads=Int32(threads))


def wait_barrier(barrier: Any, parity: Int32) -> None:
    """Wait for the phase `parity` of a shared mbarrier, then reconverge the warp.

    Lanes may leave the polling loop one by one. What usually follows, a matrix instruction or a copy that the warp
    issues once, is wrong or fatal in a warp that has not come together again.
    """
    cute.arch.mbarrier_wait(barrier, parity)
    cute.arch.sync_warp()
