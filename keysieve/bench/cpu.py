"""The cpu backend against the obvious code, and the memory of a long row: ``python -m keysieve.bench.cpu``.

Both sides start from the same cache bytes, page table and query codes, on one thread. The obvious code dequantises a
request's keys to float32, multiplies, takes max(., 0), weights, sums over heads and calls ``torch.topk``; it is neither
exact nor deterministic in its ties. Every timed selection of keysieve is compared with an exact stable sort of its own
logits in the same run, before anything is printed.

One JSON line a measurement (``--json``); times in microseconds of one step over all requests.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from keysieve.api import DecodeIndexer, score
from keysieve.bench import timing
from keysieve.bench.places import require_file
from keysieve.cache import IndexCache
from keysieve.checks import require_int
from keysieve.quantize import quantize_query
from keysieve.spec import MAX_CONTEXT, PAGE, IndexerSpec

_SEED = 20
_APPEND = 1 << 15
_MEMORY_LIMIT_MIB = 2048
_RATIO_LIMIT = 2.0
_TEXT = (
    "Times the cpu backend beside the obvious float32 code, after checking every selection, and measures the memory of "
    "a long row."
)
_NUMBERS = {
    "--requests": (8, "requests of one row each"),
    "--keys": (131072, "keys that every row sees"),
    "--heads": (32, "indexer heads, one of 8, 16, 32, 64"),
    "--topk": (2048, "keys a row selects, 1..4096"),
    "--repeats": (5, "timed steps of each side"),
    "--memory-keys": (1 << 20, "keys of the row whose memory is measured"),
}


class Setup:
    """A batch of equally long requests over a shuffled pool.

    Args:
        spec: the indexer.
        requests: rows (next_n is 1).
        keys: length of every row.
    """

    def __init__(self, spec: IndexerSpec, requests: int, keys: int) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        pages = -(-keys // PAGE)
        self.spec = spec
        self.cache = IndexCache.empty(spec, pages=requests * pages, device="cpu")
        for first in range(0, pages * PAGE, _APPEND):
            slots = torch.arange(first, min(first + _APPEND, pages * PAGE))
            self.cache.append(torch.randn(len(slots), 128, generator=generator), slots)
        for r in range(1, requests):  # bytes of its own for every request; what they say may repeat
            self.cache.data[r * pages : (r + 1) * pages] = self.cache.data[:pages]
        q = torch.randn(requests, spec.heads, 128, generator=generator)
        query, _ = quantize_query(spec, q)
        assert isinstance(query, torch.Tensor)  # an FP8 spec: the obvious code decodes E4M3
        self.query = query
        self.weights = torch.randn(requests, spec.heads, generator=generator)
        orders = [torch.randperm(pages, generator=generator) + r * pages for r in range(requests)]
        self.table = torch.stack(orders).to(torch.int32)
        self.lengths = torch.full((requests,), keys, dtype=torch.int32)
        self.indexer = DecodeIndexer(spec, max_rows=requests, max_context=keys, device="cpu")

    def step(self) -> Any:
        """One step of keysieve."""
        return self.indexer(self.query, self.cache, self.weights, self.lengths, self.table, positions=True)

    def obvious(self) -> list[torch.Tensor]:
        """One step of the obvious float32 code, from the same bytes (FP8)."""
        chosen = []
        for r, length in enumerate(self.lengths.tolist()):
            codes = self.cache.page_codes(self.table[r]).view(torch.float8_e4m3fn).view(-1, 128)
            scale = self.cache.page_scales(self.table[r]).view(-1, 1)
            keys = codes.to(torch.float32) * scale
            dots = self.query[r].to(torch.float32) @ keys.t()
            logits = (torch.relu(dots) * self.weights[r].view(-1, 1)).sum(0)[:length]
            chosen.append(torch.topk(logits, min(self.spec.topk, length)).indices)
        return chosen

    def is_exact(self) -> bool:
        """Whether the step's positions are those of a stable descending sort of its own logits."""
        result = self.step()
        for r, length in enumerate(self.lengths.tolist()):
            rows = slice(r, r + 1)
            args = (self.weights[rows], self.lengths[rows], self.table[rows])
            logits = score(self.spec, self.query[rows], self.cache, *args)[0].to(torch.float32)
            order = torch.sort(logits, descending=True, stable=True).indices[: self.spec.topk]
            wanted = order.sort().values.to(torch.int32)
            if not torch.equal(result.positions[r, : min(length, self.spec.topk)], wanted):
                return False
        return True


def say(text: str) -> None:
    """Progress, seen at once: a run takes from seconds to minutes."""
    print(f"  {text}", flush=True)


