"""Checks of the whole step and of its scores, on cases of :mod:`keysieve.testing`."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from keysieve.api import DecodeIndexer, score
from keysieve.backends import DeviceFaultWarning
from keysieve.cache import IndexCache
from keysieve.check import brute
from keysieve.check.hostile import hostile_case
from keysieve.check.trial import Mismatch, Scope, bits16, generators, pool_of, shown, thirds
from keysieve.check.writers import require
from keysieve.checks import DeviceFault
from keysieve.spec import FORMATS, PAGE, IndexerSpec
from keysieve.testing import Case, draw_case, guarded_rows

BAD_PAGES = (-1, -(2**31), 2**31 - 1)


@dataclass(frozen=True, eq=False)
class StepTrial:
    """A case and how it is passed.

    Attributes:
        case: the tensors, on the CPU.
        lengths_2d: pass lengths as [requests, next_n].
        expanded: pass the tables with one row per query row (needs ``lengths_2d`` if next_n > 1).
        bf16_weights: pass BF16 weights.
        int64_lengths: pass int64 lengths.
        extra: columns of ``max_len`` (score) or keys of ``max_context`` (step) past the longest row.
    """

    case: Case
    lengths_2d: bool = False
    expanded: bool = False
    bf16_weights: bool = False
    int64_lengths: bool = False
    extra: int = 0


# --- drawing and shrinking -----------------------------------------------------------------------------------------


def draw_step(seed: int, scope: Scope, hostile: float = 0.2) -> StepTrial:
    """A case of anything, now and then a long one, now and then with page ids or lengths that must be caught."""
    rng, gen = generators(seed)
    given: dict[str, Any] = {"numerics": rng.choice(["fp32", "fp32", "bf16"])}
    if scope.specs is not None:
        given["key_format"], given["heads"], given["next_n"] = rng.choice(scope.specs)
    if rng.random() < hostile:
        case = _draw_hostile(rng, seed, given)
    else:
        # BF16 arithmetic on unbounded integers is slow; contexts past 16384 keys cross the cpu backend's chunks.
        size = rng.choices(["small", "medium", "long"], [0.8, 0.17, 0.03])[0]
        contexts = {"small": 300, "medium": 2500, "long": 40000}
        if size != "small" and scope.specs is None:
            given["heads"] = 8
        if size == "long":
            given["numerics"] = "fp32"
            given.setdefault("next_n", rng.choice([1, 2]))
        case = draw_case(seed, **given, max_context=contexts[size], max_requests=1 if size == "long" else 4)
        case = case if size == "long" else _fewer_rows(case, 8)
    if rng.random() < 0.25 and case.index_table.numel():
        case = _spoil(case, rng, gen)
    return StepTrial(
        case,
        lengths_2d=rng.random() < 0.3,
        expanded=rng.random() < 0.3,
        bf16_weights=rng.random() < 0.3,
        int64_lengths=rng.random() < 0.2,
        extra=rng.choice([0, 0, 1, 63, 700]),
    )


def _draw_hostile(rng: random.Random, seed: int, given: dict[str, Any]) -> Case:
    """A case that is hostile to arithmetic, up to a few pages a row."""
    spec = IndexerSpec(
        heads=given.get("heads") or rng.choice([8, 8, 16, 32, 64]),
        topk=rng.choice([1, 8, 33, 64, 100]),
        key_format=given.get("key_format") or rng.choice(list(FORMATS)),
        numerics=given["numerics"],
    )
    next_n = given.get("next_n") or rng.choice([1, 1, 2, 3])
    lengths = [
        [rng.choice([0, 1, 64, 65, rng.randint(1, 200)]) for _ in range(next_n)] for _ in range(rng.randint(1, 2))
    ]
    stride = rng.choice([None, spec.format.page_bytes + 16 * rng.randint(0, 40)])
    return hostile_case(spec, lengths, next_n, seed, stride)


def draw_scores(seed: int, scope: Scope) -> StepTrial:
    """:func:`draw_step`, most of them hostile to arithmetic."""
    return draw_step(seed, scope, hostile=0.7)


def _spoil(case: Case, rng: random.Random, gen: torch.Generator) -> Case:
    """Page ids outside the pool in columns that are needed, or lengths beyond the table."""
    if rng.random() < 0.7:
        table = case.index_table.clone()
        wrong = torch.rand(table.shape, generator=gen) < 0.2
        bad = torch.tensor([*BAD_PAGES, case.cache.shape[0]], dtype=torch.int32)
        table[wrong] = bad[torch.randint(0, len(bad), table.shape, generator=gen)][wrong]
        return replace(case, index_table=table)
    lengths = case.seq_lens.clone()
    lengths[rng.randrange(case.rows)] = rng.choice([case.index_table.shape[1] * PAGE + 1, 2**31 - 1])
    return replace(case, seq_lens=lengths)


def usable(case: Case, limit: int) -> list[int]:
    """Keys that each row really has: a length beyond ``limit`` or the tables makes its row empty."""
    limits = [limit, case.index_table.shape[1] * PAGE]
    if case.kv_table is not None:
        limits.append(case.kv_table.shape[1] * case.kv_page)
    return [length if 0 < length <= min(limits) else 0 for length in case.lengths]


def longest(case: Case) -> int:
    """The longest length that the index table can hold, at least 1."""
    return max([1, *(n for n in case.lengths if n <= case.index_table.shape[1] * PAGE)])


def keep_requests(case: Case, keep: list[int]) -> Case:
    """The case with only the requests ``keep``."""
    rows = [r * case.next_n + j for r in keep for j in range(case.next_n)]
    return replace(
        _with_rows(case, rows),
        index_table=case.index_table[keep],
        kv_table=None if case.kv_table is None else case.kv_table[keep],
    )


def _with_rows(case: Case, rows: list[int]) -> Case:
    query = case.query
    picked = (query[0][rows], query[1][rows]) if isinstance(query, tuple) else query.view(torch.uint8)[rows]
    return replace(case, query=picked, weights=case.weights[rows], seq_lens=case.seq_lens[rows], logits=None)


def row_alone(case: Case, row: int) -> Case:
    """One row of the case as a batch of its own, next_n 1."""
    alone = _with_rows(case, [row])
    request = row // case.next_n
    kv_table = None if case.kv_table is None else case.kv_table[request : request + 1]
    return replace(alone, next_n=1, index_table=case.index_table[request : request + 1], kv_table=kv_table)


def _fewer_rows(case: Case, rows: int) -> Case:
    return keep_requests(case, list(range(max(1, min(case.requests, rows // case.next_n)))))


def smaller_cases(case: Case) -> Iterator[Case]:
    """Simpler variants of a case, the boldest first."""
    for keep in thirds(case.requests):
        yield keep_requests(case, keep)
    if case.next_n > 1:
        for row in range(case.rows if case.rows <= 8 else 1):
            yield row_alone(case, row)
    if any(n > 1 for n in case.lengths):
        yield replace(case, seq_lens=case.seq_lens // 2, logits=None)
    for row, length in enumerate(case.lengths if case.rows <= 16 else []):
        for less in (0, length // 2, length - PAGE, length - 1):
            if 0 <= less < length:
                lengths = case.seq_lens.clone()
                lengths[row] = less
                yield replace(case, seq_lens=lengths, logits=None)
    topk = case.spec.topk
    for fewer in (1, topk // 2, topk - 1):
        if 1 <= fewer < topk:
            yield replace(case, spec=replace(case.spec, topk=fewer))
    if case.kv_table is not None:
        yield replace(case, kv_table=None)
    if case.spec.heads > 8:
        heads = case.spec.heads // 2
        query = case.query
        fewer_q = (query[0][:, :heads], query[1][:, :heads]) if isinstance(query, tuple) else query[:, :heads]
        yield replace(case, spec=replace(case.spec, heads=heads), query=fewer_q, weights=case.weights[:, :heads])
    if case.cache.shape[0] > 1 and not case.cache.is_contiguous():
        yield replace(case, cache=case.cache.contiguous())


def smaller_steps(trial: StepTrial) -> Iterator[StepTrial]:
    for case in smaller_cases(trial.case):
        yield replace(trial, case=case)
    for name in ("lengths_2d", "expanded", "bf16_weights", "int64_lengths", "extra"):
        if getattr(trial, name):
            yield replace(trial, **{name: type(getattr(trial, name))()})


def describe_step(trial: StepTrial) -> str:
    case = trial.case
    ways = [n for n in ("lengths_2d", "expanded", "bf16_weights", "int64_lengths") if getattr(trial, n)]
    kv = "" if case.kv_table is None else f", kv_page {case.kv_page}, block_rows {case.block_rows}"
    return (
        f"{case.spec}\n{case.requests} requests x {case.next_n} rows, seq_lens {shown(case.lengths)}, pool "
        f"{case.cache.shape[0]} pages of stride {case.cache.stride(0)}, table {list(case.index_table.shape)}{kv}, "
        f"extra {trial.extra}{', ' if ways else ''}{', '.join(ways)}\nfirst table row "
        f"{shown(case.index_table[0].tolist() if case.requests else [])}\ndrawn as {case.recipe}"
    )


# --- arguments and oracle ------------------------------------------------------------------------------------------


def arguments(trial: StepTrial, scope: Scope) -> tuple[Case, tuple[Any, Any, Any, Any, Any], dict[str, Any]]:
    """The case on the device, and the positional and paging arguments of a call."""
    case = trial.case.to(scope.device)
    weights = case.weights.to(torch.bfloat16) if trial.bf16_weights else case.weights
    lengths = case.seq_lens.to(torch.int64) if trial.int64_lengths else case.seq_lens
    table, paging = case.index_table, case.paging()
    if trial.lengths_2d:
        lengths = lengths.view(case.requests, case.next_n)
    if trial.expanded and (trial.lengths_2d or case.next_n == 1):
        table = table.repeat_interleave(case.next_n, 0)
        if paging:
            paging["kv_table"] = paging["kv_table"].repeat_interleave(case.next_n, 0)
    return case, (case.query, IndexCache(case.spec, case.cache), weights, lengths, table), paging


def expected_logits(trial: StepTrial, lengths: list[int], numerics: str) -> list[NDArray[Any]]:
    """Per row, the BF16 bits that the contract gives its keys."""
    case = trial.case
    pool, stride = pool_of(case.cache)
    weights = (case.weights.to(torch.bfloat16) if trial.bf16_weights else case.weights).float().numpy()
    pair = case.query if isinstance(case.query, tuple) else (case.query, None)
    codes = pair[0].contiguous().view(torch.uint8).numpy()
    words = None if pair[1] is None else pair[1].contiguous().view(torch.uint8).view(*pair[1].shape, 4).numpy()
    wanted = []
    for request in range(case.requests):
        rows = range(request * case.next_n, (request + 1) * case.next_n)
        most = max(lengths[t] for t in rows)
        pages = case.index_table[request].tolist()
        outside = np.array([not 0 <= pages[p // PAGE] < case.cache.shape[0] for p in range(most)], dtype=bool)
        slots = [0 if outside[p] else pages[p // PAGE] * PAGE + p % PAGE for p in range(most)]
        keys, scales = brute.gather_keys(pool, stride, case.spec.key_format, slots)
        for t in rows:
            n, q_words = lengths[t], None if words is None else words[t]
            bits = brute.logits(case.spec.key_format, numerics, codes[t], q_words, weights[t], keys[:n], scales[:n])
            wanted.append(np.where(outside[:n], brute.NAN_BITS, bits).astype(np.uint16))
    return wanted


class Scores:
    """``score``: logits against the brute force (bit for bit on the CPU), and -inf past every row's length."""

    name = "scores"
    draw = staticmethod(draw_scores)
    smaller = staticmethod(smaller_steps)
    describe = staticmethod(describe_step)

    def run(self, trial: StepTrial, scope: Scope) -> None:
        case, given, _ = arguments(trial, scope)
        max_len = longest(trial.case) + trial.extra
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeviceFaultWarning)
            got = score(case.spec, *given, max_len=max_len)
        if tuple(got.shape) != (case.rows, max_len) or got.dtype != torch.bfloat16:
            raise Mismatch(f"score: {got.dtype} {list(got.shape)}, expected bfloat16 {[case.rows, max_len]}")
        lengths = usable(replace(trial.case, kv_table=None), max_len)
        bits = bits16(got)
        for t, length in enumerate(lengths):
            require(f"row {t} past its length {length}", bits[t, length:], np.full(max_len - length, 0xFF80, np.uint16))
        wanted = expected_logits(trial, lengths, case.spec.numerics_on("cpu"))
        for t, length in enumerate(lengths):
            require(f"logits of row {t}", bits[t, :length], wanted[t])


