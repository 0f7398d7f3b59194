"""A tile's matrix products on Hopper, and the way from accumulators to a lane's logits.

Accumulator of thread (warp w, lane l): key `16 w + l / 4 + 8 r`, column `8 b + 2 (l % 4) + v`. Columns are heads row
after row here (`sm90_score_rows` has another order). The head sum is, in this order, for every shape alike: per thread
and v, fused multiply-adds over b ascending (the first a product); then v = 0 plus v = 1; then lanes l and l ^ 1; then l
and l ^ 2. On the way the lanes of a quad share out the work: bit 0 of the lane keeps r, bit 1 keeps the page, so that
each lane ends with one key of the tile per row.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from keysieve.device import numerics, ptx
from keysieve.kernels import score_trace
from keysieve.kernels import sm90_score_store as store
from keysieve.kernels.sm90_score_config import PAGE_SLOT, PAGES_PER_TILE
from keysieve.kernels.sm90_score_store import select
from keysieve.spec import GROUP, HEAD_DIM, PAGE, TILE

K_STEP = 32


class Products:
    """The matrix products of a tile. Chunks of equal width share their accumulators: one a page, or (ahead 1) one."""

    def __init__(self, kernel: Any, shared: Any, thread: Int32) -> None:
        heads, stages = kernel.config.heads, kernel.shape.stages
        local = thread % Int32(128)
        self.first: list[Any] = []
        self.more: list[Any] = []
        self.a: list[Any] = []
        self.b: list[Any] = []
        self.acc: list[list[Any]] = []
        pool: dict[int, list[Any]] = {}
        for start, rows in kernel.chunks:
            columns = rows * heads
            begin, more = matrix_op(columns, False), matrix_op(columns, True)
            mine = begin.get_slice(local)
            held = query_tiles(shared, kernel.places, start * heads, columns, kernel.shape.query_stages)
            self.a.append(begin.make_fragment_A(mine.partition_A(key_tiles(shared, kernel.places, stages))))
            self.b.append(begin.make_fragment_B(mine.partition_B(held)))
            self.first.append(begin)
            self.more.append(more)
            shape = begin.partition_shape_C((PAGE, columns))
            if columns not in pool:
                pool[columns] = [cute.make_rmem_tensor(shape, Float32) for _ in range(kernel.shape.ahead)]
            self.acc.append([pool[columns][page % kernel.shape.ahead] for page in range(PAGES_PER_TILE)])

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> "Products":
        return self

    def start(self, stage: Int32, query_stage: Int32) -> None:
        """Before the first product of a tile: nothing to do for keys that the unit reads as they are."""

    def key_scale(self, config: Any, place: Uint32) -> Any:
        """What the sums of the lane's key are multiplied by."""
        return key_scale(config, place)

    def mend(self, kernel: Any, sums: list[Float32], chunk: int, page: int, query_stage: Int32, lane: Int32) -> Any:
        """The head sums of a page whose product is done: as they are."""
        del kernel, chunk, page, query_stage, lane
        return sums

    def steps(self, kernel: Any) -> list[tuple[int, int]]:
        """The products of a tile in their order: (chunk, page)."""
        return [(chunk, page) for chunk in range(len(kernel.chunks)) for page in range(PAGES_PER_TILE)]

    def places_of(self, warp: Int32, lane: Int32) -> tuple[Int32, Int32]:
        """(the key of a tile whose scale the lane reads, the first key that it stores): here the same."""
        key = ((lane >> Int32(1)) & 1) * PAGE + warp * 16 + (lane & 1) * GROUP + (lane >> Int32(2))
        return key, key

    def no_request(self) -> list[Any]:
        """In the place of `request_places` before the first request."""
        return [Int64(0), Int64(0)]

    def request_places(
        self, targets: Any, row: Int64, stride: Int64, lengths: Uint32, warp: Int32, lane: Int32
    ) -> list[Any]:
        """What `finish` wants to know of a request: its first row's element, and the elements from row to row."""
        del targets, lengths, warp, lane
        return [row, stride]

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
        """Results of a tile whose first products have been issued, see `finish_tile`."""
        row, stride = request
        position = tile * Int32(TILE) + key
        finish_tile(
            kernel,
            shared,
            self,
            targets,
            weights,
            self.steps(kernel),
            stage,
            query_stage,
            lengths,
            position,
            row,
            stride,
            scale,
            lane,
            group,
        )

    def issue(self, chunk: int, page: int, stage: Int32, query_stage: Int32) -> None:
        """Start the product of one page with one chunk: a group of four instructions."""
        acc = self.acc[chunk][page]
        slot = stage * Int32(PAGES_PER_TILE) + Int32(page)
        warpgroup.fence()
        for k in range(HEAD_DIM // K_STEP):
            mma = self.more[chunk] if k else self.first[chunk]
            cute.gemm(mma, acc, self.a[chunk][(None, None, k, slot)], self.b[chunk][(None, None, k, query_stage)], acc)
        warpgroup.commit_group()


def key_tiles(shared: Any, places: Any, stages: int) -> Any:
    """Key pages as the A operand: E4M3 (64, 128, pages in the ring), swizzled, one page per slot."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
    tile = cute.tile_to_shape(atom, (PAGE, HEAD_DIM), order=(0, 1))
    outer = cute.append(tile.outer, cute.make_layout(stages * PAGES_PER_TILE, stride=PAGE_SLOT))
    return cute.make_tensor(shared.fp8(places.keys, tile.inner), outer)


def query_tiles(shared: Any, places: Any, first_column: int, columns: int, stages: int) -> Any:
    """Columns of the held queries as the B operand: E4M3 (columns, 128, query stages), swizzled."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
    tile = cute.tile_to_shape(atom, (columns, HEAD_DIM), order=(0, 1))
    outer = cute.append(tile.outer, cute.make_layout(stages, stride=places.query_bytes))
    return cute.make_tensor(shared.fp8(places.query + first_column * HEAD_DIM, tile.inner), outer)


def matrix_op(columns: int, accumulate: bool) -> Any:
    """A 64 x columns x 32 E4M3 product, both operands in shared memory, float32 accumulators."""
    op = warpgroup.MmaF8Op(
        Float8E4M3FN,
        Float8E4M3FN,
        Float32,
        (64, columns, K_STEP),
        warpgroup.OperandSource.SMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    mma = cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    return mma


@cute.jit
def release(barrier: Any) -> None:
    """This warp has read what the barrier guards."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


def finish_tile(
    kernel: Any,
    shared: Any,
    products: Any,
    targets: Any,
    weights: Any,
    steps: list[tuple[int, int]],
    stage: Int32,
    query_stage: Int32,
    lengths: Uint32,
    position: Int32,
    row: Int64,
    stride: Int64,
    scale: Float32,
    lane: Int32,
    group: Int32,
) -> None:
    """Reduce each product while the next one (ahead 1: another group's) runs; store a chunk when both of its pages are
    done."""
    ahead = kernel.shape.ahead
    places = store.Places(targets, row, stride, position, lane)
    inside = store.row_lengths(lengths, kernel.config.next_n)
    halves: list[Any] = []
    for step, (chunk, page) in enumerate(steps):
        warpgroup.wait_group(min(ahead, len(steps) - step) - 1)
        if step in (0, len(steps) - 1):
            score_trace.tick(kernel, shared, 1 if step == 0 else 2, position >> Int32(7), group)
        if step + 1 == len(steps):
            release(shared.key_empty + stage)
            score_trace.mark(kernel, shared, score_trace.MULTIPLIED, group == Int32(0))
        sums = head_sums(kernel, products.acc[chunk][page], chunk, weights, lane)
        halves.append(products.mend(kernel, sums, chunk, page, query_stage, lane))
        weights.forget()
        if step + ahead < len(steps):
            products.issue(steps[step + ahead][0], steps[step + ahead][1], stage, query_stage)
        if page == 1:
            start, rows = kernel.chunks[chunk]
            values = [
                numerics.mul(across_pages(halves[2 * chunk][i], halves[2 * chunk + 1][i], lane), scale)
                for i in range(rows)
            ]
            store.store_chunk(kernel.config, places, values, start, inside, lengths, lane)
    score_trace.tick(kernel, shared, 3, position >> Int32(7), group)


class Weights:
    """Halved head weights as a thread reads them: from registers, or four at a time from shared `place`."""

    def __init__(self, shape: Any, resident: Any, place: Uint32) -> None:
        self.shape = shape
        self.resident = resident
        self.place = place
        self.read: dict[int, Any] = {}

    def pair(self, column_block: int) -> list[Any]:
        """Those of the thread's two columns of a block of eight."""
        at = 2 * (column_block % 2)
        return self.four(column_block // 2)[at : at + 2]

    def four(self, pair: int) -> list[Any]:
        """Those of the thread's four columns of two blocks of eight."""
        if self.shape.resident:
            found: list[Any] = self.resident[4 * pair : 4 * pair + 4]
            return found
        if pair not in self.read:
            self.read[pair] = ptx.load_shared_v4(self.place + Uint32(64 * pair))
        return [numerics.bits_float(word) for word in self.read[pair]]

    def forget(self) -> None:
        """Read again what the next product needs, rather than hold it in registers."""
        self.read = {}


def head_sums(kernel: Any, acc: Any, chunk: int, weights: Weights, lane: Int32) -> list[Float32]:
    """Per row of the chunk: this lane's share (its r) of the head sum of one page, after the first lane exchange."""
    start, rows = kernel.chunks[chunk]
    blocks = kernel.config.heads // 8
    odd = (lane & Int32(1)) != Int32(0)
    sums: list[Float32] = []
    for row in range(rows):
        part = [[Float32(0.0), Float32(0.0)], [Float32(0.0), Float32(0.0)]]
        for block in range(blocks):
            pair = weights.pair((start + row) * blocks + block)
            for r in range(2):
                for v in range(2):
                    twice = numerics.twice_relu(acc[4 * (row * blocks + block) + 2 * r + v])
                    if block == 0:
                        part[r][v] = numerics.mul(twice, pair[v])
                    else:
                        part[r][v] = numerics.fma(twice, pair[v], part[r][v])
        whole = [numerics.add(part[r][0], part[r][1]) for r in range(2)]
        sums.append(exchange(whole[0], whole[1], odd, 1))
    return sums


def exchange(low: Float32, high: Float32, upper: Any, distance: int) -> Float32:
    """Add across lanes `distance` apart: lanes with `upper` get the sum of `high`, the others that of `low`."""
    mine, other = select(upper, high, low), select(upper, low, high)
    return numerics.add(mine, cute.arch.shuffle_sync_bfly(other, distance))


def across_pages(first: Float32, second: Float32, lane: Int32) -> Float32:
    """Second lane exchange: bit 1 of the lane keeps the page."""
    return exchange(first, second, (lane & Int32(2)) != Int32(0), 2)


def key_scale(config: Any, place: Uint32) -> Float32:
    """The key's scale as float32: stored so, or from the lowest UE8M0 byte (0 is 2^-127, 255 is NaN).

    MXFP4 dots have their scales inside.
    """
    if config.key_format == "mxfp4":
        return Float32(1.0)
    word = ptx.load_shared(place)
    if config.key_format == "fp8_fp32":
        return numerics.bits_float(word)
    code = word & Uint32(0xFF)
    subnormal = Uint32(code == Uint32(0)) * Uint32(0x00400000)
    nan = Uint32(code == Uint32(255)) * Uint32(0x00400000)
    return numerics.bits_float((code << Uint32(23)) | subnormal | nan)
