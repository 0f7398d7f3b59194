"""`keysieve compile`: fill the kernel cache, with or without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from typing import Any

from keysieve import compile as kernel_compile
from keysieve.checks import refuse, require_choice
from keysieve.compile import parallel, store, versions
from keysieve.kernels.base import ARCHS, Kernel


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "compile",
        help="fill the kernel cache (no GPU needed)",
        description="Compile kernels ahead of time into the cache that every later process reads. Needs the CuTe DSL, "
        "not a GPU. Without --all, the configurations of the usual models are compiled.",
    )
    parser.add_argument("--arch", default=None, metavar="A,B", help=f"targets: {', '.join(ARCHS)} (default: all)")
    parser.add_argument("--all", action="store_true", help="every configuration that a call can ask for")
    parser.add_argument("--kernel", action="append", default=None, metavar="NAME", help="only this kernel (repeatable)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="OPTION=V,W", help="only configurations with these option values"
    )
    parser.add_argument(
        "--dir", default=None, help=f"cache directory (default: ${store.CACHE_ENV} or the user's cache)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--list", action="store_true", help="say what would be compiled, and where it is cached")
    parser.set_defaults(run=run)


def targets(text: str | None) -> tuple[str, ...]:
    """The targets named by a comma-separated list."""
    if text is None:
        return ARCHS
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names or ("",):
        require_choice("--arch", name, ARCHS, "Name the targets separated by commas.")
    return names


def filters(settings: list[str]) -> dict[str, set[str]]:
    """`option=v,w` settings as a mapping."""
    wanted: dict[str, set[str]] = {}
    for setting in settings:
        name, equals, values = setting.partition("=")
        if not equals or not name or not values:
            remedy = "Name an option of a kernel."
            refuse("--set", got=repr(setting), accepted="option=value[,value...]", remedy=remedy)
        wanted.setdefault(name, set()).update(values.split(","))
    return wanted


def chosen(kernel: Kernel, arch: str, everything: bool, wanted: dict[str, set[str]]) -> list[Any]:
    """The configurations of `kernel` to compile for `arch`. Options that a kernel does not have do not restrict it."""
    source = kernel.admitted if everything or kernel.common is None else kernel.common
    names = {field.name for field in dataclasses.fields(kernel.config)}
    return [
        config
        for config in source(arch)
        if all(str(getattr(config, name)) in values for name, values in wanted.items() if name in names)
    ]


def check_filters(kernels: list[Kernel], archs: tuple[str, ...], wanted: dict[str, set[str]]) -> None:
    """Refuse an option that none of `kernels` has, and a value that no configuration has: nothing would be compiled."""
    for option, values in wanted.items():
        having = [k for k in kernels if option in {field.name for field in dataclasses.fields(k.config)}]
        if not having:
            options = sorted({field.name for k in kernels for field in dataclasses.fields(k.config)})
            require_choice("--set", option, tuple(options), "`keysieve compile --list` shows the configurations.")
        known = {str(getattr(c, option)) for k in having for arch in archs if arch in k.archs for c in k.admitted(arch)}
        for value in sorted(values - known):
            require_choice(f"--set {option}", value, tuple(sorted(known)), "Name values that a configuration has.")


def run(args: argparse.Namespace) -> int:
    """Compile what was asked for; 1 when anything failed, or could not be kept."""
    archs, wanted = targets(args.arch), filters(args.set)
    if args.dir is not None:
        os.environ[store.CACHE_ENV] = args.dir  # worker processes inherit it
    known = {kernel.name: kernel for kernel in kernel_compile.kernels()}
    for name in args.kernel or ():
        require_choice("--kernel", name, tuple(known), "`keysieve compile --list` shows them.")
    picked = [known[name] for name in args.kernel] if args.kernel else list(known.values())
    check_filters(picked, archs, wanted)
    jobs = [
        parallel.Job(kernel.name, config, arch)
        for arch in archs
        for kernel in picked
        if arch in kernel.archs
        for config in chosen(kernel, arch, args.all, wanted)
    ]
    tool = versions.require()
    print(f"{len(jobs)} configurations, CuTe DSL {tool.dsl}, tvm-ffi {tool.ffi}, cache {store.cache_dir()}")
    if args.list:
        for job in jobs:
            name = kernel_compile.entry_name(known[job.kernel], job.config, job.arch)
            state = "cached" if store.Store(store.cache_dir()).find(name) else "missing"
            print(f"{state:8} {name}")
        return 0
    return _compile(jobs, args.jobs)


def _compile(jobs: list[parallel.Job], processes: int) -> int:
    start, failed = time.perf_counter(), 0
    tally: dict[str, int] = {}
    for number, result in enumerate(parallel.run(jobs, processes), 1):
        tally[result.status] = tally.get(result.status, 0) + 1
        line = f"[{number}/{len(jobs)}] {result.status:8} {result.seconds:6.2f} s  {result.name}"
        failed += result.status in ("failed", "unsaved")
        if result.status == "failed":
            print(f"{line}\n    {result.error}", file=sys.stderr)
        else:
            print(line)
    summary = ", ".join(f"{count} {status}" for status, count in sorted(tally.items())) or "nothing to do"
    print(f"{summary} in {time.perf_counter() - start:.1f} s")
    return 1 if failed else 0