class Steps:
    """``DecodeIndexer``: rows, counts and positions of a whole step, its guards, and its fault report."""

    name = "steps"
    draw = staticmethod(draw_step)
    smaller = staticmethod(smaller_steps)
    describe = staticmethod(describe_step)

    def run(self, trial: StepTrial, scope: Scope) -> None:
        case, given, paging = arguments(trial, scope)
        topk, rows = case.spec.topk, case.rows
        limit = longest(trial.case) + trial.extra
        indexer = DecodeIndexer(case.spec, rows, limit, next_n=case.next_n, device=scope.device, backend=scope.backend)
        out = guarded_rows(rows, topk, device=scope.device)
        where = guarded_rows(rows, topk, device=scope.device)
        counts = torch.full((rows,), 77, dtype=torch.int32, device=scope.device)
        indexer(*given, **paging, positions=where.view, out=out.view, counts=counts)
        out.assert_canaries()
        where.assert_canaries()
        lengths = usable(trial.case, limit)
        wanted = expected_logits(trial, lengths, case.spec.numerics_on(indexer.backend))
        for t, length in enumerate(lengths):
            chosen = brute.select(wanted[t], topk)
            tail = [-1] * (topk - len(chosen))
            placed = chosen
            if trial.case.kv_table is not None:
                table = trial.case.kv_table[t // case.next_n].tolist()
                placed = brute.physical(chosen, table, case.kv_page, case.block_rows)
            require(f"positions of row {t} of {length} keys", where.view[t].cpu().numpy(), as_int32(chosen + tail))
            require(f"rows of row {t}", out.view[t].cpu().numpy(), as_int32(placed + tail))
            require(f"counts[{t}]", counts[t : t + 1].cpu().numpy(), as_int32([len(chosen)]))
        self._faults(trial, indexer, lengths)

    def _faults(self, trial: StepTrial, indexer: DecodeIndexer, lengths: list[int]) -> None:
        """The indexer reports rows that were left empty and pages outside the pool, and nothing else."""
        case = trial.case
        emptied = any(n > 0 and used == 0 for n, used in zip(case.lengths, lengths, strict=True))
        outside = (case.index_table < 0) | (case.index_table >= case.cache.shape[0])
        read = torch.zeros_like(outside)
        for request in range(case.requests):
            most = max(lengths[request * case.next_n : (request + 1) * case.next_n])
            if most > case.spec.topk:  # a request whose rows all fit topk is not scored
                read[request, : -(-most // PAGE)] = True
        expected = emptied or bool((outside & read).any())
        try:
            indexer.check()
        except DeviceFault as fault:
            if not expected:
                raise Mismatch(f"check() reports a fault that is none: {fault}") from None
        else:
            if expected:
                raise Mismatch("check() reports nothing, though a row was left empty or a page id is out of range")


def as_int32(values: list[int]) -> NDArray[Any]:
    return np.array(values, dtype=np.int64).astype(np.int32)
