"""Calls that end in the middle on one rank, by any exception: no later call is merged in their place.

All layers here have the same lengths, rows and call site, so that nothing but the group's own state can tell that one
is missing; every selection that is returned at all must be the unsharded one of its own layer.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import keysieve as ks
from keysieve.dcp import gather
from keysieve.dcp.base import ContextParallel
from keysieve.testing import Case, random_case

from .processes import run_ranks
from .shards import indexer_of, shard_case, step

FP8 = ks.IndexerSpec(heads=8, topk=48)
Patch = Callable[[ks.DecodeIndexer, Any, pytest.MonkeyPatch], None]


def _layers(count: int) -> list[Case]:
    return [random_case(FP8, [300, 200], seed=seed) for seed in range(count)]


def _alone(cases: list[Case]) -> list[Any]:
    chosen = [step(indexer_of(case), case).positions for case in cases]
    return [positions.tolist() for positions in chosen if positions is not None]


def _raise(error: BaseException) -> Callable[..., Any]:
    def stand_in(*_args: Any, **_kwargs: Any) -> Any:
        raise error

    return stand_in


def _one_layer(indexer: ks.DecodeIndexer, case: Case) -> Any:
    """The positions, or what was raised, whatever it is: the caller of the failed rank goes on."""
    try:
        selection = step(indexer, case)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    assert selection.positions is not None
    return selection.positions.tolist()


# --- before the exchange: the peers are told, and everybody stays in step -------------------------------------------


def _scores_fail(indexer: ks.DecodeIndexer, _group: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(indexer._runner, "local_logits", _raise(RuntimeError("can't allocate memory")))


def _ctrl_c(indexer: ks.DecodeIndexer, _group: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(indexer._runner, "local_logits", _raise(KeyboardInterrupt()))


def _alarm(indexer: ks.DecodeIndexer, _group: Any, patch: pytest.MonkeyPatch) -> None:
    """A real signal, whose handler raises between two instructions of the step."""

    def handler(*_args: Any) -> None:
        raise TimeoutError("alarm")

    def scores(_step: Any) -> Any:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        for _ in range(3000):  # not one long sleep: another thread may take the signal, and would not end it
            time.sleep(0.01)

    patch.setattr(indexer._runner, "local_logits", scores)


def _just_before_select(indexer: ks.DecodeIndexer, _group: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(indexer, "_exchange", _raise(KeyboardInterrupt()))


def _candidates_fail(_indexer: ks.DecodeIndexer, _group: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gather, "local_topk", _raise(MemoryError("candidates")))


def _header_fails(_indexer: ks.DecodeIndexer, group: Any, patch: pytest.MonkeyPatch) -> None:
    real = group._header

    def header(*args: Any, refused: bool = False) -> Any:
        if not refused:
            raise TypeError("header")
        return real(*args, refused=refused)

    patch.setattr(group, "_header", header)


BEFORE: tuple[tuple[Patch, str], ...] = (
    (_scores_fail, "RuntimeError: can't allocate memory"),
    (_ctrl_c, "KeyboardInterrupt: "),
    (_alarm, "TimeoutError: alarm"),
    (_just_before_select, "KeyboardInterrupt: "),
    (_candidates_fail, "MemoryError: candidates"),
    (_header_fails, "TypeError: header"),
)


def _before(rank: int, world: int, cases: list[Case]) -> list[Any]:
    """On rank 1 every second layer fails, each in another way; nobody's caller stops."""
    group = ks.dcp.Gather(interleave=16, timeout=30.0)
    indexer = indexer_of(cases[0], group, max_context=1024)
    got = []
    for layer, case in enumerate(cases):
        mine = shard_case(case, world, rank, 16)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and layer % 2:
                BEFORE[layer // 2][0](indexer, group, patch)
            got.append(_one_layer(indexer, mine))
    return got


def test_any_exception_before_the_exchange_is_told_to_the_peers_and_the_next_layer_is_right() -> None:
    cases = _layers(2 * len(BEFORE) + 1)
    expected = _alone(cases)
    results = run_ranks(3, _before, cases, limit=60)
    for rank, result in enumerate(results):
        assert result.error is None, result.error
        for layer, got in enumerate(result.value):
            if layer % 2 == 0:
                assert got == expected[layer], f"rank {rank}, layer {layer}: {str(got)[:200]}"
            elif rank == 1:
                assert got == BEFORE[layer // 2][1]
            else:
                assert got.startswith("ExchangeError"), f"rank {rank}, layer {layer}: {str(got)[:200]}"
                assert f"rank(s) [1] refused call {layer + 1}" in got
        assert result.seconds < 20, "nobody waits for a timeout"


def _left_out(rank: int, world: int, cases: list[Case]) -> list[Any]:
    """The caller itself fails between two layers of rank 1, and says so."""
    group = ks.dcp.Gather(interleave=16, timeout=30.0)
    indexer = indexer_of(cases[0], group, max_context=1024)
    got = []
    for layer, case in enumerate(cases):
        if rank == 1 and layer == 1:
            group.withdraw()
            got.append("withdrawn")
        else:
            got.append(_one_layer(indexer, shard_case(case, world, rank, 16)))
    return got


def test_a_caller_that_leaves_out_a_call_can_say_so() -> None:
    cases = _layers(3)
    expected = _alone(cases)
    zero, one = (result.value for result in run_ranks(2, _left_out, cases, limit=60))
    assert (zero[0], zero[2]) == (one[0], one[2]) == (expected[0], expected[2])
    assert "rank(s) [1] refused call 2" in zero[1]


# --- inside the exchange: the group is broken for the interrupted rank ----------------------------------------------


def _in_headers(_indexer: ks.DecodeIndexer, group: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(group, "_exchange_headers", _raise(KeyboardInterrupt()))


def _after_headers(_indexer: ks.DecodeIndexer, group: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(group, "_verdict", _raise(KeyboardInterrupt()))


def _after_lists(_indexer: ks.DecodeIndexer, group: Any, patch: pytest.MonkeyPatch) -> None:
    """All that the peers need is with them: they finish this call, and only miss this rank in the next."""
    real = group._swap

    def swap(own: Any, everyones: Any, tag: int, when: str) -> None:
        real(own, everyones, tag, when)
        if tag != gather._HEADER_TAG:
            raise KeyboardInterrupt

    patch.setattr(group, "_swap", swap)


def _while_telling(indexer: ks.DecodeIndexer, group: Any, patch: pytest.MonkeyPatch) -> None:
    """The second Ctrl-C comes while the peers are being told of the first."""
    _ctrl_c(indexer, group, patch)
    _in_headers(indexer, group, patch)


INSIDE: tuple[Patch, ...] = (_in_headers, _after_headers, _after_lists, _while_telling)


def _inside(rank: int, world: int, cases: list[Case], how: int) -> list[Any]:
    """The first call may take its time, as the processes that were started after one another do."""
    group = ks.dcp.Gather(interleave=16, timeout=30.0)
    indexer = indexer_of(cases[0], group, max_context=1024)
    got = []
    for layer, case in enumerate(cases):
        if layer == 1:
            group.timeout = 1.0
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and layer == 1:
                INSIDE[how](indexer, group, patch)
            got.append(_one_layer(indexer, shard_case(case, world, rank, 16)))
    return got


@pytest.mark.parametrize("how", range(len(INSIDE)), ids=[f.__name__.strip("_") for f in INSIDE])
def test_an_exception_inside_the_exchange_ends_the_group(how: int) -> None:
    cases = _layers(4)
    expected = _alone(cases)
    zero, one = run_ranks(2, _inside, cases, how, limit=60)
    assert (zero.error, one.error) == (None, None)
    assert one.value[0] == expected[0]
    assert one.value[1] == "KeyboardInterrupt: "
    for text in one.value[2:]:
        assert text.startswith("ExchangeError: this all-gather failed before"), text
        assert "call 2 was interrupted on rank 1" in text
    good = 2 if INSIDE[how] is _after_lists else 1
    assert zero.value[:good] == expected[:good]
    assert f"no answer on rank 0 to call {good + 1} from rank 1 (" in zero.value[good]
    assert all("failed before" in text for text in zero.value[good + 1 :])
    assert max(zero.seconds, one.seconds) < 10


def _destroyed(rank: int, world: int, cases: list[Case]) -> list[Any]:
    group = ks.dcp.Gather(interleave=16, timeout=30.0)
    indexer = indexer_of(cases[0], group, max_context=1024)
    got = [_one_layer(indexer, shard_case(cases[0], world, rank, 16))]
    group.timeout = 1.0
    dist.destroy_process_group()
    return [*got, *(_one_layer(indexer, shard_case(case, world, rank, 16)) for case in cases)]


def test_a_process_group_that_was_destroyed_is_an_error_of_the_exchange() -> None:
    cases = _layers(2)
    for rank, result in enumerate(run_ranks(2, _destroyed, cases, limit=60)):
        assert result.error is None, result.error
        _, first, second = result.value
        assert f"ExchangeError: dcp: got no answer on rank {rank} to call 2 from rank {1 - rank} (" in first
        assert second.startswith("ExchangeError: this all-gather failed before")


def _own_work(rank: int, world: int, cases: list[Case]) -> list[Any]:
    """Merging fails on rank 1, after everything that the peers need and everything that this rank needs."""
    group = ks.dcp.Gather(interleave=16, timeout=30.0)
    indexer = indexer_of(cases[0], group, max_context=1024)
    got = []
    for layer, case in enumerate(cases):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and layer == 1:
                patch.setattr(gather, "merge", _raise(MemoryError("merge")))
            got.append(_one_layer(indexer, shard_case(case, world, rank, 16)))
    return got


def test_an_exception_after_the_exchange_is_this_ranks_own() -> None:
    cases = _layers(3)
    expected = _alone(cases)
    zero, one = (result.value for result in run_ranks(2, _own_work, cases, limit=60))
    assert zero == expected
    assert one == [expected[0], "MemoryError: merge", expected[2]]


# --- what an indexer does with any transport ------------------------------------------------------------------------


class Noting(ContextParallel):
    """A group of one rank that notes what it is told, and fails where it is asked to."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__(1, 0)
        self.told: list[str] = []
        self.error = error

    def offered(self, topk: int) -> int:
        return topk

    def _allocate(self, device: Any) -> None:
        if self.max_rows > 100:
            raise MemoryError(str(device))

    def select(self, *_args: Any, **_kwargs: Any) -> Any:
        self.calls += 1
        self.told.append("select")
        assert self.error is not None
        raise self.error

    def withdraw(self) -> None:
        self.calls += 1
        self.told.append("withdraw")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), MemoryError(), ks.KeysieveError("x")])
def test_a_call_is_selected_or_withdrawn_and_never_both(error: BaseException) -> None:
    (case,) = _layers(1)
    group = Noting(error)
    indexer = indexer_of(case, group)
    with pytest.raises(type(error)):
        step(indexer, case)
    indexer._runner.local_logits = _raise(error)  # type: ignore[method-assign]  # fails before select
    with pytest.raises(type(error)):
        step(indexer, case)
    assert group.told == ["select", "withdraw"]


def test_a_bind_that_fails_leaves_the_limits_as_they_were() -> None:
    (case,) = _layers(1)
    group = Noting(None)
    indexer_of(case, group, max_context=512)
    before = (group.topk, group.max_rows, group.max_context, group.planes)
    with pytest.raises(MemoryError):
        indexer_of(case, group, max_rows=101, max_context=1 << 20)
    assert (group.topk, group.max_rows, group.max_context, group.planes) == before
