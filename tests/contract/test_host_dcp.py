"""The host side of a context-parallel step on a GPU: what would be launched, and what failures become (`faked_gpu`)."""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from faked_gpu import SPEC, Device, arguments, call

import keysieve as ks
from keysieve import sm90_step
from keysieve.dcp import ExchangeError
from keysieve.dcp import exchange as exchange_module
from keysieve.dcp.exchange import Exchange, virtual_ranks
from keysieve.device.report import REPORT_MAGIC, REPORT_WORDS
from keysieve.kernels.sharding_word import sharding_word

CPU = ["cpu"] * 2


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    backend = made.install(monkeypatch)
    backend.name = "sm90"
    return made


def ranks(**options: Any) -> list[tuple[Exchange, ks.DecodeIndexer]]:
    made = virtual_ranks(CPU, topn=12, interleave=64, **options)
    return [(one, ks.DecodeIndexer(SPEC, 8, 768, next_n=(1, 2), device="cpu", dcp=one)) for one in made]


def test_a_step_is_three_launches_with_the_call_s_site(device: Device) -> None:
    (one, indexer), _ = ranks()
    call(indexer, {**arguments(), "site": 7})
    names = [label.split("__")[0] for label, _ in device.launched]
    assert names == ["sm90_score", "local_push", "exchange_merge"]
    assert "layout_pitched" in device.launched[0][0]
    assert sharding_word(2, 0, 64, 768) in device.launched[0][1]
    # The last number of each is the stream; behind its chaining local top-N's shared memory comes first.
    chained = [numbers[at] for (_, numbers), at in zip(device.launched, (-2, -3, -2), strict=True)]
    assert chained == [0, 1, 1], "the last two are chained to what is before"
    assert device.launched[1][1][-5] == 1, "lengths were complete before the scorer: they are read ahead of the wait"
    first = list(device.launched)
    call(indexer, {**arguments(), "site": 9})
    changed = [
        [(a, b) for a, b in zip(old, new, strict=True) if (a, b) == (7, 9)]
        for (_, old), (_, new) in zip(first, device.launched[3:], strict=True)
    ]
    assert [len(c) for c in changed] == [0, 1, 1], "the site of both exchange kernels is the second call's own"
    assert one.calls == 2


EXPECTED = r"rank 0, row 3, call 17 \(4 rows, site 7, length 100\).*source rank 1: expected tag 17, seen 15.*round 1"


def report(one: Exchange) -> None:
    """As a merge of this rank does before it traps."""
    assert one.memory is not None
    words = [REPORT_MAGIC, 0, 3, 1, 17, 15, 1, 4 << 16 | 7, 0, 100, 0, 17] + [0] * (REPORT_WORDS - 12)
    one.memory.report.copy_(torch.frombuffer(bytearray(struct.pack("<16I", *words)), dtype=torch.uint8))


def lost(one: Exchange | None = None) -> Any:
    """What every call of CUDA's does in a lost context, questions as well. one: whose merge reports just before."""
    if one is not None:
        report(one)
    raise RuntimeError("CUDA error: unspecified launch failure")


def test_a_reported_failure_is_raised_by_check_and_by_the_next_call(device: Device) -> None:
    (one, indexer), _ = ranks()
    call(indexer, arguments())
    report(one)
    with pytest.raises(ExchangeError, match=EXPECTED):
        indexer.check()
    before = len(device.launched)
    with pytest.raises(ExchangeError, match=EXPECTED):
        call(indexer, arguments())
    assert len(device.launched) == before


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_check_names_the_peer_where_cuda_answers_nothing(
    device: Device, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Not even whether a stream is captured: the error may have surfaced elsewhere first, or do so in this check."""
    (one, indexer), _ = ranks()
    call(indexer, arguments())
    if when == "before":
        report(one)
    monkeypatch.setattr(sm90_step, "capturing", lambda: lost(one))
    with pytest.raises(ExchangeError, match=EXPECTED):
        indexer.check()
    assert device.launched


@pytest.mark.parametrize("at", ["the stream's turn", "a launch"])
def test_a_call_that_a_trap_meets_halfway_names_the_peer(
    device: Device, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    (one, indexer), _ = ranks()
    call(indexer, arguments())

    class Trapped(list[Any]):
        def append(self, item: Any) -> None:  # noqa: ARG002  # nothing is launched any more
            lost(one)

    if at == "a launch":
        device.launched = Trapped()
    else:
        device.stream = 5
        monkeypatch.setattr(sm90_step, "capturing", lambda: lost(one))
    with pytest.raises(ExchangeError, match=EXPECTED) as raised:
        call(indexer, arguments())
    assert "unspecified launch failure" in str(raised.value.__cause__)


def test_an_error_that_no_merge_reported_stays_what_it_is(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, indexer), _ = ranks()
    call(indexer, arguments())
    monkeypatch.setattr(sm90_step, "capturing", lost)
    with pytest.raises(RuntimeError, match="unspecified") as raised:
        indexer.check()
    assert not isinstance(raised.value, ExchangeError)
    device.stream = 5
    with pytest.raises(RuntimeError, match="unspecified") as raised:
        call(indexer, arguments())
    assert not isinstance(raised.value, ExchangeError)


@pytest.mark.usefixtures("device")
def test_exchanges_on_one_device_of_a_process_lose_it_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has no report of its own, and the context that rank 0's merge took with it."""
    (one, _), (two, _) = ranks()
    (elsewhere, _), _ = ranks()
    here = torch.device("cuda", 77)
    one._decided, two._decided, elsewhere._decided = here, here, torch.device("cuda", 78)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: lost())
    with pytest.raises(RuntimeError, match="unspecified"):
        two.check(here)
    report(one)
    with pytest.raises(ExchangeError, match=EXPECTED):
        two.check(here)
    with pytest.raises(RuntimeError, match="unspecified"):
        elsewhere.check(torch.device("cuda", 78))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    elsewhere.check(torch.device("cuda", 78))


