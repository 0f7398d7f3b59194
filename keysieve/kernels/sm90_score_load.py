"""What the scorers' producers copy, and where to.

What differs between the kernels, the one that is passed in knows: `boxes` (how a page lies in global and in shared
memory), `copy_page`, `scale_words` (where the 64 scale words of a page stand in a stage) and `put_weights` (the form in
which its consumers read the head weights).
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from keysieve.device import ptx
from keysieve.spec import PAGE, TILE

BATCH = 16
"""Tiles looked up together: two lanes each."""

PAGES_PER_TILE = TILE // PAGE
NO_PAGE = -1
"""Lane code of a page that the request does not need."""
BAD_PAGE = -2
"""Lane code of a needed page whose id is outside the pool."""
NAN_WORD = 0xFFFFFFFF
"""A scale word that reads as NaN in every format."""


@dataclass(frozen=True)
class Boxes:
    """What the tensor copies move. row_bytes: of a key or query row, 128 or 64, and the width of the swizzle.

    page_rows: rows that one box brings of a page. slot_bytes: shared bytes from one page of the ring to the next.
    page_bytes: all bytes that arrive for a page, whoever copies them.
    """

    row_bytes: int
    page_rows: int
    slot_bytes: int
    page_bytes: int

    def swizzle(self) -> Any:
        """The swizzle of the copy engine and the matrix unit for rows of this width: 16-byte chunks by row number."""
        return cute.make_swizzle({128: 3, 64: 2}[self.row_bytes], 4, 3)

    def tile(self, rows: int) -> Any:
        """`rows` rows as one box lays them out in shared memory."""
        return cute.make_composed_layout(
            self.swizzle(), 0, cute.make_layout((rows, self.row_bytes), stride=(self.row_bytes, 1))
        )


# Calls of the kernel's own methods stand in functions: inside a run-time loop the DSL would take the kernel for a value
# that the loop changes.


def copy_page(
    kernel: Any,
    shared: Any,
    key_copy: Any,
    source: Any,
    target: Any,
    page: Int32,
    stage: Int32,
    half: int,
    policy: Int64,
) -> None:
    """Start the copies of pool page `page` into half `half` of a stage; they complete on `key_full[stage]`."""
    kernel.copy_page(shared, key_copy, source, target, page, stage, half, policy)


def scale_words(kernel: Any, shared: Any, slot: Int32) -> Any:
    """Shared address of the 64 scale words of the ring's page `slot`."""
    return kernel.scale_words(shared, slot)


def put_weights(kernel: Any, shared: Any, weights: Int64, row: Int32, stage: Int32, lane: Int32) -> None:
    """Head weights of the request whose first row is `row`, into a query stage; the whole warp."""
    kernel.put_weights(shared, weights, row, stage, lane)


def page_views(kernel: Any, shared: Any, key_copy: Any, key_pages: Any) -> tuple[Any, Any]:
    """(global pages by id, ring slots by number) as the tensor copy wants them."""
    boxes = kernel.boxes
    slots = kernel.shape.stages * PAGES_PER_TILE
    layout = cute.make_layout((boxes.page_rows, boxes.row_bytes, slots), stride=(boxes.row_bytes, 1, boxes.slot_bytes))
    ring = cute.make_tensor(shared.fp8(kernel.places.keys, boxes.swizzle()), layout)
    pool = cute.local_tile(key_pages, (boxes.page_rows, boxes.row_bytes), (0, 0, None))
    target, source = cpasync.tma_partition(
        key_copy, 0, cute.make_layout(1), cute.group_modes(ring, 0, 2), cute.group_modes(pool, 0, 2)
    )
    return source, target


@cute.jit
def spoil_scales(words: Uint32, lane: Int32) -> None:
    """Make 64 scale words of a ring slot NaN. Later copies into the slot come from the async proxy: fence."""
    for half in cutlass.range_constexpr(2):
        where = words + Uint32(lane * Int32(4) + Int32(PAGE * 2 * half))
        ptx.store_shared(where, Uint32(NAN_WORD))
    ptx.fence_async_shared()
    cute.arch.sync_warp()


def copy_queries(
    kernel: Any, row_copy: Any, source: Any, target: Any, request: Int32, stage: Int32, barrier: Any
) -> None:
    """Start the copies of a request's queries into query stage `stage`; they complete on `barrier`."""
    if getattr(kernel.shape, "by_rows", False):
        kernel.copy_sets(row_copy, source, target, request, stage, barrier)
        return
    for part in range(kernel.config.next_n):
        row = request * Int32(kernel.config.next_n) + Int32(part)
        cute.copy(row_copy, source[(None, row)], target[(None, part, stage)], tma_bar_ptr=barrier)


def row_views(kernel: Any, shared: Any, row_copy: Any, query_rows: Any) -> tuple[Any, Any]:
    """(global query rows by number, held rows by (row of the request, stage)) as the tensor copy wants them."""
    if getattr(kernel.shape, "by_rows", False):
        sets: tuple[Any, Any] = kernel.set_views(shared, row_copy, query_rows)
        return sets
    heads, boxes = kernel.config.heads, kernel.boxes
    layout = cute.make_layout(
        (heads, boxes.row_bytes, kernel.config.next_n, kernel.shape.query_stages),
        stride=(boxes.row_bytes, 1, heads * boxes.row_bytes, kernel.places.query_bytes),
    )
    held = cute.make_tensor(shared.fp8(kernel.places.query, boxes.swizzle()), layout)
    rows = cute.local_tile(query_rows, (heads, boxes.row_bytes), (0, 0, None))
    target, source = cpasync.tma_partition(
        row_copy, 0, cute.make_layout(1), cute.group_modes(held, 0, 2), cute.group_modes(rows, 0, 2)
    )
    return source, target
