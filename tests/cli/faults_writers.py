# ruff: noqa: ARG005 - a patched function keeps the signature of the one it stands in for
"""Deliberate faults in writers and queries."""

from __future__ import annotations

from typing import Any

import torch
from fault_registry import Patch, after, fault

from keysieve import cache, quantize


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
