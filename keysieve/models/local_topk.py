"""The local top-N as the GPU kernel does it, pass by pass, in NumPy.

What the kernel relies on, and what the property tests of this module hold to the reference:

1. **Held.** A row whose vectors (8 keys) fit the registers of a block, or of a cluster of blocks that hold it in parts,
   is selected from directly. A block counts its keys value by value above a *floor* that lies at most 1,023 below its
   best key: if its threads hold four vectors or more and its part has enough of them, just below the bin (of 32 values)
   of the N-th largest of their maxima, which N keys reach; else the lowest such value. The row's threshold lies above
   every floor of the first kind, and all blocks have counted what lies above the highest floor: the sums of their
   counts from there on give the N-th largest key, unless fewer than N were counted. Then all keys are counted by their
   upper 10 bits, and again value by value from the digit found on, the last bin taking what lies beyond. All keys above
   the threshold are taken, and the first equal to it: a block's words begin behind those of the blocks before it,
   behind their keys above the threshold and, of the equal ones, as many as are still taken. Where threads hold four
   vectors, those whose largest key does not reach the threshold are dropped before their keys are looked at once more,
   if that spares a round. Two blocks of eight vectors a thread count above a floor that both guess alike from the same
   eighth of the row. It is taken if N keys or more reach it and the threshold is in one of 254 bins from it on, by the
   sums of their counts; a bin of more than one value is counted once more. Else all keys are counted by two digits as
   above. Where most of the sample reach the floor, the commonest value there is tried as the threshold; if N keys
   lie above it, it is the floor.
2. **Vectors.** Of a longer row only those vectors are looked at whose largest key reaches the bin of the N-th largest
   of these maxima, or, where that are many, exactly the N best vectors by (maximum, lower index): they hold the N best
   keys (point 4 of `models.select`), and they fit the registers. Where the scorer has written the maxima and the
   block's registers hold them, the bin is one of 16 values, looked for among the 64 from the best maximum's down; the
   vectors that reach it are taken if the registers hold them. Else the maxima are looked at as if the block had found
   them.
3. **Bound and list**, for rows whose maxima do not fit shared memory. Cut a row into disjoint groups of keys. If N
   groups hold a key that reaches b, so do N keys: the N-th largest of the groups' maxima, and all the more the lower
   edge of the bin it falls into, is reached by at least N keys. (The edge is taken where few more than N maxima reach
   it: that spares a look at their lower bits.) Which keys make a group does not matter; the kernel takes runs of one
   thread's vectors. With fewer than N groups that hold a key there is no bound (1, which every key reaches). The keys
   that reach the bound, in index order, hold the N best. If the list has no room for them, all keys are looked at.
4. **Threshold** from a bound. A histogram of the 2,048 values from a floor on, the last bin taking all that lies
   beyond, gives the N-th largest key exactly unless it falls into that last bin. Then the upper 11 bits are counted,
   and the histogram is made again from the lowest value that has the digit found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keysieve.models.select import Indices, Keys, tops_of

BINS = 2048
WINDOW = 1024
SIFTED = 2048
VECTOR = 8


@dataclass(frozen=True)
class Shape:
    """Of the kernel: threads of a block; vectors that one holds; vectors whose maxima there is room for; entries of the
    list; of maxima that are given, how many the registers hold. At least N vectors fit the registers."""

    threads: int = 1024
    held: int = 4
    room: int = 16384
    listed: int = 4096
    given: int = 0


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


def find_top(parts: list[Keys], n: int) -> int:
    """A multiple of 8 that `n` keys of the row reach, from the maxima of the parts' vectors: the lower edge of the bin
    of the `n`-th largest of them; 0 if that is not among 32 bins from the best one's down. A part tells of no more bins
    than that, from its own best one's down."""
    counts = np.zeros(BINS + 32, np.int64)
    for part in parts:
        digit = int(part.max(initial=0)) >> 5
        its = np.bincount(tops_of(part) >> 5, minlength=BINS)
        lowest = max(digit - 31, 0)
        counts[lowest : digit + 1] += its[lowest : digit + 1]
    best = int(np.flatnonzero(counts)[-1])
    upto = np.cumsum(counts[max(best - 31, 0) : best + 1][::-1])
    return (best - int(np.argmax(upto >= n))) << 5 if upto[-1] >= n else 0


