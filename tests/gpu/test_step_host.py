"""The host side of a step on a device: forms that are known, streams, graphs, memory, limits, what is reported."""

from __future__ import annotations

import torch
from harness import cases, poison
from test_step import Inputs, allocations, raised

import keysieve as ks

CASE = (32, 512, 1, "fp8_fp32", torch.float32, 6, 6000)


def built(x: Inputs, device: torch.device, **options: object) -> ks.DecodeIndexer:
    """An indexer for the inputs; `options` replace or add arguments."""
    wanted = {"max_rows": x.rows, "max_context": x.longest, "next_n": x.next_n, "device": device} | options
    return ks.DecodeIndexer(x.spec, **wanted)  # type: ignore[arg-type]  # a dict of keyword arguments


def test_known_forms_take_new_tensors(device: torch.device) -> None:
    """Calls of one form with other tensors, all allocated anew each time, select what a first call selects."""
    sets = [Inputs(device, CASE, seed) for seed in range(3)]
    first = [built(x, device)(*x.arguments(), positions=True) for x in sets]
    indexer = built(sets[0], device)
    for i in range(60):
        x, want = sets[i % 3], first[i % 3]
        fresh = [t.clone() for t in (x.query, x.weights, x.lens)]
        table = x.table.clone()
        cache = ks.IndexCache(x.spec, x.cache.data.clone())
        rows = poison((x.rows, x.spec.topk), torch.int32, device)
        got = indexer(fresh[0], cache, fresh[1], fresh[2], table, positions=True, out=rows)
        assert got.rows is rows
        for a, b in zip(got, want, strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(a, b)
    indexer.check()


@cases(torch.int32, torch.int64)
def test_eager_steps_on_two_streams_take_turns(device: torch.device, case: torch.dtype) -> None:
    """Steps alternate between two streams without the caller's events; the workspace is never shared in time."""
    sets = [Inputs(device, (32, 2048, 2, "fp8_fp32", torch.float32, 5, 60000), seed) for seed in (1, 2)]
    indexer = built(sets[0], device)
    lens = [x.lens.to(case) for x in sets]
    want = [indexer(x.query, x.cache, x.weights, n, x.table).rows for x, n in zip(sets, lens, strict=True)]
    streams = [torch.cuda.Stream(device) for _ in sets]
    rows = [poison((x.rows, x.spec.topk), torch.int32, device) for x in sets]
    differing = [torch.zeros((), dtype=torch.int64, device=device) for _ in sets]
    torch.cuda.synchronize(device)
    for _ in range(200):
        for x, n, stream, out, expected, wrong in zip(sets, lens, streams, rows, want, differing, strict=True):
            with torch.cuda.stream(stream):
                indexer(x.query, x.cache, x.weights, n, x.table, out=out)
                wrong += (out != expected).sum()
    torch.cuda.synchronize(device)
    assert [int(wrong) for wrong in differing] == [0, 0]
    indexer.check()


@cases(True, False)
def test_a_step_waits_for_that_of_the_default_stream(device: torch.device, case: bool) -> None:
    """The default stream is behind when a step comes on another, or the other way round: the later step ends later."""
    x = Inputs(device, CASE, seed=5)
    indexer = built(x, device)
    default, side = torch.cuda.default_stream(device), torch.cuda.Stream(device)
    first, second = (default, side) if case else (side, default)
    outs = [poison((x.rows, x.spec.topk), torch.int32, device) for _ in range(2)]
    torch.cuda._sleep(1)  # what is loaded when it is first launched may wait for the device: loaded now
    want = indexer(*x.arguments()).rows
    shown = 0
    # On the checked path, then as a known form; the last one where the host is slow.
    for cycles in (60_000_000, 60_000_000, 900_000_000):
        torch.cuda.synchronize(device)
        with torch.cuda.stream(first):
            torch.cuda._sleep(cycles)
            indexer(*x.arguments(), out=outs[0])
            before = first.record_event()
        with torch.cuda.stream(second):
            indexer(*x.arguments(), out=outs[1])
            after = second.record_event()
        shown += not before.query()  # the host was ahead
        after.synchronize()
        assert before.query(), "the second step did not wait for the first"
        if shown == 2:
            break
    assert shown, "nothing was shown: a processor that others use, too, was behind the device"
    assert all(torch.equal(out, want) for out in outs)


def test_two_graphs_of_other_sizes_and_eager_steps_between(device: torch.device) -> None:
    """One indexer, two captured batch sizes and eager steps in between, one after another on one stream."""
    x = Inputs(device, CASE, seed=5)
    indexer = built(x, device)
    want = indexer(*x.arguments()).rows
    graphs, outs = [], []
    for requests in (x.requests, 2):
        out = poison((requests, x.spec.topk), torch.int32, device)
        arguments = (x.query[:requests], x.cache, x.weights[:requests], x.lens[:requests], x.table[:requests])
        counts = poison((requests,), torch.int32, device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            before = allocations(device)
            indexer(*arguments, out=out, counts=counts)
            assert allocations(device) == before
        graphs.append(graph)
        outs.append(out)
    for i in range(100):
        outs[i % 2].fill_(0x5A5A5A5A)
        graphs[i % 2].replay()
        if i % 3 == 0:
            assert torch.equal(indexer(*x.arguments()).rows, want)
        assert torch.equal(outs[i % 2], want[: outs[i % 2].shape[0]])
    indexer.check()


def test_memory_is_what_the_plan_says_and_steps_take_none(device: torch.device) -> None:
    x = Inputs(device, CASE, seed=6)
    said = ks.workspace_bytes(x.spec, x.rows, x.longest, device=device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    indexer = built(x, device)
    assert torch.cuda.memory_stats(device)["requested_bytes.all.current"] - before == said == indexer.workspace_bytes
    rows, counts = poison((x.rows, x.spec.topk), torch.int32, device), poison((x.rows,), torch.int32, device)
    for lens in (x.lens, x.lens.to(torch.int64), torch.stack([x.lens, x.lens], 1)[:, 0]):
        have = allocations(device)
        for _ in range(3):
            indexer(x.query, x.cache, x.weights, lens, x.table, out=rows, counts=counts)
        assert allocations(device) == have, "a step allocated"
    indexer.check()


def test_growth_after_capture_is_refused(device: torch.device) -> None:
    """More rows than the buffers were made for, and a kernel that is not loaded: refused, capture goes on."""
    x = Inputs(device, CASE, seed=7)
    indexer = built(x, device, max_rows=2)
    rows = poison((x.rows, x.spec.topk), torch.int32, device)
    small = (x.query[:2], x.cache, x.weights[:2], x.lens[:2], x.table[:2])
    want = indexer(*small).rows.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        said = raised(ks.KeysieveError, lambda: indexer(*x.arguments(), out=rows))
        indexer(*small, out=rows[:2])
    assert "max_rows = 2" in said
    graph.replay()
    assert torch.equal(rows[:2], want)
    assert bool((rows[2:] == 0x5A5A5A5A).all())


def test_more_keys_than_max_total_keys_raise_the_flag(device: torch.device) -> None:
    """Lengths that the host does not see: requests beyond the bound are empty, the others right, and it is reported."""
    x = Inputs(device, CASE, seed=8)
    indexer = built(x, device, max_total_keys=2 * 6016)
    whole = built(x, device)
    rows, counts = poison((x.rows, x.spec.topk), torch.int32, device), poison((x.rows,), torch.int32, device)
    lens = torch.zeros_like(x.lens)
    indexer(x.query, x.cache, x.weights, lens, x.table, out=rows, counts=counts)
    indexer.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indexer(x.query, x.cache, x.weights, lens, x.table, out=rows, counts=counts)
    lens.fill_(x.longest)
    graph.replay()
    want = whole(x.query, x.cache, x.weights, lens, x.table)
    assert counts.tolist() == [x.spec.topk] * 2 + [0] * (x.rows - 2)
    assert torch.equal(rows[:2], want.rows[:2])
    assert bool((rows[2:] == -1).all())
    assert "max_total_keys" in raised(ks.DeviceFault, indexer.check)
    lens[2:] = 0
    graph.replay()
    assert torch.equal(rows[:2], want.rows[:2])
    indexer.check()


def test_early_release_gives_the_same_bytes(device: torch.device) -> None:
    x = Inputs(device, CASE, seed=9)
    want, indexer = built(x, device)(*x.arguments()), built(x, device, early_release=True)
    assert "early release" in str(indexer.plan)
    for _ in range(50):
        assert torch.equal(indexer(*x.arguments()).rows, want.rows)
    indexer.check()


def test_inference_mode_may_begin_or_end_at_any_time(device: torch.device) -> None:
    x = Inputs(device, CASE, seed=10)
    with torch.inference_mode():
        indexer = built(x, device)
        inside = indexer(*x.arguments(), positions=True)
        lens = x.lens.to(torch.int64)
    outside = indexer(*x.arguments(), positions=True)
    again = indexer(x.query, x.cache, x.weights, lens, x.table, out=inside.rows)
    assert again.rows is inside.rows
    assert torch.equal(inside.rows, outside.rows)
    with torch.inference_mode():
        assert torch.equal(indexer(x.query, x.cache, x.weights, lens, x.table, out=outside.rows).rows, inside.rows)
    indexer.check()


def test_compiled_step_is_one_operator(device: torch.device) -> None:
    """torch.compile keeps the step whole, and a compiled caller gets the eager bytes."""
    x = Inputs(device, CASE, seed=11)
    indexer = built(x, device)

    def layer(query: torch.Tensor, weights: torch.Tensor, lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = indexer(query, x.cache, weights * 1.0, lens, x.table)
        return out.rows + 0, out.counts

    rows, counts = torch.compile(layer, backend="aot_eager", fullgraph=True)(x.query, x.weights, x.lens)
    want = indexer(*x.arguments())
    assert torch.equal(rows, want.rows)
    assert torch.equal(counts, want.counts)


def test_refusals_of_known_forms_write_nothing(device: torch.device) -> None:
    """After a good call, arguments that only addresses tell apart from it are refused as on a first call."""
    x = Inputs(device, CASE, seed=12)
    indexer = built(x, device)
    rows, counts = poison((x.rows, x.spec.topk), torch.int32, device), poison((x.rows,), torch.int32, device)
    indexer(*x.arguments(), out=rows, counts=counts)
    rows.fill_(0x5A5A5A5A)
    shifted = torch.empty(x.query.numel() + 1, dtype=torch.uint8, device=device)[1:].view(x.query.shape)
    shifted.copy_(x.query.view(torch.uint8))
    query = shifted.view(x.query.dtype)
    for known in (indexer, built(x, device)):
        said = raised(
            ks.KeysieveError,
            lambda i=known: i(query, x.cache, x.weights, x.lens, x.table, out=rows, counts=counts),
        )
        assert "query" in said
        assert "16-byte alignment" in said
        said = raised(ks.KeysieveError, lambda i=known: i(*x.arguments(), out=rows, counts=rows.view(-1)[: x.rows]))
        assert "counts" in said
    assert bool((rows == 0x5A5A5A5A).all())


def test_a_capture_that_forks_keeps_its_steps_apart(device: torch.device) -> None:
    """Two steps on two streams of one capture share the workspace and do not meet in it."""
    sets = [Inputs(device, (32, 2048, 2, "fp8_fp32", torch.float32, 5, 60000), seed) for seed in (3, 4)]
    indexer = built(sets[0], device)
    want = [indexer(*x.arguments()).rows for x in sets]
    rows = [poison((x.rows, x.spec.topk), torch.int32, device) for x in sets]
    counts = [poison((x.rows,), torch.int32, device) for x in sets]
    side, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream(device)
        side.wait_stream(main)
        for _ in range(5):
            for x, out, number, stream in zip(sets, rows, counts, (main, side), strict=True):
                with torch.cuda.stream(stream):
                    indexer(*x.arguments(), out=out, counts=number)
        main.wait_stream(side)
    for _ in range(50):
        for out in rows:
            out.fill_(0x5A5A5A5A)
        graph.replay()
        assert all(torch.equal(out, expected) for out, expected in zip(rows, want, strict=True))
    indexer.check()


def test_a_kernel_first_asked_for_in_a_capture_is_refused(device: torch.device) -> None:
    """bfloat16 weights and an unusual shape: no other test has loaded that scorer. An eager step is the cure."""
    x = Inputs(device, (16, 64, 5, "fp8_ue8m0", torch.bfloat16, 2, 900), seed=13)
    indexer = built(x, device)
    rows, counts = poison((x.rows, 64), torch.int32, device), poison((x.rows,), torch.int32, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        said = raised(ks.KeysieveError, lambda: indexer(*x.arguments(), out=rows, counts=counts))
        rows[:1].add_(0)
    assert "graph is being captured" in said
    assert "run one step" in said
    want = indexer(*x.arguments()).rows
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        indexer(*x.arguments(), out=rows, counts=counts)
    graph.replay()
    assert torch.equal(rows, want)


def test_tensors_on_the_last_device(device: torch.device) -> None:
    """Whatever device is current: with several GPUs, tensors and streams of another one; with one GPU, that one."""
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    here, there = Inputs(device, CASE, seed=14), Inputs(last, CASE, seed=14)
    assert torch.cuda.current_device() == device.index
    indexer = built(there, last)
    want = built(here, device)(*here.arguments(), positions=True)
    side = torch.cuda.Stream(last)
    for i in range(6):
        with torch.cuda.stream(side if i % 2 else None), torch.cuda.device(device):
            got = indexer(*there.arguments(), positions=True)
        torch.cuda.synchronize(last)
        assert got.rows.device == last
        assert torch.equal(got.rows.cpu(), want.rows.cpu())
        assert torch.equal(got.counts.cpu(), want.counts.cpu())
    positions, counts = there.expected()
    assert torch.equal(want.rows.cpu(), positions)
    assert torch.equal(want.counts.cpu(), counts)
    assert torch.cuda.current_device() == device.index
    indexer.check()


def test_64_bit_lengths_do_not_wrap(device: torch.device) -> None:
    """2**32 + 5 keys are beyond every limit: an empty row and a report, in steps (checked, then known) and in topk."""
    x = Inputs(device, CASE, seed=15)
    indexer = built(x, device)
    want = indexer(*x.arguments()).rows
    lens = x.lens.to(torch.int64)
    lens[1] = 2**32 + 5
    for _ in range(2):
        out = indexer(x.query, x.cache, x.weights, lens, x.table)
        assert int(out.counts[1]) == 0
        assert torch.equal(out.rows[2:], want[2:])
        assert "seq_lens" in raised(ks.DeviceFault, indexer.check)
    logits = torch.zeros(2, 64, dtype=torch.bfloat16, device=device)
    _, counts = ks.topk(logits, torch.tensor([2**32 + 5, 9], device=device), 4)
    assert counts.tolist() == [0, 4]
    raised(ks.DeviceFault, indexer.check)


def test_public_topk_fills_counts_with_gaps(device: torch.device) -> None:
    buffer = torch.full((8, 2), -9, dtype=torch.int32, device=device)
    logits = torch.zeros(8, 64, dtype=torch.bfloat16, device=device)
    lengths = torch.arange(8, dtype=torch.int32, device=device)
    ks.topk(logits, lengths, 5, counts=buffer[:, 0])
    assert buffer[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 5, 5]
    assert buffer[:, 1].tolist() == [-9] * 8
