"""The exchange between devices: what it adds to a step, beside NCCL's all-gather, and whole context-parallel steps.

    keysieve bench dcp [--world 2] [--only exchange,late,rescue,steps] [--out docs/measurements/dcp.jsonl]

One process a device. `exchange`: score + local top-N + exchange + merge, less score + local top-N of the same run; its
peer is score + local top-K + NCCL all-gather + merge, less score + local top-K. `late`: one rank sleeps a millisecond
in every step. `rescue`: N = K / W, so that every rank of every row is asked twice. `steps`: a DecodeIndexer. Everything
is captured into graphs; a record is only made beside a green gate: positions equal on all ranks and, for the first
rows, those of a stable order of all ranks' logits.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import keysieve as ks
from keysieve.bench import timing
from keysieve.bench.caches import make_pool
from keysieve.bench.dcp_chain import Chain
from keysieve.bench.limits import H200
from keysieve.bench.places import require_file
from keysieve.bench.score import TOPK, Case, Inputs, make_inputs
from keysieve.checks import refuse
from keysieve.reference.dcp_maps import global_positions
from keysieve.reference.topk import select
from keysieve.spec import MAX_WORLD, PAGE, default_topn

ROWS = (1, 16, 64, 128, 512)
TARGETS_US = {1: 6.0, 16: 6.0, 64: 6.0, 128: 10.0, 512: 20.0}
"""Rows -> what exchange and merge may add to a step between two H200."""

LATE_CYCLES = 1_900_000
"""About a millisecond of an H200's clock."""

STEPS = (("1x1M", 1, 1 << 20), ("64x128K", 64, 128 << 10))
GATED = 2
"""Rows whose selection is held to a stable order of all ranks' logits."""


@dataclass(frozen=True)
class Here:
    """This process's place."""

    rank: int
    world: int
    device: torch.device
    pool: torch.Tensor
    out: Path | None

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def keep(self, record: timing.Record) -> None:
        if self.rank == 0 and self.out is not None:
            timing.append(self.out, record)


def local_keys(rows: int) -> int:
    """Keys of a row on each rank: fewer where many rows would make the scorer's time drown the rest."""
    return 16384 if rows <= 64 else 4096


def timed(here: Here, step: Callable[[int], object], sets: int, size: int) -> timing.Timing:
    """`graph_time` with all ranks starting together."""
    torch.cuda.synchronize()
    dist.barrier()
    taken = timing.graph_time(step, sets=sets, bytes_per_set=size, device=here.device, iterations=24, replays=15)
    dist.barrier()
    return taken


def gate(here: Here, chain: Chain, x: Inputs, local: int, rows: int) -> None:
    """Raise unless all ranks have the same positions, and those of a stable order of everybody's logits."""
    chain.settle(x)
    everyones = [torch.empty_like(chain.positions) for _ in range(here.world)]
    dist.all_gather(everyones, chain.positions)
    if any(not torch.equal(one, chain.positions) for one in everyones):
        raise AssertionError(f"{rows} rows: positions differ between ranks")
    few = min(rows, GATED)
    mine = chain.logits[:few, :local].contiguous()
    shards = [torch.empty_like(mine) for _ in range(here.world)]
    dist.all_gather(shards, mine)
    whole = torch.empty(few, local * here.world, dtype=torch.bfloat16, device=here.device)
    for rank, shard in enumerate(shards):
        whole[:, global_positions(torch.arange(local, device=here.device), here.world, rank, 1)] = shard
    wanted, _ = select(whole.cpu(), [local * here.world] * few, TOPK)
    if not torch.equal(chain.positions[:few].cpu(), wanted):
        raise AssertionError(f"{rows} rows: the selection is not that of all ranks' logits")


