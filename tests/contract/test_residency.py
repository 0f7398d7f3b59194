"""What is set aside of L2 for results: the bookkeeping, on a device that is made up."""

from __future__ import annotations

import pytest

from keysieve import residency as r
from keysieve.checks import KeysieveError, UnsupportedError


class Made:
    """A device whose driver rounds sizes up to `step` and refuses with `status`."""

    def __init__(self, limit: int, most: int, step: int = 1, status: int = 0) -> None:
        self.now, self.largest, self.step, self.status = limit, most, step, status
        self.resets = 0

    def limit(self) -> int:
        return self.now

    def set_limit(self, size: int) -> int:
        if not self.status:
            self.now = -(-size // self.step) * self.step
        return self.status

    def most(self) -> int:
        return self.largest

    def reset(self) -> int:
        self.resets += 1
        return 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    device = Made(11_796_480, 39_321_600, step=1 << 16)
    found = r.Residency(device)
    monkeypatch.setattr(r, "residency", lambda _index: found)
    monkeypatch.setattr(r.torch.cuda, "device_count", lambda: 1)
    return device


@pytest.mark.usefixtures("made")
def test_the_default_keeps_what_the_driver_sets_aside() -> None:
    from keysieve.kernels.sm90_score_config import KEPT_ROWS

    assert r.residency(0).rows == KEPT_ROWS
    assert r.Residency(Made(0, 0)).rows == 0


def test_a_larger_part_is_kept_and_given_back(made: Made) -> None:
    assert r.keep_results_in_l2(24, 0) == 11.25
    assert made.now == 24 * r.MEGABYTE
    assert r.residency(0).rows == 24 * r.MEGABYTE * 7 // 8 // 288
    assert made.resets == 1, "what had stayed under the old size is let go"
    assert r.keep_results_in_l2(20.01, 0) == 24
    assert r.residency(0).size == made.now, "the size is what the driver made of it"
    r.keep_results_in_l2(0, 0)
    assert made.now == 11_796_480


@pytest.mark.parametrize("given", [-1, float("nan"), float("inf"), 1 << 20, 1e-7, "24", "much", True, None])
def test_what_is_no_size_is_refused(made: Made, given: object) -> None:
    with pytest.raises(KeysieveError, match=r"megabytes.*a size in MiB"):
        r.keep_results_in_l2(given, 0)  # type: ignore[arg-type]
    assert made.now == 11_796_480


def test_more_than_the_device_has_is_refused(made: Made) -> None:
    with pytest.raises(KeysieveError, match=r"got 40.*at most 37\.5"):
        r.keep_results_in_l2(40, 0)
    made.largest = 0  # as under MIG
    with pytest.raises(KeysieveError, match="at most 0 here"):
        r.keep_results_in_l2(1, 0)
    assert made.now == 11_796_480


def test_a_driver_that_refuses_is_named(made: Made) -> None:
    made.status = 215
    with pytest.raises(UnsupportedError, match=r"status 215.*MPS"):
        r.keep_results_in_l2(16, 0)
    assert r.residency(0).size == 11_796_480


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("given", ["cpu", "cuda:1", 1, -1, 3.5, "what"])
def test_what_is_no_device_of_this_process_is_refused(given: object) -> None:
    with pytest.raises(KeysieveError, match=rf"device: got {given}; accepted: a CUDA device, 0 to 0"):
        r.keep_results_in_l2(16, given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, 0, "cuda", "cuda:0"])
def test_a_process_without_devices_is_told(monkeypatch: pytest.MonkeyPatch, given: object) -> None:
    monkeypatch.setattr(r.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(KeysieveError, match="sees none"):
        r.keep_results_in_l2(24, given)  # type: ignore[arg-type]


def test_the_environment_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Made(11_796_480, 39_321_600)
    monkeypatch.setattr(r, "DriverDevice", lambda _index: device)
    r.residency.cache_clear()
    monkeypatch.setenv(r.KEEP_ENV, "16")
    assert r.residency(5).size == 16 << 20
    assert r.residency(5) is r.residency(5)
    r.residency.cache_clear()
    for wanted in ("lots", "1000"):  # no size; more than the device has
        monkeypatch.setenv(r.KEEP_ENV, wanted)
        with pytest.raises(KeysieveError, match=rf"{r.KEEP_ENV}: got '?{wanted}"):
            r.residency(5)
    device.status = 215
    monkeypatch.setenv(r.KEEP_ENV, "16")
    with pytest.raises(UnsupportedError, match=rf"{r.KEEP_ENV}: got driver status 215"):
        r.residency(5)
    r.residency.cache_clear()
