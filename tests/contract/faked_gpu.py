"""The Hopper backend with its launches replaced: tensors on the CPU, kernels that only write down their integers.

For the host side of a step: what is refused, what would be launched with which addresses, on which stream. Nothing is
computed, so nothing here says that a kernel is right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import keysieve as ks
from keysieve import IndexerSpec, gpu, indexer, sm90, sm90_step

CPU = torch.device("cpu")
POOL_STREAM = 1000
SPEC = IndexerSpec(heads=8, topk=16)


@dataclass
class Device:
    """The faked device: what was launched, and the state that the host asks for."""

    launched: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    stream: int = 0
    index: int = 0
    entered: list[int] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)
    capturing: set[int] = field(default_factory=set)
    """Streams that are part of a capture."""

    def install(self, patch: pytest.MonkeyPatch) -> sm90.Sm90Backend:
        """Put the faked device where the host looks."""
        backend = sm90.Sm90Backend()
        backend._sms[CPU] = 132
        patch.setattr(gpu, "Launcher", lambda kernel, config, _device: Launch(self, kernel.symbol(config)))
        patch.setattr(sm90_step, "capturing", lambda: self.stream in self.capturing)
        patch.setattr(indexer, "resolve", lambda *_args, **_options: backend)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _index: self.stream, raising=False)
        patch.setattr(torch._C, "_cuda_getDevice", lambda: self.index, raising=False)
        patch.setattr(torch.cuda, "device", lambda index: Entered(self, index))
        # As torch does: a zero is no handle there, but asks for a stream of its pool.
        patch.setattr(torch.cuda, "ExternalStream", lambda handle, **_: handle or POOL_STREAM)
        patch.setattr(torch.cuda, "default_stream", lambda _device: 0)
        patch.setattr(torch.cuda, "current_stream", lambda _device: Stream(self))
        patch.setattr(torch.cuda, "stream", lambda handle: Current(self, handle))
        return backend


class Launch:
    """In place of keysieve.launch.Launcher."""

    def __init__(self, device: Device, label: str) -> None:
        self._device, self.label = device, label

    def function(self, *args: int) -> None:
        assert all(type(a) is int or isinstance(a, int) for a in args)
        assert self._device.index == 0, "launched while another device was current"
        self._device.launched.append((self.label, tuple(int(a) for a in args)))

    def __call__(self, *args: int) -> None:
        self.function(*args, self._device.stream)


class Entered:
    """In place of the context manager torch.cuda.device."""

    def __init__(self, device: Device, index: int) -> None:
        self._device, self._index = device, index

    def __enter__(self) -> None:
        self._device.entered.append(self._index)
        self._before, self._device.index = self._device.index, self._index

    def __exit__(self, *_: object) -> None:
        self._device.index = self._before


class Current:
    """In place of the context manager torch.cuda.stream."""

    def __init__(self, device: Device, handle: int) -> None:
        self._device, self._handle = device, handle

    def __enter__(self) -> None:
        self._before, self._device.stream = self._device.stream, self._handle

    def __exit__(self, *_: object) -> None:
        self._device.stream = self._before


class Stream:
    """In place of the current stream."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def wait_stream(self, other: int) -> None:
        self._device.waits.append((self._device.stream, other))


def arguments(
    rows: int = 4, *, next_n: int = 2, columns: int = 6, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """A good call's arguments, by name, every tensor given."""
    requests = rows // next_n
    query = torch.zeros(rows, SPEC.heads, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return {
        "query": query,
        "cache": ks.IndexCache(SPEC, torch.zeros(9, 64, 132, dtype=torch.uint8)),
        "weights": torch.zeros(rows, SPEC.heads, dtype=dtype),
        "seq_lens": torch.full((rows,), 100, dtype=torch.int32),
        "index_table": torch.zeros(requests, columns, dtype=torch.int32),
        "kv_table": torch.zeros(requests, columns, dtype=torch.int32),
        "kv_page": 64,
        "block_rows": 64,
        "positions": torch.full((rows, SPEC.topk), 7, dtype=torch.int32),
        "out": torch.full((rows, SPEC.topk), 7, dtype=torch.int32),
        "counts": torch.full((rows,), 7, dtype=torch.int32),
        "site": 0,
    }


def build(max_rows: int = 8, **options: Any) -> ks.DecodeIndexer:
    """An indexer on the faked device."""
    return ks.DecodeIndexer(SPEC, max_rows, 384, next_n=(1, 2), device="cpu", **options)


def call(made: ks.DecodeIndexer, given: dict[str, Any]) -> ks.Selection:
    first = [given[name] for name in ("query", "cache", "weights", "seq_lens", "index_table")]
    return made(*first, **{name: value for name, value in given.items() if name not in POSITIONAL})


POSITIONAL = ("query", "cache", "weights", "seq_lens", "index_table")


def moved(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """The same tensor `by` bytes into an allocation that is 64-byte aligned."""
    size = tensor.numel() * tensor.element_size()
    room = torch.zeros(size + 128, dtype=torch.uint8)
    first = -room.data_ptr() % 64 + by
    return room[first : first + size].view(tensor.dtype).view(tensor.shape)
