"""Context parallelism off the usual path: a replicated index cache, and candidates gathered by a collective.

Both are made of torch's operations beside the kernels, without allocations that a captured step could not make.
"""

from __future__ import annotations

import bisect
from typing import Any

import torch
import torch.distributed as dist

from keysieve.dcp.base import ContextParallel
from keysieve.dcp.exchange import Exchange
from keysieve.inputs import Step
from keysieve.kernels.flags import FLAG_RANKS_DIFFER
from keysieve.plan import Plan, Sharding
from keysieve.reference.dcp_maps import global_positions
from keysieve.spec import PAGE, pitch_of


class Replicated:
    """A replicated index cache: this rank's pages of it, or, where pages are shared by ranks, its columns of the whole.

    Attributes:
        whole: BF16 ``[max_rows, pitch]`` logits of the whole context, or None where pages are not shared.
    """

    def __init__(self, plan: Plan, sharding: Sharding, device: torch.device) -> None:
        rows, context = plan.problem.max_rows, plan.problem.max_context
        self.whole: torch.Tensor | None = None
        self._narrow: torch.Tensor | None = None
        with torch.inference_mode(False):
            if sharding.interleave % PAGE:
                self.whole = torch.empty(rows, pitch_of(context), dtype=torch.bfloat16, device=device)
                local = torch.arange(sharding.max_local_len(context), device=device)
                columns = global_positions(local, sharding.world, sharding.rank, sharding.interleave)
            else:
                pages = torch.arange(-(-context // PAGE), device=device)
                owner = (pages // (sharding.interleave // PAGE)) % sharding.world
                columns = pages[owner == sharding.rank]
                self._narrow = torch.zeros(rows, max(columns.numel(), 1), dtype=torch.int32, device=device)
        self._columns = columns
        self._sorted = columns.tolist()

    def _inside(self, width: int) -> int:
        """How many of this rank's columns are below `width`."""
        return bisect.bisect_left(self._sorted, width)

    def table_keys(self, step: Step) -> int:
        """Keys of this rank that the table has columns for."""
        if self.whole is not None:
            return self._inside(step.table_keys)
        return self._inside(step.index_table.shape[1]) * PAGE

    def table(self, step: Step) -> torch.Tensor:
        """The table that the scorer reads."""
        if self._narrow is None:
            return step.index_table
        return self._narrow[: step.requests, : max(self._inside(step.index_table.shape[1]), 1)]

    def fill_table(self, step: Step) -> None:
        """Bring this rank's pages into the narrow table."""
        count = self._inside(step.index_table.shape[1])
        if self._narrow is not None and count:
            self._narrow[: step.requests, :count].copy_(step.index_table[:, self._columns[:count]])

    def take_columns(self, rows: int, logits: torch.Tensor) -> None:
        """This rank's columns of the whole logits, into its own."""
        assert self.whole is not None
        logits[:rows, : self._columns.numel()].copy_(self.whole[:rows, self._columns])


class Gathered:
    """The all-gather path: candidate rows of all ranks, N = K, each with its call's signature behind it."""

    def __init__(self, plan: Plan, sharding: Sharding, device: torch.device, dcp: ContextParallel) -> None:
        path = dcp.gathers if isinstance(dcp, Exchange) else dcp
        self._group: Any = path.group  # type: ignore[union-attr]  # a Gather's
        self._words, self._world = plan.words, sharding.world
        rows = plan.problem.max_rows
        with torch.inference_mode(False):
            self._own = torch.zeros(rows, plan.words + 2, dtype=torch.int32, device=device)
            self._all = torch.zeros(sharding.world * rows, plan.words + 2, dtype=torch.int32, device=device)
            probe = torch.zeros(sharding.world, dtype=torch.int32, device=device)
        # The first collective of a group makes its communicator, which no captured step could do.
        dist.all_gather_into_tensor(probe, probe[:1].clone(), group=self._group)

    def own(self, rows: int) -> torch.Tensor:
        """This rank's candidate rows, int32 ``[rows, words]``."""
        return self._own[:rows, : self._words]

    def lists(self, rows: int) -> torch.Tensor:
        """All ranks', int32 ``[world, rows, words]``."""
        return self._all[: self._world * rows].view(self._world, rows, -1)[:, :, : self._words]

    def exchange(self, lens: torch.Tensor, site: int, flags: torch.Tensor) -> None:
        """Gather; a signature that differs raises a flag, and empties what was gathered."""
        rows = lens.numel()
        own, everyone = self._own[:rows], self._all[: self._world * rows]
        own[:, self._words].fill_(_signed(rows << 16 | site))
        own[:, self._words + 1].copy_(lens.reshape(-1).clamp(0, 2**31 - 1))
        dist.all_gather_into_tensor(everyone, own, group=self._group)
        signatures = everyone.view(self._world, rows, -1)[:, :, self._words :]
        differ = (signatures != own[:, self._words :]).any()
        everyone.masked_fill_(differ, 0)
        flags[:1].bitwise_or_(differ.to(torch.int32) << FLAG_RANKS_DIFFER)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value
