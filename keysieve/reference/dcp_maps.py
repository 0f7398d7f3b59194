"""Who holds which position under decode context parallelism.

With W ranks and interleave S, position g of a context lies on rank ``(g // S) % W``; a rank numbers its keys by local
index, in order of position. Both maps keep order, so "ascending local index" and "ascending position" agree on a
rank: the merge relies on it.
"""

from __future__ import annotations

from typing import TypeVar, overload

import torch

from keysieve.checks import describe, refuse, require_int
from keysieve.spec import MAX_CONTEXT, MAX_WORLD

_INT32_MAX = 2**31 - 1

Index = TypeVar("Index", int, torch.Tensor)


def check_sharding(world: int, rank: int, interleave: int) -> None:
    """Refuse a world outside 1..16, a rank outside it, or an interleave below 1."""
    require_int("world", world, 1, MAX_WORLD, "Use at most 16 context ranks.")
    require_int("rank", rank, 0, world - 1, "Pass this process's rank within the group.")
    require_int("interleave", interleave, 1, MAX_CONTEXT, "Use the interleave that the KV cache is sharded with.")


def owner_of(position: Index, world: int, interleave: int) -> Index:
    """The rank that holds global ``position`` (an int, or an integer tensor of any shape)."""
    return (position // interleave) % world


def local_index(position: Index, world: int, interleave: int) -> Index:
    """The local index of global ``position`` on the rank that holds it."""
    return position // (interleave * world) * interleave + position % interleave


@overload
def global_positions(local: int, world: int, rank: int, interleave: int) -> int: ...


@overload
def global_positions(local: torch.Tensor, world: int, rank: int | torch.Tensor, interleave: int) -> torch.Tensor: ...


def global_positions(
    local: int | torch.Tensor, world: int, rank: int | torch.Tensor, interleave: int
) -> int | torch.Tensor:
    """The global position of ``local`` index on ``rank``: ``(l // S) * S * W + r * S + l % S``.

    ``local`` and ``rank`` may be ints or integer tensors that broadcast; negative entries are not masked here.
    """
    return local // interleave * (interleave * world) + rank * interleave + local % interleave


def local_seq_lens(
    seq_lens: torch.Tensor, world: int, rank: int, interleave: int = 1, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Keys of each row that lie on ``rank``: how many positions ``g < seq_lens`` have ``(g // S) % W == rank``.

    Args:
        seq_lens: integer tensor of any shape (1-D per row, or ``[requests, next_n]``: every speculative row has its
            own length, and so its own local length); 0 or less is an empty row and gives 0.
        world: ranks, 1..16 (W).
        rank: the rank asked about.
        interleave: consecutive positions on one rank (S).
        out: an int32 tensor of the same shape to write into.

    Returns:
        int32, the shape of ``seq_lens``.
    """
    check_sharding(world, rank, interleave)
    kind = seq_lens.dtype if isinstance(seq_lens, torch.Tensor) else torch.bool
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        refuse("seq_lens", got=repr(seq_lens)[:80], accepted="an integer tensor", remedy="Pass int32 lengths.")
    local = _local_lens(seq_lens, world, rank, interleave)
    if out is None:
        return local
    if not isinstance(out, torch.Tensor) or out.dtype != torch.int32 or out.shape != local.shape:
        refuse(
            "out",
            got=describe(out),
            accepted=f"int32 {list(local.shape)}",
            remedy="Pass a matching buffer, or none.",
        )
    return out.copy_(local)


def lens_of_all_ranks(seq_lens: torch.Tensor, world: int, interleave: int) -> torch.Tensor:
    """int32 ``[rows, world]``: :func:`local_seq_lens` of every rank, for integer ``seq_lens [rows]``; no checks."""
    ranks = torch.arange(world, device=seq_lens.device)
    return _local_lens(seq_lens[:, None], world, ranks, interleave)


def _local_lens(seq_lens: torch.Tensor, world: int, rank: int | torch.Tensor, interleave: int) -> torch.Tensor:
    """Whole rounds of W blocks give a block each; of the last, partial round a rank gets what reaches it."""
    lens = seq_lens.to(torch.int64).clamp_min(0)
    whole = lens // (interleave * world) * interleave
    rest = lens % (interleave * world) - rank * interleave
    # Beyond int32 a length stays beyond every limit, so that whoever checks limits still refuses it.
    return (whole + rest.clamp(0, interleave)).clamp_max(_INT32_MAX).to(torch.int32)
