"""One context-parallel ``DecodeIndexer``'s part on a Hopper GPU: score, offer candidates, merge what all ranks offer.

With an :class:`~keysieve.dcp.Exchange` whose ranks reach each other's memory a step is a chain of kernels that knows no
host in between; by all-gather the same kernels run before and after a collective of the group. Lengths are global; a
kernel computes its rank's own where it reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from keysieve.checks import describe, refuse
from keysieve.dcp.base import ContextParallel
from keysieve.dcp.exchange import Exchange
from keysieve.dcp.exchange_memory import ExchangeMemory
from keysieve.inputs import Placement, Selection, Step
from keysieve.kernels.exchange_host import Merger
from keysieve.kernels.local_topk_host import LocalTopk
from keysieve.kernels.sharding_word import sharding_word
from keysieve.kernels.sm90_score_config import PITCHED_TOPS
from keysieve.plan import Plan, Sharding
from keysieve.relaunch import Address, Calls, Recorder, launch_list, named
from keysieve.repeats import ADDRESSES, Relaunch
from keysieve.sm90_dcp_paths import Gathered, Replicated
from keysieve.sm90_step import StreamWorkspace, limit_requests
from keysieve.spec import GROUP

if TYPE_CHECKING:
    from keysieve.gpu import GpuBackend

_SITE: Final = "site"
_NAMES: Final = (*ADDRESSES, _SITE)


class Sm90DcpRunner(StreamWorkspace):
    """One rank of a context-parallel ``DecodeIndexer`` on one Hopper GPU.

    Args:
        backend: whose launchers are used.
        plan: pitched, with its sharding.
        device: this rank's.
        dcp: what the indexer was built with, bound.

    Attributes:
        path: what a step runs, in words.
    """

    def __init__(self, backend: GpuBackend, plan: Plan, device: torch.device, dcp: ContextParallel) -> None:
        super().__init__(backend, plan, device)
        problem = plan.problem
        assert problem.sharding is not None
        self._sharding: Sharding = problem.sharding
        self._dcp = dcp
        self._local = self._sharding.max_local_len(problem.max_context)
        self._shard = Replicated(plan, self._sharding, device) if not self._sharding.sharded else None
        self.split: list[Callable[[], None]] | None = None
        """Where merges are put, to be launched later, instead of being launched: see `DcpRelaunch.make`."""
        self._calls: Calls = []
        gathers = not isinstance(dcp, Exchange) or dcp.gathers is not None
        self._exchange: Exchange | None = None if gathers else dcp  # type: ignore[assignment]  # an Exchange, by the line above
        self._memory: ExchangeMemory | None = None if self._exchange is None else self._exchange.memory
        self._gathered = Gathered(plan, self._sharding, device, dcp) if gathers else None

        def make(kernel: Any, config: Any) -> Recorder:
            return Recorder(backend.launcher(device, kernel, config), self._calls)

        topn = self._sharding.topn
        given = plan.tops_elements > 0
        self._offer = LocalTopk(
            make, n=topn, planes=plan.planes, push=True, keys=self._local, sms=self._blocks, given=given
        )
        self._merge = Merger(
            make,
            k=problem.spec.topk,
            n=topn,
            planes=plan.planes,
            world=self._sharding.world,
            rank=self._sharding.rank,
            interleave=self._sharding.interleave,
            tagged=not gathers,
            sms=self._blocks,
        )
        for next_n in problem.next_n:
            for layout in ("pitched", PITCHED_TOPS)[: 1 + given]:
                config = backend.score_config(problem.spec, next_n, layout, "float32")
                backend.launcher(device, backend.scorer(problem.spec)[0], config)
        how = "all-gather" if gathers else "tagged pairs"
        self.path = f"score into pitched logits, offer {topn} candidates a row by {how}, merge"

    # --- a step ------------------------------------------------------------------------------------------------

    def run(self, step: Step, place: Placement, out: Selection, site: int) -> Relaunch | None:
        """Fill every entry of ``out``; collective over the ranks."""
        limit_requests(step)
        for name, tensor in (("query", step.codes), ("weights", step.weights), ("counts", out.counts)):
            if not tensor.is_contiguous():
                refuse(name, got=describe(tensor), accepted="a contiguous tensor", remedy="Call .contiguous() on it.")
        lens = step.seq_lens
        copied = lens.dtype != torch.int32 or not lens.is_contiguous()
        with self.lock:
            parts = self._written_down(step, place, out, self._lens[: step.rows] if copied else lens, site)
        relaunch = DcpRelaunch(self, parts, self._take_lengths if copied else None)
        tensors = (step.codes, step.cache.data, step.weights, lens, step.index_table, place.kv_table, *out, step.words)
        given = (*(0 if t is None else t.data_ptr() for t in tensors), site)
        if self.split is not None:
            relaunch.make(lens, given, step=step, merges=False)
            self.split.append(partial(relaunch.make, lens, given, pushes=False))
        else:
            relaunch.make(lens, given, step=step)
        return relaunch if self._shard is None and self._gathered is None else None

    def _written_down(
        self, step: Step, place: Placement, out: Selection, lens: torch.Tensor, site: int
    ) -> tuple[Callable[..., None], ...]:
        """The launches of the scorer, of the candidates (pushed, or left for the all-gather), and of the merge."""
        rows, numbered = step.rows, Address(site, _SITE)
        logits, tops = self._results(rows)
        local_limit = min(
            self._local, self._table_keys(step), *([] if place.table_keys is None else [place.table_keys])
        )
        if lens.data_ptr() != self._lens.data_ptr():
            lens = named(lens, "seq_lens")
        self._calls.clear()
        self._score(step, lens, logits, tops)
        score = list(self._calls)
        self._calls.clear()
        s, memory = self._sharding, self._memory
        common: dict[str, Any] = {
            "world": s.world,
            "rank": s.rank,
            "interleave": s.interleave,
            "limit": self.plan.problem.max_context,
            "local_limit": local_limit,
            "flags": self._flags.word,
            "site": numbered,
            "chained": self._shard is None,
            "settled": self._shard is None,  # the scorer triggers behind its own wait for whoever wrote the lengths
        }
        if memory is not None:
            place_of: dict[str, Any] = {
                "peers": memory.peers,
                "slots": memory.layout.slots,
                "max_rows": memory.layout.shape.max_rows,
            }
            self._offer.push(logits, lens, tops=tops, **place_of, epoch=memory.epoch, release=True, **common)
        else:
            assert self._gathered is not None
            self._offer.push(logits, lens, tops=tops, words=self._gathered.own(rows), **common)
        offer = list(self._calls)
        self._calls.clear()
        targets: dict[str, Any] = {
            "out": named(out.rows, "out"),
            "counts": named(out.counts, "counts"),
            "positions": None if out.positions is None else named(out.positions, "positions"),
            "kv_table": None if place.kv_table is None else named(place.kv_table, "kv_table"),
            "kv_page": place.kv_page,
            "block_rows": place.block_rows,
        }
        if memory is not None:
            self._merge.exchange(
                memory,
                logits,
                lens,
                step.next_n,
                site=numbered,
                limit=self.plan.problem.max_context,
                local_limit=local_limit,
                timeout_ns=int(self._dcp.timeout * 1e9),  # type: ignore[attr-defined]  # an Exchange's
                flags=self._flags.word,
                release=self.plan.problem.early_release,
                chained=True,
                **targets,
            )
        else:
            assert self._gathered is not None
            self._merge.merge(self._gathered.lists(rows), lens, step.next_n, **targets)
        merge = list(self._calls)
        self._calls.clear()
        return tuple(launch_list(part, _NAMES) for part in (score, offer, merge))

    def _results(self, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of so many rows, and where their maxima are put, directly behind them, if those are wanted: in a place
        of their own fewer lines stay in L2, which costs the scorer up to 3 %."""
        elements = rows * self.plan.pitch
        logits = self._logits[:elements].view(rows, self.plan.pitch)
        if not self._offer.takes_maxima(rows):
            return logits, None
        return logits, self._logits[elements : elements + elements // GROUP].view(torch.int16)

    def _table_keys(self, step: Step) -> int:
        """Keys of this rank that the index table has columns for."""
        if self._shard is None:
            return step.table_keys
        return self._shard.table_keys(step)

    def _score(self, step: Step, lens: torch.Tensor, logits: torch.Tensor, tops: torch.Tensor | None) -> None:
        """Write down the scorer's launch: over this rank's keys, with lengths that it makes local itself."""
        launch, config = self._backend.score_launcher(step, "pitched" if tops is None else PITCHED_TOPS)
        s = self._sharding
        word = sharding_word(s.world, s.rank, s.interleave, self.plan.problem.max_context)
        table, width = named(step.index_table, "index_table"), self._local
        if self._shard is not None:
            table = self._shard.table(step)
            if self._shard.whole is not None:
                logits, word, width = self._shard.whole[: step.rows], 0, self.plan.problem.max_context
        self._backend.scorer(step.spec)[1].score_pitched(
            Recorder(launch, self._calls),
            config,
            named(step.codes, "query"),
            named(step.cache.data, "cache"),
            named(step.weights, "weights"),
            lens,
            table,
            max_context=width,
            logits=logits,
            flags=self._flags.word,
            blocks=self._blocks,
            words=None if step.words is None else named(step.words, "words"),
            sharding=word,
            **({} if tops is None else {"tops": tops}),
        )

    # --- what a launch does ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Count the call."""
        self._dcp.calls += 1

    def interrupted(self, error: BaseException, began: bool) -> None:
        """Not all of a call was launched, for ``error``: raised as what a merge reported, if one did."""
        if self._exchange is not None:
            if began:
                self._exchange.interrupted()
            if isinstance(error, RuntimeError):
                self._exchange.raise_instead(error, self._device)

    def prepare(self, step: Step | None) -> None:
        """What comes before the scorer: a replicated cache's narrowed table."""
        if self._shard is not None and step is not None:
            self._shard.fill_table(step)

    def columns(self, rows: int) -> None:
        """What comes between the scorer and the candidates where a replicated cache was scored whole."""
        if self._shard is not None and self._shard.whole is not None:
            self._shard.take_columns(rows, self._results(rows)[0])

    def between(self, seq_lens: torch.Tensor, site: int) -> None:
        """What comes between the candidates and the merge: the all-gather."""
        if self._gathered is not None:
            self._gathered.exchange(seq_lens, site, self._flags.word)

    def check(self) -> None:
        """Report what kernels flagged since the last check; synchronises.

        Raises:
            ExchangeError: a merge gave up: rank, row, call, source and round are named.
            DeviceFault: the text says what was met and what its result was.
        """
        if self._exchange is None:
            super().check()
            return
        with self._exchange.translated(self._device):  # after a trap CUDA may not even say whether a stream is captured
            self.refuse_in_capture()
            self._exchange.check(self._device)
            super().check()


class DcpRelaunch:
    """The launches of one form of step; see :class:`keysieve.repeats.Relaunch`.

    Args:
        runner: whose workspace is used.
        parts: score; candidates; merge.
        take_lengths: brings lengths that the kernels cannot read as they are into the workspace; or None.
    """

    __slots__ = (
        *("_parts", "_runner", "_take_lengths", "current_device", "direct", "element", "index", "lock"),
        *("raw_stream", "turns"),
    )

    alignment = 16  # of the copy engine

    def __init__(
        self,
        runner: Sm90DcpRunner,
        parts: tuple[Callable[..., None], ...],
        take_lengths: Callable[[torch.Tensor], None] | None,
    ) -> None:
        self._runner, self._parts, self._take_lengths = runner, parts, take_lengths
        self.turns, self.index, self.lock, self.element = runner, runner.index, runner.lock, runner.element
        self.direct: Callable[..., None] | None = None
        self.raw_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.current_device: Callable[[], int] = torch._C._cuda_getDevice

    def launch(
        self,
        seq_lens: torch.Tensor,
        query: int,
        cache: int,
        weights: int,
        lens: int,
        index_table: int,
        kv_table: int,
        out: int,
        counts: int,
        positions: int,
        words: int = 0,
        site: int = 0,
    ) -> None:
        """Make the launches on the device's current stream; collective over the ranks."""
        given = (query, cache, weights, lens, index_table, kv_table, out, counts, positions, words, site)
        self.make(seq_lens, given)

    def make(
        self,
        seq_lens: torch.Tensor,
        given: tuple[int, ...],
        *,
        step: Step | None = None,
        pushes: bool = True,
        merges: bool = True,
    ) -> None:
        """Make the launches, given the addresses and the site.

        step: where the index table has to be prepared. pushes, merges: one of them False leaves out that part of the
        call, which is then made later or was made before: for ranks that share a device, where all candidates are
        pushed before the first merge waits for them.
        """
        if self.current_device() != self.index:
            with torch.cuda.device(self.index):
                self.make(seq_lens, given, step=step, pushes=pushes, merges=merges)
            return
        runner = self._runner
        score, offer, merge = self._parts
        with self.lock:
            began = not pushes
            try:
                stream = self.raw_stream(self.index)
                if stream != self.turns.stream:
                    self.turns.take_turns(stream)
                if pushes:
                    runner.begin()
                    began = True
                    if self._take_lengths is not None:
                        self._take_lengths(seq_lens)
                    runner.prepare(step)
                    score(*given, stream)
                    runner.columns(seq_lens.numel())
                    offer(*given, stream)
                    runner.between(seq_lens, int(given[-1]))
                if merges:
                    merge(*given, stream)
            except BaseException as error:
                runner.interrupted(error, began)
                raise
