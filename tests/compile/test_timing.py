"""Arithmetic of timing and the shape of a record."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from keysieve.bench import timing
from keysieve.checks import KeysieveError

MEASURED = {"op": "score", "case": "32x128K", "us": 143.12345, "us_min": 143.0, "us_max": 144.0, "cached": False}
WHERE = {"device": "a card", "arch": "sm_90a"}


def test_a_record_has_the_fields_of_the_measurements_page(tmp_path: Path) -> None:
    line = json.loads(timing.Record(**MEASURED, **WHERE, exact=True, limit_us=131.9, extra={"sms": 132}).line())
    assert list(line) == [
        *("date", "device", "arch", "op", "case", "requests", "keys", "next_n", "heads", "topk", "format", "numerics"),
        *("world", "us", "us_min", "us_max", "limit_us", "peers", "exact", "cached", "versions", "commit", "sms"),
    ]
    assert line["us"] == 143.123
    path = tmp_path / "new" / "records.jsonl"
    record = timing.Record(**MEASURED, **WHERE, exact=True)
    timing.append(path, record)
    timing.append(path, record, record)
    assert [json.loads(text)["op"] for text in path.read_text().splitlines()] == ["score"] * 3


def test_no_record_without_a_green_gate() -> None:
    for gate in (False, None, 1):
        with pytest.raises(KeysieveError, match="exact"):
            timing.Record(**MEASURED, **WHERE, exact=gate)  # type: ignore[arg-type]  # refused on purpose
    with pytest.raises(KeysieveError, match="op: got 'attention'"):
        timing.Record(**{**MEASURED, "op": "attention"}, **WHERE, exact=True)
    with pytest.raises(KeysieveError, match="extra: got"):
        timing.Record(**MEASURED, **WHERE, exact=True, extra={"us": 1}).line()


def test_median_and_extremes() -> None:
    found = timing.summarise([5.0, 1.0, 9.0, 2.0, 3.0, 4.0, 8.0, 7.0, 6.0], 12, False)
    assert (found.us, found.us_min, found.us_max, found.replays) == (5.0, 1.0, 9.0, 9)
    with pytest.raises(KeysieveError, match="at least 9"):
        timing.summarise([1.0] * 8, 12, False)


@pytest.mark.parametrize(
    ("sets", "wanted", "count"), [(1, 12, 12), (5, 12, 15), (7, 1, 14), (12, 12, 12), (40, 12, 40)]
)
def test_iterations_are_whole_rounds_over_the_sets(sets: int, wanted: int, count: int) -> None:
    assert timing.iterations_for(sets, wanted) == count


def test_sets_exceed_three_caches() -> None:
    l2 = 50 << 20
    for size in (1 << 20, 17 << 20, 150 << 20, 151 << 20):
        sets = timing.sets_for(size, l2, most=1000)
        assert not timing.is_cached(sets, size, l2)
        assert sets == 2 or timing.is_cached(sets - 1, size, l2)  # never one set alone
    assert timing.is_cached(timing.sets_for(4096, l2), 4096, l2)  # too small for 64 sets: the record says so


def test_host_time_excludes_the_drain() -> None:
    drained = []
    found = timing.host_time(
        lambda: None, calls=50, rounds=9, drain=lambda: time.sleep(0.002) or drained.append(1), warmup_seconds=0.0
    )
    assert len(drained) == 10
    assert found.us < 40  # 2 ms of draining over 50 calls would be 40 us


def test_the_commit_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(timing.COMMIT_ENV, "abc123")
    assert timing.commit() == "abc123"
    assert {"python", "torch"} <= set(timing.versions())
