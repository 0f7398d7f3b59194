"""The exchange executed over shared memory: late stores in any order, two parities, wrapping epochs, rescues."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import keysieve as ks
from keysieve.dcp import fuzz
from keysieve.dcp.memory import ExchangeMemory, ExchangeShape, LateWire, PromptWire, Stores
from keysieve.dcp.shared import SharedExchange
from keysieve.testing import pattern_case

from .processes import run_ranks
from .shards import assert_is_tp, indexer_of, plain, shard_case, step
from .threads import SPEC, calls_of, drawn, exchanges_of, in_threads


def _assert_tp(cases: list[fuzz.Case], results: list[Any]) -> None:
    for result in results:
        assert isinstance(result, list), result
    for call, case in enumerate(cases):
        expected, _ = ks.topk(case.logits, case.lens, case.k)
        holder = torch.where(expected < 0, -1, expected // case.interleave % case.world)
        for rank, won in enumerate(result[call] for result in results):
            assert torch.equal(won.positions, expected), f"call {call}, rank {rank}"
            assert torch.equal(won.counts, (holder == rank).sum(1, dtype=torch.int32))
            ids = won.local // case.interleave * case.interleave * case.world + rank * case.interleave
            ids = ids + won.local % case.interleave
            assert torch.equal(ids[won.local >= 0], expected[holder == rank])


@pytest.mark.parametrize(("world", "n", "interleave"), [(2, 4, 1), (3, 3, 2), (4, 2, 16), (8, 8, 1)])
def test_late_stores_in_any_order_change_nothing(world: int, n: int, interleave: int) -> None:
    cases = [drawn(s, world=world, n=n, k=8, rows=3, interleave=interleave) for s in range(24)]
    exchanges = exchanges_of(ExchangeShape(world, max_rows=3, topk=8, topn=n), interleave=interleave)
    results = in_threads(exchanges, lambda e: calls_of(e, cases, pause=0.002))
    _assert_tp(cases, results)
    assert len({e.rescues for e in exchanges}) == 1, "all ranks see the same rescues"
    assert exchanges[0].rescues > 0 or n == 8
    for exchange in exchanges:
        exchange.close()


def test_epochs_wrap_past_two_to_the_32() -> None:
    cases = [drawn(s, world=3, n=3, k=8, rows=2) for s in range(30)]
    exchanges = exchanges_of(ExchangeShape(3, max_rows=2, topk=8, topn=3), epoch=(1 << 32) - 11)
    _assert_tp(cases, in_threads(exchanges, lambda e: calls_of(e, cases)))
    assert [int(e) for e in exchanges[0]._epoch] == [19, 19]
    assert exchanges[0].rescues > 3


def test_slots_that_were_not_preset_are_caught_by_the_signature() -> None:
    """Zeroed slots carry tag 0, which is the tag of the first call after the wrap: nothing is selected from them."""
    case = drawn(3, world=2, n=4, k=8, rows=1)
    exchanges = exchanges_of(ExchangeShape(2, 1, 8, 4), epoch=(1 << 32) - 1, preset=False, late=False)
    with pytest.raises(ks.dcp.ExchangeError, match=r"row 0: source 1 made another call: 0 rows, site 0"):
        calls_of(exchanges[0], [case], sites=[5])


def test_alternating_row_counts_keep_every_rows_epoch() -> None:
    """Rows beyond a call's rows take no part in it; their epochs stay behind, on every rank alike."""
    cases = [drawn(s, world=2, n=4, k=8, rows=1 + s % 4) for s in range(20)]
    exchanges = exchanges_of(ExchangeShape(2, max_rows=4, topk=8, topn=4))
    _assert_tp(cases, in_threads(exchanges, lambda e: calls_of(e, cases)))
    assert [int(e) for e in exchanges[1]._epoch] == [20, 15, 10, 5]


def _in_process(rank: int, world: int, memory: ExchangeMemory, cases: list[fuzz.Case], epoch: int) -> Any:
    del world
    exchange = SharedExchange(memory, rank, interleave=4, wire=LateWire(rank, longest_pause=500e-6), first_epoch=epoch)
    exchange.bind(replace(SPEC, topk=memory.shape.topk), max_rows=3, max_context=1 << 12, device="cpu")
    won = calls_of(exchange, cases, pause=0.003)
    exchange.close()
    return [(w.local.tolist(), w.counts.tolist(), w.positions.tolist()) for w in won], exchange.rescues


@pytest.mark.parametrize(("world", "n"), [(2, 4), (4, 3), (8, 2)])
def test_real_processes_with_random_delays(world: int, n: int) -> None:
    epoch = (1 << 32) - 9
    memory = ExchangeMemory(ExchangeShape(world, max_rows=3, topk=16, topn=n))
    memory.preset(epoch)
    cases = [drawn(100 + s, world=world, n=n, k=16, rows=3, interleave=4) for s in range(20)]
    results = run_ranks(world, _in_process, memory, cases, epoch, limit=110)
    assert [r.error for r in results] == [None] * world
    lists = [
        [ks.dcp.Winners(*(torch.tensor(part, dtype=torch.int32) for part in won)) for won in r.value[0]]
        for r in results
    ]
    _assert_tp(cases, lists)
    assert results[0].value[1] > 5


