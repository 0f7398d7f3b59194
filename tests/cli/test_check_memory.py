"""What `keysieve check` finds does not depend on what memory held before: unwritten places are found from any seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from faults import FAULTS

from keysieve.check.runner import STAGES, attempt, examine, seed_of
from keysieve.check.trial import Scope

SCOPE = Scope(torch.device("cpu"))
UNWRITTEN = [f for f in FAULTS if f.name == "slots_past_the_count_unwritten"]
FILLED = {
    torch.int32: 2**31 - 1,
    torch.int64: 2**63 - 1,
    torch.uint8: 255,
    torch.bfloat16: float("nan"),
    torch.float32: float("nan"),
}


class Looks:
    """A stage that looks at memory as torch gives it; ``trial`` is raised at the end unless it is None."""

    name = "looks"

    def __init__(self) -> None:
        self.seen: dict[torch.dtype, list[torch.Tensor]] = {}
        self.asked = False

    def draw(self, seed: int, scope: Scope) -> Exception | None:
        del seed, scope
        return None

    def run(self, trial: Exception | None, scope: Scope) -> None:
        del scope
        self.asked = torch.are_deterministic_algorithms_enabled()
        for dtype in FILLED:
            used = torch.ones(64, dtype=dtype)
            like = torch.empty_like(used)
            self.seen[dtype] = [torch.empty(64, dtype=dtype), like, used.new_empty((64,))]
        if trial is not None:
            raise trial

    def smaller(self, trial: Exception | None) -> Iterator[Exception | None]:
        del trial
        return iter(())

    def describe(self, trial: Exception | None) -> str:
        return repr(trial)


def modes() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.mark.parametrize("raised", [None, ValueError("unexpected")])
@pytest.mark.parametrize(
    ("asked", "warned", "filling"), [(False, False, True), (True, False, False), (True, True, True)]
)
def test_memory_is_filled_in_a_case_and_torch_is_as_before_after_it(
    raised: Exception | None, asked: bool, warned: bool, filling: bool
) -> None:
    before, stage = modes(), Looks()
    try:
        torch.use_deterministic_algorithms(asked, warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = filling
        found = attempt(stage, raised, SCOPE)
        assert (found is None) == (raised is None)
        assert modes() == (asked, warned, filling)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]
    for dtype, value in FILLED.items():
        for tensor in stage.seen[dtype]:
            assert torch.equal(tensor.nan_to_num(7.0), torch.full((64,), value, dtype=dtype).nan_to_num(7.0))


def test_a_gpus_memory_is_left_as_it_is() -> None:
    """Fills would be captured into the graphs under test, and clean their buffers at every replay."""
    stage = Looks()
    assert attempt(stage, None, Scope(torch.device("cuda"))) is None
    assert not stage.asked


@pytest.mark.parametrize("fault", UNWRITTEN, ids=lambda f: f.stage)
def test_unwritten_places_are_found_whatever_stood_there(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all places taken hold -1 already, what should have been written."""
    stage = next(s for s in STAGES if s.name == fault.stage)
    fault.apply(monkeypatch)
    seeds = [seed for seed in (seed_of(1, i) for i in range(12)) if attempt(stage, stage.draw(seed, SCOPE), SCOPE)]
    assert seeds, "some of these cases must show it"
    real, real_new = torch.empty, torch.Tensor.new_empty
    for value in (-1, 0, 1):

        def dirty(tensor: torch.Tensor, value: int = value) -> torch.Tensor:
            # As the allocator would have given it; what torch filled stays.
            filled = torch.are_deterministic_algorithms_enabled()
            return tensor if filled or tensor.dtype != torch.int32 else tensor.fill_(value)

        monkeypatch.setattr(torch, "empty", lambda *a, dirty=dirty, **n: dirty(real(*a, **n)))
        monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, dirty=dirty, **n: dirty(real_new(*a, **n)))
        for seed in seeds:
            assert examine(stage, seed, SCOPE, shrink_seconds=0.0), (value, seed)
