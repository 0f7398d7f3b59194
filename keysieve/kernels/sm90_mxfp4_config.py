"""What the sm90 scorer of MXFP4 index caches can be asked for, and how each configuration is cut.

Compiled, not run on a device: the backend refuses MXFP4 and no call reaches this. The frame is that of
`sm90_score_config`; keys are half as wide in shared memory, queries are held as BF16. No cutlass here.
"""

from collections.abc import Iterable
from dataclasses import replace

from keysieve.kernels.base import MAX_BLOCK_SHARED, Kernel
from keysieve.kernels.sm90_score_config import (
    FEW_REQUESTS,
    LAYOUTS,
    ORDERS,
    PAGES_PER_TILE,
    WEIGHTS,
    ScoreConfig,
    ScoreShape,
    SmemMap,
)
from keysieve.spec import FORMATS, HEAD_DIM, HEADS, MAX_NEXT_N, MAX_REQUESTS

FORMAT = "mxfp4"
KEY_BYTES = FORMATS[FORMAT].key_bytes
SCALE_PLACE = FORMATS[FORMAT].scale_offset
PAGE_SLOT = FORMATS[FORMAT].page_bytes
"""Shared bytes of one page: as it is in memory. A multiple of 128, which the copy engine wants."""

QUERY_ROW = 2 * HEAD_DIM
"""Shared bytes of a query head: 128 BF16."""

assert PAGE_SLOT % 128 == 0


MOST_COLUMNS = 192
"""Widest product, heads x next_n, that is offered: wider ones spill registers as they are cut here."""


def smem_map(config: ScoreConfig, shape: ScoreShape) -> SmemMap:
    """Where everything lies. Queries first: their swizzle wants 1,024-byte alignment."""
    query_bytes = config.columns * QUERY_ROW
    weight_bytes = -(-config.columns // 16) * 16 * 4
    query = 0
    keys = query + shape.query_stages * query_bytes
    weights = keys + shape.stages * PAGES_PER_TILE * PAGE_SLOT
    lengths = weights + shape.query_stages * weight_bytes
    prefix = lengths + shape.query_stages * 4 * MAX_NEXT_N
    rest = prefix + -(-4 * (MAX_REQUESTS + 1) // 16) * 16
    orders = rest + -(-4 * (FEW_REQUESTS + 1) // 16) * 16
    descriptors = orders + 4 * ORDERS
    scratch = descriptors + 16 * shape.stages
    barriers = scratch + 4 * 32
    total = barriers + 8 * 2 * (shape.stages + shape.query_stages + ORDERS)
    return SmemMap(
        keys=keys,
        query=query,
        weights=weights,
        lengths=lengths,
        prefix=prefix,
        rest=rest,
        orders=orders,
        descriptors=descriptors,
        scratch=scratch,
        barriers=barriers,
        total=total,
        query_bytes=query_bytes,
        weight_bytes=weight_bytes,
    )


def shape_of(config: ScoreConfig) -> ScoreShape:
    """The cut that is launched for `config`. A chunk is at most 64 columns, beside two pages of widened keys."""
    # Chunks of two widths have accumulators each, and many chunks keep much at hand: one product in flight then.
    ahead = 2 if config.columns <= 64 or config.columns == 128 else 1
    shape = ScoreShape(groups=3, stages=15, query_stages=2, chunk_columns=64, registers=(32, 160), ahead=ahead)
    while smem_map(config, shape).total > MAX_BLOCK_SHARED:
        shape = replace(shape, stages=shape.stages - shape.groups)
    return shape


def admitted(arch: str) -> Iterable[ScoreConfig]:
    """Every configuration the host may ask for on `arch`."""
    if arch != "sm_90a":
        return ()
    return tuple(
        ScoreConfig(FORMAT, heads, next_n, layout, weights)
        for heads in HEADS
        for next_n in range(1, MAX_NEXT_N + 1)
        for layout in LAYOUTS
        for weights in WEIGHTS
        if heads * next_n <= MOST_COLUMNS
    )


def common(arch: str) -> Iterable[ScoreConfig]:
    """None: no call reaches this scorer, which has not run on a device yet."""
    del arch
    return ()


KERNEL = Kernel(
    name="sm90_mxfp4",
    entry="keysieve.kernels.sm90_mxfp4:build",
    config=ScoreConfig,
    archs=("sm_90a",),
    admitted=admitted,
    common=common,
)
