"""NaN through the Blackwell scorer's source on the model of the chip: keys, queries and scales of every format."""

from __future__ import annotations

import numpy as np
import pytest
from sm100_block import EVERY_LANE, Case, Device, by_reference, expected, make_case, name
from sm100_source import KERNELS

from keysieve.kernels.sm100_score_config import ScoreConfig, shape_of
from keysieve.spec import CANONICAL_NAN, PAGE, TILE

WITH_NAN = [
    ScoreConfig("fp8_fp32", "fp32", 8, 3, "pitched", "float32"),
    ScoreConfig("fp8_ue8m0", "bf16", 8, 3, "pitched", "float32"),
    ScoreConfig("fp8_fp32", "bf16", 8, 3, "pitched", "bfloat16"),
    ScoreConfig("mxfp4", "bf16", 8, 3, "pitched", "float32"),
    ScoreConfig("mxfp4", "fp32", 8, 3, "pitched", "float32"),
]


def case_with_nan(config: ScoreConfig) -> tuple[Case, set[int]]:
    """A tile with NaN where the format has room for one, and the keys whose logits must be NaN in all rows; row 1's
    query has one too, in a single head."""
    case = make_case(config, (1,), seed=11)
    case.lengths[:] = TILE - np.arange(config.next_n)
    form = config.format
    first, second = (case.pages[page] for page in case.table[0])
    if config.key_format == "mxfp4":
        first[form.scale_offset + 4 * 5 + 2] = 255  # key 5, its third block
        second[form.scale_offset + 4 * 9] = 255
        case.words[1, 2, 3] = 255
        return case, {5, PAGE + 9}
    first[5 * config.row_bytes + 77] = 0x7F
    second[9 * config.row_bytes] = 0xFF
    case.query[1, 2, 100] = 0x7F
    scale = second[form.scale_offset + 4 * 20 :]
    scale[:4] = 255  # a float32 NaN, and UE8M0's
    return case, {5, PAGE + 9, PAGE + 20}


@pytest.mark.parametrize("config", WITH_NAN, ids=name)
def test_nan_codes_and_scales_make_nan_logits(config: ScoreConfig) -> None:
    """A NaN key, query or scale spoils its own logits, canonically, and no other."""
    case, spoilt = case_with_nan(config)
    got = Device(case, shape_of(config), 1, EVERY_LANE).run()
    wanted = by_reference(case) if config.numerics == "bf16" else expected(case)
    np.testing.assert_array_equal(got, wanted)
    for row in range(config.next_n):
        inside = range(int(case.lengths[0, row]))
        assert {key for key in inside if got[row, key] == CANONICAL_NAN} == (set(inside) if row == 1 else spoilt)


@pytest.mark.parametrize(
    ("config", "old", "new"),
    [
        (WITH_NAN[0], "numerics.twice_relu(dots[4 * block + i])", "numerics.max_num(2 * dots[4 * block + i], 0.0)"),
        (WITH_NAN[4], "numerics.max_nan(dots", "numerics.max_num(dots"),
    ],
    ids=["fp8", "mxfp4"],
)
def test_a_relu_that_drops_nan_is_noticed(config: ScoreConfig, old: str, new: str) -> None:
    assert old in (KERNELS / "sm100_score_math.py").read_text()
    case, _ = case_with_nan(config)
    got = Device(case, shape_of(config), 1, EVERY_LANE, edits=((old, new),)).run()
    assert (got != expected(case)).any()
