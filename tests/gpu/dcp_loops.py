"""Graphs of context-parallel calls that are replayed many times, each replay's outputs checked and poisoned at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from dcp_ranks import Context, Geometry, Rank

import keysieve as ks

POISON = 7


class Loop:
    """A graph of several calls of one rank, and one that counts what is wrong in their outputs and poisons them.

    Args:
        rank: whose calls; it has made a call of so many rows, whose outputs were right: `right`.
        sites: a call for each.
        before: work of an engine in front of each call, captured with it.
    """

    def __init__(self, rank: Rank, sites: list[int], right: ks.Selection, rows: int | None = None) -> None:
        self.rank = rank
        self.right = [None if part is None else part.clone() for part in right]
        self.wrong = torch.zeros(1, dtype=torch.int64, device=rank.device)
        self.calls, self.check = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(rank.device)
        with torch.cuda.graph(self.calls, stream=rank.stream):
            self.found = []
            for site in sites:
                self.before()
                self.found.append(rank.call(site=site, rows=rows))
        with torch.cuda.graph(self.check, stream=rank.stream):
            for selection in self.found:
                for have, want in zip(selection, self.right, strict=True):
                    assert have is not None
                    self.wrong += (have != want).sum()
                    have.fill_(POISON)

    def before(self) -> None:
        """What an engine's kernels do in front of a call."""

    def replay(self) -> None:
        """The calls, then the check, on the current stream."""
        self.calls.replay()
        self.check.replay()

    def hold(self) -> None:
        """Raise if any replay so far left a wrong element."""
        assert int(self.wrong) == 0, f"{int(self.wrong)} wrong elements on rank {self.rank.dcp.rank}"


class Produced(Loop):
    """Lengths and page tables are written by kernels directly in front of every call, over nonsense."""

    def __init__(self, rank: Rank, sites: list[int], right: ks.Selection) -> None:
        self.lens, self.table, self.kv_table = rank.lens.clone(), rank.table.clone(), rank.kv_table.clone()
        super().__init__(rank, sites, right)

    def before(self) -> None:
        r = self.rank
        for tensor in (r.lens, r.table, r.kv_table):
            tensor.zero_()
        r.kv_table.copy_(self.kv_table)
        r.table.copy_(self.table)
        r.lens.copy_(self.lens)


class Traffic:
    """Copies of 64 MiB on a stream of their own, to another device where there is one."""

    def __init__(self, device: torch.device, other: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.ends = [torch.ones(1 << 26, dtype=torch.uint8, device=d) for d in (device, other)]
        self.go()
        torch.cuda.synchronize(device)

    def go(self) -> None:
        with torch.cuda.stream(self.stream):
            self.ends[1].copy_(self.ends[0], non_blocking=True)


def build(case: Geometry, dcp: Any, **options: Any) -> tuple[Rank, ks.Selection]:
    """This rank, and what one rank selects on the whole context."""
    device = torch.device("cuda", torch.cuda.current_device())
    context = Context(case, device)
    whole = Rank(context, None, device).call()
    torch.cuda.synchronize()
    return Rank(context, dcp, device, **options), whole


def together(one: Rank) -> None:
    """This device has done everything, and so have the others."""
    torch.cuda.synchronize(one.device)
    dist.barrier()
