"""A model of what the Blackwell scorer's code talks to, written from the PTX ISA: memories, copy engine, matrix unit.

Shared memory is bytes; tensor memory is 128 lanes of 512 columns, kept as exact numbers (float64; a float32 is made of
them when they are read) or as 32-bit words (scales). Operations of the matrix unit go through a queue that a thread of
its own works off, in order and late; a commit arrives on its barrier when it comes out of the queue. Copies have a
thread as well, which takes those that wait in any order.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
DEADLINE = 120.0
"""Seconds that a wait may last: against hangs alone, and far beyond what a slow machine needs for a whole block."""


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Values of E4M3 codes: bias 7, no infinity, 0x7F and 0xFF are NaN."""
    codes = codes.astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value = np.where((codes & 0x7F) == 0x7F, np.nan, value)
    return np.where(codes & 0x80, -value, value)


def ue8m0(codes: np.ndarray) -> np.ndarray:
    """Values of UE8M0 scale bytes: powers of two with bias 127; 255 is NaN."""
    return np.where(codes == 255, np.nan, 2.0 ** (codes.astype(np.float64) - 127.0))


def field(word: int, first: int, last: int) -> int:
    """Bits first..last of a word."""
    return word >> first & (1 << last - first + 1) - 1


def swizzle(address: int, mode: int) -> int:
    """Swizzle modes of the matrix descriptor: 2 (128 bytes), 4 (64), 6 (32), 0 (none). On absolute addresses."""
    mask = {2: 7, 4: 3, 6: 1, 0: 0}[mode]
    return address ^ (address >> 7 & mask) << 4


class Barrier:
    """An mbarrier: `count` arrivals, and the bytes that they announced, complete a phase. A wait for parity p passes
    when the current phase has the other parity: right while the waiter is at most one phase behind, wrong beyond."""

    changed = threading.Condition()
    given_up = False
    waits: ClassVar[dict[int, tuple[Barrier, int]]] = {}
    """What each waiting thread waits for: a barrier, and a parity."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.phase = 0
        self.bytes = 0

    def arrive(self, announced: int = 0) -> None:
        with Barrier.changed:
            self.bytes += announced
            self.pending -= 1
            assert self.pending >= 0
            self._settle()

    def landed(self, count: int) -> None:
        """`count` bytes of a copy have arrived."""
        with Barrier.changed:
            self.bytes -= count
            assert self.bytes >= 0, "more bytes than were announced"
            self._settle()

    def _settle(self) -> None:
        if self.pending == self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            Barrier.changed.notify_all()

    def passes(self, parity: int) -> bool:
        return self.phase & 1 != parity & 1

    def wait(self, parity: int) -> None:
        with Barrier.changed:
            Barrier.waits[threading.get_ident()] = self, parity
            done = Barrier.changed.wait_for(lambda: Barrier.given_up or self.passes(parity), DEADLINE)
            del Barrier.waits[threading.get_ident()]
            if not done or Barrier.given_up:
                raise TimeoutError(f"barrier in phase {self.phase}, waited for parity {parity}")

    @classmethod
    def stuck(cls) -> int:
        """How many threads wait for a phase that has not come; one that has yet to wake up does not."""
        with cls.changed:
            return sum(not barrier.passes(parity) for barrier, parity in cls.waits.values())

    @classmethod
    def give_up(cls) -> None:
        """Something failed: nobody needs to wait any longer."""
        with cls.changed:
            cls.given_up = True
            cls.changed.notify_all()


class NamedBarrier:
    """Where a block's warps meet; a warp that only arrives does not wait."""

    def __init__(self, warps: int) -> None:
        self.warps = self.missing = warps

    def arrive(self) -> None:
        with Barrier.changed:
            self.missing -= 1
            assert self.missing >= 0, "more warps than the barrier has"
            Barrier.changed.notify_all()

    def wait(self) -> None:
        with Barrier.changed:
            done = Barrier.changed.wait_for(lambda: Barrier.given_up or self.missing == 0, DEADLINE)
            if not done or Barrier.given_up:
                raise TimeoutError(f"{self.missing} of {self.warps} warps have not come")


