"""Launches written down once and made again for other tensors of the same form, for the price of their addresses.

The host functions of the kernels (``select_host``, ``sm90_score_host``) turn tensors into integers: addresses, strides,
sizes. Only the addresses differ between two calls of one form (shapes, strides, dtypes). So a host function is run once
with :class:`Named` tensors, whose addresses remember what they are the address of, into a :class:`Recorder`, and the
integers become a :func:`launch_list`. What an argument means stays written in one place, the host function.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NoReturn, Protocol, cast

import torch

from keysieve.checks import warn_caller
from keysieve.driver import Driver, driver
from keysieve.prepared import prepare


class Address(int):
    """An address that remembers the name of its tensor."""

    name: str

    def __new__(cls, value: int, name: str) -> Address:
        made = super().__new__(cls, value)
        made.name = name
        return made


class Named:
    """A tensor whose ``data_ptr()`` is an :class:`Address`; in all else the tensor itself."""

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self._tensor, self._address = tensor, Address(tensor.data_ptr(), name)
        # What host functions ask for most, at hand: __getattr__ is slow.
        self.shape, self.stride, self.is_contiguous = tensor.shape, tensor.stride, tensor.is_contiguous

    def data_ptr(self) -> Address:
        return self._address

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._tensor, attribute)


def named(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """``tensor`` as a host function takes it, its address named."""
    return cast(torch.Tensor, Named(tensor, name))


class Target(Protocol):
    """What a launcher has to offer: see :class:`keysieve.launch.Launcher`."""

    function: Callable[..., None]

    @property
    def label(self) -> str: ...


class Recorder:
    """Takes the place of a launcher in a host function: writes the call down instead of making it."""

    def __init__(self, target: Target, calls: Calls) -> None:
        self._target, self._calls = target, calls

    def __call__(self, *args: int) -> None:
        self._calls.append((self._target, args))


Calls = list[tuple[Target, tuple[int, ...]]]
"""What a :class:`Recorder` writes down: kernels and their arguments, in order."""


class LaunchError(RuntimeError):
    """The driver or the runtime refused a launch."""


class Launches:
    """Recorded calls, made again one after another on one stream.

    Args:
        calls: what a :class:`Recorder` wrote down.
        names: the addresses that a call gets, in this order, all positional; then comes the stream's handle.
        in_graph: whether an executable graph may take their place: not where the kernel after them is to start early.

    Attributes:
        function: what a call does, for those who call it in every step.
        unprepared: why :meth:`prepared` answered None, if it did.
        failed: whether that was for something that was not to be expected.
    """

    __slots__ = ("_calls", "_in_graph", "_names", "failed", "function", "unprepared")

    def __init__(self, calls: Calls, names: Sequence[str], *, in_graph: bool = True) -> None:
        self._calls, self._names, self._in_graph = list(calls), tuple(names), in_graph
        self.function = launch_list(calls, names)
        self.unprepared, self.failed = "", False

    def __call__(self, *args: int) -> None:
        self.function(*args)

    def prepared(self, addresses: Sequence[int], aligned: Sequence[int], index: int) -> Callable[..., None] | None:
        """A function that makes the calls as one graph, or None: see :func:`keysieve.prepared.prepare`.

        addresses: of a call. aligned: what each of them is a multiple of. index: the current device's.
        """
        found = driver() if self._in_graph and _graphs_possible() else None
        if found is None:
            self.unprepared = "not wanted, or no driver that can"
            return None
        single = [launch_list([call], self._names) for call in self._calls]
        names, given = self._names, tuple(addresses)
        try:
            with _preparing:
                stream = _capture_stream(found, index)
                return prepare(found, single, self.function, names, given, aligned, stream, _capturing)
        except Exception as error:  # whatever it is: this step has been launched, and those after it need no graph
            self.unprepared, self.failed = str(error) or type(error).__name__, True
            return None  # launched as before

    def tell(self) -> None:
        """Warn of a preparation that failed: steps are right without it, and take the host twice the time."""
        if self.failed:
            text = f"this form of step is launched kernel by kernel, as no graph could be made of it: {self.unprepared}"
            warn_caller(f"keysieve: {text} ({GRAPHS_ENV}=0 does not try)", RuntimeWarning)


GRAPHS_ENV = "KEYSIEVE_STEP_GRAPHS"
"""Environment variable: 0, when the package is imported, has repeated eager steps launched kernel by kernel."""


def _graphs_possible() -> bool:
    """Not where every kernel is to be waited for (to find one that fails): nobody waits for those of a graph."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") in ("", "0")


_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)

_preparing = threading.Lock()
"""One preparation at a time: indexers of several threads share the stream."""

_capture_streams: dict[int, int] = {}
"""Device -> a stream that launches are captured on to be prepared, and nothing runs on."""


def _capture_stream(found: Driver, index: int) -> int:
    """The stream to capture on, of the current device, `index`."""
    if index not in _capture_streams:
        _capture_streams[index] = found.new_stream()
    return _capture_streams[index]


def launch_list(calls: Calls, names: Sequence[str]) -> Callable[..., None]:
    """The function of :class:`Launches`."""
    forms, values = [], []
    for target, args in calls:
        forms.append(tuple(a.name if isinstance(a, Address) else "" for a in args))
        values += [target.function, *(int(a) for a in args if not isinstance(a, Address))]
    return _maker(tuple(forms), tuple(names))(_failed, [target for target, _ in calls], *values)


@lru_cache(maxsize=256)
def _maker(forms: tuple[tuple[str, ...], ...], names: tuple[str, ...]) -> Callable[..., Callable[..., None]]:
    """Makes launch functions: of which argument is which address or constant, not of the constants' values.

    Written as source, as namedtuple is: picking fifty integers out of tuples would take longer than all else that the
    host does in a step. The code of one form serves all sizes; its constants are the made function's own variables.
    """
    constants: list[str] = []
    body: list[str] = []
    for at, form in enumerate(forms):
        constants.append(f"call_{at}")
        given = []
        for place, name in enumerate(form):
            if not name:
                constants.append(f"value_{at}_{place}")
            given.append(name or constants[-1])
        body += [
            "  try:",
            f"   call_{at}({', '.join(given)}, stream)",
            "  except RuntimeError as error:",
            f"   failed(targets[{at}], error)",
        ]
    head = [f"def make(failed, targets, {', '.join(constants)}):", f" def launch({', '.join(names)}, stream):"]
    scope: dict[str, Any] = {}
    exec(compile("\n".join([*head, *body, " return launch"]), "<keysieve launches>", "exec"), scope)
    made: Callable[..., Callable[..., None]] = scope["make"]
    return made


def _failed(target: Target, error: RuntimeError) -> NoReturn:
    raise LaunchError(f"launching {target.label} failed: {error}") from error
