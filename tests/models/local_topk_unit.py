"""What the code of two blocks that share a row talks to: numbers of the DSL, shared memory, mbarriers, copies.

Numbers have the width and sign of their types, and types do not mix. Shared memory knows who touched a byte last:
accesses that no barrier puts in order fail, as do reads of what is not there yet and of global memory beyond the row.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import ptx_text

from keysieve.kernels.local_topk_config import LocalMap, LocalTopkConfig

BASE = 0x400
ROW_AT = 0x7F2000000010


class Number(int):
    """An integer of the DSL: wraps, and keeps to numbers of its own type and Python's."""

    bits, top = 64, 1 << 63  # top: of a signed type

    def __new__(cls, value: Any) -> Any:
        top = cls.top
        return int.__new__(cls, ((int(value) + top) & (1 << cls.bits) - 1) - top)

    __hash__ = int.__hash__


def _operator(kind: type[Number], name: str) -> Any:
    plain, new = getattr(int, f"__{name}__"), int.__new__
    bits, mask, top = kind.bits, (1 << kind.bits) - 1, kind.top

    def check(other: Any) -> None:
        if type(other) not in (int, bool):
            raise TypeError(f"{kind.__name__} {name} {type(other).__name__}")

    def apply(self: Any, other: Any) -> Any:
        if type(other) is not kind:
            check(other)
        return new(kind, ((plain(self, other) + top) & mask) - top)

    def shift(self: Any, other: Any) -> Any:
        assert 0 <= other < bits, f"{name} by {int(other)}"
        return apply(self, other)

    def divide(self: Any, other: Any) -> Any:
        assert self >= 0, "a negative number is divided"
        return apply(self, other)

    def compare(self: Any, other: Any) -> Any:
        if type(other) is not kind:
            check(other)
        return plain(self, other)

    return {"lshift": shift, "rshift": shift, "floordiv": divide, "mod": divide}.get(
        name, compare if name in ("lt", "le", "gt", "ge", "eq", "ne") else apply
    )


class Int64(Number):
    pass


class Int32(Number):
    bits, top = 32, 1 << 31


class Uint32(Number):
    bits, top = 32, 0


OPERATORS = "add sub mul floordiv mod and or xor lshift rshift radd rsub rmul lt le gt ge eq ne"
for _kind in (Int64, Int32, Uint32):
    for _name in OPERATORS.split():
        setattr(_kind, f"__{_name}__", _operator(_kind, _name))
    _kind.__hash__ = int.__hash__  # type: ignore[method-assign, assignment]


# ---------------------------------------------------------------------------------------------- a block


@dataclass(eq=False)
class Touch:
    """Who touched a byte: a thread (-1: several) of a warp (-1: of several), between which barriers; or the mbarrier
    whose phase shows what was written."""

    thread: int
    warp: int = 0
    warp_meets: int = 0
    block_meets: int = 0
    atomic: bool = False
    barrier: int = 0


FRESH = Touch(-2)
"""Of a byte that nobody has written."""


class Lane:
    """A thread of a block."""

    def __init__(self, block: Block, thread: int) -> None:
        self.block, self.thread, self.number = block, thread, thread & 31
        self.job: Any = None
        self.answer: Any = None
        self.wants: Any = None
        self.meets = 0
        self.seen: frozenset[int] = frozenset()
        self.result: Any = None
        self.touch()

    def touch(self) -> None:
        """A barrier lies behind this lane."""
        place = (self.thread, self.thread >> 5, self.meets, self.block.meets)
        self.own, self.own_atomic = Touch(*place), Touch(*place, atomic=True)


