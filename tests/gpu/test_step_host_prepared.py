"""Steps whose launches the driver is given ready made: any addresses, streams, captures and threads; the same bytes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from harness import cases, poison
from test_step import Inputs, allocations
from test_step_host import CASE, built

import keysieve as ks
from keysieve import repeats

PREPARED_AFTER = 4

SHAPES = (
    CASE,
    (32, 512, 4, "fp8_fp32", torch.float32, 3, 3000),
    (64, 2048, 1, "fp8_ue8m0", torch.float32, 2, 90000),
    (64, 1024, 2, "mxfp4", torch.float32, 4, 5000),
    (32, 2048, 1, "fp8_fp32", torch.bfloat16, 1, 300000),
)


def prepared(test: Callable[..., None]) -> Callable[..., None]:
    """Forms that the test makes are prepared when they have come back four times."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        before, repeats.PREPARED_AFTER = repeats.PREPARED_AFTER, PREPARED_AFTER
        try:
            test(*args, **options)
        finally:
            repeats.PREPARED_AFTER = before

    return run


class Step:
    """One indexer and its inputs, with a form that has come back often enough."""

    def __init__(self, device: torch.device, case: Any, *, positions: bool = False) -> None:
        self.x = Inputs(device, case, seed=3)
        self.indexer = built(self.x, device)
        self.positions = positions
        self.want = [t.clone() for t in self.indexer(*self.x.arguments(), positions=True) if t is not None]
        for _ in range(PREPARED_AFTER + 2):
            assert self(self.x.arguments())

    def outputs(self, odd: int = 0) -> dict[str, Any]:
        """New buffers, `odd` ints past an aligned address."""
        rows, k = self.x.rows, self.x.spec.topk
        made = [poison((rows * n + odd,), torch.int32, self.x.lens.device)[odd:] for n in (k, 1, k)]
        views = made[0].view(rows, k), made[1], made[2].view(rows, k)
        return {"out": views[0], "counts": views[1], "positions": views[2] if self.positions else False}

    def __call__(self, arguments: Any, odd: int = 0) -> bool:
        got = self.indexer(*arguments, **self.outputs(odd))
        return all(torch.equal(a, b) for a, b in zip(got, self.want, strict=False) if a is not None)

    def made_by(self) -> str:
        """The name of the function that launches the newest form."""
        return str(getattr(self.indexer._known[0]._direct, "__name__", "none"))


def moved_arguments(x: Inputs, odd: int) -> tuple[Any, ...]:
    """The inputs at other addresses, those of plain loads ``odd`` elements past an aligned one."""

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        room = torch.empty(tensor.numel() + odd, dtype=tensor.dtype, device=tensor.device)[odd:].view(tensor.shape)
        return room.copy_(tensor)

    query, cache, weights, lens, table = x.arguments()
    query = tuple(t.clone() for t in query) if isinstance(query, tuple) else query.clone()
    return query, ks.IndexCache(x.spec, cache.data.clone()), placed(weights), placed(lens), placed(table)


@cases(*SHAPES)
@prepared
def test_prepared_launches_take_any_addresses(device: torch.device, case: Any) -> None:
    for positions in (False, True):
        step = Step(device, case, positions=positions)
        assert step.made_by() == "prepared"
        kept = []
        for i in range(40):
            arguments = moved_arguments(step.x, i % 4)
            assert step(arguments, odd=i % 3)
            kept.append(arguments if i % 2 else None)  # so that some addresses come back and others do not
        assert step.made_by() == "prepared"  # the form with a table without gaps, too
        step.indexer.check()


@prepared
def test_prepared_launches_are_captured_as_any_other(device: torch.device) -> None:
    """Eager steps on the very stream of the capture, so that nothing but the capture differs; nothing is allocated."""
    step = Step(device, CASE)
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    buffers = step.outputs()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        assert step(step.x.arguments())
        have = allocations(device)
        for _ in range(3):
            step.indexer(*step.x.arguments(), **buffers)
        assert allocations(device) == have
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        step.indexer(*step.x.arguments(), **buffers)
    for _ in range(20):
        buffers["out"].fill_(7)
        graph.replay()
        assert torch.equal(buffers["out"], step.want[0])
        assert step(moved_arguments(step.x, 1))
    step.indexer.check()


@prepared
def test_a_thread_that_never_used_the_device(device: torch.device) -> None:
    """The driver knows no context there at first; then steps of several threads take turns."""
    step = Step(device, CASE)
    torch.cuda.synchronize(device)
    calls = [moved_arguments(step.x, i % 3) for i in range(4)]
    torch.cuda.synchronize(device)
    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(lambda c=c: [step(c) for _ in range(50)]) for c in calls]
        assert all(all(future.result(60)) for future in done)
    step.indexer.check()


