"""The exchange's kernels: what can be asked for. No cutlass here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keysieve.kernels.base import ARCHS, Kernel
from keysieve.spec import MAX_WORLD

MAX_PLANES = 10
"""Index planes of a candidate row, at most."""


@dataclass(frozen=True)
class MergeConfig:
    """What the code of `exchange_merge` is specialised by.

    Attributes:
        tagged: whether words come as tagged pairs that peers push; else as candidate rows in ordinary memory.
        held: words of a row's first lists, of all ranks together, that shared memory has room for; longer ones are
            read again from L2.
        k_class: largest K.
        threads: of a block, which works on one row.
        rounds: pairs of words that a thread has room for in registers (the latency form); 0: none (throughput).
        trace: for measurements: clocks of the steps go to `flags` (see `exchange_select.note_clock`).
    """

    tagged: bool = True
    held: int = 4096
    k_class: int = 2048
    threads: int = 512
    rounds: int = 0
    trace: bool = False

    @property
    def early(self) -> bool:
        """Are words polled for before the grid dependency, which is then waited for where a block ends?"""
        return self.tagged and self.rounds > 0

    @property
    def second_rounds(self) -> int:
        """Pairs that a thread has room for when second lists are merged."""
        return max(self.rounds, 4)

    @property
    def resident(self) -> int:
        """Blocks that share a multiprocessor: two if so few words leave the registers for it. (Left alone the assembler
        aims at two, and spills.)"""
        return 2 if self.tagged and self.rounds == 3 else 1

    @property
    def shared_bytes(self) -> int:
        return MergeMap.of(self).total


@dataclass(frozen=True)
class MergeMap:
    """Byte offsets in the block's shared memory."""

    high: int  # u32 [2048]: counts of the upper 11 bits
    low: int  # u32 [512]: counts of the lower 5 bits, or of a digit of ids
    cleared: int  # bytes from 0 that are zeroed for every selection
    found: int  # u32 [16]: what one warp tells the others
    sums: int  # u32 [32]: a word a warp
    rejected: int  # u32 [16]: per source, whether an entry of its list was rejected
    begins: int  # u32 [32]: winners of lower sources; in the latency form, earlier, a word a warp
    bases: int  # u64 [16]: address of each source's list
    steps: int  # u32 [16]: bytes from word to word of it
    ties: int  # u32 [512]: ids of equal keys
    winners: int  # u32 [k_class]: ids, source by source
    planes: int  # u32 [10 * k_class / 32]: room for a second list's index planes behind its entries in `winners`
    words: int  # u32 [held]: the first lists
    clocks: int  # u32 [16], of `trace`
    total: int

    @staticmethod
    def of(config: MergeConfig) -> MergeMap:
        at: dict[str, int] = {}
        place = 0
        sizes = (
            ("high", 4 * 2048),
            ("low", 4 * 512),
            ("found", 64),
            ("sums", 128),
            ("rejected", 64),
            ("begins", 128),
            ("bases", 128),
            ("steps", 64),
            ("ties", 4 * TIES),
            ("winners", 4 * config.k_class),
            ("planes", 4 * MAX_PLANES * config.k_class // 32),
            ("words", 4 * config.held),
            ("clocks", 64 if config.trace else 0),
        )
        for name, size in sizes:
            at[name] = place
            place += size
        return MergeMap(cleared=4 * 2048 + 4 * 512, total=place, **at)


TIES = 512
"""Equal keys at the threshold up to which they are ranked against each other; more are selected digit by digit."""

HELD: tuple[int, ...] = (4096, 12288)
K_CLASSES: tuple[int, ...] = (2048, 4096)


ROUNDS: tuple[int, ...] = (3, 4, 6)
"""Pairs a thread of the latency form, at most; shared memory has room for as many words as a block's threads hold."""


def rounds_needed(world: int, words: int, threads: int = 512) -> int:
    """Pairs of a thread where lists of `words` words from `world` ranks are dealt to a block's warps by 32 pairs."""
    chunks = -(-(-(-words // 2) + 1) // 32)
    return -(-(chunks * world) // (threads // 32))


def divider(interleave: int) -> int:
    """What divides local indices (below 2^27) by the interleave: factor, and in the upper half the shift behind it.

    With 2^s the least power of two from the interleave S on and m = ceil(2^(27 + s) / S), index * m is above its due by
    less than index * S / 2^(27 + s) <= 1 / S of a unit of the quotient, so the shifted product is exact.
    """
    shift = 27 + (interleave - 1).bit_length()
    return -(-(1 << shift) // interleave) | (shift << 32)


def merge_config(world: int, words: int, k: int, tagged: bool) -> MergeConfig:
    """The configuration for lists of `words` words from `world` ranks.

    Where both forms can take a row the latency form takes it, on every device: it was faster at every W and number of
    rows that were measured (docs/measurements/dcp-gpu.md, "The two forms of the merge"). The throughput form is kept
    for lists that no block's registers hold.
    """
    if not 1 <= world <= MAX_WORLD:
        raise ValueError(f"world {world}: 1..{MAX_WORLD}")
    k_class = next(c for c in K_CLASSES if k <= c)
    need = rounds_needed(world, words)
    for rounds in ROUNDS:
        if need <= rounds:
            return MergeConfig(tagged, 1024 * rounds, k_class, rounds=rounds)
    held = HELD[0] if world * words <= HELD[0] else HELD[1]
    return MergeConfig(tagged, held, k_class)


def _merge(arch: str) -> Iterable[MergeConfig]:
    del arch
    forms = [*((held, 0) for held in HELD), *((1024 * rounds, rounds) for rounds in ROUNDS)]
    both = (True, False)
    return [MergeConfig(tagged, held, k, rounds=rounds) for tagged in both for held, rounds in forms for k in K_CLASSES]


MERGE = Kernel(
    name="exchange_merge",
    entry="keysieve.kernels.exchange_merge:build",
    config=MergeConfig,
    archs=ARCHS,
    admitted=_merge,
    max_registers=128,
)
KERNELS: tuple[Kernel, ...] = (MERGE,)
