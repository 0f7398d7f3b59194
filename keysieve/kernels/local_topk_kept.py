"""Vectors of a row's part that have a key which reaches a guessed floor: listed, and their keys counted from it on.

Keys are looked at as BF16 bits, which are ordered as signed numbers as long as one side of a comparison is not
negative: with such a floor, only keys that reach it matter. With a negative one, vectors are told by their smallest
bits as unsigned numbers (a negative number's are larger than any other's, and the larger the farther from zero), and
the keys of those listed are brought into the order of signed numbers. A *turn* is what either is compared with: (the
floor less one in that order, in both halves; its negative; 1 where the floor is negative). A warp works on its own run
of vectors alone, in its own places of shared memory, so that index order is (warp, place).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import exchange_cluster, packed, ptx
from keysieve.kernels.local_topk_config import NARROW

NO_KEYS = 0xFFFFFFFF
"""Bits of two places without a key: as signed numbers they reach no floor that is not negative, as unsigned ones
none."""

NOTHING = 0x80008000
"""Less than any key in the order of signed numbers."""


def turn_of(below: Uint32, negative: Any) -> Any:
    """The turn of a floor that is one more than key16 `below`."""
    least = below ^ Uint32(0x8000)
    minus = (Uint32(0) - least) & Uint32(0xFFFF)
    return least * Uint32(0x10001), minus * Uint32(0x10001), Int32(negative)


def places_of(row: Any) -> Uint32:
    """This warp's places of vectors."""
    return row.kept + Uint32(row.warp) * Uint32(16 * 32 * row.config.held)


def landed_of(row: Any) -> Uint32:
    """The mbarrier of this warp's vectors."""
    return row.landed + Uint32(row.warp) * Uint32(8)


