"""Refusals: every error names the argument, what was got, what is accepted, and what to do about it.

Checks run on the host before anything is launched or written, so a refused call leaves outputs and caches as they
were. This module is a leaf: it imports nothing of keysieve.
"""

from __future__ import annotations

import numbers
import operator
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch

_TYPED: ContextVar[Mapping[str, str]] = ContextVar("keysieve_typed")
_INSIDE = ("keysieve", "torch")


class KeysieveError(ValueError):
    """A call was refused. The message names the argument, what was got, what is accepted and the remedy."""


class UnsupportedError(KeysieveError):
    """The arguments are sound, but this backend or machine cannot run them; ``supports()`` gives the same text."""


class DeviceFault(RuntimeError):
    """A kernel met something the host could not see beforehand and raised its device flag."""


class DeviceFaultWarning(RuntimeWarning):
    """A stateless call on the CPU met what would raise a device flag on a GPU; its text says what and where."""


@contextmanager
def as_typed(names: Mapping[str, str]) -> Iterator[None]:
    """Within it refusals and warnings call arguments what the caller typed.

    names: keysieve's argument name to the caller's. Single words ("query") are replaced only where they are the refused
    argument; names with an underscore wherever they stand.
    """
    token = _TYPED.set(names)
    try:
        yield
    finally:
        _TYPED.reset(token)


def _typed() -> Mapping[str, str]:
    import torch

    # torch.compile cannot trace a context variable; what it traces is refused in keysieve's names.
    return {} if torch.compiler.is_compiling() else _TYPED.get({})


def in_callers_words(text: str) -> str:
    """``text`` with argument names as :func:`as_typed` says."""
    names = _typed()
    return re.sub(r"[a-z]+(_[a-z]+)+", lambda found: names.get(found[0], found[0]), text) if names else text


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warn at the line that called into keysieve, however deep inside this is."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None:
        level, frame = level + 1, frame.f_back
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _INSIDE:
            break
    warnings.warn(in_callers_words(text), category, stacklevel=level)


def message(argument: str, *, got: object, accepted: str, remedy: str) -> str:
    """The text of a refusal."""
    names = _typed()
    if names:
        argument = re.sub(r"^[a-z_]+", lambda found: names.get(found[0], found[0]), argument)
    return in_callers_words(f"{argument}: got {got}; accepted: {accepted}. {remedy}")


def refuse(argument: str, *, got: object, accepted: str, remedy: str) -> NoReturn:
    """Raise :class:`KeysieveError` with the four parts every refusal has."""
    raise KeysieveError(message(argument, got=got, accepted=accepted, remedy=remedy))


def require_int(argument: str, value: object, low: int, high: int, remedy: str) -> int:
    """``value`` as an int within ``low..high``, or a refusal. A bool is not an int here, and nothing is rounded."""
    try:
        # Tensors and arrays have an __index__ that fails unless they hold one integer; int() would cut 2.5 to 2.
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # what it is for
    except TypeError:
        number = None
    if number is None:
        refuse(argument, got=f"{value!r} ({type(value).__name__})", accepted=f"an int in {low}..{high}", remedy=remedy)
    if not low <= number <= high:
        refuse(argument, got=number, accepted=f"an int in {low}..{high}", remedy=remedy)
    return number


def require_float(argument: str, value: object, remedy: str) -> float:
    """``value`` as a float if it is a real number (a bool or a tensor is not), or a refusal."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(argument, got=f"{value!r} ({type(value).__name__})", accepted="a number", remedy=remedy)
    return float(value)


def require_choice(argument: str, value: object, choices: tuple[object, ...], remedy: str) -> None:
    """Refuse ``value`` unless it is one of ``choices``."""
    if value not in choices:
        refuse(argument, got=repr(value), accepted=", ".join(repr(c) for c in choices), remedy=remedy)


def describe(tensor: object) -> str:
    """Shape, dtype, strides and device of a tensor (or the type of anything else), for messages."""
    if not all(hasattr(tensor, name) for name in ("shape", "dtype", "stride", "device")):  # NumPy: no stride()
        return type(tensor).__name__
    t: torch.Tensor = tensor  # type: ignore[assignment]  # narrowed by the attribute test above
    dtype = str(t.dtype).removeprefix("torch.")
    return f"{dtype}{list(t.shape)} stride {tuple(t.stride())} on {t.device}"


def require_tensor(
    argument: str,
    tensor: object,
    *,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    device: torch.device | None = None,
    unit_inner: bool = False,
    remedy: str = "Convert or reshape it before the call.",
) -> torch.Tensor:
    """``tensor`` if its dtype, shape (None: any size) and device fit and, if asked, its last stride is 1."""
    import torch

    if isinstance(tensor, torch.Tensor):
        fits = tensor.dtype in dtypes and tensor.dim() == len(shape)
        fits = fits and all(want is None or want == have for want, have in zip(shape, tensor.shape, strict=False))
        fits = fits and (device is None or tensor.device == device)
        # A dimension of size 0 or 1 may carry any stride: nothing is stepped over.
        fits = fits and (not unit_inner or tensor.numel() == 0 or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1)
        if fits:
            return tensor
    names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    wanted = f"{names} [{', '.join('any' if s is None else str(s) for s in shape)}]"
    if device is not None:
        wanted += f" on {device}"
    if unit_inner:
        wanted += " with unit stride in the last dimension"
    refuse(argument, got=describe(tensor), accepted=wanted, remedy=remedy)
