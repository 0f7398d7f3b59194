"""``keysieve demo --ranks W``: the context sharded over processes, the same keys, and a rank that errs is noticed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from keysieve.demo.model import read_text
from keysieve.demo.run import Settings
from keysieve.demo.run import run as run_demo

SMALL = ["--bytes", "100", "--steps", "4", "--topk", "24"]

DIVERGE = """
import sys
from keysieve.cli.main import main
from keysieve.demo import ranks

real = ranks.Follower.step

def wrong(self, step):
    out = real(self, step)
    if self.shard.group.rank == 2 and step.layer == 3:
        out.positions[:, 0] += 1
    return out

ranks.Follower.step = wrong
sys.exit(main(sys.argv[1:]))
"""


def _demo(folder: Path, *arguments: str, script: str | None = None) -> tuple[int, str]:
    """Exit status and output; a process of its own, since the ranks are forked from it."""
    code = script or "import sys; from keysieve.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "demo", *SMALL, "--out", str(folder), *arguments]
    environment = {**os.environ, "COLUMNS": "100"}  # whatever the terminal's, the tables below are read whole
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    return done.returncode, done.stdout + done.stderr


def _digest(shown: str) -> str:
    found = re.search(r"digest of all selected positions +│ +([0-9a-f]{16})", shown)
    assert found, shown
    return found[1]


@pytest.mark.slow
def test_four_ranks_select_what_one_selects(tmp_path: Path) -> None:
    alone = run_demo(Settings(read_text(None)[:100], steps=4, topk=24))
    assert alone.totals.clean
    code, sharded = _demo(tmp_path, "--ranks", "4", "--interleave", "16")
    assert code == 0, sharded
    assert _digest(sharded) == alone.digest.hexdigest()[:16]
    rows = re.findall(r"│ +(\d) │ +(\d+) │ +([\d,]+) │ +yes │", sharded)
    assert [rank for rank, _, _ in rows] == ["0", "1", "2", "3"]
    assert sum(int(keys) for _, keys, _ in rows) == 100
    # Three indexing layers; row t selects min(t + 1, 24) keys.
    assert sum(int(owned.replace(",", "")) for _, _, owned in rows) == 3 * (24 * 25 // 2 + 24 * 76)


@pytest.mark.slow
def test_a_rank_that_selects_other_keys_fails_the_demo(tmp_path: Path) -> None:
    code, shown = _demo(tmp_path, "--ranks", "3", script=DIVERGE)
    assert code == 1, shown
    assert "the ranks did not select the same keys" in shown
    assert re.search(r"│ +2 │ +\d+ │ +[\d,]+ │ +NO │", shown), shown


@pytest.mark.parametrize(("option", "value"), [("--ranks", "17"), ("--ranks", "0"), ("--interleave", "101")])
def test_impossible_ranks_are_refused(tmp_path: Path, option: str, value: str) -> None:
    arguments = [option, value] if option == "--ranks" else ["--ranks", "2", option, value]
    code, shown = _demo(tmp_path, *arguments)
    assert code != 0
    assert f"{option}: got {value}" in shown
