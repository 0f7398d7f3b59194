"""Steps of the local top-N, each a pass of `keysieve/models/local_topk.py`, in the block that works on a row.

A row's vectors (8 keys, 16 bytes) are spread as in `select`: a warp owns a contiguous run of `rounds * 32` of them and
lane l of it vectors l, l + 32, ..., so that loads are coalesced and index order is (warp, round, lane). The rounds are
walked in batches of `held`; the first batch stays in registers until candidates are listed, others are read again in
every pass. No atomic's result decides a position.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import packed, ptx, scan
from keysieve.kernels import local_topk_window as window
from keysieve.kernels.local_topk_config import LocalMap, LocalTopkConfig

EQUAL_SHIFT = 16  # counts of two kinds in one word


def mark(row: Any, slot: int) -> None:
    """With `config.trace`: note the clock at a step, for one thread of the block (see `dump_marks`)."""
    if row.config.trace:
        _mark(row.found + Uint32(64 + 4 * slot), row.thread)


def mark_at(config: LocalTopkConfig, base: Uint32, thread: Int32, slot: int) -> None:
    """`mark` where there is no row yet."""
    if config.trace:
        _mark(base + Uint32(LocalMap.of(config).found + 64 + 4 * slot), thread)


@cute.jit
def _mark(place: Uint32, thread: Int32) -> None:
    if thread == Int32(0):
        ptx.store_shared(place, ptx.asm("mov.u32 $0, %clock;", "=r", (Uint32,), ())[0])


def dump_marks(row: Any, where: Int64, block: Int32) -> None:
    """With `config.trace`: write this block's 16 marks to u32 `where[block][16]`."""
    if row.config.trace:
        _dump_marks(row.found + Uint32(64), where, block, row.thread)


@cute.jit
def _dump_marks(base: Uint32, where: Int64, block: Int32, thread: Int32) -> None:
    if thread == Int32(0):
        for slot in cutlass.range(16, unroll=1):
            value = ptx.load_shared(base + Uint32(slot) * Uint32(4))
            ptx.store(where + Int64(block * Int32(16) + slot) * Int64(4), value)


class Row:
    """A row of `length` keys at byte `address`: trace-time handle of what the steps are addressed by.

    first, count: of the vectors, those that this block works on; all of them if left out.
    """

    def __init__(
        self,
        config: LocalTopkConfig,
        base: Uint32,
        thread: Int32,
        address: Int64,
        length: Int32,
        first: Any = None,
        count: Any = None,
    ) -> None:
        places = LocalMap.of(config)
        self.config, self.thread, self.address, self.length = config, thread, address, length
        self.lane = thread & Int32(31)
        self.warp = thread >> Int32(5)
        self.vectors = (length + Int32(7)) >> Int32(3)
        self.whole = self.vectors  # of the row
        self.share = self.vectors  # of the largest part
        self.plan: Any = None  # see `local_topk_guess.plan`
        self.rounds = ((self.vectors if count is None else count) + Int32(config.threads - 1)) // Int32(config.threads)
        self.batches = (self.rounds + Int32(config.held - 1)) // Int32(config.held)
        self.start = self.warp * self.rounds * Int32(32) + self.lane
        if first is not None:
            self.start = self.start + first
            self.vectors = first + count  # none beyond is looked at
        self.count = self.vectors if count is None else count
        self.end = self.vectors * Int32(8)  # of the keys looked at
        self.end = self.end - (self.end - length) * Int32(self.end > length)
        self.wide = length > Int32(1 << 16)
        self.first = base + Uint32(places.first)
        self.second = base + Uint32(places.second)
        self.low = base + Uint32(places.low)
        self.fine = base + Uint32(places.low + 128)
        self.maxima = base + Uint32(places.maxima)
        self.received = base + Uint32(places.received)
        self.floors = base + Uint32(places.floors)
        self.bins = base + Uint32(places.bins)
        self.arrivals = base + Uint32(places.arrivals)
        self.sample = base + Uint32(places.sample)
        self.narrow = base + Uint32(places.narrow)
        self.again = base + Uint32(places.again)
        self.gathered = base + Uint32(places.gathered)
        self.landed = base + Uint32(places.landed)
        self.kept = base + Uint32(places.kept)
        self.ids = base + Uint32(places.ids)
        self.numbers = base + Uint32(places.numbers)
        self.found = base + Uint32(places.found)
        self.peers = base + Uint32(places.peers)
        self.sums = base + Uint32(places.sums)
        self.pair_sums = base + Uint32(places.pair_sums)
        self.words = base + Uint32(places.words)
        self.tops = base + Uint32(places.tops)
        self.list = base + Uint32(places.list)
        self.list_tops = base + Uint32(places.list_tops)

    def mark(self, slot: int) -> None:
        """See `mark`."""
        mark(self, slot)

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Row:
        return self


