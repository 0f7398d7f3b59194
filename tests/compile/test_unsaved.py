"""Kernels compiled for a cache that cannot be written: said by the exit code, and nothing is left elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from keysieve import compile as kernel_compile
from keysieve.cli.main import main
from keysieve.compile import beside, store
from keysieve.kernels.tile_offsets_config import KERNEL, TileOffsetsConfig

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
ARCH = "sm_90a"


@pytest.fixture
def blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory that cannot be made, and a folder for temporary files."""
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))  # worker processes' too
    monkeypatch.setattr(store.tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv(store.CACHE_ENV, str(tmp_path / "file" / "cache"))
    return tmp_path


def left(folder: Path) -> list[str]:
    return [path.name for path in (folder / "tmp").iterdir() if path.suffix in (".so", ".o")]


def test_a_command_that_could_save_nothing_does_not_succeed(
    blocked: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(store.CACHE_ENV)  # restored although `run` sets it
    words = ("--arch", ARCH, "--kernel", "tile_offsets", "--set", "next_n=1", "--dir", str(blocked / "file" / "cache"))
    assert main(("compile", *words)) == 1
    assert "1 unsaved" in capfd.readouterr().out
    assert left(blocked) == []


@pytest.mark.filterwarnings("ignore:keysieve. the kernel cache")
def test_compiling_beside_leaves_nothing_where_the_disk_is_full(blocked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.CACHE_ENV, str(blocked / "cache"))
    monkeypatch.setattr(store.Store, "put", lambda *_: None)
    monkeypatch.setattr(beside, "_start", lambda *_: type("Done", (), {"wait": lambda _: 0})())
    monkeypatch.setattr(beside.os, "sched_getaffinity", lambda _: {0, 1})
    made = []
    real = kernel_compile._compile_into
    monkeypatch.setattr(kernel_compile, "_compile_into", lambda *given: made.append(real(*given)) or made[-1])
    beside.prepare([(KERNEL, TileOffsetsConfig(n)) for n in (1, 2)], ARCH)
    assert [outcome.status for outcome in made] == ["unsaved"]
    assert left(blocked) == []
