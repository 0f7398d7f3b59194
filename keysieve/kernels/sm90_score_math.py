"""Consumers of the sm90 scorer: matrix products of a tile, and the way from accumulators to stored logits.

A warpgroup takes a whole tile: two pages of 64 keys (the M side) by the columns of a chunk of rows (the N side), one
page's product running while the other page's accumulators are reduced.

Accumulator of thread (warp w, lane l): key `16 w + l / 4 + 8 r`, column `8 b + 2 (l % 4) + v`. The head sum is, in this
order, for every shape alike: per thread and v, fused multiply-adds over b ascending (the first a product); then
v = 0 plus v = 1; then lanes l and l ^ 1; then l and l ^ 2. On the way the lanes of a quad share out the work: bit 0 of
the lane keeps r, bit 1 keeps the page, so that each lane ends with one key of the tile per row.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from keysieve.device import numerics, ptx, sync
from keysieve.kernels import schedule, score_trace
from keysieve.kernels import sm90_score_store as store
from keysieve.kernels.sm90_score_config import NO_REQUEST, PAGE_SLOT, PAGES_PER_TILE
from keysieve.kernels.sm90_score_store import select
from keysieve.spec import GROUP, HEAD_DIM, PAGE, TILE

SCALE_OFFSET = 8192
K_STEP = 32


class Targets:
    """Where results go: byte addresses of logits (BF16) and tops (uint16), and the pitched layout's pitch. policy: of
    stores, see `store_policy`."""

    def __init__(self, logits: Int64, tops: Int64, pitch: Int64, policy: Any = None) -> None:
        self.logits = logits
        self.tops = tops
        self.pitch = pitch
        self.policy = policy

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> "Targets":
        return self


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

    def key_scale(self, config: Any, place: Uint32) -> Float32:
        """What the sums of the lane's key are multiplied by."""
        return key_scale(config, place)

    def mend(self, kernel: Any, sums: list[Float32], chunk: int, page: int, query_stage: Int32, lane: Int32) -> Any:
        """The head sums of a page whose product is done: as they are."""
        del kernel, chunk, page, query_stage, lane
        return sums

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
def consume(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    products: Any,
    targets: Any,
    thread: Int32,
    led: Int32,
) -> None:
    """One consumer warpgroup: every `groups`-th of the block's tiles, in order, until the end is announced.

    led: 1 if the block's first request was announced before it was known to have a tile here (see `lead_keys`).
    """
    config = kernel.config
    shape = kernel.shape
    lane = cute.arch.lane_idx()
    group = cute.arch.make_warp_uniform(thread // Int32(128))
    warp = cute.arch.make_warp_uniform((thread // Int32(32)) % Int32(4))
    key = ((lane >> Int32(1)) & 1) * PAGE + warp * 16 + (lane & 1) * GROUP + (lane >> Int32(2))
    scale_place = scale_offset(key)
    quad = Uint32(lane & 3) * Uint32(16)
    weights = [Float32(0.0) for _ in range(config.columns // 4 if shape.resident else 1)]
    held = Int32(-1)
    row = Int64(0)
    stride = Int64(0)
    stage = group
    phase = Int32(0)
    owner, tile, sequence = next_tile(shared, stage, phase)
    while owner != Int32(NO_REQUEST):
        score_trace.mark(kernel, shared, score_trace.LANDED, held < Int32(0) and group == Int32(0))
        if sequence != held:
            for request in cutlass.range(held + Int32(1), sequence + Int32(1), unroll=1):
                if request > Int32(0):  # those this group had no tile of are released as well, in order
                    release(shared.query_empty + (request - Int32(1)) % Int32(shape.query_stages))
                query_stage = request % Int32(shape.query_stages)
                sync.wait_barrier(shared.query_full + query_stage, (request // Int32(shape.query_stages)) & 1)
            held = sequence
            row, stride = row_places(config, shared, targets, owner)
            if cutlass.const_expr(shape.resident):
                place = shared.weights + Uint32(held % Int32(shape.query_stages)) * Uint32(kernel.places.weight_bytes)
                for pair in cutlass.range_constexpr(-(-config.columns // 16)):
                    four = ptx.load_shared_v4(place + Uint32(64 * pair) + quad)
                    for word in cutlass.range_constexpr(4):
                        if cutlass.const_expr(4 * pair + word < config.columns // 4):
                            weights[4 * pair + word] = numerics.bits_float(four[word])
            score_trace.mark(kernel, shared, score_trace.QUERIED, group == Int32(0))
        score_tile(
            kernel,
            shared,
            products,
            targets,
            weights,
            stage,
            held % Int32(shape.query_stages),
            tile * Int32(TILE) + key,
            row,
            stride,
            scale_place,
            quad,
            lane,
            group,
        )
        stage = stage + Int32(shape.groups)
        if stage >= Int32(shape.stages):
            stage = stage - Int32(shape.stages)
            phase = phase ^ Int32(1)
        owner, tile, sequence = next_tile(shared, stage, phase)
    if held >= Int32(0):
        release(shared.query_empty + held % Int32(shape.query_stages))
    elif led != Int32(0):  # no tile for this group, but others may wait for room
        release(shared.query_empty)
    score_trace.mark(kernel, shared, score_trace.DONE, group == Int32(0))


@cute.jit
def next_tile(shared: Any, stage: Int32, phase: Int32) -> Any:
    """(request or NO_REQUEST, tile of it, its number in the block's order) of a stage, when it has landed."""
    sync.wait_barrier(getattr(shared, "landed", shared.key_full) + stage, phase)
    owner, tile, sequence, _unused = ptx.load_shared_v4(shared.descriptors + Uint32(stage) * Uint32(16))
    return Int32(owner), Int32(tile), Int32(sequence)


def scale_offset(key: Int32) -> Uint32:
    """Byte offset in a ring stage of a tile key's scale word: the page's rows 64 and 65, swizzled as the copy does."""
    page, token = key // Int32(PAGE), key % Int32(PAGE)
    line = token // Int32(32)
    chunk = ((token % Int32(32)) // Int32(4)) ^ line
    return Uint32(page * PAGE_SLOT + SCALE_OFFSET + line * HEAD_DIM + chunk * 16 + (token % Int32(4)) * 4)


@cute.jit
def release(barrier: Any) -> None:
    """This warp has read what the barrier guards."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def row_places(config: cutlass.Constexpr[Any], shared: Any, targets: Any, request: Int32) -> Any:
    """(element of the request's first row, elements between its rows) in the logits buffer."""
    row = Int64(0)
    stride = Int64(0)
    if cutlass.const_expr(config.layout == "compact"):
        before = schedule.tiles_before(shared.prefix, request)
        after = schedule.tiles_before(shared.prefix, request + Int32(1))
        row = Int64(before) * Int64(TILE * config.next_n)
        stride = Int64(after - before) * Int64(TILE)
    else:
        row = Int64(request) * Int64(config.next_n) * targets.pitch
        stride = targets.pitch
    return row, stride


@cute.jit
def score_tile(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    products: Any,
    targets: Any,
    weights: Any,
    stage: Int32,
    query_stage: Int32,
    position: Int32,
    row: Int64,
    stride: Int64,
    scale_place: Uint32,
    quad: Uint32,
    lane: Int32,
    group: Int32,
) -> None:
    """All products of a tile and their results. position: of this lane's key in its request."""
    steps = steps_of(kernel)
    score_trace.tick(kernel, shared, 0, position >> Int32(7), group)
    products.start(stage, query_stage)
    for ahead in cutlass.range_constexpr(kernel.shape.ahead):
        products.issue(steps[ahead][0], steps[ahead][1], stage, query_stage)
    place = shared.keys + Uint32(stage) * Uint32(PAGES_PER_TILE * PAGE_SLOT) + scale_place
    scale = products.key_scale(kernel.config, place)
    place = shared.weights + Uint32(query_stage) * Uint32(kernel.places.weight_bytes) + quad
    lengths = shared.lengths + Uint32(query_stage) * Uint32(32)
    finish_tile(
        kernel,
        shared,
        products,
        targets,
        Weights(kernel.shape, weights, place),
        steps,
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


def steps_of(kernel: Any) -> list[tuple[int, int]]:
    """The products of a tile in their order: (chunk, page)."""
    return [(chunk, page) for chunk in range(len(kernel.chunks)) for page in range(PAGES_PER_TILE)]


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
        if self.shape.resident:
            found: list[Any] = self.resident[2 * column_block : 2 * column_block + 2]
            return found
        four = column_block // 2
        if four not in self.read:
            self.read[four] = ptx.load_shared_v4(self.place + Uint32(64 * four))
        at = 2 * (column_block % 2)
        return [numerics.bits_float(word) for word in self.read[four][at : at + 2]]

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
