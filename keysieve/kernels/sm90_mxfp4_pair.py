"""Two rows of a request side by side in a quad of lanes: sums, logits and maxima of the sm90 MXFP4 scorer.

The order of a product's columns is free (`sm90_mxfp4_config.product_column`). Here lane `2 row + half` of a quad has
the heads `8 i + 4 half + 0..3` of one row, for the keys `16 w + l / 4 + 8 r` of a page. The head sum is that of
`sm90_score_products`, operation for operation; only the last of its additions crosses lanes, and on that way bit 0 of
the lane keeps the page. So a lane ends with the keys r = 0 and 1 of one row, whose logits are the halves of a word, and
the maxima of two neighbouring groups are found together.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import numerics, packed, ptx
from keysieve.kernels.sm90_mxfp4_apart import anew, final_factor, row_sums, whole_codes
from keysieve.kernels.sm90_mxfp4_scales import NO_CODES
from keysieve.kernels.sm90_mxfp4_store import logit_word
from keysieve.kernels.sm90_score_products import Weights, exchange
from keysieve.kernels.sm90_score_store import KEY_LANES, row_lengths, select
from keysieve.spec import GROUP, PAGE, TILE

LANES = 4
"""Lanes that store maxima: those of the first key of a group."""


@dsl_user_op
def store_word_below(
    address: Int64, word: Uint32, index: Int32, bound: Int32, policy: Int64, *, loc: Any = None, ip: Any = None
) -> None:
    """Store `word` to global memory if index < bound: no branch. policy: of `l2_policy`."""
    text = "{ .reg .pred p; setp.lt.s32 p, $2, $3; @p st.global.L2::cache_hint.b32 [$0], $1, $4; }"
    ptx.asm(text, "l,r,r,r,l", (), (address, word, index, bound, policy), loc=loc, ip=ip)


class PairPlaces:
    """Where a lane's results of a request go.

    length: usable length of its row. whole: tiles inside both rows, stored without masks (none if a word of two maxima
    has no place). logit, top: addresses in tile 0, of its first key's logit (the other's is 16 bytes further) and of
    its groups' two maxima; limit: `whole` if it stores those, else 0. key: its first in a tile.
    """

    def __init__(
        self, targets: Any, row: Int64, stride: Int64, lengths: Uint32, warp: Int32, lane: Int32, compact: bool
    ) -> None:
        line = (lane >> Int32(1)) & Int32(1)
        self.compact = compact
        self.policy = targets.policy
        self.key = (lane & Int32(1)) * Int32(PAGE) + warp * Int32(16) + (lane >> Int32(2))
        own = row + Int64(line) * stride
        self.logit = targets.logits + (own + Int64(self.key)) * Int64(2)
        self.top = targets.tops + ((own + Int64(self.key - (lane >> Int32(2)))) >> Int64(2))
        first, second = row_lengths(lengths, 2)
        self.length = select(line == Int32(0), first, second)
        whole = select(first < second, first, second) // Int32(TILE)
        if compact:
            whole = select((targets.tops & Int64(3)) != Int64(0), Int32(0), whole)
        self.whole = whole
        self.limit = select(lane < Int32(LANES), whole, Int32(0))


def pair_sums(kernel: Any, acc: Any, weights: Weights) -> list[Float32]:
    """A lane's share of its row's head sums of one page, for r = 0 and 1."""
    shares: list[Float32] = []
    for r in range(2):
        halves: list[Float32] = []
        for odd in range(2):
            chains: list[Any] = [None, None]
            for i in range(kernel.config.heads // 8):
                pair = weights.pair(2 * i + odd)
                for v in range(2):
                    twice = numerics.twice_relu(acc[4 * (2 * i + odd) + 2 * r + v])
                    if i == 0:
                        chains[v] = numerics.mul(twice, pair[v])
                    else:
                        chains[v] = numerics.fma(twice, pair[v], chains[v])
            halves.append(numerics.add(chains[0], chains[1]))
        shares.append(numerics.add(halves[0], halves[1]))
    return shares


def pair_values(pages: list[list[Float32]], factors: list[Uint32], lane: Int32) -> list[Float32]:
    """The lane's two logits before rounding, from the shares of both pages."""
    odd = (lane & Int32(1)) != Int32(0)
    return [numerics.mul(exchange(pages[0][r], pages[1][r], odd, 1), numerics.bits_float(factors[r])) for r in range(2)]


