"""Where everything of the device exchange lies: byte offsets in a rank's symmetric block, and its private arrays.

A *block* is the memory that peers write: the same layout on every rank, so that an offset means the same in all of
them. Its parts, each aligned to 256 bytes:

* ``slots``, 16-byte pairs ``[2 parities, world sources, max_rows, pairs]``: ``(word, tag, word, tag)``;
* ``recv``, int32 ``[max_rows, rescued, recv_pitch]``: second lists of saturated ranks; absent if N = K;
* ``flags``, int64 ``[world, max_rows]``: per source, the number of the row's rescue whose list has arrived.

Private to a rank, in ordinary memory of its device: ``epoch`` (uint32 per row: completed calls), ``seq2`` (int64 per
row: completed rescues), ``ticket`` (row numbers handed to blocks) and ``peers`` (int64 ``[16]``: the blocks' addresses
as this device sees them). Pure arithmetic: nothing is allocated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from keysieve.dcp.memory import ExchangeShape
from keysieve.spec import MAX_WORLD

PAIR_BYTES: Final = 16
ALIGNMENT: Final = 256
TICKET_WORDS: Final = 64


@dataclass(frozen=True)
class ExchangeLayout:
    """Byte offsets and pitches of a block for one :class:`~keysieve.dcp.memory.ExchangeShape`."""

    shape: ExchangeShape

    @property
    def slot_bytes(self) -> int:
        """Of one row of one source and parity."""
        return PAIR_BYTES * self.shape.pairs

    @property
    def slots_bytes(self) -> int:
        return 2 * self.shape.world * self.shape.max_rows * self.slot_bytes

    @property
    def rescued(self) -> int:
        """Second lists that a row has room for: the most ranks that can be saturated, none if lists are whole."""
        return 0 if self.shape.topn >= self.shape.topk else self.shape.rescued

    @property
    def recv_pitch(self) -> int:
        """int32 words from list to list: the words of a second list in whole 16-byte vectors."""
        return -(-self.shape.second_words // 4) * 4

    @property
    def recv_bytes(self) -> int:
        return 4 * self.shape.max_rows * self.rescued * self.recv_pitch

    @property
    def flags_bytes(self) -> int:
        return 8 * self.shape.world * self.shape.max_rows

    @property
    def slots(self) -> int:
        """Offset of the slots."""
        return 0

    @property
    def recv(self) -> int:
        """Offset of the second lists."""
        return _aligned(self.slots_bytes)

    @property
    def flags(self) -> int:
        """Offset of the rescue flags."""
        return self.recv + _aligned(self.recv_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a rank's block."""
        return self.flags + _aligned(self.flags_bytes)

    @property
    def private_bytes(self) -> int:
        """Bytes of a rank's private arrays."""
        return 12 * self.shape.max_rows + 4 * TICKET_WORDS + 8 * MAX_WORLD

    def slot(self, parity: int, source: int, row: int) -> int:
        """Offset of a row's pairs."""
        return self.slots + ((parity * self.shape.world + source) * self.shape.max_rows + row) * self.slot_bytes

    def second_list(self, row: int, index: int) -> int:
        """Offset of the list of the ``index``-th saturated rank of a row."""
        return self.recv + 4 * self.recv_pitch * (row * self.rescued + index)

    def flag(self, source: int, row: int) -> int:
        """Offset of a source's rescue flag of a row."""
        return self.flags + 8 * (source * self.shape.max_rows + row)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
