"""Compile kernels, keep them on disk, load them: `load(kernel, config, arch)` is all that the rest of keysieve needs.

Nothing here imports cutlass until something has to be compiled; kernels found in the cache are loaded with tvm-ffi and
the DSL's runtime library alone. docs/kernels.md says how a kernel is registered, and how the cache works.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from keysieve.checks import UnsupportedError, message, warn_caller
from keysieve.compile import loader, options, source, store, versions
from keysieve.kernels import CONFIG_MODULES
from keysieve.kernels.base import Kernel

Function = Callable[..., None]

_FORMAT = 1  # raise when the meaning of entries changes
_loaded: dict[tuple[str, Any, str], Function] = {}
_guard = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """What `ensure` did: `status` is "cached", "compiled" or "unsaved" (compiled, but the cache cannot be written)."""

    name: str
    status: str
    seconds: float
    entry: store.Entry


def kernels() -> tuple[Kernel, ...]:
    """Every registered kernel, in registration order."""
    found: list[Kernel] = []
    for name in CONFIG_MODULES:
        module = importlib.import_module(name)
        found.extend(getattr(module, "KERNELS", None) or (module.KERNEL,))
    names = [kernel.name for kernel in found]
    if len(set(names)) != len(names):
        raise ValueError(f"kernel names are not unique: {names}")
    return tuple(found)


def entry_name(kernel: Kernel, config: Any, arch: str, tool: versions.Toolchain | None = None) -> str:
    """File name (without suffix) of a configuration: readable part, and a hash over all that the code depends on."""
    tool = tool or versions.require()
    key = {
        "format": _FORMAT,
        "kernel": kernel.name,
        "options": kernel.options(config),
        "arch": arch,
        "source": source.fingerprint(kernel.module),
        "dsl": tool.dsl,
        "ffi": tool.ffi,
        "compiler_options": options.OPTIONS,
        "host": platform.machine(),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return f"{kernel.symbol(config)[:120]}-{arch}-{digest[:20]}"


def ensure(kernel: Kernel, config: Any, arch: str, root: store.Store | None = None) -> Outcome:
    """Make sure that a configuration is in the cache, compiling it if needed. Several processes compile it once."""
    start = time.perf_counter()
    name = entry_name(kernel, config, arch)
    cache = root or store.Store(store.cache_dir())
    entry = cache.find(name)
    if entry is not None:
        return Outcome(name, "cached", time.perf_counter() - start, entry)
    versions.require_compiler()
    broken = cache.corrupt(name)
    if broken is not None:
        warn_caller(f"keysieve: rebuilding a damaged kernel cache entry: {broken}", RuntimeWarning)
    with cache.lock(name):
        entry = cache.find(name)  # another process may have made it while this one waited
        if entry is not None:
            return Outcome(name, "cached", time.perf_counter() - start, entry)
        return _compile_into(cache, kernel, config, arch, name, start)


def fill(kernel: Kernel, config: Any, arch: str) -> Outcome:
    """:func:`ensure` for those who do not load what was made: where the cache cannot be written nothing is kept."""
    outcome = ensure(kernel, config, arch)
    if outcome.status == "unsaved":
        outcome.entry.path.unlink(missing_ok=True)
    return outcome


def _compile_into(cache: store.Store, kernel: Kernel, config: Any, arch: str, name: str, start: float) -> Outcome:
    from keysieve.compile.tracing import build_quickly

    built = build_quickly(kernel, config, arch)
    described = {"symbol": built.symbol, "arch": arch, "form": built.form, "facts": asdict(built.facts)}
    facts = json.loads(json.dumps(described))  # as a later process will read them
    path = cache.put(name, built.form, built.image, facts)
    status = "compiled"
    if path is None:
        status = "unsaved"
        warn_caller(
            f"keysieve: the kernel cache {cache.root} cannot be written; kernels are compiled at every start. "
            f"Set {store.CACHE_ENV} to a directory that can, or fill it with `keysieve compile`.",
            RuntimeWarning,
        )
        path = store.private_copy(name, built.form, built.image, facts)
    return Outcome(name, status, time.perf_counter() - start, store.Entry(path, built.form, facts))


def load(kernel: Kernel, config: Any, arch: str) -> Function:
    """The callable of a configuration: from memory, from the cache, or compiled now.

    It takes the kernel's entry arguments as plain ints, the stream handle last. Raises UnsupportedError when the
    toolchain is missing or untested or the arch is not served, KernelBuildError when the kernel does not compile.
    """
    key = (kernel.name, config, arch)
    function = _loaded.get(key)
    if function is not None:
        return function
    if arch not in kernel.archs:
        accepted = ", ".join(kernel.archs)
        raise UnsupportedError(
            message(f"kernel {kernel.name}", got=arch, accepted=accepted, remedy="Use a device of these targets.")
        )
    with _guard:
        function = _loaded.get(key)
        if function is None:
            outcome = ensure(kernel, config, arch)
            function = loader.load(outcome.entry, kernel.symbol(config))
            if outcome.status == "unsaved":
                outcome.entry.path.unlink(missing_ok=True)
            _loaded[key] = function
    return function


def is_loaded(kernel: Kernel, config: Any, arch: str) -> bool:
    """Has `load` been called for this configuration in this process? (Under graph capture it must have been.)"""
    return (kernel.name, config, arch) in _loaded
