"""The exchange protocol: every reachable state of the small suite, and every seeded fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keysieve.dcp.protocol import FAULTS, SEEDED, SMALL, Model, Scenario, explore, main
from keysieve.dcp.protocol.suite import FULL_CHIP, SKIPPED, WRAP


@pytest.mark.parametrize("scenario", SMALL, ids=lambda s: s.name)
def test_the_protocol_is_sound(scenario: Scenario) -> None:
    result = explore(Model(scenario))
    print(result.text())
    assert result.complete
    assert result.violation is None, result.text()
    assert result.states > 1000
    if scenario.client_errs:
        assert result.finished == 0, "ranks with different programs cannot both finish"
        assert result.reported > 0
    else:
        assert result.finished > 0
        assert result.reported == 0


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_every_seeded_fault_is_found(fault: str) -> None:
    result = explore(Model(SEEDED[fault], frozenset({fault}), symmetric=False))
    print(result.text())
    assert result.violation is not None
    assert result.trace, "a violation comes with the steps that lead to it"
    # The same scenario without the fault is sound: it is the fault that was found.
    assert explore(Model(SEEDED[fault])).sound


def test_a_trace_replays_to_its_violation() -> None:
    """The printed steps are a path of the model: following them one by one ends in the reported violation."""
    model = Model(SEEDED["half-tag"], frozenset({"half-tag"}), symmetric=False)
    result = explore(model)
    state = model.initial()
    violations = []
    for text in result.trace:
        step = next(s for s in model.successors(state) if s.text == text)
        violations.append(step.violation)
        state = step.state
    assert violations[:-1] == [None] * (len(result.trace) - 1)
    assert violations[-1] == result.violation


def test_interchangeable_halves_change_the_count_and_not_the_verdict() -> None:
    scenario = Scenario("pair", ((1, 2), (1, 2)), units=("lo", "hi"), own_in_order=True)
    reduced, full = explore(Model(scenario)), explore(Model(scenario, symmetric=False))
    assert reduced.sound
    assert full.sound
    assert reduced.states < full.states
    assert reduced.depth == full.depth
    broken = [
        explore(Model(scenario, frozenset({"one-parity"}), symmetric=symmetric)).violation
        for symmetric in (True, False)
    ]
    assert all(v is not None and v.startswith("deadlock") for v in broken)


def test_where_epochs_start_does_not_matter() -> None:
    """Tags wrap in different places, the reachable states correspond one to one."""
    results = [explore(Model(scenario)) for scenario in WRAP]
    assert all(r.sound for r in results)
    assert len({(r.states, r.steps, r.depth) for r in results}) == 1


def test_equal_signatures_cannot_reveal_a_skipped_call() -> None:
    """Stated in the documentation as what the signature cannot do."""
    blind = Scenario("skip, equal signatures", SKIPPED.programs, units=SKIPPED.units, client_errs=True,
                     signatures={1: 7, 2: 7, 3: 7}, own_in_order=True)  # fmt: skip
    result = explore(Model(blind))
    assert result.violation is not None
    assert "words of another call" in result.violation


def test_a_chip_that_holds_all_rows_does_not_need_the_row_order() -> None:
    """The order matters because chips are full: with room for both rows any will do, with room for one it will not."""
    one_each = replace(FULL_CHIP, saturated={(1, 0): (0,), (1, 1): (1,)})
    any_order = frozenset({"any-row-order"})
    assert explore(Model(replace(one_each, resident=None), any_order)).sound
    assert explore(Model(one_each, any_order)).violation is not None
    assert explore(Model(one_each)).sound


def test_a_limit_of_states_is_not_called_sound() -> None:
    result = explore(Model(SMALL[0]), max_states=500)
    assert not result.complete
    assert not result.sound
    assert "NOT COMPLETE" in result.text()


def test_unknown_faults_are_refused() -> None:
    with pytest.raises(ValueError, match="no-such-fault"):
        Model(SMALL[0], frozenset({"no-such-fault"}))


def test_a_trace_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", "relaxed-flag"]) == 0
    printed = capsys.readouterr().out
    assert "rescue word of call 0" in printed
    assert "  1. rank 0 pushes row 0 of call 1" in printed