def sift(parts: list[Keys], n: int, shape: Shape) -> list[tuple[Indices, int | None]]:
    """Of every part (places of the keys that are looked at, a bound that `n` keys of the row reach; 0: there is none;
    None: it was not looked for)."""
    sizes = [-(-len(part) // VECTOR) for part in parts]
    enough = n + n // 8
    if shape.held <= 4 or max(sizes) <= 2 * shape.threads or sum(sizes) < enough:
        bounds = [None if size >= enough and shape.held >= 4 else 0 for size in sizes]
        return [(np.arange(len(part)), bound) for part, bound in zip(parts, bounds, strict=True)]
    bound = find_top(parts, n)
    bound = bound if bound >= 64 else 0
    out: list[tuple[Indices, int | None]] = []
    for part in parts:
        reaching = np.flatnonzero(tops_of(part) >= bound)
        places = (reaching[:, None] * VECTOR + np.arange(VECTOR)).reshape(-1)
        fits = bound > 0 and len(reaching) <= SIFTED
        out.append((places[places < len(part)] if fits else np.arange(len(part)), bound))
    return out


def find_floor(part: Keys, n: int, bound: int | None) -> int:
    """What a block counts its part above: a multiple of 8. bound: one that `n` keys of the row reach, 0 if none is
    known; None: look for it."""
    top = int(part.max()) if len(part) else 0
    if bound is None:
        bound = find_top([part], n)
    return max(bound - 8, (top | 7) - (WINDOW - 1), 0)


def held_threshold(parts: list[Keys], n: int, bounds: list[int | None]) -> tuple[int, int]:
    """(the `n`-th largest key, how many equal to it are taken) of the keys that blocks hold, together at least `n`."""
    floors = [find_floor(part, n, bound) for part, bound in zip(parts, bounds, strict=True)]
    counted = [part[part > floor].astype(np.int64) - floor for part, floor in zip(parts, floors, strict=True)]
    floor = max(floors)
    counts = np.zeros(WINDOW, np.int64)
    for its, own in zip(counted, floors, strict=True):
        assert its.max(initial=0) < WINDOW
        counts += np.bincount(its, minlength=2**17)[floor - own :][:WINDOW]
    digit, above = find_digit(counts, n)
    if digit < 0:
        keys = np.concatenate(parts).astype(np.int64)
        digit, _ = find_digit(np.bincount(keys >> 6, minlength=WINDOW), n)
        floor = max((digit << 6) - 8, 0)
        counts = np.bincount(np.minimum(keys[keys > floor] - floor, WINDOW - 1), minlength=WINDOW)
        digit, above = find_digit(counts, n)
    return floor + digit, n - above


def best_shared(keys: Keys, n: int, blocks: int, shape: Shape) -> list[Indices]:
    """What each of the blocks that share a row of more than `n` keys takes."""
    vectors = -(-len(keys) // VECTOR)
    share = -(-vectors // blocks) * VECTOR
    parts = [keys[block * share : (block + 1) * share] for block in range(blocks)]
    sifted = sift(parts, n, shape)
    looked = [part[places] for part, (places, _) in zip(parts, sifted, strict=True)]
    threshold, need = held_threshold(looked, n, [bound for _, bound in sifted])
    taken, equal = [], 0  # equal: of the parts so far, those that are taken
    for block, (its, (places, _)) in enumerate(zip(looked, sifted, strict=True)):
        if shape.held == 4:
            kept = squeeze(its, threshold, shape)
            its, places = its[kept], places[kept]
        taken.append(block * share + places[choose(its, threshold, need - equal)])
        equal = min(equal + int((its == threshold).sum()), need)
    return taken


def squeeze(keys: Keys, threshold: int, shape: Shape) -> Indices:
    """Places of the keys whose vectors hold one that reaches the threshold, if that spares a round and there is room
    for them; else of all."""
    reaching = np.flatnonzero(tops_of(keys) >= threshold)
    places = (reaching[:, None] * VECTOR + np.arange(VECTOR)).reshape(-1)
    vectors = -(-len(keys) // VECTOR)
    rounds, fewer = -(-vectors // shape.threads), -(-len(reaching) // shape.threads)
    return places[places < len(keys)] if fewer < rounds and len(reaching) <= SIFTED else np.arange(len(keys))


def choose(keys: Keys, threshold: int, need: int) -> Indices:
    """Indices of the keys above the threshold and of the first `need` equal to it, ascending."""
    equal = np.flatnonzero(keys == threshold)[:need]
    return np.sort(np.concatenate([np.flatnonzero(keys > threshold), equal]))


def list_vectors(keys: Keys, n: int, held: int) -> tuple[Indices, int]:
    """(vectors that hold the `n` best keys, ascending, at most `held` of them; a multiple of 8 that `n` keys reach).
    There are at least `n` vectors."""
    maxima = tops_of(keys)
    digit, above = find_digit(np.bincount(maxima >> 5, minlength=BINS), n)
    reaching = np.flatnonzero(maxima >> 5 >= digit)
    if len(reaching) <= min(n + n // 2, held):
        return reaching, digit << 5
    low, between = find_digit(np.bincount(maxima[maxima >> 5 == digit] & 31, minlength=32), n - above)
    return choose(maxima, digit << 5 | low, n - above - between), digit << 5


def find_fine(maxima: Keys, n: int) -> int:
    """The lower edge of the bin of 16 values of the `n`-th largest maximum, if it is one of the 64 bins from the best
    one's down and holds positive numbers' keys, but not the least of them; else 0."""
    if len(maxima) < n:
        return 0
    digit = int(np.sort(maxima)[-n]) >> 4
    return digit << 4 if digit > max(BINS, (int(maxima.max()) >> 4) - 64) else 0


def list_given(keys: Keys, n: int, shape: Shape) -> tuple[Indices, int]:
    """`list_vectors` of a row whose maxima are given."""
    maxima = tops_of(keys)
    bound = find_fine(maxima, n) if len(maxima) <= shape.given else 0
    reaching = np.flatnonzero(maxima >= bound)
    if bound > 0 and len(reaching) <= shape.threads * shape.held:
        return reaching, bound
    return list_vectors(keys, n, shape.threads * shape.held)


def best_keys(keys: Keys, n: int, shape: Shape) -> Indices:
    """Local indices of the first min(n, length) of a row's keys (key16) by (key descending, index ascending)."""
    if len(keys) <= n:
        return np.arange(len(keys))
    vectors = -(-len(keys) // VECTOR)
    if vectors <= shape.threads * shape.held:
        return best_shared(keys, n, 1, shape)[0]
    if vectors <= shape.room:
        listed, bound = list_given(keys, n, shape)
        places = (listed[:, None] * VECTOR + np.arange(VECTOR)).reshape(-1)
        places = places[places < len(keys)]
        return places[choose(keys[places], *held_threshold([keys[places]], n, [bound]))]
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
