"""Launches prepared for the driver: told apart into addresses and the rest, or left to the host functions."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import pytest

from keysieve import relaunch
from keysieve.driver import CLUSTER, COOPERATIVE, PROGRAMMATIC, DriverError, Node
from keysieve.prepared import places, prepare, samples
from keysieve.relaunch import Address, Launches

NAMES = ("pool", "query", "table", "out", "absent")
TABLE, OUT = 2, 3
ALIGNED = (16, 16, 4, 4, 4)
GIVEN = (0x7F00_0000_0010, 0x7F00_0000_0010, 0x7F10_0000_0004, 0x7F20_0000_0000, 0)
"""Two of the addresses are equal, as those of one tensor given twice are."""


class Fake:
    """A driver that takes down what fake kernels launch, and what it is told to launch."""

    def __init__(self, refuse_from: int = 99) -> None:
        self.taken: list[Node] | None = None
        self.launched: list[tuple[int, ...]] = []
        self.refuse_from = refuse_from

    def captured(self, launch: Callable[[int], None], stream: int) -> tuple[Node, ...]:
        self.taken = []
        launch(stream)
        nodes, self.taken = tuple(self.taken), None
        return nodes

    def launch(self, config: Any, function: Any, params: Any, extra: None) -> int:
        assert extra is None
        if len(self.launched) >= self.refuse_from:
            return 201
        pointers, c = params._obj, config._obj
        sizes = SIZES[ctypes.addressof(function._obj)]
        values = tuple(ctypes.string_at(pointers[i] or 0, size) for i, size in enumerate(sizes))
        attributes = [(a.id, tuple(a.value[:3])) for a in c.attributes[: c.count]]
        self.launched.append((ctypes.addressof(function._obj), values, c.stream, c.shared, attributes, c.grid_x))
        return 0


SIZES = {0x5000: (8, 128, 128, 4, 8), 0x6000: (8, 8, 4)}


def words(*values: int) -> bytes:
    return struct.pack(f"={len(values)}Q", *values)


def score(*given: int) -> Node:
    """A kernel with two tensor maps, one of which begins beside its tensor."""
    pool, query, table, _, absent, _ = given
    maps = words(query, *range(15)), words(7, pool + 8192, *range(14))
    return Node(
        0x5000, (3, 1, 1), (32, 1, 1), 77, (words(table), *maps, b"\1\0\0\0", words(absent)), (0, 0, 0), False, False
    )


def select(*given: int) -> Node:
    table, out = given[TABLE], given[OUT]
    return Node(0x6000, (4, 1, 1), (64, 1, 1), 0, (words(table), words(out), b"\2\0\0\0"), (2, 1, 1), True, True)


class Kernels:
    """Host functions for fake kernels: into the capture, or to the list of ordinary launches."""

    def __init__(self, fake: Fake, made: tuple[Callable[..., Node], ...] = (score, select)) -> None:
        self.fake, self.made, self.ordinary = fake, made, []  # type: list[tuple[int, tuple[int, ...]]]

    def from_launch(self, i: int, to: int | None = None) -> Callable[..., None]:
        def launch(*args: int) -> None:
            for make in self.made[i:to]:
                if self.fake.taken is None:
                    self.ordinary.append((self.made.index(make), args))
                else:
                    self.fake.taken.append(make(*args))

        return launch

    def prepare(self) -> Callable[..., None]:
        again = [self.from_launch(i) for i in range(len(self.made))]
        return prepare(self.fake, self.from_launch(0, 1), again, NAMES, GIVEN, ALIGNED, 5)


def others(seed: int) -> tuple[int, ...]:
    return tuple(a and 16 * (seed * 7919 + 31 * i + 1) for i, a in enumerate(GIVEN))


def test_launches_are_those_of_the_host_function_for_any_addresses_and_stream() -> None:
    kernels = Kernels(fake := Fake())
    prepared = kernels.prepare()
    assert not fake.launched
    for seed in range(20):
        given, stream = others(seed), seed % 3
        fake.launched.clear()
        prepared(*given, stream)
        wanted = [score(*given, stream), select(*given, stream)]
        assert [x[:2] for x in fake.launched] == [(n.function, n.params) for n in wanted]
        assert [(x[2] or 0, x[3], x[5]) for x in fake.launched] == [(stream, n.shared, n.grid[0]) for n in wanted]
        assert fake.launched[0][4] == []
        assert fake.launched[1][4] == [(PROGRAMMATIC, (1, 0, 0)), (CLUSTER, (2, 1, 1)), (COOPERATIVE, (1, 0, 0))]
    assert not kernels.ordinary


@pytest.mark.parametrize("refused", [0, 1])
def test_what_the_driver_refuses_the_host_functions_launch(refused: int) -> None:
    kernels = Kernels(fake := Fake(refuse_from=refused))
    kernels.prepare()(*others(3), 9)
    assert len(fake.launched) == refused
    assert kernels.ordinary == [(i, (*others(3), 9)) for i in range(refused, 2)]


def changed(make: Callable[..., Node], **fields: Callable[..., Any]) -> Callable[..., Node]:
    return lambda *args: make(*args)._replace(**{name: of(*args) for name, of in fields.items()})


def with_params(of: Callable[[int, int], tuple[bytes, ...]]) -> Callable[..., Node]:
    return changed(select, params=lambda *a: of(a[TABLE], a[OUT]))


FOREIGN: dict[str, Callable[..., Node]] = {
    "a grid that depends on an address": changed(select, grid=lambda *a: (a[0] >> 20 & 7, 1, 1)),
    "shared memory by alignment": changed(select, shared=lambda *a: a[TABLE] % 8),
    "a flag of alignment": with_params(lambda table, out: (words(table), words(out), bytes([out % 16, 0, 0, 0]))),
    "a sum of addresses": with_params(lambda table, out: (words(table + out), words(out), bytes(4))),
    "half an address": with_params(
        lambda table, out: (words(table), words(out), struct.pack("=I", table & 0xFFFF_FFFF))
    ),
    "an address far away": with_params(lambda table, out: (words(table + (1 << 40)), words(out), bytes(4))),
    "fewer parameters": with_params(lambda table, _: (words(table),) * (1 + (table >> 20 & 1))),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_not_explained_by_addresses_is_not_prepared(kind: str) -> None:
    kernels = Kernels(Fake(), (score, FOREIGN[kind]))
    with pytest.raises(DriverError):
        kernels.prepare()


def test_more_launches_than_were_written_down_are_not_prepared() -> None:
    kernels = Kernels(Fake())
    again = [kernels.from_launch(0), kernels.from_launch(1)]

    def more(*args: int) -> None:
        again[0](*args)
        again[1](*args)

    with pytest.raises(DriverError, match="3 launches were captured, 2 made"):
        prepare(kernels.fake, kernels.from_launch(0, 1), [more, again[1]], NAMES, GIVEN, ALIGNED, 5)


def test_samples_are_aligned_as_said_and_apart() -> None:
    sets = samples(GIVEN, ALIGNED)
    for given in sets:
        assert given[4] == 0
        assert all(a % least == 0 for a, least in zip(given, ALIGNED, strict=True))
    assert all(len(set(given[:4])) == 4 for given in sets[1:])
    assert all(a % 4096 == 0 for a in sets[2])
    assert [a % 4096 for a in sets[3][:4]] == list(ALIGNED[:4])


def test_places_tell_equal_addresses_apart() -> None:
    old, new, *_ = samples(GIVEN, ALIGNED)
    found = places(words(1, old[1], old[0]), words(1, new[1], new[0]), old, new)
    assert [(p.offset, p.address) for p in found] == [(8, 1), (16, 0)]


def test_without_a_driver_or_a_stream_nothing_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Target:
        label = "a kernel"

        def __init__(self) -> None:
            self.calls: list[tuple[int, ...]] = []

        def function(self, *args: int) -> None:
            self.calls.append(args)

    target = Target()
    launches = Launches([(target, (Address(3, "query"), 8))], ("query",))
    monkeypatch.setattr(relaunch, "driver", lambda: None)
    relaunch.may_prepare(0)
    assert launches.prepared((16,), (16,), 0) is None
    launches(48, 5)
    assert target.calls == [(48, 8, 5)]
    fake = Fake()
    monkeypatch.setattr(relaunch, "driver", lambda: fake)
    assert launches.prepared((16,), (16,), 0) is None  # no stream
    monkeypatch.setattr(relaunch, "_capture_streams", {0: 5})
    assert launches.prepared((16,), (16,), 0) is None  # nothing was captured
