"""Steps large enough that their logits and maxima are dropped from L2 once selected from."""

from __future__ import annotations

from typing import Any

import torch
from harness import cases
from test_step import Inputs

import keysieve as ks

LARGE = [
    # heads, topk, next_n, format, weights, requests, longest: half of the rows are long enough, half are not
    (32, 2048, 2, "fp8_fp32", torch.float32, 40, 60000),
    (32, 512, 1, "fp8_fp32", torch.float32, 129, 35000),
    (8, 2048, 1, "fp8_fp32", torch.float32, 18, 200001),
]


@cases(*LARGE)
def test_dropped_results(device: torch.device, case: tuple[int, int, int, str, torch.dtype, int, int]) -> None:
    """The same selection, step after step in one workspace, from one that drops its results and one that keeps them."""
    from keysieve.kernels.select import DROP_ROWS

    x = Inputs(device, case, seed=33)
    assert x.rows * (x.longest // 128) > DROP_ROWS
    positions, counts = x.expected()
    both = [
        ks.DecodeIndexer(x.spec, max_rows=x.rows, max_context=x.longest, next_n=x.next_n, device=device)
        for _ in range(2)
    ]
    runners: list[Any] = [indexer._runner for indexer in both]
    runners[0]._drop, runners[1]._drop = True, False
    for turn in range(4):
        for indexer in both:
            out = indexer(*x.arguments(), positions=True)
            assert out.positions is not None
            assert torch.equal(out.positions.cpu(), positions), f"turn {turn}"
            assert torch.equal(out.counts.cpu(), counts), f"turn {turn}"
            indexer.check()
    codes, lens = x.query.view(torch.uint8), x.lens
    for turn in range(200):  # other queries and lengths every time: what stood there before must not be selected from
        x.query = codes.roll(turn, 0).view(x.query.dtype)
        x.lens = lens.roll(turn * x.next_n, 0).clamp(max=x.longest - turn % 9)
        first, second = (indexer(*x.arguments()) for indexer in both)
        assert torch.equal(first.rows, second.rows), f"turn {turn}"
        assert torch.equal(first.counts, second.counts), f"turn {turn}"
