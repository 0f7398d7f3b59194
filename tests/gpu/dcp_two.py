"""Two processes, two devices, one exchange over NVLink: `python tests/gpu/dcp_two.py TASK ..`. Status 0 if all hold.

Each process is one rank with its own shard, and has the whole context as well, which its selection is held to.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch  # noqa: E402  # the path above comes first
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from dcp_ranks import Context, Geometry, Rank, hold_one, raised  # noqa: E402

import keysieve as ks  # noqa: E402

CASES = [
    Geometry(2),
    Geometry(2, lens=(9000, 2049, 2048, 2047, -3, 1)),
    Geometry(2, interleave=64, distinct=300),
    Geometry(2, interleave=5000, lens=(9000, 8192, 100), crowded=True),
    Geometry(2, topn=1024, lens=(9000, 3000, 0, 40000)),
    Geometry(2, next_n=4, lens=(7000, 7001, 7002, 7003, 0, 50, 6000, 1), heads=64, key_format="fp8_ue8m0"),
    Geometry(2, topk=4096, lens=(30000, 4097), distinct=500),
    Geometry(2, lens=(300000, 270001), heads=8, topk=512),
]


def build(case: Geometry, rank: int, dcp: Any, **options: Any) -> tuple[Rank, ks.Selection]:
    """This rank, and what one rank selects on the whole context."""
    device = torch.device("cuda", rank)
    context = Context(case, device)
    whole = Rank(context, None, device).call()
    torch.cuda.synchronize()
    return Rank(context, dcp, device, **options), whole


def cases(rank: int) -> None:
    """Every case, eager, several calls; the exchange is what carries them."""
    for case in CASES:
        dcp = ks.dcp.Exchange(topn=case.topn, interleave=case.interleave)
        one, whole = build(case, rank, dcp)
        assert dcp.reason is None, dcp.reason
        for site in range(5):
            found = one.call(site=site)
            one.indexer.check()
            hold_one(one, found, whole)


def replays(rank: int) -> None:
    """10,000 replays of three exchanges each, one rank or the other late by up to a millisecond at random."""
    one, whole = build(Geometry(2, lens=(9000, 2500, 0, 3000), heads=8), rank, ks.dcp.Exchange())
    one.call()
    one.indexer.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=one.stream):
        found = [one.call(site=site) for site in range(3)]
    draw = random.Random(rank)
    wrong = torch.zeros(1, dtype=torch.int64, device=one.device)
    with torch.cuda.stream(one.stream):
        for turn in range(10_000):
            if draw.random() < 0.02:
                torch.cuda._sleep(draw.randrange(1_800_000))
            graph.replay()
            if turn % 8 == 0:
                for selection in found:
                    wrong += (selection.positions != whole.positions).sum()
                    selection.positions.fill_(7)
    one.indexer.check()
    assert int(wrong) == 0
    graph.replay()
    one.indexer.check()
    assert int(one.dcp.memory.epoch[0]) == 1 + 3 * 10_001


def full(rank: int) -> None:
    """More rows than the chip holds blocks, a rescue in every row, epochs from 2^32 - 3."""
    case = Geometry(2, topn=1024, lens=(2600,) * 1200, heads=8, distinct=3000)
    one, whole = build(case, rank, ks.dcp.Exchange(topn=1024))
    one.dcp.memory.preset(2**32 - 3)
    torch.cuda.synchronize()
    dist.barrier()
    for site in range(6):
        found = one.call(site=site)
        one.indexer.check()
        have, want = found.positions, whole.positions
        assert torch.equal(have, want), f"call {site}: {int((have != want).any(1).sum())} rows differ"
    assert int(one.dcp.memory.seq2.min()) == 6
    assert int(one.dcp.memory.epoch[5]) == 3


def alternate(rank: int) -> None:
    """Two graphs of different rows, in an order that both ranks know."""
    one, whole = build(Geometry(2, lens=(9000, 2500, 0, 3000, 4000, 5000), heads=8), rank, ks.dcp.Exchange())
    graphs = []
    for rows, sites in ((6, [0]), (2, [1, 2, 3])):
        one.call(rows=rows)
        one.indexer.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=one.stream):
            found = [one.call(site=site, rows=rows) for site in sites]
        graphs.append((graph, found, rows))
    both, own = random.Random(5), random.Random(rank)
    with torch.cuda.stream(one.stream):
        for _ in range(1000):
            if own.random() < 0.1:
                torch.cuda._sleep(own.randrange(100_000))
            graphs[both.randrange(2)][0].replay()
    one.indexer.check()
    for _, found, rows in graphs:
        for selection in found:
            hold_one(one, selection, whole, rows)


def gathered(rank: int) -> None:
    """The all-gather path: forced, and as Gather; eager and captured; a differing call is flagged."""
    case = Geometry(2, lens=(9000, 2500, 0, 3000), distinct=200, heads=8)
    for dcp in (ks.dcp.Exchange(gather=True), ks.dcp.Gather()):
        one, whole = build(case, rank, dcp)
        found = one.call(site=3)
        one.indexer.check()
        hold_one(one, found, whole)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=one.stream):
            found = one.call(site=4)
        for _ in range(5):
            graph.replay()
        one.indexer.check()
        hold_one(one, found, whole)
    found = one.call(site=rank)
    text = raised(ks.DeviceFault, one.indexer.check)
    assert "different calls" in text, text
    assert int(found.counts.abs().sum()) == 0


def groups(rank: int) -> None:
    """A Gloo group, a group whose ranks are listed backwards, and groups of one."""
    case = Geometry(2, lens=(9000, 2500), heads=8)
    for group in (dist.new_group([0, 1], backend="gloo"), dist.new_group([1, 0])):
        one, whole = build(case, rank, ks.dcp.Exchange(group))
        assert one.dcp.reason is None, one.dcp.reason
        found = one.call()
        one.indexer.check()
        hold_one(one, found, whole)
    single = [dist.new_group([0]), dist.new_group([1])][rank]
    one, whole = build(Geometry(1, lens=(9000, 2500), heads=8), rank, ks.dcp.Exchange(single))
    found = one.call()
    one.indexer.check()
    hold_one(one, found, whole)


def killed(rank: int) -> None:
    """Rank 1 dies between two calls: rank 0 says so within the limit, and makes no further call."""
    one, _ = build(Geometry(2, lens=(9000, 2500), heads=8), rank, ks.dcp.Exchange(timeout=0.5))
    one.call()
    one.indexer.check()
    if rank == 1:
        os._exit(0)
    began = time.monotonic()
    one.call(site=11)
    text = raised(ks.dcp.ExchangeError, one.indexer.check)
    assert time.monotonic() - began < 5, time.monotonic() - began
    for part in ("rank 0", "row 0", "call 2", "source rank 1", "site 11", "expected tag 2", "round 1"):
        assert part in text, text
    assert "call 2" in raised(ks.dcp.ExchangeError, one.call)
    print("rank 0: killed holds", flush=True)
    os._exit(0)


TASKS = {f.__name__: f for f in (cases, replays, full, alternate, gathered, groups, killed)}


def _run(rank: int, tasks: list[str], port: int) -> None:
    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=2)
    for task in tasks:
        began = time.monotonic()
        TASKS[task](rank)
        print(f"rank {rank}: {task} holds, {time.monotonic() - began:.1f} s", flush=True)
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_run, (sys.argv[1:], port), nprocs=2)


if __name__ == "__main__":
    main()
