"""Times of the scorer on one GPU, DeepGEMM beside it in the same run where it is installed, exactness first.

    python -m keysieve.bench.score [--set main,heads64,bimodal] [--only 32x128K] [--out docs/measurements/score.jsonl]
                                   [--format fp8_fp32] [--no-peers] [--prepare] [--seconds 45] [--warm-peers]
                               [--keep-results 24]

Every case first passes its gate: our logits within the derived bound of the exact ones on sampled rows, tops and rerun
bitwise, and (with DeepGEMM) both logits within the sum of both bounds. Only then is it timed, as `bench.timing` says.
Prints a table and appends one JSON line a case.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from keysieve.backends import load, name_for
from keysieve.bench import timing
from keysieve.bench.caches import make_pool, make_query, page_values, query_values
from keysieve.bench.limits import Rates, limit_text, rates_of, rounded, share_text
from keysieve.bench.places import require_file
from keysieve.launch import Launcher, arch_of
from keysieve.reference.layouts import row_tops
from keysieve.residency import keep_results_in_l2, residency
from keysieve.spec import FORMATS, PAGE, TILE, IndexerSpec
from keysieve.testing.score_bound import logit_bound

TOPK = 2048
POOL_PAGES = 140_000
MOST_SETS = 400


@dataclass(frozen=True)
class Case:
    """`lengths` of the requests; every row of a request sees as many keys."""

    name: str
    lengths: tuple[int, ...]
    next_n: int = 1
    heads: int = 32
    key_format: str = "fp8_fp32"

    @property
    def spec(self) -> IndexerSpec:
        """What is scored."""
        return IndexerSpec(self.heads, TOPK, self.key_format, numerics="fp32")

    @property
    def keys(self) -> int:
        """Keys scored: of requests longer than topk."""
        return sum(n for n in self.lengths if n > TOPK)

    @property
    def read_bytes(self) -> int:
        """Key and scale bytes of an iteration."""
        return self.keys * self.spec.format.width

    def limit_us(self, rates: Rates | None) -> float | None:
        """Bytes read and written at the read bandwidth; above heads x next_n = 128 the products, if longer.

        None for a device whose rates nobody has measured.
        """
        if rates is None:
            return None
        moved = (self.read_bytes + self.keys * self.next_n * 2.25) / rates.read
        products = 2 * 128 * self.heads * self.next_n * self.keys / rates.products
        return 1e6 * (max(moved, products) if self.heads * self.next_n > 128 else moved)


def _uniform(requests: int, keys: int, next_n: int = 1, heads: int = 32) -> Case:
    size = f"{keys >> 20}M" if keys >= 1 << 20 else f"{keys >> 10}K"
    name = f"{requests}x{size}" + (f"x{next_n}" if next_n > 1 else "")
    return Case(name, (keys,) * requests, next_n, heads)


K = 1024
CASE_SETS: dict[str, list[Case]] = {
    "main": [
        *(_uniform(1, n * K) for n in (4, 32, 128, 1024)),
        *(_uniform(8, n * K) for n in (32, 128)),
        *(_uniform(32, n * K) for n in (4, 32, 128)),
        *(_uniform(128, n * K) for n in (4, 32)),
        *(_uniform(64, 64 * K, n) for n in (1, 2, 4, 8)),
        _uniform(32, 32 * K, 2),
    ],
    "heads64": [
        *(_uniform(r, n * K, heads=64) for r, n in ((1, 4), (1, 128), (8, 128), (32, 128), (128, 4), (128, 32))),
        *(_uniform(64, 64 * K, n, heads=64) for n in (1, 2, 4, 8)),
    ],
    "bimodal": [
        Case("bimodal40", (*(4 * K for _ in range(36)), *(256 * K for _ in range(4)))),
        Case("bimodal40_uniform", ((36 * 4 * K + 4 * 256 * K) // 40 // TILE * TILE,) * 40),
    ],
}


@dataclass
class Inputs:
    """One input set of a case, and where its results go: one place for all sets, as for all layers."""

    query: torch.Tensor
    words: torch.Tensor | None
    weights: torch.Tensor
    lens: torch.Tensor
    table: torch.Tensor
    logits: torch.Tensor
    tops: torch.Tensor
    starts: torch.Tensor
    flags: torch.Tensor

    def given(self, rows: slice = slice(None)) -> Any:
        """The query as the library's calls take it."""
        return self.query[rows] if self.words is None else (self.query[rows], self.words[rows])


