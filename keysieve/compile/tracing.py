"""Kernels are traced without what only their messages need: a third of the time a build takes; the object is the same.

The DSL asks, for each of the ten thousand operations of a kernel, which line of Python made it, as soon as the device
assembler's remarks are wanted, and they always are: spills and serialised products stand there. They name no line.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

from keysieve.compile import build as building
from keysieve.kernels.base import Kernel

_LOCK = threading.Lock()  # what is changed here belongs to the process

_ASKS = "_get_caller_frame_info"  # of the DSL's op wrappers; in other versions than the tested ones it may be missing


def build_quickly(kernel: Kernel, config: Any, arch: str) -> building.Built:
    """What :func:`keysieve.compile.build.build` makes, byte for byte, sooner.

    A kernel that does not compile is built once more with lines, so that the error names them.
    """
    if os.environ.get(building.VERBOSE_ENV) == "1":
        return building.build(kernel, config, arch)
    with _LOCK:
        try:
            with _no_collection(), _no_lines(arch):
                return building.build(kernel, config, arch)
        except building.KernelBuildError as error:
            if error.__cause__ is None:  # it was compiled; what came out must not ship
                raise
        return building.build(kernel, config, arch)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Importing the DSL and tracing make a million objects that stay: going through them again finds nothing."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


@contextlib.contextmanager
def _no_lines(arch: str) -> Iterator[None]:
    """Operations get no line of Python, where the DSL can be told so. arch: the target of what is built meanwhile."""
    os.environ.setdefault("CUTE_DSL_ARCH", arch)  # read when the DSL is imported
    import cutlass.cute  # noqa: F401  # loads the wrappers
    from cutlass._mlir_helpers import op

    asks = getattr(op, _ASKS, None)
    if asks is None:
        yield
        return
    setattr(op, _ASKS, lambda: None)
    try:
        yield
    finally:
        setattr(op, _ASKS, asks)
