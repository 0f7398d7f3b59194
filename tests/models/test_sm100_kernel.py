"""The Blackwell scorer's own source, run in Python on a model of the chip: bytes in, logits out, bit for bit.

What is executed is the text of `sm100_score_math` and `sm100_score_feed` (and what they share with Hopper): addresses,
descriptors, instruction words, scale orders, tensor-memory columns, head sums, rounding, barriers and phases. What is
modelled (tests/models/sm100_unit.py) is written from the PTX ISA. The producers' copies are played by the test.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sm100_unit
import torch
from sm100_source import KERNELS, Lanes, Warp, bf16, device_code, f32
from sm100_unit import DEADLINE, E2M1, Barrier, Barriers, Unit, e4m3, ue8m0

import keysieve as ks
from keysieve.kernels.sm100_score_config import (
    GROUPS,
    WARPS,
    ScoreConfig,
    ScoreShape,
    chunks_of,
    key_tile,
    query_rows,
    shape_of,
    smem_map,
    tensor_map,
)
from keysieve.spec import CANONICAL_NAN, PAGE, TILE, key16

WORDS_AT, WEIGHTS_AT, LOGITS_AT, TOPS_AT, PITCH = 1 << 20, 2 << 20, 1 << 24, 1 << 28, 1 << 16


@dataclass
class Case:
    """One block's work. tiles: of each request. Keys lie in pages 2 i and 2 i + 1 for the i-th tile."""

    config: ScoreConfig
    tiles: tuple[int, ...]
    pages: np.ndarray
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
    lengths = longest - rng.integers(0, TILE, (len(tiles), config.next_n))
    return Case(config, tiles, pages, query, words, weights, lengths)


