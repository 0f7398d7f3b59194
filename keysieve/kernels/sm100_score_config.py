"""What the Blackwell scorer can be asked for, and how each configuration is cut: products, rings, memory.

No cutlass here: the host reads the same numbers to plan launches, and tests hold them to the chip's limits and to a
plain model of the layouts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from keysieve.kernels.base import MAX_BLOCK_SHARED, Kernel
from keysieve.kernels.score_cut import ORDERS, chunks_of, rows_and_options, tables_at
from keysieve.kernels.sm100_score_words import N_STEP
from keysieve.spec import FORMATS, HEADS, MAX_NEXT_N, NUMERICS, TILE, KeyFormat

ARCHS = ("sm_100a", "sm_103a")
GROUPS = 2
"""Epilogue warpgroups. They take the products in turn, so that one reads tensor memory while the other stores."""

WARPS = 4
"""Warps of a group; warp w of a group reaches lanes 32 w .. 32 w + 31 of tensor memory."""

THREADS = (GROUPS + 1) * 128
KEY_WARP = GROUPS * WARPS
QUERY_WARP = KEY_WARP + 1
MATRIX_WARP = KEY_WARP + 2
SETUP_WARP = KEY_WARP + 3
"""Barriers and tensor memory; then (MXFP4) the order of the keys' scale words."""

TENSOR_COLUMNS = 512
SCALE_COLUMNS = 4
"""Columns that the scale words of 128 rows take: lane r % 32 of column r / 32 holds row r's word, four bytes."""

SCALE_BYTES = 512
K_BYTES = 32
"""Bytes of an operand row that one instruction takes: 32 E4M3 codes, or 64 E2M1 codes."""


@dataclass(frozen=True)
class ScoreConfig:
    """One compiled scorer.

    key_format: "fp8_fp32", "fp8_ue8m0" or "mxfp4". numerics: "bf16" or "fp32". heads: 8, 16, 32, 64. next_n: query
    rows per request, 1..8. layout: "compact" (with the maxima of each 8 keys) or "pitched". weights: "float32" or
    "bfloat16", as they lie in memory.
    """

    key_format: str
    numerics: str
    heads: int
    next_n: int
    layout: str
    weights: str

    @property
    def columns(self) -> int:
        """Columns of the matrix product: all heads of all rows of a request."""
        return self.heads * self.next_n

    @property
    def format(self) -> KeyFormat:
        """The bytes of the keys."""
        return FORMATS[self.key_format]

    @property
    def row_bytes(self) -> int:
        """Bytes of a key or of a query head: the width of the swizzle."""
        return self.format.key_bytes

    @property
    def steps(self) -> int:
        """Instructions along K per product: 4 of 32 codes, or 2 of 64."""
        return self.row_bytes // K_BYTES


@dataclass(frozen=True)
class ScoreShape:
    """How a configuration is cut.

    stages: tiles in the key ring. query_stages: requests whose queries and weights are held. chunk_columns: most
    columns of one product. accumulators: products whose results are held in tensor memory.
    """

    stages: int
    query_stages: int
    chunk_columns: int
    accumulators: int
    evict_first: bool = True
    groups: ClassVar[int] = GROUPS
    trace: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.accumulators % GROUPS:
            # An accumulator must always belong to the same group. A group waits for its own products alone, and a wait
            # by parity is only right when the barrier is at most one phase behind.
            raise ValueError(f"{self}: accumulators is not a multiple of {GROUPS}")
        if self.stages < GROUPS:
            # A group looks at tile t knowing of tiles up to t - GROUPS that they have landed, by its last product. The
            # tile that had the same stage before must be one of them, for the same reason.
            raise ValueError(f"{self}: a group could take the tile before for its own")
        if self.query_stages < GROUPS:
            # A group gives a request up when it sees its next tile, or never, if it has none any more. The other
            # group's products until then may be of the request after, whose query must have a place.
            raise ValueError(f"{self}: a product could wait for a query whose place the other group holds")

    @property
    def threads(self) -> int:
        """Threads of a block: the epilogue groups, then the warpgroup of the other roles."""
        return THREADS


