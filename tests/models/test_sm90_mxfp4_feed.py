"""The producer warps of Hopper's MXFP4 scorer, executed: every tile once, on its own pages and queries.

All blocks of a launch one after another, a thread a lane of the key, query and planning warps and one a group of
consumers, which let go of tiles and queries as the device's do and note what they would score.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sm100_source import PRODUCERS, Lanes, Warp, bindings, execute, functions, run_together
from sm100_unit import Barrier, Barriers, NamedBarrier, Unit

from keysieve.kernels.score_cut import HOME_ROUNDS, ORDERS
from keysieve.kernels.sm90_mxfp4_config import (
    PAGE_SLOT,
    QUERY_BARRIER,
    SCALE_PLACE,
    START_BARRIER,
    shape_of,
    smem_map,
)
from keysieve.kernels.sm90_score_config import NO_REQUEST, PAGES_PER_TILE, ScoreConfig
from keysieve.spec import PAGE, TILE

LENS, TABLE, FLAGS, KEYS = 3 << 20, 4 << 20, 5 << 20, 1 << 32
STRIDE = PAGE_SLOT + 48
GARBAGE = 0x7FFFFFFF
FILES = ("schedule_spread.py", "sm90_mxfp4_send.py", "sm90_mxfp4_start.py", "sm90_mxfp4_feed.py")
ROWS = ("prefix", "rest", "orders", "descriptors", "scratch", "keys", "weights", "lengths")


class Case:
    """Requests of so many tiles, each longest row ending somewhere in its last one; pages in any order."""

    def __init__(self, next_n: int, tiles: tuple[int, ...], skip: int = 0) -> None:
        rng = np.random.default_rng(len(tiles) + sum(tiles))
        self.config = ScoreConfig("mxfp4", 32 if next_n == 1 else 16, next_n, "compact", "float32")
        self.skip = skip
        longest = np.array(tiles)[:, None] * TILE
        self.lengths = np.maximum(longest - rng.integers(0, TILE, (len(tiles), next_n)), 0)
        self.lengths[:, 0] = np.where(self.lengths.max(1) > 0, self.lengths.max(1), 0)
        top = self.lengths.max(1)
        self.tiles = [-(-int(n) // TILE) if n > skip else 0 for n in top]
        self.pages = rng.integers(0, 256, (PAGES_PER_TILE * sum(tiles), PAGE_SLOT), dtype=np.uint8)
        ids = iter(rng.permutation(len(self.pages)))
        self.table = np.full((len(tiles), PAGES_PER_TILE * max(tiles)), GARBAGE, np.int32)
        for request, count in enumerate(-(-top // PAGE)):
            self.table[request, :count] = [next(ids) for _ in range(count)]


class Block:
    """One block of a launch."""

    def __init__(self, case: Case, block: int, blocks: int, edits: tuple[tuple[str, str], ...] = ()) -> None:
        self.case, self.cut = case, (block, blocks)
        config, shape = case.config, shape_of(case.config)
        self.shape, places = shape, smem_map(config, shape)
        self.unit, self.here = Unit(places.total, block), Lanes()
        self.unit.plan = NamedBarrier(shape.threads // 32 - 1)  # all but the query warp
        start = NamedBarrier(shape.producer_warps)
        self.unit.meetings = {START_BARRIER: start, QUERY_BARRIER: NamedBarrier(2)}
        self.unit.pool = (KEYS, STRIDE, case.pages)
        self.names = names = self.code(edits)
        at = {name: self.unit.origin + getattr(places, name) for name in ROWS}
        rings = (
            ("key_full", shape.stages, 1),
            ("key_empty", shape.stages, 4),
            ("query_full", shape.query_stages, 2),
            ("query_empty", shape.query_stages, 4 * shape.groups),
            ("order_full", ORDERS, 1),
            ("order_empty", ORDERS, 1),
        )
        barriers = {name: Barriers(tuple(Barrier(arrivals) for _ in range(n))) for name, n, arrivals in rings}
        over = names["spread"](len(case.tiles), blocks)
        landed = Barriers(tuple(Barrier(1) for _ in range(shape.stages)))
        self.shared = SimpleNamespace(**at, **barriers, landed=landed, over=over)
        self.kernel = SimpleNamespace(
            config=config,
            shape=shape,
            places=places,
            home_rounds=min(HOME_ROUNDS, shape.stages - 1),
            query_warp=4 * shape.groups + 1,
            boxes=SimpleNamespace(page_bytes=PAGE_SLOT, slot_bytes=PAGE_SLOT),
        )
        names.update(widen_queries=self.widen_queries, scale_weights=lambda *_: None)
        self.home = over.home_of(block)
        self.queries: dict[int, int] = {}  # request by stage
        self.seen: list[tuple[int, int]] = []
        self.led = len(case.tiles) <= names["few"](config.next_n)
        memory = ((LENS, case.lengths.astype(np.int32)), (TABLE, case.table))
        for place, data in memory:
            self.unit.memory.update({place + i: byte for i, byte in enumerate(data.tobytes())})
        if not self.led:  # all threads of the block have made it
            pages = -(-case.lengths.max(1) // PAGE)
            for request, before in enumerate(np.cumsum([0, *case.tiles])):
                half = int(request < len(case.tiles) and pages[request] % 2)
                names["ptx"].store_shared(at["prefix"] + 4 * request, int(before) << 1 | half)

    def code(self, edits: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        """The producers' functions by name, over this block's memory."""
        names = bindings(self.unit, self.here)
        up = names["cute"].arch.shuffle_sync_up
        names["cute"].arch.shuffle_sync_up = lambda value, d, mask_and_clamp=0: up(value, d, mask_and_clamp)
        names["cute"].arch.mbarrier_test_wait = lambda barriers, parity: barriers.here.passes(parity)
        names["Int64"] = type("Int64", (int,), {})
        names["score_trace"] = SimpleNamespace(mark=lambda *_: None, COPYING=0, PLANNED=0)
        for file, only in (*PRODUCERS, *((file, None) for file in FILES)):
            execute(functions(file, only, edits), file, names)
        names["scale_words"] = lambda _kernel, shared, slot: shared.keys + slot * PAGE_SLOT + SCALE_PLACE
        names.update(START_BARRIER=START_BARRIER, QUERY_BARRIER=QUERY_BARRIER)
        names["scan"] = names["schedule"] = names["homes"] = SimpleNamespace(**names)
        return names

    def widen_queries(
        self, _kernel: Any, shared: Any, _query: Any, _words: Any, _weights: Any, row: int, *rest: Any
    ) -> int:
        stage, phase, lane, starts = rest
        if starts:
            self.names["meet"](self.kernel)
        else:
            self.names["sync"].wait_barrier(shared.query_empty + stage, phase)
        if lane == 0:
            self.queries[stage] = row // self.case.config.next_n
        self.here.meet()
        return 0

    def asked(self) -> tuple[Any, ...]:
        """What the warps that send are told."""
        requests, width = self.case.table.shape
        lens = self.names["lengths_of"]("compact", LENS, 0)
        sources = SimpleNamespace(keys=KEYS, stride=STRIDE)
        return (sources, TABLE, width, len(self.case.pages), FLAGS, lens, requests, PAGE * width, self.case.skip)

    def key_warp(self, lane: int, together: Warp) -> None:
        self.here.join(12, lane, together)
        numbers = (1 << 20, *self.cut, self.home)
        self.names["stream_keys"](self.kernel, self.shared, *self.asked(), *numbers)

    def scale_warp(self) -> None:
        """It makes barriers: here they are made with the block."""
        if self.led:
            self.unit.meetings[START_BARRIER].arrive()
            self.unit.plan.arrive()

    def query_warp(self, lane: int, together: Warp) -> None:
        self.here.join(13, lane, together)
        requests, width = self.case.table.shape
        lens = self.names["lengths_of"]("compact", LENS, 0)
        numbers = (lens, PAGE * width, requests, 1 << 20, self.home)
        self.names["stream_queries"](self.kernel, self.shared, 0, 0, 0, *numbers)

    def plan_warp(self, lane: int, together: Warp) -> None:
        self.here.join(15, lane, together)
        requests, width = self.case.table.shape
        if self.led:
            lens = self.names["lengths_of"]("compact", LENS, 0)
            numbers = (FLAGS, lens, requests, PAGE * width, self.case.skip, self.cut[0])
            self.names["plan_few"](self.kernel, self.shared, *numbers)
            self.names["wait_for_plan"](self.kernel)

    def wait_for_plan(self) -> None:
        if self.led:
            self.unit.plan.arrive()
            self.unit.plan.wait()

    def consumers(self, group: int) -> None:
        """A warpgroup: its four warps' arrivals are this thread's."""
        for _warp in range(4):
            self.wait_for_plan() if _warp == 3 else self.unit.plan.arrive() if self.led else None
        held, number, shape, shared = -1, group, self.shape, self.shared
        load = self.names["ptx"].load_shared_v4
        while True:
            stage = number % shape.stages
            (shared.key_full + stage).here.wait(number // shape.stages & 1)
            request, tile, ordered, _ = load(shared.descriptors + 16 * stage)
            if request == NO_REQUEST & 0xFFFFFFFF:
                break
            for passed in range(held + 1, ordered + 1):
                if passed > 0:
                    self.release(shared.query_empty + (passed - 1) % shape.query_stages)
                place = passed % shape.query_stages
                (shared.query_full + place).here.wait(passed // shape.query_stages & 1)
            held = ordered
            assert self.queries[held % shape.query_stages] == request, "other queries"
            self.check_pages(request, tile, stage)
            self.seen.append((request, tile))
            self.release(shared.key_empty + stage)
            number += shape.groups
        if held >= 0 or self.led:
            self.release(shared.query_empty + max(held, 0) % shape.query_stages)

    def release(self, barriers: Any) -> None:
        for _warp in range(4):
            barriers.here.arrive()

    def check_pages(self, request: int, tile: int, stage: int) -> None:
        for half in range(PAGES_PER_TILE):
            page = PAGES_PER_TILE * tile + half
            if page * PAGE < self.case.lengths[request].max():
                at = self.shared.keys + (PAGES_PER_TILE * stage + half) * PAGE_SLOT
                want = self.case.pages[self.case.table[request, page]]
                assert np.array_equal(self.unit.smem[at : at + PAGE_SLOT], want), (request, page)

    def run(self) -> list[tuple[int, int]]:
        """Scored tiles."""
        warps = [Warp(60.0) for _ in range(3)]
        roles = zip((self.key_warp, self.query_warp, self.plan_warp), warps, strict=True)
        jobs = [partial(role, lane, warp) for role, warp in roles for lane in range(32)]
        jobs.append(self.scale_warp)
        jobs += [partial(self.consumers, group) for group in range(self.shape.groups)]
        failures = run_together(jobs, warps)
        self.unit.close()
        if failures:
            raise failures[0]
        return self.seen


CASES = {
    "even, a block each": (1, (18, 18, 18), 3, 0),
    "even, several blocks each": (1, (20, 14), 5, 0),
    "even, short": (4, (2, 2, 1, 0), 4, 0),
    "even, a run behind sixteen home tiles": (1, (39, 40), 4, 0),
    "uneven, a request more than blocks": (1, (3, 25, 1, 0, 9), 4, 0),
    "uneven, fewer requests than blocks": (1, (3, 25, 9), 5, 0),
    "uneven by one tile": (1, (5, 3), 2, 0),
    "more requests than blocks": (1, (0, 7, 1, 0, 3, 12), 3, 0),
    "blocks without a tile": (1, (2,), 4, 0),
    "no tiles": (4, (0, 0, 9, 0), 3, 0),
    "four requests a lane": (1, (1, 0, 2, 1) * 9, 2, 0),
    "many requests": (4, (*((1, 0, 2) * 11), 9), 2, 0),
    "short ones are not scored": (1, (5, 20, 2, 6), 3, 700),
}


@pytest.mark.parametrize("name", CASES)
def test_every_tile_once_on_its_own_pages_and_queries(name: str) -> None:
    next_n, tiles, blocks, skip = CASES[name]
    case = Case(next_n, tiles, skip)
    done = [Block(case, block, blocks).run() for block in range(blocks)]
    want = [(request, tile) for request, count in enumerate(case.tiles) for tile in range(count)]
    assert sorted(tile for seen in done for tile in seen) == want
    assert max(map(len, done)) <= -(-sum(case.tiles) // blocks)
    if name.startswith("even"):
        assert all(len({request for request, _ in seen}) <= 1 for seen in done), "blocks keep to their request"


def test_a_run_that_is_cut_wrongly_is_noticed() -> None:
    """What the test is for: tiles behind the home tiles twice, and others never."""
    next_n, tiles, blocks, skip = CASES["even, a run behind sixteen home tiles"]
    case = Case(next_n, tiles, skip)
    edits = (("first + run, end)", "first + run + Int32(1), end)"),)
    done = [tile for block in range(blocks) for tile in Block(case, block, blocks, edits).run()]
    assert len(done) > len(set(done))
