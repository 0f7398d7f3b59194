"""One ``DecodeIndexer``'s part on a Hopper GPU: its workspace, which stream may use it, and its two launches a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

from keysieve.checks import DeviceFault, describe, refuse
from keysieve.inputs import Placement, Selection, Step
from keysieve.kernels import select_host
from keysieve.kernels.flags import describe as describe_flags
from keysieve.kernels.select_config import SELECT
from keysieve.launch import capturing
from keysieve.plan import Plan
from keysieve.relaunch import Calls, Launches, Recorder, named
from keysieve.repeats import ADDRESSES, Relaunch
from keysieve.residency import residency
from keysieve.spec import MAX_REQUESTS

if TYPE_CHECKING:
    from keysieve.gpu import GpuBackend

NO_STREAM: Final = -1
"""A handle that no stream has."""

LEGACY_STREAM: Final = 0
"""The default stream's handle. It cannot be captured, and during some captures it is an error to ask whether it is."""


MOST_INT32: Final = 2**31 - 1


class DeviceFlags:
    """One int32 flag word on a device that kernels raise bits of and ``take`` reports. See ``kernels/flags.py``."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.word = torch.zeros(64, dtype=torch.int32, device=device)

    def take(self) -> str:
        """What was raised since the last call, as text; empty for nothing. Synchronises."""
        word = int(self.word[0].item())
        if word:
            self.word.zero_()
        return describe_flags(word)


def narrow(lengths: torch.Tensor) -> torch.Tensor:
    """Lengths as int32, none of them taken for a shorter one: what does not fit stays beyond every limit."""
    return lengths if lengths.dtype == torch.int32 else lengths.clamp(-1, MOST_INT32).to(torch.int32)


def limit_requests(step: Step) -> None:
    """Refuse more requests than the kernels' tables hold."""
    if step.requests > MAX_REQUESTS:
        remedy = "Split the batch into several calls."
        refuse("index_table", got=f"{step.requests} requests", accepted=f"at most {MAX_REQUESTS}", remedy=remedy)


