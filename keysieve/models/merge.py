"""The merge as the GPU kernel does it, pass by pass, in NumPy: one row, the lists of all ranks.

What the kernel relies on, and what the property tests of this module hold to the reference:

1. **Two forms, one threshold.** `flat_threshold` counts the upper 11 bits of key16, then the lower 5 in the bin found.
   `distance_threshold` counts keys by their lower 11 bits, which tells keys apart if the largest and the least are less
   than 2,048 values apart; if they are not it counts distances from the least one, in 2,048 bins of equal width, and
   splits the bin found. Both give the K-th largest key, and how many equal to it are taken.
2. **Cut.** Of more equal keys than are needed the ones with the lowest ids (global positions) are taken: the largest of
   those ids is the cut. Few are ranked against each other; of many the id is found digit by digit, 11 bits from the
   row's length down. Ids are unique, so both give the same.
3. **Saturated** is a rank whose list is full, which has more keys than that, and whose entries are all taken.
4. **Second lists** need to hold only keys that reach the first round's threshold T: K offered keys reach it, so a key
   below T is not among the K best of any larger set. A second list may hence be shorter than K, or be cut to K.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BINS = 2048
NEAR = 256
"""Keys from the least one on among which the threshold is looked for first."""

FEW = 128
"""Equal keys up to which they are ranked against each other."""

_EMPTY = 0

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Lists:
    """A row's lists, source by source. keys: key16, 0 for an empty entry; ids: global positions; both [sources, n]."""

    keys: Numbers
    ids: Numbers


@dataclass(frozen=True)
class Found:
    """threshold: the K-th largest key (0: everything is taken); need: entries equal to it that are taken; equal: all of
    them."""

    threshold: int
    need: int
    equal: int


def find_bin(counts: Numbers, want: int) -> tuple[int, int]:
    """(bin, entries in higher bins) of the `want`-th largest entry; bin 0 where there are fewer."""
    above = 0
    for digit in range(len(counts) - 1, 0, -1):
        if above + counts[digit] >= want:
            return digit, above
        above += int(counts[digit])
    return 0, above


def flat_threshold(lists: Lists, k: int) -> Found:
    """Two digits of key16: the throughput form."""
    live = lists.keys[lists.keys != _EMPTY]
    digit, above = find_bin(np.bincount(live >> 5, minlength=BINS), k)
    low = np.bincount(live[live >> 5 == digit] & 31, minlength=32)
    lower, more = find_bin(low, k - above)
    return Found(digit << 5 | lower, k - above - more, int(low[lower]))


def near_threshold(live: Numbers, k: int) -> Found | None:
    """The threshold if it is among the NEAR keys from the least one on, a multiple of eight taken for that: so many of
    the smallest keys are not taken, and the next one is it. None as well where bins would have several keys."""
    lowest = int(live.min()) // 8 * 8
    if (int(live.max()) | 3) - lowest >= BINS:
        return None
    counts = np.bincount(live & (BINS - 1), minlength=BINS)[(lowest + np.arange(NEAR)) & (BINS - 1)]
    excess = len(live) - k
    reach = np.cumsum(counts)
    if reach[-1] <= excess:
        return None
    step = int(np.argmax(reach > excess))
    return Found(lowest + step, int(reach[step]) - excess, int(counts[step]))


def distance_threshold(lists: Lists, k: int) -> Found:
    """Lower 11 bits, or distances from the least key: the latency form."""
    live = lists.keys[lists.keys != _EMPTY]
    if len(live) < k:
        return Found(0, 0, 0)
    near = near_threshold(live, k)
    return near or far_threshold(live, k)


def far_threshold(live: Numbers, k: int) -> Found:
    """`distance_threshold` where the threshold is not near the least key."""
    least, most = int(live.min()), int(live.max())
    upper = most | 3  # bins are looked at by fours
    if upper - least < BINS:
        counts = np.bincount(live & (BINS - 1), minlength=BINS)
        turned = counts[np.arange(upper - BINS + 1, upper + 1) & (BINS - 1)]
        digit, above = find_bin(turned, k)
        return Found(upper - BINS + 1 + digit, k - above, int(turned[digit]))
    shift = (most - least | BINS).bit_length() - 11
    distance = live - least
    counts = np.bincount(distance >> shift, minlength=BINS)
    assert len(counts) == BINS
    digit, above = find_bin(counts, k)
    low = np.bincount(distance[distance >> shift == digit] - (digit << shift), minlength=32)
    lower, more = find_bin(low, k - above)
    return Found(least + (digit << shift) + lower, k - above - more, int(low[lower]))


def cut_few(ids: Numbers, need: int) -> int:
    """The `need`-th smallest id, by counting for each how many are smaller."""
    smaller = (ids[None, :] < ids[:, None]).sum(1)
    return int(ids[smaller == need - 1][0])


def cut_many(ids: Numbers, need: int, length: int) -> int:
    """The `need`-th smallest id, by digits of 11 bits; every id is below `length`."""
    shift = (length >> 11).bit_length()
    before, prefix, left = shift + 11, 0, need
    while True:
        width = before - shift
        inside = ids[ids >> before == prefix]
        digits = (inside >> shift) & ((1 << width) - 1)
        reverse, above = find_bin(np.bincount(BINS - 1 - digits, minlength=BINS), left)
        left -= above
        prefix = prefix << width | (BINS - 1 - reverse)
        if shift == 0:
            return prefix
        before, shift = shift, max(shift - 11, 0)


def chosen(lists: Lists, k: int, length: int, *, latency: bool, few: int = FEW) -> tuple[NDArray[np.bool_], int]:
    """(which entries are among the K best, the threshold key)."""
    found = distance_threshold(lists, k) if latency else flat_threshold(lists, k)
    live = lists.keys != _EMPTY
    same = live & (lists.keys == found.threshold)
    taken = live & (lists.keys > found.threshold)
    if found.threshold and found.equal > found.need:
        ties = lists.ids[same]
        cut = cut_few(ties, found.need) if found.equal <= few else cut_many(ties, found.need, length)
        return taken | same & (lists.ids <= cut), found.threshold
    return taken | same, found.threshold


def saturated(lists: Lists, taken: NDArray[np.bool_], local_lens: Numbers, k: int) -> NDArray[np.bool_]:
    """Which sources' lists are full, shorter than their keys, and taken whole."""
    n = lists.keys.shape[1]
    asked: NDArray[np.bool_] = (taken.sum(1) == n) & (local_lens > n) & np.bool_(n < k)
    return asked


def second_list(keys: Numbers, k: int, least: int) -> Numbers:
    """Local indices of a rank's first K keys (key16) of at least `least`, ascending: its second list."""
    reaching = np.flatnonzero(keys >= max(least, 1))
    if len(reaching) > k:
        best = np.lexsort((reaching, -keys[reaching]))[:k]
        reaching = np.sort(reaching[best])
    return reaching
