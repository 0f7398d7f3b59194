"""Quick builds: the same object, sooner; an error still names its line; nothing that was changed stays changed."""

from __future__ import annotations

import gc
import re

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
probe = pytest.importorskip("probe_kernels")

from cutlass._mlir_helpers import op  # noqa: E402

from keysieve.compile import build, tracing  # noqa: E402
from keysieve.kernels.base import Kernel  # noqa: E402
from keysieve.kernels.select_config import SELECT, SelectConfig  # noqa: E402

ARCH = "sm_90a"


def kernel() -> Kernel:
    return Kernel("probe", "probe_kernels:build", probe.ProbeConfig, (ARCH,), lambda _: [probe.ProbeConfig()])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for every line of Python that the DSL looks for: was the collector on?"""
    seen: list[bool] = []
    real = op._get_caller_frame_info

    def looked() -> object:
        seen.append(gc.isenabled())
        return real()

    monkeypatch.setattr(op, tracing._ASKS, looked)
    return seen


def test_the_object_is_the_same_and_no_line_is_looked_for(asked: list[bool]) -> None:
    config = SelectConfig(512, 1, 512, True)
    quick = tracing.build_quickly(SELECT, config, ARCH)
    assert not asked
    plain = build.build(SELECT, config, ARCH)
    assert len(asked) > 1000
    assert all(asked)
    assert (quick.image, quick.facts, quick.ptx, quick.form) == (plain.image, plain.facts, plain.ptx, plain.form)


def test_what_was_changed_is_put_back(asked: list[bool]) -> None:
    looks = getattr(op, tracing._ASKS)
    tracing.build_quickly(kernel(), probe.ProbeConfig(), ARCH)
    assert getattr(op, tracing._ASKS) is looks
    assert gc.isenabled()
    gc.disable()
    try:
        tracing.build_quickly(kernel(), probe.ProbeConfig(), ARCH)
        assert not gc.isenabled()  # the application's choice
    finally:
        gc.enable()
    assert not asked


def test_a_kernel_that_does_not_compile_is_told_by_its_line(asked: list[bool]) -> None:
    with pytest.raises(build.KernelBuildError, match=r"(?s)broken on purpose"):
        tracing.build_quickly(kernel(), probe.ProbeConfig(broken=True), ARCH)
    assert asked  # the second time
    assert gc.isenabled()


def test_code_that_must_not_ship_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    real = build.build
    monkeypatch.setattr(build, "build", lambda *args: built.append(args) or real(*args))
    with pytest.raises(build.KernelBuildError, match=re.escape("local memory")):
        tracing.build_quickly(kernel(), probe.ProbeConfig(indexed_array=True), ARCH)
    assert len(built) == 1


def test_another_dsl_without_the_name_builds_as_well(monkeypatch: pytest.MonkeyPatch, asked: list[bool]) -> None:
    monkeypatch.setattr(tracing, "_ASKS", "_no_such_name")
    assert tracing.build_quickly(kernel(), probe.ProbeConfig(), ARCH).image
    assert asked
    assert not hasattr(op, "_no_such_name")


def test_the_compiler_can_be_listened_to_with_lines(monkeypatch: pytest.MonkeyPatch, asked: list[bool]) -> None:
    monkeypatch.setenv(build.VERBOSE_ENV, "1")
    tracing.build_quickly(kernel(), probe.ProbeConfig(), ARCH)
    assert asked
