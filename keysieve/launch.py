"""Launch compiled kernels: on the right device, on its current stream, for a few microseconds of host time.

A :class:`Launcher` is made once per kernel configuration and device (that loads or compiles the kernel) and called in
every step. It takes plain integers; whoever calls it has checked what they mean.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from keysieve import compile as kernel_compile
from keysieve.checks import KeysieveError, UnsupportedError, message
from keysieve.compile import versions
from keysieve.kernels.base import Kernel

ARCH_OF_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
"""Compute capability -> target. An allow-list: a capability that is not here is not served."""


def arch_of_capability(capability: tuple[int, int]) -> str | None:
    """The target that serves a compute capability, or None."""
    return ARCH_OF_CAPABILITY.get(capability)


def unlaunchable(device: torch.device | str | int) -> str | None:
    """Why kernels cannot be launched on `device` (no CUDA, unserved capability, missing toolchain), or None."""
    try:
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        return message("device", got=repr(device), accepted="a torch device", remedy=str(error).splitlines()[0])
    if wanted.type != "cuda":
        return message("device", got=wanted, accepted="a CUDA device", remedy="Move the tensors, or use backend='cpu'.")
    if not torch.cuda.is_available():
        remedy = "torch finds no CUDA device here: use a CPU ('cpu'), or install a driver and a CUDA build of torch."
        return message("device", got=wanted, accepted="a usable CUDA device", remedy=remedy)
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    if index >= torch.cuda.device_count():
        remedy = "Name a device that exists."
        return message("device", got=wanted, accepted=f"cuda:0..cuda:{torch.cuda.device_count() - 1}", remedy=remedy)
    capability = torch.cuda.get_device_capability(index)
    if arch_of_capability(capability) is None:
        served = ", ".join(f"{major}.{minor}" for major, minor in ARCH_OF_CAPABILITY)
        return message(
            "device",
            got=f"cuda:{index}, compute capability {capability[0]}.{capability[1]}",
            accepted=f"compute capability {served}",
            remedy="Use backend='cpu', or a Hopper or Blackwell data-centre GPU.",
        )
    return versions.unusable()


def arch_of(device: torch.device | str | int) -> tuple[int, str]:
    """(device index, target) of a CUDA device; UnsupportedError with the reason when kernels cannot run there."""
    reason = unlaunchable(device)
    if reason is not None:
        raise UnsupportedError(reason)
    wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    arch = arch_of_capability(torch.cuda.get_device_capability(index))
    assert arch is not None  # unlaunchable() looked
    return index, arch


def capturing() -> bool:
    """Is the current stream being captured into a graph? False, and no context made, where CUDA is not in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return False
    return torch.cuda.is_current_stream_capturing()


class Launcher:
    """One kernel configuration, ready on one device.

    Args:
        kernel: a registered kernel.
        config: one of its configurations.
        device: a CUDA device (index, name or torch.device).

    Raises:
        UnsupportedError: no such device, an unserved one, or the toolchain is missing or untested.
        KeysieveError: the kernel would have to be loaded or compiled while a graph is being captured.

    ``function`` is the loaded entry itself, which takes the stream's handle as its last argument: for callers that look
    up device and stream once for several launches.
    """

    __slots__ = ("_current_device", "_index", "_raw_stream", "arch", "config", "function", "kernel")

    def __init__(self, kernel: Kernel, config: Any, device: torch.device | str | int) -> None:
        index, arch = arch_of(device)
        if not kernel_compile.is_loaded(kernel, config, arch) and capturing():
            raise KeysieveError(
                message(
                    f"kernel {kernel.name}",
                    got=f"{config} first asked for while a CUDA graph is being captured",
                    accepted="kernels that are loaded before the capture",
                    remedy="Build the indexer, and run one step with this next_n, before capturing.",
                )
            )
        self.kernel, self.config, self.arch = kernel, config, arch
        self._index = index
        self.function: Callable[..., None] = kernel_compile.load(kernel, config, arch)
        # Two C calls instead of Stream objects: an eager launch has a budget of a few microseconds.
        self._raw_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._current_device: Callable[[], int] = torch._C._cuda_getDevice

    def __call__(self, *args: int) -> None:
        """Launch on the device's current stream. args: the entry's arguments, without the stream."""
        index = self._index
        try:
            if self._current_device() == index:
                self.function(*args, self._raw_stream(index))
            else:
                with torch.cuda.device(index):
                    self.function(*args, self._raw_stream(index))
        except RuntimeError as error:
            raise RuntimeError(f"launching {self.label} failed: {error}") from error

    @property
    def label(self) -> str:
        """Which kernel this is and where it runs, for messages."""
        return f"{self.kernel.symbol(self.config)} on cuda:{self._index}"


def compiler_available() -> bool:
    """Can kernels be compiled here (not only loaded)? Looks for the package without importing it."""
    return importlib.util.find_spec("cutlass") is not None
