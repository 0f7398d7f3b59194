"""Where each part of a model state lies in its bytes.

A state is flat: one byte per small number, offsets computed once. Every ``(destination, source, row)`` channel has
``units`` chunks of five bytes: what the slot of parity 0 holds (a call number) and the set of stores on their way to it
(bit c - 1 for call c), the same for parity 1, and whether the running merge has accepted the unit.
"""

from __future__ import annotations

from typing import Final

UNREAD: Final = 0xFF
"""A warp that has not read its epoch yet."""

CHUNK: Final = 5


class Layout:
    """Offsets into a state for ``world`` ranks, ``rows`` rows, ``units`` halves a row and ``calls`` calls."""

    def __init__(self, world: int, rows: int, units: int, calls: int, rescue_units: int) -> None:
        if rows * calls > 8:
            raise ValueError(f"a state has room for 8 words of (row, call), not {rows * calls}")
        self.world, self.rows, self.units, self.calls, self.rescue_units = world, rows, units, calls, rescue_units
        self._cells = 0
        self._tags = self._cells + world * world * rows * units * CHUNK
        self._rows = self._tags + world * rows * (calls + 1)
        self._row_bytes = 8 + world
        self._recv = self._rows + world * rows * self._row_bytes
        self._flags = self._recv + world * rows * world * rescue_units * 3
        self._flag_calls = self._flags + world * world * rows * 2
        self._failed = self._flag_calls + world * rows * (calls + 1)
        self.size = self._failed + world
        ranks, every_row = range(world), range(rows)
        self.channels = [(d, s, r) for d in ranks for s in ranks for r in every_row]
        self.rescue_cells = [(d, r, i, u) for d in ranks for r in every_row for i in ranks for u in range(rescue_units)]

    def cell(self, dst: int, source: int, row: int, unit: int) -> int:
        """First of the five bytes of a unit; ``unit == units`` is one past the last."""
        return (((dst * self.world + source) * self.rows + row) * self.units + unit) * CHUNK

    def tag(self, rank: int, row: int, call: int) -> int:
        """The tag that ``rank`` pushed ``call`` with."""
        return self._tags + (rank * self.rows + row) * (self.calls + 1) + call

    def _row(self, rank: int, row: int) -> int:
        return self._rows + (rank * self.rows + row) * self._row_bytes

    def epoch(self, rank: int, row: int) -> int:
        """Completed calls, modulo the tag modulus: what the kernels read."""
        return self._row(rank, row)

    def pushed(self, rank: int, row: int) -> int:
        """Calls whose words this rank has pushed."""
        return self._row(rank, row) + 1

    def merged(self, rank: int, row: int) -> int:
        """Calls whose merge is complete (true count; the kernels only see the epoch)."""
        return self._row(rank, row) + 2

    def started(self, rank: int, row: int) -> int:
        """Whether the block of the row is resident."""
        return self._row(rank, row) + 3

    def stored(self, rank: int, row: int) -> int:
        """Whether the epoch was stored before the end (a fault)."""
        return self._row(rank, row) + 4

    def wrote(self, rank: int, row: int) -> int:
        """Whether this rank has written its rescue words of the running merge."""
        return self._row(rank, row) + 5

    def tainted(self, rank: int, row: int) -> int:
        """Whether a word of another call was accepted (only after a client's error)."""
        return self._row(rank, row) + 6

    def seq(self, rank: int, row: int) -> int:
        """Completed rescue rounds of the row."""
        return self._row(rank, row) + 7

    def base(self, rank: int, row: int, source: int) -> int:
        """The epoch that the warp of ``source`` works with."""
        return self._row(rank, row) + 8 + source

    def recv(self, dst: int, row: int, index: int, unit: int) -> int:
        """Three bytes: which rescue word is here (see :meth:`word`), the stores on their way, whether it was read."""
        return self._recv + (((dst * self.rows + row) * self.world + index) * self.rescue_units + unit) * 3

    def word(self, row: int, call: int) -> int:
        """The name of the rescue words of ``row`` and ``call``, from 1; 0 is memory that was never written."""
        return row * self.calls + call

    def named(self, word: int) -> str:
        """A rescue word's name, for reports."""
        row, call = divmod(word - 1, self.calls)
        return f"call {call + 1}, row {row}" if word else "call 0"

    def flag(self, dst: int, source: int, row: int) -> int:
        """Two bytes: the flag's value at ``dst``, and the values on their way."""
        return self._flags + ((dst * self.world + source) * self.rows + row) * 2

    def flag_call(self, rank: int, row: int, seq: int) -> int:
        """Which call ``rank`` published flag value ``seq`` for."""
        return self._flag_calls + (rank * self.rows + row) * (self.calls + 1) + seq

    def failed(self, rank: int) -> int:
        """Whether the rank has reported a failure and stopped."""
        return self._failed + rank
