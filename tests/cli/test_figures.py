"""README's table and the pictures come from the recorded lines, and README shows the newest of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from keysieve.bench import figures, report
from keysieve.cli.main import main as cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the command reads and writes."""
    shutil.copytree(ROOT / "docs" / "measurements", tmp_path / "docs" / "measurements")
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def test_readme_is_current() -> None:
    assert cli(["bench", "figures", "--root", str(ROOT), "--check"]) == 0


def test_pictures_are_the_committed_ones(checkout: Path) -> None:
    """The pictures of the repository are those of its records (drawn by any matplotlib: compared by name)."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    assert cli(["bench", "figures", "--root", str(checkout)]) == 0
    drawn = {path.name for path in (checkout / "docs" / "figures").iterdir()}
    committed = {path.name for path in (ROOT / "docs" / "figures").glob("*.svg")}
    assert drawn == committed & {f"{name}.svg" for name in figures.PICTURES}
    assert all(b"<svg" in path.read_bytes() for path in (checkout / "docs" / "figures").iterdir())
    assert (checkout / "README.md").read_text() == (ROOT / "README.md").read_text()


def test_a_newer_record_changes_the_table(checkout: Path) -> None:
    file = checkout / "docs" / "measurements" / "step.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    (newest,) = report.read([file]).lines[:1]
    changed = newest | {"date": "2099-01-01", "us": 1234.5, "peers": {figures.DETERMINISTIC: 6789.1}}
    file.write_text("\n".join(json.dumps(line) for line in [*lines, changed]) + "\n")
    assert cli(["bench", "figures", "--root", str(checkout), "--check"]) == 1
    assert "1234.5" not in (checkout / "README.md").read_text(), "--check writes nothing"
    block = figures.readme_block(report.read([file]))
    assert "| 1234.5 | 6789.1 |" in block
    assert "2099-01-01" in block


def test_each_column_and_file_says_the_commit_it_was_measured_on(checkout: Path) -> None:
    """Also where some cases of a column were measured again later."""
    file = checkout / "docs" / "measurements" / "step.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [line | {"commit": "a" * 40 + "+tried", "date": "2026-12-01T10:00"} for line in lines]
    later = next(line for line in lines if line["case"] == "1x1M") | {"commit": "b" * 12, "date": "2026-12-02T10:00"}
    file.write_text("\n".join(json.dumps(line) for line in [*lines, later]) + "\n")
    assert cli(["bench", "figures", "--root", str(checkout), "--check"]) == 1
    measured = report.read([file])
    others = ", ".join(case for case in figures.CASES if case != "1x1M")
    told = f"*whole step*: aaaaaaa+tried (2026-12-01) for {others}; bbbbbbb (2026-12-02) for 1x1M."
    assert told in figures.readme_block(measured)
    several = f"{len(measured.lines) - 1} of aaaaaaa+tried (2026-12-01); 1 of bbbbbbb (2026-12-02)"
    assert several in figures.records_block([file])


def test_the_page_of_records_is_held_to_them(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = checkout / "docs" / "measurements" / "README.md"
    page.write_text(page.read_text().replace("| score | NVIDIA H200 |", "| score | NVIDIA H100 |"))
    assert cli(["bench", "figures", "--root", str(checkout), "--check"]) == 1
    assert str(page) in capsys.readouterr().out


def test_a_readme_without_its_markers_is_left_alone(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = checkout / "README.md"
    readme.write_text("nothing here")
    assert cli(["bench", "figures", "--root", str(checkout)]) == 2
    assert "markers" in capsys.readouterr().err
    assert readme.read_text() == "nothing here"


def test_the_exchange_is_drawn_against_rows(checkout: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    base = {"device": "D", "op": "exchange", "exact": True, "world": 2, "date": "2026-12-01", "topk": 2048}
    rows = [
        base | {"case": f"{n} rows", "requests": n, "us": 5.0 + n / 64, "peers": {"nccl_all_gather_merge": 25.0}}
        for n in (1, 64)
    ]
    file = checkout / "docs" / "measurements" / "dcp.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in rows) + "\n")
    drawn = figures.draw(report.read([file]), checkout / "pictures")
    assert [path.name for path in drawn] == ["dcp-by-rows.svg"]


def test_peers_that_were_not_measured_have_no_legend(checkout: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from matplotlib.figure import Figure

    measured = report.read([checkout / "docs" / "measurements" / "step.jsonl"])
    axes = Figure().subplots()
    used = figures.by_context(measured, axes)
    named = any("FlashInfer" in text for text in axes.get_legend_handles_labels()[1])
    assert named == any(figures.DETERMINISTIC in line["peers"] for line in used)


def test_cases_of_equal_limits_are_always_drawn_in_the_same_order(checkout: Path) -> None:
    """Else two runs over the same records draw different pictures, whose differences say nothing."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from matplotlib.figure import Figure

    measured = report.read(sorted((checkout / "docs" / "measurements").glob("*.jsonl")))
    axes = Figure().subplots()
    used = figures.by_batch(measured, axes)
    steps = {line["case"]: line["limit_us"] for line in used if line["op"] == "step"}
    assert len(set(steps.values())) < len(steps), "no two limits are equal: the case says nothing"
    drawn = [label.get_text() for label in axes.get_xticklabels()]
    assert drawn == sorted(steps, key=lambda case: (steps[case], case))


def test_rows_that_all_need_a_second_round_are_another_measurement(checkout: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from matplotlib.figure import Figure

    base = {"device": "D", "op": "exchange", "exact": True, "world": 2, "date": "2026-12-01", "topk": 2048, "case": "c"}
    lines = [base | {"requests": 1, "us": 16.0, "topn": 1216}, base | {"requests": 1, "us": 45.0, "topn": 1024}]
    file = checkout / "docs" / "measurements" / "two.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    measured = report.read([file])
    assert len(measured.lines) == 2, "neither replaces the other"
    assert [line["us"] for line in figures.by_rows(measured, Figure().subplots())] == [16.0]
