# ruff: noqa: ARG005 - a patched function keeps the signature of the one it stands in for
"""Deliberate faults, one deviation from the contract each, and the stage of ``keysieve check`` that must find it.

Most are errors that have been made in the field. A fault is a function that patches keysieve's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch

from keysieve import cache, quantize
from keysieve.check import selections
from keysieve.reference import bf16, step

# The package re-exports functions of the same names: these are the modules.
local_topk, merge, score, topk = (
    import_module(f"keysieve.reference.{name}") for name in ("local_topk", "merge", "score", "topk")
)

FAULTS: list[Fault] = []
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    """``apply`` breaks keysieve; ``stage`` must notice."""

    stage: str
    name: str
    apply: Callable[[Patch], None]


def fault(*stages: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register a fault for the stages that must find it."""

    def register(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        FAULTS.extend(Fault(stage, apply.__name__, apply) for stage in stages)
        return apply

    return register


def after(patch: Patch, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """``owner.name`` with its result passed through ``change``."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **named: change(real(*args, **named)))


# --- writers and queries -------------------------------------------------------------------------------------------


@fault("writers")
def no_floor_under_amax(patch: Patch) -> None:
    real = quantize._block_amax
    patch.setattr(quantize, "_block_amax", lambda x, floor: real(x, 0.0))


@fault("writers", "queries")
def scale_boundary_is_exclusive(patch: Patch) -> None:
    real = quantize.encode_ue8m0_scale
    patch.setattr(
        quantize,
        "encode_ue8m0_scale",
        lambda amax, limit: real(torch.nextafter(amax, amax.new_full((), float("inf"))), limit),
    )


@fault("writers", "queries")
def scale_by_reciprocal(patch: Patch) -> None:
    """amax * (1/448) instead of amax / 448, and the same for the codes."""

    def quantize_fp8(x: torch.Tensor, pow2: bool, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
        x = quantize._finite(x)
        amax = quantize._block_amax(x, floor)
        scale = quantize.decode_ue8m0(quantize.encode_ue8m0_scale(amax, 448.0)) if pow2 else amax * (1.0 / 448.0)
        return quantize.encode_e4m3(x / scale.unsqueeze(-1)), scale

    patch.setattr(quantize, "_quantize_fp8", quantize_fp8)


@fault("writers")
def e2m1_ties_always_to_zero(patch: Patch) -> None:
    real = quantize.encode_e2m1
    patch.setattr(quantize, "encode_e2m1", lambda x, rounding="half_even": real(x, "half_to_zero"))


@fault("writers", "queries")
def nibbles_swapped(patch: Patch) -> None:
    after(patch, quantize, "encode_e2m1", lambda packed: packed >> 4 | packed << 4)


@fault("writers")
def e4m3_truncates(patch: Patch) -> None:
    def encode(x: torch.Tensor) -> torch.Tensor:
        return (
            (x.view(torch.int32) & ~0xFFFFF)
            .view(torch.float32)
            .clamp(-448, 448)
            .to(torch.float8_e4m3fn)
            .view(torch.uint8)
        )

    patch.setattr(quantize, "encode_e4m3", encode)


@fault("writers")
def nan_becomes_zero(patch: Patch) -> None:
    real = quantize._finite
    patch.setattr(quantize, "_finite", lambda x: torch.nan_to_num(real(x), nan=0.0, posinf=3.4e38, neginf=-3.4e38))


@fault("writers")
def page_interleaved_by_token(patch: Patch) -> None:
    """Key and scale of a token side by side, which looks plausible and is wrong."""
    patch.setattr(cache, "key_plane", lambda fmt, data: data[:, :, : fmt.key_bytes])
    patch.setattr(cache, "scale_plane", lambda fmt, data: data[:, :, fmt.key_bytes :])


@fault("writers")
def page_stride_taken_as_dense(patch: Patch) -> None:
    def plane(fmt: Any, data: torch.Tensor) -> torch.Tensor:
        return data.as_strided((data.shape[0], 64, fmt.key_bytes), (fmt.page_bytes, fmt.key_bytes, 1))

    patch.setattr(cache, "key_plane", plane)


@fault("writers")
def first_of_duplicates_wins(patch: Patch) -> None:
    def resolve(self: cache.IndexCache, slots: torch.Tensor) -> Any:
        flipped = torch.flip(slots, [0])
        targets, winners, any_valid = real(self, flipped)
        return targets, slots.numel() - 1 - winners, any_valid

    real = cache.IndexCache._resolve
    patch.setattr(cache.IndexCache, "_resolve", resolve)


@fault("writers")
def negative_slots_count_from_the_end(patch: Patch) -> None:
    real = cache.IndexCache._resolve
    patch.setattr(cache.IndexCache, "_resolve", lambda self, slots: real(self, slots % (self.pages * 64)))


@fault("writers")
def skipped_keys_leave_a_mark(patch: Patch) -> None:
    """Without a single valid slot the last key is written to slot 0."""
    after(patch, cache.IndexCache, "_resolve", lambda found: (*found[:2], torch.ones_like(found[2])))


@fault("queries")
def query_scale_not_a_power_of_two(patch: Patch) -> None:
    real = quantize._quantize_fp8
    patch.setattr(quantize, "_quantize_fp8", lambda x, pow2, floor: real(x, False, floor))


@fault("queries")
def weights_folded_in_another_order(patch: Patch) -> None:
    from keysieve.check import writers

    def fold(w: torch.Tensor, q_scale: torch.Tensor | None, softmax_scale: float) -> torch.Tensor:
        factor = torch.tensor(softmax_scale) * torch.tensor(w.shape[-1] ** -0.5)
        return w.float() * factor if q_scale is None else w.float() * (q_scale * factor)

    patch.setattr(writers, "fold_weights", fold)


# --- scores --------------------------------------------------------------------------------------------------------


@fault("scores", "steps")
def relu_drops_nan(patch: Patch) -> None:
    """fmax(NaN, 0) is 0."""
    for module, name in ((score, "head_sum_fp32"), (score, "head_sum_bf16")):
        real = getattr(module, name)
        patch.setattr(module, name, lambda dots, weights, real=real: real(dots.nan_to_num(0.0, float("inf")), weights))


@fault("scores", "steps")
def relu_missing(patch: Patch) -> None:
    def head_sum(dots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        products = dots * weights[:, :, None]
        total = products[0].clone()
        for product in products[1:]:
            total.add_(product)
        return total

    patch.setattr(score, "head_sum_fp32", head_sum)


@fault("scores")
def heads_summed_downwards(patch: Patch) -> None:
    real = score.head_sum_fp32
    patch.setattr(score, "head_sum_fp32", lambda dots, weights: real(dots.flip(0), weights.flip(0)))


@fault("scores")
def heads_summed_by_fma(patch: Patch) -> None:
    def head_sum(dots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        relu = dots.clamp_min(0.0).double()
        total = (relu[0] * weights[0, :, None]).float()
        for h in range(1, len(relu)):
            total = (relu[h] * weights[h, :, None] + total.double()).float()
        return total

    patch.setattr(score, "head_sum_fp32", head_sum)


@fault("scores")
def dots_in_float32(patch: Patch) -> None:
    patch.setattr(score, "exact_dots", lambda fmt, query, keys: torch.mm(query.float(), keys.float().t()))


@fault("scores")
def mxfp4_blocks_added_backwards(patch: Patch) -> None:
    real = score.exact_dots

    def dots(fmt: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        if fmt.is_fp8:
            return real(fmt, query, key)
        turn = [i for block in (3, 2, 1, 0) for i in range(32 * block, 32 * block + 32)]
        return real(fmt, query[:, turn], key[:, turn])

    patch.setattr(score, "exact_dots", dots)


@fault("scores")
def minus_zero_and_nan_payloads_stored(patch: Patch) -> None:
    patch.setattr(score, "canonicalize_", lambda logits: logits)


@fault("scores")
def logits_truncated_to_bf16(patch: Patch) -> None:
    real = score.head_sum_fp32

    def head_sum(dots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (real(dots, weights).view(torch.int32) & ~0xFFFF).view(torch.float32)

    patch.setattr(score, "head_sum_fp32", head_sum)


@fault("scores")
def bf16_fma_rounds_twice(patch: Patch) -> None:
    patch.setattr(bf16, "fma_bf16", lambda a, b, c: (a.float() * b.float() + c.float()).to(torch.bfloat16))


@fault("scores")
def bf16_in_one_accumulator(patch: Patch) -> None:
    def head_sum(dots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(dots.shape[1:], dtype=torch.bfloat16)
        for dot, w in zip(dots.clamp_min(0.0).to(torch.bfloat16), weights, strict=True):
            total = bf16.fma_bf16(dot, w[:, None], total)
        return total.float()

    patch.setattr(score, "head_sum_bf16", head_sum)


@fault("scores")
def scale_of_the_next_token(patch: Patch) -> None:
    after(patch, cache.IndexCache, "page_scales", lambda scales: scales.roll(1, 1))


@fault("scores")
def ue8m0_zero_is_zero_and_255_is_infinite(patch: Patch) -> None:
    patch.setattr(quantize, "decode_ue8m0", lambda codes: (codes.to(torch.int32) << 23).view(torch.float32))


@fault("scores", "steps")
def page_ids_outside_the_pool_clamped(patch: Patch) -> None:
    real = score.Scorer._score_pages
    patch.setattr(
        score.Scorer,
        "_score_pages",
        lambda self, query, weights, ids, outside, out: real(
            self, query, weights, ids.clamp(0, self._step.cache.pages - 1), outside & False, out
        ),
    )


@fault("scores")
def second_chunk_of_a_long_row_repeats_the_first(patch: Patch) -> None:
    score_pages, score_request = score.Scorer._score_pages, score.Scorer.score_request

    def request(self: Any, *args: Any) -> None:
        self.first_ids = None
        score_request(self, *args)

    def pages(self: Any, query: Any, weights: Any, ids: torch.Tensor, outside: Any, out: torch.Tensor) -> None:
        if self.first_ids is None:
            self.first_ids = ids
        score_pages(self, query, weights, self.first_ids[: len(ids)], outside, out)

    patch.setattr(score.Scorer, "score_request", request)
    patch.setattr(score.Scorer, "_score_pages", pages)


# --- selection -----------------------------------------------------------------------------------------------------


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


# --- context parallelism -------------------------------------------------------------------------------------------


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