class StreamWorkspace:
    """What every runner on a Hopper GPU has: a workspace that one stream at a time uses, and a flag word.

    An eager step on another stream than the last one first waits for that one, and so does a captured step on another
    stream of the same capture. A replay is not seen by the host: graphs that share an indexer are replayed one after
    another, as an engine does; graphs that run side by side need an indexer each.

    Attributes:
        stream: of the last step, if that was an eager one: a step on it need not take turns.
        index: the device's.
        element: one int32 of the workspace.
        lock: threads take turns with the workspace and with what is said about streams.
    """

    def __init__(self, backend: GpuBackend, plan: Plan, device: torch.device) -> None:
        self.plan, self._backend, self._device = plan, backend, device
        rows = plan.problem.max_rows
        with torch.inference_mode(False):
            behind = plan.tops_elements if plan.layout == "pitched" else 0  # of two bytes as well
            self._logits = torch.empty(plan.logits_elements + behind, dtype=torch.bfloat16, device=device)
            self._lens = torch.zeros(rows, dtype=torch.int32, device=device)
            self._wide = torch.zeros(rows, dtype=torch.int64, device=device)
            self.element = self._lens[:1]
        self._flags = DeviceFlags(device)
        self._blocks = backend.sms(device)
        self.index = device.index or 0
        self.stream: int = torch._C._cuda_getCurrentRawStream(self.index)
        self._last_eager, self._last_captured = self.stream, NO_STREAM
        self.lock = threading.Lock()

    def _take_lengths(self, seq_lens: torch.Tensor) -> None:
        """Bring lengths that are 64-bit or have gaps into the workspace; see :func:`narrow`. Nothing is allocated."""
        rows, shape = seq_lens.numel(), seq_lens.shape
        if seq_lens.dtype == torch.int64:
            seq_lens = torch.clamp(seq_lens, -1, MOST_INT32, out=self._wide[:rows].view(shape))
        self._lens[:rows].view(shape).copy_(seq_lens)

    def take_turns(self, stream: int) -> None:
        """Make ``stream``, the current one, wait for the last step of another stream where the host can see that.

        An eager step waits for the last eager one. A captured step waits for the last captured one if that one's stream
        is part of a capture now: a capture that forks. Replays are not seen here.
        """
        captured = capturing()
        before = self._last_captured if captured else self._last_eager
        if captured and before == NO_STREAM:
            before = self._last_eager  # the capture began on the stream of the eager steps, in a known form
        if before not in (stream, NO_STREAM):
            other = stream_of(before, self._device)
            joined = before != LEGACY_STREAM and _in_capture(other)
            if joined and not captured:
                refuse(
                    "indexer",
                    got="an eager step while the stream of its last one is being captured",
                    accepted="eager steps on other streams before or after that capture",
                    remedy="Give what is captured an indexer of its own: the wait would be captured too.",
                )
            if not captured or joined:
                torch.cuda.current_stream(self._device).wait_stream(other)
        if captured:
            self._last_captured, self.stream = stream, NO_STREAM  # so that the next step comes here as well
        else:
            self._last_captured, self.stream, self._last_eager = NO_STREAM, stream, stream

    def refuse_in_capture(self) -> None:
        """Refuse a check while the current stream is captured: it would synchronise, which ends the capture."""
        if capturing():
            remedy = "Call it after the capture, where you synchronise anyway."
            accepted = "a call outside of captures: it synchronises"
            refuse("check", got="a call while a CUDA graph is being captured", accepted=accepted, remedy=remedy)

    def _wait_for_last(self) -> None:
        """Make the current stream wait for the last eager step on another one."""
        with self.lock:
            last = self._last_eager
        if last != torch._C._cuda_getCurrentRawStream(self.index):
            other = stream_of(last, self._device)
            if last == LEGACY_STREAM or not _in_capture(other):  # else the wait would be part of that capture
                torch.cuda.current_stream(self._device).wait_stream(other)

    def check(self) -> None:
        """Report what kernels flagged since the last check, this indexer's and stateless calls'; synchronises.

        The last eager step is waited for, whichever stream it ran on, unless that is being captured now (by another
        thread). Replays on other streams are not seen here.

        Raises:
            DeviceFault: the text says what was met and what its result was.
            KeysieveError: the current stream is being captured; nothing was done.
        """
        self.refuse_in_capture()
        self._wait_for_last()
        found = [text for text in (self._flags.take(), self._backend.flags(self._device).take()) if text]
        if found:
            raise DeviceFault("; ".join(found))


