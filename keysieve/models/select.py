"""The exact selection as the GPU kernel does it, pass by pass, in NumPy.

What the kernel relies on, and what the property tests of this module hold to a stable sort:

1. **Digits.** The K-th largest of a set of key16 values is found from a histogram of the upper 11 bits and one of the
   lower 5 bits of the values in the bin that the first one points at (`Threshold`). Where parts share a row, the
   first digit is the octave (sign and exponent, 9 bits), and the second one the value in it.
2. **Ties.** All values above the threshold are taken, and the first `need` values equal to it, in position order.
3. **Parts.** A row may be cut into contiguous parts held by different blocks. Only histograms travel between blocks; a
   block's first output slot follows from the counts of the blocks before it. Counts are cut at 8,191, so that eight of
   them fit 16 bits: the digit lies in a bin of as many keys or above it, and what is above the digit is not cut.
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
7. **Bound.** Among the keys of listed groups the threshold is no less than the K-th group's top, which K groups reach,
   and mostly not much more. The 510 values from there on are counted one by one, and what lies beyond in one bin;
   unless the threshold is in that one, this gives it at once (`find_near`).
8. **Near the best.** Where few of a shared row's keys are wanted, the threshold mostly lies within some octaves below
   the best ones: each part counts the same way from a floor of its own on (`floor_of`). What lies above the highest
   floor all have counted.
9. **Plateaus.** Where it does not lie there, it may be zero (`find_plateau`). If not, two digits are looked for.
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

ZERO = 0x8000
"""key16 of zero."""

OCTAVE_BITS = 9
"""Bits of the first digit where parts share a row."""

MOST = 8191
"""No block says of a bin that it holds more."""

NEAR = 512
"""Bins of values that are counted one by one."""

LONG = 48
"""Keys for each wanted one from which on a shared row's threshold is expected near its best keys."""

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


def find_shared(parts: list[Keys], want: int) -> tuple[Threshold, list[int]]:
    """Of parts that share a row, from what their blocks tell each other: (the threshold, where each part's first
    selected key goes)."""
    shift = 16 - OCTAVE_BITS
    octaves = np.stack([np.bincount(part >> shift, minlength=1 << OCTAVE_BITS) for part in parts]).clip(max=MOST)
    digit, above = _crossing(octaves.sum(axis=0), want)
    inside = [part[part >> shift == digit] & ((1 << shift) - 1) for part in parts]
    values = np.stack([np.bincount(part, minlength=1 << shift) for part in inside]).clip(max=MOST)
    rest, between = _crossing(values.sum(axis=0), want - above)
    threshold = Threshold(digit << shift | rest, want - above - between)
    higher = octaves[:, digit + 1 :].sum(axis=1) + values[:, rest + 1 :].sum(axis=1)
    return threshold, _first_slots(threshold.need, higher, values[:, rest])


def find_near(parts: list[Keys], want: int, floors: list[int], bins: int = NEAR) -> tuple[Threshold, list[int]] | None:
    """`find_shared` from one histogram of every part, value by value above a floor of its own, no negative number. None
    if the threshold is not above the highest floor, or beyond the bins of a part that has keys there."""
    floor = max(floors)
    limit = bins - 1
    counts = np.zeros((len(parts), bins), np.int64)
    for index, (part, own) in enumerate(zip(parts, floors, strict=True)):
        near = np.clip(part.astype(np.int64) - own, 0, bins - 1)
        its = np.bincount(near, minlength=bins).clip(max=MOST)
        if its[-1]:
            limit = min(limit, bins - 1 - (floor - own))
        counts[index, : max(0, bins - (floor - own))] = its[floor - own :]
    if counts.sum() < want:
        return None
    digit, above = _crossing(counts.sum(axis=0), want)
    if digit == 0 or digit >= limit:
        return None
    threshold = Threshold(floor + digit, want - above)
    return threshold, _first_slots(threshold.need, counts[:, digit + 1 :].sum(axis=1), counts[:, digit])


