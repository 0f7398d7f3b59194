"""Checks of what writes bytes: the cache writers, reading back, query quantisation and folded weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from keysieve.cache import IndexCache
from keysieve.check import brute
from keysieve.check.trial import Mismatch, Scope, generators, shown, storage_of, thirds
from keysieve.quantize import fold_weights, quantize_query
from keysieve.spec import AMAX_FLOOR_FP8, AMAX_FLOOR_MXFP4, FORMATS, IndexerSpec

KINDS = ("normal", "scaled", "ties", "boundary", "zero", "special", "subnormal", "any_bits")


def draw_vectors(kind: str, n: int, rng: random.Random, gen: torch.Generator) -> torch.Tensor:
    """float32 [n, 128] of one kind that quantisers have got wrong."""
    normal = torch.randn(n, 128, generator=gen)
    power = torch.randint(-20, 20, (n, 1), generator=gen).float()
    if kind == "normal":
        return normal
    if kind == "scaled":
        return normal * torch.exp2(power * 5)
    if kind == "ties":  # on the midpoints of both code tables
        return torch.randint(-96, 97, (n, 128), generator=gen) / 16.0 * torch.exp2(power)
    if kind == "boundary":  # the largest element is code_max * 2**k, or its float32 neighbour
        largest = torch.tensor([448.0, 6.0])[torch.randint(0, 2, (n, 1), generator=gen)] * torch.exp2(power)
        aside = torch.randint(-1, 2, (n, 1), generator=gen, dtype=torch.int32)
        values = torch.rand(n, 128, generator=gen) * largest * 0.999
        values[:, ::32] = (largest.view(torch.int32) + aside).view(torch.float32) * (1 - 2 * rng.randint(0, 1))
        return values
    if kind == "zero":
        return torch.where(torch.rand(n, 128, generator=gen) < 0.02, normal, normal * 0) * (
            torch.rand(n, 1, generator=gen) < 0.5
        )
    if kind == "special":
        values = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38, -0.0, 1e-45, 1e-4])
        pick = torch.rand(n, 128, generator=gen) < 0.02
        return torch.where(pick, values[torch.randint(0, len(values), (n, 128), generator=gen)], normal)
    if kind == "subnormal":
        return normal * 2.0 ** -rng.randint(120, 149)
    bits = torch.randint(-(2**31), 2**31, (n, 128), generator=gen)
    return bits.to(torch.int32).view(torch.float32)


def as_floats(x: torch.Tensor) -> NDArray[Any]:
    """float32 numpy values of a float32 or BF16 tensor."""
    return x.float().cpu().numpy()


@dataclass(frozen=True, eq=False)
class WriterTrial:
    """Keys, slots and the pool they go to."""

    spec: IndexerSpec
    options: dict[str, Any]
    keys: torch.Tensor
    slots: torch.Tensor
    pages: int
    stride: int
    fill: int


class Writers:
    """``IndexCache.append``, every byte of the pool, and what ``read`` and ``codes`` give back."""

    name = "writers"

    def draw(self, seed: int, scope: Scope) -> WriterTrial:
        del scope
        rng, gen = generators(seed)
        key_format = rng.choice(list(FORMATS))
        fmt = FORMATS[key_format]
        options: dict[str, Any] = {}
        if key_format == "fp8_fp32":
            options["scale_rounding"] = rng.choice(["plain", "pow2"])
        if key_format == "mxfp4":
            options["fp4_rounding"] = rng.choice(["half_even", "half_to_zero"])
            options["amax_floor"] = rng.choice([None, AMAX_FLOOR_FP8])
        n, pages = rng.choice([1, 2, 7, 64, 65, 200]), rng.randint(1, 6)
        parts = [draw_vectors(rng.choice(KINDS), -(-n // 3), rng, gen) for _ in range(3)]
        keys = torch.cat(parts)[torch.randperm(3 * -(-n // 3), generator=gen)[:n]]
        if rng.random() < 0.4:
            keys = keys.to(torch.bfloat16)
        if rng.random() < 0.3:
            keys = torch.stack([keys, keys * 0], dim=-1).flatten(1)[:, ::2]  # strided
        kind = rng.choice(["any", "distinct", "crowded", "any", "distinct", "crowded", "none"])
        slots = torch.randint(-3, pages * 64, (n,), generator=gen)
        if kind == "distinct":
            slots = torch.randperm(max(n, pages * 64), generator=gen)[:n]
            slots = torch.where(slots < pages * 64, slots, torch.full_like(slots, -1))
        if kind == "none":
            slots = torch.full((n,), -1)
        if kind == "crowded":
            slots = torch.randint(0, max(2, n // 4), (n,), generator=gen) % (pages * 64)
        stride = fmt.page_bytes + rng.choice([0, 0, 16, 4096 + 16])
        return WriterTrial(IndexerSpec(8, 16, key_format), options, keys, slots, pages, stride, rng.randint(0, 255))

    def run(self, trial: WriterTrial, scope: Scope) -> None:
        spec, fmt = trial.spec, trial.spec.format
        whole = torch.full((trial.pages * trial.stride + 32,), trial.fill, dtype=torch.uint8, device=scope.device)
        pool = whole[16:].as_strided((trial.pages, 64, fmt.width), (trial.stride, fmt.width, 1))
        before = storage_of(whole)
        cache = IndexCache(spec, pool, **trial.options)
        keys, slots = trial.keys.to(scope.device), trial.slots.to(scope.device)
        cache.append(keys, slots)
        floor = trial.options.get("amax_floor") or (AMAX_FLOOR_FP8 if fmt.is_fp8 else AMAX_FLOOR_MXFP4)
        codes, scales = brute.quantise_keys(
            spec.key_format,
            as_floats(trial.keys),
            trial.options.get("scale_rounding") == "pow2",
            trial.options.get("fp4_rounding") == "half_to_zero",
            floor,
        )
        want = before.copy()
        for key, slot in enumerate(trial.slots.tolist()):
            if slot >= 0:
                to_codes, to_scale = brute.token_bytes(want[16:], trial.stride, spec.key_format, slot)
                to_codes[:], to_scale[:] = codes[key], scales[key]
        require("pool byte", storage_of(whole), want)
        held = sorted({s for s in trial.slots.tolist() if s >= 0})
        got_codes, got_scales = (t.cpu().numpy() for t in cache.codes(torch.tensor(held, device=scope.device).long()))
        want_codes, want_scales = brute.gather_keys(want[16:], trial.stride, spec.key_format, held)
        require("codes", got_codes, want_codes)
        require("scale bytes", got_scales, want_scales)
        values = as_floats(cache.read(torch.tensor(held, device=scope.device).long())) + np.float32(0)  # -0 is +0
        require_floats("read", values, brute.dequantised(spec.key_format, want_codes, want_scales))

    def smaller(self, trial: WriterTrial) -> Iterator[WriterTrial]:
        for keep in thirds(trial.keys.shape[0]):
            yield replace(trial, keys=trial.keys[keep], slots=trial.slots[keep])
        if trial.stride != trial.spec.format.page_bytes:
            yield replace(trial, stride=trial.spec.format.page_bytes)
        last_page = int(trial.slots.max()) // 64 + 1 if trial.slots.numel() else 1
        if 1 <= last_page < trial.pages:
            yield replace(trial, pages=last_page)
        if trial.fill:
            yield replace(trial, fill=0)
        for block in range(4):  # elements that do not matter
            part = trial.keys[:, 32 * block : 32 * block + 32]
            if bool((part != 0).any()):
                keys = trial.keys.clone()
                keys[:, 32 * block : 32 * block + 32] = 0
                yield replace(trial, keys=keys)

    def describe(self, trial: WriterTrial) -> str:
        return (
            f"{trial.spec.key_format} {trial.options}, {trial.pages} pages, stride {trial.stride}, fill {trial.fill}; "
            f"{trial.keys.shape[0]} {trial.keys.dtype} keys to slots {shown(trial.slots.tolist())}\n"
            f"keys {trial.keys.float().tolist() if trial.keys.shape[0] <= 2 else '(many)'}"
        )


@dataclass(frozen=True, eq=False)
class QueryTrial:
    """Queries and head weights to quantise and fold."""

    spec: IndexerSpec
    options: dict[str, Any]
    q: torch.Tensor
    w: torch.Tensor
    softmax_scale: float


class Queries:
    """``quantize_query`` and ``fold_weights``, bit for bit."""

    name = "queries"

    def draw(self, seed: int, scope: Scope) -> QueryTrial:
        del scope
        rng, gen = generators(seed)
        key_format, heads, rows = rng.choice(list(FORMATS)), rng.choice([8, 16, 32, 64]), rng.randint(1, 5)
        fp8 = FORMATS[key_format].is_fp8
        options: dict[str, Any] = {"scale_rounding": rng.choice(["pow2", "plain"])} if fp8 else {}
        if not fp8:
            options["fp4_rounding"] = rng.choice(["half_even", "half_to_zero"])
        q = draw_vectors(rng.choice(KINDS), rows * heads, rng, gen).view(rows, heads, 128)
        w = torch.randn(rows, heads, generator=gen)
        if rng.random() < 0.5:
            q, w = q.to(torch.bfloat16), w.to(torch.bfloat16)
        if rng.random() < 0.3:
            w = torch.stack([w, w + 1], dim=-1)[..., 0]  # strided
        return QueryTrial(IndexerSpec(heads, 16, key_format), options, q, w, rng.choice([1.0, 128**-0.5, 0.1]))

    def run(self, trial: QueryTrial, scope: Scope) -> None:
        spec, rows = trial.spec, trial.q.shape[0]
        code, q_scale = quantize_query(spec, trial.q.to(scope.device), **trial.options)
        flat = as_floats(trial.q).reshape(-1, 128)
        want_scale = None
        if isinstance(code, tuple):
            ties_to_zero = trial.options.get("fp4_rounding") == "half_to_zero"
            want, scales = brute.quantise_mxfp4(flat, ties_to_zero, AMAX_FLOOR_MXFP4)
            require("query codes", code[0].cpu().numpy().reshape(-1, 64), want)
            words = code[1].cpu().numpy().astype("<i4").reshape(-1, 1).view(np.uint8)
            require("query scale bytes", words, scales)
            if q_scale is not None:
                raise Mismatch("MXFP4 query: q_scale is not None")
        else:
            assert q_scale is not None
            want, scale = brute.quantise_fp8(flat, trial.options.get("scale_rounding") == "pow2", AMAX_FLOOR_FP8)
            require("query codes", code.view(torch.uint8).cpu().numpy().reshape(-1, 128), want)
            want_scale = scale.reshape(rows, -1)
            require_floats("q_scale", q_scale.cpu().numpy(), want_scale)
        folded = fold_weights(trial.w.to(scope.device), q_scale, trial.softmax_scale)
        with np.errstate(all="ignore"):
            want_folded = brute.fold_weights(as_floats(trial.w), want_scale, trial.softmax_scale)
        require_floats("fold_weights", folded.cpu().numpy(), want_folded)

    def smaller(self, trial: QueryTrial) -> Iterator[QueryTrial]:
        for keep in thirds(trial.q.shape[0]):
            yield replace(trial, q=trial.q[keep], w=trial.w[keep])
        if trial.spec.heads > 8:
            heads = trial.spec.heads // 2
            yield replace(trial, spec=replace(trial.spec, heads=heads), q=trial.q[:, :heads], w=trial.w[:, :heads])
        if trial.q.shape[0] == 1:
            for head in range(trial.spec.heads):
                if bool((trial.q[:, head] != 0).any()):
                    q = trial.q.clone()
                    q[:, head] = 0
                    yield replace(trial, q=q)

    def describe(self, trial: QueryTrial) -> str:
        heads = [h for h in range(trial.spec.heads) if bool((trial.q[:, h] != 0).any())]
        return (
            f"{trial.spec.key_format} {trial.options}, q {trial.q.dtype} {list(trial.q.shape)}, softmax_scale "
            f"{trial.softmax_scale}; nonzero heads {shown(heads)}; w {shown(trial.w.flatten().tolist())}"
        )


def require(name: str, got: NDArray[Any], want: NDArray[Any]) -> None:
    """Raise Mismatch unless two integer arrays agree."""
    text = brute.difference(name, got, want)
    if text:
        raise Mismatch(text)


def require_floats(name: str, got: NDArray[Any], want: NDArray[Any]) -> None:
    """Raise Mismatch unless two float32 arrays have the same bits; NaNs of any payload count as equal."""
    got, want = np.ascontiguousarray(got), np.ascontiguousarray(want)
    if got.shape == want.shape:
        both = np.isnan(got) & np.isnan(want)
        got, want = np.where(both, 0, got).astype(np.float32), np.where(both, 0, want).astype(np.float32)
    text = brute.difference(name, got.view(np.uint32), want.view(np.uint32))
    if text:
        raise Mismatch(f"{text} (float32 bits)")
