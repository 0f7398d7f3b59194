"""Pushing to W ranks and merging from them, with all ranks on one device: ``keysieve bench dcp-virtual``.

No link is crossed, and kernels of the ranks follow one another on one stream, so every merge finds its words in place:
what is measured is the work of the kernels as W grows, not the time that words are on their way. (A second round waits
for another rank's merge, so it cannot be measured like this.) Per rank: local top-N
that writes its words here (`offer_us`), the same that pushes them to all W ranks (`push_us`), and the merge (`us`). The
cost model of docs/dcp-scaling.md takes them together with the times over a link.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import keysieve as ks
from keysieve.bench import timing
from keysieve.bench.dcp_chain import Chain
from keysieve.bench.places import require_file
from keysieve.bench.score import TOPK
from keysieve.dcp.exchange import virtual_ranks
from keysieve.reference.local_topk import local_topk
from keysieve.reference.merge import merge
from keysieve.spec import default_topn

WORLDS = (2, 4, 8, 16)
ROWS = (1, 16, 64, 128, 512)
LOCAL = 4096
"""Keys of a row on each rank: more than any N."""


@dataclass(frozen=True)
class Here:
    """One virtual rank's place."""

    rank: int
    world: int
    device: torch.device
    pool: torch.Tensor | None = None


def chains_of(world: int, rows: int, topn: int, device: torch.device) -> list[Chain]:
    """A chain for every rank, over random logits of its own."""
    spec = ks.IndexerSpec(32, TOPK)
    ranks = virtual_ranks([device] * world, topn)
    for one in ranks:
        one.bind(spec, max_rows=rows, max_context=LOCAL * world, device=device)
    chains = [Chain(Here(r, world, device), spec, rows, LOCAL, topn, ranks[r].memory) for r in range(world)]
    draw = torch.Generator(device=device).manual_seed(world)
    for chain in chains:
        chain.logits.copy_(torch.randn(chain.logits.shape, device=device, generator=draw).bfloat16() + 0.0)
    return chains


def gate(chains: list[Chain], topn: int) -> None:
    """Raise unless every rank's merge of two rows is the reference's."""
    for chain in chains:
        chain.push(chained=False)
    for chain in chains:
        chain.merge(chained=False, positions=True)
    torch.cuda.synchronize()
    world, few = len(chains), min(2, chains[0].logits.shape[0])
    logits = [chain.logits[:few, :LOCAL].cpu() for chain in chains]
    lens, local = torch.full((few,), LOCAL * world), torch.full((few,), LOCAL)
    words = [local_topk(x, local, topn)[0] for x in logits]
    wanted = merge(words, TOPK, rank=0, seq_lens=lens).positions  # refuses if a rank were saturated
    for chain in chains:
        if not torch.equal(chain.positions[:few].cpu(), wanted):
            raise AssertionError(f"rank {chain.here.rank} of {world}: positions differ from the reference")


def measure(world: int, rows: int, device: torch.device) -> timing.Record:
    """One line: W ranks, so many rows."""
    topn = default_topn(TOPK, world)
    chains = chains_of(world, rows, topn, device)
    gate(chains, topn)

    def offers(_: int) -> None:
        for chain in chains:
            chain.top.push(chain.logits, chain.lens, words=chain.words, **chain.shard)

    def pushes(_: int) -> None:
        for chain in chains:
            chain.push(chained=False, release=False)

    def calls(_: int) -> None:
        pushes(0)
        for chain in chains:
            chain.merge(chained=False)

    size = sum(chain.logits.numel() * 2 for chain in chains)
    offer, push, call = (
        timing.graph_time(f, sets=1, bytes_per_set=size, device=device) for f in (offers, pushes, calls)
    )
    merged = timing.Timing(
        (call.us - push.us) / world,
        (call.us_min - push.us_max) / world,
        (call.us_max - push.us_min) / world,
        call.iterations,
        call.replays,
        call.cached,
    )
    return timing.record(
        "merge",
        f"W{world} {rows} rows",
        merged,
        device,
        requests=rows,
        keys=LOCAL * world,
        heads=32,
        topk=TOPK,
        format="bf16 logits",
        world=world,
        exact=True,
        extra={
            "topn": topn,
            "transport": "one device",
            "offer_us": round(offer.us / world, 3),
            "push_us": round(push.us / world, 3),
        },
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="JSON lines are appended here")
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)), help="comma list of W")
    args = parser.parse_args(argv)
    require_file("--out", args.out)
    device = torch.device("cuda", torch.cuda.current_device())
    for world in map(int, args.worlds.split(",")):
        for rows in ROWS:
            record = measure(world, rows, device)
            if args.out is not None:
                timing.append(args.out, record)
            x = record.extra
            print(
                f"{record.case:>18} N {x['topn']:4d}: offer {x['offer_us']:6.2f} push {x['push_us']:6.2f}"
                f" merge {record.us:6.2f} us a rank",
                flush=True,
            )
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
