"""A rank's best keys as candidate rows: what can be asked for. No cutlass here.

Two kernels share one body (`local_topk.py`): `local_push` reads this rank's own pitched logits and pushes the words of
every row to all ranks; `local_topk` reads anyone's BF16 rows and writes candidate rows only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keysieve.kernels.base import ARCHS, Kernel
from keysieve.spec import MAX_TOPK, candidate_words

MAX_PLANES = 10
"""Index planes of a candidate row, at most."""

N_CLASSES: tuple[int, ...] = (2048, 4096)
"""Largest N that a compiled kernel serves: sizes its lists."""

BINS = 2048
"""Bins of a histogram: 11 bits of key16, or the 2,048 values from a bound on."""


@dataclass(frozen=True)
class LocalTopkConfig:
    """What the code is specialised by.

    Attributes:
        push: whether words are pushed to peers, from canonical logits whose global lengths are given; else the logits
            are anyone's, with local lengths.
        n_class: largest N, one of `N_CLASSES`.
        threads: threads of a block, which works on one row.
        held: vectors of 8 keys that a thread keeps in registers; more are read again in every pass.
    """

    push: bool
    n_class: int = 2048
    threads: int = 1024
    held: int = 4

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def listed(self) -> int:
        """Candidates that the shared list has room for."""
        return 2 * self.n_class

    @property
    def share(self) -> int:
        """Candidates of a full list that a thread looks at."""
        return self.listed // self.threads

    @property
    def shared_bytes(self) -> int:
        return LocalMap.of(self).total


@dataclass(frozen=True)
class LocalMap:
    """Byte offsets in the block's shared memory."""

    first: int  # u32 [BINS]: maxima by their upper 11 bits
    second: int  # u32 [BINS]: candidates by their distance from the bound
    low: int  # u32 [32]: maxima of the bound's bin by their lower 5 bits
    cleared: int  # bytes from 0 that are zeroed at the start
    found: int  # u32 [4]: what one warp tells the others
    sums: int  # u32 [2][32]: counts of every warp, of two scans
    words: int  # u32: the row's words and a word of padding
    tops: int  # u16 [n_class]: index >> 16 of every entry
    list: int  # u32 [listed]: words of candidates, in index order
    list_tops: int  # u16 [listed]: their index >> 16
    total: int

    @staticmethod
    def of(config: LocalTopkConfig) -> LocalMap:
        cleared = 2 * 4 * BINS + 128
        found = cleared
        sums = found + 16
        words = sums + 256
        tops = words + -(-4 * (candidate_words(config.n_class, MAX_PLANES) + 2) // 16) * 16
        listed = tops + 2 * config.n_class
        list_tops = listed + 4 * config.listed
        return LocalMap(
            first=0,
            second=4 * BINS,
            low=8 * BINS,
            cleared=cleared,
            found=found,
            sums=sums,
            words=words,
            tops=tops,
            list=listed,
            list_tops=list_tops,
            total=list_tops + 2 * config.listed,
        )


def config_for(n: int, push: bool) -> LocalTopkConfig:
    """The configuration that serves `n` entries."""
    return LocalTopkConfig(push, n_class_of(n), 1024 if push else 512)


def n_class_of(n: int) -> int:
    """The N class that serves `n` (1..4096)."""
    if not 1 <= n <= MAX_TOPK:
        raise ValueError(f"n {n}: 1..{MAX_TOPK}")
    return next(c for c in N_CLASSES if n <= c)


def _push(arch: str) -> Iterable[LocalTopkConfig]:
    del arch  # the same for all of them
    return [config_for(n, True) for n in N_CLASSES]


def _plain(arch: str) -> Iterable[LocalTopkConfig]:
    del arch
    return [config_for(n, False) for n in N_CLASSES]


LOCAL_PUSH = Kernel(
    name="local_push",
    entry="keysieve.kernels.local_topk:build",
    config=LocalTopkConfig,
    archs=ARCHS,
    admitted=_push,
    max_registers=64,
)
LOCAL_TOPK = Kernel(
    name="local_topk",
    entry="keysieve.kernels.local_topk:build",
    config=LocalTopkConfig,
    archs=ARCHS,
    admitted=_plain,
    max_registers=128,
)
KERNELS: tuple[Kernel, ...] = (LOCAL_PUSH, LOCAL_TOPK)
