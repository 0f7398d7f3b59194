"""Compile one configuration of one kernel, look at the result, and export it. Imports cutlass when called."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keysieve.compile import inspect
from keysieve.compile.options import OPTIONS
from keysieve.kernels.base import MAX_BLOCK_SHARED, Kernel

# Assembler messages that mean the code is not what was written: matrix products serialised, waits injected.
_BAD_NOTES = re.compile(r"C75(?:12|14|17|19)|(?<!\d)[1-9]\d* bytes spill (?:stores|loads)")

VERBOSE_ENV = "KEYSIEVE_BUILD_VERBOSE"
"""1: leave the compiler's messages on standard error instead of collecting them (to see why it crashes)."""

_LOCK = threading.Lock()  # tracing is not safe from several threads


class KernelBuildError(RuntimeError):
    """A kernel does not compile, or what came out must not ship (spills, too much shared memory)."""


@dataclass(frozen=True)
class Built:
    """One compiled configuration.

    image: the bytes to store and load: a shared object (`form` "so"), or a relocatable object ("o") where no linker
    was found. cubin, ptx, host_ir: kept for inspection; notes: what the device assembler said.
    """

    symbol: str
    arch: str
    form: str
    image: bytes
    facts: inspect.Facts
    cubin: bytes
    ptx: str
    host_ir: str
    notes: str


def build(kernel: Kernel, config: Any, arch: str, *, check: bool = True) -> Built:
    """Compile `kernel` for `config` and `arch`.

    check: raise KernelBuildError on local memory, spills, excess shared memory or registers, and on matrix products
    that the assembler serialised.
    """
    if arch not in kernel.archs:
        raise KernelBuildError(f"kernel {kernel.name}: arch {arch!r}; it compiles for {', '.join(kernel.archs)}")
    symbol = kernel.symbol(config)
    with _LOCK, tempfile.TemporaryDirectory(prefix="keysieve-build-") as scratch:
        compiled, notes = _compile(kernel, config, arch, symbol, scratch)
        obj = Path(scratch) / f"{symbol}.o"
        compiled.export_to_c(str(obj), function_name=symbol)
        linked = link(obj)
        image = (linked or obj).read_bytes()
        cubin, ptx = compiled.__cubin__, compiled.__ptx__
        if not isinstance(cubin, bytes) or not ptx:
            raise KernelBuildError(f"{symbol} for {arch}: the compiler kept no device code")
        host_ir = str(compiled.ir_module)
    facts = inspect.Facts(inspect.read_cubin(cubin), inspect.read_host_ir(host_ir), inspect.read_ptx(ptx))
    if check:
        problems = facts.problems(MAX_BLOCK_SHARED, kernel.max_registers) + bad_notes(notes)
        if problems:
            raise KernelBuildError(f"{symbol} for {arch}: " + "; ".join(problems))
    form = "so" if linked is not None else "o"
    return Built(symbol, arch, form, image, facts, cubin, ptx, host_ir, notes)


def bad_notes(notes: str) -> list[str]:
    """Lines of the assembler's messages that tell of spills, serialised matrix products or injected waits."""
    return [line.strip() for line in notes.splitlines() if _BAD_NOTES.search(line)]


def link(obj: Path) -> Path | None:
    """Link an object into a shared one beside it with the system's compiler or linker; None where there is none.

    Undefined symbols stay so: the DSL's runtime library and tvm-ffi, loaded before it, provide them.
    """
    out = obj.with_suffix(".so")
    for tool in ("cc", "gcc", "clang", "ld", "ld.lld"):
        found = shutil.which(tool)
        if found is None:
            continue
        done = subprocess.run([found, "-shared", "-o", str(out), str(obj)], capture_output=True, check=False)
        if done.returncode == 0 and out.is_file():
            return out
    return None


def _compile(kernel: Kernel, config: Any, arch: str, symbol: str, scratch: str) -> tuple[Any, str]:
    # The DSL reads its default target once, at import; kernels that ask for it while being built must see theirs.
    os.environ.setdefault("CUTE_DSL_ARCH", arch)
    import cutlass.cute as cute

    try:
        entry, args = kernel.build(config, arch)
        with _heard(Path(scratch) / "stderr.txt") as notes:
            compiled = cute.compile(entry, *args, options=f"{OPTIONS} --gpu-arch={arch} --dump-dir {scratch}")
        return compiled, notes()
    except Exception as error:
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
        raise KernelBuildError(f"{symbol} for {arch} does not compile: {type(error).__name__}: {text}") from error


@contextlib.contextmanager
def _heard(path: Path) -> Iterator[Callable[[], str]]:
    """Collect what is written to standard error, by Python and by native code, instead of showing it."""
    if os.environ.get(VERBOSE_ENV) == "1":
        yield lambda: ""
        return
    python = io.StringIO()
    saved = os.dup(2)
    try:
        with path.open("wb") as sink, contextlib.redirect_stderr(python):
            os.dup2(sink.fileno(), 2)
            yield lambda: re.sub(r"\x1b\[[0-9;]*m", "", path.read_text(errors="replace") + python.getvalue())
    finally:
        os.dup2(saved, 2)
        os.close(saved)
