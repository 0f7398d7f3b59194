"""A step's streams, devices, captures and reports, on a faked device."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from faked_gpu import CPU, SPEC, Device, Launch, arguments, build, call, moved

import keysieve as ks
from keysieve import IndexerSpec, gpu, sm90_step
from keysieve.reference.topk import check_topk
from keysieve.residency import residency


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    made.install(monkeypatch)
    return made


@pytest.mark.parametrize("times", [1, 2])
def test_another_stream_waits_for_the_last_one(device: Device, times: int) -> None:
    """On the checked path and on the known one; the same stream again waits for nothing."""
    indexer, given = build(), arguments()
    for _ in range(times - 1):
        call(indexer, given)
    for stream in (5, 5, 9, 5):
        device.stream = stream
        call(indexer, given)
        assert [args[-1] for _, args in device.launched[-2:]] == [stream, stream]
    assert device.waits == [(5, 0), (9, 5), (5, 9)]


@pytest.mark.parametrize("times", [1, 2])
def test_a_captured_step_does_not_wait_for_eager_ones(device: Device, times: int) -> None:
    """And the other way round: nothing of a capture has run when it was made."""
    indexer, given = build(), arguments()
    for _ in range(times):
        call(indexer, given)
    device.stream, device.capturing = 3, {3}
    for _ in range(3):
        call(indexer, given)
    assert device.waits == []
    device.stream, device.capturing = 0, set()
    call(indexer, given)
    assert device.waits == []  # the eager stream is still the last one that eager steps used
    device.stream = 3
    call(indexer, given)
    assert device.waits == [(3, 0)]


@pytest.mark.parametrize("first", [2, 3])
@pytest.mark.parametrize("times", [0, 2])
def test_a_capture_that_forks_keeps_its_steps_apart(device: Device, times: int, first: int) -> None:
    """Steps on two streams of one capture, also where it began on the stream of the eager steps."""
    device.stream = 2
    indexer, given = build(), arguments()
    for _ in range(times):
        call(indexer, given)
    device.capturing = {first, 4}
    for device.stream in (first, 4, 4, first):
        call(indexer, given)
    assert device.waits == [(4, first), (first, 4)]
    device.capturing = {5}
    device.stream = 5
    call(indexer, given)
    assert device.waits == [(4, first), (first, 4)], "a finished capture is nothing to wait for"
    device.capturing, device.stream = set(), 2
    call(indexer, given)
    assert len(device.waits) == 2


@pytest.mark.parametrize("times", [1, 2])
def test_an_eager_step_does_not_wait_for_a_stream_that_is_captured(device: Device, times: int) -> None:
    """By another thread, say: the wait would join its capture, and the step would not run."""
    device.stream = 2
    indexer, given = build(), arguments()
    for _ in range(times):
        call(indexer, given)
    device.launched.clear()
    device.capturing, device.stream = {2}, 7
    with pytest.raises(ks.KeysieveError, match="eager step while the stream of its last one is being captured"):
        call(indexer, given)
    assert not device.waits
    assert not device.launched
    device.capturing = set()
    call(indexer, given)
    assert device.waits == [(7, 2)]


def test_the_default_stream_is_not_asked_whether_it_is_captured(device: Device) -> None:
    """It cannot be, and CUDA may answer the question with an error while another stream is."""
    indexer, given = build(), arguments()
    call(indexer, given)
    device.stream, device.capturing = 3, {0, 3}
    call(indexer, given)
    assert device.waits == []


def test_launches_enter_the_device_of_the_tensors(device: Device) -> None:
    indexer, given = build(), arguments()
    for current in (0, 1, 1, 0):
        device.index = current
        call(indexer, given)
        assert device.index == current
    assert device.entered == [0, 0]
    assert len(device.launched) == 8


def test_early_release_reaches_the_selection_only(device: Device) -> None:
    given = arguments()
    calls = {}
    for early in (False, True):
        indexer = build(early_release=early)
        device.launched.clear()
        call(indexer, given)
        calls[early] = list(device.launched)
        assert ("early release" in repr(indexer)) == early
    small = [[a for a in args if a < 4096] for early in calls for _, args in calls[early]]
    assert small[0] == small[2]
    # The entry ends with: release (bit 1: results may be dropped), the limit the scorer had, launched as a programmatic
    # dependent, stream.
    assert small[1][-4:] == [2, 384, 1, 0]
    assert [x - y for x, y in zip(small[3], small[1], strict=True)] == [0] * (len(small[1]) - 4) + [1, 0, 0, 0]


def test_results_stay_where_room_was_set_aside_for_them(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    aside = residency(0)
    for size, kept, release in ((aside.default, aside.rows, 2), (24 << 20, (24 << 20) * 7 // 8 // 288, 0)):
        monkeypatch.setattr(aside, "size", size)
        device.launched.clear()
        call(build(), arguments())
        (_, score), (_, select) = device.launched
        assert score[11] == kept
        assert select[-5] == release


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("known", [False, True])
def test_a_failed_launch_says_which(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """From the checked path and from a known form, of the first kernel and of the second."""
    failing = ["select"]

    def function(self: Launch, *_: int) -> None:
        if self.label.startswith(failing[0]):
            raise RuntimeError("no such kernel image")

    monkeypatch.setattr(Launch, "function", function)
    indexer, given = build(), arguments()
    if known:
        failing[0] = "neither"
        call(indexer, given)
    for failing[0] in ("select", "sm90_score"):
        with pytest.raises(RuntimeError, match=f"launching {failing[0]}.* failed: no such kernel image"):
            call(indexer, given)
        assert len(indexer._known) == int(known), "a form is known once its launches have worked"


def test_a_compiled_caller_keeps_the_step_and_takes_the_known_form(device: Device) -> None:
    """torch.compile(fullgraph): one operator, which launches with the addresses of each call."""
    indexer, given = build(), arguments()
    traced: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        traced.extend(str(node.target) for node in graph.graph.nodes if "keysieve" in str(node.target))
        return graph.forward

    torch.compiler.reset()
    layer = torch.compile(lambda inputs: call(indexer, inputs).rows, backend=keep, fullgraph=True)
    for _ in range(3):
        inputs = given | {"weights": given["weights"].clone()}
        device.launched.clear()
        assert layer(inputs) is inputs["out"]
        assert [inputs["weights"].data_ptr() in args for _, args in device.launched] == [True, False]
    assert traced == ["keysieve.decode_step.default"]
    assert len(indexer._known) == 1


def test_the_path_is_said(device: Device) -> None:
    assert build().path == "sm90: score into compact logits, then select as its programmatic dependent: two kernels"
    assert "released early" in build(early_release=True).path
    assert device.launched == []


def test_supports_answers_before_a_cache_exists_and_with_it(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes alone are judged without a cache; with one, its device and its pages' alignment as well."""
    backend = device.install(monkeypatch)
    monkeypatch.setattr(gpu, "unlaunchable", lambda _: None)
    cache = arguments()["cache"]
    assert backend.reason_against(SPEC, 1, CPU, None) is None
    assert backend.reason_against(SPEC, 8, CPU, cache) is None
    assert backend.reason_against(IndexerSpec(64, 16, "mxfp4"), 8, CPU, None) is None
    assert "next_n 9" in str(backend.reason_against(IndexerSpec(8, 16, "mxfp4"), 9, CPU, None))
    said = {
        "numerics": backend.reason_against(IndexerSpec(8, 16, numerics="bf16"), 1, CPU, cache),
        "spec": backend.reason_against(SPEC, 9, CPU, None),
        "cache": backend.reason_against(SPEC, 1, CPU, ks.IndexCache(SPEC, cache.data.to("meta"))),
    }
    for name, reason in said.items():
        assert reason is not None
        assert reason.startswith(f"{name}: got ")
    cache.data.set_(moved(cache.data, 8))
    reason = backend.reason_against(SPEC, 1, CPU, cache)
    assert reason is not None
    assert "16-byte aligned" in reason
    monkeypatch.setattr(gpu, "unlaunchable", lambda _: "the toolchain is missing")
    assert backend.reason_against(SPEC, 1, CPU, None) == "the toolchain is missing"


