"""Checks of selection alone: the public top-k on anyone's rows, and context-parallel candidates and merging."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from keysieve.api import local_topk, merge, topk
from keysieve.check import brute
from keysieve.check.steps import as_int32
from keysieve.check.trial import Scope, bits16, generators, shown, thirds
from keysieve.check.writers import require
from keysieve.checks import DeviceFaultWarning
from keysieve.reference.dcp_maps import local_seq_lens
from keysieve.reference.merge import saturated_ranks
from keysieve.testing import PATTERNS, guarded_rows

TOPKS = (1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 500, 513, 705, 1023, 1024, 2047, 2048, 4095, 4096)


def draw_rows(widths: list[int], k: int, rng: random.Random, gen: torch.Generator) -> torch.Tensor:
    """BF16 [rows, max width]: every row in a pattern of its own; past its width the largest score there is."""
    logits = torch.full((len(widths), max([1, *widths])), float("inf"), dtype=torch.bfloat16)
    for row, width in enumerate(widths):
        pattern = PATTERNS[rng.choice(list(PATTERNS))]
        logits[row, :width] = pattern(width, min(k, max(width, 1)), gen).to(torch.bfloat16)
    if rng.random() < 0.3:  # foreign bits: -0 and NaN of any payload
        foreign = torch.tensor([0x8000, 0x7FC0, 0xFFC1, 0x7F81, 0xFFFF], dtype=torch.int32)
        picked = foreign[torch.randint(0, 5, logits.shape, generator=gen)]
        picked = torch.where(picked > 0x7FFF, picked - 0x10000, picked).to(torch.int16)
        where = torch.rand(logits.shape, generator=gen) < 0.1
        logits = torch.where(where, picked, logits.view(torch.int16)).view(torch.bfloat16)
    return logits


@dataclass(frozen=True, eq=False)
class RowsTrial:
    """Rows of logits to select from; ``kv_table`` [requests, blocks] with every request's share of the rows."""

    logits: torch.Tensor
    lengths: list[int]
    k: int
    stride: int
    kv_table: torch.Tensor | None
    kv_page: int
    block_rows: int
    owner: list[int] | None


