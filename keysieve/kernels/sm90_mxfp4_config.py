"""What the sm90 scorer of MXFP4 index caches can be asked for, and how each configuration is cut.

The frame is that of `sm90_score_config`: keys are half as wide in shared memory, queries are held as E4M3 beside the
exponents that they were widened with. No cutlass here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from keysieve.kernels import sm90_score_config as fp8
from keysieve.kernels.base import MAX_BLOCK_SHARED, Kernel
from keysieve.kernels.score_cut import ORDERS, PAGES_PER_TILE, rows_and_options, tables_at
from keysieve.kernels.sm90_score_config import ScoreConfig, ScoreShape, SmemMap
from keysieve.spec import FORMATS, HEAD_DIM, HEADS, TILE

FORMAT = "mxfp4"
KEY_BYTES = FORMATS[FORMAT].key_bytes
SCALE_PLACE = FORMATS[FORMAT].scale_offset
PAGE_SLOT = FORMATS[FORMAT].page_bytes
"""Shared bytes of one page: as it is in memory. A multiple of 128, which the copy engine wants."""

assert PAGE_SLOT % 128 == 0

REACH = 14
"""Largest difference of block scales, as exponents, within which an E2M1 vector is an E4M3 vector, exactly."""

TOP = 6
"""Exponent that the largest block is widened with: 6 * 2^6 is the largest E4M3 number that an E2M1 code can become."""

TABLE = 8 * (REACH + 1)
"""Bytes of the table of widened codes: eight E4M3 magnitudes for each exponent. A few constants stand behind it."""

assert TABLE % 16 == 8

CHUNK = fp8.SET * fp8.PART
"""Columns of four rows and 32 of their heads, where lanes have rows."""

AREA = 3 * 4 * TILE
"""Bytes that say what a tile's scales are, see `sm90_mxfp4_places`."""

START_BARRIER, QUERY_BARRIER = 2, 3
"""Named barriers of a block with few requests, beside the plan's (see `sm90_mxfp4_start`): the mbarriers and the table
of codes are there; the prefix table is there for the query warp."""

TILE_APART = 1 << 30
"""Set in a tile's request number, in its descriptor, if one of its keys is apart (for consumers of `plain_tiles`)."""


@dataclass(frozen=True)
class WideMap(SmemMap):
    """And: `table` of widened codes; per query stage and column the head's `factors` (float32) and `codes` (a word of
    four exponents); per query stage a word of `marks`, the rows that are scored block by block; per stage of the ring
    an `area` and a barrier `ready`."""

    table: int
    factors: int
    codes: int
    marks: int
    area: int
    ready: int