@dsl_user_op
def prepare(barrier: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Make an mbarrier that one thread arrives at, for bulk copies that the block asks for."""
    ptx.asm("mbarrier.init.shared.b64 [$0], 1;", "r", (), (barrier,), loc=loc, ip=ip)


def inside(words: Any, one: Int32, end: Int32) -> list[Any]:
    """The keys of vector `one` that lie below `end`, `NO_KEYS` for the others."""
    masks = [packed.inside_mask(one * Int32(8) + Int32(2 * index), Int32(0), end) for index in range(4)]
    return [word | (mask ^ Uint32(NO_KEYS)) for word, mask in zip(words, masks, strict=True)]


def lane_bin(bins: Any, wanted: Uint32) -> Any:
    """Whole warp: (the sum of this lane's bins and of those of the lanes before it; if the `wanted`-th from the top is
    in one of this lane's eight, the last of them the highest, which one; the number in higher bins; in that one). Words
    with a number in the upper half and something else in the lower are looked at by `wanted` in the upper half."""
    pairs = [bins[2 * i] + bins[2 * i + 1] for i in range(4)]
    upper = pairs[2] + pairs[3]
    mine = pairs[0] + pairs[1] + upper
    upto = Uint32(packed.warp_prefix(Int32(mine)))
    above = upto - mine
    more = above + upper < wanted
    place = _select(more, Int32(0), Int32(4))
    above = _select(more, above + upper, above)
    pair = _select(more, pairs[1], pairs[3])
    ones = [_select(more, bins[1], bins[5]), _select(more, bins[3], bins[7])]
    lows = [_select(more, bins[0], bins[4]), _select(more, bins[2], bins[6])]
    more = above + pair < wanted
    place = _select(more, place, place + Int32(2))
    above = _select(more, above + pair, above)
    one = _select(more, ones[0], ones[1])
    low = _select(more, lows[0], lows[1])
    more = above + one < wanted
    place = _select(more, place, place + Int32(1))
    above = _select(more, above + one, above)
    return upto, place, above, _select(more, low, one)


def _select(condition: Any, yes: Any, no: Any) -> Any:
    return cutlass.select_(condition, yes, no)


@cute.jit
def keep_reaching(row: Any, sampled: Any, asked: Int32, turn: Any) -> Int32:
    """List which of this warp's vectors have a key that reaches the floor, in index order; returns their number. List
    and vectors are visible to the warp then. Loads are asked for together, and so are votes."""
    held = row.config.held
    least, _minus, negative = turn
    number = row.numbers + Uint32(row.warp) * Uint32(32 * held)
    own = places_of(row) + Uint32(row.lane) * Uint32(16)
    best = [Uint32(0) for _ in range(held)]
    land(row, sampled, asked)
    if negative == Int32(0):
        best[0] = largest(sampled)
        for step in cutlass.range_constexpr(1, held):  # what lies in places without a vector is not looked at
            best[step] = largest(ptx.load_shared_v4(own + Uint32(512 * step)))
    else:
        best[0] = smallest(sampled) ^ Uint32(0x7FFF7FFF)
        for step in cutlass.range_constexpr(1, held):
            best[step] = smallest(ptx.load_shared_v4(own + Uint32(512 * step))) ^ Uint32(0x7FFF7FFF)
    if row.rounds < Int32(held) or row.start - row.lane + Int32(32 * held) > row.vectors:
        for step in cutlass.range_constexpr(1, held):
            if Int32(step) >= row.rounds or row.start + Int32(32 * step) >= row.vectors:
                best[step] = Uint32(NOTHING)
    votes = [_reaching(one, least) for one in best]
    below = ptx.lanes_below()
    hits = Uint32(0)
    for step in cutlass.range_constexpr(held):
        _note(number + hits, votes[step], below, Uint32(row.lane) + Uint32(32 * step))
        hits = hits + Uint32(cute.arch.popc(votes[step]))
    cute.arch.sync_warp()
    return Int32(hits)


@cute.jit
def land(row: Any, sampled: Any, asked: Int32) -> None:
    """Until all of this warp's vectors are in their places, `NO_KEYS` past the row's end. Visible to the warp."""
    place = places_of(row)
    ptx.store_shared_v4(place + Uint32(row.lane) * Uint32(16), *sampled)
    if asked > Int32(0):
        exchange_cluster.receive(landed_of(row))
        last = (row.end >> Int32(3)) - (row.start - row.lane)  # its place among the warp's, if the row's end cuts it
        cut = (row.end & Int32(7)) != Int32(0) and last >= Int32(32) and last < row.rounds * Int32(32)
        if cut and row.lane == Int32(0):
            where = place + Uint32(last) * Uint32(16)
            made = inside(ptx.load_shared_v4(where), row.end >> Int32(3), row.end)
            ptx.store_shared_v4(where, *made)
    cute.arch.sync_warp()


def largest(words: Any) -> Uint32:
    """The largest of each half of four words, as signed numbers."""
    return max_s16x2(max_s16x2(words[0], words[1]), max_s16x2(words[2], words[3]))


def smallest(words: Any) -> Uint32:
    """The smallest of each half of four words, as unsigned numbers."""
    return packed.min_u16x2(packed.min_u16x2(words[0], words[1]), packed.min_u16x2(words[2], words[3]))


def larger_half(word: Uint32) -> Uint32:
    return max_s16x2(word, word >> Uint32(16)) & Uint32(0xFFFF)


def smaller_half(word: Uint32) -> Uint32:
    return packed.min_u16x2(word, word >> Uint32(16)) & Uint32(0xFFFF)


@cute.jit
def load_kept(row: Any, index: Int32, hits: Int32, turn: Any) -> Any:
    """(Of the warp's listed vector `index`, how far every key lies above the floor less one, 0 below and beyond the
    last; its place among the warp's)."""
    least, minus, negative = turn
    words = [Uint32(NO_KEYS) for _ in range(4)]
    number = Uint32(0)
    if index < hits:
        number = packed.load_shared_u8(row.numbers + Uint32(row.warp * Int32(32 * row.config.held) + index))
        loaded = ptx.load_shared_v4(places_of(row) + number * Uint32(16))
        for word in cutlass.range_constexpr(4):
            words[word] = loaded[word]
    if negative != Int32(0):
        for word in cutlass.range_constexpr(4):
            words[word] = words[word] ^ (packed.sign_mask_x2(words[word]) & Uint32(0x7FFF7FFF))
    for word in cutlass.range_constexpr(4):
        words[word] = add_u16x2(max_s16x2(words[word], least), minus)
    return words, number


@cute.jit
def count_kept(row: Any, hits: Int32, turn: Any, shift: Int32) -> Any:
    """Count the keys of this warp's vectors in bins of 2^shift distances, the last one taking what lies beyond.
    Returns the distances and the places of this lane's first two vectors."""
    first, number = load_kept(row, row.lane, hits, turn)
    count_distances(row, first, shift)
    second = [Uint32(0) for _ in range(4)]
    second_number = Uint32(0)
    if hits > Int32(32):
        loaded, second_number = load_kept(row, row.lane + Int32(32), hits, turn)
        for word in cutlass.range_constexpr(4):
            second[word] = loaded[word]
        count_distances(row, second, shift)
    for index in cutlass.range(Int32(64) + row.lane, hits + row.lane, 32, unroll=1):
        more, _number = load_kept(row, index, hits, turn)
        count_distances(row, more, shift)
    return first, second, number, second_number


@cute.jit
def count_distances(row: Any, distances: Any, shift: Int32) -> None:
    """Count eight distances: bin 0 has those of 0, bin b those from 2^shift (b - 1) + 1 to 2^shift b."""
    if shift == Int32(0):
        for word in cutlass.range_constexpr(4):
            places = packed.min_u16x2(distances[word], Uint32((NARROW - 1) * 0x10001)) * Uint32(4)
            ptx.red_shared(row.narrow + (places & Uint32(0xFFFF)), Uint32(1), "add")
            ptx.red_shared(row.narrow + (places >> Uint32(16)), Uint32(1), "add")
    else:
        round_up = (Uint32(1) << Uint32(shift)) - Uint32(1)
        for word in cutlass.range_constexpr(4):
            for half in cutlass.range_constexpr(2):
                distance = (distances[word] >> Uint32(16 * half)) & Uint32(0xFFFF)
                place = packed.min_u32((distance + round_up) >> Uint32(shift), Uint32(NARROW - 1))
                ptx.red_shared(row.narrow + place * Uint32(4), Uint32(1), "add")


@cute.jit
def send_narrow(row: Any, narrow: Uint32, gathered: Uint32, arrival: Uint32, rank: Int32) -> None:
    """One warp: this block's counts to both blocks, eight of a lane, lane 0's the highest. They are visible."""
    lowest = narrow + (Uint32(NARROW - 8) - Uint32(8) * Uint32(row.lane)) * Uint32(4)
    bins = [*ptx.load_shared_v4(lowest), *ptx.load_shared_v4(lowest + Uint32(16))]
    words = [bins[2 * i] | (bins[2 * i + 1] << Uint32(16)) for i in range(4)]
    place = gathered + Uint32(rank) * Uint32(2 * NARROW) + Uint32(row.lane) * Uint32(16)
    for block in cutlass.range_constexpr(row.config.cluster):
        exchange_cluster.send_v4(place, *words, arrival, Uint32(block))


@cute.jit
def find_narrow(
    row: Any, gathered: Uint32, arrival: Uint32, n: Int32, rank: Int32, exact: cutlass.Constexpr[bool]
) -> None:
    """One warp: when both blocks' counts are there, note (the bin of the `n`-th from the top, 0 if that is none; keys
    in higher bins; keys in higher bins, and in that one, of the block before this one). exact: all bins count, and one
    of them is it; else the first, of what does not reach the guess, does not, and the last is none, as it has no end.

    The sums over both blocks and the first one's are halves of a word. A sum of 2^16, of a whole row, is lost: none is
    found then."""
    exchange_cluster.receive(arrival)
    place = gathered + Uint32(row.lane) * Uint32(16)
    first = ptx.load_shared_v4(place)
    second = ptx.load_shared_v4(place + Uint32(2 * NARROW))
    bins = []
    for word in cutlass.range_constexpr(4):
        low = first[word] & Uint32(0xFFFF)
        bins.append(low * Uint32(0x10001) + (second[word] << Uint32(16)))
        high = first[word] >> Uint32(16)
        bins.append(high * Uint32(0x10001) + (second[word] & Uint32(0xFFFF0000)))
    if cutlass.const_expr(not exact):  # noqa: SIM102  # a trace-time test, then a run-time one
        if row.lane == Int32(31):
            bins[0] = Uint32(0)
    wanted = Uint32(n) << Uint32(16)
    reach, digit, above, inside = lane_bin(bins, wanted)
    votes = Uint32(cute.arch.vote_ballot_sync(reach >= wanted))
    digit = digit + Int32(NARROW - 8) - Int32(8) * row.lane
    if cutlass.const_expr(not exact):
        digit = digit * Int32(digit < Int32(NARROW - 1)) * Int32(votes != Uint32(0))
    if row.lane == (packed.lowest_bit(votes) & Int32(31)):
        of_first = Uint32(0xFFFF) * Uint32(rank > Int32(0))  # if this is the second
        ptx.store_shared_v4(row.found, Uint32(digit), above >> Uint32(16), above & of_first, inside & of_first)


def halves(words: Any) -> list[Uint32]:
    """The halves of words, the lower one first."""
    return [(word >> Uint32(16 * half)) & Uint32(0xFFFF) for word in words for half in range(2)]


@dsl_user_op
def max_s16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Lane-wise signed maximum of two 16-bit halves: one instruction on sm_90 and later."""
    return ptx.asm("max.s16x2 $0, $1, $2;", "=r,r,r", (Uint32,), (a, b), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def add_u16x2(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Lane-wise sum of two 16-bit halves: one instruction on sm_90 and later."""
    return ptx.asm("add.u16x2 $0, $1, $2;", "=r,r,r", (Uint32,), (a, b), pure=True, loc=loc, ip=ip)[0]


@dsl_user_op
def _reaching(best: Uint32, least: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Whole warp: the lanes in which a half of `best` is above `least`."""
    text = (
        "{ .reg .pred p; .reg .b32 t; max.s16x2 t, $1, $2; setp.ne.u32 p, t, $2;"
        " vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    )
    return ptx.asm(text, "=r,r,r", (Uint32,), (best, least), loc=loc, ip=ip)[0]


@dsl_user_op
def _note(place: Uint32, votes: Uint32, below: Uint32, number: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Whole warp: store the numbers of the lanes in `votes`, a byte each, from `place` on. No branch."""
    text = (
        "{ .reg .pred p; .reg .b32 i, b; add.u32 b, $2, 1; and.b32 b, b, $1; setp.ne.u32 p, b, 0; and.b32 i, $1, $2;"
        " popc.b32 i, i; add.u32 i, i, $0; @p st.shared.u8 [i], $3; }"
    )
    ptx.asm(text, "r,r,r,r", (), (place, votes, below, number), loc=loc, ip=ip)
