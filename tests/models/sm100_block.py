"""One block of the Blackwell scorer on the model of the chip, the work it is given, and what should come out."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from sm100_numbers import bf16, f32
from sm100_source import ByNumber, Lanes, Warp, device_code, methods, producer_code, run_together
from sm100_unit import DEADLINE, E2M1, Barrier, Barriers, NamedBarrier, Unit, e4m3, ue8m0

import keysieve as ks
from keysieve.kernels.score_cut import HOME_ROUNDS, ORDERS, chunks_of
from keysieve.kernels.sm100_score_config import (
    GROUPS,
    KEY_WARP,
    MATRIX_WARP,
    QUERY_WARP,
    SETUP_WARP,
    THREADS,
    WARPS,
    ScoreConfig,
    ScoreShape,
    key_tile,
    query_rows,
    smem_map,
    tensor_map,
)
from keysieve.spec import CANONICAL_NAN, PAGE, TILE

WORDS_AT, WEIGHTS_AT, LENS_AT, TABLE_AT, FLAGS_AT = 1 << 20, 2 << 20, 3 << 20, 4 << 20, 5 << 20
LOGITS_AT, TOPS_AT, KEYS_AT, PITCH = 1 << 24, 1 << 28, 1 << 32, 1 << 16
GARBAGE = 0x7FFFFFFF
PADDING = 48


class EarlyShape(ScoreShape):
    """A cut whose blocks send for their first tile before they know all lengths, see `sm90_score_early`."""

    early = True


@dataclass
class Case:
    """A step's work. tiles: of each request. pages: the pool. table: int32 [requests, pages], garbage where no row of
    the request has a key. lengths: [requests, next_n]."""

    config: ScoreConfig
    tiles: tuple[int, ...]
    pages: np.ndarray
    table: np.ndarray
    query: np.ndarray
    words: np.ndarray
    weights: torch.Tensor
    lengths: np.ndarray


def make_case(config: ScoreConfig, tiles: tuple[int, ...], seed: int) -> Case:
    rng = np.random.default_rng(seed)
    form = config.format
    pages = rng.integers(0, 256, (2 * sum(tiles), PAGE, form.width), dtype=np.uint8).reshape(2 * sum(tiles), -1)
    rows = len(tiles) * config.next_n
    query = rng.integers(0, 256, (rows, config.heads, form.query_width), dtype=np.uint8)
    scales = pages[:, form.scale_offset :]
    if config.format.is_fp8:
        for codes in (pages[:, : form.scale_offset], query):
            codes[(codes & 0x7F) == 0x7F] = 0x30  # NaN has its own tests: test_sm100_nan.py
        if config.key_format == "fp8_fp32":
            scales[:] = rng.uniform(0.001, 2.0, (len(pages), PAGE)).astype(np.float32).view(np.uint8)
        else:
            scales[:] = rng.integers(110, 135, (len(pages), PAGE), dtype=np.uint8).repeat(4, 1)
    else:
        scales[:] = rng.integers(118, 132, scales.shape, dtype=np.uint8)
    words = rng.integers(118, 132, (rows, config.heads, 4), dtype=np.uint8)
    weights = torch.from_numpy(rng.standard_normal((rows, config.heads)).astype(np.float32))
    if config.weights == "bfloat16":
        weights = weights.to(torch.bfloat16)
    longest = np.array(tiles)[:, None] * TILE
    lengths = np.maximum(longest - rng.integers(0, TILE, (len(tiles), config.next_n)), 0)
    ids = iter(rng.permutation(len(pages)))
    table = np.full((len(tiles), 2 * max(tiles)), GARBAGE, np.int32)
    for request, needed in enumerate(-(-lengths.max(1) // PAGE)):
        table[request, :needed] = [next(ids) for _ in range(needed)]
    return Case(config, tiles, pages, table, query, words, weights, lengths)


class Device:
    """A block of the scorer, every warp of it executed. block, blocks: which of how many. lanes: those of an epilogue
    warp that are computed, one after another (compact: all at once)."""

    def __init__(
        self,
        case: Case,
        shape: ScoreShape,
        seed: int,
        lanes: tuple[int, ...],
        edits: tuple[tuple[str, str], ...] = (),
        block: int = 0,
        blocks: int = 1,
    ) -> None:
        config = case.config
        form, places = config.format, smem_map(config, shape)
        self.case, self.lanes, self.cut = case, lanes, (block, blocks)
        self.capacity = 1 << 20
        self.sharding = 0
        self.unit = unit = Unit(places.total, seed)
        self.here = Lanes()
        self.code = device_code(unit, self.here, edits)
        self.feed = producer_code(unit, self.here, edits)
        self.kernel = SimpleNamespace(
            sends_alike=block % 2 == 1,  # as Hopper's scorer does, in every second block
            config=config,
            shape=EarlyShape(**vars(shape)) if block % 4 > 1 else shape,  # as some cuts of Hopper's are
            places=places,
            tensor=tensor_map(config, shape),
            chunks=chunks_of(config, shape),
            home_rounds=min(HOME_ROUNDS, shape.stages - 1),
            boxes=SimpleNamespace(page_bytes=form.page_bytes, row_bytes=config.row_bytes),
        )
        for called, function in methods(unit, self.here, self.code, edits).items():
            setattr(self.kernel, called, MethodType(function, self.kernel))
        unit.allocated = self.kernel.tensor.columns
        unit.plan = NamedBarrier(THREADS // 32)
        stride = form.page_bytes + PADDING
        unit.pool = (KEYS_AT, stride, case.pages)
        at = {name: unit.origin + getattr(places, name) for name in vars(places)}
        self.shared = SimpleNamespace(
            **{name: at[name] for name in ("scales", "weights", "lengths", "prefix", "rest", "orders", "descriptors")},
            tensor=at["tensor"],
            origin=unit.origin,
            scale_source=KEYS_AT + form.scale_offset,
            page_stride=stride,
            query_words=WORDS_AT,
            over=self.feed["reciprocal"](len(case.tiles)),
            **self._barriers(shape),
        )
        self.code["ptx"].store_shared(at["tensor"], 0)  # the allocation begins at column 0
        self.led = len(case.tiles) <= self.feed["few"](config.next_n)
        if not self.led:  # the plan of many requests is all threads' work, and not part of this model
            pages = -(-case.lengths.max(1) // PAGE)
            for request, before in enumerate(np.cumsum([0, *case.tiles])):
                half = int(request < len(pages) and pages[request] % 2)
                self.code["ptx"].store_shared(at["prefix"] + 4 * request, int(before) << 1 | half)
        for place, data in ((WORDS_AT, case.words), (WEIGHTS_AT, case.weights), (TABLE_AT, case.table)):
            self._put_global(place, data)
        self._put_global(LENS_AT, case.lengths.astype(np.int32))

    def _barriers(self, shape: ScoreShape) -> dict[str, Barriers]:
        """As `ScoreKernel.begin` makes them; tests/compile/test_sm100_code.py holds the counts to the compiled code."""
        arrivals = {
            "key_full": (shape.stages, 1),
            "key_empty": (shape.stages, 1 + WARPS * len(self.kernel.chunks)),
            "scales_ready": (shape.stages, 1),
            "query_full": (shape.query_stages, 2),
            "query_empty": (shape.query_stages, 1 + WARPS * GROUPS),
            "sum_full": (shape.accumulators, 1),
            "sum_empty": (shape.accumulators, WARPS),
            "order_full": (ORDERS, 1),
            "order_empty": (ORDERS, 1),
        }
        return {name: Barriers(tuple(Barrier(each) for _ in range(count))) for name, (count, each) in arrivals.items()}

    def _put_global(self, at: int, data: Any) -> None:
        raw = data.contiguous().view(torch.uint8).numpy() if isinstance(data, torch.Tensor) else data
        self.unit.memory.update({at + i: byte for i, byte in enumerate(raw.tobytes())})

    # --- the warps: a thread a lane, or one for all of them ----------------------------------------------------------

    def stream_keys(self, lane: int, together: Warp) -> None:
        self.here.join(KEY_WARP, lane, together)
        case, config, feed = self.case, self.case.config, self.feed
        requests, width = case.table.shape
        lens, limit, skip = feed["lengths_of"](config.layout, LENS_AT, self.sharding), PAGE * width, 0
        asked = (0, 0)
        if self.led:
            asked = feed["ask_ahead"](self.kernel, lens, TABLE_AT, width, requests, limit, *self.cut, self.shared.over)
        pool = ByNumber(lambda page: case.pages[page][: config.format.scale_offset].reshape(PAGE, config.row_bytes))
        ring = ByNumber(
            lambda slot: self.unit.origin + key_tile(self.kernel.places, slot // 2) + slot % 2 * PAGE * config.row_bytes
        )
        feed["page_views"] = lambda *_: (pool, ring)
        where = (TABLE_AT, width, len(case.pages), FLAGS_AT, lens)
        numbers = (requests, limit, skip, self.capacity, *self.cut, *asked)
        feed["stream_keys"](self.kernel, self.shared, None, None, *where, *numbers)

    def stream_queries(self, lane: int, together: Warp) -> None:
        self.here.join(QUERY_WARP, lane, together)
        case, config, feed = self.case, self.case.config, self.feed
        requests, width = case.table.shape
        rows = ByNumber(lambda row: case.query[row])
        held = ByNumber(lambda part, stage: self.unit.origin + query_rows(config, self.kernel.places, part, stage))
        feed["row_views"] = lambda *_: (rows, held)
        lens = feed["lengths_of"](config.layout, LENS_AT, self.sharding)
        numbers = (PAGE * width, requests, self.capacity, *self.cut)
        feed["stream_queries"](self.kernel, self.shared, None, None, WEIGHTS_AT, lens, *numbers)

    def await_plan(self) -> None:
        """With few requests, what every other warp does before all else; here by one thread a warp."""
        if self.led:
            self.unit.plan.arrive()
            self.unit.plan.wait()

    def multiply(self) -> None:
        self.here.join(MATRIX_WARP, 0)
        self.await_plan()
        self.code["multiply"](self.kernel, self.shared)
        for number, barrier in enumerate(self.shared.key_empty.items):
            assert barrier.pending == barrier.count, f"stage {number} is still in use when the products are over"

    def set_up(self, lane: int, together: Warp) -> None:
        self.here.join(SETUP_WARP, lane, together)
        if lane == 0:
            self.await_plan()
        together.meet()
        if not self.case.config.format.is_fp8:
            self.code["arrange_key_scales"](self.kernel, self.shared)

    def finish(self, warp: int, lane: int, together: Warp | None = None) -> None:
        self.here.join(warp, lane, together)
        if together is not None:
            if lane == 0:
                self.await_plan()
            together.meet()
        targets = SimpleNamespace(logits=LOGITS_AT, tops=TOPS_AT, pitch=PITCH)
        self.code["finish"](self.kernel, self.shared, targets, 32 * warp + lane)

    def finish_in_turn(self, warp: int) -> None:
        self.await_plan()
        for lane in self.lanes:
            self.finish(warp, lane)

    def run(self) -> np.ndarray:
        """BF16 bits [rows, keys] of pitched logits; -1 where nothing was stored."""
        self.run_warps()
        rows, keys = len(self.case.tiles) * self.case.config.next_n, max(self.case.tiles) * TILE
        return np.stack([self.stored(LOGITS_AT + 2 * row * PITCH, keys) for row in range(rows)])

    def stored(self, at: int, count: int) -> np.ndarray:
        """16-bit elements of global memory; -1 where nothing was stored."""
        memory = self.unit.memory
        places = range(at, at + 2 * count, 2)
        return np.array([memory[p] | memory[p + 1] << 8 if p in memory else -1 for p in places])

    def run_warps(self) -> None:
        jobs: list[Any] = [self.multiply]
        warps: list[Warp] = []
        for role in (self.stream_keys, self.stream_queries, self.set_up):
            warps.append(Warp(DEADLINE))
            jobs += [lambda r=role, x=lane, t=warps[-1]: r(x, t) for lane in range(32)]
        for warp in range(GROUPS * WARPS):
            if self.case.config.layout == "compact":  # the maxima cross lanes
                warps.append(Warp(DEADLINE))
                jobs += [lambda w=warp, x=lane, t=warps[-1]: self.finish(w, x, t) for lane in range(32)]
            else:
                jobs.append(lambda warp=warp: self.finish_in_turn(warp))
        failures = run_together(jobs, warps)
        self.unit.close()
        if self.unit.failures or failures:
            raise (self.unit.failures + failures)[0]


def name(config: ScoreConfig) -> str:
    return f"{config.key_format}-{config.numerics}-{config.heads}x{config.next_n}-{config.weights}"


EVERY_LANE = (*range(1, 32), 0)
"""One after another, the lane that arrives for the warp last. For blocks whose tiles and products all fit at once."""


def expected(case: Case) -> np.ndarray:
    """BF16 bits of the logits by the documented order of each numerics, -1 past a row's length. fp32 has no other
    statement in Python than this one; bf16 has the reference (see below)."""
    config = case.config
    form = config.format
    out = np.full((len(case.query), max(case.tiles) * TILE), -1)
    for request in range(len(case.tiles)):
        pages = case.pages[np.minimum(case.table[request], len(case.pages) - 1)]  # garbage is beyond every length
        codes, scales = pages[:, : form.scale_offset], pages[:, form.scale_offset :]
        if config.format.is_fp8:
            keys, factor = e4m3(codes).reshape(-1, 128), key_scales(config, scales)
        else:
            keys, factor = dequantised(codes.reshape(-1, 64), scales.reshape(-1, 4)), None
        for j in range(config.next_n):
            row = request * config.next_n + j
            query = e4m3(case.query[row]) if factor is not None else dequantised(case.query[row], case.words[row])
            dots = np.maximum(query @ keys.T, 0.0).astype(np.float32)
            weights = [Fraction(float(w)) for w in case.weights[row].float()]
            for key in range(int(case.lengths[request, j])):
                if np.isnan(dots[:, key]).any() or (factor is not None and np.isnan(factor[key])):
                    out[row, key] = CANONICAL_NAN
                    continue
                parts = [Fraction(0)] * 4
                for head in range(config.heads):
                    term = Fraction(float(dots[head, key])) * weights[head] + parts[head % 4]
                    parts[head % 4] = Fraction(float(f32(term)))
                pairs = [Fraction(float(f32(parts[i] + parts[i + 1]))) for i in (0, 2)]
                total = f32(pairs[0] + pairs[1])
                if factor is not None:
                    total = f32(Fraction(float(total)) * Fraction(float(factor[key])))
                out[row, key] = bf16(float(total))
    return out


def key_scales(config: ScoreConfig, scales: np.ndarray) -> np.ndarray:
    if config.key_format == "fp8_fp32":
        return np.ascontiguousarray(scales).view(np.float32).reshape(-1)
    return ue8m0(scales.reshape(-1, 4)[:, 0])


def dequantised(pairs: np.ndarray, scales: np.ndarray) -> np.ndarray:
    values = E2M1[np.stack([pairs & 15, pairs >> 4], -1)].reshape(len(pairs), 4, 32)
    return (values * ue8m0(scales)[..., None]).reshape(len(pairs), 128)


def by_reference(case: Case) -> np.ndarray:
    """The same from the cpu backend, with the case's numerics."""
    config = case.config
    spec = ks.IndexerSpec(heads=config.heads, topk=1, key_format=config.key_format, numerics=config.numerics)
    pages = torch.from_numpy(case.pages.reshape(len(case.pages), PAGE, -1).copy())
    codes = torch.from_numpy(case.query)
    query: Any = codes.view(torch.float8_e4m3fn)
    if not config.format.is_fp8:
        query = (codes, torch.from_numpy(case.words).view(torch.int32).squeeze(-1))
    width = case.table.shape[1]
    lengths = torch.from_numpy(case.lengths.astype(np.int32))
    logits = ks.score(
        spec,
        query,
        ks.IndexCache(spec, pages),
        case.weights,
        lengths,
        torch.from_numpy(case.table),
        max_len=width * PAGE,
    )
    bits = logits.view(torch.int16).numpy().astype(np.int64) & 0xFFFF
    inside = np.arange(width * PAGE)[None] < case.lengths.reshape(-1, 1)
    return np.where(inside, bits, -1)
