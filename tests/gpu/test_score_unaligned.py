"""Logits at addresses that are no multiple of the scorer's widest store: the same bits, and nothing beside them."""

from __future__ import annotations

from dataclasses import replace

import score_cases as sc
import torch
from harness import cases

LONGEST = 1500
"""Keys: whole tiles, which are stored several keys at a time, and the part of one."""


@cases(
    *((32, 4, layout, shift) for layout in ("compact", "pitched") for shift in (1, 2, 3)),
    (32, 8, "compact", 1),
    (64, 4, "compact", 2),
    (64, 8, "pitched", 1),
    (32, 1, "compact", 1),
)
def test_logits_that_are_not_aligned(device: torch.device, case: tuple[int, int, str, int]) -> None:
    """case: heads, next_n, layout, elements by which the logits (pitched: every row further) are shifted."""
    heads, next_n, layout, shift = case
    lengths = [LONGEST - t % 3 for t in range(6 * next_n)]
    p = sc.problem(device, sc.config_of(heads, next_n, layout), lengths, seed=41)
    want = sc.run(p)
    into = sc.buffers(p)
    if layout == "compact":
        store = torch.full((into.logits.numel() + 8,), sc.SENTINEL, dtype=torch.int16, device=device)
        into = replace(into, logits=store[shift : shift + into.logits.numel()])
    else:
        rows, pitch = into.logits.shape
        store = torch.full((rows, pitch + shift), sc.SENTINEL, dtype=torch.int16, device=device)
        into = replace(into, logits=store[:, :pitch])
    beside = int((store != sc.SENTINEL).sum())
    sc.launch(p, into)
    assert int(into.flags.item()) == 0
    assert torch.equal(into.logits, want.logits)
    if into.tops is not None and want.tops is not None:
        assert torch.equal(into.tops, want.tops)
    assert int((store != sc.SENTINEL).sum()) - beside == int((want.logits != sc.SENTINEL).sum())