class Device:
    """A block of the scorer: the executed warps, and the producers."""

    def __init__(
        self, case: Case, shape: ScoreShape, seed: int, lanes: tuple[int, ...], edits: tuple[tuple[str, str], ...] = ()
    ) -> None:
        config = case.config
        self.case, self.lanes = case, lanes
        self.kernel = SimpleNamespace(
            config=config,
            shape=shape,
            places=smem_map(config, shape),
            tensor=tensor_map(config, shape),
            chunks=chunks_of(config, shape),
        )
        places = self.kernel.places
        self.unit = Unit(places.total, seed)
        self.unit.allocated = self.kernel.tensor.columns
        self.here = Lanes()
        self.code = device_code(self.unit, self.here, edits)
        chunks = len(self.kernel.chunks)
        at = {name: self.unit.origin + getattr(places, name) for name in vars(places)}

        def barriers(count: int, arrivals: int) -> Barriers:
            return Barriers(tuple(Barrier(arrivals) for _ in range(count)))

        self.shared = SimpleNamespace(
            **{name: at[name] for name in ("scales", "weights", "lengths", "prefix", "descriptors", "tensor")},
            origin=self.unit.origin,
            key_full=barriers(shape.stages, 1),
            key_empty=barriers(shape.stages, 1 + WARPS * chunks),
            scales_ready=barriers(shape.stages, 1),
            query_full=barriers(shape.query_stages, 2),
            query_empty=barriers(shape.query_stages, 1 + WARPS * GROUPS),
            sum_full=barriers(shape.accumulators, 1),
            sum_empty=barriers(shape.accumulators, WARPS),
        )
        self.code["ptx"].store_shared(at["tensor"], 0)  # the allocation begins at column 0
        for request, before in enumerate(np.cumsum([0, *case.tiles])):
            self.code["ptx"].store_shared(at["prefix"] + 4 * request, int(before) << 1)
        self._put_global(WORDS_AT, case.words)
        self._put_global(WEIGHTS_AT, case.weights)

    def _put_global(self, at: int, data: Any) -> None:
        raw = data.contiguous().view(torch.uint8).numpy() if isinstance(data, torch.Tensor) else data
        self.unit.memory.update({at + i: byte for i, byte in enumerate(raw.tobytes())})

    # --- the producers, played here -----------------------------------------------------------------------------------

    def stream_keys(self) -> None:
        config, places, shape = self.case.config, self.kernel.places, self.kernel.shape
        form, number = config.format, 0
        for sequence, count in enumerate(self.case.tiles):
            for tile in range(count):
                stage, lap = number % shape.stages, number // shape.stages
                (self.shared.key_empty + stage).here.wait(1 ^ lap & 1)
                for half in range(2):
                    page = self.case.pages[2 * number + half]
                    rows = page[: form.scale_offset].reshape(PAGE, config.row_bytes)
                    slot = self.unit.origin + key_tile(places, stage) + half * PAGE * config.row_bytes
                    self.unit.copy_box(slot, rows)
                    at = self.shared.scales + (2 * stage + half) * 4 * PAGE
                    self.unit.smem[at : at + 4 * PAGE] = page[form.scale_offset :]
                self.code["ptx"].store_shared_v4(self.shared.descriptors + 16 * stage, sequence, tile, sequence, 0)
                (self.shared.key_full + stage).here.arrive()
                number += 1

    def stream_queries(self) -> None:
        case, places, shape = self.case, self.kernel.places, self.kernel.shape
        config = case.config
        for request in range(len(case.tiles)):
            stage, lap = request % shape.query_stages, request // shape.query_stages
            (self.shared.query_empty + stage).here.wait(1 ^ lap & 1)
            first = request * config.next_n
            for row in range(config.next_n):
                at = self.unit.origin + query_rows(config, places, row, stage)
                self.unit.copy_box(at, case.query[first + row])
                self.code["ptx"].store_shared(
                    self.shared.lengths + 32 * stage + 4 * row, int(case.lengths[request, row])
                )
            for lane in range(32):
                self.code["put_weights"](self.kernel, self.shared, WEIGHTS_AT, first, stage, lane)
                if not config.format.is_fp8:
                    self.code["put_query_scales"](self.kernel, self.shared, WORDS_AT, first, stage, lane)
            for _ in range(2):
                (self.shared.query_full + stage).here.arrive()

    # --- the executed warps -------------------------------------------------------------------------------------------

    def multiply(self) -> None:
        self.code["multiply"](self.kernel, self.shared, 0, sum(self.case.tiles))

    def arrange(self, lane: int, meet: Any) -> None:
        self.here.lane, self.here.meet = lane, meet
        self.code["arrange_key_scales"](self.kernel, self.shared, 0, sum(self.case.tiles))

    def finish(self, warp: int, lane: int, together: Warp | None = None) -> None:
        self.here.warp, self.here.lane = warp, lane
        if together is not None:
            self.here.meet, self.here.exchange = together.meet, together.exchange
        targets = SimpleNamespace(logits=LOGITS_AT, tops=TOPS_AT, pitch=PITCH)
        self.code["finish"](self.kernel, self.shared, targets, 32 * warp + lane, 0, sum(self.case.tiles))

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
        jobs = [self.stream_keys, self.stream_queries, self.multiply]
        if not self.case.config.format.is_fp8:
            meeting = threading.Barrier(32, timeout=DEADLINE)
            jobs += [lambda lane=lane: self.arrange(lane, meeting.wait) for lane in range(32)]
        for warp in range(GROUPS * WARPS):
            if self.case.config.layout == "compact":  # the maxima cross lanes
                together = Warp(DEADLINE)
                jobs += [lambda w=warp, x=lane, t=together: self.finish(w, x, t) for lane in range(32)]
            else:
                jobs.append(lambda warp=warp: [self.finish(warp, lane) for lane in self.lanes])
        failures: list[BaseException] = []

        def guarded(job: Any) -> None:
            try:
                job()
            except BaseException as failure:
                failures.append(failure)
                Barrier.give_up()

        threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * DEADLINE)
        self.unit.close()
        if self.unit.failures or failures:
            raise (self.unit.failures + failures)[0]


EVERY_LANE = (*range(1, 32), 0)
"""One after another, the lane that arrives for the warp last. For blocks whose tiles and products all fit at once."""


