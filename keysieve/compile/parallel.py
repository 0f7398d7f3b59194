"""Compile many configurations in several processes (tracing is not safe from several threads)."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Job:
    """One configuration of a kernel (by name) for a target."""

    kernel: str
    config: Any
    arch: str


@dataclass(frozen=True)
class Result:
    """How a job went: status "cached", "compiled", "unsaved" or "failed" (then `error` says why)."""

    name: str
    status: str
    seconds: float
    error: str = ""


def _prepare(arch: str) -> None:
    # The DSL reads its default target at import, and some of its atoms look at it: every worker serves one target.
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def do(job: Job) -> Result:
    """Run one job in this process."""
    from keysieve import compile as kernel_compile

    start = time.perf_counter()
    known = {kernel.name: kernel for kernel in kernel_compile.kernels()}
    kernel = known[job.kernel]
    try:
        outcome = kernel_compile.fill(kernel, job.config, job.arch)
    except Exception as error:
        label = f"{kernel.symbol(job.config)}-{job.arch}"
        return Result(label, "failed", time.perf_counter() - start, f"{type(error).__name__}: {error}")
    return Result(outcome.name, outcome.status, outcome.seconds)


def cached(job: Job) -> Result | None:
    """The result of a job whose entry is already there and sound, found without starting anything."""
    from keysieve import compile as kernel_compile
    from keysieve.compile import store

    start = time.perf_counter()
    kernel = next(kernel for kernel in kernel_compile.kernels() if kernel.name == job.kernel)
    name = kernel_compile.entry_name(kernel, job.config, job.arch)
    if store.Store(store.cache_dir()).find(name) is None:
        return None
    return Result(name, "cached", time.perf_counter() - start)


def run(jobs: list[Job], processes: int) -> Iterator[Result]:
    """Run the jobs; yields results as they come: first what is cached, then target after target what has to be
    compiled, in up to `processes` processes."""
    missing = []
    for job in jobs:
        found = cached(job)
        if found is None:
            missing.append(job)
        else:
            yield found
    context = multiprocessing.get_context("spawn")
    for arch in dict.fromkeys(job.arch for job in missing):
        mine = [job for job in missing if job.arch == arch]
        workers = max(1, min(processes, len(mine)))
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare, initargs=(arch,)) as pool:
            for future in as_completed([pool.submit(do, job) for job in mine]):
                yield future.result()
