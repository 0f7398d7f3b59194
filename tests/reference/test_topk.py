"""The exact top-k against a full sort by (key16 descending, position ascending)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keysieve import spec
from keysieve.reference import topk
from keysieve.reference.keys import key16
from keysieve.reference.topk import _SHORT, select_positions, threshold16
from keysieve.testing import guarded_rows

NAN = float("nan")


def by_sorting(logits: torch.Tensor, length: int, k: int) -> list[int]:
    """Positions chosen from one row, by the definition."""
    keys = key16(logits[: max(length, 0)]).tolist()
    ranked = sorted(range(len(keys)), key=lambda p: (-keys[p], p))
    return sorted(ranked[:k])


def assert_selects(logits: torch.Tensor, lengths: list[int], k: int) -> None:
    positions, counts = topk(logits, torch.tensor(lengths, dtype=torch.int32), k)
    assert positions.dtype == counts.dtype == torch.int32
    assert positions.shape == (len(lengths), k)
    for t, length in enumerate(lengths):
        want = by_sorting(logits[t], length, k)
        assert counts[t] == len(want) == spec.selected_count(length, k)
        assert positions[t].tolist() == want + [-1] * (k - len(want))


@st.composite
def rows_with_ties(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], int]:
    """Rows from a small alphabet of patterns (ties everywhere), with ragged and padding lengths."""
    width = draw(st.integers(1, 90))
    rows = draw(st.integers(1, 4))
    alphabet = draw(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=6))
    alphabet += draw(st.sampled_from(([], [0x8000, 0x0000], [0x7FC0, 0xFFC0, 0xFF80], [0x7F80])))
    picks = st.lists(st.sampled_from(alphabet), min_size=width, max_size=width)
    patterns = torch.tensor([draw(picks) for _ in range(rows)])
    lengths = draw(st.lists(st.integers(-2, width), min_size=rows, max_size=rows))
    return patterns.to(torch.int16).view(torch.bfloat16), lengths, draw(st.integers(1, 100))


@settings(max_examples=400)
@given(rows_with_ties())
def test_selection_is_the_first_k_of_the_order(case: tuple[torch.Tensor, list[int], int]) -> None:
    assert_selects(*case)


@pytest.mark.parametrize("n", [_SHORT - 1, _SHORT, _SHORT + 1, 50_000])
@pytest.mark.parametrize("k", [1, 511, 2048, 4096])
@pytest.mark.parametrize("kind", ["normal", "plateau", "equal", "low bits", "few values"])
def test_long_rows(n: int, k: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(n + k)
    x = torch.randn(n, generator=generator)
    if kind == "plateau":
        x = torch.where(torch.rand(n, generator=generator) < k / n / 2, x, 0.0)
    elif kind == "equal":
        x = torch.ones(n)
    elif kind == "low bits":
        x = 1 + torch.randint(0, 8, (n,), generator=generator) / 128
    elif kind == "few values":
        x = torch.randint(-3, 4, (n,), generator=generator).to(torch.float32)
    keys = key16(x.to(torch.bfloat16))
    order = torch.sort(keys, descending=True, stable=True).indices[:k]
    assert int(keys[order[-1]]) == threshold16(keys, k)
    assert torch.equal(select_positions(keys, k), order.sort().values)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_rows_of_about_k_keys(extra: int) -> None:
    k = 64
    logits = torch.randn(3, k + 1, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    assert_selects(logits, [k + extra] * 3, k)


def test_what_lies_past_a_row_is_not_read() -> None:
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    poisoned = logits.clone()
    poisoned[0, 300:] = torch.inf
    poisoned[1, 77:] = NAN
    lengths = torch.tensor([300, 77], dtype=torch.int32)
    for mine, theirs in zip(topk(logits, lengths, 50), topk(poisoned, lengths, 50), strict=True):
        assert torch.equal(mine, theirs)


def test_special_values_rank_nan_below_minus_infinity_and_both_are_taken_last() -> None:
    row = torch.tensor([[NAN, -torch.inf, 1.0, -0.0, torch.inf, 0.0, -NAN, -torch.inf]]).to(torch.bfloat16)
    lengths = torch.tensor([8], dtype=torch.int32)
    chosen = [topk(row, lengths, k)[0][0].tolist() for k in range(1, 9)]
    assert chosen[:5] == [[4], [2, 4], [2, 3, 4], [2, 3, 4, 5], [1, 2, 3, 4, 5]]
    assert chosen[5] == [1, 2, 3, 4, 5, 7]
    assert chosen[6] == [0, 1, 2, 3, 4, 5, 7]
    assert chosen[7] == list(range(8))


@settings(max_examples=100)
@given(
    st.integers(0, 6),
    st.sampled_from((None, 1, 3, 100)),
    st.integers(1, 40),
    st.integers(0, 2**31 - 1),
)
def test_physical_rows_follow_the_table(log_page: int, span: int | None, k: int, seed: int) -> None:
    page = 1 << log_page
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 130, generator=generator).to(torch.bfloat16)
    lengths = torch.tensor([130, 7, 0, 64], dtype=torch.int32)
    blocks = -(-130 // page)
    storage = torch.randint(0, 10_000, (2, blocks + 5), generator=generator, dtype=torch.int32)
    table = storage[:, :blocks]
    positions, counts = topk(logits, lengths, k)
    block_rows = page if span is None else page + span
    for owner in (None, torch.tensor([1, 1, 0, 0], dtype=torch.int32)):
        rows, same = topk(
            logits,
            lengths,
            k,
            kv_table=table,
            kv_page=page,
            block_rows=None if span is None else block_rows,
            row_request=owner,
        )
        assert torch.equal(counts, same)
        for t in range(4):
            request = t // 2 if owner is None else int(owner[t])
            want = [
                -1 if p < 0 else int(table[request, p // page]) * block_rows + p % page for p in positions[t].tolist()
            ]
            assert rows[t].tolist() == want


def test_unneeded_table_columns_are_not_looked_at() -> None:
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(8)).to(torch.bfloat16)
    table = torch.tensor([[3, 2**31 - 1, -5]], dtype=torch.int32)
    rows, _ = topk(logits, torch.tensor([16], dtype=torch.int32), 4, kv_table=table, kv_page=16)
    positions, _ = topk(logits, torch.tensor([16], dtype=torch.int32), 4)
    assert torch.equal(rows, positions + 48)


def test_strided_logits_and_lengths() -> None:
    storage = guarded_rows(3, 100, dtype=torch.bfloat16, stride=130)
    storage.view.copy_(torch.randn(3, 100, generator=torch.Generator().manual_seed(9)))
    lengths = torch.tensor([[100, 9], [50, 9], [3, 9]], dtype=torch.int32)[:, 0]
    dense = topk(storage.view.contiguous(), lengths.contiguous(), 20)
    for got, want in zip(topk(storage.view, lengths, 20), dense, strict=True):
        assert torch.equal(got, want)
    storage.assert_canaries()


def test_empty_batches_and_empty_rows() -> None:
    positions, counts = topk(torch.empty(0, 10, dtype=torch.bfloat16), torch.empty(0, dtype=torch.int32), 3)
    assert positions.shape == (0, 3)
    assert counts.shape == (0,)
    positions, counts = topk(torch.empty(2, 0, dtype=torch.bfloat16), torch.tensor([0, -7], dtype=torch.int32), 3)
    assert positions.tolist() == [[-1] * 3] * 2
    assert counts.tolist() == [0, 0]
