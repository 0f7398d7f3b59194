"""The merge with its blocks in an adverse order, for processes of their own: `adverse("late")` before ranks are built.

`late`: every block waits up to 16 us, another time on each rank, before it draws its row, so that which block has which
row is scrambled, and differs between ranks. `descending`: odd ranks begin with the highest row: what the order is there
to prevent. Kernels have names of their own, so caches keep them apart.
"""

from __future__ import annotations

import dataclasses
from typing import Any

ORDERS = ("late", "descending")


def adverse(order: str) -> None:
    """From now on this process's merges are the adverse ones."""
    import cutlass.cute as cute
    from cutlass import Int32, Int64, Uint32

    from keysieve.device import ptx
    from keysieve.kernels import exchange_host, exchange_rows

    draw = exchange_rows.draw_row

    @cute.jit
    def late(lists: Any, ticket: Int64, rows: Int32) -> Int32:
        block, _, _ = cute.arch.block_idx()
        mixed = (Uint32(block) + Uint32(lists.rank) * Uint32(0x10001)) * Uint32(0x9E3779B1)
        mixed = (mixed ^ (mixed >> Uint32(15))) * Uint32(0x85EBCA77)
        start, pause = ptx.global_ns(), Int64((mixed >> Uint32(16)) & Uint32(0x3FFF))
        while ptx.global_ns() - start < pause:
            pass
        return draw(lists, ticket, rows)

    @cute.jit
    def descending(lists: Any, ticket: Int64, rows: Int32) -> Int32:
        drawn = draw(lists, ticket, rows)
        if (Int32(lists.rank) & Int32(1)) != Int32(0):
            drawn = rows - Int32(1) - drawn
        return drawn

    exchange_rows.draw_row = {"late": late, "descending": descending}[order]  # type: ignore[assignment]  # on purpose
    kernel = exchange_host.MERGE
    exchange_host.MERGE = dataclasses.replace(kernel, name=f"merge_{order}")


HOLD = """
extern "C" __global__ void hold(int us) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < 1000ull * us);
}
"""
HOLD_BYTES = 200 * 1024
"""Shared memory of a holding block: a multiprocessor has room for nothing of ours beside it."""


class Holder:
    """A foreign kernel that keeps a number of multiprocessors to itself for a while."""

    def __init__(self, device: Any) -> None:
        import torch

        self.stream = torch.cuda.Stream(device)
        self.kernel = torch.cuda._compile_kernel(HOLD, "hold")
        self.kernel.set_shared_memory_config(HOLD_BYTES)

    def __call__(self, blocks: int, us: int) -> None:
        self.kernel((blocks, 1, 1), (32, 1, 1), [us], HOLD_BYTES, self.stream)
