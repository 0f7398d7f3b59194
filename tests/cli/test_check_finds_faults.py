"""Every deliberate fault is found by ``keysieve check`` within a minute, made small, and comes back from its seed."""

from __future__ import annotations

import pytest
import torch
from faults import FAULTS, Fault

from keysieve.check.runner import STAGES, attempt, examine, run_cases
from keysieve.check.trial import Scope

SCOPE = Scope(torch.device("cpu"))
STAGE = {stage.name: stage for stage in STAGES}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.stage}-{f.name}")
def test_fault_is_found_shrunk_and_replayed(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.apply(monkeypatch)
    tally = run_cases(SCOPE, stages=[STAGE[fault.stage]], base=1, seconds=60.0, shrink_seconds=1.0)
    assert tally.failures, f"not found in {tally.total} cases"
    found = tally.failures[0]
    assert examine(STAGE[found.stage], found.seed, SCOPE, shrink_seconds=0.0), "the printed seed must repeat it"
    monkeypatch.undo()
    trial = STAGE[found.stage].draw(found.seed, SCOPE)
    assert attempt(STAGE[found.stage], trial, SCOPE) is None, "the case must pass once the fault is gone"


def test_every_stage_has_faults() -> None:
    assert {f.stage for f in FAULTS} == set(STAGE)
