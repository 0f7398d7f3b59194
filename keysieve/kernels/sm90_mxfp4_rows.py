"""MXFP4 on Hopper in requests of 4 and 8 rows of 32 or 64 heads: a lane of a quad has all heads of one row.

The order of columns, of sums and of stores is that of `sm90_score_rows`; keys come from registers. A lane's keys are
rows `16 w + l / 4 + 8 r` of both pages, so that it wants four factors instead of one, and no sum crosses lanes.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup

from keysieve.device import numerics, packed, ptx
from keysieve.kernels import score_trace
from keysieve.kernels.sm90_mxfp4_apart import anew, block_dots, final_factor, whole_codes, whole_weight
from keysieve.kernels.sm90_mxfp4_config import AREA, CHUNK
from keysieve.kernels.sm90_mxfp4_math import WideProducts, matrix_op
from keysieve.kernels.sm90_mxfp4_places import CODES, FACTORS
from keysieve.kernels.sm90_mxfp4_scales import NO_CODES
from keysieve.kernels.sm90_score_config import PAGES_PER_TILE, PART, SET
from keysieve.kernels.sm90_score_math import query_tiles
from keysieve.kernels.sm90_score_products import release
from keysieve.kernels.sm90_score_rows import RowProducts, extend_chains, fours, joined, store_sets
from keysieve.kernels.sm90_score_store import select
from keysieve.spec import HEAD_DIM, PAGE, TILE

FOURS = PART // 8
"""Blocks of eight heads in a part."""


class WideRows(WideProducts, RowProducts):
    """The matrix products of a tile: keys widened in registers, columns as `RowProducts` has them."""

    def __init__(self, kernel: Any, shared: Any, thread: Int32) -> None:
        shape, width = kernel.shape, kernel.shape.chunk_columns
        self.place_keys(kernel, shared, thread)
        self.parts = kernel.config.heads // PART
        self.sets = kernel.config.next_n // SET
        self.width = width // CHUNK
        self.count = kernel.config.columns // width
        begin, more = matrix_op(width, False), matrix_op(width, True)
        mine = begin.get_slice(thread % Int32(128))
        held = [query_tiles(shared, kernel.places, i * width, width, shape.query_stages) for i in range(self.count)]
        self.b = [begin.make_fragment_B(mine.partition_B(part)) for part in held]
        self.first, self.more = [begin] * self.count, [more] * self.count
        pool = [cute.make_rmem_tensor(begin.partition_shape_C((PAGE, width)), Float32) for _ in range(shape.ahead)]
        self.acc: list[list[Any]] = [[None] * PAGES_PER_TILE for _ in range(self.count)]
        for step, (product, page) in enumerate(self.steps(kernel)):
            self.acc[product][page] = pool[step % shape.ahead]
        operand = begin.partition_shape_A((PAGE, HEAD_DIM))
        self.a = [cute.make_rmem_tensor(operand, Float8E4M3FN) for _ in range(PAGES_PER_TILE)]
        self.words = [cute.recast_tensor(a, Uint32) for a in self.a]

    def start(self, stage: Int32, query_stage: Int32) -> None:
        """Scales of a tile: what its keys are widened with, and whether one of the warp's is apart."""
        self.offsets = self.read_offsets(stage)
        self.codes = ptx.load_shared(self.own_place + Uint32(stage) * Uint32(AREA) + Uint32(CODES))
        mark = self.read_mark(query_stage)
        self.some = cute.arch.vote_any_sync(((self.codes ^ Uint32(NO_CODES)) | mark) != Uint32(0))

    def key_scale(self, config: Any, place: Uint32) -> Any:
        """None: `finish` reads the factors of the lane's four keys."""
        del config, place
        return None

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
        """As `RowProducts.finish`; a set's logits of a page that must be are formed again before they are rounded."""
        del scale
        steps, ahead = self.steps(kernel), kernel.shape.ahead
        chains: list[Any] = []
        words: list[list[Uint32]] = [[] for _ in range(self.sets)]
        area = self.lane_place + Uint32(stage) * Uint32(AREA) + Uint32(FACTORS)
        factors = [
            ptx.load_shared(area + Uint32(4 * PAGE * page + 32 * r)) for page in range(PAGES_PER_TILE) for r in range(2)
        ]
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
                    two = [
                        numerics.mul(joined(chains[8 * r : 8 * r + 8]), numerics.bits_float(factors[2 * page + r]))
                        for r in range(2)
                    ]
                    low, high = mend_keys(kernel, self, two[0], two[1], factors, rows, page, query_stage, lane)
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


