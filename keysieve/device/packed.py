"""Eight 16-bit keys as four words: foreign BF16 bits to key16, group maxima, comparison masks, byte-wide shared memory.

Word i of a vector holds keys 2i (low half) and 2i + 1 (high half), as a 16-byte load gives them.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import keys, ptx

KEYS = 8
KEY16_NAN_PLUS = 0xFFFF  # image of the positive NaN 0x7FFF that BF16 arithmetic returns
KEY16_NAN = 0x003F


@dsl_user_op
def max_bf16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Lane-wise BF16 maximum; a NaN loses against any number, +0 wins against -0."""
    return ptx.asm("max.bf16x2 $0, $1, $2;", "=r,r,r", (Uint32,), (a, b), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def settle_bf16x2(word: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """`x * 1 + 0` on both halves: -0 becomes +0, every NaN becomes 0x7FFF, all else stays (subnormals included)."""
    text = "fma.rn.bf16x2 $0, $1, $2, $3;"
    operands = (word, Uint32(0x3F803F80), Uint32(0))
    return ptx.asm(text, "=r,r,r,r", (Uint32,), operands, pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def sign_mask_x2(word: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """0xFFFF in every half whose sign bit is set, else 0 (one byte permutation in its sign-spreading mode)."""
    text = "prmt.b32 $0, $1, 0, 0xBB99;"
    return ptx.asm(text, "=r,r", (Uint32,), (word,), pure=True, loc=loc, ip=ip)[0]


def key16x2_fast(word: Uint32) -> Uint32:
    """`keys.key16x2` in two instructions (kernels only)."""
    return word ^ (sign_mask_x2(word) | Uint32(keys.LANES_TOP))


@cute.jit
def foreign_key16x8(words: Any) -> Any:
    """key16 of eight arbitrary BF16 values: -0 as +0, every NaN as the canonical one."""
    out = [key16x2_fast(settle_bf16x2(word)) for word in words]
    most = ptx.max_u16x2(ptx.max_u16x2(out[0], out[1]), ptx.max_u16x2(out[2], out[3]))
    # A half of all ones: its lower 15 bits carry into the top bit, which is set as well.
    odd = ((most & Uint32(0x7FFF7FFF)) + Uint32(0x00010001)) & most & Uint32(keys.LANES_TOP)
    if odd != Uint32(0):
        for index in cutlass.range_constexpr(4):
            low = keys.low16(out[index])
            high = keys.high16(out[index])
            if low == Uint32(KEY16_NAN_PLUS):
                low = Uint32(KEY16_NAN)
            if high == Uint32(KEY16_NAN_PLUS):
                high = Uint32(KEY16_NAN)
            out[index] = keys.pack16(low, high)
    return out


@cute.jit
def foreign_top(words: Any) -> Uint32:
    """key16 of the best of eight arbitrary BF16 values; masked ones must have been set to a NaN."""
    best = max_bf16x2(max_bf16x2(words[0], words[1]), max_bf16x2(words[2], words[3]))
    best = max_bf16x2(best, best >> Uint32(16))
    key = keys.low16(key16x2_fast(settle_bf16x2(best)))
    if key == Uint32(KEY16_NAN_PLUS):
        key = Uint32(KEY16_NAN)
    return key


def inside_mask(first: Int32, begin: Int32, end: Int32) -> Uint32:
    """Mask of the halves of a word at index `first` (low) and `first + 1` (high) that lie in [begin, end)."""
    low = Uint32(first >= begin) * Uint32(first < end)
    second = first + Int32(1)
    high = Uint32(second >= begin) * Uint32(second < end)
    return low * Uint32(0xFFFF) | high * Uint32(0xFFFF0000)


@dsl_user_op
def _reach_x8(a: Uint32, b: Uint32, c: Uint32, d: Uint32, minus: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Bit i set where key i is at least t; minus = 2^32 - (t << 16). Two instructions a key: the carry out of the
    comparing addition is shifted into the mask."""
    lines = ["{ .reg .b32 t; mov.b32 $0, 0;"]
    for operand in ("$4", "$3", "$2", "$1"):
        lines.append(f"add.cc.u32 t, {operand}, $5; addc.u32 $0, $0, $0;")
        lines.append(f"shl.b32 t, {operand}, 16; add.cc.u32 t, t, $5; addc.u32 $0, $0, $0;")
    text = " ".join([*lines, "}"])
    return ptx.asm(text, "=&r,r,r,r,r,r", (Uint32,), (a, b, c, d, minus), pure=True, loc=loc, ip=ip)[0]


def masks_x8(words: Any, threshold: Uint32) -> Any:
    """(bit i set where key i is above `threshold`, bit i set where it equals it), i = 0..7. 0 < threshold < 0xFFFF."""
    reach = _reach_x8(*words, Uint32(0) - (threshold << Uint32(16)))
    greater = _reach_x8(*words, Uint32(0) - ((threshold + Uint32(1)) << Uint32(16)))
    return greater, reach ^ greater


@dsl_user_op
def load_shared_v2(addr: Uint32, *, loc: Any = None, ip: Any = None) -> tuple[Any, ...]:
    """Two 32-bit words (8-byte aligned) from shared memory."""
    return ptx.asm("ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", (Uint32,) * 2, (addr,), loc=loc, ip=ip)


@dsl_user_op
def store_shared_v2(addr: Uint32, a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Two 32-bit words (8-byte aligned) to shared memory."""
    ptx.asm("st.shared.v2.b32 [$0], {$1, $2};", "r,r,r", (), (addr, a, b), loc=loc, ip=ip)


@dsl_user_op
def store_shared_u8(addr: Uint32, value: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """The low byte of `value` to shared memory."""
    ptx.asm("st.shared.u8 [$0], $1;", "r,r", (), (addr, value), loc=loc, ip=ip)


@dsl_user_op
def load_shared_u8(addr: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """A byte from shared memory, zero-extended."""
    return ptx.asm("ld.shared.u8 $0, [$1];", "=r,r", (Uint32,), (addr,), loc=loc, ip=ip)[0]


def lowest_bit(mask: Uint32) -> Int32:
    """Index of the lowest set bit; 32 for an empty mask."""
    return Int32(cute.arch.popc((mask - Uint32(1)) & (mask ^ Uint32(0xFFFFFFFF))))


@dsl_user_op
def copy_async_word(dst: Uint32, src: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Start copying 4 bytes from global to shared memory; complete after `copy_async_wait` of the same thread."""
    ptx.asm("cp.async.ca.shared.global [$0], [$1], 4;", "r,l", (), (dst, src), loc=loc, ip=ip)


@dsl_user_op
def copy_async_wait(*, loc: Any = None, ip: Any = None) -> None:
    """Wait for all of this thread's asynchronous copies; a barrier then shows them to others."""
    ptx.asm("cp.async.wait_all;", "", (), (), loc=loc, ip=ip)


@dsl_user_op
def highest_bit(mask: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Index of the highest set bit (mask not 0)."""
    return ptx.asm("bfind.u32 $0, $1;", "=r,r", (Uint32,), (mask,), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def warp_prefix(value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Sum over lanes 0..lane of `value`: five shuffles, each with the predicate that its source lane exists."""
    steps = " ".join(
        f"shfl.sync.up.b32 t|p, $0, {1 << step}, 0, 0xffffffff; @p add.s32 $0, $0, t;" for step in range(5)
    )
    text = f"{{ .reg .b32 t; .reg .pred p; mov.b32 $0, $1; {steps} }}"
    return ptx.asm(text, "=&r,r", (Int32,), (value,), loc=loc, ip=ip)[0]


@dsl_user_op
def store_bits_x8(addr: Uint32, first: Uint32, mask: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Store `first + i` for every set bit i (0..7) of `mask`, ascending, to consecutive shared words from `addr` on."""
    lines = ["{ .reg .b32 a, t, v; .reg .pred p; mov.b32 a, $0; mov.b32 v, $1;"]
    for bit in range(8):
        lines.append(f"and.b32 t, $2, {1 << bit}; setp.ne.u32 p, t, 0; @p st.shared.b32 [a], v; @p add.u32 a, a, 4;")
        lines.append("add.u32 v, v, 1;")
    ptx.asm(" ".join([*lines, "}"]), "r,r,r", (), (addr, first, mask), loc=loc, ip=ip)


@dsl_user_op
def min_u32(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The smaller of two unsigned numbers."""
    return ptx.asm("min.u32 $0, $1, $2;", "=r,r,r", (Uint32,), (a, b), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def min_u16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Lane-wise unsigned minimum of two 16-bit halves: one instruction on sm_90 and later."""
    return ptx.asm("min.u16x2 $0, $1, $2;", "=r,r,r", (Uint32,), (a, b), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def high_half(word: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The upper 16 bits of a word in both halves, by the half-precision adder: the integer unit has enough to do.

    They must not be those of an infinity or a NaN (bits 10 to 14 all set); to any other, -0 adds nothing.
    """
    text = (
        "{ .reg .b16 l, h; .reg .b32 t, z; mov.b32 {l, h}, $1; mov.b32 t, {h, h}; mov.b32 z, 0x80008000; "
        "add.rn.f16x2 $0, t, z; }"
    )
    return ptx.asm(text, "=r,r", (Uint32,), (word,), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def multiply_add(a: Uint32, b: Uint32, c: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """a * b + c, the low 32 bits."""
    return ptx.asm("mad.lo.u32 $0, $1, $2, $3;", "=r,r,r,r", (Uint32,), (a, b, c), pure=True, loc=loc, ip=ip)[0]