def time_alternately(calls: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Sorted microseconds of every call, each run ``repeats`` times in turn, after one turn that is not counted."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        say(f"timing both sides: turn {turn} of {repeats}" if turn else "timing both sides: a turn that is not counted")
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if turn:
                taken.append((time.perf_counter() - start) * 1e6)
    return [sorted(taken) for taken in times]


def peak_bytes() -> int:
    """The most resident memory this process has had; 0 if the system does not say."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def cpu_name() -> str:
    """The processor's model name, or its architecture where the system does not say."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def record(setup: Setup, case: str, times: Sequence[float], **values: Any) -> timing.Record:
    """A measurement of the cpu backend, with date, versions and commit filled in. ``times``: sorted microseconds."""
    return timing.Record(
        op="step",
        case=case,
        us=times[len(times) // 2],
        us_min=times[0],
        us_max=times[-1],
        cached=False,
        device=cpu_name(),
        arch="cpu",
        requests=len(setup.lengths),
        keys=int(setup.lengths[0]),
        heads=setup.spec.heads,
        topk=setup.spec.topk,
        format=setup.spec.key_format,
        numerics=setup.spec.numerics_on("cpu"),
        versions=timing.versions(),
        commit=timing.commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        **values,
    )


def measure_speed(requests: int, keys: int, heads: int, topk: int, repeats: int) -> timing.Record:
    """Time keysieve's step and the obvious code, alternately, after checking the selection."""
    say(f"{requests} x {keys} keys, {heads} heads: making the cache")
    setup = Setup(IndexerSpec(heads=heads, topk=topk), requests, keys)
    say("comparing every selection with a stable sort")
    exact = setup.is_exact()
    ours, plain = time_alternately((setup.step, setup.obvious), repeats)
    middle = plain[len(plain) // 2]
    extra = {"threads": torch.get_num_threads(), "ratio": round(ours[len(ours) // 2] / middle, 3)}
    peers = {"obvious float32": round(middle, 3)}
    return record(setup, f"{requests}x{keys // 1024}K", ours, exact=exact, peers=peers, extra=extra)


def measure_memory(keys: int, heads: int, topk: int) -> timing.Record:
    """The peak memory of this process after one step on one row of ``keys``; run it in a process of its own."""
    setup = Setup(IndexerSpec(heads=heads, topk=topk), 1, keys)
    start = time.perf_counter()
    setup.step()
    spent = (time.perf_counter() - start) * 1e6
    peak = peak_bytes()  # before the exactness check, which sorts the whole row
    extra = {"threads": torch.get_num_threads(), "peak_bytes": peak}
    return record(setup, f"1x{keys // 1024}K", [spent], exact=setup.is_exact(), extra=extra)


def memory_of_own_process(args: argparse.Namespace) -> str:
    """The JSON line of :func:`measure_memory` in a fresh process, so that nothing else is counted."""
    command = [sys.executable, "-m", "keysieve.bench.cpu", "--only-memory", "--memory-keys", str(args.memory_keys)]
    command += ["--heads", str(args.heads), "--topk", str(args.topk)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the ratio and the peak memory of one run; 1 if a limit was broken. An inexact selection raises."""
    parser = argparse.ArgumentParser(prog="keysieve bench cpu", description=_TEXT)
    for name, (default, text) in _NUMBERS.items():
        parser.add_argument(name, type=int, metavar="N", default=default, help=f"{text} (default: {default})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line per measurement to this file")
    parser.add_argument("--only-memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in _NUMBERS:
        require_int(name, getattr(args, name[2:].replace("-", "_")), 1, MAX_CONTEXT, "Give at least one.")
    require_file("--json", args.json)
    torch.set_num_threads(1)
    if args.only_memory:
        print(measure_memory(args.memory_keys, args.heads, args.topk).line())
        return 0
    speed = measure_speed(args.requests, args.keys, args.heads, args.topk, args.repeats)
    say(f"the memory of a row of {args.memory_keys} keys, in a process of its own")
    line = memory_of_own_process(args)
    memory = json.loads(line)
    ratio, peak = speed.extra["ratio"], memory["peak_bytes"] / 2**20
    print(f"{speed.case}, {args.heads} heads, one thread, median of {args.repeats}; selections exact")
    print(f"  keysieve        {speed.us / 1e3:9.1f} ms")
    print(f"  obvious float32 {speed.peers['obvious float32'] / 1e3:9.1f} ms")
    print(f"  ratio           {ratio:9.2f}    (limit {_RATIO_LIMIT})")
    print(f"{memory['case']}: peak memory of the process {peak:.0f} MiB (limit {_MEMORY_LIMIT_MIB})")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        with args.json.open("a") as lines:
            lines.write(f"{speed.line()}\n{line}\n")
    return 0 if ratio <= _RATIO_LIMIT and peak < _MEMORY_LIMIT_MIB else 1


if __name__ == "__main__":
    sys.exit(main())