def _indexed(rank: int, world: int, memory: ExchangeMemory, case: Any) -> Any:
    exchange = SharedExchange(memory, rank, interleave=16, wire=LateWire(rank))
    mine = shard_case(case, world, rank, 16)
    indexer = indexer_of(mine, exchange, max_context=1024)
    won = [plain(step(indexer, mine, site=layer)) for layer in range(3)]
    exchange.close()
    return won


def test_a_decode_indexer_runs_on_it() -> None:
    spec = ks.IndexerSpec(heads=8, topk=40)
    case = pattern_case(spec, "half_tied", [[700, 701], [0, 30], [90, 41]], next_n=2, seed=4)
    memory = ExchangeMemory(ExchangeShape(4, max_rows=6, topk=40, topn=12))
    results = run_ranks(4, _indexed, memory, case, limit=60)
    assert [r.error for r in results] == [None] * 4
    for layer in range(3):
        assert_is_tp(case, 4, 16, [r.value[layer] for r in results])


# --- faults of clients and of ranks --------------------------------------------------------------------------------


def test_other_row_counts_are_refused_on_both_ranks() -> None:
    exchanges = exchanges_of(ExchangeShape(2, 5, 8, 8), timeout=5.0)
    results = in_threads(exchanges, lambda e: calls_of(e, [drawn(1, world=2, n=8, k=8, rows=4 + e.rank)]))
    for rank, (error, seconds) in enumerate(results):
        assert isinstance(error, ks.dcp.ExchangeError)
        assert f"rank {rank}, row 0: source {1 - rank} made another call: {5 - rank} rows" in str(error)
        assert seconds < 5.0, "found by the signature, not by waiting"


def test_a_skipped_call_is_found_by_the_site() -> None:
    """Rank 1 leaves out layer 1; its words of layer 2 have the tag that rank 0 waits for."""
    cases = [drawn(s, world=2, n=8, k=8, rows=1) for s in range(3)]
    exchanges = exchanges_of(ExchangeShape(2, 1, 8, 8), timeout=30.0)
    plans = [([0, 1, 2], cases), ([0, 2], [cases[0], cases[2]])]
    results = in_threads(exchanges, lambda e: calls_of(e, plans[e.rank][1], sites=plans[e.rank][0]))
    texts = [str(error) for error, _ in results]
    assert max(seconds for _, seconds in results) < 20, "found by the signature, not by waiting"
    assert "source 1 made another call: 1 rows, site 2" in texts[0]
    assert "source 0 made another call: 1 rows, site 1" in texts[1]


def test_a_rank_that_refuses_a_call_makes_no_other_and_its_peer_is_told_by_the_clock() -> None:
    """Its next call would carry the tag of the refused one, and could be merged in its place."""
    cases = [drawn(s, world=2, n=8, k=8, rows=1) for s in range(2)]
    exchanges = exchanges_of(ExchangeShape(2, 1, 8, 8), timeout=0.5)
    wrong = replace(cases[0], logits=cases[0].logits.float())

    def work(exchange: SharedExchange) -> Any:
        if exchange.rank == 0:
            return calls_of(exchange, cases, sites=[0, 0])
        with pytest.raises(ks.KeysieveError, match="logits: got float32"):
            calls_of(exchange, [wrong], sites=[0])
        return calls_of(exchange, [cases[1]], sites=[0])

    (peer, seconds), (own, _) = in_threads(exchanges, work)
    assert "no answer within 0.5 s: source 1" in str(peer)
    assert seconds < 8
    assert "rank 1 refused a call of its own" in str(own)


def test_a_rank_that_never_answers_ends_in_a_report_that_names_it() -> None:
    case = drawn(1, world=3, n=8, k=8, rows=2)
    exchanges = exchanges_of(ExchangeShape(3, 2, 8, 8), timeout=2.0)
    results = in_threads(exchanges[:2], lambda e: calls_of(e, [case]))
    for rank, (error, seconds) in enumerate(results):
        assert str(error) == (
            f"rank {rank}, row 0: no answer within 2 s: source 2: 12 of 12 words missing; "
            "expected tag 1, seen 0; round 1"
        )
        assert seconds < 8
    with pytest.raises(ks.dcp.ExchangeError, match="failed before"):
        calls_of(exchanges[0], [case])


def test_a_rank_that_dies_before_its_second_list_is_reported_in_round_two() -> None:
    """Both ranks are saturated; rank 1 pushes its first list and stops."""
    case = fuzz.Case(2, 1, 1, 8, torch.tensor([40], dtype=torch.int32), torch.zeros(1, 40).bfloat16())
    exchanges = exchanges_of(ExchangeShape(2, 1, 8, 1), timeout=0.5, late=False)
    stopped = exchanges[1]
    stopped._merge_row = lambda *_: None
    calls_of(stopped, [case])
    with pytest.raises(ks.dcp.ExchangeError, match=r"source 1: expected flag 1, seen 0; round 2"):
        calls_of(exchanges[0], [case])


