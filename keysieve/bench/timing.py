"""How device time is taken, and the one JSON line that a measurement leaves.

Time: a CUDA graph of at least 12 iterations is captured once and replayed; a replay's time divided by the iterations is
one sample, and the median of at least 9 samples is the result. The inputs of the iterations rotate through sets that
together exceed three L2 caches, or the record says `cached`. The first kernel of an iteration is launched without the
programmatic-launch attribute, so that iterations do not overlap; inside an iteration it is on. (That is up to the
`step` callable; `graph_time` cannot see it.)
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from keysieve.checks import refuse

MIN_ITERATIONS = 12
MIN_REPLAYS = 9
L2_MULTIPLE = 3

OPS = ("score", "select", "step", "local_topk", "exchange", "merge", "dcp_step", "compile", "launch")


@dataclass(frozen=True)
class Timing:
    """Microseconds an iteration takes: median, least and most over the replays; `cached`: inputs fit three L2s."""

    us: float
    us_min: float
    us_max: float
    iterations: int
    replays: int
    cached: bool


def iterations_for(sets: int, wanted: int = MIN_ITERATIONS) -> int:
    """At least `wanted` (and 12) iterations, a whole number of rounds over the input sets."""
    least = max(wanted, MIN_ITERATIONS)
    return -(-least // sets) * sets


def sets_for(bytes_per_set: int, l2_bytes: int, most: int = 64) -> int:
    """Input sets needed so that together they exceed three L2 caches, at most `most`; two at the least: of a single
    large set, loads that leave L2 first find the same part there again in every iteration."""
    return max(min(2, most), min(most, L2_MULTIPLE * l2_bytes // max(bytes_per_set, 1) + 1))


def is_cached(sets: int, bytes_per_set: int, l2_bytes: int) -> bool:
    """Do all input sets together fit in three L2 caches? (Then the record has to say so.)"""
    return sets * bytes_per_set <= L2_MULTIPLE * l2_bytes


def graph_time(
    step: Callable[[int], object],
    *,
    sets: int,
    bytes_per_set: int,
    device: torch.device | str | int = "cuda",
    iterations: int = MIN_ITERATIONS,
    replays: int = MIN_REPLAYS,
    warmup: int = 2,
) -> Timing:
    """Time `step(i)`, which enqueues one iteration on input set `i % sets` on the current stream.

    Everything must be compiled, loaded and allocated: the first calls here warm up eagerly on the capture stream, then
    the graph is captured. bytes_per_set: bytes an iteration reads from memory.
    """
    where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    count = iterations_for(sets, iterations)
    with torch.cuda.device(where):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for i in range(max(sets, 1)):
                step(i)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                step(i % sets)
        with torch.cuda.stream(stream):
            for _ in range(warmup):
                graph.replay()
            samples = [_replay(graph, stream, count) for _ in range(max(replays, MIN_REPLAYS))]
        l2 = torch.cuda.get_device_properties(where).L2_cache_size
    return summarise(samples, count, is_cached(sets, bytes_per_set, l2))


def _replay(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # as above
    begin.record(stream)
    graph.replay()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / count


def summarise(samples: list[float], iterations: int, cached: bool) -> Timing:
    """Median, least and most of per-iteration times in microseconds."""
    if len(samples) < MIN_REPLAYS:
        refuse("samples", got=len(samples), accepted=f"at least {MIN_REPLAYS}", remedy="Replay more often.")
    return Timing(statistics.median(samples), min(samples), max(samples), iterations, len(samples), cached)


def host_time(
    call: Callable[[], object],
    *,
    calls: int = 300,
    rounds: int = 15,
    drain: Callable[[], object],
    warmup_seconds: float = 0.3,
) -> Timing:
    """Host microseconds that one `call()` takes (a launch included, the device's work not waited for).

    drain: waits until the device is idle; runs between the rounds, outside the timed part, so that the launch queue
    does not fill up and the device's speed is not measured instead. The calls before the first round
    bring processor and caches to a steady state. Compare only numbers of one process: see docs/measurements/launch.md.
    """
    ready = time.perf_counter() + warmup_seconds
    while time.perf_counter() < ready:
        for _ in range(calls):
            call()
        drain()
    samples = []
    for _ in range(rounds):
        drain()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) / calls * 1e6)
    drain()
    return summarise(samples, calls, True)


# ------------------------------------------------------------------------------------------------------------ records


FIELDS = (
    *("date", "device", "arch", "op", "case", "requests", "keys", "next_n", "heads", "topk", "format", "numerics"),
    *("world", "us", "us_min", "us_max", "limit_us", "peers", "exact", "cached", "versions", "commit"),
)
"""Fields of a line, in their order; a line's extra fields follow."""

COMMIT_ENV = "KEYSIEVE_COMMIT"
"""Names the commit where the package does not lie in a checkout."""


@dataclass(frozen=True)
class Record:
    """One measurement. Fields and their order are those of docs/measurements; anything else goes into `extra`.

    exact: the exactness gate of the same run was green. A record cannot be made otherwise.
    """

    op: str
    case: str
    us: float
    us_min: float
    us_max: float
    exact: bool
    cached: bool
    device: str
    arch: str
    requests: int = 0
    keys: int = 0
    next_n: int = 1
    heads: int = 0
    topk: int = 0
    format: str = ""
    numerics: str = ""
    world: int = 1
    limit_us: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    date: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.exact is not True:
            remedy = "A measurement counts only beside a green exactness gate in the same run: fix what is wrong first."
            refuse("exact", got=repr(self.exact), accepted="True", remedy=remedy)
        if self.op not in OPS:
            refuse("op", got=repr(self.op), accepted=", ".join(OPS), remedy="Name what was measured.")

    def line(self) -> str:
        """The JSON line."""
        values = dataclasses.asdict(self)
        extra = values.pop("extra")
        line = {name: values[name] for name in FIELDS}
        for name in ("us", "us_min", "us_max"):
            line[name] = round(line[name], 3)
        overlap = set(extra) & set(line)
        if overlap:
            refuse("extra", got=sorted(overlap), accepted="names that are no fields", remedy="Rename them.")
        return json.dumps(line | extra)


def record(op: str, case: str, timing: Timing, device: torch.device | str | int, **fields: Any) -> Record:
    """A record of `timing` on `device`, with date, versions and commit filled in."""
    from keysieve.launch import arch_of

    index, arch = arch_of(device)
    filled: dict[str, Any] = {
        "device": torch.cuda.get_device_name(index),
        "arch": arch,
        "us": timing.us,
        "us_min": timing.us_min,
        "us_max": timing.us_max,
        "cached": timing.cached,
        "versions": versions(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return Record(op=op, case=case, **(filled | fields))


def append(path: Path, *records: Record) -> None:
    """Append records to a JSON-lines file, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for item in records:
            file.write(item.line() + "\n")


def versions() -> dict[str, str]:
    """Versions of what a measurement depends on; the driver where a device is in use."""
    from keysieve.compile.versions import Toolchain, installed

    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    tool = installed()
    if isinstance(tool, Toolchain):
        found |= {"cutlass_dsl": tool.dsl, "tvm_ffi": tool.ffi}
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if driver:
        found["driver"] = driver.splitlines()[0].strip()
    return found


def commit() -> str:
    """The commit the package's directory is checked out at, with `+` when files of the package differ from it."""
    named = os.environ.get(COMMIT_ENV)
    if named:
        return named
    root = Path(__file__).resolve().parents[1]
    head = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    if not head:
        return ""
    dirty = _output("git", "-C", str(root), "status", "--porcelain", "--", ".")
    return head.strip() + ("+" if dirty else "")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
