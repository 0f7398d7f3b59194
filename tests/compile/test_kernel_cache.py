"""The kernel cache: keys, damage, directories that cannot be written, and processes that start together."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from keysieve import compile as kernel_compile
from keysieve.compile import loader, source, store, versions
from keysieve.kernels.tile_offsets_config import KERNEL, TileOffsetsConfig

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")

CONFIG = TileOffsetsConfig(1)
ARCH = "sm_90a"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.CACHE_ENV, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def image() -> bytes:
    """The bytes of one real entry."""
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        return kernel_compile.ensure(KERNEL, CONFIG, ARCH, store.Store(Path(scratch))).entry.path.read_bytes()


def lay(cache: Path, data: bytes) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"{kernel_compile.entry_name(KERNEL, CONFIG, ARCH)}.so"
    path.write_bytes(data)
    return path


def test_the_first_call_compiles_and_the_second_does_not(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kernel_compile.ensure(KERNEL, CONFIG, ARCH)
    assert first.status == "compiled"
    assert first.entry.path.parent == cache
    monkeypatch.setattr("keysieve.compile.build.build", lambda *_: pytest.fail("compiled again"))
    second = kernel_compile.ensure(KERNEL, CONFIG, ARCH)
    assert second.status == "cached"
    assert second.entry == first.entry
    assert sorted(p.suffix for p in cache.iterdir()) == [".lock", ".so"]  # nothing written aside is left


def test_entries_carry_the_facts_of_their_code(cache: Path) -> None:
    facts = kernel_compile.ensure(KERNEL, CONFIG, ARCH).entry.facts
    assert facts["symbol"] == "tile_offsets__next_n_1"
    assert facts["facts"]["kernels"][0]["frame_bytes"] == 0
    assert cache.is_dir()


@pytest.mark.parametrize("damage", ["empty", "short", "truncated", "flipped", "trailer", "foreign", "longer"])
def test_a_damaged_file_is_noticed_and_rebuilt(cache: Path, image: bytes, damage: str) -> None:
    flipped = bytearray(image)
    flipped[len(image) // 3] ^= 1
    trailer = bytearray(image)
    trailer[-120] ^= 1
    bad = {
        "empty": b"",
        "short": image[:20],
        "truncated": image[: len(image) * 2 // 3],
        "flipped": bytes(flipped),
        "trailer": bytes(trailer),
        "foreign": b"\x7fELF" + bytes(5000),
        "longer": image + b"\0",
    }[damage]
    path = lay(cache, bad)
    with pytest.warns(RuntimeWarning, match="rebuilding a damaged kernel cache entry") as told:
        outcome = kernel_compile.ensure(KERNEL, CONFIG, ARCH)
    assert told.pop(RuntimeWarning).filename == __file__
    assert outcome.status == "compiled"
    assert path.read_bytes() != bad
    assert store.decode(path.read_bytes())[0][:4] == b"\x7fELF"
    assert kernel_compile.ensure(KERNEL, CONFIG, ARCH).status == "cached"


def test_every_flipped_bit_is_noticed(image: bytes) -> None:
    for at in [*range(0, len(image), 997), *range(len(image) - 80, len(image))]:
        bad = bytearray(image)
        bad[at] ^= 0x10
        with pytest.raises((store.CorruptEntry, ValueError)):
            store.decode(bytes(bad))
    for size in range(0, len(image), 1009):
        with pytest.raises(store.CorruptEntry):
            store.decode(image[:size])


def test_a_sound_file_is_loaded_as_it_lies(cache: Path, image: bytes) -> None:
    path = lay(cache, image)
    outcome = kernel_compile.ensure(KERNEL, CONFIG, ARCH)
    assert outcome.status == "cached"
    function = loader.load(outcome.entry, KERNEL.symbol(CONFIG))
    assert callable(function)
    assert path.read_bytes() == image


def test_a_directory_that_cannot_be_made_compiles_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv(store.CACHE_ENV, str(blocked / "cache"))
    with pytest.warns(RuntimeWarning, match="cannot be written") as told:
        outcome = kernel_compile.ensure(KERNEL, CONFIG, ARCH)
    assert told.pop(RuntimeWarning).filename == __file__
    assert outcome.status == "unsaved"
    assert store.decode(outcome.entry.path.read_bytes())
    function = loader.load(outcome.entry, KERNEL.symbol(CONFIG))
    outcome.entry.path.unlink()
    assert callable(function)
    assert blocked.read_text() == "not a directory"


def test_a_read_only_directory_serves_what_it_has(cache: Path, image: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused writes are simulated, since a test may run as root, whom permissions do not stop."""
    lay(cache, image)
    before = sorted(cache.iterdir())

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(store.tempfile, "mkstemp", refuse)
    monkeypatch.setattr(store.os, "open", refuse)
    assert kernel_compile.ensure(KERNEL, CONFIG, ARCH).status == "cached"
    monkeypatch.undo()
    monkeypatch.setenv(store.CACHE_ENV, str(cache))
    assert sorted(cache.iterdir()) == before


