"""Ranks of a ``SharedExchange`` as threads of one process, and the cases they are run on."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import keysieve as ks
from keysieve.dcp import fuzz
from keysieve.dcp.memory import ExchangeMemory, ExchangeShape, LateWire
from keysieve.dcp.shared import SharedExchange

SPEC = ks.IndexerSpec(heads=8, topk=8)
WIRES: list[LateWire] = []
"""Those of a test, which `conftest.py` closes: a wire's thread looks for stores thousands of times a second."""


def drawn(seed: int, *, world: int, n: int, k: int, rows: int, interleave: int = 1) -> fuzz.Case:
    """A case of fixed geometry with this seed's lengths and score shapes, at least one row of them crowded."""
    rng = np.random.default_rng(seed)
    lens = [int(rng.choice((0, 1, k, int(rng.integers(0, 200))))) for _ in range(rows)]
    scores = np.stack([fuzz.SHAPES[int(rng.integers(len(fuzz.SHAPES)))](rng, 200) for _ in range(rows)])
    tensors = torch.tensor(lens, dtype=torch.int32), torch.from_numpy(scores).bfloat16()
    return fuzz.Case(world, interleave, n, k, *tensors)


def calls_of(
    exchange: SharedExchange, cases: list[fuzz.Case], pause: float = 0.0, sites: list[int] | None = None
) -> Any:
    """One rank's winners of every case, in order."""
    won = []
    for call, case in enumerate(cases):
        logits, local_lens = fuzz.shard(case, exchange.rank)
        if pause:
            time.sleep(float(np.random.default_rng((call, exchange.rank)).random()) * pause)
        site = call if sites is None else sites[call]
        won.append(exchange.select(logits, local_lens, case.lens, site=site % 1000))
    return won


def in_threads(exchanges: list[SharedExchange], work: Any) -> list[Any]:
    """``work(exchange)`` in one thread per rank; what each returned or raised, with the time it took."""
    results: list[Any] = [None] * len(exchanges)

    def body(rank: int) -> None:
        began = time.monotonic()
        try:
            results[rank] = work(exchanges[rank])
        except Exception as error:
            results[rank] = (error, time.monotonic() - began)

    threads = [threading.Thread(target=body, args=(r,)) for r in range(len(exchanges))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return results


def exchanges_of(
    shape: ExchangeShape, *, late: bool = True, preset: bool = True, epoch: int = 0, **options: Any
) -> list[Any]:
    memory = ExchangeMemory(shape)
    if preset and epoch:
        memory.preset(epoch)
    wires = [LateWire(r) if late else None for r in range(shape.world)]
    WIRES.extend(wire for wire in wires if wire is not None)
    exchanges = [SharedExchange(memory, r, wire=wires[r], first_epoch=epoch, **options) for r in range(shape.world)]
    for exchange in exchanges:
        spec = replace(SPEC, topk=shape.topk)
        exchange.bind(spec, max_rows=shape.max_rows, max_context=1 << 12, device="cpu")
    return exchanges
