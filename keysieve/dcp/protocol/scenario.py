"""What the model is run on: who calls what, how large the world is, and which precautions can be switched off."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

FAULTS: Final[dict[str, str]] = {
    "one-parity": "one slot per source instead of two: call e + 1 is pushed over call e",
    "half-tag": "the tag is checked on the first half of a pair only",
    "early-epoch": "the merge stores the epoch while other warps, which read it themselves, are still reading slots",
    "no-grid-wait": "the local top-N kernel does not wait for the merge before it",
    "empty-returns": "the merge of an empty row returns without waiting for the row's words",
    "pads-not-awaited": "the merge does not wait for words that hold no candidate",
    "no-signature": "the signature of a call is not compared",
    "early-rescue": "rescue words are written before the first round is accepted",
    "any-row-order": "blocks of the merge start in whatever order the hardware likes",
    "shared-lists": "all rows keep their rescue lists in one place",
    "relaxed-flag": "the rescue flag is published without release order",
    "ordered-tags": "a tag is accepted if it is at least the expected one, as an unsigned number",
    "zeroed-slots": "slots are zeroed although the epochs do not start at 0",
}


@dataclass(frozen=True)
class Scenario:
    """Who calls what, and how large the world is.

    Attributes:
        name: for reports.
        programs: per rank, the calls it makes, in order, as numbers 1..8. Equal on all ranks, unless a client errs.
        rows: query rows of every call.
        units: the 64-bit halves of one row's words, by kind: ``lo`` and ``hi`` of a pair, ``sig`` (signature).
        tag_modulus: tags count modulo this even number (2^32 on the hardware).
        first_epoch: completed calls, modulo ``tag_modulus``, before the first one here.
        pads: per call, the units that hold no candidate in it.
        empty: (call, row) that are empty rows.
        saturated: per (call, row), the ranks that must be rescued.
        rescue_units: 64-bit halves of a row's rescue words.
        resident: blocks of a merge that fit a rank's chip at a time; None for all.
        signatures: signature of each call; by default all differ.
        client_errs: the ranks' programs differ. Then a reported failure or timeout is the right end, and only a
            *completed* merge with words of another call is a violation.
        own_in_order: a rank's stores to its own slots land at once (they are still read half by half).
        overlapped: the merge's blocks start, read the epoch and poll while their rank's own pushes of the call are yet
            to come, and wait for these where they end; else they wait where they begin.
    """

    name: str
    programs: tuple[tuple[int, ...], ...]
    rows: int = 1
    units: tuple[str, ...] = ("lo", "hi", "sig")
    tag_modulus: int = 4
    first_epoch: int = 0
    pads: dict[int, frozenset[int]] = field(default_factory=dict)
    empty: frozenset[tuple[int, int]] = frozenset()
    saturated: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    rescue_units: int = 1
    resident: int | None = None
    signatures: dict[int, int] = field(default_factory=dict)
    client_errs: bool = False
    own_in_order: bool = False
    overlapped: bool = False

    @property
    def world(self) -> int:
        return len(self.programs)

    @property
    def calls(self) -> int:
        return max(max(p) for p in self.programs)

    def signature(self, call: int) -> int:
        return self.signatures.get(call, call)
