"""Consumers of the sm90 MXFP4 scorer where one product takes all rows of a request: a loop per request, results late.

From the last exchange to the stores a tile's results are a chain of some fifty instructions, each waiting for the
one before. So the values of a tile are kept, and their way to memory is walked while the next tile's keys are widened
and multiplied. They never outlive their request: before a warpgroup lets go of its queries it stores them. Tiles of one
request are a loop of their own, so that what is the same for all of them is worked out once.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from keysieve.device import numerics, ptx, sync
from keysieve.kernels import score_trace
from keysieve.kernels.sm90_mxfp4_apart import mend_tile
from keysieve.kernels.sm90_mxfp4_store import Places, store_rows
from keysieve.kernels.sm90_score_config import NO_REQUEST, PAGES_PER_TILE
from keysieve.kernels.sm90_score_math import next_tile, row_places
from keysieve.kernels.sm90_score_products import Weights, across_pages, head_sums, release
from keysieve.spec import GROUP, PAGE

NOWHERE = 0x7FFFFF
"""A tile past every length: nothing is stored."""


@cute.jit
def consume(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    products: Any,
    targets: Any,
    thread: Int32,
    led: Int32,
) -> None:
    """One consumer warpgroup, as `sm90_score_math.consume`."""
    config = kernel.config
    shape = kernel.shape
    lane = cute.arch.lane_idx()
    group = cute.arch.make_warp_uniform(thread // Int32(128))
    warp = cute.arch.make_warp_uniform((thread // Int32(32)) % Int32(4))
    key = ((lane >> Int32(1)) & 1) * PAGE + warp * 16 + (lane & 1) * GROUP + (lane >> Int32(2))
    quad = Uint32(lane & 3) * Uint32(16)
    held = Int32(-1)
    stage = group
    phase = Int32(0)
    owner, tile, sequence = next_tile(shared, stage, phase)
    score_trace.mark(kernel, shared, score_trace.LANDED, group == Int32(0))
    while owner != Int32(NO_REQUEST):
        for request in cutlass.range(held + Int32(1), sequence + Int32(1), unroll=1):
            if request > Int32(0):  # those this group had no tile of are released as well, in order
                release(shared.query_empty + (request - Int32(1)) % Int32(shape.query_stages))
            query_stage = request % Int32(shape.query_stages)
            sync.wait_barrier(shared.query_full + query_stage, (request // Int32(shape.query_stages)) & 1)
        held = sequence
        place = held % Int32(shape.query_stages)
        row, stride = row_places(config, shared, targets, owner)
        places = Places(targets, row, stride, key, lane)
        weights = resident_weights(kernel, shared, place, quad)
        score_trace.mark(kernel, shared, score_trace.QUERIED, group == Int32(0))
        products.begin(place)
        values = [Float32(0.0) for _ in range(config.next_n)]
        kept = Int32(NOWHERE)  # tile whose values they are
        more = Int32(1)
        while more != Int32(0):
            products.start(stage, place)
            products.issue(0, 0, stage, place)
            store_values(config, shared, places, values, kept, place, lane)
            if cutlass.const_expr(shape.ahead == 2):
                products.issue(0, 1, stage, place)
            kept = tile
            values = tile_values(kernel, shared, products, weights, stage, place, quad, lane)
            stage = stage + Int32(shape.groups)
            if stage >= Int32(shape.stages):
                stage = stage - Int32(shape.stages)
                phase = phase ^ Int32(1)
            owner, tile, sequence = next_tile(shared, stage, phase)
            more = Int32(owner != Int32(NO_REQUEST)) * Int32(sequence == held)
        store_values(config, shared, places, values, kept, place, lane)
    if held >= Int32(0):
        release(shared.query_empty + held % Int32(shape.query_stages))
    elif led != Int32(0):  # no tile for this group, but others may wait for room
        release(shared.query_empty)
    score_trace.mark(kernel, shared, score_trace.DONE, group == Int32(0))


def resident_weights(kernel: Any, shared: Any, place: Int32, quad: Uint32) -> list[Float32]:
    """A request's halved weights of this thread's columns, where they stay in registers."""
    columns = kernel.config.columns
    here = shared.weights + Uint32(place) * Uint32(kernel.places.weight_bytes) + quad
    found: list[Float32] = []
    for pair in range(-(-columns // 16) if kernel.shape.resident else 0):
        found += [numerics.bits_float(word) for word in ptx.load_shared_v4(here + Uint32(64 * pair))]
    return found[: columns // 4]


def tile_values(
    kernel: Any, shared: Any, products: Any, resident: Any, stage: Int32, place: Int32, quad: Uint32, lane: Int32
) -> list[Float32]:
    """Of a tile whose products run: the logits of this lane's key in each row, before rounding."""
    here = shared.weights + Uint32(place) * Uint32(kernel.places.weight_bytes) + quad
    weights = Weights(kernel.shape, resident, here)
    sums: list[Float32] = []
    for page in range(PAGES_PER_TILE):
        warpgroup.wait_group(min(kernel.shape.ahead, PAGES_PER_TILE - page) - 1)
        sums += head_sums(kernel, products.acc[0][page], 0, weights, lane)
        weights.forget()
        if page + kernel.shape.ahead < PAGES_PER_TILE:
            products.issue(0, page + kernel.shape.ahead, stage, place)
    sums, factor = mend_tile(kernel, products, sums, stage, place, lane)
    release(shared.key_empty + stage)
    rows = kernel.config.next_n
    return [numerics.mul(across_pages(sums[i], sums[rows + i], lane), factor) for i in range(rows)]


def store_values(
    config: Any, shared: Any, places: Places, values: list[Float32], tile: Int32, place: Int32, lane: Int32
) -> None:
    """The values of a tile to memory; none of NOWHERE."""
    lengths = shared.lengths + Uint32(place) * Uint32(32)
    store_rows(config, places.at(tile), values, lengths, lane)