class Rows:
    """``topk`` on BF16 rows of any origin."""

    name = "topk"

    def draw(self, seed: int, scope: Scope) -> RowsTrial:
        del scope
        rng, gen = generators(seed)
        k = rng.choice(TOPKS)
        rows = rng.randint(1, 5)
        around = [k - 1, k, k + 1, 2 * k, 16383, 16384, 16385, 20000]
        sizes = [rng.choice([0, 1, rng.randint(0, 900), rng.choice(around)]) for _ in range(rows)]
        lengths = [n if n else rng.choice([0, -1, -(2**31)]) for n in sizes]
        logits = draw_rows(sizes, k, rng, gen)
        stride = logits.shape[1] + rng.choice([0, 1, 8, 100])
        if rng.random() < 0.5:
            return RowsTrial(logits, lengths, k, stride, None, 64, 64, None)
        page = rng.choice([1, 16, 64, 256])
        requests = rng.choice([1, rows])
        owner = [rng.randrange(requests) for _ in range(rows)] if rng.random() < 0.5 else None
        blocks = -(-logits.shape[1] // page)
        table = torch.randint(0, 1 << 20, (requests, blocks + 2), generator=gen, dtype=torch.int32)
        return RowsTrial(logits, lengths, k, stride, table, page, page * rng.choice([1, 3]), owner)

    def run(self, trial: RowsTrial, scope: Scope) -> None:
        rows, width = trial.logits.shape
        stride = max(trial.stride, width)
        whole = torch.full((rows, stride), float("inf"), dtype=torch.bfloat16)
        whole[:, :width] = trial.logits
        logits = whole.to(scope.device)[:, :width]
        lengths = torch.tensor(trial.lengths, dtype=torch.int32, device=scope.device)
        paging: dict[str, Any] = {}
        if trial.kv_table is not None:
            paging = {"kv_page": trial.kv_page, "block_rows": trial.block_rows}
            paging["kv_table"] = trial.kv_table.to(scope.device)
            if trial.owner is not None:
                paging["row_request"] = torch.tensor(trial.owner, dtype=torch.int32, device=scope.device)
        out = guarded_rows(rows, trial.k, device=scope.device)
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeviceFaultWarning)
            _, counts = topk(logits, lengths, trial.k, out=out.view, **paging)
        out.assert_canaries()
        bits = bits16(trial.logits)
        for t, length in enumerate(trial.lengths):
            chosen = brute.select(bits[t, : max(length, 0)], trial.k)
            placed = chosen
            if trial.kv_table is not None:
                request = t // (rows // trial.kv_table.shape[0]) if trial.owner is None else trial.owner[t]
                placed = brute.physical(chosen, trial.kv_table[request].tolist(), trial.kv_page, trial.block_rows)
            tail = [-1] * (trial.k - len(chosen))
            require(f"row {t} of {length} keys", out.view[t].cpu().numpy(), as_int32(placed + tail))
            require(f"counts[{t}]", counts[t : t + 1].cpu().numpy(), as_int32([len(chosen)]))

    def smaller(self, trial: RowsTrial) -> Iterator[RowsTrial]:
        if trial.kv_table is not None:
            yield replace(trial, kv_table=None, owner=None)
        else:
            for keep in thirds(len(trial.lengths)):
                yield replace(trial, logits=trial.logits[keep], lengths=[trial.lengths[t] for t in keep])
        if trial.stride > trial.logits.shape[1]:
            yield replace(trial, stride=trial.logits.shape[1])
        for t, length in enumerate(trial.lengths):
            for less in (0, length // 2, length - 8, length - 1):
                if 0 <= less < length:
                    lengths = [less if i == t else n for i, n in enumerate(trial.lengths)]
                    most = max([1, *lengths])
                    yield replace(trial, lengths=lengths, logits=trial.logits[:, :most], stride=most)
            if length > 1:  # drop the front instead
                shifted = trial.logits.clone()
                half = length // 2
                shifted[t, : length - half] = trial.logits[t, half:length]
                yield replace(
                    trial, lengths=[n - half if i == t else n for i, n in enumerate(trial.lengths)], logits=shifted
                )
        for fewer in (1, trial.k // 2, trial.k - 1):
            if 1 <= fewer < trial.k:
                yield replace(trial, k=fewer)

    def describe(self, trial: RowsTrial) -> str:
        kv = "" if trial.kv_table is None else f", kv_table {list(trial.kv_table.shape)} kv_page {trial.kv_page}"
        text = f"k {trial.k}, lengths {shown(trial.lengths)}, row stride {trial.stride}{kv}, owner {trial.owner}"
        bits = bits16(trial.logits)
        if bits.shape[1] <= 64:
            text += "".join(f"\nrow {t} bits {shown([hex(b) for b in row.tolist()], 64)}" for t, row in enumerate(bits))
        return text


@dataclass(frozen=True, eq=False)
class ShardTrial:
    """A row of logits spread over ranks."""

    logits: torch.Tensor
    lengths: list[int]
    k: int
    n: int
    world: int
    interleave: int
    planes: int
    with_lengths: bool


class Shards:
    """``local_topk`` and ``merge``: candidate words, owned winners, counts and global positions on every rank."""

    name = "shards"

    def draw(self, seed: int, scope: Scope) -> ShardTrial:
        del scope
        rng, gen = generators(seed)
        world = rng.choice([1, 2, 2, 3, 4, 5, 8, 16])
        interleave = rng.choice([1, 1, 2, 16, 64, 1000])
        k = rng.choice([1, 2, 3, 8, 31, 32, 33, 64, 200, 512])
        n = rng.choice([1, max(1, k // world), min(k, k // world + 3), k, rng.randint(1, k)])
        rows = rng.randint(1, 3)
        far = rng.random() < 0.06
        if far:  # local indices beyond 16 and 17 bits, with winners there
            world, rows, sizes = 1, 1, [rng.choice([65536, 65537, 70000, 140000])]
        else:
            sizes = [rng.choice([0, 1, k, k + 1, rng.randint(0, 40), rng.randint(0, 1200)]) for _ in range(rows)]
        logits = draw_rows(sizes, k, rng, gen)
        if far:
            logits[0, -3:] = 1e38
        # The longest local length needs this many planes; more are allowed, and all ranks agree on them.
        planes = max(1, (max(max(sizes), 1) - 1).bit_length() - 16) + rng.choice([0, 0, 1])
        return ShardTrial(logits, sizes, k, n, world, interleave, planes, rng.random() < 0.5)

    def run(self, trial: ShardTrial, scope: Scope) -> None:
        lengths = torch.tensor(trial.lengths, dtype=torch.int32)
        bits = bits16(trial.logits)
        first: list[torch.Tensor] = []
        second: list[torch.Tensor] = []
        for rank in range(trial.world):
            owned = [brute.owned_positions(n, trial.world, rank, trial.interleave) for n in trial.lengths]
            local_lens = local_seq_lens(lengths, trial.world, rank, trial.interleave)
            require(f"local_seq_lens of rank {rank}", local_lens.numpy(), as_int32([len(o) for o in owned]))
            local = torch.full((len(owned), max(1, *map(len, owned)) + 3), float("inf"), dtype=torch.bfloat16)
            for t, places in enumerate(owned):
                local[t, : len(places)] = trial.logits[t, places]
            for n, kept in ((trial.n, first), (trial.k, second)):
                words, counts = local_topk(local.to(scope.device), local_lens.to(scope.device), n, trial.planes)
                kept.append(words.cpu())
                for t, places in enumerate(owned):
                    want = np.array(brute.candidate_row(bits[t, places], n, trial.planes), dtype=np.int64)
                    got = words[t].cpu().numpy().astype(np.int64) & 0xFFFFFFFF
                    require(f"candidate words of rank {rank}, row {t}, n {n}", got, want)
                    require("count", counts[t : t + 1].cpu().numpy(), as_int32([min(n, len(places))]))
        given = lengths if trial.with_lengths else None
        self._merge(trial, given, torch.stack(first), torch.stack(second), scope.device)

    def _merge(
        self,
        trial: ShardTrial,
        lengths: torch.Tensor | None,
        first: torch.Tensor,
        second: torch.Tensor,
        device: torch.device,
    ) -> None:
        bits, k, world, interleave = bits16(trial.logits), trial.k, trial.world, trial.interleave
        asked = saturated_ranks(first, k, interleave=interleave, planes=trial.planes, seq_lens=lengths)
        for t in range(len(trial.lengths)):
            if int(asked[:, t].sum()) > min(world, k // trial.n):
                require(f"saturated ranks of row {t}", asked[:, t].numpy(), np.zeros(world, dtype=bool))
        second[~asked] = 0x7FFF7FFF  # nobody may read what was not asked for
        first, second = first.to(device), second.to(device)
        lengths = None if lengths is None else lengths.to(device)
        wanted = [brute.select(bits[t, :n], k) for t, n in enumerate(trial.lengths)]
        for rank in range(world):
            won = merge(
                first, k, rank=rank, interleave=interleave, planes=trial.planes, seq_lens=lengths, second=second
            )
            for t, chosen in enumerate(wanted):
                mine = {
                    g: local for local, g in enumerate(brute.owned_positions(trial.lengths[t], world, rank, interleave))
                }
                local = [mine[g] for g in chosen if g in mine]
                where = f"of row {t} on rank {rank}"
                require(
                    f"positions {where}", won.positions[t].cpu().numpy(), as_int32(chosen + [-1] * (k - len(chosen)))
                )
                require(f"winners {where}", won.rows[t].cpu().numpy(), as_int32(local + [-1] * (k - len(local))))
                require(f"count {where}", won.counts[t : t + 1].cpu().numpy(), as_int32([len(local)]))

    def smaller(self, trial: ShardTrial) -> Iterator[ShardTrial]:
        for keep in thirds(len(trial.lengths)):
            yield replace(trial, logits=trial.logits[keep], lengths=[trial.lengths[t] for t in keep])
        for t, length in enumerate(trial.lengths):
            for less in (length // 2, length - 1):
                if 0 <= less < length:
                    yield replace(trial, lengths=[less if i == t else n for i, n in enumerate(trial.lengths)])
        for world in (2, trial.world - 1):
            if 1 < world < trial.world:
                yield replace(trial, world=world)
        if trial.interleave > 1:
            yield replace(trial, interleave=1)
        for k, n in (
            (trial.k // 2, min(trial.n, trial.k // 2)),
            (trial.k - 1, min(trial.n, trial.k - 1)),
            (trial.k, 1),
        ):
            if 1 <= n <= k and (k, n) < (trial.k, trial.n):
                yield replace(trial, k=k, n=n)
        if trial.planes > 1 and max(trial.lengths) <= 1 << (15 + trial.planes):
            yield replace(trial, planes=trial.planes - 1)

    def describe(self, trial: ShardTrial) -> str:
        text = (
            f"world {trial.world}, interleave {trial.interleave}, k {trial.k}, n {trial.n}, planes {trial.planes}, "
            f"lengths {shown(trial.lengths)}, lengths passed to merge: {trial.with_lengths}"
        )
        if max(trial.lengths) <= 64:
            for t, row in enumerate(bits16(trial.logits)):
                text += f"\nrow {t} bits {shown([hex(b) for b in row[: trial.lengths[t]].tolist()], 64)}"
        return text
