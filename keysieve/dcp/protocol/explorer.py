"""Breadth-first exploration of every state a model can reach, with the shortest trace to whatever breaks it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from keysieve.dcp.protocol.model import Model


@dataclass(frozen=True)
class Exploration:
    """What an exploration found.

    Attributes:
        scenario: its name.
        faults: the seeded faults.
        states: distinct states reached.
        steps: transitions examined.
        depth: steps to the farthest state.
        finished: states in which every rank has completed its program.
        reported: end states in which a rank reported differing signatures, or waits for a peer that will not answer
            (a bounded wait, so a reported one); only after a client's error.
        seconds: wall time.
        violation: what went wrong first, or None.
        trace: the steps that lead there, a shortest sequence.
        complete: False if the limit of states ended the exploration first.
    """

    scenario: str
    faults: tuple[str, ...]
    states: int
    steps: int
    depth: int
    finished: int
    reported: int
    seconds: float
    violation: str | None
    trace: tuple[str, ...]
    complete: bool

    @property
    def sound(self) -> bool:
        """Everything was explored and nothing broke."""
        return self.complete and self.violation is None

    def text(self) -> str:
        """One line, and the trace if there is one."""
        name = self.scenario + (f" with {' + '.join(self.faults)}" if self.faults else "")
        line = f"{name}: {self.states:,} states, {self.steps:,} steps, depth {self.depth}, {self.seconds:.1f} s"
        if not self.complete:
            return line + "; NOT COMPLETE (limit of states reached)"
        if self.violation is None:
            return line + f"; sound ({self.finished} ends, {self.reported} reported failures)"
        steps = "\n".join(f"  {i + 1:3}. {step}" for i, step in enumerate(self.trace))
        return f"{line}; broken: {self.violation}\n{steps}"


def explore(model: Model, *, max_states: int = 50_000_000) -> Exploration:
    """Reach every state of ``model``, or the first that violates an invariant, or ``max_states`` of them.

    The invariants: no step accepts a word of another call (the model reports it), and a state without steps is one in
    which every rank has finished its program. After a client's error an end in which failures are reported, or in
    which a rank waits for a peer (the wait is bounded), is allowed too.
    """
    began = time.perf_counter()
    first = model.initial()
    parents: dict[bytes, bytes | None] = {first: None}
    level: deque[bytes] = deque([first])
    depth = steps = finished = reported = 0
    violation: str | None = None
    trace: tuple[str, ...] = ()
    complete = True
    while level and violation is None and complete:
        following: deque[bytes] = deque()
        while level:
            state = level.popleft()
            stuck = True
            for step in model.successors(state):
                stuck = False
                steps += 1
                if step.violation is not None:
                    violation = step.violation
                    trace = (*_trace(model, parents, state), step.text)
                    break
                if step.state not in parents:
                    parents[step.state] = state
                    following.append(step.state)
            if violation is not None:
                break
            if stuck and model.finished(state):
                finished += 1
            elif stuck and model.scenario.client_errs:
                reported += 1
            elif stuck:
                violation = "deadlock: " + model.waiting(state)
                trace = _trace(model, parents, state)
                break
            if len(parents) > max_states:
                complete = False
                break
        level = following
        depth += bool(level)
    return Exploration(
        model.scenario.name,
        tuple(sorted(model.faults)),
        len(parents),
        steps,
        depth,
        finished,
        reported,
        time.perf_counter() - began,
        violation,
        trace,
        complete,
    )


def _trace(model: Model, parents: dict[bytes, bytes | None], state: bytes) -> tuple[str, ...]:
    """The steps from the initial state to ``state``, found again from the stored parents."""
    texts: list[str] = []
    while (parent := parents[state]) is not None:
        texts.append(next(step.text for step in model.successors(parent) if step.state == state))
        state = parent
    return tuple(reversed(texts))
