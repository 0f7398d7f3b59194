"""Which backend runs a call, and why not the others.

A backend turns checked inputs into results; it never checks arguments again and never falls back to another device.
``supports()`` gives as text the reason that an error would carry.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from keysieve.cache import require_cache
from keysieve.checks import KeysieveError, UnsupportedError, message, require_choice, require_int
from keysieve.inputs import Placement, Selection, Step, check_spec
from keysieve.plan import Plan
from keysieve.reference.faults import Faults
from keysieve.reference.local_topk import local_topk
from keysieve.reference.score import score_checked
from keysieve.reference.step import CpuRunner
from keysieve.reference.topk import TopkCall, topk_checked
from keysieve.repeats import Relaunch
from keysieve.spec import BACKENDS, MAX_NEXT_N, IndexerSpec

if TYPE_CHECKING:
    from keysieve.dcp.base import ContextParallel

ARCHITECTURES: Final = {(9, 0): "sm90", (10, 0): "sm100", (10, 3): "sm100"}
"""CUDA compute capabilities and the backend that serves them. An allow-list: others are refused by name."""

GPU_HOSTS: Final[dict[str, str]] = {"sm90": "keysieve.sm90", "sm100": "keysieve.sm100"}
"""GPU backend name -> module whose ``make()`` returns its :class:`Backend`. Imported when first asked for."""


class Runner(Protocol):
    """One ``DecodeIndexer``'s part on one device: it owns the workspace of ``plan``."""

    plan: Plan
    path: str
    """What a step runs, in words."""

    def run(self, step: Step, place: Placement, out: Selection) -> Relaunch | None:
        """Fill every entry of ``out``; a refusal comes before the first write.

        Returns what does the same for other tensors of the same form, or None where every call needs its own checks.
        """

    def within_limits(self, step: Step) -> Step:
        """For decode context parallelism: rows longer than ``max_context`` made empty where the host sees lengths."""

    def check_local(self, local_lens: torch.Tensor, place: Placement) -> None:
        """Refuse a KV block table too narrow for this rank's lengths, where the host sees lengths."""

    def local_logits(self, step: Step) -> torch.Tensor:
        """BF16 ``[rows, >= longest]``, indexed by key, for decode context parallelism; the step's lengths are local."""

    def check(self) -> None:
        """Raise DeviceFault if a kernel raised its flag since the last check; may synchronise."""


class ExchangingRunner(Protocol):
    """One rank of a context-parallel ``DecodeIndexer`` whose kernels offer candidates and merge them."""

    plan: Plan
    path: str

    def run(self, step: Step, place: Placement, out: Selection, site: int) -> Relaunch | None:
        """Fill every entry of ``out``, collectively; else as :meth:`Runner.run`."""

    def check(self) -> None:
        """Raise DeviceFault or ExchangeError for what kernels reported since the last check; may synchronise."""


