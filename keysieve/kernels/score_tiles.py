"""Steps that every warp of a scorer takes through its rings."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def advance(place: Int32, phase: Int32, places: cutlass.Constexpr[int]) -> Any:
    """The next place of a ring, and its phase: the other one after each lap."""
    place = place + Int32(1)
    if place == Int32(places):
        place = Int32(0)
        phase = phase ^ Int32(1)
    return place, phase
