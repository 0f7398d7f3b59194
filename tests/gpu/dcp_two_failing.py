"""Tasks of `dcp_two.py` in which merges give up, as they should: the CUDA context is lost, the process ends."""

from __future__ import annotations

import os
import time
from typing import NoReturn

import torch
from dcp_adverse import adverse
from dcp_loops import build, together
from dcp_ranks import Geometry, Rank, raised

import keysieve as ks


def give_up(rank: int, task: str, text: str) -> NoReturn:
    """Say so and end: the CUDA context is lost."""
    print(f"rank {rank}: {task} holds: {text}", flush=True)
    os._exit(0)


def named(one: Rank, call: int, *parts: str, within: float = 5.0) -> str:
    """What a merge of the last call reports in so many seconds; the parts are in it, and no further call is made."""
    began = time.monotonic()
    text = raised(ks.dcp.ExchangeError, one.indexer.check)
    assert time.monotonic() - began < within, time.monotonic() - began
    for part in (f"rank {one.dcp.rank}", f"call {call}", *parts):
        assert part in text, text
    assert f"call {call}" in raised(ks.dcp.ExchangeError, one.call)
    return text


def killed(rank: int) -> None:
    """Rank 1 dies between two calls: rank 0 says so within the limit, and makes no further call."""
    one, _ = build(Geometry(2, lens=(9000, 2500), heads=8), ks.dcp.Exchange(timeout=0.5))
    one.call()
    one.indexer.check()
    if rank == 1:
        os._exit(0)
    one.call(site=11)
    give_up(rank, "killed", named(one, 2, "row 0", "source rank 1", "site 11", "expected tag 2", "round 1"))


def killed_late(rank: int) -> None:
    """The same among replays of a graph: rank 1 dies after its tenth."""
    one, _ = build(Geometry(2, lens=(9000, 2500), heads=8), ks.dcp.Exchange(timeout=0.5))
    one.call()
    one.indexer.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=one.stream):
        for site in range(3):
            one.call(site=site)
    together(one)
    for _ in range(10):
        graph.replay()
    if rank == 1:
        torch.cuda.synchronize()
        os._exit(0)
    graph.replay()
    give_up(rank, "killed_late", named(one, 32, "source rank 1", "site 0", "expected tag 32", "round 1"))


def skipped(rank: int) -> None:
    """Rank 1 lives on and makes no call."""
    one, _ = build(Geometry(2, lens=(9000, 2500), heads=8), ks.dcp.Exchange(timeout=0.5))
    one.call()
    together(one)
    if rank == 1:
        time.sleep(3)
        os._exit(0)
    one.call(site=12)
    give_up(rank, "skipped", named(one, 2, "source rank 1", "site 12", "round 1"))


def disagreed(rank: int) -> None:
    """Four rows on one rank, five on the other: both say so."""
    one, _ = build(Geometry(2, lens=(9000, 2500, 1, 2, 3), heads=8), ks.dcp.Exchange(timeout=2.0))
    one.call()
    together(one)
    one.call(rows=4 + rank)
    give_up(rank, "disagreed", named(one, 2, "made another call", "4 rows", "5 rows"))


def descending(rank: int) -> None:
    """What the order is for: rows from below on one rank and from above on the other wait for ever, and say so."""
    adverse("descending")
    case = Geometry(2, topn=1024, lens=(2600,) * 1200, heads=8, distinct=3000)
    one, _ = build(case, ks.dcp.Exchange(topn=1024, timeout=1.0))
    together(one)
    one.call()
    text = raised(ks.dcp.ExchangeError, one.indexer.check)
    assert "round 2" in text, text
    give_up(rank, "descending", text)


FAILING = (killed, killed_late, skipped, disagreed, descending)
NAMES = tuple(task.__name__ for task in FAILING)
