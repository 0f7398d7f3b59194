"""Merging the candidate rows of all ranks: which winners lie here, and which ranks must be asked again.

The union over ranks of what :func:`merge` returns is what tensor parallelism selects on the unsharded context: the
first K keys by (key16 descending, global position ascending), bit for bit.

One round is not always enough. A rank offers N < K candidates; if its list is full and *every* entry of it is among
the K best of all that was offered, a key it did not offer may belong there too: it is *saturated*. Any other rank's
hidden keys rank below one of its own rejected entries, so none of them can win. Saturated ranks, at most ``K // N`` of
them, offer their local top-K in a second round, and the K best of (unsaturated ranks' first lists, saturated ranks'
second lists) is the answer. Asking only ranks whose entries all lie *strictly* above the K-th score is not enough: with
W = 2, S = 1, N = 1, K = 2 and scores 1, 0, 1, 1 it would miss position 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from keysieve.checks import refuse, require_int, require_tensor
from keysieve.inputs import check_placement
from keysieve.reference.dcp_maps import check_sharding, global_positions, lens_of_all_ranks
from keysieve.reference.local_topk import require_candidates, require_planes, unpack_candidates
from keysieve.reference.rows import physical_rows
from keysieve.spec import MAX_TOPK

_ID_BITS = 40
_ID_MAX = (1 << _ID_BITS) - 1


class Merged(NamedTuple):
    """The winners of every row, as one rank sees them.

    Attributes:
        rows: int32 ``[rows, k]``: the winners this rank owns, ascending, then -1: local indices, or physical rows of
            this rank's KV cache if a ``kv_table`` was given.
        counts: int32 ``[rows]``: how many those are.
        positions: int32 ``[rows, k]``: global positions of all winners, ascending, then -1; the same on every rank.
        saturated: bool ``[world, rows]``: the ranks whose second lists were needed.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor
    saturated: torch.Tensor


