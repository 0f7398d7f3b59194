"""The NVLink exchange: candidate rows pushed into every rank's slots, merged by every rank; see ``docs/dcp.md``.

An :class:`Exchange` is made of a torch.distributed group. Whether its ranks can reach each other's memory is found out
together, when the first indexer is built; where they cannot, the same calls go by all-gather (:class:`Gather`, with N
= K), and :attr:`Exchange.reason` says why. :func:`virtual_ranks` makes ranks that live in one process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from keysieve.checks import DeviceFault, UnsupportedError, message, refuse, require_int
from keysieve.dcp import exchange_report
from keysieve.dcp.base import ContextParallel, ExchangeError, Winners, require_timeout
from keysieve.dcp.exchange_memory import ExchangeMemory, VirtualBlocks, symmetric
from keysieve.dcp.exchange_reach import everyones, no_peers
from keysieve.dcp.gather import DEFAULT_TIMEOUT, Gather
from keysieve.dcp.group import require_group
from keysieve.dcp.layout import ExchangeLayout
from keysieve.dcp.memory import ExchangeShape
from keysieve.launch import capturing
from keysieve.plan import Sharding
from keysieve.spec import MAX_TOPK, MAX_WORLD, IndexerSpec, default_topn

LOOK: Final = 0.002
"""Seconds between two looks for a report while the device is waited for."""

_EVERY: Final[weakref.WeakSet[Exchange]] = weakref.WeakSet()
"""Of this process: those on one device share a CUDA context, and lose it together."""

_every_lock: Final = threading.RLock()
"""A set cannot be listed while another thread adds to it."""


def _same(one: torch.device | None, other: torch.device) -> bool:
    """Are both CUDA devices, and the same one as far as they have an index?"""
    if one is None or not one.type == other.type == "cuda":
        return False
    return one.index == other.index or None in (one.index, other.index)


class Exchange(ContextParallel):
    """Decode context parallelism over NVLink peer memory.

    Args:
        group: a torch.distributed group whose ranks share every context, in shard order; None for the default group.
            2..16 ranks, each with a device of its own (a group of one works, and exchanges nothing).
        topn: candidates a rank offers for a row, at most ``topk``; None: ``topk/W + 6 sqrt(topk/W)``, rounded up to 32.
            Fewer mean more rescues, and never other keys; with ``W * topn <= topk`` every long row needs one.
        interleave: consecutive positions that lie on one rank (S).
        sharded: False if the index cache is replicated (indexed by global position on every rank).
        timeout: seconds that a merge waits for a peer's words before it gives up, at most 86,400.
        gather: True to go by all-gather in any case; None: where the ranks cannot reach each other's memory.

    Building an indexer with it is collective: all ranks do it, in the same order. Nothing is allocated later.

    Raises:
        KeysieveError: torch.distributed is not initialised, this process is not in the group, or a bad argument.
    """

    name = "exchange"

    def __init__(
        self,
        group: Any = None,
        topn: int | None = None,
        interleave: int = 1,
        sharded: bool = True,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        gather: bool | None = None,
    ) -> None:
        self.group, world, rank = require_group(group, "Exchange")
        self._begin(world, rank, topn, interleave, sharded, timeout)
        self._blocks: VirtualBlocks | None = None
        self._forced = gather

    def _begin(self, world: int, rank: int, topn: int | None, interleave: int, sharded: bool, timeout: float) -> None:
        super().__init__(world, rank, interleave=interleave, sharded=sharded)
        if topn is not None:
            require_int("topn", topn, 1, MAX_TOPK, "Leave topn out for the default.")
        self.topn = topn
        self.timeout = require_timeout(timeout)
        self.reason: str | None = None
        """Why calls go by all-gather, or None: they are exchanged (or no indexer has been built yet)."""
        self.memory: ExchangeMemory | None = None
        """What the newest indexer uses. Older ones keep what they were built with."""
        self._gather: Gather | None = None
        self._decided: torch.device | None = None
        self._memories: dict[ExchangeLayout, ExchangeMemory] = {}
        self._broken: str | None = None
        self._lost = False
        with _every_lock:
            _EVERY.add(self)

    # --- what an indexer calls ---------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """How candidates travel, in words."""
        if self._gather is not None:
            return f"all-gather of K candidates a rank, because {self.reason}"
        where = "symmetric memory" if self._blocks is None else "memory of one process"
        return f"pushed into every rank's slots ({where})"

    @property
    def workspace_bytes(self) -> int:
        """Bytes on this rank's device that indexers built so far share: slots, second lists, flags, epochs."""
        return sum(layout.block_bytes + layout.private_bytes for layout in self._memories)

    @property
    def gathers(self) -> Gather | None:
        """The all-gather path, where it is taken."""
        return self._gather

    def offered(self, topk: int) -> int:
        if self._gather is not None:
            return topk
        n = default_topn(topk, self.world) if self.topn is None else self.topn
        if n > topk and self.topn is not None:
            refuse("topn", got=n, accepted=f"at most topk = {topk}", remedy="Leave topn out for the default.")
        return n

    def bind(self, spec: IndexerSpec, *, max_rows: int, max_context: int, device: torch.device | str) -> Sharding:
        where = torch.device(device)
        self._raise_reported()
        if capturing():
            refuse(
                "dcp",
                got="an indexer built while a CUDA graph is being captured",
                accepted="indexers built before the capture: their ranks meet, and allocate",
                remedy="Build the indexer, and run one step, before capturing.",
            )
        self._decide(where)
        if self._gather is not None:
            sharding = self._gather.bind(spec, max_rows=max_rows, max_context=max_context, device=where)
            self.topk, self.max_rows, self.max_context = spec.topk, self._gather.max_rows, self._gather.max_context
            self.planes = self._gather.planes
            return sharding
        return super().bind(spec, max_rows=max_rows, max_context=max_context, device=where)

    def select(
        self, logits: torch.Tensor, local_lens: torch.Tensor, seq_lens: torch.Tensor, *, site: int = 0
    ) -> Winners:
        if self._gather is not None:
            self.calls += 1
            return self._gather.select(logits, local_lens, seq_lens, site=site)
        raise UnsupportedError(
            message(
                "dcp",
                got="select() of an exchange between devices",
                accepted="a step of the DecodeIndexer: its kernels exchange candidates",
                remedy="Call the indexer, or use keysieve.dcp.Gather.",
            )
        )

    def withdraw(self) -> None:
        """This rank leaves out a call that its peers make.

        Stores cannot say so: the peers' merges give up after the time limit, and a later call of this rank could be
        taken for the one left out. So there is none. (By all-gather the peers are told, and all stay in step.)
        """
        self.calls += 1
        if self._gather is not None:
            self._gather.withdraw()
        elif self._broken is None:
            self._broken = f"rank {self.rank} left out a call, which its peers cannot know"

    def refused(self) -> None:
        """An indexer refused a call before anything of it was launched.

        If the peers refused theirs as well, all are in step. If they did not they wait in vain and report it; and this
        rank's next call is held to theirs by its signature.
        """
        if self._gather is not None:
            self._gather.withdraw()
        self.calls += 1

    # --- failures ----------------------------------------------------------------------------------------------

    def failure(self) -> str | None:
        """What a merge of this rank reported before it gave up, as text, or None. Does not synchronise.

        For handlers of CUDA errors: after a report the context is gone, but this can still be asked. The exchange's
        memory is then never freed: torch would end the process instead of letting an exception through.
        """
        for memory in self._all_memory():
            found = exchange_report.failure(memory.report, self.timeout)
            if found is not None:
                self._lose()
                return found
        return None

    def _all_memory(self) -> list[ExchangeMemory]:
        """As it is now: another thread may build an indexer, which adds some, while this one is asked for reports."""
        return list(self._memories.values())

    def _lose(self) -> None:
        """The CUDA context is gone, once a merge has reported."""
        if not self._lost:
            self._lost = True
            for memory in self._all_memory():
                memory.keep_for_ever()

    def raise_failure(self) -> None:
        """Refuse a call after a failure: the device may be lost, and the ranks are out of step.

        Raises:
            ExchangeError: a merge gave up, or a call was left out or interrupted.
        """
        self._raise_reported()
        if self._broken is not None:
            raise ExchangeError(f"this exchange failed before and its ranks are out of step: {self._broken}")

    def _reported(self) -> bool:
        """Has a merge of this rank left a report? Neither CUDA nor the device is asked."""
        return any(exchange_report.written(memory.report) for memory in self._all_memory())

    def _raise_reported(self) -> None:
        if self._reported():
            raise ExchangeError(self.failure())

    @contextmanager
    def translated(self, device: torch.device) -> Iterator[None]:
        """What a merge reported, before the block and after it, and instead of what CUDA raises in it.

        After a trap every call of CUDA's may raise, even a question: one that is asked on the way to naming the peer is
        asked in here.

        Raises:
            ExchangeError: rank, row, call, source and round are named.
        """
        self._raise_reported()
        try:
            yield
        except RuntimeError as error:
            self.raise_instead(error, device)
            raise
        self._raise_reported()

    def raise_instead(self, error: RuntimeError, device: torch.device) -> None:
        """Raise what a merge reported, if one did, in the place of an error that followed from it.

        The merge may be of another exchange of this process on the device, whose context this one loses as well.
        """
        if isinstance(error, ExchangeError | DeviceFault):
            return
        text = self.failure() or self._told_by(self._beside(device))
        if text is not None:
            raise ExchangeError(text) from error

    def _beside(self, device: torch.device) -> list[Exchange]:
        """This process' other exchanges on a CUDA device. Without an index it is the current one, for which CUDA would
        have to be asked: then those on any."""
        with _every_lock:
            every = list(_EVERY)
        return [other for other in every if other is not self and _same(other._decided, device)]

    def _told_by(self, others: list[Exchange]) -> str | None:
        """What a merge of one of `others` reported before it took their device's context with it, or None."""
        for other in others:
            if (text := other.failure()) is not None:
                self._lose()
                return text
        return None

    def interrupted(self) -> None:
        """Only a part of a call's kernels was launched: no later call of this rank can be in step."""
        self._broken = f"call {self.calls} was interrupted on rank {self.rank} in the middle of its launches"

    def check(self, device: torch.device) -> None:
        """Wait for the device, or until a merge has reported, and translate what it reported.

        Raises:
            ExchangeError: a peer did not answer, or made another call; rank, row, call, source and round are named.
        """
        with self.translated(device):
            if device.type == "cuda":
                self._wait(device)

    def _wait(self, device: torch.device) -> None:
        """Until the device has done everything, or a merge has reported, of whichever exchange of this process on it. A
        report is in this process's memory when its kernel traps; that the context is lost the driver tells seconds
        later, and half a minute later where processes share the device, one after the other."""
        # Each thread has a current device of its own.
        index = torch.cuda.current_device() if device.index is None else device.index
        others = self._beside(torch.device("cuda", index))
        failed: list[Exception] = []

        def synchronise() -> None:
            try:
                torch.cuda.synchronize(index)
            except Exception as error:
                failed.append(error)

        # No daemon: one that comes back to an interpreter which has ended takes the process with it. So the end of a
        # process, not the error, waits for the driver.
        waiter = threading.Thread(target=synchronise, name="keysieve-check", daemon=False)
        try:
            waiter.start()
        except RuntimeError:  # none is to be had: Python 3.12 starts no thread once the interpreter ends
            synchronise()
        while waiter.is_alive() and not any(one._reported() for one in (self, *others)):
            waiter.join(LOOK)
        if failed:
            raise failed[0]
        if (text := self._told_by(others)) is not None:
            raise ExchangeError(text)

    # --- memory ------------------------------------------------------------------------------------------------

    def layout(self, topk: int) -> ExchangeLayout:
        """The layout of blocks that serve the bound limits."""
        return ExchangeLayout(ExchangeShape(self.world, self.max_rows, topk, self.offered(topk), self.planes))

    def _allocate(self, device: torch.device) -> None:
        layout = self.layout(self.topk)
        if layout not in self._memories:
            self._memories[layout] = self._new_memory(layout, device)
        self.memory = self._memories[layout]

    def _new_memory(self, layout: ExchangeLayout, device: torch.device) -> ExchangeMemory:
        if self._blocks is not None:
            return self._blocks.memory(layout, self.rank)
        memory: ExchangeMemory | None = None
        text: str | None = None
        try:
            memory = symmetric(layout, device, self.group)
        except UnsupportedError as error:
            text = str(error)
        # Also the barrier behind the zeroing: nobody pushes before everybody's block is zero.
        failed = [f"rank {r}: {t}" for r, t in enumerate(everyones(text, self.group, self.world)) if t is not None]
        if failed or memory is None:
            raise UnsupportedError("; ".join(failed))
        return memory

    def _decide(self, device: torch.device) -> None:
        """Find out together, once, whether the ranks exchange or gather."""
        if self._decided is not None:
            if device != self._decided:
                refuse(
                    "dcp",
                    got=f"an indexer on {device} after one on {self._decided}",
                    accepted="indexers of one device",
                    remedy="Use one Exchange per device.",
                )
            return
        if self._blocks is None:
            why = "it was asked for (gather=True)" if self._forced else no_peers(device, self.group, self.world)
            if why is not None:
                if self._forced is False:
                    remedy = "Leave gather out, or use ranks of one host whose GPUs have peer access."
                    raise UnsupportedError(
                        message("group", got=why, accepted="ranks that reach each other's memory", remedy=remedy)
                    )
                self.reason = why
                self._gather = Gather(self.group, None, self.interleave, self.sharded, timeout=self.timeout)
        self._decided = device


def virtual_ranks(
    devices: Sequence[torch.device | str],
    topn: int | None = None,
    interleave: int = 1,
    sharded: bool = True,
    *,
    timeout: float = DEFAULT_TIMEOUT,
) -> list[Exchange]:
    """Ranks that live in this process: an exchange for each of ``devices``, in rank order; a device may occur often.

    For tests and for ``keysieve check``. Each rank's steps run on a stream of its own. Merges wait on the device for
    the other ranks' words, so on one device either all ranks' words are pushed before the first merge is launched, or
    all merges' blocks fit beside a scorer; and CUDA_DEVICE_MAX_CONNECTIONS=32 keeps streams from sharing a queue.

    Raises:
        KeysieveError: no devices, or more than 16; or a bad argument as for :class:`Exchange`.
    """
    world = require_int("devices", len(devices), 1, MAX_WORLD, "Name a device for each of at most 16 ranks.")
    blocks = VirtualBlocks([torch.device(d) for d in devices])
    made = []
    for rank in range(world):
        one = Exchange.__new__(Exchange)
        one.group, one._blocks, one._forced = None, blocks, False
        one._begin(world, rank, topn, interleave, sharded, timeout)
        made.append(one)
    return made