@pytest.mark.parametrize("times", [0, 1])
def test_two_threads_never_mix_their_launches(device: Device, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Score and select of a step stay together, on the checked path and on the known one."""

    def slow(self: Launch, *args: int) -> None:
        time.sleep(0.002)
        device.launched.append((self.label, args))

    monkeypatch.setattr(Launch, "function", slow)
    indexer, given = build(), arguments()
    for _ in range(times):
        call(indexer, given)
    device.launched.clear()
    steps = [given | {"weights": given["weights"].clone(), "counts": given["counts"].clone()} for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda step: call(indexer, step), steps))
    pairs = list(zip(device.launched[::2], device.launched[1::2], strict=True))
    assert len(pairs) == 8
    found = [
        [step["weights"].data_ptr() in score and step["counts"].data_ptr() in select for step in steps].index(True)
        for (_, score), (_, select) in pairs
    ]
    assert sorted(found) == list(range(8))


WIDE = torch.tensor([2**32 + 5, 2**31, -(2**40), 7, 2**63 - 1, 0])
NARROW = [2**31 - 1, 2**31 - 1, -1, 7, 2**31 - 1, 0]


@pytest.mark.usefixtures("device")
def test_long_64_bit_lengths_are_not_taken_for_short_ones() -> None:
    """2**32 + 5 is beyond every limit, so the kernels empty the row and flag it; cut to 32 bits it would be 5."""
    assert sm90_step.narrow(WIDE).tolist() == NARROW
    short = torch.ones(3, dtype=torch.int32)
    assert sm90_step.narrow(short) is short
    indexer = build()
    runner: Any = indexer._runner
    strided = torch.stack([WIDE, WIDE * 0], 1)[:, 0]
    for lens in (WIDE, strided, WIDE.view(3, 2), strided.view(3, 2)):
        runner._lens.fill_(-7)
        given = arguments(6) | {"seq_lens": lens}
        for _ in range(2):  # checked, then known
            call(indexer, given)
            assert runner._lens.tolist() == [*NARROW, -7, -7]
            runner._lens.fill_(-7)


@pytest.mark.parametrize("gap", [False, True])
def test_public_topk_writes_counts_with_gaps_through_a_copy(
    device: Device, gap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel writes counts side by side: in a caller's strided ones it would overwrite what lies between."""
    backend = device.install(monkeypatch)
    logits, lengths = torch.zeros(4, 64, dtype=torch.bfloat16), torch.full((4,), 64, dtype=torch.int32)
    buffer = torch.full((4, 2), -9, dtype=torch.int32)
    counts = buffer[:, 0] if gap else torch.full((4,), -9, dtype=torch.int32)
    _, number = backend.topk(check_topk(logits, lengths, 8, None, None, None, None), None, counts)
    assert number is counts
    (_, args), *more = device.launched
    assert not more
    assert (counts.data_ptr() in args) == (not gap)
    assert bool((buffer[:, 1] == -9).all())


def test_public_topk_judges_64_bit_owners_before_it_narrows_them(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Request 2**32 is no request: its row is flagged, not served from request 0's table."""
    backend = device.install(monkeypatch)
    logits, lengths = torch.zeros(2, 64, dtype=torch.bfloat16), torch.full((2,), 64, dtype=torch.int32)
    table = torch.zeros(2, 1, dtype=torch.int32)
    for owner, flagged in ((1, False), (2**32, True), (-(2**32), True)):
        owners = torch.tensor([0, owner])
        backend.topk(check_topk(logits, lengths, 8, table, 64, 64, owners), None, None)
        assert bool(backend.flags(CPU).take()) == flagged


def test_no_rows_launch_nothing(device: Device) -> None:
    empty = arguments(0, next_n=1)
    indexer = build()
    for _ in range(2):
        assert call(indexer, empty).rows.shape == (0, 16)
    assert device.launched == []
    assert indexer.device == CPU