@cute.jit
def mend_keys(
    kernel: cutlass.Constexpr[Any],
    products: Any,
    low: Float32,
    high: Float32,
    factors: Any,
    rows: cutlass.Constexpr[int],
    page: cutlass.Constexpr[int],
    query_stage: Int32,
    lane: Int32,
) -> Any:
    """The logits of a lane's two keys of a page, in its row of a set, formed again where one of the two is apart."""
    if products.some:
        lane = anew(lane)
        mark = ptx.load_shared(products.shared.marks + Uint32(query_stage) * Uint32(4))
        row = Int32(SET * rows) + (lane & Int32(3))
        marked = ((mark >> Uint32(row)) & Uint32(1)) != Uint32(0)
        base = lane & Int32(28)
        codes = [Uint32(cute.arch.shuffle_sync(products.codes, base + Int32(2 * page + r))) for r in range(2)]
        keys = [whole_codes(codes[r], factors[2 * page + r]) for r in range(2)]
        sums = row_sums(kernel, products, products.words[page], keys, row, marked, rows, query_stage, lane)
        low = formed(sums[0], low, codes[0], factors[2 * page], marked)
        high = formed(sums[1], high, codes[1], factors[2 * page + 1], marked)
    return low, high


def formed(total: Float32, logit: Float32, codes: Uint32, factor: Uint32, marked: Any) -> Float32:
    """`total`, or NaN with its key, where key or row is apart; else `logit`."""
    alone = (codes != Uint32(NO_CODES)) | marked
    return Float32(select(alone, numerics.mul(total, final_factor(factor, alone)), logit))


@cute.jit
def row_sums(
    kernel: cutlass.Constexpr[Any],
    products: Any,
    words: cute.Tensor,
    keys: Any,
    row: Int32,
    marked: Any,
    rows: cutlass.Constexpr[int],
    query_stage: Int32,
    lane: Int32,
) -> Any:
    """Head sums of the lane's two keys in its row, in the order of all other shapes."""
    shared = products.shared
    heads = kernel.config.heads
    quad = lane & Int32(3)
    query = shared.query + Uint32(query_stage) * Uint32(kernel.places.query_bytes)
    stage = Uint32(query_stage) * Uint32(kernel.places.weight_bytes)
    chains = [Float32(0.0) for _ in range(16)]
    for eight in cutlass.range(heads // 8, unroll=1):
        chunk = Int32(rows * (heads // PART)) + eight // Int32(FOURS)
        for j in cutlass.range_constexpr(4):
            block = eight % Int32(FOURS) * Int32(4) + Int32(j)
            held = Uint32(chunk * Int32(CHUNK) + block * Int32(8)) + Uint32(lane >> Int32(2))
            line = query + held * Uint32(128) + Uint32(quad) * Uint32(4)
            mine = stage + Uint32(row * Int32(heads) + eight * Int32(8) + Int32(2 * j)) * Uint32(4)
            factors = packed.load_shared_v2(shared.factors + mine)
            codes = packed.load_shared_v2(shared.codes + mine)
            scales = [whole_codes(codes[v], factors[v]) for v in range(2)]
            word = chunk * Int32(CHUNK) + (block >> Int32(1)) * Int32(16) + quad * Int32(4) + Int32(2 * (j % 2))
            two = packed.load_shared_v2(shared.weights + stage + Uint32(word) * Uint32(4))
            weight = [whole_weight(numerics.bits_float(two[v]), factors[v], marked) for v in range(2)]
            dots = block_dots(words, line, held, keys, scales, quad)
            for i in cutlass.range_constexpr(4):
                at = 8 * (i // 2) + 2 * j + i % 2
                chains[at] = numerics.fma(numerics.max_nan(dots[i], Float32(0.0)), weight[i % 2], chains[at])
    return joined(chains[:8]), joined(chains[8:])