@cute.jit
def settle(row: Any, raw: Any, one: Int32) -> Any:
    """key16 of vector `one`, 0 where no key is."""
    words = list(raw)
    if cutlass.const_expr(row.config.push):
        for word in cutlass.range_constexpr(4):
            words[word] = packed.key16x2_fast(words[word])
    else:
        words = list(packed.foreign_key16x8(words))
    if one * Int32(8) + Int32(8) > row.end:
        for word in cutlass.range_constexpr(4):
            words[word] = words[word] & packed.inside_mask(one * Int32(8) + Int32(2 * word), Int32(0), row.end)
    return words


@cute.jit
def load_raw(row: Any, batch: Int32) -> Any:
    """The words of this thread's vectors of a batch, 0 where no vector is."""
    held = row.config.held
    words = [Uint32(0) for _ in range(4 * held)]
    for step in cutlass.range_constexpr(held):
        one = row.start + (batch * Int32(held) + Int32(step)) * Int32(32)
        if batch * Int32(held) + Int32(step) < row.rounds and one < row.vectors:
            loaded = ptx.load_v4(row.address + Int64(one) * Int64(16))
            for word in cutlass.range_constexpr(4):
                words[4 * step + word] = loaded[word]
    return words


@cute.jit
def load_batch(row: Any, batch: Int32) -> Any:
    """key16 of this thread's vectors of a batch, 0 where no key is."""
    held = row.config.held
    words = load_raw(row, batch)
    for step in cutlass.range_constexpr(held):
        one = row.start + (batch * Int32(held) + Int32(step)) * Int32(32)
        if batch * Int32(held) + Int32(step) < row.rounds and one - row.lane < row.vectors:
            made = settle(row, words[4 * step : 4 * step + 4], one)
            for word in cutlass.range_constexpr(4):
                words[4 * step + word] = made[word]
    return words


@cute.jit
def block_offsets(row: Any, mine: Int32, scan_index: cutlass.Constexpr[int]) -> Any:
    """(sum of `mine` over the warps before, over the block); `mine` is a warp's own, the same in all its lanes. One
    block barrier."""
    sums = row.sums + Uint32(128 * scan_index)
    if row.lane == Int32(0):
        ptx.store_shared(sums + Uint32(row.warp) * Uint32(4), Uint32(mine))
    cute.arch.sync_threads()
    value = Int32(0)
    if row.lane < Int32(row.config.warps):
        value = Int32(ptx.load_shared(sums + Uint32(row.lane) * Uint32(4)))
    return scan.warp_sum(value * Int32(row.lane < row.warp)), scan.warp_sum(value)


def counts_of(masks: Uint32) -> Int32:
    """Counts of the two masks of `place_held`, the second one shifted by `EQUAL_SHIFT`."""
    equal = Int32(cute.arch.popc(masks >> Uint32(8)))
    return Int32(cute.arch.popc(masks & Uint32(0xFF))) | (equal << Int32(EQUAL_SHIFT))


@cute.jit
def first_bits(mask: Uint32, count: Int32) -> Uint32:
    """The lowest `count` (0 or more) set bits of the mask."""
    extra = Int32(cute.arch.popc(mask)) - count
    while extra > Int32(0) and mask != Uint32(0):
        mask = mask ^ (Uint32(1) << packed.highest_bit(mask))
        extra = extra - Int32(1)
    return mask


@cute.jit
def key_of(words: Any, bit: Uint32) -> Uint32:
    """Key `bit` (0..7) of a vector in registers; the upper half holds something."""
    first = words[0]
    second = words[2]
    if (bit & Uint32(2)) != Uint32(0):
        first = words[1]
        second = words[3]
    if (bit & Uint32(4)) != Uint32(0):
        first = second
    return first >> ((bit & Uint32(1)) << Uint32(4))


@cute.jit
def put_keys(
    row: Any, words: Any, mask: Uint32, place: Int32, one: Int32, target: Uint32, tops: Uint32, looped: Any
) -> None:
    """Store those keys of vector `one` that are in the mask (at the places of `EQUAL_KEYS`), as words, from entry
    `place` of `target` on. looped: the row is wide, or most masks have no or one bit."""
    tail = Uint32(0xFFFF) - (Uint32(one * Int32(8)) & Uint32(0xFFFF))
    if looped:
        left = key_order(mask)
        entry = Uint32(place) + Uint32(cute.arch.popc(mask))
        while left != Uint32(0):  # from the highest down: finding it takes one instruction
            bit = packed.highest_bit(left)
            entry = entry - Uint32(1)
            ptx.store_shared(target + entry * Uint32(4), (key_of(words, bit) << Uint32(16)) | (tail - bit))
            if row.wide:
                ptx.store_shared_u16(tops + entry * Uint32(2), Uint32(one >> Int32(13)))
            left = left ^ (Uint32(1) << bit)
    else:
        store_words_x8(target + Uint32(place) * Uint32(4), *words, tail, mask)


