"""Where each request's tiles begin in the compact logits buffer: the rule of the buffer's layout, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from keysieve.spec import request_tiles


@dataclass(frozen=True)
class TileOffsets:
    """What the `tile_offsets` kernel writes.

    offsets: int32 [requests + 1], exclusive prefix sums of tiles, the total last. counts: int32 [rows], the keys each
    row selects. short, empty, refused: rows with 1..topk keys, without keys (refused ones included), and longer than
    max_context.
    """

    offsets: torch.Tensor
    counts: torch.Tensor
    short: int
    empty: int
    refused: int


def tile_offsets(
    seq_lens: torch.Tensor, next_n: int, topk: int, max_context: int, *, score_all: bool = False
) -> TileOffsets:
    """Tiles of 128 keys that each request's rows need, request after request.

    seq_lens: int32 [requests * next_n]; a row longer than max_context counts as empty. score_all: count the tiles of
    requests whose rows all fit topk too (pitched layout, public `score`).
    """
    lens = seq_lens.to(torch.int64)
    refused = lens > max_context
    lens = torch.where(refused, torch.zeros_like(lens), lens.clamp(min=0))
    longest = lens.view(-1, next_n).amax(dim=1).tolist() if lens.numel() else []
    tiles = [request_tiles(int(n), None if score_all else topk) for n in longest]
    offsets = torch.tensor([0, *tiles], dtype=torch.int64).cumsum(0)
    return TileOffsets(
        offsets=offsets.to(torch.int32),
        counts=lens.clamp(max=topk).to(torch.int32),
        short=int(((lens > 0) & (lens <= topk)).sum()),
        empty=int((lens == 0).sum()),
        refused=int(refused.sum()),
    )