def make_inputs(case: Case, pool: torch.Tensor, sets: int) -> list[Inputs]:
    """`sets` input sets over pages drawn without repetition as far as the pool reaches."""
    device = pool.device
    generator = torch.Generator(device=device).manual_seed(5)
    order = torch.randperm(pool.shape[0], device=device, generator=generator).int()
    need = [-(-n // PAGE) for n in case.lengths]
    rows, heads = len(case.lengths) * case.next_n, case.heads
    elements = sum(-(-n // TILE) * TILE for n in case.lengths) * case.next_n
    logits = torch.empty(elements, dtype=torch.bfloat16, device=device)
    tops = torch.empty(elements // 8, dtype=torch.int16, device=device)
    made: list[Inputs] = []
    for index in range(sets):
        start = index * sum(need) % max(1, pool.shape[0] - sum(need))
        table = torch.zeros(len(need), max(need), dtype=torch.int32, device=device)
        for request, count in enumerate(need):
            table[request, :count] = order[start : start + count]
            start += count
        query, words = make_query(rows, heads, device, case.key_format, generator)
        weights = torch.randn(rows, heads, device=device, generator=generator)
        lens = torch.tensor([n for n in case.lengths for _ in range(case.next_n)], dtype=torch.int32, device=device)
        starts = torch.empty(len(need) + 1, dtype=torch.int32, device=device)
        flags = torch.zeros(1, dtype=torch.int32, device=device)
        made.append(Inputs(query, words, weights, lens, table, logits, tops, starts, flags))
    return made


def score_call(host: Any, launch: Callable[..., None], config: Any, pool: torch.Tensor, x: Inputs, blocks: int) -> None:
    """One launch on an input set."""
    host.score_compact(
        launch,
        config,
        x.query,
        pool,
        x.weights,
        x.lens,
        x.table,
        topk=TOPK,
        max_context=x.table.shape[1] * PAGE,
        logits=x.logits,
        tops=x.tops,
        starts=x.starts,
        flags=x.flags,
        blocks=blocks,
        words=x.words,
        kept=residency(x.query.get_device()).rows,
    )


def exact_row(case: Case, pool: torch.Tensor, x: Inputs, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 (logits, magnitudes) of a row, see `score_bound`."""
    request, length = row // case.next_n, int(x.lens[row])
    raw = pool.view(pool.shape[0], -1)[x.table[request, : -(-length // PAGE)].long()]
    keys, scale = (t[:length] for t in page_values(raw, case.key_format))
    query = query_values(x.query[row], None if x.words is None else x.words[row])
    weights = x.weights[row].double()[:, None]
    exact = ((query @ keys.T).clamp_min(0.0) * weights).sum(0) * scale
    return exact, (query.abs() @ keys.abs().T * weights.abs()).sum(0) * scale


def gate(case: Case, pool: torch.Tensor, x: Inputs, call: Callable[[], None], peer: Callable[[], Any] | None) -> float:
    """Raise unless the case is right; returns the worst excess over BF16 rounding as a share of the magnitude."""
    x.logits.fill_(float("nan"))
    call()
    first, first_tops = x.logits.clone(), x.tops.clone()
    x.logits.fill_(float("nan"))
    call()
    if int(x.flags.item()) or not torch.equal(first.view(torch.int16), x.logits.view(torch.int16)):
        raise AssertionError(f"{case.name}: flag {int(x.flags.item())} or rerun differs")
    other = peer() if peer is not None else None
    starts, worst = x.starts.tolist(), 0.0
    rows = len(case.lengths) * case.next_n
    for row in sorted({0, rows - 1, rows // 2, rows // 3}):
        request, j = divmod(row, case.next_n)
        tiles = starts[request + 1] - starts[request]
        if not tiles:
            continue
        at, length = TILE * (case.next_n * starts[request] + j * tiles), case.lengths[request]
        mine = first[at : at + length]
        exact, magnitude = exact_row(case, pool, x, row)
        bound = logit_bound(exact, magnitude, case.heads)
        error = (mine.double() - exact).abs()
        if not bool((error <= bound).all()):
            raise AssertionError(f"{case.name} row {row}: {float((error - bound).max())} beyond the bound")
        worst = max(worst, float(((error - exact.abs() * 2.0**-8) / magnitude).max()))
        tops = row_tops(mine.cpu()).to(torch.int32)
        if not torch.equal(tops, first_tops[at // 8 : at // 8 + len(tops)].cpu().to(torch.int32) & 0xFFFF):
            raise AssertionError(f"{case.name} row {row}: tops are not those of the logits")
        if other is not None and not bool(((other[row, :length].double() - mine.double()).abs() <= 2 * bound).all()):
            raise AssertionError(f"{case.name} row {row}: DeepGEMM's logits are not within both bounds")
    return worst


class DeepGemm:
    """The peer: its paged logits and the metadata kernel that it needs beforehand."""

    def __init__(self) -> None:
        import deep_gemm

        self.module = deep_gemm
        self.blocks = int(deep_gemm.get_num_sms())

    def lengths(self, case: Case, x: Inputs) -> torch.Tensor:
        """Lengths as the peer wants them: [requests, next_n], every row's own."""
        return x.lens.view(len(case.lengths), case.next_n).contiguous()

    def metadata(self, lengths: torch.Tensor) -> torch.Tensor:
        """The schedule, a kernel of its own."""
        plan: torch.Tensor = self.module.get_paged_mqa_logits_metadata(lengths, PAGE, self.blocks)
        return plan

    def logits(self, case: Case, pool: torch.Tensor, x: Inputs, lengths: torch.Tensor, plan: torch.Tensor) -> Any:
        """float32 [rows, max context]."""
        query = x.query.view(len(case.lengths), case.next_n, case.heads, 128)
        cache = pool.view(pool.shape[0], PAGE, 1, 132)
        longest = x.table.shape[1] * PAGE
        return self.module.fp8_paged_mqa_logits(query, cache, x.weights, lengths, x.table, plan, longest, False)


def read_bandwidth(device: torch.device, gigabytes: int = 4) -> float:
    """Bytes a second at which this device reads a large array from end to end now: what cases beside it can be held to.

    Devices of one kind differ by several per cent, and one device with its temperature.
    """
    numbers = torch.ones(gigabytes << 28, dtype=torch.float32, device=device)
    numbers.sum()
    taken = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # as in bench.timing
        begin.record()
        numbers.sum()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e-3)
    return float(numbers.numel() * 4 / statistics.median(taken))


def peers_of(case: Case, peer: DeepGemm | None) -> DeepGemm | None:
    """The peer where it serves the case: FP8 caches, one or two query rows."""
    return peer if peer is not None and case.next_n <= 2 and case.spec.format.is_fp8 else None


def measure(case: Case, pool: torch.Tensor, peer: DeepGemm | None, bandwidth: float) -> timing.Record:
    """Gate, then times of ours and of the peer's two kernels. bandwidth: of `read_bandwidth`, for the record."""
    device = pool.device
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    config = config_of(case, device)
    kernel, host = _backend(device).scorer(case.spec)
    launch = Launcher(kernel, config, device)
    sets = timing.sets_for(case.read_bytes, l2, MOST_SETS)
    inputs = make_inputs(case, pool, sets)
    torch.cuda.synchronize(device)
    served = peers_of(case, peer)
    plans: list[tuple[torch.Tensor, torch.Tensor]] = []
    if served is not None:
        lengths = [served.lengths(case, x) for x in inputs]
        plans = [(n, served.metadata(n)) for n in lengths]

    def theirs(i: int) -> Any:
        assert served is not None
        return served.logits(case, pool, inputs[i], *plans[i])

    def ours(i: int) -> None:
        score_call(host, launch, config, pool, inputs[i], blocks)

    excess = gate(case, pool, inputs[0], lambda: ours(0), (lambda: theirs(0)) if served else None)
    taken = timing.graph_time(ours, sets=sets, bytes_per_set=case.read_bytes, device=device)
    peers: dict[str, float] = {}
    aside = residency(device.index or 0)
    aside.reset()  # so that lines of ours take no room from the peer
    if served is not None:
        theirs_us = timing.graph_time(theirs, sets=sets, bytes_per_set=case.read_bytes, device=device)
        plan_us = timing.graph_time(
            lambda i: served.metadata(plans[i][0]), sets=sets, bytes_per_set=case.read_bytes, device=device
        )
        peers = {"deep_gemm_logits": round(theirs_us.us, 3), "deep_gemm_metadata": round(plan_us.us, 3)}
    return timing.record(
        "score",
        case.name,
        taken,
        device,
        requests=len(case.lengths),
        keys=max(case.lengths),
        next_n=case.next_n,
        heads=case.heads,
        topk=TOPK,
        format=case.key_format,
        numerics="fp32",
        exact=True,
        limit_us=rounded(case.limit_us(rates_of(device)), 2),
        peers=peers,
        extra={
            "error_over_magnitude": float(f"{excess:.3g}"),
            "input_sets": sets,
            "l2_set_aside_mb": round(aside.size / 2**20, 2),
            "read_tbps": round(bandwidth / 1e12, 3),
        },
    )


def _backend(device: torch.device) -> Any:
    """The GPU backend that serves the device: its kernel, its host functions, its configurations."""
    return load(name_for("auto", device))


def config_of(case: Case, device: torch.device) -> Any:
    """The configuration a case runs in."""
    return _backend(device).score_config(case.spec, case.next_n, "compact", "float32")


def prepare(cases: list[Case], device: torch.device) -> None:
    """Compile the cases' kernels in several processes."""
    from keysieve.compile.parallel import Job, run

    configs = list(dict.fromkeys(config_of(case, device) for case in cases))
    kernel, arch = _backend(device).scorer(cases[0].spec)[0], arch_of(device)[1]
    for result in run([Job(kernel.name, config, arch) for config in configs], len(configs)):
        if result.status == "failed":
            raise RuntimeError(f"{result.name}: {result.error}")


def warm_peers(peer: DeepGemm, device: torch.device) -> None:
    """Have the peer build its kernels: it compiles at the first call of every shape class."""
    pool = make_pool(4096, device)
    for heads in (32, 64):
        for next_n in (1, 2):
            for requests in (1, 40, 64, 128):
                case = _uniform(requests, 256, next_n, heads)
                (x,) = make_inputs(case, pool, 1)
                lengths = peer.lengths(case, x)
                peer.logits(case, pool, x, lengths, peer.metadata(lengths))
    torch.cuda.synchronize(device)


def told(record: timing.Record) -> str:
    """A case's line of output."""
    limit, share = limit_text(record.limit_us, 6), share_text(record.limit_us, record.us)
    beside = " ".join(f"{name} {us:.1f}" for name, us in record.peers.items())
    line = f"{record.case:>18} h{record.heads} {record.us:8.2f} us ({record.us_min:.2f}..{record.us_max:.2f})"
    return f"{line} limit {limit} ({share}) {beside}"


def main(argv: list[str] | None = None) -> int:
    """Entry point; exit status 1 when a gate failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="main,heads64,bimodal", help=f"comma list of {', '.join(CASE_SETS)}")
    parser.add_argument("--only", default="", help="comma list of case names")
    parser.add_argument("--format", default="fp8_fp32", choices=tuple(FORMATS), help="of keys and queries")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines are appended here")
    parser.add_argument("--no-peers", action="store_true", help="leave DeepGEMM out where it is installed")
    parser.add_argument("--prepare", action="store_true", help="compile in parallel first")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no case after this many seconds")
    parser.add_argument(
        "--keep-results", type=float, default=None, help="MiB of L2 set aside for results, see keep_results_in_l2"
    )
    parser.add_argument("--warm-peers", action="store_true", help="only have the peers build their kernels")
    args = parser.parse_args(argv)
    require_file("--out", args.out)
    begin = time.monotonic()
    names = set(filter(None, args.only.split(",")))
    listed = [c for group in args.set.split(",") for c in CASE_SETS[group] if not names or c.name in names]
    chosen = [replace(c, key_format=args.format) for c in listed]
    device = torch.device("cuda", torch.cuda.current_device())
    if args.warm_peers:
        warm_peers(DeepGemm(), device)
        return 0
    if args.prepare:
        prepare(chosen, device)
    if args.keep_results is not None:
        keep_results_in_l2(args.keep_results, device)
    bandwidth = read_bandwidth(device)
    print(f"this device reads {bandwidth / 1e12:.2f} TB/s", flush=True)
    pages = max([math.ceil(sum(-(-n // PAGE) for n in c.lengths)) for c in chosen] + [POOL_PAGES])
    pool = make_pool(pages, device, args.format)
    peer: DeepGemm | None = None
    if not args.no_peers:
        try:
            peer = DeepGemm()
        except ImportError as error:
            print(f"DeepGEMM is not measured: {error}", flush=True)
    failed = 0
    for case in chosen:
        if time.monotonic() - begin > args.seconds:
            print(f"{case.name} h{case.heads}: not measured, the time is up", flush=True)
            continue
        try:
            record = measure(case, pool, peer, bandwidth)
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
