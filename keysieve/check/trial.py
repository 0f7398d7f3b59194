"""What a stage of ``keysieve check`` is, and the small tools that stages share."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

T = TypeVar("T")


class Mismatch(AssertionError):
    """A result differs from the brute force; the text says where."""


@dataclass(frozen=True)
class Scope:
    """What cases may be drawn.

    Attributes:
        device: where the checked code runs; cases are drawn on the CPU and moved.
        backend: as for ``DecodeIndexer``.
        specs: (key_format, heads, next_n) triples that may be drawn, or None for all. A GPU backend compiles one kernel
            for each, so a run keeps to a few.
        numerics: what may be drawn for the spec's numerics.
        repeats: how often a step is run; all runs must give the same bits.
    """

    device: torch.device
    backend: str = "auto"
    specs: tuple[tuple[str, int, int], ...] | None = None
    numerics: tuple[str | None, ...] = ("fp32", "fp32", "bf16")
    repeats: int = 1

    @property
    def exact_scores(self) -> bool:
        """Whether logits are promised bit for bit: on the CPU. A GPU's are held to a bound."""
        return self.device.type == "cpu"


class Stage(Protocol[T]):
    """One kind of case: how to draw it from a seed, run it, and make it smaller."""

    name: str
    """Stem of the command line's ``--stage`` and of reports."""

    def draw(self, seed: int, scope: Scope) -> T:
        """The case of ``seed``."""

    def run(self, trial: T, scope: Scope) -> None:
        """Run keysieve and the brute force; raise :class:`Mismatch` where they differ."""

    def smaller(self, trial: T) -> Iterator[T]:
        """Simpler variants, the boldest first. Every chain of them ends."""

    def describe(self, trial: T) -> str:
        """The case in a few lines, for a report."""


def generators(seed: int) -> tuple[random.Random, torch.Generator]:
    """Python's and torch's random numbers of one case."""
    return random.Random(seed), torch.Generator().manual_seed(seed)


@contextmanager
def filled_memory(scope: Scope) -> Iterator[None]:
    """On the CPU, memory that torch takes inside holds NaN, or an integer's largest value, until it is written.

    A value that the checked code forgot to write is then the same one in every run, and never a right one: left as the
    allocator gives it, it can be right by chance (a place of -1 where -1 stood before), so that a case that failed
    would pass when its seed is replayed. Uses torch's own ``torch.utils.deterministic.fill_uninitialized_memory``.

    Not on a GPU: the fills would be captured into the graphs under test and clean their buffers at every replay.
    """
    if scope.device.type != "cpu":
        yield
        return
    memory: Any = torch.utils.deterministic  # a module whose setting is a property: torch does not type it
    filling = memory.fill_uninitialized_memory
    asked, only_warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(asked, warn_only=only_warned)
        memory.fill_uninitialized_memory = filling


def storage_of(tensor: torch.Tensor) -> NDArray[Any]:
    """A copy of every byte of the storage under ``tensor``."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole.cpu().numpy().copy()


def pool_of(cache: torch.Tensor) -> tuple[NDArray[Any], int]:
    """A pool uint8 [pages, 64, width] as flat bytes (uint8 array, padding included) and its page stride."""
    stride = cache.stride(0) if cache.shape[0] > 1 else cache.shape[1] * cache.shape[2]
    return storage_of(cache)[cache.storage_offset() :], stride


def bits16(tensor: torch.Tensor) -> NDArray[Any]:
    """The bits of a BF16 tensor, uint16."""
    return tensor.contiguous().cpu().view(torch.int16).numpy().view(np.uint16)


def shown(values: Sequence[object], limit: int = 16) -> str:
    """A list, cut."""
    text = ", ".join(str(v) for v in values[:limit])
    return f"[{text}{', ...' if len(values) > limit else ''}]"


def thirds(count: int) -> Iterator[list[int]]:
    """Subsets of ``range(count)`` worth keeping: halves first, then all but one, then nothing smaller than one."""
    if count <= 1:
        return
    half = count // 2
    yield list(range(half))
    yield list(range(half, count))
    if 2 < count <= 12:
        for left_out in range(count):
            yield [i for i in range(count) if i != left_out]
