"""The exchange's memory on the CPU: the slots, rescue lists and flags of every rank, in the layout of the protocol.

One anonymous shared mapping stands for the peer-mapped buffers of all devices: threads share it as it is, processes by
forking after it was made. Every rank's block holds

* ``slots``, uint64 ``[2 parities, world sources, max_rows, 2 * pairs]``: a 64-bit half is a data word (low 32 bits)
  next to the tag of its call (high 32 bits); two halves are a pair, and the last pair of a row is the signature;
* ``recv``, int32 ``[max_rows, min(W, K // N), words(K)]``: the second lists of saturated ranks;
* ``flags``, int64 ``[world, max_rows]``: per source, the number of rescue rounds of the row whose list has arrived.

An aligned 64-bit element is read and written as one: that is all the exchange asks of a store. Between a rescue list
and its flag it needs release and acquire order as well, which x86-64 gives every store and load.
"""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keysieve.checks import refuse, require_int
from keysieve.spec import MAX_TOPK, MAX_WORLD, candidate_words

Halves = NDArray[np.uint64]


@dataclass(frozen=True)
class ExchangeShape:
    """Sizes that all ranks agree on.

    Attributes:
        world: ranks (W).
        max_rows: query rows of the largest call.
        topk: keys to select per row (K).
        topn: candidates a rank offers per row (N), at most K.
        planes: index planes of the candidate rows.
    """

    world: int
    max_rows: int
    topk: int
    topn: int
    planes: int = 1

    def __post_init__(self) -> None:
        require_int("world", self.world, 1, MAX_WORLD, "Use at most 16 context ranks.")
        require_int("max_rows", self.max_rows, 1, (1 << 16) - 1, "Split larger batches.")
        require_int("topk", self.topk, 1, MAX_TOPK, "Select fewer keys per row.")
        require_int("topn", self.topn, 1, self.topk, "Offer at most topk candidates a row.")
        require_int("planes", self.planes, 1, 10, "Use keysieve.spec.index_planes(longest local length).")

    @property
    def words(self) -> int:
        """int32 words of a first list."""
        return candidate_words(self.topn, self.planes)

    @property
    def second_words(self) -> int:
        """int32 words of a second list."""
        return candidate_words(self.topk, self.planes)

    @property
    def pairs(self) -> int:
        """Pairs of a row: its words, two a pair, and the signature."""
        return -(-self.words // 2) + 1

    @property
    def rescued(self) -> int:
        """The most ranks that can be saturated in one row."""
        return min(self.world, self.topk // self.topn)


class ExchangeMemory:
    """The buffers of all ranks; made once, before the ranks' threads start or their processes are forked."""

    def __init__(self, shape: ExchangeShape) -> None:
        self.shape = shape
        s = shape
        slots = 8 * 2 * s.world * s.max_rows * 2 * s.pairs
        recv = -(-4 * s.max_rows * s.rescued * s.second_words // 8) * 8
        flags = 8 * s.world * s.max_rows
        block = slots + recv + flags
        self._map = mmap.mmap(-1, s.world * block)
        self.slots: list[Halves] = []
        self.recv: list[NDArray[np.int32]] = []
        self.flags: list[NDArray[np.int64]] = []
        for rank in range(s.world):
            at = rank * block
            raw = np.frombuffer(self._map, dtype=np.uint8, count=block, offset=at)
            self.slots.append(raw[:slots].view(np.uint64).reshape(2, s.world, s.max_rows, 2 * s.pairs))
            lists = raw[slots : slots + 4 * s.max_rows * s.rescued * s.second_words]
            self.recv.append(lists.view(np.int32).reshape(s.max_rows, s.rescued, s.second_words))
            self.flags.append(raw[slots + recv :].view(np.int64).reshape(s.world, s.max_rows))

    def preset(self, epoch: int) -> None:
        """Tag every slot with ``epoch``, as after that many completed calls; fresh memory is as after none."""
        for slots in self.slots:
            slots[...] = np.uint64((epoch & 0xFFFFFFFF) << 32)


# --- how stores travel ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Stores:
    """Stores issued together: ``target.reshape(-1)[at[i]] = values[i]``, one element at a time, in any order.

    ``after`` holds stores that these must not overtake (a release); they are forgotten once landed.
    """

    target: NDArray[np.generic]
    at: NDArray[np.int64]
    values: NDArray[np.generic]
    after: list[Stores] = field(default_factory=list)
    landed: int = 0

    @property
    def done(self) -> bool:
        return self.landed == self.at.size

    def land(self, count: int) -> None:
        """Let the next ``count`` stores land."""
        part = slice(self.landed, self.landed + count)
        self.target[self.at[part]] = self.values[part]
        self.landed = min(self.landed + count, self.at.size)


class PromptWire:
    """Stores land when they are issued, in order."""

    def issue(self, stores: Sequence[Stores]) -> None:
        for each in stores:
            each.land(each.at.size)

    def close(self) -> None:
        """Nothing is on its way."""


class LateWire:
    """Stores land later, in a random order, a few at a time, from another thread: a rank runs on meanwhile.

    Only what the protocol may rely on is kept: an element lands whole, and a release does not overtake what it orders.

    Args:
        seed: fixes the order in which this wire's choices are made (not the interleaving with other threads).
        longest_pause: the longest sleep between landings, in seconds.
    """

    def __init__(self, seed: int, *, longest_pause: float = 200e-6) -> None:
        self._random = random.Random(seed)
        self._pause = longest_pause
        self._pending: list[Stores] = []
        self._lock = threading.Lock()
        self._closing = False
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"wire-{seed}", daemon=True)
        self._thread.start()

    def issue(self, stores: Sequence[Stores]) -> None:
        if self._failed is not None or not self._thread.is_alive():
            refuse("wire", got=f"a wire that has stopped ({self._failed})", accepted="an open wire", remedy="Make one.")
        for each in stores:
            order = np.array(self._random.sample(range(each.at.size), each.at.size), dtype=np.int64)
            each.at, each.values = each.at[order], each.values[order]
        with self._lock:
            self._pending.extend(stores)

    def _run(self) -> None:
        try:
            while not (self._closing and not self._pending):
                self._land_some()
        except BaseException as error:
            self._failed = error
            raise

    def _land_some(self) -> None:
        with self._lock:
            free = [s for s in self._pending if all(before.done for before in s.after)]
        if free:
            # Mostly the older ones, sometimes any: calls overlap, and nothing waits for ever.
            chosen = free[0] if self._random.random() < 0.5 else self._random.choice(free)
            chosen.land(self._random.choice((1, 1, 3, 16, 64)))
            if chosen.done:
                with self._lock:
                    self._pending.remove(chosen)
        if not free or self._random.random() < 0.05:
            time.sleep(self._random.random() * self._pause)

    def close(self) -> None:
        """Let everything land and stop; a rank that ends before its last stores have landed fails its peers."""
        self._closing = True
        self._thread.join()
