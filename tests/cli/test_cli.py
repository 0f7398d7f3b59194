"""The command line: exit codes, one-line errors, JSON, replaying, and what is said where a package is missing."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from keysieve import IndexerSpec, supports
from keysieve.bench import figures
from keysieve.check import devices, steps
from keysieve.check.runner import STAGES
from keysieve.check.trial import Scope
from keysieve.cli import doctor as doctor_cli
from keysieve.cli import main as cli
from keysieve.doctor import diagnose


def run(*argv: str) -> int:
    return cli.main(list(argv))


def test_every_subcommand_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run("--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for command in ("demo", "doctor", "check", "bench", "compile"):
        assert command in shown
        if command != "bench":
            with pytest.raises(SystemExit) as stop:
                run(command, "--help")
            assert stop.value.code == 0
    assert run("bench", "--help") == 0
    assert "cpu" in capsys.readouterr().out


def test_help_needs_no_docstrings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Python run with -OO has none."""
    for stage in STAGES:
        monkeypatch.setattr(type(stage), "__doc__", None)
    monkeypatch.setattr(figures, "__doc__", None)
    assert run("check", "--stage", "help") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [stage.name for stage in STAGES]
    with pytest.raises(SystemExit) as ended:
        figures.main(["--help"])
    assert ended.value.code == 0


def test_check_reports_counts_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "--cases", "14", "--seed", "7") == 0
    out = capsys.readouterr().out
    assert "seed 7" in out
    assert re.search(
        r"14 cases in .*writers 2, queries 2, scores 2, topk 2, steps 2, replays 2, shards 2\): 0 mism", out
    )


def test_check_prints_a_replay_that_repeats_the_mismatch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = steps.brute.select
    monkeypatch.setattr(steps.brute, "select", lambda bits, k: [p for p in real(bits, k) if p != 3])
    assert run("check", "--cases", "300", "--seed", "1", "--stage", "steps") == 1
    captured = capsys.readouterr()
    assert "1 mismatches" in captured.out
    replay = re.search(r"repeat: keysieve (check --stage steps --replay \d+)", captured.err)
    assert replay
    assert "smallest case found" in captured.err
    assert run(*replay[1].split()) == 1
    monkeypatch.undo()
    assert run(*replay[1].split()) == 0


def test_keep_going_reports_several(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps.brute, "select", lambda bits, k: list(range(min(k, len(bits)))))
    assert run("check", "--cases", "120", "--seed", "1", "--stage", "steps,topk", "--keep-going") == 1
    captured = capsys.readouterr()
    assert captured.err.count("MISMATCH in ") == 10
    assert "10 mismatches" in captured.out


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
def test_numerics_asked_for_are_those_of_every_case(
    numerics: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str | None] = []
    judged = steps.expected_logits

    def noted(trial: Any, lengths: list[int], rule: str) -> Any:
        drawn.append(trial.case.spec.numerics)
        return judged(trial, lengths, rule)

    monkeypatch.setattr(steps, "expected_logits", noted)
    assert run("check", "--cases", "60", "--seed", "3", "--stage", "steps,scores", "--numerics", numerics) == 0
    assert f"numerics {numerics}" in capsys.readouterr().out
    assert len(drawn) == 60
    assert set(drawn) == {numerics}
    monkeypatch.setattr(steps.brute, "select", lambda bits, k: list(range(min(k, len(bits)))))
    assert run("check", "--cases", "60", "--seed", "3", "--stage", "steps", "--numerics", numerics) == 1
    assert f"--numerics {numerics}" in capsys.readouterr().err.splitlines()[-1], "what repeats the case has it too"


@pytest.mark.parametrize("numerics", [None, "fp32", "bf16"])
def test_numerics_asked_for_reach_the_gpu_kernels(numerics: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str | None] = set()

    def supported(spec: IndexerSpec, *_: object) -> None:
        asked.add(spec.numerics)

    monkeypatch.setattr(devices, "supports", supported)
    scope = devices.scope_for(torch.device("cuda"), numerics=numerics)
    assert asked == {numerics}
    assert scope.numerics == (numerics,)
    wanted = {numerics} if numerics else {None, "fp32"}  # long contexts are fp32 unless something else was asked for
    assert {steps.draw_step(seed, scope).case.spec.numerics for seed in range(150)} == wanted


