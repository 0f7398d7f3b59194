"""Launches written down once and made again for other tensors of the same form, for the price of their addresses.

The host functions of the kernels (``select_host``, ``sm90_score_host``) turn tensors into integers: addresses, strides,
sizes. Only the addresses differ between two calls of one form (shapes, strides, dtypes). So a host function is run once
with :class:`Named` tensors, whose addresses remember what they are the address of, into a :class:`Recorder`, and the
integers become a :class:`LaunchList`. What an argument means stays written in one place, the host function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Protocol, cast

import torch


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
        self._tensor, self._name = tensor, name

    def data_ptr(self) -> Address:
        return Address(self._tensor.data_ptr(), self._name)

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

    def __init__(self, target: Target, calls: list[tuple[Target, tuple[int, ...]]]) -> None:
        self._target, self._calls = target, calls

    def __call__(self, *args: int) -> None:
        self._calls.append((self._target, args))


class LaunchList:
    """Recorded calls of kernels, to be made one after another on one stream.

    Args:
        calls: what a :class:`Recorder` wrote down.
        names: the addresses that ``__call__`` gets, in this order; the last one is the stream's handle.
    """

    __slots__ = ("_calls", "_constants")

    def __init__(self, calls: Sequence[tuple[Target, tuple[int, ...]]], names: Sequence[str]) -> None:
        constants: list[int] = []
        self._calls: list[tuple[Target, Callable[..., None], Callable[[tuple[int, ...]], tuple[int, ...]]]] = []
        for target, args in calls:
            places = []
            for value in args:
                if isinstance(value, Address):
                    places.append(names.index(value.name))
                else:
                    places.append(len(names) + len(constants))
                    constants.append(int(value))
            self._calls.append((target, target.function, itemgetter(*places, len(names) - 1)))
        self._constants = tuple(constants)

    def __call__(self, values: tuple[int, ...]) -> None:
        """Launch all. values: an integer for each name."""
        values += self._constants
        for target, function, pick in self._calls:
            try:
                function(*pick(values))
            except RuntimeError as error:
                raise RuntimeError(f"launching {target.label} failed: {error}") from error
