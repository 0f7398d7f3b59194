"""Pinned float arithmetic: what is written is what is computed, whatever the compiler would like to contract.

Generated device code contracts `a * b + c` into a fused multiply-add. Where the contract counts roundings, use these.
Inside a kernel they are single PTX instructions; in host code (CPU tests) the same functions build the equivalent
IEEE operation, so their results agree bit for bit, NaN payloads aside.

Two maxima, choose one per place: `max_nan` gives NaN when either side is NaN (the contract wants this for
`max(dot, 0)`), `max_num` gives the other operand.

BF16 values travel as bits in `Uint32`: one in the low 16 bits, or two ("x2": the low half has the lower index).
"""

from typing import Any

from cutlass import Float32, Uint32
from cutlass._mlir.dialects import arith
from cutlass._mlir.dialects import math as math_ops
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device.keys import LANES_SIGN, canonical16
from keysieve.device.ptx import asm, in_kernel

NAN_BITS = 0xFFC0  # the canonical NaN of a logit


@dsl_user_op
def mul(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a * b rounded to nearest even; never contracted with a following addition."""
    if not in_kernel():
        return a * b
    return asm("mul.rn.f32 $0, $1, $2;", "=f,f,f", (Float32,), (a, b), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def add(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a + b rounded to nearest even; a preceding product is never contracted into it."""
    if not in_kernel():
        return a + b
    return asm("add.rn.f32 $0, $1, $2;", "=f,f,f", (Float32,), (a, b), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a * b + c with one rounding to nearest even."""
    if not in_kernel():
        values = [x.ir_value(loc=loc, ip=ip) for x in (a, b, c)]
        return Float32(math_ops.fma(*values, loc=loc, ip=ip))
    return asm("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", (Float32,), (a, b, c), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def max_nan(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Maximum that is NaN when either operand is NaN; on the device max(-0, +0) is +0."""
    if not in_kernel():
        return Float32(arith.maximumf(a.ir_value(loc=loc, ip=ip), b.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
    return asm("max.NaN.f32 $0, $1, $2;", "=f,f,f", (Float32,), (a, b), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def max_num(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Maximum that drops a NaN: the other operand when one is NaN."""
    if not in_kernel():
        return Float32(arith.maxnumf(a.ir_value(loc=loc, ip=ip), b.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
    return asm("max.f32 $0, $1, $2;", "=f,f,f", (Float32,), (a, b), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def twice_relu(a: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """2 * max(a, 0), exact for |a| < 2^127, as a + |a|: NaN stays NaN, -0 gives +0, and no maximum unit is used."""
    if not in_kernel():
        return a + Float32(math_ops.absf(a.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
    text = "{ .reg .f32 m; abs.f32 m, $1; add.rn.f32 $0, $1, m; }"
    return asm(text, "=f,f", (Float32,), (a,), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def float_bits(value: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The 32 bits of a float."""
    return value.bitcast(Uint32, loc=loc, ip=ip)


@dsl_user_op
def bits_float(bits: Uint32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The float with these 32 bits."""
    return bits.bitcast(Float32, loc=loc, ip=ip)


def bf16_to_float(bits: Uint32) -> Float32:
    """Float value of BF16 bits in the low half (the upper half must be zero). Exact."""
    return bits_float(bits << Uint32(16))


def bf16_high_to_float(word: Uint32) -> Float32:
    """Float value of the BF16 in the high half of a word. Exact."""
    return bits_float(word & Uint32(0xFFFF0000))


def bf16_bits_integer(value: Float32) -> Uint32:
    """BF16 bits of a float, nearest even, by integer arithmetic alone: the definition the instruction is held to.

    A NaN becomes some NaN (canonicalise afterwards where bits matter).
    """
    bits = float_bits(value)
    nan = Uint32((bits & Uint32(0x7FFFFFFF)) > Uint32(0x7F800000))
    odd = (bits >> Uint32(16)) & Uint32(1)
    rounded = (bits + Uint32(0x7FFF) + odd) >> Uint32(16)
    return rounded * (Uint32(1) - nan) + nan * Uint32(0x7FFF)


@dsl_user_op
def bf16_bits(value: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """BF16 bits of a float, rounded to nearest even, in the low half; the upper half is zero."""
    if not in_kernel():
        return bf16_bits_integer(value)
    text = "{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; cvt.u32.u16 $0, h; }"
    return asm(text, "=r,f", (Uint32,), (value,), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def bf16x2_bits(low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two floats rounded to BF16 (nearest even), packed: `low` in the low half."""
    if not in_kernel():
        return bf16_bits_integer(low) | (bf16_bits_integer(high) << Uint32(16))
    text = "cvt.rn.bf16x2.f32 $0, $1, $2;"  # the first source goes to the high half
    return asm(text, "=r,f,f", (Uint32,), (high, low), pure=True, loc=loc, ip=ip)[0]


def logit_bits(value: Float32) -> Uint32:
    """A logit as stored: BF16 nearest even, -0 as +0, every NaN as the canonical one."""
    return canonical16(bf16_bits(value))


def canonical_bf16x2(word: Uint32) -> Uint32:
    """`canonical16` of both halves in lane-parallel integer arithmetic (no compares, no branches)."""
    magnitude = word & Uint32(0x7FFF7FFF)
    # Per half, bit 15 of (magnitude + 0x007F) is set exactly when magnitude > 0x7F80; no carry leaves a half.
    nan = ((magnitude + Uint32(0x007F007F)) >> Uint32(15)) & Uint32(LANES_SIGN)
    # Bit 15 of (magnitude + 0x7FFF) is clear exactly when magnitude == 0: then the sign must go.
    zero = (((magnitude + Uint32(0x7FFF7FFF)) >> Uint32(15)) & Uint32(LANES_SIGN)) ^ Uint32(LANES_SIGN)
    kept = word & ((zero * Uint32(0xFFFF)) ^ Uint32(0xFFFFFFFF))
    mask = nan * Uint32(0xFFFF)
    return (kept & (mask ^ Uint32(0xFFFFFFFF))) | (mask & Uint32(NAN_BITS * 0x10001))


def logit_bits_x2(low: Float32, high: Float32) -> Uint32:
    """Two logits as stored, packed in a word."""
    return canonical_bf16x2(bf16x2_bits(low, high))


# ------------------------------------------------------------------------ packed BF16 (device only: no CPU form)


@dsl_user_op
def fma_bf16x2(a: Uint32, b: Uint32, c: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Packed BF16 a * b + c, one rounding to nearest even a half."""
    return asm("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", (Uint32,), (a, b, c), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def relu_bf16x2(low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """max(x, 0) of two floats rounded to BF16 (nearest even), packed: `low` in the low half. NaN stays a NaN."""
    text = "cvt.rn.relu.bf16x2.f32 $0, $1, $2;"  # the first source goes to the high half
    return asm(text, "=r,f,f", (Uint32,), (high, low), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def add_bf16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Packed BF16 a + b, nearest even."""
    return asm("add.rn.bf16x2 $0, $1, $2;", "=r,r,r", (Uint32,), (a, b), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def add_bf16(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """BF16 a + b (bits in the low halves, upper halves ignored), nearest even; the upper half of the result is zero."""
    text = "{ .reg .b16 x, y, z; cvt.u16.u32 x, $1; cvt.u16.u32 y, $2; add.rn.bf16 z, x, y; cvt.u32.u16 $0, z; }"
    return asm(text, "=r,r,r", (Uint32,), (a, b), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def max_nan_bf16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Packed BF16 maximum, NaN when either is NaN."""
    return asm("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", (Uint32,), (a, b), pure=True, loc=loc, ip=ip)[0]
