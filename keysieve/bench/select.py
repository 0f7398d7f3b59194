"""Times of the selection kernels: `python -m keysieve.bench.select [--out FILE] [--peers] [--only NAMES] [--quick]`.

Every case first passes an exactness gate (bitwise against a stable sort of the same logits, on the device); a failing
case ends the run. Then `select` (maxima given) and `topk` (computed) are timed as `timing.py` says, with physical rows
through a block table, and with `--peers` whatever other top-k kernels can be imported, on the same logits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keysieve.bench import timing
from keysieve.bench.limits import Rates, rates_of
from keysieve.bench.places import require_file
from keysieve.checks import KeysieveError
from keysieve.kernels.select_host import Selector, topk_workspace_bytes
from keysieve.launch import Launcher
from keysieve.spec import GROUP, TILE

SHAPES = (
    (1, 4096), (1, 32768), (1, 131072), (1, 1 << 20), (8, 131072), (32, 131072), (128, 4096), (128, 32768), (64, 65536),
    (512, 8192), (2, 131072),
)  # fmt: skip
KINDS = ("gaussian", "plateau", "equal")
MEMORY = 1 << 30  # bytes of input sets kept at a time


@dataclass(frozen=True)
class Case:
    """rows x keys; `lens` where the rows differ."""

    name: str
    lens: tuple[int, ...]

    @property
    def rows(self) -> int:
        return len(self.lens)

    @property
    def longest(self) -> int:
        return max(self.lens)

    @property
    def elements(self) -> int:
        return sum(-(-n // TILE) * TILE for n in self.lens)


def size_name(keys: int) -> str:
    """131072 -> "128K", 1048576 -> "1M"."""
    return f"{keys >> 20}M" if keys % (1 << 20) == 0 else f"{keys >> 10}K" if keys % 1024 == 0 else str(keys)


def uniform(rows: int, keys: int) -> Case:
    return Case(f"{rows}x{size_name(keys)}", (keys,) * rows)


def bimodal() -> tuple[Case, Case]:
    """90 % of 128 rows with 4K keys, 10 % with 256K; and the uniform batch with as many keys in all."""
    lens = tuple(262144 if i % 10 == 0 else 4096 for i in range(128))
    even = -(-sum(lens) // 128 // TILE) * TILE
    return Case("bimodal", lens), Case("bimodal_uniform", (even,) * 128)


class Inputs:
    """Input sets in the compact layout: values of one kind, canonical, with their maxima."""

    def __init__(self, case: Case, kind: str, k: int, sets: int, device: torch.device) -> None:
        self.case, self.k, self.device = case, k, device
        self.logits = torch.stack([self._values(kind) for _ in range(sets)])
        best = self.logits.view(sets, -1, GROUP).float().amax(-1).to(torch.bfloat16)
        self.tops = _key16(best).to(torch.int16)  # wraps to the same 16 bits
        tiles = torch.tensor([-(-n // TILE) if n > k else 0 for n in case.lens])
        self.starts = torch.cat([torch.zeros(1), tiles.cumsum(0)]).to(torch.int32).to(device)
        self.lens = torch.tensor(case.lens, dtype=torch.int32, device=device)
        width = -(-case.longest // 64)
        self.table = torch.randint(0, 1 << 20, (case.rows, width), dtype=torch.int32, device=device)
        self.out = torch.empty(case.rows, k, dtype=torch.int32, device=device)
        self.positions = torch.empty_like(self.out)
        self.counts = torch.empty(case.rows, dtype=torch.int32, device=device)

    def _values(self, kind: str) -> torch.Tensor:
        if kind == "equal":
            return torch.zeros(self.case.elements, dtype=torch.bfloat16, device=self.device)
        x = torch.randn(self.case.elements, dtype=torch.bfloat16, device=self.device)
        if kind == "plateau":  # half of what is wanted is positive, then exact zeros through the threshold
            share = min(0.45, self.k / 2 / self.case.longest)
            x = (x - statistics.NormalDist().inv_cdf(1 - share)).clamp_min(0)
        return x + 0.0  # no -0

    def rows_of(self, index: int) -> list[torch.Tensor]:
        """The rows of one set, each without its padding."""
        parts = torch.split(self.logits[index], [-(-n // TILE) * TILE for n in self.case.lens])
        return [part[:n] for part, n in zip(parts, self.case.lens, strict=True)]


def _key16(x: torch.Tensor) -> torch.Tensor:
    bits = x.view(torch.int16).to(torch.int32) & 0xFFFF
    return torch.where(bits >= 0x8000, bits ^ 0xFFFF, bits ^ 0x8000)


class Subject:
    """The two entries on one set of inputs."""

    def __init__(self, inputs: Inputs) -> None:
        case, k, device = inputs.case, inputs.k, inputs.device
        sms = torch.cuda.get_device_properties(device).multi_processor_count

        def make(maxima: bool) -> Selector:
            return Selector(
                lambda kernel, config: Launcher(kernel, config, device),
                k=k,
                max_rows=case.rows,
                max_len=case.longest,
                sms=sms,
                maxima=maxima,
            )

        self.inputs, self.with_tops, self.without = inputs, make(True), make(False)
        room = topk_workspace_bytes(case.rows, case.longest, k, sms)
        self.room = torch.empty(room, dtype=torch.uint8, device=device)

    def select(self, index: int, positions: torch.Tensor | None = None) -> None:
        i = self.inputs
        self.with_tops.select(
            i.logits[index], i.tops[index], i.lens, 1, starts=i.starts, out=i.out, counts=i.counts, kv_table=i.table,
            positions=positions,
        )  # fmt: skip

    def topk(self, index: int, positions: torch.Tensor | None = None) -> None:
        i = self.inputs
        logits = i.logits[index].view(i.case.rows, -1)
        self.without.topk(
            logits, i.lens, out=i.out, counts=i.counts, kv_table=i.table, positions=positions, workspace=self.room
        )

    def gate(self, with_topk: bool) -> None:
        """Both entries against a stable sort of the same logits, positions and physical rows, on the first set."""
        i = self.inputs
        calls = [self.select, self.topk] if with_topk else [self.select]
        want = torch.full_like(i.out, -1)
        for t, row in enumerate(i.rows_of(0)):
            order = torch.sort(_key16(row), descending=True, stable=True).indices[: i.k]
            want[t, : len(order)] = order.sort().values.to(torch.int32)
        entry = torch.gather(i.table, 1, (want.clamp_min(0) // 64).long())
        mapped = torch.where(want < 0, -1, entry * 64 + want % 64).to(torch.int32)
        for call in calls:
            for tensor in (i.out, i.positions, i.counts):
                tensor.fill_(-77)
            call(0, i.positions)
            if not torch.equal(i.positions, want) or not torch.equal(i.out, mapped):
                wrong = int((i.positions != want).sum())
                raise KeysieveError(f"{i.case.name}: {call.__name__} differs from a stable sort in {wrong} positions")


def peer_calls(inputs: Inputs) -> dict[str, Callable[[int], object]]:
    """Other top-k kernels that can be imported here, on the same logits, uniform rows only."""
    case, k = inputs.case, inputs.k
    rows = inputs.logits.view(inputs.logits.shape[0], case.rows, -1)
    found: dict[str, Callable[[int], object]] = {"torch_topk_unordered_ties": lambda i: torch.topk(rows[i], k, dim=1)}
    try:
        import cuda.bindings.driver as cuda
        from cudnn.deepseek_sparse_attention.indexer_top_k import indexer_top_k_wrapper
    except ImportError:
        pass
    else:

        def cudnn(i: int) -> object:
            stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
            return indexer_top_k_wrapper(
                rows[i], inputs.lens, k, return_val=False, stream=stream, tie_break=1, deterministic=True
            )

        found["cudnn_frontend_deterministic_positions"] = cudnn
    try:
        import flashinfer
    except ImportError:
        pass
    else:
        found["flashinfer_deterministic"] = lambda i: flashinfer.top_k_page_table_transform(
            rows[i], inputs.table, inputs.lens, k, deterministic=True, tie_break=1, dsa_graph_safe=True, page_size=64
        )
    return found


def limit_us(size: int, rates: Rates | None) -> float | None:
    """The limit of `size` bytes moved, in microseconds: None for a device whose bandwidth nobody has measured."""
    return None if rates is None else round(size / rates.read * 1e6, 3)


def measure(case: Case, kind: str, k: int, peers: bool, device: torch.device) -> list[timing.Record]:
    """Gate, then times: one record for each entry."""
    size = 2 * case.elements + 2 * case.elements // GROUP
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    sets = timing.sets_for(size, l2, most=max(1, min(128, MEMORY // size)))
    inputs = Inputs(case, kind, k, sets, device)
    even = len(set(case.lens)) == 1
    subject = Subject(inputs)
    subject.gate(with_topk=even)
    torch.cuda.synchronize(device)
    others: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, call in (peer_calls(inputs) if peers and even else {}).items():
        try:
            others[name] = round(timing.graph_time(call, sets=sets, bytes_per_set=size, device=device).us, 2)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:120]
    made = []
    written = 4 * k * case.rows
    entries = [("select", subject.select, subject.with_tops, size - 2 * case.elements + written)]
    if even:
        entries.append(("topk", subject.topk, subject.without, 2 * case.elements + written))
    for entry, call, selector, read in entries:
        taken = timing.graph_time(call, sets=sets, bytes_per_set=size, device=device)
        config = selector.config(case.rows)
        extra: dict[str, Any] = {
            "entry": entry,
            "kind": kind,
            "blocks_per_row": config.cluster,
            "threads": config.threads,
        }
        if failed:
            extra["peers_failed"] = failed
        made.append(
            timing.record(
                "select",
                case.name,
                taken,
                device,
                requests=case.rows,
                keys=case.longest,
                topk=k,
                peers=others,
                exact=True,
                limit_us=limit_us(read, rates_of(device)),
                extra=extra,
            )
        )
    return made


def warm_peers(device: torch.device) -> None:
    """Call every peer once on a small case, so that those which compile when first used have; prints what it took."""
    inputs = Inputs(uniform(1, 4096), "gaussian", 2048, 1, device)
    for name, call in peer_calls(inputs).items():
        begun = time.perf_counter()
        try:
            call(0)
            torch.cuda.synchronize(device)
            state = "ready"
        except Exception as error:
            state = f"{type(error).__name__}: {error}"[:300]
        print(f"{name}: {state} after {time.perf_counter() - begun:.1f} s", flush=True)


def cases(quick: bool) -> list[tuple[Case, str, int]]:
    """(case, kind, K), the most important first."""
    shapes = SHAPES[:3] if quick else SHAPES
    listed = [(uniform(rows, keys), kind, 2048) for kind in KINDS[:2] for rows, keys in shapes]
    if not quick:
        listed += [(case, "gaussian", 2048) for case in bimodal()]
    listed += [(uniform(rows, keys), KINDS[2], 2048) for rows, keys in shapes]
    if not quick:
        listed += [(uniform(32, 32768), "gaussian", k) for k in (512, 1024, 4096)]
    return listed


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m keysieve.bench.select", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON-lines file to append to")
    parser.add_argument("--peers", action="store_true", help="time other top-k kernels that can be imported")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case, and time no peer, after this long")
    parser.add_argument("--quick", action="store_true", help="three shapes only")
    parser.add_argument("--only", default="", help="comma list of case names, such as 1x4K,bimodal")
    parser.add_argument("--kinds", default="", help=f"comma list of {', '.join(KINDS)}")
    parser.add_argument("--warm-peers", action="store_true", help="only build the peers that compile when first used")
    args = parser.parse_args(argv)
    require_file("--out", args.out)
    device = torch.device("cuda", torch.cuda.current_device())
    if args.warm_peers:
        warm_peers(device)
        return 0
    names, kinds = ({*filter(None, text.split(","))} for text in (args.only, args.kinds))
    torch.manual_seed(20)
    print(f"{'case':>16} {'kind':>9} {'K':>5} {'select':>8} {'topk':>8}  peers (us)")
    begun = time.perf_counter()
    for case, kind, k in cases(args.quick):
        if (names and case.name not in names) or (kinds and kind not in kinds):
            continue
        left = args.seconds - (time.perf_counter() - begun)
        if left < 0:
            print(f"{case.name:>16} {kind:>9} {k:>5}  not measured: the time given is up", flush=True)
            continue
        # Peers compile when first used: they get most of the time, our own cases all that is left.
        peers = args.peers and kind != "equal" and left > args.seconds * 0.4
        made = measure(case, kind, k, peers, device)
        if args.out is not None:
            timing.append(args.out, *made)
        times = {record.extra["entry"]: record.us for record in made}
        mark = " cached" if made[0].cached else ""
        topk = f"{times['topk']:8.2f}" if "topk" in times else " " * 8
        failed = made[0].extra.get("peers_failed", "")
        print(
            f"{case.name:>16} {kind:>9} {k:>5} {times['select']:8.2f} {topk}  {made[0].peers}{mark} {failed}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
