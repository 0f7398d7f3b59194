"""One rank's step among W, and what exchange and merge add to it, on one device: its peers' words are its own.

Each rank of a group does the same work on as many keys, so a group's step is one rank's, but for what the words' way
takes. Here that rank runs alone: score, local top-N, a push to W places and a merge of W lists, as a `DecodeIndexer`
launches them; the places are those from which its own merge takes its sources' words. What is missing is the link (see
`dcp_spread`), and the other ranks' stores on it.
"""

from __future__ import annotations

from typing import Any

import torch

import keysieve as ks
from keysieve.bench import timing
from keysieve.bench.dcp import local_keys
from keysieve.bench.dcp_chain import Chain
from keysieve.bench.dcp_model import CHAIN
from keysieve.bench.score import TOPK, Case, make_inputs
from keysieve.dcp.exchange import virtual_ranks
from keysieve.reference.local_topk import local_topk
from keysieve.reference.merge import merge
from keysieve.spec import PAGE, default_topn, index_planes

STEPS = (("1x1M", 1, 1 << 20), ("64x128K", 64, 128 << 10))
GATED = 2


def feed_itself(ranks: list[Any], spec: ks.IndexerSpec, rows: int, keys: int, device: torch.device) -> None:
    """Rank 0's words for rank t become source t's at rank 0."""
    for one in ranks:
        one.bind(spec, max_rows=rows, max_context=keys, device=device)
    memory = ranks[0].memory
    base, layout = memory.block.data_ptr(), memory.layout
    memory.set_peers([base + layout.slot(0, t, 0) - layout.slot(0, 0, 0) for t in range(len(ranks))])


def measure(world: int, name: str, requests: int, keys: int, pool: torch.Tensor) -> timing.Record:
    """A line: the step of one of `world` ranks."""
    device, local = pool.device, keys // world
    case = Case(name, (local,) * requests)
    spec, topn = ks.IndexerSpec(case.heads, TOPK), default_topn(TOPK, world)
    ranks = virtual_ranks([device] * world, topn)
    feed_itself(ranks, spec, requests, keys, device)
    indexer = ks.DecodeIndexer(spec, requests, keys, device=device, dcp=ranks[0])
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    inputs = make_inputs(case, pool, timing.sets_for(case.read_bytes, l2, 24))
    cache = ks.IndexCache(spec, pool)
    table = torch.randperm(requests * local // PAGE, device=device).to(torch.int32).view(requests, -1)
    out = torch.empty(requests, TOPK, dtype=torch.int32, device=device)
    counts = torch.empty(requests, dtype=torch.int32, device=device)
    lens = torch.full((requests,), keys, dtype=torch.int32, device=device)

    def step(i: int) -> None:
        x = inputs[i]
        indexer(x.query, cache, x.weights, lens, x.table, kv_table=table, out=out, counts=counts)

    taken = timing.graph_time(step, sets=len(inputs), bytes_per_set=case.read_bytes, device=device)
    x, few = inputs[0], min(requests, GATED)
    found = indexer(x.query, cache, x.weights, lens, x.table, positions=True)
    indexer.check()
    mine = torch.full((few,), local, dtype=torch.int32, device=device)
    logits = ks.score(spec, x.query[:few], cache, x.weights[:few], mine, x.table[:few], max_len=local)
    words, _ = local_topk(logits.cpu(), mine.cpu(), topn, index_planes(local))
    everyones = torch.full((few,), keys)
    wanted = merge([words] * world, TOPK, rank=0, planes=index_planes(local), seq_lens=everyones).positions
    if found.positions is None or not torch.equal(found.positions[:few].cpu(), wanted):
        raise AssertionError(f"{name} on one of {world} ranks: the selection is not that of {world} equal lists")
    return timing.record(
        "dcp_step",
        name,
        taken,
        device,
        requests=requests,
        keys=keys,
        heads=case.heads,
        topk=TOPK,
        format="fp8_fp32",
        numerics="fp32",
        world=world,
        exact=True,
        extra={"local_keys": local, "topn": topn, "virtual": "fed by itself"},
    )


def added(world: int, rows: int, pool: torch.Tensor) -> timing.Record:
    """A line: what push and merge add to score and local top-N, launches chained as in a step, without any link."""
    from keysieve.bench.dcp_virtual import Here  # it uses this module

    device, local, topn = pool.device, local_keys(rows), default_topn(TOPK, world)
    case, spec = Case(f"W{world} {rows} rows", (local,) * rows), ks.IndexerSpec(32, TOPK)
    ranks = virtual_ranks([device] * world, topn)
    feed_itself(ranks, spec, rows, local * world, device)
    chain = Chain(Here(0, world, device, pool), spec, rows, local, topn, ranks[0].memory)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    inputs = make_inputs(case, pool, timing.sets_for(case.read_bytes, l2, 24))
    common: dict[str, Any] = {"sets": len(inputs), "bytes_per_set": case.read_bytes, "device": device}
    base = timing.graph_time(lambda i: chain.offer(inputs[i]), **common)
    full = timing.graph_time(lambda i: chain.step(inputs[i]), **common)
    chain.settle(inputs[0])
    few = min(rows, GATED)
    mine, everyones = torch.full((few,), local), torch.full((few,), local * world)
    words, _ = local_topk(chain.logits[:few, :local].cpu(), mine, topn, index_planes(local))
    wanted = merge([words] * world, TOPK, rank=0, planes=index_planes(local), seq_lens=everyones).positions
    if not torch.equal(chain.positions[:few].cpu(), wanted):
        raise AssertionError(f"{case.name}, fed by itself: the selection is not that of {world} equal lists")
    least, most = full.us_min - base.us_max, full.us_max - base.us_min
    return timing.record(
        "merge",
        case.name,
        timing.Timing(full.us - base.us, least, most, full.iterations, full.replays, full.cached),
        device,
        requests=rows,
        keys=local * world,
        heads=case.heads,
        topk=TOPK,
        format="fp8_fp32",
        world=world,
        exact=True,
        extra={
            "topn": topn,
            "transport": "one device",
            "kind": CHAIN,
            "virtual": "fed by itself",
            "local_keys": local,
            "step_us": round(full.us, 2),
            "score_local_us": round(base.us, 2),
        },
    )
