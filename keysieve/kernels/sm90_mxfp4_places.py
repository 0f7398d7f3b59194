"""What a landed tile's scales say, worked out by two producer warps before the consumers take the tile.

Each of the two does one page of every tile, two keys a lane, and leaves in the stage's *area*: per key a word of table
offsets (a byte a block), the factor, and the scale codes if the key is apart (`NO_CODES` if it is not). If one is, the
descriptor's request number gets the bit `TILE_APART`; that of an end becomes no request's. Then the tile has *landed*.
Consumers read this instead of working it out: there it was a tenth of their instructions and the longest chain before a
tile's first product.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from keysieve.device import packed, ptx, sync
from keysieve.kernels.sm90_mxfp4_config import AREA, KEY_BYTES, PAGE_SLOT, SCALE_PLACE, TILE_APART, plain_tiles
from keysieve.kernels.sm90_mxfp4_scales import NO_CODES, near_scales, place_scales, zero_blocks
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
            with cute.arch.elect_one():  # so that no tile's number is the present one's
                ptx.store_shared(shared.descriptors + Uint32(stage) * Uint32(16) + Uint32(8), Uint32(Int32(NO_REQUEST)))
        else:
            place_page(shared, stage, half, lane, plain_tiles(kernel.config, shape))
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.landed + stage)
        stage = stage + Int32(1)
        if stage == Int32(shape.stages):
            stage = Int32(0)
            phase = phase ^ Int32(1)


@cute.jit
def place_page(shared: Any, stage: Int32, half: Int32, lane: Int32, tells: cutlass.Constexpr[bool]) -> None:
    """Page `half` of the tile in `stage`; a lane has keys 2 lane and 2 lane + 1. tells: mark a tile with one apart."""
    page = shared.keys + Uint32(stage * Int32(PAGES_PER_TILE) + half) * Uint32(PAGE_SLOT)
    codes = packed.load_shared_v2(page + Uint32(SCALE_PLACE) + Uint32(lane) * Uint32(8))
    offsets, factors, far = near_scales(codes)
    kept = [Uint32(NO_CODES) for _ in range(2)]
    if cute.arch.vote_any_sync(far != Uint32(0)):
        some = Int32(0)
        for i in cutlass.range_constexpr(2):
            key = page + (Uint32(lane) * Uint32(2) + Uint32(i)) * Uint32(KEY_BYTES)
            offsets[i], factors[i], apart = place_scales(codes[i], zero_blocks(key))
            kept[i] = Uint32(select(apart != Int32(0), codes[i], Uint32(NO_CODES)))
            some = some | apart
        if cutlass.const_expr(tells):  # noqa: SIM102  # a trace-time test, then a run-time one
            if cute.arch.vote_any_sync(some != Int32(0)):
                with cute.arch.elect_one():
                    number = shared.descriptors + Uint32(stage) * Uint32(16) + Uint32(8)
                    # The other page's warp may do the same.
                    ptx.store_shared(number, ptx.load_shared(number) | Uint32(TILE_APART))
    area = shared.area + Uint32(stage) * Uint32(AREA)
    place = area + Uint32(half) * Uint32(4 * PAGE) + Uint32(lane) * Uint32(8)
    packed.store_shared_v2(place, offsets[0], offsets[1])
    packed.store_shared_v2(place + Uint32(FACTORS), factors[0], factors[1])
    packed.store_shared_v2(place + Uint32(CODES), kept[0], kept[1])