def expected(case: Case) -> np.ndarray:
    """BF16 bits of the logits by the documented order of each numerics, -1 past a row's length. fp32 has no other
    statement in Python than this one; bf16 has the reference (see below)."""
    config = case.config
    form = config.format
    out = np.full((len(case.query), max(case.tiles) * TILE), -1)
    first = 0
    for request, tiles in enumerate(case.tiles):
        pages = case.pages[first : first + 2 * tiles]
        first += 2 * tiles
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
    width = 2 * max(case.tiles)
    starts = np.cumsum([0, *case.tiles]) * 2
    table = np.zeros((len(case.tiles), width), np.int32)
    for request, tiles in enumerate(case.tiles):
        table[request, : 2 * tiles] = np.arange(starts[request], starts[request] + 2 * tiles)
    lengths = torch.from_numpy(case.lengths.astype(np.int32))
    logits = ks.score(
        spec, query, ks.IndexCache(spec, pages), case.weights, lengths, torch.from_numpy(table), max_len=width * PAGE
    )
    bits = logits.view(torch.int16).numpy().astype(np.int64) & 0xFFFF
    inside = np.arange(width * PAGE)[None] < case.lengths.reshape(-1, 1)
    return np.where(inside, bits, -1)


ONE_TILE = [
    ScoreConfig("fp8_fp32", "fp32", 8, 3, "pitched", "float32"),  # 24 columns, padded to 32
    ScoreConfig("fp8_ue8m0", "bf16", 32, 2, "pitched", "float32"),
    ScoreConfig("fp8_fp32", "bf16", 64, 5, "pitched", "bfloat16"),  # two products
    ScoreConfig("fp8_ue8m0", "fp32", 16, 1, "pitched", "bfloat16"),
    ScoreConfig("mxfp4", "bf16", 32, 5, "pitched", "float32"),  # two products
    ScoreConfig("mxfp4", "fp32", 8, 1, "pitched", "float32"),
    ScoreConfig("mxfp4", "fp32", 64, 3, "pitched", "bfloat16"),  # two products
]


def name(config: ScoreConfig) -> str:
    return f"{config.key_format}-{config.numerics}-{config.heads}x{config.next_n}-{config.weights}"


@pytest.mark.parametrize("config", ONE_TILE, ids=name)
def test_a_tile_bit_for_bit(config: ScoreConfig) -> None:
    """Every lane, every row, every head of one tile, from cache bytes to stored bits."""
    case = make_case(config, (1,), seed=config.columns)
    got = Device(case, shape_of(config), 1, EVERY_LANE).run()
    wanted = by_reference(case) if config.numerics == "bf16" else expected(case)
    np.testing.assert_array_equal(got, wanted)
    assert len(np.unique(got)) > 25, "the case says nothing"


