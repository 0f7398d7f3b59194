"""Random search for a context on which sharded selection differs from the unsharded one.

Every case draws its own world, interleave, N, K, row lengths and score shapes from one seed, shards the context, takes
every rank through ``local_topk``, ``saturated_ranks`` and ``merge`` of :mod:`keysieve.reference`, and compares with the
exact top-k of the whole rows: the same positions in the same order on every rank, every winner on exactly the rank that
holds it, and no more rescued ranks than ``min(W, K // N)``. Nothing is tolerated: integers are equal or they are not.

``python -m keysieve.dcp.fuzz --seeds 0:100000`` runs a range of seeds; a failing seed is a complete description.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from keysieve.reference.dcp_maps import global_positions, local_seq_lens
from keysieve.reference.local_topk import local_topk
from keysieve.reference.merge import Merged, merge, saturated_ranks
from keysieve.reference.topk import topk
from keysieve.spec import candidate_words, default_topn, index_planes

INTERLEAVES = (1, 2, 3, 4, 5, 8, 16, 64)
WORLDS = (1, 2, 2, 2, 3, 3, 4, 4, 4, 5, 6, 7, 8, 8)
"""Mostly small worlds, where one rank can hide many winners; any of 1..16 in a fifth of the cases."""

Scores = np.ndarray[tuple[int], np.dtype[np.float32]]
Shape = Callable[[np.random.Generator, int], Scores]


@dataclass(frozen=True)
class Case:
    """One sharded selection: ``logits`` BF16 ``[rows, width]`` of the whole context, and how it is spread."""

    world: int
    interleave: int
    n: int
    k: int
    lens: torch.Tensor
    logits: torch.Tensor

    def __str__(self) -> str:
        lens = self.lens.tolist()
        return f"W={self.world} S={self.interleave} N={self.n} K={self.k} lengths={lens}"


@dataclass(frozen=True)
class Outcome:
    """What a case showed: the first difference as text (None: equal), and how many (row, rank) were rescued."""

    difference: str | None
    rows: int
    rescued: int


@dataclass(frozen=True)
class Report:
    """Totals of a range of seeds; ``failures`` lists ``(seed, text)``."""

    first: int
    last: int
    rows: int
    rescued_rows: int
    rescued_ranks: int
    seconds: float
    cpu_seconds: float
    failures: tuple[tuple[int, str], ...]


# --- score shapes: ties and plateaus are the normal case --------------------------------------------------------------


def _gaussian(rng: np.random.Generator, n: int) -> Scores:
    return rng.standard_normal(n, dtype=np.float32)


def _few_values(rng: np.random.Generator, n: int) -> Scores:
    return rng.integers(0, 4, n).astype(np.float32)


def _plateau(rng: np.random.Generator, n: int) -> Scores:
    """Zeros after a ReLU, with a few positive scores."""
    scores = np.zeros(n, dtype=np.float32)
    some = rng.random(n) < rng.choice([0.01, 0.05, 0.2])
    scores[some] = rng.random(int(some.sum()), dtype=np.float32) + 0.5
    return scores


def _equal(rng: np.random.Generator, n: int) -> Scores:
    return np.full(n, rng.choice([0.0, 1.0, -2.0]), dtype=np.float32)


def _one_block(rng: np.random.Generator, n: int) -> Scores:
    """High scores in one stretch of positions: with a wide interleave, on one rank."""
    scores = rng.integers(0, 2, n).astype(np.float32)
    at = int(rng.integers(0, n)) if n else 0
    scores[at : at + int(rng.integers(1, 65))] = 3.0
    return scores


def _one_rank(rng: np.random.Generator, n: int) -> Scores:
    """High scores in every p-th position: with interleave 1 and p ranks, all on one rank."""
    scores = rng.integers(0, 2, n).astype(np.float32)
    scores[int(rng.integers(0, 8)) :: int(rng.integers(2, 17))] = 5.0
    return scores


def _ordered(rng: np.random.Generator, n: int) -> Scores:
    ramp = np.arange(n, dtype=np.float32) // int(rng.integers(1, 9))
    return ramp if rng.random() < 0.5 else -ramp


def _special(rng: np.random.Generator, n: int) -> Scores:
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40, -1.0, 3e38], dtype=np.float32)
    return rng.choice(values, n)


SHAPES: tuple[Shape, ...] = (_gaussian, _few_values, _plateau, _equal, _one_block, _one_rank, _ordered, _special)


def _length(rng: np.random.Generator, world: int, k: int, n: int, longest: int) -> int:
    """Mostly random, often at an edge: empty, shorter than the world, around N, K and W * N."""
    edges = (0, -3, 1, world - 1, world, n, k - 1, k, k + 1, world * n, world * n + 1, longest)
    length = int(rng.choice(edges)) if rng.random() < 0.4 else int(rng.integers(0, longest + 1))
    return min(length, longest)


def draw(seed: int, *, longest: int = 320, largest_k: int = 48) -> Case:
    """The case of ``seed``; the bounds are part of its description."""
    rng = np.random.default_rng(seed)
    world = int(rng.integers(1, 17) if rng.random() < 0.2 else rng.choice(WORLDS))
    interleave = int(rng.choice(INTERLEAVES))
    k = int(rng.integers(1, largest_k + 1))
    n = int(rng.choice((1, k, min(k, -(-k // world)), min(k, default_topn(k, world)), int(rng.integers(1, k + 1)))))
    rows = int(rng.integers(1, 3))
    lens = [_length(rng, world, k, n, longest) for _ in range(rows)]
    width = max(1, *lens)
    scores = np.stack([SHAPES[int(rng.integers(len(SHAPES)))](rng, width) for _ in range(rows)])
    return Case(world, interleave, n, k, torch.tensor(lens, dtype=torch.int32), torch.from_numpy(scores).bfloat16())


# --- one case, through the public functions ---------------------------------------------------------------------------


def shard(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's logits by local index, and its lengths."""
    width = torch.tensor([case.logits.shape[1]])
    mine = int(local_seq_lens(width, case.world, rank, case.interleave)[0])
    ids = global_positions(torch.arange(mine), case.world, rank, case.interleave)
    return case.logits[:, ids], local_seq_lens(case.lens, case.world, rank, case.interleave)


