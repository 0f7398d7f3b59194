"""The exact selection as the GPU kernel does it, pass by pass, in NumPy.

What the kernel relies on, and what the property tests of this module hold to a stable sort:

1. **Digits.** The K-th largest of a set of key16 values is found from a histogram of the upper 11 bits and one of the
   lower 5 bits of the values in the bin that the first one points at (`Threshold`).
2. **Ties.** All values above the threshold are taken, and the first `need` values equal to it, in position order.
3. **Parts.** A row may be cut into contiguous parts held by different blocks. Only histograms and counts travel between
   blocks; a block's first output slot follows from the counts of the blocks before it.
4. **Two levels.** Cut the row into contiguous groups of at most 8 keys, and let a group's *top* be its largest key.
   The K best groups by (top descending, position ascending) hold the K best keys by (key descending, position
   ascending): a key outside of them has K groups before its own whose tops are larger, or as large and at a lower
   position, and each of those holds a key that is preferred to it. So a long row is a selection among tops (an eighth
   of the data) followed by one among the keys of exactly K groups, and no list can overflow, whatever the number of
   equal keys.
5. **Numbers.** Keys themselves stay BF16 bits: bins of negative numbers are read in the other direction, and the masks
   of keys above and equal to the threshold come from comparing numbers (`find_high_of_numbers`, `number_masks`).
6. **Room.** Any larger set of groups serves as well if it contains those K. Where all groups whose tops share the K-th
   top's first digit, or exceed it, fit the room there is, they are taken and the second digit is not looked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Keys: TypeAlias = NDArray[np.uint16]
Indices: TypeAlias = NDArray[np.int64]

GROUP = 8
NAN = 0x003F
"""key16 of every NaN."""

HIGH_BITS = 11
TOP_BITS = 12
"""Bits of the first digit: among keys, and among the maxima of a row that one block works on."""


@dataclass(frozen=True)
class Threshold:
    """The K-th largest key16 of all parts, and how many of the keys equal to it are taken."""

    key: int
    need: int


def key16_of_bits(bits: Keys) -> Keys:
    """key16 of arbitrary BF16 bits: -0 as +0, every NaN as the canonical one."""
    bits = np.where((bits & 0x7FFF) > 0x7F80, np.uint16(0xFFC0), bits)
    bits = np.where(bits == 0x8000, np.uint16(0), bits)
    return np.where(bits & 0x8000, bits ^ 0xFFFF, bits ^ 0x8000).astype(np.uint16)


def settled_bits(bits: Keys) -> Keys:
    """What the kernel has of arbitrary BF16 bits before it has looked for NaNs: `x * 1 + 0` turns -0 into +0 and every
    NaN into 0x7FFF, which is larger than any number there is."""
    bits = np.where((bits & 0x7FFF) > 0x7F80, np.uint16(0x7FFF), bits)
    return np.where(bits == 0x8000, 0, bits).astype(np.uint16)


def settle_nans(bits: Keys, counts: NDArray[np.int64]) -> tuple[Keys, NDArray[np.int64]]:
    """`settled_bits` and their histogram by upper bits, with NaNs where they belong: whatever is in the bin of 0x7FFF
    is a NaN, so one look at that bin tells whether there is anything to do."""
    shift = 16 - HIGH_BITS
    nans = counts[0x7FFF >> shift]
    if nans == 0:
        return bits, counts
    counts = counts.copy()
    counts[0xFFC0 >> shift] += nans
    counts[0x7FFF >> shift] = 0
    return np.where(bits == 0x7FFF, np.uint16(0xFFC0), bits).astype(np.uint16), counts


def _crossing(counts: NDArray[np.int64], want: int) -> tuple[int, int]:
    """From the top bin down: (the bin that holds the `want`-th, the number of keys in higher bins)."""
    upto = np.cumsum(counts[::-1])
    place = int(np.argmax(upto >= want))
    return len(counts) - 1 - place, int(upto[place] - counts[len(counts) - 1 - place])


def find_high(parts: list[Keys], want: int, bits: int = HIGH_BITS) -> tuple[int, int, int]:
    """First pass over all parts: (upper `bits` bits of the `want`-th key, keys above its bin, keys in the bin)."""
    bins = 1 << bits
    counts = sum((np.bincount(part >> (16 - bits), minlength=bins) for part in parts), np.zeros(bins, np.int64))
    digit, above = _crossing(counts, want)
    return digit, above, int(counts[digit])


def number_order(bits: int = HIGH_BITS) -> Indices:
    """Bins of numbers by the upper `bits` bits of BF16, best first: positive ones from the largest down, then negative
    ones from the smallest bits up. The bin at place i is that of the key16 digit `2 ** bits - 1 - i`."""
    half = 1 << (bits - 1)
    return np.concatenate([np.arange(half)[::-1], np.arange(half, 2 * half)])


def find_high_of_numbers(parts: list[Keys], want: int, bits: int = HIGH_BITS) -> tuple[int, int, int]:
    """`find_high` of keys that stay BF16 bits: the digit is that of their key16."""
    bins = 1 << bits
    counts = sum((np.bincount(part >> (16 - bits), minlength=bins) for part in parts), np.zeros(bins, np.int64))
    ordered = counts[number_order(bits)]
    place = int(np.argmax(np.cumsum(ordered) >= want))
    return bins - 1 - place, int(ordered[:place].sum()), int(ordered[place])


def low_of_numbers(part: Keys, digit: int, bits: int = HIGH_BITS) -> Keys:
    """The other bits of key16 of those of `part`'s BF16 bits whose digit is `digit`: what is left of the difference
    from the digit's own bits."""
    flip = 0x8000 if digit >> (bits - 1) else 0xFFFF
    rest = part ^ np.uint16((digit << (16 - bits)) ^ flip)
    low: Keys = rest[rest < 1 << (16 - bits)]
    return low


