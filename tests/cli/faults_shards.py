# ruff: noqa: ARG005 - a patched function keeps the signature of the one it stands in for
"""Deliberate faults in what context-parallel ranks send and merge."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from fault_registry import Patch, after, fault

from keysieve.check import selections

# The package re-exports functions of the same names: these are the modules.
local_topk, merge = (import_module(f"keysieve.reference.{name}") for name in ("local_topk", "merge"))


@fault("shards")
def index_planes_dropped(patch: Patch) -> None:
    real = local_topk.pack_candidates
    patch.setattr(local_topk, "pack_candidates", lambda key, local, planes: real(key, local & 0xFFFF, planes))


@fault("shards")
def saturated_only_if_strictly_above(patch: Patch) -> None:
    """The rule that asks for all entries strictly above the K-th score."""
    real = merge._saturated

    def saturated(order: torch.Tensor, k: int, *rest: Any) -> torch.Tensor:
        flat = order.flatten(1)
        if flat.shape[1] < k:
            return real(order, k, *rest)
        kth = flat.topk(k, dim=1).values[:, -1] >> merge._ID_BITS
        return real(order, k, *rest) & ((order >> merge._ID_BITS) > kth[:, None, None]).all(-1)

    patch.setattr(merge, "_saturated", saturated)
    patch.setattr(
        selections, "saturated_ranks", lambda words, k, **named: torch.zeros(words.shape[:2], dtype=torch.bool)
    )


@fault("shards")
def nobody_is_saturated(patch: Patch) -> None:
    after(patch, merge, "_saturated", torch.zeros_like)


@fault("shards")
def merge_ties_by_rank(patch: Patch) -> None:
    """Equal keys ordered by rank, then local index, instead of by global position."""
    real = merge.global_positions
    patch.setattr(merge, "global_positions", lambda local, world, rank, interleave: real(local, 1, 0, 1) + rank * 5000)


@fault("shards")
def interleave_taken_as_one(patch: Patch) -> None:
    real = merge.global_positions
    patch.setattr(merge, "global_positions", lambda local, world, rank, interleave: real(local, world, rank, 1))


@fault("shards")
def local_lengths_rounded_up(patch: Patch) -> None:
    real = selections.local_seq_lens
    patch.setattr(
        selections,
        "local_seq_lens",
        lambda lens, world, rank, interleave: torch.maximum(real(lens, world, 0, interleave), lens * 0).int(),
    )
