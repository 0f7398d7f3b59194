"""Consumers of the sm90 MXFP4 scorer where one product takes all rows of a request: a loop per request, results late.

From the last exchange to the stores a tile's results are a chain of some fifty instructions, each waiting for the
one before. So the values of a tile are kept, and their way to memory is walked while the next tile's keys are widened
and multiplied. They never outlive their request: before a warpgroup lets go of its queries it stores them.

Tiles of one request that are *plain* are a loop of their own, which nothing else takes part in: no vector of theirs is
apart (the scale warps say so in the tile's descriptor, in one word with the request's number), they lie inside all of
its rows, and none of their logits is a NaN. A tile that is apart is scored outside of it; one that ends a row, or with
a NaN, ends the loop and is stored outside of it.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup

from keysieve.device import numerics, ptx, sync
from keysieve.kernels import score_trace
from keysieve.kernels.sm90_mxfp4_apart import mend_tile
from keysieve.kernels.sm90_mxfp4_config import TILE_APART, side_by_side
from keysieve.kernels.sm90_mxfp4_pair import (
    PairPlaces,
    mend_pair,
    pair_sums,
    pair_values,
    store_pair,
    store_pair_plain,
)
from keysieve.kernels.sm90_mxfp4_store import Places, PlainPlaces, store_plain, store_rows
from keysieve.kernels.sm90_score_config import NO_REQUEST, PAGES_PER_TILE
from keysieve.kernels.sm90_score_math import next_tile, row_places
from keysieve.kernels.sm90_score_products import Weights, across_pages, head_sums, release
from keysieve.kernels.sm90_score_store import select
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
    quad = Uint32(lane & 3) * Uint32(16)
    held = Int32(-1)
    stage = group
    phase = Int32(0)
    owner, tile, sequence = next_tile(shared, stage, phase)
    score_trace.mark(kernel, shared, score_trace.LANDED, group == Int32(0))
    while owner != Int32(NO_REQUEST):
        number = sequence & Int32(TILE_APART - 1)
        place = number % Int32(shape.query_stages)
        row, stride = row_places(config, shared, targets, owner)
        lengths = shared.lengths + Uint32(place) * Uint32(32)
        if cutlass.const_expr(not side_by_side(config)):
            places = result_places(config, targets, row, stride, lengths, warp, lane)
        for request in cutlass.range(held + Int32(1), number + Int32(1), unroll=1):
            if request > Int32(0):  # those this group had no tile of are released as well, in order
                release(shared.query_empty + (request - Int32(1)) % Int32(shape.query_stages))
            query_stage = request % Int32(shape.query_stages)
            sync.wait_barrier(shared.query_full + query_stage, (request // Int32(shape.query_stages)) & 1)
        held = number
        if cutlass.const_expr(side_by_side(config)):
            places = result_places(config, targets, row, stride, lengths, warp, lane)
        else:
            places.read_lengths()
        weights = resident_weights(kernel, shared, place, quad)
        score_trace.mark(kernel, shared, score_trace.QUERIED, group == Int32(0))
        products.begin(place)
        values = [Float32(0.0) for _ in range(config.next_n)]
        kept = Int32(NOWHERE)  # tile whose values they are
        if (sequence != held) | (products.mark != Uint32(0)):
            products.start(stage, place)
            products.issue(0, 0, stage, place)
            products.issue(0, 1, stage, place)
            kept = tile
            values = any_values(kernel, shared, products, weights, stage, place, quad, lane)
            stage, phase = next_stage(shape, stage, phase)
            owner, tile, sequence = next_tile(shared, stage, phase)
        else:
            more = Int32(1)
            while more != Int32(0):
                start_plain(config, products, stage)
                products.issue(0, 0, stage, place)
                store_plain_tile(config, places, values, kept, lane)
                products.issue(0, 1, stage, place)
                release(shared.key_empty + stage)
                kept = tile
                values = plain_values(kernel, shared, products, weights, place, quad, lane)
                stage, phase = next_stage(shape, stage, phase)
                owner, tile, sequence = next_tile(shared, stage, phase)
                spoiled = Uint32(cute.arch.vote_any_sync(not_a_number(values)))
                more = Int32(sequence == held) * Int32(kept < places.whole) * Int32(spoiled == Uint32(0))
        store_tile(config, places, values, kept, lane)
    if held >= Int32(0):
        release(shared.query_empty + held % Int32(shape.query_stages))
    elif led != Int32(0):  # no tile for this group, but others may wait for room
        release(shared.query_empty)
    score_trace.mark(kernel, shared, score_trace.DONE, group == Int32(0))


def next_stage(shape: Any, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
    """The stage of the group's next tile, and its barrier's parity."""
    after = stage + Int32(shape.groups)
    wrapped = after >= Int32(shape.stages)
    return select(wrapped, after - Int32(shape.stages), after), select(wrapped, phase ^ Int32(1), phase)


def not_a_number(values: list[Float32]) -> Any:
    """Is one of them a NaN (or perhaps two are infinite)?"""
    total = values[0]
    for value in values[1:]:
        total = numerics.add(total, value)
    return total != total


def result_places(
    config: Any, targets: Any, row: Int64, stride: Int64, lengths: Uint32, warp: Int32, lane: Int32
) -> Any:
    """Where a lane's results of a request go."""
    if side_by_side(config):
        return PairPlaces(targets, row, stride, lengths, warp, lane, config.layout == "compact")
    key = ((lane >> Int32(1)) & 1) * PAGE + warp * 16 + (lane & 1) * GROUP + (lane >> Int32(2))
    return PlainPlaces(config, Places(targets, row, stride, key, lane), lengths, lane)


