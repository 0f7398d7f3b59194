"""What a merge that gave up left in pinned memory, as the text of an exception: who did not answer which call."""

from __future__ import annotations

import torch

from keysieve.checks import message
from keysieve.device.report import (
    REPORT_MAGIC,
    STAGE_FLAG,
    STAGE_SIGNATURE,
    WORD_MAGIC,
    SpinReport,
    decode_report,
)

_TWO_31 = 1 << 31


def written(report: torch.Tensor) -> bool:
    """Has a kernel left a report in this pinned buffer? A look at one word: no synchronisation."""
    return int(report[4 * WORD_MAGIC : 4 * WORD_MAGIC + 4].view(torch.int32)[0]) == REPORT_MAGIC


def failure(report: torch.Tensor, timeout: float) -> str | None:
    """The text for what a kernel reported, or None."""
    found = decode_report(bytes(report.tolist()))
    return None if found is None else text_of(found, timeout)


def text_of(found: SpinReport, timeout: float) -> str:
    """Rank, row, call, source and round in words, and what to do."""
    where = f"on rank {found.rank}, row {found.row}, call {found.tag}"
    if found.stage == STAGE_SIGNATURE:
        ours, theirs = _call(found.call, found.length), _call(found.their_call, found.their_length)
        return message(
            "dcp",
            got=f"{where}: source rank {found.source} made another call: {theirs}; this rank: {ours} (round 1)",
            accepted="the same rows, site and lengths on every rank",
            remedy="Call all ranks alike, idle ranks with padding rows; this process's CUDA context is lost: restart.",
        )
    own = _call(found.call, found.length)
    if found.stage == STAGE_FLAG:
        what = f"no second list from source rank {found.source}: expected flag {found.expected}, seen {found.seen}"
        number = 2
    else:
        what = f"no words from source rank {found.source}: expected tag {found.expected}, seen {found.seen}"
        number = 1
    return message(
        "dcp",
        got=f"{where} ({own}): {what} within {timeout:g} s (round {number})",
        accepted="an answer from every rank within the time limit",
        remedy=(
            f"Rank {found.source} died, stopped, is late, or made fewer calls: look at its log; this process's CUDA "
            "context is lost: restart."
        ),
    )


def _call(word: int, length: int) -> str:
    signed = length - (1 << 32) if length >= _TWO_31 else length
    return f"{word >> 16} rows, site {word & 0xFFFF}, length {signed}"
