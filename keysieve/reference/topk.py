"""Exact selection: the first keys of a row by (key16 descending, position ascending), in ascending position.

A row selects ``min(max(length, 0), k)`` keys. The threshold (the k-th best key16) comes from a histogram of the
65,536 possible values; everything above it is taken, and the rest of the places go to the lowest positions among the
keys that equal it. Nothing here depends on the order in which anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keysieve.checks import refuse, require_int, require_tensor
from keysieve.inputs import Placement, check_placement
from keysieve.reference.faults import Faults, usable_lengths
from keysieve.reference.keys import key16
from keysieve.reference.rows import physical_rows
from keysieve.spec import MAX_TOPK

MAX_WIDTH = 2**31 - 64
"""Keys of a row of the public top-k at most: positions, and the ends of blocks' parts of a row, are 32-bit numbers."""

_SHORT = 16384
"""Below this many keys an order statistic of the keys themselves is cheaper than a histogram of all key16 values."""


def threshold16(keys: torch.Tensor, k: int) -> int:
    """The k-th largest of ``keys`` (int32 ``[n]`` of key16, ``1 <= k <= n``)."""
    n = keys.numel()
    if n < _SHORT:
        return int(torch.kthvalue(keys, n - k + 1).values)
    histogram = torch.bincount(keys, minlength=1 << 16)
    # below[v] counts keys <= v; the k-th largest is the first v with at least n - k + 1 keys at or below it.
    below = histogram.cumsum(0)
    return int(torch.searchsorted(below, n - k + 1))


def select_positions(keys: torch.Tensor, k: int) -> torch.Tensor:
    """int64 ``[min(n, k)]``: ascending positions of the best ``k`` of ``keys`` (int32 ``[n]`` of key16).

    Equal keys: the lower position is better.
    """
    n = keys.numel()
    if n <= k:
        return torch.arange(n, device=keys.device)
    threshold = threshold16(keys, k)
    taken = keys > threshold
    ties = torch.nonzero(keys == threshold).view(-1)
    taken[ties[: k - int(taken.sum())]] = True
    return torch.nonzero(taken).view(-1)


def select_row_(logits: torch.Tensor, length: int, k: int, out: torch.Tensor) -> int:
    """Select from one row into ``out`` (int32 ``[>= k]``): ascending positions, then -1. Returns the count.

    Args:
        logits: bfloat16 ``[>= length]``; what lies past ``length`` is not read.
        length: keys of the row; 0 or less selects nothing.
        k: places.
        out: int32, at least ``k`` long; every place is written.
    """
    count = min(max(length, 0), k)
    if length > k:
        out[:count] = select_positions(key16(logits[:length]), k)
    else:
        out[:count] = torch.arange(count, dtype=torch.int32, device=out.device)
    out[count:] = -1
    return count


