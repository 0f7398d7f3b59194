"""Tables and pictures of recorded measurements."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from keysieve.bench import dcp_model, plot, report
from keysieve.checks import KeysieveError
from keysieve.cli import main as cli
from keysieve.cli.bench import TOPICS

BASE: dict[str, Any] = {
    "date": "2026-11-30",
    "device": "NVIDIA H200",
    "op": "step",
    "case": "1x4K",
    "heads": 32,
    "topk": 2048,
    "format": "fp8_fp32",
    "us": 10.0,
    "us_min": 9.5,
    "us_max": 11.0,
    "limit_us": 2.5,
    "peers": {"other": 25.0},
    "exact": True,
    "commit": "0123456789ab",
}


def written(path: Path, *changes: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(BASE | change) for change in changes) + "\n")
    return path


def test_table_shows_share_of_limit_and_ratio_to_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "a.jsonl", {}, {"case": "32x4K", "us": 20.0, "peers": {}, "limit_us": None})
    assert cli.main(["bench", "table", str(file)]) == 0
    title, head, first, second = capsys.readouterr().out.splitlines()
    assert title == ("step on NVIDIA H200, microseconds; fp8_fp32, 32 heads, K 2048; 2026-11-30; keysieve 0123456")
    assert " ".join(head.split()) == "case us min..max limit of limit other (x)"
    assert " ".join(first.split()) == "1x4K 10.0 9.5..11.0 2.5 25 % 25.0 (2.5)"
    assert " ".join(second.split()) == "32x4K 20.0 9.5..11.0"


def test_a_table_of_several_settings_and_commits_says_which_line_is_of_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = {"heads": 0, "topk": 0, "format": "", "what": "a launch"}
    changes = {"heads": 64, "commit": "f" * 40 + "+select", "date": "2026-12-01"}
    assert cli.main(["bench", "table", str(written(tmp_path / "a.jsonl", {}, none, changes))]) == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title == "step on NVIDIA H200, microseconds; 2026-11-30, 2026-12-01; keysieve 0123456, fffffff+select"
    assert head.split()[:2] == ["case", "setting"]
    assert head.split()[-1] == "commit"
    assert ["fp8_fp32, 32 heads, K 2048" in rows[0], "fp8_fp32, 64 heads, K 2048" in rows[2]] == [True, True]
    assert " ".join(rows[1].split()).startswith("1x4K a launch 10.0"), "no heads, no K: nothing is said of them"
    assert [row.split()[-1] for row in rows] == ["0123456", "0123456", "fffffff+select"]


def test_newest_line_wins_and_inexact_lines_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(
        tmp_path / "a.jsonl", {"us": 7.0, "date": "2026-12-01"}, {"us": 12.0}, {"case": "wrong", "exact": False}
    )
    measured = report.read([file])
    assert [line["us"] for line in measured.lines] == [7.0]
    assert measured.inexact == 1
    assert cli.main(["bench", "table", str(file)]) == 0
    assert "1 measurements left out" in capsys.readouterr().out


def test_a_file_of_failures_only_is_a_finding(tmp_path: Path) -> None:
    assert cli.main(["bench", "table", str(written(tmp_path / "a.jsonl", {"exact": False}))]) == 1


def test_bad_files_are_named_with_their_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "b.jsonl"
    broken.write_text(json.dumps(BASE) + "\n{nonsense\n")
    assert cli.main(["bench", "table", str(broken)]) == 2
    assert f"{broken}:2" in capsys.readouterr().err
    broken.write_text('{"op": "step"}\n')
    assert cli.main(["bench", "plot", str(broken)]) == 2
    assert "without ['device', 'case', 'us', 'exact']" in capsys.readouterr().err
    assert cli.main(["bench", "table", str(tmp_path / "absent")]) == 2
    capsys.readouterr()
    assert cli.main(["bench", "plot", str(written(tmp_path / "a.jsonl", {})), "--op", "sleep"]) == 2
    assert "--op: got 'sleep'; accepted: 'step'" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "told"), [("no json", ":1 (Expecting value"), ('\n{"op": "merge"}', ":2 without")])
def test_the_cost_model_names_bad_lines_as_tables_do(tmp_path: Path, text: str, told: str) -> None:
    """It read its file by itself once, and ended in a traceback of the parser."""
    records = tmp_path / "bad.jsonl"
    records.write_text(text)
    with pytest.raises(KeysieveError) as caught:
        dcp_model.main(["--records", str(records)])
    assert f"{records}{told}" in str(caught.value)


def test_plot_draws_one_picture_per_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    file = written(tmp_path / "a.jsonl", {}, {"case": "32x4K", "us": 20.0}, {"op": "score", "limit_us": None})
    assert cli.main(["bench", "plot", str(file), "--out", str(tmp_path / "out")]) == 0
    pictures = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert pictures == ["bench-score-nvidia-h200.png", "bench-step-nvidia-h200.png"]
    assert all((tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert "picture:" in capsys.readouterr().out


def test_seventy_five_cases_in_a_picture_can_be_read() -> None:
    """No two names of cases meet, nor do those of the time axis, and none leaves the picture."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    lines = [
        BASE | {"case": f"{2**n}x128K", "kind": kind, "topk": topk, "us": 4.0 * 2**n, "cached": n < 4}
        for n in range(11)
        for kind in ("gaussian", "plateau", "equal")
        for topk in (512, 2048)
    ] + [BASE | {"case": "a long name of a case", "kind": f"special kind {n}"} for n in range(9)]
    assert len(lines) == 75
    parts = dict(plot.panels(lines))
    assert list(parts) == [
        *(f"K {k}, {kind}" for kind in ("gaussian", "plateau", "equal") for k in (512, 2048)),
        "one case each",
    ]
    assert [name for name, _ in parts["K 512, gaussian"]][3:5] == ["8x128K, cached", "16x128K"]
    assert sorted(name for name, _ in parts["one case each"])[1] == "a long name of a case, K 2048, special kind 1"
    figure = plot.picture("NVIDIA H200", "select", lines)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    whole = figure.bbox
    for axes in figure.axes:
        for labels in (axes.get_yticklabels(), figure.axes[-1].get_xticklabels(which="both")):
            boxes = [label.get_window_extent() for label in labels if label.get_text() and label.get_visible()]
            inside = [box for box in boxes if box.x1 > axes.bbox.x0 - 400 and box.x0 <= axes.bbox.x1]
            assert len(inside) >= 2
            for at, box in enumerate(inside):
                assert not any(box.overlaps(other) for other in inside[:at])
        for label in axes.get_yticklabels():
            assert whole.x0 <= label.get_window_extent().x0


