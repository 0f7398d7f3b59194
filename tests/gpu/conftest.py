"""pytest's side of `harness.py`: parameters, the device fixture, and one stated reason where no device is there."""

from __future__ import annotations

import sys
from pathlib import Path

import harness
import pytest
import torch

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "device"))  # its leaf_kernels run here as well


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    listed = getattr(metafunc.function, "cases", None)
    if listed is not None and "case" in metafunc.fixturenames:
        metafunc.parametrize("case", listed, ids=str)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.is_relative_to(HERE)]
    reason = harness.unavailable() if mine else None
    for item in mine:
        item.add_marker("gpu")
        lacking = reason or harness.lacking(item.function)  # type: ignore[attr-defined]  # all items here are functions
        if lacking is not None:
            item.add_marker(pytest.mark.skip(reason=lacking))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return harness.device()
