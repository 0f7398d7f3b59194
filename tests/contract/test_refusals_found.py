"""Refusals and reports that a hostile reader found missing; each with the rest of its kind."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import keysieve as ks
from keysieve.checks import require_int
from keysieve.quantize import quantize_keys

SPEC = ks.IndexerSpec(heads=8, topk=4)
LOGITS = torch.zeros(2, 10, dtype=torch.bfloat16)


def test_a_rank_never_offers_an_emptied_row() -> None:
    with pytest.raises(ks.KeysieveError, match=r"local_lens.*10 columns"):
        ks.local_topk(LOGITS, torch.tensor([3, 11], dtype=torch.int32), 2)


def test_the_reference_names_report_as_the_public_ones_do() -> None:
    lengths = torch.tensor([3, 11], dtype=torch.int32)
    for topk in (ks.topk, ks.reference.topk):
        with pytest.warns(ks.DeviceFaultWarning, match="row 1"):
            _, counts = topk(LOGITS, lengths, 2)
        assert counts.tolist() == [2, 0]
    cache = ks.IndexCache.empty(SPEC, pages=1)
    cache.append(torch.ones(64, 128), torch.arange(64))
    query, _ = ks.quantize_query(SPEC, torch.ones(1, 8, 128))
    table = torch.tensor([[5]], dtype=torch.int32)
    for score in (ks.score, ks.reference.score):
        with pytest.warns(ks.DeviceFaultWarning, match="page"):
            score(SPEC, query, cache, torch.ones(1, 8), torch.tensor([3], dtype=torch.int32), table)


@pytest.mark.parametrize("key_format", ["fp8_fp32", "fp8_ue8m0", "mxfp4"])
def test_a_pickled_cache_is_one_pool(key_format: str) -> None:
    spec = ks.IndexerSpec(heads=8, topk=4, key_format=key_format)
    cache = ks.IndexCache.empty(spec, pages=2, amax_floor=0.5)
    cache.data.zero_()
    again = pickle.loads(pickle.dumps(cache))
    again.append(torch.full((1, 128), 0.25), torch.tensor([70]))
    cache.append(torch.full((1, 128), 0.25), torch.tensor([70]))
    assert torch.equal(again.data, cache.data)
    assert bool(again.data.any())
    assert torch.equal(again.read(torch.tensor([70])), cache.read(torch.tensor([70])))


def test_reading_ignores_the_default_dtype() -> None:
    spec = ks.IndexerSpec(heads=8, topk=4, key_format="mxfp4")
    cache = ks.IndexCache.empty(spec, pages=1)
    cache.append(torch.ones(1, 128), torch.tensor([0]))
    torch.set_default_dtype(torch.float64)
    try:
        assert cache.read(torch.tensor([0])).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_lengths_beyond_int32_stay_beyond_every_limit() -> None:
    for length in (2**33, 2**32 + 10, 2**62):
        lens = torch.tensor([length])
        assert int(ks.local_seq_lens(lens, 2, 0)) >= 2**31 - 1


@pytest.mark.parametrize("value", [torch.tensor(2.5), np.array(2.7), np.array([2, 3]), True, None, "2", 2.0])
def test_an_int_is_never_cut_out_of_something_else(value: object) -> None:
    with pytest.raises(ks.KeysieveError, match="accepted: an int"):
        require_int("k", value, 1, 10, "Give one.")
    with pytest.raises(ks.KeysieveError):
        ks.topk(LOGITS, torch.tensor([3, 3], dtype=torch.int32), value)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("field", ["heads", "topk", "page", "head_dim"])
def test_a_spec_holds_plain_ints(field: str) -> None:
    plain = {"heads": 8, "topk": 4, "page": 64, "head_dim": 128}
    for made in (np.int64, torch.tensor):
        spec = ks.IndexerSpec(**{**plain, field: made(plain[field])})
        assert type(getattr(spec, field)) is int
        assert spec == ks.IndexerSpec(**plain)
        assert hash(spec) == hash(ks.IndexerSpec(**plain))
    with pytest.raises(ks.KeysieveError, match=field):
        ks.IndexerSpec(**{**plain, field: float(plain[field])})


def test_two_dimensional_lengths_pass_through_the_sharded_functions() -> None:
    lens = torch.tensor([[40, 39], [7, 0], [3, 21]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 40, generator=generator).to(torch.bfloat16)
    shards = [logits[:, rank::2].contiguous() for rank in (0, 1)]
    words = [ks.local_topk(shards[r], ks.local_seq_lens(lens, 2, r), 4)[0] for r in (0, 1)]
    flat = [ks.local_topk(shards[r], ks.local_seq_lens(lens.reshape(-1), 2, r), 4)[0] for r in (0, 1)]
    assert torch.equal(words[0], flat[0])
    merged = ks.merge(words, 4, rank=0, seq_lens=lens)
    expected, _ = ks.topk(logits, lens.reshape(-1), 4)
    assert torch.equal(merged.positions, expected)


def test_a_subclass_stays_one_when_pickled() -> None:
    assert type(pickle.loads(pickle.dumps(Named.empty(SPEC, 1)))) is Named


class Named(ks.IndexCache):
    """At module level, so that pickle finds it."""


@pytest.mark.parametrize(("name", "value"), [("heads", 128), ("heads", 12), ("heads", 0), ("topk", 0), ("topk", 5000)])
def test_remedies_can_be_followed(name: str, value: int) -> None:
    with pytest.raises(ks.KeysieveError) as refusal:
        ks.IndexerSpec(**{"heads": 8, "topk": 4, name: value})
    text = str(refusal.value)
    assert ("8, 16, 32, 64" if name == "heads" else "1..4096") in text
    assert "fewer" not in text


WORDS = torch.zeros(2, 1, 3, dtype=torch.int32)
CALLS = {
    "local_topk list lens": lambda: ks.local_topk(LOGITS, [3, 4], 2),
    "local_topk no lens": lambda: ks.local_topk(LOGITS, None, 2),
    "local_topk planes": lambda: ks.local_topk(LOGITS, torch.tensor([3, 4]), 2, planes=11),
    "merge None": lambda: ks.merge(None, 4, rank=0),
    "merge [None]": lambda: ks.merge([None], 4, rank=0),
    "merge []": lambda: ks.merge([], 4, rank=0),
    "merge planes": lambda: ks.merge(WORDS, 4, rank=0, planes="x"),
    "merge planes 0": lambda: ks.merge(WORDS, 4, rank=0, planes=0),
    "merge rank": lambda: ks.merge(WORDS, 4, rank=2),
    "cache spec": lambda: ks.IndexCache(None, torch.zeros(1, 64, 132, dtype=torch.uint8)),
    "empty spec": lambda: ks.IndexCache.empty("x", 3),
    "query spec": lambda: ks.quantize_query(None, torch.zeros(1, 8, 128)),
    "keys spec": lambda: quantize_keys(None, torch.zeros(1, 128)),
    "floor text": lambda: ks.IndexCache.empty(SPEC, 1, amax_floor="a"),
    "floor nan": lambda: ks.IndexCache.empty(SPEC, 1, amax_floor=float("nan")),
    "softmax_scale": lambda: ks.fold_weights(torch.zeros(1, 8), None, None),
    "softmax_scale tensor": lambda: ks.fold_weights(torch.zeros(1, 8), None, torch.ones(8)),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_refusal_has_its_four_parts(name: str) -> None:
    with pytest.raises(ks.KeysieveError) as refusal:
        CALLS[name]()
    text = str(refusal.value)
    assert ": got " in text
    assert "; accepted: " in text
    assert text.rstrip().endswith(".")


def test_a_numpy_array_is_refused_by_its_argument() -> None:
    """It has a shape and a dtype, but is no tensor: once the message itself failed on it."""
    logits = torch.zeros(1, 8, dtype=torch.bfloat16)
    with pytest.raises(ks.KeysieveError, match="lengths: got ndarray"):
        ks.topk(logits, torch.tensor([8], dtype=torch.int32).numpy(), 4)
