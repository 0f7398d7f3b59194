"""An executable model of the exchange: what can happen, one indivisible step at a time.

The model knows ranks, their in-order streams, the slots of two parities, stores that land late and in any order, the
epochs and tags (with a small modulus, so that they wrap within a few calls), the signature, and the rescue round. It
does *not* know logits: a word is only the name of the call it was pushed for. A reader that accepts a word of another
call than its own has accepted a lost, stale, torn or mixed word, and that is a violation, however the tags looked.

A state is a ``bytes`` object of fixed layout (see :class:`Layout`), so states hash fast and a million of them fit in
memory. :meth:`Model.successors` lists every step that is possible in a state. Faults switch off one precaution of the
protocol each; ``keysieve.dcp.protocol.suite`` shows that each of them is found.

What is atomic here is what is atomic on the hardware: the landing of one 64-bit half, one polling load of one half,
the store of one epoch, one flag. Kernel boundaries are the grid-dependency waits. Completion of a kernel says nothing
about its remote stores: they may still be in flight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from keysieve.dcp.protocol.layout import UNREAD, Layout
from keysieve.dcp.protocol.scenario import FAULTS, Scenario


@dataclass(frozen=True)
class Step:
    """One indivisible step out of a state: what happened, where it leads, and what it broke."""

    text: str
    state: bytes
    violation: str | None = None


class Model:
    """The steps of one scenario, with the given faults seeded.

    Args:
        scenario: who calls what.
        faults: names out of :data:`FAULTS`; none for the protocol as it is.
        symmetric: treat the halves of a row's words that differ in nothing as interchangeable. Sound, and far fewer
            states; off for traces, where the names of the halves should stay put.
    """

    def __init__(self, scenario: Scenario, faults: frozenset[str] = frozenset(), *, symmetric: bool = True) -> None:
        unknown = faults - FAULTS.keys()
        if unknown:
            raise ValueError(f"unknown faults {sorted(unknown)}; known: {', '.join(FAULTS)}")
        self.scenario = scenario
        self.faults = faults
        self.layout = Layout(scenario.world, scenario.rows, len(scenario.units), scenario.calls, scenario.rescue_units)
        self._groups = self._interchangeable() if symmetric else ()

    def _interchangeable(self) -> tuple[tuple[int, int], ...]:
        """Ranges of consecutive units that no rule tells apart."""
        s = self.scenario
        if "half-tag" in self.faults:
            return ()

        def kind(unit: int) -> tuple[bool, ...]:
            padding = (unit in s.pads.get(call, frozenset()) for call in range(1, s.calls + 1))
            return (s.units[unit] == "sig", *padding)

        bounds = [0, *(u for u in range(1, len(s.units)) if kind(u) != kind(u - 1)), len(s.units)]
        return tuple((a, b) for a, b in itertools.pairwise(bounds) if b - a > 1)

    def initial(self) -> bytes:
        """Nothing pushed; slots hold call 0, whose tag is the completed epoch (or 0, if zeroed)."""
        s, at = self.scenario, self.layout
        state = bytearray(at.size)
        preset = 0 if "zeroed-slots" in self.faults else s.first_epoch % s.tag_modulus
        for rank in range(s.world):
            for row in range(s.rows):
                state[at.epoch(rank, row)] = s.first_epoch % s.tag_modulus
                state[at.tag(rank, row, 0)] = preset
                for source in range(s.world):
                    state[at.base(rank, row, source)] = UNREAD
        return bytes(state)

    def finished(self, state: bytes) -> bool:
        """Whether every rank has completed its program."""
        s, at = self.scenario, self.layout
        return all(state[at.merged(r, row)] == len(s.programs[r]) for r in range(s.world) for row in range(s.rows))

    def failed(self, state: bytes) -> bool:
        """Whether some rank has reported a signature that differs."""
        return any(state[self.layout.failed(r)] for r in range(self.scenario.world))

    def waiting(self, state: bytes) -> str:
        """What every unfinished block waits for, for the report of a deadlock."""
        s, at = self.scenario, self.layout
        found = []
        for rank in range(s.world):
            for row in range(s.rows):
                nth = state[at.merged(rank, row)] + 1
                if nth > len(s.programs[rank]):
                    continue
                call = s.programs[rank][nth - 1]
                if not state[at.started(rank, row)]:
                    found.append(f"rank {rank} row {row} call {call} has not started")
                    continue
                absent = [
                    f"{s.units[unit]} of rank {source}"
                    for source in range(s.world)
                    for unit in range(at.units)
                    if not state[at.cell(rank, source, row, unit) + 4]
                ]
                found.append(f"rank {rank} row {row} call {call} waits for {', '.join(absent) or 'a rescue flag'}")
        return "; ".join(found)

    def successors(self, state: bytes) -> Iterator[Step]:
        """Every step that is possible in ``state``."""
        s, at = self.scenario, self.layout
        yield from self._landings(state)
        for rank in range(s.world):
            if state[at.failed(rank)]:
                continue
            for row in range(s.rows):
                yield from self._pushes(state, rank, row)
                yield from self._merges(state, rank, row)

    # --- stores that were issued earlier land ------------------------------------------------------------------

    def _landings(self, state: bytes) -> Iterator[Step]:
        s, at = self.scenario, self.layout
        for dst, source, row in at.channels:
            for unit in range(at.units):
                cell = at.cell(dst, source, row, unit)
                for parity in (0, 1):
                    fly = state[cell + 2 * parity + 1]
                    while fly:
                        bit = fly & -fly
                        fly ^= bit
                        b = bytearray(state)
                        b[cell + 2 * parity] = bit.bit_length()
                        b[cell + 2 * parity + 1] ^= bit
                        self._settle(b, dst, source, row)
                        yield Step(
                            f"{s.units[unit]} word of call {bit.bit_length()}, row {row}, lands: rank {source} -> "
                            f"rank {dst}, parity {parity}",
                            bytes(b),
                        )
            yield from self._flag_landings(state, dst, source, row)
        for dst, row, index, unit in at.rescue_cells:
            cell = at.recv(dst, row, index, unit)
            for word in _bits(state[cell + 1]):
                b = bytearray(state)
                b[cell], b[cell + 1] = word, state[cell + 1] ^ (1 << (word - 1))
                yield Step(f"rescue word of {at.named(word)} lands on rank {dst}, list {index}", bytes(b))

    def _flag_landings(self, state: bytes, dst: int, source: int, row: int) -> Iterator[Step]:
        """A flag lands; released, it may not overtake the rescue words its source wrote before it."""
        at, s = self.layout, self.scenario
        flag = at.flag(dst, source, row)
        for seq in _bits(state[flag + 1]):
            call = state[at.flag_call(source, row, seq)]
            index = s.saturated[call, row].index(source)
            cells = (at.recv(dst, self._place(row), index, u) for u in range(s.rescue_units))
            late = any(state[cell + 1] & (1 << (at.word(row, call) - 1)) for cell in cells)
            if late and "relaxed-flag" not in self.faults:
                continue
            b = bytearray(state)
            b[flag] = seq
            b[flag + 1] ^= 1 << (seq - 1)
            yield Step(f"rescue flag {seq} of row {row} lands: rank {source} -> rank {dst}", bytes(b))

    # --- local top-N: the words of one row are pushed to every rank --------------------------------------------

    def _pushes(self, state: bytes, rank: int, row: int) -> Iterator[Step]:
        s, at = self.scenario, self.layout
        nth = state[at.pushed(rank, row)] + 1
        if nth > len(s.programs[rank]):
            return
        # The grid-dependency wait: every block of the previous merge is complete.
        behind = at.pushed if "no-grid-wait" in self.faults else at.merged
        if min(state[behind(rank, other)] for other in range(s.rows)) < nth - 1:
            return
        call = s.programs[rank][nth - 1]
        tag = (state[at.epoch(rank, row)] + 1) % s.tag_modulus
        parity = self._parity(tag)
        b = bytearray(state)
        b[at.pushed(rank, row)] = nth
        b[at.tag(rank, row, call)] = tag
        for dst in range(s.world):
            for unit in range(at.units):
                cell = at.cell(dst, rank, row, unit) + 2 * parity
                if dst == rank and s.own_in_order:
                    b[cell] = call
                else:
                    b[cell + 1] |= 1 << (call - 1)
            self._settle(b, dst, rank, row)
        yield Step(f"rank {rank} pushes row {row} of call {call} (tag {tag}, parity {parity})", bytes(b))

    def _parity(self, tag: int) -> int:
        return 0 if "one-parity" in self.faults else tag & 1

    # --- merge: one block per row ------------------------------------------------------------------------------

    def _merges(self, state: bytes, rank: int, row: int) -> Iterator[Step]:
        s, at = self.scenario, self.layout
        nth = state[at.merged(rank, row)] + 1
        if nth > len(s.programs[rank]):
            return
        if min(state[at.merged(rank, r)] for r in range(s.rows)) < nth - 1:
            return  # the scorer of this call waited for them, and the pushes for the scorer
        if not s.overlapped and not self._pushed(state, rank, nth):
            return
        call = s.programs[rank][nth - 1]
        if not state[at.started(rank, row)]:
            yield from self._start(state, rank, row, nth)
            return
        if "early-epoch" in self.faults:
            yield from self._early_epoch(state, rank, row)
        accepted = True
        if not ("empty-returns" in self.faults and (call, row) in s.empty):
            skip = s.pads.get(call, frozenset()) if "pads-not-awaited" in self.faults else frozenset()
            for source in range(s.world):
                for unit in range(at.units):
                    if unit in skip or state[at.cell(rank, source, row, unit) + 4]:
                        continue
                    accepted = False
                    yield from self._accept(state, rank, row, source, unit, call)
        yield from self._rescue(state, rank, row, call, accepted)

    def _pushed(self, state: bytes, rank: int, nth: int) -> bool:
        """Has the rank pushed all rows of its nth call? That is what the merge's grid-dependency wait waits for."""
        return min(state[self.layout.pushed(rank, row)] for row in range(self.scenario.rows)) >= nth

    def _start(self, state: bytes, rank: int, row: int, nth: int) -> Iterator[Step]:
        s, at = self.scenario, self.layout
        running = sum(state[at.started(rank, other)] for other in range(s.rows))
        if s.resident is not None and running >= s.resident:
            return
        if "any-row-order" not in self.faults and any(
            not state[at.started(rank, other)] and state[at.merged(rank, other)] < nth for other in range(row)
        ):
            return
        b = bytearray(state)
        b[at.started(rank, row)] = 1
        if "early-epoch" not in self.faults:
            for source in range(s.world):
                b[at.base(rank, row, source)] = state[at.epoch(rank, row)]
        yield Step(f"rank {rank} starts the merge of row {row}, epoch {state[at.epoch(rank, row)]}", bytes(b))

    def _early_epoch(self, state: bytes, rank: int, row: int) -> Iterator[Step]:
        """The fault: each warp (one per source) reads the epoch itself, and the first to finish stores it."""
        s, at = self.scenario, self.layout
        for source in range(s.world):
            base = at.base(rank, row, source)
            if state[base] == UNREAD:
                b = bytearray(state)
                b[base] = state[at.epoch(rank, row)]
                yield Step(f"rank {rank} row {row}: the warp of source {source} reads epoch {b[base]}", bytes(b))
        stored = at.stored(rank, row)
        for source in range(s.world):
            done = all(state[at.cell(rank, source, row, u) + 4] for u in range(at.units))
            if done and not state[stored]:
                b = bytearray(state)
                b[stored] = 1
                b[at.epoch(rank, row)] = (state[at.epoch(rank, row)] + 1) % s.tag_modulus
                yield Step(f"rank {rank} row {row}: the warp of source {source} stores the epoch", bytes(b))
                return

    def _accept(self, state: bytes, rank: int, row: int, source: int, unit: int, call: int) -> Iterator[Step]:
        """One polling load that finds the expected tag."""
        s, at = self.scenario, self.layout
        base = state[at.base(rank, row, source)]
        if base == UNREAD or ("half-tag" in self.faults and s.units[unit] == "hi"):
            return
        expected = (base + 1) % s.tag_modulus
        parity = self._parity(expected)
        held = state[at.cell(rank, source, row, unit) + 2 * parity]
        tag = state[at.tag(source, row, held)]
        if not (tag >= expected if "ordered-tags" in self.faults else tag == expected):
            return
        b = bytearray(state)
        both = "half-tag" in self.faults and s.units[unit] == "lo"
        text, violation = "", None
        for half in (unit, unit + 1) if both else (unit,):
            cell = at.cell(rank, source, row, half)
            held = state[cell + 2 * parity]
            b[cell + 4] = 1
            text = f"rank {rank} accepts {s.units[half]} of row {row} from rank {source}: call {held}'s, tag {tag}"
            if held != call and s.client_errs:
                b[at.tainted(rank, row)] = 1
            elif held != call:
                seen = state[at.tag(source, row, held)]
                violation = (
                    f"rank {rank}, merging row {row} of call {call} (tag {expected}), took the {s.units[half]} word of "
                    f"call {held} (tag {seen}) from rank {source} for its own"
                )
            compared = s.units[half] == "sig" and "no-signature" not in self.faults
            if compared and s.signature(held) != s.signature(call):
                b[at.failed(rank)] = 1
                text += "; signatures differ: reported"
        self._settle(b, rank, source, row)
        yield Step(text, bytes(b), violation)

    # --- second round, and the end of a row --------------------------------------------------------------------

    def _place(self, row: int) -> int:
        """The row of ``recv`` that the lists of ``row`` are kept in."""
        return 0 if "shared-lists" in self.faults else row

    def _rescue(self, state: bytes, rank: int, row: int, call: int, accepted: bool) -> Iterator[Step]:
        s, at = self.scenario, self.layout
        ranks = s.saturated.get((call, row), ())
        wrote = at.wrote(rank, row)
        if rank in ranks and not state[wrote] and (accepted or "early-rescue" in self.faults):
            seq = state[at.seq(rank, row)] + 1
            b = bytearray(state)
            b[wrote] = 1
            b[at.flag_call(rank, row, seq)] = call
            for dst in range(s.world):
                for unit in range(s.rescue_units):
                    b[at.recv(dst, self._place(row), ranks.index(rank), unit) + 1] |= 1 << (at.word(row, call) - 1)
                b[at.flag(dst, rank, row) + 1] |= 1 << (seq - 1)
            yield Step(f"rank {rank} writes its rescue words of row {row}, call {call}, and flag {seq}", bytes(b))
        if not accepted:
            return
        complete = rank not in ranks or bool(state[wrote])
        for index, source in enumerate(ranks):
            flag = state[at.flag(rank, source, row)]
            for unit in range(s.rescue_units):
                cell, own = at.recv(rank, self._place(row), index, unit), at.recv(rank, row, index, unit)
                if state[own + 2]:
                    continue
                complete = False
                if flag < state[at.seq(rank, row)] + 1:
                    continue
                b = bytearray(state)
                b[own + 2] = 1
                violation = None
                if state[cell] != at.word(row, call):
                    violation = (
                        f"rank {rank} read a rescue word of {at.named(state[cell])} for row {row} of call {call} "
                        f"(list {index}, from rank {source})"
                    )
                yield Step(f"rank {rank} reads rank {source}'s rescue word of row {row}", bytes(b), violation)
        if complete and self._pushed(state, rank, state[at.merged(rank, row)] + 1):
            yield self._finish(state, rank, row, call, bool(ranks))

    def _finish(self, state: bytes, rank: int, row: int, call: int, rescued: bool) -> Step:
        """The output is written, the epoch stored, the block done."""
        s, at = self.scenario, self.layout
        b = bytearray(state)
        if not state[at.stored(rank, row)]:
            b[at.epoch(rank, row)] = (state[at.epoch(rank, row)] + 1) % s.tag_modulus
        if rescued:
            b[at.seq(rank, row)] += 1
        b[at.merged(rank, row)] += 1
        for cleared in (at.started, at.stored, at.wrote, at.tainted):
            b[cleared(rank, row)] = 0
        for source in range(s.world):
            b[at.base(rank, row, source)] = UNREAD
            for unit in range(at.units):
                b[at.cell(rank, source, row, unit) + 4] = 0
            self._settle(b, rank, source, row)
        for index in range(s.world):
            for unit in range(s.rescue_units):
                b[at.recv(rank, row, index, unit) + 2] = 0
        violation = None
        if state[at.tainted(rank, row)]:
            violation = f"rank {rank} completed row {row} of call {call} with words of another call"
        return Step(f"rank {rank} completes row {row} of call {call}", bytes(b), violation)

    # --- equal states get equal bytes --------------------------------------------------------------------------

    def _settle(self, b: bytearray, dst: int, source: int, row: int) -> None:
        """Order interchangeable units of one channel, so that states that differ only by their names are one."""
        for first, last in self._groups:
            a, z = self.layout.cell(dst, source, row, first), self.layout.cell(dst, source, row, last)
            chunks = sorted(bytes(b[i : i + 5]) for i in range(a, z, 5))
            b[a:z] = b"".join(chunks)


def _bits(mask: int) -> Iterator[int]:
    """1-based numbers of the bits set in ``mask``."""
    while mask:
        bit = mask & -mask
        mask ^= bit
        yield bit.bit_length()
