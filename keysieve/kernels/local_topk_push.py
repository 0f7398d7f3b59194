"""Words of a row to all ranks, as tagged pairs: docs/dcp.md."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import packed, ptx
from keysieve.kernels import local_topk_steps as steps


@cute.jit
def push(row: Any, count: Int32, begin: Int32, end: Int32, call: Any) -> None:
    """Push words begin .. end - 1 to every rank, another rank first for every rank; who has the last word pushes
    the padding behind it and the signature too. Where a pair's words are two blocks', each pushes its half. Many
    ranks are shared out to quarters of a block that is not small. One block barrier, when all is known but the
    words."""
    signature, length, calls, peers, slots, max_rows, world, rank, number = call
    tag = _next_tag(calls)
    pairs = ((count + Int32(1)) >> Int32(1)) + Int32(1)
    first = begin
    pushed = end
    if end == count:
        pushed = pairs * Int32(2)
    if peers == Int64(0) or first == pushed:
        first = Int32(0)
        pushed = Int32(0)
    place = Int32(tag & Uint32(1)) * world + rank
    slot = slots + (Int64(place) * Int64(max_rows) + Int64(number)) * Int64(pairs) * Int64(16)
    quarters = Int32(0)  # log2 of the parts of the block
    if cutlass.const_expr(row.config.threads >= 512):
        quarters = Int32(world >= Int32(4)) * Int32(2)
    each = Int32(row.config.threads) >> quarters
    part = row.thread >> (Int32(row.config.threads.bit_length() - 1) - quarters)
    leading = rank + part + Int32(1)
    leading = leading - world * Int32(leading >= world)
    leading_block = ptx.load(row.peers + Uint32(leading) * Uint32(8), Int64, space="shared::cta") + slot
    cute.arch.sync_threads()
    steps.mark(row, 9)
    for pair in cutlass.range(
        (first >> Int32(1)) + (row.thread & (each - Int32(1))), (pushed + Int32(1)) >> Int32(1), each, unroll=1
    ):
        lower, upper = signature, length
        if pair < pairs - Int32(1):
            lower, upper = packed.load_shared_v2(row.words + Uint32(pair) * Uint32(8))
        only = Int32(0)  # 1, 2: only the first, only the second word
        if cutlass.const_expr(row.config.cluster > 1):
            only = Int32(pair * Int32(2) < first) * Int32(2) + Int32(pair * Int32(2) + Int32(2) > pushed)
        target = leading
        block = leading_block
        for _step in cutlass.range(part, world, Int32(1) << quarters, unroll=1):
            address = block + Int64(pair) * Int64(16)
            if only == Int32(0):
                ptx.store_pair(address, lower, upper, tag)
            else:
                half = lower
                if only == Int32(2):
                    half = upper
                    address = address + Int64(8)
                word = Int64(half) | (Int64(tag) << Int64(32))
                ptx.store(address, word, "relaxed", "sys")
            target = target + (Int32(1) << quarters)
            target = target - world * Int32(target >= world)
            block = ptx.load(row.peers + Uint32(target) * Uint32(8), Int64, space="shared::cta") + slot


def _next_tag(calls: Uint32) -> Uint32:
    """One more, added here and not where the calls are loaded: that would wait for them before anything else is."""
    return ptx.asm("add.u32 $0, $1, 1;", "=r,r", (Uint32,), (calls,))[0]
