"""How every paged scorer is cut: what its options are called, what stands in shared memory beside keys and queries.

No cutlass here: the host reads the same numbers to plan launches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from keysieve.spec import MAX_NEXT_N, MAX_REQUESTS, PAGE, TILE

LAYOUTS = ("compact", "pitched")
WEIGHTS = ("float32", "bfloat16")

PAGES_PER_TILE = TILE // PAGE
FEW_REQUESTS = 128
"""Most requests that one warp plans, `schedule.few` at next_n 1."""

HOME_ROUNDS = 4
"""Home tiles of a block at most (see `schedule_homes`): they keep it busy while the page ids of its others are read."""

ORDERS = 8
"""Requests by which the key warp may be ahead of the query warp, a power of two above the number of warpgroups."""

NO_REQUEST = -1
"""In the place of a request: there are no more."""


def chunks_of(config: Any, shape: Any) -> tuple[tuple[int, int], ...]:
    """(first row, rows) of each matrix product of a tile: as few products as fit `chunk_columns`, near-equal rows."""
    most = max(1, min(config.next_n, shape.chunk_columns // config.heads))
    count = -(-config.next_n // most)
    base, extra = divmod(config.next_n, count)
    sizes = [base + (i < extra) for i in range(count)]
    starts = [sum(sizes[:i]) for i in range(count)]
    return tuple(zip(starts, sizes, strict=True))


@dataclass(frozen=True)
class Tables:
    """Byte offsets of what the producers and the plan need, and the first byte behind it.

    lengths: 8 words a held request. prefix: see `schedule`; rest: see `schedule_homes`. orders: requests for the query
    warp. descriptors: 16 bytes a tile of the ring. scratch: a word a warp.
    """

    lengths: int
    prefix: int
    rest: int
    orders: int
    descriptors: int
    scratch: int
    end: int


def tables_at(start: int, stages: int, query_stages: int) -> Tables:
    """The tables from byte `start` on, a multiple of 16."""
    prefix = start + query_stages * 4 * MAX_NEXT_N
    rest = prefix + -(-4 * (MAX_REQUESTS + 1) // 16) * 16
    orders = rest + -(-4 * (FEW_REQUESTS + 1) // 16) * 16
    descriptors = orders + 4 * ORDERS
    scratch = descriptors + 16 * stages
    return Tables(start, prefix, rest, orders, descriptors, scratch, scratch + 4 * 32)


def rows_and_options(heads: tuple[int, ...]) -> Iterator[tuple[int, int, str, str]]:
    """(heads, next_n, layout, weights) of every scorer of a key format."""
    for count in heads:
        for next_n in range(1, MAX_NEXT_N + 1):
            for layout in LAYOUTS:
                for weights in WEIGHTS:
                    yield count, next_n, layout, weights
