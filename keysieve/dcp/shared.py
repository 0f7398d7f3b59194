"""The one-sided exchange, executed: ranks on one host push candidate rows into each other's slots and merge them.

It follows the protocol of the NVLink exchange step by step (``docs/dcp.md``): a tag beside every word, two parities,
an epoch per row, the signature, the rescue in the same merge, bounded waits. Ranks are threads or forked processes,
memory is an :class:`~keysieve.dcp.memory.ExchangeMemory`, and stores may be made to land late and in any order. It
exists to run the protocol under real concurrency without a GPU; for work between CPU processes use ``Gather``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from keysieve.checks import refuse, require_int, require_tensor
from keysieve.dcp.base import MAX_SITE, ContextParallel, ExchangeError, Winners, require_timeout
from keysieve.dcp.memory import ExchangeMemory, Halves, PromptWire, Stores
from keysieve.reference.local_topk import local_topk
from keysieve.reference.merge import merge, saturated_ranks

_MASK: Final = 0xFFFFFFFF
_POLL: Final = 20e-6
"""Seconds between two looks at slots that have not arrived."""


class Wire(Protocol):
    """What carries a rank's stores."""

    def issue(self, stores: list[Stores]) -> None: ...

    def close(self) -> None: ...


class SharedExchange(ContextParallel):
    """One rank of the exchange over shared memory.

    Args:
        memory: the buffers of all ranks.
        rank: this rank.
        interleave: consecutive positions that lie on one rank (S).
        sharded: False if the index cache is replicated.
        timeout: seconds to wait for a word or a flag.
        wire: how this rank's stores travel; default: they land at once.
        first_epoch: completed calls of every row to start from (modulo 2^32); the memory must be preset to it.
    """

    name = "shared memory"

    def __init__(
        self,
        memory: ExchangeMemory,
        rank: int,
        *,
        interleave: int = 1,
        sharded: bool = True,
        timeout: float = 10.0,
        wire: Wire | None = None,
        first_epoch: int = 0,
    ) -> None:
        super().__init__(memory.shape.world, rank, interleave=interleave, sharded=sharded)
        self.memory = memory
        self.timeout = require_timeout(timeout)
        self.rescues = 0
        """(row, call) pairs that needed a second round so far."""
        self._wire: Wire = PromptWire() if wire is None else wire
        self._epoch = np.full(memory.shape.max_rows, first_epoch & _MASK, dtype=np.uint32)
        self._seq = np.zeros(memory.shape.max_rows, dtype=np.int64)
        self._broken: str | None = None

    def offered(self, topk: int) -> int:
        shape = self.memory.shape
        if topk != shape.topk:
            refuse("topk", got=topk, accepted=f"the memory's {shape.topk}", remedy="Make the memory for this topk.")
        return shape.topn

    def _allocate(self, device: torch.device) -> None:
        shape = self.memory.shape
        have = (device.type, self.max_rows <= shape.max_rows, self.planes)
        if have != ("cpu", True, shape.planes):
            refuse(
                "memory",
                got=f"{shape} for {self.max_rows} rows, {self.planes} index planes on {device}",
                accepted="memory for at least as many rows and exactly these planes, on cpu",
                remedy="Make the memory with index_planes(longest local length) and the indexer's max_rows.",
            )

    def close(self) -> None:
        """Let this rank's last stores land; call it when no further call will be made."""
        self._wire.close()

    def withdraw(self) -> None:
        """Stores cannot say "refused", and a later call could be taken for the refused one: so there is none."""
        if self._broken is None:
            self._broken = f"rank {self.rank} refused a call of its own, which its peers cannot know"
            self.calls += 1

    def select(
        self, logits: torch.Tensor, local_lens: torch.Tensor, seq_lens: torch.Tensor, *, site: int = 0
    ) -> Winners:
        if self._broken is not None:
            raise ExchangeError(f"this exchange failed before and its ranks are out of step: {self._broken}")
        # The mark first, and taken away by a complete call only: some rows of one that ended in the middle, by
        # whatever exception, have been pushed or have their epoch stored, and the next call would be paired with it.
        self._broken = f"rank {self.rank} refused a call of its own, which its peers cannot know"
        self.calls += 1
        rows, k = seq_lens.shape[0], self.topk
        words = self._candidates(logits, local_lens, rows)
        signatures = self._signatures(rows, site, seq_lens)
        self._broken = f"rank {self.rank} was interrupted in the middle of a call"
        for row in range(rows):
            self._push(row, words[row].numpy(), signatures[row])
        won = Winners(
            torch.full((rows, k), -1, dtype=torch.int32, device="cpu"),
            torch.zeros(rows, dtype=torch.int32, device="cpu"),
            torch.full((rows, k), -1, dtype=torch.int32, device="cpu"),
        )
        # Ascending on every rank: in the second round a row waits for the same row of another rank.
        for row in range(rows):
            self._merge_row(row, logits, local_lens, seq_lens, signatures[row], won)
        self._broken = None
        return won

    def _candidates(self, logits: torch.Tensor, local_lens: torch.Tensor, rows: int) -> torch.Tensor:
        """int32 ``[rows, words]``: this rank's first lists, or a refusal."""
        integers = (torch.int32, torch.int64)
        require_tensor("local_lens", local_lens, dtypes=integers, shape=(rows,))
        require_tensor("logits", logits, dtypes=(torch.bfloat16,), shape=(rows, None), unit_inner=True)
        if rows > self.max_rows:
            refuse("rows", got=rows, accepted=f"at most max_rows = {self.max_rows}", remedy="Build a larger indexer.")
        return local_topk(logits, local_lens, self.memory.shape.topn, self.planes)[0]

    def _signatures(self, rows: int, site: int, seq_lens: torch.Tensor) -> NDArray[np.uint32]:
        """uint32 ``[rows, 2]``: (rows and call site, the row's global length)."""
        require_int("site", site, 0, MAX_SITE, "Pass the layer number.")
        signature = np.empty((rows, 2), dtype=np.uint32)
        signature[:, 0] = rows << 16 | site
        signature[:, 1] = seq_lens.to(torch.int64).clamp_min(0).numpy()
        return signature

    # --- local top-N: push -------------------------------------------------------------------------------------

    def _push(self, row: int, words: NDArray[np.int32], signature: NDArray[np.uint32]) -> None:
        """Every word of the row, tagged, to every rank's slot of this call's parity."""
        shape = self.memory.shape
        call = (int(self._epoch[row]) + 1) & _MASK
        data = np.zeros(2 * shape.pairs, dtype=np.uint64)
        data[: words.size] = words.view(np.uint32)
        data[-2:] = signature
        halves = data | np.uint64(call << 32)
        place = np.arange(2 * shape.pairs, dtype=np.int64)
        self._wire.issue(
            [Stores(self.memory.slots[dst][call & 1, self.rank, row], place, halves) for dst in range(self.world)]
        )

    # --- merge -------------------------------------------------------------------------------------------------

    def _merge_row(
        self,
        row: int,
        logits: torch.Tensor,
        local_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        signature: NDArray[np.uint32],
        won: Winners,
    ) -> None:
        """What the block of ``row`` does: accept, compare signatures, rescue, write, store the epoch."""
        shape, one = self.memory.shape, slice(row, row + 1)
        call = (int(self._epoch[row]) + 1) & _MASK  # read once
        halves = self._accept(row, call)
        data = (halves & np.uint64(_MASK)).astype(np.uint32)
        self._compare(row, call, data[:, -2:], signature)
        words = torch.from_numpy(data[:, : shape.words].view(np.int32).copy()).unsqueeze(1)
        lens = seq_lens[one]
        again = saturated_ranks(words, self.topk, interleave=self.interleave, planes=self.planes, seq_lens=lens)
        second = None
        if bool(again.any()):
            ranks = again[:, 0].nonzero().view(-1).tolist()
            second = self._rescue(row, ranks, logits[one], local_lens[one])
            self._seq[row] += 1
            self.rescues += 1
        merged = merge(
            words,
            self.topk,
            rank=self.rank,
            interleave=self.interleave,
            planes=self.planes,
            seq_lens=lens,
            second=second,
        )
        won.local[row], won.counts[row], won.positions[row] = merged.rows[0], merged.counts[0], merged.positions[0]
        self._epoch[row] = call

    def _accept(self, row: int, call: int) -> Halves:
        """uint64 ``[world, 2 * pairs]``: each half as it was when its tag was first seen to be this call's."""
        slots = self.memory.slots[self.rank][call & 1, :, row]
        taken = np.zeros(slots.shape, dtype=np.uint64)
        accepted = np.zeros(slots.shape, dtype=bool)
        tag = np.uint64(call)

        def look() -> str | None:
            seen = slots.copy()
            fresh = (seen >> np.uint64(32) == tag) & ~accepted
            taken[fresh] = seen[fresh]
            accepted[fresh] = True
            if accepted.all():
                return None
            source, half = (int(i) for i in np.argwhere(~accepted)[0])
            missing = int((~accepted[source]).sum())
            return (
                f"source {source}: {missing} of {slots.shape[1]} words missing; "
                f"expected tag {call}, seen {int(seen[source, half]) >> 32}; round 1"
            )

        self._wait(look, row)
        return taken

    def _compare(self, row: int, call: int, signatures: NDArray[np.uint32], own: NDArray[np.uint32]) -> None:
        """Refuse words that were pushed for another call than this rank's."""
        differ = (signatures != own).any(1)
        if differ.any():
            source = int(np.argmax(differ))
            theirs, ours = (
                f"{int(s[0]) >> 16} rows, site {int(s[0]) & 0xFFFF}, length {int(s[1])}"
                for s in (signatures[source], own)
            )
            self._fail(row, f"source {source} made another call: {theirs}; this rank: {ours}; tag {call}")

    def _rescue(self, row: int, ranks: list[int], logits: torch.Tensor, local_lens: torch.Tensor) -> torch.Tensor:
        """int32 ``[world, 1, words(K)]``: the saturated ranks' second lists (other entries are not filled)."""
        shape, seq = self.memory.shape, int(self._seq[row]) + 1
        if self.rank in ranks:
            words, _ = local_topk(logits, local_lens, self.topk, self.planes)
            index, place = ranks.index(self.rank), np.arange(shape.second_words, dtype=np.int64)
            for dst in range(self.world):
                lists = Stores(self.memory.recv[dst][row, index], place, words[0].numpy())
                at, value = np.array([row], dtype=np.int64), np.array([seq], dtype=np.int64)
                self._wire.issue([lists, Stores(self.memory.flags[dst][self.rank], at, value, after=[lists])])
        flags = self.memory.flags[self.rank]

        def look() -> str | None:
            absent = [source for source in ranks if int(flags[source, row]) < seq]
            if not absent:
                return None
            return f"source {absent[0]}: expected flag {seq}, seen {int(flags[absent[0], row])}; round 2"

        self._wait(look, row)
        second = np.zeros((self.world, 1, shape.second_words), dtype=np.int32)
        for index, source in enumerate(ranks):
            second[source, 0] = self.memory.recv[self.rank][row, index]
        return torch.from_numpy(second)

    # --- bounded waits -----------------------------------------------------------------------------------------

    def _wait(self, look: Callable[[], str | None], row: int) -> None:
        """Until ``look`` has nothing missing, or the time is up."""
        deadline = time.monotonic() + self.timeout
        while (missing := look()) is not None:
            if time.monotonic() > deadline:
                self._fail(row, f"no answer within {self.timeout:g} s: {missing}")
            time.sleep(_POLL)

    def _fail(self, row: int, what: str) -> None:
        self._broken = f"rank {self.rank}, row {row}: {what}"
        raise ExchangeError(self._broken)
