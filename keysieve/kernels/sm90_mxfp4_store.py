"""A tile's results to memory, as `sm90_score_store.store_chunk`: the same bytes, fewer instructions in a chain."""

from typing import Any

from cutlass import Float32, Int32, Int64, Uint32

from keysieve.device import numerics, packed, ptx
from keysieve.kernels import sm90_score_store as store
from keysieve.kernels.sm90_score_store import row_lengths, select, store_tops
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