def _dies(rank: int, world: int, memory: ExchangeMemory, case: fuzz.Case) -> Any:
    del world
    exchange = SharedExchange(memory, rank, timeout=30.0)
    exchange.bind(SPEC, max_rows=2, max_context=1 << 12, device="cpu")
    calls_of(exchange, [case])
    exchange.timeout = 1.0  # from here on: the processes were not started at one moment
    if rank == 1:
        os._exit(9)
    calls_of(exchange, [case])


def test_a_process_that_dies_is_an_error_on_the_others() -> None:
    memory = ExchangeMemory(ExchangeShape(3, 2, 8, 4))
    results = run_ranks(3, _dies, memory, drawn(2, world=3, n=4, k=8, rows=2))
    assert results[1].died
    for rank in (0, 2):
        assert results[rank].kind == "ExchangeError"
        assert f"rank {rank}, row 0: no answer within 1 s: source 1:" in str(results[rank].error)


# --- layout and wires ----------------------------------------------------------------------------------------------


def test_the_layout_is_the_protocols() -> None:
    shape = ExchangeShape(2, max_rows=3, topk=8, topn=5)
    assert (shape.words, shape.pairs, shape.rescued, shape.second_words) == (6, 4, 1, 9)
    case = fuzz.Case(2, 1, 5, 8, torch.tensor([10, 0], dtype=torch.int32), torch.ones(2, 10).bfloat16())
    (first, _) = exchanges_of(shape, late=False)
    logits, local_lens = fuzz.shard(case, 0)
    words, _ = ks.local_topk(logits, local_lens, 5)
    first._push(0, words[0].numpy(), first._signatures(2, 77, case.lens)[0])
    for dst in range(2):
        slot = first.memory.slots[dst][1, 0, 0]
        # Little-endian int32 (w0, e, w1, e): two data words, each beside the tag of the call.
        pairs = slot.view(np.int32).reshape(4, 4)
        assert (pairs[:, 1::2] == 1).all()
        assert pairs[:3, ::2].reshape(-1).tolist() == words[0].tolist()
        assert pairs[3, ::2].tolist() == [2 << 16 | 77, 10]
        assert not first.memory.slots[dst][0].any()
        assert not first.memory.slots[dst][1, 1].any()


class Watched(Stores):
    """Stores that note what had landed after each landing."""

    def land(self, count: int) -> None:
        super().land(count)
        self.after_each = [*getattr(self, "after_each", []), int((self.target > 0).sum())]


def test_a_late_wire_lands_everything_and_keeps_a_release_behind_its_words() -> None:
    target, flag = np.zeros(500, dtype=np.uint64), np.zeros(1, dtype=np.int64)
    wire = LateWire(3, longest_pause=50e-6)
    words = Watched(target, np.arange(500), np.arange(1, 501, dtype=np.uint64))
    wire.issue([words, Stores(flag, np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64), after=[words])])
    while not flag[0]:
        time.sleep(0)
    assert (target == np.arange(1, 501)).all(), "the flag was seen before the words it releases"
    wire.close()
    assert len(words.after_each) >= 500 / 64, "words land a few at a time"
    assert words.after_each == sorted(set(words.after_each))
    assert words.at.tolist() != sorted(words.at.tolist()), "words land in another order than they were issued in"


def test_without_a_release_a_flag_does_overtake() -> None:
    """The wire is unkind enough that the order matters: among twenty seeds some land an unordered flag too early."""
    early = []

    class Flag(Stores):
        def land(self, count: int) -> None:
            early.append(not words.done)
            super().land(count)

    for seed in range(20):
        target, flag = np.zeros(300, dtype=np.uint64), np.zeros(1, dtype=np.int64)
        words = Stores(target, np.arange(300), np.ones(300, dtype=np.uint64))
        wire = LateWire(seed, longest_pause=0.0)
        wire.issue([words, Flag(flag, np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64))])
        wire.close()
        assert target.all()
        assert flag[0]
    assert any(early)
    PromptWire().close()


def test_memory_for_other_sizes_is_refused() -> None:
    memory = ExchangeMemory(ExchangeShape(2, max_rows=2, topk=8, topn=4))
    with pytest.raises(ks.KeysieveError, match="topk"):
        SharedExchange(memory, 0).bind(replace(SPEC, topk=9), max_rows=2, max_context=64, device="cpu")
    with pytest.raises(ks.KeysieveError, match="max_rows"):
        SharedExchange(memory, 0).bind(SPEC, max_rows=3, max_context=64, device="cpu")
    with pytest.raises(ks.KeysieveError, match="planes"):
        SharedExchange(memory, 0).bind(SPEC, max_rows=2, max_context=1 << 20, device="cpu")
    with pytest.raises(ks.KeysieveError, match="rank"):
        SharedExchange(memory, 2)
