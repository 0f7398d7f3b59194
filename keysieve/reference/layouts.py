"""The two layouts of a step's logits, as packers: what the GPU kernels write and read, in plain PyTorch.

Compact (tensor parallel): only the tiles of 128 keys that are needed, request after request, the rows of a request
one after another, with ``tops``, the largest key16 of each aligned 8 keys. Row j of request r starts at element
``128 * (next_n * sum(tiles(i) for i < r) + j * tiles(r))``, where ``tiles(i)`` is 0 for a request whose rows all fit
``topk``. Pitched (context parallel): row t at ``t * pitch``, no tops, every request scored.

What lies past a row's length is undefined in both; the packers fill it with what the caller says, so that a test can
poison it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from keysieve.checks import refuse
from keysieve.reference.keys import key16
from keysieve.spec import GROUP, KEY16_EMPTY, PITCH_MULTIPLE, TILE, request_tiles

Lengths = Sequence[int] | torch.Tensor


@dataclass(frozen=True)
class CompactLayout:
    """Where every row of a step lies in the compact layout.

    Attributes:
        lengths: keys of every row, 0 for an empty one.
        next_n: query rows per request.
        tiles: tiles of every request; 0 for one that is not scored.
        starts: first element of every row.
        elements: elements of all rows: ``128 * next_n * sum(tiles)``.
    """

    lengths: tuple[int, ...]
    next_n: int
    tiles: tuple[int, ...]
    starts: tuple[int, ...]
    elements: int

    def scored(self, row: int) -> bool:
        """Whether the row's request is scored at all."""
        return self.tiles[row // self.next_n] > 0


def compact_layout(lengths: Lengths, next_n: int, topk: int) -> CompactLayout:
    """The compact layout of rows with these ``lengths`` (``[rows]``, any integers; 0 or less is an empty row)."""
    lens = _as_lengths(lengths)
    if next_n < 1 or len(lens) % next_n:
        refuse(
            "next_n",
            got=f"{next_n} for {len(lens)} rows",
            accepted="a divisor of the number of rows",
            remedy="Give every request the same number of rows; pad with rows of length 0.",
        )
    tiles = tuple(request_tiles(max(lens[r : r + next_n]), topk) for r in range(0, len(lens), next_n))
    starts: list[int] = []
    base = 0
    for count in tiles:
        starts += [TILE * (base + j * count) for j in range(next_n)]
        base += next_n * count
    return CompactLayout(lens, next_n, tiles, tuple(starts), TILE * base)


def pack_compact(
    logits: torch.Tensor, layout: CompactLayout, *, fill: float = -torch.inf, tops_fill: int = KEY16_EMPTY
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and tops of a step in the compact layout.

    Args:
        logits: bfloat16 ``[rows, >= longest]``; only what lies within a row's length is read.
        layout: from :func:`compact_layout`.
        fill: the logit written past a row's length.
        tops_fill: the key16 written for groups wholly past a row's length.

    Returns:
        ``(bfloat16 [elements], uint16 [elements / 8])``.
    """
    packed = torch.full((layout.elements,), fill, dtype=torch.bfloat16, device=logits.device)
    tops = torch.full((layout.elements // GROUP,), tops_fill, dtype=torch.int32, device=logits.device)
    for t, (length, start) in enumerate(zip(layout.lengths, layout.starts, strict=True)):
        if length <= 0 or not layout.scored(t):
            continue
        row = logits[t, :length]
        packed[start : start + length] = row
        first, groups = start // GROUP, -(-length // GROUP)
        tops[first : first + groups] = row_tops(row)
    return packed, tops.to(torch.uint16)


def row_tops(row: torch.Tensor) -> torch.Tensor:
    """int32 ``[ceil(n / 8)]``: the largest key16 of each aligned 8 of ``row`` (bfloat16 ``[n]``, ``n >= 1``)."""
    groups = -(-row.numel() // GROUP)
    keys = torch.zeros(groups * GROUP, dtype=torch.int32, device=row.device)  # 0 is below every key
    keys[: row.numel()] = key16(row)
    return keys.view(groups, GROUP).amax(1)


def unpack_compact(packed: torch.Tensor, layout: CompactLayout, max_len: int | None = None) -> torch.Tensor:
    """bfloat16 ``[rows, max_len]`` from the compact layout: -inf past a row's length and in requests not scored.

    Args:
        packed: bfloat16 ``[>= elements]``.
        layout: from :func:`compact_layout`.
        max_len: width of the result; default the longest length.
    """
    width = max(layout.lengths, default=0) if max_len is None else max_len
    logits = torch.full((len(layout.lengths), width), -torch.inf, dtype=torch.bfloat16, device=packed.device)
    for t, (length, start) in enumerate(zip(layout.lengths, layout.starts, strict=True)):
        if layout.scored(t):
            logits[t, :length] = packed[start : start + length]
    return logits


def pack_pitched(logits: torch.Tensor, lengths: Lengths, pitch: int, *, fill: float = -torch.inf) -> torch.Tensor:
    """bfloat16 ``[rows * pitch]``: row t at ``t * pitch``, ``fill`` past its length.

    Args:
        logits: bfloat16 ``[rows, >= longest]``; only what lies within a row's length is read.
        lengths: keys of every row; 0 or less is an empty row.
        pitch: elements from row to row, a multiple of 512 that holds the longest row.
    """
    lens = _as_lengths(lengths)
    _check_pitch(pitch, max(lens, default=0))
    packed = torch.full((len(lens), pitch), fill, dtype=torch.bfloat16, device=logits.device)
    for t, length in enumerate(lens):
        packed[t, :length] = logits[t, :length]
    return packed.view(-1)


def unpack_pitched(packed: torch.Tensor, lengths: Lengths, pitch: int, max_len: int | None = None) -> torch.Tensor:
    """bfloat16 ``[rows, max_len]`` from the pitched layout, -inf past a row's length; see :func:`pack_pitched`."""
    lens = _as_lengths(lengths)
    width = max(lens, default=0) if max_len is None else max_len
    _check_pitch(pitch, max(lens, default=0))
    logits = torch.full((len(lens), width), -torch.inf, dtype=torch.bfloat16, device=packed.device)
    for t, length in enumerate(lens):
        logits[t, :length] = packed[t * pitch : t * pitch + length]
    return logits


def _as_lengths(lengths: Lengths) -> tuple[int, ...]:
    values = lengths.reshape(-1).tolist() if isinstance(lengths, torch.Tensor) else lengths
    return tuple(max(int(v), 0) for v in values)


def _check_pitch(pitch: int, longest: int) -> None:
    if pitch % PITCH_MULTIPLE or pitch < longest:
        refuse(
            "pitch",
            got=pitch,
            accepted=f"a multiple of {PITCH_MULTIPLE} of at least {longest}",
            remedy="Use keysieve.spec.pitch_of(longest length).",
        )
