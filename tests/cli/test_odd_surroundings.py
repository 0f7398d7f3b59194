"""Arguments that scripts pass by mistake, and places where the kernel cache cannot be: one line, no traceback."""

from __future__ import annotations

import os
import pwd
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from keysieve import doctor
from keysieve.cli import doctor as doctor_cli
from keysieve.cli.main import REFUSED, main
from keysieve.compile import store


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("check", "--stage", ""), "--stage: got ''"),  # an unset variable of a shell script
        (("check", "--stage", "topk,exchange", "--cases", "2"), "--stage: got 'exchange'"),  # kernels' work alone
        (("check", "--stage", "exchange", "--replay", "1"), "--stage: got 'exchange'"),
        (("demo", "--seed", "-1"), "--seed: got -1"),
        (("demo", "--seed", "99999999999999999999"), "--seed: got 99999999999999999999"),
    ],
)
def test_a_bad_argument_is_one_line(argv: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    if argv[0] == "demo":
        for package in ("rich", "transformers", "matplotlib"):
            pytest.importorskip(package)
    assert main(argv) == REFUSED
    text = capsys.readouterr().err
    assert told in text
    assert text.count("\n") == 1


def test_a_file_that_is_no_text_is_refused_as_no_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "picture.jsonl").write_bytes(b"\x89PNG\xff\n")
    assert main(("bench", "table", str(tmp_path / "picture.jsonl"))) == REFUSED
    assert "picture.jsonl:1" in capsys.readouterr().err


def test_without_a_home_the_cache_lies_where_an_empty_one_would_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a user without a name; nothing there can be written, and the warning says so."""

    def nobody(user: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    for name in (store.CACHE_ENV, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    without = store.cache_dir()
    monkeypatch.setenv("HOME", "/")
    assert without == store.cache_dir()


def test_doctor_says_that_a_cache_under_a_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(store.CACHE_ENV, str(tmp_path / "file" / "cache"))
    (fact,) = doctor._cache_facts()
    assert fact.status == doctor.NOTE
    monkeypatch.setenv(store.CACHE_ENV, str(tmp_path / "folder" / "cache"))
    (fact,) = doctor._cache_facts()
    assert fact.status == doctor.OK


def test_doctors_plain_lines_fit_whatever_a_fact_is_called() -> None:
    """Without the GPU extra one of them is called "CuTe DSL and tvm-ffi"."""
    facts = [
        doctor.Fact("CuTe DSL and tvm-ffi", doctor.MISSING, "a word of many " * 20),
        doctor.Fact("a", doctor.OK, ""),
    ]
    lines = doctor_cli.plain_lines(replace(doctor.diagnose(), facts=facts))
    assert max(len(line) for line in lines) <= 80
    assert " ".join(lines).count("many") == 20


def test_doctor_may_not_look_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's home, as in a container that is run as somebody else. Simulated: root may look everywhere."""
    home, access = tmp_path / "home", os.access
    home.mkdir()

    def unless_inside(real: Any) -> Any:
        def look(path: Any, *args: Any, **more: Any) -> Any:
            if isinstance(path, str | Path) and home in Path(path).parents:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *args, **more)

        return look

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, unless_inside(getattr(os, name)))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != home and access(path, mode))
    monkeypatch.setenv(store.CACHE_ENV, str(home / ".cache" / "keysieve"))
    (fact,) = doctor._cache_facts()
    assert fact.status == doctor.NOTE
