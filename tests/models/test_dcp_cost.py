"""The exchange's cost model finds the coefficients that made its records, and its error covers what they scatter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keysieve.bench import dcp_model as cost
from keysieve.spec import default_topn


def records(noise: float, seed: int = 0) -> list[dict[str, Any]]:
    """Lines as `dcp` and `dcp_virtual` write them, from coefficients that are known here."""
    draw = np.random.default_rng(seed)
    lines: list[dict[str, Any]] = []
    for world in cost.WORLDS:
        for rows in cost.ROWS:
            kilopairs = cost.pairs_of(world) * world * cost.waves(rows) / 1000
            push, merge = 0.5 + 0.3 * kilopairs, 2.0 + 0.9 * kilopairs + 0.05 * world
            near, far = draw.normal(0, noise, 2)
            common = {"world": world, "requests": rows, "topn": default_topn(2048, world)}
            extra = {"transport": "one device", "offer_us": 5.0, "push_us": 5.0 + push}
            lines.append({**common, **extra, "op": "merge", "us": merge + near})
            if world == 2:
                link = 1.2 + cost.link_bytes(2, rows) / 0.35e6
                us = push + merge + link + far
                lines.append({**common, "op": "exchange", "transport": "nvlink", "us": us, "case": f"{rows}x32K"})
    for world, us in ((1, 150.0), (2, 80.0)):
        lines.append({"op": "dcp_step", "case": "64x128K", "world": world, "requests": 64, "us": us})
    lines.append({**lines[-1], "late_rank": 1, "us": 1000.0})
    return lines


def test_coefficients_are_found_again() -> None:
    found = cost.model(records(0.0))
    assert found.push.values == pytest.approx((0.5, 0.3))
    assert found.merge.values == pytest.approx((2.0, 0.9, 0.05))
    assert found.link.values == pytest.approx((1.2, 1 / 0.35))
    assert found.error < 1e-6
    assert found.added(2, 64) == pytest.approx(found.measured[2, 64])


def test_the_error_covers_most_of_the_scatter() -> None:
    truth = cost.model(records(0.0))
    inside = total = 0
    for seed in range(20):
        found = cost.model(records(0.3, seed))
        for world in cost.WORLDS:
            for rows in cost.ROWS:
                total += 1
                inside += abs(found.added(world, rows) - truth.added(world, rows)) <= found.error
    assert inside / total > 0.9


def test_a_world_left_out_is_expected_from_the_others() -> None:
    assert cost.model(records(0.0), left_out=8).added(8, 128) == pytest.approx(cost.model(records(0.0)).added(8, 128))


def test_the_table_and_the_figure_are_made(tmp_path: Path) -> None:
    lines = records(0.1)
    found = cost.model(lines)
    assert len(cost.table(found).splitlines()) == 2 + len(cost.ROWS)
    cost.draw(found, lines, tmp_path / "scaling.svg")
    assert "<svg" in (tmp_path / "scaling.svg").read_text()