@dataclass(frozen=True)
class SmemMap:
    """Byte offsets in the block's dynamic shared memory; `total` is what the launch asks for.

    scales: the keys' scale words as the pages have them. key_scales, query_scales: (MXFP4) as tensor memory takes them.
    """

    keys: int
    query: int
    scales: int
    key_scales: int
    query_scales: int
    weights: int
    lengths: int
    prefix: int
    rest: int
    orders: int
    descriptors: int
    scratch: int
    tensor: int
    barriers: int
    total: int
    tile_bytes: int
    query_bytes: int
    query_scale_bytes: int
    weight_bytes: int


@dataclass(frozen=True)
class TensorMap:
    """Columns of tensor memory. Accumulator a begins at `a * pitch`; from `scales` on, each has (MXFP4) four columns of
    the keys' scale words and four of the queries'.

    An accumulator's scale words are replaced when it is free, so that no product that reads them is under way: the unit
    orders a copy before later products of its thread, but not after earlier ones. columns: allocated, a power of two.
    """

    pitch: int
    scales: int
    columns: int


def padded(columns: int) -> int:
    """Columns of a product as the instruction counts them."""
    return -(-columns // N_STEP) * N_STEP


def tensor_map(config: ScoreConfig, shape: ScoreShape) -> TensorMap:
    """Where accumulators and scale words lie in tensor memory."""
    chunks = chunks_of(config, shape)
    pitch = padded(max(rows for _, rows in chunks) * config.heads)
    end = shape.accumulators * pitch
    scales = end
    if not config.format.is_fp8:
        end += shape.accumulators * 2 * SCALE_COLUMNS
    columns = max(32, 1 << (end - 1).bit_length())
    return TensorMap(pitch, scales, columns)


def barriers_of(shape: ScoreShape) -> int:
    """64-bit barriers: key full, empty and scales ready; full and empty of queries, accumulators and orders."""
    return 3 * shape.stages + 2 * (shape.query_stages + shape.accumulators + ORDERS)


def smem_map(config: ScoreConfig, shape: ScoreShape) -> SmemMap:
    """Where everything lies. Swizzled tiles first: they want 1,024-byte alignment.

    The last product of a request may read up to 8 rows past the query's end (heads 8, an odd number of rows); those
    bytes are part of the stage, whatever they hold, and fill accumulator columns that nobody reads.
    """
    mx = not config.format.is_fp8
    chunks = chunks_of(config, shape)
    tile_bytes = TILE * config.row_bytes
    rows = max(start * config.heads + padded(rows * config.heads) for start, rows in chunks)
    query_bytes = -(-rows * config.row_bytes // 1024) * 1024
    query_scale_bytes = SCALE_BYTES * len(chunks) * mx
    weight_bytes = -(-config.columns * (4 if config.numerics == "fp32" else 2) // 16) * 16
    keys = 0
    query = keys + shape.stages * tile_bytes
    scales = query + shape.query_stages * query_bytes
    key_scales = scales + shape.stages * 4 * TILE
    query_scales = key_scales + shape.stages * SCALE_BYTES * mx
    weights = query_scales + shape.query_stages * query_scale_bytes
    tables = tables_at(weights + shape.query_stages * weight_bytes, shape.stages, shape.query_stages)
    tensor = tables.end
    barriers = tensor + 16
    total = barriers + 8 * barriers_of(shape)
    return SmemMap(
        keys=keys,
        query=query,
        scales=scales,
        key_scales=key_scales,
        query_scales=query_scales,
        weights=weights,
        lengths=tables.lengths,
        prefix=tables.prefix,
        rest=tables.rest,
        orders=tables.orders,
        descriptors=tables.descriptors,
        scratch=tables.scratch,
        tensor=tensor,
        barriers=barriers,
        total=total,
        tile_bytes=tile_bytes,
        query_bytes=query_bytes,
        query_scale_bytes=query_scale_bytes,
        weight_bytes=weight_bytes,
    )


# Places at run time. Stages and slots are the kernel's numbers there, and Python integers in the tests that execute
# these expressions against a model of the unit.


def key_tile(places: SmemMap, stage: Any) -> Any:
    """Shared offset of a stage's 128 key rows."""
    return places.keys + stage * places.tile_bytes


def query_rows(config: ScoreConfig, places: SmemMap, first_row: int, query_stage: Any) -> Any:
    """Shared offset of the query heads from row `first_row` of the request on."""
    return places.query + first_row * config.heads * config.row_bytes + query_stage * places.query_bytes


def key_scale_words(places: SmemMap, stage: Any) -> Any:
    """Shared offset of a stage's scale words in the unit's order (MXFP4)."""
    return places.key_scales + stage * SCALE_BYTES


def query_scale_words(places: SmemMap, chunk: int, query_stage: Any) -> Any:
    """Shared offset of the scale words of a product's query heads in the unit's order (MXFP4)."""
    return places.query_scales + chunk * SCALE_BYTES + query_stage * places.query_scale_bytes


def sum_column(config: ScoreConfig, tensor: TensorMap, slot: Any, row: int) -> Any:
    """Column, from the allocation's first on, of head 0 of row `row` of the chunk that accumulator `slot` holds."""
    return row * config.heads + slot * tensor.pitch


def key_scale_column(tensor: TensorMap, slot: Any) -> Any:
    """First column of the keys' scale words of the product in accumulator `slot`."""
    return tensor.scales + slot * (2 * SCALE_COLUMNS)


def query_scale_column(tensor: TensorMap, slot: Any) -> Any:
    """First column of the queries' scale words of the product in accumulator `slot`."""
    return tensor.scales + SCALE_COLUMNS + slot * (2 * SCALE_COLUMNS)


def shape_of(config: ScoreConfig) -> ScoreShape:
    """The cut that is launched for `config`: as many tiles in flight, and as many accumulators, as fit."""
    fp8 = config.format.is_fp8
    # MXFP4 products keep to the 128 columns whose scale words fill one set of four tensor-memory columns.
    shape = ScoreShape(stages=10 if fp8 else 16, query_stages=2, chunk_columns=256 if fp8 else 128, accumulators=4)
    if tensor_map(config, shape).columns > TENSOR_COLUMNS:
        shape = replace(shape, accumulators=2)
    while smem_map(config, shape).total > MAX_BLOCK_SHARED:
        shape = replace(shape, stages=shape.stages - 1)
    return shape


def admitted(arch: str) -> Iterable[ScoreConfig]:
    """Every configuration the host may ask for on `arch`."""
    if arch not in ARCHS:
        return ()
    return tuple(
        ScoreConfig(key_format, numerics, *rest)
        for key_format in FORMATS
        for numerics in NUMERICS
        for rest in rows_and_options(HEADS)
    )


def common(arch: str) -> Iterable[ScoreConfig]:
    """Those worth compiling ahead: 32 and 64 heads, up to three speculative tokens, folded (float32) weights, and the
    backend's own numerics."""
    return tuple(
        config
        for config in admitted(arch)
        if config.heads >= 32
        and config.next_n in (1, 2, 4)
        and config.weights == "float32"
        and config.numerics == "bf16"
    )


def unsupported(heads: int, next_n: int, key_format: str) -> str | None:
    """Why this scorer cannot run such a shape, or None."""
    if key_format not in FORMATS:
        return f"key_format {key_format!r} has no sm100 scorer; it has {', '.join(FORMATS)}"
    if heads not in HEADS:
        return f"heads {heads}: the sm100 scorer takes {', '.join(map(str, HEADS))}; pad with zero heads"
    if not 1 <= next_n <= MAX_NEXT_N:
        return f"next_n {next_n}: the sm100 scorer takes 1..{MAX_NEXT_N}"
    return None


KERNEL = Kernel(
    name="sm100_score",
    entry="keysieve.kernels.sm100_score:build",
    config=ScoreConfig,
    archs=ARCHS,
    admitted=admitted,
    common=common,
)
