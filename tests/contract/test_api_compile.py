"""torch.compile keeps every call as one opaque operator and changes no bit."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch

import keysieve as ks
from keysieve import IndexerSpec, Selection, api, backends
from keysieve.dcp.base import ContextParallel, Winners
from keysieve.testing import Case, assert_bitwise_equal, random_case

FORMATS = pytest.mark.parametrize("key_format", ["fp8_fp32", "mxfp4"])


def case_of(key_format: str, seed: int = 61) -> Case:
    return random_case(IndexerSpec(heads=8, topk=48, key_format=key_format), [[200, 90], [30, 0]], next_n=2, seed=seed)


class Graphs:
    """A torch.compile backend that keeps the graphs it is given."""

    def __init__(self) -> None:
        self.seen: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        self.seen.append(graph)
        return graph.forward

    def operators(self) -> list[str]:
        return [str(n.target) for g in self.seen for n in g.graph.nodes if "keysieve" in str(n.target)]


@FORMATS
def test_a_step_is_one_operator_in_one_graph(key_format: str) -> None:
    case = case_of(key_format)
    indexer = ks.DecodeIndexer(case.spec, max_rows=4, max_context=512, next_n=2, device="cpu")
    cache, graphs = case.index_cache(), Graphs()

    def layer(query: Any, weights: torch.Tensor, lens: torch.Tensor, table: torch.Tensor, kv: torch.Tensor) -> Any:
        got = indexer(query, cache, weights * 1.0, lens + 0, table, kv_table=kv, positions=True)
        return got.rows + 0, got.counts, got.positions

    args = (case.query, case.weights, case.seq_lens, case.index_table, case.kv_table)
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for got, want in zip(compiled(*args), layer(*args), strict=True):
        assert_bitwise_equal(got, want)
    assert graphs.operators() == ["keysieve.decode_step.default"]
    shorter = (*args[:2], case.seq_lens - 20, *args[3:])
    for got, want in zip(compiled(*shorter), layer(*shorter), strict=True):
        assert_bitwise_equal(got, want)
    assert len(graphs.seen) == 1  # other lengths compile nothing
    fn = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for got, want in zip(fn(*args), layer(*args), strict=True):
        assert_bitwise_equal(got, want)


def test_a_compiled_step_writes_the_callers_buffers_and_refuses_what_the_eager_one_does() -> None:
    case = case_of("fp8_fp32")
    indexer = ks.DecodeIndexer(case.spec, max_rows=4, max_context=512, next_n=2, device="cpu")
    out, positions = (torch.full((4, 48), 77, dtype=torch.int32) for _ in range(2))
    counts, cache = torch.full((4,), 77, dtype=torch.int32), case.index_cache()

    def layer(weights: torch.Tensor) -> Selection:
        lens, table = case.seq_lens, case.index_table
        return indexer(case.query, cache, weights, lens, table, out=out, counts=counts, positions=positions)

    want = layer(case.weights)
    rows, numbers = want.rows.clone(), want.counts.clone()
    out.fill_(77)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = compiled(case.weights)
    assert got.positions.data_ptr() == positions.data_ptr()
    assert got.rows.data_ptr() == out.data_ptr()
    assert_bitwise_equal(out, rows)
    assert_bitwise_equal(counts, numbers)
    out.fill_(77)
    with pytest.raises(ks.KeysieveError, match="weights: got"):
        compiled(case.weights.double())
    assert bool((out == 77).all())


class Alone(ContextParallel):
    """A group of one rank that notes the call sites."""

    def __init__(self) -> None:
        super().__init__(1, 0)
        self.sites: list[int] = []

    def offered(self, topk: int) -> int:
        return topk

    def select(
        self, logits: torch.Tensor, local_lens: torch.Tensor, seq_lens: torch.Tensor, *, site: int = 0
    ) -> Winners:
        assert torch.equal(local_lens, seq_lens.clamp_min(0))
        self.sites.append(site)
        positions, counts = ks.topk(logits, local_lens, self.topk)
        return Winners(positions, counts, positions)


def test_the_call_site_reaches_the_group_compiled_or_not() -> None:
    case, group = case_of("fp8_fp32"), Alone()
    cache = case.index_cache()
    indexer = ks.DecodeIndexer(case.spec, max_rows=4, max_context=512, next_n=2, device="cpu", dcp=group)
    plain = ks.DecodeIndexer(case.spec, max_rows=4, max_context=512, next_n=2, device="cpu")

    def layer(weights: torch.Tensor) -> torch.Tensor:
        return indexer(case.query, cache, weights, case.seq_lens, case.index_table, site=7, **case.paging()).rows

    want = plain(case.query, cache, case.weights, case.seq_lens, case.index_table, **case.paging()).rows
    assert_bitwise_equal(layer(case.weights), want)
    assert_bitwise_equal(torch.compile(layer, fullgraph=True, backend="eager")(case.weights), want)
    assert group.sites == [7, 7]


@FORMATS
def test_score_and_topk_are_operators_too(key_format: str) -> None:
    case = case_of(key_format)
    cache, graphs = case.index_cache(), Graphs()

    def both(query: Any, weights: torch.Tensor, lens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = ks.score(case.spec, query, cache, weights, lens, case.index_table, 256)
        plain = ks.topk(logits, lens, 48)
        return (logits, *plain, *ks.topk(logits, lens, 48, **case.paging()))

    args = (case.query, case.weights, case.seq_lens)
    for got, want in zip(torch.compile(both, fullgraph=True, backend=graphs)(*args), both(*args), strict=True):
        assert_bitwise_equal(got, want)
    assert graphs.operators() == ["keysieve.score.default", "keysieve.topk.default", "keysieve.topk.default"]


def test_a_device_is_asked_what_it_can_when_a_compiled_call_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while it is traced: a GPU's backend looks at the cache's address, and a traced tensor has none."""
    case = case_of("fp8_fp32")
    cache = case.index_cache()

    def looks(spec: IndexerSpec, *, cache: Any = None, **options: Any) -> Any:
        if cache is not None and cache.data.data_ptr() % 16:
            raise AssertionError
        return backends.resolve(spec, cache=cache, **options)

    def by_address(backend: str, device: torch.device) -> str:
        assert case.index_table.data_ptr() % 4 == 0
        return backends.name_for(backend, device)

    monkeypatch.setattr(api, "resolve", looks)
    monkeypatch.setattr(api, "name_for", by_address)

    def both(weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = ks.score(case.spec, case.query, cache, weights, case.seq_lens, case.index_table, 256)
        return (logits, *ks.topk(logits, case.seq_lens, 48))

    want = both(case.weights)
    for got, wanted in zip(torch.compile(both, fullgraph=True, backend="eager")(case.weights), want, strict=True):
        assert_bitwise_equal(got, wanted)


@FORMATS
def test_a_cache_may_be_made_in_what_is_compiled(key_format: str) -> None:
    """Around an engine's own pool, in each call; its address is judged when the operators run."""
    case = case_of(key_format)
    indexer = ks.DecodeIndexer(case.spec, max_rows=4, max_context=512, next_n=2, device="cpu")

    def layer(pool: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = ks.IndexCache(case.spec, pool)
        logits = ks.score(case.spec, case.query, cache, case.weights, case.seq_lens, case.index_table, 256)
        return (logits, indexer(case.query, cache, case.weights, case.seq_lens, case.index_table).rows)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    room = torch.empty(case.cache.untyped_storage().nbytes() + 64, dtype=torch.uint8)
    for start in (0, 16):
        pool = room[start:].as_strided(case.cache.shape, case.cache.stride()).copy_(case.cache)
        for got, want in zip(compiled(pool), layer(pool), strict=True):
            assert_bitwise_equal(got, want)
    odd = room[3:].as_strided(case.cache.shape, case.cache.stride())
    for way in (layer, compiled):
        with pytest.raises(ks.KeysieveError, match="tensor address: got 3 mod 16"):
            way(odd)


def test_a_cache_that_left_a_compiled_function_is_judged_by_its_address() -> None:
    case = case_of("fp8_fp32")
    room = torch.zeros(case.cache.untyped_storage().nbytes() + 64, dtype=torch.uint8)
    odd = room[3:].as_strided(case.cache.shape, case.cache.stride())

    def wrap(pool: torch.Tensor) -> tuple[ks.IndexCache, torch.Tensor]:
        return ks.IndexCache(case.spec, pool), pool + 1

    cache, _ = torch.compile(wrap, fullgraph=True, backend="eager")(odd)
    with pytest.raises(ks.KeysieveError, match="tensor address: got 3 mod 16"):
        ks.score(case.spec, case.query, cache, case.weights, case.seq_lens, case.index_table, 256)


def test_score_without_a_width_is_refused_under_compile() -> None:
    case = case_of("fp8_fp32")
    cache = case.index_cache()

    def wide(weights: torch.Tensor) -> torch.Tensor:
        return ks.score(case.spec, case.query, cache, weights, case.seq_lens, case.index_table)

    with pytest.raises(Exception, match="max_len: got None"):
        torch.compile(wide, fullgraph=True, backend="eager")(case.weights)


@pytest.mark.parametrize("key_format", ["fp8_fp32", "fp8_ue8m0", "mxfp4"])
def test_operators_keep_their_promises(key_format: str) -> None:
    """torch's own check: schema (only the named buffers are written), fakes, and tracing."""
    case = case_of(key_format)
    s = dataclasses.replace(case.spec, numerics="bf16")
    codes, words = case.query if isinstance(case.query, tuple) else (case.query.view(torch.uint8), None)
    inputs = (codes, words, case.cache, case.weights, case.seq_lens, case.index_table)
    logits = torch.zeros(4, 256, dtype=torch.bfloat16)
    score_args = (*inputs, 2, s.heads, s.topk, s.key_format, s.numerics, logits)
    torch.library.opcheck(torch.ops.keysieve.score.default, score_args)
    out, counts = torch.zeros(4, 48, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    topk_args = (logits, case.seq_lens, case.kv_table, None, 64, 64, out, counts)
    torch.library.opcheck(torch.ops.keysieve.topk.default, topk_args)
    indexer = ks.DecodeIndexer(case.spec, max_rows=4, max_context=512, next_n=2, device="cpu")
    step_args = (indexer._handle, *inputs, case.kv_table, None, None, 0, out, counts, torch.zeros_like(out))
    torch.library.opcheck(torch.ops.keysieve.decode_step.default, step_args)


def test_an_indexer_that_is_gone_is_named() -> None:
    case = case_of("fp8_fp32")
    indexer = ks.DecodeIndexer(case.spec, max_rows=4, max_context=512, next_n=2, device="cpu")
    handle = indexer._handle
    del indexer
    gc.collect()
    inputs = (case.query.view(torch.uint8), None, case.cache, case.weights, case.seq_lens, case.index_table)
    out, counts = torch.zeros(4, 48, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ks.KeysieveError, match="indexer: got one that no longer exists"):
        torch.ops.keysieve.decode_step(handle, *inputs, None, None, None, 0, out, counts, None)