def exchange(here: Here, rows: int, topn: int | None = None, late: bool = False) -> float:
    """What exchange and merge add, recorded; returns it in microseconds."""
    local = local_keys(rows)
    case = Case(f"{rows}x{local * here.world >> 10}K", (local,) * rows)
    l2 = torch.cuda.get_device_properties(here.device).L2_cache_size
    sets = min(timing.sets_for(case.read_bytes, l2), 24)
    inputs = make_inputs(case, here.pool, sets)
    n = default_topn(TOPK, here.world) if topn is None else topn
    memory = ks.dcp.Exchange(topn=n)
    spec = ks.IndexerSpec(case.heads, TOPK)
    memory.bind(spec, max_rows=rows, max_context=local * here.world, device=here.device)
    if memory.memory is None:
        raise AssertionError(f"no exchange: {memory.reason}")
    chain = Chain(here, spec, rows, local, n, memory.memory)
    whole = Chain(here, spec, rows, local, TOPK, None)
    if late:

        def slow(i: int) -> None:
            if here.rank == 1:
                torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            chain.step(inputs[i])

        taken = timed(here, slow, sets, case.read_bytes)
        gate(here, chain, inputs[0], local, rows)
        memory.check(here.device)
        record = make_record(here, "dcp_step", case, taken, {"late_rank": 1, "topn": n}, {})
        here.keep(record)
        here.say(f"{case.name:>10} one rank late by {LATE_CYCLES} cycles: step {taken.us:9.2f} us")
        return taken.us
    base = timed(here, lambda i: chain.offer(inputs[i]), sets, case.read_bytes)
    full = timed(here, lambda i: chain.step(inputs[i]), sets, case.read_bytes)
    gate(here, chain, inputs[0], local, rows)
    memory.check(here.device)
    peer_base = timed(here, lambda i: whole.offer(inputs[i]), sets, case.read_bytes)
    peer = timed(here, lambda i: whole.gathered_step(inputs[i]), sets, case.read_bytes)
    gate(here, whole, inputs[0], local, rows)
    added, nccl = full.us - base.us, peer.us - peer_base.us
    least, most = full.us_min - base.us_max, full.us_max - base.us_min
    spread = timing.Timing(added, least, most, full.iterations, full.replays, full.cached)
    extra = {
        "topn": n,
        "local_keys": local,
        "step_us": round(full.us, 2),
        "score_local_us": round(base.us, 2),
        "nccl_step_us": round(peer.us, 2),
        "transport": "nvlink",
        "must_reach_us": target_us(torch.cuda.get_device_name(here.device), rows),
    }
    must = "" if extra["must_reach_us"] is None else f" (must {extra['must_reach_us']:4.1f})"
    here.keep(make_record(here, "exchange", case, spread, extra, {"nccl_all_gather_merge": round(nccl, 2)}))
    here.say(
        f"{case.name:>10} N {n:4d}: exchange + merge {added:7.2f} us{must}, NCCL all-gather +"
        f" merge {nccl:7.2f}; step {full.us:7.2f}, score + local top-N {base.us:7.2f}"
    )
    return added


def steps(here: Here, name: str, requests: int, keys: int) -> None:
    """A whole step of a DecodeIndexer: on one device with the whole context, and on all with a shard each."""
    dist.barrier()
    if here.rank == 0:
        one_step(here, 1, name, requests, keys)
    dist.barrier()
    one_step(here, here.world, name, requests, keys)