class Block:
    """A block of the cluster: its shared memory, mbarriers and lanes."""

    def __init__(self, config: LocalTopkConfig, rank: int, draw: random.Random) -> None:
        places = LocalMap.of(config)
        self.rank, self.total, self.meets = rank, places.total, 0
        poison = draw.choice((b"\x7f\x7f", b"\0\0", b"\xff\xff", b"\xa5\xa5", b"\xc0\xff", b"\x80\x3f"))
        self.bytes = bytearray(poison * (places.total // 2))
        cleared = slice(places.uncleared, places.cleared)
        self.writers: list[Any] = [FRESH] * places.total
        self.bytes[cleared], self.writers[cleared] = bytes(len(self.bytes[cleared])), [None] * len(self.bytes[cleared])
        self.readers: list[Any] = [None] * places.total
        for first, end in ((places.kept, places.numbers), (places.found, places.found + 16)):
            self.writers[first:end] = [None] * (end - first)  # is read before it is written, and left out of account
        self.phases: dict[int, list[int]] = {}  # of an mbarrier: arrivals and bytes that are missing
        self.on_their_way = 0
        self.lanes = [Lane(self, thread) for thread in range(config.threads)]
        self.warps = [self.lanes[i : i + 32] for i in range(0, config.threads, 32)]


def _orders(before: Touch, now: Touch, lane: Lane) -> bool:
    """Does a barrier lie between?"""
    if before.barrier:
        return before.barrier in lane.seen
    same_warp = before.warp == now.warp and (before.warp_meets < now.warp_meets or before.thread == now.thread)
    return before.block_meets < now.block_meets or same_warp or (before.atomic and now.atomic)


@cache
def _statement(text: str, constraints: str) -> tuple[Callable[..., Any], list[bool]]:
    """What executes it; which of its inputs are of 64 bits."""
    kinds = [kind for kind in constraints.split(",") if kind and kind[0] != "="]
    return ptx_text.function(text, constraints), [kind == "l" for kind in kinds]


def _bits(one: Number, wide: bool) -> int:
    if type(one) is Uint32 and not wide:
        return int(one)
    assert type(one) is Int64 if wide else type(one) in (Int32, Uint32), f"an operand of another type: {type(one)}"
    return int(one) & (1 << type(one).bits) - 1


class Unit:
    """What a statement of PTX asks of the cluster; `here`: the lane that executes it."""

    def __init__(self, blocks: list[Block], row: bytes) -> None:
        self.blocks, self.row = blocks, row
        self.here: Lane = blocks[0].lanes[0]
        self.landings: list[tuple[Block, Callable[[], bool]]] = []

    def asm(self, text: str, constraints: str, results: Any, operands: Any, **_options: Any) -> Any:
        run, wide = _statement(text, constraints)
        outputs, new = run(self, *map(_bits, operands, wide)), int.__new__
        return [new(kind, one) if kind is Uint32 else kind(one) for kind, one in zip(results, outputs, strict=True)]

    def asm_meeting(self, text: str, constraints: str, results: Any, operands: Any, **_options: Any) -> Any:
        run, wide = _statement(text, constraints)
        outputs = yield from run(self, *map(_bits, operands, wide))
        return [kind(one) for kind, one in zip(results, outputs, strict=True)]

    # --- shared memory

    def _touch(self, at: int, count: int, writes: bool, atomic: bool = False) -> int:
        lane, block = self.here, self.here.block
        at -= BASE
        assert at % count == 0, "not aligned"
        assert 0 <= at <= block.total - count, "outside of shared memory"
        now = lane.own_atomic if atomic else lane.own
        touched = block.writers[at : at + count]
        for before in touched[:1] if touched.count(touched[0]) == count else touched:
            if before is not None and before is not now:
                assert writes or before is not FRESH, f"byte {at} is read, and was not written"
                assert before is FRESH or _orders(before, now, lane), f"byte {at}: {now} behind a write, {before}"
        touched = block.readers[at : at + count]
        new: Any = now
        for before in touched[:1] if touched.count(touched[0]) == count else touched:
            if before is not None and before is not now and not _orders(before, now, lane):
                assert not writes, f"byte {at} is written by {now} and read by {before}"
                new = Touch(-1, now.warp if before.warp == now.warp else -1, now.warp_meets, now.block_meets)
        (block.writers if writes else block.readers)[at : at + count] = [new] * count
        return at

    def load_shared(self, at: int, size: int, count: int) -> tuple[int, ...]:
        at = self._touch(at, size * count, False)
        return struct.unpack_from(f"<{count}{'.BH.I'[size]}", self.here.block.bytes, at)

    def store_shared(self, at: int, size: int, words: tuple[int, ...]) -> None:
        at = self._touch(at, size * len(words), True)
        low = [word & (1 << 8 * size) - 1 for word in words]
        struct.pack_into(f"<{len(words)}{'.BH.I'[size]}", self.here.block.bytes, at, *low)

    def add(self, at: int, value: int) -> None:
        at = self._touch(at, 4, True, True)
        (old,) = struct.unpack_from("<I", self.here.block.bytes, at)
        struct.pack_into("<I", self.here.block.bytes, at, old + value & ptx_text.M)

    def load_global(self, at: int, size: int, count: int) -> tuple[int, ...]:
        assert at % (size * count) == 0, "not aligned"
        assert 0 <= at - ROW_AT <= len(self.row) - size * count, "a load outside of the row"
        return struct.unpack_from(f"<{count}I", self.row, at - ROW_AT)

    def lanes_below(self) -> int:
        return (1 << self.here.number) - 1

    # --- mbarriers, and what lands late

    def init(self, barrier: int, arrivals: int) -> None:
        assert barrier % 8 == 0
        assert barrier not in self.here.block.phases, "a barrier is made twice"
        self.here.block.phases[barrier] = [arrivals, 0]

    def expect(self, barrier: int, count: int) -> None:
        phase = self.here.block.phases[barrier]
        phase[0] -= 1
        phase[1] += count
        assert phase[0] >= 0, "a second arrival"

    def copy(self, target: int, source: int, count: int, barrier: int) -> None:
        assert target % 16 == source % 16 == count % 16 == 0, "a copy is not aligned"
        assert count > 0, "an empty copy"
        assert 0 <= source - ROW_AT <= len(self.row) - count, "a copy from outside of the row"
        self._land(self.here.block, target, self.row[source - ROW_AT :][:count], barrier)

    def send(self, address: int, words: tuple[int, ...] | int, barrier: int) -> None:
        packed = words if isinstance(words, tuple) else (words,)
        assert address >> 32 == barrier >> 32
        target = address & ptx_text.M
        assert target % (4 * len(packed)) == 0, "not aligned"
        data = struct.pack(f"<{len(packed)}I", *packed)
        self._land(self.blocks[address >> 32], target, data, barrier & ptx_text.M)

    def _land(self, block: Block, target: int, data: bytes, barrier: int) -> None:
        at, phase = target - BASE, block.phases[barrier]
        assert 0 <= at <= block.total - len(data), "outside of shared memory"
        places = slice(at, at + len(data))
        assert all(one is None or one is FRESH for one in block.writers[places] + block.readers[places]), "sent over"
        block.writers[places] = [Touch(-2, barrier=barrier)] * len(data)
        block.on_their_way += 1

        def land() -> bool:
            """Is the phase complete?"""
            block.bytes[places] = data
            block.on_their_way -= 1
            phase[1] -= len(data)
            assert phase[1] >= 0, "more bytes than were announced"
            return phase == [0, 0]

        self.landings.append((block, land))
