"""The local top-N as the GPU kernel does it, pass by pass, in NumPy.

What the kernel relies on, and what the property tests of this module hold to the reference:

1. **Held.** A row whose vectors (8 keys) fit the block's registers is selected from directly: a histogram of the 2,048
   values up to the largest key gives the N-th largest one; where it lies lower, its upper 11 bits and then its lower 5
   are counted. All keys above it are taken, and the first equal to it.
2. **Vectors.** Of a longer row only those vectors are looked at whose largest key reaches the bin of the N-th largest
   of these maxima, or, where that are many, exactly the N best vectors by (maximum, lower index): they hold the N best
   keys (point 4 of `models.select`), and they fit the registers.
3. **Bound and list**, for rows whose maxima do not fit shared memory. Cut a row into disjoint groups of keys. If N
   groups hold a key that reaches b, so do N keys: the N-th largest of the groups' maxima, and all the more the lower
   edge of the bin it falls into, is reached by at least N keys. (The edge is taken where few more than N maxima reach
   it: that spares a look at their lower bits.) Which keys make a group does not matter; the kernel takes runs of one
   thread's vectors. With fewer than N groups that hold a key there is no bound (1, which every key reaches). The keys
   that reach the bound, in index order, hold the N best. If the list has no room for them, all keys are looked at.
4. **Threshold** from a bound. A histogram of the 2,048 values from a floor on, the last bin taking all that lies
   beyond, gives the N-th largest key exactly unless it falls into that last bin. Then the upper 11 bits are counted,
   and the histogram is made again from the lowest value that has the digit found.
5. **Shared.** A cluster of blocks holds a row in parts. The largest key of all parts, then the sums of their histograms
   (below it), give every block the same threshold. A block's words begin behind those of lower ones: behind their keys
   above the threshold and, of the equal ones, as many as are still taken. If the threshold lies lower than the
   histogram, one block takes the whole row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keysieve.models.select import Indices, Keys, tops_of

BINS = 2048
VECTOR = 8


@dataclass(frozen=True)
class Shape:
    """Of the kernel: threads of a block; vectors that one holds; vectors whose maxima there is room for; entries of the
    list. At least N vectors fit the registers."""

    threads: int = 1024
    held: int = 4
    room: int = 16384
    listed: int = 4096


DEFAULT = Shape()


def groups_of(length: int, n: int, threads: int) -> NDArray[np.int64]:
    """The group of every vector of a row of `length` keys: a warp owns 32 * rounds neighbouring vectors, a lane every
    32nd of them, and a group is a run of about `rounds / 2^i` of a lane's, so that there are some 1.5 n groups."""
    vectors = -(-length // VECTOR)
    rounds = -(-vectors // threads)
    halvings = sum(3 * n > factor * threads for factor in (2, 4, 8))
    span = max(1, rounds >> halvings)
    index = np.arange(vectors)
    warp, within = index // (32 * rounds), index % (32 * rounds)
    number, lane = within // 32, within % 32
    return (warp * 32 + lane) * (-(-rounds // span)) + number // span


def find_digit(counts: NDArray[np.int64], want: int) -> tuple[int, int]:
    """From the top bin down: (the bin that holds the `want`-th, the number in higher bins); (-1, _) if there are
    fewer."""
    upto = np.cumsum(counts[::-1])
    if want > upto[-1]:
        return -1, int(upto[-1])
    place = int(np.argmax(upto >= want))
    digit = len(counts) - 1 - place
    return digit, int(upto[place] - counts[digit])


def find_bound(keys: Keys, n: int, threads: int) -> int:
    """A key16 that at least `n` of the keys reach: 1 where nothing better is known."""
    vectors = -(-len(keys) // VECTOR)
    if vectors <= n + n // 8:
        return 1
    group = np.repeat(groups_of(len(keys), n, threads), VECTOR)[: len(keys)]
    maxima = np.zeros(group.max() + 1, np.uint16)
    np.maximum.at(maxima, group, keys)
    counts = np.bincount(maxima[maxima > 0] >> 5, minlength=BINS)
    digit, above = find_digit(counts, n)
    if digit <= 0:
        return 1
    if above + counts[digit] <= n + n // 4:
        return digit << 5
    low, _ = find_digit(np.bincount(maxima[maxima >> 5 == digit] & 31, minlength=32), n - above)
    return digit << 5 | low


def find_threshold(keys: Keys, n: int, bound: int) -> tuple[int, int, int]:
    """(the `n`-th largest key, how many equal to it are taken, histograms made). At least `n` keys reach `bound`."""
    floor, shift = (bound, 0) if bound > 1 else (0, 5)
    passes = 0
    wide = keys.astype(np.int64)
    while True:
        passes += 1
        counts = np.bincount(np.minimum((wide[wide >= floor] - floor) >> shift, BINS - 1), minlength=BINS)
        digit, above = find_digit(counts, n)
        if shift:
            floor, shift = digit << 5, 0
        elif digit < BINS - 1:
            return floor + digit, n - above, passes
        else:
            floor, shift = 0, 5


def near_threshold(parts: list[Keys], n: int) -> tuple[int, int] | None:
    """(the `n`-th largest key of all parts, how many equal to it are taken); None if it lies too far below the best."""
    top = max((int(part.max()) for part in parts if len(part)), default=0)
    floor = max(top - (BINS - 1), 1)
    counts = np.zeros(BINS, np.int64)
    for part in parts:
        counts += np.bincount(part[part >= floor].astype(np.int64) - floor, minlength=BINS)
    digit, above = find_digit(counts, n)
    return None if digit < 0 else (floor + digit, n - above)


def held_threshold(keys: Keys, n: int) -> tuple[int, int]:
    """(the `n`-th largest key, how many equal to it are taken) of the keys that a block holds."""
    near = near_threshold([keys], n)
    if near is not None:
        return near
    digit, above = find_digit(np.bincount(keys >> 5, minlength=BINS), n)
    low, between = find_digit(np.bincount(keys[keys >> 5 == digit] & 31, minlength=32), n - above)
    return digit << 5 | low, n - above - between


def best_shared(keys: Keys, n: int, blocks: int) -> list[Indices] | None:
    """What each of the blocks that share a row of more than `n` keys takes, or None: one takes the row alone."""
    vectors = -(-len(keys) // VECTOR)
    share = -(-vectors // blocks) * VECTOR
    parts = [keys[block * share : (block + 1) * share] for block in range(blocks)]
    near = near_threshold(parts, n)
    if near is None:
        return None
    threshold, need = near
    taken, equal = [], 0  # equal: of the parts so far, those that are taken
    for block, part in enumerate(parts):
        taken.append(block * share + choose(part, threshold, need - equal))
        equal = min(equal + int((part == threshold).sum()), need)
    return taken


def choose(keys: Keys, threshold: int, need: int) -> Indices:
    """Indices of the keys above the threshold and of the first `need` equal to it, ascending."""
    equal = np.flatnonzero(keys == threshold)[:need]
    return np.sort(np.concatenate([np.flatnonzero(keys > threshold), equal]))


def list_vectors(keys: Keys, n: int, held: int) -> Indices:
    """Vectors that hold the `n` best keys, ascending, at most `held` of them. There are at least `n` vectors."""
    maxima = tops_of(keys)
    digit, above = find_digit(np.bincount(maxima >> 5, minlength=BINS), n)
    reaching = np.flatnonzero(maxima >> 5 >= digit)
    if len(reaching) <= min(n + n // 2, held):
        return reaching
    low, between = find_digit(np.bincount(maxima[maxima >> 5 == digit] & 31, minlength=32), n - above)
    return choose(maxima, digit << 5 | low, n - above - between)


def best_keys(keys: Keys, n: int, shape: Shape) -> Indices:
    """Local indices of the first min(n, length) of a row's keys (key16) by (key descending, index ascending)."""
    if len(keys) <= n:
        return np.arange(len(keys))
    vectors = -(-len(keys) // VECTOR)
    if vectors <= shape.threads * shape.held:
        return choose(keys, *held_threshold(keys, n))
    if vectors <= shape.room:
        places = (list_vectors(keys, n, shape.threads * shape.held)[:, None] * VECTOR + np.arange(VECTOR)).reshape(-1)
        places = places[places < len(keys)]
        return places[choose(keys[places], *held_threshold(keys[places], n))]
    bound = find_bound(keys, n, shape.threads)
    reaching = np.flatnonzero(keys >= bound)
    assert len(reaching) >= n
    if len(reaching) > shape.listed:
        threshold, need, _ = find_threshold(keys, n, bound)
        return choose(keys, threshold, need)
    threshold, need, _ = find_threshold(keys[reaching], n, bound)
    return reaching[choose(keys[reaching], threshold, need)]


def candidate_row(keys: Keys, n: int, planes: int, shape: Shape = DEFAULT) -> NDArray[np.uint32]:
    """The row's words: entries in ascending index, empty ones last, then the index planes."""
    chosen = best_keys(keys, n, shape)
    groups = -(-n // 32)
    words = np.zeros(n + planes * groups, np.uint32)
    low = (0xFFFF - (chosen & 0xFFFF)).astype(np.uint32)
    words[: len(chosen)] = keys[chosen].astype(np.uint32) << 16 | low
    upper = np.zeros(groups * 32, np.uint32)
    upper[: len(chosen)] = chosen >> 16
    place = np.arange(32, dtype=np.uint32)
    for plane in range(planes):
        bits = (upper.reshape(groups, 32) >> np.uint32(plane) & np.uint32(1)) << place
        words[n + plane * groups : n + (plane + 1) * groups] = bits.sum(1, dtype=np.uint32)
    return words


def pairs_of(words: NDArray[np.uint32], rows: int, site: int, length: int, tag: int) -> NDArray[np.uint32]:
    """What is pushed for a row, uint32 [pairs, 4]: two words of it and the tag beside each, the signature last."""
    padded = np.append(words, np.zeros(len(words) % 2, np.uint32))
    data = np.append(padded, np.array([rows << 16 | site, max(length, 0)], np.uint32)).reshape(-1, 2)
    pairs = np.full((len(data), 4), tag, np.uint32)
    pairs[:, 0::2] = data
    return pairs
