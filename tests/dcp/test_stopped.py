"""A process that is stopped (by SIGSTOP, a debugger, a machine that swaps) is named by every peer, in every phase."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import keysieve as ks
from keysieve.dcp import gather
from keysieve.testing import Case, random_case

from .processes import run_ranks
from .shards import indexer_of, shard_case, step

FP8 = ks.IndexerSpec(heads=8, topk=48)
WORLD, VICTIM, TIMEOUT = 4, 2, 1.5
STILL = 1.2
"""Seconds past its deadline after which a rank says that it stood still: more than it loses on a busy machine, and less
than TIMEOUT, so that one that counts from the beginning of its wait would be noticed."""


def _stop(seconds: float, after: float = 0.0) -> None:
    """Stop this whole process, its transport's threads too, now or later; another one does it, and wakes it up."""
    own = os.getpid()
    if os.fork() == 0:
        if after:
            time.sleep(after)
            os.kill(own, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(own, signal.SIGCONT)
        os._exit(0)
    if not after:
        os.kill(own, signal.SIGSTOP)


def _stopping(group: Any, phase: str) -> Any:
    """``group._swap`` that stops in its second call: before headers, between the phases, or amid the candidates."""
    real = group._swap

    def swap(own: torch.Tensor, everyones: torch.Tensor, tag: int, when: str) -> None:
        if group.calls == 2 and (tag == gather._HEADER_TAG) == (phase == "headers"):
            if phase == "half the candidates":
                theirs = torch.empty_like(own)
                for work in (dist.irecv(theirs, src=0, tag=tag), dist.isend(own, dst=0, tag=tag)):
                    work.wait()
            _stop(2.5 * TIMEOUT)
        real(own, everyones, tag, when)

    return swap


def _calls(rank: int, world: int, case: Case, phase: str) -> list[Any]:
    group = ks.dcp.Gather(interleave=16, timeout=30.0)
    mine = shard_case(case, world, rank, 16)
    indexer = indexer_of(mine, group)
    if rank == VICTIM:
        group._swap = _stopping(group, phase)  # type: ignore[method-assign]  # stops at a chosen place
    gather._STOOD_STILL = STILL
    got = []
    for call in range(3):
        if call == 1:  # the first call may take its time, as processes that were started after one another do
            group.timeout = TIMEOUT
        began = time.monotonic()
        try:
            selection = step(indexer, mine)
            assert selection.positions is not None
            text = str(selection.positions.tolist())
        except ks.dcp.ExchangeError as error:
            text = str(error)
        got.append((text, time.monotonic() - began))
    return got


@pytest.mark.parametrize("phase", ["headers", "candidates", "half the candidates"])
def test_a_stopped_rank_is_named_by_all_its_peers(phase: str) -> None:
    case = random_case(FP8, [300, 200], seed=3)
    results = run_ranks(WORLD, _calls, case, phase, limit=40)
    alone = step(indexer_of(case), case).positions
    assert alone is not None
    for rank, result in enumerate(results):
        assert result.error is None, result.error
        texts = [text for text, _ in result.value]
        assert texts[0] == str(alone.tolist())
        # Rank 0 has all it needs of the second call if the stopped rank got that far: it finds out in the third.
        failed = 2 if phase == "half the candidates" and rank == 0 else 1
        assert texts[1:failed] == texts[:1] * (failed - 1)
        assert f"no answer on rank {rank} to call {failed + 1} from " in texts[failed]
        if rank == VICTIM:
            continue
        assert "this rank itself stood still" not in texts[failed]
        assert f"rank {VICTIM} (silent for 1.5 s)" in texts[failed]
        # Ranks 1 and 3 wait in the second call while rank 0 waits for them in the third.
        if failed == 1:
            others = [r for r in range(WORLD) if r not in (rank, VICTIM) and f"rank {r} (" in texts[failed]]
            assert not others, texts[failed]
        assert max(seconds for _, seconds in result.value) < 2 * TIMEOUT + 5, "two phases, each within the limit"


def _stopped_in_a_wait(rank: int, world: int, case: Case) -> str:
    group = ks.dcp.Gather(interleave=16, timeout=30.0)
    mine = shard_case(case, world, rank, 16)
    indexer = indexer_of(mine, group)
    step(indexer, mine)
    group.timeout = 1.0
    if rank == 1:
        real = group._swap

        def swap(*args: Any) -> None:
            _stop(2.0, after=0.5)
            real(*args)

        group._swap = swap  # type: ignore[method-assign]  # stopped half a second after the wait has begun
    else:
        time.sleep(4.5)
    with pytest.raises(ks.dcp.ExchangeError) as failure:
        step(indexer, mine)
    return str(failure.value)


def test_a_rank_that_stood_still_in_a_wait_says_so_itself() -> None:
    """Its own report would otherwise blame a peer for a limit that passed while it did not run."""
    late, stopped = (r.value for r in run_ranks(2, _stopped_in_a_wait, random_case(FP8, [90], seed=1), limit=40))
    assert "from rank 0 (silent for 1 s); this rank itself stood still for " in stopped
    assert "stood still" not in late
