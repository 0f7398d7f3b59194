"""The property everything rests on: the union of what the ranks select is what tensor parallelism selects."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keysieve as ks
from keysieve.dcp import fuzz
from keysieve.reference.local_topk import local_topk
from keysieve.reference.merge import saturated_ranks
from keysieve.spec import default_topn

from .slow import Sharded, best, keys_of

VALUES = st.sampled_from([0.0, 1.0, 2.0, -1.0, float("inf"), float("-inf"), float("nan")])


def _case(world: int, interleave: int, n: int, k: int, scores: list[list[float]]) -> fuzz.Case:
    width = max(1, *(len(s) for s in scores))
    padded = torch.tensor([s + [9.0] * (width - len(s)) for s in scores]).bfloat16()
    lens = torch.tensor([len(s) for s in scores], dtype=torch.int32)
    return fuzz.Case(world, interleave, n, k, lens, padded)


@settings(max_examples=300)
@given(st.data())
def test_the_union_over_ranks_is_the_unsharded_selection(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 16))
    interleave = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    k = data.draw(st.integers(1, 24))
    n = data.draw(st.integers(1, k))
    rows = data.draw(st.lists(st.lists(VALUES, max_size=60), min_size=1, max_size=2))
    case = _case(world, interleave, n, k, rows)
    merged = fuzz.exchange(case)
    assert fuzz.difference(case, merged) is None
    for row, scores in enumerate(rows):
        # And the same by sorting lists, which shares nothing with the package.
        keys = keys_of(torch.tensor(scores).bfloat16()) if scores else []
        sharded = Sharded.of(keys, world, interleave)
        expected = best([(key, g) for g, key in enumerate(keys)], k)
        assert {r for r in range(world) if merged[0].saturated[r, row]} == sharded.saturated(n, k)
        assert sharded.merged(n, k, sharded.saturated(n, k)) == expected
        assert [p for p in merged[0].positions[row].tolist() if p >= 0] == [g for _, g in expected]
        assert len(sharded.saturated(n, k)) <= min(world, k // n)


def test_seeded_cases() -> None:
    """A slice of the range that ``docs/measurements`` records in full."""
    report = fuzz.run(range(800))
    assert report.failures == ()
    assert (report.first, report.last) == (0, 799)
    assert report.rescued_rows > 200, "the second round must be exercised, not just possible"


def test_longer_rows() -> None:
    report = fuzz.run(range(40), longest=6000, largest_k=700)
    assert report.failures == ()
    assert report.rescued_rows > 5


def test_every_small_row_exhaustively() -> None:
    """All rows of up to 7 keys with two scores, through the package, for small W, S, K and every N."""
    rows = 0
    for length in range(8):
        scores = [list(row) for row in itertools.product((0.0, 1.0), repeat=length)]
        expected = [sorted(range(length), key=lambda g, row=row: (-row[g], g)) for row in scores]
        for (world, interleave), k in itertools.product(((2, 1), (2, 2), (3, 1), (2, 3)), range(1, 5)):
            best_k = [sorted(order[:k]) + [-1] * (k - len(order)) for order in expected]
            for n in range(1, k + 1):
                case = _case(world, interleave, n, k, scores)
                merged = fuzz.exchange(case)
                assert merged[0].positions.tolist() == best_k, str(case)
                assert fuzz.difference(case, merged) is None, str(case)
                rows += len(scores)
    assert rows == 10_200


def test_the_strict_rule_misses_a_tied_winner() -> None:
    """W = 2, S = 1, N = 1, K = 2, scores 1, 0, 1, 1: the counterexample that forbids asking for strict excess."""
    keys = keys_of(torch.tensor([1.0, 0.0, 1.0, 1.0]).bfloat16())
    sharded = Sharded.of(keys, world=2, interleave=1)
    assert sharded.strictly_saturated(1, 2) == set()
    wrong = sharded.merged(1, 2, sharded.strictly_saturated(1, 2))
    assert [g for _, g in wrong] == [0, 3]
    assert [g for _, g in best([(key, g) for g, key in enumerate(keys)], 2)] == [0, 2]
    assert 0 in sharded.saturated(1, 2)
    merged = fuzz.exchange(_case(2, 1, 1, 2, [[1.0, 0.0, 1.0, 1.0]]))
    assert merged[0].positions.tolist() == [[0, 2]]
    assert [m.rows.tolist() for m in merged] == [[[0, 1]], [[-1, -1]]]
    assert [m.counts.tolist() for m in merged] == [[2], [0]]


def test_weaker_rules_fail_and_the_rule_does_not_exhaustively() -> None:
    """Every row of up to 7 keys with scores 0 and 1: the strict rule and no second round at all are both wrong."""
    strict_wrong = approximate_wrong = 0
    for length in range(8):
        for scores in itertools.product((0.0, 1.0), repeat=length):
            keys = keys_of(torch.tensor(scores).bfloat16()) if scores else []
            sharded = Sharded.of(keys, world=2, interleave=1)
            for k in (2, 3, 4):
                expected = best([(key, g) for g, key in enumerate(keys)], k)
                for n in range(1, k):
                    assert sharded.merged(n, k, sharded.saturated(n, k)) == expected
                    strict_wrong += sharded.merged(n, k, sharded.strictly_saturated(n, k)) != expected
                    approximate_wrong += sharded.merged(n, k, set()) != expected
    assert strict_wrong > 0
    assert approximate_wrong > strict_wrong


def _lists(case: fuzz.Case, n: int) -> torch.Tensor:
    shards = [fuzz.shard(case, r) for r in range(case.world)]
    return torch.stack([local_topk(logits, lens, n)[0] for logits, lens in shards])


def test_all_winners_on_one_rank_and_none_on_the_others() -> None:
    scores = [5.0 if g % 4 == 2 else 0.0 for g in range(64)]
    case = _case(4, 1, 8, 8, [scores])
    merged = fuzz.exchange(case)
    assert [int(m.counts) for m in merged] == [0, 0, 8, 0]
    assert merged[2].rows.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert merged[0].rows.tolist() == [[-1] * 8]
    assert merged[0].positions.tolist() == [[2, 6, 10, 14, 18, 22, 26, 30]]


def test_rows_shorter_than_the_world() -> None:
    merged = fuzz.exchange(_case(8, 1, 2, 4, [[1.0, 2.0, 3.0], []]))
    assert [m.counts.tolist() for m in merged] == [[1, 0]] * 3 + [[0, 0]] * 5
    assert merged[5].positions.tolist() == [[0, 1, 2, -1], [-1] * 4]


def test_physical_rows_are_of_this_ranks_shard() -> None:
    case = _case(2, 16, 8, 8, [[float(g % 7) for g in range(100)], [float(-g) for g in range(50)]])
    words = _lists(case, 8)
    table = torch.tensor([[30, 10, 20, 99], [3, 1, 2, 98]], dtype=torch.int32)
    for rank in range(2):
        bare = ks.merge(words, 8, rank=rank, interleave=16, seq_lens=case.lens)
        placed = ks.merge(
            words, 8, rank=rank, interleave=16, seq_lens=case.lens, kv_table=table, kv_page=16, block_rows=20
        )
        for row in range(2):
            local = [x for x in bare.rows[row].tolist() if x >= 0]
            assert placed.rows[row].tolist()[: len(local)] == [int(table[row, x // 16]) * 20 + x % 16 for x in local]
            assert set(placed.rows[row].tolist()[len(local) :]) <= {-1}
        assert torch.equal(placed.positions, bare.positions)
    swapped = ks.merge(words, 8, rank=0, interleave=16, kv_table=table, kv_page=16, row_request=torch.tensor([1, 0]))
    first = int(ks.merge(words, 8, rank=0, interleave=16).rows[0, 0])
    assert int(swapped.rows[0, 0]) == int(table[1, first // 16]) * 16 + first % 16


def test_tables_that_do_not_reach_the_winners_are_refused() -> None:
    case = _case(2, 1, 4, 4, [[float(g) for g in range(100)], [1.0] * 5])
    words = _lists(case, 4)
    wide = torch.zeros(2, 4, dtype=torch.int32)
    assert ks.merge(words, 4, rank=0, kv_table=wide, kv_page=16).counts.tolist() == [2, 2]
    for table, page, named in (
        (wide[:, :3], 16, "reach local index 49"),
        (torch.zeros(3, 4, dtype=torch.int32), 16, "3 rows of 64 keys"),
        (wide, 24, "kv_page"),
        (wide.long(), 16, "kv_table"),
    ):
        with pytest.raises(ks.KeysieveError, match=named):
            ks.merge(words, 4, rank=0, kv_table=table, kv_page=page)
    with pytest.raises(ks.KeysieveError, match="row_request"):
        ks.merge(words, 4, rank=0, kv_table=wide, kv_page=16, row_request=torch.tensor([0, 2]))


def test_words_may_come_as_a_list_and_need_no_lengths_with_n_equal_k() -> None:
    case = _case(3, 2, 6, 6, [[float(g * 7 % 11) for g in range(40)]])
    words = _lists(case, 6)
    for rank in range(3):
        a = ks.merge(list(words), 6, rank=rank, interleave=2)
        b = ks.merge(words, 6, rank=rank, interleave=2, seq_lens=case.lens)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not a.saturated.any()


def test_without_lengths_a_full_list_counts_as_saturated() -> None:
    """Two keys, both offered: with the lengths nothing is hidden, without them nobody can know."""
    case = _case(2, 1, 1, 2, [[1.0, 1.0]])
    words = _lists(case, 1)
    assert not saturated_ranks(words, 2, seq_lens=case.lens).any()
    assert saturated_ranks(words, 2).all()
    second = _lists(case, 2)
    assert ks.merge(words, 2, rank=0, second=second).positions.tolist() == [[0, 1]]


def test_a_missing_second_list_is_refused_with_the_remedy() -> None:
    words = _lists(_case(2, 1, 1, 2, [[1.0, 0.0, 1.0, 1.0]]), 1)
    with pytest.raises(ks.KeysieveError, match=r"second: got None.*row 0: rank 0.*local_topk"):
        ks.merge(words, 2, rank=0)


def test_lists_that_do_not_fit_the_lengths_are_refused() -> None:
    case = _case(2, 1, 4, 4, [[1.0] * 9])
    words = _lists(case, 4)
    words[1, 0, 3] = 0
    with pytest.raises(ks.KeysieveError, match=r"words: got 3 candidates from rank 1 for row 0.* = 4"):
        ks.merge(words, 4, rank=0, seq_lens=case.lens)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"k": 0}, "k"),
        ({"k": 4097}, "k"),
        ({"k": 3}, "n <= k"),
        ({"rank": 2}, "rank"),
        ({"interleave": 0}, "interleave"),
        ({"words": torch.zeros(2, 1, 5, dtype=torch.int64)}, "int32"),
        ({"words": torch.zeros(2, 5, dtype=torch.int32)}, "world, rows, words"),
        ({"words": [torch.zeros(1, 5, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int32)]}, "one shape"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, "seq_lens"),
        ({"row_request": torch.zeros(1, dtype=torch.int32)}, "row_request"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, object], named: str) -> None:
    arguments: dict[str, object] = {"words": torch.zeros(2, 1, 5, dtype=torch.int32), "k": 4, "rank": 0}
    arguments |= change
    words, k = arguments.pop("words"), arguments.pop("k")
    with pytest.raises(ks.KeysieveError, match=named):
        ks.merge(words, k, **arguments)  # type: ignore[arg-type]  # wrong types are the point


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"k": 0}, "k"),
        ({"k": 2}, "n <= k"),
        ({"k": True}, "k"),
        ({"seq_lens": torch.tensor([5])}, "seq_lens"),
        ({"seq_lens": torch.tensor([[5, 5], [5, 5]])}, "seq_lens"),
        ({"seq_lens": torch.tensor([5.0, 5.0, 5.0])}, "seq_lens"),
        ({"seq_lens": [5, 5, 5]}, "seq_lens"),
    ],
)
def test_the_saturated_ranks_of_bad_arguments_are_not_asked_for(change: dict[str, Any], named: str) -> None:
    words = _lists(_case(2, 1, 3, 8, [[1.0] * 9] * 3), 3)
    assert saturated_ranks(words, 8, seq_lens=torch.tensor([9, 9, 9])).any()
    with pytest.raises(ks.KeysieveError, match=named):
        saturated_ranks(words, **({"k": 8} | change))


def test_the_default_number_of_candidates_rescues_almost_never() -> None:
    """Gaussian rows at the default N: the measured reason for its six standard deviations."""
    generator = torch.Generator().manual_seed(1)
    for world in (2, 4, 8):
        k = 256
        n = default_topn(k, world)
        logits = torch.randn(20, 4096, generator=generator).bfloat16()
        case = fuzz.Case(world, 1, n, k, torch.full((20,), 4096, dtype=torch.int32), logits)
        merged = fuzz.exchange(case)
        assert fuzz.difference(case, merged) is None
        assert not merged[0].saturated.any()


def test_many_ties_at_the_threshold_of_a_long_row() -> None:
    """Real activations have up to a thousand keys equal to the K-th: four ranks, K = 2048, 131,072 keys, rounded."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(1, 131072, generator=generator).mul(0.05).bfloat16()
    case = fuzz.Case(4, 64, default_topn(2048, 4), 2048, torch.tensor([131072], dtype=torch.int32), logits)
    merged = fuzz.exchange(case)
    assert fuzz.difference(case, merged) is None
    lowest = logits[0, merged[0].positions[0].long()].min()
    assert int((logits[0] == lowest).sum()) > 20
