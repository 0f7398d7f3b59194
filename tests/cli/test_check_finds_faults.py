"""Every deliberate fault is found by ``keysieve check`` within 300 cases, made small, and comes back from its seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from faults import FAULTS, Fault

from keysieve.check.runner import STAGES, attempt, examine, run_cases
from keysieve.check.trial import Scope

SCOPE = Scope(torch.device("cpu"))
STAGE = {stage.name: stage for stage in STAGES}
CASES = 300
"""Within which a fault must be found. By count, so that it does not matter how fast the machine is; 78 are the most
that any needs, and all 300 take well under a minute."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.stage}-{f.name}")
def test_fault_is_found_shrunk_and_replayed(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.apply(monkeypatch)
    tally = run_cases(SCOPE, stages=[STAGE[fault.stage]], base=1, cases=CASES, shrink_seconds=0.2)
    assert tally.failures, f"not found in {tally.total} cases"
    found = tally.failures[0]
    assert examine(STAGE[found.stage], found.seed, SCOPE, shrink_seconds=0.0), "the printed seed must repeat it"
    monkeypatch.undo()
    trial = STAGE[found.stage].draw(found.seed, SCOPE)
    assert attempt(STAGE[found.stage], trial, SCOPE) is None, "the case must pass once the fault is gone"


def test_every_stage_has_faults_and_the_documentation_lists_them() -> None:
    on_cpus = set(STAGE) - {"exchange"}  # kernels' work alone; faults of its protocol are the explorer's to find
    assert {f.stage for f in FAULTS} == on_cpus
    text = " ".join((Path(__file__).parents[2] / "docs" / "cli.md").read_text().split())
    for fault in FAULTS:
        assert fault.name.replace("_", " ") in text


def test_shrinking_ends_at_a_case_that_shows_only_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    next(f for f in FAULTS if f.name == "ties_to_the_highest_positions").apply(monkeypatch)
    tally = run_cases(SCOPE, stages=[STAGE["topk"]], base=3, cases=CASES)
    small = tally.failures[0].description
    # Two equal keys compete for one place: nothing smaller shows it.
    assert small.startswith("k 1, lengths [2], row stride 2, owner None")
    assert tally.failures[0].steps > 3
