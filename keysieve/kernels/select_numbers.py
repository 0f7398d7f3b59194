"""Keys that stay the BF16 numbers they are, in the second stage of the exact selection.

Turning every key into a key16 costs two instructions for two keys, and comparing integers by carries two a key. Numbers
are counted by their own upper bits, in bins that are read in key16's order; the other bits of key16 are what is left of
the difference from the digit's bits; and two numbers are compared at once.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import packed, ptx


def flip(positive: Any) -> Uint32:
    """What makes key16 of bits, or bits of key16, in both halves: for numbers of one sign."""
    return Uint32(0xFFFFFFFF) - Uint32(positive) * Uint32(0x7FFF7FFF)


def bits_of(key: Uint32) -> Uint32:
    """The bits of the number whose key16 is `key`, in both halves."""
    return (key * Uint32(0x10001)) ^ flip(key >= Uint32(0x8000))


@dsl_user_op
def number_masks(words: Any, number: Uint32, *, loc: Any = None, ip: Any = None) -> Any:
    """(bit i set where number i of eight is above `number`, bit i set where it equals it), i = 0..7. number: the same
    in both halves, not a NaN. NaNs are neither. Half the instructions of `packed.masks_x8`."""
    lines = ["{ .reg .b32 t, m; mov.b32 m, 0;"]
    for index in range(4):
        both = 1 << (2 * index) | 1 << (16 + 2 * index + 1)
        for name, shift in (("gt", 0), ("eq", 8)):
            lines.append(f"set.{name}.u32.bf16x2 t, ${index + 2}, $6; and.b32 t, t, {both << shift}; or.b32 m, m, t;")
    lines.append("shr.u32 t, m, 16; or.b32 m, m, t; and.b32 $0, m, 255; bfe.u32 $1, m, 8, 8; }")
    return ptx.asm(" ".join(lines), "=r,=r,r,r,r,r,r", (Uint32, Uint32), (*words, number), pure=True, loc=loc, ip=ip)


def bins_at(place: Uint32, count: int) -> list[Int32]:
    """`count` (2, or a multiple of 4) neighbouring counters from shared memory, the last one first."""
    if count == 2:
        loaded = list(packed.load_shared_v2(place))
    else:
        loaded = [word for index in range(count // 4) for word in ptx.load_shared_v4(place + Uint32(16 * index))]
    return [Int32(word) for word in reversed(loaded)]


@cute.jit
def number_bins(histogram: Uint32, thread: Int32, each: cutlass.Constexpr[int], bits: cutlass.Constexpr[int]) -> Any:
    """`each` (2 or 4) bins of a histogram by the upper `bits` bits of numbers, best first, the first thread's the best:
    those of positive numbers from the largest down, then those of negative ones from the smallest bits up."""
    positive = thread < Int32((1 << (bits - 1)) // each)
    first = thread * Int32(each)
    if positive:
        first = Int32((1 << (bits - 1)) - each) - first
    loaded = bins_at(histogram + Uint32(first) * Uint32(4), each)
    bins = []
    for index in cutlass.range_constexpr(each):
        one = loaded[each - 1 - index]
        if positive:
            one = loaded[index]
        bins.append(one)
    return bins
