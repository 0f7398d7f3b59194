"""``DecodeIndexer(dcp=Gather)`` in real processes: the keys of one rank alone, and clear errors in bounded time."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import keysieve as ks
from keysieve.testing import Case, pattern_case, random_case, take_requests

from .processes import Result, run_ranks
from .shards import assert_is_tp, indexer_of, plain, shard_case, step

FP8 = ks.IndexerSpec(heads=8, topk=48)
LAYOUTS = ((1, True), (16, True), (64, False), (3, False))
"""(interleave, sharded): a replicated cache with whole pages per rank, and with an interleave that splits pages."""


def _values(results: list[Result]) -> list[Any]:
    failures = [f"rank {r}: {x.kind}: {x.error}" for r, x in enumerate(results) if x.error is not None or x.died]
    assert not failures, failures
    return [x.value for x in results]


# --- the same keys -------------------------------------------------------------------------------------------------


def _cases() -> list[Case]:
    """Ties everywhere, plateaus, speculative rows, padding rows in the middle, rows shorter than the world."""
    bf16 = ks.IndexerSpec(heads=16, topk=33, key_format="fp8_ue8m0", numerics="bf16")
    fp4 = ks.IndexerSpec(heads=8, topk=20, key_format="mxfp4")
    return [
        random_case(FP8, [700, 0, 5, 48, 49, 300], seed=1, copies=0.5),
        pattern_case(FP8, "relu_plateau", [900, 130], seed=2),
        random_case(bf16, [[200, 201, 0, 203], [7, 7, 9, 500]], next_n=4, seed=3),
        random_case(fp4, [[330, 331], [1, 2]], next_n=2, seed=4, copies=0.5),
        pattern_case(FP8, "all_equal", [400, 64, 3], seed=5),
    ]


def _same_keys(rank: int, world: int, cases: list[Case]) -> list[Any]:
    got = []
    for interleave, sharded in LAYOUTS:
        for case in cases:
            group = ks.dcp.Gather(interleave=interleave, sharded=sharded)
            mine = shard_case(case, world, rank, interleave, sharded=sharded)
            indexer = indexer_of(mine, group, max_context=2048)
            got.append([plain(step(indexer, mine, site=site)) for site in range(2)])
    return got


@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
def test_the_ranks_together_select_what_one_rank_selects(world: int) -> None:
    cases = _cases()
    per_rank = _values(run_ranks(world, _same_keys, cases, limit=110))
    for i, (interleave, sharded) in enumerate(LAYOUTS):
        for j, case in enumerate(cases):
            for again in range(2):
                selections = [ranks[i * len(cases) + j][again] for ranks in per_rank]
                assert_is_tp(case, world, interleave, selections, sharded=sharded)


def _positions(rank: int, world: int, cases: list[Case], interleave: int) -> list[Any]:
    group = ks.dcp.Gather(interleave=interleave)
    indexer = indexer_of(cases[0], group, max_rows=64, max_context=2048)
    return [plain(step(indexer, shard_case(case, world, rank, interleave))) for case in cases]


def test_ranks_and_batches_agree_in_set_and_order() -> None:
    """One batch of 64 rows, two of 32 and 64 of one row, on four ranks: the same lists, byte for byte, everywhere."""
    whole = pattern_case(FP8, "half_tied", [100 + 7 * r for r in range(64)], seed=6)
    slices = [whole, *(take_requests(whole, list(range(a, a + 32))) for a in (0, 32))]
    slices += [take_requests(whole, [r]) for r in range(64)]
    per_rank = _values(run_ranks(4, _positions, slices, 16, limit=110))
    first = per_rank[0][0][2]
    for ranks in per_rank:
        _, whole_counts, positions = ranks[0]
        assert (positions == first).all()
        halves, singles = ranks[1:3], ranks[3:]
        for parts in (halves, singles):
            assert (torch.cat([torch.from_numpy(p[2]) for p in parts]).numpy() == positions).all()
            assert (torch.cat([torch.from_numpy(p[1]) for p in parts]).numpy() == whole_counts).all()
    assert_is_tp(whole, 4, 16, [ranks[0] for ranks in per_rank])


def _long_steps(rank: int, _world: int, calls: int) -> Any:
    """128K-key rows with random delays of ranks; scores given, so that only selection and exchange run."""
    group = ks.dcp.Gather(interleave=64)
    group.bind(ks.IndexerSpec(heads=8, topk=2048), max_rows=4, max_context=1 << 18, device="cpu")
    pause = torch.Generator().manual_seed(rank)
    digests = []
    for call in range(calls):
        lens = torch.tensor([131072, 80_000 + call, 0, 100], dtype=torch.int32)
        if call == calls - 1:  # an idle batch after a long step: dummy rows of one key
            lens = torch.tensor([1, 1, 0, 1], dtype=torch.int32)
        logits = torch.randn(4, 131072, generator=torch.Generator().manual_seed(call)).bfloat16()
        time.sleep(float(torch.rand(1, generator=pause)) * 0.005)
        won = group.select(group.own_columns(logits), group.local_lens(lens), lens, site=call)
        digests.append((won.positions.sum(1).tolist(), won.counts.tolist()))
        if rank == 0:
            expected, _ = ks.topk(logits, lens, 2048)
            assert torch.equal(won.positions, expected)
    return digests


def test_long_rows_with_delayed_ranks_and_an_idle_batch_after_them() -> None:
    per_rank = _values(run_ranks(4, _long_steps, 4, limit=110))
    for call in range(4):
        assert len({str(ranks[call][0]) for ranks in per_rank}) == 1
        counts = torch.tensor([ranks[call][1] for ranks in per_rank]).sum(0)
        assert counts.tolist() == ([2048, 2048, 0, 100] if call < 3 else [1, 1, 0, 1])


# --- errors, on every rank, in bounded time ------------------------------------------------------------------------


def _uneven(rank: int, world: int, case: Case, odd_rank: int, odd: str, timeout: float) -> Any:
    group = ks.dcp.Gather(interleave=16, timeout=30.0)
    mine = shard_case(case, world, rank, 16)
    indexer = indexer_of(mine, group, max_rows=64, max_context=1000 if odd == "context" and rank == odd_rank else 4096)
    assert plain(step(indexer, mine)) is not None
    group.timeout = timeout  # of the calls to come: the processes were not started at one moment
    if rank == odd_rank:
        if odd == "rows":
            mine = take_requests(mine, [0, 1, 1])
        elif odd == "no rows":
            mine = take_requests(mine, [])
        elif odd == "lengths":
            mine = replace(mine, seq_lens=mine.seq_lens + 1)
        elif odd == "dies":
            os._exit(7)
        elif odd == "dies later":
            group._verdict = lambda _headers: os._exit(7)  # type: ignore[method-assign]  # headers are exchanged
        elif odd == "sleeps":
            time.sleep(timeout + 1.0)
        elif odd == "refused":
            mine = replace(mine, index_table=mine.index_table[:, :1])
        elif odd == "dtype":
            mine = replace(mine, weights=mine.weights.double())
    outputs = [torch.full((mine.rows, case.spec.topk), 77, dtype=torch.int32) for _ in range(2)]
    try:
        options = {"site": 9} if odd == "site" and rank == odd_rank else {}
        indexer(mine.query, mine.index_cache(), mine.weights, mine.seq_lens, mine.index_table, out=outputs[0],
                positions=outputs[1], **options)  # fmt: skip
    except ks.KeysieveError as error:
        untouched = all(bool((x == 77).all()) for x in outputs)
        return str(error), type(error).__name__, untouched, _next_call(indexer, case, world, rank)
    return "no error", "", False, ""


def _next_call(indexer: ks.DecodeIndexer, case: Case, world: int, rank: int) -> str:
    """What a good call after the failed one says."""
    try:
        step(indexer, shard_case(case, world, rank, 16))
    except ks.KeysieveError as error:
        return str(error)
    return "fine"


AGREED = {
    "rows": "rows: got rank 0: 2, rank 1: 3, rank 2: 2",
    "no rows": "rows: got rank 0: 2, rank 1: 0, rank 2: 2",
    "lengths": "lengths digest: got rank 0:",
    "site": "site: got rank 0: 0, rank 1: 9, rank 2: 0",
}


@pytest.mark.parametrize("odd", sorted(AGREED))
def test_ranks_called_differently_all_refuse_at_once_and_stay_in_step(odd: str) -> None:
    case = random_case(FP8, [300, 200], seed=8)
    results = run_ranks(3, _uneven, case, 1, odd, 30.0, limit=60)
    for rank, (text, kind, untouched, after) in enumerate(_values(results)):
        assert kind == "ExchangeError"
        assert AGREED[odd] in text, f"rank {rank}: {text}"
        assert "accepted: the same" in text
        assert untouched, f"rank {rank}: outputs were written by a refused call"
        assert after == "fine", f"rank {rank}: {after}"
    assert max(r.seconds for r in results) < 10, "nobody waits for a timeout"


@pytest.mark.parametrize("odd", ["refused", "dtype"])
def test_a_rank_whose_call_is_refused_tells_its_peers(odd: str) -> None:
    """Refused before the exchange; the next call of that rank must not stand in for the refused one."""
    case = random_case(FP8, [300, 200], seed=8)
    results = run_ranks(3, _uneven, case, 1, odd, 30.0, limit=60)
    for rank, (text, kind, untouched, after) in enumerate(_values(results)):
        assert untouched
        assert after == "fine", f"rank {rank}: {after}"
        if rank == 1:
            assert kind == "KeysieveError"
            assert ("columns for" if odd == "refused" else "weights: got float64") in text
        else:
            assert kind == "ExchangeError"
            assert "rank(s) [1] refused call 2" in text
    assert max(r.seconds for r in results) < 10, "nobody waits for a timeout"


@pytest.mark.parametrize("odd", ["dies", "dies later", "sleeps"])
def test_a_rank_that_goes_away_is_an_error_on_the_others_within_the_time_limit(odd: str) -> None:
    case = random_case(FP8, [300, 200], seed=8)
    results = run_ranks(4, _uneven, case, 2, odd, 2.0, limit=60)
    for rank in (0, 1, 3):
        assert results[rank].error is None, results[rank]
        text, kind, untouched, after = results[rank].value
        assert kind == "ExchangeError"
        assert untouched
        assert f"no answer on rank {rank} to call 2 from " in text
        assert "from rank 2 (" in text
        assert (", after agreeing on the call" in text) == (odd == "dies later")
        assert "failed before" in after, "a group whose ranks are out of step refuses further calls"
        assert results[rank].seconds < 20, "the limit set last holds, not the first"
    assert results[2].died == odd.startswith("dies")


def _zero_everywhere(rank: int, world: int, case: Case) -> Any:
    group = ks.dcp.Gather()
    indexer = indexer_of(case, group, max_rows=8, max_context=1024)
    empty = step(indexer, take_requests(shard_case(case, world, rank, 1), []))
    return tuple(empty.rows.shape), plain(step(indexer, shard_case(case, world, rank, 1)))


def test_no_rows_on_any_rank_is_an_ordinary_call() -> None:
    case = random_case(FP8, [90], seed=9)
    values = _values(run_ranks(2, _zero_everywhere, case))
    assert [shape for shape, _ in values] == [(0, 48)] * 2
    assert_is_tp(case, 2, 1, [selection for _, selection in values])


def _subgroups(rank: int, _world: int, case: Case) -> Any:
    """A subgroup of three, then all four, with other calls in between."""
    three = dist.new_group([0, 1, 2])
    everyone = dist.new_group([0, 1, 2, 3])
    got = []
    for group, size in ((three, 3), (everyone, 4), (three, 3)):
        if rank < size:
            mine = shard_case(case, size, rank, 4)
            got.append(plain(step(indexer_of(mine, ks.dcp.Gather(group, interleave=4)), mine)))
        else:
            with pytest.raises(ks.KeysieveError, match="group that this process is not in"):
                ks.dcp.Gather(group)
            got.append(None)
    return got


def test_a_subgroup_and_then_the_full_group() -> None:
    case = random_case(FP8, [256, 77], seed=10)
    per_rank = _values(run_ranks(4, _subgroups, case))
    assert_is_tp(case, 3, 4, [per_rank[r][0] for r in range(3)])
    assert_is_tp(case, 4, 4, [per_rank[r][1] for r in range(4)])
    assert_is_tp(case, 3, 4, [per_rank[r][2] for r in range(3)])


def _filtered(rank: int, world: int, case: Case) -> str:
    """Tables narrowed to this rank, lengths not: refused before anything is written."""
    mine = shard_case(case, world, rank, 16)
    indexer = indexer_of(mine, ks.dcp.Gather(interleave=16, timeout=3.0))
    try:
        step(indexer, replace(mine, index_table=mine.index_table[:1]))
    except ks.KeysieveError as error:
        return str(error)
    return "no error"


def test_tables_of_fewer_requests_than_lengths_are_refused() -> None:
    case = random_case(FP8, [300, 200, 100], seed=11)
    for text in _values(run_ranks(2, _filtered, case)):
        assert "index_table" in text or "next_n" in text


# --- construction --------------------------------------------------------------------------------------------------


def test_without_a_process_group_the_refusal_says_what_to_do() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ks.KeysieveError, match="init_process_group"):
        ks.dcp.Gather()


def test_without_a_process_group_an_exchange_says_what_to_do() -> None:
    with pytest.raises(ks.KeysieveError, match="init_process_group"):
        ks.dcp.Exchange(None, topn=64, interleave=1, sharded=True)


def _constructions(_rank: int, _world: int) -> list[str]:
    texts = []
    for build in (
        lambda: ks.dcp.Gather(interleave=0),
        lambda: ks.dcp.Gather(timeout=0),
        lambda: ks.dcp.Gather(timeout=float("inf")),
        lambda: ks.dcp.Gather(timeout=None),
        lambda: ks.DecodeIndexer(FP8, max_rows=1, max_context=64, device="cpu", dcp=ks.dcp.Gather(topn=7)),
        lambda: [
            ks.DecodeIndexer(replace(FP8, topk=k), max_rows=1, max_context=64, device="cpu", dcp=shared)
            for shared in [ks.dcp.Gather()]
            for k in (8, 9)
        ],
    ):
        with pytest.raises(ks.KeysieveError) as refusal:
            build()
        texts.append(str(refusal.value))
    return texts


def test_bad_constructions_are_refused() -> None:
    (texts,) = _values(run_ranks(1, _constructions))
    for text, named in zip(
        texts, ("interleave", *3 * ["timeout"], "topn", "topk=9 after one with topk=8"), strict=True
    ):
        assert named in text
        assert "accepted:" in text


def _device_only(_rank: int, _world: int) -> str:
    group = ks.dcp.Gather()
    dist.get_backend_config = lambda _group: "cuda:nccl"  # as a group made with backend="nccl" says
    with pytest.raises(ks.KeysieveError) as refusal:
        ks.DecodeIndexer(FP8, max_rows=1, max_context=64, device="cpu", dcp=group)
    return str(refusal.value)


def test_a_group_that_cannot_carry_cpu_tensors_is_refused() -> None:
    (text,) = _values(run_ranks(1, _device_only))
    assert "'cuda:nccl'" in text
    assert "backend='gloo'" in text


def _alone(_rank: int, _world: int, case: Case) -> Any:
    mine = shard_case(case, 1, 0, 1)
    return plain(step(indexer_of(mine, ks.dcp.Gather()), mine))


def test_a_world_of_one_is_tensor_parallel() -> None:
    case = random_case(FP8, [300, 20], seed=12)
    assert_is_tp(case, 1, 1, _values(run_ranks(1, _alone, case)))
