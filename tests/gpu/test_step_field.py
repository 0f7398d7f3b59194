"""Cases from the field that concern memory, graphs and time of the step on a device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import poison
from test_step import Inputs, allocations

import keysieve as ks
from keysieve.reference.topk import select

CASE = (32, 2048, 1, "fp8_fp32", torch.float32, 4, 9000)


def pool(device: torch.device, keys: int, seed: int) -> tuple[ks.IndexerSpec, ks.IndexCache]:
    """An fp8_fp32 pool of distinct random keys: bytes without NaN codes, scales in [1, 2)."""
    spec = ks.IndexerSpec(32, 2048, "fp8_fp32")
    cache = ks.IndexCache.empty(spec, pages=-(-keys // 64), device=device)
    draw = torch.Generator(device).manual_seed(seed)
    codes = torch.randint(0, 0x7F, cache.data.shape, dtype=torch.uint8, device=device, generator=draw)
    signs = torch.randint(0, 2, cache.data.shape, dtype=torch.uint8, device=device, generator=draw)
    flat = cache.data.view(cache.data.shape[0], -1)
    flat.copy_((codes | (signs << 7)).view_as(flat))
    flat[:, 8192:].view(torch.float32).copy_(1 + torch.rand(flat.shape[0], 64, device=device, generator=draw))
    return spec, cache


def operands(spec: ks.IndexerSpec, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Query codes and head weights of so many rows."""
    draw = torch.Generator().manual_seed(rows)
    codes, scale = ks.quantize_query(spec, torch.randn(rows, spec.heads, 128, generator=draw))
    assert isinstance(codes, torch.Tensor)
    weights = ks.fold_weights(torch.randn(rows, spec.heads, generator=draw), scale, 128**-0.5)
    return codes.to(device), weights.to(device)


def microseconds(step: Callable[[], object], device: torch.device) -> float:
    """The best of nine times of a step in a graph of twenty."""
    step()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            step()
    best = float("inf")
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, 1000 * begin.elapsed_time(end) / 20)
    return best


