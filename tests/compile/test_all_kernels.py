"""Every registered kernel compiles for every target it is registered for, and what comes out may ship.

By default a set of configurations that covers all pairs of option values; all of them with KEYSIEVE_COMPILE_ALL=1.
"""

from __future__ import annotations

import dataclasses
import os

import pytest

from keysieve.compile import kernels
from keysieve.compile.build import build
from keysieve.kernels.base import ARCHS, Kernel, pairwise

EVERYTHING = os.environ.get("KEYSIEVE_COMPILE_ALL") == "1"


def jobs() -> list[object]:
    found = []
    for kernel in kernels():
        pool = [(arch, config) for arch in kernel.archs for config in kernel.admitted(arch)]
        for arch, config in pool if EVERYTHING else all_pairs(kernel, pool):
            found.append(pytest.param(kernel, config, arch, id=f"{kernel.symbol(config)}-{arch}"))
    return found


def all_pairs(kernel: Kernel, pool: list[tuple[str, object]]) -> list[tuple[str, object]]:
    """Some of `pool` that together have every pair of option values, the target being an option as well."""
    names = ["target", *(f.name for f in dataclasses.fields(kernel.config))]
    made = dataclasses.make_dataclass("Choice", names, frozen=True)
    choices = {made(arch, *(v for _, v in kernel.options(config))): (arch, config) for arch, config in pool}
    return [choices[choice] for choice in pairwise(choices)]


@pytest.mark.parametrize(("kernel", "config", "arch"), jobs())
def test_compiles_without_spills_and_within_limits(kernel: Kernel, config: object, arch: str) -> None:
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
    built = build(kernel, config, arch)  # raises KernelBuildError on local memory, spills, shared memory, registers
    assert built.facts.kernels
    assert len(built.facts.launches) == len(built.facts.kernels)
    for code in built.facts.kernels:
        assert code.threads is not None
        assert code.registers * code.threads[0] * code.threads[1] * code.threads[2] <= 65536
    # Chained launches are only right when every kernel waits for the one before it.
    waits = built.facts.count(r"griddepcontrol\.wait$")
    chained = [launch for launch in built.facts.launches if launch.programmatic != 0]
    assert waits >= len(chained)


def test_registrations_are_sound() -> None:
    for kernel in kernels():
        for arch in kernel.archs:
            assert arch in ARCHS
            admitted = list(kernel.admitted(arch))
            assert admitted, f"{kernel.name} admits nothing on {arch}"
            assert len(set(admitted)) == len(admitted)
            symbols = {kernel.symbol(config) for config in admitted}
            assert len(symbols) == len(admitted), f"{kernel.name}: two configurations share a symbol"
            assert all(symbol.isidentifier() for symbol in symbols)
            common = set(kernel.common(arch)) if kernel.common else set()
            assert common <= set(admitted)


def test_pairwise_covers_every_pair_with_fewer_configurations() -> None:
    from dataclasses import dataclass
    from itertools import product

    @dataclass(frozen=True)
    class Options:
        a: int
        b: str
        c: bool
        d: int

    everything = [Options(*values) for values in product(range(4), "xyz", (False, True), range(3))]
    everything = [o for o in everything if not (o.a == 3 and o.c)]  # not every combination is admitted
    few = pairwise(everything)
    assert set(few) <= set(everything)
    assert len(few) < len(everything) / 3
    for first, second in [("a", "b"), ("a", "c"), ("a", "d"), ("b", "c"), ("b", "d"), ("c", "d")]:
        pairs = {(getattr(o, first), getattr(o, second)) for o in everything}
        assert {(getattr(o, first), getattr(o, second)) for o in few} == pairs