def test_an_unwritable_directory_still_yields_other_kernels(
    cache: Path, image: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay(cache, image)
    real = store.tempfile.mkstemp

    def only_elsewhere(*args: object, **more: object) -> tuple[int, str]:
        if str(more.get("dir", "")).startswith(str(cache)):
            raise OSError(30, "Read-only file system")
        return real(*args, **more)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr(store.tempfile, "mkstemp", only_elsewhere)
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        outcome = kernel_compile.ensure(KERNEL, TileOffsetsConfig(2), ARCH)
    assert outcome.status == "unsaved"
    outcome.entry.path.unlink()


def test_load_removes_its_private_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(store.CACHE_ENV, str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(store.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(kernel_compile, "_loaded", {})
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        function = kernel_compile.load(KERNEL, TileOffsetsConfig(6), ARCH)
    assert callable(function)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert kernel_compile.load(KERNEL, TileOffsetsConfig(6), ARCH) is function
    assert kernel_compile.is_loaded(KERNEL, TileOffsetsConfig(6), ARCH)
    assert not kernel_compile.is_loaded(KERNEL, TileOffsetsConfig(6), "sm_100a")


def test_the_key_follows_everything_the_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = versions.require()

    def name(**more: object) -> str:
        return kernel_compile.entry_name(KERNEL, CONFIG, ARCH, replace(tool, **more))  # type: ignore[arg-type]  # fields

    base = name()
    assert name() == base
    changed = {
        "dsl": name(dsl="4.8.2"),
        "ffi": name(ffi="0.1.99"),
        "arch": kernel_compile.entry_name(KERNEL, CONFIG, "sm_100a", tool),
        "options": kernel_compile.entry_name(KERNEL, TileOffsetsConfig(2), ARCH, tool),
    }
    monkeypatch.setattr("keysieve.compile.options.OPTIONS", "--other")
    changed["compiler options"] = name()
    monkeypatch.undo()
    monkeypatch.setattr(source, "fingerprint", lambda _: "another")
    changed["source"] = name()
    monkeypatch.undo()
    monkeypatch.setattr(kernel_compile.platform, "machine", lambda: "aarch64")
    changed["host"] = name()
    monkeypatch.undo()
    assert len({base, *changed.values()}) == 1 + len(changed)
    assert name(compiler=False) == base  # a machine that cannot compile finds what another one compiled


def test_the_key_holds_no_path_and_no_python_version(tmp_path: Path) -> None:
    script = (
        "from keysieve import compile as c; from keysieve.kernels.tile_offsets_config import *;"
        f"print(c.entry_name(KERNEL, TileOffsetsConfig(1), '{ARCH}'))"
    )
    found = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == kernel_compile.entry_name(KERNEL, CONFIG, ARCH)


def test_sources_are_the_modules_a_kernel_reaches() -> None:
    found = source.sources(KERNEL.module)
    assert {"keysieve.kernels.tile_offsets", "keysieve.device.scan", "keysieve.device.ptx", "keysieve.spec"} <= set(
        found
    )
    assert "keysieve.api" not in found
    assert not any(name.startswith("keysieve.reference") for name in found)
    with pytest.raises(ValueError, match="no source file"):
        source.sources("keysieve.kernels.there_is_no_such_kernel")


@pytest.mark.parametrize("path", sorted(Path(source.__file__).parents[1].rglob("*.py")), ids=lambda p: p.stem)
def test_imports_are_found_as_the_parser_finds_them(path: Path) -> None:
    expected = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            expected.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            expected.add(node.module or "")
            expected.update(f"{node.module}.{alias.name}" for alias in node.names)
    expected = {name for name in expected if name == "keysieve" or name.startswith("keysieve.")}
    found = source._imports(path)
    assert expected <= found
    spurious = found - expected  # only what a docstring or a string shows as an example
    assert all(name.startswith("keysieve") for name in spurious)


def test_a_changed_leaf_changes_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = source.fingerprint.__wrapped__(KERNEL.module)
    real = source._path

    def shifted(module: str) -> Path | None:
        path = real(module)
        if module != "keysieve.device.scan" or path is None:
            return path
        copy = tmp_path / "scan.py"
        copy.write_text(path.read_text() + "\n# another version\n")
        return copy

    monkeypatch.setattr(source, "_path", shifted)
    assert source.fingerprint.__wrapped__(KERNEL.module) != before


TOGETHER = """
import json, sys, time
from pathlib import Path
from keysieve import compile as kernel_compile
from keysieve.compile import loader
from keysieve.kernels.tile_offsets_config import KERNEL, TileOffsetsConfig
gate = Path(sys.argv[1])
print("ready", flush=True)
while not gate.exists():
    time.sleep(0.005)
found = []
for n in (1, 2):
    outcome = kernel_compile.ensure(KERNEL, TileOffsetsConfig(n), "sm_90a")
    loader.load(outcome.entry, KERNEL.symbol(TileOffsetsConfig(n)))
    found.append(outcome.status)
print(json.dumps([found, "cutlass" in sys.modules]))
"""


def start(tmp_path: Path, cache: Path) -> subprocess.Popen[str]:
    env = {**os.environ, store.CACHE_ENV: str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TOGETHER, str(tmp_path / "gate")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def test_eight_processes_compile_each_kernel_once(tmp_path: Path) -> None:
    """All wait at a gate, start on one empty cache, and load; then a ninth finds everything, without the DSL."""
    cache = tmp_path / "cache"
    processes = [start(tmp_path, cache) for _ in range(8)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    (tmp_path / "gate").write_text("")
    statuses = []
    for process in processes:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err[-3000:]
        statuses += json.loads(out.splitlines()[-1])[0]
    assert sorted(statuses) == ["cached"] * 14 + ["compiled"] * 2
    late = start(tmp_path, cache)
    out, err = late.communicate(timeout=600)
    assert late.returncode == 0, err[-3000:]
    assert json.loads(out.splitlines()[-1]) == [["cached", "cached"], False]
    assert not list(cache.glob("*.tmp"))


def test_locks_exclude_and_time_out(tmp_path: Path) -> None:
    first, second = store.Store(tmp_path), store.Store(tmp_path)
    with first.lock("key") as held:
        assert held
        with second.lock("key", seconds=0.1) as also:
            assert not also
        with second.lock("other", seconds=0.1) as also:
            assert also
    with second.lock("key", seconds=0.1) as again:
        assert again


def test_a_warm_load_is_quick(cache: Path, image: bytes) -> None:
    """A budget of 50 ms for finding, checking and loading an entry; the second of two, so that libraries are in."""
    lay(cache, image)
    outcome = kernel_compile.ensure(KERNEL, CONFIG, ARCH)
    loader.load(outcome.entry, KERNEL.symbol(CONFIG))
    begin = time.perf_counter()
    outcome = kernel_compile.ensure(KERNEL, CONFIG, ARCH)
    loader.load(outcome.entry, KERNEL.symbol(CONFIG))
    assert time.perf_counter() - begin < 0.5  # ten times the budget: machines that run tests are busy


def test_without_a_linker_a_plain_object_is_kept_and_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keysieve.compile.build.shutil.which", lambda _: None)
    outcome = kernel_compile.ensure(KERNEL, CONFIG, ARCH)
    assert (outcome.status, outcome.entry.form, outcome.entry.path.suffix) == ("compiled", "o", ".o")
    assert kernel_compile.ensure(KERNEL, CONFIG, ARCH).status == "cached"
    function = loader.load(outcome.entry, KERNEL.symbol(CONFIG))
    assert callable(function)
    with pytest.raises(Exception, match=r"Expects 11 parameters .*lens: int64"):
        function("not", "integers")  # it is the kernel's own argument check that answers
    assert cache.is_dir()


def test_a_compiler_that_fails_gives_way_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from keysieve.compile.build import build, link

    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    real = __import__("shutil").which
    monkeypatch.setattr("keysieve.compile.build.shutil.which", lambda n: str(broken) if n == "cc" else real(n))
    assert build(KERNEL, CONFIG, ARCH).form == "so"
    monkeypatch.setattr("keysieve.compile.build.shutil.which", lambda _: str(broken))
    (tmp_path / "x.o").write_bytes(b"")
    assert link(tmp_path / "x.o") is None
