"""Exact selection: what can be asked for. No cutlass here.

Two kernels share one body (`select.py`): `select` reads keysieve's own logits in the compact layout and their per-8
maxima; `topk` reads anyone's BF16 rows and computes the maxima itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keysieve.kernels.base import ARCHS, Kernel
from keysieve.spec import MAX_TOPK

K_CLASSES: tuple[int, ...] = (2048, 4096)
"""Largest K that a compiled kernel serves: sizes its lists and its registers."""

CLUSTERS: tuple[int, ...] = (1, 2, 4, 8)
"""Blocks that may share a row, over distributed shared memory. (16 were slower in every measured shape: exchanges grow,
and clusters of 16 do not fill the chip.)"""

VECTORS: int = 4
"""16-byte vectors that a thread keeps in registers: of keys, and before them of maxima (more maxima are read again)."""

OCTAVE_BITS: int = 9
"""Bits of the first digit where blocks share a row: sign and exponent."""

COPIES: int = 4
"""Histograms of octaves that a block counts in."""


@dataclass(frozen=True)
class SelectConfig:
    """What the code is specialised by.

    Attributes:
        k_class: the largest K it serves, one of `K_CLASSES`.
        cluster: blocks per row, one of `CLUSTERS`.
        threads: threads of a block, 512 or 1024: 512 leave room for a second block on the SM, 1024 hold longer parts.
        maxima: whether the per-8 maxima come with the logits (`select`); else they are computed (`topk`).
        trace: note the clock at every step, for tuning.
        given: `topk` whose maxima another kernel computes (`select_tops.py`), which runs in front of it.
    """

    k_class: int
    cluster: int
    threads: int = 512
    maxima: bool = True
    trace: bool = False
    given: bool = False

    @property
    def warps(self) -> int:
        return self.threads // 32

    def high_bits(self, stage: int) -> int:
        """Bits of an unshared row's first digit: 11, and 12 among maxima where no row is shared, since a finer digit
        mostly spares the second one (see `find_groups`)."""
        return 12 if self.cluster == 1 and stage == 0 else 11

    @property
    def alignment(self) -> int:
        """The map begins at a multiple of this: a histogram's bin is then addressed by `bin * 4 | base`."""
        return 4 << self.high_bits(0)

    @property
    def held_groups(self) -> int:
        """Groups of 8 keys whose keys fit the block's registers. At least K: the second level's input."""
        return VECTORS * self.threads

    @property
    def streamed(self) -> bool:
        """Does a row whose maxima are computed here stream through shared memory? Where blocks share a row, an SM has
        one of them, and room for the rings; blocks that may lie two on an SM load into registers."""
        return not self.maxima and not self.given and self.cluster > 1

    @property
    def chunk_groups(self) -> int:
        """Groups of 8 keys in a chunk of a streamed row."""
        return 128 if self.threads == 512 else 64

    @property
    def chunks(self) -> int:
        """Chunks in the ring of a warp: 128 or 96 KB a block on their way."""
        if not self.streamed:
            return 0
        return 4 if self.threads == 512 else 3

    @property
    def solo_groups(self) -> int:
        """Groups of 8 keys up to which one block works on a row alone."""
        return 1024

    @property
    def table_words(self) -> int:
        """Entries of the block table kept in shared memory; longer parts look their entries up in L2."""
        return 4 * self.threads

    @property
    def topped_keys(self) -> int:
        """Keys of a part whose maxima fit the block's registers."""
        return VECTORS * self.threads * 64

    @property
    def scratch_bytes(self) -> int:
        """Scratch of a warp: a kernel that computes maxima keeps what its registers will hold."""
        return 512 if self.maxima or self.given else 512 * VECTORS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory to ask for: the map, and what aligning its start may cost."""
        return SharedMap.of(self).total + self.alignment


TOPS_VECTORS: int = 4
"""Groups that a thread of the `tops` kernel reads."""


@dataclass(frozen=True)
class TopsConfig:
    """What the code of `tops`, the maxima of foreign rows, is specialised by: threads of a block."""

    threads: int = 256

    @property
    def groups(self) -> int:
        """Groups of 8 keys that a block reads."""
        return TOPS_VECTORS * self.threads


@dataclass(frozen=True)
class SharedMap:
    """Byte offsets in the block's dynamic shared memory.

    Two stages (0: maxima, 1: keys) have histograms of their own, so that nothing is cleared between them while another
    block of the cluster may still read it.
    """

    high: tuple[int, int]  # u32 [2048 or 4096]: counts of the upper bits; of a shared row u32 [COPIES][512]: of octaves
    low: tuple[int, int]  # u32 [64 or 256]: counts of the other bits inside the threshold's bin, then of keys outside
    cleared: int  # bytes from 0 that are zeroed at the start
    chunks: tuple[int, int]  # u32 [32]: sums of neighbouring bins, of every warp
    octaves: tuple[int, int]  # u16 [cluster][512]: of a shared row, `high` of every block
    values: tuple[int, int]  # u16 [cluster][128]: of a shared row, `low` of every block
    found: tuple[int, int]  # u32 [4]: threshold digit and the keys above it; the keys in its bin. Of a shared row:
    # digit, keys above it in the row and in the blocks before, keys in it there
    sums: tuple[int, int]  # u32 [32]: what every warp takes
    arrivals: int  # u64 [6]: mbarriers of what the cluster's blocks send (stage 0 octaves, values; stage 1 the same;
    # bins above floors, and these; plateaus)
    floors: int  # u32 [2][8]: of a shared row, what every block counts from; its keys above and at zero, 16 bits each
    tiles: int  # u32 [32]: tiles of earlier requests, a partial sum of every warp
    groups: int  # u32 [held_groups]: groups that were found, in position order
    picks: int  # u32 [k_class]: keys that were found, in position order
    table: int  # i32 [table_words]: the part's entries of the block table
    edges: int  # u16 [2][8]: raw keys of the row's first and last group, where they are not whole
    scratch: (
        int  # a warp's own: masks (512 bytes); before, computed maxima: its own (512 bytes a round) or, streamed, all
    )
    landings: int  # u64 [warps][chunks]: mbarriers of a streamed row's chunks
    ring: int  # a streamed row's chunks, every warp's ring in turn; begins where `groups` begins, which come later
    total: int

    @staticmethod
    def of(config: SelectConfig) -> SharedMap:
        high = (0, 4 << config.high_bits(0))
        lows = 256 if config.cluster == 1 else 8 << (16 - OCTAVE_BITS)
        low = (high[1] + (4 << config.high_bits(1)), high[1] + (4 << config.high_bits(1)) + lows)
        at = cleared = low[1] + lows
        shared = config.cluster > 1
        sizes = {
            "chunks": 128,
            "octaves": (2 << OCTAVE_BITS) * config.cluster * shared,
            "values": (2 << (16 - OCTAVE_BITS)) * config.cluster * shared,
            "found": 16,
            "sums": 128,
        }
        pairs: dict[str, tuple[int, int]] = {}
        for name, size in sizes.items():
            pairs[name] = (at, at + size)
            at += 2 * size
        arrivals = at
        floors = arrivals + 64
        tiles = floors + 64
        edges = tiles + 128
        landings = edges + 128
        scratch = landings + -(-8 * config.chunks * config.warps // 128) * 128
        table = scratch + config.scratch_bytes * config.warps
        ring = groups = table + 4 * config.table_words
        picks = groups + 4 * config.held_groups
        total = picks + 4 * config.k_class
        total = max(total, ring + 16 * config.chunk_groups * config.chunks * config.warps) + (64 if config.trace else 0)
        return SharedMap(
            high=high,
            low=low,
            **pairs,
            cleared=cleared,
            arrivals=arrivals,
            floors=floors,
            tiles=tiles,
            groups=groups,
            picks=picks,
            table=table,
            edges=edges,
            scratch=scratch,
            landings=landings,
            ring=ring,
            total=total,
        )


def k_class_of(k: int) -> int:
    """The K class that serves `k` (1..4096)."""
    if not 1 <= k <= MAX_TOPK:
        raise ValueError(f"k {k}: 1..{MAX_TOPK}")
    return next(c for c in K_CLASSES if k <= c)


def _admitted(maxima: bool) -> Iterable[SelectConfig]:
    shapes = [(2048, 512), (2048, 1024), (4096, 1024)]
    given = [] if maxima else [SelectConfig(2048, 8, 512, maxima, given=True)]
    return [SelectConfig(k, cluster, threads, maxima) for k, threads in shapes for cluster in CLUSTERS] + given


def _select(arch: str) -> Iterable[SelectConfig]:
    del arch  # the same for all of them
    return _admitted(True)


def _topk(arch: str) -> Iterable[SelectConfig]:
    del arch
    return _admitted(False)


def _tops(arch: str) -> Iterable[TopsConfig]:
    del arch
    return [TopsConfig()]


SELECT = Kernel(
    name="select",
    entry="keysieve.kernels.select:build_select",
    config=SelectConfig,
    archs=ARCHS,
    admitted=_select,
    max_registers=64,
)
TOPK = Kernel(
    name="topk",
    entry="keysieve.kernels.select:build_topk",
    config=SelectConfig,
    archs=ARCHS,
    admitted=_topk,
    max_registers=72,  # of blocks of 512 threads that stream a row: no second one shares their SM
)
TOPS = Kernel(
    name="topk_tops",
    entry="keysieve.kernels.select_tops:build_tops",
    config=TopsConfig,
    archs=ARCHS,
    admitted=_tops,
    max_registers=64,
)
KERNELS: tuple[Kernel, ...] = (SELECT, TOPK, TOPS)
