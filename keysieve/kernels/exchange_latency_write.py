"""What a row merged by the latency form becomes: this rank's winners as rows of its cache, all winners listed."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from keysieve.device import ptx
from keysieve.device.paged import physical_row, table_entry
from keysieve.kernels import exchange_latency as arrival
from keysieve.kernels import exchange_latency_select as search
from keysieve.kernels import exchange_lists as row_lists
from keysieve.kernels.exchange_lists import FOUND_THRESHOLD


@dsl_user_op
def _store_if(flag: Uint32, addr: Int64, value: Int32, *, loc: Any = None, ip: Any = None) -> None:
    text = "{ .reg .pred p; setp.ne.u32 p, $0, 0; @p st.global.b32 [$1], $2; }"
    ptx.asm(text, "r,l,r", (), (flag, addr, value), loc=loc, ip=ip)


def store_if(flag: Any, addr: Int64, value: Int32) -> None:
    """Store a word where the flag is set: no branch."""
    _store_if(Uint32(flag), addr, value)


@cute.jit
def fill(lists: Any, row: Int32, out: Int64, out_stride: Int64) -> None:
    """-1 into the whole row of `out`: while words are on their way."""
    line = out + Int64(row) * out_stride * Int64(4)
    line = line + Int64(lists.thread) * Int64(4)
    for step in cutlass.range_constexpr(lists.config.k_class // lists.config.threads):
        first = step * lists.config.threads
        store_if(lists.thread + Int32(first) < lists.k, line + Int64(4 * first), Int32(-1))


@cute.jit
def look_up(share: Any, words: Any, uppers: Any, where: Any, row: Int32) -> Any:
    """What an entry of this rank's own list becomes: local index, or row of the cache. Loads only are issued here."""
    table, table_stride, next_n, page_log2, _block_rows = where
    request = row
    if next_n > Int32(1):
        request = row // next_n
    entries = [Int32(0) for _ in range(2 * share.rounds)]
    if table != Int64(0):
        for part in cutlass.range_constexpr(share.rounds):
            if share.mine(part):
                for side in cutlass.range_constexpr(2):
                    half = 2 * part + side
                    if words[half] != Uint32(0):
                        local = Int32(arrival.local_of(words[half], uppers, half))
                        entries[half] = ptx.load(
                            table_entry(table, request, table_stride, local >> page_log2), Int32, "relaxed"
                        )
    return entries


@cute.jit
def write_own(
    share: Any,
    words: Any,
    uppers: Any,
    entries: Any,
    chosen: Uint32,
    before: Int32,
    row: Int32,
    where: Any,
    target: Any,
) -> None:
    """This rank's winners to `out`. before: those of lower warps. The rest of the row has been filled with -1."""
    table, _table_stride, _next_n, page_log2, block_rows = where
    out, out_stride, _counts, _positions = target
    below = ptx.lanes_below()
    own = Uint32(0)
    for part in cutlass.range_constexpr(share.rounds):
        own = own | (Uint32(share.mine(part)) * Uint32(3 << (2 * part)))
    if own != Uint32(0):  # of the whole warp
        taken = chosen & own
        line = out + (Int64(row) * out_stride + Int64(before)) * Int64(4)
        votes = [
            Uint32(cute.arch.vote_ballot_sync((taken & Uint32(1 << half)) != Uint32(0)))
            for half in range(2 * share.rounds)
        ]
        place = Int32(0)
        for part in cutlass.range_constexpr(share.rounds):
            evens, odds = votes[2 * part], votes[2 * part + 1]
            spot = place + Int32(cute.arch.popc(evens & below)) + Int32(cute.arch.popc(odds & below))
            for side in cutlass.range_constexpr(2):
                half = 2 * part + side
                value = Int32(arrival.local_of(words[half], uppers, half))
                if table != Int64(0):
                    value = physical_row(entries[half], value, page_log2, block_rows)
                store_if(taken & Uint32(1 << half), line + Int64(Uint32(spot)) * Int64(4), value)
                spot = spot + Int32((taken >> Uint32(half)) & Uint32(1))
            place = place + Int32(cute.arch.popc(evens)) + Int32(cute.arch.popc(odds))


