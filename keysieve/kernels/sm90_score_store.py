"""From head sums to memory: the last exchange, scale, BF16, logits, and the maxima of each 8 keys.

A lane holds one key of the tile for every row of a chunk (bit 0 of the lane: r, bit 1: the page, the rest: the key
within its group of 8). Logits are stored by every lane, a row at a time. The maxima of a group lie across eight lanes:
rows are packed two to a word, and on the way to the maximum the lanes share out the words, so that at the end lane
bits 2 (and 3) name the pair of rows and bit 4 the row of the pair, and one store writes them all.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from keysieve.device import keys, numerics, ptx
from keysieve.kernels.sm90_score_config import KEPT_ROWS

KEY_LANES = (4, 8, 16)
"""Lane distances between the keys of a group of 8."""


def select(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where the condition holds, else `no`: a select, not a branch."""
    return cutlass.select_(condition, yes, no)


def logit_word(low: Float32, high: Float32) -> Uint32:
    """Two logits as stored (BF16, nearest even, -0 as +0, NaN as 0xFFC0), `low` in the low half.

    Conversion and addition give 0x7FFF for every NaN; adding one to a half then carries into its sign bit.
    """
    word = numerics.add_bf16x2(numerics.bf16x2_bits(low, high), Uint32(0))
    nan = (word + Uint32(0x00010001)) & (word ^ Uint32(0xFFFFFFFF)) & Uint32(0x80008000)
    return word ^ ((nan >> Uint32(15)) * Uint32(0x803F))


def store_policy(tiles: Int32, config: Any, pitch: Int64) -> Int64:
    """L2's policy for the results of a step of `tiles` tiles: they are asked to stay, as many of them as the set-aside
    for such lines holds, so that the keys do not push them out before they are read and overwritten: a line that is
    written back between the reads costs several times its bytes.

    pitch: of pitched logits; of compact ones, which have none, the tile rows that may stay. Of a step that has more, a
    share of the lines may, always the same ones; of more than four times as many, none.
    """
    rows = tiles * Int32(config.next_n)
    kept = Int32(pitch) if config.layout == "compact" else Int32(KEPT_ROWS)
    policy = ptx.l2_policy("evict_first")
    for quarters in (1, 2, 3, 4):
        fits = rows * Int32(quarters) <= kept * Int32(4)
        policy = select(fits, ptx.l2_policy("evict_last", quarters / 4), policy)
    return policy


class Places:
    """A tile's byte addresses for one lane, in the request's row 0: its logit, its group's top; and the row pitches."""

    def __init__(self, targets: Any, row: Int64, stride: Int64, position: Int32, lane: Int32) -> None:
        group = position - (lane >> Int32(2))
        self.position = position
        self.policy = targets.policy
        self.group = group
        self.logit = targets.logits + (row + Int64(position)) * Int64(2)
        self.logit_pitch = stride * Int64(2)
        self.top = targets.tops + ((row + Int64(group)) >> Int64(2))  # 2 bytes for 8 elements
        self.top_pitch = stride >> Int64(2)


def row_lengths(lengths: Uint32, rows: int) -> list[Int32]:
    """The usable lengths of the request's rows, from their eight words of shared memory."""
    words: list[Any] = []
    for first in range(0, rows, 4):
        words += ptx.load_shared_v4(lengths + Uint32(4 * first))
    return [Int32(word) for word in words[:rows]]


def store_chunk(
    config: Any,
    places: Places,
    values: list[Float32],
    first: int,
    inside: list[Int32],
    lengths: Uint32,
    lane: Int32,
) -> None:
    """Store rows `first` .. of a chunk: `values` are this lane's logits before rounding, `inside` all rows' lengths."""
    count = len(values)
    best: list[Uint32] = []
    for pair in range(0, count, 2):
        rows = range(pair, min(pair + 2, count))
        word = logit_word(values[rows[0]], values[rows[-1]])
        ranks = keys.key16x2(word)
        for half, row in enumerate(rows):
            place = places.logit + places.logit_pitch * Int64(first + row)
            ptx.store_half_below(place, word, half, places.position, inside[first + row], places.policy)
            outside = places.position >= inside[first + row]
            ranks = select(outside, ranks & Uint32(0xFFFF << (16 * (1 - half))), ranks)
        best.append(ranks & Uint32(0xFFFF) if len(rows) == 1 else ranks)
    if config.layout != "pitched":
        store_tops(places, best, first, count, lengths, lane)


def store_tops(places: Places, best: list[Uint32], first: int, count: int, lengths: Uint32, lane: Int32) -> None:
    """The groups' maxima of the chunk's rows. best: per pair of rows, key16 of this lane's key, 0 outside the row."""
    best = best + [Uint32(0)] * ({1: 1, 2: 2, 3: 4, 4: 4}[len(best)] - len(best))
    pair = Int32(0)
    idle = Int32(0)
    for distance in KEY_LANES:
        if len(best) > 1:
            upper = (lane & Int32(distance)) != Int32(0)
            middle = len(best) // 2
            kept = [select(upper, best[middle + i], best[i]) for i in range(middle)]
            sent = [select(upper, best[i], best[middle + i]) for i in range(middle)]
            pair = pair + select(upper, Int32(middle), Int32(0))
        else:
            kept, sent = best, best
            if distance != KEY_LANES[-1]:
                idle = idle | (lane & Int32(distance))
        best = [
            ptx.max_u16x2(a, Uint32(cute.arch.shuffle_sync_bfly(b, distance))) for a, b in zip(kept, sent, strict=True)
        ]
    half = (lane >> Int32(4)) & Int32(1)
    row = pair * Int32(2) + half
    length = Int32(ptx.load_shared(lengths + Uint32(4 * first) + Uint32(row) * Uint32(4)))
    wanted = select(row < Int32(count), length, Int32(0))
    wanted = select(idle == Int32(0), wanted, Int32(0))
    top = best[0] >> (Uint32(half) * Uint32(16))
    place = places.top + places.top_pitch * Int64(first) + places.top_pitch * Int64(row)
    ptx.store_half_below(place, top, 0, places.group, wanted, places.policy)
