"""Launching: streams, capture, the cache, and what a call costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from harness import cases
from test_tile_offsets import MAX_CONTEXT, Buffers, lengths

from keysieve.bench.timing import host_time
from keysieve.checks import KeysieveError
from keysieve.kernels.tile_offsets_config import KERNEL, TileOffsetsConfig
from keysieve.launch import Launcher

HERE = Path(__file__).resolve().parent


def test_side_stream_is_honoured(device: torch.device) -> None:
    """Inputs written on a side stream after a long kernel: only a launch on that stream sees them."""
    launcher = Launcher(KERNEL, TileOffsetsConfig(1), device)
    lens = torch.zeros(4096, dtype=torch.int32, device=device)
    late = lengths("random", 4096, 3, device)
    buffers = Buffers(4096, 1, device)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        lens.copy_(late)
        buffers.launch(launcher, lens, 2048, False)
    stream.synchronize()
    buffers.check(late, 1, 2048, False)


def test_graph_replays_follow_the_lengths(device: torch.device) -> None:
    launcher = Launcher(KERNEL, TileOffsetsConfig(2), device)
    lens = torch.zeros(2048, dtype=torch.int32, device=device)
    buffers = Buffers(1024, 2, device)
    buffers.launch(launcher, lens, 2048, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for chained in (0, 1, 1):
            buffers.launch(launcher, lens, 2048, False, chained=chained)
    for seed, kind in enumerate(("padding", "long", "random", "padding", "long", "edges")):
        lens.copy_(lengths(kind, 2048, seed, device))
        buffers.offsets[:1025].fill_(0x5A5A5A5A)
        graph.replay()
        buffers.check(lens, 2, 2048, False)


CAPTURE_FIRST = """
import sys
sys.path[:0] = {paths!r}
import torch
from test_tile_offsets import Buffers, lengths
from keysieve.kernels.tile_offsets_config import KERNEL, TileOffsetsConfig
from keysieve.launch import Launcher
device = torch.device("cuda", 0)
lens = lengths("random", 64, 1, device)
buffers = Buffers(64, 1, device)
launcher = Launcher(KERNEL, TileOffsetsConfig(1), device)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    buffers.launch(launcher, lens, 2048, False)
graph.replay()
torch.cuda.synchronize()
buffers.check(lens, 1, 2048, False)
print("captured first")
"""


def python(script: str, cache: str | None = None) -> str:
    """Run a script in a fresh process and return what it printed."""
    paths = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": ":".join(paths)}
    if cache is not None:
        env["KEYSIEVE_CACHE_DIR"] = cache
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=90, check=False, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_first_call_of_a_process_may_be_captured(device: torch.device) -> None:
    del device
    assert "captured first" in python(CAPTURE_FIRST.format(paths=[str(HERE), str(HERE.parents[1])]))


def test_loading_under_capture_is_refused(device: torch.device) -> None:
    from keysieve import compile as kernel_compile

    config = TileOffsetsConfig(7)
    saved = dict(kernel_compile._loaded)
    kernel_compile._loaded.clear()
    x = torch.zeros(4, device=device)
    refusal = ""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
            try:
                Launcher(KERNEL, config, device)
            except KeysieveError as error:
                refusal = str(error)
        graph.replay()
    finally:
        kernel_compile._loaded.update(saved)
    assert "before capturing" in refusal
    assert x.tolist() == [1.0] * 4


ONE_OF_MANY = """
import json, sys, time
sys.path[:0] = {paths!r}
import torch
from test_tile_offsets import Buffers, lengths
from keysieve import compile as kernel_compile
from keysieve.kernels.tile_offsets_config import KERNEL, TileOffsetsConfig
from keysieve.launch import Launcher, arch_of
device = torch.device("cuda", 0)
lens = lengths("random", 4096, 1, device)
statuses = []
inner = kernel_compile.ensure
def watched(*args, **more):
    outcome = inner(*args, **more)
    statuses.append(outcome.status)
    return outcome
kernel_compile.ensure = watched
start = time.perf_counter()
launchers = [Launcher(KERNEL, TileOffsetsConfig(n), device) for n in (1, 2, 4)]
seconds = time.perf_counter() - start
for n, launcher in zip((1, 2, 4), launchers):
    buffers = Buffers(4096 // n, n, device)
    buffers.launch(launcher, lens, 2048, False)
    torch.cuda.synchronize()
    buffers.check(lens, n, 2048, False)
print(json.dumps(dict(statuses=statuses, seconds=seconds, cutlass="cutlass" in sys.modules)))
"""


@cases(8)
def test_processes_that_start_together_compile_a_kernel_once(device: torch.device, case: int) -> None:
    del device
    script = ONE_OF_MANY.format(paths=[str(HERE), str(HERE.parents[1])])
    paths = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "PYTHONPATH": ":".join(paths), "KEYSIEVE_CACHE_DIR": cache}
        started = [
            subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
            for _ in range(case)
        ]
        results = []
        for process in started:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err.decode()[-3000:]
            results.append(json.loads(out.splitlines()[-1]))
        compiled = [status for result in results for status in result["statuses"]].count("compiled")
        assert compiled == 3, results
        again = json.loads(python(script, cache).splitlines()[-1])
        assert again["statuses"] == ["cached"] * 3
        assert not again["cutlass"], "a warm start must not import the DSL"
        print("cold, 8 processes:", [round(r["seconds"], 2) for r in results], "warm:", round(again["seconds"], 3))


def test_a_call_costs_a_few_microseconds(device: torch.device) -> None:
    """The budget is 5 us with the launch; a shared machine gets twice that before the test fails."""
    launcher = Launcher(KERNEL, TileOffsetsConfig(1), device)
    lens = lengths("random", 32, 1, device)
    buffers = Buffers(32, 1, device)
    arguments = (*[x.data_ptr() for x in (lens, buffers.offsets, buffers.counts, buffers.info, buffers.flags)],)
    scalars = (32, 2048, 2048, MAX_CONTEXT, 0)
    timing = host_time(lambda: launcher(*arguments, *scalars), drain=torch.cuda.synchronize)
    print(f"host time of a call: {timing.us:.2f} us ({timing.us_min:.2f}..{timing.us_max:.2f})")
    assert timing.us_min < 10.0, timing
