"""The exchange's cost model finds the coefficients that made its records, and its error covers what they scatter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keysieve.bench import dcp_model as cost
from keysieve.checks import KeysieveError
from keysieve.spec import default_topn

ALONE, LINK = (2.5, 0.7, 1.8, 0.05), (1.2, 1 / 0.35)


def records(noise: float, seed: int = 0) -> list[dict[str, Any]]:
    """Lines as `dcp` and `dcp_virtual` write them, from coefficients that are known here."""
    draw = np.random.default_rng(seed)
    lines: list[dict[str, Any]] = []
    for world in cost.WORLDS:
        for rows in cost.ROWS:
            pairs, later = cost.pairs_of(world), max(0.0, rows / 132 - 1)
            work = pairs * world * rows / 1e5
            alone = ALONE[0] + ALONE[1] * work + ALONE[2] * pairs * world * later / 1000 + ALONE[3] * world
            near, far, apart = draw.normal(0, noise, 3)
            common = {"world": world, "requests": rows, "topn": default_topn(2048, world)}
            one = {"op": "merge", "transport": "one device"}
            lines.append({**common, **one, "kind": cost.CHAIN, "us": alone * (1 + near / 5)})
            lines.append({**common, **one, "us": 99.0})
            lines.append({**common, **one, "us": 99.0, "kind": "throughput form"})
            left = LINK[0] + LINK[1] * rows * pairs * 16 * (world // 2) ** 2 / 1e6
            lines.append({**common, "op": "merge", "transport": "two devices", "us": left + apart})
            if world == 2:
                us = alone + LINK[0] + LINK[1] * rows * pairs * 16 / 1e6 + far
                lines.append({**common, "op": "exchange", "transport": "nvlink", "us": us, "case": f"{rows}x32K"})
    for world, us in ((1, 150.0), (2, 80.0)):
        lines.append({"op": "dcp_step", "case": "64x128K", "world": world, "requests": 64, "us": us})
    lines.append({**lines[-1], "late_rank": 1, "us": 1000.0})
    for world, us in ((2, 76.0), (4, 40.0), (8, 22.0)):
        lines.append({**lines[-2], "world": world, "virtual": "fed by itself", "us": us})
    return lines


def test_coefficients_are_found_again() -> None:
    found = cost.model(records(0.0))
    assert found.alone.values == pytest.approx(ALONE)
    assert found.link.values == pytest.approx(LINK)
    assert found.error(8, 64) < 1e-6
    assert found.added(2, 64) == pytest.approx(found.measured[2, 64])


def test_the_error_covers_most_of_the_scatter() -> None:
    truth = cost.model(records(0.0))
    inside = total = 0
    for seed in range(20):
        found = cost.model(records(0.3, seed))
        for world in cost.WORLDS:
            for rows in cost.ROWS:
                total += 1
                inside += abs(found.added(world, rows) - truth.added(world, rows)) <= found.error(world, rows)
    assert inside / total > 0.9


def test_a_step_is_one_rank_s_and_the_link() -> None:
    lines = records(0.0)
    found, steps = cost.model(lines), cost.steps_of(lines)
    assert steps["64x128K"].measured == {1: 150.0, 2: 80.0}
    expected = steps["64x128K"].expected(found)
    assert expected[8] == pytest.approx(22.0 + LINK[0] + LINK[1] * cost.link_megabytes(8, 64))
    assert steps["64x128K"].efficiency(8, expected[8]) == pytest.approx(150 / 8 / expected[8])
    assert "| 64x128K | 2 | 80.0 | 76.0 | " in cost.step_table(found, steps)


def test_a_world_left_out_is_expected_from_the_others() -> None:
    assert cost.model(records(0.0), left_out=8).added(8, 128) == pytest.approx(cost.model(records(0.0)).added(8, 128))


def test_the_table_and_the_figure_are_made(tmp_path: Path) -> None:
    lines = records(0.1)
    found = cost.model(lines)
    assert len(cost.table(found).splitlines()) == 2 + len(cost.ROWS)
    cost.draw(found, lines, tmp_path / "scaling.svg")
    assert "<svg" in (tmp_path / "scaling.svg").read_text()


def test_records_without_a_rank_alone_are_refused() -> None:
    lines = [line for line in records(0.0) if line.get("kind") != cost.CHAIN]
    with pytest.raises(KeysieveError, match="no lines of chain"):
        cost.model(lines)


def test_times_over_links_of_other_code_are_left_out() -> None:
    lines = records(0.0)
    others = [{**line, "us": 99.0, "commit": "older"} for line in lines if line["op"] == "exchange"]
    found = cost.model([*lines, *others])
    assert found.link.values == pytest.approx(LINK)
    alone = cost.model([line for line in lines if line["op"] != "exchange"])
    assert alone.link.values == pytest.approx(LINK)
    assert alone.measured == {}
