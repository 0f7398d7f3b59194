"""Position <-> (rank, local index), local lengths, and the sizes that follow from them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keysieve as ks
from keysieve.plan import Sharding
from keysieve.reference.dcp_maps import global_positions, lens_of_all_ranks, local_index, local_seq_lens, owner_of
from keysieve.spec import PAGE


@pytest.mark.parametrize("interleave", [1, 16, 64, 128, 1024])
@pytest.mark.parametrize("world", range(1, 17))
def test_every_position_has_one_place_and_comes_back(world: int, interleave: int) -> None:
    position = torch.arange(interleave * world * 2 + interleave + 7)
    rank, local = owner_of(position, world, interleave), local_index(position, world, interleave)
    assert torch.equal(global_positions(local, world, rank, interleave), position)
    for r in range(world):
        held = local[rank == r]
        # Local indices of a rank are 0, 1, 2, ... in order of position: no holes, order kept.
        assert torch.equal(held, torch.arange(held.numel()))
        for page in (16, 64):
            slots = held // page * page + held % page
            assert slots.unique().numel() == held.numel()


def test_scalars_map_like_tensors() -> None:
    for position in range(200):
        rank, local = owner_of(position, 3, 4), local_index(position, 3, 4)
        assert (rank, local) == (position // 4 % 3, [g for g in range(200) if g // 4 % 3 == rank].index(position))
        assert global_positions(local, 3, rank, 4) == position


@given(
    world=st.integers(1, 16),
    interleave=st.sampled_from([1, 2, 3, 5, 16, 64, 100]),
    lens=st.lists(st.integers(-3, 700), min_size=1, max_size=4),
)
def test_local_lengths_count_the_positions(world: int, interleave: int, lens: list[int]) -> None:
    counted = [[sum(g // interleave % world == r for g in range(max(n, 0))) for n in lens] for r in range(world)]
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    for rank in range(world):
        got = ks.local_seq_lens(seq_lens, world, rank, interleave)
        assert got.dtype == torch.int32
        assert got.tolist() == counted[rank]
    assert lens_of_all_ranks(seq_lens, world, interleave).T.tolist() == counted


def test_speculative_rows_have_their_own_local_lengths() -> None:
    """Four drafts of one request: which rank a new position lands on changes from row to row."""
    lens = torch.tensor([[9, 10, 11, 12], [0, 1, 2, -1]], dtype=torch.int64)
    got = [local_seq_lens(lens, 2, r, 2).tolist() for r in range(2)]
    assert got == [[[5, 6, 6, 6], [0, 1, 2, 0]], [[4, 4, 5, 6], [0, 0, 0, 0]]]


def test_lengths_go_into_a_given_buffer_and_a_column_of_a_table_is_fine() -> None:
    table = torch.tensor([[7, 1], [20, 1]], dtype=torch.int32)
    out = torch.full((2,), -9, dtype=torch.int32)
    assert local_seq_lens(table[:, 0], 4, 1, 1, out=out) is out
    assert out.tolist() == [2, 5]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("interleave", [1, 16, 64, 128])
def test_the_size_function_is_exact(world: int, interleave: int) -> None:
    """A pool sized by it holds the last key of the longest context, and has no page to spare."""
    for context in (1, 63, 64, 65, 1000, 4096):
        longest = max(int(local_seq_lens(torch.tensor([context]), world, r, interleave)) for r in range(world))
        sharding = Sharding(world, 0, interleave, topn=1)
        assert sharding.max_local_len(context) == longest
        spec = ks.IndexerSpec(heads=8, topk=8)
        pages = -(-longest // PAGE)
        cache = ks.IndexCache.empty(spec, pages=pages, device="cpu")
        cache.append(torch.ones(1, 128), torch.tensor([longest - 1]))
        assert int(cache.codes(torch.tensor([longest - 1]))[0].sum()) > 0
        assert pages * PAGE - longest < PAGE


@pytest.mark.parametrize(
    ("world", "rank", "interleave", "named"),
    [(0, 0, 1, "world"), (17, 0, 1, "world"), (2, 2, 1, "rank"), (2, -1, 1, "rank"), (2, 0, 0, "interleave")],
)
def test_impossible_shardings_are_refused(world: int, rank: int, interleave: int, named: str) -> None:
    with pytest.raises(ks.KeysieveError, match=named):
        local_seq_lens(torch.tensor([5]), world, rank, interleave)


def test_lengths_that_are_no_integers_are_refused() -> None:
    for lens in (torch.tensor([1.5]), torch.tensor([3 + 0j]), torch.tensor([True]), [3]):
        with pytest.raises(ks.KeysieveError, match="seq_lens"):
            local_seq_lens(lens, 2, 0)  # type: ignore[arg-type]  # a list is one of them
    for out in (torch.zeros(3, dtype=torch.int32), torch.zeros(2), [1, 2]):
        with pytest.raises(ks.KeysieveError, match="out: got"):
            local_seq_lens(torch.tensor([1, 2]), 2, 0, out=out)  # type: ignore[arg-type]  # a list is the point
