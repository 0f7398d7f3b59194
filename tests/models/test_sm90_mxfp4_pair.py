"""Where the columns of two rows of a request lie when they are side by side in a quad of lanes."""

import pytest

from keysieve.kernels.sm90_mxfp4_config import product_column, request_column, side_by_side
from keysieve.kernels.sm90_score_config import ScoreConfig


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_a_lane_has_half_the_heads_of_one_row(heads: int) -> None:
    """Lane `2 row + half` of a quad, whose columns are `8 b + 2 lane + v`, holds the heads `8 i + 4 half + 0..3`; its
    pairs of blocks `2 i`, `2 i + 1` are the heads' chains of `sm90_score_products`, i ascending."""
    config = ScoreConfig("mxfp4", heads, 2, "compact", "float32")
    assert side_by_side(config)
    seen = set()
    for lane in range(4):
        row, half = lane >> 1, lane & 1
        for block in range(2 * heads // 8):
            for v in range(2):
                head = 8 * (block // 2) + 4 * half + 2 * (block % 2) + v
                column = 8 * block + 2 * lane + v
                assert product_column(config, row * heads + head) == column
                assert request_column(config, column) == row * heads + head
                seen.add(column)
    assert seen == set(range(2 * heads))


@pytest.mark.parametrize(("heads", "next_n"), [(32, 1), (64, 1), (8, 3), (16, 4), (32, 5)])
def test_other_shapes_keep_their_columns(heads: int, next_n: int) -> None:
    config = ScoreConfig("mxfp4", heads, next_n, "compact", "float32")
    assert not side_by_side(config)
    assert all(product_column(config, c) == c == request_column(config, c) for c in range(config.columns))
