"""`keysieve compile` fills a cache that `load` then reads."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from keysieve import compile as kernel_compile
from keysieve.checks import KeysieveError
from keysieve.cli import compile as cli
from keysieve.compile import parallel, store
from keysieve.kernels.base import ARCHS
from keysieve.kernels.tile_offsets_config import KERNEL, TileOffsetsConfig

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    monkeypatch.setenv(store.CACHE_ENV, str(tmp_path / "default"))  # restored although `run` changes it
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())

    def run(*words: str) -> int:
        args = parser.parse_args(["compile", *words])
        return int(args.run(args))

    return run


def test_fills_the_cache_for_every_target_asked_for(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = str(tmp_path / "filled")
    words = (
        "--arch",
        "sm_90a,sm_100a",
        "--kernel",
        "tile_offsets",
        "--set",
        "next_n=3",
        "--dir",
        where,
        "--jobs",
        "2",
    )
    assert command(*words, "--list") == 0
    listed = capsys.readouterr().out
    assert listed.count("missing") == 2
    assert not Path(where).exists()
    assert command(*words) == 0
    out = capsys.readouterr().out
    assert "2 configurations" in out
    assert "2 compiled in" in out
    assert os.environ[store.CACHE_ENV] == where
    for arch in ("sm_90a", "sm_100a"):
        assert kernel_compile.ensure(KERNEL, TileOffsetsConfig(3), arch).status == "cached"
    assert len(list(Path(where).glob("*.so"))) == 2
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", lambda *_, **__: pytest.fail("nothing was missing"))
    assert command(*words) == 0
    assert "2 cached in" in capsys.readouterr().out


def test_refuses_what_it_does_not_know(command: Callable[..., int]) -> None:
    with pytest.raises(KeysieveError, match=r"--arch: got 'sm_80'; accepted: .*sm_90a"):
        command("--arch", "sm_90a,sm_80")
    with pytest.raises(KeysieveError, match="--kernel: got 'attention'"):
        command("--kernel", "attention")
    with pytest.raises(KeysieveError, match="--set: got 'next_n'"):
        command("--set", "next_n")
    assert cli.targets(None) == ARCHS


def test_all_takes_what_common_leaves_out() -> None:
    from dataclasses import replace

    few = replace(KERNEL, common=lambda _: [TileOffsetsConfig(1)])
    assert cli.chosen(few, "sm_90a", False, {}) == [TileOffsetsConfig(1)]
    assert len(cli.chosen(few, "sm_90a", True, {})) == 8
    assert cli.chosen(few, "sm_90a", True, {"next_n": {"4", "9"}, "heads": {"32"}}) == [TileOffsetsConfig(4)]
    assert len(cli.chosen(KERNEL, "sm_90a", False, {})) == 8


def test_a_kernel_that_fails_is_reported_and_the_rest_is_done(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [
        parallel.Result("good", "compiled", 1.0),
        parallel.Result("bad", "failed", 0.5, "KernelBuildError: spills"),
    ]
    monkeypatch.setattr(parallel, "run", lambda *_: iter(results))
    assert command("--arch", "sm_90a", "--kernel", "tile_offsets") == 1
    captured = capsys.readouterr()
    assert "1 compiled, 1 failed" in captured.out
    assert "KernelBuildError: spills" in captured.err


def test_a_failing_job_is_a_result_not_an_exception() -> None:
    result = parallel.do(parallel.Job("tile_offsets", TileOffsetsConfig(1), "sm_80"))
    assert result.status == "failed"
    assert "it compiles for sm_90a" in result.error


def test_options_and_values_that_nothing_has_are_refused(command: Callable[..., int]) -> None:
    with pytest.raises(KeysieveError, match=r"--set: got 'hedas'"):
        command("--set", "hedas=32", "--list")
    with pytest.raises(KeysieveError, match=r"--set heads: got '7'"):
        command("--kernel", "sm90_score", "--set", "heads=7", "--list")
    with pytest.raises(KeysieveError, match=r"--set: got 'heads'"):
        command("--kernel", "tile_offsets", "--set", "heads=32", "--list")
