"""When a known form's launches are prepared, and what launches before, after, and where that fails: a faked device."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from faked_gpu import Device, arguments, build, call, moved

import keysieve as ks
from keysieve import relaunch, repeats
from keysieve.driver import DriverError
from keysieve.relaunch import Launches
from keysieve.repeats import ADDRESSES

USUAL = arguments() | {"positions": False}
FORMS = {"usual": USUAL, "any": arguments(), "new buffers": USUAL | {"out": None, "counts": None}}


class Preparing:
    """In place of Launches.prepared: counts, and answers with a launch function of its own, or None."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
        self.launched: list[tuple[int, ...]] = []
        self.refuses = False
        self.capturing = False

    def __call__(self, *args: Any) -> Callable[..., None] | None:
        self.asked.append(args)  # type: ignore[arg-type]  # as they are
        if self.refuses:
            return None

        def launch(*addresses: int) -> None:
            self.launched.append(addresses)

        return launch


@pytest.fixture
def preparing(monkeypatch: pytest.MonkeyPatch) -> Preparing:
    made = Preparing()
    monkeypatch.setattr(Launches, "prepared", lambda _launches, *args: made(*args))
    monkeypatch.setattr(repeats, "PREPARED_AFTER", 3)
    monkeypatch.setattr(repeats, "capturing", lambda: made.capturing)
    return made


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    made.install(monkeypatch)
    return made


def addresses_of(given: dict[str, Any], filled: ks.Selection) -> tuple[int, ...]:
    tensors = given | {"cache": given["cache"].data, "words": None, "out": filled.rows, "counts": filled.counts}
    return tuple(getattr(tensors[name], "data_ptr", lambda: 0)() for name in ADDRESSES)


@pytest.mark.parametrize("form", FORMS)
def test_after_some_repeats_the_prepared_launches_are_made(device: Device, preparing: Preparing, form: str) -> None:
    indexer, given = build(), FORMS[form]
    for _ in range(4):  # checked, and three repeats
        assert not preparing.launched
        filled = call(indexer, given)
    assert len(device.launched) == 8
    ((addresses, aligned, index),) = preparing.asked
    assert addresses == addresses_of(given, filled)
    assert dict(zip(ADDRESSES, aligned, strict=True)) == dict.fromkeys(ADDRESSES, 2) | {"query": 16, "cache": 16}
    assert index == 0
    other = given | {"weights": given["weights"].clone(), "query": moved(given["query"], 16).view(given["query"].dtype)}
    for asked in (other, given, other):
        filled = call(indexer, asked)
        assert asked["out"] is None or filled.rows is asked["out"]
        assert preparing.launched.pop() == (*addresses_of(asked, filled), 0)
    assert len(device.launched) == 8
    assert len(preparing.asked) == 1


@pytest.mark.parametrize("form", FORMS)
def test_where_nothing_can_be_prepared_it_goes_on_as_before(device: Device, preparing: Preparing, form: str) -> None:
    indexer, given = build(), FORMS[form]
    preparing.refuses = True
    for _ in range(9):
        call(indexer, given)
    assert len(preparing.asked) == 1
    assert len(device.launched) == 18


class NoStream:
    """A driver that cannot make a stream, for this reason."""

    def __init__(self, reason: Exception) -> None:
        self.reason = reason

    def new_stream(self) -> int:
        raise self.reason


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("reason", [DriverError, ValueError, MemoryError])
def test_a_preparation_that_fails_is_told_once(
    device: Device, monkeypatch: pytest.MonkeyPatch, early: bool, reason: type[Exception]
) -> None:
    """At the caller's line; not where no graph was to be expected. Steps go on, whatever the reason."""
    monkeypatch.setattr(repeats, "PREPARED_AFTER", 2)
    monkeypatch.setattr(relaunch, "driver", lambda: NoStream(reason("cuStreamCreate failed with 2")))
    monkeypatch.setattr(relaunch, "_capture_streams", {})
    indexer = build(early_release=early)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # of a file that an earlier test forgot
        for _ in range(6):
            call(indexer, FORMS["usual"])
    assert [w.category for w in told] == [RuntimeWarning] * (not early)
    assert all("cuStreamCreate failed with 2" in str(w.message) and "faked_gpu" in w.filename for w in told)
    assert len(device.launched) == 12


@pytest.mark.usefixtures("device")
def test_nothing_is_prepared_during_a_capture(preparing: Preparing) -> None:
    indexer, given = build(), FORMS["usual"]
    preparing.capturing = True
    for _ in range(9):
        call(indexer, given)
    assert not preparing.asked
    preparing.capturing = False
    call(indexer, given)
    assert len(preparing.asked) == 1
    call(indexer, given)
    assert len(preparing.launched) == 1


def test_another_stream_takes_its_turn_first(device: Device, preparing: Preparing) -> None:
    """Steps of a stream that was not the last one's are ordered, and launched by host functions; the next is not."""
    indexer, given = build(), FORMS["usual"]
    for _ in range(5):
        call(indexer, given)
    assert len(preparing.launched) == 1
    before = len(device.launched)
    device.stream = 7
    call(indexer, given)
    assert device.waits == [(7, 0)]
    assert (len(preparing.launched), len(device.launched)) == (1, before + 2)
    call(indexer, given)
    assert preparing.launched[-1][-1] == 7
    assert len(device.launched) == before + 2


@pytest.mark.usefixtures("device", "preparing")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [2, 6])
def test_a_dropped_indexer_leaves_nothing_behind(form: str, steps: int) -> None:
    indexer, given = build(), FORMS[form]
    for _ in range(steps):
        call(indexer, given)
    workspace = weakref.ref(indexer._runner)
    gc.collect()
    gc.disable()
    try:
        del indexer
        assert workspace() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("device")
def test_early_release_keeps_its_kernels_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that follows a graph waits for all of it."""
    seen = []
    real = Launches.prepared

    def prepared(launches: Launches, *args: Any) -> Callable[..., None] | None:
        seen.append(launches._in_graph)
        return real(launches, *args)

    monkeypatch.setattr(Launches, "prepared", prepared)
    monkeypatch.setattr(repeats, "PREPARED_AFTER", 1)
    for early in (False, True):
        indexer: ks.DecodeIndexer = build(early_release=early)
        for _ in range(3):
            call(indexer, FORMS["usual"])
    assert seen == [True, False]


@pytest.mark.parametrize(("asked", "after"), [(None, 4), ("", 4), ("1", 4), ("0", 0)])
def test_nothing_is_prepared_where_the_environment_says_so(
    device: Device, monkeypatch: pytest.MonkeyPatch, asked: str | None, after: int
) -> None:
    assert repeats.prepared_after(asked) == after
    monkeypatch.setattr(repeats, "PREPARED_AFTER", after)
    tried: list[object] = []
    monkeypatch.setattr(Launches, "prepared", lambda *given: tried.append(given))
    for form in FORMS.values():
        indexer = build()
        for _ in range(9):
            call(indexer, form)
    assert len(tried) == (len(FORMS) if after else 0)
    assert len(device.launched) == 2 * 9 * len(FORMS)
