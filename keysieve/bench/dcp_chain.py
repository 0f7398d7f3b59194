"""One rank's chain of kernels, part by part, for measurements: score, candidates, exchange, merge."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import keysieve as ks
from keysieve.backends import load
from keysieve.bench.score import TOPK, Inputs
from keysieve.kernels.exchange_host import Merger
from keysieve.kernels.local_topk_host import LocalTopk
from keysieve.kernels.sharding_word import sharding_word
from keysieve.kernels.sm90_score_config import PITCHED_TOPS
from keysieve.spec import GROUP, candidate_words, index_planes, pitch_of


class Chain:
    """Kernels and buffers for `rows` rows of `local` keys a rank.

    Args:
        here: rank, world, device, and pool of keys.
        spec: the indexer.
        rows, local: rows of a call; keys of a row on each rank.
        topn: candidates offered.
        memory: of an exchange; None for candidate rows in ordinary memory, gathered by the group.
        merging: the merge's configuration, None for the one that suits.
    """

    def __init__(
        self, here: Any, spec: ks.IndexerSpec, rows: int, local: int, topn: int, memory: Any, merging: Any = None
    ) -> None:
        self.here, self.spec, self.local, self.memory = here, spec, local, memory
        device = here.device
        backend: Any = load("sm90")
        self.backend = backend
        self.planes = index_planes(local)
        self.words = torch.zeros(rows, candidate_words(topn, self.planes), dtype=torch.int32, device=device)
        self.gathered = torch.zeros(here.world * rows, self.words.shape[1], dtype=torch.int32, device=device)
        self.out = torch.empty(rows, TOPK, dtype=torch.int32, device=device)
        self.counts = torch.empty(rows, dtype=torch.int32, device=device)
        self.positions = torch.empty(rows, TOPK, dtype=torch.int32, device=device)
        self.lens = torch.full((rows,), local * here.world, dtype=torch.int32, device=device)
        self.flags = torch.zeros(64, dtype=torch.int32, device=device)
        self.sms = self.backend.sms(device)

        def make(kernel: Any, wanted: Any) -> Any:
            return self.backend.launcher(device, kernel, wanted)

        given = spec.format.is_fp8
        self.top = LocalTopk(make, n=topn, planes=self.planes, push=True, keys=local, sms=self.sms, given=given)
        layout = PITCHED_TOPS if self.top.takes_maxima(rows) else "pitched"
        config = self.backend.score_config(spec, 1, layout, "float32")
        self.launch, self.config = self.backend.launcher(device, self.backend.scorer(spec)[0], config), config
        elements = rows * pitch_of(local)
        results = torch.empty(elements + elements // GROUP, dtype=torch.bfloat16, device=device)
        self.logits = results[:elements].view(rows, -1)
        self.tops = results[elements:].view(torch.int16) if layout == PITCHED_TOPS else None
        self.maxima: dict[str, torch.Tensor] = {} if self.tops is None else {"tops": self.tops}
        self.merger = Merger(
            make,
            k=TOPK,
            n=topn,
            planes=self.planes,
            world=here.world,
            rank=here.rank,
            interleave=1,
            tagged=memory is not None,
            sms=self.sms,
            config=merging,
        )
        self.shard: dict[str, Any] = {"world": here.world, "rank": here.rank, "interleave": 1}

    def score(self, x: Inputs) -> None:
        self.backend.scorer(self.spec)[1].score_pitched(
            self.launch,
            self.config,
            x.query,
            self.here.pool,
            x.weights,
            self.lens,
            x.table,
            max_context=self.local,
            logits=self.logits,
            flags=self.flags,
            blocks=self.sms,
            sharding=sharding_word(self.here.world, self.here.rank, 1, self.local * self.here.world),
            **self.maxima,
        )

    def offer(self, x: Inputs) -> None:
        """Score and local top-N, the words kept here: what the exchange comes on top of."""
        self.score(x)
        self.top.push(self.logits, self.lens, tops=self.tops, words=self.words, chained=True, **self.shard)

    def push(self, release: bool = True, chained: bool = True) -> None:
        """Local top-N, the words pushed to all ranks."""
        m = self.memory
        place = {"peers": m.peers, "slots": m.layout.slots, "max_rows": m.layout.shape.max_rows, "epoch": m.epoch}
        self.top.push(self.logits, self.lens, tops=self.tops, **place, release=release, chained=chained, **self.shard)

    def merge(self, chained: bool = True, positions: bool = False) -> None:
        """Wait for all words, merge."""
        self.merger.exchange(
            self.memory,
            self.logits,
            self.lens,
            1,
            site=0,
            limit=self.local * self.here.world,
            local_limit=self.local,
            timeout_ns=10_000_000_000,
            out=self.out,
            counts=self.counts,
            positions=self.positions if positions else None,
            chained=chained,
        )

    def step(self, x: Inputs) -> None:
        """Score, local top-N and push, merge."""
        self.score(x)
        self.push()
        self.merge()

    def gathered_step(self, x: Inputs) -> None:
        """Score, local top-K, all-gather, merge."""
        self.offer(x)
        dist.all_gather_into_tensor(self.gathered, self.words)
        self.merge_gathered()

    def merge_gathered(self, positions: bool = False) -> None:
        """Merge what was gathered."""
        lists = self.gathered.view(self.here.world, self.words.shape[0], -1)
        where = self.positions if positions else None
        self.merger.merge(lists, self.lens, 1, out=self.out, counts=self.counts, positions=where)

    def settle(self, x: Inputs) -> None:
        """One more step, with positions, for a gate."""
        if self.memory is not None:
            self.score(x)
            self.push()
            self.merge(positions=True)
        else:
            self.offer(x)
            dist.all_gather_into_tensor(self.gathered, self.words)
            self.merge_gathered(positions=True)
        torch.cuda.synchronize()
