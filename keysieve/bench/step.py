"""The whole step on one GPU: ``DecodeIndexer`` in a CUDA graph, with score and select timed alone beside it.

    python -m keysieve.bench.step [--only 32x128K,1x4K] [--format fp8_fp32] [--out docs/measurements/step.jsonl]
                                  [--peers]

Every case first passes its gate: the positions of every row equal an exact, tie-ordered selection from the device's own
logits, its physical rows are those positions looked up in the block table that is then timed, and what the timed calls
left behind is byte-equal to that. Time is taken as ``bench.timing`` says. Prints a table and appends one JSON line a
case.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import keysieve as ks
from keysieve.bench import timing
from keysieve.bench.caches import make_pool
from keysieve.bench.limits import H200, limit_text, rates_of, rounded
from keysieve.bench.peers import steps
from keysieve.bench.places import require_file
from keysieve.bench.score import POOL_PAGES, TOPK, Case, Inputs, make_inputs
from keysieve.inputs import Selection
from keysieve.reference.rows import physical_rows
from keysieve.reference.topk import select
from keysieve.residency import residency
from keysieve.spec import FORMATS, PAGE

K = 1024
RELEASE = -4
"""Place of the argument of select's entry whose bit 1 lets it drop what it has read."""

CHAINED = -2
"""Place of the argument of select's entry that says whether it is a programmatic dependent."""

TARGETS_US = {
    "1x4K": 7.0,
    "1x32K": 8.5,
    "1x128K": 12.0,
    "1x1M": 47.0,
    "8x32K": 16.0,
    "8x128K": 42.0,
    "32x4K": 12.0,
    "32x32K": 42.0,
    "32x128K": 146.0,
    "128x4K": 24.0,
    "128x32K": 147.0,
    "64x64K": 146.0,
    "32x32Kx2": 45.0,
    "64x64Kx2": 150.0,
}
"""Case -> the time to reach on an H200: below the fastest unordered combination of parts measured there."""

MXFP4_TARGETS_US = {"8x128K": 35.0, "128x4K": 24.0, "64x64K": 95.0, "64x64Kx2": 105.0}
"""The same for MXFP4 caches: 10 us after the time of the scorer."""

CASES = [
    *(Case(f"1x{n}K" if n < K else "1x1M", (n * K,)) for n in (4, 32, 128, 1024)),
    *(Case(f"8x{n}K", (n * K,) * 8) for n in (32, 128)),
    *(Case(f"32x{n}K", (n * K,) * 32) for n in (4, 32, 128)),
    *(Case(f"128x{n}K", (n * K,) * 128) for n in (4, 32)),
    Case("64x64K", (64 * K,) * 64),
    Case("32x32Kx2", (32 * K,) * 32, 2),
    Case("64x64Kx2", (64 * K,) * 64, 2),
]


@dataclass(frozen=True)
class Expected:
    """What every step on one input set has to write: int32 ``[rows, K]`` and ``[rows]``."""

    rows: torch.Tensor
    positions: torch.Tensor
    counts: torch.Tensor

    def compare(self, case: str, what: str, got: Selection) -> None:
        """Raise AssertionError, naming the first wrong row, unless ``got`` is this to the byte."""
        pairs = [("counts", got.counts, self.counts), ("physical rows", got.rows, self.rows)]
        pairs += [("positions", got.positions, self.positions)] if got.positions is not None else []
        for name, ours, right in pairs:
            wrong = (ours != right).view(ours.shape[0], -1).any(1).nonzero().view(-1)
            if wrong.numel():
                raise AssertionError(f"{case}: {what}: wrong {name} in {wrong.numel()} rows, first {int(wrong[0])}")


def expected_from(logits: torch.Tensor, lens: list[int], k: int, kv_table: torch.Tensor) -> Expected:
    """The exact selection from the device's own logits, by the reference's rule, for every row.

    It runs where the logits are; that it is what a CPU selects is checked on the first four rows.
    """
    positions, counts = select(logits, lens, k)
    few = slice(0, 4)
    again, numbers = select(logits[few].cpu(), lens[few], k)
    if not torch.equal(positions[few].cpu(), again) or not torch.equal(counts[few].cpu(), numbers):
        raise AssertionError("the reference's selection on the device is not the one on the CPU")
    return Expected(physical_rows(positions, kv_table), positions, counts)