@pytest.mark.usefixtures("device")
def test_no_indexer_is_built_after_a_failure() -> None:
    (one, _), _ = ranks()
    report(one)
    with pytest.raises(ExchangeError, match=EXPECTED):
        ks.DecodeIndexer(SPEC, 4, 768, next_n=(1, 2), device="cpu", dcp=one)


@pytest.mark.usefixtures("device")
def test_a_check_does_not_wait_for_a_device_that_recovers_from_a_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is there seconds before the driver says that the context is lost."""
    (one, _), _ = ranks()
    recovered = threading.Event()

    def synchronize(_device: int) -> None:
        report(one)
        assert recovered.wait(60)
        lost()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    try:
        with pytest.raises(ExchangeError, match=EXPECTED):
            one.check(torch.device("cuda", 0))
        assert not recovered.is_set()
    finally:
        recovered.set()


@pytest.mark.usefixtures("device")
def test_a_check_does_not_wait_for_the_driver_where_another_exchange_s_merge_trapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (one, _), (two, _) = ranks()
    recovered, here = threading.Event(), torch.device("cuda", 0)
    one._decided = two._decided = here

    def synchronize(_device: int) -> None:
        report(one)
        assert recovered.wait(60)
        lost()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    try:
        with pytest.raises(ExchangeError, match=EXPECTED):
            two.check(here)
        assert not recovered.is_set()
    finally:
        recovered.set()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("reports", [False, True])
def test_a_check_without_a_thread_to_wait_in_waits_itself(monkeypatch: pytest.MonkeyPatch, reports: bool) -> None:
    """Python 3.12 starts none once the interpreter ends, for a handler of `atexit` say."""
    (one, _), _ = ranks()
    waited: list[int] = []

    def none_left(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def synchronize(index: int) -> None:
        waited.append(index)
        if reports:
            lost(one)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(threading.Thread, "start", none_left)
    if reports:
        with pytest.raises(ExchangeError, match=EXPECTED):
            one.check(torch.device("cuda", 3))
    else:
        one.check(torch.device("cuda", 3))
    assert waited == [3]


@pytest.mark.usefixtures("device")
def test_a_device_without_an_index_is_on_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one is current CUDA may not say any more."""
    (one, _), (two, _) = ranks()
    monkeypatch.setattr(exchange_module, "_EVERY", weakref.WeakSet((one, two)))  # not what other tests have left
    one._decided = two._decided = torch.device("cuda", 77)
    monkeypatch.setattr(torch.cuda, "current_device", lost)
    with pytest.raises(RuntimeError, match="unspecified"):
        two.check(torch.device("cuda"))
    report(one)
    with pytest.raises(ExchangeError, match=EXPECTED):
        two.check(torch.device("cuda"))


@pytest.mark.usefixtures("device")
def test_exchanges_may_be_made_while_others_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that another thread adds to cannot be listed: that error would have hidden CUDA's."""
    made: list[Any] = []
    builder = threading.Thread(target=lambda: made.append(virtual_ranks(CPU, topn=12)))

    class Listed(weakref.WeakSet[Exchange]):
        def __iter__(self) -> Iterator[Exchange]:
            for at, one in enumerate(super().__iter__()):
                if at == 0 and builder.ident is None:
                    builder.start()
                    builder.join(0.2)
                yield one

    (one, _), _ = ranks()
    monkeypatch.setattr(exchange_module, "_EVERY", Listed(exchange_module._EVERY))
    assert one._beside(torch.device("cuda", 0)) == []
    builder.join(60)
    assert len(made) == 1
    assert set(made[0]) <= set(exchange_module._EVERY)


