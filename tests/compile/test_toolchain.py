"""Missing and untested versions give one clear line; devices are served by an allow-list."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from keysieve import launch
from keysieve.checks import KeysieveError, UnsupportedError
from keysieve.compile import loader, versions
from keysieve.kernels.tile_offsets_config import KERNEL, TileOffsetsConfig


def pretend(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    """Let importlib.metadata know these distributions only (names with _ for -)."""

    def version(name: str) -> str:
        try:
            return found[name.replace("-", "_")]
        except KeyError:
            raise versions.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(versions.metadata, "version", version)
    versions.installed.cache_clear()


@pytest.fixture(autouse=True)
def forget() -> object:
    yield
    versions.installed.cache_clear()


def test_absent_packages_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    with pytest.raises(UnsupportedError, match=r"apache-tvm-ffi: got not installed; .*pip install 'keysieve\[gpu\]'"):
        versions.require()
    pretend(monkeypatch, apache_tvm_ffi="0.1.11")
    with pytest.raises(UnsupportedError, match=r"nvidia-cutlass-dsl: got not installed; accepted: 4\.8\.1"):
        versions.require()


@pytest.mark.parametrize("dsl", ["4.4.2", "4.8.0", "4.9.0", "5.0.0"])
def test_untested_dsl_versions_are_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch, dsl: str) -> None:
    pretend(monkeypatch, apache_tvm_ffi="0.1.11", nvidia_cutlass_dsl=dsl)
    with pytest.raises(UnsupportedError, match=f"got {dsl}; accepted: 4.8.1"):
        versions.require()
    monkeypatch.setenv(versions.ALLOW_UNTESTED, "1")
    assert versions.require() == versions.Toolchain(dsl, "0.1.11", True)


def test_untested_ffi_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, apache_tvm_ffi="0.2.0", nvidia_cutlass_dsl="4.8.1")
    with pytest.raises(UnsupportedError, match=r"apache-tvm-ffi: got 0\.2\.0; accepted: 0\.1\.x"):
        versions.require()


def test_runtime_libraries_alone_load_but_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, apache_tvm_ffi="0.1.11", nvidia_cutlass_dsl_libs_cu12="4.8.1")
    assert not versions.require().compiler
    with pytest.raises(UnsupportedError, match="keysieve compile"):
        versions.require_compiler()


def test_a_broken_runtime_library_raises_its_true_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / loader.RUNTIME
    broken.write_bytes(b"\x7fELF this is no library")
    monkeypatch.setenv("CUTE_DSL_LIBS", str(broken))
    monkeypatch.setattr(loader, "_kept", [])
    assert loader.runtime_library() == broken
    with pytest.raises(UnsupportedError, match=r"libcute_dsl_runtime\.so: got .*(invalid ELF|file too short|ELF)"):
        loader._load_runtime()


def test_the_runtime_library_may_be_named_by_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / loader.RUNTIME).write_bytes(b"")
    monkeypatch.setenv("CUTE_DSL_LIBS", f"/nowhere:{tmp_path}")
    assert loader.runtime_library() == tmp_path / loader.RUNTIME


def test_capabilities_are_an_allow_list() -> None:
    served = {
        cap: launch.arch_of_capability(cap) for cap in [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 1)]
    }
    assert served == {
        (8, 0): None,
        (8, 9): None,
        (9, 0): "sm_90a",
        (10, 0): "sm_100a",
        (10, 3): "sm_103a",
        (11, 0): None,
        (12, 1): None,
    }


@pytest.mark.parametrize("capability", [(8, 0), (11, 0), (12, 1)])
def test_unserved_devices_are_refused_by_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with pytest.raises(
        UnsupportedError, match=rf"compute capability {capability[0]}\.{capability[1]}; accepted: .*9\.0"
    ):
        launch.arch_of("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 3))
    if versions.unusable() is None:
        assert launch.arch_of("cuda") == (0, "sm_103a")
    with pytest.raises(UnsupportedError, match=r"got cuda:1; accepted: cuda:0\.\.cuda:0"):
        launch.arch_of(1)


def test_cpu_devices_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="got cpu; accepted: a CUDA device"):
        launch.arch_of("cpu")
    assert "accepted: a torch device" in (launch.unlaunchable("no such device") or "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device; this machine has one")
def test_without_a_device_the_launcher_says_so_and_compiles_nothing() -> None:
    with pytest.raises(UnsupportedError, match="torch finds no CUDA device"):
        launch.Launcher(KERNEL, TileOffsetsConfig(1), "cuda")
    assert issubclass(UnsupportedError, KeysieveError)


def test_importing_the_frame_imports_no_dsl_and_makes_no_context() -> None:
    script = (
        "import sys, torch, keysieve.launch, keysieve.compile, keysieve.bench.timing, keysieve.cli.compile\n"
        "from keysieve.compile import kernels\n"
        "kernels()\n"
        "assert not {'cutlass', 'tvm_ffi', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
