"""Kernels that one indexer needs, compiled side by side where the cache has none of them.

Tracing holds the interpreter and is not safe from several threads, so each goes into a process of its own; such a
process imports neither torch nor what of keysieve needs it, and is at work after half a second. Nothing here is needed
for a result: what was not made is made when it is asked for, and refusals come from there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keysieve import compile as kernel_compile
from keysieve.compile import store, versions
from keysieve.kernels.base import Kernel

Job = tuple[Kernel, Any]
"""A kernel and one of its configurations."""

_WORKER = """
import json, sys, types
job = json.loads(sys.argv[1])
sys.path[:] = job["path"]
sys.modules["torch"] = None  # tvm-ffi imports it where there is one; nothing here uses it
package = types.ModuleType("keysieve")
package.__path__ = [job["package"]]
sys.modules["keysieve"] = package  # its modules without its __init__
from keysieve import compile as kernel_compile
kernel = next(k for k in kernel_compile.kernels() if k.name == job["kernel"])
kernel_compile.fill(kernel, kernel.config(**job["options"]), job["arch"])
"""


def missing(jobs: Sequence[Job], arch: str) -> list[Job]:
    """Those that are neither loaded nor in the cache."""
    cache = store.Store(store.cache_dir())
    return [
        (kernel, config)
        for kernel, config in jobs
        if not kernel_compile.is_loaded(kernel, config, arch)
        and cache.find(kernel_compile.entry_name(kernel, config, arch)) is None
    ]


def prepare(jobs: Sequence[Job], arch: str) -> None:
    """Fill the cache with what it has not of `jobs`: the first ones here, the last ones in processes of their own.

    Does nothing for a single kernel, without a compiler, without an interpreter to start, or where the cache cannot be
    written. A kernel that does not compile is left to whoever loads it.
    """
    if versions.unusable() is not None:
        return
    todo = missing(jobs, arch)
    processes = min(len(todo) - 1, len(os.sched_getaffinity(0)) - 1)
    if processes < 1 or not _startable() or not _writable(store.cache_dir()):
        return
    workers = [_start(kernel, config, arch) for kernel, config in todo[-processes:]]
    try:
        versions.require_compiler()
        for kernel, config in todo[:-processes]:
            kernel_compile.fill(kernel, config, arch)
    except Exception:  # met again, and raised, where the kernel is loaded
        pass
    finally:
        for worker in workers:
            worker.wait()


def _start(kernel: Kernel, config: Any, arch: str) -> subprocess.Popen[bytes]:
    job = {
        "path": sys.path,
        "package": str(Path(__file__).resolve().parents[1]),
        "kernel": kernel.name,
        "options": dict(kernel.options(config)),
        "arch": arch,
    }
    return subprocess.Popen(
        [sys.executable, "-c", _WORKER, json.dumps(job)],
        env=os.environ | {"CUTE_DSL_ARCH": arch},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _startable() -> bool:
    """Is there a Python to start? Inside another program sys.executable may be that program."""
    path = Path(sys.executable or "")
    return path.name.startswith("python") and path.is_file()


def _writable(root: Path) -> bool:
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o755)
    except OSError:
        return False
    return os.access(root, os.W_OK | os.X_OK)
