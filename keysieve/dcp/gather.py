"""The all-gather path: candidate rows with N = K over any torch.distributed group, merged on every rank.

A full list of K candidates is already all that a rank could contribute, so no rank is ever saturated and one round is
exact. It needs no peer memory: Gloo between CPUs, across hosts, anywhere. It is slower than the NVLink exchange and
always correct.

Before the candidates, the ranks exchange a small header: which call this is, how many rows, which lengths. Every rank
sees every header and comes to the same verdict, so ranks that were called differently all refuse the call, with the
same text, at once, and stay in step. A rank that does not answer at all ends the wait after ``timeout`` seconds with an
error that names it. Headers and candidates both travel from each rank to each, not by a collective of the group, so
that a peer which stops half-way can be named too.

A call that ended in the middle, by whatever exception, must not be followed by another: the next one would be merged
in its place on the peers. So a call marks the group as broken first and takes the mark away when the ranks are known to
be in step again; whatever happens in between, the mark stays.
"""

from __future__ import annotations

import math
import re
import time
import zlib
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from keysieve.checks import message, refuse, require_int, require_tensor
from keysieve.dcp.base import MAX_SITE, ContextParallel, ExchangeError, Winners, require_timeout
from keysieve.dcp.group import require_group
from keysieve.reference.local_topk import local_topk
from keysieve.reference.merge import merge

DEFAULT_TIMEOUT: Final = 10.0
"""Seconds that a rank waits for a peer."""

_STOOD_STILL: Final = 0.5
"""Seconds past its deadline after which a wait shows that this process did not run."""

_MAGIC: Final = 0x6B736976
_FIELDS: Final = (
    "magic",
    "call number",
    "rows",
    "site",
    "topk",
    "interleave",
    "index planes",
    "lengths digest",
    "refused",
)
_REFUSED: Final = len(_FIELDS) - 1
_HEADER_TAG: Final = 0x6B73
_LISTS_TAG: Final = 0x6B74
"""Message tags, so that headers and candidates do not meet other point-to-point traffic of the group."""


