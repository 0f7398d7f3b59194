"""The scenarios the protocol is explored on, and the faults that must be found.

``SMALL`` runs in well under a minute and is part of the ordinary tests; ``LARGE`` is for ``keysieve check --protocol``.
``SEEDED`` names, for each fault, the scenario in which it shows; the same scenario without the fault is explored as
well and must be sound, so that it is the fault that is found and not the scenario.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from keysieve.dcp.protocol.scenario import Scenario

PAIR: Final = ("lo", "hi", "sig")
WORD: Final = ("lo", "sig")


def _all(world: int, calls: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(1, calls + 1)) for _ in range(world))


def _rescued(world: int, calls: int, rows: int = 1) -> dict[tuple[int, int], tuple[int, ...]]:
    """Every rank saturated in every row and call."""
    return {(c, row): tuple(range(world)) for c in range(1, calls + 1) for row in range(rows)}


EMPTY_THEN_FULL: Final = Scenario(
    "2 ranks, 3 calls, the row empty in the first", _all(2, 3), units=("sig",), empty=frozenset({(1, 0)})
)
PADS_THEN_WORDS: Final = Scenario(
    "2 ranks, 3 calls, a half that is padding in the first",
    _all(2, 3),
    units=WORD,
    pads={1: frozenset({0})},
    own_in_order=True,
)
ONE_RESCUED: Final = Scenario(
    "2 ranks, 2 calls, rank 0 rescued", _all(2, 2), units=("sig",), saturated={(1, 0): (0,), (2, 0): (0,)}
)
FULL_CHIP: Final = Scenario(
    "2 ranks, 2 rows, both rescued, one block resident",
    _all(2, 1),
    rows=2,
    units=("sig",),
    saturated=_rescued(2, 1, 2),
    resident=1,
    own_in_order=True,
)
BOTH_ROWS: Final = Scenario(
    "2 ranks, 2 rows, rank 0 rescued in both, both resident",
    _all(2, 1),
    rows=2,
    units=("sig",),
    saturated={(1, 0): (0,), (1, 1): (0,)},
    own_in_order=True,
)
SKIPPED: Final = Scenario(
    "2 ranks, rank 1 skips a call", ((1, 2, 3), (1, 3)), units=WORD, client_errs=True, own_in_order=True
)
OTHER_ROWS: Final = Scenario(
    "2 ranks, different row counts", ((1, 2), (3, 4)), units=WORD, client_errs=True, own_in_order=True
)
WRAP: Final = tuple(
    Scenario(
        f"2 ranks, 3 calls, epoch starts at {first} of 4", _all(2, 3), units=WORD, first_epoch=first, own_in_order=True
    )
    for first in range(4)
)

SMALL: Final[tuple[Scenario, ...]] = (
    Scenario("2 ranks, 3 calls, 2 halves", _all(2, 3), units=WORD, first_epoch=2),
    Scenario("2 ranks, 3 calls, 3 halves, own in order", _all(2, 3), units=PAIR, own_in_order=True),
    Scenario("3 ranks, 2 calls, 1 half, own in order", _all(3, 2), units=("sig",), own_in_order=True),
    *WRAP,
    EMPTY_THEN_FULL,
    PADS_THEN_WORDS,
    ONE_RESCUED,
    Scenario(
        "2 ranks, 3 calls, rescues change hands",
        _all(2, 3),
        units=("sig",),
        saturated={(1, 0): (0,), (2, 0): (1,), (3, 0): (0, 1)},
        own_in_order=True,
    ),
    FULL_CHIP,
    BOTH_ROWS,
    SKIPPED,
    OTHER_ROWS,
    *(
        replace(one, name=f"{one.name}, overlapped", overlapped=True)
        for one in (*WRAP[2:3], ONE_RESCUED, FULL_CHIP, BOTH_ROWS, SKIPPED)
    ),
)

LARGE: Final[tuple[Scenario, ...]] = (
    *SMALL,
    *(replace(one, name=f"{one.name}, overlapped", overlapped=True) for one in SMALL[:3]),
    Scenario("2 ranks, 3 calls, 3 halves", _all(2, 3), units=PAIR, first_epoch=3),
    Scenario("2 ranks, 5 calls, 2 halves", _all(2, 5), units=WORD, first_epoch=1),
    Scenario("2 ranks, 2 calls, 4 halves, own in order", _all(2, 2), units=("lo", "hi", "lo", "hi"), own_in_order=True),
    Scenario("3 ranks, 3 calls, 1 half", _all(3, 3), units=("sig",), first_epoch=3, own_in_order=True),
    Scenario("3 ranks, 2 calls, 1 half, own late too", _all(3, 2), units=("sig",), first_epoch=2),
    Scenario("3 ranks, 1 call, 2 halves, own in order", _all(3, 1), units=("lo", "hi"), own_in_order=True),
    Scenario(
        "2 ranks, 2 rows, both rescued, both resident",
        _all(2, 1),
        rows=2,
        units=("sig",),
        saturated=_rescued(2, 1, 2),
        own_in_order=True,
    ),
    Scenario("2 ranks, 2 rows, 2 calls, 1 half, own in order", _all(2, 2), rows=2, units=("sig",), own_in_order=True),
    Scenario("2 ranks, 3 calls, both rescued", _all(2, 3), units=("sig",), saturated=_rescued(2, 3), own_in_order=True),
    Scenario(
        "3 ranks, 2 calls, other ranks rescued each time",
        _all(3, 2),
        units=("sig",),
        saturated={(1, 0): (0,), (2, 0): (2,)},
        own_in_order=True,
    ),
)

SEEDED: Final[dict[str, Scenario]] = {
    "one-parity": WRAP[0],
    "half-tag": SMALL[1],
    "early-epoch": WRAP[0],
    "no-grid-wait": WRAP[0],
    "empty-returns": EMPTY_THEN_FULL,
    "pads-not-awaited": PADS_THEN_WORDS,
    "no-signature": SKIPPED,
    "early-rescue": ONE_RESCUED,
    "any-row-order": FULL_CHIP,
    "shared-lists": BOTH_ROWS,
    "relaxed-flag": ONE_RESCUED,
    "ordered-tags": WRAP[3],
    "zeroed-slots": WRAP[3],
}
