"""Which versions of the CuTe DSL and of tvm-ffi are installed, and whether they have been tested. No cutlass import."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from importlib import metadata

from keysieve.checks import UnsupportedError, message

TESTED_DSL = ("4.8.1",)
"""CuTe DSL versions whose compiled kernels were tested."""

TESTED_FFI_SERIES = ("0.1",)
"""tvm-ffi series (major.minor) whose objects and loaders were tested together."""

ALLOW_UNTESTED = "KEYSIEVE_ALLOW_UNTESTED"
"""Environment variable: 1 lets untested DSL and tvm-ffi versions through."""

_DSL_DISTRIBUTIONS = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "nvidia-cutlass-dsl-libs-cu12")
_INSTALL = "Install the GPU extra: pip install 'keysieve[gpu]'."


@dataclass(frozen=True)
class Toolchain:
    """Versions that compiled code depends on. `compiler`: whether kernels can be compiled here, not only loaded."""

    dsl: str
    ffi: str
    compiler: bool


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


@functools.cache
def installed() -> Toolchain | str:
    """The toolchain of this interpreter, or the reason as text why there is none."""
    ffi = _version("apache-tvm-ffi")
    if ffi is None:
        return message("apache-tvm-ffi", got="not installed", accepted="0.1.x", remedy=_INSTALL)
    dsl = _version(*_DSL_DISTRIBUTIONS)
    if dsl is None:
        return message("nvidia-cutlass-dsl", got="not installed", accepted=" or ".join(TESTED_DSL), remedy=_INSTALL)
    return Toolchain(dsl=dsl, ffi=ffi, compiler=_version("nvidia-cutlass-dsl") is not None)


def untested(tool: Toolchain) -> str | None:
    """None when both versions were tested, else the reason as text."""
    if tool.dsl not in TESTED_DSL:
        remedy = f"Install a tested one (pip install nvidia-cutlass-dsl=={TESTED_DSL[-1]}), or set {ALLOW_UNTESTED}=1."
        return message("nvidia-cutlass-dsl", got=tool.dsl, accepted=" or ".join(TESTED_DSL), remedy=remedy)
    if ".".join(tool.ffi.split(".")[:2]) not in TESTED_FFI_SERIES:
        remedy = f"Install a tested one (pip install 'apache-tvm-ffi<0.2'), or set {ALLOW_UNTESTED}=1."
        return message("apache-tvm-ffi", got=tool.ffi, accepted="0.1.x", remedy=remedy)
    return None


def unusable(environ: dict[str, str] | None = None) -> str | None:
    """Why kernels cannot be loaded here (missing or untested versions), or None. `environ`: default, the process's."""
    tool = installed()
    if isinstance(tool, str):
        return tool
    env = os.environ if environ is None else environ
    if env.get(ALLOW_UNTESTED) == "1":
        return None
    return untested(tool)


def require() -> Toolchain:
    """The toolchain, or UnsupportedError with the reason."""
    reason = unusable()
    if reason is not None:
        raise UnsupportedError(reason)
    tool = installed()
    assert isinstance(tool, Toolchain)
    return tool


def require_compiler() -> Toolchain:
    """The toolchain with a compiler, or UnsupportedError."""
    tool = require()
    if not tool.compiler:
        raise UnsupportedError(
            message(
                "nvidia-cutlass-dsl",
                got="only its runtime libraries are installed, and the kernel cache lacks this kernel",
                accepted="the whole DSL, or a filled cache",
                remedy="Run `keysieve compile` where the DSL is installed and carry the cache directory here.",
            )
        )
    return tool
