"""Refusals and warnings of the aliases in the words of the library whose names they carry."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import torch

from keysieve.checks import as_typed

Call = TypeVar("Call", bound=Callable[..., object])


def speaks(**names: str) -> Callable[[Call], Call]:
    """A decorator: within the function keysieve's argument ``name`` is called ``names[name]`` in what it says."""

    def decorate(function: Call) -> Call:
        @wraps(function)
        def call(*args: object, **named: object) -> object:
            if torch.compiler.is_compiling():  # the graph's own refusals keep keysieve's words
                return function(*args, **named)
            with as_typed(names):
                return function(*args, **named)

        return call  # type: ignore[return-value]  # the same parameters and result: wraps

    return decorate
