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

CLUSTERS: tuple[int, ...] = (4, 8)
"""Blocks that may share a row. (Two do not pay: one block that looks at maxima first is faster.)"""

SHARED_KEYS = 16384
"""Where a rank's rows may have more keys than this, they are shared by blocks if there are SMs enough."""

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
        held: vectors of 8 keys that a thread keeps in registers.
        room: vectors whose maxima shared memory has room for; a row has no more. 0: rows of any length, slower.
        cluster: blocks of a row, which share it if their registers hold it, and if it is long enough for that.
    """

    push: bool
    n_class: int = 2048
    threads: int = 1024
    held: int = 4
    room: int = 16384
    cluster: int = 1
    trace: bool = False

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
    low: int  # u32 [2][32]: keys of the threshold's bin by their lower 5 bits; maxima likewise
    cleared: int  # bytes from 0 that are zeroed at the start
    found: int  # u32 [16]: what one warp tells the others; behind it 16 more for `trace`
    peers: int  # u64 [16]: the blocks' addresses
    sums: int  # u32 [2][32]: counts of every warp, of two scans
    words: int  # u32: the row's words and a word of padding
    tops: int  # u16 [n_class]: index >> 16 of every entry
    list: int  # u32 [listed]: words of candidates, in index order
    list_tops: int  # u16 [listed]: their index >> 16
    maxima: int  # u16 [room]: the largest key of every vector; in a shared row u16 [cluster][BINS]: all blocks' counts
    sent: (
        int  # u32 [2][16]: of every block of the cluster, the largest key, and how many are above and at the threshold
    )
    arrivals: int  # u64 [4]: mbarriers of what the cluster's blocks send
    total: int

    @staticmethod
    def of(config: LocalTopkConfig) -> LocalMap:
        cleared = 2 * 4 * BINS + 256
        found = cleared
        peers = found + 128
        sums = peers + 128
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
            peers=peers,
            sums=sums,
            words=words,
            tops=tops,
            list=listed,
            list_tops=list_tops,
            maxima=list_tops + 2 * config.listed,
            sent=list_tops + 2 * config.listed + 2 * config.room,
            arrivals=list_tops + 2 * config.listed + 2 * config.room + 128,
            total=list_tops + 2 * config.listed + 2 * config.room + (160 if config.cluster > 1 else 0),
        )


def room_for(planes: int) -> int:
    """Vectors of the longest row that so many planes can index, 0 if shared memory has no room for their maxima."""
    if planes > 3:
        return 0
    return 1 << 14 if planes == 1 else 1 << 16


def config_for(n: int, planes: int, push: bool, cluster: int = 1) -> LocalTopkConfig:
    """The configuration that serves `n` entries with that many index planes."""
    room = room_for(planes)
    if push:
        return LocalTopkConfig(True, n_class_of(n), 1024, 4, room, cluster)
    return LocalTopkConfig(False, n_class_of(n), 512, 8 if room else 4, room)


def cluster_for(rows: int, keys: int, sms: int) -> int:
    """Blocks that share a row, where `rows` rows of up to `keys` keys are worked on by `sms` multiprocessors: as many
    as leave a quarter of them free, since clusters do not pack a chip."""
    if keys <= SHARED_KEYS:
        return 1
    return next((c for c in sorted(CLUSTERS, reverse=True) if 4 * rows * c <= 3 * sms), 1)


def n_class_of(n: int) -> int:
    """The N class that serves `n` (1..4096)."""
    if not 1 <= n <= MAX_TOPK:
        raise ValueError(f"n {n}: 1..{MAX_TOPK}")
    return next(c for c in N_CLASSES if n <= c)


def _push(arch: str) -> Iterable[LocalTopkConfig]:
    del arch  # the same for all of them
    alone = [config_for(n, planes, True) for n in N_CLASSES for planes in (1, 2, 4)]
    return alone + [
        config_for(n, planes, True, cluster) for n in N_CLASSES for planes in (1, 2) for cluster in CLUSTERS
    ]


def _plain(arch: str) -> Iterable[LocalTopkConfig]:
    del arch
    return [config_for(n, planes, False) for n in N_CLASSES for planes in (1, 2, 4)]


LOCAL_PUSH = Kernel(
    name="local_push",
    entry="keysieve.kernels.local_topk:build",
    config=LocalTopkConfig,
    archs=ARCHS,
    admitted=_push,
    max_registers=128,
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
