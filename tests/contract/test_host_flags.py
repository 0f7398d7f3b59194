"""What kernels report by flag words, what of it a capture cannot do, and limits by a rank's tables: a faked device."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from faked_gpu import CPU, SPEC, Device, arguments, build, call

import keysieve as ks
from keysieve import gpu, sm90_merge
from keysieve.dcp.exchange import virtual_ranks
from keysieve.reference.topk import check_topk
from keysieve.sm90_step import DeviceFlags


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    made.install(monkeypatch)
    return made


def test_the_flag_word_is_not_made_in_a_capture(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory would belong to the graph, and hold what lay there until a replay zeroes it."""
    backend = device.install(monkeypatch)
    logits, lengths = torch.zeros(2, 64, dtype=torch.bfloat16), torch.full((2,), 64, dtype=torch.int32)
    asked = check_topk(logits, lengths, 8, None, None, None, None)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "capturing", lambda: True)
        with pytest.raises(ks.KeysieveError, match="first stateless call"):
            backend.topk(asked, None, None)
        assert not backend._flags
    backend.topk(asked, None, None)
    monkeypatch.setattr(gpu, "capturing", lambda: True)
    backend.topk(asked, None, None)
    assert len(device.launched) == 2


def test_two_threads_that_come_first_have_one_flag_word(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = device.install(monkeypatch)

    def slow(where: torch.device) -> DeviceFlags:
        time.sleep(0.1)
        return DeviceFlags(where)

    monkeypatch.setattr(gpu, "DeviceFlags", slow)
    found: list[DeviceFlags] = []
    threads = [threading.Thread(target=lambda: found.append(backend.flags(CPU))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] is backend.flags(CPU)


def test_a_check_waits_for_the_last_step_of_another_stream(device: Device) -> None:
    indexer, given = build(), arguments()
    call(indexer, given)
    indexer.check()
    assert device.waits == []
    device.stream = 5
    call(indexer, given)
    device.waits.clear()
    device.stream = 9
    indexer.check()
    assert device.waits == [(9, 5)]
    device.stream = 5
    indexer.check()
    assert device.waits == [(9, 5)]
    device.stream, device.capturing = 9, {5}
    indexer.check()
    assert device.waits == [(9, 5)], "a wait for a stream that another thread captures would be part of its capture"


@pytest.mark.parametrize("sharded", [False, True])
def test_what_synchronises_is_refused_in_a_capture(device: Device, sharded: bool) -> None:
    """CUDA's own answer would end the capture."""
    one, _ = virtual_ranks(["cpu"] * 2, topn=12, interleave=64)
    indexer = build(dcp=one) if sharded else build()
    call(indexer, arguments())
    device.stream, device.capturing = 3, {3}
    call(indexer, arguments())
    with pytest.raises(ks.KeysieveError, match="check: got a call while a CUDA graph is being captured"):
        indexer.check()
    device.stream = 0
    indexer.check()


def test_a_merge_that_would_look_for_saturated_ranks_is_refused_in_a_capture(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = device.install(monkeypatch)
    words = torch.zeros(2, 3, 9, dtype=torch.int32)
    second = torch.zeros(2, 3, 17, dtype=torch.int32)
    monkeypatch.setattr(sm90_merge, "capturing", lambda: True)
    place = (None, None, None)
    with pytest.raises(ks.KeysieveError, match="second: got None"):
        backend.merger.merge(words, 16, 0, 1, 1, None, None, place)
    assert not device.launched
    backend.merger.merge(words, 16, 0, 1, 1, None, second, place)
    backend.merger.merge(second, 16, 0, 1, 1, None, None, place)
    assert len(device.launched) == 2


def test_a_kv_table_without_columns_holds_no_keys_of_a_rank(device: Device) -> None:
    """Rows with keys there are beyond it, as beyond any table that is too narrow."""
    one, _ = virtual_ranks(["cpu"] * 2, topn=12, interleave=64)
    indexer = ks.DecodeIndexer(SPEC, 8, 768, next_n=(1, 2), device="cpu", dcp=one)
    limits = []
    for columns in (1, 0):
        device.launched.clear()
        call(indexer, {**arguments(), "kv_table": torch.zeros(2, columns, dtype=torch.int32)})
        limits.append([numbers[at] for (_, numbers), at in zip(device.launched[1:], (9, 22), strict=True)])
    assert limits == [[64, 64], [0, 0]]


def test_a_merge_takes_no_length_beyond_32_bits_for_a_shorter_one(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[torch.Tensor] = []
    monkeypatch.setattr(sm90_merge.Merger, "merge", lambda _self, _words, lens, *_, **_named: taken.append(lens))
    words, lens = torch.zeros(2, 3, 9, dtype=torch.int32), torch.tensor([2**32 + 5, 7, 5 - 2**32])
    merger = device.install(monkeypatch).merger
    merger.merge(words, 16, 0, 1, 1, lens, torch.zeros(2, 3, 17, dtype=torch.int32), (None, None, None))
    assert taken[0].dtype == torch.int32
    assert taken[0].tolist() == [2**31 - 1, 7, -1]
