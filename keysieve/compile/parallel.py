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
        outcome = kernel_compile.ensure(kernel, job.config, job.arch)
    except Exception as error:
        label = f"{kernel.symbol(job.config)}-{job.arch}"
        return Result(label, "failed", time.perf_counter() - start, f"{type(error).__name__}: {error}")
    return Result(outcome.name, outcome.status, outcome.seconds)


def run(jobs: list[Job], processes: int) -> Iterator[Result]:
    """Run the jobs, target after target, in up to `processes` processes each; yields results as they come."""
    context = multiprocessing.get_context("spawn")
    for arch in dict.fromkeys(job.arch for job in jobs):
        mine = [job for job in jobs if job.arch == arch]
        workers = max(1, min(processes, len(mine)))
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare, initargs=(arch,)) as pool:
            for future in as_completed([pool.submit(do, job) for job in mine]):
                yield future.result()
