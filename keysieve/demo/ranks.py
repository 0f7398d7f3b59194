"""The demo with its context sharded over W processes: each rank keeps and scores its share of the keys, all agree.

Every rank reads the same text with the same model, so that its attention can be compared as well, but of the indexer's
keys it holds only its own: ``keysieve.dcp.Gather`` exchanges candidates over Gloo. Rank 0 holds every selection to the
unsharded one and to the independent verifier; at the end the ranks compare digests of everything they selected.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from keysieve.api import DecodeIndexer
from keysieve.cache import IndexCache, key_plane, scale_plane, slots_of
from keysieve.checks import require_int
from keysieve.dcp import Gather
from keysieve.demo import verify
from keysieve.demo.recorder import Recorder
from keysieve.demo.run import CHUNK, Progress, Settings
from keysieve.demo.run import run as read
from keysieve.inputs import Selection
from keysieve.integrations.transformers import IndexerStep
from keysieve.reference.dcp_maps import global_positions, local_seq_lens
from keysieve.spec import MAX_WORLD, PAGE

TIMEOUT = 300.0
"""Seconds a rank waits for another: rank 0 verifies while the others wait."""


class Shard:
    """One rank's keys of every layer, in its own pages, and the sharded step over them.

    Args:
        group: the exchange.
        max_rows: query rows of one call at most.
        context: keys of the whole context at most.
        seed: of the block placement in this rank's attention cache, a random permutation.
    """

    def __init__(self, group: Gather, *, max_rows: int, context: int, seed: int) -> None:
        self.group, self._max_rows, self._context = group, max_rows, context
        self._indexers: dict[int, DecodeIndexer] = {}
        self._caches: dict[int, tuple[IndexCache, int]] = {}
        most = local_seq_lens(torch.tensor([context]), group.world, 0, group.interleave)
        blocks = -(-max(int(most[0]), 1) // PAGE)
        order = np.random.default_rng((seed, group.rank)).permutation(2 * blocks)[:blocks]
        self.table = torch.from_numpy(order.astype(np.int32))
        """Page ids of this rank's keys, by local index // 64: one table serves its index cache and attention cache."""

    @property
    def keys_per_layer(self) -> int:
        """Keys of every layer's context that lie on this rank."""
        return max((held for _, held in self._caches.values()), default=0)

    def _own_cache(self, step: IndexerStep) -> IndexCache:
        """This rank's cache of the step's layer, brought up to its context: the bytes of the keys that lie here."""
        made = IndexCache.empty(step.spec, pages=2 * self.table.numel(), device="cpu")
        cache, held = self._caches.get(step.layer, (made, 0))
        longest = torch.tensor([step.longest])
        count = int(local_seq_lens(longest, self.group.world, self.group.rank, self.group.interleave)[0])
        local = torch.arange(held, count)
        position = global_positions(local, self.group.world, self.group.rank, self.group.interleave)
        codes, scales = step.cache.codes(slots_of(step.index_table[0], position))
        slots = slots_of(self.table, local)
        key_plane(step.spec.format, cache.data)[slots // PAGE, slots % PAGE] = codes
        scale_plane(step.spec.format, cache.data)[slots // PAGE, slots % PAGE] = scales
        self._caches[step.layer] = (cache, count)
        return cache

    def select(self, step: IndexerStep) -> Selection:
        """The sharded step: this rank's physical rows and counts, and the global positions of all winners."""
        table = self.table.expand(step.index_table.shape[0], -1)
        return self._indexer(step)(
            step.query,
            self._own_cache(step),
            step.weights,
            step.seq_lens,
            table,
            kv_table=table,
            kv_page=PAGE,
            positions=True,
            site=step.layer,
        )

    def _indexer(self, step: IndexerStep) -> DecodeIndexer:
        if step.next_n not in self._indexers:
            self._indexers[step.next_n] = DecodeIndexer(
                step.spec,
                max_rows=max(self._max_rows // step.next_n, 1) * step.next_n,
                max_context=self._context,
                next_n=step.next_n,
                device="cpu",
                dcp=self.group,
            )
        return self._indexers[step.next_n]


class ShardedRecorder(Recorder):
    """The recorder of rank 0: selects over all ranks, verifies as the plain one does, and checks its own rows.

    Args:
        shard: this rank's keys.
        max_rows, context, seed: as for :class:`Recorder`.
    """

    def __init__(self, shard: Shard, *, max_rows: int, context: int, seed: int = 0) -> None:
        super().__init__(max_rows=max_rows, context=context, seed=seed)
        self.shard = shard
        self.owned = 0
        """Selected keys, over all rows and layers, that lie on this rank."""

    def step(self, step: IndexerStep) -> Selection:
        out = self.shard.select(step)
        self.owned += int(out.counts.sum())
        return out

    def _compare(self, chosen: verify.Ints, given: tuple[Any, ...], row: int) -> None:
        """One row: all positions, as sharded and as unsharded, and this rank's count and physical rows."""
        out_positions, out_counts, out_rows, positions, counts = given
        group, table = self.shard.group, self.shard.table.numpy()
        want = np.full(positions.shape[1], -1, np.int32)
        want[: len(chosen)] = chosen
        mine = chosen[chosen // group.interleave % group.world == group.rank]
        local = mine // (group.interleave * group.world) * group.interleave + mine % group.interleave
        placed = np.full(positions.shape[1], -1, np.int32)
        placed[: len(mine)] = table[local // PAGE] * PAGE + local % PAGE
        same = counts[row] == len(chosen) and out_counts[row] == len(mine)
        same = same and np.array_equal(out_positions[row], want) and np.array_equal(positions[row], want)
        same = same and np.array_equal(out_rows[row], placed)
        self.totals.verified += 1
        self.totals.mismatches += not same


class Follower(ShardedRecorder):
    """The recorder of the other ranks: selects, and leaves the verifying to rank 0."""

    def __call__(self, step: IndexerStep) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.step(step)
        assert out.positions is not None
        self.digest.update(out.positions.numpy().tobytes())
        return out.positions, (out.positions >= 0).sum(1, dtype=torch.int32)

    def watch_attention(self, _model: nn.Module) -> list[Any]:
        return []


@dataclass(frozen=True)
class RankReport:
    """What one rank says at the end: a digest of all it selected, its share of the winners, its keys of one layer."""

    digest: str
    owned: int
    keys: int


RankZero = Callable[[Progress | None], tuple[Recorder, list[RankReport]]]


@contextmanager
def started(settings: Settings, world: int, interleave: int = PAGE) -> Iterator[RankZero]:
    """Fork ranks 1..world-1, which start reading; yields what rank 0 has to do in this process.

    Args:
        settings: what to read.
        world: ranks, 1..16.
        interleave: consecutive positions on one rank.

    Yields:
        A function of a progress callback that reads as rank 0; it returns rank 0's recorder and every rank's report.

    Raises:
        KeysieveError: a bad argument, or (while reading) a rank that died or made other calls.
    """
    require_int("--ranks", world, 1, MAX_WORLD, "Use at most 16 ranks.")
    require_int("--interleave", interleave, 1, len(settings.text), "Choose one within the text's length.")
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="keysieve-demo-") as folder:
        store = str(Path(folder) / "store")
        # Forked before this process starts threads (a progress bar, a process group) of its own.
        others = [
            context.Process(target=_other, args=(settings, world, rank, interleave, store)) for rank in range(1, world)
        ]
        for process in others:
            process.start()
        try:
            yield lambda progress: _one_rank(ShardedRecorder, settings, world, 0, interleave, store, progress)
        finally:
            for process in others:
                process.join(10)
                if process.is_alive():
                    process.terminate()


def _other(settings: Settings, world: int, rank: int, interleave: int, store: str) -> None:
    torch.set_num_threads(1)
    _one_rank(Follower, settings, world, rank, interleave, store, None)


def _one_rank(
    kind: Callable[..., ShardedRecorder],
    settings: Settings,
    world: int,
    rank: int,
    interleave: int,
    store: str,
    progress: Progress | None,
) -> tuple[Recorder, list[RankReport]]:
    # All ranks are on this host; a machine without a network still has its loopback.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    try:
        group = Gather(interleave=interleave, timeout=TIMEOUT)
        sizes = {"max_rows": CHUNK + 8, "context": len(settings.text), "seed": settings.seed}
        recorder = kind(Shard(group, **sizes), **sizes)
        read(settings, progress, recorder)
        mine = RankReport(recorder.digest.hexdigest(), recorder.owned, recorder.shard.keys_per_layer)
        reports: list[Any] = [None] * world
        dist.all_gather_object(reports, mine)
        return recorder, reports
    finally:
        dist.destroy_process_group()
