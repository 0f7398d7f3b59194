"""What the host time of an eager step is made of, on one GPU.

    python -m keysieve.bench.host [--out docs/measurements/host.jsonl] [--processors]

First the gate: a repeated call's bytes equal those of a first call. Then the medians of rounds in which each call has
its turn, the launch queue drained in between: the step with the caller's buffers, with new ones, and with every check
made; the two launches alone, as the step makes them and by the kernels' host functions; the step with its launches
replaced by nothing; and torch's own operators beside them. A shared machine changes its speed within seconds: compare
lines of one run only, and between runs their ratio to ``zero_``, which each record carries.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
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
from keysieve.repeats import ADDRESSES, PREPARED_AFTER

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
        self.others = [(torch.empty_like(self.out), torch.empty_like(self.counts)) for _ in range(17)]
        self.turn = 0
        self.small = torch.zeros(1024, device=device)

    def step(self) -> Any:
        x = self.x
        return self.indexer(
            x.query, self.cache, x.weights, x.lens, x.table, kv_table=self.kv_table, out=self.out, counts=self.counts
        )

    def step_other_buffers(self) -> Any:
        x, self.turn = self.x, (self.turn + 1) % len(self.others)
        out, counts = self.others[self.turn]
        return self.indexer(
            x.query, self.cache, x.weights, x.lens, x.table, kv_table=self.kv_table, out=out, counts=counts
        )

    def step_new_buffers(self) -> Any:
        x = self.x
        return self.indexer(x.query, self.cache, x.weights, x.lens, x.table, kv_table=self.kv_table)

    def step_checked(self) -> Any:
        kept, self.indexer._known = self.indexer._known, ()
        result = self.step()
        self.indexer._known = kept
        return result

    def gate(self) -> None:
        """Raise unless checked, repeated and prepared calls (where asked for) give the same bytes."""
        first = self.step_checked().rows.clone()
        for call in (self.step, self.step_other_buffers, self.step_new_buffers):
            for _ in range(PREPARED_AFTER + 2):
                if not torch.equal(call().rows, first):
                    raise AssertionError("a repeated call differs from a checked one")
        self.indexer.check()

    def parts(self) -> dict[str, Callable[[], object]]:
        """Name -> call, the whole step first."""
        for _ in range(PREPARED_AFTER + 2):
            self.step()
        # As in a program that steps with its own buffers only: their form is asked first.
        self.indexer._known = tuple(sorted(self.indexer._known, key=lambda form: form._absent is not None))
        known: Any = self.indexer._known[0]
        runner: Any = self.indexer._runner
        x, stream = self.x, runner.stream
        given = (x.query, self.cache.data, x.weights, x.lens, x.table, self.kv_table, self.out, self.counts)
        addresses = (*(t.data_ptr() for t in given), 0, 0, stream)
        calls = list(runner._calls)
        prepared, by_host = known._direct, launch_list(calls, ADDRESSES)
        first, second = launch_list(calls[:1], ADDRESSES), launch_list(calls[1:], ADDRESSES)
        nothing: Calls = [(Silent(), args) for _, args in calls]
        forms = {"quiet": known.function(launch_list(nothing, ADDRESSES)), "host": known.function(by_host)}

        def replaced(form: str) -> object:
            kept, known.repeat = known.repeat, forms[form]
            result = self.step()
            known.repeat = kept
            return result

        return {
            "step, caller's buffers": self.step,
            "step, caller's buffers, other ones each time": self.step_other_buffers,
            "step, new buffers": self.step_new_buffers,
            "step, every check made": self.step_checked,
            "step, launched by host functions": lambda: replaced("host"),
            "step, launches replaced by nothing": lambda: replaced("quiet"),
            "both launches, as the step makes them": lambda: prepared(*addresses),
            "both launches, bare": lambda: by_host(*addresses),
            "score launch, bare": lambda: first(*addresses),
            "select launch, bare": lambda: second(*addresses),
            "torch zero_": self.small.zero_,
            "torch empty_like": lambda: torch.empty_like(self.small),
            "torch.cuda._sleep(0)": lambda: torch.cuda._sleep(0),  # type: ignore[no-untyped-call]  # torch's
        }


def in_turns(
    calls: dict[str, Callable[[], object]], *, each: int = 60, rounds: int = 25, drain: Callable[[], object]
) -> dict[str, timing.Timing]:
    """Host microseconds of each call: in every round each is timed over ``each`` calls, one after another.

    So few that the launch queue does not fill. drain: waits until the device is idle, before each and not timed.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name, call in calls.items():
            drain()
            call()  # what the one before left cold
            start = time.perf_counter()
            for _ in range(each):
                call()
            taken = (time.perf_counter() - start) / each * 1e6
            if turn >= 2:
                samples[name].append(taken)
    drain()
    return {name: timing.summarise(found, each, True) for name, found in samples.items()}


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
    taken = in_turns(calls, drain=torch.cuda.synchronize)
    zero = taken["torch zero_"].us
    shape = {"requests": 1, "keys": 4096, "heads": CASE.heads, "topk": TOPK, "format": parts.spec.key_format}
    for name, found in taken.items():
        ratio = found.us / zero
        print(
            f"{name:<48} {found.us:7.2f} us ({found.us_min:.2f}..{found.us_max:.2f}), zero_ x {ratio:.2f}", flush=True
        )
        if args.out is not None:
            extra = {"what": name, "torch_zero_us": round(zero, 3)}
            line = timing.record("launch", CASE.name, found, device, exact=True, numerics="fp32", extra=extra, **shape)
            timing.append(args.out, line)
    parts.gate()
    if args.processors:
        print("step by processor:", by_processor(calls["step, caller's buffers"]), flush=True)
        print("zero_ by processor:", by_processor(calls["torch zero_"]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
