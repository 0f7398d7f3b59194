"""Calls on a ``SharedExchange`` that end in the middle on one rank: stores cannot say so, so it makes no other call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import keysieve as ks
from keysieve.dcp import fuzz
from keysieve.dcp.memory import ExchangeMemory, ExchangeShape
from keysieve.dcp.shared import SharedExchange

from .threads import calls_of, drawn, exchanges_of, in_threads


def test_a_refusal_inside_the_merge_ends_the_exchange() -> None:
    """Rank 1's stale local length shows in the merge, when its words, tagged, are in place: no call may take them."""
    first = fuzz.Case(2, 1, 8, 8, torch.tensor([10, 10]), torch.tensor([[0.0] * 10, [9.0, 0.0] * 5]).bfloat16())
    second = replace(first, logits=torch.tensor([[0.0] * 10, [0.0, 9.0] * 5]).bfloat16())
    exchanges = exchanges_of(ExchangeShape(2, 2, 8, 8), timeout=30.0, late=False)

    def work(exchange: SharedExchange) -> Any:
        logits, local_lens = fuzz.shard(first, exchange.rank)
        if exchange.rank == 1:
            local_lens = local_lens - torch.tensor([1, 0])
        with pytest.raises(ks.KeysieveError, match="words: got 4 candidates from rank 1 for row 0"):
            exchange.select(logits, local_lens, first.lens)
        return calls_of(exchange, [second])

    for rank, (error, _) in enumerate(in_threads(exchanges, work)):
        assert f"rank {rank} was interrupted in the middle of a call" in str(error)


def _pushes_stop(exchange: SharedExchange, patch: pytest.MonkeyPatch) -> None:
    real = exchange._push

    def push(row: int, *rest: Any) -> None:
        if row == 1:
            raise KeyboardInterrupt
        real(row, *rest)

    patch.setattr(exchange, "_push", push)


def _merges_stop(exchange: SharedExchange, patch: pytest.MonkeyPatch) -> None:
    real = exchange._merge_row

    def merge_row(row: int, *rest: Any) -> None:
        real(row, *rest)
        raise MemoryError

    patch.setattr(exchange, "_merge_row", merge_row)


def _candidates_stop(exchange: SharedExchange, patch: pytest.MonkeyPatch) -> None:
    def candidates(*_args: Any) -> Any:
        raise RuntimeError("candidates")

    patch.setattr(exchange, "_candidates", candidates)


@pytest.mark.parametrize("stop", [_candidates_stop, _pushes_stop, _merges_stop])
def test_a_rank_whose_call_was_interrupted_makes_no_other(stop: Any) -> None:
    """Equal rows, lengths and sites: the next call's words would pass for the interrupted one's."""
    cases = [drawn(s, world=2, n=8, k=8, rows=2) for s in range(2)]
    cases[1] = replace(cases[1], lens=cases[0].lens)
    exchanges = exchanges_of(ExchangeShape(2, 2, 8, 8), timeout=30.0, late=False)

    def work(exchange: SharedExchange) -> Any:
        if exchange.rank == 0:
            won = calls_of(exchange, cases[:1]) if stop is _merges_stop else []
            exchange.timeout = 0.5  # for the call that the other rank does not make
            return calls_of(exchange, cases[len(won) :], sites=[0, 0])
        with pytest.MonkeyPatch.context() as patch:
            stop(exchange, patch)
            with pytest.raises((KeyboardInterrupt, MemoryError, RuntimeError)):
                calls_of(exchange, cases[:1])
        return calls_of(exchange, cases[1:], sites=[0])

    (peer, seconds), (own, _) = in_threads(exchanges, work)
    assert "no answer within 0.5 s: source 1" in str(peer)
    assert seconds < 10
    assert "failed before" in str(own)
    assert exchanges[1].calls == 1


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), 1e300, "x", None])
def test_a_time_limit_that_is_none_is_refused(timeout: Any) -> None:
    memory = ExchangeMemory(ExchangeShape(2, max_rows=2, topk=8, topn=4))
    with pytest.raises(ks.KeysieveError, match="timeout: got"):
        SharedExchange(memory, 0, timeout=timeout)
