"""A property is tried on the same examples in every run, whatever ran or was imported before it."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.internal.constants_ast import is_local_module_file


def examples() -> list[tuple[int, float, bytes]]:
    """What a property of 100 examples is tried on, now."""
    seen = []

    @settings(max_examples=100)
    @given(st.integers(0, 1 << 40), st.floats(), st.binary())
    def tried(number: int, real: float, data: bytes) -> None:
        seen.append((number, real.hex(), data))

    tried()
    return seen


def test_examples_do_not_depend_on_what_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hypothesis would draw the numbers of a module of the checked code as well, from when it is imported."""
    before = examples()
    source = tmp_path / "telling.py"
    numbers = range(123_456_789, 123_456_789 + 7 * 400, 7)
    source.write_text(f"NUMBERS = {[*numbers]}\nREALS = {[n + 0.25 for n in numbers]}\nDATA = b'telling'\n")
    assert is_local_module_file(str(source)), "else hypothesis would not look into it anyway"
    spec = spec_from_file_location("telling", source)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "telling", module)
    assert len({number for number, _, _ in before}) > 20
    assert examples() == before
