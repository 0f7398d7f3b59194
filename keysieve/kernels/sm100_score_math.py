"""The Blackwell scorer's products, issued by one warp, and its epilogue: tensor memory to stored logits.

A product takes all 128 keys of a tile (the M side, lanes of tensor memory) by the columns of a chunk of rows (the N
side). Products are numbered in tile order, chunk after chunk; product p is left in accumulator `p % accumulators` and
read by epilogue group `p % GROUPS`, so that an accumulator always belongs to one group.

A thread of the epilogue holds one key and sums its heads alone, in an order that depends on the number of heads only:

* fp32: four sums, head h into sum h % 4 by fused multiply-add (the first a product), then (0 + 1) + (2 + 3), times the
  key's scale, rounded to BF16.
* bf16: the stock bit rule: ReLU rounded to BF16, two BF16x2 sums by fused multiply-add, the first takes head pairs
  (0, 1) and (4, 5) of every 8, the second (2, 3) and (6, 7); added as BF16x2, then low + high as BF16; times the key's
  scale in float32, rounded to BF16.

MXFP4 has its scales inside the products.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from keysieve.device import keys, numerics, ptx, sync, tcgen05
from keysieve.kernels import sm100_score_words as words
from keysieve.kernels.score_cut import NO_REQUEST
from keysieve.kernels.score_tiles import advance
from keysieve.kernels.sm90_score_math import key_scale, next_tile, row_places
from keysieve.kernels.sm90_score_products import release
from keysieve.kernels.sm90_score_store import logit_word
from keysieve.kernels.sm100_score_config import (
    GROUPS,
    K_BYTES,
    SCALE_BYTES,
    WARPS,
    key_scale_column,
    key_scale_words,
    key_tile,
    padded,
    query_rows,
    query_scale_column,
    query_scale_words,
    sum_column,
)
from keysieve.spec import GROUP, TILE

LOAD_COLUMNS = 64
"""Columns an epilogue thread takes from tensor memory at a time: registers."""

LOG2_GROUP = GROUP.bit_length() - 1


# ------------------------------------------------------------------------------------------------- the matrix warp


@cute.jit
def multiply(kernel: cutlass.Constexpr[Any], shared: Any) -> None:
    """All products of the block's tiles, by one warp. A commit tracks the products of its own thread alone: products,
    copies and commits all stand under an election among the whole warp, which falls on the same lane every time.

    Ends when no commit for a tile is outstanding: nothing arrives in this block's memory after the block has gone."""
    shape = kernel.shape
    tensor = ptx.load_shared(shared.tensor)
    stage = Int32(0)
    phase = Int32(0)
    slot = Int32(0)
    slot_phase = Int32(1)  # parity 1 passes on a fresh barrier
    held = Int32(-1)
    owner, _tile, sequence = next_tile(shared, stage, phase)
    while owner != Int32(NO_REQUEST):
        for request in cutlass.range(held + Int32(1), sequence + Int32(1), unroll=1):  # 0 may have no tile here
            if request > Int32(0):
                with cute.arch.elect_one():
                    tcgen05.commit(ptx.smem_addr(shared.query_empty + (request - Int32(1)) % Int32(shape.query_stages)))
            await_query(shape, shared, request)
        held = sequence
        if cutlass.const_expr(not kernel.config.format.is_fp8):
            sync.wait_barrier(shared.scales_ready + stage, phase)
        for chunk in cutlass.range_constexpr(len(kernel.chunks)):
            sync.wait_barrier(shared.sum_empty + slot, slot_phase)
            tcgen05.fence_after()
            with cute.arch.elect_one():
                if cutlass.const_expr(not kernel.config.format.is_fp8):
                    copy_scales(kernel, shared, tensor, chunk, stage, held % Int32(shape.query_stages), slot)
                issue(kernel, shared, tensor, chunk, stage, held % Int32(shape.query_stages), slot)
                if cutlass.const_expr(chunk + 1 == len(kernel.chunks)):
                    tcgen05.commit(ptx.smem_addr(shared.key_empty + stage))
                tcgen05.commit(ptx.smem_addr(shared.sum_full + slot))
            slot, slot_phase = advance(slot, slot_phase, shape.accumulators)
        stage, phase = advance(stage, phase, shape.stages)
        owner, _tile, sequence = next_tile(shared, stage, phase)
    for used in cutlass.range(shape.stages, unroll=1):  # stages below the present one are a lap ahead of the others
        sync.wait_barrier(shared.key_empty + used, phase ^ Int32(used >= stage))


