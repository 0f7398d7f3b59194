"""A repeated step's launches as one executable graph, of which each call sets nothing but the addresses.

What a host function compiled by the DSL does in each launch (tensor maps, a launch structure, a call through the
runtime) has the same result for equal arguments but for the addresses. So the launches are captured for a few sets of
addresses, in which no kernel runs, and what differs is where addresses stand. From then on a call writes its addresses
there, hands every node its parameters and starts the graph: a third of what the launches cost the host, and to the
device the same two kernels, the second as the first one's programmatic dependent. Whatever addresses alone do not
explain is left to the host functions, and so is every call that a graph could not stand for: while the stream is
captured, on a stream with a priority or a part of the device of its own, and where the driver refuses.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from keysieve.driver import Driver, DriverError, Executable, Node

Addresses = tuple[int, ...]
Launch = Callable[..., None]

STEP = 256
"""Addresses are told from one another by moving each by another multiple of this many bytes: not far, so that they stay
inside their allocations (nothing is read there)."""

MAP_BYTES = 128
"""A tensor map; where its address stands is the driver's to know."""

_MOST_OFFSET = 1 << 20


@dataclass(frozen=True)
class Place:
    """Bytes of a parameter that say an address.

    Attributes:
        offset: of eight bytes in the parameter; -1 for a tensor map, whose address the driver puts in.
        address: which one.
        added: what is added to it.
    """

    offset: int
    address: int
    added: int = 0


def samples(addresses: Addresses, aligned: Sequence[int]) -> list[Addresses]:
    """Addresses to capture launches with: these, others to compare them with, then what is held against the finding.

    The last ones are aligned as well, and as badly, as addresses can be, so that a host function that looks at
    alignment is found out. What is absent (0) stays so. aligned: what each address is a multiple of at the least.
    """

    def moved(given: Addresses, times: int) -> Addresses:
        return tuple(a and a + (i + 1) * times * STEP for i, a in enumerate(given))

    well = tuple(a and a // STEP * STEP for a in addresses)
    badly = tuple(a and a + least for a, least in zip(well, aligned, strict=True))
    return [addresses, moved(addresses, 1), moved(well, 3), moved(badly, 5)]


def noise(one: bytes, other: bytes) -> frozenset[int]:
    """Bytes of a parameter that mean nothing: equal launches differ there (what fills up a structure)."""
    if len(one) != len(other):
        raise DriverError("equal launches have parameters of other sizes")
    return frozenset(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)


def same(one: bytes, other: bytes, ignored: frozenset[int]) -> bool:
    """Are two parameters equal but for bytes that mean nothing?"""
    return one == other or not {i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b} - ignored


def places(
    driver: Driver, before: bytes, after: bytes, ignored: frozenset[int], old: Addresses, new: Addresses
) -> list[Place]:
    """Where a parameter says addresses: what differs between two captures.

    Raises:
        DriverError: something differs that is no address.
    """
    if len(before) != len(after):
        raise DriverError("a parameter's size depends on addresses")
    if same(before, after, ignored):
        return []
    found: list[Place] = []
    for offset in range(0, len(before) - 7, 8):
        (was,), (now,) = struct.unpack_from("=Q", before, offset), struct.unpack_from("=Q", after, offset)
        fitting = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a and now - was == b - a]
        if len(fitting) == 1 and 0 <= was - old[fitting[0]] < _MOST_OFFSET:
            found.append(Place(offset, fitting[0], was - old[fitting[0]]))
    if same(_put(driver, before, found, new), after, ignored):
        return found
    if len(before) == MAP_BYTES:
        for i, address in enumerate(new):
            if address and same(_put(driver, before, [Place(-1, i)], new), after, ignored):
                return [Place(-1, i)]
    unexplained = [i for i, (a, b) in enumerate(zip(_put(driver, before, found, new), after, strict=True)) if a != b]
    raise DriverError(f"a parameter of {len(before)} bytes differs by more than addresses, in bytes {unexplained}")