def merge(
    words: torch.Tensor | list[torch.Tensor],
    k: int,
    *,
    rank: int,
    interleave: int = 1,
    planes: int = 1,
    seq_lens: torch.Tensor | None = None,
    second: torch.Tensor | list[torch.Tensor] | None = None,
    kv_table: torch.Tensor | None = None,
    kv_page: int | None = None,
    block_rows: int | None = None,
    row_request: torch.Tensor | None = None,
) -> Merged:
    """The winners of every row that ``rank`` owns, from the candidate rows of all ranks.

    Args:
        words: int32 ``[world, rows, n + planes * ceil(n / 32)]`` (or a list of ``world`` tensors): the first lists.
        k: keys to select per row, 1..4096; ``n <= k``.
        rank: the rank whose winners are returned, 0..world-1.
        interleave: consecutive positions on one rank (S).
        planes: index planes of the candidate rows.
        seq_lens: integer ``[rows]`` or ``[requests, next_n]``, global lengths. With them a rank whose full list is all
            it has is known not to be saturated, and lists that do not fit the lengths are refused.
        second: int32 ``[world, rows, k + planes * ceil(k / 32)]``: the local top-K lists of the saturated ranks (see
            :func:`saturated_ranks`); what the other ranks' entries hold is not read.
        kv_table, kv_page, block_rows, row_request: this rank's block table, as for ``topk``: physical rows are
            returned instead of local indices.

    Raises:
        KeysieveError: a wrong shape or dtype; lists longer than k; a saturated rank without its second list; a table
            without a block for a winner.
    """
    words = require_candidates("words", words)
    world, rows, _ = words.shape
    require_int("k", k, 1, MAX_TOPK, "Select fewer keys per row.")
    check_sharding(world, rank, interleave)
    require_planes(planes)
    order, n = _orders(words, interleave, planes)
    if n > k:
        refuse("words", got=f"lists of {n} candidates for k={k}", accepted="n <= k", remedy="Offer at most k a rank.")
    if seq_lens is not None:
        seq_lens = _lengths(seq_lens, rows)
        _check_lists("words", order, seq_lens, interleave, n, order.new_ones((rows, world), dtype=torch.bool))
    saturated = _saturated(order, k, n, seq_lens, interleave)
    if bool(saturated.any()):
        order = _with_second(order, saturated, second, k, interleave, planes, seq_lens)
    won = _chosen(order, k)
    ids = _ID_MAX - (order & _ID_MAX)
    positions = _compact(torch.where(won, ids, _ID_MAX).flatten(1), k)
    # Order within a rank is the same by local index and by position, so the owned positions ascend as well.
    owned = _compact(torch.where(won[:, rank], ids[:, rank], _ID_MAX), k).to(torch.int64)
    local = torch.where(owned < 0, -1, owned // (interleave * world) * interleave + owned % interleave)
    counts = won[:, rank].sum(-1, dtype=torch.int32)
    out = local.to(torch.int32)
    if kv_table is None and row_request is not None:
        remedy = "Pass kv_table too, or leave row_request out."
        refuse("row_request", got="a tensor without kv_table", accepted="None", remedy=remedy)
    if kv_table is not None:
        out = _placed(out, kv_table, kv_page, block_rows, row_request)
    return Merged(out, counts, positions, saturated.T.contiguous())


def saturated_ranks(
    words: torch.Tensor | list[torch.Tensor],
    k: int,
    *,
    interleave: int = 1,
    planes: int = 1,
    seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """bool ``[world, rows]``: the ranks that must offer their local top-k of a row before it can be merged.

    Every rank computes the same from the same words, so nobody has to be told. Arguments and refusals as for
    :func:`merge`, except that the lists are not held to the lengths.
    """
    words = require_candidates("words", words)
    require_int("k", k, 1, MAX_TOPK, "Select fewer keys per row.")
    check_sharding(words.shape[0], 0, interleave)
    require_planes(planes)
    order, n = _orders(words, interleave, planes)
    if n > k:
        refuse("words", got=f"lists of {n} candidates for k={k}", accepted="n <= k", remedy="Offer at most k a rank.")
    if seq_lens is not None:
        seq_lens = _lengths(seq_lens, words.shape[1])
    return _saturated(order, k, n, seq_lens, interleave).T.contiguous()


def _lengths(seq_lens: torch.Tensor, rows: int) -> torch.Tensor:
    """``seq_lens`` as integers ``[rows]``, or a refusal; nothing is broadcast."""
    if isinstance(seq_lens, torch.Tensor) and seq_lens.dim() == 2 and seq_lens.numel() == rows:
        seq_lens = seq_lens.reshape(-1)
    return require_tensor("seq_lens", seq_lens, dtypes=(torch.int32, torch.int64), shape=(rows,))


def _orders(words: torch.Tensor, interleave: int, planes: int) -> tuple[torch.Tensor, int]:
    """int64 ``[rows, world, n]``, larger is better and no two live keys are equal; 0 for an empty entry."""
    keys, local = unpack_candidates(words, planes)
    world = words.shape[0]
    ranks = torch.arange(world, device=words.device).view(world, 1, 1)
    ids = global_positions(local, world, ranks, interleave)
    order = torch.where(keys > 0, keys << _ID_BITS | (_ID_MAX - ids), 0)
    return order.transpose(0, 1).contiguous(), keys.shape[-1]


def _chosen(order: torch.Tensor, k: int) -> torch.Tensor:
    """bool, the shape of ``order [rows, world, n]``: the k best entries of each row (all, if there are fewer)."""
    flat = order.flatten(1)
    if flat.shape[1] <= k:
        return order > 0
    threshold = flat.topk(k, dim=1).values[:, -1].clamp_min(1)
    return order >= threshold.view(-1, 1, 1)


def _saturated(order: torch.Tensor, k: int, n: int, seq_lens: torch.Tensor | None, interleave: int) -> torch.Tensor:
    """bool ``[rows, world]``: full lists, shorter than k and than the rank's keys, that were chosen entirely."""
    rows, world, _ = order.shape
    if n >= k:
        return torch.zeros(rows, world, dtype=torch.bool, device=order.device)
    # An empty entry is never chosen, so "all chosen" implies "full".
    saturated = _chosen(order, k).all(-1)
    if seq_lens is not None:
        saturated &= lens_of_all_ranks(seq_lens, world, interleave).to(order.device) > n
    return saturated


def _with_second(
    order: torch.Tensor,
    saturated: torch.Tensor,
    second: torch.Tensor | list[torch.Tensor] | None,
    k: int,
    interleave: int,
    planes: int,
    seq_lens: torch.Tensor | None,
) -> torch.Tensor:
    """``order`` with the saturated ranks' lists replaced by their local top-k: int64 ``[rows, world, k]``."""
    rows, world, n = order.shape
    if second is None:
        row, rank = (int(i) for i in saturated.nonzero()[0])
        refuse(
            "second",
            got=f"None, but {int(saturated.any(1).sum())} row(s) have saturated ranks (row {row}: rank {rank})",
            accepted="the local top-k candidate rows of the saturated ranks",
            remedy="Offer local_topk(logits, local_lens, k) of the rows that saturated_ranks() names, or use n = k.",
        )
    second = require_candidates("second", second)
    again, entries = _orders(second, interleave, planes)
    if again.shape[:2] != (rows, world) or entries != k:
        refuse(
            "second",
            got=f"{list(second.shape)} ({entries} entries)",
            accepted=f"[{world}, {rows}, words] with {k} entries a row",
            remedy="Make the second lists with n = k for the same rows.",
        )
    if seq_lens is not None:
        _check_lists("second", again, seq_lens, interleave, k, saturated)
    padded = torch.nn.functional.pad(order, (0, k - n))
    return torch.where(saturated.unsqueeze(-1), again, padded)


def _placed(
    local: torch.Tensor,
    kv_table: torch.Tensor,
    kv_page: int | None,
    block_rows: int | None,
    row_request: torch.Tensor | None,
) -> torch.Tensor:
    """Physical rows of ``local [rows, k]`` in this rank's KV cache, or a refusal of the table."""
    rows, device = local.shape[0], local.device
    requests = kv_table.shape[0] if isinstance(kv_table, torch.Tensor) and kv_table.dim() else rows
    place = check_placement(kv_table, kv_page, block_rows, rows=requests, requests=requests, next_n=1, device=device)
    if row_request is not None:
        kinds = (torch.int32, torch.int64)
        row_request = require_tensor("row_request", row_request, dtypes=kinds, shape=(rows,), device=device)
        inside = bool(((row_request >= 0) & (row_request < requests)).all())
    else:
        inside = rows % requests == 0 if requests else rows == 0
    columns = 0 if place.table_keys is None else place.table_keys
    farthest = int(local.max()) if local.numel() else -1
    if not inside or farthest >= columns:
        refuse(
            "kv_table",
            got=f"{requests} rows of {columns} keys, for {rows} rows whose winners reach local index {farthest}",
            accepted="a table row for every row (row_request names them) and a block for every winner",
            remedy="Pass this rank's own KV block table, as wide as its longest row.",
        )
    return physical_rows(local, kv_table, kv_page=place.kv_page, block_rows=place.block_rows, row_request=row_request)


def _check_lists(
    argument: str, order: torch.Tensor, seq_lens: torch.Tensor, interleave: int, n: int, which: torch.Tensor
) -> None:
    """Refuse lists (of the ranks in ``which [rows, world]``) whose entries do not number min(n, local length)."""
    wanted = lens_of_all_ranks(seq_lens, order.shape[1], interleave).clamp_max(n).to(order.device)
    have = (order > 0).sum(-1)
    wrong = (have != wanted) & which.to(order.device)
    if bool(wrong.any()):
        row, rank = (int(i) for i in wrong.nonzero()[0])
        refuse(
            argument,
            got=f"{int(have[row, rank])} candidates from rank {rank} for row {row}",
            accepted=f"min(n, local length) = {int(wanted[row, rank])} for seq_lens[{row}] = {int(seq_lens[row])}",
            remedy="Call every rank with the same global lengths, interleave, n and planes.",
        )


def _compact(ids: torch.Tensor, k: int) -> torch.Tensor:
    """int32 ``[rows, k]``: the entries of ``ids [rows, any]`` below the marker, ascending, then -1."""
    ordered = ids.sort(dim=1).values[:, :k]
    ordered = torch.nn.functional.pad(ordered, (0, k - ordered.shape[1]), value=_ID_MAX)
    return torch.where(ordered == _ID_MAX, -1, ordered).to(torch.int32)
