"""Launches prepared as one graph: told apart into addresses and the rest, or left to the host functions."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from interrupts import interrupted

from keysieve import relaunch
from keysieve.driver import Captured, Driver, DriverError, Node, NodeParams
from keysieve.prepared import noise, places, prepare, samples
from keysieve.relaunch import Address, Launches

NAMES = ("pool", "query", "table", "out", "absent")
TABLE, OUT = 2, 3
ALIGNED = (16, 16, 4, 4, 4)
GIVEN = (0x7F00_0000_0010, 0x7F00_0000_0010, 0x7F10_0000_0004, 0x7F20_0000_0000, 0)
"""Two of the addresses are equal, as those of one tensor given twice are."""

Make = Callable[..., Node]


def words(*values: int) -> bytes:
    return struct.pack(f"={len(values)}Q", *values)


def hidden(address: int) -> bytes:
    """A tensor map whose address is not written as it is."""
    return words(5, 6, address >> 4 ^ 0xABCD, address >> 40, *range(12))


class Fake:
    """A driver that takes down what fake kernels launch, and what their graph would launch."""

    def __init__(self) -> None:
        self.taken: list[Node] | None = None
        self.graphs: dict[int, tuple[Node, ...]] = {}
        self.executables: dict[int, dict[int, Any]] = {}
        self.started: list[tuple[int, list[tuple[int, tuple[bytes, ...]]]]] = []
        self.refused, self.unusual, self.captures = "", set[int](), False
        self.handles = itertools.count(0x10000, 64)

    def captured(self, launch: Callable[[int], None], stream: int) -> Captured:
        self.taken = []
        launch(stream)
        graph, nodes, self.taken = next(self.handles), tuple(self.taken), None
        self.graphs[graph] = nodes
        return Captured(graph, tuple(next(self.handles) for _ in nodes), nodes)

    def instantiated(self, captured: Captured) -> int:
        made = next(self.handles)
        self.executables[made] = dict.fromkeys(captured.handles)
        return made

    def forget(self, graph: int, executable: int) -> None:
        del self.graphs[graph]
        if executable:
            del self.executables[executable]

    def new_stream(self) -> int:
        raise DriverError("no stream")

    def ordinary(self, stream: int) -> bool:
        return stream not in self.unusual

    def node_params(self, node: int) -> NodeParams:
        return NodeParams(function=node)

    def capturing(self) -> bool:
        return self.captures

    def set_node(self, executable: Any, node: Any, params: Any) -> int:
        if self.refused == "set":
            return 1
        self.executables[ctypes.addressof(executable._obj)][ctypes.addressof(node._obj)] = params._obj
        return 0

    def readdress(self, tensor_map: ctypes.c_void_p, address: ctypes.c_void_p) -> int:
        if self.refused == "map":
            return 1
        ctypes.memmove(tensor_map, hidden(address.value or 0), 128)
        return 0

    def start(self, executable: Any, stream: ctypes.c_void_p) -> int:
        if self.refused == "start":
            return 1
        each = self.executables[ctypes.addressof(executable._obj)]
        found = []
        for (node, ours), (function, sizes) in zip(each.items(), SIZES.items(), strict=True):
            assert ours.function == node
            found.append((function, tuple(ctypes.string_at(ours.params[i], size) for i, size in enumerate(sizes))))
        self.started.append((stream.value or 0, found))
        return 0


SIZES = {0x5000: (8, 128, 128, 4, 8, 16), 0x6000: (8, 8, 8)}
garbage = itertools.count()
stack: list[int] = []


def score(*given: int) -> Node:
    """A kernel with two tensor maps, one beside its tensor, and a structure that is not filled up."""
    pool, query, table, _, absent, _ = given
    stack[:] = [query & 0xFFFF_FFFF]
    maps = words(query, *range(15)), words(7, pool + 8192, *range(14))
    room = words(out := given[OUT]) + b"\7\0\0\0" + struct.pack("=I", next(garbage))
    assert len(room) == 16, out
    return Node(0x5000, (3, 1, 1), (32,), 77, (words(table), *maps, b"\1\0\0\0", words(absent), room), (0, 0), False)


def score_hidden(*given: int) -> Node:
    node = score(*given)
    return node._replace(params=(node.params[0], hidden(given[1]), hidden(given[0]), *node.params[3:]))


def select(*given: int) -> Node:
    """A kernel that is launched as a dependent, with a structure in which lies what the call before left there."""
    left = b"\2\0\0\0" + struct.pack("=I", stack[0])
    stack[:] = [given[TABLE] & 0xFFFF_FFFF]
    return Node(0x6000, (4, 1, 1), (64,), 0, (words(given[TABLE]), words(given[OUT]), left), (1, 2), True)


class Kernels:
    """Host functions for fake kernels: into the capture, or to the list of ordinary launches."""

    def __init__(self, *made: Make) -> None:
        self.fake, self.made = Fake(), made
        self.ordinary: list[tuple[int, ...]] = []

    def launch(self, made: tuple[Make, ...]) -> Callable[..., None]:
        def launch(*args: int) -> None:
            if self.fake.taken is None:
                self.ordinary.append(args)
            else:
                self.fake.taken += [make(*args) for make in made]

        return launch

    def prepare(self) -> Callable[..., None]:
        single, again, fake = [self.launch((make,)) for make in self.made], self.launch(self.made), self.fake
        return prepare(fake, single, again, NAMES, GIVEN, ALIGNED, 5, fake.capturing)  # type: ignore[arg-type]  # a fake


def others(seed: int) -> tuple[int, ...]:
    return tuple(a and 16 * (seed * 7919 + 31 * i + (1 << 36)) for i, a in enumerate(GIVEN))


def meant(node: Node) -> tuple[int, tuple[bytes, ...]]:
    """What of a launch means something."""
    return node.function, read(node.params)


def read(params: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Without what lies between members."""
    return tuple(v[:12] if len(v) == 16 else v[:4] if v.startswith(b"\2\0\0\0") else v for v in params)


