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

SHAPES: tuple[tuple[int, int, int], ...] = (
    *((1, 512, 2), (1, 512, 4)),
    *((2, 512, 2), (2, 512, 4), (2, 1024, 4), (2, 512, 8)),
    *((4, 256, 2), (4, 256, 4), (4, 256, 8)),
    *((8, 256, 4), (8, 512, 4), (8, 1024, 4)),
)
"""(blocks of a row, threads of a block, vectors that a thread holds): kernels for rows that the registers hold, the
smaller ones first. Few threads that hold several vectors are faster than many: every thread has its share of the
searches and sums. The measurements are in docs/measurements/local_topk.md."""

BINS = 2048
"""Bins of a histogram: 11 bits of key16, or the 2,048 values from a bound on."""

WINDOW = 1024
"""Values below the best key that a row in registers is first looked at in: eight octaves. Blocks that share a row send
each other the counts of so many bins."""


SIFTED = 2048
"""Vectors that shared memory has room for where a block drops most of those that its registers hold."""


NARROW = 256
"""Bins from a guessed floor on that a row is first looked at in; the lowest of them takes what does not reach it, the
highest what lies beyond."""

MAX_SHIFT = 8
"""log2 of the values in such a bin, at most: a bin is counted once more in as many bins as it has values."""

SAMPLE_STEP = 2
"""log2 of the values in a bin of the sample's maxima."""

SAMPLE_BINS = 1 << (16 - SAMPLE_STEP)

SMALL_N = 512
"""Largest N for which maxima are worth their bytes whether or not they stay in L2."""

GUESSED_N = 2048
"""Largest N for which two blocks guess a floor; with more than 32,768 keys, in place of two of 1,024 threads."""


