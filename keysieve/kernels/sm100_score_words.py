"""The bit fields that the Blackwell matrix unit is told things by, and where it expects operands and scales to lie.

Plain integers, no cutlass: the kernel builds its words from these functions, and tests hold them to tables written from
the PTX ISA ("tcgen05": shared memory descriptor, instruction descriptor, block scaling).
"""

from typing import Any, Final

SWIZZLES: Final = {128: 2, 64: 4, 32: 6}
"""Bytes of a swizzled row -> the descriptor's swizzle mode."""

LAYOUT_VERSION: Final = 1
"""Bits 46-48 of a shared-memory descriptor: a fixed constant of this generation."""

M: Final = 128
"""Rows of a product: the keys of a tile."""

N_STEP: Final = 16
MAX_N: Final = 256


def encoded(value: int) -> int:
    """A shared address or byte offset as descriptors hold it: 18 bits in units of 16 bytes."""
    return (value & 0x3FFFF) >> 4


def operand_descriptor(row_bytes: int) -> int:
    """Shared-memory descriptor without its start address: a K-major operand, swizzled rows of `row_bytes` (128 or 64).

    Eight rows make up one core matrix; the stride field holds the bytes from one to the next. The leading dimension is
    not used by swizzled K-major operands (1 by convention). The base offset is 0: patterns start at their own multiple.
    Add `encoded(address)`; a step along K is `encoded(bytes)` more.
    """
    return encoded(16) << 16 | encoded(8 * row_bytes) << 32 | LAYOUT_VERSION << 46 | SWIZZLES[row_bytes] << 61


def scale_descriptor() -> int:
    """Shared-memory descriptor, without its start address, of 512 bytes of scale words: 32 unswizzled rows of 16.

    Eight rows of 16 bytes are one core matrix of 128 bytes; the next one follows it. A row is one core matrix wide, so
    the leading dimension is not used (1 by convention).
    """
    return encoded(16) << 16 | encoded(128) << 32 | LAYOUT_VERSION << 46


def f8_word(n: int) -> int:
    """Instruction descriptor of kind::f8f6f4: E4M3 x E4M3 -> float32, both K-major, dense, 128 x n."""
    _check(n)
    return 1 << 4 | n >> 3 << 17 | M >> 4 << 24


def mxf4_word(n: int, scale_id: int) -> int:
    """Instruction descriptor of kind::mxf4: E2M1 x E2M1 with UE8M0 scales -> float32, dense, 128 x n.

    scale_id: 0 or 2, the first byte of the scale words that this step along K uses, of both operands.
    """
    _check(n)
    if scale_id not in (0, 2):
        raise ValueError(f"scale_id {scale_id}: with two scales a step it is 0 or 2")
    return scale_id << 4 | 1 << 7 | 1 << 10 | n >> 3 << 17 | 1 << 23 | M >> 7 << 27 | scale_id << 29


def _check(n: int) -> None:
    if n % N_STEP or not 0 < n <= MAX_N:
        raise ValueError(f"n {n}: a multiple of {N_STEP} up to {MAX_N}")


def scale_offset(row: Any) -> Any:
    """Byte offset of the scale word of operand row `row` (0..127) in its 512 bytes of shared memory.

    The copy puts 16-byte row l into lane l of four columns; the unit takes row r's word from lane r % 32 of column
    r / 32.
    """
    return row % 32 * 16 + row // 32 * 4
