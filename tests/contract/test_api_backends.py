"""Which backend runs, the reasons against the others, and that nothing falls back to another device."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import keysieve as ks
from keysieve import IndexerSpec, UnsupportedError, backends
from keysieve.testing import random_case

SPEC = IndexerSpec(heads=32, topk=2048)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes torch claim one CUDA device of a capability."""

    def claim(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: f"Fake {major}.{minor}")

    return claim


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def error_of(**options: Any) -> str:
    with pytest.raises(UnsupportedError) as refusal:
        ks.DecodeIndexer(SPEC, max_rows=8, max_context=4096, **options)
    return str(refusal.value)


def test_the_cpu_runs_every_spec() -> None:
    for key_format in ("fp8_fp32", "fp8_ue8m0", "mxfp4"):
        for heads in (8, 16, 32, 64):
            spec = IndexerSpec(heads=heads, topk=4096, key_format=key_format)
            for backend in ("auto", "cpu"):
                assert ks.supports(spec, next_n=8, backend=backend, device="cpu") is None
    assert ks.supports(SPEC, backend="cpu") is None  # its device needs no naming
    assert ks.DecodeIndexer(SPEC, 8, 4096, device="cpu").backend == "cpu"
    assert ks.DecodeIndexer(SPEC, 8, 4096, device="cpu:0").device == torch.device("cpu")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("backend", ["auto", "sm90", "sm100"])
def test_without_a_gpu_the_reason_says_so(backend: str) -> None:
    reason = ks.supports(SPEC, backend=backend)
    assert reason is not None
    assert "sees no CUDA device" in reason
    assert "device='cpu'" in reason
    assert error_of(backend=backend, device="cuda") == reason


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (11, 0), (12, 0), (12, 1)])
def test_other_architectures_are_refused_by_name(fake_gpu: Any, capability: tuple[int, int]) -> None:
    """An allow-list: an unknown or newer architecture is not taken for a known one."""
    fake_gpu(*capability)
    for backend in ("auto", "sm90", "sm100"):
        reason = ks.supports(SPEC, backend=backend)
        assert reason is not None
        assert f"compute capability {capability[0]}.{capability[1]} (Fake" in reason
        assert "9.0 (sm90), 10.0 (sm100)" in reason
        assert error_of(backend=backend, device="cuda:0") == reason


@pytest.mark.parametrize(("capability", "name", "other"), [((9, 0), "sm90", "sm100"), ((10, 0), "sm100", "sm90")])
def test_a_backend_serves_its_own_architecture_only(
    fake_gpu: Any, capability: tuple[int, int], name: str, other: str
) -> None:
    fake_gpu(*capability)
    assert backends.name_for("auto", torch.device("cuda:0")) == name
    assert backends.name_for(name, torch.device("cuda:0")) == name
    reason = ks.supports(SPEC, backend=other)
    assert reason is not None
    assert reason.startswith(f"backend: got '{other}'")
    assert f"'{name}'" in reason


def test_a_version_without_kernels_says_so(fake_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(9, 0)
    monkeypatch.setattr(backends, "GPU_HOSTS", {})
    reason = ks.supports(SPEC)
    assert reason is not None
    assert "no sm90 kernels" in reason
    assert error_of(device="cuda") == reason


def test_backends_and_devices_that_do_not_go_together() -> None:
    for backend, device in (("cpu", "cuda:0"), ("sm90", "cpu"), ("sm100", "cpu"), ("auto", "meta")):
        reason = ks.supports(SPEC, backend=backend, device=device)
        assert reason is not None
        assert reason.startswith("device: got ")
        assert error_of(backend=backend, device=device) == reason


def test_reasons_for_bad_arguments() -> None:
    assert "next_n" in str(ks.supports(SPEC, next_n=9, device="cpu"))
    assert "backend" in str(ks.supports(SPEC, backend="sm80", device="cpu"))
    assert "device" in str(ks.supports(SPEC, device="nowhere"))
    assert "spec" in str(ks.supports("glm"))  # type: ignore[arg-type]  # on purpose
    case = random_case(IndexerSpec(heads=8, topk=8), [9], seed=1)
    assert ks.supports(SPEC, device="cpu", cache=case.index_cache()) is None


class Recorder:
    """A GPU backend that records what it is asked."""

    name = "sm90"

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def reason_against(self, spec: IndexerSpec, next_n: int, device: torch.device, cache: Any) -> str | None:
        self.asked.append((spec, next_n, str(device), cache))
        return "next_n: got 8; accepted: less. Do less." if next_n == 8 else None

    def runner(self, plan: Any, device: torch.device, dcp: Any = None) -> Any:
        del dcp
        return SimpleNamespace(plan=plan, device=device)


def test_a_gpu_backend_is_imported_when_asked_for_and_answers_for_itself(
    fake_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu(9, 0)
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "a_gpu_host", SimpleNamespace(make=lambda: recorder))  # type: ignore[arg-type]
    monkeypatch.setattr(backends, "GPU_HOSTS", {"sm90": "a_gpu_host"})
    monkeypatch.setattr(backends, "_LOADED", dict(backends._LOADED))
    backends._LOADED.pop("sm90", None)
    assert ks.supports(SPEC, next_n=4) is None
    assert recorder.asked == [(SPEC, 4, "cuda:0", None)]
    assert ks.supports(SPEC, next_n=8) == "next_n: got 8; accepted: less. Do less."
    assert error_of(device="cuda", next_n=(1, 8)) == "next_n: got 8; accepted: less. Do less."
    built = ks.DecodeIndexer(SPEC, 8, 4096, next_n=(1, 2), device="cuda")
    assert built.backend == "sm90"
    assert built.plan.problem.next_n == (1, 2)
    assert built.workspace_bytes == ks.workspace_bytes(SPEC, 8, 4096, next_n=(1, 2), backend="sm90")