@dataclass(frozen=True)
class Barriers:
    """Consecutive barriers, addressed as `barriers + number`."""

    items: tuple[Barrier, ...]
    at: int = 0

    def __add__(self, number: int) -> Barriers:
        return Barriers(self.items, self.at + number)

    @property
    def here(self) -> Barrier:
        assert 0 <= self.at < len(self.items)
        return self.items[self.at]


class Unit:
    """One block's memories and its asynchronous engines."""

    def __init__(self, smem_bytes: int, seed: int, origin: int = 0x400) -> None:
        self.origin = origin
        self.smem = np.full(origin + smem_bytes, 0xA5, np.uint8)  # what nobody wrote is poison
        self.sums = np.full((128, 512), np.nan)
        self.words = np.full((128, 512), 0xDEADBEEF, np.uint32)
        self.allocated = 0
        self.memory: dict[int, int] = {}
        self.random = random.Random(seed)
        self.failures: list[BaseException] = []
        Barrier.given_up = False
        self.counts: dict[str, int] = defaultdict(int)
        self.plan = NamedBarrier(0)
        self.pool = (0, 1, np.empty((0, 0), np.uint8))
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._copies: queue.SimpleQueue = queue.SimpleQueue()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._work, self._copy)]
        for thread in self._threads:
            thread.start()

    # --- the engines ------------------------------------------------------------------------------------------------

    def submit(self, operation) -> None:
        self._queue.put(operation)

    def submit_copy(self, operation) -> None:
        self._copies.put(operation)

    def close(self) -> None:
        self._queue.put(None)
        self._copies.put(None)
        for thread in self._threads:
            thread.join(DEADLINE)

    def _work(self) -> None:
        while (operation := self._queue.get()) is not None:
            if self.random.random() < 0.1:
                time.sleep(self.random.random() * 0.002)
            self._try(operation)

    def _copy(self) -> None:
        draw = random.Random(self.random.random())
        ended, waiting = False, []
        while not ended or waiting:
            while not ended and (not waiting or not self._copies.empty()):
                operation = self._copies.get()
                ended = operation is None
                waiting += [] if ended else [operation]
            if waiting:
                if draw.random() < 0.1:
                    time.sleep(draw.random() * 0.002)
                self._try(waiting.pop(draw.randrange(len(waiting))))

    def _try(self, operation) -> None:
        try:
            operation()
        except BaseException as failure:
            self.failures.append(failure)
            Barrier.give_up()

    # --- the copy engine --------------------------------------------------------------------------------------------

    def copy_box(self, target: int, rows: np.ndarray) -> None:
        """A tensor copy of uint8 [n, 128 | 64] with the swizzle of its width, chunk of 16 bytes after chunk."""
        width = rows.shape[1]
        assert target % (8 * width) == 0, "patterns begin at multiples of eight rows"
        mode = {128: 2, 64: 4}[width]
        for at in range(0, rows.size, 16):
            place = swizzle(target + at, mode)
            self.smem[place : place + 16] = rows.reshape(-1)[at : at + 16]

    def global_bytes(self, at: int, count: int) -> np.ndarray:
        """Bytes of the page pool: (address, bytes between pages, uint8 [pages, bytes])."""
        first, stride, pages = self.pool
        page, within = divmod(at - first, stride)
        assert 0 <= page < len(pages)
        assert within + count <= pages.shape[1]
        return pages[page, within : within + count]

    # --- the matrix unit --------------------------------------------------------------------------------------------

    def operand(self, descriptor: int, rows: int) -> np.ndarray:
        """uint8 [rows, 32]: the bytes that one instruction takes of a K-major operand, by its 64-bit descriptor."""
        descriptor &= (1 << 64) - 1
        start, stride = field(descriptor, 0, 13) << 4, field(descriptor, 32, 45) << 4
        mode = field(descriptor, 61, 63)
        assert field(descriptor, 46, 48) == 1
        assert field(descriptor, 49, 60) == 0
        width = {2: 128, 4: 64}[mode]
        out = np.empty((rows, 32), np.uint8)
        for row in range(rows):
            line = start + row // 8 * stride + row % 8 * width
            for half in (0, 16):
                place = swizzle(line + half, mode)
                out[row, half : half + 16] = self.smem[place : place + 16]
        return out

    def product_f8(self, d: int, a: int, b: int, word: int, accumulate: bool) -> None:
        n = field(word, 17, 22) << 3
        assert field(word, 24, 28) << 4 == 128
        assert word & ~(0x3F << 17 | 0x1F << 24) == 1 << 4, "float32 from two E4M3 operands, K-major, dense"
        x, y = e4m3(self.operand(a, 128)), e4m3(self.operand(b, n))
        self._add(d, x, y, accumulate)

    def product_mxf4(self, d: int, a: int, b: int, word: int, scale_a: int, scale_b: int, accumulate: bool) -> None:
        n = field(word, 17, 22) << 3
        assert (field(word, 27, 28) << 7, field(word, 23, 23)) == (128, 1), "128 rows, UE8M0 scales"
        assert field(word, 7, 9) == field(word, 10, 11) == 1, "E2M1 operands"
        ids = field(word, 29, 30), field(word, 4, 5)
        assert word & ~(3 << 4 | 7 << 7 | 3 << 10 | 0x3F << 17 | 1 << 23 | 3 << 27 | 3 << 29) == 0
        x = self.scaled(self.operand(a, 128), scale_a, ids[0])
        y = self.scaled(self.operand(b, n), scale_b, ids[1])
        self._add(d, x, y, accumulate)

    def scaled(self, codes: np.ndarray, address: int, first: int) -> np.ndarray:
        """float64 [rows, 64]: E2M1 pairs times the two scales of their row: bytes first, first + 1 of its word."""
        assert address in range(0, self.allocated, 4)
        assert first in (0, 2)
        values = E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(len(codes), 2, 32)
        row = np.arange(len(codes))
        words = self.words[row % 32, address + row // 32]
        for lanes in range(32, 128, 32):  # the unit reads its own quarter of the lanes: all must hold the words
            np.testing.assert_array_equal(self.words[lanes + row % 32, address + row // 32], words)
        exponents = np.stack([words >> 8 * first & 255, words >> 8 * (first + 1) & 255], -1).astype(np.int64)
        return (values * ue8m0(exponents)[..., None]).reshape(len(codes), 64)

    def _add(self, d: int, x: np.ndarray, y: np.ndarray, accumulate: bool) -> None:
        assert 0 <= d <= self.allocated - len(y), "sums outside the allocation"
        self.counts["products"] += 1
        place = self.sums[:, d : d + len(y)]
        place[:] = x @ y.T + (place if accumulate else 0.0)  # a NaN factor makes its whole sum NaN

    def copy_scales(self, address: int, descriptor: int) -> None:
        """32x128b.warpx4: core matrices of 8 rows x 16 bytes, `stride` apart, to four columns of all quarters."""
        start, stride = field(descriptor, 0, 13) << 4, field(descriptor, 32, 45) << 4
        assert (field(descriptor, 61, 63), field(descriptor, 46, 48)) == (0, 1)
        assert 0 <= address <= self.allocated - 4
        self.counts["scale copies"] += 1
        for row in range(32):
            line = start + row // 8 * stride + row % 8 * 16
            words = self.smem[line : line + 16].view(np.uint32)
            for quarter in range(4):
                self.words[32 * quarter + row, address : address + 4] = words

    def load(self, warp: int, lane: int, address: int, columns: int) -> list[float]:
        """32x32b: a lane's columns. The warp reaches its own quarter of the lanes alone."""
        first = address >> 16
        assert first == 32 * (warp % 4), f"warp {warp} reads lanes from {first} on"
        at = address & 0xFFFF
        assert at + columns <= self.allocated
        return [np.float32(value) for value in self.sums[first + lane, at : at + columns]]
