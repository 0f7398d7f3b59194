"""Corners of the public calls: threads, default devices, copies, empty batches, what supports() says of a cache."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import keysieve as ks
from keysieve import IndexerSpec, KeysieveError
from keysieve.reference.topk import check_topk
from keysieve.testing import assert_bitwise_equal, random_case

SPEC = IndexerSpec(heads=8, topk=48)


def test_two_threads_with_one_indexer_take_turns() -> None:
    """torch lets the other thread run in the middle of a step, and both use one buffer of logits."""
    cases = [random_case(SPEC, [[8000], [7000]], next_n=1, seed=seed) for seed in (1, 2)]
    indexer = ks.DecodeIndexer(SPEC, max_rows=2, max_context=8000, device="cpu")

    def rows(case: int) -> torch.Tensor:
        c = cases[case]
        return indexer(c.query, c.index_cache(), c.weights, c.seq_lens, c.index_table).rows

    want = [rows(0), rows(1)]
    with ThreadPoolExecutor(2) as pool:
        for got, case in zip(pool.map(rows, [0, 1] * 12), [0, 1] * 12, strict=True):
            assert_bitwise_equal(got, want[case], "rows")


def test_the_cpu_backend_needs_no_device() -> None:
    assert ks.DecodeIndexer(SPEC, 2, 100, backend="cpu").device == torch.device("cpu")
    assert ks.workspace_bytes(SPEC, 2, 100, backend="cpu") == ks.workspace_bytes(SPEC, 2, 100, device="cpu")
    assert ks.supports(SPEC, backend="cpu") is None


def test_an_indexer_is_not_copied() -> None:
    """A copy would carry the handle by which compiled graphs find the original."""
    indexer = ks.DecodeIndexer(SPEC, 2, 100, device="cpu")
    for make in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(KeysieveError, match="indexer: got a DecodeIndexer to copy or pickle"):
            make(indexer)


def test_supports_judges_the_cache_as_the_call_does() -> None:
    case = random_case(SPEC, [[30]], next_n=1, seed=3)
    other = ks.IndexCache.empty(IndexerSpec(heads=8, topk=48, key_format="mxfp4"), 9)
    indexer = ks.DecodeIndexer(SPEC, 1, 100, device="cpu")
    for cache in (other, 3):
        with pytest.raises(KeysieveError) as refusal:
            indexer(case.query, cache, case.weights, case.seq_lens, case.index_table)
        assert ks.supports(SPEC, device="cpu", cache=cache) == str(refusal.value)


def test_requests_without_rows_are_refused() -> None:
    """Lengths [5, 0] name five requests of no rows: not an empty batch, which has no requests."""
    case = random_case(SPEC, [[30]], next_n=1, seed=4)
    table = case.index_table[:1].expand(5, -1)
    cache = case.index_cache()
    empty = (case.query[:0], cache, case.weights[:0]) if isinstance(case.query, torch.Tensor) else None
    assert empty is not None
    with pytest.raises(KeysieveError, match=r"seq_lens: got \[5, 0\] for 0 query rows"):
        ks.score(SPEC, *empty, torch.zeros(5, 0, dtype=torch.int32), table)
    for shape in ((0, 2), (0,)):
        assert ks.score(SPEC, *empty, torch.zeros(shape, dtype=torch.int32), table[:0]).shape == (0, 0)


def test_rows_beyond_32_bit_positions_are_refused() -> None:
    """By shape alone: nothing of the row's 4 GiB is needed for that."""
    lengths = torch.zeros(1, dtype=torch.int32, device="meta")
    for width, refused in ((2**31 - 64, False), (2**31 - 63, True), (2**31 - 1, True), (2**33, True)):
        logits = torch.empty(1, width, dtype=torch.bfloat16, device="meta")
        if refused:
            with pytest.raises(KeysieveError, match=f"logits: got rows of {width} keys; accepted: at most 2147483584"):
                check_topk(logits, lengths, 4, None, None, None, None)
        else:
            assert check_topk(logits, lengths, 4, None, None, None, None).k == 4


def test_an_output_that_requires_grad_is_refused() -> None:
    case = random_case(SPEC, [[30]], next_n=1, seed=5)
    out = torch.zeros(1, 64, dtype=torch.bfloat16, requires_grad=True)
    arguments = (case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table)
    with pytest.raises(KeysieveError, match="out: got a tensor that requires grad"):
        ks.score(SPEC, *arguments, max_len=64, out=out)
    assert not bool(out.any())
