# ruff: noqa: ARG005 - a patched function keeps the signature of the one it stands in for
"""Deliberate faults in selection and in the step."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from fault_registry import Patch, fault

from keysieve.reference import step

# The package re-exports functions of the same names: these are the modules.
score, topk = (import_module(f"keysieve.reference.{name}") for name in ("score", "topk"))


@fault("topk", "steps", "shards")
def ties_to_the_highest_positions(patch: Patch) -> None:
    real = topk.select_positions

    def select(keys16: torch.Tensor, k: int) -> torch.Tensor:
        return (keys16.numel() - 1 - real(keys16.flip(0), k)).flip(0)

    patch.setattr(topk, "select_positions", select)


@fault("topk", "steps", "shards")
def winners_by_rank_not_by_position(patch: Patch) -> None:
    patch.setattr(topk, "select_positions", lambda key, k: torch.sort(key, descending=True, stable=True).indices[:k])


@fault("topk")
def foreign_minus_zero_ranks_below_zero(patch: Patch) -> None:
    def key16(logits: torch.Tensor) -> torch.Tensor:
        bits = logits.view(torch.int16).to(torch.int32)
        key = torch.where(bits < 0, bits.bitwise_not(), bits + 0x8000)
        return key.masked_fill((key < 0x7F) | (key > 0xFF80), 0x3F)

    patch.setattr(topk, "key16", key16)


@fault("topk")
def foreign_nan_ranks_by_its_bits(patch: Patch) -> None:
    def key16(logits: torch.Tensor) -> torch.Tensor:
        bits = logits.view(torch.int16).to(torch.int32)
        key = torch.where(bits < 0, bits.bitwise_not(), bits + 0x8000)
        return key.masked_fill(key == 0x7FFF, 0x8000)

    patch.setattr(topk, "key16", key16)


@fault("topk", "steps")
def coarse_threshold(patch: Patch) -> None:
    """A threshold of 11 bits whose last bin is not refined."""
    real = topk.threshold16
    patch.setattr(topk, "threshold16", lambda key, k: real(key, k) & ~0x1F)
    patch.setattr(
        topk,
        "select_positions",
        lambda key, k, real=topk.select_positions: real(torch.where(key & 0x1F > 0, key & ~0x1F, key), k),
    )


@fault("topk", "steps")
def long_rows_lose_their_best_key(patch: Patch) -> None:
    real = topk.select_positions

    def select(key: torch.Tensor, k: int) -> torch.Tensor:
        return real(key.masked_fill(key == key.max(), 0x40), k) if key.numel() > 300 else real(key, k)

    patch.setattr(topk, "select_positions", select)


@fault("topk", "steps")
def slots_past_the_count_unwritten(patch: Patch) -> None:
    def select_row(logits: torch.Tensor, length: int, k: int, out: torch.Tensor) -> int:
        kept = out.clone()
        count = real(logits, length, k, out)
        out[count:] = kept[count:]
        return count

    real = topk.select_row_
    patch.setattr(topk, "select_row_", select_row)
    patch.setattr(step, "select_row_", select_row)


@fault("topk", "steps")
def count_includes_the_padding(patch: Patch) -> None:
    def select_row(logits: torch.Tensor, length: int, k: int, out: torch.Tensor) -> int:
        real(logits, length, k, out)
        return k if length > 0 else 0

    real = topk.select_row_
    patch.setattr(topk, "select_row_", select_row)
    patch.setattr(step, "select_row_", select_row)


@fault("topk")
def a_key_past_the_length_is_seen(patch: Patch) -> None:
    real = topk.select_row_

    def select_row(logits: torch.Tensor, length: int, k: int, out: torch.Tensor) -> int:
        longer = min(length + 1, logits.numel()) if length > k else length
        return real(logits, longer, k, out)

    patch.setattr(topk, "select_row_", select_row)


@fault("topk", "steps")
def block_rows_ignored(patch: Patch) -> None:
    for module in (topk, step):
        real = module.physical_rows
        patch.setattr(
            module, "physical_rows", lambda *args, real=real, **named: real(*args, **named | {"block_rows": None})
        )


@fault("topk")
def row_request_ignored(patch: Patch) -> None:
    real = topk.physical_rows
    patch.setattr(topk, "physical_rows", lambda *args, **named: real(*args, **named | {"row_request": None}))


# --- the step ------------------------------------------------------------------------------------------------------


@fault("steps")
def draft_rows_see_the_longest_context(patch: Patch) -> None:
    real = step.CpuRunner.run

    def run(self: Any, given: Any, place: Any, out: Any) -> None:
        per_request = given.seq_lens.view(-1, given.next_n)
        longest = per_request.max(dim=1, keepdim=True).values.expand_as(per_request).reshape(-1)
        real(self, replace(given, seq_lens=longest), place, out)

    patch.setattr(step.CpuRunner, "run", run)


@fault("steps")
def rows_of_one_request_swapped(patch: Patch) -> None:
    real = score.Scorer._query
    patch.setattr(
        score.Scorer,
        "_query",
        lambda self, r: real(self, r).view(-1, self._step.next_n, 128).flip(1).reshape(-1, 128),
    )


@fault("steps")
def short_row_shortcut_one_too_long(patch: Patch) -> None:
    real = step.select_row_

    def select_row(logits: torch.Tensor, length: int, k: int, out: torch.Tensor) -> int:
        return real(logits, length - 1 if length == k + 1 else length, k, out)

    patch.setattr(step, "select_row_", select_row)


@fault("steps")
def faults_forgotten(patch: Patch) -> None:
    patch.setattr(step.CpuRunner, "check", lambda self: None)


@fault("steps")
def physical_rows_of_the_first_request(patch: Patch) -> None:
    real = step.physical_rows
    patch.setattr(
        step, "physical_rows", lambda where, table, **named: real(where, table[:1].expand(len(table), -1), **named)
    )


@fault("replays")
def logits_of_an_earlier_step_kept(patch: Patch) -> None:
    real = step.CpuRunner.run

    def run(self: Any, given: Any, place: Any, out: Any) -> None:
        kept = getattr(self, "kept", None)
        real(self, given if kept is None else replace(given, weights=kept), place, out)
        self.kept = given.weights.clone()

    patch.setattr(step.CpuRunner, "run", run)


@fault("replays")
def empty_rows_keep_what_stood_there(patch: Patch) -> None:
    real = step.select_row_

    def select_row(logits: torch.Tensor, length: int, k: int, out: torch.Tensor) -> int:
        return real(logits, length, k, out) if length > 0 else 0

    patch.setattr(step, "select_row_", select_row)