@cute.jit
def list_all(share: Any, words: Any, uppers: Any, chosen: Uint32, before: Int32) -> None:
    """All winners' ids in `winners`, source by source, and `begins`, as `exchange_rows.compact` leaves them; a block
    barrier must follow. before: winners of lower warps."""
    lists = share.lists
    below = ptx.lanes_below()
    place = before
    for part in cutlass.range_constexpr(share.rounds):
        if share.pairs[part] == Int32(0) and share.has(part):  # lane 0 of a list's first chunk
            ptx.store_shared(lists.begins + Uint32(share.sources[part]) * Uint32(4), Uint32(place))
        even = (chosen >> Uint32(2 * part)) & Uint32(1)
        odd = (chosen >> Uint32(2 * part + 1)) & Uint32(1)
        evens = Uint32(cute.arch.vote_ballot_sync(even != Uint32(0)))
        odds = Uint32(cute.arch.vote_ballot_sync(odd != Uint32(0)))
        spot = place + Int32(cute.arch.popc(evens & below)) + Int32(cute.arch.popc(odds & below))
        for side in cutlass.range_constexpr(2):
            half = 2 * part + side
            if ((chosen >> Uint32(half)) & Uint32(1)) != Uint32(0):
                position = arrival.id_of(share, words[half], uppers, half)
                ptx.store_shared(lists.winners + Uint32(spot) * Uint32(4), position)
                spot = spot + Int32(1)
        place = place + Int32(cute.arch.popc(evens)) + Int32(cute.arch.popc(odds))
    if lists.thread == Int32(lists.config.threads - 1):
        ptx.store_shared(lists.begins + Uint32(lists.world) * Uint32(4), Uint32(place))


@cute.jit
def merge_row(
    share: Any,
    words: Any,
    length: Int32,
    hidden: Uint32,
    wide: Any,
    row: Int32,
    where: Any,
    target: Any,
    again: cutlass.Constexpr[bool],
) -> Uint32:
    """Write the row from this thread's words, unless ranks are saturated: their mask, and the threshold is noted.

    length: above every id. hidden: mask of the sources that have more keys than their list. wide: may local indices
    have more than 16 bits? again: second lists are among them, nobody is asked. The result is followed by a block
    barrier where it is not 0.
    """
    lists = share.lists
    search.count_keys(share, words)
    cute.arch.sync_threads()
    row_lists.note_clock(lists, 4)
    if share.warp == Int32(search.warps_of(lists) - 1):
        search.search_near(share)
    uppers = arrival.upper_bits(share, wide)
    entries = [Int32(0) for _ in range(2 * share.rounds)]
    if cutlass.const_expr(not again):
        entries = look_up(share, words, uppers, where, row)
    cute.arch.sync_threads()
    found = search.found_near(share, words)
    row_lists.note_clock(lists, 6)
    chosen = search.choose_entries(share, words, uppers, found, length)
    row_lists.note_clock(lists, 7)
    before, own_before, owned, refused = search.count_chosen(share, chosen)
    asked = Uint32(0)
    if cutlass.const_expr(not again):
        asked = hidden & (refused ^ Uint32(0xFFFFFFFF))
    if asked == Uint32(0):
        if cutlass.const_expr(again):  # late, to hold fewer registers
            entries = look_up(share, words, uppers, where, row)
        write_own(share, words, uppers, entries, chosen, own_before, row, where, target)
        _out, _out_stride, counts, positions = target
        if positions != Int64(0):
            list_all(share, words, uppers, chosen, before)
        if lists.thread == Int32(0):
            ptx.store(counts + Int64(row) * Int64(4), owned)
    else:
        if lists.thread == Int32(0):
            ptx.store_shared(lists.note(FOUND_THRESHOLD), found[0])
        cute.arch.sync_threads()
    return asked
