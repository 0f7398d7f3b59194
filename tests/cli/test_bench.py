"""Tables and pictures of recorded measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keysieve.bench import report
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
}


def written(path: Path, *changes: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(BASE | change) for change in changes) + "\n")
    return path


def test_table_shows_share_of_limit_and_ratio_to_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "a.jsonl", {}, {"case": "32x4K", "us": 20.0, "peers": {}, "limit_us": None})
    assert cli.main(["bench", "table", str(file)]) == 0
    head, first, second = capsys.readouterr().out.splitlines()[1:]
    assert " ".join(head.split()) == "case setting us min..max limit of limit other (x)"
    assert " ".join(first.split()) == "1x4K fp8_fp32, 32 heads, K 2048 10.0 9.5..11.0 2.5 25 % 25.0 (2.5)"
    assert " ".join(second.split()) == "32x4K fp8_fp32, 32 heads, K 2048 20.0 9.5..11.0"


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


def test_plot_draws_one_picture_per_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    file = written(tmp_path / "a.jsonl", {}, {"case": "32x4K", "us": 20.0}, {"op": "score", "limit_us": None})
    assert cli.main(["bench", "plot", str(file), "--out", str(tmp_path / "out")]) == 0
    pictures = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert pictures == ["bench-score-nvidia-h200.png", "bench-step-nvidia-h200.png"]
    assert all((tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert "picture:" in capsys.readouterr().out


def test_topics_that_need_a_gpu_say_why_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    from keysieve.launch import unlaunchable

    reason = unlaunchable("cuda")
    if reason is None:
        return  # a device is there: tests/gpu measure on it
    for name, topic in TOPICS.items():
        if topic.gpu:
            assert cli.main(["bench", name]) == 2
            assert reason in capsys.readouterr().err


@pytest.mark.parametrize("topic", sorted(TOPICS))
def test_every_topic_has_help_without_a_gpu(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", topic, "--help"])
    assert stop.value.code == 0
    assert "usage:" in capsys.readouterr().out