def start_plain(config: Any, products: Any, stage: Int32) -> None:
    """Scales of a tile with nothing apart."""
    (products.start_pair if side_by_side(config) else products.start_plain)(stage)


def store_plain_tile(config: Any, places: Any, values: list[Float32], tile: Int32, lane: Int32) -> None:
    """The values of a plain tile to memory; none of NOWHERE."""
    if side_by_side(config):
        store_pair_plain(places, values, tile)
    else:
        store_plain(places, values, tile, lane)


def store_tile(config: Any, places: Any, values: list[Float32], tile: Int32, lane: Int32) -> None:
    """The values of any tile to memory; none of NOWHERE."""
    if side_by_side(config):
        store_pair(places, values, tile, lane)
    else:
        store_rows(config, places.any.at(tile), values, places.lengths, lane)


def plain_values(
    kernel: Any, shared: Any, products: Any, resident: Any, place: Int32, quad: Uint32, lane: Int32
) -> list[Float32]:
    """Of a plain tile whose products run: this lane's logits, before rounding."""
    config = kernel.config
    here = shared.weights + Uint32(place) * Uint32(kernel.places.weight_bytes) + quad
    weights = Weights(kernel.shape, resident, here)
    pages: list[list[Float32]] = []
    for page in range(PAGES_PER_TILE):
        warpgroup.wait_group(PAGES_PER_TILE - 1 - page)
        acc = products.acc[0][page]
        pages.append(
            pair_sums(kernel, acc, weights) if side_by_side(config) else head_sums(kernel, acc, 0, weights, lane)
        )
        weights.forget()
    if side_by_side(config):
        return pair_values(pages, products.factors, lane)
    factor = numerics.bits_float(products.factor)
    return [numerics.mul(across_pages(pages[0][i], pages[1][i], lane), factor) for i in range(config.next_n)]


def any_values(
    kernel: Any, shared: Any, products: Any, resident: Any, stage: Int32, place: Int32, quad: Uint32, lane: Int32
) -> list[Float32]:
    """The same of any tile, which is let go of."""
    if not side_by_side(kernel.config):
        return tile_values(kernel, shared, products, resident, stage, place, quad, lane)
    products.read_factors(stage)
    values = plain_values(kernel, shared, products, resident, place, quad, lane)
    values = list(mend_pair(kernel, products, values, stage, place, lane))
    release(shared.key_empty + stage)
    return values


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
