"""What the host time of an eager step is made of, on one GPU.

    python -m keysieve.bench.host [--out docs/measurements/host.jsonl] [--processors]

First the gate: a repeated call's bytes equal those of a first call. Then, each the median of rounds of calls with the
launch queue drained in between: the step with the caller's buffers, with new buffers, and with every check made; the
two launches alone; the step with its launches replaced by nothing; and torch's own operators beside them. Host times
differ between processes of a shared machine: compare lines of one run only.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import keysieve as ks
from keysieve.bench import timing
from keysieve.bench.caches import make_pool
from keysieve.bench.places import require_file
from keysieve.bench.score import TOPK, Case, Inputs, make_inputs
from keysieve.relaunch import Calls, launch_list
from keysieve.repeats import ADDRESSES

CASE = Case("1x4K", (4096,))


class Silent:
    """A kernel that takes its arguments and does nothing."""

    label = "nothing"

    def __init__(self) -> None:
        self.function: Callable[..., None] = lambda *_: None


class Parts:
    """The callables to time: the whole step and its parts, on one set of inputs."""

    def __init__(self, pool: torch.Tensor, case: Case) -> None:
        device = pool.device
        self.spec = ks.IndexerSpec(case.heads, TOPK)
        rows = len(case.lengths)
        self.cache = ks.IndexCache(self.spec, pool)
        self.indexer = ks.DecodeIndexer(self.spec, rows, max(case.lengths), device=device)
        self.x: Inputs = make_inputs(case, pool, 1)[0]
        self.kv_table = torch.zeros(rows, max(case.lengths) // 64, dtype=torch.int32, device=device)
        self.out = torch.empty(rows, TOPK, dtype=torch.int32, device=device)
        self.counts = torch.empty(rows, dtype=torch.int32, device=device)
        self.small = torch.zeros(1024, device=device)

    def step(self) -> Any:
        x = self.x
        return self.indexer(
            x.query, self.cache, x.weights, x.lens, x.table, kv_table=self.kv_table, out=self.out, counts=self.counts
        )

    def step_new_buffers(self) -> Any:
        x = self.x
        return self.indexer(x.query, self.cache, x.weights, x.lens, x.table, kv_table=self.kv_table)

    def step_checked(self) -> Any:
        self.indexer._known = ()
        return self.step()

    def gate(self) -> None:
        """Raise unless checked and repeated calls give the same bytes."""
        first = self.step_checked().rows.clone()
        for call in (self.step, self.step_new_buffers, self.step_new_buffers):
            if not torch.equal(call().rows, first):
                raise AssertionError("a repeated call differs from a checked one")
        self.indexer.check()

    def parts(self) -> dict[str, Callable[[], object]]:
        """Name -> call, the whole step first."""
        self.step_checked()
        runner: Any = self.indexer._runner
        (score, score_args), (select, select_args) = (
            (target.function, (*(int(a) for a in args), runner.stream)) for target, args in runner._calls
        )
        nothing: Calls = [(Silent(), args) for target, args in runner._calls]
        quiet = self.indexer._known[0].usual(launch_list(nothing, ADDRESSES))

        def replaced() -> object:
            now: Any = self.indexer._known[0]
            kept, now.repeat = now.repeat, quiet
            result = self.step()
            now.repeat = kept
            return result

        def both() -> None:
            score(*score_args)
            select(*select_args)

        return {
            "step, caller's buffers": self.step,
            "step, new buffers": self.step_new_buffers,
            "step, every check made": self.step_checked,
            "step, launches replaced by nothing": replaced,
            "both launches, bare": both,
            "score launch, bare": lambda: score(*score_args),
            "select launch, bare": lambda: select(*select_args),
            "torch zero_": self.small.zero_,
            "torch empty_like": lambda: torch.empty_like(self.small),
            "torch.cuda._sleep(0)": lambda: torch.cuda._sleep(0),  # type: ignore[no-untyped-call]  # torch's
        }


def host_us(call: Callable[[], object]) -> timing.Timing:
    """Host microseconds of a call: few calls a round, so that the launch queue never fills."""
    return timing.host_time(call, calls=60, rounds=25, drain=torch.cuda.synchronize, warmup_seconds=0.05)


def by_processor(call: Callable[[], object]) -> dict[int, float]:
    """The call's host time on each processor this process may use: shows what placement does."""
    allowed = sorted(os.sched_getaffinity(0))
    found = {}
    try:
        for processor in allowed[:16]:
            os.sched_setaffinity(0, {processor})
            found[processor] = round(host_us(call).us, 2)
    finally:
        os.sched_setaffinity(0, allowed)
    return found


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="JSON lines are appended here")
    parser.add_argument("--processors", action="store_true", help="also time the step on each processor")
    args = parser.parse_args(argv)
    require_file("--out", args.out)
    device = torch.device("cuda", torch.cuda.current_device())
    parts = Parts(make_pool(1024, device), CASE)
    parts.gate()
    calls = parts.parts()
    for collect in (True, False):
        if not collect:
            gc.disable()
        for name, call in calls.items():
            taken = host_us(call)
            label = name if collect else f"{name}, no garbage collection"
            print(f"{label:<60} {taken.us:7.2f} us ({taken.us_min:.2f}..{taken.us_max:.2f})", flush=True)
            if args.out is not None and collect:
                shape = {
                    "requests": 1,
                    "keys": 4096,
                    "heads": CASE.heads,
                    "topk": TOPK,
                    "format": parts.spec.key_format,
                }
                timing.append(
                    args.out,
                    timing.record(
                        "launch", CASE.name, taken, device, exact=True, numerics="fp32", extra={"what": name}, **shape
                    ),
                )
    gc.enable()
    parts.gate()
    if args.processors:
        print("step by processor:", by_processor(calls["step, caller's buffers"]), flush=True)
        print("zero_ by processor:", by_processor(calls["torch zero_"]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
