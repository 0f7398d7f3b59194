"""W ranks on two devices, half on each: what the link adds as W grows, beyond the two ranks that two devices allow.

Each device's stream runs its ranks' pushes, then their merges, again and again; every merge waits for the words of the
ranks on the other device. The same ranks on one device do the same work without a link. The difference, per iteration,
is what the link adds while `(W / 2)^2` lists a row leave each device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from keysieve.bench import timing
from keysieve.bench.dcp_chain import Chain
from keysieve.bench.dcp_virtual import chains_of, gate, merge_record
from keysieve.bench.score import TOPK
from keysieve.spec import default_topn

ITERATIONS = 100
"""In a graph; that two graphs start some microseconds apart counts a hundredth."""


def rounds(chains: list[Chain]) -> Callable[[], None]:
    """A call of each of one device's ranks: all pushes, then all merges."""

    def call() -> None:
        for chain in chains:
            chain.push(chained=False, release=False)
        for chain in chains:
            chain.merge(chained=False)

    return call


def graph_times(calls: dict[torch.device, Callable[[], None]]) -> timing.Timing:
    """An iteration of the calls, which wait for each other across devices; the clock is that of the last device."""
    graphs, streams = {}, {}
    for device, call in calls.items():
        with torch.cuda.device(device):
            streams[device] = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            graphs[device] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[device], stream=streams[device]):
                for _ in range(ITERATIONS):
                    call()
    samples, last = [], list(calls)[-1]
    for _ in range(2 + 15):
        for device in calls:
            torch.cuda.synchronize(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # as above
        for device in calls:
            with torch.cuda.device(device), torch.cuda.stream(streams[device]):
                if device == last:
                    begin.record(streams[device])
                graphs[device].replay()
                if device == last:
                    end.record(streams[device])
        end.synchronize()
        samples.append(float(begin.elapsed_time(end)) * 1e3 / ITERATIONS)
        time.sleep(0.001)
    return timing.summarise(samples[2:], ITERATIONS, True)


def measure(world: int, rows: int) -> timing.Record:
    """A line: the link's part of an iteration of `world / 2` ranks a device."""
    topn = default_topn(TOPK, world)
    both = [torch.device("cuda", r * 2 // world) for r in range(world)]
    own = chains_of(world, rows, topn, [both[0]] * world)
    gate(own, topn)
    alone = graph_times({both[0]: rounds(own)})
    del own
    chains = chains_of(world, rows, topn, both)
    gate(chains, topn)
    halves = {d: rounds([c for c in chains if c.here.device == d]) for d in dict.fromkeys(both)}
    taken = graph_times(halves)
    gate(chains, topn)
    link = timing.Timing(
        taken.us - alone.us / 2, taken.us_min - alone.us_max / 2, taken.us_max - alone.us_min / 2, ITERATIONS,
        taken.replays, True,
    )  # fmt: skip
    return merge_record(
        world,
        rows,
        link,
        both[0],
        {
            "topn": topn,
            "transport": "two devices",
            "virtual": "two devices",
            "what": "added by the link",
            "iteration_us": round(taken.us, 3),
            "one_device_us": round(alone.us / 2, 3),
        },
    )
