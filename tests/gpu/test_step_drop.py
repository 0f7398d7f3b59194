"""Steps large enough that their logits and maxima are dropped from L2 once selected from."""

from __future__ import annotations

from typing import Any

import torch
from harness import cases, poison
from test_step import Inputs

import keysieve as ks
from keysieve.bench.step import CHAINED, RELEASE

Case = tuple[int, int, int, str, torch.dtype, int, int]

LARGE: list[Case] = [
    # heads, topk, next_n, format, weights, requests, longest: some of the rows are long enough, others are not
    (32, 2048, 2, "fp8_fp32", torch.float32, 40, 75000),
    (32, 512, 1, "fp8_fp32", torch.float32, 129, 45000),
    (8, 2048, 1, "fp8_fp32", torch.float32, 24, 240001),
    (8, 512, 8, "fp8_fp32", torch.float32, 1, 750001),  # few keys for many tile rows: the one for a sanitizer
]
TURNS = 60


def two_indexers(x: Inputs, device: torch.device) -> list[ks.DecodeIndexer]:
    """One that drops its results, and lets the next kernel start early, and one that does neither."""
    from keysieve.kernels.select import DROP_ROWS

    assert x.rows * (x.longest // 128) > DROP_ROWS
    both = []
    for drop in (True, False):
        indexer = ks.DecodeIndexer(x.spec, x.rows, x.longest, x.next_n, device=device, early_release=drop)
        runner: Any = indexer._runner
        runner._drop = drop
        both.append(indexer)
    return both


class Turns:
    """The inputs of a case, with other queries and lengths at every turn, in the same memory."""

    def __init__(self, x: Inputs) -> None:
        self.x, self.codes, self.lens = x, x.query.view(torch.uint8).clone(), x.lens.clone()

    def take(self, turn: int) -> None:
        """Turn 0: as drawn. Later: another row's queries and lengths, some a little shorter; every tenth is empty."""
        x = self.x
        x.query.view(torch.uint8).copy_(self.codes.roll(turn, 0))
        lens = self.lens.roll(turn * x.next_n, 0).clamp(max=x.longest - turn % 9)
        x.lens.copy_(lens if turn % 10 != 9 else lens * 0)


@cases(*LARGE)
def test_dropped_results(device: torch.device, case: Case) -> None:
    """The same selection, step after step in one workspace, from one that drops its results and one that keeps them."""
    x = Inputs(device, case, seed=33)
    positions, counts = x.expected()
    both = two_indexers(x, device)
    for turn in range(2):
        for indexer in both:
            out = indexer(*x.arguments(), positions=True)
            assert out.positions is not None
            assert torch.equal(out.positions.cpu(), positions), f"turn {turn}"
            assert torch.equal(out.counts.cpu(), counts), f"turn {turn}"
            indexer.check()
    turns = Turns(x)
    for turn in range(TURNS):  # what stood there before must not be selected from
        turns.take(turn)
        first, second = (indexer(*x.arguments()) for indexer in both)
        assert torch.equal(first.rows, second.rows), f"turn {turn}"
        assert torch.equal(first.counts, second.counts), f"turn {turn}"


def launches(indexer: ks.DecodeIndexer, x: Inputs, **outputs: Any) -> list[Any]:
    """A step's two launches, [function, arguments] each, which take a stream besides."""
    indexer._known = ()  # a known form would launch without writing down what
    indexer(*x.arguments(), **outputs)
    runner: Any = indexer._runner
    return [[target.function, [int(a) for a in arguments]] for target, arguments in runner._calls]


@cases(*LARGE)
def test_dropped_results_in_graphs(device: torch.device, case: Case) -> None:
    """One graph, captured with zero lengths, replayed with other lengths and queries every time: a step that drops its
    results and releases the next kernel early, and behind it a selection that is its programmatic dependent."""
    x = Inputs(device, case, seed=34)
    dropping, keeping = two_indexers(x, device)
    turns = Turns(x)
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
    got, kept, behind = (
        (poison((x.rows, x.spec.topk), torch.int32, device), poison((x.rows,), torch.int32, device)) for _ in range(3)
    )
    x.lens.zero_()
    step = launches(dropping, x, out=got[0], counts=got[1])
    assert step[1][1][RELEASE] == 3, "drops, and lets the next one start"
    assert step[1][1][CHAINED] == 1
    dependent = launches(keeping, x, out=behind[0], counts=behind[1])[1]
    assert dependent[1][RELEASE] == 0
    assert dependent[1][CHAINED] == 1
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for function, arguments in (*step, dependent):  # the last one selects from what `keeping` has scored
            function(*arguments, torch.cuda.current_stream().cuda_stream)
    for turn in range(TURNS):
        turns.take(turn)
        for rows, counts in (got, kept, behind):
            rows.fill_(0x5A5A5A5A)
            counts.fill_(0x5A5A5A5A)
        keeping(*x.arguments(), out=kept[0], counts=kept[1])
        graph.replay()
        if turn % 3 == 0:  # and twice in a row, over what the first one dropped
            graph.replay()
        for one in (got, behind):
            assert torch.equal(one[0], kept[0]), f"turn {turn}"
            assert torch.equal(one[1], kept[1]), f"turn {turn}"
    dropping.check()
    keeping.check()
