"""The second round of a row: a saturated rank's local top-K to every rank, and everybody's wait for those lists.

The rank's own logits are read again (they are kept until the next call's scorer, which waits for this merge). Only keys
that reach the first round's threshold can win, so only those are counted; the list may therefore be shorter than K, and
its unused entries are empty.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from keysieve.device import keys, packed, ptx, scan
from keysieve.kernels import exchange_lists as row_lists
from keysieve.kernels import exchange_select as choose
from keysieve.kernels import exchange_words as arrival
from keysieve.kernels.exchange_lists import FOUND_ABOVE, FOUND_THRESHOLD

GROUP = 8
"""Keys of a 16-byte vector of logits."""

HELD = 4
"""Vectors of a thread whose loads are issued together."""


@cute.jit
def second_round(
    lists: Any,
    wait: Any,
    saturated: Uint32,
    logits: Int64,
    length: Int32,
    peers: Int64,
    recv: Int64,
    arrived: Int64,
    max_rows: Int32,
    recv_pitch: Int32,
    rescued: Int32,
    seq2: Int64,
    row: Int32,
) -> None:
    """Exchange second lists, and describe them in place of the saturated ranks' first ones. length: this rank's."""
    lane = lists.thread & Int32(31)
    blocks = Int64(0)
    if lane < lists.world:
        blocks = ptx.load(peers + Int64(lane) * Int64(8), Int64)
    number = ptx.load(seq2 + Int64(row) * Int64(8), Int64) + Int64(1)
    if ((saturated >> Uint32(lists.rank)) & Uint32(1)) != Uint32(0):
        below = (Uint32(1) << Uint32(lists.rank)) - Uint32(1)
        index = Int32(cute.arch.popc(saturated & below))
        threshold = ptx.load_shared(lists.note(FOUND_THRESHOLD))
        make_list(lists, logits, length, threshold)
        place = recv + (Int64(row) * Int64(rescued) + Int64(index)) * Int64(recv_pitch) * Int64(4)
        send_list(lists, blocks, place)
        cute.arch.sync_threads()  # the release below covers what every thread has sent: it is cumulative
        if lists.thread < lists.world:
            flag = arrived + (Int64(lists.rank) * Int64(max_rows) + Int64(row)) * Int64(8)
            ptx.store(blocks + flag, number, "release", "sys")
    mine = block_of(blocks, lists.rank)
    bit = Uint32(1) << Uint32(lane)
    if lists.thread < lists.world and (saturated & bit) != Uint32(0):
        flag = mine + arrived + (Int64(lane) * Int64(max_rows) + Int64(row)) * Int64(8)
        arrival.wait_flag(wait, flag, number, Uint32(lane))
        index = Int32(cute.arch.popc(saturated & (bit - Uint32(1))))
        place = recv + (Int64(row) * Int64(rescued) + Int64(index)) * Int64(recv_pitch) * Int64(4)
        row_lists.describe(lists, lane, mine + place, Int32(4), lists.k)
    if lists.thread == Int32(0):
        ptx.store(seq2 + Int64(row) * Int64(8), number)
    cute.arch.sync_threads()


def block_of(blocks: Int64, source: Int32) -> Int64:
    """What lane `source` has in `blocks`."""
    low = Uint32(cute.arch.shuffle_sync(Uint32(blocks & Int64(0xFFFFFFFF)), source))
    high = Uint32(cute.arch.shuffle_sync(Uint32((blocks >> Int64(32)) & Int64(0xFFFFFFFF)), source))
    return Int64(low) | (Int64(high) << Int64(32))


@cute.jit
def load_keys(logits: Int64, group: Int32, length: Int32, least: Uint32) -> Any:
    """Eight key16 of a row, 0 for those beyond its length or below `least`."""
    words = [Uint32(0) for _ in range(4)]
    if group * Int32(GROUP) < length:
        loaded = ptx.load_v4(logits + Int64(group) * Int64(16))
        for part in cutlass.range_constexpr(4):
            words[part] = keys.key16x2(loaded[part])
    found = [Uint32(0) for _ in range(GROUP)]
    for part in cutlass.range_constexpr(GROUP):
        key = (words[part // 2] >> Uint32(16 * (part % 2))) & Uint32(0xFFFF)
        inside = Uint32(group * Int32(GROUP) + Int32(part) < length) * Uint32(key >= least)
        found[part] = key * inside
    return found


@cute.jit
def make_list(lists: Any, logits: Int64, length: Int32, least: Uint32) -> None:
    """The row's first K keys of at least `least`, as candidate words in `winners`, index planes behind them. Ends with
    a block barrier."""
    vectors = (length + Int32(GROUP - 1)) >> Int32(3)
    rounds = (vectors + Int32(lists.config.threads - 1)) // Int32(lists.config.threads)
    cute.arch.sync_threads()  # everybody has read what is cleared now
    row_lists.clear(lists)
    clear_list(lists)
    cute.arch.sync_threads()
    if cutlass.const_expr(lists.config.rounds > 0):
        # Seldom do more than K keys reach the first round's threshold: then they are the list.
        reaching = list_reaching(lists, logits, length, least + Uint32(least == Uint32(0)), rounds)
        if reaching > lists.k:
            make_long_list(lists, logits, length, least, vectors)
    else:
        make_long_list(lists, logits, length, least, vectors)


@cute.jit
def clear_list(lists: Any) -> None:
    """Zero the list to be made, planes included; a block barrier must follow."""
    words = lists.k + lists.planes * ((lists.k + Int32(31)) >> Int32(5))
    for vector in cutlass.range(lists.thread, (words + Int32(3)) >> Int32(2), lists.config.threads, unroll=1):
        ptx.store_shared_v4(lists.winners + Uint32(vector) * Uint32(16), Uint32(0), Uint32(0), Uint32(0), Uint32(0))


def first_vector(lists: Any, rounds: Int32) -> Int32:
    """Of the contiguous run of vectors that this thread's warp owns, this lane's first."""
    return (lists.thread >> Int32(5)) * rounds * Int32(32) + (lists.thread & Int32(31))


@cute.jit
def list_reaching(lists: Any, logits: Int64, length: Int32, least: Uint32, rounds: Int32) -> Int32:
    """List all keys of at least `least` (1 or more) in ascending index, if there are not more than K; returns how many
    they are. Ends with a block barrier if they were listed."""
    lane, warp = lists.thread & Int32(31), lists.thread >> Int32(5)
    first = first_vector(lists, rounds)
    words = load_held(logits, first, Int32(0), rounds, length)
    count = Int32(0)
    for part in cutlass.range_constexpr(HELD):
        count = count + Int32(cute.arch.popc(reach_x8(words[4 * part : 4 * part + 4], least)))
    for start in cutlass.range(HELD, rounds, HELD, unroll=1):
        more = load_held(logits, first, Int32(start), rounds, length)
        for part in cutlass.range_constexpr(HELD):
            count = count + Int32(cute.arch.popc(reach_x8(more[4 * part : 4 * part + 4], least)))
    count = scan.warp_sum(count)
    if lane == Int32(0):
        ptx.store_shared(lists.sums + Uint32(warp) * Uint32(4), Uint32(count))
    cute.arch.sync_threads()
    other = Int32(0)
    if lane < Int32(lists.config.threads // 32):
        other = Int32(ptx.load_shared(lists.sums + Uint32(lane) * Uint32(4)))
    total = scan.warp_sum(other)
    place = scan.warp_sum(other * Int32(lane < warp))
    if total <= lists.k:
        place = put_reaching(lists, words, first, least, place)
        for start in cutlass.range(HELD, rounds, HELD, unroll=1):
            more = load_held(logits, first, Int32(start), rounds, length)
            place = put_reaching(lists, more, first + Int32(start) * Int32(32), least, place)
        cute.arch.sync_threads()
    return total


@cute.jit
def put_reaching(lists: Any, words: Any, vector: Int32, least: Uint32, place: Int32) -> Int32:
    """Entries for the keys of HELD vectors of each lane that are at least `least`, from entry `place` on; returns the
    entry behind them. vector: the lane's first."""
    groups = (lists.k + Int32(31)) >> Int32(5)
    for part in cutlass.range_constexpr(HELD):
        mask = reach_x8(words[4 * part : 4 * part + 4], least)
        mine = Int32(cute.arch.popc(mask))
        upto = packed.warp_prefix(mine)
        spot = place + upto - mine
        while mask != Uint32(0):  # seldom more than two or three of a lane's eight
            bit = packed.lowest_bit(mask)
            mask = mask & (mask - Uint32(1))
            word = words[4 * part]
            for other in cutlass.range_constexpr(1, 4):
                if (bit >> Int32(1)) == Int32(other):
                    word = words[4 * part + other]
            key = (word >> (Uint32(bit & Int32(1)) << Uint32(4))) & Uint32(0xFFFF)
            put(lists, spot, key, (vector + Int32(32 * part)) * Int32(GROUP) + bit, groups)
            spot = spot + Int32(1)
        cute.arch.sync_warp()
        place = place + Int32(cute.arch.shuffle_sync(upto, 31))
    return place


