"""Wide rows on Hopper: four query rows of a request side by side in a quad of lanes, so that no lane needs another's
sums.

The order of a product's columns is free. Here column `8 b + 2 q + v` of a chunk of 128 is row `4 set + q`, head
`32 part + 2 b + v`: lane q of a quad (see `sm90_score_products`) has all heads of one row, for the keys
`16 w + l / 4 + 8 r` of a page. The head sum is that of `sm90_score_products`, operation for operation: a chain of fused
multiply-adds over the heads `8 i + 2 j + v`, i ascending, for each (j, v); then v = 0 plus v = 1; then j = 0 plus 1 and
j = 2 plus 3; then both.

A set's logits of a tile, four a lane, become 8 bytes of one row in two lane exchanges: bit 2 of the lane then names r,
bit 3 the page, bit 4 the half of the group of 8 keys.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup

from keysieve.device import keys, numerics, packed, ptx
from keysieve.kernels import score_trace
from keysieve.kernels.sm90_score_config import PAGE_SLOT, PAGES_PER_TILE, PART, SET
from keysieve.kernels.sm90_score_products import Products, key_scale, key_tiles, matrix_op, query_tiles, release
from keysieve.kernels.sm90_score_store import row_lengths, select
from keysieve.spec import HEAD_DIM, PAGE, TILE

CHUNK = SET * PART

SET_BOX = (2, SET, PART // 2, HEAD_DIM)
"""What one copy brings of the queries: (v, q, b, element)."""

SET_STRIDES = (HEAD_DIM, 2 * HEAD_DIM, 2 * SET * HEAD_DIM, 1)
"""How it lies in shared memory: column `8 b + 2 q + v` after column."""

NAN = 0x7FFF
"""NaN as conversion, addition and maximum of BF16 give it."""


def set_copy(load: Any, queries: Any, rows: Int32, heads: int) -> Any:
    """(tensor copy, its view of the queries) for boxes of `SET_BOX`. queries: pointer to E4M3 [rows, heads, 128]."""
    layout = cute.make_layout((2, rows, heads // 2, HEAD_DIM), stride=(HEAD_DIM, heads * HEAD_DIM, 2 * HEAD_DIM, 1))
    box = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, cute.make_layout(SET_BOX, stride=SET_STRIDES))
    return cpasync.make_tiled_tma_atom(load, cute.make_tensor(queries, layout), box, SET_BOX)


def set_views(kernel: Any, shared: Any, row_copy: Any, query_rows: Any) -> tuple[Any, Any]:
    """(global queries by (set of rows, part), held ones by (chunk, stage)) as the tensor copy wants them."""
    layout = cute.make_layout(
        (*SET_BOX, kernel.config.columns // CHUNK, kernel.shape.query_stages),
        stride=(*SET_STRIDES, CHUNK * HEAD_DIM, kernel.places.query_bytes),
    )
    held = cute.make_tensor(shared.fp8(kernel.places.query, cute.make_swizzle(3, 4, 3)), layout)
    rows = cute.local_tile(query_rows, SET_BOX, (0, None, None, 0))
    target, source = cpasync.tma_partition(
        row_copy, 0, cute.make_layout(1), cute.group_modes(held, 0, 4), cute.group_modes(rows, 0, 4)
    )
    return source, target


def copy_sets(kernel: Any, row_copy: Any, source: Any, target: Any, request: Int32, stage: Int32, barrier: Any) -> None:
    """Start the copies of a request's queries into a query stage."""
    parts, sets = kernel.config.heads // PART, kernel.config.next_n // SET
    for chunk in range(sets * parts):
        rows, part = divmod(chunk, parts)
        given = source[(None, request * Int32(sets) + Int32(rows), part)]
        cute.copy(row_copy, given, target[(None, chunk, stage)], tma_bar_ptr=barrier)