@dsl_user_op
def store_words_x8(
    addr: Uint32,
    a: Uint32,
    b: Uint32,
    c: Uint32,
    d: Uint32,
    tail: Uint32,
    mask: Uint32,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Store, for every key i that is in `mask` (at the places of `EQUAL_KEYS`), it with `tail - i` below it, to
    consecutive shared words."""
    lines = ["{ .reg .b32 p, t, v, w; .reg .pred q; mov.b32 p, $0; mad.lo.u32 v, $5, 0x10001, 0xFFFF0000;"]
    for key in range(8):
        bit = 1 << (2 * (key // 2) + 16 * (key % 2))
        lines.append(f"and.b32 t, $6, {bit}; setp.ne.u32 q, t, 0;")
        lines.append(f"prmt.b32 w, ${1 + key // 2}, v, {0x3276 if key % 2 else 0x1054};")
        lines.append("@q st.shared.b32 [p], w; @q add.u32 p, p, 4;")
        if key % 2 and key < 7:
            lines.append("sub.u32 v, v, 0x00020002;")
    ptx.asm(" ".join([*lines, "}"]), "r,r,r,r,r,r,r", (), (addr, a, b, c, d, tail, mask), loc=loc, ip=ip)


@cute.jit
def place_held(
    row: Any, words: Any, vectors: Any, rounds: Int32, count: Int32, n: Int32, top: Uint32, bound: Uint32, bounded: Any
) -> None:
    """The row's words from the vectors in registers, which hold its N best: histograms of their keys, then each thread
    places its own. vectors: their numbers, ascending in the order (warp, round, lane)."""
    threshold, need, _above, _equal = window.find(row, words, rounds, count, n, top, bound, bounded, Int32(0), False)
    mark(row, 6)
    place_chosen(row, words, vectors, rounds, count, threshold, need, Int32(0), Int32(0))


@cute.jit
def place_chosen(
    row: Any,
    words: Any,
    vectors: Any,
    rounds: Int32,
    count: Int32,
    threshold: Uint32,
    need: Int32,
    above: Int32,
    equal: Int32,
) -> Int32:
    """Place the keys above the threshold, and equal ones until `need` of the row are; of either, `above` and `equal`
    come before this block's. Returns this block's counts, the equal ones shifted by EQUAL_SHIFT. One block barrier.

    A word counts the masks' bits of two vectors, a byte each; no sum over lower lanes is more than 248."""
    held = row.config.held
    masks = [Uint32(0) for _ in range(held)]
    for step in cutlass.range_constexpr(held):
        if window.has_round(row, step, rounds, count):
            masks[step] = codes_x8(words[4 * step : 4 * step + 4], threshold)
    lower = [Uint32(0) for _ in range(held // 2)]
    totals = [Uint32(0) for _ in range(held)]  # of the warp
    all_of = Uint32(0)
    for pair in cutlass.range_constexpr(held // 2):
        if window.has_round(row, 2 * pair, rounds, count):
            mine = byte_counts(masks[2 * pair]) | (byte_counts(masks[2 * pair + 1]) << Uint32(16))
            lower[pair] = Uint32(packed.warp_prefix(Int32(mine))) - mine
            last = Uint32(cute.arch.shuffle_sync(Int32(lower[pair]), Int32(31)))
            last_mine = Uint32(cute.arch.shuffle_sync(Int32(mine), Int32(31)))
            totals[2 * pair] = wide_counts(last) + wide_counts(last_mine)
            totals[2 * pair + 1] = wide_counts(last >> Uint32(16)) + wide_counts(last_mine >> Uint32(16))
            all_of = all_of + totals[2 * pair] + totals[2 * pair + 1]
    before_word, block = block_offsets(row, Int32(all_of), 0)
    mark(row, 7)
    before = Uint32(before_word + above + (equal << Int32(EQUAL_SHIFT)))
    for step in cutlass.range_constexpr(held):
        if window.has_round(row, step, rounds, count):
            both = before + wide_counts(lower[step // 2] >> Uint32(16 * (step % 2)))
            taken = Int32(both >> Uint32(EQUAL_SHIFT))
            if taken > need:
                taken = need
            kept = first_keys(masks[step] & Uint32(EQUAL_KEYS), need - taken)
            chosen = ((masks[step] >> Uint32(1)) & Uint32(EQUAL_KEYS)) | kept
            slot = Int32(both & Uint32(0xFFFF)) + taken
            one = words[4 * step : 4 * step + 4]
            put_keys(row, one, chosen, slot, vectors[step], row.words, row.tops, row.wide or rounds > Int32(2))
            before = before + totals[step]
    mark(row, 15)
    return block


EQUAL_KEYS = 0x00550055
"""Of a vector's code, bit 2 i + 16 h: of key 2 i + h. Its neighbour above says that the key is larger."""


def codes_x8(words: Any, threshold: Uint32) -> Uint32:
    """Of eight keys, two bits each: 1 the threshold (which is not 0), 2 above it. Three instructions for two keys."""
    least = threshold - Uint32(1)
    return _codes_x8(*words, least * Uint32(0x10001), ((Uint32(0) - least) & Uint32(0xFFFF)) * Uint32(0x10001))


@dsl_user_op
def _codes_x8(
    a: Uint32, b: Uint32, c: Uint32, d: Uint32, least: Uint32, back: Uint32, *, loc: Any = None, ip: Any = None
) -> Uint32:
    """least: what is subtracted of what is not below it, `back`: its negative, in both halves."""
    text = (
        "{ .reg .b32 p, q, r, s, two; mov.b32 two, 0x00020002;"
        + "".join(
            f" max.u16x2 {t}, ${i}, $5; add.u16x2 {t}, {t}, $6; min.u16x2 {t}, {t}, two;"
            for i, t in enumerate("pqrs", 1)
        )
        + " mad.lo.u32 p, q, 4, p; mad.lo.u32 r, s, 4, r; mad.lo.u32 $0, r, 16, p; }"
    )
    args = (a, b, c, d, least, back)
    return ptx.asm(text, "=r,r,r,r,r,r,r", (Uint32,), args, pure=True, loc=loc, ip=ip)[0]


def key_order(keys: Uint32) -> Uint32:
    """Bits of keys at the places of `EQUAL_KEYS`, as bit i for key i."""
    return (keys & Uint32(0x55)) | ((keys >> Uint32(15)) & Uint32(0xAA))


def key_places(mask: Uint32) -> Uint32:
    """The reverse of `key_order`."""
    return (mask & Uint32(0x55)) | ((mask & Uint32(0xAA)) << Uint32(15))


@cute.jit
def first_keys(keys: Uint32, count: Int32) -> Uint32:
    """The first `count` (0 or more) of the keys whose bits are set at the places of `EQUAL_KEYS`."""
    extra = Int32(cute.arch.popc(keys)) - count
    while extra > Int32(0) and keys != Uint32(0):
        last = packed.highest_bit(key_order(keys))
        keys = keys ^ (Uint32(1) << ((last & Uint32(6)) | ((last & Uint32(1)) << Uint32(4))))
        extra = extra - Int32(1)
    return keys


@dsl_user_op
def compare_x8(
    how: str, a: Uint32, b: Uint32, c: Uint32, d: Uint32, both: Uint32, *, loc: Any = None, ip: Any = None
) -> Uint32:
    """Bit i set where key i, as BF16, compares to the two equal halves of `both`. True is 1.0, of which bits 7 to 13
    are set."""
    text = (
        "{ .reg .b32 p, q, r, s;"
        f" set.{how}.bf16x2.bf16x2 p, $1, $5; set.{how}.bf16x2.bf16x2 q, $2, $5;"
        f" set.{how}.bf16x2.bf16x2 r, $3, $5; set.{how}.bf16x2.bf16x2 s, $4, $5;"
        " and.b32 p, p, 0x00800080; and.b32 q, q, 0x02000200; and.b32 r, r, 0x08000800; and.b32 s, s, 0x20002000;"
        " or.b32 p, p, q; or.b32 r, r, s; or.b32 p, p, r;"
        " shr.u32 q, p, 7; shr.u32 r, p, 22; and.b32 q, q, 0x55; and.b32 r, r, 0xAA; or.b32 $0, q, r; }"
    )
    return ptx.asm(text, "=r,r,r,r,r,r", (Uint32,), (a, b, c, d, both), pure=True, loc=loc, ip=ip)[0]


def byte_counts(codes: Uint32) -> Uint32:
    """Of a vector's code, keys above the threshold and equal to it, a byte each."""
    above = Uint32(cute.arch.popc(codes & Uint32(EQUAL_KEYS << 1)))
    return above | (Uint32(cute.arch.popc(codes & Uint32(EQUAL_KEYS))) << Uint32(8))


def wide_counts(counts: Uint32) -> Uint32:
    """Two counts of a byte each, the second shifted by EQUAL_SHIFT instead of 8; the rest of the word is ignored."""
    return ptx.byte_perm(counts, Uint32(0), Uint32(0x4140))