def reach_x8(words: Any, least: Uint32) -> Uint32:
    """Bit i set where key i is at least `least` (1..0xFFFE), i = 0..7."""
    greater, equal = packed.masks_x8(words, least)
    return greater | equal


@cute.jit
def load_held(logits: Int64, first: Int32, start: Int32, rounds: Int32, length: Int32) -> Any:
    """Key16, two a word, of HELD of this thread's vectors from round `start` on; 0 where no key is."""
    words = [Uint32(0) for _ in range(4 * HELD)]
    for part in cutlass.range_constexpr(HELD):
        vector = first + (start + Int32(part)) * Int32(32)
        if start + Int32(part) < rounds and vector * Int32(GROUP) < length:
            loaded = ptx.load_v4(logits + Int64(vector) * Int64(16))
            for word in cutlass.range_constexpr(4):
                words[4 * part + word] = loaded[word]
    for part in cutlass.range_constexpr(HELD):
        vector = first + (start + Int32(part)) * Int32(32)
        if start + Int32(part) < rounds:
            for word in cutlass.range_constexpr(4):
                inside = packed.inside_mask(vector * Int32(GROUP) + Int32(2 * word), Int32(0), length)
                words[4 * part + word] = packed.key16x2_fast(words[4 * part + word]) & inside
    return words