class Gather(ContextParallel):
    """Decode context parallelism over a torch.distributed group, by all-gather.

    Args:
        group: a process group whose ranks share every context, in shard order; None for the default group. 1..16 ranks.
        topn: None, or ``topk``: this path always offers K candidates.
        interleave: consecutive positions that lie on one rank (S).
        sharded: False if the index cache is replicated (indexed by global position on every rank).
        timeout: seconds, at most 86,400, to wait for the peers in each of a call's two phases, headers and candidates.
            Beyond its own work a call therefore takes at most twice this, and :meth:`withdraw` at most this; a signal
            such as Ctrl-C is acted on when the wait in progress is over.

    Raises:
        KeysieveError: torch.distributed is not initialised, this process is not in the group, or a bad argument.
    """

    name = "all-gather"

    def __init__(
        self,
        group: Any = None,
        topn: int | None = None,
        interleave: int = 1,
        sharded: bool = True,
        *,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.group, world, rank = require_group(group, "Gather")
        super().__init__(world, rank, interleave=interleave, sharded=sharded)
        self.topn = topn
        self.timeout = require_timeout(timeout)
        self._broken: str | None = None

    def offered(self, topk: int) -> int:
        if self.topn not in (None, topk):
            refuse(
                "topn",
                got=self.topn,
                accepted=f"None or topk ({topk})",
                remedy="The all-gather path offers K candidates, so that one round is exact; leave topn out.",
            )
        return topk

    def _allocate(self, device: torch.device) -> None:
        kind = device.type
        config = dist.get_backend_config(self.group)
        if f"{kind}:" not in config:
            wanted = {"cpu": "gloo", "cuda": "nccl"}.get(kind, "a backend of the device")
            refuse(
                "group",
                got=f"a group whose backends are {config!r}",
                accepted=f"a group that can carry tensors on {device}",
                remedy=f"Make it with torch.distributed.new_group(ranks, backend={wanted!r}).",
            )

    def select(
        self, logits: torch.Tensor, local_lens: torch.Tensor, seq_lens: torch.Tensor, *, site: int = 0
    ) -> Winners:
        if self._broken is not None:
            raise ExchangeError(f"this all-gather failed before and its ranks are out of step: {self._broken}")
        self._begin()
        try:
            rows, lens = self._checked(logits, local_lens, seq_lens)
            words, _ = local_topk(logits, local_lens, self.topk, self.planes)
            header = self._header(rows, lens, site)
            # Made here, where a failure can still be told to the peers.
            lists = torch.empty((self.world, *words.shape), dtype=words.dtype, device="cpu")
        except BaseException:
            self._tell_refused()
            raise
        verdict = self._verdict(self._exchange_headers(header))
        if verdict is not None:
            self._broken = None
            raise ExchangeError(verdict)
        if rows:
            self._swap(words, lists, _LISTS_TAG, ", after agreeing on the call")
        self._broken = None
        if rows == 0:
            return self._nothing()
        merged = merge(
            lists,
            self.topk,
            rank=self.rank,
            interleave=self.interleave,
            planes=self.planes,
            seq_lens=lens,
        )
        return Winners(merged.rows, merged.counts, merged.positions)

    def withdraw(self) -> None:
        if self._broken is None:
            self._begin()
            self._tell_refused()

    def _begin(self) -> None:
        """Count a call, with the mark that it leaves unless it ends in step; the mark first, an alarm may strike."""
        self._broken = f"call {self.calls + 1} was interrupted on rank {self.rank}, and its peers may have gone on"
        self.calls += 1

    def _tell_refused(self) -> None:
        """The peers' headers for one that says "refused". Where that fails the mark stays; later calls report it."""
        try:
            self._exchange_headers(self._header(0, torch.empty(0, dtype=torch.int32, device="cpu"), 0, refused=True))
        except Exception:
            return  # the caller has a better error at hand; an interrupt goes on
        self._broken = None

    def _checked(
        self, logits: torch.Tensor, local_lens: torch.Tensor, seq_lens: torch.Tensor
    ) -> tuple[int, torch.Tensor]:
        """Rows and global lengths of the call, or a refusal."""
        if not self.topk:
            refuse("dcp", got="a Gather that no indexer has bound", accepted="bind() first", remedy="Pass it as dcp=.")
        integers = (torch.int32, torch.int64)
        lens = require_tensor("seq_lens", seq_lens, dtypes=integers, shape=(None,))
        rows = lens.shape[0]
        require_tensor("local_lens", local_lens, dtypes=integers, shape=(rows,))
        require_tensor("logits", logits, dtypes=(torch.bfloat16,), shape=(rows, None), unit_inner=True)
        if rows > self.max_rows:
            refuse("rows", got=rows, accepted=f"at most max_rows = {self.max_rows}", remedy="Build a larger indexer.")
        if rows and int(lens.max()) > self.max_context:
            refuse(
                "seq_lens",
                got=int(lens.max()),
                accepted=f"at most max_context = {self.max_context}",
                remedy="Build the indexer for a longer context.",
            )
        return rows, lens

    def _nothing(self) -> Winners:
        empty = torch.full((0, self.topk), -1, dtype=torch.int32, device="cpu")
        return Winners(empty, torch.zeros(0, dtype=torch.int32, device="cpu"), empty.clone())

    # --- headers -----------------------------------------------------------------------------------------------

    def _header(self, rows: int, lens: torch.Tensor, site: int, refused: bool = False) -> torch.Tensor:
        require_int("site", site, 0, MAX_SITE, "Pass the layer number.")
        # 64 bits, so that no two lengths look the same and int32 equals int64.
        digest = zlib.crc32(lens.to(torch.int64).contiguous().numpy().tobytes())
        values = (_MAGIC, self.calls, rows, site, self.topk, self.interleave, self.planes, digest, int(refused))
        return torch.tensor(values, dtype=torch.int64, device="cpu")

    def _verdict(self, headers: torch.Tensor) -> str | None:
        """What is wrong with the call: a rank refused it, or two headers differ. The same text on every rank."""
        refused = headers[:, _REFUSED].nonzero().view(-1).tolist()
        if refused:
            return message(
                "call",
                got=f"rank(s) {refused} refused call {self.calls} (their own error says why)",
                accepted="the same valid call on every rank",
                remedy="Fix the call on those ranks; all ranks are still in step.",
            )
        for column, field in enumerate(_FIELDS[:_REFUSED]):
            values = headers[:, column].tolist()
            if len(set(values)) > 1:
                return message(
                    field,
                    got=", ".join(f"rank {r}: {v}" for r, v in enumerate(values)),
                    accepted=f"the same {field} on every rank",
                    remedy="Call all ranks with the same rows, lengths and layer, idle ranks with padding rows.",
                )
        return None

    def _exchange_headers(self, own: torch.Tensor) -> torch.Tensor:
        """int64 ``[world, fields]``: every rank's header."""
        headers = torch.zeros((self.world, len(_FIELDS)), dtype=torch.int64, device="cpu")
        self._swap(own, headers, _HEADER_TAG, "")
        return headers

    def _swap(self, own: torch.Tensor, everyones: torch.Tensor, tag: int, when: str) -> None:
        """``own`` to every peer, theirs into ``everyones[peer]``; raise for the peers that do not answer in time."""
        everyones[self.rank] = own
        deadline = time.monotonic() + self.timeout
        started: list[tuple[int, Any]] = []
        silent: dict[int, str] = {}
        for peer in (r for r in range(self.world) if r != self.rank):
            try:
                address = dist.get_global_rank(self.group, peer)
                started.append((peer, dist.irecv(everyones[peer], src=address, group=self.group, tag=tag)))
                started.append((peer, dist.isend(own, dst=address, group=self.group, tag=tag)))
            except (RuntimeError, ValueError) as error:  # the latter for a group that was destroyed
                silent[peer] = _first_line(error)
        for peer, work in started:
            try:
                left = math.ceil(1000 * (deadline - time.monotonic()))  # cut down, it ends early
                work.wait(timedelta(milliseconds=max(left, 1)))
            except RuntimeError as error:
                # A wait that times out closes all connections; the peers after it were silent as long.
                text = _first_line(error)
                late = time.monotonic() >= deadline and "closed by peer" not in text
                silent.setdefault(peer, f"silent for {self.timeout:g} s" if late else text)
        if silent:
            who = ", ".join(f"rank {peer} ({silent[peer]})" for peer in sorted(silent))
            over = time.monotonic() - deadline
            if over > _STOOD_STILL:
                when += f"; this rank itself stood still for {over:.1f} s"
            self._broken = message(
                "dcp",
                got=f"no answer on rank {self.rank} to call {self.calls} from {who}{when}",
                accepted=f"an answer from all {self.world} ranks within {self.timeout:g} s",
                remedy="A rank died, stopped, or made other calls; look at its log, then build a new group.",
            )
            raise ExchangeError(self._broken)


def _first_line(error: BaseException) -> str:
    """The transport's own words, without the place in its sources where they stand."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", text.splitlines()[0])[:200]
