"""A tile's results to memory, as `sm90_score_store.store_chunk`: the same bytes, fewer instructions in a chain."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from keysieve.device import numerics, packed, ptx
from keysieve.kernels import sm90_score_store as store
from keysieve.kernels.sm90_score_store import KEY_LANES, row_lengths, select, store_tops
from keysieve.spec import GROUP, TILE

NAN_CHANGES = 0x803F803F
"""What turns 0x7FFF, BF16 arithmetic's NaN, into 0xFFC0, in both halves."""


class Places(store.Places):
    """A request's places as one lane sees them: of its key in tile 0 and of the key's group (see
    `sm90_score_store.Places`)."""

    def __init__(self, targets: Any, row: Int64, stride: Int64, key: Int32, lane: Int32) -> None:
        self.policy = targets.policy
        self.key = key
        self.first_group = key - (lane >> Int32(2))
        self.first_logit = targets.logits + (row + Int64(key)) * Int64(2)
        self.logit_pitch = stride * Int64(2)
        self.first_top = targets.tops + ((row + Int64(self.first_group)) >> Int64(2))
        self.top_pitch = stride >> Int64(2)

    def at(self, tile: Int32) -> "Places":
        """The same, in a tile."""
        self.position = self.key + tile * Int32(TILE)
        self.group = self.first_group + tile * Int32(TILE)
        self.logit = self.first_logit + Int64(tile) * Int64(2 * TILE)
        self.top = self.first_top + Int64(tile) * Int64(2 * TILE // GROUP)
        return self


def logit_word(low: Float32, high: Float32) -> Uint32:
    """`sm90_score_store.logit_word`. Only of a NaN the successor has a sign bit that it has not itself; the byte
    permutation spreads it over its half."""
    word = numerics.add_bf16x2(numerics.bf16x2_bits(low, high), Uint32(0))
    turned = (word + Uint32(0x00010001)) & (word ^ Uint32(0xFFFFFFFF))
    return word ^ (packed.sign_mask_x2(turned) & Uint32(NAN_CHANGES))


def store_rows(config: Any, places: Places, values: list[Float32], lengths: Uint32, lane: Int32) -> None:
    """All rows of a request: `values` are this lane's logits before rounding, one a row; lengths: their address."""
    count = len(values)
    inside = row_lengths(lengths, count)
    best: list[Uint32] = []
    for pair in range(0, count, 2):
        rows = range(pair, min(pair + 2, count))
        word = logit_word(values[rows[0]], values[rows[-1]])
        ranks = packed.key16x2_fast(word)
        for half, row in enumerate(rows):
            place = places.logit + places.logit_pitch * Int64(row)
            ptx.store_half_below(place, word, half, places.position, inside[row], places.policy)
            outside = places.position >= inside[row]
            ranks = select(outside, ranks & Uint32(0xFFFF << (16 * (1 - half))), ranks)
        best.append(ranks & Uint32(0xFFFF) if len(rows) == 1 else ranks)
    if config.layout == "compact":
        store_tops(places, best, 0, count, lengths, lane)


class PlainPlaces:
    """Where a request's plain tiles go, for one lane.

    whole: tiles inside all rows. logit, top: addresses in tile 0, of row 0's logit and of the maximum that the lane
    stores; limit: `whole` if it stores one, else 0.
    """

    def __init__(self, config: Any, places: Places, lengths: Uint32, lane: Int32) -> None:
        self.config = config
        self.any = places
        self.lengths = lengths
        self.policy = places.policy
        self.logit = places.first_logit
        self.pitch = places.logit_pitch
        row = Int32(0)
        idle = Int32(0)
        words = top_words(config.next_n)
        for distance in KEY_LANES:
            bit = select((lane & Int32(distance)) != Int32(0), Int32(1), Int32(0))
            if words > 1:
                words //= 2
                row = row + bit * Int32(2 * words)
            elif distance == KEY_LANES[-1]:
                row = row + bit
            else:
                idle = idle | bit
        self.stores = (idle == Int32(0)) & (row < Int32(config.next_n))
        self.top = places.first_top + places.top_pitch * Int64(row)

    def read_lengths(self) -> None:
        """What the request's lengths say, when they are there."""
        found = row_lengths(self.lengths, self.config.next_n)
        least = found[0]
        for length in found[1:]:
            least = select(length < least, length, least)
        self.whole = least // Int32(TILE)
        self.limit = select(self.stores, self.whole, Int32(0))


def top_words(rows: int) -> int:
    """Words of two rows that lanes share out between them."""
    return {1: 1, 2: 2, 3: 4, 4: 4}[(rows + 1) // 2]


def store_plain(plain: PlainPlaces, values: list[Float32], tile: Int32, lane: Int32) -> None:
    """A plain tile's results: no NaN and nothing to mask, so that maxima are found among the BF16 values. None of
    NOWHERE."""
    config = plain.config
    count = len(values)
    words: list[Uint32] = []
    address = plain.logit + Int64(tile) * Int64(2 * TILE)
    for pair in range(0, count, 2):
        rows = range(pair, min(pair + 2, count))
        words.append(numerics.add_bf16x2(numerics.bf16x2_bits(values[rows[0]], values[rows[-1]]), Uint32(0)))
        for half, row in enumerate(rows):
            place = address + plain.pitch * Int64(row) if row else address
            ptx.store_half_below(place, words[-1], half, tile, plain.whole, plain.policy)
    if config.layout != "compact":
        return
    best = words + words[-1:] * (top_words(count) - len(words))
    for distance in KEY_LANES:
        if len(best) > 1:
            upper = (lane & Int32(distance)) != Int32(0)
            middle = len(best) // 2
            kept = [select(upper, best[middle + i], best[i]) for i in range(middle)]
            sent = [select(upper, best[i], best[middle + i]) for i in range(middle)]
        else:
            kept, sent = best, best
        best = [
            packed.max_bf16x2(a, Uint32(cute.arch.shuffle_sync_bfly(b, distance)))
            for a, b in zip(kept, sent, strict=True)
        ]
    top = packed.key16x2_fast(best[0])
    if count > 1:
        top = top >> (Uint32(lane) & Uint32(KEY_LANES[-1]))
    ptx.store_half_below(plain.top + Int64(tile) * Int64(2 * TILE // GROUP), top, 0, tile, plain.limit, plain.policy)