def test_same_seed_same_cases() -> None:
    scope = Scope(torch.device("cpu"))
    for stage in STAGES:
        first, second = (stage.describe(stage.draw(5, scope)) for _ in range(2))
        assert first == second
        assert first != stage.describe(stage.draw(6, scope))


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("check", "--stage", "nope"), "--stage: got 'nope'"),
        (("check", "--replay", "1"), "--replay: got 7 stages"),
        (("check", "--cases", "0"), "--cases: got 0"),
        (("check", "--minutes", "nan"), "--minutes: got nan"),
        (("check", "--device", "gpu0"), "device"),
        (("check", "--device", "cpu", "--backend", "sm90"), "backend 'sm90'"),
    ],
)
def test_bad_arguments_are_one_line(argv: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("keysieve check: ")
    assert told in err
    assert len(err.strip().splitlines()) == 1


def test_missing_package_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [m for m in sys.modules if m == "rich" or m.startswith("rich.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert run("demo", "--bytes", "8", "--steps", "2") == 3
    err = capsys.readouterr().err
    assert "needs the package rich" in err
    assert "pip install 'keysieve[demo]'" in err
    assert run("doctor") == 0, "doctor prints plain tables without rich"
    assert "backend cpu" in capsys.readouterr().out


def test_the_demo_looks_at_its_folder_before_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("rich", "transformers", "matplotlib"):
        pytest.importorskip(package, reason="the demo needs it")
    from keysieve.demo import run as demo_run

    def read(*_: object) -> None:
        raise AssertionError("read the text first")

    monkeypatch.setattr(demo_run, "run", read)
    taken = tmp_path / "a file"
    taken.write_text("")
    assert run("demo", "--bytes", "64", "--steps", "2", "--out", str(taken)) == 2
    assert f"--out: got {taken} (File exists); accepted: a folder" in capsys.readouterr().err


def test_doctor_json_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--json", "--backend", "cpu") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["works"] is True
    state = {b["name"]: b for b in told["backends"]}
    assert set(state) == {"cpu", "sm90", "sm100"}
    assert state["cpu"]["formats"] == ["fp8_ue8m0", "fp8_fp32", "mxfp4"]
    assert {"python", "torch", "kernel cache"} <= {f["name"] for f in told["facts"]}


def test_doctor_says_why_a_backend_does_not_work(capsys: pytest.CaptureFixture[str]) -> None:
    for backend in ("sm90", "sm100"):
        reason = supports(IndexerSpec(heads=32, topk=2048), 1, backend, "cuda:0")
        code = run("doctor", "--json", "--backend", backend)
        told = json.loads(capsys.readouterr().out)
        entry = next(b for b in told["backends"] if b["name"] == backend)
        assert (code == 0) is entry["works"]
        if not entry["works"]:
            assert entry["reason"]
            if not told["devices"]:
                assert entry["reason"] == reason


def test_no_command_at_all_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    shown = capsys.readouterr().err
    for command in ("demo", "doctor", "check", "bench", "compile"):
        assert f"\n    {command} " in shown


def test_plain_lines_name_every_fact() -> None:
    found = diagnose()
    text = "\n".join(doctor_cli.plain_lines(found))
    for fact in found.facts:
        assert fact.name in text


@pytest.mark.parametrize("rich", [True, False])
def test_doctor_fits_eighty_columns(
    rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache folder that no column holds, and every word of it still there."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("KEYSIEVE_CACHE_DIR", "/nowhere" + "/a-long-folder-name" * 6)
    if not rich:
        for name in [m for m in sys.modules if m == "rich" or m.startswith("rich.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "rich", None)
        monkeypatch.setitem(sys.modules, "rich.console", None)
    run("doctor", "--backend", "sm90")
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "".join(out.replace("│", "").split()).count("/a-long-folder-name") == 6
    assert ("│" in out) is rich
