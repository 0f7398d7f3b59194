"""After construction no shape asks for another kernel: field cases M3 and M4, on a faked device.

Whoever loads or compiles a kernel makes a Launcher; these tests count them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from faked_gpu import Device, Launch, arguments, build, call

from keysieve import gpu


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were loaded, in order."""
    device, names = Device(), []
    device.install(monkeypatch)

    def launcher(kernel: Any, config: Any, _device: object) -> Launch:
        names.append(kernel.symbol(config))
        return Launch(device, names[-1])

    monkeypatch.setattr(gpu, "Launcher", launcher)
    return names


def test_m3_construction_loads_all_that_a_thousand_shapes_need(loaded: list[str]) -> None:
    """Every prepared next_n and any number of rows, in any order."""
    indexer = build(max_rows=64)
    prepared = list(loaded)
    assert prepared
    draw = random.Random(0)
    for _ in range(1000):
        next_n = draw.choice((1, 2))
        given = arguments(next_n * draw.randint(1, 64 // next_n), next_n=next_n, columns=draw.randint(6, 40))
        given["seq_lens"].random_(0, 384)
        call(indexer, given)
    assert loaded == prepared, "a step loaded another kernel"


def test_m3_bfloat16_weights_load_their_scorer_once(loaded: list[str]) -> None:
    """The one kernel that construction leaves out, as docs/step.md says; it is not loaded again."""
    indexer = build()
    prepared = len(loaded)
    for rows in (2, 4, 8, 2):
        call(indexer, arguments(rows, dtype=torch.bfloat16))
    assert len(loaded) == prepared + 1


def test_m4_a_hundred_table_widths_and_strides_need_one_kernel(loaded: list[str]) -> None:
    indexer = build()
    prepared = list(loaded)
    for columns in range(6, 106):
        given = arguments(columns=columns)
        wide = torch.zeros(2, columns + columns % 7, dtype=torch.int32)
        given["index_table"], given["kv_table"] = wide[:, :columns], wide[:, :columns].clone()
        call(indexer, given)
    assert loaded == prepared, "a table's width or stride is baked into a kernel"