def _put(driver: Driver, value: bytes, where: Sequence[Place], addresses: Addresses) -> bytes:
    """A parameter with other addresses in it."""
    room = _Room(len(value))
    ctypes.memmove(room.start, value, len(value))
    for place in where:
        address = addresses[place.address] + place.added
        if place.offset < 0:
            driver.readdress(ctypes.c_void_p(room.start), ctypes.c_void_p(address))
        else:
            struct.pack_into("=Q", room.memory, room.start - room.base + place.offset, address)
    return ctypes.string_at(room.start, len(value))


class _Room:
    """Memory of so many bytes from a multiple of 64 on, as the driver wants tensor maps."""

    def __init__(self, size: int) -> None:
        self.memory = (ctypes.c_ubyte * (size + 64))()
        self.base = ctypes.addressof(self.memory)
        self.start = -(-self.base // 64) * 64


class Block:
    """The memory from which a graph's nodes take their parameters: addresses, and what holds addresses.

    Args:
        driver: the driver.
        nodes: the launches as captured.
        where: the places of addresses in each parameter of each launch.
        addresses: how many a launch is given.

    Attributes:
        memory: all of it, for ``pack_into``.
        writes: (offset in memory, what stands there), in ascending order.
        maps: which address each tensor map has that the driver puts in.
        pointers: each node's parameters, as the driver is given them.
        mapped: the addresses that those maps have now.
        stream: the stream of the last call; usable: whether a graph may stand for launches on it; handle: to give it.
    """

    def __init__(
        self, driver: Driver, nodes: Sequence[Node], where: Sequence[Sequence[Sequence[Place]]], addresses: int
    ) -> None:
        self._driver = driver
        every = [(n, p) for n, node in enumerate(nodes) for p in range(len(node.params))]
        held = [(n, p) for n, p in every if not self._bare(nodes[n], where[n], p)]
        # What begins with an address comes first, behind the plain addresses, and is written together with them.
        held.sort(key=lambda at: not any(place.offset == 0 for place in where[at[0]][at[1]]))
        end = -(-8 * addresses // 64) * 64
        front, starts = end - 8 * addresses, dict[tuple[int, int], int]()
        for at in held:
            starts[at] = end
            end += -(-len(nodes[at[0]].params[at[1]]) // 64) * 64
        room = _Room(end)
        self.memory, shift = room.memory, room.start - room.base
        self.writes = [(shift + front + 8 * i, Place(0, i)) for i in range(addresses)]
        self.pointers: list[ctypes.Array[ctypes.c_void_p]] = []
        self.maps: list[int] = []
        self._maps: list[ctypes.c_void_p] = []
        for n, node in enumerate(nodes):
            pointers = (ctypes.c_void_p * max(len(node.params), 1))()
            for p, value in enumerate(node.params):
                if (n, p) not in starts:
                    pointers[p] = room.start + front + 8 * where[n][p][0].address
                    continue
                start = starts[n, p]
                pointers[p] = room.start + start
                ctypes.memmove(room.start + start, value, len(value))
                for place in where[n][p]:
                    if place.offset < 0:
                        self.maps.append(place.address)
                        self._maps.append(ctypes.c_void_p(room.start + start))
                    else:
                        self.writes.append((shift + start + place.offset, place))
            self.pointers.append(pointers)
        self.writes.sort(key=lambda write: write[0])
        self._sizes = [[len(value) for value in node.params] for node in nodes]
        self.mapped = [-1] * len(self.maps)
        self.stream, self.usable, self.handle = -1, False, ctypes.c_void_p(0)

    @staticmethod
    def _bare(node: Node, where: Sequence[Sequence[Place]], p: int) -> bool:
        """Is the parameter an address and nothing else?"""
        return len(node.params[p]) == 8 and len(where[p]) == 1 and not where[p][0].added

    def move_to(self, stream: int) -> None:
        """A call on another stream than the one before."""
        self.usable, self.handle, self.stream = self._driver.ordinary(stream), ctypes.c_void_p(stream), stream

    def remap(self, i: int, address: int) -> bool:
        """Put an address into a tensor map; True if the driver refuses."""
        self.mapped[i] = -1  # whatever ends this, also a signal's handler after the driver has written
        failed = bool(self._driver.readdress(self._maps[i], ctypes.c_void_p(address)))
        if not failed:
            self.mapped[i] = address
        return failed

    def values(self) -> list[tuple[bytes, ...]]:
        """The parameters of each node as the driver would read them now."""
        return [
            tuple(ctypes.string_at(pointers[p] or 0, size) for p, size in enumerate(sizes))
            for pointers, sizes in zip(self.pointers, self._sizes, strict=True)
        ]


def prepare(
    driver: Driver,
    single: Sequence[Launch],
    again: Launch,
    names: Sequence[str],
    addresses: Addresses,
    aligned: Sequence[int],
    stream: int,
    capturing: Callable[[], bool],
) -> Launch:
    """A function that makes the launches of ``again`` for any addresses, as one graph.

    Args:
        driver: the driver.
        single: makes each of the launches alone.
        again: makes all of them. All take addresses and stream.
        names: the addresses that they and the function take, all positional, before the stream.
        addresses: those of a call: 0 for what is absent, and absent in every later call.
        aligned: what each of them is a multiple of.
        stream: one of the current device that nothing else uses, to capture on.
        capturing: whether the current stream, which is the one that the function is given, is being captured.

    Raises:
        DriverError: the launches cannot be told apart into addresses and the rest, or not be one graph.
    """
    old, new, *held_against = samples(addresses, aligned)

    def nodes_of(given: Addresses) -> list[Node]:
        found = []
        for launch in single:

            def after_others(to: int, launch: Launch = launch) -> None:
                again(*old, to)  # behind a kernel it shows whether it waits for that
                _wipe_stack()
                launch(*given, to)

            captured = driver.captured(after_others, stream)
            driver.forget(captured.graph, 0)
            if len(captured.nodes) != len(single) + 1:
                raise DriverError(f"{len(captured.nodes)} launches were captured, {len(single) + 1} made")
            found.append(captured.nodes[-1])
        return found

    nodes, others, repeated = nodes_of(old), nodes_of(new), nodes_of(old)
    if not nodes or nodes[0].programmatic:
        raise DriverError("a graph waits for all that is ahead of it, the first launch does not")
    if any([_frame(n) for n in nodes] != [_frame(n) for n in found] for found in (others, repeated)):
        raise DriverError("how a kernel is launched depends on addresses")
    where: list[list[list[Place]]] = []
    ignored: list[list[frozenset[int]]] = []
    for node, other, equal in zip(nodes, others, repeated, strict=True):
        ignored.append([noise(a, b) for a, b in zip(node.params, equal.params, strict=True)])
        each = zip(node.params, other.params, ignored[-1], strict=True)
        where.append([places(driver, b, a, n, old, new) for b, a, n in each])
    block = Block(driver, nodes, where, len(addresses))
    trial = _function(block, names, again, len(nodes), set_node=_nothing, start=_nothing, capturing=_never)
    for given in held_against:
        block.stream, block.usable = stream, True
        trial(*given, stream)
        found = nodes_of(given)
        if [_frame(n) for n in nodes] != [_frame(n) for n in found]:
            raise DriverError("how a kernel is launched depends on addresses' alignment")
        for values, node, unread in zip(block.values(), found, ignored, strict=True):
            if not all(same(a, b, n) for a, b, n in zip(values, node.params, unread, strict=True)):
                raise DriverError("a launch differs by more than addresses")
    block.stream = -1
    graph = Executable(driver, driver.captured(lambda to: again(*old, to), stream))
    if [_frame(n) for n in graph.captured.nodes] != [_frame(n) for n in nodes]:
        raise DriverError("the graph holds other launches")
    return _function(
        block, names, again, len(nodes), set_node=driver.set_node, start=driver.start, capturing=capturing, graph=graph
    )


class _Wipe(ctypes.Structure):
    _fields_ = (("zeros", ctypes.c_ubyte * 16384),)


_ZEROS = _Wipe()


def _wipe_stack() -> None:
    """Let the next call from here find zeros on its stack, where it reads what nothing wrote.

    Host functions fill half of a tensor map; the rest is whatever earlier calls left there, and would look as if it
    depended on addresses. A structure of zeros, passed by value, is copied over it; the function called ignores it.
    """
    ctypes.pythonapi.Py_IsInitialized(_ZEROS)


def _frame(node: Node) -> tuple[object, ...]:
    """All of a launch but what its parameters hold."""
    return node._replace(params=()), tuple(len(value) for value in node.params)


def _nothing(*_: object) -> int:
    return 0


def _never() -> bool:
    return False


def _function(
    block: Block,
    names: Sequence[str],
    again: Launch,
    launches: int,
    *,
    set_node: Callable[..., int],
    start: Callable[..., int],
    capturing: Callable[[], bool],
    graph: Executable | None = None,
) -> Launch:
    groups: list[list[tuple[int, Place]]] = []
    for offset, place in block.writes:
        if groups and offset == groups[-1][0][0] + 8 * len(groups[-1]):
            groups[-1].append((offset, place))
        else:
            groups.append([(offset, place)])
    form = tuple(tuple((place.address, place.added) for _, place in group) for group in groups)
    packs = [struct.Struct(f"={len(group)}Q").pack_into for group in groups]
    starts = [group[0][0] for group in groups]
    executable: Any = None
    nodes: list[Any] = [None] * launches
    params: list[Any] = [None] * launches
    if graph is not None:
        executable = _pointer(graph.handle)
        for i, (node, pointers) in enumerate(zip(graph.captured.handles, block.pointers, strict=True)):
            ours = graph.node_params(node)
            ours.params = pointers
            nodes[i], params[i] = _pointer(node), ctypes.byref(ours)
    maker = _maker(form, tuple(block.maps), launches, tuple(names))
    return maker(block, graph, set_node, start, capturing, again, executable, *packs, *starts, *nodes, *params)


def _pointer(handle: int) -> Any:
    """What ctypes passes as a pointer with the value of ``handle``, made once for all calls."""
    return ctypes.byref(ctypes.c_ubyte.from_address(handle))


@lru_cache(maxsize=256)
def _maker(
    form: tuple[tuple[tuple[int, int], ...], ...], maps: tuple[int, ...], launches: int, names: tuple[str, ...]
) -> Callable[..., Launch]:
    """Makes launch functions, as :func:`keysieve.relaunch._maker` does: their values are their own variables."""
    groups, each = range(len(form)), range(launches)
    made = [f"pack_{i}" for i in groups] + [f"start_{i}" for i in groups]
    made += [f"node_{i}" for i in each] + [f"params_{i}" for i in each]
    given = ", ".join(names)
    # The legacy stream (0) cannot be captured, and to ask whether it is can be an error.
    body = [
        "  if stream != block.stream:",
        "   block.move_to(stream)",
        "  if not block.usable or (stream and capturing()):",
        f"   return again({given}, stream)",
    ]
    for i, group in enumerate(form):
        values = [names[address] + (f" + {added}" if added else "") for address, added in group]
        body.append(f"  pack_{i}(memory, start_{i}, {', '.join(values)})")
    refused = [f"({names[address]} != mapped[{i}] and remap({i}, {names[address]}))" for i, address in enumerate(maps)]
    refused += [f"set_node(executable, node_{i}, params_{i})" for i in each]
    body += [
        f"  if {' or '.join([*refused, 'start(executable, block.handle)'])}:",
        f"   again({given}, stream)",  # which says why
    ]
    head = [
        f"def make(block, graph, set_node, start, capturing, again, executable, {', '.join(made)}):",
        " memory, mapped, remap = block.memory, block.mapped, block.remap",
        f" def prepared({given}, stream, graph=graph):",  # the graph lives as long as the function
    ]
    scope: dict[str, Any] = {}
    exec(compile("\n".join([*head, *body, " return prepared"]), "<keysieve prepared launches>", "exec"), scope)
    maker: Callable[..., Launch] = scope["make"]
    return maker
