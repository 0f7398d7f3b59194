"""key16 on registers, and candidate words. Integers only: every function also runs on the CPU as a jit function.

`key16` is the order-preserving image of BF16 bits as an unsigned number (larger is better); 0 means empty and never
denotes a key. Bits must be canonical first (-0 as +0, every NaN as 0xFFC0) wherever they may come from outside.
A word is a `Uint32`; "x2" forms treat its two 16-bit halves alike (low half = lower index).
"""

from cutlass import Int32, Uint32

LANES_SIGN = 0x00010001  # bit 0 of either half
LANES_TOP = 0x80008000  # sign bit of either half


def key16(bits: Uint32) -> Uint32:
    """key16 of BF16 bits (0..0xFFFF in, 0..0xFFFF out): `bits ^ 0xFFFF` when negative, else `bits ^ 0x8000`."""
    return (bits ^ ((bits >> Uint32(15)) * Uint32(0x7FFF))) ^ Uint32(0x8000)


def bits_of_key16(key: Uint32) -> Uint32:
    """The BF16 bits a key16 came from (inverse of `key16`)."""
    negative = (key >> Uint32(15)) ^ Uint32(1)
    return (key ^ Uint32(0x8000)) ^ (negative * Uint32(0x7FFF))


def key16x2(word: Uint32) -> Uint32:
    """key16 of both halves of a word of two BF16 values."""
    sign = (word >> Uint32(15)) & Uint32(LANES_SIGN)
    return (word ^ (sign * Uint32(0x7FFF))) ^ Uint32(LANES_TOP)


def bits_of_key16x2(word: Uint32) -> Uint32:
    """Inverse of `key16x2`."""
    negative = ((word >> Uint32(15)) & Uint32(LANES_SIGN)) ^ Uint32(LANES_SIGN)
    return (word ^ Uint32(LANES_TOP)) ^ (negative * Uint32(0x7FFF))


def canonical16(bits: Uint32) -> Uint32:
    """Canonical BF16 bits: -0 becomes +0, every NaN becomes 0xFFC0, all else unchanged."""
    magnitude = bits & Uint32(0x7FFF)
    nan = Uint32(magnitude > Uint32(0x7F80))
    zero = Uint32(magnitude == Uint32(0))
    kept = bits * (Uint32(1) - zero)
    return kept * (Uint32(1) - nan) + nan * Uint32(0xFFC0)


def canonical16x2(word: Uint32) -> Uint32:
    """`canonical16` of both halves."""
    return canonical16(word & Uint32(0xFFFF)) | (canonical16(word >> Uint32(16)) << Uint32(16))


def low16(word: Uint32) -> Uint32:
    """The half with the lower index."""
    return word & Uint32(0xFFFF)


def high16(word: Uint32) -> Uint32:
    """The half with the higher index."""
    return word >> Uint32(16)


def pack16(low: Uint32, high: Uint32) -> Uint32:
    """Two 16-bit values (upper bits zero) as one word."""
    return low | (high << Uint32(16))


def candidate_word(key: Uint32, index: Int32) -> Uint32:
    """First word of a candidate: `key16 << 16 | (0xFFFF - (index & 0xFFFF))`. 0 is reserved for an empty entry."""
    return (key << Uint32(16)) | (Uint32(0xFFFF) - (Uint32(index) & Uint32(0xFFFF)))


def candidate_key(word: Uint32) -> Uint32:
    """key16 of a candidate's first word (0: empty entry)."""
    return word >> Uint32(16)


def candidate_index(word: Uint32, high: Uint32) -> Int32:
    """Local index of a candidate from its first word and the plane bits (`high` = index >> 16)."""
    return Int32((Uint32(0xFFFF) - (word & Uint32(0xFFFF))) | (high << Uint32(16)))