class Sm90Runner(StreamWorkspace):
    """One ``DecodeIndexer`` on one Hopper GPU: its workspace, its kernels, and two launches a step.

    Attributes:
        path: what a step runs, in words.
    """

    def __init__(self, backend: GpuBackend, plan: Plan, device: torch.device) -> None:
        super().__init__(backend, plan, device)
        problem = plan.problem
        with torch.inference_mode(False):
            self._tops = torch.empty(plan.tops_elements, dtype=torch.int16, device=device)
            self._starts = torch.zeros(problem.max_rows + 1, dtype=torch.int32, device=device)
        release = ", released early" if problem.early_release else ""
        self.path = f"score into compact logits, then select as its programmatic dependent{release}: two kernels"
        self._calls: Calls = []
        aside = residency(self.index)
        self._kept = aside.rows
        # Where the application has set room aside for results they may as well stay until they are overwritten.
        self._drop = aside.size <= aside.default
        limits = (problem.max_rows, problem.max_context, problem.spec.topk, self._blocks)
        scorer = backend.scorer(problem.spec)[0]
        # float32 weights are what fold_weights gives; bfloat16 is loaded when first met
        scores = [backend.score_config(problem.spec, next_n, "compact", "float32") for next_n in problem.next_n]
        selects = select_host.configs_up_to(*limits, maxima=True)
        backend.prepare(device, [(SELECT, c) for c in selects] + [(scorer, c) for c in scores])
        self._select = select_host.Selector(
            lambda kernel, config: Recorder(backend.launcher(device, kernel, config), self._calls),
            k=problem.spec.topk,
            max_rows=problem.max_rows,
            max_len=problem.max_context,
            sms=self._blocks,
            maxima=True,
        )
        for config in scores:
            backend.launcher(device, scorer, config)

    def run(self, step: Step, place: Placement, out: Selection) -> Relaunch:
        """Score, then select as a programmatic dependent: fill every entry of ``out``."""
        limit_requests(step)
        for name, tensor in (("query", step.codes), ("weights", step.weights), ("counts", out.counts)):
            if not tensor.is_contiguous():
                refuse(name, got=describe(tensor), accepted="a contiguous tensor", remedy="Call .contiguous() on it.")
        lens = step.seq_lens
        copied = lens.dtype != torch.int32 or not lens.is_contiguous()
        with self.lock:
            calls = self._written_down(step, place, out, self._lens[: step.rows] if copied else named(lens, "seq_lens"))
            launches = Launches(calls, ADDRESSES, in_graph=not self.plan.problem.early_release)
            relaunch = Sm90Relaunch(self, launches, self._take_lengths if copied else None)
        tensors = (step.codes, step.cache.data, step.weights, lens, step.index_table, place.kv_table, *out, step.words)
        relaunch.launch(lens, *(0 if t is None else t.data_ptr() for t in tensors))
        return relaunch

    def _written_down(self, step: Step, place: Placement, out: Selection, lens: torch.Tensor) -> Calls:
        """The two launches as integers; refuses what the kernels cannot take."""
        launch, config = self._backend.score_launcher(step, "compact")
        self._calls.clear()
        self._backend.scorer(step.spec)[1].score_compact(
            Recorder(launch, self._calls),
            config,
            named(step.codes, "query"),
            named(step.cache.data, "cache"),
            named(step.weights, "weights"),
            lens,
            named(step.index_table, "index_table"),
            topk=step.spec.topk,
            max_context=self.plan.problem.max_context,
            logits=self._logits,
            tops=self._tops,
            starts=self._starts,
            flags=self._flags.word,
            blocks=self._blocks,
            words=None if step.words is None else named(step.words, "words"),
            kept=self._kept,
        )
        limit = min(self.plan.problem.max_context, step.table_keys)
        self._select.select(
            self._logits,
            self._tops,
            lens,
            step.next_n,
            out=named(out.rows, "out"),
            counts=named(out.counts, "counts"),
            positions=None if out.positions is None else named(out.positions, "positions"),
            starts=self._starts,
            limit=limit,
            scored=limit,
            kv_table=None if place.kv_table is None else named(place.kv_table, "kv_table"),
            kv_page=place.kv_page,
            block_rows=place.block_rows,
            flags=self._flags.word,
            release=self.plan.problem.early_release,
            chained=True,
            drop=self._drop,
        )
        return self._calls


class Sm90Relaunch:
    """The two launches of one form of step; see :class:`keysieve.repeats.Relaunch`.

    Args:
        runner: whose workspace is used.
        launches: score and select.
        take_lengths: brings lengths that the kernels cannot read as they are into the workspace; or None.
    """

    __slots__ = (
        *("_launches", "_take_lengths", "current_device", "direct", "element", "index", "lock", "raw_stream"),
        "turns",
    )

    alignment = 16  # of the copy engine

    def __init__(
        self,
        runner: StreamWorkspace,
        launches: Callable[..., None],
        take_lengths: Callable[[torch.Tensor], None] | None,
    ) -> None:
        self.turns, self._launches, self._take_lengths, self.index = runner, launches, take_lengths, runner.index
        self.lock, self.element = runner.lock, runner.element
        self.direct = None if take_lengths is not None else launches
        # C calls instead of Stream objects: an eager step has a budget of a few microseconds.
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
        addresses = (query, cache, weights, lens, index_table, kv_table, out, counts, positions, words)
        if self.current_device() != self.index:
            with torch.cuda.device(self.index):
                self.launch(seq_lens, *addresses, site)
            return
        with self.lock:
            stream = self.raw_stream(self.index)
            if stream != self.turns.stream:
                self.turns.take_turns(stream)
            if self._take_lengths is not None:
                self._take_lengths(seq_lens)
            self._launches(*addresses, stream)


def stream_of(handle: int, device: torch.device) -> torch.cuda.Stream:
    """The stream with this handle. ExternalStream is not for 0: asked for that it takes a stream of torch's pool."""
    if handle == LEGACY_STREAM:
        return torch.cuda.default_stream(device)
    made: torch.cuda.Stream = torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]  # torch's
    return made


def _in_capture(stream: torch.cuda.Stream) -> bool:
    """Is ``stream`` part of a capture that goes on?"""
    with torch.cuda.stream(stream):
        return capturing()