def test_a_million_keys_of_64_rows_take_the_stated_memory(device: torch.device) -> None:
    """64 rows of 1,048,576 keys, one page table for all: the peak beside the inputs is what was said beforehand."""
    keys = 1 << 20
    spec, cache = pool(device, keys, seed=1)
    query, weights = operands(spec, 64, device)
    table = torch.arange(keys // 64, dtype=torch.int32, device=device).expand(64, -1)
    lens = torch.full((64,), keys, dtype=torch.int32, device=device)
    lens[1::2] -= torch.arange(32, dtype=torch.int32, device=device)
    said = ks.workspace_bytes(spec, 64, keys, device=device)
    assert said < 64 * keys * 2 * 1.2, "BF16 logits and an eighth as many maxima, not more"
    rows, counts = poison((64, 2048), torch.int32, device), poison((64,), torch.int32, device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    indexer = ks.DecodeIndexer(spec, 64, keys, device=device)
    indexer(query, cache, weights, lens, table, out=rows, counts=counts)
    torch.cuda.synchronize(device)
    assert torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before <= said
    for t in (0, 63):
        alone = ks.score(spec, query[t : t + 1], cache, weights[t : t + 1], lens[t : t + 1], table[:1], max_len=keys)
        positions, _ = select(alone.cpu(), [int(lens[t])], 2048)
        assert torch.equal(rows[t].cpu(), positions[0])
    assert counts.tolist() == [2048] * 64
    indexer.check()


def test_growing_contexts_allocate_nothing(device: torch.device) -> None:
    """Lengths grow from 1 to 200,000 over 400 steps; device allocations stay what they were."""
    spec, cache = pool(device, 200_000, seed=2)
    query, weights = operands(spec, 2, device)
    table = torch.arange(200_000 // 64, dtype=torch.int32, device=device).expand(2, -1)
    indexer = ks.DecodeIndexer(spec, 2, 200_000, device=device)
    rows, counts = poison((2, 2048), torch.int32, device), poison((2,), torch.int32, device)
    lens = torch.ones(2, dtype=torch.int32, device=device)
    indexer(query, cache, weights, lens, table, out=rows, counts=counts)
    have = allocations(device)
    for _ in range(400):
        lens += 499
        indexer(query, cache, weights, lens, table, out=rows, counts=counts)
    assert allocations(device) == have
    assert counts.tolist() == [2048, 2048]
    indexer.check()


def test_short_rows_read_no_key(device: torch.device) -> None:
    """Rows of at most topk keys take all of them, also from pages full of NaN; longer rows beside them are right."""
    x = Inputs(device, CASE, seed=3)
    x.lengths = torch.tensor([2048, 9000, 1, 0], dtype=torch.int32)
    x.lens = x.lengths.to(device)
    indexer = ks.DecodeIndexer(x.spec, x.rows, x.longest, device=device)
    want, _ = x.expected()
    for request in (0, 2, 3):
        x.cache.data[x.table[request, : -(-x.longest // 64)].long()] = 0xFF
    out = indexer(*x.arguments())
    assert torch.equal(out.rows.cpu(), want)
    assert out.rows[0].tolist() == list(range(2048))
    assert out.counts.tolist() == [2048, 2048, 1, 0]
    indexer.check()


def test_capture_of_a_short_row_allocates_nothing(device: torch.device) -> None:
    """topk 2048 and 501 keys, captured with an allocator that would show in the counts."""
    x = Inputs(device, (32, 2048, 1, "fp8_fp32", torch.float32, 1, 501), seed=4)
    indexer = ks.DecodeIndexer(x.spec, 1, 501, device=device)
    rows, counts = poison((1, 2048), torch.int32, device), poison((1,), torch.int32, device)
    indexer(*x.arguments(), out=rows, counts=counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = allocations(device)
        indexer(*x.arguments(), out=rows, counts=counts)
        assert allocations(device) == before
    rows.fill_(0x5A5A5A5A)
    graph.replay()
    assert rows[0].tolist() == list(range(501)) + [-1] * 1547
    assert counts.tolist() == [501]


def test_formats_at_the_same_addresses_are_told_apart(device: torch.device) -> None:
    """The same bytes read as fp8_fp32 and as fp8_ue8m0 by two indexers, in turns: each gives what it gives alone."""
    x = Inputs(device, (32, 512, 1, "fp8_ue8m0", torch.float32, 3, 5000), seed=5)
    forms = []
    for key_format in ("fp8_ue8m0", "fp8_fp32"):
        spec = ks.IndexerSpec(32, 512, key_format)
        cache = ks.IndexCache(spec, x.cache.data)
        logits = ks.score(spec, x.query, cache, x.weights, x.lens, x.table, max_len=x.longest)
        want, _ = select(logits.cpu(), x.lengths.tolist(), 512)
        forms.append((ks.DecodeIndexer(spec, x.rows, x.longest, device=device), cache, want))
    for i in range(20):
        indexer, cache, want = forms[i % 2]
        assert torch.equal(indexer(x.query, cache, x.weights, x.lens, x.table).rows.cpu(), want)


def test_tensors_freed_right_after_the_call(device: torch.device) -> None:
    """Inputs and results of a side stream are freed and their memory is written anew while steps are still to run."""
    x = Inputs(device, CASE, seed=6)
    indexer = ks.DecodeIndexer(x.spec, x.rows, x.longest, device=device)
    want = indexer(*x.arguments()).rows.clone()
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
    side.wait_stream(torch.cuda.current_stream(device))
    differing = torch.zeros((), dtype=torch.int64, device=device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        for _ in range(200):
            query, weights, lens, table = x.query.clone(), x.weights.clone(), x.lens.clone(), x.table.clone()
            out = indexer(query, x.cache, weights, lens, table)
            del query, weights, lens, table
            for n in (x.query.numel(), x.weights.numel() * 4, x.lens.numel() * 4, x.table.numel() * 4):
                torch.full((n,), 0xFF, dtype=torch.uint8, device=device)
            differing += (out.rows != want).sum()
    side.synchronize()
    assert int(differing) == 0


def test_time_follows_lengths_not_the_table(device: torch.device) -> None:
    """2,049 to 4,096 keys in a table a million keys wide take what they take in a narrow one; two rows hardly more."""
    keys = 1 << 20
    spec, cache = pool(device, keys, seed=7)
    query, weights = operands(spec, 2, device)
    table = torch.arange(keys // 64, dtype=torch.int32, device=device).expand(2, -1)
    out = (poison((2, 2048), torch.int32, device), poison((2,), torch.int32, device))

    def timed(indexer: ks.DecodeIndexer, n: int, length: int, width: int) -> float:
        lens = torch.full((n,), length, dtype=torch.int32, device=device)
        given = (query[:n], cache, weights[:n], lens, table[:n, : width // 64])
        return microseconds(lambda: indexer(*given, out=out[0][:n], counts=out[1][:n]), device)

    wide = ks.DecodeIndexer(spec, 2, keys, device=device)
    narrow, broad = timed(wide, 1, 4096, 4096), timed(wide, 1, 4096, keys)
    one, two = timed(wide, 1, 131072, 131072), timed(wide, 2, 131072, 131072)
    print(f"  1x4K in a narrow table {narrow:.2f} us, in one of 1M {broad:.2f}; 1x128K {one:.2f}, 2x128K {two:.2f}")
    assert broad <= 1.05 * narrow + 0.3
    # 1.2 times is out of reach so near the limit: the second row's 17 MB are 4 us at the memory's speed.
    assert two <= one + 1.5 * 131072 * 132 / 4.27e6, "a second row costs more than its bytes"
    assert narrow <= 9.0, "the floor of small batches"
