"""What the device tests need beyond plain functions, with or without pytest.

A device test is a function `test_...(device)`; with `@cases(...)` it runs once a case, as `test_...(device, case)`.
`conftest.py` teaches pytest this; `python tests/gpu/runner.py` runs the same functions where pytest is not installed.
Test modules import torch and keysieve at the top, and cutlass only inside functions: they must be importable anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def cases(*values: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the decorated test once for each value, given as its `case` argument."""

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        function.cases = values  # type: ignore[attr-defined]  # a function attribute on purpose
        return function

    return mark


def devices(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The decorated test needs so many devices; it is left out where there are fewer."""

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        function.devices = count  # type: ignore[attr-defined]  # a function attribute on purpose
        return function

    return mark


def lacking(function: Callable[..., None]) -> str | None:
    """Why this test cannot run on a machine whose first device is usable, or None."""
    wanted, have = getattr(function, "devices", 1), torch.cuda.device_count()
    return None if have >= wanted else f"needs {wanted} devices, {have} here"


def unavailable() -> str | None:
    """Why device tests cannot run here, or None."""
    from keysieve.launch import unlaunchable

    return unlaunchable("cuda")


def device() -> torch.device:
    """The device under test: the current one."""
    return torch.device("cuda", torch.cuda.current_device())


def poison(shape: tuple[int, ...], dtype: torch.dtype, where: torch.device) -> torch.Tensor:
    """A tensor full of 0x5A bytes, so that an element nobody wrote is seen."""
    count = torch.empty(shape, dtype=dtype).numel() * torch.empty((), dtype=dtype).element_size()
    return torch.full((count,), 0x5A, dtype=torch.uint8, device=where).view(dtype).view(shape)
