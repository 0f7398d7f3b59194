"""Engine modules loaded from an unpacked wheel, without their dependencies: what is not asked for is a stand-in.

A listed module's own source is executed as it ships; every other module it imports from the engine (and triton,
compiled extensions, ..) is a `MagicMock`. So the glue is tested against the functions the wheel really contains, on a
CPU.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest

importlib.import_module("torch.utils.flop_counter")  # asks for triton: let that be before there is a stand-in for it


def root_of(engine: str) -> Path:
    """Where the engine's package lies: KEYSIEVE_<ENGINE>_SOURCE (a folder with an unpacked wheel) or site-packages."""
    named = os.environ.get(f"KEYSIEVE_{engine.upper()}_SOURCE")
    if named:
        return Path(named)
    found = importlib.util.find_spec(engine)
    if found is None or not found.submodule_search_locations:
        pytest.skip(
            f"{engine} is not installed; unpack its wheel and name the folder in KEYSIEVE_{engine.upper()}_SOURCE "
            "to test the glue against its real functions"
        )
    return Path(next(iter(found.submodule_search_locations))).parent


class StandIn(ModuleType):
    """A module of which everything can be imported."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path, stand_ins: tuple[str, ...], real: tuple[str, ...], given: dict[str, Any]) -> None:
        self.root, self.stand_ins, self.real, self.given = root, stand_ins, real, given

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name in self.real:
            return importlib.util.spec_from_file_location(name, self.root / (name.replace(".", "/") + ".py"))
        if name.split(".")[0] in self.stand_ins:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for name, value in self.given.items():
            owner, _, attribute = name.rpartition(".")
            if owner == module.__name__:
                setattr(module, attribute, value)


@contextlib.contextmanager
def modules(
    engine: str, real: tuple[str, ...], stand_ins: tuple[str, ...], given: dict[str, Any]
) -> Iterator[list[ModuleType]]:
    """The listed modules of an engine, executed from its source. stand_ins: other top-level names that are mocked;
    given: values of names in mocked modules (decorators, mostly)."""
    finder = Finder(root_of(engine), (engine, *stand_ins), real, given)
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in finder.stand_ins}
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield [importlib.import_module(name) for name in real]
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] in finder.stand_ins]:
            del sys.modules[name]
        sys.modules.update(before)
