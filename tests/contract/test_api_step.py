"""The whole step through ``DecodeIndexer``, against the independent brute force and in every form a call may take."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.step import Expected, expected_step

import keysieve as ks
from keysieve import DecodeIndexer, IndexerSpec, KeysieveError, Selection
from keysieve.reference.score import Scorer
from keysieve.testing import Case, assert_bitwise_equal, assert_untouched, draw_case, guarded_rows, random_case

CONTEXT = 2048


def indexer_for(case: Case, **options: Any) -> DecodeIndexer:
    defaults = {"max_rows": max(case.rows, 1), "max_context": CONTEXT, "next_n": case.next_n, "device": "cpu"}
    return DecodeIndexer(case.spec, **{**defaults, **options})


def run(case: Case, indexer: DecodeIndexer | None = None, **options: Any) -> Selection:
    """One step of a case; ``options`` replace or add keyword arguments, or tensors of the case."""
    fields = {name: options.pop(name) for name in ("seq_lens", "index_table") if name in options}
    seq_lens, table = fields.get("seq_lens", case.seq_lens), fields.get("index_table", case.index_table)
    indexer = indexer_for(case) if indexer is None else indexer
    kwargs = {**case.paging(), "positions": True, **options}
    return indexer(case.query, case.index_cache(), case.weights, seq_lens, table, **kwargs)


def assert_same(got: Selection | Expected, want: Selection | Expected, what: object = "a step") -> None:
    for name in ("rows", "counts", "positions"):
        assert_bitwise_equal(getattr(got, name), getattr(want, name), f"{name} of {what}")


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31 - 1), numerics=st.sampled_from(("fp32", "bf16")))
def test_steps_of_every_kind_equal_the_brute_force(seed: int, numerics: str) -> None:
    case = draw_case(seed, numerics=numerics, max_context=900, max_requests=4)
    indexer = indexer_for(case)
    with assert_untouched(cache=case.cache, index_table=case.index_table, seq_lens=case.seq_lens):
        got = run(case, indexer)
    assert_same(got, expected_step(case, numerics), case)
    indexer.check()  # nothing to report


RAGGED = random_case(
    IndexerSpec(heads=8, topk=96), [[200, 201, 202], [0, 64, 300], [-1, 0, 0], [96, 95, 97]], next_n=3, seed=31,
    kv_page=16, block_rows=24,
)  # fmt: skip


def test_two_dimensional_lengths_and_columns_of_a_table_of_lengths() -> None:
    want = expected_step(RAGGED)
    square = RAGGED.seq_lens.view(4, 3)
    assert_same(run(RAGGED, seq_lens=square), want)
    assert_same(run(RAGGED, seq_lens=square.t().contiguous().t()), want)
    wide = torch.stack([RAGGED.seq_lens, torch.full_like(RAGGED.seq_lens, 77)], 1)
    assert_same(run(RAGGED, seq_lens=wide[:, 0]), want)
    assert_same(run(RAGGED, seq_lens=RAGGED.seq_lens.to(torch.int64)), want)


def test_tables_expanded_per_row() -> None:
    want = expected_step(RAGGED)
    index_table = RAGGED.index_table.repeat_interleave(3, 0)
    kv_table = RAGGED.kv_table.repeat_interleave(3, 0)
    square = RAGGED.seq_lens.view(4, 3)
    assert_same(run(RAGGED, seq_lens=square, index_table=index_table, kv_table=kv_table), want, "2-D lengths")
    one = indexer_for(RAGGED, next_n=(1, 3))
    assert_same(run(RAGGED, one, index_table=index_table, kv_table=kv_table), want, "next_n 1")
    shared = random_case(RAGGED.spec, [[200, 150, 64]], next_n=3, seed=32)
    tables = {"index_table": shared.index_table.expand(3, -1), "kv_table": shared.kv_table.expand(3, -1)}
    assert_same(run(shared, indexer_for(shared, next_n=1), **tables), expected_step(shared), "stride 0")


def test_strided_query_and_weights() -> None:
    query = torch.empty(RAGGED.rows, 2, 8, 128, dtype=torch.uint8)
    query[:, 1] = RAGGED.query.view(torch.uint8)
    weights = torch.full((RAGGED.rows, 30), torch.nan)
    weights[:, 3:19:2] = RAGGED.weights
    strided = dataclasses.replace(RAGGED, query=query[:, 1].view(torch.float8_e4m3fn), weights=weights[:, 3:19:2])
    assert_same(run(strided), expected_step(RAGGED))


def test_query_as_bytes() -> None:
    assert_same(run(dataclasses.replace(RAGGED, query=RAGGED.query.view(torch.uint8))), expected_step(RAGGED))


def test_output_buffers_of_the_caller() -> None:
    want = expected_step(RAGGED)
    out, positions = guarded_rows(12, 96), guarded_rows(12, 96, stride=96)
    counts = guarded_rows(12, 1, stride=1)
    got = run(RAGGED, out=out.view, positions=positions.view, counts=counts.view[:, 0])
    assert_same(got, want)
    assert got.rows.data_ptr() == out.view.data_ptr()
    assert got.positions is positions.view
    assert got.counts.data_ptr() == counts.view.data_ptr()
    for buffer in (out, positions, counts):
        buffer.assert_canaries()


def test_positions_only_on_request_and_rows_are_positions_without_a_table() -> None:
    want = expected_step(RAGGED)
    plain = run(RAGGED, positions=False)
    assert plain.positions is None
    assert torch.equal(plain.rows, want.rows)
    untabled = run(RAGGED, kv_table=None)
    assert torch.equal(untabled.rows, want.positions)
    assert torch.equal(untabled.positions, want.positions)


def test_kv_page_defaults_to_the_page_and_block_rows_to_kv_page() -> None:
    case = random_case(IndexerSpec(heads=8, topk=32), [200], seed=33, kv_page=64)
    assert_same(run(case, kv_page=None, block_rows=None), expected_step(case))
    small = random_case(IndexerSpec(heads=8, topk=32), [200], seed=33, kv_page=16)
    assert_same(run(small, block_rows=None), expected_step(small))


def test_short_requests_are_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row fits topk: no key byte and no page id is read. One longer row in a request: it is scored."""
    scored: list[int] = []
    score_request = Scorer.score_request

    def watch(self: Scorer, request: int, *rest: Any) -> None:
        scored.append(request)
        score_request(self, request, *rest)

    monkeypatch.setattr(Scorer, "score_request", watch)
    case = random_case(IndexerSpec(heads=8, topk=100), [[100, 3], [101, 3], [0, 0], [64, 99]], next_n=2, seed=34)
    want = expected_step(case)
    table = case.index_table.clone()
    table[[0, 2, 3]] = -1
    indexer = indexer_for(case)
    assert_same(run(case, indexer, index_table=table), want)
    assert scored == [1]
    indexer.check()
    ks.score(case.spec, case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table)
    assert scored == [1, 0, 1, 2, 3]  # the public score always scores