class Backend(Protocol):
    """What a device can do. Inputs are checked and lie on the backend's device."""

    name: str

    def reason_against(self, spec: IndexerSpec, next_n: int, device: torch.device, cache: Any) -> str | None:
        """Why this backend cannot run ``spec`` on ``device``, or None."""

    def score(self, step: Step, max_len: int | None, out: torch.Tensor | None) -> torch.Tensor:
        """BF16 ``[rows, max_len]``, -inf past a row's length; into ``out`` if given."""

    def topk(self, call: TopkCall, out: torch.Tensor | None, counts: torch.Tensor | None) -> tuple[Any, Any]:
        """Positions or physical rows int32 ``[rows, k]``, and counts int32 ``[rows]``."""

    def local_topk(
        self, logits: torch.Tensor, local_lens: torch.Tensor, n: int, planes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidate rows int32 ``[rows, words]``, and counts int32 ``[rows]``."""

    def runner(self, plan: Plan, device: torch.device, dcp: ContextParallel | None = None) -> Runner | ExchangingRunner:
        """Allocate the workspace of ``plan``. dcp: the context-parallel object of the indexer, bound, or None."""


class CpuBackend:
    """PyTorch on the CPU: the embedded default and the oracle of the others."""

    name = "cpu"

    def reason_against(self, spec: IndexerSpec, next_n: int, device: torch.device, cache: Any) -> str | None:
        del spec, next_n  # every valid spec runs
        if device.type != "cpu":
            remedy = "Use backend='auto', or keep the tensors on the CPU."
            return message("device", got=f"{str(device)!r} for backend 'cpu'", accepted="'cpu'", remedy=remedy)
        if cache is not None and cache.data.device.type != "cpu":
            return message("cache", got=f"on {cache.data.device}", accepted="on cpu", remedy="Move it to the CPU.")
        return None

    def score(self, step: Step, max_len: int | None, out: torch.Tensor | None) -> torch.Tensor:
        faults = Faults()
        logits = score_checked(step, max_len, faults)
        faults.warn()
        return logits if out is None else out.copy_(logits)

    def topk(self, call: TopkCall, out: torch.Tensor | None, counts: torch.Tensor | None) -> tuple[Any, Any]:
        faults = Faults()
        chosen, number = topk_checked(call, faults)
        faults.warn()
        return chosen if out is None else out.copy_(chosen), number if counts is None else counts.copy_(number)

    def local_topk(
        self, logits: torch.Tensor, local_lens: torch.Tensor, n: int, planes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return local_topk(logits, local_lens, n, planes)

    def runner(self, plan: Plan, device: torch.device, dcp: ContextParallel | None = None) -> CpuRunner:
        del device, dcp
        return CpuRunner(plan)


_LOADED: dict[str, Backend] = {"cpu": CpuBackend()}


def load(name: str) -> Backend:
    """The backend of that name.

    Raises:
        UnsupportedError: this version has no such backend.
    """
    if name not in _LOADED:
        if name not in GPU_HOSTS:
            raise UnsupportedError(
                message(
                    "backend",
                    got=repr(name),
                    accepted=", ".join(repr(b) for b in BACKENDS if b in _LOADED or b in GPU_HOSTS),
                    remedy=f"This version of keysieve has no {name} kernels; run on device='cpu'.",
                )
            )
        made: Backend = importlib.import_module(GPU_HOSTS[name]).make()
        _LOADED[name] = made
    return _LOADED[name]


def name_for(backend: str, device: torch.device) -> str:
    """The backend that ``backend`` ("auto" or a name) means on ``device``.

    Raises:
        UnsupportedError: no backend serves the device. There is no fallback to another device.
    """
    require_choice("backend", backend, ("auto", *BACKENDS), "Use 'auto' to let the device decide.")
    if device.type == "cpu" and backend in ("auto", "cpu"):
        return "cpu"
    if backend == "cpu":
        return "cpu"  # its own reason names the device
    if device.type != "cuda":
        accepted = "'cpu' or 'cuda'" if backend == "auto" else "'cuda'"
        remedy = "GPU backends run on CUDA tensors; use backend='auto' or 'cpu' for tensors on the CPU."
        raise UnsupportedError(
            message("device", got=f"{str(device)!r} for backend {backend!r}", accepted=accepted, remedy=remedy)
        )
    found = _backend_of_device(device)
    if backend not in ("auto", found):
        remedy = "Use backend='auto'."
        raise UnsupportedError(message("backend", got=f"{backend!r} on {device}", accepted=repr(found), remedy=remedy))
    return found


def _backend_of_device(device: torch.device) -> str:
    """The backend that serves a CUDA device's architecture."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            message(
                "device",
                got=f"{str(device)!r}, but torch {torch.__version__} sees no CUDA device",
                accepted="a CUDA device that torch can use, or 'cpu'",
                remedy="Pass device='cpu', or install a CUDA build of torch and a driver.",
            )
        )
    capability = torch.cuda.get_device_capability(device)
    if capability not in ARCHITECTURES:
        accepted = ", ".join(f"{major}.{minor} ({name})" for (major, minor), name in ARCHITECTURES.items())
        raise UnsupportedError(
            message(
                "device",
                got=f"compute capability {capability[0]}.{capability[1]} ({torch.cuda.get_device_name(device)})",
                accepted=accepted,
                remedy="Use one of these GPUs, or device='cpu'.",
            )
        )
    return ARCHITECTURES[capability]


def resolve(
    spec: IndexerSpec, *, next_n: int = 1, backend: str = "auto", device: torch.device, cache: Any = None
) -> Backend:
    """The backend that runs ``spec`` with ``next_n`` rows per request on ``device``.

    Raises:
        UnsupportedError: with the same text that :func:`supports` returns.
    """
    require_int("next_n", next_n, 1, MAX_NEXT_N, "Use at most 8 query rows per request (1 + speculative tokens).")
    found = load(name_for(backend, device))
    reason = found.reason_against(spec, next_n, device, cache)
    if reason is not None:
        raise UnsupportedError(reason)
    return found


def supports(
    spec: IndexerSpec,
    next_n: int = 1,
    backend: str = "auto",
    device: torch.device | str | None = None,
    cache: Any = None,
) -> str | None:
    """None if this machine can run ``spec``, else the reason as text: the text that the error would carry.

    Args:
        spec: the model's indexer.
        next_n: query rows per request, 1..8.
        backend: ``"auto"`` (the device decides), ``"cpu"``, ``"sm90"`` or ``"sm100"``.
        device: default ``"cuda"``, or ``"cpu"`` with ``backend="cpu"``.
        cache: an IndexCache to judge as well: its format and device, and on a GPU that its pages are 16-byte aligned.
    """
    try:
        check_spec(spec)
        where = as_device(device, backend)
        if cache is not None:
            require_cache(spec, cache)
        resolve(spec, next_n=next_n, backend=backend, device=where, cache=cache)
    except KeysieveError as refusal:
        return str(refusal)
    return None


def as_device(device: torch.device | str | None, backend: str = "auto") -> torch.device:
    """``device`` as a torch.device, with torch's own complaint turned into a refusal.

    None means the CPU for ``backend="cpu"``, else CUDA.
    """
    if device is None:
        device = "cpu" if backend == "cpu" else "cuda"
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError) as error:
        remedy = "Name a device such as 'cpu' or 'cuda:0'."
        text = message("device", got=repr(device), accepted="a torch device", remedy=remedy)
        raise KeysieveError(text) from error
    # As the devices of tensors are named: a CUDA device has its index, the CPU has none.
    if str(named) == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if named.type == "cpu" else named
