"""Candidate rows: their bytes, and that they hold a rank's best keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keysieve as ks
from keysieve.reference.local_topk import entries_of, pack_candidates, unpack_candidates
from keysieve.spec import candidate_words, index_planes

from .slow import best, keys_of, pack, signed


def test_golden_words() -> None:
    """Two entries and one empty place, written out by hand: 0 at index 5, and 1.0 at index 0x1_0003."""
    keys = torch.tensor([[0x8000, 0xBF80, 0]])
    local = torch.tensor([[5, 0x10003, -1]])
    words = pack_candidates(keys, local, planes=2)
    assert [w & 0xFFFFFFFF for w in words[0].tolist()] == [0x8000FFFA, 0xBF80FFFC, 0, 0b10, 0]
    assert words.dtype == torch.int32


@given(st.data())
def test_packing_is_the_contract_and_comes_back(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 100))
    planes = data.draw(st.integers(1, 4))
    count = data.draw(st.integers(0, n))
    local = sorted(data.draw(st.sets(st.integers(0, (1 << (16 + planes)) - 1), min_size=count, max_size=count)))
    keys = data.draw(st.lists(st.integers(0x3F, 0xFF80), min_size=count, max_size=count))
    rest = n - count
    words = pack_candidates(torch.tensor([keys + [0] * rest]), torch.tensor([local + [-1] * rest]), planes)
    assert words.shape == (1, candidate_words(n, planes))
    assert words[0].tolist() == signed(pack(list(zip(keys, local, strict=True)), n, planes))
    got_keys, got_local = unpack_candidates(words, planes)
    assert got_keys[0].tolist() == keys + [0] * rest
    assert got_local[0].tolist() == local + [-1] * rest


def test_the_number_of_entries_follows_from_the_width() -> None:
    for planes in (1, 2, 5, 10):
        widths = [candidate_words(n, planes) for n in range(1, 4097)]
        assert [entries_of(w, planes) for w in widths] == list(range(1, 4097))
    with pytest.raises(ks.KeysieveError, match="words"):
        entries_of(1, 1)
    with pytest.raises(ks.KeysieveError, match="words"):
        entries_of(34, 1)  # 32 entries take 33 words, 33 entries take 35


def _assert_rows(logits: torch.Tensor, lens: list[int], n: int, planes: int) -> None:
    words, counts = ks.local_topk(logits, torch.tensor(lens, dtype=torch.int32), n, planes=planes)
    assert words.dtype == torch.int32
    assert counts.dtype == torch.int32
    for row, length in enumerate(lens):
        expected = best([(key, i) for i, key in enumerate(keys_of(logits[row][: max(length, 0)]))], n)
        assert counts[row] == len(expected) == min(n, max(length, 0))
        assert words[row].tolist() == signed(pack(expected, n, planes))


@given(st.data())
def test_a_row_holds_the_best_keys(data: st.DataObject) -> None:
    width = data.draw(st.integers(0, 70))
    rows = data.draw(st.integers(1, 3))
    values = data.draw(
        st.sampled_from(
            [(0.0, 1.0), (0.0, -0.0, float("nan"), float("inf"), float("-inf"), 2.0), (3.0,), (-1.0, 0.5, 7)]
        )
    )
    scores = [data.draw(st.lists(st.sampled_from(values), min_size=width, max_size=width)) for _ in range(rows)]
    lens = [data.draw(st.integers(-1, width)) for _ in range(rows)]
    logits = torch.tensor(scores, dtype=torch.float32).reshape(rows, width).bfloat16()
    _assert_rows(logits, lens, data.draw(st.integers(1, 40)), data.draw(st.integers(1, 2)))


@pytest.mark.parametrize(("length", "planes"), [(65536, 1), (65537, 1), (131072, 1), (131073, 2), (200_000, 2)])
def test_indices_past_sixteen_bits(length: int, planes: int) -> None:
    """Winners on both sides of every plane boundary, in a row of ties."""
    assert index_planes(length) == planes
    logits = torch.zeros(1, length).bfloat16()
    planted = [0, 65535, 65536, 131071, 131072, 196607, 196608, length - 1]
    logits[0, [p for p in planted if p < length]] = 1.0
    _assert_rows(logits, [length], 16, planes)


def test_rows_longer_than_the_planes_reach_are_refused() -> None:
    logits = torch.zeros(1, 131073).bfloat16()
    with pytest.raises(ks.KeysieveError, match=r"planes: got 1 .*131072"):
        ks.local_topk(logits, torch.tensor([131073]), 4, planes=1)


def test_a_strided_row_view_and_no_rows() -> None:
    wide = torch.randn(3, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    _assert_rows(wide[:, 8:40], [32, 0, 31], 8, 1)
    words, counts = ks.local_topk(wide[:0], torch.zeros(0, dtype=torch.int32), 8)
    assert words.shape == (0, 9)
    assert counts.shape == (0,)


@pytest.mark.parametrize(("n", "planes", "named"), [(0, 1, "n"), (4097, 1, "n"), (4, 0, "planes"), (4, 11, "planes")])
def test_bad_sizes_are_refused(n: int, planes: int, named: str) -> None:
    with pytest.raises(ks.KeysieveError, match=named):
        ks.local_topk(torch.zeros(1, 4).bfloat16(), torch.tensor([4]), n, planes=planes)
