"""A rank's N best keys of every row, as candidate rows: words for the exchange, pushed as tagged pairs or written.

One block a row, or a cluster of them. The passes are those of `keysieve/models/local_topk.py`:

* a row of at most N keys offers all of them;
* a row that the registers hold is selected from directly: one histogram of the values below the best key, masks, block
  scan; where a thread holds many vectors of 8 keys, those that cannot matter are dropped first;
* of a longer row the vectors whose maxima reach that of the N-th best one, or exactly the N best, go the same way: they
  hold the N best keys, whatever the values are, and fit the registers; the maxima are found here, or given;
* where the maxima do not fit shared memory (more than 524,288 keys) a bound from maxima, a list of the keys that reach
  it, and an exact pass over all keys where the list has no room.

The kernel waits for its grid dependency before its first global read, but for lengths that are `settled`: complete
before the kernel in front started, which triggers only after its own wait. Every pair of a row is pushed, padding and
signature included, for an empty row as well: the merge waits for all of them. The row's epoch is read once.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from keysieve.device import keys, packed, ptx
from keysieve.kernels import local_topk_given as given
from keysieve.kernels import local_topk_listed as listed
from keysieve.kernels import local_topk_long as long
from keysieve.kernels import local_topk_push as pushing
from keysieve.kernels import local_topk_sift as sift
from keysieve.kernels import local_topk_split as split
from keysieve.kernels import local_topk_steps as steps
from keysieve.kernels import local_topk_window as window
from keysieve.kernels.flags import FLAG_BAD_LENGTH
from keysieve.kernels.local_topk_config import LocalMap, LocalTopkConfig
from keysieve.kernels.local_topk_steps import Row
from keysieve.kernels.sharding import local_length


class LocalTopk:
    """The kernel for one configuration; `__call__` is the host entry that is compiled."""

    def __init__(self, config: LocalTopkConfig) -> None:
        self.config = config
        self.map = LocalMap.of(config)

    @cute.jit
    def __call__(
        self,
        logits: Int64,
        tops: Int64,
        pitch: Int64,
        lens: Int64,
        lens_stride: Int64,
        rows: Int32,
        n: Int32,
        planes: Int32,
        limit: Int32,
        local_limit: Int32,
        words: Int64,
        words_stride: Int64,
        counts: Int64,
        peers: Int64,
        slots: Int64,
        max_rows: Int32,
        world: Int32,
        rank: Int32,
        interleave: Int32,
        epoch: Int64,
        site: Int32,
        flags: Int64,
        settled: Int32,
        release: Int32,
        overlap: Int32,
        shared: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch. Addresses are byte addresses (0: absent), strides and pitch are in elements.

        logits: BF16 rows, `pitch` apart; 16-byte aligned, `pitch` a multiple of 8, and a row's last vector is readable.
        tops: where they are given, key16 of the largest of every 8 keys, `pitch / 8` apart; undefined past a row's end.
        lens: int32 per row, global lengths (push) or local ones. limit: a longer row, local_limit: one with more local
        keys is empty and raises a flag. words: int32 `[rows, n + planes * ceil(n / 32)]`; counts: int32 `[rows]`.
        peers: int64 per rank, the blocks' addresses; slots: offset of the slots in a block, of `max_rows` rows; epoch:
        u32 per row. settled: 1 reads lengths before the grid dependency. release, overlap, shared: as for
        `select`.
        """
        kind = "local_push" if self.config.push else "local_topk"
        blocks = f"_c{self.config.cluster}" if self.config.cluster > 1 else ""
        self.kernel.set_name_prefix(f"{kind}_n{self.config.n_class}_t{self.config.threads}_h{self.config.held}{blocks}")
        self.kernel(
            logits, tops, pitch, lens, lens_stride, rows, n, planes, limit, local_limit, words, words_stride, counts,
            peers, slots, max_rows, world, rank, interleave, epoch, site, flags, settled, release,
        ).launch(
            grid=(rows * Int32(self.config.cluster), 1, 1),
            block=(self.config.threads, 1, 1),
            cluster=None if self.config.cluster == 1 else (self.config.cluster, 1, 1),
            smem=shared,
            stream=stream,
            use_pdl=overlap,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        logits: Int64,
        tops: Int64,
        pitch: Int64,
        lens: Int64,
        lens_stride: Int64,
        rows: Int32,
        n: Int32,
        planes: Int32,
        limit: Int32,
        local_limit: Int32,
        words: Int64,
        words_stride: Int64,
        counts: Int64,
        peers: Int64,
        slots: Int64,
        max_rows: Int32,
        world: Int32,
        rank: Int32,
        interleave: Int32,
        epoch: Int64,
        site: Int32,
        flags: Int64,
        settled: Int32,
        release: Int32,
    ) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        rank_here = Int32(0)
        if cutlass.const_expr(config.cluster > 1):
            rank_here = row & Int32(config.cluster - 1)
            row = row // Int32(config.cluster)
        base = ptx.smem_addr(SmemAllocator().allocate_array(Uint32, config.shared_bytes // 4, byte_alignment=128))
        steps.mark_at(config, base, thread, 11)
        if cutlass.const_expr(config.cluster > 1):
            split.open_cluster(base, thread, config)
        if settled == Int32(0):
            ptx.grid_wait()
        elif thread == Int32(64):
            ptx.prefetch_line(logits + Int64(row) * pitch * Int64(2))
        length = self.enter(base, thread, lens + Int64(row) * lens_stride * Int64(4), n, planes, peers, world)
        steps.mark_at(config, base, thread, 12)
        length = length * Int32(length > Int32(0))
        fault = length > limit
        usable = length * Int32(length <= limit)
        if cutlass.const_expr(config.push):
            usable = local_length(usable, Uint32(world), Uint32(rank), Uint32(interleave))
        fault = fault or usable > local_limit
        usable = usable * Int32(usable <= local_limit)
        handle = Row(config, base, thread, logits + Int64(row) * pitch * Int64(2), usable)
        part = handle
        if cutlass.const_expr(config.cluster > 1):
            part = split.part_of(handle, base, n, rank_here)
        if settled != Int32(0):
            own = slots + Int64(rank * max_rows + row) * Int64(16)
            self.prefetch(base, thread, part, peers, own, epoch + Int64(row) * Int64(4), world)
            ptx.grid_wait()
        if release != Int32(0):
            ptx.grid_launch_dependents()
        count = n + planes * ((n + Int32(31)) >> Int32(5))
        tag = Uint32(0)
        if cutlass.const_expr(config.push):
            tag = self.tag_of(peers, epoch, row)
        steps.mark(handle, 0)
        signature = (Uint32(rows) << Uint32(16)) | Uint32(site)
        call = (signature, Uint32(length), tag, peers, slots, max_rows, world, rank, row)
        target = (words, words_stride, counts)
        alone = rank_here == Int32(0)
        if cutlass.const_expr(config.cluster > 1):  # noqa: SIM102  # a trace-time test, then a run-time one
            if split.is_shared(handle, n):
                begin, found = split.share_row(part, n, planes, rank_here)
                alone = Boolean(False)
                if rank_here == Int32(config.cluster - 1):
                    found = count - begin
                self.finish(handle, count, begin, begin + found, call, target)
        if alone:
            if cutlass.const_expr(config.guesses):
                self.take_all(handle, n)  # others are shared
            elif usable > n:
                self.find(handle, n, tops + Int64(row) * (pitch >> Int64(2)))
            else:
                self.take_all(handle, n)
            if handle.wide:
                cute.arch.sync_threads()
                self.write_planes(handle, n, planes)
            self.finish(handle, count, Int32(0), count, call, target)
        steps.mark(handle, 10)
        steps.dump_marks(handle, flags, row)
        if thread + rank_here == Int32(0):
            if counts != Int64(0):
                taken = n
                if usable < n:
                    taken = usable
                ptx.store(counts + Int64(row) * Int64(4), taken)
            if fault and flags != Int64(0):
                ptx.red_global(flags, Uint32(1 << FLAG_BAD_LENGTH), "or", "relaxed", "gpu")

    @cute.jit
    def finish(self, handle: Any, count: Int32, begin: Int32, end: Int32, call: Any, target: Any) -> None:
        """Words begin .. end - 1 of the row's `count`: pushed to all ranks, and written if there is a place for it.
        One block barrier, behind which they are complete."""
        words, words_stride, _counts = target
        if cutlass.const_expr(self.config.push):
            pushing.push(handle, count, begin, end, call)
        else:
            cute.arch.sync_threads()
        if words != Int64(0):
            line = words + Int64(call[-1]) * words_stride * Int64(4)
            for word in cutlass.range(begin + handle.thread, end, self.config.threads, unroll=1):
                value = ptx.load_shared(handle.words + Uint32(word) * Uint32(4))
                ptx.store(line + Int64(word) * Int64(4), value)

    @cute.jit
    def enter(
        self, base: Uint32, thread: Int32, where: Int64, n: Int32, planes: Int32, peers: Int64, world: Int32
    ) -> Int32:
        """The row's length, read by one warp for all. Meanwhile the histograms are cleared, as are the words of planes
        and padding, and the blocks' addresses, which never change, are brought to shared memory by another warp. One
        block barrier; in a cluster, all of its blocks run then."""
        config, places = self.config, self.map
        length = Int32(0)
        low = Uint32(0)
        high = Uint32(0)
        fetches = thread >= Int32(32) and thread < Int32(32) + world and peers != Int64(0)
        if thread < Int32(32):
            length = ptx.load(where, Int32, "relaxed")
        if cutlass.const_expr(config.push):  # noqa: SIM102  # a trace-time test, then a run-time one
            if fetches:
                low, high = ptx.load_v2(peers + Int64(thread - Int32(32)) * Int64(8))
        for index in cutlass.range_constexpr(-(-(places.cleared - places.uncleared) // 16 // config.threads)):
            place = thread + Int32(places.uncleared // 16 + index * config.threads)
            if place < Int32(places.cleared // 16):
                ptx.store_shared_v4(base + Uint32(place) * Uint32(16), Uint32(0), Uint32(0), Uint32(0), Uint32(0))
        count = n + planes * ((n + Int32(31)) >> Int32(5))
        for place in cutlass.range(n + thread, count + Int32(1), config.threads, unroll=1):  # planes and padding
            ptx.store_shared(base + Uint32(places.words) + Uint32(place) * Uint32(4), Uint32(0))
        if cutlass.const_expr(config.push):  # noqa: SIM102
            if fetches:
                packed.store_shared_v2(base + Uint32(places.peers) + Uint32(thread - Int32(32)) * Uint32(8), low, high)
        if thread == Int32(0):
            ptx.store_shared(base + Uint32(places.found), Uint32(length))
        if cutlass.const_expr(config.cluster > 1):
            cute.arch.cluster_wait()
        cute.arch.sync_threads()
        return Int32(ptx.load_shared(base + Uint32(places.found)))

    @cute.jit
    def prefetch(
        self, base: Uint32, thread: Int32, part: Any, peers: Int64, slot: Int64, calls: Int64, world: Int32
    ) -> None:
        """Ask for a line of what will be read, and of what will be written: their pages' translations; and for that of
        the row's calls, which the keys of a step drive out of L2."""
        if thread == Int32(96) and part.start < part.vectors:
            ptx.prefetch_line(part.address + Int64(part.start) * Int64(16))
        if cutlass.const_expr(self.config.push):
            if thread >= Int32(128) and thread < Int32(128) + world and peers != Int64(0):
                place = base + Uint32(self.map.peers) + Uint32(thread - Int32(128)) * Uint32(8)
                ptx.prefetch_line(ptx.load(place, Int64, space="shared::cta") + slot)
            if thread == Int32(160) and peers != Int64(0):
                ptx.prefetch_line(calls)

    @cute.jit
    def tag_of(self, peers: Int64, epoch: Int64, row: Int32) -> Uint32:
        """The row's completed calls; the call's tag is one more. What adds it waits for the load: only `push` does."""
        tag = Uint32(0)
        if peers != Int64(0):
            tag = ptx.load(epoch + Int64(row) * Int64(4), Uint32)
        return tag

    @cute.jit
    def find(self, handle: Any, n: Int32, tops: Int64) -> None:
        """The words of a row of more than N keys."""
        if cutlass.const_expr(self.config.longer):
            if handle.batches <= Int32(1):
                self.find_held(handle, n)
            else:
                cute.arch.sync_threads()
                if cutlass.const_expr(self.config.given):
                    given.find(handle, tops, n)
                elif cutlass.const_expr(self.config.room > 0):
                    long.find(handle, n)
                else:
                    self.find_listed(handle, n)
        else:
            self.find_held(handle, n)

    @cute.jit
    def find_held(self, handle: Any, n: Int32) -> None:
        """The words of a row that the registers hold."""
        words, vectors, rounds, count, top, bound, bounded = sift.gather(handle, n, Int32(0), False)
        steps.mark(handle, 4)
        if cutlass.const_expr(self.config.squeezes):
            tops = window.vector_tops(handle, words, rounds, count)
            found = window.find(handle, words, rounds, count, n, top, bound, bounded, Int32(0), False, tops)
            steps.mark(handle, 6)
            words, vectors, rounds, count = sift.squeeze(handle, words, vectors, tops, rounds, count, found[0])
            steps.place_chosen(handle, words, vectors, rounds, count, found[0], found[1], Int32(0), Int32(0))
        else:
            steps.place_held(handle, words, vectors, rounds, count, n, top, bound, bounded)

    @cute.jit
    def find_listed(self, handle: Any, n: Int32) -> None:
        """The words of a row of any length, through a list of keys that reach a bound."""
        words = steps.load_batch(handle, Int32(0))
        bound = Uint32(1)
        if handle.vectors > n + (n >> Int32(3)):
            bound = listed.find_bound(handle, words, n)
        steps.mark(handle, 2)
        reaching = Int32(self.config.listed + 1)
        if bound != Uint32(1) or handle.length <= Int32(self.config.listed):
            reaching = listed.list_reaching(handle, words, bound)
        steps.mark(handle, 3)
        threshold = Uint32(0)
        need = Int32(0)
        count = n
        fits = reaching <= Int32(self.config.listed)
        if not fits:
            threshold, need = listed.find_threshold(handle, [], n, bound, True)
            listed.list_chosen(handle, threshold, need)
            threshold = Uint32(0)
            need = Int32(0)
        else:
            count = reaching
        entries, rounds, start = listed.load_entries(handle, count)
        if fits:
            threshold, need = listed.find_threshold(handle, entries, n, bound, False)
        steps.mark(handle, 4)
        listed.place_entries(handle, entries, rounds, start, threshold, need)

    @cute.jit
    def take_all(self, handle: Any, n: Int32) -> None:
        """The words of a row of at most N keys: all of them, then empty entries."""
        for entry in cutlass.range(handle.thread, n, self.config.threads, unroll=2):
            word = Uint32(0)
            if entry < handle.length:
                bits = ptx.load_u16(handle.address + Int64(entry) * Int64(2))
                if cutlass.const_expr(not self.config.push):
                    bits = keys.canonical16(bits)
                word = keys.candidate_word(keys.key16(bits), entry)
            ptx.store_shared(handle.words + Uint32(entry) * Uint32(4), word)

    @cute.jit
    def write_planes(self, handle: Any, n: Int32, planes: Int32) -> None:
        """The index planes of a row that has indices of more than 16 bits. Whole warps: a word is a vote."""
        groups = (n + Int32(31)) >> Int32(5)
        for entry in cutlass.range(handle.thread, groups * Int32(32), self.config.threads, unroll=1):
            upper = Uint32(0)
            if entry < n:
                upper = ptx.load_shared_u16(handle.tops + Uint32(entry) * Uint32(2))
            for plane in cutlass.range(planes, unroll=1):
                votes = Uint32(cute.arch.vote_ballot_sync(((upper >> Uint32(plane)) & Uint32(1)) != Uint32(0)))
                if handle.lane == Int32(0):
                    place = n + plane * groups + (entry >> Int32(5))
                    ptx.store_shared(handle.words + Uint32(place) * Uint32(4), votes)


def build(config: LocalTopkConfig, arch: str) -> tuple[Any, tuple[Any, ...]]:
    """Jit function and fake arguments."""
    del arch
    i64, i32 = Int64(0), Int32(1)
    args = (
        i64, i64, i64, i64, i64, i32, i32, i32, i32, i32, i64, i64, i64, i64, i64, i32, i32, i32, i32, i64, i32, i64,
        i32, i32, i32, i32, make_fake_stream(),
    )  # fmt: skip
    return LocalTopk(config).__call__, args
