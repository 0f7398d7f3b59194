"""More ranks than devices, a process each: `python tests/gpu/dcp_many.py WORLD TASK ..`. Status 0 if all hold.

Ranks that share a device cannot meet in symmetric memory, so their blocks are shared by CUDA's inter-process handles;
beyond that all is as in `dcp_two.py`, whose tasks run here with two ranks, but for those of NCCL and of symmetric
memory. Processes take turns on their device, so a call takes milliseconds, and limits of time are wider.
"""

from __future__ import annotations

import functools
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import dcp_two  # noqa: E402  # the path above comes first
import dcp_two_failing  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from dcp_loops import Loop, build, together  # noqa: E402
from dcp_ranks import Geometry, hold_one  # noqa: E402
from dcp_two_failing import give_up, named  # noqa: E402
from torch.multiprocessing.reductions import reduce_tensor  # noqa: E402

import keysieve as ks  # noqa: E402
from keysieve.dcp.exchange_memory import ExchangeMemory  # noqa: E402


def open_here(rebuild: Any, args: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    """Another process's tensor, mapped by this process's device whichever device it lies on: the driver then opens the
    way between the two. (By itself torch maps it by the other device, whose mappings our kernels cannot use.)"""
    return rebuild(*(device.index if place == STORAGE_DEVICE else arg for place, arg in enumerate(args)))


STORAGE_DEVICE = 6
"""Among the arguments of torch's `rebuild_cuda_tensor`."""

EXCHANGE = ks.dcp.Exchange

PATIENCE = 60.0
"""Seconds in which a lost context is told, where processes take turns: beside twenty others it took 26."""


class SharedBlocks:
    """Every rank's block, opened by all ranks of a group."""

    def __init__(self, group: Any) -> None:
        self.group, self.kept = group, []

    def memory(self, layout: Any, rank: int) -> ExchangeMemory:
        device = torch.device("cuda", torch.cuda.current_device())
        block = torch.zeros(layout.block_bytes, dtype=torch.uint8, device=device)
        memory = ExchangeMemory(layout, block)
        handles: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(handles, reduce_tensor(block), group=self.group)
        opened = [block if r == rank else open_here(*handle, device) for r, handle in enumerate(handles)]
        memory.set_peers([t.data_ptr() for t in opened])
        self.kept += opened
        torch.cuda.synchronize(device)
        dist.barrier(self.group)
        return memory


def exchange(group: Any = None, interleave: int = 1, topn: int | None = None, timeout: float = 10.0) -> Any:
    """An exchange of a group whose ranks may share devices."""
    one = EXCHANGE.__new__(EXCHANGE)
    one.group, one._blocks, one._forced = group, SharedBlocks(group), False
    one._begin(dist.get_world_size(group), dist.get_rank(group), topn, interleave, True, timeout)
    return one


def cases(world: int) -> None:
    """Lists by default, and lists so short that every rank is asked again."""
    for topn, interleave in ((None, 64), (2048 // world, 1)):
        case = Geometry(world, topn=topn, lens=(20000, 1, 4000, 9000), heads=8, interleave=interleave)
        one, whole = build(case, exchange(None, interleave, topn))
        for site in range(3):
            found = one.call(site=site)
            one.indexer.check()
            hold_one(one, found, whole)


def replays(world: int) -> None:
    """500 replays of three exchanges, any rank late by up to a millisecond, outputs checked and poisoned at once."""
    one, whole = build(Geometry(world, lens=(9000, 2500, 0, 3000), heads=8), exchange())
    right = one.call()
    one.indexer.check()
    hold_one(one, right, whole)
    loop = Loop(one, [0, 1, 2], right)
    torch.cuda._sleep(1)  # its code is loaded before merges wait: loading may wait for the device
    together(one)
    draw = random.Random(dist.get_rank())
    with torch.cuda.stream(one.stream):
        for _ in range(500):
            if draw.random() < 0.1:
                torch.cuda._sleep(draw.randrange(1_800_000))
            loop.replay()
    one.indexer.check()
    loop.hold()


def groups(world: int) -> None:
    """Halves of the world side by side, then the world with its ranks listed backwards."""
    rank, half = dist.get_rank(), world // 2
    halves = [dist.new_group(list(range(half))), dist.new_group(list(range(half, world)))]
    turned = dist.new_group(list(reversed(range(world))))
    for group, size in ((halves[rank // half], half), (turned, world)):
        one, whole = build(Geometry(size, lens=(9000, 2500), heads=8), exchange(group))
        found = one.call()
        one.indexer.check()
        hold_one(one, found, whole)
        together(one)


def killed(world: int) -> None:
    """The last rank dies between two calls: every other rank names it."""
    one, _ = build(Geometry(world, lens=(9000, 2500), heads=8), exchange(timeout=2.0))
    one.call()
    together(one)
    if dist.get_rank() == world - 1:
        os._exit(0)
    one.call(site=11)
    text = named(one, 2, f"source rank {world - 1}", "site 11", "round 1", within=PATIENCE)
    give_up(dist.get_rank(), "killed", text)


def of_two(task: str) -> None:
    """A task of `dcp_two.py`, by ranks that share a device: a limit of half a second may pass while others have it."""

    def patient(*args: Any, timeout: float = 10.0, **options: Any) -> Any:
        return exchange(*args, timeout=max(timeout, 2.0), **options)

    ks.dcp.Exchange = patient  # type: ignore[misc, assignment]  # in this process only
    dcp_two_failing.named = functools.partial(named, within=PATIENCE)
    dcp_two.TASKS[task](dist.get_rank())


TASKS: dict[str, Callable[[int], None]] = {f.__name__: f for f in (cases, replays, groups, killed)}
OF_TWO = ("late", "drafts", "alternate", "captured", "full", "held", "scrambled", *dcp_two_failing.NAMES[1:])
"""Of `dcp_two.py`. Those of NCCL, of symmetric memory and of traffic between two devices are not."""


def _run(rank: int, world: int, tasks: list[str], port: int) -> None:
    torch.cuda.set_device(rank * torch.cuda.device_count() // world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for task in tasks:
        began = time.monotonic()
        try:
            TASKS[task](world) if task in TASKS else of_two(task)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        print(f"rank {rank} of {world}: {task} holds, {time.monotonic() - began:.1f} s", flush=True)
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = int(sys.argv[1])
    unknown = {*sys.argv[2:]} - {*TASKS, *(OF_TWO if world == 2 else ())}
    if unknown:
        sys.exit(f"no task of {world} ranks: {', '.join(sorted(unknown))}")
    mp.spawn(_run, (world, sys.argv[2:], port), nprocs=world)


if __name__ == "__main__":
    main()
