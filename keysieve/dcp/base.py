"""What a ``DecodeIndexer`` asks of its ``dcp`` object: the seam between scoring and the exchange of candidates.

An indexer with ``dcp=`` does, on every rank and for every step, in this order and without an early return (a rank
with zero rows makes the calls too, or its peers wait for it in vain):

1. ``sharding = dcp.bind(spec, max_rows=, max_context=, device=)`` once, when the indexer is built. It may be called
   again for another indexer of the same process (layers share the object) and then only widens the limits.
2. ``local = dcp.local_lens(seq_lens)``: int32, the shape of ``seq_lens``; how many of each row's keys lie here.
3. the logits of this rank's own keys, BF16 ``[rows, >= max(local)]``, indexed by *local* index: a sharded index cache
   is scored with ``local`` as its lengths; a replicated one (``dcp.sharded`` is False) is scored with the global
   lengths, and ``dcp.own_columns(logits)`` takes the keys that lie here. ``dcp.own_table(table)`` does the same with
   whole pages where the interleave allows it, so that only own keys are read.
4. ``won = dcp.select(logits, local, seq_lens, site=)``: collective; returns :class:`Winners`.
5. ``won.local`` are indices into this rank's shard: physical rows follow from this rank's ``kv_table`` by the
   ordinary rule (entries of -1 stay -1). Without a table they are the output.

A call that ends before step 4, by whatever exception, is announced with ``dcp.withdraw()``, once, in place of
``select``. Whether ``select`` was reached is seen from ``dcp.calls``, which both count before anything else.

``select`` raises :class:`ExchangeError` when the ranks disagree or a peer does not answer in time; it has then
returned nothing, so a caller that writes outputs afterwards leaves them untouched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch

from keysieve.checks import KeysieveError, refuse, require_float, require_int
from keysieve.plan import Sharding
from keysieve.reference.dcp_maps import global_positions, local_seq_lens
from keysieve.spec import MAX_CONTEXT, MAX_WORLD, PAGE, index_planes

if TYPE_CHECKING:
    from keysieve.spec import IndexerSpec


MAX_SITE = (1 << 16) - 1
"""The signature of a call packs rows and site into one word, 16 bits each."""


LONGEST_TIMEOUT = 86400.0
"""Seconds; a longer wait is no limit to anybody."""


class ExchangeError(KeysieveError, RuntimeError):
    """The ranks of a context-parallel group disagree about a call, or one of them did not answer in time."""


class Winners(NamedTuple):
    """What this rank holds of every row's selection.

    Attributes:
        local: int32 ``[rows, topk]``: local indices of the winners that lie on this rank, ascending, then -1.
        counts: int32 ``[rows]``: how many those are (0 for a rank that owns none).
        positions: int32 ``[rows, topk]``: all ``min(len, topk)`` winners' global positions, ascending, then -1; the
            same on every rank.
    """

    local: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor


def require_timeout(timeout: object) -> float:
    """A time limit in seconds, above 0 and at most a day, or a refusal: clocks and transports take no other."""
    remedy = "Use the default of 10."
    seconds = require_float("timeout", timeout, remedy)
    if not 0 < seconds <= LONGEST_TIMEOUT:
        accepted = f"seconds above 0, at most {LONGEST_TIMEOUT:g}"
        refuse("timeout", got=timeout, accepted=accepted, remedy=remedy)
    return seconds


class ContextParallel(ABC):
    """One rank's view of a group of ranks that share every context.

    Args:
        world: ranks in the group, 1..16 (W).
        rank: this rank.
        interleave: consecutive positions on one rank (S).
        sharded: False if the index cache is replicated, that is, indexed by global position on every rank.
    """

    name: str

    def __init__(self, world: int, rank: int, *, interleave: int = 1, sharded: bool = True) -> None:
        self.world = require_int("world", world, 1, MAX_WORLD, "Use a group of at most 16 context ranks.")
        self.rank = require_int("rank", rank, 0, world - 1, "Pass this process's rank within the group.")
        self.interleave = require_int(
            "interleave", interleave, 1, MAX_CONTEXT, "Use the interleave that the KV cache is sharded with."
        )
        self.sharded = bool(sharded)
        self.calls = 0
        """Calls begun on this rank, withdrawn ones included: :meth:`select` and :meth:`withdraw` count first."""
        self.topk = 0
        self.max_rows = 0
        self.max_context = 0
        self.planes = 1

    @property
    def path(self) -> str:
        """How candidates travel, in words."""
        return f"exchanged by {type(self).__name__}"

    # --- what an indexer calls ---------------------------------------------------------------------------------

    def bind(self, spec: IndexerSpec, *, max_rows: int, max_context: int, device: torch.device | str) -> Sharding:
        """Take the limits of an indexer; allocate what the exchange needs. Returns how the context is sharded."""
        if self.topk not in (0, spec.topk):
            refuse(
                "dcp",
                got=f"an indexer with topk={spec.topk} after one with topk={self.topk}",
                accepted="indexers that agree on topk",
                remedy="Use one dcp object per topk.",
            )
        before = (self.topk, self.max_rows, self.max_context, self.planes)
        sharding = Sharding(self.world, self.rank, self.interleave, self.offered(spec.topk), self.sharded)
        self.topk = spec.topk
        self.max_rows = max(self.max_rows, max_rows)
        self.max_context = max(self.max_context, max_context)
        self.planes = index_planes(sharding.max_local_len(self.max_context))
        try:
            self._allocate(torch.device(device))
        except BaseException:
            self.topk, self.max_rows, self.max_context, self.planes = before
            raise
        return sharding

    def local_lens(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """int32, the shape of ``seq_lens``: keys of each row on this rank (0 for an empty row)."""
        return local_seq_lens(seq_lens, self.world, self.rank, self.interleave)

    def own_columns(self, logits: torch.Tensor) -> torch.Tensor:
        """Columns of a replicated cache's ``logits [rows, length]`` that lie on this rank, by local index."""
        length = torch.tensor([logits.shape[-1]], device="cpu")
        mine = int(local_seq_lens(length, self.world, self.rank, self.interleave)[0])
        local = torch.arange(mine, device=logits.device)
        return logits[:, global_positions(local, self.world, self.rank, self.interleave)]

    def own_table(self, index_table: torch.Tensor) -> torch.Tensor | None:
        """This rank's pages of a replicated ``index_table [requests, pages]``, or None if pages are shared by ranks.

        With an interleave that is a multiple of the page, local page p is a whole global page, so the replicated
        cache can be read through this narrower table with *local* lengths.
        """
        if self.interleave % PAGE:
            return None
        step = self.interleave // PAGE
        pages = torch.arange(index_table.shape[1], device=index_table.device)
        return index_table[:, (pages // step) % self.world == self.rank]

    @abstractmethod
    def select(
        self, logits: torch.Tensor, local_lens: torch.Tensor, seq_lens: torch.Tensor, *, site: int = 0
    ) -> Winners:
        """Exchange candidates and merge them; collective over the group.

        Args:
            logits: BF16 ``[rows, length]`` of this rank's keys, ``length >= max(local_lens)``; unit inner stride.
            local_lens: int32 ``[rows]``, this rank's lengths (of :meth:`local_lens`).
            seq_lens: int32 ``[rows]``, global lengths, equal on all ranks.
            site: the layer or call site, 0..65535; part of the call's signature, so that a rank which skips a layer
                is noticed.

        Raises:
            ExchangeError: the ranks' calls differ, or a peer did not answer within the time limit.
        """

    def withdraw(self) -> None:  # noqa: B027  # a transport that cannot tell leaves it to the peers' bounded wait
        """Tell the peers that this rank refused a call, where the transport can; collective like :meth:`select`.

        Raises no error: the caller has a better one at hand. Without it the peers would wait in vain, or, if the next
        call looks the same, take its candidates for those of the refused one. An indexer does this for its own calls;
        code that leaves out a call which the peers make (an error between two layers) does it for that call.
        """

    def raise_failure(self) -> None:  # noqa: B027  # a transport that fails in `select` has nothing to say before it
        """Raise what an earlier call left behind, before anything of the next one is touched. Does not synchronise."""

    def refused(self) -> None:
        """An indexer's call ended before anything of it was exchanged; by default as :meth:`withdraw`."""
        self.withdraw()

    # --- what an implementation provides -----------------------------------------------------------------------

    @abstractmethod
    def offered(self, topk: int) -> int:
        """Candidates a rank offers for a row (N)."""

    def _allocate(self, device: torch.device) -> None:  # noqa: B027  # nothing to allocate is a sound default
        """Make the buffers for ``max_rows`` rows; called by :meth:`bind`, never in a step."""