@cute.jit
def mend_pair(
    kernel: cutlass.Constexpr[Any], products: Any, values: Any, stage: Int32, query_stage: Int32, lane: Int32
) -> Any:
    """A tile's logits, those of keys and rows that are apart formed again (see `sm90_mxfp4_apart`)."""
    if products.some:
        lane = anew(lane)
        mark = ptx.load_shared(products.shared.marks + Uint32(query_stage) * Uint32(4))
        whole = whole_codes(products.codes, products.factor)
        base = lane & Int32(28)
        for page in cutlass.range_constexpr(2):
            words = products.widened(page, anew(stage))
            keys = [Uint32(cute.arch.shuffle_sync(whole, base + Int32(2 * page + r))) for r in range(2)]
            codes = [Uint32(cute.arch.shuffle_sync(products.codes, base + Int32(2 * page + r))) for r in range(2)]
            known = [Uint32(cute.arch.shuffle_sync(products.factor, base + Int32(2 * page + r))) for r in range(2)]
            for row in cutlass.range(2, unroll=1):
                marked = ((mark >> Uint32(row)) & Uint32(1)) != Uint32(0)
                two = row_sums(kernel, products.shared, words, keys, row, marked, query_stage, lane)
                mine = (lane & Int32(3)) == row * Int32(2) + Int32(page)
                for r in cutlass.range_constexpr(2):
                    total = numerics.add(two[r], cute.arch.shuffle_sync_bfly(two[r], 1))
                    total = numerics.add(total, cute.arch.shuffle_sync_bfly(total, 2))
                    alone = (codes[r] != Uint32(NO_CODES)) | marked
                    logit = numerics.mul(total, final_factor(known[r], alone))
                    values[r] = Float32(select(mine & alone, logit, values[r]))
    return values


def store_pair_plain(plain: PairPlaces, values: list[Float32], tile: Int32) -> None:
    """A plain tile's results, see `sm90_mxfp4_store.store_plain`."""
    word = numerics.add_bf16x2(numerics.bf16x2_bits(values[0], values[1]), Uint32(0))
    address = plain.logit + Int64(tile) * Int64(2 * TILE)
    for r in range(2):
        ptx.store_half_below(address + Int64(2 * GROUP * r), word, r, tile, plain.whole, plain.policy)
    if plain.compact:
        for distance in KEY_LANES:
            word = packed.max_bf16x2(word, Uint32(cute.arch.shuffle_sync_bfly(word, distance)))
        top = plain.top + Int64(tile) * Int64(2 * TILE // GROUP)
        store_word_below(top, packed.key16x2_fast(word), tile, plain.limit, plain.policy)


def store_pair(places: PairPlaces, values: list[Float32], tile: Int32, lane: Int32) -> None:
    """Any tile's results; none of a tile past every length."""
    word = logit_word(values[0], values[1])
    ranks = packed.key16x2_fast(word)
    position = tile * Int32(TILE) + places.key
    address = places.logit + Int64(tile) * Int64(2 * TILE)
    for r in range(2):
        at = position + Int32(GROUP * r)
        ptx.store_half_below(address + Int64(2 * GROUP * r), word, r, at, places.length, places.policy)
        ranks = select(at >= places.length, ranks & Uint32(0xFFFF << (16 * (1 - r))), ranks)
    if places.compact:
        for distance in KEY_LANES:
            ranks = ptx.max_u16x2(ranks, Uint32(cute.arch.shuffle_sync_bfly(ranks, distance)))
        limit = select(lane < Int32(LANES), places.length, Int32(0))
        top = places.top + Int64(tile) * Int64(2 * TILE // GROUP)
        for r in range(2):
            ptx.store_half_below(top + Int64(2 * r), ranks, r, position + Int32(GROUP * r), limit, places.policy)
