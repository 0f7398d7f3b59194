"""Pushing to W ranks and merging from them, with all ranks on one device: ``keysieve bench dcp-virtual``.

No link is crossed, and kernels of the ranks follow one another on one stream, so every merge finds its words in place:
what is measured is the work of the kernels as W grows, not the time that words are on their way. (A second round waits
for another rank's merge, so it cannot be measured like this.) Per rank: local top-N that writes its words here
(`offer_us`), the same that pushes them to all W ranks (`push_us`), and the merge (`us`). `--only forms`: the same
with the form of the merge that is not chosen; `chain`: what both add to one rank's chained launches; `steps`: one
rank's whole step among W (`dcp_alone`); `spread`: W ranks on two devices (`dcp_spread`). The cost model of
docs/dcp-scaling.md takes the last three together with the times over a link.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import keysieve as ks
from keysieve.bench import timing
from keysieve.bench.caches import make_pool
from keysieve.bench.dcp_chain import Chain
from keysieve.bench.places import require_file
from keysieve.bench.score import TOPK
from keysieve.checks import refuse, require_choice
from keysieve.dcp.exchange import virtual_ranks
from keysieve.kernels.exchange_config import HELD, MergeConfig
from keysieve.reference.local_topk import local_topk
from keysieve.reference.merge import merge
from keysieve.spec import candidate_words, default_topn

WORLDS = (2, 4, 8, 16)
ROWS = (1, 16, 64, 128, 512)
KINDS = ("merge", "forms", "chain", "steps", "spread")
LOCAL = 4096
"""Keys of a row on each rank: more than any N."""


@dataclass(frozen=True)
class Here:
    """One virtual rank's place."""

    rank: int
    world: int
    device: torch.device
    pool: torch.Tensor | None = None


def chains_of(
    world: int, rows: int, topn: int, devices: list[torch.device], merging: MergeConfig | None = None
) -> list[Chain]:
    """A chain for every rank, on its device, over random logits of its own."""
    spec = ks.IndexerSpec(32, TOPK)
    ranks = virtual_ranks(list(devices), topn)
    for one, device in zip(ranks, devices, strict=True):
        one.bind(spec, max_rows=rows, max_context=LOCAL * world, device=device)
    chains = []
    for r, device in enumerate(devices):
        with torch.cuda.device(device):
            chains.append(Chain(Here(r, world, device), spec, rows, LOCAL, topn, ranks[r].memory, merging))
    draw = torch.Generator().manual_seed(world)
    for chain in chains:
        chain.logits.copy_(torch.randn(chain.logits.shape, generator=draw).bfloat16() + 0.0)
    return chains


def gate(chains: list[Chain], topn: int) -> None:
    """Raise unless every rank's merge of two rows is the reference's."""
    for chain in chains:
        with torch.cuda.device(chain.here.device):
            chain.push(chained=False)
    for chain in chains:
        with torch.cuda.device(chain.here.device):
            chain.merge(chained=False, positions=True)
    for device in {chain.here.device for chain in chains}:
        torch.cuda.synchronize(device)
    world, few = len(chains), min(2, chains[0].logits.shape[0])
    logits = [chain.logits[:few, :LOCAL].cpu() for chain in chains]
    lens, local = torch.full((few,), LOCAL * world), torch.full((few,), LOCAL)
    words = [local_topk(x, local, topn)[0] for x in logits]
    wanted = merge(words, TOPK, rank=0, seq_lens=lens).positions  # refuses if a rank were saturated
    for chain in chains:
        if not torch.equal(chain.positions[:few].cpu(), wanted):
            raise AssertionError(f"rank {chain.here.rank} of {world}: positions differ from the reference")


def measure(world: int, rows: int, device: torch.device, throughput: bool = False) -> timing.Record:
    """One line: W ranks, so many rows. throughput: the form of the merge that is not chosen for such rows."""
    topn = default_topn(TOPK, world)
    other = MergeConfig(True, next(h for h in HELD if world * candidate_words(topn, 1) <= h), TOPK)
    chains = chains_of(world, rows, topn, [device] * world, other if throughput else None)
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
    return merge_record(
        world,
        rows,
        merged,
        device,
        {
            "topn": topn,
            "transport": "one device",
            **({"kind": "throughput form"} if throughput else {}),
            "offer_us": round(offer.us / world, 3),
            "push_us": round(push.us / world, 3),
        },
    )


def merge_record(
    world: int, rows: int, taken: timing.Timing, device: torch.device, extra: dict[str, object]
) -> timing.Record:
    """The line of `rows` rows that `world` ranks merge, behind a green gate."""
    return timing.record(
        "merge",
        f"W{world} {rows} rows",
        taken,
        device,
        requests=rows,
        keys=LOCAL * world,
        heads=32,
        topk=TOPK,
        format="bf16 logits",
        world=world,
        exact=True,
        extra=extra,
    )


def lines(only: set[str], worlds: list[int], device: torch.device) -> Iterator[tuple[timing.Record, str]]:
    """Records as they are made, and what to print of each."""
    from keysieve.bench import dcp_alone, dcp_spread  # they use what stands above

    for kind in ("merge", "forms"):
        for world, rows in itertools.product(worlds if kind in only else (), ROWS):
            found = measure(world, rows, device, kind == "forms")
            x = found.extra
            parts = f"offer {x['offer_us']:6.2f} push {x['push_us']:6.2f} merge {found.us:6.2f} us a rank"
            yield found, f"{found.case:>18} N {x['topn']:4d}: {parts}"
            torch.cuda.empty_cache()
    pool = make_pool(140_000, device) if only & {"chain", "steps"} else None
    for world, rows in itertools.product(worlds if "chain" in only else (), ROWS):
        assert pool is not None
        found = dcp_alone.added(world, rows, pool)
        yield found, f"{found.case:>18} N {found.extra['topn']:4d}: exchange + merge, no link {found.us:7.2f} us"
        torch.cuda.empty_cache()
    if "steps" in only:
        assert pool is not None
        for name, requests, keys in dcp_alone.STEPS:
            for world in worlds:
                found = dcp_alone.measure(world, name, requests, keys, pool)
                yield found, f"{name:>18} one of {world:2d} ranks: step {found.us:7.2f} us"
                torch.cuda.empty_cache()
    if "spread" in only:
        for world in worlds:
            for rows in ROWS:
                found = dcp_spread.measure(world, rows)
                x = found.extra
                parts = f"two devices {x['iteration_us']:7.2f}, their work {x['one_device_us']:7.2f}"
                yield found, f"{found.case:>18} N {x['topn']:4d}: {parts}, link {found.us:6.2f} us an iteration"
                torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="JSON lines are appended here")
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)), help="comma list of W")
    parser.add_argument("--only", default="merge,chain,steps", help=f"comma list of {', '.join(KINDS)} (two GPUs)")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after this many seconds")
    args = parser.parse_args(argv)
    require_file("--out", args.out)
    only = set(args.only.split(","))
    for word in only:
        require_choice("--only", word, KINDS, "Name what is to be measured.")
    if "spread" in only and torch.cuda.device_count() < 2:
        remedy = "Leave spread out: the others need one device."
        refuse(
            "--only", got="spread", accepted="merge, forms, chain, steps; with a second device spread", remedy=remedy
        )
    begun = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    for record, text in lines(only, [int(w) for w in args.worlds.split(",")], device):
        if args.out is not None:
            timing.append(args.out, record)
        print(text, flush=True)
        if time.monotonic() - begun > args.seconds:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