def gate(
    spec: ks.IndexerSpec, indexer: ks.DecodeIndexer, cache: ks.IndexCache, x: Inputs, kv_table: torch.Tensor, case: Case
) -> Expected:
    """Raise unless a step selects exactly from the device's own logits, every row, and its rows are the table's.

    Returns what a step on these inputs has to write.
    """
    out = indexer(x.given(), cache, x.weights, x.lens, x.table, kv_table=kv_table, positions=True)
    indexer.check()
    logits = ks.score(spec, x.given(), cache, x.weights, x.lens, x.table, max_len=max(case.lengths))
    expected = expected_from(logits, x.lens.tolist(), spec.topk, kv_table)
    expected.compare(case.name, "a first step", out)
    return expected


def peer_times(calls: dict[str, Callable[[int], object]], sets: int, case: Case, device: torch.device) -> Any:
    """Microseconds by name, and the reasons of those that failed."""
    times: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, call in calls.items():
        try:
            taken = timing.graph_time(call, sets=sets, bytes_per_set=case.read_bytes, device=device)
            times[name] = round(taken.us, 2)
        except Exception as error:  # whatever another library raises: ours is measured all the same
            failed[name] = f"{type(error).__name__}: {error}"[:120]
    return times, failed


Part = tuple[Callable[[int], None], int, int]
"""What enqueues a part's iteration, over how many input sets it rotates, and the bytes of one."""


