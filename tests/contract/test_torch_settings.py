"""What a program sets in torch, and what kind of tensors it passes, changes no bit of what the functions give."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import keysieve as ks
from keysieve import IndexerSpec
from keysieve.cache import IndexCache
from keysieve.compat import deep_gemm, flashinfer
from keysieve.testing import Case, assert_bitwise_equal, random_case


def case_of(key_format: str, numerics: str | None) -> Case:
    spec = IndexerSpec(heads=8, topk=48, key_format=key_format, numerics=numerics)
    return random_case(spec, [[200, 90], [30, 0]], next_n=2, seed=17)


def everything(case: Case) -> list[torch.Tensor]:
    """What each public function makes of a case."""
    spec, cache = case.spec, case.index_cache()
    indexer = ks.DecodeIndexer(spec, max_rows=4, max_context=512, next_n=2, device="cpu")
    inputs = (case.query, cache, case.weights, case.seq_lens, case.index_table)
    step = indexer(*inputs, positions=True, **case.paging())
    logits = ks.score(spec, *inputs, 256)
    found = [step.rows, step.counts, logits, ks.score(spec, *inputs), *ks.topk(logits, case.seq_lens, 20)]
    if step.positions is not None:
        found.append(step.positions)
    shards = [ks.local_seq_lens(case.seq_lens, 2, rank, 64) for rank in range(2)]
    parts = [logits.view(4, 2, 2, 64)[:, :, rank].reshape(4, 128) for rank in range(2)]
    words = [ks.local_topk(part, lens, 20)[0] for part, lens in zip(parts, shards, strict=True)]
    found += [*shards, *words, *ks.merge(words, 20, rank=1, interleave=64, seq_lens=case.seq_lens)]
    found.append(flashinfer.top_k_ragged_transform(logits, case.seq_lens, case.seq_lens, 20))
    if spec.key_format == "fp8_fp32":
        query, pool, lens = case.query.view(2, 2, 8, 128), case.cache.unsqueeze(2), case.seq_lens.view(2, 2)
        found.append(deep_gemm.fp8_paged_mqa_logits(query, pool, case.weights, lens, case.index_table, None, 256))
    return found


def written(case: Case) -> list[torch.Tensor]:
    """What the quantisers and writers make of numbers."""
    numbers = torch.Generator().manual_seed(4)
    keys, heads = (torch.randn(n, 128, generator=numbers, dtype=torch.float32, device="cpu") for n in (64, 24))
    w = torch.randn(3, 8, generator=numbers, dtype=torch.float32, device="cpu")
    cache = IndexCache.empty(case.spec, 1, device="cpu")
    slots = torch.arange(64, device="cpu")
    cache.append(keys, slots)
    query, scale = ks.quantize_query(case.spec, heads.view(3, 8, 128))
    codes = list(query) if isinstance(query, tuple) else [query.view(torch.uint8)]
    return [cache.data, cache.read(slots), *codes, ks.fold_weights(w, scale, 128**-0.5)]


@contextlib.contextmanager
def default_dtype(kind: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def only_deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def imprecise_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Seen(TorchDispatchMode):
    """As profilers and memory trackers look on."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


SETTINGS: dict[str, Callable[[], Any]] = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "new tensors on another device": lambda: torch.device("meta"),
    "new tensors in float64": lambda: default_dtype(torch.float64),
    "new tensors in bfloat16": lambda: default_dtype(torch.bfloat16),
    "deterministic algorithms only": only_deterministic,
    "float32 products in bfloat16": imprecise_products,
    "inference": torch.inference_mode,
    "gradients and anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "someone looks on": Seen,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("key_format", "numerics"), [("fp8_fp32", None), ("fp8_ue8m0", "bf16"), ("mxfp4", None)])
def test_settings_of_torch_change_no_bit(setting: str, key_format: str, numerics: str | None) -> None:
    case = case_of(key_format, numerics)
    want = [*everything(case), *written(case)]
    with SETTINGS[setting]():
        got = [*everything(case), *written(case)]
    for one, other in zip(got, want, strict=True):
        assert one.device.type == "cpu"
        assert_bitwise_equal(one, other)


class Own(torch.Tensor):
    """A subclass of a user's."""


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same elements, not side by side."""
    bits = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
    room = torch.zeros(*bits.shape[:-1], 2 * bits.shape[-1], dtype=bits.dtype)
    room[..., 1::2] = bits
    return room[..., 1::2] if bits is x else room.view(x.dtype)[..., 1::2]


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "subclass": lambda x: (
        x.view(torch.uint8).as_subclass(Own) if x.dtype == torch.float8_e4m3fn else x.as_subclass(Own)
    ),
    "apart": apart,
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=x.dtype in (torch.float32, torch.bfloat16)),
    "negated lazily": lambda x: torch._neg_view(-x) if x.dtype == torch.float32 else x,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key_format", ["fp8_fp32", "mxfp4"])
def test_kinds_of_tensors_change_no_bit(kind: str, key_format: str) -> None:
    case, make = case_of(key_format, None), KINDS[kind]
    indexer = ks.DecodeIndexer(case.spec, max_rows=4, max_context=512, next_n=2, device="cpu")
    inputs = (case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table)
    query = tuple(make(q) for q in case.query) if isinstance(case.query, tuple) else make(case.query)
    column = torch.stack([case.seq_lens, case.seq_lens + 1], dim=1)[:, 0] if kind == "apart" else make(case.seq_lens)
    other = (query, inputs[1], make(case.weights), column, case.index_table if kind == "apart" else make(inputs[4]))
    got, want = indexer(*other, positions=True), indexer(*inputs, positions=True)
    for one, wanted in zip(got, want, strict=True):
        assert type(one) is torch.Tensor
        assert not one.requires_grad
        assert_bitwise_equal(one, wanted)
    scores = ks.score(case.spec, *other, 256)
    assert not scores.requires_grad
    assert_bitwise_equal(scores, ks.score(case.spec, *inputs, 256))
