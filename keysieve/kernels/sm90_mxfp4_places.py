"""What a landed tile's scales say, worked out by two producer warps before the consumers take the tile.

Each of the two does one page of every tile, two keys a lane, and leaves in the stage's *area*: per key a word of table
offsets (a byte a block), the factor, and the scale codes if the key is apart (`NO_CODES` if it is not). Then the tile
has *landed*. Consumers read this instead of working it out: there it was a tenth of their instructions and the longest
chain before a tile's first product.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from keysieve.device import packed, ptx, sync
from keysieve.kernels.sm90_mxfp4_config import AREA, KEY_BYTES, PAGE_SLOT, SCALE_PLACE
from keysieve.kernels.sm90_mxfp4_scales import (
    NO_CODES,
    factor_bits,
    offsets_from,
    place_scales,
    spread_of,
    within_reach,
    zero_blocks,
)
from keysieve.kernels.sm90_score_config import NO_REQUEST, PAGES_PER_TILE
from keysieve.kernels.sm90_score_store import select
from keysieve.spec import PAGE

FACTORS = 4 * PAGE * PAGES_PER_TILE
CODES = 2 * FACTORS
"""Byte offsets in an area; the offsets stand first."""

assert CODES + FACTORS <= AREA


@cute.jit
def place_tiles(kernel: cutlass.Constexpr[Any], shared: Any, half: Int32) -> None:
    """One warp: page `half` of every tile in turn, until the ends meant for the consumers have been passed on."""
    shape = kernel.shape
    lane = cute.arch.lane_idx()
    stage = Int32(0)
    phase = Int32(0)
    left = Int32(shape.groups)
    while left > Int32(0):
        sync.wait_barrier(shared.key_full + stage, phase)
        owner = Int32(ptx.load_shared(shared.descriptors + Uint32(stage) * Uint32(16)))
        if owner == Int32(NO_REQUEST):
            left = left - Int32(1)
        else:
            place_page(shared, stage, half, lane)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.landed + stage)
        stage = stage + Int32(1)
        if stage == Int32(shape.stages):
            stage = Int32(0)
            phase = phase ^ Int32(1)


@cute.jit
def place_page(shared: Any, stage: Int32, half: Int32, lane: Int32) -> None:
    """Page `half` of the tile in `stage`; a lane has keys 2 lane and 2 lane + 1."""
    page = shared.keys + Uint32(stage * Int32(PAGES_PER_TILE) + half) * Uint32(PAGE_SLOT)
    codes = packed.load_shared_v2(page + Uint32(SCALE_PLACE) + Uint32(lane) * Uint32(8))
    spreads = [spread_of(word) for word in codes]
    offsets = [offsets_from(codes[i], spreads[i][0]) for i in range(2)]
    factors = [factor_bits(spreads[i][0]) for i in range(2)]
    kept = [Uint32(NO_CODES) for _ in range(2)]
    together = within_reach(*spreads[0]) & within_reach(*spreads[1])
    if Int32(cute.arch.vote_all_sync(together)) == Int32(0):
        for i in cutlass.range_constexpr(2):
            key = page + (Uint32(lane) * Uint32(2) + Uint32(i)) * Uint32(KEY_BYTES)
            offsets[i], factors[i], apart = place_scales(codes[i], zero_blocks(key))
            kept[i] = Uint32(select(apart != Int32(0), codes[i], Uint32(NO_CODES)))
    area = shared.area + Uint32(stage) * Uint32(AREA)
    place = area + Uint32(half) * Uint32(4 * PAGE) + Uint32(lane) * Uint32(8)
    packed.store_shared_v2(place, offsets[0], offsets[1])
    packed.store_shared_v2(place + Uint32(FACTORS), factors[0], factors[1])
    packed.store_shared_v2(place + Uint32(CODES), kept[0], kept[1])
