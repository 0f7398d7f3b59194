"""Turn a cache entry into a callable, without importing cutlass where possible."""

from __future__ import annotations

import ctypes
import os
from importlib import metadata
from pathlib import Path
from typing import Any

from keysieve.checks import UnsupportedError, message
from keysieve.compile.store import Entry

RUNTIME = "libcute_dsl_runtime.so"
_LIBS_ENV = "CUTE_DSL_LIBS"
_DISTRIBUTIONS = ("nvidia-cutlass-dsl-libs-cu13", "nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-base")

_kept: list[Any] = []  # libraries and modules stay loaded for the life of the process


def runtime_library() -> Path | None:
    """Path of the DSL's runtime library: from `$CUTE_DSL_LIBS` (a file, or directories), else from installed wheels."""
    for part in os.environ.get(_LIBS_ENV, "").split(":"):
        path = Path(part) if part.endswith(RUNTIME) else Path(part) / RUNTIME
        if part and path.is_file():
            return path
    for name in _DISTRIBUTIONS:
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == RUNTIME and "stubs" not in file.parts:
                path = Path(str(file.locate()))
                if path.is_file():
                    return path
    return None


def _load_runtime() -> None:
    if any(kind == "runtime" for kind, _ in _kept):
        return
    path = runtime_library()
    if path is None:
        raise UnsupportedError(
            message(
                RUNTIME,
                got="not found in the installed packages",
                accepted=f"the file of an nvidia-cutlass-dsl-libs wheel, or a path in {_LIBS_ENV}",
                remedy="Install the GPU extra: pip install 'keysieve[gpu]'.",
            )
        )
    try:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise UnsupportedError(
            message(RUNTIME, got=f"{path}: {error}", accepted="a loadable library", remedy="Reinstall the wheel.")
        ) from error
    _kept.append(("runtime", library))


def load(entry: Entry, symbol: str) -> Any:
    """The function `symbol` of an entry. A shared object is loaded by tvm-ffi; a bare object by the DSL (slower)."""
    import tvm_ffi

    _load_runtime()
    if entry.form == "so":
        module = tvm_ffi.load_module(str(entry.path))
        function = getattr(module, symbol)
    else:
        import cutlass.cute as cute

        module = cute.runtime.load_module(str(entry.path), enable_tvm_ffi=True)
        function = getattr(module, symbol)
    _kept.append(("module", module))
    return function
