"""A step's case, how it is passed to keysieve, and what the brute force says about it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from keysieve.api import score
from keysieve.cache import IndexCache
from keysieve.check import brute
from keysieve.check.trial import Mismatch, Scope, bits16, pool_of
from keysieve.checks import DeviceFaultWarning
from keysieve.spec import PAGE, IndexerSpec
from keysieve.testing import Case
from keysieve.testing.score_bound import logit_bound


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


def score_bits(spec: IndexerSpec, given: tuple[Any, Any, Any, Any, Any], max_len: int) -> NDArray[Any]:
    """The bits of ``score``'s result, uint16 [rows, max_len]; what it warns about is part of the case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeviceFaultWarning)
        got = score(spec, *given, max_len=max_len)
    rows = given[2].shape[0]
    if tuple(got.shape) != (rows, max_len) or got.dtype != torch.bfloat16:
        raise Mismatch(f"score: {got.dtype} {list(got.shape)}, expected bfloat16 {[rows, max_len]}")
    return bits16(got)


@dataclass(frozen=True, eq=False)
class RowBytes:
    """What one row's logits are made of, as numpy arrays, for the brute force."""

    query: NDArray[Any]
    query_scales: NDArray[Any] | None
    weights: NDArray[Any]
    keys: NDArray[Any]
    scales: NDArray[Any]
    outside: NDArray[Any]

    def given(self) -> tuple[Any, Any, Any, Any, Any]:
        """In the order of the brute force's arguments."""
        return self.query, self.query_scales, self.weights, self.keys, self.scales


def row_bytes(trial: StepTrial, lengths: list[int]) -> Iterator[RowBytes]:
    """The bytes of every row; keys on pages outside the pool are marked and have the bytes of slot 0."""
    case = trial.case
    pool, stride = pool_of(case.cache)
    weights = (case.weights.to(torch.bfloat16) if trial.bf16_weights else case.weights).float().numpy()
    pair = case.query if isinstance(case.query, tuple) else (case.query, None)
    codes = pair[0].contiguous().view(torch.uint8).numpy()
    words = None if pair[1] is None else pair[1].contiguous().view(torch.uint8).view(*pair[1].shape, 4).numpy()
    for request in range(case.requests):
        rows = range(request * case.next_n, (request + 1) * case.next_n)
        most = max(lengths[t] for t in rows)
        pages = case.index_table[request].tolist()
        outside = np.array([not 0 <= pages[p // PAGE] < case.cache.shape[0] for p in range(most)], dtype=bool)
        slots = [0 if outside[p] else pages[p // PAGE] * PAGE + p % PAGE for p in range(most)]
        keys, scales = brute.gather_keys(pool, stride, case.spec.key_format, slots)
        for t in rows:
            n = lengths[t]
            q_words = None if words is None else words[t]
            yield RowBytes(codes[t], q_words, weights[t], keys[:n], scales[:n], outside[:n])


def expected_logits(trial: StepTrial, lengths: list[int], numerics: str) -> list[NDArray[Any]]:
    """Per row, the BF16 bits that the contract gives its keys."""
    key_format = trial.case.spec.key_format
    return [
        np.where(row.outside, brute.NAN_BITS, brute.logits(key_format, numerics, *row.given())).astype(np.uint16)
        for row in row_bytes(trial, lengths)
    ]


def require_near(name: str, got: NDArray[Any], row: RowBytes, spec: IndexerSpec, numerics: str) -> None:
    """Hold a GPU's logits (BF16 bits) to the stated bound around the real value; NaN where NaN is due.

    Where sums come near the end of float32's range (or an input is infinite) the order of the additions decides what
    overflows: not checked.
    """
    value, magnitude, largest, nan = (torch.from_numpy(x) for x in brute.real_logits(spec.key_format, *row.given()))
    bound = logit_bound(value, magnitude, spec.heads)
    if spec.key_format == "mxfp4":  # a dot that has its scales in it is a float32, subnormal ones included
        bound = bound + 2.0**-148 * float(np.abs(row.weights.astype(np.float64)).sum()) + spec.heads * 2.0**-150
    if numerics == "bf16":
        bound = bound + magnitude * (spec.heads // 4 + 4) * 2.0**-8
    floats = torch.from_numpy((got.astype(np.uint32) << 16).view(np.float32)).double()
    nan_due = torch.from_numpy(row.outside) | nan
    tame = largest < 2.0**120
    wrong = (nan_due & (torch.from_numpy(got != brute.NAN_BITS))) | (
        ~nan_due & tame & (floats.isnan() | ((floats - value).abs() > bound))
    )
    if bool(wrong.any()):
        at = int(torch.nonzero(wrong)[0])
        raise Mismatch(
            f"{name}[{at}]: got {float(floats[at])!r} (bits {int(got[at]):#06x}), exact {float(value[at])!r}, bound "
            f"{float(bound[at]):.3g} ({int(wrong.sum())} of {len(got)})"
        )