def select(logits: torch.Tensor, lengths: Sequence[int], k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions int32 ``[rows, k]`` and counts int32 ``[rows]`` of BF16 ``logits [rows, any]``, no checks."""
    rows = len(lengths)
    positions = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    counts = [select_row_(logits[t], lengths[t], k, positions[t]) for t in range(rows)]
    return positions, torch.tensor(counts, dtype=torch.int32, device=logits.device)


@dataclass(frozen=True)
class TopkCall:
    """A checked call of the public top-k.

    Attributes:
        logits: bfloat16 ``[rows, width]``, unit inner stride.
        lengths: int32 or int64 ``[rows]``.
        k: keys to select per row.
        place: where selected keys lie; without a KV table the output is positions.
        owner: integer ``[rows]``, the KV table row of every row, or None: rows spread evenly.
    """

    logits: torch.Tensor
    lengths: torch.Tensor
    k: int
    place: Placement
    owner: torch.Tensor | None


def check_topk(
    logits: Any, lengths: Any, k: Any, kv_table: Any, kv_page: Any, block_rows: Any, row_request: Any
) -> TopkCall:
    """Check the arguments of the public top-k."""
    remedy = "Round them to BF16 first (tensor.to(torch.bfloat16)); keys are ordered by their BF16 value."
    logits = require_tensor(
        "logits", logits, dtypes=(torch.bfloat16,), shape=(None, None), unit_inner=True, remedy=remedy
    )
    rows, device = logits.shape[0], logits.device
    if logits.shape[1] > MAX_WIDTH:
        got, accepted = f"rows of {logits.shape[1]} keys", f"at most {MAX_WIDTH}"
        refuse("logits", got=got, accepted=accepted, remedy="Select from parts of a row and merge them.")
    places = require_int("k", k, 1, MAX_TOPK, "Select between 1 and 4096 keys per row.")
    kinds = (torch.int32, torch.int64)
    if isinstance(lengths, torch.Tensor) and lengths.dim() == 2 and lengths.numel() == rows:
        lengths = lengths.reshape(-1)
    lens = require_tensor("lengths", lengths, dtypes=kinds, shape=(rows,), device=device)
    table_rows = kv_table.shape[0] if isinstance(kv_table, torch.Tensor) and kv_table.dim() else rows
    place = check_placement(
        kv_table, kv_page, block_rows, rows=table_rows, requests=table_rows, next_n=1, device=device
    )
    if row_request is None:
        if rows % table_rows if table_rows else rows:
            refuse(
                "kv_table",
                got=f"{table_rows} rows for {rows} rows of logits",
                accepted="a number of rows that divides the rows of logits",
                remedy="Pass row_request [rows], which names the table row of every row.",
            )
        return TopkCall(logits, lens, places, place, None)
    if kv_table is None:
        remedy = "Pass kv_table too, or leave row_request out."
        refuse("row_request", got="a tensor without kv_table", accepted="None", remedy=remedy)
    owner = require_tensor("row_request", row_request, dtypes=kinds, shape=(rows,), device=device)
    return TopkCall(logits, lens, places, place, owner)


@torch.no_grad()
def topk_checked(call: TopkCall, faults: Faults) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions or physical rows int32 ``[rows, k]`` and counts int32 ``[rows]`` of a checked call on the CPU."""
    limits = [(call.logits.shape[1], "the logits' row")]
    if call.place.table_keys is not None:
        limits.append((call.place.table_keys, call.place.table_limit()))
    usable = usable_lengths(call.lengths.tolist(), limits, faults)
    owner, table = call.owner, call.place.kv_table
    if owner is not None and table is not None:
        _empty_unowned(usable, owner, table.shape[0], faults)
        owner = owner.clamp(0, max(table.shape[0] - 1, 0))
    positions, counts = select(call.logits, usable, call.k)
    if table is None:
        return positions, counts
    place = call.place
    placed = physical_rows(positions, table, kv_page=place.kv_page, block_rows=place.block_rows, row_request=owner)
    return placed, counts


def _empty_unowned(lengths: list[int], owner: torch.Tensor, requests: int, faults: Faults) -> None:
    """Empty the rows whose ``row_request`` names no row of the KV block table, with a fault."""
    for t, request in enumerate(owner.tolist()):
        if lengths[t] > 0 and not 0 <= request < requests:
            faults.add(f"row {t}: row_request {request} is outside the {requests} rows of kv_table; it was left empty")
            lengths[t] = 0


def topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    kv_table: torch.Tensor | None = None,
    kv_page: int | None = None,
    block_rows: int | None = None,
    row_request: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    faults: Faults | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact top-k of BF16 rows, on the CPU; see :func:`keysieve.topk` for the arguments.

    Returns:
        int32 ``[rows, k]``: ascending positions, or with ``kv_table`` their physical rows, then -1; and counts.
    """
    call = check_topk(logits, lengths, k, kv_table, kv_page, block_rows, row_request)
    found = Faults() if faults is None else faults
    chosen, number = topk_checked(call, found)
    if faults is None:
        found.warn()
    return chosen if out is None else out.copy_(chosen), number if counts is None else counts.copy_(number)
