"""The same bits every time: thousands of runs and graph replays, dirty workspaces, a busy memory, chained launches."""

from __future__ import annotations

import torch
from harness import cases, poison
from select_cases import compact, oracle_positions, tile_starts, values
from test_select import K, Outputs, selector, sms_for, tables

from keysieve.kernels.select_host import topk_workspace_bytes


class Hog:
    """Copies on another stream, so that memory and L2 are busy."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.source = torch.ones(32 << 20, dtype=torch.float32, device=device)
        self.target = torch.empty_like(self.source)

    def push(self) -> None:
        with torch.cuda.stream(self.stream):
            self.target.copy_(self.source, non_blocking=True)


@cases((True, 1), (True, 8), (False, 1), (False, 8))
def test_ten_thousand_replays(device: torch.device, case: tuple[bool, int]) -> None:
    replay(device, *case, [30_000, 2_000, 140_001, 9_000, 0, 65_536, 2_049, 20_000])


def test_ten_thousand_replays_of_two_kernels(device: torch.device) -> None:
    """Maxima from a kernel in front, into a workspace that is overwritten before each launch."""
    assert selector(device, K, 1, 500_001, 8, False).config(1).given
    replay(device, False, 8, [500_001])


def replay(device: torch.device, maxima: bool, cluster: int, lens: list[int]) -> None:
    """A graph of 20 launches on tied rows, replayed 500 times beside a memory hog: every output equals the first."""
    count = len(lens)
    rows = [
        values("pairs" if t % 2 else "relu", 1, max(1, n), min(K, max(1, n)), device, t)[0] for t, n in enumerate(lens)
    ]
    out = Outputs(count, K, device)
    use = selector(device, K, count, max(lens), cluster, maxima)
    step = compact(rows, lens, 1, K)
    logits = torch.zeros(count, max(lens), dtype=torch.bfloat16, device=device)
    for t, n in enumerate(lens):
        logits[t, :n] = rows[t][:n]
    need = topk_workspace_bytes(count, max(lens), K, sms_for(count, cluster))
    room = poison((max(16, need),), torch.uint8, device)

    def launch() -> None:
        if maxima:
            use.select(step.logits, step.tops, step.lens, 1, **out.given)
        else:
            use.topk(logits, step.lens, workspace=room, **out.given)

    launch()
    torch.cuda.synchronize(device)
    out.check(rows, lens, None)
    first = out.positions.clone()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    hog = Hog(device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(20):
            out.wide_positions.fill_(0x5A5A5A5A)
            room.fill_(0xA5)
            launch()
            wrong += (out.positions != first).sum()
    for replay in range(500):
        if replay % 5 == 0:
            hog.push()
        graph.replay()
    torch.cuda.synchronize(device)
    assert int(wrong) == 0


def test_lengths_change_between_replays(device: torch.device) -> None:
    """Captured with empty rows, replayed with long ones and back."""
    x = values("gaussian", 4, 200_000, K, device, 4)
    lens = torch.zeros(4, dtype=torch.int32, device=device)
    out = Outputs(4, K, device)
    topk = selector(device, K, 4, 200_000, 8, False)
    topk.topk(x, lens, **out.given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        topk.topk(x, lens, **out.given)
    for now in ([200_000, 3, 70_000, 0], [0, 0, 0, 0], [2_048, 2_049, 199_999, -1], [5_000, 16_000, 40_000, 200_000]):
        lens.copy_(torch.tensor(now, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize(device)
        out.check(list(x), now, None)


@cases(1, 4)
def test_chained_launches_see_what_came_before(device: torch.device, case: int) -> None:
    """Each launch lets the next one start early, and the next one's table is what the launch before it wrote."""
    lens = [12_000, 40_000, 2_000, 70_000]
    rows = [values("relu", 1, n, min(K, n), device, t)[0] for t, n in enumerate(lens)]
    step = compact(rows, lens, 1, K)
    starts = tile_starts(lens, 1, K, device)
    use = selector(device, K, 4, max(lens), case, True)
    table = tables(4, max(lens), device)
    chain = [poison((4, K), torch.int32, device) for _ in range(3)]
    counts = torch.empty(4, dtype=torch.int32, device=device)

    def launch(source: torch.Tensor, page: int, target: torch.Tensor, chained: bool) -> None:
        use.select(
            step.logits, step.tops, step.lens, 1, starts=starts, out=target, counts=counts, kv_table=source,
            kv_page=page, block_rows=page, release=True, chained=chained,
        )  # fmt: skip

    def one_round() -> None:
        launch(table, 64, chain[0], False)
        launch(chain[0], 64, chain[1], True)  # 2048 blocks of 64 tokens cover every row
        launch(chain[1], 64, chain[2], True)

    one_round()
    torch.cuda.synchronize(device)
    want = table
    for result in chain:
        for t, n in enumerate(lens):
            position = oracle_positions(rows[t], n, K)
            block = want[t][(position.clamp_min(0) // 64).long()]
            mapped = torch.where(position < 0, -1, block * 64 + position % 64).to(torch.int32)
            assert torch.equal(result[t], mapped)
        want = result
    kept = [result.clone() for result in chain]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    hog = Hog(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            for result in chain:
                result.fill_(-7)
            one_round()
            for result, first in zip(chain, kept, strict=True):
                wrong += (result != first).sum()
    for replay in range(400):
        if replay % 4 == 0:
            hog.push()
        graph.replay()
    torch.cuda.synchronize(device)
    assert int(wrong) == 0