@pytest.mark.usefixtures("device")
def test_an_indexer_may_be_built_while_reports_are_looked_for() -> None:
    """It adds memory to its exchange: what lists that may not stumble, as its error would have hidden CUDA's."""
    (one, _), _ = ranks()
    memories: dict[Any, Any] = one._memories

    class Memory:
        """The exchange's; another is there when it has been asked for something."""

        def __init__(self, memory: Any) -> None:
            self._memory = memory

        def __getattr__(self, name: str) -> Any:
            memories[object()] = self._memory
            return getattr(self._memory, name)

    for layout, memory in [*memories.items()]:
        memories[layout] = Memory(memory)
    assert not one._reported()
    assert one.failure() is None
    report(one)
    assert one._reported()
    assert one.failure() is not None


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("reports", [False, True])
def test_a_check_that_waited_for_the_device_tells_its_error(monkeypatch: pytest.MonkeyPatch, reports: bool) -> None:
    (one, _), _ = ranks()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: lost(one if reports else None))
    with pytest.raises(RuntimeError, match=EXPECTED if reports else "unspecified") as raised:
        one.check(torch.device("cuda", 0))
    assert isinstance(raised.value, ExchangeError) == reports
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    if not reports:
        one.check(torch.device("cuda", 0))


@pytest.mark.usefixtures("device")
def test_a_check_waits_for_the_callers_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits: a thread begins with device 0 as its current one."""
    (one, _), _ = ranks()
    waited: list[int] = []
    monkeypatch.setattr(
        torch.cuda, "current_device", lambda: 3 * (threading.current_thread() is threading.main_thread())
    )
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    one.check(torch.device("cuda"))
    one.check(torch.device("cuda", 5))
    assert waited == [3, 5]


def test_a_refused_call_leaves_the_exchange_usable_and_a_left_out_one_does_not(device: Device) -> None:
    (one, indexer), _ = ranks()
    with pytest.raises(ks.KeysieveError, match="weights"):
        call(indexer, {**arguments(), "weights": torch.zeros(3, 3)})
    assert not device.launched
    call(indexer, arguments())
    one.withdraw()
    with pytest.raises(ExchangeError, match="left out a call"):
        call(indexer, arguments())


def test_a_call_cut_off_between_its_launches_is_the_last(device: Device) -> None:
    (_, indexer), _ = ranks()
    call(indexer, arguments())
    launched = device.launched

    class Cut(list[Any]):
        def append(self, item: Any) -> None:
            if len(self) == 4:
                raise KeyboardInterrupt
            super().append(item)

    device.launched = Cut(launched)
    with pytest.raises(KeyboardInterrupt):
        call(indexer, arguments())
    device.launched = launched
    with pytest.raises(ExchangeError, match="interrupted"):
        call(indexer, arguments())


def test_a_compiled_caller_keeps_the_step_and_hears_of_failures(device: Device) -> None:
    """torch.compile(fullgraph): whether a merge has reported is looked at when the operator runs."""
    (one, indexer), _ = ranks()
    torch.compiler.reset()
    layer = torch.compile(lambda inputs: call(indexer, inputs).rows, backend="eager", fullgraph=True)
    for calls in (1, 2, 3):
        layer(arguments())
        assert (one.calls, len(device.launched)) == (calls, 3 * calls)
    one.withdraw()
    with pytest.raises(ExchangeError, match="left out a call"):
        layer(arguments())


@pytest.mark.usefixtures("device")
def test_building_an_indexer_under_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from keysieve.dcp import exchange

    monkeypatch.setattr(exchange, "capturing", lambda: True)
    with pytest.raises(ks.KeysieveError, match="before the capture"):
        ranks()


def test_no_rows_launch_nothing(device: Device) -> None:
    (_, indexer), _ = ranks()
    given = arguments(0)
    assert call(indexer, given).rows.shape == (0, SPEC.topk)
    assert not device.launched


def test_a_replicated_cache_is_read_through_this_rank_s_pages(device: Device) -> None:
    _, (one, indexer) = ranks(sharded=False)
    given = arguments()
    given["index_table"] = torch.arange(2 * 12, dtype=torch.int32).view(2, 12) % 9
    call(indexer, given)
    narrow = indexer._runner._shard._narrow
    assert narrow[:2, :6].tolist() == given["index_table"][:, 1::2].tolist()
    assert one.rank == 1
    (push,) = (numbers for label, numbers in device.launched if label.startswith("local_push"))
    assert push[-5] == push[-3] == 0, "what copies pages stands in between: nothing is read ahead of it"