@pytest.mark.parametrize("first", [score, score_hidden])
def test_launches_are_those_of_the_host_function_for_any_addresses_and_stream(first: Make) -> None:
    kernels = Kernels(first, select)
    prepared, fake = kernels.prepare(), kernels.fake
    assert not fake.started
    for seed in (*range(20), 3, 3, 4):
        given, stream = others(seed), seed % 3
        prepared(*given, stream)
        ((got, nodes),) = fake.started
        fake.started.clear()
        assert got == stream
        assert [(f, read(values)) for f, values in nodes] == [
            meant(first(*given, stream)),
            meant(select(*given, stream)),
        ]
    assert not kernels.ordinary


@pytest.mark.parametrize("refused", ["set", "start", "map"])
def test_what_the_driver_refuses_the_host_functions_launch(refused: str) -> None:
    kernels = Kernels(score_hidden, select)
    prepared, fake = kernels.prepare(), kernels.fake
    fake.refused = refused
    prepared(*others(3), 9)
    assert kernels.ordinary == [(*others(3), 9)]
    assert not fake.started
    fake.refused = ""
    prepared(*others(3), 9)
    assert len(fake.started) == len(kernels.ordinary) == 1
    assert fake.started[0][1][0][1][1] == hidden(others(3)[1])


def test_an_interrupt_after_the_driver_has_put_an_address_into_a_map_is_no_stale_map(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C between the driver's write and the note of it: the address that stood there before is written again."""
    kernels = Kernels(score_hidden, select)
    prepared, fake = kernels.prepare(), kernels.fake
    prepared(*others(3), 9)
    put = fake.readdress

    def interrupted(*given: Any) -> int:
        put(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fake, "readdress", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepared(*others(4), 9)
    fake.started.clear()
    prepared(*others(3), 9)
    assert [(f, read(values)) for f, values in fake.started[0][1]] == [
        meant(score_hidden(*others(3), 9)),
        meant(select(*others(3), 9)),
    ]


def test_a_graph_stands_for_nothing_under_capture_or_on_an_unusual_stream() -> None:
    kernels = Kernels(score, select)
    prepared, fake = kernels.prepare(), kernels.fake
    fake.unusual = {8}
    for stream, captures, graph in ((7, False, True), (7, True, False), (8, False, False), (7, False, True)):
        fake.captures = captures
        fake.started.clear()
        kernels.ordinary.clear()
        prepared(*others(1), stream)
        assert (len(fake.started), len(kernels.ordinary)) == (int(graph), int(not graph))
    fake.captures = True
    fake.started.clear()
    prepared(*others(1), 0)  # the legacy stream is never captured, and not asked
    assert len(fake.started) == 1


def test_graphs_are_given_back() -> None:
    kernels = Kernels(score, select)
    prepared, fake = kernels.prepare(), kernels.fake
    assert len(fake.graphs) == len(fake.executables) == 1
    prepared(*others(1), 7)
    del prepared
    gc.collect()
    assert not fake.graphs
    assert not fake.executables


def changed(make: Make, **fields: Callable[..., Any]) -> Make:
    return lambda *args: make(*args)._replace(**{name: of(*args) for name, of in fields.items()})


def with_params(of: Callable[[int, int], tuple[bytes, ...]]) -> Make:
    return changed(select, params=lambda *a: of(a[TABLE], a[OUT]))


FOREIGN: dict[str, tuple[Make, Make]] = {
    "a grid that depends on an address": (score, changed(select, grid=lambda *a: (a[0] >> 8 & 7, 1, 1))),
    "shared memory by alignment": (score, changed(select, shared=lambda *a: a[TABLE] % 8)),
    "a flag of alignment": (score, with_params(lambda t, out: (words(t), words(out), bytes([out % 16, 0, 0, 0])))),
    "a sum of addresses": (score, with_params(lambda t, out: (words(t + out), words(out), bytes(4)))),
    "half an address": (score, with_params(lambda t, out: (words(t), words(out), struct.pack("=I", t & 0xFFFF_FFFF)))),
    "an address far away": (score, with_params(lambda t, out: (words(t + (1 << 40)), words(out), bytes(4)))),
    "fewer parameters": (score, with_params(lambda t, _: (words(t),) * (1 + (t >> 8 & 1)))),
    "a first launch that does not wait": (changed(score, programmatic=lambda *_: True), select),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_not_explained_by_addresses_is_not_prepared(kind: str) -> None:
    kernels = Kernels(*FOREIGN[kind])
    with pytest.raises(DriverError):
        kernels.prepare()
    assert not kernels.fake.executables
    assert not kernels.fake.graphs


def test_samples_are_aligned_as_said_and_apart() -> None:
    sets = samples(GIVEN, ALIGNED)
    for given in sets:
        assert given[4] == 0
        assert all(a % least == 0 for a, least in zip(given, ALIGNED, strict=True))
    assert all(len(set(given[:4])) == 4 for given in sets[1:])
    assert all(a % 256 == 0 for a in sets[2])
    assert [a % 256 for a in sets[3][:4]] == list(ALIGNED[:4])


def test_places_tell_equal_addresses_apart_and_pass_over_noise() -> None:
    old, new, *_ = samples(GIVEN, ALIGNED)
    before, after = words(1, old[1], old[0], 9), words(1, new[1], new[0], 8)
    unread = noise(words(1, 2, 3, 9), words(1, 2, 3, 10))
    fake: Any = Fake()
    found = places(fake, before, after, unread, old, new)
    assert [(p.offset, p.address) for p in found] == [(8, 1), (16, 0)]
    with pytest.raises(DriverError):
        places(fake, before, after, frozenset(), old, new)


class Target:
    """A kernel that writes down its arguments."""

    label = "a kernel"

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def function(self, *args: int) -> None:
        self.calls.append(args)


def test_without_a_driver_or_a_stream_nothing_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target()
    launches = Launches([(target, (Address(3, "query"), 8))], ("query",))
    monkeypatch.setattr(relaunch, "driver", lambda: None)
    assert launches.prepared((16,), (16,), 0) is None
    launches(48, 5)
    assert target.calls == [(48, 8, 5)]
    fake = Fake()
    monkeypatch.setattr(relaunch, "driver", lambda: fake)
    monkeypatch.setattr(relaunch, "_capture_streams", {})
    assert launches.prepared((16,), (16,), 0) is None  # no stream can be had
    assert "no stream" in launches.unprepared
    assert launches.failed
    monkeypatch.setattr(relaunch, "_capture_streams", {0: 5})
    assert launches.prepared((16,), (16,), 0) is None  # nothing was captured
    assert "not wanted" not in launches.unprepared
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_LAUNCH_BLOCKING", "1")
        assert launches.prepared((16,), (16,), 0) is None
        assert "not wanted" in launches.unprepared
    assert Launches([(target, (Address(3, "query"), 8))], ("query",), in_graph=False).prepared((16,), (16,), 0) is None


class Library:
    """In place of the driver's library: every function succeeds; a capture's graph is 77."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(*args: Any) -> int:
            self.called.append(name)
            if name == "cuStreamEndCapture":
                args[1]._obj.value = 77
            if name == "cuGraphDestroy":
                assert args[0].value == 77
            return 0

        return function


def test_an_interrupt_of_a_capture_ends_it() -> None:
    """At every place where CPython looks for signals: a stream left capturing would fail every later preparation."""

    def capture(driver: Driver) -> None:
        with contextlib.suppress(DriverError):  # no kernel was captured
            driver.captured(lambda _: None, 5)

    after, came = 0, True
    while came:
        after += 1
        library = Library()
        came = interrupted(functools.partial(capture, Driver(library)), after, ("c_return",))
        begun = library.called.count("cuStreamBeginCapture_v2")
        assert library.called.count("cuStreamEndCapture") >= begun, after
    assert after > 5


def test_a_capture_that_does_not_begin_is_told_by_that() -> None:
    """It is ended all the same, and what that answers hides nothing."""
    library = Library()
    driver = Driver(library)
    driver._call["cuStreamBeginCapture_v2"] = lambda *_: 901
    driver._call["cuStreamEndCapture"] = lambda *_: 401
    with pytest.raises(DriverError, match="cuStreamBeginCapture_v2 failed with 901"):
        driver.captured(lambda _: pytest.fail("launched"), 5)
    assert "cuGraphDestroy" not in library.called


@pytest.mark.parametrize("fault", [RuntimeError, DriverError])
def test_a_capture_that_fails_leaves_no_graph(fault: type[Exception]) -> None:
    """Whether a launch raises in it, or what was captured is no row of kernels (here: no kernel at all)."""
    library = Library()

    def launch(_: int) -> None:
        if fault is RuntimeError:
            raise fault("no such kernel image")

    with pytest.raises(fault):
        Driver(library).captured(launch, 5)
    assert library.called.count("cuStreamEndCapture") == 1
    assert library.called.count("cuGraphDestroy") == 1


def test_threads_prepare_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """They capture on one stream of the device."""
    inside, most = [0], [0]

    def prepare(*_: object) -> Callable[..., None]:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1
        return lambda *_: None

    monkeypatch.setattr(relaunch, "driver", lambda: Fake())
    monkeypatch.setattr(relaunch, "prepare", prepare)
    monkeypatch.setattr(relaunch, "_capture_streams", {0: 5})
    with ThreadPoolExecutor(4) as pool:
        each = [Launches([(Target(), (Address(3, "query"), 8))], ("query",)) for _ in range(8)]
        made = list(pool.map(lambda launches: launches.prepared((16,), (16,), 0), each))
    assert all(made)
    assert most == [1]