@cute.jit
def make_long_list(lists: Any, logits: Int64, length: Int32, least: Uint32, vectors: Int32) -> None:
    """`make_list` for any number of keys of at least `least`."""
    threads = lists.config.threads
    thread = lists.thread
    lane = thread & Int32(31)
    k = lists.k
    for group in cutlass.range(thread, vectors, threads, unroll=1):
        found = load_keys(logits, group, length, least)
        for part in cutlass.range_constexpr(GROUP):
            if found[part] != Uint32(0):
                scan.histogram_add(lists.high, found[part] >> Uint32(5))
    cute.arch.sync_threads()
    if cutlass.const_expr(lists.config.rounds > 0):
        digit, above, _same = choose.find_bin(lists, k, Uint32(row_lists.BINS - 1))
    else:
        if thread < Int32(32):
            digit, above, _equal = scan.warp_find_digit(lists.high, k, lane, 2048)
            if lane == Int32(0):
                ptx.store_shared(lists.note(FOUND_THRESHOLD), Uint32(digit))
                ptx.store_shared(lists.note(FOUND_ABOVE), Uint32(above))
        cute.arch.sync_threads()
        digit = ptx.load_shared(lists.note(FOUND_THRESHOLD))
        above = Int32(ptx.load_shared(lists.note(FOUND_ABOVE)))
    for group in cutlass.range(thread, vectors, threads, unroll=1):
        found = load_keys(logits, group, length, least)
        for part in cutlass.range_constexpr(GROUP):
            if found[part] != Uint32(0) and (found[part] >> Uint32(5)) == digit:
                scan.histogram_add(lists.low, found[part] & Uint32(31))
    cute.arch.sync_threads()
    if thread < Int32(32):
        lower, more, _equal = scan.warp_find_digit(lists.low, k - above, lane, 32)
        if lane == Int32(0):
            ptx.store_shared(lists.note(FOUND_THRESHOLD), (digit << Uint32(5)) | Uint32(lower))
            ptx.store_shared(lists.note(FOUND_ABOVE), Uint32(above + more))
    cute.arch.sync_threads()
    threshold = ptx.load_shared(lists.note(FOUND_THRESHOLD))
    need = k - Int32(ptx.load_shared(lists.note(FOUND_ABOVE)))
    collect(lists, logits, length, least, threshold, need, vectors)


