# ruff: noqa: ARG005 - a patched function keeps the signature of the one it stands in for
"""Deliberate faults in scores."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from fault_registry import Patch, after, fault

from keysieve import cache, quantize
from keysieve.reference import bf16

score = import_module("keysieve.reference.score")  # the package re-exports a function of this name


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