@dataclass(frozen=True)
class LocalTopkConfig:
    """What the code is specialised by.

    Attributes:
        push: whether words are pushed to peers, from canonical logits whose global lengths are given; else the logits
            are anyone's, with local lengths.
        n_class: largest N, one of `N_CLASSES`.
        threads: threads of a block.
        held: vectors of 8 keys that a thread keeps in registers.
        room: vectors whose maxima shared memory has room for; a row has no more. 0: rows of any length, slower.
        cluster: blocks of a row, which share it if it is long enough for that.
        longer: whether rows may be longer than the registers of all blocks hold: the first block takes them alone, and
            its registers hold at least `n_class` vectors.
        given: whether the scorer has written the vectors' maxima.
    """

    push: bool
    n_class: int = 2048
    threads: int = 1024
    held: int = 4
    room: int = 16384
    cluster: int = 1
    longer: bool = True
    trace: bool = False
    given: bool = False

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def keys(self) -> int:
        """Keys of the longest row that all blocks' registers hold."""
        return self.cluster * self.block_keys

    @property
    def block_keys(self) -> int:
        """Keys that a block's registers hold."""
        return 8 * self.threads * self.held

    @property
    def solo_keys(self) -> int:
        """Keys of a row up to which the first block works on it alone: the trips between blocks would cost more than
        they spare."""
        return 0 if self.guesses else min(8192, self.block_keys)

    @property
    def sifts(self) -> bool:
        """Does a block that holds more than four vectors a thread drop those that cannot matter?"""
        return self.held > 4 and (self.room > 0 or not self.longer) and not self.guesses

    @property
    def guesses(self) -> bool:
        """Do two blocks that hold four vectors a thread or more first guess what will not matter?"""
        shape = self.cluster == 2 and self.threads < 1024 and self.held >= 4 and self.keys <= 1 << 16
        return shape and self.push and not self.longer and self.n_class <= n_class_of(GUESSED_N)

    @property
    def squeezes(self) -> bool:
        """Does a block drop the vectors below the threshold before it looks at their keys once more?"""
        return self.held == 4 and not self.longer and not self.guesses

    @property
    def listed(self) -> int:
        """Candidates that the shared list has room for."""
        return 2 * self.n_class if self.longer else SIFTED

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
    uncleared: int  # bytes from 0 that are not zeroed at the start
    cleared: int  # up to here they are
    sample: int  # u16 [SAMPLE_BINS]: the sample's maxima
    narrow: int  # u32 [NARROW]: keys by their distance from a guess
    again: int  # u32 [NARROW + 4]: those of one bin by theirs from its lower end, then all others; [4]: a plateau's
    found: int  # u32 [16]: what one warp tells the others; behind it 16 more for `trace`
    peers: int  # u64 [16]: the blocks' addresses
    sums: int  # u32 [2][32]: counts of every warp, of two scans
    pair_sums: int  # u32 [32][2]: the same of a scan of two counts
    words: int  # u32: the row's words and a word of padding
    tops: int  # u16 [n_class]: index >> 16 of every entry
    list: int  # u32 [listed]: words of candidates, or numbers of vectors, in index order
    list_tops: int  # u16 [listed]: their index >> 16
    maxima: int  # u16 [room]: the largest key of every vector; or u32 [SIFTED][4]: vectors that may matter
    received: int  # u16 [2][cluster][WINDOW]: in a shared row, all blocks' counts of a histogram, of two in turn
    floors: int  # u32 [3][cluster]: what they counted from; 64 bytes behind it u32 [cluster]: what a plateau's have
    bins: int  # u32 [cluster][36]: all blocks' counts of the best maxima, from their best one's bin down; that
    arrivals: int  # u64 [7]: mbarriers of the three histograms that the cluster's blocks may send, `bins`, `gathered`,
    # a second count and a plateau's
    gathered: int  # u16 [cluster][NARROW]: counts of `narrow`: the highest eight of a lane, ascending, then eight below
    landed: int  # u64 [warps]: mbarriers of what is on its way there
    kept: int  # u32 [warps][32 * held][4]: each warp's vectors
    ids: int  # u16 [warps][256 * held]: their keys that do, 8 * the vector's place + the key's; where `sample` was
    numbers: int  # u8 [warps][32 * held]: those of its vectors that reach a guess
    total: int

    @staticmethod
    def of(config: LocalTopkConfig) -> LocalMap:
        narrow = 2 * 4 * BINS + 256
        again = narrow + (4 * NARROW if config.guesses else 0)
        sample = again + (4 * (NARROW + 8) if config.guesses else 0)
        cleared = sample + (2 * SAMPLE_BINS if config.guesses else 0)
        found = sample + (max(2 * SAMPLE_BINS, 16 * config.threads * config.held) if config.guesses else 0)
        peers = found + 128
        sums = peers + 128
        pair_sums = sums + 256
        words = pair_sums + 256
        tops = words + -(-4 * (candidate_words(config.n_class, MAX_PLANES) + 2) // 16) * 16
        listed = tops + 2 * config.n_class
        list_tops = listed + (4 * config.listed if config.longer or config.sifts or config.squeezes else 0)
        maxima = list_tops + (2 * config.listed if config.longer else 0)
        received = maxima + (16 * SIFTED if config.sifts or config.squeezes else 0)
        shared = 2 * 2 * WINDOW * config.cluster if config.cluster > 1 else 0
        floors = max(maxima + (2 * config.room if config.longer else 0), received + shared)
        bins = floors + 128
        arrivals = bins + 144 * config.cluster
        gathered = arrivals + 64
        landed = gathered + 2 * NARROW * config.cluster
        kept = landed + 256
        numbers = kept + 16 * config.threads * config.held
        total = arrivals + 32 if config.cluster > 1 else floors
        if config.guesses:
            total = numbers + config.threads * config.held
        return LocalMap(
            first=0,
            second=4 * BINS,
            low=8 * BINS,
            uncleared=narrow if config.guesses else 0,
            cleared=cleared,
            found=found,
            peers=peers,
            sums=sums,
            pair_sums=pair_sums,
            words=words,
            tops=tops,
            list=listed,
            list_tops=list_tops,
            maxima=maxima,
            received=received,
            floors=floors,
            bins=bins,
            arrivals=arrivals,
            sample=sample,
            narrow=narrow,
            again=again,
            gathered=gathered,
            landed=landed,
            kept=kept,
            ids=sample,
            numbers=numbers,
            total=total,
        )


def room_for(planes: int) -> int:
    """Vectors of the longest row that so many planes can index, 0 if shared memory has no room for their maxima."""
    if planes > 3:
        return 0
    return 1 << 14 if planes == 1 else 1 << 16


def config_for(
    n: int, planes: int, push: bool, shape: tuple[int, int, int] | None = None, given: bool = False
) -> LocalTopkConfig:
    """The configuration that serves `n` entries with that many index planes; with one of `SHAPES`, which are for
    `push`, only rows of at most its `keys`. given: without a shape, for `push`, and where shared memory has room for
    them: the vectors' maxima are given."""
    room = room_for(planes)
    if shape is not None:
        cluster, threads, held = shape
        return LocalTopkConfig(True, n_class_of(n), threads, held, room, cluster, longer=False)
    if push:
        return LocalTopkConfig(True, n_class_of(n), 1024, 4, room, given=given and room > 0)
    return LocalTopkConfig(False, n_class_of(n), 512, 8 if room else 4, room)


def shape_for(rows: int, keys: int, sms: int, n: int, given: bool = False) -> tuple[int, int, int] | None:
    """The one of `SHAPES` for `rows` rows of up to `keys` keys on `sms` multiprocessors: as many blocks a row as leave
    a quarter of the chip free, since clusters do not pack it; or two, if each has a multiprocessor. None: rows are
    worked on by a block each, and may be longer than its registers hold. That is so where there are more rows than
    multiprocessors: several small blocks on each, with a merge launched behind them, were seen to take a step of 512
    rows of 4,096 keys to 202 us. And it is so where maxima are given and two blocks would need 1,024 threads each. Up
    to `GUESSED_N` two blocks of 512 threads guess what will not matter: 64 rows of 65,536 keys with N 1,216 take 6.4 to
    6.9 us so, where two blocks of 1,024 threads take 12.4; with N 2,048 8.4 for 11.1, with N 4,096 12.9 for 12.6.
    given: maxima are, and it is worth their bytes."""
    if rows > sms:
        return None
    for cluster in (8, 4, 2, 1):
        fits = rows * cluster <= sms if cluster <= 2 else 4 * rows * cluster <= 3 * sms
        held = [shape for shape in SHAPES if shape[0] == cluster and 8 * cluster * shape[1] * shape[2] >= keys]
        worth = keys > (16384 if cluster == 8 else 8192)
        if cluster == 2 and n > GUESSED_N:
            held = [shape for shape in held if shape[2] < 8]
        if cluster == 2 and (given or n <= GUESSED_N):
            held = [shape for shape in held if shape[1] < 1024]
        if held and (cluster == 1 or (fits and worth)):
            return held[0]
    return None


def n_class_of(n: int) -> int:
    """The N class that serves `n` (1..4096)."""
    if not 1 <= n <= MAX_TOPK:
        raise ValueError(f"n {n}: 1..{MAX_TOPK}")
    return next(c for c in N_CLASSES if n <= c)


def _push(arch: str) -> Iterable[LocalTopkConfig]:
    del arch  # the same for all of them
    alone = [config_for(n, planes, True) for n in N_CLASSES for planes in (1, 2, 4)]
    alone += [config_for(n, planes, True, given=True) for n in N_CLASSES for planes in (1, 2)]
    held = {config_for(n, planes, True, shape) for n in N_CLASSES for planes in (1, 2, 4) for shape in SHAPES}
    held = {config for config in held if config.guesses or (config.cluster, config.held) != (2, 8)}
    return alone + sorted(held, key=str)


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
