"""Ten thousand replays, with lengths, tables, queries and cache contents changing between them, bit for bit.

What is expected comes from the reference selection over the device's own logits, once for each (contents, lengths);
where the keys lie (the index table, the KV table) is drawn anew for every replay and must not matter.
"""

from __future__ import annotations

from typing import Any

import torch
from harness import cases, poison

import keysieve as ks
from keysieve.reference.topk import select

REPLAYS = 10_000
CONTENTS, LENGTHS, TABLES = 4, 12, 16
KV_PAGE, BLOCK_ROWS = 128, 640

SOAKS = [
    # heads, topk, next_n, format, requests, longest
    (32, 2048, 1, "fp8_fp32", 12, 9000),
    (64, 512, 2, "fp8_ue8m0", 5, 24000),
    (32, 2048, 1, "fp8_fp32", 1, 140000),  # one request: the row is taken by a cluster
]


class Traffic:
    """Everything that can change between two replays, prepared on the device, and the static buffers it goes into."""

    def __init__(self, device: torch.device, case: tuple[int, int, int, str, int, int], seed: int) -> None:
        heads, topk, self.next_n, key_format, self.requests, self.longest = case
        draw = torch.Generator().manual_seed(seed)
        self.spec = ks.IndexerSpec(heads, topk, key_format)
        self.rows = self.requests * self.next_n
        self.columns = -(-self.longest // 64)
        used, pages = self.requests * self.columns, self.requests * self.columns + 7
        self.pages = [self._keys(device, used, draw) for _ in range(CONTENTS)]
        self.queries, self.weights = [], []
        for _ in range(CONTENTS):
            codes, scale = ks.quantize_query(self.spec, torch.randn(self.rows, heads, 128, generator=draw))
            assert isinstance(codes, torch.Tensor)
            self.queries.append(codes.to(device))
            weights = ks.fold_weights(torch.randn(self.rows, heads, generator=draw), scale, 128**-0.5)
            self.weights.append(weights.to(device))
        self.lengths = [self._lengths(draw, topk, i) for i in range(LENGTHS)]
        self.on_device = [lens.to(device) for lens in self.lengths]
        self.orders = [torch.randperm(pages, generator=draw)[:used].to(device) for _ in range(TABLES)]
        blocks = -(-self.longest // KV_PAGE)
        kv = [torch.randperm(self.requests * blocks, generator=draw).to(torch.int32) for _ in range(TABLES)]
        self.kv = [table.view(self.requests, blocks).to(device) for table in kv]
        # What a graph reads and writes. Spare pages hold NaN keys and infinite scales throughout.
        self.cache = ks.IndexCache.empty(self.spec, pages=pages, device=device)
        self.cache.data.fill_(0xFF)
        self.query, self.weight = self.queries[0].clone(), self.weights[0].clone()
        self.lens = torch.zeros(self.rows, dtype=torch.int32, device=device)
        self.table = torch.full((self.requests, self.columns + 3), 0x7F0F0F0F, dtype=torch.int32, device=device)
        self.kv_table = self.kv[0].clone()
        self.out = ks.Selection(
            poison((self.rows, topk + 8), torch.int32, device)[:, :topk],
            poison((self.rows,), torch.int32, device),
            poison((self.rows, topk), torch.int32, device),
        )
        self.wrong = torch.zeros(3, dtype=torch.int64, device=device)
        self.owner = torch.arange(self.rows, device=device)[:, None] // self.next_n
        self.want = [[self._expected(c, n) for n in range(LENGTHS)] for c in range(CONTENTS)]

    def _keys(self, device: torch.device, pages: int, draw: torch.Generator) -> torch.Tensor:
        """Bytes of so many pages in logical order; few distinct keys, so that ties run through many cuts."""
        cache = ks.IndexCache.empty(self.spec, pages=pages, device=device)
        keys = torch.randn(1024, 128, generator=draw).to(device)
        pick = torch.randint(0, 1024, (pages * 64,), generator=draw).to(device)
        cache.append(keys[pick], torch.arange(pages * 64, device=device))
        return cache.data.clone()

    def _lengths(self, draw: torch.Generator, topk: int, i: int) -> torch.Tensor:
        """All empty, all longest, all about topk, else ragged with padding rows."""
        lens = torch.randint(0, self.longest + 1, (self.rows,), generator=draw)
        lens[torch.rand(self.rows, generator=draw) < 0.2] = -1
        if i < 3:
            lens = torch.full((self.rows,), (0, self.longest, topk + 1)[i])
        return lens.to(torch.int32)

    def _expected(self, contents: int, lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.load(contents, lengths, 0)
        logits = ks.score(
            self.spec, self.query, self.cache, self.weight, self.lens, self.table, max_len=self.longest
        ).cpu()
        positions, counts = select(logits, self.lengths[lengths].clamp(min=0).tolist(), self.spec.topk)
        return positions.to(self.lens.device), counts.to(self.lens.device)

    def load(self, contents: int, lengths: int, table: int) -> None:
        """Put one state into the static buffers, on the current stream."""
        order = self.orders[table]
        self.cache.data[order] = self.pages[contents]
        self.table[:, : self.columns] = order.view(self.requests, self.columns)
        self.kv_table.copy_(self.kv[table])
        self.query.copy_(self.queries[contents])
        self.weight.copy_(self.weights[contents])
        self.lens.copy_(self.on_device[lengths])

    def step(self, indexer: ks.DecodeIndexer) -> None:
        assert self.out.positions is not None
        indexer(
            *(self.query, self.cache, self.weight, self.lens, self.table),
            kv_table=self.kv_table,
            kv_page=KV_PAGE,
            block_rows=BLOCK_ROWS,
            out=self.out.rows,
            counts=self.out.counts,
            positions=self.out.positions,
        )

    def spoil(self) -> None:
        """Outputs that hold what nobody writes."""
        for tensor in self.out:
            assert tensor is not None
            tensor.fill_(0x5A5A5A5A)

    def compare(self, contents: int, lengths: int) -> None:
        """Count elements that differ, on the device."""
        positions, counts = self.want[contents][lengths]
        assert self.out.positions is not None
        self.wrong[0] += (self.out.positions != positions).sum()
        self.wrong[1] += (self.out.counts != counts).sum()
        at = positions.clamp(min=0).long()
        rows = self.kv_table[self.owner, at // KV_PAGE] * BLOCK_ROWS + at % KV_PAGE
        self.wrong[2] += (self.out.rows != torch.where(positions < 0, -1, rows)).sum()


def states(replays: int, seed: int) -> list[list[int]]:
    """(contents, lengths, table) of each replay."""
    draw = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, n, (replays,), generator=draw) for n in (CONTENTS, LENGTHS, TABLES)]
    return torch.stack(drawn, 1).tolist()


def built(x: Traffic, device: torch.device, **options: Any) -> ks.DecodeIndexer:
    return ks.DecodeIndexer(x.spec, x.rows, x.longest, next_n=x.next_n, device=device, **options)


def captured(x: Traffic, indexer: ks.DecodeIndexer, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of one step, captured with all lengths zero."""
    x.lens.zero_()
    torch.cuda.synchronize()  # lengths must not change while a step reads them
    with torch.cuda.stream(stream):
        x.step(indexer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        x.step(indexer)
    return graph


def garbage(indexer: ks.DecodeIndexer, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The workspace's tensors as bytes, each with random bytes to fill it with: what a step finds there is any."""
    runner: Any = indexer._runner
    found = []
    for tensor in (runner._logits, runner._tops, runner._starts):
        place = tensor.view(torch.uint8)
        found.append((place, torch.randint(0, 256, place.shape, dtype=torch.uint8, device=device)))
    return found


@cases(*SOAKS)
def test_soak(device: torch.device, case: tuple[int, int, int, str, int, int]) -> None:
    """10,000 replays on a stream of its own; every 16th finds a dirty workspace; a memory hog runs beside them."""
    x = Traffic(device, case, seed=case[4] + case[5])
    indexer = built(x, device)
    stream, side = torch.cuda.Stream(device), torch.cuda.Stream(device)
    graph = captured(x, indexer, stream)
    dirt = garbage(indexer, device)
    hog = torch.empty(1 << 25, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for i, (contents, lengths, table) in enumerate(states(REPLAYS, seed=1)):
            x.load(contents, lengths, table)
            x.spoil()
            if i % 16 == 0:
                for place, bytes_ in dirt:
                    place.copy_(bytes_)
            if i % 8 == 0:
                with torch.cuda.stream(side):
                    hog.mul_(1.0001)
            graph.replay()
            x.compare(contents, lengths)
            if i % 1000 == 999:
                assert x.wrong.tolist() == [0, 0, 0], f"differing positions, counts, rows by replay {i}"
    torch.cuda.synchronize()
    indexer.check()


def test_soak_of_two_graphs_on_two_streams(device: torch.device) -> None:
    """Two indexers, a graph each, replayed side by side on two streams, eager steps of a third between them."""
    sets = [Traffic(device, case, seed=21 + i) for i, case in enumerate(SOAKS[:2])]
    indexers = [built(x, device) for x in sets]
    eager = built(sets[0], device, early_release=True)
    streams = [torch.cuda.Stream(device) for _ in sets]
    graphs = [captured(x, indexer, stream) for x, indexer, stream in zip(sets, indexers, streams, strict=True)]
    torch.cuda.synchronize()
    for i, picks in enumerate(zip(states(REPLAYS // 2, 2), states(REPLAYS // 2, 3), strict=True)):
        for x, graph, stream, (contents, lengths, table) in zip(sets, graphs, streams, picks, strict=True):
            with torch.cuda.stream(stream):
                x.load(contents, lengths, table)
                x.spoil()
                graph.replay()
                x.compare(contents, lengths)
                if i % 10 == 0 and x is sets[0]:
                    x.spoil()
                    x.step(eager)
                    x.compare(contents, lengths)
        if i % 500 == 499:
            assert [x.wrong.tolist() for x in sets] == [[0, 0, 0]] * 2, f"by replay {i}"
    torch.cuda.synchronize()
    for indexer in (*indexers, eager):
        indexer.check()


def test_soak_with_producers_in_the_graph(device: torch.device) -> None:
    """Lengths, tables and query are written by kernels of the graph right before the step; copies run beside it."""
    x = Traffic(device, SOAKS[0], seed=31)
    indexer = built(x, device)
    stream, side = torch.cuda.Stream(device), torch.cuda.Stream(device)
    staged = [t.clone() for t in (x.lens, x.table, x.kv_table, x.query.view(torch.uint8))]
    captured(x, indexer, stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for tensor, source in zip((x.lens, x.table, x.kv_table, x.query.view(torch.uint8)), staged, strict=True):
            tensor.copy_(source)
        x.step(indexer)
    big = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    other = torch.empty_like(big)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for i, (contents, lengths, table) in enumerate(states(REPLAYS, seed=4)):
            x.load(contents, lengths, table)
            for tensor, source in zip((x.lens, x.table, x.kv_table, x.query.view(torch.uint8)), staged, strict=True):
                source.copy_(tensor)
            x.lens.fill_(x.longest)  # stale values would be seen
            x.kv_table.zero_()
            x.spoil()
            if i % 8 == 0:
                with torch.cuda.stream(side):
                    other.copy_(big)
            graph.replay()
            x.compare(contents, lengths)
            if i % 1000 == 999:
                assert x.wrong.tolist() == [0, 0, 0], f"by replay {i}"
    torch.cuda.synchronize()
    indexer.check()
