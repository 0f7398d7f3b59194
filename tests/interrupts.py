"""Ends a function anywhere, as a signal's handler that raises does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    """What a handler raises."""


def interrupted(function: Callable[[], Any], after: int, at: Container[str] = ("call", "c_return")) -> bool:
    """Run ``function`` and raise in its ``after``-th call that begins (Python) or ends (C); whether there was one.

    Those are the places where CPython looks for signals: never between two instructions that call nothing.
    at: one of the two alone, where functions of Python stand for functions of C.
    """
    left, inside = after, True

    def look(_frame: FrameType, event: str, _of: Any) -> None:
        nonlocal left
        left -= inside and event in at
        if inside and not left:
            sys.setprofile(None)
            raise Interrupted

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        function()
        inside = False
    except Interrupted:
        inside = False
    finally:
        sys.setprofile(before)
    return left <= 0
