"""The gate of ``bench.step``: what it expects is the contract's selection, and a step that differs does not pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from keysieve.bench.step import Expected, expected_from
from keysieve.inputs import Selection

K = 16
LENGTHS = [200, 5, 0, 64, 137, 200]


@pytest.fixture
def expected() -> Expected:
    """Rows of many equal logits over a block table of scattered blocks, next_n 2."""
    draw = torch.Generator().manual_seed(3)
    logits = torch.randint(0, 9, (6, 256), generator=draw).to(torch.bfloat16)
    table = torch.randperm(12, generator=draw).to(torch.int32).view(3, 4)
    made = expected_from(logits, LENGTHS, K, table)
    for row, length in enumerate(LENGTHS):  # a stable order, written out
        order = sorted(range(length), key=lambda p: (-float(logits[row, p]), p))[:K]
        wanted = sorted(order) + [-1] * (K - len(order))
        assert made.positions[row].tolist() == wanted
        assert made.rows[row].tolist() == [p if p < 0 else int(table[row // 2, p // 64]) * 64 + p % 64 for p in wanted]
        assert int(made.counts[row]) == min(K, length)
    return made


def copied(e: Expected) -> Selection:
    return Selection(e.rows.clone(), e.counts.clone(), e.positions.clone())


def test_the_right_step_passes(expected: Expected) -> None:
    expected.compare("case", "a step", copied(expected))
    expected.compare("case", "a step", copied(expected)._replace(positions=None))


def _other_row(got: Selection) -> None:
    got.rows[5, 3] += 64


def _later_position(got: Selection) -> None:
    assert got.positions is not None
    got.positions[4, K - 1] += 1


def _one_key_less(got: Selection) -> None:
    got.counts[5] -= 1


def _not_padded(got: Selection) -> None:
    got.rows[1, K - 1] = 0


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (_other_row, "physical rows in 1 rows, first 5"),
        (_later_position, "positions in 1 rows, first 4"),
        (_one_key_less, "counts in 1 rows, first 5"),
        (_not_padded, "physical rows in 1 rows, first 1"),
    ],
)
def test_a_wrong_step_does_not_pass(expected: Expected, fault: Callable[[Selection], None], told: str) -> None:
    got = copied(expected)
    fault(got)
    with pytest.raises(AssertionError, match=told):
        expected.compare("case", "a step", got)
