"""Steps that a signal's handler ends anywhere, threads that wait for one that prepares a graph, and whoever shows the
warning that none could be made: a faked device."""

from __future__ import annotations

import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from faked_gpu import Device, arguments, build, call
from interrupts import interrupted

from keysieve import relaunch, repeats
from keysieve.driver import DriverError
from keysieve.relaunch import Launches

USUAL = arguments() | {"positions": False}
FORMS = {"usual": USUAL, "any": arguments(), "new buffers": USUAL | {"out": None, "counts": None}}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    made.install(monkeypatch)
    return made


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where it comes in a weakref's callback
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("known", [False, True])
def test_a_step_ended_anywhere_leaves_the_next_one_right(
    device: Device, monkeypatch: pytest.MonkeyPatch, form: str, known: bool
) -> None:
    monkeypatch.setattr(repeats, "PREPARED_AFTER", 0)
    given, after, came = FORMS[form], 0, True
    indexer = build()
    while came:
        after += 1
        if known and not indexer._known:
            call(indexer, given)
        if not known:
            indexer._known = ()
        came = interrupted(lambda: call(indexer, given), after)
        assert not indexer._runner.lock.locked(), f"the lock was left taken by an interrupt at call {after}"
        device.launched.clear()
        filled = call(indexer, given)
        (_, score), (_, select) = device.launched
        assert given["query"].data_ptr() in score
        assert filled.rows.data_ptr() in select
        assert (score[-1], select[-1]) == (0, 0)
    assert after > 10


@pytest.mark.parametrize("waiting", [1, 2, 3, 8])
@pytest.mark.usefixtures("device")
def test_threads_that_waited_do_not_prepare_again(monkeypatch: pytest.MonkeyPatch, waiting: int) -> None:
    """They hold the function that warms up, and call it when the form has been prepared."""
    monkeypatch.setattr(repeats, "PREPARED_AFTER", 2)
    asked: list[object] = []
    monkeypatch.setattr(Launches, "prepared", lambda *given: asked.append(given))
    indexer = build()
    for _ in range(2):
        call(indexer, USUAL)
    with ThreadPoolExecutor(1 + waiting) as pool:
        with indexer._runner.lock:
            steps = [pool.submit(call, indexer, USUAL) for _ in range(1 + waiting)]
            time.sleep(0.2)  # all wait for the lock now; if not, this shows less, and fails no sooner
        for step in steps:
            step.result()
    assert len(asked) == 1


class NoStream:
    """A driver that cannot make a stream."""

    def new_stream(self) -> int:
        raise DriverError("cuStreamCreate failed with 2")


@pytest.mark.parametrize("form", FORMS)
def test_whoever_shows_the_warning_may_take_a_step(device: Device, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """It is given without the indexer's lock; as an error as well it ends a step that has been launched."""
    monkeypatch.setattr(repeats, "PREPARED_AFTER", 1)
    monkeypatch.setattr(relaunch, "driver", NoStream)
    monkeypatch.setattr(relaunch, "_capture_streams", {})
    indexer, locked = build(), list[bool]()

    def show(*_: object, **__: object) -> None:
        locked.append(indexer._runner.lock.locked())
        if not locked[0]:
            call(indexer, FORMS[form])

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # of a file that an earlier test forgot
        monkeypatch.setattr(warnings, "showwarning", show)
        for _ in range(3):
            call(indexer, FORMS[form])
    assert locked == [False]
    assert len(device.launched) == 8
    indexer = build()
    device.launched.clear()
    call(indexer, FORMS[form])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="no graph could be made"):
            call(indexer, FORMS[form])
    assert not indexer._runner.lock.locked()
    call(indexer, FORMS[form])
    assert len(device.launched) == 6
