"""Limits and targets are those of the device they were measured on, and of no other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keysieve.bench import dcp, figures, host, limits, report, score, select, step, timing

MEASUREMENTS = Path(__file__).resolve().parents[2] / "docs" / "measurements"
OTHERS = ("NVIDIA H100 80GB HBM3", "NVIDIA H200 NVL", "NVIDIA B200", "")


def recorded(name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (MEASUREMENTS / name).read_text().splitlines()]
    return [line for line in lines if line["device"] == limits.H200]


def record(**changes: Any) -> timing.Record:
    given: dict[str, Any] = {
        "op": "step",
        "case": "1x4K",
        "us": 10.0,
        "us_min": 9.5,
        "us_max": 11.0,
        "exact": True,
        "cached": False,
        "device": "",
        "arch": "sm_90a",
        "heads": 32,
        "extra": {
            "must_reach_us": None,
            "parts_alone_us": {"score": 4.0, "select": 5.0, "select_in_l2": 4.5},
            "host_us": 7.0,
        },
    }
    return timing.Record(**given | changes)


def test_rates_are_given_by_the_devices_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (limits.H200, *OTHERS):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_, name=name: name)
        rates = limits.rates_of(torch.device("cuda", 0))
        assert rates == (limits.Rates(4.27e12, 1.58e15) if name == limits.H200 else None)


def test_what_was_recorded_on_an_h200_is_what_is_computed_for_one() -> None:
    rates = limits.RATES[limits.H200]
    cases = {(c.name, c.heads): c for group in score.CASE_SETS.values() for c in group}
    checked = 0
    for line in recorded("score.jsonl"):
        case = cases.get((line["case"], line["heads"]))
        if case is not None:
            case = replace(case, key_format=line["format"])
            assert limits.rounded(case.limit_us(rates), 2) == line["limit_us"], line["case"]
            checked += 1
    steps = {c.name: c for c in step.CASES}
    for line in recorded("step.jsonl"):
        case = replace(steps[line["case"]], key_format=line["format"])
        assert limits.rounded(case.limit_us(rates), 2) == line["limit_us"], line["case"]
        checked += 1
    assert checked >= 20
    (least,) = {
        line["limit_us"]
        for line in recorded("select.jsonl")
        if (line["case"], line["topk"], line["entry"]) == ("1x1M", 2048, "topk")
    }
    assert select.limit_us(2 * (1 << 20) + 4 * 2048, rates) == least


def test_another_device_has_neither_limit_nor_target() -> None:
    case = step.CASES[0]
    assert case.limit_us(None) is None
    assert select.limit_us(1 << 30, None) is None
    assert limits.rounded(None, 2) is None
    assert step.target_us(limits.H200, case) == step.TARGETS_US[case.name]
    assert step.target_us(limits.H200, replace(step.CASES[5], key_format="mxfp4")) == 35.0
    assert dcp.target_us(limits.H200, 16) == dcp.TARGETS_US[16]
    for name in OTHERS:
        assert step.target_us(name, case) is None
        assert dcp.target_us(name, 16) is None


def test_lines_of_output_with_and_without_a_limit() -> None:
    known = record(limit_us=2.5, extra={**record().extra, "must_reach_us": 7.0})
    assert "must    7.0 over" in step.told(known)
    assert "limit 2.5 host" in step.told(known)
    assert "must" not in step.told(record())
    assert "limit - host" in step.told(record())
    assert "limit    2.5 ( 25%)" in score.told(known)
    assert "limit      - (   -)" in score.told(record())


def test_records_without_a_limit_are_tabled_and_drawn_over(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="pictures need matplotlib")
    lines = [
        record(op=op, case=case, limit_us=limit, device="a GPU", requests=1, topk=2048, format="fp8_fp32").line()
        for op in ("score", "step")
        for case, limit in (("1x4K", None), ("8x128K", 30.0))
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    measured = report.read([tmp_path / "a.jsonl"])
    assert [row[-1] for row in report.table(measured.of("a GPU", "step"))] == ["of limit", "", "300 %"]
    figure, axes = pyplot.subplots()
    assert [line["case"] for line in figures.by_batch(measured, axes)] == ["8x128K", "8x128K"]
    pyplot.close(figure)


@pytest.mark.parametrize("topic", [score, select, step, host, dcp], ids=lambda topic: topic.__name__)
def test_a_place_that_cannot_be_written_is_refused_before_the_device_is_asked(
    topic: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object) -> int:
        raise AssertionError("the device was asked first")

    monkeypatch.setattr(torch.cuda, "current_device", asked)
    with pytest.raises(ValueError, match=r"--out: got .* \(Is a directory\)"):
        topic.main(["--out", str(tmp_path)])
