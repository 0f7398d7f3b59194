"""Context-parallel ranks on devices, and the unsharded context that they are held to.

The same keys are written into one cache and into the ranks' shards; a logit depends on its key's bytes alone, so what
one rank selects on the whole context is what the ranks together have to select, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import keysieve as ks


@dataclass(frozen=True)
class Geometry:
    """One case: W ranks, what they select, and of what."""

    world: int
    topk: int = 2048
    topn: int | None = None
    interleave: int = 1
    lens: tuple[int, ...] = (9000, 0, 2048, 3000)
    next_n: int = 1
    heads: int = 32
    key_format: str = "fp8_fp32"
    weights: torch.dtype = torch.float32
    distinct: int = 0
    """Keys that occur, so that logits tie; 0: all differ."""
    crowded: bool = False
    """The first stripe of positions scores highest: one rank owns most winners."""
    sharded: bool = True
    max_context: int | None = None

    @property
    def requests(self) -> int:
        return len(self.lens) // self.next_n

    @property
    def longest(self) -> int:
        return max(*self.lens, 1)


class Context:
    """Queries, weights and keys of a case, as one cache with its tables and as every rank's."""

    def __init__(self, geometry: Geometry, device: torch.device, seed: int = 0) -> None:
        g = self.geometry = geometry
        self.device = device
        self.spec = ks.IndexerSpec(g.heads, g.topk, g.key_format)
        draw = torch.Generator().manual_seed(seed)
        rows = len(g.lens)
        query, scale = ks.quantize_query(self.spec, torch.randn(rows, g.heads, 128, generator=draw))
        self.query = query if isinstance(query, tuple) else (query,)
        self.weights = ks.fold_weights(torch.randn(rows, g.heads, generator=draw), scale, 128**-0.5).to(g.weights)
        self.keys = torch.randn(g.requests, g.longest, 128, generator=draw).bfloat16()
        if g.distinct:
            which = torch.randint(0, g.distinct, (g.requests, g.longest), generator=draw)
            self.keys = torch.randn(g.distinct, 128, generator=draw).bfloat16()[which]
        if g.crowded:
            self.keys[:, : g.longest // g.world] *= 4
        self.lens = torch.tensor(g.lens, dtype=torch.int32)
        self.order = torch.Generator().manual_seed(seed + 1)

    def cache(self, positions: torch.Tensor, device: torch.device) -> tuple[ks.IndexCache, torch.Tensor]:
        """The keys at ``positions``, in this order, in a cache of permuted pages; and its index table."""
        g, count = self.geometry, positions.numel()
        columns = max(-(-count // 64), 1)
        cache = ks.IndexCache.empty(self.spec, pages=g.requests * columns + 2, device=device)
        table = torch.randperm(g.requests * columns + 2, generator=self.order)[: g.requests * columns]
        table = table.to(torch.int32).view(g.requests, columns)
        place = torch.arange(count)
        for request in range(g.requests):
            slots = table[request].to(torch.int64)[place // 64] * 64 + place % 64
            if count:
                cache.append(self.keys[request, positions].to(device), slots.to(device))
        return cache, table.to(device)

    def kv_table(self, keys: int, device: torch.device) -> torch.Tensor:
        blocks = max(-(-keys // 64), 1)
        table = torch.randperm(self.geometry.requests * blocks, generator=self.order).to(torch.int32)
        return table.view(self.geometry.requests, blocks).to(device)


class Rank:
    """One rank's indexer and tensors."""

    def __init__(self, context: Context, dcp: Any, device: torch.device, **options: Any) -> None:
        g = context.geometry
        self.context, self.dcp, self.device = context, dcp, device
        world, rank = (1, 0) if dcp is None else (dcp.world, dcp.rank)
        keys = torch.arange(g.longest)
        self.owned = keys[(keys // g.interleave) % world == rank] if world > 1 else keys
        self.cache, self.table = context.cache(self.owned if g.sharded or dcp is None else keys, device)
        self.kv_table = context.kv_table(self.owned.numel(), device)
        self.query = tuple(part.to(device) for part in context.query)
        self.weights = context.weights.to(device)
        self.lens = context.lens.to(device)
        self.indexer = ks.DecodeIndexer(
            context.spec, len(g.lens), g.max_context or g.longest, g.next_n, device=device, dcp=dcp, **options
        )
        self.stream = torch.cuda.Stream(device)

    def call(self, *, site: int = 0, rows: int | None = None, **more: Any) -> ks.Selection:
        """A step on the current stream; rows: only the first ones."""
        count = len(self.context.geometry.lens) if rows is None else rows
        requests = count // self.context.geometry.next_n
        more.setdefault("positions", True)
        more.setdefault("kv_table", self.kv_table[:requests])
        query = tuple(part[:count] for part in self.query)
        return self.indexer(
            query if len(query) > 1 else query[0],
            self.cache,
            self.weights[:count],
            self.lens[:count],
            self.table[:requests],
            kv_page=64,
            site=site,
            **more,
        )


def virtual(context: Context, devices: list[torch.device], **options: Any) -> list[Rank]:
    """Ranks in this process, one for each of ``devices``."""
    from keysieve.dcp.exchange import virtual_ranks

    g = context.geometry
    timeout = options.pop("timeout", 5.0)
    ranks = virtual_ranks(list(devices), g.topn, g.interleave, g.sharded, timeout=timeout)
    return [Rank(context, one, device, **options) for one, device in zip(ranks, devices, strict=True)]


def step(ranks: list[Rank], **more: Any) -> list[ks.Selection]:
    """One call on every rank: all candidates are pushed before the first merge is launched."""
    found = []
    for rank in ranks:
        rank.indexer._runner.split = []
        with torch.cuda.stream(rank.stream):
            found.append(rank.call(**more))
    settle(ranks)
    for rank in ranks:
        merges, rank.indexer._runner.split = rank.indexer._runner.split, None
        with torch.cuda.stream(rank.stream):
            for merge in merges:
                merge()
    settle(ranks)
    return found


def settle(ranks: list[Rank]) -> None:
    """Wait for all ranks; a merge that gave up raises what it reported."""
    for rank in ranks:
        if rank.dcp is None:
            torch.cuda.synchronize(rank.device)
        else:
            rank.dcp.check(rank.device)


def hold(ranks: list[Rank], found: list[ks.Selection], whole: ks.Selection, rows: int | None = None) -> None:
    """What the ranks selected is what one rank selected on the whole context: positions, rows and counts."""
    for rank, selection in zip(ranks, found, strict=True):
        hold_one(rank, selection, whole, rows)
    count = len(ranks[0].context.geometry.lens) if rows is None else rows
    total = torch.stack([selection.counts.cpu() for selection in found]).sum(0, dtype=torch.int32)
    assert torch.equal(total, whole.counts[:count].cpu())


def hold_one(rank: Rank, selection: ks.Selection, whole: ks.Selection, rows: int | None = None) -> None:
    """The same for one rank: all positions, and its own part of the rows, in order, compacted."""
    g = rank.context.geometry
    count = len(g.lens) if rows is None else rows
    assert whole.positions is not None
    assert selection.positions is not None
    want, have = whole.positions[:count].cpu(), selection.positions.cpu()
    wrong = (have != want).any(1).nonzero().view(-1).tolist()
    assert not wrong, f"positions on rank {rank.dcp.rank}: rows {wrong[:8]} of {count}"
    counts, chosen, table = selection.counts.cpu(), selection.rows.cpu().to(torch.int64), rank.kv_table.cpu()
    for row in range(count):
        mine = want[row][(want[row] >= 0) & ((want[row] // g.interleave) % g.world == rank.dcp.rank)].to(torch.int64)
        local = mine // (g.interleave * g.world) * g.interleave + mine % g.interleave
        physical = table[row // g.next_n].to(torch.int64)[local // 64] * 64 + local % 64
        where = f"row {row} on rank {rank.dcp.rank}"
        assert int(counts[row]) == mine.numel(), f"count of {where}: {int(counts[row])}, not {mine.numel()}"
        assert torch.equal(chosen[row, : mine.numel()], physical), where
        assert bool((chosen[row, mine.numel() :] == -1).all()), f"padding of {where}"


def both(context: Context, devices: list[torch.device], **options: Any) -> tuple[list[Rank], Rank]:
    """The ranks, and one that has the whole context."""
    return virtual(context, devices, **options), Rank(context, None, devices[0])


def raised(kind: type[BaseException], call: Callable[[], object]) -> str:
    """The text of the `kind` that `call` raises."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")
