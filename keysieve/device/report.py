"""The report a bounded spin leaves behind before it traps. No cutlass here: the host reads it with this module.

One report is 64 bytes of pinned host memory, sixteen 32-bit words. The kernel writes words 1.. first and the magic
word last, with release semantics at system scope, so a reader that sees the magic sees the rest.
"""

import struct
from dataclasses import dataclass

REPORT_BYTES = 64
REPORT_WORDS = REPORT_BYTES // 4
REPORT_MAGIC = 0x6B733A21

# Word numbers of the fields, in the order of `SpinReport`.
WORD_MAGIC, WORD_RANK, WORD_ROW, WORD_SOURCE, WORD_EXPECTED, WORD_SEEN, WORD_STAGE = range(7)
WORD_CALL, WORD_THEIR_CALL, WORD_LENGTH, WORD_THEIR_LENGTH, WORD_TAG = range(7, 12)
"""Of an exchange: the waiting rank's signature and the source's, `(rows << 16 | site)` and a length each; the call."""

STAGE_WORDS, STAGE_FLAG, STAGE_SIGNATURE = 1, 2, 3
"""Stages of an exchange: a word of the first round is missing; a rescue's flag is; the source made another call."""


@dataclass(frozen=True)
class SpinReport:
    """What a spin was waiting for when its time ran out.

    rank: who waited. row: for which row (or item). source: whose answer was missing. expected, seen: the tag awaited
    and the tag found. stage: a number the kernel gives to its waiting places (for an exchange: STAGE_WORDS, ..). call,
    length: of an exchange, the waiting rank's signature; their_call, their_length: the source's, at STAGE_SIGNATURE;
    tag: the call's number modulo 2^32.
    """

    rank: int
    row: int
    source: int
    expected: int
    seen: int
    stage: int
    call: int = 0
    their_call: int = 0
    length: int = 0
    their_length: int = 0
    tag: int = 0

    def __str__(self) -> str:
        return (
            f"rank {self.rank} waited in vain for rank {self.source} at row {self.row}, stage {self.stage}: "
            f"expected tag {self.expected:#x}, saw {self.seen:#x}"
        )


def decode_report(raw: bytes) -> SpinReport | None:
    """The report in `raw` (64 bytes), or None when none was written."""
    if len(raw) != REPORT_BYTES:
        raise ValueError(f"a report is {REPORT_BYTES} bytes, got {len(raw)}")
    words = struct.unpack(f"<{REPORT_WORDS}I", raw)
    if words[WORD_MAGIC] != REPORT_MAGIC:
        return None
    return SpinReport(*words[WORD_RANK : WORD_TAG + 1])