def descriptor(constant: int, address: Uint32) -> Int64:
    """A shared-memory descriptor: its constant fields and the start address in units of 16 bytes."""
    if constant >= 1 << 63:  # as the signed number with these bits
        constant -= 1 << 64
    return Int64(constant) | Int64((address & Uint32(0x3FFFF)) >> Uint32(4))


def issue(kernel: Any, shared: Any, tensor: Uint32, chunk: int, stage: Int32, query_stage: Int32, slot: Int32) -> None:
    """One product: the instructions along K, the first of which overwrites the accumulator."""
    config, places, columns = kernel.config, kernel.places, kernel.tensor
    start, rows = kernel.chunks[chunk]
    n = padded(rows * config.heads)
    constant = words.operand_descriptor(config.row_bytes)
    a = descriptor(constant, shared.origin + key_tile(places, Uint32(stage)))
    b = descriptor(constant, shared.origin + query_rows(config, places, start, Uint32(query_stage)))
    d = tensor + sum_column(config, columns, Uint32(slot), 0)
    for step in range(config.steps):
        along = Int64(words.encoded(K_BYTES * step))
        if config.format.is_fp8:
            tcgen05.product_f8(d, a + along, b + along, words.f8_word(n), step > 0)
        else:
            word = words.mxf4_word(n, 2 * step)
            key_scales = tensor + key_scale_column(columns, Uint32(slot))
            query_scales = tensor + query_scale_column(columns, Uint32(slot))
            tcgen05.product_mxf4(d, a + along, b + along, word, key_scales, query_scales, step > 0)


def copy_scales(
    kernel: Any, shared: Any, tensor: Uint32, chunk: int, stage: Int32, query_stage: Int32, slot: Int32
) -> None:
    """MXFP4: a product's scale words to tensor memory. The unit keeps a copy in order before later products of its
    thread; earlier ones that read the same columns are done, since the accumulator was free."""
    constant = words.scale_descriptor()
    keys_at = shared.origin + key_scale_words(kernel.places, Uint32(stage))
    queries_at = shared.origin + query_scale_words(kernel.places, chunk, Uint32(query_stage))
    tcgen05.copy_scales(tensor + key_scale_column(kernel.tensor, Uint32(slot)), descriptor(constant, keys_at))
    tcgen05.copy_scales(tensor + query_scale_column(kernel.tensor, Uint32(slot)), descriptor(constant, queries_at))


# ------------------------------------------------------------------------------------------------- the epilogue