def test_batches_that_are_sliced_padded_or_repeated_select_the_same() -> None:
    lengths = [[300 + 7 * r + j for j in range(4)] for r in range(6)]
    case = random_case(IndexerSpec(heads=16, topk=64), lengths, next_n=4, seed=35)
    whole = run(case)
    assert_same(run(case), whole, "the same step again")
    indexer = indexer_for(case, next_n=(1, 4), max_rows=64)
    cache, table = case.index_cache(), case.index_table
    for t in range(case.rows):
        one = slice(t, t + 1)
        r = slice(t // 4, t // 4 + 1)
        got = indexer(case.query[one], cache, case.weights[one], case.seq_lens[one], table[r], positions=True)
        assert torch.equal(got.positions, whole.positions[one])
        assert torch.equal(got.counts, whole.counts[one])
    padded = case.seq_lens.clone().view(6, 4)
    padded[1, 2], padded[4] = 0, -5
    got = run(case, seq_lens=padded)
    for t, length in enumerate(padded.view(-1).tolist()):
        if length > 0:
            assert torch.equal(got.rows[t], whole.rows[t])
        else:
            assert got.counts[t] == 0
            assert bool((got.rows[t] == -1).all())
            assert bool((got.positions[t] == -1).all())


def test_an_empty_batch() -> None:
    case = random_case(IndexerSpec(heads=8, topk=16), [9], seed=36)
    query, weights = case.query[:0], case.weights[:0]
    indexer = DecodeIndexer(case.spec, max_rows=4, max_context=100, next_n=(1, 2), device="cpu")
    for seq_lens in (torch.empty(0, dtype=torch.int32), torch.empty(0, 2, dtype=torch.int32)):
        table, kv = torch.empty(0, 3, dtype=torch.int32), torch.empty(0, 3, dtype=torch.int32)
        got = indexer(query, case.index_cache(), weights, seq_lens, table, kv_table=kv, positions=True)
        assert got.rows.shape == got.positions.shape == (0, 16)
        assert got.counts.shape == (0,)


def test_state_does_not_leak_between_layers_formats_or_lengths() -> None:
    """One indexer, two caches in turn, long and short steps in turn: as if each were alone."""
    first = random_case(IndexerSpec(heads=8, topk=64), [900, 70], seed=37)
    second = random_case(IndexerSpec(heads=8, topk=64), [80, 500], seed=38)
    indexer = indexer_for(first)
    for _ in range(2):
        assert_same(run(first, indexer), expected_step(first))
        assert_same(run(second, indexer), expected_step(second))
        rolled_back = dataclasses.replace(first, seq_lens=first.seq_lens - 3)
        assert_same(run(rolled_back, indexer), expected_step(rolled_back))


def test_one_indexer_serves_several_next_n() -> None:
    spec = IndexerSpec(heads=8, topk=32)
    indexer = DecodeIndexer(spec, max_rows=16, max_context=512, next_n=(1, 2, 4), device="cpu")
    for n in (4, 1, 2):
        case = random_case(spec, [[200 + j for j in range(n)], [90] * n], next_n=n, seed=40 + n)
        assert_same(run(case, indexer), expected_step(case))
    with pytest.raises(KeysieveError, match=r"next_n: got 3 .*\(1, 2, 4\)"):
        run(random_case(spec, [[9] * 3], next_n=3, seed=44), indexer)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_autograd_modes(mode: Any) -> None:
    want = expected_step(RAGGED)
    weights = RAGGED.weights.clone().requires_grad_()
    with mode():
        indexer = indexer_for(RAGGED)
        inside = run(dataclasses.replace(RAGGED, weights=weights), indexer)
    assert_same(inside, want)
    assert_same(run(RAGGED, indexer), want)


def test_plan_and_workspace_can_be_asked_before_construction() -> None:
    spec = IndexerSpec(heads=32, topk=2048)
    indexer = DecodeIndexer(spec, max_rows=64, max_context=5000, next_n=(1, 2), device="cpu")
    asked = ks.workspace_bytes(spec, 64, 5000, next_n=(1, 2), device="cpu")
    assert asked == indexer.workspace_bytes == indexer.plan.workspace_bytes
    assert f"{asked:,} B" in str(indexer.plan)
    assert indexer.plan.logits_elements == 2 * 5120
    wide = ks.workspace_bytes(spec, 640, 1 << 20, device="cuda", backend="sm90")
    narrow = ks.workspace_bytes(spec, 64, 1 << 20, device="cuda", backend="sm90")
    bounded = ks.workspace_bytes(spec, 640, 1 << 20, device="cuda", backend="sm90", max_total_keys=1 << 20)
    assert bounded < narrow < wide
    assert wide >= 640 * (1 << 20) * 2


def test_faults_are_reported_once_and_the_rest_of_the_step_stands() -> None:
    case = random_case(IndexerSpec(heads=8, topk=32), [200, 300, 100], seed=45)
    want = expected_step(case)
    table = case.index_table.clone()
    table[2, 1] = case.cache.shape[0]
    for options, text in (
        ({"index_table": case.index_table[:, :4]}, "row 1: length 300 is beyond the 256 keys of index_table"),
        ({"kv_table": case.kv_table[:, :4]}, "row 1: length 300 is beyond the 256 keys of kv_table"),
        ({"index_table": table}, "request 2: index_table column 1"),
    ):
        indexer = indexer_for(case)
        got = run(case, indexer, **options)
        broken = 2 if "request 2" in text else 1
        for t in set(range(3)) - {broken}:
            assert torch.equal(got.rows[t], want.rows[t])
        if broken == 1:
            assert got.counts[1] == 0
            assert bool((got.rows[1] == -1).all())
            assert bool((got.positions[1] == -1).all())
        else:
            kept = got.positions[2, :32]
            assert not bool(((kept >= 64) & (kept < 100)).any())  # NaN ranks below every other key
        with pytest.raises(ks.DeviceFault, match=text):
            indexer.check()
        indexer.check()
    short = indexer_for(case, max_context=250)
    got = run(case, short)
    assert got.counts.tolist() == [32, 0, 32]
    with pytest.raises(ks.DeviceFault, match="max_context"):
        short.check()


def test_stateless_calls_warn() -> None:
    case = random_case(IndexerSpec(heads=8, topk=32), [200], seed=46)
    args = (case.spec, case.query, case.index_cache(), case.weights, case.seq_lens)
    with pytest.warns(ks.DeviceFaultWarning, match="row 0: length 200"):
        ks.score(*args, case.index_table[:, :2])
    logits = ks.score(*args, case.index_table)
    with pytest.warns(ks.DeviceFaultWarning, match="row 0: length 201"):
        positions, counts = ks.topk(logits, case.seq_lens + 1, 8)
    assert counts.tolist() == [0]
    assert positions.tolist() == [[-1] * 8]
    owner = torch.tensor([5], dtype=torch.int32)
    with pytest.warns(ks.DeviceFaultWarning, match="row_request 5"):
        rows, counts = ks.topk(logits, case.seq_lens, 8, kv_table=case.kv_table, row_request=owner)
    assert counts.tolist() == [0]
    assert rows.tolist() == [[-1] * 8]


def test_max_total_keys_bounds_what_a_step_may_need() -> None:
    """128 * next_n * tiles of the requests that are scored; requests that fit topk cost nothing."""
    case = random_case(IndexerSpec(heads=8, topk=100), [[129, 3], [100, 100], [300, 0]], next_n=2, seed=47)
    needed = 2 * 128 * (2 + 0 + 3)
    assert_same(run(case, indexer_for(case, max_total_keys=needed)), expected_step(case))
    out = torch.full((6, 100), 77, dtype=torch.int32)
    tight = indexer_for(case, max_total_keys=needed - 1)
    with (
        assert_untouched(out=out),
        pytest.raises(KeysieveError, match=f"max_total_keys: got a step that needs {needed}"),
    ):
        run(case, tight, out=out)


def test_public_score_and_topk_into_buffers() -> None:
    case = random_case(IndexerSpec(heads=8, topk=32), [[200, 100], [50, 0]], next_n=2, seed=48)
    args = (case.spec, case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table)
    buffer = guarded_rows(4, 256, dtype=torch.bfloat16)
    logits = ks.score(*args, 256, out=buffer.view)
    assert logits.data_ptr() == buffer.view.data_ptr()
    buffer.assert_canaries()
    assert_bitwise_equal(logits, ks.score(*args, 256))
    want = expected_step(case)
    out, counts = guarded_rows(4, 32), torch.empty(4, dtype=torch.int32)
    got = ks.topk(logits, case.seq_lens, 32, out=out.view, counts=counts, **case.paging())
    assert got[0].data_ptr() == out.view.data_ptr()
    assert_bitwise_equal(out.view, want.rows)
    assert_bitwise_equal(counts, want.counts)
    out.assert_canaries()
    shared = torch.tensor([1, 0, 0, 1], dtype=torch.int32)
    by_owner, _ = ks.topk(logits, case.seq_lens, 32, row_request=shared, **case.paging())
    swapped, _ = ks.topk(logits[[1, 2, 0, 3]], case.seq_lens[[1, 2, 0, 3]], 32, **case.paging())
    assert_bitwise_equal(by_owner[[1, 2, 0, 3]], swapped)
