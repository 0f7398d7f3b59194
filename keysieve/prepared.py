"""Launches handed to the driver ready made: of a step that is repeated, only its addresses are put in.

What a host function compiled by the DSL does in each launch (two tensor maps, a launch structure with attributes that
are zero, a call through the runtime) has the same result for equal arguments but for the addresses. So it is captured
for a few sets of addresses, in which no kernel runs, and what differs is where addresses stand. A launch is then those
bytes with the addresses written in, given to ``cuLaunchKernelEx``: to the device it is the launch that the host
function makes. Whatever cannot be explained by addresses alone is left to the host functions.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from keysieve.driver import CLUSTER, COOPERATIVE, PROGRAMMATIC, Attribute, Config, Driver, DriverError, Node

Addresses = tuple[int, ...]
Launch = Callable[..., None]

STEP = 1 << 20
"""Addresses are told from one another by moving each by another multiple of this many bytes."""

ALIGNED = 4096
_MOST_OFFSET = 1 << 20
_LINE = 64


@dataclass(frozen=True)
class Place:
    """Eight bytes of a parameter that are an address: ``offset`` in it, which address, and what is added to it."""

    offset: int
    address: int
    added: int


def moved(addresses: Addresses, times: int) -> Addresses:
    """Other addresses, aligned as these are, each moved by another distance; what is absent (0) stays so."""
    return tuple(a and a + (i + 1) * times * STEP for i, a in enumerate(addresses))


def samples(addresses: Addresses, aligned: Sequence[int]) -> list[Addresses]:
    """Addresses to capture launches with: these, others to compare them with, then what is held against the finding.

    The last ones are aligned as well, and as badly, as addresses can be, so that a host function that looks at
    alignment is found out. aligned: what each address is a multiple of at the least.
    """
    well = tuple(a and a // ALIGNED * ALIGNED for a in addresses)
    badly = tuple(a and a + least for a, least in zip(well, aligned, strict=True))
    return [addresses, moved(addresses, 1), moved(well, 3), moved(badly, 5)]


def places(before: bytes, after: bytes, old: Addresses, new: Addresses) -> list[Place]:
    """Where a parameter holds addresses: what differs between two captures.

    Raises:
        DriverError: something differs that is no address.
    """
    found = []
    whole = len(before) // 8 * 8
    if len(before) != len(after) or before[whole:] != after[whole:]:
        raise DriverError("a parameter differs by more than addresses")
    for offset in range(0, whole, 8):
        (was,), (now,) = struct.unpack_from("=Q", before, offset), struct.unpack_from("=Q", after, offset)
        if was == now:
            continue
        fitting = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a and now - was == b - a]
        if len(fitting) != 1 or not 0 <= was - old[fitting[0]] < _MOST_OFFSET:
            raise DriverError(f"a parameter differs by more than addresses: {was:#x}, {now:#x}")
        found.append(Place(offset, fitting[0], was - old[fitting[0]]))
    return found


class Block:
    """The memory that launches are read from: addresses, parameters, and the structures that point to them.

    Args:
        nodes: the launches as captured with ``addresses``.
        where: the places of addresses in each parameter of each launch.
        addresses: how many a launch is given.
    """

    def __init__(self, nodes: Sequence[Node], where: Sequence[Sequence[Sequence[Place]]], addresses: int) -> None:
        self.stream = -1
        plain = [Place(0, i, 0) for i in range(addresses)]
        held = [
            (n, p) for n, node in enumerate(nodes) for p in range(len(node.params)) if not self._bare(node, where[n], p)
        ]
        # What begins with an address comes first: it is written together with the plain ones.
        held.sort(key=lambda at: not any(place.offset == 0 for place in where[at[0]][at[1]]))
        end, starts = 8 * addresses, {}
        for at in held:
            starts[at] = end
            end += -(-len(nodes[at[0]].params[at[1]]) // _LINE) * _LINE
        self.memory = (ctypes.c_ubyte * max(end, 8))()
        base = ctypes.addressof(self.memory)
        self.writes: list[tuple[int, Place]] = [(8 * i, place) for i, place in enumerate(plain)]
        self.params: list[ctypes.Array[ctypes.c_void_p]] = []
        self.configs: list[Config] = []
        for n, node in enumerate(nodes):
            pointers = (ctypes.c_void_p * max(len(node.params), 1))()
            for p, value in enumerate(node.params):
                start = starts.get((n, p))
                if start is None:
                    pointers[p] = base + 8 * where[n][p][0].address
                    continue
                pointers[p] = base + start
                ctypes.memmove(base + start, value, len(value))
                self.writes += [(start + place.offset, place) for place in where[n][p]]
            self.params.append(pointers)
            self.configs.append(self._config(node))
        self.sizes = [[len(value) for value in node.params] for node in nodes]

    @staticmethod
    def _bare(node: Node, where: Sequence[Sequence[Place]], p: int) -> bool:
        """Is the parameter an address and nothing else?"""
        return len(node.params[p]) == 8 and len(where[p]) == 1 and not where[p][0].added

    @staticmethod
    def _config(node: Node) -> Config:
        given: list[tuple[int, tuple[int, ...]]] = []
        if node.programmatic:
            given.append((PROGRAMMATIC, (1,)))
        if node.cluster[0] * node.cluster[1] * node.cluster[2] > 1:
            given.append((CLUSTER, node.cluster))
        if node.cooperative:
            given.append((COOPERATIVE, (1,)))
        attributes = (Attribute * max(len(given), 1))()
        for attribute, (number, value) in zip(attributes, given, strict=False):
            attribute.id = number
            attribute.value[: len(value)] = value
        return Config(*node.grid, *node.block, node.shared, None, attributes, len(given))

    def move_to(self, stream: int) -> None:
        """Let the launches go to another stream."""
        for config in self.configs:
            config.stream = stream
        self.stream = stream

    def values(self) -> list[tuple[bytes, ...]]:
        """The parameters of each launch as the driver would read them now."""
        return [
            tuple(ctypes.string_at(pointers[p] or 0, size) for p, size in enumerate(sizes))
            for pointers, sizes in zip(self.params, self.sizes, strict=True)
        ]


def prepare(
    driver: Driver,
    first: Launch,
    again: Sequence[Launch],
    names: Sequence[str],
    addresses: Addresses,
    aligned: Sequence[int],
    stream: int,
) -> Launch:
    """A function that makes the launches of ``again[0]`` for any addresses, through the driver alone.

    Args:
        driver: the driver.
        first: makes the first of the launches only.
        again: ``again[i]`` makes the launches from the i-th on. They take addresses and stream.
        names: the addresses that they and the function take, all positional, before the stream.
        addresses: those of a call: 0 for what is absent, and absent in every later call.
        aligned: what each of them is a multiple of.
        stream: one of the current device that nothing else uses, to capture on.

    Where the driver refuses a launch the function leaves it, and those after it, to ``again``, which says why.

    Raises:
        DriverError: the launches cannot be told apart into addresses and the rest.
    """

    def nodes_of(given: Addresses) -> tuple[Node, ...]:
        def both(to: int) -> None:
            first(*given, to)  # so that the one after it shows whether it waits for what is ahead of it
            again[0](*given, to)

        return driver.captured(both, stream)[1:]

    old, new, *held_against = samples(addresses, aligned)
    nodes, others = nodes_of(old), nodes_of(new)
    if len(nodes) != len(again) or len(others) != len(again):
        raise DriverError(f"{len(nodes)} launches were captured, {len(again)} made")
    where = []
    for node, other in zip(nodes, others, strict=True):
        if node._replace(params=()) != other._replace(params=()) or len(node.params) != len(other.params):
            raise DriverError("a launch depends on its addresses")
        where.append([places(b, a, old, new) for b, a in zip(node.params, other.params, strict=True)])
    block = Block(nodes, where, len(addresses))
    trial = _function(block, nodes, lambda *_: 0, again, names)
    for given in held_against:
        trial(*given, stream)
        if [node._replace(params=v) for node, v in zip(nodes, block.values(), strict=True)] != [*nodes_of(given)]:
            raise DriverError("a launch differs by more than addresses")
    return _function(block, nodes, driver.launch, again, names)


def _function(
    block: Block, nodes: Sequence[Node], launch: Callable[..., int], again: Sequence[Launch], names: Sequence[str]
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
    # byref() of what lies at a handle's address is a pointer with the handle's value, ready made for every call.
    handles = [ctypes.byref(ctypes.c_ubyte.from_address(node.function)) for node in nodes]
    configs = [ctypes.byref(config) for config in block.configs]
    params = [ctypes.byref(pointers) for pointers in block.params]
    return _maker(form, len(nodes), tuple(names))(
        block, block.memory, launch, *packs, *starts, *configs, *handles, *params, *again
    )


@lru_cache(maxsize=256)
def _maker(
    form: tuple[tuple[tuple[int, int], ...], ...], launches: int, names: tuple[str, ...]
) -> Callable[..., Launch]:
    """Makes launch functions, as :func:`keysieve.relaunch._maker` does: their values are their own variables."""
    groups, each = range(len(form)), range(launches)
    made = [f"{name}_{i}" for name, over in (("pack", groups), ("start", groups)) for i in over]
    made += [f"{name}_{i}" for name in ("config", "handle", "params", "again") for i in each]
    given = ", ".join(names)
    body = ["  if stream != block.stream:", "   block.move_to(stream)"]
    for i, group in enumerate(form):
        values = [names[address] + (f" + {added}" if added else "") for address, added in group]
        body.append(f"  pack_{i}(memory, start_{i}, {', '.join(values)})")
    for i in each:
        body += [f"  if launch(config_{i}, handle_{i}, params_{i}, None):", f"   return again_{i}({given}, stream)"]
    head = [f"def make(block, memory, launch, {', '.join(made)}):", f" def prepared({given}, stream):"]
    scope: dict[str, Any] = {}
    exec(compile("\n".join([*head, *body, " return prepared"]), "<keysieve prepared launches>", "exec"), scope)
    maker: Callable[..., Launch] = scope["make"]
    return maker
