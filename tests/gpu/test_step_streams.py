"""Steps on one stream while something else goes on on another: a check, another thread's capture."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from harness import cases, poison
from test_step import Inputs, raised
from test_step_host import CASE, built

import keysieve as ks


def elsewhere(call: Callable[[], object]) -> None:
    """Run it in another thread; raises what it raised."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def test_a_check_waits_for_the_last_step_of_another_stream(device: torch.device) -> None:
    """Called on the default stream while that step is still queued behind 50 ms of work, it tells its fault."""
    x = Inputs(device, CASE, seed=5)
    indexer, side = built(x, device), torch.cuda.Stream(device)
    indexer(*x.arguments())
    indexer.check()
    lens = x.lens.clone()
    lens[0] = x.longest + 1
    for _ in range(3):
        torch.cuda.synchronize(device)
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            indexer(x.query, x.cache, x.weights, lens, x.table)
        assert "max_context" in raised(ks.DeviceFault, indexer.check)
        indexer.check()


@cases("global", "thread_local", "relaxed")
def test_a_capture_of_the_last_step_s_stream_goes_on(device: torch.device, case: str) -> None:
    """Another thread's eager step is refused meanwhile: its wait would be captured, and the step not run. Its check
    does not wait for that stream."""
    x = Inputs(device, CASE, seed=5)
    indexer, stream, side = built(x, device), torch.cuda.Stream(device), torch.cuda.Stream(device)
    want = indexer(*x.arguments()).rows.clone()
    rows, counts = poison((x.rows, x.spec.topk), torch.int32, device), poison((x.rows,), torch.int32, device)
    other = torch.full_like(rows, 7)
    torch.cuda.synchronize(device)
    for current in (stream, side, stream):
        with torch.cuda.stream(current):
            indexer(*x.arguments(), out=rows, counts=counts)
    torch.cuda.synchronize(device)
    said: list[str] = []

    def step() -> None:
        with torch.cuda.stream(side):
            said.append(raised(ks.KeysieveError, lambda: indexer(*x.arguments(), out=other, counts=counts)))
            if case != "global":  # what reads a device's memory is forbidden to other threads
                indexer.check()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=case):
        rows.fill_(3)
        elsewhere(step)
        indexer(*x.arguments(), out=rows, counts=counts)
    assert "is being captured" in said[0]
    for _ in range(3):
        rows.fill_(9)
        graph.replay()
        assert torch.equal(rows, want)
    assert bool((other == 7).all()), "the refused step wrote nothing"
    with torch.cuda.stream(side):
        indexer(*x.arguments(), out=other, counts=counts)
    torch.cuda.synchronize(device)
    assert torch.equal(other, want)
    indexer.check()
