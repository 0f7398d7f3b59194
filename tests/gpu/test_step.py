"""The whole step on a device: it selects what a stable order of the device's own logits selects, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import cases, poison

import keysieve as ks
from keysieve.reference.rows import physical_rows
from keysieve.reference.topk import select

STEPS = [
    # heads, topk, next_n, format, weights, requests, longest
    (32, 2048, 1, "fp8_fp32", torch.float32, 9, 9000),
    (32, 2048, 2, "fp8_ue8m0", torch.bfloat16, 5, 20000),
    (64, 512, 4, "fp8_fp32", torch.float32, 7, 6000),
    (8, 64, 3, "fp8_fp32", torch.float32, 12, 3000),
    (16, 705, 8, "fp8_ue8m0", torch.float32, 3, 5000),
    (32, 4096, 1, "fp8_fp32", torch.bfloat16, 3, 140000),
    (32, 1, 1, "fp8_fp32", torch.float32, 40, 700),
    (32, 2048, 1, "mxfp4", torch.float32, 9, 9000),
    (64, 512, 4, "mxfp4", torch.bfloat16, 7, 6000),
    (8, 64, 3, "mxfp4", torch.float32, 12, 3000),
]


def raised(kind: type[Exception], call: Callable[[], object]) -> str:
    """The text of the `kind` that `call` raises. (The runner of machines without pytest runs this file too.)"""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def allocations(device: torch.device) -> int:
    """Device allocations that this process has made so far. (Entering a capture collects garbage: bytes may fall.)"""
    return int(torch.cuda.memory_stats(device)["allocation.all.allocated"])


class Inputs:
    """One step's tensors on the device: permuted pages, ragged lengths with padding rows, poisoned spare columns."""

    def __init__(self, device: torch.device, case: tuple[int, int, int, str, torch.dtype, int, int], seed: int) -> None:
        heads, topk, self.next_n, key_format, dtype, self.requests, self.longest = case
        draw = torch.Generator().manual_seed(seed)
        self.spec = ks.IndexerSpec(heads, topk, key_format)
        self.rows = self.requests * self.next_n
        columns = -(-self.longest // 64)
        pages = self.requests * columns + 3
        self.cache = ks.IndexCache.empty(self.spec, pages=pages, device=device)
        keys = torch.randn(4096, 128, generator=draw).to(device)
        for first in range(0, pages * 64, 4096):
            slots = torch.arange(first, min(first + 4096, pages * 64), device=device)
            self.cache.append(keys[: slots.numel()] * (1 + first % 7), slots)
        order = torch.randperm(pages, generator=draw)[: self.requests * columns].to(torch.int32)
        spare = torch.full((self.requests, 5), 0x7F0F0F0F, dtype=torch.int32)
        self.table = torch.cat([order.view(self.requests, columns), spare], 1).to(device)[:, :-1]
        query, scale = ks.quantize_query(self.spec, torch.randn(self.rows, heads, 128, generator=draw))
        self.query = query.to(device) if isinstance(query, torch.Tensor) else tuple(t.to(device) for t in query)
        weights = ks.fold_weights(torch.randn(self.rows, heads, generator=draw), scale, 128**-0.5)
        self.weights = weights.to(device, dtype)
        lengths = torch.randint(0, self.longest + 1, (self.rows,), generator=draw)
        lengths[torch.rand(self.rows, generator=draw) < 0.2] = 0
        lengths[-1], lengths[0] = self.longest, min(topk + 1, self.longest)
        self.lengths = lengths.to(torch.int32)
        self.lens = self.lengths.to(device)
        blocks = -(-self.longest // 128)
        self.kv_table = torch.randperm(self.requests * blocks, generator=draw).to(torch.int32).view(-1, blocks)

    def arguments(self) -> tuple[Any, ks.IndexCache, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.cache, self.weights, self.lens, self.table

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and counts by the reference selection over the device's own logits."""
        logits = ks.score(self.spec, *self.arguments(), max_len=self.longest)
        return select(logits.cpu(), self.lengths.tolist(), self.spec.topk)


@cases(*STEPS)
def test_step_selects_from_its_own_logits(
    device: torch.device, case: tuple[int, int, int, str, torch.dtype, int, int]
) -> None:
    x = Inputs(device, case, seed=sum(v for v in case if isinstance(v, int)))
    positions, counts = x.expected()
    indexer = ks.DecodeIndexer(x.spec, max_rows=x.rows, max_context=x.longest, next_n=x.next_n, device=device)
    wide = poison((x.rows, x.spec.topk + 8), torch.int32, device)
    kv_table = x.kv_table.to(device)
    out = indexer(
        *x.arguments(), kv_table=kv_table, kv_page=128, block_rows=640, positions=True, out=wide[:, : x.spec.topk]
    )
    indexer.check()
    assert torch.equal(out.counts.cpu(), counts)
    assert out.positions is not None
    assert torch.equal(out.positions.cpu(), positions)
    assert torch.equal(out.rows.cpu(), physical_rows(positions, x.kv_table, kv_page=128, block_rows=640))
    assert bool((wide[:, x.spec.topk :] == 0x5A5A5A5A).all()), "written past the row"
    again = indexer(*x.arguments())
    assert torch.equal(again.rows, out.positions)


@cases(STEPS[0], STEPS[7])
def test_one_graph_serves_every_length(
    device: torch.device, case: tuple[int, int, int, str, torch.dtype, int, int]
) -> None:
    """Captured with zero lengths, replayed with long ones, short ones, and zero again."""
    x = Inputs(device, case, seed=3)
    indexer = ks.DecodeIndexer(x.spec, max_rows=x.rows, max_context=x.longest, device=device)
    rows = poison((x.rows, x.spec.topk), torch.int32, device)
    counts = poison((x.rows,), torch.int32, device)
    lens = torch.zeros_like(x.lens)

    def step() -> None:
        indexer(x.query, x.cache, x.weights, lens, x.table, out=rows, counts=counts)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = allocations(device)
        step()
        assert allocations(device) == before, "a captured step allocated"
    for lengths in (x.lengths, x.lengths.flip(0), x.lengths.clamp(max=2048), torch.zeros_like(x.lengths), x.lengths):
        lens.copy_(lengths)
        rows.fill_(0x5A5A5A5A)
        graph.replay()
        x.lens, x.lengths = lens, lengths
        positions, number = x.expected()
        assert torch.equal(counts.cpu(), number)
        assert torch.equal(rows.cpu(), positions)
    indexer.check()


def test_repeats_on_dirty_memory_are_byte_equal(device: torch.device) -> None:
    """A thousand steps, a copy engine and a memory hog beside them on another stream."""
    x = Inputs(device, (32, 2048, 2, "fp8_fp32", torch.float32, 6, 30000), seed=8)
    indexer = ks.DecodeIndexer(x.spec, max_rows=x.rows, max_context=x.longest, next_n=2, device=device)
    first = indexer(*x.arguments()).rows.clone()
    hog, side = torch.empty(1 << 26, device=device), torch.cuda.Stream()
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for i in range(1000):
        if i % 10 == 0:
            with torch.cuda.stream(side):
                hog.mul_(1.0001)
        differing += (indexer(*x.arguments()).rows != first).sum()
    assert int(differing) == 0
    indexer.check()


def test_side_stream_and_other_length_forms(device: torch.device) -> None:
    """Inputs made on a side stream after a spin are the ones used; 2-D, int64 and strided lengths give the same."""
    x = Inputs(device, STEPS[1], seed=4)
    indexer = ks.DecodeIndexer(x.spec, max_rows=x.rows, max_context=x.longest, next_n=2, device=device)
    expected = indexer(*x.arguments()).rows.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(5_000_000)
        lens = x.lens.clone()
        got = indexer(x.query, x.cache, x.weights, lens, x.table).rows
    side.synchronize()
    assert torch.equal(got, expected)
    strided = torch.stack([x.lens, x.lens * 0 - 1], 1)[:, 0]
    for lens in (x.lens.view(-1, 2), x.lens.to(torch.int64), strided):
        assert torch.equal(indexer(x.query, x.cache, x.weights, lens, x.table).rows, expected)
    indexer.check()


def test_faults_are_contained_and_reported(device: torch.device) -> None:
    """A page id outside the pool and a length beyond the table: safe results, one report each, then silence."""
    x = Inputs(device, STEPS[0], seed=5)
    indexer = ks.DecodeIndexer(x.spec, max_rows=x.rows, max_context=x.longest, device=device)
    good = indexer(*x.arguments(), positions=True)
    lens = x.lens.clone()
    lens[2] = x.longest + 100_000
    out = indexer(x.query, x.cache, x.weights, lens, x.table)
    keep = torch.arange(x.rows, device=device) != 2
    assert int(out.counts[2]) == 0
    assert bool((out.rows[2] == -1).all())
    assert torch.equal(out.rows[keep], good.rows[keep])
    assert "seq_lens" in raised(ks.DeviceFault, indexer.check)
    indexer.check()


def test_supports_and_refusals(device: torch.device) -> None:
    """What this backend cannot do is said, with the same text, before anything is launched."""
    assert ks.supports(ks.IndexerSpec(32, 2048), 4, "auto", device) is None
    assert ks.supports(ks.IndexerSpec(64, 2048, "mxfp4"), 8, "auto", device) is None
    for key_format in ("fp8_fp32", "mxfp4"):
        spec = ks.IndexerSpec(32, 2048, key_format, numerics="bf16")
        reason = ks.supports(spec, 1, "auto", device)
        assert reason
        assert raised(ks.UnsupportedError, lambda s=spec: ks.DecodeIndexer(s, 1, 128, device=device)) == reason
