"""The Hopper backend: FP8 scoring by ``kernels/sm90_score``, selection by ``kernels/select``, from checked inputs.

Imported by :mod:`keysieve.backends` when a CUDA device of capability 9.0 is first used; imports no cutlass itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from keysieve.checks import DeviceFault, KeysieveError, UnsupportedError, describe, message, refuse
from keysieve.inputs import Placement, Selection, Step
from keysieve.kernels import select_host, sm90_score_config, sm90_score_host
from keysieve.kernels.flags import FLAG_BAD_OWNER
from keysieve.kernels.flags import describe as describe_flags
from keysieve.launch import Launcher, capturing, unlaunchable
from keysieve.plan import Plan
from keysieve.reference.topk import TopkCall
from keysieve.relaunch import Calls, Recorder, launch_list, named
from keysieve.repeats import ADDRESSES, Relaunch
from keysieve.spec import MAX_REQUESTS, IndexerSpec, pitch_of

_WEIGHTS: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_SELECTORS: Final = 256
"""Shapes of the public top-k whose selectors are kept."""


NO_STREAM: Final = -1
"""A handle that no stream has."""

LEGACY_STREAM: Final = 0
"""The default stream's handle. It cannot be captured, and during some captures it is an error to ask whether it is."""


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


class Sm90Backend:
    """What one process does on its Hopper GPUs. Stateless calls share one flag word per device."""

    name = "sm90"

    def __init__(self) -> None:
        self._flags: dict[torch.device, DeviceFlags] = {}
        self._sms: dict[torch.device, int] = {}
        self._launchers: dict[tuple[torch.device, Any], Launcher] = {}
        self._selectors: dict[tuple[torch.device, int, int, int], select_host.Selector] = {}

    # --- answers ---------------------------------------------------------------------------------------------------

    def reason_against(self, spec: IndexerSpec, next_n: int, device: torch.device, cache: Any) -> str | None:
        """Why this backend cannot run ``spec`` on ``device``, or None."""
        reason = sm90_score_config.unsupported(spec.heads, next_n, spec.key_format)
        if reason is not None:
            return message("spec", got=spec, accepted=reason, remedy="Use one of these, or device='cpu'.")
        if spec.numerics_on(self.name) != "fp32":
            remedy = "Use numerics=None or 'fp32' on Hopper; 'bf16' runs on the CPU."
            return message("numerics", got=repr(spec.numerics), accepted="'fp32' on sm90", remedy=remedy)
        if cache is not None:
            data = cache.data
            if data.device != device:
                return message("cache", got=f"on {data.device}", accepted=f"on {device}", remedy="Move it.")
            if data.data_ptr() % 16 or data.stride(0) % 16:
                remedy = "Allocate the pool 16-byte aligned, with a page stride that is a multiple of 16 bytes."
                return message("cache", got=describe(data), accepted="16-byte aligned pages", remedy=remedy)
        return unlaunchable(device)

    # --- stateless calls -------------------------------------------------------------------------------------------

    def score(self, step: Step, max_len: int | None, out: torch.Tensor | None) -> torch.Tensor:
        """BF16 ``[rows, max_len]``: every row is scored; -inf past its length."""
        device = step.codes.device
        if max_len is None:
            if capturing():
                remedy = "Pass max_len, the width of the result in keys."
                refuse("max_len", got=None, accepted="an int while a CUDA graph is captured", remedy=remedy)
            lengths = step.seq_lens.clamp(0, step.table_keys).to(torch.int32)
            max_len = int(lengths.max().item()) if step.rows else 0
        if step.rows == 0 or max_len == 0:
            return out if out is not None else step.weights.new_empty((step.rows, max_len), dtype=torch.bfloat16)
        pitched = torch.full((step.rows, pitch_of(max_len)), -torch.inf, dtype=torch.bfloat16, device=device)
        _score_into(self, step, pitched, max_len, self.flags(device).word)
        return pitched[:, :max_len] if out is None else out.copy_(pitched[:, :max_len])

    def topk(
        self, call: TopkCall, out: torch.Tensor | None, counts: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions or physical rows int32 ``[rows, k]``, and counts int32 ``[rows]``."""
        rows, width = call.logits.shape
        device = call.logits.device
        chosen = torch.empty(rows, call.k, dtype=torch.int32, device=device) if out is None else out
        number = torch.empty(rows, dtype=torch.int32, device=device) if counts is None else counts
        if rows == 0:
            return chosen, number
        flags = self.flags(device).word
        lengths, table = call.lengths.to(torch.int32), call.place.kv_table
        owner = None if call.owner is None else call.owner.to(torch.int32).contiguous()
        if owner is not None and table is not None:
            bad = (owner < 0) | (owner >= table.shape[0])
            flags[:1].bitwise_or_((bad & (lengths > 0)).any().to(torch.int32) << FLAG_BAD_OWNER)
            lengths, owner = torch.where(bad, 0, lengths), owner.clamp(0, max(table.shape[0] - 1, 0))
        size = select_host.topk_workspace_bytes(rows, width, call.k, self.sms(device))
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        self._selector(device, call.k, rows, width).topk(
            call.logits,
            lengths,
            out=chosen,
            counts=number,
            workspace=workspace,
            next_n=rows // table.shape[0] if table is not None and owner is None else 1,
            kv_table=table,
            kv_page=call.place.kv_page,
            block_rows=call.place.block_rows,
            row_request=owner,
            flags=flags,
        )
        return chosen, number

    def runner(self, plan: Plan, device: torch.device) -> Sm90Runner:
        """Allocate the workspace of ``plan`` and load its kernels."""
        if plan.problem.sharding is not None:
            raise UnsupportedError(
                message(
                    "dcp",
                    got=f"{plan.problem.sharding.world} context ranks on {device}",
                    accepted="dcp=None on CUDA devices, or dcp=ks.dcp.Gather(...) on the CPU",
                    remedy="Context-parallel kernels do not exist yet; run tensor parallel on GPUs.",
                )
            )
        return Sm90Runner(self, plan, device)

    # --- shared pieces ---------------------------------------------------------------------------------------------

    def flags(self, device: torch.device) -> DeviceFlags:
        """The flag word that stateless calls on ``device`` raise; the next ``DecodeIndexer.check`` there reports it."""
        if device not in self._flags:
            self._flags[device] = DeviceFlags(device)
        return self._flags[device]

    def sms(self, device: torch.device) -> int:
        """Streaming multiprocessors of ``device``."""
        if device not in self._sms:
            self._sms[device] = int(torch.cuda.get_device_properties(device).multi_processor_count)
        return self._sms[device]

    def launcher(self, device: torch.device, kernel: Any, config: Any) -> Launcher:
        """The launcher of one kernel configuration on ``device``, made once."""
        key = (device, config)
        if key not in self._launchers:
            self._launchers[key] = Launcher(kernel, config, device)
        return self._launchers[key]

    def score_launcher(self, step: Step, layout: str) -> tuple[Launcher, sm90_score_config.ScoreConfig]:
        """The scorer for a step's format, heads, rows per request and weights."""
        config = sm90_score_config.ScoreConfig(
            step.spec.key_format, step.spec.heads, step.next_n, layout, _WEIGHTS[step.weights.dtype]
        )
        return self.launcher(step.codes.device, sm90_score_config.KERNEL, config), config

    def _selector(self, device: torch.device, k: int, rows: int, width: int) -> select_host.Selector:
        """The public top-k's selector for a shape; kernels are shared by all of them, so forgetting some is cheap."""
        key = (device, k, rows, width)
        if key not in self._selectors:
            if len(self._selectors) >= _SELECTORS:
                self._selectors.clear()
            self._selectors[key] = self.selector(device, k=k, max_rows=rows, max_len=width, maxima=False)
        return self._selectors[key]

    def selector(
        self, device: torch.device, *, k: int, max_rows: int, max_len: int, maxima: bool
    ) -> select_host.Selector:
        """A selector whose launches are made on ``device``."""

        def make(kernel: Any, config: Any) -> Launcher:
            return self.launcher(device, kernel, config)

        return select_host.Selector(make, k=k, max_rows=max_rows, max_len=max_len, sms=self.sms(device), maxima=maxima)


def _score_into(backend: Sm90Backend, step: Step, pitched: torch.Tensor, max_len: int, flags: torch.Tensor) -> None:
    launch, config = backend.score_launcher(step, "pitched")
    _limit_requests(step)
    sm90_score_host.score_pitched(
        launch,
        config,
        step.codes.contiguous(),
        step.cache.data,
        step.weights.contiguous(),
        step.seq_lens.to(torch.int32).contiguous(),
        step.index_table,
        max_context=max_len,
        logits=pitched,
        flags=flags,
        blocks=backend.sms(step.codes.device),
    )


def _limit_requests(step: Step) -> None:
    if step.requests > MAX_REQUESTS:
        remedy = "Split the batch into several calls."
        refuse("index_table", got=f"{step.requests} requests", accepted=f"at most {MAX_REQUESTS}", remedy=remedy)


class Sm90Runner:
    """One ``DecodeIndexer`` on one Hopper GPU: its workspace, its kernels, and two launches a step.

    The workspace is used by one stream at a time. An eager step on another stream than the last one first waits for
    that one, and so does a captured step on another stream of the same capture. A replay is not seen by the host:
    graphs that share an indexer are replayed one after another, as an engine does; graphs that run side by side need
    an indexer each.

    Attributes:
        stream: of the last step, if that was an eager one: a step on it need not take turns.
        index: the device's.
        path: what a step runs, in words.
    """

    def __init__(self, backend: Sm90Backend, plan: Plan, device: torch.device) -> None:
        self.plan, self._backend, self._device = plan, backend, device
        problem = plan.problem
        with torch.inference_mode(False):
            self._logits = torch.empty(plan.logits_elements, dtype=torch.bfloat16, device=device)
            self._tops = torch.empty(plan.tops_elements, dtype=torch.int16, device=device)
            self._starts = torch.zeros(problem.max_rows + 1, dtype=torch.int32, device=device)
            self._lens = torch.zeros(problem.max_rows, dtype=torch.int32, device=device)
        self._flags = DeviceFlags(device)
        self._blocks = backend.sms(device)
        self.index = device.index or 0
        release = ", released early" if problem.early_release else ""
        self.path = f"score into compact logits, then select as its programmatic dependent{release}: two kernels"
        self._calls: Calls = []
        self._select = select_host.Selector(
            lambda kernel, config: Recorder(backend.launcher(device, kernel, config), self._calls),
            k=problem.spec.topk,
            max_rows=problem.max_rows,
            max_len=problem.max_context,
            sms=self._blocks,
            maxima=True,
        )
        for next_n in problem.next_n:  # float32 weights are what fold_weights gives; bfloat16 is loaded when first met
            config = sm90_score_config.ScoreConfig(
                problem.spec.key_format, problem.spec.heads, next_n, "compact", "float32"
            )
            backend.launcher(device, sm90_score_config.KERNEL, config)
        self.stream: int = torch._C._cuda_getCurrentRawStream(self.index)
        self._last_eager, self._last_captured = self.stream, NO_STREAM

    def run(self, step: Step, place: Placement, out: Selection) -> Relaunch:
        """Score, then select as a programmatic dependent: fill every entry of ``out``."""
        _limit_requests(step)
        for name, tensor in (("query", step.codes), ("weights", step.weights), ("counts", out.counts)):
            if not tensor.is_contiguous():
                refuse(name, got=describe(tensor), accepted="a contiguous tensor", remedy="Call .contiguous() on it.")
        lens = step.seq_lens
        copied = lens.dtype != torch.int32 or not lens.is_contiguous()
        calls = self._written_down(step, place, out, self._lens[: step.rows] if copied else named(lens, "seq_lens"))
        relaunch = Sm90Relaunch(self, launch_list(calls, ADDRESSES), self._lens if copied else None)
        tensors = (step.codes, step.cache.data, step.weights, lens, step.index_table, place.kv_table, *out)
        relaunch.launch(lens, *(0 if t is None else t.data_ptr() for t in tensors))
        return relaunch

    def _written_down(self, step: Step, place: Placement, out: Selection, lens: torch.Tensor) -> Calls:
        """The two launches as integers; refuses what the kernels cannot take."""
        launch, config = self._backend.score_launcher(step, "compact")
        self._calls.clear()
        sm90_score_host.score_compact(
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
        )
        self._select.select(
            self._logits,
            self._tops,
            lens,
            step.next_n,
            out=named(out.rows, "out"),
            counts=named(out.counts, "counts"),
            positions=None if out.positions is None else named(out.positions, "positions"),
            starts=self._starts,
            limit=min(self.plan.problem.max_context, step.table_keys),
            kv_table=None if place.kv_table is None else named(place.kv_table, "kv_table"),
            kv_page=place.kv_page,
            block_rows=place.block_rows,
            flags=self._flags.word,
            release=self.plan.problem.early_release,
            chained=True,
        )
        return self._calls

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
            other = torch.cuda.ExternalStream(before, device=self._device)  # type: ignore[no-untyped-call]  # torch's
            if not captured or (before != LEGACY_STREAM and _in_capture(other)):
                torch.cuda.current_stream(self._device).wait_stream(other)
        if captured:
            self._last_captured, self.stream = stream, NO_STREAM  # so that the next step comes here as well
        else:
            self._last_captured, self.stream, self._last_eager = NO_STREAM, stream, stream

    # Context parallelism does not run here (Sm90Backend.runner refuses it), so nobody comes this way.

    def within_limits(self, step: Step) -> Step:
        del step
        raise _no_sharding()

    def check_local(self, local_lens: torch.Tensor, place: Placement) -> None:
        del local_lens, place
        raise _no_sharding()

    def local_logits(self, step: Step) -> torch.Tensor:
        del step
        raise _no_sharding()

    def check(self) -> None:
        """Report what kernels flagged since the last check, this indexer's and stateless calls'; synchronises.

        Raises:
            DeviceFault: the text says what was met and what its result was.
        """
        found = [text for text in (self._flags.take(), self._backend.flags(self._device).take()) if text]
        if found:
            raise DeviceFault("; ".join(found))


class Sm90Relaunch:
    """The two launches of one form of step; see :class:`keysieve.repeats.Relaunch`.

    Args:
        runner: whose workspace is used.
        launches: score and select.
        lens: int32 ``[max_rows]``, where lengths that the kernels cannot read as they are are converted to; or None.
    """

    __slots__ = ("_launches", "_lens", "current_device", "direct", "index", "raw_stream", "turns")

    alignment = 16  # of the copy engine

    def __init__(self, runner: Sm90Runner, launches: Callable[..., None], lens: torch.Tensor | None) -> None:
        self.turns, self._launches, self._lens, self.index = runner, launches, lens, runner.index
        self.direct = None if lens is not None else launches
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
    ) -> None:
        addresses = (query, cache, weights, lens, index_table, kv_table, out, counts, positions)
        if self.current_device() != self.index:
            with torch.cuda.device(self.index):
                self.launch(seq_lens, *addresses)
            return
        stream = self.raw_stream(self.index)
        if stream != self.turns.stream:
            self.turns.take_turns(stream)
        if self._lens is not None:
            self._lens[: seq_lens.numel()].view(seq_lens.shape).copy_(seq_lens)
        self._launches(*addresses, stream)


def _in_capture(stream: torch.cuda.Stream) -> bool:
    """Is ``stream`` part of a capture that goes on?"""
    with torch.cuda.stream(stream):
        return capturing()


def _no_sharding() -> KeysieveError:
    return UnsupportedError(
        message("dcp", got="a context-parallel step", accepted="dcp=None", remedy="Run context parallelism on the CPU.")
    )


def make() -> Sm90Backend:
    """The backend, for :func:`keysieve.backends.load`."""
    return Sm90Backend()
