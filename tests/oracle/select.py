"""key16, the exact selection and physical rows, in the plainest form."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def canonical(bits: int) -> int:
    """-0 counts as +0, every NaN as the canonical NaN."""
    exponent, fraction = bits >> 7 & 0xFF, bits & 0x7F
    if exponent == 0xFF and fraction:
        return 0xFFC0
    return 0 if bits == 0x8000 else bits


def key16(bits: int) -> int:
    """Order-preserving image of canonical BF16 bits: larger is better."""
    return bits ^ 0xFFFF if bits & 0x8000 else bits ^ 0x8000


_KEY16 = np.array([key16(canonical(bits)) for bits in range(1 << 16)], dtype=np.int64)


def select(bits: NDArray[np.uint16], topk: int) -> list[int]:
    """Positions of the first ``min(len, topk)`` keys by (key16 descending, position ascending), ascending."""
    keys = _KEY16[bits]
    if len(keys) <= 4096:
        ranked = sorted(range(len(keys)), key=lambda position: (-int(keys[position]), position))
        return sorted(ranked[:topk])
    order = np.argsort(-keys, kind="stable")[:topk]
    return [int(position) for position in np.sort(order)]


def physical_row(position: int, table_row: list[int], kv_page: int, block_rows: int) -> int:
    """Row of the attention cache that holds a position."""
    return table_row[position // kv_page] * block_rows + position % kv_page


def padded(values: list[int], width: int) -> list[int]:
    """``values``, then -1 up to ``width``."""
    return values + [-1] * (width - len(values))
