"""What the GPU backends share: an architecture's scorer, and selection by ``kernels/select``, from checked inputs.

An architecture's module (``sm90``, ``sm100``) says which scorer it has, what that one cannot do, and which of its
configurations a spec means. Imports no cutlass itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final

import torch

from keysieve.checks import describe, message, refuse
from keysieve.compile import beside
from keysieve.dcp.base import ContextParallel
from keysieve.inputs import Step
from keysieve.kernels import select_host
from keysieve.kernels.base import Kernel
from keysieve.kernels.flags import FLAG_BAD_OWNER
from keysieve.kernels.local_topk_host import LocalTopk
from keysieve.launch import Launcher, arch_of, capturing, unlaunchable
from keysieve.plan import Plan
from keysieve.reference.topk import TopkCall
from keysieve.sm90_dcp import Sm90DcpRunner
from keysieve.sm90_merge import ListMerger
from keysieve.sm90_step import DeviceFlags, Sm90Runner, limit_requests, narrow
from keysieve.spec import IndexerSpec, candidate_words, pitch_of

_WEIGHTS: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_SELECTORS: Final = 256
"""Shapes of the public top-k whose selectors are kept."""


class GpuBackend(ABC):
    """What one process does on its GPUs of one architecture. Stateless calls share one flag word per device.

    name: the backend's.
    """

    name: str

    def __init__(self) -> None:
        self._flags: dict[torch.device, DeviceFlags] = {}
        self._sms: dict[torch.device, int] = {}
        self._launchers: dict[tuple[torch.device, Any], Launcher] = {}
        self._selectors: dict[tuple[torch.device, int, int, int], select_host.Selector] = {}
        self.merger = ListMerger(self)
        """Candidate rows merged by stateless calls."""

    # --- answers ---------------------------------------------------------------------------------------------------

    def reason_against(self, spec: IndexerSpec, next_n: int, device: torch.device, cache: Any) -> str | None:
        """Why this backend cannot run ``spec`` on ``device``, or None."""
        reason = self._no_scorer(spec, next_n)
        if reason is not None:
            return reason
        if cache is not None:
            data = cache.data
            if data.device != device:
                return message("cache", got=f"on {data.device}", accepted=f"on {device}", remedy="Move it.")
            if data.data_ptr() % 16 or data.stride(0) % 16:
                remedy = "Allocate the pool 16-byte aligned, with a page stride that is a multiple of 16 bytes."
                return message("cache", got=describe(data), accepted="16-byte aligned pages", remedy=remedy)
        return unlaunchable(device)

    @abstractmethod
    def _no_scorer(self, spec: IndexerSpec, next_n: int) -> str | None:
        """Why there is no scorer for ``spec``, or None."""

    @abstractmethod
    def scorer(self, spec: IndexerSpec) -> tuple[Kernel, Any]:
        """The kernel that scores caches of ``spec``, and the module whose functions launch it."""

    @abstractmethod
    def score_config(self, spec: IndexerSpec, next_n: int, layout: str, weights: str) -> Any:
        """The scorer's configuration for ``spec``; weights: "float32" or "bfloat16"."""

    # --- stateless calls -------------------------------------------------------------------------------------------

    def score(self, step: Step, max_len: int | None, out: torch.Tensor | None) -> torch.Tensor:
        """BF16 ``[rows, max_len]``: every row is scored; -inf past its length."""
        device = step.codes.device
        if max_len is None:
            if capturing():
                remedy = "Pass max_len, the width of the result in keys."
                refuse("max_len", got=None, accepted="an int while a CUDA graph is captured", remedy=remedy)
            usable = torch.where(
                step.seq_lens > step.table_keys, 0, step.seq_lens
            )  # as the cpu backend: longest usable
            max_len = max(int(usable.max().item()), 0) if step.rows else 0
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
        # The kernel writes counts side by side; a caller's with gaps get a copy.
        given = counts is not None and counts.is_contiguous()
        number = counts if counts is not None and given else torch.empty(rows, dtype=torch.int32, device=device)
        if rows == 0:
            return chosen, number if counts is None else counts
        flags = self.flags(device).word
        lengths, owner, table = narrow(call.lengths), call.owner, call.place.kv_table
        if owner is not None and table is not None:
            bad = (owner < 0) | (owner >= table.shape[0])
            flags[:1].bitwise_or_((bad & (lengths > 0)).any().to(torch.int32) << FLAG_BAD_OWNER)
            lengths, owner = torch.where(bad, 0, lengths), owner.clamp(0, max(table.shape[0] - 1, 0))
        owner = None if owner is None else owner.to(torch.int32).contiguous()
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
        return chosen, number if counts is None or given else counts.copy_(number)

    def local_topk(
        self, logits: torch.Tensor, local_lens: torch.Tensor, n: int, planes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidate rows int32 ``[rows, words]``, and counts int32 ``[rows]``; a row that is too long is empty."""
        rows, device = logits.shape[0], logits.device
        words = torch.empty(rows, candidate_words(n, planes), dtype=torch.int32, device=device)
        counts = torch.empty(rows, dtype=torch.int32, device=device)
        kernel = LocalTopk(lambda k, config: self.launcher(device, k, config), n=n, planes=planes, push=False)
        limit = 1 << (16 + planes)
        flags = self.flags(device).word
        kernel.topk(logits, narrow(local_lens), words=words, counts=counts, limit=limit, flags=flags)
        return words, counts

    def runner(
        self, plan: Plan, device: torch.device, dcp: ContextParallel | None = None
    ) -> Sm90Runner | Sm90DcpRunner:
        """Allocate the workspace of ``plan`` and load its kernels. dcp: what the indexer was built with, bound."""
        if dcp is None:
            return Sm90Runner(self, plan, device)
        return Sm90DcpRunner(self, plan, device, dcp)

    # --- shared pieces ---------------------------------------------------------------------------------------------

    def flags(self, device: torch.device) -> DeviceFlags:
        """The flag word that stateless calls on ``device`` raise; the next ``DecodeIndexer.check`` there reports it."""
        if device not in self._flags:
            if capturing():  # its memory would be the graph's, and zeroed by replays alone
                refuse(
                    "device",
                    got=f"the process's first stateless call on {device} while a CUDA graph is being captured",
                    accepted="a capture after such a call",
                    remedy="Make one, of any shape, before capturing.",
                )
            self._flags.setdefault(device, DeviceFlags(device))  # one, also where two threads come first
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

    def prepare(self, device: torch.device, jobs: list[tuple[Any, Any]]) -> None:
        """Compile side by side what the cache has not of (kernel, configuration): see ``compile.beside``."""
        if device.type == "cuda" and not capturing():
            beside.prepare(jobs, arch_of(device)[1])

    def score_launcher(self, step: Step, layout: str) -> tuple[Launcher, Any]:
        """The scorer for a step's format, heads, rows per request and weights, and its configuration."""
        config = self.score_config(step.spec, step.next_n, layout, _WEIGHTS[step.weights.dtype])
        return self.launcher(step.codes.device, self.scorer(step.spec)[0], config), config

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


def _score_into(backend: GpuBackend, step: Step, pitched: torch.Tensor, max_len: int, flags: torch.Tensor) -> None:
    launch, config = backend.score_launcher(step, "pitched")
    limit_requests(step)
    backend.scorer(step.spec)[1].score_pitched(
        launch,
        config,
        step.codes.contiguous(),
        step.cache.data,
        step.weights.contiguous(),
        narrow(step.seq_lens).contiguous(),
        step.index_table,
        max_context=max_len,
        logits=pitched,
        flags=flags,
        blocks=backend.sms(step.codes.device),
        words=None if step.words is None else step.words.contiguous(),
    )