def number_masks(part: Keys, key: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(above, equal) by comparing BF16 numbers with the one whose key16 is `key`; of NaNs by their key16."""
    if key <= NAN:
        keys = key16_of_bits(part)
        return keys > key, keys == key
    wanted = np.uint16(key ^ (0x8000 if key >= 0x8000 else 0xFFFF))
    numbers = (part.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return numbers > np.uint32(int(wanted) << 16).view(np.float32), part == wanted


def find_threshold(parts: list[Keys], want: int, bits: int = HIGH_BITS) -> Threshold:
    """Two histogram passes over all parts. `want` keys or more must exist (1 <= want)."""
    digit, above, _ = find_high(parts, want, bits)
    bins, shift = 1 << (16 - bits), 16 - bits
    low = sum(
        (np.bincount(part[(part >> shift) == digit] & (bins - 1), minlength=bins) for part in parts),
        np.zeros(bins, np.int64),
    )
    rest, between = _crossing(low, want - above)
    return Threshold(digit << shift | rest, want - above - between)


def take_with_room(part: Keys, want: int, room: int) -> Indices:
    """Indices of at most `room` of a single part's keys, ascending, with the `want` best among them (room >= want)."""
    digit, above, inside = find_high([part], want, TOP_BITS)
    if above + inside <= room:
        return np.flatnonzero(part >= digit << (16 - TOP_BITS))
    return take([part], want, TOP_BITS)[0]


def take(parts: list[Keys], want: int, bits: int = HIGH_BITS) -> list[Indices]:
    """For every part, the indices it contributes to the `want` best of all, ascending. Parts are in position order."""
    threshold = find_threshold(parts, want, bits)
    taken: list[Indices] = []
    equal_before = 0
    for part in parts:
        quota = max(0, threshold.need - equal_before)
        equal = np.flatnonzero(part == threshold.key)
        equal_before += len(equal)
        taken.append(np.sort(np.concatenate([np.flatnonzero(part > threshold.key), equal[:quota]])))
    return taken


def first_slots(taken: list[Indices]) -> list[int]:
    """The output slot of every part's first selected key: what the counts of the parts before it add up to."""
    return [0, *np.cumsum([len(indices) for indices in taken])[:-1].tolist()]


def tops_of(keys: Keys, head: int = 0) -> Keys:
    """Largest key16 of every group of 8; the first group holds only `8 - head` keys (an unaligned row)."""
    padded = np.concatenate([np.zeros(head, np.uint16), keys])
    padded = np.concatenate([padded, np.zeros(-len(padded) % GROUP, np.uint16)])
    tops: Keys = padded.reshape(-1, GROUP).max(axis=1)
    return tops


def split(total: int, parts: int) -> list[slice]:
    """`total` units cut into `parts` contiguous runs of equal size (the last ones may be short or empty)."""
    each = -(-total // parts)
    return [slice(min(i * each, total), min((i + 1) * each, total)) for i in range(parts)]


def select_direct(keys: Keys, want: int, parts: int = 1, head: int = 0) -> Indices:
    """Selection among all keys of a row that is cut into `parts` at group borders."""
    total = -(-(len(keys) + head) // GROUP)
    runs = [slice(max(0, run.start * GROUP - head), max(0, run.stop * GROUP - head)) for run in split(total, parts)]
    taken = take([keys[run] for run in runs], want)
    return np.concatenate([run.start + indices for run, indices in zip(runs, taken, strict=True)])


def select_two_level(
    keys: Keys, want: int, tops: Keys, parts: int = 1, head: int = 0, room: int | None = None
) -> Indices:
    """Selection among the tops of a row's groups, then among the keys of the `want` groups found.

    tops: one entry per group that has a key inside the row; there must be at least `want`. Each part keeps the groups
    it found and selects among their keys; the parts' lists together hold exactly `want` groups. room: groups that a
    single part can hold (at least `want`), if that may be used.
    """
    runs = split(len(tops), parts)
    found = take([tops[run] for run in runs], want) if room is None else [take_with_room(tops, want, room)]
    groups = [run.start + indices for run, indices in zip(runs, found, strict=True)]
    assert room is not None or sum(map(len, groups)) == want
    positions = [(found[:, None] * GROUP + np.arange(GROUP) - head).reshape(-1) for found in groups]
    inside = [(place >= 0) & (place < len(keys)) for place in positions]
    lists = [
        np.where(inner, keys[np.clip(place, 0, len(keys) - 1)], np.uint16(0)).astype(np.uint16)
        for place, inner in zip(positions, inside, strict=True)
    ]
    taken = take(lists, want)
    return np.concatenate([place[indices] for place, indices in zip(positions, taken, strict=True)])


def select_row(
    keys: Keys, k: int, *, parts: int = 1, direct: int = 16384, tops: Keys | None = None, head: int = 0
) -> Indices:
    """Positions of the k best keys of a row, ascending: the kernel's choice of path included.

    keys: key16 of the row's keys. direct: keys a part can hold at once; a longer row goes through the tops, which are
    computed from the keys when they are not given.
    """
    if len(keys) <= k:
        return np.arange(len(keys))
    groups = -(-(len(keys) + head) // GROUP)
    if -(-groups // parts) * GROUP <= direct or groups < k:
        return select_direct(keys, k, parts, head)
    tops = (tops_of(keys, head) if tops is None else tops)[:groups]
    room = max(k, direct // GROUP) if parts == 1 else None
    return select_two_level(keys, k, tops, parts, head, room)


def row_starts(lengths: NDArray[np.int64], next_n: int, topk: int) -> NDArray[np.int64]:
    """First element of every row in the compact logits layout (2-D `[requests, next_n]` lengths flattened)."""
    longest = np.maximum(lengths.reshape(-1, next_n).max(axis=1), 0)
    tiles = np.where(longest <= topk, 0, -(-longest // 128))
    before = np.cumsum(tiles) - tiles
    rows = np.arange(lengths.size)
    return 128 * (next_n * before[rows // next_n] + (rows % next_n) * tiles[rows // next_n])