@cute.jit
def collect(
    lists: Any, logits: Int64, length: Int32, least: Uint32, threshold: Uint32, need: Int32, vectors: Int32
) -> None:
    """List the keys above the threshold and the first `need` equal ones, in ascending index. Ends with a block
    barrier."""
    threads = lists.config.threads
    thread = lists.thread
    before_above = Int32(0)
    before_equal = Int32(0)
    groups = (lists.k + Int32(31)) >> Int32(5)
    for start in cutlass.range(0, vectors, threads, unroll=1):
        group = Int32(start) + thread
        found = load_keys(logits, group, length, least)
        above = Int32(0)
        equal = Int32(0)
        for part in cutlass.range_constexpr(GROUP):
            above = above + Int32(found[part] > threshold)
            equal = equal + Int32(found[part] == threshold) * Int32(found[part] != Uint32(0))
        packed = above | (equal << Int32(16))
        lower, total = scan.block_exclusive(packed, lists.sums, thread, threads // 32)
        place_above = before_above + (lower & Int32(0xFFFF))
        place_equal = before_equal + (lower >> Int32(16))
        for part in cutlass.range_constexpr(GROUP):
            key = found[part]
            over = key > threshold
            same = key == threshold and key != Uint32(0)
            if over or (same and place_equal < need):
                kept = place_equal
                if kept > need:
                    kept = need
                place = place_above + kept
                put(lists, place, key, group * Int32(GROUP) + Int32(part), groups)
            place_above = place_above + Int32(over)
            place_equal = place_equal + Int32(same)
        before_above = before_above + (total & Int32(0xFFFF))
        before_equal = before_equal + (total >> Int32(16))
    cute.arch.sync_threads()


@cute.jit
def put(lists: Any, place: Int32, key: Uint32, index: Int32, groups: Int32) -> None:
    """Entry `place` of the second list being made."""
    ptx.store_shared(lists.winners + Uint32(place) * Uint32(4), keys.candidate_word(key, index))
    upper = Uint32(index) >> Uint32(16)
    for plane in cutlass.range(lists.planes, unroll=1):
        bit = (upper >> Uint32(plane)) & Uint32(1)
        if bit != Uint32(0):
            word = plane * groups + (place >> Int32(5))
            address = lists.plane_words + Uint32(word) * Uint32(4)
            ptx.red_shared(address, Uint32(1) << (Uint32(place) & Uint32(31)), "or")


@cute.jit
def send_list(lists: Any, blocks: Int64, place: Int64) -> None:
    """The list made by `make_list` to offset `place` of every rank's block, in 16-byte stores; its pitch has room."""
    groups = (lists.k + Int32(31)) >> Int32(5)
    vectors = (lists.k + lists.planes * groups + Int32(3)) >> Int32(2)
    for target in cutlass.range(lists.world, unroll=1):
        block = block_of(blocks, Int32(target))
        for vector in cutlass.range(lists.thread, vectors, lists.config.threads, unroll=2):
            a, b, c, d = ptx.load_shared_v4(lists.winners + Uint32(vector) * Uint32(16))
            ptx.store_v4(block + place + Int64(vector) * Int64(16), a, b, c, d)
