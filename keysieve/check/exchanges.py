"""Checks of the exchange on a GPU: all ranks on one device, their words pushed, merged and asked for again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from keysieve.backends import load, name_for
from keysieve.check import brute
from keysieve.check.selections import Shards, ShardTrial
from keysieve.check.steps import as_int32
from keysieve.check.trial import Scope, bits16, generators
from keysieve.check.writers import require
from keysieve.checks import UnsupportedError, message
from keysieve.dcp.exchange_memory import VirtualBlocks
from keysieve.dcp.exchange_report import failure
from keysieve.dcp.layout import ExchangeLayout
from keysieve.dcp.memory import ExchangeShape
from keysieve.kernels.exchange_host import Merger
from keysieve.kernels.local_topk_host import LocalTopk
from keysieve.spec import pitch_of

CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Streams that share a hardware queue wait for each other, and a merge that waits for another rank must not."""

Words = NDArray[np.int32]

_DEFAULT_CONNECTIONS: Final = 8
_TIMEOUT_NS: Final = 5_000_000_000
_CALLS: Final = 3


@dataclass(frozen=True, eq=False)
class ExchangeTrial:
    """A row of logits spread over ranks, and the epoch that their exchange starts from."""

    shards: ShardTrial
    epoch: int


class Exchanges:
    """The exchange of candidates between ranks of one GPU: every rank's winners and counts, all positions."""

    name = "exchange"

    def __init__(self) -> None:
        self._shards = Shards()

    def draw(self, seed: int, scope: Scope) -> ExchangeTrial:
        rng, _ = generators(seed ^ 0x5A5A)
        shards = self._shards.draw(seed, scope)
        most = int(os.environ.get(CONNECTIONS, _DEFAULT_CONNECTIONS)) // 2
        zero = torch.tensor(0.0, dtype=torch.bfloat16)
        logits = torch.where(shards.logits == 0, zero, shards.logits)  # as the scorer stores them: no -0, one NaN
        logits = torch.where(logits.isnan(), torch.tensor(-64, dtype=torch.int16).view(torch.bfloat16), logits)
        shards = replace(shards, logits=logits, world=min(shards.world, max(most, 1)), with_lengths=True)
        return ExchangeTrial(shards, rng.choice([0, 1, 77, 2**31 - 1, 2**32 - 2, 2**32 - 1]))

    def smaller(self, trial: ExchangeTrial) -> Iterator[ExchangeTrial]:
        for shards in self._shards.smaller(trial.shards):
            yield replace(trial, shards=shards)
        if trial.epoch:
            yield replace(trial, epoch=0)

    def describe(self, trial: ExchangeTrial) -> str:
        return f"{self._shards.describe(trial.shards)}\nepoch {trial.epoch}"

    def run(self, trial: ExchangeTrial, scope: Scope) -> None:
        if scope.device.type != "cuda":
            accepted = "a CUDA device; `keysieve check --protocol` explores the protocol anywhere"
            raise UnsupportedError(
                message("device", got=scope.device, accepted=accepted, remedy="Leave this stage out on the CPU.")
            )
        backend: Any = load(name_for(scope.backend, scope.device))
        ranks = _Ranks(trial, scope.device, backend)
        for call in range(_CALLS):
            ranks.call(call)
            self._hold(trial.shards, ranks, call)

    def _hold(self, trial: ShardTrial, ranks: _Ranks, call: int) -> None:
        bits = bits16(trial.logits)
        for t, length in enumerate(trial.lengths):
            chosen = brute.select(bits[t, :length], trial.k)
            filled = as_int32(chosen + [-1] * (trial.k - len(chosen)))
            for rank in range(trial.world):
                owned = brute.owned_positions(length, trial.world, rank, trial.interleave)
                mine = {g: local for local, g in enumerate(owned)}
                local = [mine[g] for g in chosen if g in mine]
                where = f"of row {t} on rank {rank}, call {call}"
                out, counts, positions = ranks.results(rank, t)
                require(f"positions {where}", positions, filled)
                require(f"winners {where}", out, as_int32(local + [-1] * (trial.k - len(local))))
                require(f"count {where}", counts, as_int32([len(local)]))


