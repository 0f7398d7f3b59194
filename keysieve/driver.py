"""The CUDA driver through ctypes: what launches are made of, read back from a capture, and a graph of them.

Nothing here is loaded before a form is prepared. A driver that lacks one of the functions is no driver (None).
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

VOID = ctypes.c_void_p
RELAXED: Final = 2
"""Capture mode: this thread's other calls are its own business, and no other thread's capture forbids ours."""

NON_BLOCKING: Final = 1
"""A stream that does not wait for the default stream."""

MOST_PARAMETERS: Final = 64
_COOPERATIVE, _CLUSTER = 2, 4  # attributes of a launch
_PROGRAMMATIC_EDGE: Final = 1
_PER_THREAD_STREAM: Final = 2


class DriverError(RuntimeError):
    """A driver call failed, or what was captured is not what was expected."""


class NodeParams(ctypes.Structure):
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


class Node(NamedTuple):
    """One kernel launch as it was captured.

    Attributes:
        function: the driver's handle of the kernel in the current context.
        grid, block: blocks and threads.
        shared: bytes of dynamic shared memory.
        params: the bytes of every kernel parameter.
        attributes: cooperative or not, and blocks of a cluster.
        programmatic: whether the launch may start before the one ahead of it has ended.
    """

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    params: tuple[bytes, ...]
    attributes: tuple[int, ...]
    programmatic: bool


class Captured(NamedTuple):
    """Launches as nodes of a graph, one after another.

    Attributes:
        graph: the graph's handle.
        handles: each node's.
        nodes: what each launches.
    """

    graph: int
    handles: tuple[int, ...]
    nodes: tuple[Node, ...]


_NEEDED: Final = (
    *("cuStreamCreate", "cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuThreadExchangeStreamCaptureMode"),
    *("cuGraphGetNodes", "cuGraphGetEdges_v2", "cuGraphKernelNodeGetParams_v2", "cuGraphKernelNodeGetAttribute"),
    *("cuGraphDestroy", "cuFuncGetParamInfo", "cuGraphInstantiateWithFlags", "cuGraphExecDestroy", "cuGraphLaunch"),
    *("cuGraphExecKernelNodeSetParams_v2", "cuStreamGetPriority", "cuStreamGetGreenCtx", "cuTensorMapReplaceAddress"),
)


class Driver:
    """The driver's functions that are needed; the ones called in every step are attributes. All return 0 for success.

    Attributes:
        set_node: ``cuGraphExecKernelNodeSetParams(exec, node, params)``.
        start: ``cuGraphLaunch(exec, stream)``.
        readdress: ``cuTensorMapReplaceAddress(map, address)``.
    """

    def __init__(self, library: Any) -> None:
        self._call = {name: getattr(library, name) for name in _NEEDED}
        self.set_node: Callable[..., int] = self._call["cuGraphExecKernelNodeSetParams_v2"]
        self.start: Callable[..., int] = self._call["cuGraphLaunch"]
        self.readdress: Callable[..., int] = self._call["cuTensorMapReplaceAddress"]

    def new_stream(self) -> int:
        """A stream of the current context, never given back: one a device is made."""
        handle = VOID()
        with self._anything_allowed():
            self._do("cuStreamCreate", ctypes.byref(handle), NON_BLOCKING)
        return int(handle.value or 0)

    def ordinary(self, stream: int) -> bool:
        """Does work on ``stream`` run as it does on any other: with the usual priority, on the whole device?"""
        if stream <= _PER_THREAD_STREAM:
            return True  # a default stream
        priority, green = ctypes.c_int(-1), VOID(1)
        asked = self._call["cuStreamGetPriority"](VOID(stream), ctypes.byref(priority))
        asked = asked or self._call["cuStreamGetGreenCtx"](VOID(stream), ctypes.byref(green))
        return not asked and priority.value == 0 and not green.value

    def captured(self, launch: Callable[[int], None], stream: int) -> Captured:
        """The kernels that ``launch(stream)`` launches, in a row; none of them runs. The graph is the caller's.

        Raises:
            DriverError: something failed, or something else than a row of kernels was captured.
        """
        graph, end, on = VOID(), self._call["cuStreamEndCapture"], VOID(stream)
        into = ctypes.byref(graph)
        with self._anything_allowed():
            try:
                try:
                    # In here, and its end one call of C: a signal's handler may raise wherever a call returns, and the
                    # stream is used again. (To end what has not begun is an error that nobody is told.)
                    self._do("cuStreamBeginCapture_v2", on, RELAXED)
                    launch(stream)
                finally:
                    code = end(on, into)
                if code or not graph.value:
                    raise DriverError(f"cuStreamEndCapture failed with {code}")
                handles, nodes = self._nodes(graph)
            except BaseException:
                if graph.value:
                    self.forget(graph.value, 0)
                raise
        return Captured(graph.value, handles, nodes)

    def instantiated(self, captured: Captured) -> int:
        """An executable graph of ``captured``: the handle, the caller's."""
        made = VOID()
        with self._anything_allowed():
            self._do("cuGraphInstantiateWithFlags", ctypes.byref(made), VOID(captured.graph), ctypes.c_ulonglong(0))
        return int(made.value or 0)

    def forget(self, graph: int, executable: int) -> None:
        """Destroy a graph and its executable one (0: none); launches that still run end as they would."""
        with self._anything_allowed():
            if executable:
                self._call["cuGraphExecDestroy"](VOID(executable))
            self._call["cuGraphDestroy"](VOID(graph))

    def node_params(self, node: int) -> NodeParams:
        """What a node launches, as the driver has it; ``params`` is valid as long as its graph is."""
        found = NodeParams()
        self._do("cuGraphKernelNodeGetParams_v2", VOID(node), ctypes.byref(found))
        return found

    def _nodes(self, graph: ctypes.c_void_p) -> tuple[tuple[int, ...], tuple[Node, ...]]:
        count = ctypes.c_size_t(0)
        self._do("cuGraphGetNodes", graph, None, ctypes.byref(count))
        nodes = (VOID * count.value)()
        self._do("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
        edges = ctypes.c_size_t(0)
        self._do("cuGraphGetEdges_v2", graph, None, None, None, ctypes.byref(edges))
        begin, end, kinds = (VOID * edges.value)(), (VOID * edges.value)(), (_Edge * edges.value)()
        if edges.value:
            self._do("cuGraphGetEdges_v2", graph, begin, end, kinds, ctypes.byref(edges))
        after = {first: (then, edge.kind) for first, then, edge in zip(begin, end, kinds, strict=True)}
        heads = set(nodes) - set(end)
        if len(heads) != 1 or edges.value != count.value - 1 or len(after) != edges.value:
            raise DriverError(f"{count.value} nodes and {edges.value} edges are not a row")
        (node,) = heads
        handles, found = [node], [self._node(node, programmatic=False)]
        while node in after:
            node, kind = after[node]
            handles.append(node)
            found.append(self._node(node, programmatic=kind == _PROGRAMMATIC_EDGE))
        return tuple(handles), tuple(found)

    def _node(self, node: int, *, programmatic: bool) -> Node:
        p = self.node_params(node)
        if p.extra or not p.function:
            raise DriverError("a kernel with packed parameters, or without a handle")
        return Node(
            int(p.function),
            (p.grid_x, p.grid_y, p.grid_z),
            (p.block_x, p.block_y, p.block_z),
            int(p.shared),
            tuple(ctypes.string_at(p.params[i], size) for i, size in enumerate(self._sizes(int(p.function)))),
            (*self._attribute(node, _COOPERATIVE)[:1], *self._attribute(node, _CLUSTER)[:3]),
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

    def _anything_allowed(self) -> _Mode:
        return _Mode(self._call["cuThreadExchangeStreamCaptureMode"])

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


class Executable:
    """An executable graph of ``captured``, which it takes over: both are destroyed when this is referred to no more."""

    def __init__(self, driver: Driver, captured: Captured) -> None:
        self.captured, self.node_params = captured, driver.node_params
        try:
            self.handle = driver.instantiated(captured)
        except BaseException:
            driver.forget(captured.graph, 0)
            raise
        # Not at the process's end: the driver may be gone by then.
        weakref.finalize(self, driver.forget, captured.graph, self.handle).atexit = False


@functools.cache
def driver() -> Driver | None:
    """The installed driver, or None if there is none or it lacks a function."""
    with suppress(OSError, AttributeError):
        return Driver(ctypes.CDLL("libcuda.so.1"))
    return None
