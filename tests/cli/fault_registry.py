"""What a deliberate fault is, and the list of all of them: see :mod:`faults`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

FAULTS: list[Fault] = []
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    """``apply`` breaks keysieve; ``stage`` must notice."""

    stage: str
    name: str
    apply: Callable[[Patch], None]


def fault(*stages: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register a fault for the stages that must find it."""

    def register(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        FAULTS.extend(Fault(stage, apply.__name__, apply) for stage in stages)
        return apply

    return register


def after(patch: Patch, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """``owner.name`` with its result passed through ``change``."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **named: change(real(*args, **named)))