def parts_alone(indexer: ks.DecodeIndexer, step: Callable[[int], None], sets: int, case: Case) -> dict[str, Part]:
    """Score and select by themselves: the launches of each input set's step, select not chained and dropping nothing.

    "select" has as many copies of the step's logits and maxima as exceed three L2s (64 at most): its inputs rotate,
    as those of everything that is timed. "select_in_l2" always reads the step's own workspace, which it therefore finds
    in L2, as in a step: less than select can be said to take alone, and the stricter of the two sums to be below.
    """
    launches = []
    runner: Any = indexer._runner
    for i in range(sets):
        indexer._known = ()  # a known form would launch without writing down what
        step(i)
        (score, score_args), (select_, select_args) = (
            (t.function, [int(a) for a in args]) for t, args in runner._calls
        )
        assert select_args[CHAINED] == 1
        assert select_args[:2] == [runner._logits.data_ptr(), runner._tops.data_ptr()]
        select_args[CHAINED] = 0
        select_args[RELEASE] &= 1  # the logits are read again: they must not be dropped
        launches.append((score, score_args, select_, select_args))
    stream = torch._C._cuda_getCurrentRawStream

    def score_alone(i: int) -> None:
        launches[i][0](*launches[i][1], stream(runner.index))

    def select_alone(i: int) -> None:
        launches[i][2](*launches[i][3], stream(runner.index))

    score_alone(0)  # what a step has dropped is undefined
    result_bytes = 2 * runner._logits.numel() + 2 * runner._tops.numel()
    l2 = torch.cuda.get_device_properties(runner._logits.device).L2_cache_size
    copies = [(runner._logits.clone(), runner._tops.clone()) for _ in range(timing.sets_for(result_bytes, l2))]

    def select_rotated(i: int) -> None:
        _, _, select_, (_, _, *rest) = launches[0]
        select_(copies[i][0].data_ptr(), copies[i][1].data_ptr(), *rest, stream(runner.index))

    return {
        "score": (score_alone, sets, case.read_bytes),
        "select": (select_rotated, len(copies), result_bytes),
        "select_in_l2": (select_alone, sets, result_bytes // sets),
    }


def measure(case: Case, pool: torch.Tensor, peers: bool = False) -> timing.Record:
    """Gate, then the time of a step in a graph and the host's time of an eager one; peers: others' steps too."""
    device = pool.device
    spec = case.spec
    cache = ks.IndexCache(spec, pool)
    rows = len(case.lengths) * case.next_n
    indexer = ks.DecodeIndexer(spec, rows, max(case.lengths), case.next_n, device=device)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    sets = timing.sets_for(case.read_bytes, l2)
    inputs = make_inputs(case, pool, sets)
    given = [x.given() for x in inputs]
    width = max(case.lengths) // PAGE
    kv_table = torch.randperm(width * len(case.lengths), device=device).to(torch.int32).view(len(case.lengths), width)
    out = torch.empty(rows, TOPK, dtype=torch.int32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    expected = gate(spec, indexer, cache, inputs[-1], kv_table, case)

    def step(i: int) -> None:
        x = inputs[i]
        indexer(given[i], cache, x.weights, x.lens, x.table, kv_table=kv_table, out=out, counts=counts)

    aside = residency(device.index or 0)
    aside.reset()  # results of the case before are not asked to stay any longer
    taken = timing.graph_time(step, sets=sets, bytes_per_set=case.read_bytes, device=device)
    expected.compare(case.name, "the last step of the timed graph", Selection(out, counts, None))  # of the last set
    parts, cached = {}, False
    for name, (call, its, size) in parts_alone(indexer, step, sets, case).items():
        aside.reset()
        alone = timing.graph_time(call, sets=its, bytes_per_set=size, device=device)
        parts[name], cached = round(alone.us, 2), cached or (name == "select" and alone.cached)
    host = _host_us(lambda: step(0))
    beside = _host_us(torch.zeros(1024, device=device).zero_)  # says what state the machine was in
    others = steps(case, pool, inputs, kv_table, TOPK) if peers and spec.format.is_fp8 else {}
    aside.reset()  # so that ours take no room from the peers
    times, failed = peer_times(others, sets, case, device)
    must = target_us(torch.cuda.get_device_name(device), case)
    extra: dict[str, Any] = {"host_us": host, "torch_zero_us": beside, "must_reach_us": must, "input_sets": sets}
    extra |= {"l2_set_aside_mb": round(aside.size / 2**20, 2), "parts_alone_us": parts}
    extra |= {"select_cached": cached}
    return timing.record(
        "step",
        case.name,
        taken,
        device,
        requests=len(case.lengths),
        keys=max(case.lengths),
        next_n=case.next_n,
        heads=case.heads,
        topk=TOPK,
        format=spec.key_format,
        numerics="fp32",
        exact=True,
        limit_us=rounded(case.limit_us(rates_of(device)), 2),
        peers=times,
        extra=extra | ({"peers_failed": failed} if failed else {}),
    )


def _host_us(call: Callable[[], object]) -> float:
    """Host microseconds of a call, the launch queue drained between short rounds."""
    taken = timing.host_time(call, calls=50, rounds=9, drain=torch.cuda.synchronize, warmup_seconds=0.1)
    return round(taken.us, 2)


def target_us(device_name: str, case: Case) -> float | None:
    """The time that a case has to reach; None where there is none: the targets are an H200's."""
    targets = TARGETS_US if case.spec.format.is_fp8 else MXFP4_TARGETS_US
    return targets.get(case.name) if device_name == H200 else None


def told(record: timing.Record) -> str:
    """A case's line of output."""
    target = record.extra["must_reach_us"]
    parts = record.extra["parts_alone_us"]
    verdict = "" if target is None else f" must {target:6.1f} {'ok' if record.us <= target else 'over'}"
    return (
        f"{record.case:>10} {record.us:8.2f} us {verdict}"
        f" parts alone {parts['score']:.2f} + {parts['select']:.2f} ({parts['select_in_l2']:.2f} in L2)"
        f" limit {limit_text(record.limit_us)}"
        f" host {record.extra['host_us']:.1f} us {record.peers or ''}"
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point; exit status 1 when a gate failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma list of case names")
    parser.add_argument("--format", default="fp8_fp32", choices=tuple(FORMATS), help="of keys and queries")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines are appended here")
    parser.add_argument(
        "--peers", action="store_true", help="other libraries' steps beside it; first bench.select --warm-peers"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no case after this many seconds")
    args = parser.parse_args(argv)
    require_file("--out", args.out)
    names = set(filter(None, args.only.split(",")))
    chosen = [replace(c, key_format=args.format) for c in CASES if not names or c.name in names]
    device = torch.device("cuda", torch.cuda.current_device())
    pages = max([math.ceil(sum(-(-n // PAGE) for n in c.lengths)) for c in chosen] + [POOL_PAGES])
    pool = make_pool(pages, device, args.format)
    failed = 0
    begun = time.monotonic()
    for case in chosen:
        if time.monotonic() - begun > args.seconds:
            print(f"{case.name:>10} not measured: the time given is up", flush=True)
            continue
        try:
            record = measure(case, pool, args.peers)
        except AssertionError as error:
            failed += 1
            print(f"GATE FAILED {error}", flush=True)
            continue
        if args.out is not None:
            timing.append(args.out, record)
        print(told(record), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
