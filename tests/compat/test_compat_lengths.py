"""Lengths of the DeepGEMM names, given for a request's last row alone: judged as lengths of every row are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import keysieve as ks
from keysieve.compat import deep_gemm
from keysieve.integrations import vllm

SPEC = ks.IndexerSpec(8, 64, "fp8_fp32", numerics="fp32")


def logits(next_n: int, lens: Any) -> torch.Tensor:
    """Of one request of ten pages."""
    numbers = torch.Generator().manual_seed(3)
    cache = ks.IndexCache.empty(SPEC, pages=10)
    cache.append(torch.randn(640, 128, generator=numbers), torch.arange(640))
    query, scale = ks.quantize_query(SPEC, torch.randn(next_n, 8, 128, generator=numbers))
    weights = ks.fold_weights(torch.ones(next_n, 8), scale, 0.1)
    table = torch.arange(10, dtype=torch.int32)[None]
    pool = cache.data.view(-1, 64, 1, 132)
    return deep_gemm.fp8_paged_mqa_logits(query[None], pool, weights, lens, table, None, 640)


def seen(scores: torch.Tensor) -> list[int]:
    return (scores > -torch.inf).sum(1).tolist()


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_integers_of_either_width_are_each_requests_last_row(next_n: int, shape: tuple[int, ...]) -> None:
    for kind in (torch.int32, torch.int64):
        assert seen(logits(next_n, torch.full(shape, 600, dtype=kind))) == [600 - back for back in range(next_n)][::-1]
        assert seen(logits(next_n, torch.full(shape, 1, dtype=kind))) == [0] * (next_n - 1) + [1]
        assert seen(logits(next_n, torch.full(shape, torch.iinfo(kind).min, dtype=kind))) == [0] * next_n


@pytest.mark.filterwarnings("ignore::keysieve.checks.DeviceFaultWarning")
@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("length", [2**31 + 5, 2**32 + 5, 2**63 - 1])
def test_a_length_beyond_32_bits_is_not_taken_for_a_shorter_one(next_n: int, length: int) -> None:
    assert seen(logits(next_n, torch.tensor([length]))) == [0] * next_n


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("lens", [torch.tensor([600.7]), torch.tensor([True]), torch.tensor([9 + 0j]), [600]])
def test_lengths_that_are_no_integers_are_refused(next_n: int, lens: Any) -> None:
    with pytest.raises(ks.KeysieveError, match="context_lens: got"):
        logits(next_n, lens)


@pytest.mark.parametrize("next_n", [2, 3])
def test_vllms_lengths_are_judged_alike(next_n: int) -> None:
    last = torch.tensor([2**32 + 5, 600, 1, -(2**40)])
    rows = vllm.row_lengths(last, next_n, 4 * next_n).view(4, next_n)
    assert rows.dtype == torch.int32
    assert rows[1:, -1].tolist() == [600, 1, 0]
    assert rows[0].tolist() == [2**31 - next_n + i for i in range(next_n)]