@cute.jit
def finish(kernel: cutlass.Constexpr[Any], shared: Any, targets: Any, thread: Int32) -> None:
    """One epilogue warpgroup: every GROUPS-th product of the block, in order, until it is sent for one that is not.

    A group looks at a tile before it waits for the tile's product: the product may wait for a query whose place the
    group gives up when it sees that its own request is over.
    """
    config = kernel.config
    shape = kernel.shape
    lane = cute.arch.lane_idx()
    group = cute.arch.make_warp_uniform(thread // Int32(32 * WARPS))
    warp = cute.arch.make_warp_uniform((thread // Int32(32)) % Int32(WARPS))
    key = warp * Int32(32) + lane
    lanes = ptx.load_shared(shared.tensor) + (Uint32(warp * Int32(32)) << Uint32(16))
    held = Int32(-1)
    row = Int64(0)
    stride = Int64(0)
    stage = Int32(0)
    phase = Int32(0)
    slot = Int32(0)
    slot_phase = Int32(0)
    turn = group
    more = Int32(1)
    while more != Int32(0):
        for chunk in cutlass.range_constexpr(len(kernel.chunks)):
            if turn == Int32(0):
                turn = Int32(GROUPS)
                owner, tile, sequence = next_tile(shared, stage, phase)
                if owner == Int32(NO_REQUEST):
                    more = Int32(0)
                else:
                    scale = tile_scale(kernel, shared, stage, key)
                    release(shared.key_empty + stage)
                    if sequence != held:
                        for request in cutlass.range(held + Int32(1), sequence + Int32(1), unroll=1):
                            if request > Int32(0):  # those it has no product of are released as well, in order
                                release(shared.query_empty + (request - Int32(1)) % Int32(shape.query_stages))
                            await_query(shape, shared, request)
                        held = sequence
                        row, stride = row_places(config, shared, targets, owner)
                    sync.wait_barrier(shared.sum_full + slot, slot_phase)
                    tcgen05.fence_after()
                    finish_product(
                        kernel,
                        shared,
                        targets,
                        lanes,
                        chunk,
                        slot,
                        held % Int32(shape.query_stages),
                        scale,
                        tile * Int32(TILE) + key,
                        row,
                        stride,
                        lane,
                    )
            turn = turn - Int32(1)
            slot, slot_phase = advance(slot, slot_phase, shape.accumulators)
        stage, phase = advance(stage, phase, shape.stages)


@cute.jit
def await_query(shape: cutlass.Constexpr[Any], shared: Any, sequence: Int32) -> None:
    """Wait for the query, weights and lengths of the block's request number `sequence`."""
    stage = sequence % Int32(shape.query_stages)
    sync.wait_barrier(shared.query_full + stage, (sequence // Int32(shape.query_stages)) & 1)


def tile_scale(kernel: Any, shared: Any, stage: Int32, key: Int32) -> Float32:
    """The scale of this thread's key, from the tile's words (MXFP4: none left to apply)."""
    if not kernel.config.format.is_fp8:
        return Float32(1.0)
    return key_scale(kernel.config, shared.scales + Uint32(stage) * Uint32(SCALE_BYTES) + Uint32(key) * Uint32(4))


@cute.jit
def finish_product(
    kernel: cutlass.Constexpr[Any],
    shared: Any,
    targets: Any,
    lanes: Uint32,
    chunk: cutlass.Constexpr[int],
    slot: Int32,
    query_stage: Int32,
    scale: Float32,
    position: Int32,
    row: Int64,
    stride: Int64,
    lane: Int32,
) -> None:
    """One product's sums out of tensor memory, some rows at a time, and their logits. position: of this lane's key."""
    config = kernel.config
    heads = config.heads
    start, rows = kernel.chunks[chunk]
    each = max(1, LOAD_COLUMNS // heads)
    weights = shared.weights + Uint32(query_stage) * Uint32(kernel.places.weight_bytes)
    row_bytes = heads * (4 if config.numerics == "fp32" else 2)
    lengths = shared.lengths + Uint32(query_stage) * Uint32(32)
    for at in cutlass.range_constexpr(0, rows, each):
        count = min(each, rows - at)
        cute.arch.sync_warp()  # the stores before may have parted the lanes; the load is the whole warp's
        values = tcgen05.load(lanes + sum_column(config, kernel.tensor, Uint32(slot), at), count * heads)
        if cutlass.const_expr(at + count == rows):  # the accumulator is free as soon as it is in registers
            tcgen05.fence_before()
            release(shared.sum_empty + slot)
        logits = [
            head_sum(kernel, values[i * heads : (i + 1) * heads], weights + Uint32((start + at + i) * row_bytes), scale)
            for i in range(count)
        ]
        for pair in cutlass.range_constexpr(0, count, 2):
            store_rows(
                config, targets, logits[pair : pair + 2], start + at + pair, lengths, position, row, stride, lane
            )


def head_sum(kernel: Any, dots: Any, weights: Uint32, scale: Float32) -> Float32:
    """The logit of one row before its rounding to BF16. weights: shared address of the row's."""
    config = kernel.config
    total = sum_fp32(config, dots, weights) if config.numerics == "fp32" else sum_bf16(dots, weights)
    return numerics.mul(total, scale) if config.format.is_fp8 else total


def sum_fp32(config: Any, dots: Any, weights: Uint32) -> Float32:
    """Four float32 sums, head h into sum h % 4; then (0 + 1) + (2 + 3)."""
    parts: list[Any] = [None] * 4
    for block in range(config.heads // 4):
        four = ptx.load_shared_v4(weights + Uint32(16 * block))
        for i in range(4):
            weight = numerics.bits_float(four[i])
            if config.format.is_fp8:  # weights are halved; no dot of E4M3 codes comes near the limit of doubling
                relu = numerics.twice_relu(dots[4 * block + i])
            else:
                relu = numerics.max_nan(dots[4 * block + i], Float32(0.0))
            parts[i] = numerics.mul(relu, weight) if block == 0 else numerics.fma(relu, weight, parts[i])
    return numerics.add(numerics.add(parts[0], parts[1]), numerics.add(parts[2], parts[3]))


def sum_bf16(dots: Any, weights: Uint32) -> Float32:
    """The stock BF16 sum over heads (8 at a time), as a float."""
    parts = [Uint32(0), Uint32(0)]
    for block in range(len(dots) // 8):
        four = ptx.load_shared_v4(weights + Uint32(16 * block))
        for i in range(4):
            low, high = dots[8 * block + 2 * i], dots[8 * block + 2 * i + 1]
            parts[i % 2] = numerics.fma_bf16x2(numerics.relu_bf16x2(low, high), four[i], parts[i % 2])
    both = numerics.add_bf16x2(parts[0], parts[1])
    return numerics.bf16_to_float(numerics.add_bf16(both, both >> Uint32(16)))


# ------------------------------------------------------------------------------------------------- to memory


@cute.jit
def store_rows(
    config: cutlass.Constexpr[Any],
    targets: Any,
    values: Any,
    first_row: cutlass.Constexpr[int],
    lengths: Uint32,
    position: Int32,
    row: Int64,
    stride: Int64,
    lane: Int32,
) -> None:
    """Store one or two rows' logits of this lane's key, and (compact) the largest key16 of its 8 keys."""
    count = len(values)
    word = logit_word(values[0], values[count - 1])
    inside = []
    best = keys.key16x2(word)
    for i in cutlass.range_constexpr(count):
        length = Int32(ptx.load_shared(lengths + Uint32(4 * (first_row + i))))
        inside.append(length)
        if position < length:
            where = row + stride * Int64(first_row + i) + Int64(position)
            ptx.store_u16(targets.logits + where * Int64(2), word >> Uint32(16 * i))
        else:
            best = best & Uint32(0xFFFF << (16 * (1 - i)))
    if cutlass.const_expr(config.layout == "compact"):
        for distance in cutlass.range_constexpr(3):
            best = ptx.max_u16x2(best, Uint32(cute.arch.shuffle_sync_bfly(best, 1 << distance)))
        if lane & Int32(GROUP - 1) == Int32(0):  # the first key of its group of 8
            for i in cutlass.range_constexpr(count):
                if position < inside[i]:
                    where = (row + stride * Int64(first_row + i) + Int64(position)) >> Int64(LOG2_GROUP)
                    ptx.store_u16(targets.tops + where * Int64(2), best >> Uint32(16 * i))
