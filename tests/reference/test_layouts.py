"""The compact and pitched layouts, element by element against their definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keysieve import KeysieveError, spec
from keysieve.reference.keys import key16
from keysieve.reference.layouts import (
    compact_layout,
    pack_compact,
    pack_pitched,
    row_tops,
    unpack_compact,
    unpack_pitched,
)

LENGTH = st.one_of(st.integers(-2, 400), st.sampled_from((0, 1, 127, 128, 129, 255, 256, 257)))


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], int, int, torch.Tensor]:
    """Lengths, next_n, topk and logits of a step."""
    next_n = draw(st.integers(1, 8))
    requests = draw(st.integers(0, 4))
    lengths = [draw(LENGTH) for _ in range(requests * next_n)]
    topk = draw(st.sampled_from((1, 64, 128, 200, 500)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits = torch.randn(len(lengths), max(1, *lengths, 1), generator=generator).to(torch.bfloat16)
    return lengths, next_n, topk, logits


@settings(max_examples=150)
@given(steps())
def test_compact_layout_is_the_formula(case: tuple[list[int], int, int, torch.Tensor]) -> None:
    lengths, n, topk, logits = case
    layout = compact_layout(lengths, n, topk)
    tiles = []
    for r in range(len(lengths) // n):
        longest = max(lengths[r * n : r * n + n])
        tiles.append(0 if longest <= topk else (longest + 127) // 128)
    assert layout.elements == n * 128 * sum(tiles)
    packed, tops = pack_compact(logits, layout, fill=7.0, tops_fill=3)
    assert packed.dtype == torch.bfloat16
    assert tops.dtype == torch.uint16
    assert (packed.numel(), tops.numel()) == (layout.elements, layout.elements // 8)
    written = torch.full((layout.elements,), 7.0, dtype=torch.bfloat16)
    for r, count in enumerate(tiles):
        for j in range(n):
            t = r * n + j
            start = 128 * (n * sum(tiles[:r]) + j * count)
            assert layout.starts[t] == start
            for g in range(count * 16):
                inside = logits[t, g * 8 : min(g * 8 + 8, max(lengths[t], 0))]
                want = int(key16(inside).max()) if inside.numel() else 3
                assert int(tops[start // 8 + g].to(torch.int32)) == want
            if count:
                written[start : start + max(lengths[t], 0)] = logits[t, : max(lengths[t], 0)]
    assert torch.equal(packed, written)
    back = unpack_compact(packed, layout, logits.shape[1])
    for t, length in enumerate(lengths):
        kept = max(length, 0) if tiles[t // n] else 0
        assert torch.equal(back[t, :kept], logits[t, :kept])
        assert bool((back[t, kept:] == -torch.inf).all())


@settings(max_examples=60)
@given(steps(), st.integers(0, 2))
def test_pitched_layout(case: tuple[list[int], int, int, torch.Tensor], more: int) -> None:
    lengths, _, _, logits = case
    pitch = spec.pitch_of(max(lengths, default=0)) + 512 * more
    packed = pack_pitched(logits, torch.tensor(lengths, dtype=torch.int32), pitch, fill=9.0)
    assert packed.numel() == len(lengths) * pitch
    for t, length in enumerate(lengths):
        row = packed[t * pitch : (t + 1) * pitch]
        kept = max(length, 0)
        assert torch.equal(row[:kept], logits[t, :kept])
        assert bool((row[kept:] == 9.0).all())
    back = unpack_pitched(packed, lengths, pitch, logits.shape[1])
    for t, length in enumerate(lengths):
        assert torch.equal(back[t, : max(length, 0)], logits[t, : max(length, 0)])
        assert bool((back[t, max(length, 0) :] == -torch.inf).all())


def test_tops_of_special_values() -> None:
    row = torch.tensor([torch.nan] * 8 + [-torch.inf] * 8 + [-0.0, -1.0, *[torch.nan] * 6] + [torch.nan, -2.0])
    assert row_tops(row.to(torch.bfloat16)).tolist() == [0x003F, 0x007F, 0x8000, 0x3FFF]


@pytest.mark.parametrize("pitch", [100, 512 + 8, 512])
def test_a_pitch_that_does_not_hold_the_rows_is_refused(pitch: int) -> None:
    with pytest.raises(KeysieveError, match="pitch"):
        pack_pitched(torch.zeros(1, 600, dtype=torch.bfloat16), [600], pitch)


def test_rows_that_are_not_whole_requests_are_refused() -> None:
    with pytest.raises(KeysieveError, match="next_n"):
        compact_layout([1, 2, 3], 2, 1)
