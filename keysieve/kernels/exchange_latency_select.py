"""Selection of the merge's latency form, over words in registers: threshold, cut among equal keys, saturated ranks.

Keys are counted by their lower 11 bits, which tell them apart where they spread over fewer than 2,048 values. Lists are
their sources' best, so few keys lie below the threshold: one warp looks for it from the least key up. Where it is not
there the block looks everywhere; where bins have several keys they are counted again, by distance from the least one,
and a second histogram splits the threshold's bin. All threads of the block call these functions together.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from keysieve.device import packed, ptx, scan
from keysieve.kernels import exchange_latency as arrival
from keysieve.kernels import exchange_lists as row_lists
from keysieve.kernels.exchange_lists import FOUND_BIN, FOUND_CUT, FOUND_NONE, FOUND_TIES, ID_MAX
from keysieve.kernels.exchange_select import find_bin
from keysieve.kernels.local_topk_kept import lane_bin

FEW = 128
"""Equal keys up to which they are ranked against each other, a warp for each; more are selected by digits of ids."""

_LOW_BINS = 32
_TOP = 12
"""Words of `found`, this one and the next: the largest and the smallest key."""


@cute.jit
def count_keys(share: Any, words: Any) -> None:
    """All live entries' keys counted by their lower 11 bits, and what the warps' largest and smallest keys are. The
    histogram is clear: a block barrier lies behind `clear`; another must follow."""
    lists = share.lists
    most = Uint32(0)  # largest key, and 0xFFFF less the smallest
    for half in cutlass.range_constexpr(2 * share.rounds):
        key = words[half] >> Uint32(16)
        place = lists.high + (key & Uint32(row_lists.BINS - 1)) * Uint32(4)
        if key == Uint32(0):  # a word that counts what has no key: no branch
            place = lists.note(FOUND_NONE)
        ptx.red_shared(place, Uint32(1), "add")
        both = (key | ((Uint32(0xFFFF) - key) << Uint32(16))) * Uint32(key != Uint32(0))
        most = ptx.max_u16x2(most, both)
    top = scan.warp_max_u32(most & Uint32(0xFFFF))
    bottom = scan.warp_max_u32(most >> Uint32(16))
    if share.lane == Int32(0):
        ptx.store_shared(lists.counts + Uint32(share.warp) * Uint32(4), top | (bottom << Uint32(16)))


@cute.jit
def search_near(share: Any) -> None:
    """The last warp: note (threshold, how many equal keys are taken, how many there are, 1), or 0 in the last place if
    the threshold is not among the 256 keys from the least one on (a multiple of eight in its place); and the largest
    and the smallest key. Eight bins a lane, from below."""
    lists = share.lists
    both = Uint32(0)
    if share.lane < Int32(warps_of(lists)):
        both = ptx.load_shared(lists.counts + Uint32(share.lane) * Uint32(4))
    none = Int32(ptx.load_shared(lists.note(FOUND_NONE)))
    bottom = Uint32(0xFFFF) - scan.warp_max_u32(both >> Uint32(16))
    top = scan.warp_max_u32(both & Uint32(0xFFFF))
    excess = Int32(2 * share.rounds * lists.config.threads) - none - lists.k  # so many live entries are not taken
    lowest = (bottom & Uint32(0xFFF8)) + Uint32(share.lane) * Uint32(8)
    place = lists.high + (lowest & Uint32(row_lists.BINS - 1)) * Uint32(4)
    bins = [*ptx.load_shared_v4(place), *ptx.load_shared_v4(place + Uint32(16))]
    wanted = Uint32(excess + Int32(1))
    reach, step, below, equal = lane_bin(bins[::-1], wanted)
    apart = (top | Uint32(3)) - (bottom & Uint32(0xFFF8)) < Uint32(row_lists.BINS)
    votes = Uint32(cute.arch.vote_ballot_sync(reach >= wanted and apart and excess >= Int32(0)))
    if share.lane == (packed.lowest_bit(votes) & Int32(31)):
        found = Uint32(votes != Uint32(0))
        threshold = lowest + Uint32(7) - Uint32(step)
        need = below + equal - Uint32(excess)
        near = found | Uint32(excess < Int32(0))
        ptx.store_shared_v4(lists.note(FOUND_BIN), threshold * found, need * found, equal * found, near)
        packed.store_shared_v2(lists.note(_TOP), top, bottom * Uint32(top != Uint32(0)))


@cute.jit
def found_near(share: Any, words: Any) -> Any:
    """(Threshold key, keys of it that are taken, keys equal to it); threshold 0 takes everything. A block barrier lies
    behind `search_near`."""
    threshold, need, equal, near = ptx.load_shared_v4(share.lists.note(FOUND_BIN))
    need, equal = Int32(need), Int32(equal)
    if near == Uint32(0):
        top, bottom = packed.load_shared_v2(share.lists.note(_TOP))
        threshold, need, equal = search_counted(share, words, top, bottom)
    return threshold, need, equal


@cute.jit
def search_counted(share: Any, words: Any, top: Uint32, bottom: Uint32) -> Any:
    """(threshold key, keys of it that are taken, keys equal to it) from what `count_keys` left; threshold 0 takes
    everything."""
    lists = share.lists
    shift = Uint32(0)
    upper = top | Uint32(3)
    if upper - bottom >= Uint32(row_lists.BINS):  # bins have several keys: they are counted again, by distance
        upper = Uint32(row_lists.BINS - 1)
        shift = packed.highest_bit((top - bottom) | Uint32(row_lists.BINS)) - Uint32(10)
        row_lists.clear_high(lists)
        cute.arch.sync_threads()
        for half in cutlass.range_constexpr(2 * share.rounds):
            if words[half] != Uint32(0):
                scan.histogram_add(lists.high, ((words[half] >> Uint32(16)) - bottom) >> shift)
        cute.arch.sync_threads()
    digit, above, equal = find_bin(lists, lists.k, upper)
    threshold = digit
    if shift != Uint32(0):
        threshold = bottom + (digit << shift)
    need = lists.k - above
    if need > equal:  # fewer than K entries are live
        threshold = Uint32(0)
        need = Int32(0)
        equal = Int32(0)
    if shift != Uint32(0) and threshold != Uint32(0):
        for half in cutlass.range_constexpr(2 * share.rounds):
            distance = (words[half] >> Uint32(16)) - bottom
            if words[half] != Uint32(0) and (distance >> shift) == digit:
                scan.histogram_add(lists.low, distance - (digit << shift))
        cute.arch.sync_threads()
        bin_of_lane = Int32(_LOW_BINS - 1) - share.lane
        count = Int32(ptx.load_shared(lists.low + Uint32(bin_of_lane) * Uint32(4)))
        upto = packed.warp_prefix(count)
        votes = Uint32(cute.arch.vote_ballot_sync(upto >= need))
        owner = packed.lowest_bit(votes)
        equal = Int32(cute.arch.shuffle_sync(count, owner))
        need = need - (Int32(cute.arch.shuffle_sync(upto, owner)) - equal)
        threshold = threshold + Uint32(Int32(_LOW_BINS - 1) - owner)
    return threshold, need, equal


@cute.jit
def id_at(share: Any, words: Any, uppers: Any, half: Int32) -> Uint32:
    """Global position of this thread's live entry `half`, known at run time."""
    word = words[0]
    upper = uppers[0]
    source = share.sources[0]
    for other in cutlass.range_constexpr(1, 2 * share.rounds):
        if half == Int32(other):
            word = words[other]
            upper = uppers[other // 2]
            source = share.sources[other // 2]
    upper = upper >> (Uint32(half & Int32(1)) << Uint32(4))
    local = ((word & Uint32(0xFFFF)) ^ Uint32(0xFFFF)) | (upper << Uint32(16))
    return row_lists.global_position(share.lists, source, local)


@cute.jit
def choose_entries(share: Any, words: Any, uppers: Any, found: Any, length: Int32) -> Uint32:
    """Bit h set where this thread's entry h is among the K best. length: above every id."""
    threshold, need, equal = found
    chosen = Uint32(0)
    same = Uint32(0)
    for half in cutlass.range_constexpr(2 * share.rounds):
        key = words[half] >> Uint32(16)
        chosen = chosen | (Uint32(key > threshold) << Uint32(half))
        same = same | (Uint32(key == threshold) << Uint32(half))
    same = same * Uint32(threshold != Uint32(0))
    if equal > need:
        first = Uint32(ID_MAX)  # this thread's first id, if it is known
        if equal <= Int32(FEW):
            first = list_few(share, words, uppers, same)
            cute.arch.sync_threads()
            rank_few(share, need)
        else:
            digit_many(share, words, uppers, same, need, length)
        cute.arch.sync_threads()
        cut = ptx.load_shared(share.lists.note(FOUND_CUT))
        left = same
        if first != Uint32(ID_MAX):
            left = same & (same - Uint32(1))
            if first > cut:
                same = left
        while left != Uint32(0):
            half = packed.lowest_bit(left)
            left = left & (left - Uint32(1))
            if id_at(share, words, uppers, half) > cut:
                same = same ^ (Uint32(1) << Uint32(half))
    return chosen | same


@cute.jit
def list_few(share: Any, words: Any, uppers: Any, same: Uint32) -> Uint32:
    """List the ids of the entries in the masks; the first one of this thread. A block barrier must follow."""
    lists = share.lists
    first = Uint32(ID_MAX)
    left = same
    place = lists.ties
    if same != Uint32(0):
        place = lists.ties + ptx.atom_shared(lists.note(FOUND_TIES), Uint32(cute.arch.popc(same)), "add") * Uint32(4)
    while left != Uint32(0):
        one = id_at(share, words, uppers, packed.lowest_bit(left))
        if left == same:
            first = one
        left = left & (left - Uint32(1))
        ptx.store_shared(place, one)
        place = place + Uint32(4)
    return first


@cute.jit
def rank_few(share: Any, need: Int32) -> None:
    """Note the `need`-th smallest of the listed ids, at most FEW: a warp counts the smaller ones of each."""
    lists = share.lists
    ties = Int32(ptx.load_shared(lists.note(FOUND_TIES)))
    others = [Uint32(ID_MAX) for _ in range(FEW // 32)]
    for part in cutlass.range_constexpr(FEW // 32):
        if share.lane + Int32(32 * part) < ties:
            others[part] = ptx.load_shared(lists.ties + Uint32(share.lane + Int32(32 * part)) * Uint32(4))
    for tie in cutlass.range(lists.thread >> Int32(5), ties, lists.config.threads // 32, unroll=1):
        mine = ptx.load_shared(lists.ties + Uint32(tie) * Uint32(4))
        smaller = Int32(0)
        for part in cutlass.range_constexpr(FEW // 32):
            smaller = smaller + Int32(cute.arch.popc(cute.arch.vote_ballot_sync(others[part] < mine)))
        if smaller == need - Int32(1) and share.lane == Int32(0):
            ptx.store_shared(lists.note(FOUND_CUT), mine)


@cute.jit
def digit_many(share: Any, words: Any, uppers: Any, same: Uint32, need: Int32, length: Int32) -> None:
    """Note the `need`-th smallest of any number of ids below `length`: digits of 11 bits, the highest first."""
    lists = share.lists
    shift = Uint32(0)
    if (length >> Int32(11)) != Int32(0):
        shift = packed.highest_bit(Uint32(length) >> Uint32(11)) + Uint32(1)
    prefix = Uint32(0)
    before = shift + Uint32(11)
    left = need
    searching = Boolean(True)
    while searching:
        cute.arch.sync_threads()
        row_lists.clear_high(lists)
        cute.arch.sync_threads()
        for half in cutlass.range_constexpr(2 * share.rounds):
            one = arrival.id_of(share, words[half], uppers, half)
            if (same & Uint32(1 << half)) != Uint32(0) and (one >> before) == prefix:
                digit = (one >> shift) & ((Uint32(1) << (before - shift)) - Uint32(1))
                scan.histogram_add(lists.high, Uint32(2047) - digit)  # the largest bin is found first
        cute.arch.sync_threads()
        reverse, above, _equal = find_bin(lists, left, Uint32(row_lists.BINS - 1))
        left = left - above
        prefix = (prefix << (before - shift)) | (Uint32(2047) - reverse)
        searching = shift != Uint32(0)
        before = shift
        lower = Int32(shift) - Int32(11)
        shift = Uint32(lower * Int32(lower > Int32(0)))
    if lists.thread == Int32(0):
        ptx.store_shared(lists.note(FOUND_CUT), prefix)


@cute.jit
def count_chosen(share: Any, chosen: Uint32) -> Any:
    """(chosen entries of the block's lower warps; of this rank's own list: those of lower warps, all of them; mask of
    the sources that have an entry, perhaps an empty one, that is not chosen). One block barrier."""
    lists = share.lists
    own = Uint32(0)
    refused = Uint32(0)
    for part in cutlass.range_constexpr(share.rounds):
        left = ((share.entries & (chosen ^ Uint32(0xFFFFFFFF))) >> Uint32(2 * part)) & Uint32(3)
        own = own | (Uint32(share.mine(part)) * Uint32(3 << (2 * part)))
        refused = refused | (Uint32(left != Uint32(0)) << Uint32(share.sources[part] & Int32(31)))
    both = Int32(cute.arch.popc(chosen)) | (Int32(cute.arch.popc(chosen & own)) << Int32(16))
    both = scan.warp_sum(both)
    refused = Uint32(cute.arch.warp_redux_sync(refused, "or"))
    if share.lane == Int32(0):
        packed.store_shared_v2(lists.sums + Uint32(share.warp) * Uint32(8), Uint32(both), refused)
    cute.arch.sync_threads()
    row_lists.note_clock(lists, 8)
    word = Uint32(0)
    refused = Uint32(0)
    if share.lane < Int32(lists.config.threads // 32):
        word, refused = packed.load_shared_v2(lists.sums + Uint32(share.lane) * Uint32(8))
    before = scan.warp_sum(Int32(word) * Int32(share.lane < share.warp))
    owned = scan.warp_sum(Int32(word >> Uint32(16)))
    refused = Uint32(cute.arch.warp_redux_sync(refused, "or"))
    return before & Int32(0xFFFF), before >> Int32(16), owned, refused


def warps_of(lists: Any) -> int:
    """Warps of the block."""
    return int(lists.config.threads // 32)
