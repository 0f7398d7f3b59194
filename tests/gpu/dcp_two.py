"""Two processes, two devices, one exchange over NVLink: `python tests/gpu/dcp_two.py TASK ..`. Status 0 if all hold.

Each process is one rank with its own shard, and has the whole context as well, which its selection is held to. The
tasks in which merges give up lose the CUDA context, so each of them has to be the last of its call; so has one of those
in SETTINGS, whose processes start differently.
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch  # noqa: E402  # the path above comes first
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from dcp_adverse import Holder, adverse  # noqa: E402
from dcp_loops import Loop, Produced, Traffic, build, together  # noqa: E402
from dcp_ranks import Geometry, hold_one, raised  # noqa: E402
from dcp_two_failing import FAILING, NAMES  # noqa: E402

import keysieve as ks  # noqa: E402

PR_SET_DUMPABLE = 4

CASES = [
    Geometry(2),
    Geometry(2, lens=(9000, 2049, 2048, 2047, -3, 1)),
    Geometry(2, interleave=64, distinct=300),
    Geometry(2, interleave=5000, lens=(9000, 8192, 100), crowded=True),
    Geometry(2, topn=1024, lens=(9000, 3000, 0, 40000)),
    Geometry(2, next_n=4, lens=(7000, 7001, 7002, 7003, 0, 50, 6000, 1), heads=64, key_format="fp8_ue8m0"),
    Geometry(2, topk=4096, lens=(30000, 4097), distinct=500),
    Geometry(2, lens=(300000, 270001), heads=8, topk=512),
    Geometry(2, lens=(9000, 2049, 2048, 2047, -3, 1), key_format="mxfp4"),
    Geometry(2, topn=1024, next_n=2, lens=(9000, 9001, 3000, 3001), heads=64, key_format="mxfp4", interleave=64),
]


def cases(rank: int) -> None:
    """Every case, eager, several calls; the exchange is what carries them."""
    del rank
    for case in CASES:
        dcp = ks.dcp.Exchange(topn=case.topn, interleave=case.interleave)
        one, whole = build(case, dcp)
        assert dcp.reason is None, dcp.reason
        for site in range(5):
            found = one.call(site=site)
            one.indexer.check()
            hold_one(one, found, whole)


def replays(rank: int) -> None:
    """10,000 replays: one rank or the other late by up to a millisecond at random, graphs of three exchanges and of one
    with other rows in turn, epochs from 2^32 - 5, every output checked and poisoned at once."""
    one, whole = build(Geometry(2, lens=(9000, 2500, 0, 3000, 4000, 5000), heads=8), ks.dcp.Exchange())
    loops = []
    for rows, sites in ((6, [0, 1, 2]), (2, [3])):
        right = one.call(rows=rows)
        one.indexer.check()
        hold_one(one, right, whole, rows)
        loops.append(Loop(one, sites, right, rows))
    together(one)
    one.dcp.memory.preset(2**32 - 5)
    together(one)
    both, own, drawn = random.Random(5), random.Random(rank), [0, 0]
    with torch.cuda.stream(one.stream):
        for _ in range(10_000):
            if own.random() < 0.1:
                torch.cuda._sleep(own.randrange(1_800_000))
            which = both.randrange(2)
            drawn[which] += 1
            loops[which].replay()
    one.indexer.check()
    for loop in loops:
        loop.hold()
    assert one.dcp.memory.epoch.tolist() == [3 * drawn[0] + drawn[1] - 5] * 2 + [3 * drawn[0] - 5] * 4


def late(rank: int) -> None:
    """2,000 steps, rank 1 late by a millisecond in each: rank 0 waits that long, and both are right."""
    one, whole = build(Geometry(2, lens=(9000,) * 16, heads=8), ks.dcp.Exchange())
    right = one.call()
    one.indexer.check()
    hold_one(one, right, whole)
    loop = Loop(one, [0], right)
    together(one)
    began = time.monotonic()
    with torch.cuda.stream(one.stream):
        for _ in range(2000):
            if rank:
                torch.cuda._sleep(1_800_000)
            loop.replay()
    one.indexer.check()
    loop.hold()
    assert time.monotonic() - began > 1.5


def long(rank: int) -> None:
    """100,000 exchanges back to back, in graphs of twenty."""
    del rank
    one, whole = build(Geometry(2, lens=(9000, 2500, 0, 3000), heads=8), ks.dcp.Exchange())
    right = one.call()
    one.indexer.check()
    hold_one(one, right, whole)
    loop = Loop(one, list(range(20)), right)
    together(one)
    with torch.cuda.stream(one.stream):
        for turn in range(5000):
            loop.calls.replay()
            if turn % 100 == 99:
                loop.check.replay()
    one.indexer.check()
    loop.hold()
    assert one.dcp.memory.epoch.tolist() == [100_001] * 4


def produced(rank: int) -> None:
    """10,000 steps whose lengths and tables are written directly before them, beside copies over NVLink."""
    one, whole = build(Geometry(2, lens=(9000, 2500, 0, 3000), heads=8), ks.dcp.Exchange())
    right = one.call()
    one.indexer.check()
    hold_one(one, right, whole)
    loop = Produced(one, [0, 1], right)
    traffic = Traffic(one.device, torch.device("cuda", 1 - rank))
    together(one)
    for turn in range(5000):
        if turn % 4 == 0:
            traffic.go()
        with torch.cuda.stream(one.stream):
            loop.replay()
    one.indexer.check()
    loop.hold()


def drafts(rank: int) -> None:
    """Four rows a request, in a graph: what one device selects for them."""
    del rank
    case = Geometry(2, next_n=4, lens=(9000, 9001, 9002, 9003, 0, 50, 6000, 1), interleave=64)
    one, whole = build(case, ks.dcp.Exchange(interleave=64))
    right = one.call()
    one.indexer.check()
    hold_one(one, right, whole)
    loop = Loop(one, [0, 1, 2], right)
    together(one)
    with torch.cuda.stream(one.stream):
        for _ in range(1000):
            loop.replay()
    one.indexer.check()
    loop.hold()


def full(rank: int, held: int = 0) -> None:
    """More rows than the chip holds blocks, a rescue in every row, epochs from 2^32 - 3."""
    case = Geometry(2, topn=1024, lens=(2600,) * 1200, heads=8, distinct=3000)
    one, whole = build(case, ks.dcp.Exchange(topn=1024))
    holder = Holder(one.device) if held else None
    one.dcp.memory.preset(2**32 - 3)
    together(one)
    for site in range(6):
        if holder is not None and site % 2 == rank:
            holder(held, 3000)
        found = one.call(site=site)
        one.indexer.check()
        have, want = found.positions, whole.positions
        assert torch.equal(have, want), f"call {site}: {int((have != want).any(1).sum())} rows differ"
    assert int(one.dcp.memory.seq2.min()) == 6
    assert int(one.dcp.memory.epoch[5]) == 3


def held(rank: int) -> None:
    """The same while a foreign kernel has half the multiprocessors of one rank, of the other, in turn."""
    full(rank, torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count // 2)


def scrambled(rank: int) -> None:
    """The same with blocks that draw their rows in another order on each rank."""
    adverse("late")
    full(rank)


def alternate(rank: int) -> None:
    """Two graphs of different rows, in an order that both ranks know."""
    one, whole = build(Geometry(2, lens=(9000, 2500, 0, 3000, 4000, 5000), heads=8), ks.dcp.Exchange())
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
        one, whole = build(case, dcp)
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


def unreachable(rank: int) -> None:
    """Devices without peer access: the all-gather is taken by itself, its reason told, its keys the same."""
    del rank
    dcp, kept = ks.dcp.Exchange(), torch.cuda.can_device_access_peer
    torch.cuda.can_device_access_peer = lambda *_: False
    try:
        one, whole = build(Geometry(2, lens=(9000, 2500, 0, 3000), distinct=200, heads=8), dcp)
    finally:
        torch.cuda.can_device_access_peer = kept
    assert "no peer access" in (dcp.reason or ""), dcp.reason
    assert "all-gather" in one.indexer.path
    found = one.call(site=3)
    one.indexer.check()
    hold_one(one, found, whole)
    loop = Loop(one, [4, 5], found)
    with torch.cuda.stream(one.stream):
        for _ in range(200):
            loop.replay()
    one.indexer.check()
    loop.hold()


def alone(rank: int) -> None:
    """Processes that see one device each: they exchange if torch can, else they gather and say why; no other keys."""
    dcp = ks.dcp.Exchange()
    one, whole = build(Geometry(2, lens=(9000, 2500, 0, 3000), distinct=200, heads=8), dcp)
    for site in range(3):
        found = one.call(site=site)
        one.indexer.check()
        hold_one(one, found, whole)
    print(f"rank {rank}: {torch.cuda.device_count()} device, {one.dcp.path}", flush=True)


def fenced(rank: int) -> None:
    """Processes whose descriptors no other may take, as in containers without that right: as `alone`."""
    alone(rank)


def groups(rank: int) -> None:
    """Groups of one before the whole group, a Gloo group, a group whose ranks are listed backwards."""
    case = Geometry(2, lens=(9000, 2500), heads=8)
    single = [dist.new_group([0]), dist.new_group([1])][rank]
    one, whole = build(Geometry(1, lens=(9000, 2500), heads=8), ks.dcp.Exchange(single))
    found = one.call()
    one.indexer.check()
    hold_one(one, found, whole)
    for group in (None, dist.new_group([0, 1], backend="gloo"), dist.new_group([1, 0])):
        one, whole = build(case, ks.dcp.Exchange(group))
        assert one.dcp.reason is None, one.dcp.reason
        found = one.call()
        one.indexer.check()
        hold_one(one, found, whole)


def captured(rank: int) -> None:
    """Building an indexer while a graph is captured is refused, before any rank waits for another."""
    del rank
    one, whole = build(Geometry(2, lens=(9000, 2500), heads=8), ks.dcp.Exchange())
    spec, device = one.context.spec, one.device
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=one.stream):
        one.lens.add_(0)
        # the indexer alone: a `Rank` copies its tensors to the device, which no capture permits
        text = raised(
            ks.KeysieveError, lambda: ks.DecodeIndexer(spec, 2, 9000, 1, device=device, dcp=ks.dcp.Exchange())
        )
    assert "captured" in text, text
    found = one.call()
    one.indexer.check()
    hold_one(one, found, whole)


ALL = (
    *(cases, replays, late, long, produced, drafts, full, held, alternate, gathered, unreachable, groups, captured),
    *(scrambled, alone, fenced, *FAILING),
)
TASKS = {f.__name__: f for f in ALL}
SETTINGS: dict[str, Callable[[int], dict[str, str]]] = {
    "alone": lambda rank: {"CUDA_VISIBLE_DEVICES": str(rank)},
    "expandable": lambda _: {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    },
}
"""Task, or word in front of tasks -> what the environment of a rank's process is before it uses a device."""


def _run(rank: int, tasks: list[str], port: int) -> None:
    for task in tasks:
        os.environ.update(SETTINGS.get(task, lambda _: {})(rank))
    if "fenced" in tasks:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    tasks = [task for task in tasks if task in TASKS]
    torch.cuda.set_device(0 if "alone" in tasks else rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    failing = {*NAMES}  # they need no collective of devices, and NCCL takes seconds to start
    dist.init_process_group("gloo" if failing & {*tasks} else "cpu:gloo,cuda:nccl", rank=rank, world_size=2)
    for task in tasks:
        began = time.monotonic()
        try:
            TASKS[task](rank)
        except Exception:
            traceback.print_exc()  # before anything is freed: after a trap that may end the process
            sys.stderr.flush()
            os._exit(1)
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
