"""The NVLink exchange: candidate rows pushed into every rank's slots, merged by every rank; see ``docs/dcp.md``.

An :class:`Exchange` is made of a torch.distributed group. Whether its ranks can reach each other's memory is found out
together, when the first indexer is built; where they cannot, the same calls go by all-gather (:class:`Gather`, with N
= K), and :attr:`Exchange.reason` says why. :func:`virtual_ranks` makes ranks that live in one process.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from keysieve.checks import UnsupportedError, message, refuse, require_int
from keysieve.dcp import exchange_report
from keysieve.dcp.base import ContextParallel, ExchangeError, Winners, require_timeout
from keysieve.dcp.exchange_memory import ExchangeMemory, VirtualBlocks, symmetric
from keysieve.dcp.gather import DEFAULT_TIMEOUT, Gather
from keysieve.dcp.group import require_group
from keysieve.dcp.layout import ExchangeLayout
from keysieve.dcp.memory import ExchangeShape
from keysieve.launch import capturing
from keysieve.plan import Sharding
from keysieve.spec import MAX_TOPK, MAX_WORLD, IndexerSpec, default_topn

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


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
        for memory in self._memories.values():
            found = exchange_report.failure(memory.report, self.timeout)
            if found is not None:
                self._lose()
                return found
        return None

    def _lose(self) -> None:
        """The CUDA context is gone, once a merge has reported."""
        if not self._lost:
            self._lost = True
            for memory in self._memories.values():
                memory.keep_for_ever()

    def raise_failure(self) -> None:
        """Refuse a call after a failure: the device may be lost, and the ranks are out of step.

        Raises:
            ExchangeError: a merge gave up, or a call was left out or interrupted.
        """
        for memory in self._memories.values():
            if exchange_report.written(memory.report):
                raise ExchangeError(self.failure())
        if self._broken is not None:
            raise ExchangeError(f"this exchange failed before and its ranks are out of step: {self._broken}")

    def interrupted(self) -> None:
        """Only a part of a call's kernels was launched: no later call of this rank can be in step."""
        self._broken = f"call {self.calls} was interrupted on rank {self.rank} in the middle of its launches"

    def check(self, device: torch.device) -> None:
        """Wait for the device and translate what a merge reported.

        Raises:
            ExchangeError: a peer did not answer, or made another call; rank, row, call, source and round are named.
        """
        try:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except RuntimeError as error:
            text = self.failure()
            if text is None:
                raise
            raise ExchangeError(text) from error
        text = self.failure()
        if text is not None:
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
        failed = [f"rank {r}: {t}" for r, t in enumerate(_everyones(text, self.group, self.world)) if t is not None]
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
            why = "it was asked for (gather=True)" if self._forced else self._no_peers(device)
            if why is not None:
                if self._forced is False:
                    remedy = "Leave gather out, or use ranks of one host whose GPUs have peer access."
                    raise UnsupportedError(
                        message("group", got=why, accepted="ranks that reach each other's memory", remedy=remedy)
                    )
                self.reason = why
                self._gather = Gather(self.group, None, self.interleave, self.sharded, timeout=self.timeout)
        self._decided = device

    def _no_peers(self, device: torch.device) -> str | None:
        """Why the ranks cannot push into each other's memory, the same answer on all of them; or None. Collective."""
        mine = (_host(), str(device), _uuid(device), _unusable(device))
        everyones = _everyones(mine, self.group, self.world)
        # What a rank sees of the others' devices may differ: verdicts are exchanged as well, and the first one holds.
        found = _first(_everyones(judged(everyones, visible=_reach(device)), self.group, self.world))
        if found is not None:
            return found
        why: str | None = None
        try:
            symmetric(ExchangeLayout(ExchangeShape(self.world, 1, 1, 1)), device, self.group)
        except UnsupportedError as error:
            why = str(error)
        return _first(_everyones(why, self.group, self.world))


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


def judged(ranks: Sequence[tuple[str, str, str, str | None]], visible: dict[str, bool] | None = None) -> str | None:
    """Why ranks with these (host, device, its identity, own reason) cannot exchange, or None.

    visible: what this process knows of devices by their identity: can its own device and they reach each other?
    """
    for rank, (_, where, _, reason) in enumerate(ranks):
        if reason is not None:
            return f"rank {rank} on {where}: {reason}"
    hosts = {host for host, *_ in ranks}
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    owners: dict[str, int] = {}
    for rank, (_, where, identity, _) in enumerate(ranks):
        if identity in owners:
            return f"ranks {owners[identity]} and {rank} share one device ({where})"
        owners[identity] = rank
    for rank, (_, where, identity, _) in enumerate(ranks):
        if visible is not None and visible.get(identity) is False:
            return f"the device of rank {rank} ({where}) has no peer access to the others"
    return None


def _host() -> str:
    """This machine, so that two containers of one host are told from two hosts with one name."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{boot or socket.gethostname()}"


def _uuid(device: torch.device) -> str:
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"{device}"
    return str(torch.cuda.get_device_properties(device).uuid)


def _unusable(device: torch.device) -> str | None:
    """Why this rank's device cannot take part, or None."""
    if device.type != "cuda":
        return "peer memory is a matter of CUDA devices"
    try:
        import torch.distributed._symmetric_memory  # is it there?
    except ImportError as error:
        return f"torch {torch.__version__} has no symmetric memory ({error})"
    return None


def _reach(device: torch.device) -> dict[str, bool] | None:
    """Of every CUDA device that this process sees, by identity: can ``device`` and it reach each other?"""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    mine = torch.cuda.current_device() if device.index is None else device.index
    found: dict[str, bool] = {}
    for other in range(torch.cuda.device_count()):
        both = other == mine or (
            torch.cuda.can_device_access_peer(mine, other) and torch.cuda.can_device_access_peer(other, mine)
        )
        found[str(torch.cuda.get_device_properties(other).uuid)] = both
    return found


def _everyones(mine: Any, group: Any, world: int) -> list[Any]:
    """``mine`` of every rank, in rank order; collective."""
    found: list[Any] = [None] * world
    dist.all_gather_object(found, mine, group=group)
    return found


def _first(texts: Sequence[str | None]) -> str | None:
    return next((text for text in texts if text is not None), None)
