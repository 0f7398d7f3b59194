"""The two scale warps of the sm90 MXFP4 scorer, which take turns, executed on barriers that pass for older phases.

A place of an odd ring belongs to the two in turn. Where a copy is late the other warp comes round to the place a lap
early: it must not take the phase before the last for its own.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from sm100_source import Lanes, bindings, execute, functions
from sm100_unit import Barrier, Barriers, Unit

from keysieve.kernels.score_cut import NO_REQUEST
from keysieve.kernels.sm90_mxfp4_config import KERNEL, shape_of

WAIT = "sync.wait_barrier(shared.landed + stage, phase ^ Int32(1))"
CUTS = sorted({(shape_of(c).groups, shape_of(c).stages) for c in KERNEL.admitted("sm_90a")})


class Ring:
    """A ring of tiles: a sender, the two warps, and a thread a warpgroup. late: a tile whose copy lands when nothing
    else can move any more (-1: none)."""

    def __init__(
        self, groups: int, stages: int, tiles: int, late: int, edits: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.groups, self.stages, self.tiles, self.late = groups, stages, tiles, late
        self.unit, self.here = Unit(16 * stages + 64, 0), Lanes()
        self.names = bindings(self.unit, self.here)
        self.names |= {"KEY_BYTES": 64, "TILE_APART": 1 << 30, "NO_CODES": 0, "plain_tiles": lambda *_: True}
        self.names |= {"PAGE_SLOT": 4352, "SCALE_PLACE": 4096, "AREA": 1536}
        execute(functions("sm90_mxfp4_places.py", None, edits), "sm90_mxfp4_places.py", self.names)
        self.names["place_tile"] = self.place
        self.there: dict[int, int] = {}  # tile by place, as copies bring them
        self.placed: dict[int, int] = {}
        self.others = 0
        self.held = threading.Event()
        self.shared = SimpleNamespace(
            descriptors=self.unit.origin,
            key_full=Barriers(tuple(Barrier(1) for _ in range(stages))),
            key_empty=Barriers(tuple(Barrier(1) for _ in range(stages))),
            landed=Barriers(tuple(Barrier(1) for _ in range(stages))),
        )

    def place(self, _shared: Any, stage: int, *_rest: Any) -> None:
        self.placed[stage] = self.there.get(stage, -1)

    def scale_warp(self, turn: int) -> None:
        self.here.join(turn, 0)
        kernel = SimpleNamespace(shape=SimpleNamespace(stages=self.stages, groups=self.groups), config=None)
        self.names["place_tiles"](kernel, self.shared, turn)

    def send(self) -> None:
        for number in range(self.tiles + self.groups):
            stage, lap = number % self.stages, number // self.stages
            (self.shared.key_empty + stage).here.wait(lap & 1 ^ 1)
            owner = number if number < self.tiles else NO_REQUEST
            self.names["ptx"].store_shared(self.shared.descriptors + 16 * stage, owner)
            if number == self.late:
                self.held.set()
            else:
                self.land(number)

    def land(self, number: int) -> None:
        self.there[number % self.stages] = number
        (self.shared.key_full + number % self.stages).here.arrive()

    def land_late(self) -> None:
        """When all others that have not ended wait for a phase that does not come: not after a time, in which they may
        have stood still."""
        while not self.at_rest():
            if Barrier.given_up:
                return
            time.sleep(0.001)
        self.land(self.late)

    def at_rest(self) -> bool:
        """The late tile has been sent, and nothing else can move."""
        with Barrier.changed:
            return self.held.is_set() and Barrier.stuck() >= self.others

    def take(self, group: int) -> None:
        for number in range(group, self.tiles, self.groups):
            stage, lap = number % self.stages, number // self.stages
            (self.shared.landed + stage).here.wait(lap & 1)
            assert self.placed.get(stage) == number, f"tile {number} was taken before its scales were placed"
            (self.shared.key_empty + stage).here.arrive()

    def run(self) -> None:
        failures: list[BaseException] = []

        def guarded(job: Any, *arguments: int) -> None:
            try:
                job(*arguments)
            except BaseException as failure:
                failures.append(failure)
                Barrier.give_up()
            finally:
                with Barrier.changed:
                    self.others -= 1

        jobs: list[Any] = [(self.send,), *((self.scale_warp, turn) for turn in range(2))]
        jobs += [(self.take, group) for group in range(self.groups)]
        self.others = len(jobs)
        if self.late >= 0:
            jobs.append((self.land_late,))
        threads = [threading.Thread(target=guarded, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.unit.close()
        if failures:
            raise failures[0]


@pytest.mark.parametrize(("groups", "stages"), CUTS)
def test_a_late_copy_is_waited_for(groups: int, stages: int) -> None:
    """Tiles of three laps, the late one in the middle of the second, of either warp."""
    for late in (stages + 4, stages + 5):
        Ring(groups, stages, 3 * stages + 2, late).run()


def test_without_the_wait_for_the_lap_before_a_tile_is_taken_too_early() -> None:
    """What the wait is for: an odd ring, on which this test can tell."""
    with pytest.raises(AssertionError, match="before its scales were placed"):
        Ring(3, 15, 47, 19, ((WAIT, "pass"),)).run()


@pytest.mark.parametrize("tiles", range(5))
def test_few_tiles_and_their_ends(tiles: int) -> None:
    """Both warps come to an end, whatever the parity of the last tile."""
    for groups, stages in CUTS:
        Ring(groups, stages, tiles, -1).run()