@prepared
def test_steps_are_prepared_and_made_while_another_thread_captures(device: torch.device) -> None:
    """A capture that forbids other threads what might synchronise: it goes on, and so do the eager steps."""
    step, other = Step(device, CASE), Inputs(device, CASE, seed=4)
    fresh = built(other, device)
    buffers, captured = step.outputs(), step.outputs()
    side = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(side):
        fresh(*other.arguments(), **buffers)
    fresh(*other.arguments(), **buffers)  # so that the thread's first step waits for the default stream, in the capture
    capturing, stepped = threading.Event(), threading.Event()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    failed: list[BaseException] = []

    def steps() -> None:
        try:
            assert capturing.wait(30)
            with torch.cuda.stream(side):
                for _ in range(3 * PREPARED_AFTER):
                    fresh(*other.arguments(), **buffers)
        except BaseException as error:
            failed.append(error)
        finally:
            stepped.set()

    thread = threading.Thread(target=steps)
    thread.start()
    with torch.cuda.graph(graph, stream=stream):
        step.indexer(*step.x.arguments(), **captured)
        capturing.set()
        assert stepped.wait(30)
        captured["out"].add_(0)
    thread.join()
    assert not failed, failed
    torch.cuda.synchronize(device)
    graph.replay()
    assert torch.equal(captured["out"], step.want[0])
    want = built(other, device)(*other.arguments())
    assert torch.equal(buffers["out"], want.rows)
    step.indexer.check()
    fresh.check()


@cases(True, False)
@prepared
def test_ten_thousand_steps_with_other_tensors_each_time(device: torch.device, case: bool) -> None:
    """Lengths, tables and addresses differ from step to step, the device a hundred steps behind; replays and a stream
    between, which takes over while the default one is still at work. As graphs, and kernel by kernel."""
    repeats.PREPARED_AFTER = PREPARED_AFTER if case else 0
    sets = [Inputs(device, (32, 512, 1, "fp8_fp32", torch.float32, 6, 6000), seed) for seed in range(4)]
    indexer = built(sets[0], device)
    want = [built(x, device)(*x.arguments()) for x in sets]
    buffers = [(poison(w.rows.shape, torch.int32, device), poison(w.counts.shape, torch.int32, device)) for w in want]
    wrong = torch.zeros(10000, dtype=torch.int64, device=device)  # one a step: no two streams add to the same
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    for _ in range(PREPARED_AFTER + 2):
        indexer(*sets[0].arguments(), out=buffers[0][0], counts=buffers[0][1])
    assert (getattr(indexer._known[0]._direct, "__name__", "") == "prepared") == case
    with torch.cuda.graph(graph):
        indexer(*sets[3].arguments(), out=buffers[3][0], counts=buffers[3][1])
    torch.cuda.synchronize(device)
    for i in range(10000):
        at = (i * 7 + i // 5) % 3
        if i % 100 == 0:
            torch.cuda._sleep(i // 100 % 24 * 400_000)  # to be a few steps behind, many, or all when the stream changes
        with torch.cuda.stream(side if i % 100 > 90 else None):
            indexer(*sets[at].arguments(), out=buffers[at][0], counts=buffers[at][1])
            if i % 11 == 0:  # before the next step of these buffers, on the same stream
                wrong[i] += (buffers[at][0] != want[at].rows).sum() + (buffers[at][1] != want[at].counts).sum()
                buffers[at][0].fill_(9)
                buffers[at][1].fill_(9)
        if i % 100 in (91, 99):
            torch.cuda.synchronize(device)  # buffers go from stream to stream
        if i % 100 == 50:
            buffers[3][0].fill_(9)
            graph.replay()
            wrong[i] += (buffers[3][0] != want[3].rows).sum()
    torch.cuda.synchronize(device)
    found = wrong.nonzero().flatten().tolist()
    assert not found, f"{len(found)} steps were wrong, these among them: {found[:20]}"
    indexer.check()


@prepared
def test_an_indexer_dropped_while_its_graph_runs(device: torch.device) -> None:
    """The graph, its parameters and the workspace go; the launches that were made end as they would."""
    step = Step(device, CASE)
    buffers = step.outputs()
    torch.cuda.synchronize(device)
    torch.cuda._sleep(30_000_000)
    for _ in range(20):
        step.indexer(*step.x.arguments(), **buffers)
    assert step.made_by() == "prepared"
    del step.indexer  # nothing is allocated meanwhile, so nothing else has its workspace's memory
    torch.cuda.synchronize(device)
    assert torch.equal(buffers["out"], step.want[0])
    assert torch.equal(buffers["counts"], step.want[1])


@prepared
def test_a_prepared_form_forgotten_in_a_capture(device: torch.device) -> None:
    """New forms of captured steps push it out, and its graph goes, while the capture goes on."""
    step, graph = Step(device, CASE), torch.cuda.CUDAGraph()
    x, buffers = step.x, step.outputs()
    tables = [torch.empty(x.requests, x.table.shape[1] + 8 * i, dtype=torch.int32, device=device) for i in range(1, 12)]
    views = [table[:, : x.table.shape[1]].copy_(x.table) for table in tables]
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        for view in views:
            step.indexer(x.query, x.cache, x.weights, x.lens, view, **buffers)
    assert step.made_by() != "prepared"
    for _ in range(3):
        buffers["out"].fill_(9)
        graph.replay()
        assert torch.equal(buffers["out"], step.want[0])
    assert step(x.arguments())
    step.indexer.check()
