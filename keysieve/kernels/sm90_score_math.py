"""Consumers of the sm90 scorer: which tiles a warpgroup takes, in which order, and what it needs of their requests.

A warpgroup takes a whole tile: two pages of 64 keys (the M side) by the columns of a chunk of rows (the N side), one
page's product running while the other page's accumulators are reduced. Products and what becomes of them are
`sm90_score_products`', or for sets of four rows `sm90_score_rows`'.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from keysieve.device import numerics, ptx, sync
from keysieve.kernels import schedule, score_trace
from keysieve.kernels.sm90_score_config import NO_REQUEST, PAGE_SLOT, PAGES_PER_TILE
from keysieve.kernels.sm90_score_products import K_STEP as K_STEP
from keysieve.kernels.sm90_score_products import Products as Products
from keysieve.kernels.sm90_score_products import Weights, release
from keysieve.kernels.sm90_score_products import key_scale as key_scale
from keysieve.kernels.sm90_score_products import query_tiles as query_tiles
from keysieve.spec import HEAD_DIM, PAGE, TILE

SCALE_OFFSET = 8192


class Targets:
    """Where results go: byte addresses of logits (BF16) and tops (uint16), and the pitched layout's pitch. policy: of
    stores, see `store_policy`."""

    def __init__(self, logits: Int64, tops: Int64, pitch: Int64, policy: Any = None) -> None:
        self.logits = logits
        self.tops = tops
        self.pitch = pitch
        self.policy = policy

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> "Targets":
        return self


@cute.jit
def consume(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    products: Any,
    targets: Any,
    thread: Int32,
    led: Int32,
) -> None:
    """One consumer warpgroup: every `groups`-th of the block's tiles, in order, until the end is announced.

    led: 1 if the block's first request was announced before it was known to have a tile here (see `lead_keys`).
    """
    config = kernel.config
    shape = kernel.shape
    lane = cute.arch.lane_idx()
    group = cute.arch.make_warp_uniform(thread // Int32(128))
    warp = cute.arch.make_warp_uniform((thread // Int32(32)) % Int32(4))
    scaled, key = products.places_of(warp, lane)
    scale_place = scale_offset(scaled)
    quad = Uint32(lane & 3) * Uint32(16)
    weights = [Float32(0.0) for _ in range(config.columns // 4 if shape.resident else 1)]
    held = Int32(-1)
    request = products.no_request()
    stage = group
    phase = Int32(0)
    owner, tile, sequence = next_tile(shared, stage, phase)
    while owner != Int32(NO_REQUEST):
        score_trace.mark(kernel, shared, score_trace.LANDED, held < Int32(0) and group == Int32(0))
        if sequence != held:
            for passed in cutlass.range(held + Int32(1), sequence + Int32(1), unroll=1):
                if passed > Int32(0):  # those this group had no tile of are released as well, in order
                    release(shared.query_empty + (passed - Int32(1)) % Int32(shape.query_stages))
                query_stage = passed % Int32(shape.query_stages)
                sync.wait_barrier(shared.query_full + query_stage, (passed // Int32(shape.query_stages)) & 1)
            held = sequence
            row, stride = row_places(config, shared, targets, owner)
            lengths = shared.lengths + Uint32(held % Int32(shape.query_stages)) * Uint32(32)
            request = products.request_places(targets, row, stride, lengths, warp, lane)
            if cutlass.const_expr(shape.resident):
                place = shared.weights + Uint32(held % Int32(shape.query_stages)) * Uint32(kernel.places.weight_bytes)
                for pair in cutlass.range_constexpr(-(-config.columns // 16)):
                    four = ptx.load_shared_v4(place + Uint32(64 * pair) + quad)
                    for word in cutlass.range_constexpr(4):
                        if cutlass.const_expr(4 * pair + word < config.columns // 4):
                            weights[4 * pair + word] = numerics.bits_float(four[word])
            score_trace.mark(kernel, shared, score_trace.QUERIED, group == Int32(0))
        score_tile(
            kernel,
            shared,
            products,
            targets,
            weights,
            stage,
            held % Int32(shape.query_stages),
            tile,
            key,
            request,
            scale_place,
            quad,
            lane,
            group,
        )
        stage = stage + Int32(shape.groups)
        if stage >= Int32(shape.stages):
            stage = stage - Int32(shape.stages)
            phase = phase ^ Int32(1)
        owner, tile, sequence = next_tile(shared, stage, phase)
    if held >= Int32(0):
        release(shared.query_empty + held % Int32(shape.query_stages))
    elif led != Int32(0):  # no tile for this group, but others may wait for room
        release(shared.query_empty)
    score_trace.mark(kernel, shared, score_trace.DONE, group == Int32(0))


@cute.jit
def next_tile(shared: Any, stage: Int32, phase: Int32) -> Any:
    """(request or NO_REQUEST, tile of it, its number in the block's order) of a stage, when it has landed."""
    sync.wait_barrier(getattr(shared, "landed", shared.key_full) + stage, phase)
    owner, tile, sequence, _unused = ptx.load_shared_v4(shared.descriptors + Uint32(stage) * Uint32(16))
    return Int32(owner), Int32(tile), Int32(sequence)


def scale_offset(key: Int32) -> Uint32:
    """Byte offset in a ring stage of a tile key's scale word: the page's rows 64 and 65, swizzled as the copy does."""
    page, token = key // Int32(PAGE), key % Int32(PAGE)
    line = token // Int32(32)
    chunk = ((token % Int32(32)) // Int32(4)) ^ line
    return Uint32(page * PAGE_SLOT + SCALE_OFFSET + line * HEAD_DIM + chunk * 16 + (token % Int32(4)) * 4)


@cute.jit
def row_places(config: cutlass.Constexpr[Any], shared: Any, targets: Any, request: Int32) -> Any:
    """(element of the request's first row, elements between its rows) in the logits buffer."""
    row = Int64(0)
    stride = Int64(0)
    if cutlass.const_expr(config.layout == "compact"):
        before = schedule.tiles_before(shared.prefix, request)
        after = schedule.tiles_before(shared.prefix, request + Int32(1))
        row = Int64(before) * Int64(TILE * config.next_n)
        stride = Int64(after - before) * Int64(TILE)
    else:
        row = Int64(request) * Int64(config.next_n) * targets.pitch
        stride = targets.pitch
    return row, stride


@cute.jit
def score_tile(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    products: Any,
    targets: Any,
    weights: Any,
    stage: Int32,
    query_stage: Int32,
    tile: Int32,
    key: Int32,
    request: Any,
    scale_place: Uint32,
    quad: Uint32,
    lane: Int32,
    group: Int32,
) -> None:
    """All products of a tile and their results. key: this lane's (first) key of the tile. row, stride, top, whole: see
    `Products.request_places`."""
    steps = products.steps(kernel)
    score_trace.tick(kernel, shared, 0, tile, group)
    products.start(stage, query_stage)
    for ahead in cutlass.range_constexpr(kernel.shape.ahead):
        products.issue(steps[ahead][0], steps[ahead][1], stage, query_stage)
    place = shared.keys + Uint32(stage) * Uint32(PAGES_PER_TILE * PAGE_SLOT) + scale_place
    scale = products.key_scale(kernel.config, place)
    place = shared.weights + Uint32(query_stage) * Uint32(kernel.places.weight_bytes) + quad
    lengths = shared.lengths + Uint32(query_stage) * Uint32(32)
    products.finish(
        kernel,
        shared,
        targets,
        Weights(kernel.shape, weights, place),
        stage,
        query_stage,
        lengths,
        tile,
        key,
        request,
        scale,
        lane,
        group,
    )
