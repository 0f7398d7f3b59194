"""The scorer on problems of a few tiles: small enough for memcheck and racecheck, and of every cut of the kernel.

Run as `compute-sanitizer --tool racecheck --kernel-name kns=sm90_score python tests/gpu/runner.py -k test_score_small`.
"""

from __future__ import annotations

import score_cases as sc
import torch
from harness import cases

LENGTHS = [129, 64, 300, 0, -3, 257, 8, 1, 511, 65]
"""Of rows: whole and half tiles, one key past a page, a tile and a group, and rows without keys."""


@cases(
    # Two blocks a multiprocessor: up to 32 columns.
    (32, 1, "compact", "fp8_fp32", "float32"),
    (32, 1, "pitched", "fp8_ue8m0", "bfloat16"),
    (8, 2, "compact", "fp8_ue8m0", "float32"),
    # One block: four warpgroups, three with resident weights (one product each, or two), two, and what is cut finer.
    (64, 1, "compact", "fp8_fp32", "float32"),
    (32, 2, "pitched", "fp8_fp32", "float32"),
    (16, 4, "compact", "fp8_fp32", "float32"),
    (32, 4, "compact", "fp8_fp32", "float32"),
    (64, 2, "pitched", "fp8_fp32", "float32"),
    (32, 8, "compact", "fp8_fp32", "float32"),
    (64, 4, "pitched", "fp8_fp32", "float32"),
    (64, 8, "compact", "fp8_fp32", "float32"),
    (32, 7, "pitched", "fp8_fp32", "float32"),
)
def test_small(device: torch.device, case: tuple[int, int, str, str, str]) -> None:
    """Bound, tops, starts and untouched surroundings, and the same bits from one, two and five multiprocessors."""
    config = sc.config_of(*case)
    lengths = [LENGTHS[(3 * t + t // 7) % len(LENGTHS)] for t in range(4 * config.next_n)]
    p = sc.problem(device, config, lengths, seed=31, page_stride=8464)
    first = sc.run(p, blocks=1)
    assert first.flag == 0
    sc.assert_frame(p, first)
    sc.assert_within_bound(p, first)
    for blocks in (2, 5):
        again = sc.run(p, blocks=blocks)
        assert torch.equal(again.logits, first.logits), f"{blocks} blocks"
        assert again.tops is None or torch.equal(again.tops, first.tops), f"{blocks} blocks"


@cases((32, 1), (32, 4))
def test_many_requests(device: torch.device, case: tuple[int, int]) -> None:
    """More requests than one warp plans for: the whole block builds the plan."""
    heads, next_n = case
    lengths = [LENGTHS[(t + t // 11) % len(LENGTHS)] % 140 for t in range(130 * next_n)]
    p = sc.problem(device, sc.config_of(heads, next_n), lengths, seed=32)
    first = sc.run(p, blocks=2)
    assert first.flag == 0
    sc.assert_frame(p, first)
    again = sc.run(p, blocks=7)
    assert torch.equal(again.logits, first.logits)
