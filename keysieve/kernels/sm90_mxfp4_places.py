"""What a landed tile's scales say, worked out by two producer warps before the consumers take the tile.

Each of the two does every second tile, four keys a lane, and leaves in the stage's *area*: per key a word of table
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

WARPS = 2
"""Warps that take turns by tiles. By pages one was busy for 500 of the 600 cycles that a tile may take, mostly waiting
for its own results, and consumers waited for tiles a fifth of the time."""


@cute.jit
def place_tiles(kernel: cutlass.Constexpr[Any], shared: Any, turn: Int32) -> None:
    """One warp of `WARPS`: every second tile, from the `turn`-th on, until its ends meant for the consumers have been
    passed on."""
    shape = kernel.shape
    stages = shape.stages
    assert shape.groups in (2, 3), "the ends of a warp are the first, and of three the third, or the second"
    lane = cute.arch.lane_idx()
    stage = turn
    phase = Int32(0)
    previous = turn - Int32(1)  # of stages; there is none before the first
    more = Int32(1)
    while more != Int32(0):
        if cutlass.const_expr(stages % WARPS != 0):  # the place's last tile was the other's: it must be done with it
            sync.wait_barrier(shared.landed + stage, phase ^ Int32(1))
        sync.wait_barrier(shared.key_full + stage, phase)
        descriptor = shared.descriptors + Uint32(stage) * Uint32(16)
        owner = Int32(ptx.load_shared(descriptor))
        if owner == Int32(NO_REQUEST):
            more = Int32(previous < Int32(0))
            if previous >= Int32(0):
                before = Int32(ptx.load_shared(shared.descriptors + Uint32(previous) * Uint32(16)))
                more = Int32(before != Int32(NO_REQUEST))
            if cutlass.const_expr(shape.groups == 2):
                more = Int32(0)
            with cute.arch.elect_one():  # so that no tile's number is the present one's
                ptx.store_shared(descriptor + Uint32(8), Uint32(Int32(NO_REQUEST)))
        else:
            place_tile(shared, stage, lane, plain_tiles(kernel.config, shape))
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(shared.landed + stage)
        previous = stage + Int32(WARPS - 1)
        stage = stage + Int32(WARPS)
        if previous >= Int32(stages):
            previous = previous - Int32(stages)
        if stage >= Int32(stages):
            stage = stage - Int32(stages)
            phase = phase ^ Int32(1)


@cute.jit
def place_tile(shared: Any, stage: Int32, lane: Int32, tells: cutlass.Constexpr[bool]) -> None:
    """The tile in `stage`; a lane has keys 2 lane and 2 lane + 1 of each page. tells: mark a tile with one apart."""
    first = shared.keys + Uint32(stage) * Uint32(PAGES_PER_TILE * PAGE_SLOT)
    pages = [first + Uint32(page * PAGE_SLOT) for page in range(PAGES_PER_TILE)]
    codes = [packed.load_shared_v2(page + Uint32(SCALE_PLACE) + Uint32(lane) * Uint32(8)) for page in pages]
    found = [near_scales(words) for words in codes]
    offsets = [word for one in found for word in one[0]]
    factors = [word for one in found for word in one[1]]
    kept = [Uint32(NO_CODES) for _ in range(2 * PAGES_PER_TILE)]
    if cute.arch.vote_any_sync((found[0][2] | found[1][2]) != Uint32(0)):
        some = Int32(0)
        for i in cutlass.range_constexpr(2 * PAGES_PER_TILE):
            key = pages[i // 2] + (Uint32(lane) * Uint32(2) + Uint32(i % 2)) * Uint32(KEY_BYTES)
            word = codes[i // 2][i % 2]
            offsets[i], factors[i], apart = place_scales(word, zero_blocks(key))
            kept[i] = Uint32(select(apart != Int32(0), word, Uint32(NO_CODES)))
            some = some | apart
        if cutlass.const_expr(tells):  # noqa: SIM102  # a trace-time test, then a run-time one
            if cute.arch.vote_any_sync(some != Int32(0)):
                with cute.arch.elect_one():
                    number = shared.descriptors + Uint32(stage) * Uint32(16) + Uint32(8)
                    ptx.store_shared(number, ptx.load_shared(number) | Uint32(TILE_APART))
    place = shared.area + Uint32(stage) * Uint32(AREA) + Uint32(lane) * Uint32(8)
    for page in cutlass.range_constexpr(PAGES_PER_TILE):
        here = place + Uint32(4 * PAGE * page)
        packed.store_shared_v2(here, offsets[2 * page], offsets[2 * page + 1])
        packed.store_shared_v2(here + Uint32(FACTORS), factors[2 * page], factors[2 * page + 1])
        packed.store_shared_v2(here + Uint32(CODES), kept[2 * page], kept[2 * page + 1])
