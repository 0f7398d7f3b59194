"""The tile prefix sum against the sentence of the contract that defines it, computed row by row."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from keysieve.reference.tile_offsets import tile_offsets

LENGTHS = st.one_of(st.integers(-3, 600), st.sampled_from([-(2**31), 0, 1, 127, 128, 129, 2048, 2049, 5000, 2**31 - 1]))


@given(
    next_n=st.integers(1, 8),
    requests=st.integers(0, 12),
    topk=st.sampled_from([1, 128, 2048, 4096]),
    score_all=st.booleans(),
    data=st.data(),
)
def test_offsets_counts_and_tallies(
    next_n: int, requests: int, topk: int, score_all: bool, data: st.DataObject
) -> None:
    max_context = 4096
    lens = data.draw(st.lists(LENGTHS, min_size=next_n * requests, max_size=next_n * requests))
    found = tile_offsets(torch.tensor(lens, dtype=torch.int32), next_n, topk, max_context, score_all=score_all)
    seen = [0 if n > max_context else max(n, 0) for n in lens]
    begin = 0
    for r in range(requests):
        assert found.offsets[r] == begin
        longest = max(seen[r * next_n : (r + 1) * next_n])
        begin += 0 if longest <= topk and not score_all else math.ceil(longest / 128)
    assert found.offsets[-1] == begin
    assert found.offsets.dtype == found.counts.dtype == torch.int32
    assert found.counts.tolist() == [min(n, topk) for n in seen]
    assert found.refused == sum(n > max_context for n in lens)
    assert found.empty == sum(n == 0 for n in seen)
    assert found.short == sum(0 < n <= topk for n in seen)


def test_the_compact_layout_of_three_requests() -> None:
    """Two rows a request: 300 keys (3 tiles), one that fits topk and is not scored, 129 keys (2 tiles)."""
    lens = torch.tensor([300, 17, 100, 0, -1, 129], dtype=torch.int32)
    assert tile_offsets(lens, 2, 100, 1 << 20).offsets.tolist() == [0, 3, 3, 5]
    assert tile_offsets(lens, 2, 100, 1 << 20, score_all=True).offsets.tolist() == [0, 3, 4, 6]
