"""The part of L2 that a device sets aside for data which is asked to stay, and how much of a step's results it holds.

A step writes its logits and maxima, reads them right after, and overwrites them in the next layer; keys stream through
the cache in between. Written lines that are pushed out by keys turn the memory around between reads and writes, which
costs more than their bytes. So the scorer asks L2 to keep results ("evict last"); how many it may ask that for is the
device's set-aside: on an H200 the driver's default is 11.25 MiB of 60. A larger one is the application's to grant,
because it takes those megabytes from everything else that runs on the device in this process:
:func:`keep_results_in_l2`.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any, Final, Protocol

import torch

from keysieve.checks import UnsupportedError, message, refuse

LIMIT_PERSISTING_L2: Final = 6
"""CU_LIMIT_PERSISTING_L2_CACHE_SIZE of the driver API."""

ATTRIBUTE_MAX_PERSISTING_L2: Final = 108
"""CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE."""

NO_DEVICE: Final = 100
"""CUDA_ERROR_NO_DEVICE."""

MEGABYTE: Final = 1 << 20

KEEP_ENV: Final = "KEYSIEVE_KEEP_RESULTS_MB"
"""Asks for `keep_results_in_l2` without a call: MiB."""

ROW_BYTES: Final = 288
"""Results of one query row and one tile of 128 keys: BF16 logits and a 16-bit maximum for each 8."""

USABLE: Final = 0.875
"""Share of the set-aside that results may fill: lines are placed by a hash, and some sets fill before others."""


class Device(Protocol):
    """What is asked of the driver about one device; sizes in bytes."""

    def limit(self) -> int: ...
    def set_limit(self, size: int) -> int: ...
    def most(self) -> int: ...
    def reset(self) -> int: ...


class DriverDevice:
    """A device's primary context through the CUDA driver."""

    def __init__(self, index: int) -> None:
        self._index = index

    def _call(self, name: str, *args: Any) -> int:
        if not torch.cuda.is_available():
            return NO_DEVICE
        with torch.cuda.device(self._index):
            torch.cuda.mem_get_info(self._index)  # the runtime binds the device's context to this thread, if none is
            return int(getattr(ctypes.CDLL("libcuda.so.1"), name)(*args))

    def limit(self) -> int:
        """The set-aside; 0 where the driver does not tell."""
        size = ctypes.c_size_t(0)
        status = self._call("cuCtxGetLimit", ctypes.byref(size), LIMIT_PERSISTING_L2)
        return 0 if status else size.value

    def set_limit(self, size: int) -> int:
        """Set it; the driver's status, 0 for success."""
        return self._call("cuCtxSetLimit", LIMIT_PERSISTING_L2, ctypes.c_size_t(size))

    def most(self) -> int:
        """The largest set-aside that the device allows."""
        value = ctypes.c_int(0)
        status = self._call("cuDeviceGetAttribute", ctypes.byref(value), ATTRIBUTE_MAX_PERSISTING_L2, self._index)
        return 0 if status else value.value

    def reset(self) -> int:
        """Lines that were asked to stay are ordinary ones from now on; the driver's status."""
        return self._call("cuCtxResetPersistingL2Cache")


class Residency:
    """One device's set-aside as this process knows it. It is asked for once; other parties' later changes go unseen."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.default = device.limit()
        self.size = self.default

    @property
    def rows(self) -> int:
        """Tile rows (see `ROW_BYTES`) whose results L2 is asked to keep."""
        return int(self.size * USABLE) // ROW_BYTES

    def keep(self, size: int, asked: str = "megabytes") -> int:
        """Set aside `size` bytes, 0: what it was at first; returns what it was before. asked: who named the size."""
        before, most = self.size, self._device.most()
        if size > most:
            remedy = "Ask for less; without MIG, and under MPS only by its own settings, a device sets L2 aside."
            refuse(asked, got=f"{size / MEGABYTE:g}", accepted=f"at most {most / MEGABYTE:g} here", remedy=remedy)
        status = self._device.set_limit(size or self.default)
        if status:
            remedy = "Under MPS set CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT; else leave it as it is."
            got = f"driver status {status}"
            raise UnsupportedError(message(asked, got=got, accepted="a device that allows it", remedy=remedy))
        self._device.reset()  # what stayed under the old size would fill the new one
        self.size = self._device.limit()
        return before

    def reset(self) -> None:
        """Make lines that were asked to stay ordinary ones, as before another library is measured."""
        self._device.reset()


@cache
def residency(index: int) -> Residency:
    """That of CUDA device `index`; `KEYSIEVE_KEEP_RESULTS_MB` is heeded when it is first asked for."""
    found = Residency(DriverDevice(index))
    wanted = os.environ.get(KEEP_ENV)
    if wanted:
        found.keep(_bytes(KEEP_ENV, wanted), KEEP_ENV)
    return found


def keep_results_in_l2(megabytes: float, device: torch.device | str | int | None = None) -> float:
    """Set a part of L2 aside for the results of steps, beyond the driver's default, and say how much it was before.

    Call it before a ``DecodeIndexer`` is built for the device: an indexer asks once how much its steps may keep. A step
    of R query rows over N keys each writes ``2.25 * R * N`` bytes of logits and maxima; what it keeps need not go to
    memory and back. The set-aside is a limit of the device's context: everything else in the process has that much
    less of the cache, and data of others that is asked to stay shares it. It is heeded by steps on one GPU; ranks of a
    context-parallel group and :func:`score` go by the driver's default. Values follow from no heuristic; the
    measurements page of the scorer has times by size. Results of any size are right under any setting.

    Args:
        megabytes: MiB; 0 sets back what the device had when it was first asked.
        device: a CUDA device (default: the current one).

    Returns:
        The size before, in MiB.

    Raises:
        KeysieveError: no size, more than the device allows (nothing where it is cut by MIG), or no CUDA device.
        UnsupportedError: the driver refuses it, as it does under MPS.
    """
    size = _bytes("megabytes", megabytes)
    return residency(_index(device)).keep(size) / MEGABYTE


def _index(device: Any) -> int:
    """Which of the process's CUDA devices is meant."""
    count = torch.cuda.device_count()
    try:
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    except (RuntimeError, TypeError):
        where = torch.device("meta")
    if count and where == torch.device("cuda"):  # without an index
        return torch.cuda.current_device()
    if where.type != "cuda" or not count or not 0 <= where.index < count:
        accepted = f"a CUDA device, 0 to {count - 1}" if count else "a CUDA device, of which this process sees none"
        got = "the current CUDA device" if device is None else device
        refuse("device", got=got, accepted=accepted, remedy="Leave it out for the current one.")
    return where.index


def _bytes(name: str, given: Any) -> int:
    try:
        if isinstance(given, bool) or (isinstance(given, str) and name != KEEP_ENV):
            raise TypeError  # numbers; text is what the environment has
        size = int(float(given) * MEGABYTE)
        whole = size > 0 or float(given) == 0
    except (OverflowError, TypeError, ValueError):
        size, whole = -1, False
    if not whole or not 0 <= size < 1 << 40:
        refuse(name, got=repr(given), accepted="a size in MiB, 0 or at least a byte", remedy="Name a size, or 0.")
    return size
