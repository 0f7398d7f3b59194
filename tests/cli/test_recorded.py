"""The measurements that ship with the project can be shown by the commands that its documentation names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(str(path) for path in (ROOT / "docs" / "measurements").glob("*.jsonl"))


@pytest.mark.parametrize("show", ["table", "plot"])
def test_committed_measurements_are_shown(show: str, tmp_path: Path) -> None:
    from keysieve.cli.main import main

    out = ["--out", str(tmp_path)] if show == "plot" else []
    assert FILES
    assert main(["bench", show, *FILES, *out]) == 0
    assert show == "table" or list(tmp_path.glob("*.png"))


def test_a_reader_that_leaves_ends_quietly() -> None:
    """`keysieve doctor --json | head -1`: no traceback."""
    command = f"{sys.executable} -m keysieve.cli.main bench table {' '.join(FILES * 40)} | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr, done.stderr
