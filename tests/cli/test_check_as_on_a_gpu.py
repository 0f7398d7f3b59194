"""The judgements that a GPU's results get, exercised on the cpu backend: bound, repeats, rows alone, own logits."""

from __future__ import annotations

import pytest
import torch
from faults import FAULTS

from keysieve.check.runner import STAGES, run_cases
from keysieve.check.trial import Scope

STAGE = {stage.name: stage for stage in STAGES}


class AsOnGpu(Scope):
    """The CPU, judged like a GPU."""

    @property
    def exact_scores(self) -> bool:
        return False


SCOPE = AsOnGpu(
    torch.device("cpu"),
    "cpu",
    (("fp8_fp32", 32, 1), ("fp8_ue8m0", 16, 2), ("mxfp4", 8, 3), ("fp8_fp32", 8, 1)),
    numerics=(None, "bf16"),
    repeats=2,
)


@pytest.mark.parametrize("stage", ["scores", "steps", "replays"])
def test_exact_results_pass(stage: str) -> None:
    tally = run_cases(SCOPE, stages=[STAGE[stage]], base=2, cases=40)
    assert not tally.failures, tally.failures[0]


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        ("scores", "relu_missing"),
        ("scores", "relu_drops_nan"),
        ("scores", "scale_of_the_next_token"),
        ("scores", "ue8m0_zero_is_zero_and_255_is_infinite"),
        ("scores", "page_ids_outside_the_pool_clamped"),
        ("steps", "ties_to_the_highest_positions"),
        ("steps", "count_includes_the_padding"),
        ("steps", "faults_forgotten"),
    ],
)
def test_faults_are_found(stage: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    next(fault for fault in FAULTS if fault.name == name).apply(monkeypatch)
    assert run_cases(SCOPE, stages=[STAGE[stage]], base=1, cases=300, shrink_seconds=0.2).failures


def test_a_result_that_changes_between_calls_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from keysieve.check import oracle

    real, calls = oracle.score, []

    def flickering(*args: object, **named: object) -> torch.Tensor:
        calls.append(1)
        logits = real(*args, **named)  # type: ignore[arg-type]  # passed on as they came
        if len(calls) % 2 == 0 and logits.numel():
            bits = logits.view(torch.int16)
            bits[0, 0] ^= 1
        return logits

    monkeypatch.setattr(oracle, "score", flickering)
    found = run_cases(SCOPE, stages=[STAGE["scores"]], base=1, cases=40, shrink_seconds=0.2).failures
    assert found
    assert "repeated call" in found[0].error or "alone" in found[0].error
