"""What the host of a GPU could not see beforehand: conditions a kernel meets, answers safely and reports.

On a GPU a kernel raises a flag. The cpu backend meets the same conditions at the same places, gives the same results
and notes them here, so that a program behaves alike on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from keysieve.checks import DeviceFaultWarning, warn_caller

_KEPT = 8
"""Texts kept; further faults are only counted."""


@dataclass
class Faults:
    """The faults of one or several calls."""

    count: int = 0
    texts: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.count += 1
        if len(self.texts) < _KEPT:
            self.texts.append(text)

    def extend(self, other: Faults) -> None:
        """Add the faults of another call."""
        self.texts += other.texts[: _KEPT - len(self.texts)]
        self.count += other.count

    def __bool__(self) -> bool:
        return self.count > 0

    def __str__(self) -> str:
        more = f" (and {self.count - len(self.texts)} more)" if self.count > len(self.texts) else ""
        return "; ".join(self.texts) + more

    def warn(self) -> None:
        """Warn of the faults, if any, at the line of a call that has no ``check()`` to report them."""
        if self:
            warn_caller(str(self), DeviceFaultWarning)

    def take(self) -> str:
        """The report, or an empty text; forgets the faults."""
        text = str(self)
        self.count = 0
        self.texts.clear()
        return text


def usable_lengths(lengths: Sequence[int], limits: Sequence[tuple[int, str]], faults: Faults) -> list[int]:
    """Every row's length, or 0 for an empty row; a row longer than one of ``limits`` becomes empty, with a fault.

    Args:
        lengths: keys per row; 0 or less is an empty row.
        limits: pairs of the most keys a row may have, and what sets that limit.
        faults: where rows beyond a limit are reported.
    """
    usable = [max(int(length), 0) for length in lengths]
    for t, length in enumerate(usable):
        for limit, why in limits:
            if length > limit:
                faults.add(f"row {t}: length {length} is beyond the {limit} keys of {why}; the row was left empty")
                usable[t] = 0
                break
    return usable