class RowProducts(Products):
    """The matrix products of a tile: each of one or more chunks, with accumulators for every product in flight."""

    def __init__(self, kernel: Any, shared: Any, thread: Int32) -> None:
        shape, width = kernel.shape, kernel.shape.chunk_columns
        self.parts = kernel.config.heads // PART
        self.sets = kernel.config.next_n // SET
        self.width = width // CHUNK
        self.count = kernel.config.columns // width
        begin, more = matrix_op(width, False), matrix_op(width, True)
        mine = begin.get_slice(thread % Int32(128))
        tiles = begin.make_fragment_A(mine.partition_A(key_tiles(shared, kernel.places, shape.stages)))
        held = [query_tiles(shared, kernel.places, i * width, width, shape.query_stages) for i in range(self.count)]
        self.a = [tiles] * self.count
        self.b = [begin.make_fragment_B(mine.partition_B(part)) for part in held]
        self.first, self.more = [begin] * self.count, [more] * self.count
        pool = [cute.make_rmem_tensor(begin.partition_shape_C((PAGE, width)), Float32) for _ in range(shape.ahead)]
        self.acc: list[list[Any]] = [[None] * PAGES_PER_TILE for _ in range(self.count)]
        for step, (product, page) in enumerate(self.steps(kernel)):
            self.acc[product][page] = pool[step % shape.ahead]

    def steps(self, kernel: Any) -> list[tuple[int, int]]:
        """(product, page) in order: a page's parts of a set one after the other, as its chains stay in registers."""
        del kernel
        each = max(1, self.parts // self.width)  # products of a set
        pages = range(PAGES_PER_TILE)
        return [(first + i, page) for first in range(0, self.count, each) for page in pages for i in range(each)]

    def places_of(self, warp: Int32, lane: Int32) -> tuple[Int32, Int32]:
        """(the lane's first key of a tile, whose scale it reads first; the first of the four keys that it stores)."""
        key = warp * 16 + (lane >> Int32(2))
        page, r, half = (lane >> Int32(3)) & 1, (lane >> Int32(2)) & 1, lane >> Int32(4)
        return key, page * PAGE + warp * 16 + r * 8 + half * 4

    def no_request(self) -> list[Any]:
        """In the place of `request_places` before the first request."""
        return [Int64(0), Int64(0), Int64(0), Int32(0), Uint32(0), Uint32(0)]

    def request_places(
        self, targets: Any, row: Int64, stride: Int64, lengths: Uint32, warp: Int32, lane: Int32
    ) -> list[Any]:
        """Address of the first logit that the lane stores in tile 0, in set 0; bytes from set to set; address of the
        maximum that it stores, in the set that bit 4 of the lane names if there are two; tiles inside all rows, stored
        8 bytes at a time; and what the lane picks in `fours` and in `best_of`, kept in registers so."""
        own = row + Int64(lane & Int32(3)) * stride + Int64(self.places_of(warp, lane)[1])
        top = (own >> Int64(3)) * Int64(2)
        if self.sets == 2:
            top = top + Int64(lane >> Int32(4)) * stride  # of four rows, 2 bytes for 8 elements
        found = row_lengths(lengths, SET * self.sets)
        least = found[0]
        for length in found[1:]:
            least = select(length < least, length, least)
        # Logits that are not 8-byte aligned are stored one by one.
        odd = ((targets.logits | (stride * Int64(2))) & Int64(7)) != Int64(0)
        return [
            targets.logits + own * Int64(2),
            stride * Int64(2 * SET),
            targets.tops + top,
            select(odd, Int32(0), least // Int32(TILE)),
            select((lane & Int32(4)) != Int32(0), Uint32(0x3276), Uint32(0x5410)),
            select(lane < Int32(16), Uint32(0x4410), Uint32(0x4432)),
        ]

    def key_scale(self, config: Any, place: Uint32) -> Any:
        """Scales of the lane's keys: of page 0 for r 0 and 1, of page 1. 8 keys further: two chunks of 16 bytes."""
        places = [place + Uint32(page * PAGE_SLOT + 32 * r) for page in range(PAGES_PER_TILE) for r in range(2)]
        return [key_scale(config, one) for one in places]

    def finish(
        self,
        kernel: Any,
        shared: Any,
        targets: Any,
        weights: Any,
        stage: Int32,
        query_stage: Int32,
        lengths: Uint32,
        tile: Int32,
        key: Int32,
        request: list[Any],
        scale: Any,
        lane: Int32,
        group: Int32,
    ) -> None:
        """Reduce each product while the next one (ahead 1: another group's) runs; store the tile when all are done."""
        steps, ahead = self.steps(kernel), kernel.shape.ahead
        chains: list[Any] = []
        words: list[list[Uint32]] = [[] for _ in range(self.sets)]
        for step, (product, page) in enumerate(steps):
            warpgroup.wait_group(min(ahead, len(steps) - step) - 1)
            if step in (0, len(steps) - 1):
                score_trace.tick(kernel, shared, 1 if step == 0 else 2, tile, group)
            if step + 1 == len(steps):
                release(shared.key_empty + stage)
                score_trace.mark(kernel, shared, score_trace.MULTIPLIED, group == Int32(0))
            for chunk in range(product * self.width, (product + 1) * self.width):
                rows, part = divmod(chunk, self.parts)
                place = 2 * PART * (chunk % self.width)
                chains = extend_chains(self.acc[product][page], place, chains if part else [], chunk, weights)
                if part + 1 == self.parts:
                    low, high = (numerics.mul(joined(chains[8 * r : 8 * r + 8]), scale[2 * page + r]) for r in range(2))
                    words[rows].append(numerics.add_bf16x2(numerics.bf16x2_bits(low, high), Uint32(0)))
            weights.forget()
            if step + ahead < len(steps):
                self.issue(steps[step + ahead][0], steps[step + ahead][1], stage, query_stage)
        logit, apart, top, whole, selector, half = request
        store_sets(
            kernel.config,
            targets,
            logit + Int64(tile) * Int64(2 * TILE),
            apart,
            top + Int64(tile) * Int64(TILE // 4),
            fours(words, selector, lane),
            lengths,
            tile,
            key,
            lane,
            whole,
            half,
        )
        score_trace.tick(kernel, shared, 3, tile, group)


def extend_chains(acc: Any, place: int, chains: list[Any], chunk: int, weights: Any) -> list[Any]:
    """The 16 chains of a page, `8 r + 2 j + v`, with the heads of one chunk added; from none: begun.

    place: of the chunk's first accumulator.
    """
    chains = list(chains) or [None] * 16
    for block in range(PART // 2):
        four = weights.four(chunk * (PART // 4) + block // 2)
        for r in range(2):
            for v in range(2):
                at = 8 * r + 2 * (block % 4) + v
                twice = numerics.twice_relu(acc[place + 4 * block + 2 * r + v])
                weight = four[2 * (block % 2) + v]
                if chains[at] is None:
                    chains[at] = numerics.mul(twice, weight)
                else:
                    chains[at] = numerics.fma(twice, weight, chains[at])
    return chains


def joined(chains: list[Float32]) -> Float32:
    """The head sum of a key from its eight chains `2 j + v`."""
    pairs = [numerics.add(chains[2 * j], chains[2 * j + 1]) for j in range(4)]
    return numerics.add(numerics.add(pairs[0], pairs[1]), numerics.add(pairs[2], pairs[3]))


def fours(words: list[list[Uint32]], selector: Uint32, lane: Int32) -> list[Uint32]:
    """Four keys of a row of each set, two words a set, from a word a page with keys `l / 4` and `l / 4 + 8`."""
    upper = (lane & Int32(8)) != Int32(0)
    found: list[Uint32] = []
    for pages in words:
        first, second = (ptx.byte_perm(word, Uint32(cute.arch.shuffle_sync_bfly(word, 4)), selector) for word in pages)
        other = Uint32(cute.arch.shuffle_sync_bfly(select(upper, first, second), 8))
        found += [select(upper, other, first), select(upper, second, other)]
    return found


@cute.jit
def store_sets(
    config: cutlass.Constexpr[Any],
    targets: Any,
    logit: Int64,
    apart: Int64,
    top: Int64,
    words: Any,
    lengths: Uint32,
    tile: Int32,
    key: Int32,
    lane: Int32,
    whole: Int32,
    half: Uint32,
) -> None:
    """Store a tile's logits and maxima from two words of four keys a set: BF16, -0 as +0 and NaN as 0x7FFF.

    logit, top: addresses in this tile of what `RowProducts.request_places` names; apart, whole, half: as it gives
    them. Where all keys of the tile are inside all rows and the warp holds no NaN, nothing is masked, and maxima are
    found among the BF16 values instead of their ranks.
    """
    own = best_of(words, half, numerics.max_nan_bf16x2)
    fault = Uint32(own == Uint32(NAN)) | Uint32(tile >= whole)
    spoiled = Uint32(cute.arch.vote_any_sync(fault != Uint32(0)))
    if spoiled == Uint32(0):  # the same for all lanes
        for rows in cutlass.range_constexpr(len(words) // 2):
            ptx.store_v2(logit + apart * Int64(rows), words[2 * rows], words[2 * rows + 1], targets.policy)
        if cutlass.const_expr(config.layout != "pitched"):
            limit = Int32(32 if len(words) > 2 else 16)
            ptx.store_half_below(top, packed.key16x2_fast(own), 0, lane, limit, targets.policy)
    else:
        store_masked(config, targets, logit, apart, top, words, lengths, tile * Int32(TILE) + key, lane, half)


def best_of(words: Any, half: Uint32, larger: Callable[[Uint32, Uint32], Uint32]) -> Uint32:
    """The maximum of the lane's group of 8 keys, of the set that bit 4 of the lane names if there are two."""
    best = [larger(words[i], words[i + 1]) for i in range(0, len(words), 2)]
    both = larger(ptx.byte_perm(best[0], best[-1], Uint32(0x5410)), ptx.byte_perm(best[0], best[-1], Uint32(0x7632)))
    both = larger(both, Uint32(cute.arch.shuffle_sync_bfly(both, 16)))
    return ptx.byte_perm(both, Uint32(0), half)


def store_masked(
    config: Any,
    targets: Any,
    logit: Int64,
    apart: Int64,
    top: Int64,
    words: Any,
    lengths: Uint32,
    position: Int32,
    lane: Int32,
    half: Uint32,
) -> None:
    """What of a lane's keys, from `position` on, is inside its rows, NaN as the canonical one; and the maxima of each
    8 keys, of what is inside."""
    place = lengths + Uint32(lane & Int32(3)) * Uint32(4)
    ranks: list[Uint32] = []
    for at, given in enumerate(words):
        rows, first = divmod(at, 2)
        length = Int32(ptx.load_shared(place + Uint32(4 * SET * rows)))
        nan = (given + Uint32(0x00010001)) & (given ^ Uint32(0xFFFFFFFF)) & Uint32(0x80008000)
        word = given ^ ((nan >> Uint32(15)) * Uint32(0x803F))
        rank = keys.key16x2(word)
        for at_half in range(2):
            where = position + Int32(2 * first + at_half)
            address = logit + apart * Int64(rows) + Int64(2 * (2 * first + at_half))
            ptx.store_half_below(address, word, at_half, where, length, targets.policy)
            rank = select(where >= length, rank & Uint32(0xFFFF << (16 * (1 - at_half))), rank)
        ranks.append(rank)
    if config.layout != "pitched":
        own = best_of(ranks, half, ptx.max_u16x2)
        rows = lane >> Int32(4)
        last = Int32(ptx.load_shared(place + Uint32(rows) * Uint32(4 * SET * (len(words) > 2))))
        length = last if len(words) > 2 else select(rows == Int32(0), last, Int32(0))
        ptx.store_half_below(top, own, 0, position & Int32(-8), length, targets.policy)
