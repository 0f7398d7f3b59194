"""Draws cases for as long as asked, and on a mismatch makes the case small and says how to get it back."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from keysieve.check.exchanges import Exchanges
from keysieve.check.replays import Replays
from keysieve.check.selections import Rows, Shards
from keysieve.check.steps import Scores, Steps
from keysieve.check.trial import Mismatch, Scope, Stage, filled_memory
from keysieve.check.writers import Queries, Writers

STAGES: tuple[Stage[Any], ...] = (Writers(), Queries(), Scores(), Rows(), Steps(), Replays(), Shards(), Exchanges())

_SEED_STEP = 0x9E3779B97F4A7C15
"""Odd, so that consecutive cases of a run get seeds far apart."""


@dataclass
class Failure:
    """One mismatch, made small.

    Attributes:
        stage, seed: what to replay.
        error: what was wrong with the case as drawn.
        small_error, description: what is wrong with the shrunk case, and that case.
        steps: how many simplifications were made.
    """

    stage: str
    seed: int
    error: str
    small_error: str
    description: str
    steps: int


@dataclass
class Tally:
    """Counts of a run."""

    cases: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.cases.values())


def seed_of(base: int, index: int) -> int:
    """The seed of case ``index`` of a run with ``--seed base``: 48 bits."""
    return (base * 0x100000001B3 + (index + 1) * _SEED_STEP) & 0xFFFFFFFFFFFF


@dataclass(frozen=True)
class Finding:
    """What went wrong with a trial: the kind of exception, and its text."""

    kind: str
    text: str


def attempt(stage: Stage[Any], trial: Any, scope: Scope) -> Finding | None:
    """None if the trial passes, else what went wrong: a mismatch, or an exception nobody expected."""
    try:
        with filled_memory(scope):
            stage.run(trial, scope)
    except Mismatch as mismatch:
        return Finding("Mismatch", str(mismatch))
    except Exception as error:  # any exception on a valid case is a finding: it is reported, not handled
        frame = traceback.extract_tb(error.__traceback__)[-1]
        kind, place = type(error).__name__, f"{frame.name}, {frame.filename.rpartition('/')[2]}:{frame.lineno}"
        return Finding(kind, f"{kind}: {error} ({place})")
    return None


def shrink(stage: Stage[Any], trial: Any, scope: Scope, found: Finding, seconds: float) -> tuple[Any, Finding, int]:
    """Greedy simplification: take the first simpler variant that fails in the same way, until none does or time is up.

    Returns the smallest failing trial found, what is wrong with it, and how many simplifications it took.
    """
    deadline = time.monotonic() + seconds
    steps = 0
    while True:
        for simpler in stage.smaller(trial):
            if time.monotonic() > deadline:
                return trial, found, steps
            still = attempt(stage, simpler, scope)
            if still is not None and still.kind == found.kind:
                trial, found, steps = simpler, still, steps + 1
                break
        else:
            return trial, found, steps


def examine(stage: Stage[Any], seed: int, scope: Scope, shrink_seconds: float) -> Failure | None:
    """Draw and run one case; on a mismatch, its shrunk report."""
    trial = stage.draw(seed, scope)
    found = attempt(stage, trial, scope)
    if found is None:
        return None
    small, remains, steps = shrink(stage, trial, scope, found, shrink_seconds)
    return Failure(stage.name, seed, found.text, remains.text, stage.describe(small), steps)


def run_cases(
    scope: Scope,
    *,
    stages: Sequence[Stage[Any]] = STAGES,
    base: int = 0,
    seconds: float | None = None,
    cases: int | None = None,
    shrink_seconds: float = 20.0,
    stop_after: int = 1,
    progress: Callable[[Tally], None] | None = None,
) -> Tally:
    """Run cases of all stages in turn until time or the case count is up, or ``stop_after`` mismatches were found.

    Args:
        scope: device, backend and what may be drawn.
        stages: kinds of cases, taken in turn.
        base: the run's seed; the same base gives the same cases in the same order.
        seconds, cases: limits, whichever comes first; without both one case of every stage runs.
        shrink_seconds: time spent on making one mismatch small.
        stop_after: mismatches after which to stop.
        progress: called after every case.
    """
    tally, start = Tally(), time.monotonic()
    if seconds is None and cases is None:
        cases = len(stages)
    for index, stage in _in_turn(stages):
        if cases is not None and index >= cases:
            break
        if seconds is not None and time.monotonic() - start >= seconds:
            break
        failure = examine(stage, seed_of(base, index), scope, shrink_seconds)
        tally.cases[stage.name] = tally.cases.get(stage.name, 0) + 1
        tally.seconds = time.monotonic() - start
        if failure is not None:
            tally.failures.append(failure)
            if len(tally.failures) >= stop_after:
                break
        if progress is not None:
            progress(tally)
    return tally


def _in_turn(stages: Sequence[Stage[Any]]) -> Iterator[tuple[int, Stage[Any]]]:
    index = 0
    while True:
        yield index, stages[index % len(stages)]
        index += 1