class _Ranks:
    """All ranks of a trial on one device, a stream each."""

    def __init__(self, trial: ExchangeTrial, device: torch.device, backend: Any) -> None:
        s = self.shards = trial.shards
        rows = len(s.lengths)
        layout = ExchangeLayout(ExchangeShape(s.world, rows, s.k, s.n, s.planes))
        blocks = VirtualBlocks([device] * s.world)
        self.memories = [blocks.memory(layout, r) for r in range(s.world)]
        for memory in self.memories:
            memory.preset(trial.epoch)
        self.lens = torch.tensor(s.lengths, dtype=torch.int32).to(device)
        self.logits = [self._local(r, device) for r in range(s.world)]
        self.out = [torch.empty(rows, s.k, dtype=torch.int32, device=device) for _ in range(2 * s.world)]
        self.counts = [torch.empty(rows, dtype=torch.int32, device=device) for _ in range(s.world)]
        self.streams = [torch.cuda.Stream(device) for _ in range(s.world)]  # type: ignore[no-untyped-call]  # torch's
        self.device = device

        def make(kernel: Any, config: Any) -> Any:
            return backend.launcher(device, kernel, config)

        self.top = LocalTopk(make, n=s.n, planes=s.planes, push=True)
        fixed: dict[str, Any] = {"k": s.k, "n": s.n, "planes": s.planes, "sms": backend.sms(device), "tagged": True}
        self.mergers = [Merger(make, world=s.world, rank=r, interleave=s.interleave, **fixed) for r in range(s.world)]

    def _local(self, rank: int, device: torch.device) -> torch.Tensor:
        s = self.shards
        owned = [brute.owned_positions(n, s.world, rank, s.interleave) for n in s.lengths]
        local = torch.full((len(owned), pitch_of(max(1, *map(len, owned)))), float("inf"), dtype=torch.bfloat16)
        for t, places in enumerate(owned):
            local[t, : len(places)] = s.logits[t, places]
        return local.to(device)

    def call(self, site: int) -> None:
        """Every rank's words first, then every rank's merge, so that none waits for what cannot start."""
        s = self.shards
        for tensor in (*self.out, *self.counts):
            tensor.fill_(0x5A5A)
        for r, memory in enumerate(self.memories):
            place: dict[str, Any] = {"peers": memory.peers, "slots": memory.layout.slots, "epoch": memory.epoch}
            place |= {"world": s.world, "rank": r, "interleave": s.interleave, "site": site}
            self.top.push(self.logits[r], self.lens, max_rows=memory.layout.shape.max_rows, **place)
        torch.cuda.synchronize(self.device)
        for r, memory in enumerate(self.memories):
            with torch.cuda.stream(self.streams[r]):
                self.mergers[r].exchange(
                    memory,
                    self.logits[r],
                    self.lens,
                    1,
                    site=site,
                    limit=1 << 26,
                    local_limit=self.logits[r].shape[1],
                    timeout_ns=_TIMEOUT_NS,
                    out=self.out[2 * r],
                    counts=self.counts[r],
                    positions=self.out[2 * r + 1],
                )
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            texts = [failure(memory.report, _TIMEOUT_NS / 1e9) for memory in self.memories]
            raise RuntimeError("; ".join(filter(None, texts)) or str(error)) from error

    def results(self, rank: int, row: int) -> tuple[Words, Words, Words]:
        """(winners, count, positions) of a row."""
        return (
            self.out[2 * rank][row].cpu().numpy(),
            self.counts[rank][row : row + 1].cpu().numpy(),
            self.out[2 * rank + 1][row].cpu().numpy(),
        )
