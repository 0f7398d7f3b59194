"""What the sm90 scorer can be asked for, and how each configuration is cut: chunks, warpgroups, shared memory.

No cutlass here: the host reads the same numbers to plan launches, and tests hold them to the chip's limits.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from keysieve.kernels.base import MAX_BLOCK_SHARED, Kernel
from keysieve.kernels.score_cut import FEW_REQUESTS as FEW_REQUESTS
from keysieve.kernels.score_cut import HOME_ROUNDS as HOME_ROUNDS
from keysieve.kernels.score_cut import LAYOUTS as LAYOUTS
from keysieve.kernels.score_cut import NO_REQUEST as NO_REQUEST
from keysieve.kernels.score_cut import ORDERS as ORDERS
from keysieve.kernels.score_cut import PAGES_PER_TILE as PAGES_PER_TILE
from keysieve.kernels.score_cut import WEIGHTS as WEIGHTS
from keysieve.kernels.score_cut import chunks_of as chunks_of
from keysieve.kernels.score_cut import rows_and_options, tables_at
from keysieve.spec import FORMATS, HEAD_DIM, HEADS, MAX_NEXT_N

FORMAT_NAMES = ("fp8_fp32", "fp8_ue8m0")

PAGE_SLOT = 9216
"""Shared bytes one page takes: 8,448 (64 x 128 key bytes, then 64 scale words) rounded up to the swizzle's 1,024."""

PITCHED_TOPS = "pitched_tops"
"""Layout of pitched logits with the maxima of each 8 keys, pitched as well: an eighth of the logits' elements."""

KEPT_ROWS = 35840
"""Tile rows of a step (288 bytes of results each) that L2 is asked to keep where nobody says how many: seven eighths of
the 11.25 MiB that an H200's driver sets aside for what is asked to stay."""

RESERVED_SHARED = 1024
"""Shared bytes that the system takes beside each block's own."""

SET = 4
"""Rows that lie side by side in a quad of lanes where a cut is `by_rows`."""

PART = 32
"""Heads of them in one chunk of columns."""

REGISTER_FILE = 65536
WARPGROUP = 128


@dataclass(frozen=True)
class ScoreConfig:
    """One compiled scorer.

    key_format: "fp8_fp32" or "fp8_ue8m0". heads: 8, 16, 32, 64. next_n: query rows per request, 1..8. layout:
    "compact" (with the maxima of each 8 keys), "pitched" or `PITCHED_TOPS`. weights: "float32" or "bfloat16".
    """

    key_format: str
    heads: int
    next_n: int
    layout: str
    weights: str

    @property
    def columns(self) -> int:
        """Columns of the matrix product: all heads of all rows of a request."""
        return self.heads * self.next_n


@dataclass(frozen=True)
class ScoreShape:
    """How a configuration is cut.

    groups: consumer warpgroups; each takes every `groups`-th tile of its block. stages: tiles in the key ring.
    query_stages: requests whose queries and weights are held. chunk_columns: most columns of one matrix instruction.
    registers: (producer, consumer) after the reallocation, or (0, 0) to leave the even split. resident: weights stay in
    registers for all tiles of a request; else they are read from shared memory for every product. ahead: products a
    warpgroup has in flight, 1 or 2, each with accumulators of its own.
    evict_first: keys leave L2 before other data. producer_warps: 2, or 4 where registers are reallocated (a whole
    warpgroup must take part). trace: write times instead of `starts` (see `score_trace`). per_sm: blocks that share a
    multiprocessor; its shared memory and registers must hold them all. by_rows: the columns of a product are ordered so
    that a lane has all heads of a row (see `sm90_score_rows`; next_n 4 or 8, 32 or 64 heads). early: a block with few
    requests sends for its first tile before it knows all lengths (see `sm90_score_early`).
    """

    groups: int = 3
    stages: int = 9
    query_stages: int = 2
    chunk_columns: int = 128
    registers: tuple[int, int] = (0, 0)
    resident: bool = False
    ahead: int = 2
    evict_first: bool = True
    producer_warps: int = 4
    trace: bool = False
    per_sm: int = 1
    by_rows: bool = False
    early: bool = False

    def __post_init__(self) -> None:
        if self.stages % self.groups:
            # A stage must always belong to the same warpgroup: tiles land out of order, and a warpgroup that waits for
            # a stage whose previous tile (another warpgroup's) has not landed would take the older phase for its own.
            raise ValueError(f"{self}: stages is not a multiple of groups")
        if self.query_stages < self.groups - 1:
            raise ValueError(f"{self}: a request could wait for a warpgroup that has no tile left")
        if self.ahead not in (1, 2):
            raise ValueError(f"{self}: one or two products in flight")
        if self.producer_warps not in (2, 4) or (self.registers[0] and self.producer_warps != 4):
            raise ValueError(f"{self}: 2 or 4 producer warps, 4 where registers are reallocated")
        if WARPGROUP * (self.registers[0] + self.groups * self.registers[1]) > self.threads * self.even_registers:
            # A warpgroup would wait for ever for registers that no other gives back.
            raise ValueError(f"{self}: more registers than the block starts with")

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers, then the producers."""
        return self.groups * WARPGROUP + self.producer_warps * 32

    @property
    def even_registers(self) -> int:
        """Registers a thread starts with: an even split among the blocks of a multiprocessor, in eights."""
        return REGISTER_FILE // (self.per_sm * self.threads) // 8 * 8


@dataclass(frozen=True)
class SmemMap:
    """Byte offsets in the block's dynamic shared memory; `total` is what the launch asks for."""

    keys: int
    query: int
    weights: int
    lengths: int
    prefix: int
    rest: int
    orders: int
    descriptors: int
    scratch: int
    barriers: int
    total: int
    query_bytes: int
    weight_bytes: int