def smem_map(config: ScoreConfig, shape: ScoreShape) -> WideMap:
    """Where everything lies. Queries first: their swizzle wants 1,024-byte alignment."""
    query_bytes = config.columns * HEAD_DIM
    weight_bytes = -(-config.columns // 16) * 16 * 4
    query = 0
    keys = query + shape.query_stages * query_bytes
    weights = keys + shape.stages * PAGES_PER_TILE * PAGE_SLOT
    factors = weights + shape.query_stages * weight_bytes
    codes = factors + shape.query_stages * weight_bytes
    table = codes + shape.query_stages * weight_bytes
    tables = tables_at(table + TABLE + 24, shape.stages, shape.query_stages)
    marks = tables.end
    area = marks + -(-4 * shape.query_stages // 16) * 16
    barriers = area + shape.stages * AREA
    ready = barriers + 8 * 2 * (shape.stages + shape.query_stages + ORDERS)
    total = ready + 8 * shape.stages
    return WideMap(
        keys=keys,
        query=query,
        weights=weights,
        lengths=tables.lengths,
        prefix=tables.prefix,
        rest=tables.rest,
        orders=tables.orders,
        descriptors=tables.descriptors,
        scratch=tables.scratch,
        barriers=barriers,
        total=total,
        query_bytes=query_bytes,
        weight_bytes=weight_bytes,
        table=table,
        factors=factors,
        codes=codes,
        marks=marks,
        area=area,
        ready=ready,
    )


def plain_tiles(config: ScoreConfig, shape: ScoreShape) -> bool:
    """Are results a tile late, and plain tiles a loop of their own (`sm90_mxfp4_consume`)? Where one product takes all
    rows."""
    return (config.columns <= 64 or side_by_side(config)) and len(fp8.chunks_of(config, shape)) == 1


def side_by_side(config: ScoreConfig) -> bool:
    """Are two rows of a request in the two pairs of a quad of lanes (`sm90_mxfp4_pair`)?"""
    return config.next_n == 2


def by_rows(config: ScoreConfig) -> bool:
    """Has a lane of a quad all heads of one row (`sm90_mxfp4_rows`)?"""
    return config.heads >= fp8.PART and config.next_n % fp8.SET == 0


def product_column(config: ScoreConfig, column: Any) -> Any:
    """The product's column of a request's column `row * heads + head`: the same, or, with rows side by side, what lane
    `2 row + j // 2` of a quad holds of head `8 i + 2 j + v`, column `8 (2 i + j % 2) + 2 lane + v`; by rows, what lane
    `row % 4` holds of head `2 b + v` of a part, column `8 b + 2 lane + v` of the chunk of the part and four rows."""
    if by_rows(config):
        row, head = column // config.heads, column % config.heads
        chunk = (row // fp8.SET) * (config.heads // fp8.PART) + head // fp8.PART
        return chunk * CHUNK + (head % fp8.PART) // 2 * 8 + row % fp8.SET * 2 + head % 2
    if not side_by_side(config):
        return column
    row, head = column // config.heads, column % config.heads
    return (head // 8) * 16 + ((head // 2) % 2) * 8 + row * 4 + ((head // 4) % 2) * 2 + head % 2


def request_column(config: ScoreConfig, column: Any) -> Any:
    """The inverse of `product_column`."""
    if by_rows(config):
        parts = config.heads // fp8.PART
        chunk, within = column // CHUNK, column % CHUNK
        row = chunk // parts * fp8.SET + within // 2 % fp8.SET
        return row * config.heads + chunk % parts * fp8.PART + within // 8 * 2 + within % 2
    if not side_by_side(config):
        return column
    head = (column // 16) * 8 + ((column // 2) % 2) * 4 + ((column // 8) % 2) * 2 + column % 2
    return ((column // 4) % 2) * config.heads + head


LEAN = 32
"""Columns up to which consumers need no more than 144 registers, and the producers have the others.

With up to 152 the assembler has two orders of the tile loop, one of which takes 4 % longer, and takes either after any
change of anything; with 144 it has taken the shorter one in every form of the kernel.
"""


def shape_of(config: ScoreConfig) -> ScoreShape:
    """The cut that is launched for `config`.

    Three warpgroups, each with its tile's keys in registers; two where it has more beside them than fits. More of
    them, or two smaller blocks, were no faster.
    """
    shape = ScoreShape(groups=3, stages=15, registers=(56, 152), chunk_columns=64)
    if config.columns <= 64 and (config.heads, config.next_n) not in fp8.CROWDED:
        shape = replace(shape, query_stages=4, resident=True)
        if config.columns <= LEAN:
            shape = replace(shape, registers=(80, 144))
    elif by_rows(config):
        shape = replace(shape, chunk_columns=CHUNK, ahead=1, by_rows=True)
        if config.columns > 256:  # three would spill
            shape = replace(shape, groups=2, stages=14, registers=(72, 216))
    elif config.heads == 16 and config.next_n >= 7:  # four rows beside three or four would spill
        shape = replace(shape, chunk_columns=48)
    elif side_by_side(config):  # two rows of 64 heads: three would spill
        shape = replace(shape, groups=2, stages=14, registers=(56, 224), chunk_columns=128, resident=True)
    while smem_map(config, shape).total > MAX_BLOCK_SHARED:
        shape = replace(shape, stages=shape.stages - shape.groups)
    return shape


def admitted(arch: str) -> Iterable[ScoreConfig]:
    """Every configuration the host may ask for on `arch`."""
    if arch != "sm_90a":
        return ()
    return tuple(ScoreConfig(FORMAT, *options) for options in rows_and_options(HEADS))


def common(arch: str) -> Iterable[ScoreConfig]:
    """None: MXFP4 caches are not what most indexers have."""
    del arch
    return ()


def unsupported(heads: int, next_n: int) -> str | None:
    """Why this scorer cannot run such a shape, or None."""
    return fp8.unsupported(heads, next_n, fp8.FORMAT_NAMES[0])


KERNEL = Kernel(
    name="sm90_mxfp4",
    entry="keysieve.kernels.sm90_mxfp4:build",
    config=ScoreConfig,
    archs=("sm_90a",),
    admitted=admitted,
    common=common,
)
