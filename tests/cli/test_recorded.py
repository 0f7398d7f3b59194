"""The measurements that ship with the project can be shown by the commands that its documentation names."""

from __future__ import annotations

import os
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
    """`keysieve bench table ... | true`: the pipe is closed, which is waited for, before anything is written to it; no
    traceback."""
    show = f"main(['bench', 'table', {FILES[0]!r}])"
    closed = "pipe = select.poll(); pipe.register(1, 0); assert pipe.poll(60_000) == [(1, select.POLLERR)]"
    code = f"import select, sys; {closed}; from keysieve.cli.main import main; sys.exit({show})"
    pipe = f'{sys.executable} -c "$CODE" | true; exit ${{PIPESTATUS[0]}}'
    environment = {**os.environ, "CODE": code}
    done = subprocess.run(
        ["bash", "-c", pipe], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 141
    assert done.stderr == ""