def test_topics_that_need_a_gpu_say_why_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    from keysieve.launch import unlaunchable

    reason = unlaunchable("cuda")
    if reason is None:
        return  # a device is there: tests/gpu measure on it
    for name, topic in TOPICS.items():
        if topic.gpu:
            assert cli.main(["bench", name]) == 2
            said = capsys.readouterr().err
            assert reason in said
            assert "use a CPU ('cpu')" in said
            assert "`keysieve bench --cpu`" in said


FEW = ["--requests", "2", "--keys", "256", "--heads", "8", "--topk", "16", "--repeats", "1", "--memory-keys", "4096"]


@pytest.mark.parametrize("words", [["--cpu", *FEW], [*FEW, "--cpu"], ["cpu", *FEW, "--cpu"], ["--cpu", "cpu", *FEW]])
def test_cpu_anywhere_is_the_topic_with_its_options(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from keysieve.bench import cpu

    given: list[list[str]] = []
    monkeypatch.setattr(cpu, "main", lambda options: given.append(options) or 0)
    assert cli.main(["bench", *words]) == 0
    assert given == [FEW]


@pytest.mark.parametrize("words", [["score", "--cpu"], ["--cpu", "score"], ["table", "x.jsonl", "--cpu"]])
def test_cpu_with_another_topic_is_refused_with_what_to_type(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert "--cpu: got it with the topic" in said
    assert "`keysieve bench cpu`" in said


def test_the_cpu_topic_says_what_it_is_doing_before_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from keysieve.bench import cpu

    said: list[str] = []

    def last(args: argparse.Namespace) -> str:
        said.append(capsys.readouterr().out)
        return cpu.measure_memory(args.memory_keys, args.heads, args.topk).line()

    monkeypatch.setattr(cpu, "memory_of_own_process", last)
    assert cli.main(["bench", "--cpu", *FEW, "--json", str(tmp_path / "new" / "a.jsonl")]) in (0, 1)
    assert len((tmp_path / "new" / "a.jsonl").read_text().splitlines()) == 2
    for step in ("2 x 256 keys, 8 heads", "comparing every selection", "turn 1 of 1", "a row of 4096 keys"):
        assert step in said[0]
    assert "selections exact" in capsys.readouterr().out


def test_places_that_cannot_be_written_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from keysieve.bench import cpu

    def measured(*_: object) -> None:
        raise AssertionError("measured before the place was looked at")

    monkeypatch.setattr(cpu, "measure_speed", measured)
    monkeypatch.setattr(plot, "picture", measured)
    lines = written(tmp_path / "a.jsonl", {})
    for words in (
        ["cpu", "--json", str(tmp_path)],
        ["cpu", "--json", str(lines / "below-a-file" / "b.jsonl")],
        ["plot", str(lines), "--out", str(lines)],
        ["plot", str(lines), "--out", str(lines / "below-a-file")],
    ):
        assert cli.main(["bench", *words]) == 2
        said = capsys.readouterr().err
        assert f"{words[-2]}: got {words[-1]} (" in said
        assert "can be written" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


@pytest.mark.parametrize("topic", sorted(TOPICS))
def test_every_topic_has_help_without_a_gpu(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", topic, "--help"])
    assert stop.value.code == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.parametrize("topic", sorted(TOPICS))
def test_every_option_of_every_topic_is_explained(topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def parse(parser: argparse.ArgumentParser, *_: Any) -> None:
        raise Asked(parser)

    module = importlib.import_module(TOPICS[topic].module)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(Asked) as asked:
        module.main([])
    parser: argparse.ArgumentParser = asked.value.args[0]
    assert [action.dest for action in parser._actions if not action.help] == []
