"""`tile_offsets`: where each request's tiles begin, counted on the device from `seq_lens`."""

from collections.abc import Iterable
from dataclasses import dataclass

from keysieve.kernels.base import ARCHS, Kernel
from keysieve.spec import MAX_NEXT_N, MAX_REQUESTS

THREADS = 1024
ITEMS = MAX_REQUESTS // THREADS
"""Consecutive requests a thread of the one block counts."""

INFO_WORDS = 4
INFO_TILES, INFO_SHORT, INFO_EMPTY, INFO_REFUSED = range(INFO_WORDS)
"""Words of `info`: all tiles; rows with 1..topk keys; rows without keys; rows longer than max_context."""

FLAG_TOO_LONG = 0
"""Bit of the device flag word that a row longer than max_context raises."""


@dataclass(frozen=True)
class TileOffsetsConfig:
    """next_n: rows a request has, 1..8."""

    next_n: int


def _admitted(arch: str) -> Iterable[TileOffsetsConfig]:
    del arch  # the same for all of them
    return [TileOffsetsConfig(next_n) for next_n in range(1, MAX_NEXT_N + 1)]


KERNEL = Kernel(
    name="tile_offsets",
    entry="keysieve.kernels.tile_offsets:build",
    config=TileOffsetsConfig,
    archs=ARCHS,
    admitted=_admitted,
    max_registers=64,
)
