"""Addresses in paged memory: every byte or element offset is 64-bit, because real pools pass 2^31 and 2^32.

Integers only (they run on the CPU too). Table entries and lengths are int32; products widen before they multiply.
"""

from cutlass import Boolean, Int32, Int64, Uint32


def page_base(pool: Int64, page: Int32, page_stride: Int64) -> Int64:
    """Byte address of an index-cache page: pool + page * page_stride (bytes between pages, a multiple of 16)."""
    return pool + Int64(page) * page_stride


def page_in_pool(page: Int32, pages: Int32) -> Boolean:
    """Is a page id from a table inside the pool? (One unsigned compare: negative ids are outside.)"""
    return Uint32(page) < Uint32(pages)


def table_entry(table: Int64, row: Int32, row_stride: Int64, column: Int32) -> Int64:
    """Byte address of int32 entry (row, column) of a table with `row_stride` elements between rows."""
    return table + (Int64(row) * row_stride + Int64(column)) * Int64(4)


def element(base: Int64, index: Int64, element_bytes: int) -> Int64:
    """Byte address of element `index` (Int64) of an array; `element_bytes` is a Python number."""
    return base + index * Int64(element_bytes)


def physical_row(block: Int32, position: Int32, kv_page_log2: Int32, block_rows: Int32) -> Int32:
    """Row of the attention cache: block * block_rows + position % kv_page (kv_page = 2 ** kv_page_log2).

    Rows are int32 by contract: a cache view with more rows than that cannot be addressed and is refused by the host.
    """
    within = position & ((Int32(1) << kv_page_log2) - Int32(1))
    return block * block_rows + within


def ceil_div_pow2(value: Int32, log2: int) -> Int32:
    """ceil(value / 2 ** log2) for value >= 0 up to 2^31 - 1, without overflow."""
    up = Int32((value & Int32((1 << log2) - 1)) != Int32(0))
    return (value >> Int32(log2)) + up


def tiles_of_length(longest: Int32, log2_tile: int, skip_up_to: Int32) -> Int32:
    """Tiles of a request whose longest row has `longest` keys: 0 when that is <= skip_up_to, else ceil(/ tile)."""
    needed = Int32(longest > skip_up_to)
    positive = Int32(longest > Int32(0))
    return ceil_div_pow2(longest * positive, log2_tile) * needed * positive