def floor_of(part: Keys, warps: int = 16, bins: int = NEAR) -> int:
    """A floor for a part of which nothing is known: below the best key, but for those of one warp, by most of the bins.
    The others are room for the best one itself."""
    bests = sorted(max(int(run.max(initial=0)), ZERO) for run in np.array_split(part, warps))
    return max(ZERO, ZERO + (bests[-2] - ZERO) // 4 * 4 - (bins - bins // 4))


def find_plateau(parts: list[Keys], want: int, key: int = ZERO) -> tuple[Threshold, list[int]] | None:
    """`find_shared` if the threshold is `key`."""
    higher = np.array([int((part > key).sum()) for part in parts])
    equal = np.array([int((part == key).sum()) for part in parts])
    need = want - int(higher.sum())
    if not 0 < need <= equal.sum():
        return None
    return Threshold(key, need), _first_slots(need, higher, equal)


def _first_slots(need: int, higher: NDArray[np.int64], equal: NDArray[np.int64]) -> list[int]:
    """Keys selected in the parts before each: all `higher` ones, and of the `equal` ones the first `need`."""
    before = [np.concatenate([[0], np.cumsum(counts)[:-1]]) for counts in (higher, equal)]
    slots: list[int] = (before[0] + np.minimum(before[1], need)).tolist()
    return slots


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
    return take_by(parts, find_threshold(parts, want, bits))


def take_by(parts: list[Keys], threshold: Threshold) -> list[Indices]:
    """`take`, from the threshold on."""
    taken: list[Indices] = []
    equal_before = 0
    for part in parts:
        quota = max(0, threshold.need - equal_before)
        equal = np.flatnonzero(part == threshold.key)
        equal_before += len(equal)
        taken.append(np.sort(np.concatenate([np.flatnonzero(part > threshold.key), equal[:quota]])))
    return taken


def take_keys(parts: list[Keys], want: int, bound: int = 0, bins: int = NEAR) -> list[Indices]:
    """`take` of keys as the second stage does it; `want` of them reach `bound`, if that is known (not 0)."""
    near = None
    if bound > ZERO:
        near = find_near(parts, want, [bound - 1] * len(parts), bins)
    elif bound == 0 and len(parts) > 1 and sum(map(len, parts)) >= LONG * want:
        near = find_near(parts, want, [floor_of(part, bins=bins) for part in parts], bins) or find_plateau(parts, want)
    if near is None and len(parts) == 1:
        return take(parts, want)
    threshold, slots = near or find_shared(parts, want)
    taken = take_by(parts, threshold)
    assert slots == first_slots(taken)
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
    taken = take_keys([keys[run] for run in runs], want)
    return np.concatenate([run.start + indices for run, indices in zip(runs, taken, strict=True)])


def select_two_level(
    keys: Keys, want: int, tops: Keys, parts: int = 1, head: int = 0, room: int | None = None, bins: int = NEAR
) -> Indices:
    """Selection among the tops of a row's groups, then among the keys of the `want` groups found.

    tops: one entry per group that has a key inside the row; there must be at least `want`. Each part keeps the groups
    it found and selects among their keys; the parts' lists together hold exactly `want` groups. room: groups that a
    single part can hold (at least `want`), if that may be used.
    """
    runs = split(len(tops), parts)
    if room is not None:
        found = [take_with_room(tops, want, room)]
    elif parts == 1:
        found = take([tops], want, TOP_BITS)
    else:
        found = take_by([tops[run] for run in runs], find_shared([tops[run] for run in runs], want)[0])
    bound = min(int(top) for run, chosen in zip(runs, found, strict=True) for top in tops[run][chosen])
    groups = [run.start + indices for run, indices in zip(runs, found, strict=True)]
    assert room is not None or sum(map(len, groups)) == want
    positions = [(found[:, None] * GROUP + np.arange(GROUP) - head).reshape(-1) for found in groups]
    inside = [(place >= 0) & (place < len(keys)) for place in positions]
    lists = [
        np.where(inner, keys[np.clip(place, 0, len(keys) - 1)], np.uint16(0)).astype(np.uint16)
        for place, inner in zip(positions, inside, strict=True)
    ]
    taken = take_keys(lists, want, bound, bins)
    return np.concatenate([place[indices] for place, indices in zip(positions, taken, strict=True)])


def select_row(
    keys: Keys,
    k: int,
    *,
    parts: int = 1,
    direct: int = 16384,
    tops: Keys | None = None,
    head: int = 0,
    bins: int = NEAR,
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
    return select_two_level(keys, k, tops, parts, head, room, bins)


def row_starts(lengths: NDArray[np.int64], next_n: int, topk: int) -> NDArray[np.int64]:
    """First element of every row in the compact logits layout (2-D `[requests, next_n]` lengths flattened)."""
    longest = np.maximum(lengths.reshape(-1, next_n).max(axis=1), 0)
    tiles = np.where(longest <= topk, 0, -(-longest // 128))
    before = np.cumsum(tiles) - tiles
    rows = np.arange(lengths.size)
    return 128 * (next_n * before[rows // next_n] + (rows % next_n) * tiles[rows // next_n])
