"""Kernels compiled side by side: what is missing is made, once each, and nobody depends on it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from keysieve import compile as kernel_compile
from keysieve.compile import beside, store
from keysieve.kernels.base import Kernel
from keysieve.kernels.tile_offsets_config import KERNEL, TileOffsetsConfig

ARCH = "sm_90a"
JOBS: list[tuple[Kernel, TileOffsetsConfig]] = [(KERNEL, TileOffsetsConfig(n)) for n in (6, 7, 8)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> store.Store:
    """An empty cache, and nothing loaded that could hide it; two processors at the least are pretended."""
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
    monkeypatch.setenv(store.CACHE_ENV, str(tmp_path / "kernels"))
    monkeypatch.setattr(kernel_compile, "_loaded", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    return store.Store(tmp_path / "kernels")


def test_each_is_made_in_a_process_of_its_own_but_the_first(
    cache: store.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = []
    ensure = kernel_compile.ensure

    def seen(kernel: Kernel, config: TileOffsetsConfig, arch: str) -> kernel_compile.Outcome:
        here.append(config)
        return ensure(kernel, config, arch)

    monkeypatch.setattr(kernel_compile, "ensure", seen)
    assert beside.missing(JOBS, ARCH) == JOBS
    beside.prepare(JOBS, ARCH)
    assert here == [JOBS[0][1]]
    assert beside.missing(JOBS, ARCH) == []
    for kernel, config in JOBS:
        assert ensure(kernel, config, ARCH).status == "cached"
    before = {p: p.stat().st_mtime_ns for p in cache.root.glob("*.so")}
    assert len(before) == 3
    beside.prepare(JOBS, ARCH)
    assert {p: p.stat().st_mtime_ns for p in cache.root.glob("*.so")} == before


def test_what_cannot_be_started_is_left_to_loading(cache: store.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is no Python is not started; a process that fails, and a kernel that does, raise nothing here."""
    monkeypatch.setattr(sys, "executable", "/bin/true")
    beside.prepare(JOBS, ARCH)
    assert beside.missing(JOBS, ARCH) == JOBS
    monkeypatch.undo()
    monkeypatch.setenv(store.CACHE_ENV, str(cache.root))
    monkeypatch.setattr(beside, "_WORKER", "raise SystemExit(1)")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(kernel_compile, "ensure", lambda *_: 1 / 0)
    beside.prepare(JOBS, ARCH)
    assert beside.missing(JOBS, ARCH) == JOBS


@pytest.mark.usefixtures("cache")
def test_one_kernel_or_one_processor_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_start", None)  # calling it would be an error
    beside.prepare(JOBS[:1], ARCH)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    beside.prepare(JOBS, ARCH)
    assert beside.missing(JOBS, ARCH) == JOBS
