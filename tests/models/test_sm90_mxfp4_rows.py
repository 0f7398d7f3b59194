"""The order of columns where a lane of a quad has all heads of one row, against the FP8 scorer's of the same shapes."""

import pytest

from keysieve.kernels.sm90_mxfp4_config import KERNEL, by_rows, product_column, request_column, shape_of
from keysieve.kernels.sm90_score_config import PART, SET, ScoreConfig

SHAPES = [(32, 4), (64, 4), (32, 8), (64, 8)]


@pytest.mark.parametrize(("heads", "next_n"), SHAPES)
def test_a_lane_has_all_heads_of_one_row(heads: int, next_n: int) -> None:
    """Column `8 b + 2 q + v` of a chunk is row `SET set + q`, head `PART part + 2 b + v`: FP8's boxes of queries."""
    config = ScoreConfig("mxfp4", heads, next_n, "compact", "float32")
    assert by_rows(config)
    assert shape_of(config).by_rows
    parts = heads // PART
    for column in range(config.columns):
        chunk, within = divmod(column, SET * PART)
        rows, part = divmod(chunk, parts)
        row = SET * rows + within // 2 % 4
        head = PART * part + within // 8 * 2 + within % 2
        assert request_column(config, column) == row * heads + head
        assert product_column(config, row * heads + head) == column


@pytest.mark.parametrize(("heads", "next_n"), SHAPES)
def test_weights_stand_where_lanes_read_them(heads: int, next_n: int) -> None:
    """Word by word the order of `halve_weights` for such rows, from the one that `scale_weights` gives any columns."""
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
    from keysieve.kernels.sm90_score_weights import column_by_rows

    config = ScoreConfig("mxfp4", heads, next_n, "compact", "float32")
    for word in range(config.columns):
        held = ((word >> 4) * 2 + ((word >> 1) & 1)) * 8 + ((word >> 2) & 3) * 2 + (word & 1)
        chunk, within = divmod(word, SET * PART)
        assert request_column(config, held) == column_by_rows(within, chunk, heads)


def test_no_other_shape_is_cut_so() -> None:
    for config in KERNEL.admitted("sm_90a"):
        assert shape_of(config).by_rows == by_rows(config) == ((config.heads, config.next_n) in SHAPES)