def smem_map(config: ScoreConfig, shape: ScoreShape) -> SmemMap:
    """Where everything lies. Swizzled tiles first: they want 1,024-byte alignment."""
    query_bytes = config.columns * HEAD_DIM
    weight_bytes = -(-config.columns // 16) * 16 * 4
    keys = 0
    query = keys + shape.stages * PAGES_PER_TILE * PAGE_SLOT
    weights = query + shape.query_stages * query_bytes
    tables = tables_at(weights + shape.query_stages * weight_bytes, shape.stages, shape.query_stages)
    return SmemMap(
        keys=keys,
        query=query,
        weights=weights,
        lengths=tables.lengths,
        prefix=tables.prefix,
        rest=tables.rest,
        orders=tables.orders,
        descriptors=tables.descriptors,
        scratch=tables.scratch,
        barriers=tables.end,
        total=tables.end + 8 * 2 * (shape.stages + shape.query_stages + ORDERS),
        query_bytes=query_bytes,
        weight_bytes=weight_bytes,
    )


CRAMPED = frozenset({(32, 5), (32, 7), (64, 3), (64, 5), (64, 6), (64, 7)})
"""(heads, next_n) whose consumers would spill within the registers that three warpgroups leave them."""


CROWDED = frozenset({(8, 8), (16, 4)})
"""(heads, next_n) of up to 64 columns whose many rows would spill within the registers that four warpgroups leave."""


def shape_of(config: ScoreConfig) -> ScoreShape:
    """The cut that is launched for `config`."""
    if config.heads >= PART and config.next_n % SET == 0:
        shape = by_rows(config)
    elif (config.heads, config.next_n) in CROWDED:
        shape = ScoreShape(groups=3, stages=9, query_stages=4, resident=True)
    elif config.columns <= 32:  # two blocks start and refill faster than one of as many stages
        shape = ScoreShape(groups=2, stages=4, query_stages=2, resident=True, producer_warps=2, per_sm=2, early=True)
    elif config.columns <= 64:
        shape = ScoreShape(groups=4, stages=8, query_stages=4, resident=True, early=True)
    elif config.columns <= 128:
        shape = ScoreShape(groups=3, stages=9, query_stages=2, registers=(32, 160), resident=True, ahead=1)
    elif (config.heads, config.next_n) in CRAMPED:
        most = (
            96 if config.heads == 32 and config.next_n == 7 else 128
        )  # a chunk of four rows beside one of three spills
        shape = ScoreShape(groups=2, stages=10, query_stages=2, registers=(40, 232), chunk_columns=most)
    else:
        shape = ScoreShape(groups=3, stages=9, query_stages=2, registers=(32, 160))
    return fitted(config, shape)


def by_rows(config: ScoreConfig) -> ScoreShape:
    """The cut of 4 or 8 rows of 32 or 64 heads."""
    if config.columns <= 256:
        return ScoreShape(groups=3, stages=9, registers=(32, 160), resident=True, ahead=1, by_rows=True)
    return ScoreShape(groups=2, stages=10, registers=(40, 232), chunk_columns=256, ahead=1, by_rows=True)


def fitted(config: ScoreConfig, shape: ScoreShape) -> ScoreShape:
    """`shape` with as many of its stages as shared memory holds, a multiple of its groups."""
    stages = shape.stages // shape.groups * shape.groups
    while stages > shape.groups:
        tried = replace(shape, stages=stages)
        if shape.per_sm * (smem_map(config, tried).total + RESERVED_SHARED) <= MAX_BLOCK_SHARED + RESERVED_SHARED:
            return tried
        stages -= shape.groups
    return replace(shape, stages=shape.groups)


def admitted(arch: str) -> Iterable[ScoreConfig]:
    """Every configuration the host may ask for on `arch`."""
    if arch != "sm_90a":
        return ()
    configs = [ScoreConfig(key_format, *rest) for key_format in FORMAT_NAMES for rest in rows_and_options(HEADS)]
    return (*configs, *(replace(config, layout=PITCHED_TOPS) for config in configs if config.layout == "pitched"))


def common(arch: str) -> Iterable[ScoreConfig]:
    """Those worth compiling ahead: 32 and 64 heads, up to three speculative tokens, folded (float32) weights."""
    return tuple(
        config
        for config in admitted(arch)
        if config.heads >= 32 and config.next_n in (1, 2, 4) and config.weights == "float32"
    )


def unsupported(heads: int, next_n: int, key_format: str) -> str | None:
    """Why this scorer cannot run such a shape, or None."""
    if key_format not in FORMAT_NAMES:
        return f"key_format {key_format!r} has no sm90 scorer; it has {', '.join(FORMAT_NAMES)}"
    if heads not in HEADS:
        return f"heads {heads}: the sm90 scorer takes {', '.join(map(str, HEADS))}; pad with zero heads"
    if not 1 <= next_n <= MAX_NEXT_N:
        return f"next_n {next_n}: the sm90 scorer takes 1..{MAX_NEXT_N}"
    return None


assert all(FORMATS[name].page_bytes == 8448 for name in FORMAT_NAMES)

KERNEL = Kernel(
    name="sm90_score",
    entry="keysieve.kernels.sm90_score:build",
    config=ScoreConfig,
    archs=("sm_90a",),
    admitted=admitted,
    common=common,
)