@pytest.mark.parametrize("key_format", ["fp8_ue8m0", "mxfp4"])
def test_compact_rows_and_the_maxima_of_eight(key_format: str) -> None:
    """Two requests, all lanes at once: rows where the layout puts them, and the largest key16 of each 8 keys."""
    config = ScoreConfig(key_format, "bf16", 8, 3, "compact", "float32")
    case = make_case(config, (2, 1), seed=3)
    device = Device(case, shape_of(config), 1, EVERY_LANE)
    device.run_warps()
    wanted = by_reference(case)
    row = 0
    for request, tiles in enumerate(case.tiles):
        before = sum(case.tiles[:request])
        for j in range(config.next_n):
            element = TILE * (config.next_n * before + j * tiles)
            keys = tiles * TILE
            np.testing.assert_array_equal(device.stored(LOGITS_AT + 2 * element, keys), wanted[row, :keys])
            ranks = np.array([-1 if bits < 0 else key16(int(bits)) for bits in wanted[row, :keys]])
            tops = device.stored(TOPS_AT + 2 * (element // 8), keys // 8)
            np.testing.assert_array_equal(tops, ranks.reshape(-1, 8).max(1))
            row += 1


RINGS = [
    (ScoreConfig("fp8_fp32", "bf16", 8, 1, "pitched", "float32"), ScoreShape(3, 2, 256, 4)),
    (ScoreConfig("fp8_fp32", "bf16", 64, 5, "pitched", "float32"), ScoreShape(2, 2, 256, 2)),
    (ScoreConfig("mxfp4", "bf16", 64, 5, "pitched", "float32"), ScoreShape(3, 2, 128, 2)),  # three products
    (ScoreConfig("mxfp4", "bf16", 16, 1, "pitched", "float32"), ScoreShape(5, 3, 128, 4)),
]


@pytest.mark.parametrize(("config", "shape"), RINGS, ids=lambda value: name(value) if hasattr(value, "heads") else "")
@pytest.mark.parametrize("seed", range(3))
def test_rings_over_many_laps(config: ScoreConfig, shape: ScoreShape, seed: int) -> None:
    """Many requests and tiles through small rings, matrix unit late at random: right bits for lane 0 of every warp."""
    rng = np.random.default_rng(seed)
    tiles = tuple(int(n) for n in rng.choice([1, 1, 1, 2, 3, 7], size=12))
    case = make_case(config, tiles, seed)
    device = Device(case, shape, seed, (0,))
    got = device.run()
    wanted = by_reference(case)
    columns = np.arange(wanted.shape[1]) % 32 == 0
    np.testing.assert_array_equal(got[:, columns], wanted[:, columns])
    assert (got[:, ~columns] == -1).all()
    assert device.unit.counts["products"] == sum(tiles) * len(device.kernel.chunks) * config.steps
    copies = 0 if config.format.is_fp8 else 2 * sum(tiles) * len(device.kernel.chunks)
    assert device.unit.counts["scale copies"] == copies


FAULTS = {
    "a step along K forgotten": ("K_BYTES * step", "0 * step"),
    "first step accumulates": ("step > 0)", "True)"),
    "scale bytes of the wrong half": ("words.mxf4_word(n, 2 * step)", "words.mxf4_word(n, 2 - 2 * step)"),
    "scale order of the page": ("scale_offset(Uint32(lane))", "16 * Uint32(lane) // 4"),
    "wrong quarter of the lanes": (
        "(Uint32(warp * Int32(32)) << Uint32(16))",
        "(Uint32(warp * Int32(16)) << Uint32(16))",
    ),
    "sum read from the next column": ("Uint32(slot), at), count", "Uint32(slot), at) + 1, count"),
    "bf16 pairs split otherwise": ("parts[i % 2])", "parts[i // 2])"),
    "query chunk begins elsewhere": ("places, start, Uint32(query_stage)", "places, 0, Uint32(query_stage)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_model_notices(fault: str) -> None:
    """Each fault, put into the source, changes bits or trips the model: the tests above can fail."""
    old, new = FAULTS[fault]
    sources = [(KERNELS / f"sm100_score_{part}.py").read_text() for part in ("math", "feed")]
    assert any(old in source for source in sources), "the source no longer has the text that this fault changes"
    config = ScoreConfig("mxfp4", "bf16", 64, 3, "pitched", "float32")
    case = make_case(config, (1,), seed=5)
    try:
        got = Device(case, shape_of(config), 1, (0,), edits=((old, new),)).run()
    except AssertionError:
        return
    columns = np.arange(TILE) % 32 == 0
    assert (got[:, columns] != by_reference(case)[:, columns]).any()


def test_an_accumulator_that_changes_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        ScoreShape(4, 2, 256, 3)


def test_a_query_held_too_long_stops_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one tile, two query places: a group that keeps a request until its next product waits for itself."""
    monkeypatch.setattr(sm100_unit, "DEADLINE", 3.0)
    config = ScoreConfig("fp8_fp32", "bf16", 8, 1, "pitched", "float32")
    held = ("// len(kernel.chunks)) >= after:", "// len(kernel.chunks)) >= last:")
    assert held[0] in (KERNELS / "sm100_score_math.py").read_text()
    with pytest.raises(TimeoutError):
        Device(make_case(config, (1,) * 6, 0), ScoreShape(3, 2, 256, 4), 0, (0,), edits=(held,)).run()