def exchange(case: Case) -> list[Merged]:
    """Every rank's winners: first lists, the saturated ranks' second lists, merge."""
    shards = [shard(case, r) for r in range(case.world)]
    planes = index_planes(max(logits.shape[1] for logits, _ in shards))
    words = torch.stack([local_topk(logits, lens, case.n, planes)[0] for logits, lens in shards])
    again = saturated_ranks(words, case.k, interleave=case.interleave, planes=planes, seq_lens=case.lens)
    second = None
    if bool(again.any()):
        # Lists that nobody asked for hold garbage: they must not be read.
        shape = (case.world, case.logits.shape[0], candidate_words(case.k, planes))
        second = torch.full(shape, -1, dtype=torch.int32)
        for rank in again.any(1).nonzero().view(-1).tolist():
            rows = again[rank].nonzero().view(-1)
            logits, lens = shards[rank]
            second[rank, rows] = local_topk(logits[rows], lens[rows], case.k, planes)[0]
    return [
        merge(words, case.k, rank=r, interleave=case.interleave, planes=planes, seq_lens=case.lens, second=second)
        for r in range(case.world)
    ]


def difference(case: Case, merged: list[Merged]) -> str | None:
    """The first way in which the ranks' winners are not the unsharded selection, or None."""
    expected, _ = topk(case.logits, case.lens, case.k)
    holder = torch.where(expected < 0, -1, expected // case.interleave % case.world)
    for rank, won in enumerate(merged):
        if not torch.equal(won.positions, expected):
            return f"rank {rank} of {case}: positions {won.positions.tolist()}, expected {expected.tolist()}"
        owned = holder == rank
        if not torch.equal(won.counts, owned.sum(1, dtype=torch.int32)):
            return f"rank {rank} of {case}: counts {won.counts.tolist()}, expected {owned.sum(1).tolist()}"
        ids = global_positions(won.rows, case.world, rank, case.interleave)
        if not torch.equal(ids[won.rows >= 0], expected[owned]):
            return f"rank {rank} of {case}: owns {ids[won.rows >= 0].tolist()}, expected {expected[owned].tolist()}"
        if not torch.equal(won.rows >= 0, torch.arange(case.k) < won.counts[:, None]):
            return f"rank {rank} of {case}: winners are not compacted: {won.rows.tolist()}"
    most = int(merged[0].saturated.sum(0).max())
    if most > min(case.world, case.k // case.n):
        return f"{case}: {most} ranks rescued, at most min(W, K // N) can be"
    return None


def run_case(case: Case) -> Outcome:
    """Shard, exchange, merge and compare one case."""
    merged = exchange(case)
    saturated = merged[0].saturated
    return Outcome(difference(case, merged), case.logits.shape[0], int(saturated.sum()))


def run(seeds: range, *, longest: int = 320, largest_k: int = 48, seconds: float | None = None) -> Report:
    """Run the cases of ``seeds`` (or as many as fit into ``seconds``)."""
    began, cpu = time.perf_counter(), time.process_time()
    rows = rescued_rows = rescued_ranks = 0
    failures: list[tuple[int, str]] = []
    last = seeds.start - 1
    for seed in seeds:
        if seconds is not None and time.perf_counter() - began > seconds:
            break
        case = draw(seed, longest=longest, largest_k=largest_k)
        merged = exchange(case)
        found = difference(case, merged)
        if found is not None:
            failures.append((seed, found))
        rows += case.logits.shape[0]
        rescued_rows += int(merged[0].saturated.any(0).sum())
        rescued_ranks += int(merged[0].saturated.sum())
        last = seed
    elapsed, busy = time.perf_counter() - began, time.process_time() - cpu
    return Report(
        seeds.start, last, rows, rescued_rows, rescued_ranks, round(elapsed, 1), round(busy, 1), tuple(failures)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of ``python -m keysieve.dcp.fuzz``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="keysieve.dcp.fuzz", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", metavar="A:B", help="seeds A..B-1 (default 0:1000)")
    parser.add_argument("--longest", type=int, default=320, help="longest row, in keys")
    parser.add_argument("--largest-k", type=int, default=48, help="largest K")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON line")
    args = parser.parse_args(argv)
    first, last = (int(part) for part in args.seeds.split(":"))
    torch.set_num_threads(1)
    report = run(range(first, last), longest=args.longest, largest_k=args.largest_k)
    if args.json:
        print(json.dumps(asdict(report)))
    else:
        print(
            f"seeds {report.first}..{report.last}: {report.rows:,} rows, {report.rescued_rows:,} rescued "
            f"({report.rescued_ranks:,} ranks), {report.seconds} s ({report.cpu_seconds} s of cpu), "
            f"{len(report.failures)} differ"
        )
        for seed, text in report.failures[:10]:
            print(f"seed {seed}: {text}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
