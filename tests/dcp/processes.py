"""Run a function in W real processes joined by a Gloo group, and collect what each of them returned or raised."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Forked, so that a process starts in milliseconds; the parent has one thread and no group.
_CONTEXT = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Result:
    """One rank's end: its value, or the type and text of what it raised, or nothing (it died); and how long it took."""

    value: Any = None
    error: str | None = None
    kind: str | None = None
    died: bool = False
    seconds: float = 0.0


def _child(rank: int, world: int, store: str, function: Callable[..., Any], args: tuple[Any, ...], pipe: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    began = time.monotonic()
    try:
        result = Result(value=function(rank, world, *args), seconds=time.monotonic() - began)
    except Exception as error:
        result = Result(error=str(error), kind=type(error).__name__, seconds=time.monotonic() - began)
    pipe.send(result)
    pipe.close()
    # No tear-down handshake with peers that may be gone.
    os._exit(0)


def run_ranks(world: int, function: Callable[..., Any], *args: Any, limit: float = 60.0) -> list[Result]:
    """``function(rank, world, *args)`` in ``world`` processes; a rank that outlives ``limit`` seconds is an error."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_child, args=(rank, world, store, function, args, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        deadline = time.monotonic() + limit
        results = []
        for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
            if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
                for late in processes:
                    late.kill()
                raise AssertionError(f"rank {rank} of {world} was still running after {limit} s")
            try:
                results.append(pipe.recv())
            except EOFError:
                results.append(Result(died=True))
            process.join(5)
        return results