def one_step(here: Here, world: int, name: str, requests: int, keys: int) -> None:
    """The step on `world` ranks: 1 (this one alone, tensor parallel) or all."""
    local, device = keys // world, here.device
    case = Case(name, (local,) * requests)
    spec = ks.IndexerSpec(case.heads, TOPK)
    indexer = ks.DecodeIndexer(spec, requests, keys, device=device, dcp=None if world == 1 else ks.dcp.Exchange())
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    inputs = make_inputs(case, here.pool, timing.sets_for(case.read_bytes, l2))
    cache = ks.IndexCache(spec, here.pool)
    table = torch.randperm(requests * local // PAGE, device=device).to(torch.int32).view(requests, -1)
    out = torch.empty(requests, TOPK, dtype=torch.int32, device=device)
    counts = torch.empty(requests, dtype=torch.int32, device=device)
    lens = torch.full((requests,), keys, dtype=torch.int32, device=device)

    def step(i: int) -> None:
        x = inputs[i]
        indexer(x.query, cache, x.weights, lens, x.table, kv_table=table, out=out, counts=counts)

    if world == 1:
        taken = timing.graph_time(step, sets=len(inputs), bytes_per_set=case.read_bytes, device=device)
    else:
        taken = timed(here, step, len(inputs), case.read_bytes)
    first = indexer(inputs[0].query, cache, inputs[0].weights, lens, inputs[0].table, positions=True)
    indexer.check()
    if world > 1:
        assert first.positions is not None
        everyones = [torch.empty_like(first.positions) for _ in range(world)]
        dist.all_gather(everyones, first.positions)
        owned = first.counts.clone()
        dist.all_reduce(owned)
        if any(not torch.equal(e, first.positions) for e in everyones) or not bool((owned == TOPK).all()):
            raise AssertionError(f"{name}: ranks disagree")
    here.keep(make_record(here, "dcp_step", case, taken, {"local_keys": local}, {}, world))
    here.say(f"{name:>10} W {world}: step {taken.us:8.2f} us")


def target_us(device_name: str, rows: int) -> float | None:
    """What exchange and merge may add; None where there is no target: they are an H200's."""
    return TARGETS_US.get(rows) if device_name == H200 else None


def make_record(
    here: Here,
    op: str,
    case: Case,
    taken: timing.Timing,
    extra: dict[str, Any],
    peers: dict[str, float],
    world: int = 0,
) -> timing.Record:
    """A record; `gate` has passed."""
    return timing.record(
        op,
        case.name,
        taken,
        here.device,
        requests=len(case.lengths),
        keys=case.lengths[0] * (world or here.world),
        heads=case.heads,
        topk=TOPK,
        format="fp8_fp32",
        numerics="fp32",
        world=world or here.world,
        exact=True,
        peers=peers,
        extra=extra,
    )


def _rank(rank: int, world: int, port: int, only: str, out: Path | None, seconds: float) -> None:
    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device("cuda", rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world, device_id=device)
    here = Here(rank, world, device, make_pool(140_000, device), out)
    begun, wanted = time.monotonic(), set(only.split(","))

    def left() -> bool:
        """Is there time for another case? Rank 0 decides for all."""
        go = torch.tensor([int(time.monotonic() - begun < seconds)], device=device)
        dist.broadcast(go, 0)
        return bool(go.item())

    jobs: list[tuple[str, Callable[[], object]]] = [
        *(("exchange", lambda rows=rows: exchange(here, rows)) for rows in ROWS),
        *(("rescue", lambda rows=rows: exchange(here, rows, TOPK // world)) for rows in (1, 64)),
        ("late", lambda: exchange(here, 16, late=True)),
        *(("steps", lambda step=step: steps(here, *step)) for step in STEPS),
    ]
    for name, job in jobs:
        if name in wanted and left():
            job()
    dist.barrier()
    dist.destroy_process_group()


def require_devices(world: int) -> None:
    """Refuse more ranks than there are devices, and a single one."""
    found = torch.cuda.device_count()
    if not 2 <= world <= min(found, MAX_WORLD):
        refuse(
            "--world",
            got=world,
            accepted=f"2..{found}: a device of this host for each rank",
            remedy="`keysieve bench dcp-virtual` measures ranks that share one device.",
        )


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="ranks, each on a device of its own")
    parser.add_argument("--only", default="exchange,rescue,late,steps", help="comma list of what to measure")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines are appended here")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after this many seconds")
    args = parser.parse_args(argv)
    require_file("--out", args.out)
    require_devices(args.world)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn: Any = getattr(mp, "spawn")  # noqa: B009  # torch does not export it to type checkers
    spawn(_rank, (args.world, port, args.only, args.out, args.seconds), nprocs=args.world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
