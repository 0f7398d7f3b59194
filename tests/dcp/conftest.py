"""No wire of a test goes on after it: fourteen were left polling, and took a third of a core from all later tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from .threads import WIRES


@pytest.fixture(autouse=True)
def no_wire_is_left() -> Iterator[None]:
    yield
    while WIRES:
        WIRES.pop().close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("wire-")]
    assert not left, f"still running: {left}"
