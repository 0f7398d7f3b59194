"""What a launcher does around the compiled function, with the device faked: stream, device, capture, errors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from keysieve import compile as kernel_compile
from keysieve import launch
from keysieve.checks import KeysieveError
from keysieve.kernels.tile_offsets_config import KERNEL, TileOffsetsConfig

CONFIG = TileOffsetsConfig(1)


class Fake:
    """Two Hopper devices, of which `current` is current; records the calls of the kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 0
        self.capturing = False
        self.calls: list[tuple[int, tuple[int, ...]]] = []
        self.error: Exception | None = None
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(cuda, "device_count", lambda: 2)
        monkeypatch.setattr(cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(cuda, "get_device_capability", lambda _: (9, 0))
        monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(cuda, "device", self.guard)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1000 + index, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.current, raising=False)
        monkeypatch.setattr(launch.versions, "unusable", lambda: None)
        monkeypatch.setattr(kernel_compile, "load", self.load)

    def guard(self, index: int) -> AbstractContextManager[Any]:
        fake = self

        class Guard(nullcontext[None]):
            def __enter__(self) -> None:
                self.before, fake.current = fake.current, index

            def __exit__(self, *_: object) -> None:
                fake.current = self.before

        return Guard()

    def load(self, kernel: Any, config: Any, arch: str) -> Any:
        assert (kernel, config, arch) == (KERNEL, CONFIG, "sm_90a")
        return self.function

    def function(self, *args: int) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append((self.current, args))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(monkeypatch)


def test_launches_on_its_own_device_and_that_devices_current_stream(fake: Fake) -> None:
    here, there = launch.Launcher(KERNEL, CONFIG, "cuda:0"), launch.Launcher(KERNEL, CONFIG, "cuda:1")
    here(1, 2)
    there(3, 4)
    fake.current = 1
    here(5)
    there(6)
    assert fake.calls == [(0, (1, 2, 1000)), (1, (3, 4, 1001)), (0, (5, 1000)), (1, (6, 1001))]
    assert fake.current == 1  # the caller's device is current again
    assert launch.Launcher(KERNEL, CONFIG, "cuda").arch == "sm_90a"


def test_the_stream_is_asked_for_at_every_call(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = iter([7, 8])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: next(streams), raising=False)
    launcher = launch.Launcher(KERNEL, CONFIG, 0)
    launcher()
    launcher()
    assert [args for _, args in fake.calls] == [(7,), (8,)]


def test_loading_under_capture_is_refused_but_a_loaded_kernel_is_not(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.capturing = True
    with pytest.raises(
        KeysieveError, match=r"first asked for while a CUDA graph is being captured; .*before capturing"
    ):
        launch.Launcher(KERNEL, CONFIG, 0)
    monkeypatch.setattr(kernel_compile, "is_loaded", lambda *_: True)
    launch.Launcher(KERNEL, CONFIG, 0)()
    assert len(fake.calls) == 1


def test_a_failing_launch_names_the_kernel_and_the_device(fake: Fake) -> None:
    launcher = launch.Launcher(KERNEL, CONFIG, 1)
    fake.error = RuntimeError("cudaErrorIllegalAddress")
    with pytest.raises(
        RuntimeError, match=r"launching tile_offsets__next_n_1 on cuda:1 failed: cudaErrorIllegalAddress"
    ):
        launcher(1)
    assert fake.current == 0
