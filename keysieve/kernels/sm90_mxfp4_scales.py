"""E2M1 codes and block scales as E4M3 numbers and one factor, exactly.

A vector of 128 elements has four scales. If they differ by at most 2^14, every element is an E4M3 number times one
power of two: the block whose scale is largest is widened with 2^6 (6 becomes 384), the others with up to 2^-8 (a half
becomes 2^-9, the smallest E4M3 number). Such a vector is *together*, its power of two the *factor* that it is
multiplied by afterwards. Which scales count, in this order: all four; if they reach too far, those of blocks that are
not zero. A vector that is not together then, or whose factor leaves 2^-46 .. 2^34, is *apart*: its elements are widened
with 2^0 and its products are formed a block at a time (`sm90_mxfp4_apart`). All of this depends on the vector's bytes
alone.

Eight nibbles make two words of four E4M3 numbers: magnitudes by one byte permutation each, whose table is the eight
magnitudes of the exponent and whose selector is the codes; signs by another, which gives 0x40 without and 0 with a sign
(the selector's top bit replicates the byte's), doubled and added. So every number comes out negated, keys and queries
alike.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from keysieve.device import packed, ptx
from keysieve.kernels.sm90_mxfp4_config import REACH, TABLE, TOP
from keysieve.kernels.sm90_score_store import select

NEAREST = 127 - 40
FARTHEST = 127 + 40
"""Scale codes within which the factor of a vector may lie."""

PLAIN = 8 * (REACH - TOP) * 0x01010101
"""Table offsets of four blocks that are widened with 2^0."""

NO_CODES = 0x7F7F7F7F
"""Four scale codes of one: of a vector that is together, whose scales are in its elements and its factor."""

NAN_BITS = 0x7FC00000
MAGNITUDES = 0x77777777
HALVES = 0x40404040


def table_bytes(exponent: int) -> list[int]:
    """The E4M3 codes of 0, 0.5, 1, 1.5, 2, 3, 4, 6 times 2^exponent, -8 <= exponent <= 6."""
    found = []
    for code in range(8):
        top, low = code >> 1, code & 1
        # value = m * 2^e with m of 0 .. 3
        m, e = (low, exponent - 1) if top == 0 else (2 + low, exponent + top - 2)
        if m == 0:
            found.append(0)
            continue
        if m >= 2:
            m, e = m - 2, e + 1  # 1.m * 2^e, m in units of a half
        else:
            m = 0
        field = e + 7
        found.append(field << 3 | m << 2 if field > 0 else (8 + 4 * m) >> (1 - field))
    return found


def table_words() -> list[int]:
    """The table of widened codes: two words for each exponent from TOP - REACH to TOP; then HALVES and 2."""
    words = []
    for exponent in range(TOP - REACH, TOP + 1):
        eight = table_bytes(exponent)
        words += [int.from_bytes(bytes(eight[i : i + 4]), "little") for i in (0, 4)]
    return [*words, HALVES, 2, 0, 0, 0, 0]


def halves_maximum(even: Uint32, odd: Uint32, best: Any) -> Uint32:
    """Maximum (or minimum) of the four halves of two words, in both halves."""
    both = best(even, odd)
    return best(both, ptx.byte_perm(both, both, Uint32(0x1032)))


def spread_of(codes: Uint32) -> tuple[Uint32, Uint32]:
    """(largest, smallest) of the four bytes of a word, each in both halves of its word."""
    even = codes & Uint32(0x00FF00FF)
    odd = ptx.byte_perm(codes, Uint32(0), Uint32(0x4341))
    return halves_maximum(even, odd, ptx.max_u16x2), halves_maximum(even, odd, packed.min_u16x2)


def within_reach(largest: Uint32, smallest: Uint32) -> Any:
    """Do scales from `smallest` to `largest` (in both halves) make a vector that is together?"""
    near = (largest - smallest) <= Uint32(REACH * 0x00010001)
    return near & ((largest - Uint32(NEAREST * 0x00010001)) <= Uint32((FARTHEST - NEAREST) * 0x00010001))


def offsets_from(codes: Uint32, largest: Uint32) -> Uint32:
    """Table offsets of four blocks, a byte each: 8 * (14 - how far below the largest their scales lie)."""
    below = ptx.byte_perm(largest, largest, Uint32(0)) - codes
    return Uint32(8 * REACH * 0x01010101) - below * Uint32(8)


def factor_bits(largest: Uint32) -> Uint32:
    """Float32 bits of the factor of a vector whose largest scale that counts is this (in the low half)."""
    return ((largest & Uint32(0xFFFF)) - Uint32(TOP)) << Uint32(23)


def near_scales(codes: tuple[Uint32, Uint32]) -> Any:
    """Of two vectors at once: (table offsets, factor bits, a word that is not zero unless all their scales are within
    reach). The largest and smallest scales of both stand in the halves of a word; the same as of `spread_of`,
    `offsets_from` and `factor_bits` where it is zero."""
    even = [word & Uint32(0x00FF00FF) for word in codes]
    odd = [ptx.byte_perm(word, Uint32(0), Uint32(0x4341)) for word in codes]
    largest = ptx.max_u16x2(*halves_of([ptx.max_u16x2(a, b) for a, b in zip(even, odd, strict=True)]))
    smallest = packed.min_u16x2(*halves_of([packed.min_u16x2(a, b) for a, b in zip(even, odd, strict=True)]))
    # Bit 15 of a half says that its vector is not; a half that borrows from the other one has it itself.
    far = (smallest + Uint32(REACH * 0x00010001)) - largest
    outside = (largest - Uint32(NEAREST * 0x00010001)) | (Uint32(FARTHEST * 0x00010001) - largest)
    both = [largest & Uint32(0xFFFF), largest >> Uint32(16)]
    offsets = [codes[i] * Uint32(8) + (Uint32(8 * REACH * 0x01010101) - both[i] * Uint32(0x08080808)) for i in range(2)]
    factors = [both[i] * Uint32(1 << 23) - Uint32(TOP << 23) for i in range(2)]
    return offsets, factors, (far | outside) & Uint32(0x80008000)


def halves_of(words: list[Uint32]) -> tuple[Uint32, Uint32]:
    """(the low halves of two words, their high halves)."""
    return ptx.byte_perm(words[0], words[1], Uint32(0x5410)), ptx.byte_perm(words[0], words[1], Uint32(0x7632))


def place_scales(codes: Uint32, zero: Uint32) -> Any:
    """(table offsets, factor bits, 1 if apart) of any vector. zero: 0xFF in the bytes of blocks that are zero."""
    largest, smallest = spread_of(codes)
    whole = within_reach(largest, smallest)
    # Blocks that are zero take part as neither largest nor smallest.
    top, _low = spread_of(codes & (zero ^ Uint32(0xFFFFFFFF)))
    _high, least = spread_of(codes | zero)
    nothing = zero == Uint32(0xFFFFFFFF)
    top = select(nothing, Uint32(127 * 0x00010001), top)
    least = select(nothing, Uint32(127 * 0x00010001), least)
    most = select(whole, largest, top)
    together = whole | within_reach(top, least)
    kept = select(whole, codes, (codes & (zero ^ Uint32(0xFFFFFFFF))) | (ptx.byte_perm(most, most, Uint32(0)) & zero))
    not_a_number = (largest & Uint32(0xFFFF)) == Uint32(255)
    offsets = select(together, offsets_from(kept, most), Uint32(PLAIN))
    factor = select(together, factor_bits(most), Uint32(0x3F800000))
    factor = select(not_a_number, Uint32(NAN_BITS), factor)
    apart = select(together | not_a_number, Int32(0), Int32(1))
    return Uint32(offsets), Uint32(factor), Int32(apart)


def fixed_words(table: Uint32) -> tuple[Uint32, ...]:
    """What `widen_word` wants in registers, from behind the table."""
    return tuple(ptx.load_shared(table + Uint32(TABLE + 4 * i)) for i in range(2))


def widen_word(word: Uint32, low: Uint32, high: Uint32, fixed: tuple[Uint32, ...]) -> tuple[Uint32, Uint32]:
    """Eight E2M1 codes as two words of four negated E4M3 numbers; low, high: the magnitudes of their exponent.

    fixed: HALVES and 2, loaded: the assembler would make constants again at each use, and multiply by shifting, while
    the integer unit is what is short. So the codes' upper half is moved down by the adder of halves. The signs' is not:
    multiplying and adding there takes time from the matrix products, and costs two instructions instead of one.
    """
    halves, two = fixed
    codes = word & Uint32(MAGNITUDES)
    upper, above = packed.high_half(codes), word >> Uint32(16)
    first, second = ptx.byte_perm(low, high, codes), ptx.byte_perm(low, high, upper)
    sign, other = ptx.byte_perm(halves, halves, word), ptx.byte_perm(halves, halves, above)
    return packed.multiply_add(sign, two, first), packed.multiply_add(other, two, second)


@cute.jit
def zero_blocks(key: Uint32) -> Uint32:
    """0xFF in the bytes of a key's blocks that hold nothing but zeros; key: shared address of its 64 bytes."""
    zero = Uint32(0)
    for block in cutlass.range_constexpr(4):
        four = ptx.load_shared_v4(key + Uint32(16 * block))
        some = (four[0] | four[1] | four[2] | four[3]) & Uint32(MAGNITUDES)
        zero = zero | select(some == Uint32(0), Uint32(0xFF << (8 * block)), Uint32(0))
    return zero
