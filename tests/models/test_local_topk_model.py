"""The passes of the local top-N, executed, held to the reference word for word."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keysieve.models import local_topk as model
from keysieve.models.select import Keys, key16_of_bits
from keysieve.reference.local_topk import local_topk

PALETTES = ("any", "few", "equal", "gaussian", "bursts", "octaves", "nan")


def bits_of(kind: str, length: int, seed: int) -> Keys:
    rng = np.random.default_rng(seed)
    if kind == "any":
        return rng.integers(0, 1 << 16, length, dtype=np.uint16)
    if kind == "few":
        return rng.choice(np.array([0, 0x8000, 0x3F80, 0x3F81, 0xBF80], np.uint16), length)
    if kind == "equal":
        return np.full(length, 0x3F80, np.uint16)
    if kind == "nan":
        return rng.choice(np.array([0x7FC0, 0xFFC0, 0xFF80, 0x7F80, 0x7F81], np.uint16), length)
    x = rng.standard_normal(length)
    if kind == "bursts":  # vectors of huge keys: the bound lies far below the threshold
        high = np.repeat(rng.random(-(-length // 8)) < 0.1, 8)[:length]
        x = np.where(high, np.abs(x) * 2.0**60 + 2.0**50, np.abs(x) * 2.0**-60)
    elif kind == "octaves":
        x = np.exp2(rng.integers(-120, 120, length).astype(np.float64))
    floats = torch.from_numpy(x).to(torch.bfloat16)
    return floats.view(torch.int16).numpy().view(np.uint16)


def reference(bits: Keys, n: int, planes: int) -> np.ndarray:
    logits = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)[None]
    words, _ = local_topk(logits, torch.tensor([len(bits)], dtype=torch.int32), n, planes)
    return words[0].numpy().view(np.uint32)


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(PALETTES),
    length=st.integers(1, 6000),
    n=st.sampled_from((1, 31, 32, 33, 64, 352, 700)),
    threads=st.sampled_from((32, 64, 256)),
    held=st.sampled_from((1, 2, 4, 8)),
    room=st.sampled_from((0, 400, 10_000)),
    listed=st.sampled_from((1, 2, 6)),
    maxima=st.sampled_from((0, 256, 10_000)),
    seed=st.integers(0, 2**32 - 1),
)
def test_words_are_the_references(
    kind: str, length: int, n: int, threads: int, held: int, room: int, listed: int, maxima: int, seed: int
) -> None:
    bits = bits_of(kind, length, seed)
    held = max(held, -(-n // threads))
    shape = model.Shape(threads, held, room, n * listed, maxima)
    assert np.array_equal(model.candidate_row(key16_of_bits(bits), n, 2, shape), reference(bits, n, 2))


@pytest.mark.parametrize("length", [65_535, 65_536, 65_537, 140_000])
def test_words_of_long_rows_have_planes(length: int) -> None:
    bits = bits_of("gaussian", length, length)
    for room in (0, 16_384):  # the longest row has more vectors than the larger one
        shape = model.Shape(1024, 4, room)
        assert np.array_equal(model.candidate_row(key16_of_bits(bits), 352, 2, shape), reference(bits, 352, 2))


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(PALETTES),
    length=st.integers(2000, 20_000),
    n=st.integers(1, 250),
    seed=st.integers(0, 2**32 - 1),
)
def test_listed_vectors_hold_the_best_keys_and_fit(kind: str, length: int, n: int, seed: int) -> None:
    keys = key16_of_bits(bits_of(kind, length, seed))
    listed, bound = model.list_vectors(keys, n, 256)
    assert bound % 8 == 0
    assert int((keys >= bound).sum()) >= n
    assert n <= len(listed) <= 256
    best = np.argsort(-keys.astype(np.int64), kind="stable")[:n]
    assert np.isin(best // 8, listed).all()


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(PALETTES),
    length=st.integers(1, 5000),
    n=st.integers(1, 600),
    threads=st.sampled_from((32, 128, 1024)),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_bound_is_reached_by_enough_keys(kind: str, length: int, n: int, threads: int, seed: int) -> None:
    keys = key16_of_bits(bits_of(kind, length, seed))
    if length >= n:
        assert int((keys >= model.find_bound(keys, n, threads)).sum()) >= n


@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 200_000), n=st.integers(1, 4096), threads=st.sampled_from((512, 1024)))
def test_groups_are_disjoint_runs_of_a_threads_vectors(length: int, n: int, threads: int) -> None:
    groups = model.groups_of(length, n, threads)
    rounds = -(-len(groups) // threads)
    sizes = np.bincount(groups)
    assert sizes.max() <= rounds
    assert sizes.sum() == -(-length // 8)


def test_gaussian_rows_have_a_useful_bound() -> None:
    """Not part of being right: the list takes what the bound leaves, at the shapes the kernel is made for."""
    for length, n in ((16_384, 352), (16_384, 1216), (65_536, 352), (65_536, 1216), (131_072, 352), (524_288, 1216)):
        keys = key16_of_bits(bits_of("gaussian", length, 7))
        reaching = int((keys >= model.find_bound(keys, n, 1024)).sum())
        assert n <= reaching <= 3 * n, (length, n, reaching)


def test_each_way_to_a_threshold_is_taken() -> None:
    """One histogram from a near bound, two without a bound, three from a bound too far below."""
    ways = set()
    for kind, bound in (("gaussian", None), ("gaussian", 1), ("bursts", None)):
        keys = key16_of_bits(bits_of(kind, 4096, 3))
        n = 100 if kind == "gaussian" else 256
        found = model.find_bound(keys, n, 1024) if bound is None else bound
        threshold, need, passes = model.find_threshold(keys, n, found)
        assert threshold == np.sort(keys)[::-1][n - 1]
        assert need == n - int((keys > threshold).sum())
        ways.add(passes)
    assert ways == {1, 2, 3}


def test_pairs_carry_words_tag_and_signature() -> None:
    words = np.arange(1, 34, dtype=np.uint32)
    pairs = model.pairs_of(words, 5, 3, -4, 9)
    assert pairs.shape == (18, 4)
    assert (pairs[:, 1::2] == 9).all()
    assert np.array_equal(pairs[:-1, 0::2].ravel(), np.append(words, 0))
    assert pairs[-1].tolist() == [5 << 16 | 3, 9, 0, 9]


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(PALETTES),
    length=st.integers(2, 6000),
    n=st.sampled_from((1, 31, 33, 352, 700)),
    blocks=st.sampled_from((2, 4, 8)),
    threads=st.sampled_from((32, 64, 512)),
    seed=st.integers(0, 2**32 - 1),
)
def test_parts_of_a_shared_row_are_the_row(
    kind: str, length: int, n: int, blocks: int, threads: int, seed: int
) -> None:
    keys = key16_of_bits(bits_of(kind, length, seed))
    if length <= n:
        return
    whole = model.best_keys(keys, n, model.DEFAULT)
    parts = model.best_shared(keys, n, blocks, model.Shape(threads, 8))
    assert np.array_equal(np.concatenate(parts), whole)
    assert np.array_equal(np.concatenate(parts), np.sort(np.argsort(-keys.astype(np.int64), kind="stable")[:n]))


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(PALETTES),
    length=st.integers(1, 9000),
    n=st.sampled_from((1, 31, 352, 700)),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_floor_is_near_the_best_key_or_reached_by_enough(kind: str, length: int, n: int, seed: int) -> None:
    keys = key16_of_bits(bits_of(kind, length, seed))
    floor = model.find_floor(keys, n, None)
    assert floor % 8 == 0
    assert floor <= int(keys.max()) < floor + model.WINDOW
    if floor > max((int(keys.max()) | 7) - (model.WINDOW - 1), 0):
        assert int((keys >= floor + 8).sum()) >= n


@pytest.mark.parametrize(("length", "n"), [(16_384, 1216), (16_384, 352), (32_768, 1216), (32_768, 352)])
def test_few_keys_of_a_gaussian_part_are_counted(length: int, n: int) -> None:
    """Not part of being right: what the kernel's time is made of."""
    keys = key16_of_bits(bits_of("gaussian", length, 9))
    counted = int((keys >= model.find_floor(keys, n, None)).sum())
    assert n <= counted <= 3 * n, counted
