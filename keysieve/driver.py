"""The CUDA driver through ctypes: what a launch is made of, read back from a capture, and launches by it alone.

Nothing here is loaded before a GPU's first repeated step. A driver without one of the functions is no driver (None).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

VOID = ctypes.c_void_p
RELAXED: Final = 2
"""Capture mode: this thread's other calls are its own business, and no other thread's capture forbids ours."""

NON_BLOCKING: Final = 1
"""A stream that does not wait for the default stream."""

MOST_PARAMETERS: Final = 64
COOPERATIVE, CLUSTER, PROGRAMMATIC = 2, 4, 6
"""Launch attributes."""

_PROGRAMMATIC_EDGE: Final = 1


class DriverError(RuntimeError):
    """A driver call failed, or what was captured is not what was launched."""


class _NodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = (
        ("function", VOID),
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("params", ctypes.POINTER(VOID)),
        ("extra", VOID),
        ("kernel", VOID),
        ("context", VOID),
    )


class _Edge(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("kind", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is the first one, two or three ints of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", VOID),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


class Node(NamedTuple):
    """One kernel launch as it was captured.

    Attributes:
        function: the driver's handle of the kernel in the current context.
        grid, block: blocks and threads.
        shared: bytes of dynamic shared memory.
        params: the bytes of every kernel parameter.
        cluster: blocks of a cluster, where the launch says so; else zeros.
        cooperative: whether all blocks have to be on the device at once.
        programmatic: whether the launch may start before the one ahead of it has ended.
    """

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    params: tuple[bytes, ...]
    cluster: tuple[int, int, int]
    cooperative: bool
    programmatic: bool


_NEEDED: Final = (
    *("cuStreamCreate", "cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuThreadExchangeStreamCaptureMode"),
    *("cuGraphGetNodes", "cuGraphGetEdges_v2", "cuGraphKernelNodeGetParams_v2", "cuGraphKernelNodeGetAttribute"),
    *("cuGraphDestroy", "cuFuncGetParamInfo", "cuLaunchKernelEx"),
)


class Driver:
    """The driver's functions that are needed.

    Attributes:
        launch: ``cuLaunchKernelEx(config, function, params, extra)``; 0 for success.
    """

    def __init__(self, library: Any) -> None:
        self._call = {name: getattr(library, name) for name in _NEEDED}
        self.launch: Callable[..., int] = self._call["cuLaunchKernelEx"]

    def new_stream(self) -> int:
        """A stream of the current context, never given back: one a device is made."""
        handle = VOID()
        with self._anything_allowed():
            self._do("cuStreamCreate", ctypes.byref(handle), NON_BLOCKING)
        return int(handle.value or 0)

    def captured(self, launch: Callable[[int], None], stream: int) -> tuple[Node, ...]:
        """The kernels that ``launch(stream)`` launches, one after another; none of them runs.

        Raises:
            DriverError: something failed, or something else than a row of kernels was captured.
        """
        graph = VOID()
        with self._anything_allowed():
            self._do("cuStreamBeginCapture_v2", VOID(stream), RELAXED)
            try:
                launch(stream)
            finally:
                self._do("cuStreamEndCapture", VOID(stream), ctypes.byref(graph))
            try:
                return self._nodes(graph)
            finally:
                self._do("cuGraphDestroy", graph)

    def _nodes(self, graph: ctypes.c_void_p) -> tuple[Node, ...]:
        count = ctypes.c_size_t(0)
        self._do("cuGraphGetNodes", graph, None, ctypes.byref(count))
        nodes = (VOID * count.value)()
        self._do("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
        edges = ctypes.c_size_t(0)
        self._do("cuGraphGetEdges_v2", graph, None, None, None, ctypes.byref(edges))
        begin, end, kinds = (VOID * edges.value)(), (VOID * edges.value)(), (_Edge * edges.value)()
        if edges.value:
            self._do("cuGraphGetEdges_v2", graph, begin, end, kinds, ctypes.byref(edges))
        after = {first: (then, kind.kind) for first, then, kind in zip(begin, end, kinds, strict=True)}
        heads = set(nodes) - set(end)
        if len(heads) != 1 or edges.value != count.value - 1 or len(after) != edges.value:
            raise DriverError(f"{count.value} nodes and {edges.value} edges are not a row")
        (node,), kind = heads, 0
        found = [self._node(node, programmatic=False)]
        while node in after:
            node, kind = after[node]
            found.append(self._node(node, programmatic=kind == _PROGRAMMATIC_EDGE))
        return tuple(found)

    def _node(self, node: int, *, programmatic: bool) -> Node:
        p = _NodeParams()
        self._do("cuGraphKernelNodeGetParams_v2", VOID(node), ctypes.byref(p))
        if p.extra or not p.function:
            raise DriverError("a kernel with packed parameters, or without a handle")
        return Node(
            int(p.function),
            (p.grid_x, p.grid_y, p.grid_z),
            (p.block_x, p.block_y, p.block_z),
            int(p.shared),
            tuple(ctypes.string_at(p.params[i], size) for i, size in enumerate(self._sizes(int(p.function)))),
            (*self._attribute(node, CLUSTER)[:3],),  # type: ignore[arg-type]  # three of them
            bool(self._attribute(node, COOPERATIVE)[0]),
            programmatic,
        )

    def _sizes(self, function: int) -> list[int]:
        """Bytes of each of a kernel's parameters."""
        found: list[int] = []
        offset, size = ctypes.c_size_t(0), ctypes.c_size_t(0)
        ask = self._call["cuFuncGetParamInfo"]
        while not ask(VOID(function), ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)):
            found.append(size.value)
            if len(found) > MOST_PARAMETERS:
                raise DriverError("more parameters than a kernel of ours has")
        return found

    def _attribute(self, node: int, number: int) -> list[int]:
        value = (ctypes.c_int * 16)()
        self._do("cuGraphKernelNodeGetAttribute", VOID(node), number, value)
        return list(value)

    @functools.cached_property
    def _exchange(self) -> Callable[..., int]:
        return self._call["cuThreadExchangeStreamCaptureMode"]  # type: ignore[no-any-return]  # ctypes

    def _anything_allowed(self) -> _Mode:
        return _Mode(self._exchange)

    def _do(self, name: str, *args: Any) -> None:
        code = self._call[name](*args)
        if code:
            raise DriverError(f"{name} failed with {code}")


class _Mode:
    """While it is entered, a capture in another thread does not forbid this thread's calls."""

    def __init__(self, exchange: Callable[..., int]) -> None:
        self._exchange, self._mode = exchange, ctypes.c_int(RELAXED)

    def __enter__(self) -> None:
        self._exchange(ctypes.byref(self._mode))

    def __exit__(self, *_: object) -> None:
        self._exchange(ctypes.byref(self._mode))


@functools.cache
def driver() -> Driver | None:
    """The installed driver, or None if there is none or it lacks a function."""
    with suppress(OSError, AttributeError):
        return Driver(ctypes.CDLL("libcuda.so.1"))
    return None
