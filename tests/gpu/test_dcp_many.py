"""Four, eight and sixteen context-parallel ranks on one device or spread over two: what one rank alone selects.

N is the default of each W (672, 352 and 224 for 2,048 keys) where a case does not ask for rescues. CUDA's streams must
not share queues: CUDA_DEVICE_MAX_CONNECTIONS=32.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import torch
from dcp_loops import Loop
from dcp_ranks import Context, Geometry, Rank, both, hold, settle, step
from harness import cases, devices
from test_dcp_ranks import warm

SPREAD = [
    Geometry(4, lens=(20000, 1, 4000, 30000), next_n=2, interleave=64),
    Geometry(4, lens=(131072, 80000), heads=8),
    Geometry(6, topk=1000, lens=(12000, 999, 1001), heads=8, distinct=60),
    Geometry(8, lens=(40000, 8000, 2048), distinct=3000),
    Geometry(8, lens=(9000, 9001, 9002, 9003, 0, 50, 6000, 1), next_n=4, interleave=16, key_format="mxfp4"),
    Geometry(8, topn=256, lens=(9000, 2500, 3000), heads=8),
    Geometry(16, lens=(50000, 8000, 16), interleave=64, crowded=True),
    Geometry(16, lens=(9000, 0, 2048, 3000), interleave=64, sharded=False),
]


def places(world: int, count: int) -> list[torch.device]:
    """A device for each rank: the first ones on the first device."""
    return [torch.device("cuda", rank * count // world) for rank in range(world)]


class Ring:
    """All ranks with the same graphs, replayed together."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.loops: list[list[Loop]] = []

    def add(self, sites: list[int], whole: object, rows: int | None = None) -> None:
        """Graphs of a call for each site."""
        warm(self.ranks, rows)
        found = step(self.ranks, rows=rows)
        hold(self.ranks, found, whole, rows)  # type: ignore[arg-type]  # a Selection
        self.loops.append([Loop(rank, sites, right, rows) for rank, right in zip(self.ranks, found, strict=True)])
        settle(self.ranks)

    def replay(self, which: int, order: list[int], delays: dict[int, int], check: bool) -> None:
        for at in order:
            loop = self.loops[which][at]
            with torch.cuda.stream(self.ranks[at].stream):
                if at in delays:
                    torch.cuda._sleep(delays[at])
                loop.calls.replay()
                if check:
                    loop.check.replay()

    def hold(self) -> None:
        settle(self.ranks)
        for loops in self.loops:
            for loop in loops:
                loop.hold()


def replayed(world: int, count: int, turns: int, every: int = 4) -> None:
    """Graphs of three calls and of one with fewer rows in turn, a rank late at random in each, epochs from 2^32 - 5."""
    devices_ = places(world, count)
    case = Geometry(world, lens=(9000, 2500, 0, 3000), heads=8)
    ranks, alone = both(Context(case, devices_[0]), devices_)
    whole = alone.call()
    ring = Ring(ranks)
    ring.add([0, 1, 2], whole)
    ring.add([3], whole, rows=2)
    for device in {*devices_}:  # its code is loaded before merges wait: loading may wait for the device
        with torch.cuda.device(device):
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for rank in ranks:
        rank.dcp.memory.preset(2**32 - 5)
    settle(ranks)
    draw, drawn = random.Random(world), [0, 0]
    for turn in range(turns):
        which = draw.randrange(2)
        drawn[which] += 1
        late = {draw.randrange(world): draw.randrange(20_000)}
        ring.replay(which, draw.sample(range(world), world), late, turn % every == 0)
    ring.hold()
    for rank in ranks:
        assert rank.dcp.memory.epoch.tolist() == [3 * drawn[0] + drawn[1] - 5] * 2 + [3 * drawn[0] - 5] * 2


@cases((4, 10_000), (8, 10_000), (16, 2_000))
def test_replays_with_a_delayed_rank(device: torch.device, case: tuple[int, int]) -> None:
    del device
    replayed(case[0], 1, case[1])


@devices(2)
@cases((4, 10_000), (8, 10_000), (16, 2_000))
def test_replays_with_a_delayed_rank_over_two_devices(device: torch.device, case: tuple[int, int]) -> None:
    del device
    replayed(case[0], 2, case[1])


@cases(
    *("4 cases replays groups", "8 cases", "4 killed", "8 killed", "2 late drafts alternate captured full"),
    *("2 held", "2 scrambled", "2 killed_late", "2 skipped", "2 disagreed", "2 descending"),
)
def test_a_process_for_each_rank(device: torch.device, case: str) -> None:
    del device
    command = [sys.executable, str(Path(__file__).with_name("dcp_many.py")), *case.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-2500:]


@devices(2)
@cases(*SPREAD)
def test_ranks_over_two_devices(device: torch.device, case: Geometry) -> None:
    ranks, alone = both(Context(case, device), places(case.world, 2))
    whole = alone.call()
    for site in range(3):
        hold(ranks, step(ranks, site=site), whole)
    for rank in ranks:
        rank.indexer.check()


@cases(*SPREAD[4:5], Geometry(2, lens=(9000, 2049, 2048, 2047, -3, 1), key_format="mxfp4", interleave=64))
def test_mxfp4_ranks(device: torch.device, case: Geometry) -> None:
    ranks, alone = both(Context(case, device), [device] * case.world)
    whole = alone.call()
    for site in range(3):
        hold(ranks, step(ranks, site=site), whole)


@cases(4, 8, 16)
def test_every_rank_of_every_row_is_asked_again(device: torch.device, case: int) -> None:
    """As many rows as leave every merge its place beside the others."""
    rows = 240 // case
    geometry = Geometry(case, topn=2048 // case, lens=(6000,) * rows, heads=8)
    ranks, alone = both(Context(geometry, device), [device] * case)
    whole = alone.call()
    for site in range(3):
        hold(ranks, step(ranks, site=site), whole)
    for rank in ranks:
        assert int(rank.dcp.memory.seq2.min()) == 3


def test_long_rows_with_a_rank_late_by_milliseconds(device: torch.device) -> None:
    """Four ranks, rows of 131,072 keys, 10,000 replays, one rank in ten of them late by 1 to 5 ms."""
    case = Geometry(4, lens=(131072, 80000), heads=8)
    ranks, alone = both(Context(case, device), [device] * 4)
    ring = Ring(ranks)
    ring.add([0], alone.call())
    draw = random.Random(3)
    for turn in range(10_000):
        late = {draw.randrange(4): draw.randrange(1_800_000, 9_000_000)} if turn % 10 == 0 else {}
        ring.replay(0, draw.sample(range(4), 4), late, turn % 4 == 0)
    ring.hold()


def test_drafts_in_a_graph(device: torch.device) -> None:
    """Four rows a request on four ranks: what one device selects for them, in every replay."""
    case = Geometry(4, next_n=4, lens=(9000, 9001, 9002, 9003, 0, 50, 6000, 1), interleave=64)
    ranks, alone = both(Context(case, device), [device] * 4)
    ring = Ring(ranks)
    ring.add([0, 1, 2], alone.call())
    draw = random.Random(4)
    for _ in range(1000):
        ring.replay(0, draw.sample(range(4), 4), {draw.randrange(4): draw.randrange(20_000)}, True)
    ring.hold()
