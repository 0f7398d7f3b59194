"""Checks of the whole step and of its scores, on cases of :mod:`keysieve.testing`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from keysieve.api import DecodeIndexer
from keysieve.backends import name_for
from keysieve.check import brute
from keysieve.check.hostile import hostile_case
from keysieve.check.oracle import StepTrial, arguments, expected_logits, require_near, row_bytes, score_bits
from keysieve.check.trial import Mismatch, Scope, generators, shown, thirds
from keysieve.check.writers import require
from keysieve.checks import DeviceFault
from keysieve.spec import FORMATS, PAGE, IndexerSpec
from keysieve.testing import Case, draw_case, guarded_rows

BAD_PAGES = (-1, -(2**31), 2**31 - 1)


# --- drawing and shrinking -----------------------------------------------------------------------------------------


def draw_step(seed: int, scope: Scope, hostile: float = 0.2, spoiled: float = 0.25) -> StepTrial:
    """A case of anything, now and then a long one, now and then with page ids or lengths that must be caught."""
    rng, gen = generators(seed)
    given: dict[str, Any] = {"numerics": rng.choice(scope.numerics)}
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
            if set(scope.numerics) != {"bf16"}:  # unless nothing else was asked for
                given["numerics"] = "fp32"
            given.setdefault("next_n", rng.choice([1, 2]))
        case = draw_case(seed, **given, max_context=contexts[size], max_requests=1 if size == "long" else 4)
        case = case if size == "long" else _fewer_rows(case, 8)
    if rng.random() < spoiled and case.index_table.numel():
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
        pair = query if isinstance(query, tuple) else (query,)
        parts = tuple(
            part.view(torch.uint8 if part.dim() == 3 else torch.int32)[:, :heads].contiguous() for part in pair
        )
        weights = case.weights[:, :heads].contiguous()
        yield replace(
            case,
            spec=replace(case.spec, heads=heads),
            query=(parts[0], parts[1]) if len(parts) == 2 else parts[0],
            weights=weights,
        )
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


# --- stages ----------------------------------------------------------------------------------------------------------


class Scores:
    """``score``: logits against the brute force (bit for bit on the CPU), and -inf past every row's length."""

    name = "scores"
    draw = staticmethod(draw_scores)
    smaller = staticmethod(smaller_steps)
    describe = staticmethod(describe_step)

    def run(self, trial: StepTrial, scope: Scope) -> None:
        case, given, _ = arguments(trial, scope)
        max_len = longest(trial.case) + trial.extra
        bits = score_bits(case.spec, given, max_len)
        lengths = usable(replace(trial.case, kv_table=None), max_len)
        for t, length in enumerate(lengths):
            require(f"row {t} past its length {length}", bits[t, length:], np.full(max_len - length, 0xFF80, np.uint16))
        if scope.exact_scores:
            wanted = expected_logits(trial, lengths, case.spec.numerics_on("cpu"))
            for t, length in enumerate(lengths):
                require(f"logits of row {t}", bits[t, :length], wanted[t])
            return
        numerics = case.spec.numerics_on(name_for(scope.backend, scope.device))
        for t, row in enumerate(row_bytes(trial, lengths)):
            require_near(f"logits of row {t}", bits[t, : lengths[t]], row, case.spec, numerics)
        self._same_bits(trial, scope, bits, max_len)

    def _same_bits(self, trial: StepTrial, scope: Scope, bits: NDArray[Any], max_len: int) -> None:
        """Again, and a row on its own: the same bits."""
        case, given, _ = arguments(trial, scope)
        for _ in range(scope.repeats - 1):
            require("logits of a repeated call", score_bits(case.spec, given, max_len), bits)
        for t in range(0, case.rows, max(1, case.rows // 3)):
            alone, alone_given, _ = arguments(replace(trial, case=row_alone(trial.case, t)), scope)
            require(f"logits of row {t} alone", score_bits(alone.spec, alone_given, max_len)[0], bits[t])


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
        _forget_faults(indexer)
        out = guarded_rows(rows, topk, device=scope.device)
        where = guarded_rows(rows, topk, device=scope.device)
        counts = torch.full((rows,), 77, dtype=torch.int32, device=scope.device)
        indexer(*given, **paging, positions=where.view, out=out.view, counts=counts)
        out.assert_canaries()
        where.assert_canaries()
        lengths = usable(trial.case, limit)
        self._faults(trial, indexer, lengths)
        wanted = self._logits(trial, scope, lengths, limit)
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
        for _ in range(scope.repeats - 1):
            again = indexer(*given, **paging, positions=True)
            assert again.positions is not None
            require("rows of a repeated step", again.rows.cpu().numpy(), out.view.cpu().numpy())
            require("positions of a repeated step", again.positions.cpu().numpy(), where.view.cpu().numpy())

    def _logits(self, trial: StepTrial, scope: Scope, lengths: list[int], limit: int) -> list[NDArray[Any]]:
        """The logits to select from: on the CPU the brute force's, on a GPU the device's own."""
        if scope.exact_scores:
            return expected_logits(trial, lengths, trial.case.spec.numerics_on("cpu"))
        case, given, _ = arguments(trial, scope)
        bits = score_bits(case.spec, given, limit)
        return [bits[t, :length] for t, length in enumerate(lengths)]

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


def _forget_faults(indexer: DecodeIndexer) -> None:
    """On a GPU an indexer also reports what stateless calls met before; those were cases of their own."""
    with contextlib.suppress(DeviceFault):
        indexer.check()


def as_int32(values: list[int]) -> NDArray[Any]:
    return np.array(values, dtype=np.int64).astype(np.int32)
