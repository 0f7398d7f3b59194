"""Of the vectors that a block holds in registers, those that may hold one of the row's N best keys, to shared memory:
before the threshold is known (`gather`), and behind it (`squeeze`).

Point 2 of `keysieve/models/local_topk.py`, on what is held: every later step costs instructions for each of its keys,
so a block with many vectors a thread first drops those whose largest key does not reach the bound from their maxima.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import packed, ptx
from keysieve.kernels import local_topk_steps as steps
from keysieve.kernels import local_topk_window as window
from keysieve.kernels.local_topk_config import SIFTED


@cute.jit
def gather(row: Any, n: Int32, rank: Int32, shared: cutlass.Constexpr[bool]) -> Any:
    """This thread's keys of the row's part, and which they are: (key16 of vectors, 0 where no key is; their numbers;
    how many a thread, the block has; the block's largest key, 0 if that is not known; a multiple of 8 that `n` keys of
    the row reach, 0 if none is known; whether to look for one). shared: by all blocks of the cluster."""
    held = row.config.held
    words = steps.load_raw(row, Int32(0))
    vectors = [row.start + Int32(32 * step) for step in range(held)]
    rounds = row.rounds
    count = row.count
    top = Uint32(0)
    bound = Uint32(0)
    enough = n + (n >> Int32(3))
    bounded = row.count >= enough
    if cutlass.const_expr(held < 4):
        bounded = Boolean(False)  # finding one takes longer than it spares
    sifted = Boolean(False)
    if cutlass.const_expr(row.config.sifts):  # noqa: SIM102  # a trace-time test, then a run-time one
        if row.whole >= enough and row.share > Int32(2 * row.config.threads):  # the same in all blocks of the cluster
            bounded = Boolean(False)
            found, top, bound = list_reaching(row, words, n, rank, shared)
            if found <= Int32(SIFTED):
                sifted = Boolean(True)
                count = found
                rounds = (found + Int32(row.config.threads - 1)) // Int32(row.config.threads)
    if sifted:
        words, vectors = take_listed(row, rounds, count)
    for step in cutlass.range_constexpr(held):
        if window.has_round(row, step, rounds, count):
            made = steps.settle(row, words[4 * step : 4 * step + 4], vectors[step])
            for word in cutlass.range_constexpr(4):
                words[4 * step + word] = made[word]
    return words, vectors, rounds, count, top, bound, bounded


@cute.jit
def take_listed(row: Any, rounds: Int32, count: Int32) -> Any:
    """(This thread's words of the `count` vectors that were listed, 0 beyond; their numbers)."""
    held = row.config.held
    words = [Uint32(0) for _ in range(4 * held)]
    vectors = [row.vectors for _ in range(held)]
    first = row.warp * rounds * Int32(32) + row.lane
    for step in cutlass.range_constexpr(held):
        index = first + Int32(32 * step)
        if Int32(step) < rounds and index < count:
            vectors[step] = Int32(ptx.load_shared(row.list + Uint32(index) * Uint32(4)))
            loaded = ptx.load_shared_v4(row.maxima + Uint32(index) * Uint32(16))
            for word in cutlass.range_constexpr(4):
                words[4 * step + word] = loaded[word]
    return words, vectors


@cute.jit
def squeeze(row: Any, words: Any, vectors: Any, tops: Any, rounds: Int32, count: Int32, threshold: Uint32) -> Any:
    """(words, vectors, rounds, count) of those vectors with a key that reaches the threshold, in the same order; of all
    where that spares no round. tops: their largest keys. One block barrier, and another one where it does spare one."""
    held = row.config.held
    hits = Uint32(0)  # a byte for each vector
    for step in cutlass.range_constexpr(held):
        hits = hits | (Uint32(tops[step] >= threshold) << Uint32(8 * step))
    upto = Uint32(packed.warp_prefix(Int32(hits)))
    of_warp = Uint32(cute.arch.shuffle_sync(Int32(upto), Int32(31)))
    sums = [(of_warp >> Uint32(8 * step)) & Uint32(0xFF) for step in range(held)]
    before_word, found = steps.block_offsets(row, Int32(sums[0] + sums[1] + sums[2] + sums[3]), 1)
    fewer = (found + Int32(row.config.threads - 1)) // Int32(row.config.threads)
    if fewer < rounds and found <= Int32(SIFTED):
        before = Uint32(before_word)
        place = upto - hits
        for step in cutlass.range_constexpr(held):
            index = before + ((place >> Uint32(8 * step)) & Uint32(0xFF))
            store_vector(
                row.maxima + index * Uint32(16),
                row.list + index * Uint32(4),
                *words[4 * step : 4 * step + 4],
                Uint32(vectors[step]),
                hits & Uint32(1 << (8 * step)),
            )
            before = before + sums[step]
        cute.arch.sync_threads()
        rounds = fewer
        count = found
        words, vectors = take_listed(row, rounds, count)
    return words, vectors, rounds, count


@dsl_user_op
def store_vector(
    where: Uint32,
    number_at: Uint32,
    a: Uint32,
    b: Uint32,
    c: Uint32,
    d: Uint32,
    number: Uint32,
    wanted: Uint32,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Store a vector and its number if `wanted` is not 0: no branch."""
    text = (
        "{ .reg .pred p; setp.ne.u32 p, $7, 0; @p st.shared.v4.b32 [$0], {$2, $3, $4, $5}; @p st.shared.b32 [$1], $6; }"
    )
    ptx.asm(text, "r,r,r,r,r,r,r,r", (), (where, number_at, a, b, c, d, number, wanted), loc=loc, ip=ip)


@cute.jit
def list_reaching(row: Any, raw: Any, n: Int32, rank: Int32, shared: cutlass.Constexpr[bool]) -> Any:
    """List the vectors whose largest key reaches the bound, in index order, if there is a bound and room for them;
    returns (their number, or more than there is room for; the block's largest key; the bound). Three block barriers."""
    held = row.config.held
    tops = [Uint32(0) for _ in range(held)]
    most = Uint32(0)
    for step in cutlass.range_constexpr(held):
        if window.has_round(row, step, row.rounds, row.count):
            one = row.start + Int32(32 * step)
            if one * Int32(8) + Int32(8) > row.end:
                for word in cutlass.range_constexpr(4):
                    inside = packed.inside_mask(one * Int32(8) + Int32(2 * word), Int32(0), row.end)
                    raw[4 * step + word] = raw[4 * step + word] | (inside ^ Uint32(0xFFFFFFFF))  # NaN: no maximum
            tops[step] = packed.foreign_top(raw[4 * step : 4 * step + 4])
            window.count_top(row, tops[step])
            if tops[step] > most:
                most = tops[step]
    row.mark(1)
    top = Uint32(0)
    bound = Uint32(0)
    if cutlass.const_expr(shared):
        top, bound = window.find_top_shared(row, most, n, rank)
    else:
        top = window.block_top(row, most)
        bound = window.bound_of(top, packed.warp_prefix(window.bin_below(row, top)), n, Uint32(0))
    row.mark(2)
    if bound < Uint32(64):  # NaNs and what is no vector are below
        bound = Uint32(0)
    total = Int32(0)
    votes = [Uint32(0) for _ in range(held)]
    for step in cutlass.range_constexpr(held):
        if window.has_round(row, step, row.rounds, row.count):
            votes[step] = Uint32(cute.arch.vote_ballot_sync(tops[step] >= bound))
            total = total + Int32(cute.arch.popc(votes[step]))
    before, found = steps.block_offsets(row, total, 1)
    if bound == Uint32(0):
        found = Int32(SIFTED + 1)
    if found <= Int32(SIFTED):
        below = ptx.lanes_below()
        for step in cutlass.range_constexpr(held):
            if window.has_round(row, step, row.rounds, row.count):
                place = Uint32(before + Int32(cute.arch.popc(votes[step] & below)))
                if tops[step] >= bound:
                    ptx.store_shared_v4(row.maxima + place * Uint32(16), *raw[4 * step : 4 * step + 4])
                    ptx.store_shared(row.list + place * Uint32(4), Uint32(row.start + Int32(32 * step)))
                before = before + Int32(cute.arch.popc(votes[step]))
        cute.arch.sync_threads()
    row.mark(3)
    return found, top, bound
