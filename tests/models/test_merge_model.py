"""The passes of the merge, executed, held to the reference: the entries taken, the ranks asked again, the answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keysieve.models import merge as model
from keysieve.models.merge import Lists
from keysieve.models.select import key16_of_bits
from keysieve.reference.dcp_maps import global_positions, local_seq_lens
from keysieve.reference.local_topk import local_topk, unpack_candidates
from keysieve.reference.merge import merge, saturated_ranks

KINDS = ("gaussian", "few", "equal", "any", "one rank", "plateau")


class Case:
    """A row over `world` ranks: logits of each, first lists, and the same in key16 and global positions."""

    def __init__(self, kind: str, world: int, interleave: int, n: int, length: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal(length)
        if kind == "few":
            x = np.round(x)
        elif kind == "equal":
            x = np.ones(length)
        elif kind == "any":
            x = np.exp2(rng.integers(-100, 100, length).astype(np.float64)) * rng.choice([-1.0, 1.0], length)
        elif kind == "one rank":
            x = x + 8 * ((np.arange(length) // interleave) % world == world - 1)
        elif kind == "plateau":
            x = np.maximum(x - 0.5, 0)
        row = torch.from_numpy(x).to(torch.bfloat16) + 0.0
        self.world, self.interleave, self.n, self.length = world, interleave, n, length
        self.lens = torch.tensor([length], dtype=torch.int32)
        self.local_lens = [int(local_seq_lens(self.lens, world, r, interleave)) for r in range(world)]
        self.logits = []
        for rank, local in enumerate(self.local_lens):
            at = global_positions(torch.arange(local), world, rank, interleave)
            self.logits.append(torch.where(row[at] == 0, torch.zeros(()).bfloat16(), row[at]))
        self.words = [self.offer(rank, n) for rank in range(world)]

    def offer(self, rank: int, n: int) -> torch.Tensor:
        local = torch.tensor([self.local_lens[rank]], dtype=torch.int32)
        logits = self.logits[rank][None] if self.local_lens[rank] else torch.zeros(1, 1, dtype=torch.bfloat16)
        return local_topk(logits, local, n, 1)[0]

    def lists(self) -> Lists:
        keys, ids = zip(*(self.decoded(rank, words) for rank, words in enumerate(self.words)), strict=True)
        return Lists(np.stack(keys), np.stack(ids))

    def decoded(self, rank: int, words: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        first = words[0].numpy().view(np.uint32)[: self.n]
        local = 0xFFFF - (first & 0xFFFF).astype(np.int64)
        ids = global_positions(torch.from_numpy(local), self.world, rank, self.interleave).numpy()
        return (first >> 16).astype(np.int64), np.asarray(ids, dtype=np.int64)

    def keys(self, rank: int) -> np.ndarray:
        bits = self.logits[rank].view(torch.int16).numpy().view(np.uint16)
        return np.asarray(key16_of_bits(bits), dtype=np.int64)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    world=st.sampled_from((1, 2, 3, 5, 8, 16)),
    interleave=st.sampled_from((1, 3, 64)),
    n=st.sampled_from((1, 8, 32, 100)),
    more=st.integers(0, 200),
    length=st.integers(1, 3000),
    latency=st.booleans(),
    few=st.sampled_from((0, 4, 128)),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_passes_give_the_references_answer(
    kind: str, world: int, interleave: int, n: int, more: int, length: int, latency: bool, few: int, seed: int
) -> None:
    case, k = Case(kind, world, interleave, n, length, seed), n + more
    lists = case.lists()
    taken, threshold = model.chosen(lists, k, length, latency=latency, few=few)
    asked = model.saturated(lists, taken, np.array(case.local_lens), k)
    expected = saturated_ranks(case.words, k, interleave=interleave, seq_lens=case.lens)[:, 0]
    assert asked.tolist() == expected.tolist()
    second = [case.offer(rank, k) for rank in range(world)]
    want = merge(case.words, k, rank=0, interleave=interleave, seq_lens=case.lens, second=second)
    if asked.any():  # unsaturated first lists, and of saturated ranks what reaches the first threshold
        keys, ids = [], []
        for rank in range(world):
            if asked[rank]:
                local = model.second_list(case.keys(rank), k, threshold)
                keys.append(case.keys(rank)[local])
                ids.append(global_positions(torch.from_numpy(local), world, rank, interleave).numpy())
            else:
                keys.append(lists.keys[rank])
                ids.append(lists.ids[rank])
        lists = Lists(np.concatenate(keys)[None], np.concatenate(ids)[None])
        taken, _ = model.chosen(lists, k, length, latency=False, few=few)
    positions = np.sort(lists.ids[taken])
    row = want.positions[0].numpy()
    assert positions.tolist() == row[row >= 0].tolist()


@settings(max_examples=200, deadline=None)
@given(
    least=st.sampled_from((1, 7, 8, 0x7FF9, 0xF000)),
    spread=st.sampled_from((1, 8, 200, 300, 2038, 2041, 2048, 3000)),
    number=st.integers(1, 600),
    k=st.integers(1, 600),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_threshold_near_the_least_key_is_the_one(least: int, spread: int, number: int, k: int, seed: int) -> None:
    """Keys that would share a bin with others are not looked at in this way."""
    rng = np.random.default_rng(seed)
    keys = np.minimum(least + np.append(rng.integers(0, spread, number), [0, spread - 1]), 0xFF80).astype(np.int64)
    lists = Lists(keys[None], np.arange(len(keys))[None])
    wanted = model.flat_threshold(lists, k) if k <= len(keys) else model.Found(0, 0, 0)
    assert model.distance_threshold(lists, k) == wanted
    if k <= len(keys):
        near = model.near_threshold(keys, k)
        assert near in (None, wanted)
        assert model.far_threshold(keys, k) == wanted
        if spread <= 200:
            assert near == wanted


@pytest.mark.parametrize("length", [1, 2047, 2048, 2049, 1 << 20, (1 << 22) + 1, 1 << 26])
def test_ids_are_cut_exactly_whatever_the_length(length: int) -> None:
    rng = np.random.default_rng(length)
    ids = np.unique(np.append(rng.integers(0, length, 700), length - 1)).astype(np.int64)
    rng.shuffle(ids)
    for need in sorted({1, 2, len(ids) // 2 or 1, len(ids)} & set(range(1, len(ids) + 1))):
        smallest = int(np.sort(ids)[need - 1])
        assert model.cut_many(ids, need, length) == model.cut_few(ids, need) == smallest


def test_unpacked_lists_are_what_the_words_say() -> None:
    """The decoding above against the package's."""
    case = Case("gaussian", 3, 1, 32, 500, 7)
    for words in case.words:
        keys, local = unpack_candidates(words, 1)[:2]
        first = words[0].numpy().view(np.uint32)[:32]
        live = first != 0
        assert torch.equal(
            keys[0][torch.from_numpy(live)].to(torch.int64), torch.from_numpy((first >> 16)[live].astype(np.int64))
        )
        assert torch.equal(
            local[0][torch.from_numpy(live)].to(torch.int64),
            torch.from_numpy(0xFFFF - (first & 0xFFFF)[live].astype(np.int64)),
        )
