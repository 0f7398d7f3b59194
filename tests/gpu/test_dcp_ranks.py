"""Context-parallel ranks on one device: they select what one rank selects on the whole context, bit for bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import torch
from dcp_ranks import Context, Geometry, Rank, both, hold, raised, settle, step, virtual
from harness import cases

import keysieve as ks
from keysieve.dcp import ExchangeError

CASES = [
    Geometry(2),
    Geometry(1, lens=(5000, 10)),
    Geometry(2, lens=(9000, 2049, 2048, 2047, -3, 1)),
    Geometry(2, interleave=64, distinct=300, weights=torch.bfloat16),
    Geometry(2, interleave=5000, lens=(9000, 8192, 100), crowded=True),
    Geometry(2, topn=1024, lens=(9000, 3000, 0, 40000)),
    Geometry(2, topn=64, lens=(9000, 3000, 4096), distinct=40),
    Geometry(2, next_n=4, lens=(7000, 7001, 7002, 7003, 0, 50, 6000, 1), heads=64, key_format="fp8_ue8m0"),
    Geometry(3, topk=512, interleave=16, lens=(3000, 100, 511, 513) * 3, distinct=50),
    Geometry(4, lens=(20000, 1, 4000, 30000), next_n=2, interleave=64),
    Geometry(5, topk=1000, lens=(12000, 999, 1001), heads=8),
    Geometry(8, lens=(40000, 8000, 2048), distinct=3000),
    Geometry(16, lens=(50000, 8000, 2048)),
    Geometry(16, lens=(50000, 8000, 16), interleave=64, crowded=True),
    Geometry(2, topk=4096, lens=(30000, 4097), distinct=500),
    Geometry(2, topk=64, topn=32, lens=(500, 64, 33, 700, 1, 129)),
    Geometry(2, lens=(9000, 0, 2048, 3000), interleave=64, sharded=False),
    Geometry(2, lens=(9000, 0, 2048, 3000), interleave=16, sharded=False, next_n=2),
    Geometry(2, lens=(300, 200), max_context=400000),
]


@cases(*CASES)
def test_ranks_select_what_one_rank_selects(device: torch.device, case: Geometry) -> None:
    ranks, alone = both(Context(case, device), [device] * case.world)
    whole = alone.call()
    for site in range(3):
        hold(ranks, step(ranks, site=site), whole)
    for rank in ranks:
        rank.indexer.check()


def test_long_rows_have_index_planes(device: torch.device) -> None:
    case = Geometry(2, lens=(300000, 270001), heads=8, topk=512)
    ranks, alone = both(Context(case, device), [device] * 2)
    assert ranks[0].indexer.plan.planes == 2
    hold(ranks, step(ranks), alone.call())


@cases((8, 8, 4096), (32, 4, 4096), (64, 8, 4096), (8, 8, 2048), (32, 4, 2048), (64, 1, 512))
def test_many_long_rows(device: torch.device, case: tuple[int, int, int]) -> None:
    """They go by the maxima that the scorer writes, with N above 2,048, or by a guess; few of them, with the same
    indexer, go neither way. Scorers that keep a row in a lane alone, and four in a quad."""
    heads, next_n, topk = case
    lens = (*range(69993, 70001), *(300,) * 8, *range(66001, 66009), 65536, 65537, 65538, 65539, 0, 2048, 2049, 1)
    ranks, alone = both(Context(Geometry(2, topk=topk, lens=lens, next_n=next_n, heads=heads), device), [device] * 2)
    offer = ranks[0].indexer._runner._offer
    assert [offer.takes_maxima(rows) for rows in (8, 24, 32)] == [False, False, topk == 4096]
    assert [offer.serves(rows).guesses for rows in (8, 24, 32)] == [False, False, topk != 4096]
    whole = alone.call()
    for site, rows in enumerate((32, 8, 32, 24, 32)):
        hold(ranks, step(ranks, rows=rows, site=site), whole, rows)
    for rank in ranks:
        rank.indexer.check()


def test_epochs_wrap(device: torch.device) -> None:
    """Tags start five calls below 2^32, slots preset with them; zero is then a tag like any other."""
    case = Geometry(2, topn=1024, lens=(9000, 3000, 70))
    ranks, alone = both(Context(case, device), [device] * 2)
    whole = alone.call()
    for rank in ranks:
        rank.dcp.memory.preset(2**32 - 5)
    torch.cuda.synchronize()
    for site in range(9):
        hold(ranks, step(ranks, site=site), whole)
    assert int(ranks[0].dcp.memory.epoch[0]) == 4


def test_rows_vary_from_call_to_call(device: torch.device) -> None:
    case = Geometry(2, lens=(9000, 2500, 4000, 3000, 5, 8000))
    ranks, alone = both(Context(case, device), [device] * 2)
    whole = alone.call()
    for rows in (6, 1, 3, 6, 2, 2, 5, 1):
        hold(ranks, step(ranks, rows=rows), whole, rows)


def test_a_rescue_in_every_row_of_a_full_chip(device: torch.device) -> None:
    """Rows are started in ascending order, and each waits for the same row of the other rank."""
    case = Geometry(2, topn=1024, lens=(4096,) * 120, heads=8)
    ranks, alone = both(Context(case, device), [device] * 2)
    whole = alone.call()
    for site in range(5):
        hold(ranks, step(ranks, site=site), whole)
    assert int(ranks[0].dcp.memory.seq2.min()) == 5


def test_outputs_are_the_callers_again_when_the_call_is_over(device: torch.device) -> None:
    """Nothing writes them later: they are poisoned at once, in stream order, and stay so."""
    case = Geometry(2)
    ranks, alone = both(Context(case, device), [device] * 2)
    whole = alone.call()
    kept = []
    for site in range(20):
        found = step(ranks, site=site)
        hold(ranks, found, whole)
        for rank, selection in zip(ranks, found, strict=True):
            with torch.cuda.stream(rank.stream):
                for tensor in selection:
                    assert tensor is not None
                    tensor.fill_(0x5A5A)
                    kept.append(tensor)
    settle(ranks)
    assert all(bool((t == 0x5A5A).all()) for t in kept)


class Replays:
    """A graph of several calls on every rank, and the outputs they leave."""

    def __init__(self, ranks: list[Rank], sites: list[int], rows: int | None = None) -> None:
        self.ranks, self.graphs, self.found = ranks, [], []
        for rank in ranks:
            graph = torch.cuda.CUDAGraph()
            rank.stream.wait_stream(torch.cuda.current_stream(rank.device))
            with torch.cuda.graph(graph, stream=rank.stream):
                self.found.append([rank.call(site=site, rows=rows) for site in sites])
            self.graphs.append(graph)

    def replay(self, order: list[int], delays: dict[int, int]) -> None:
        for at in order:
            with torch.cuda.stream(self.ranks[at].stream):
                if at in delays:
                    torch.cuda._sleep(delays[at])
                self.graphs[at].replay()


def warm(ranks: list[Rank], rows: int | None = None) -> None:
    """A first call in the form that is captured next, and every other kernel that is launched beside waiting merges:
    loading one waits for the device."""
    for rank, selection in zip(ranks, step(ranks, rows=rows), strict=True):
        torch.cuda._sleep(1)
        wrong = torch.zeros(1, dtype=torch.int64, device=rank.device)
        wrong += (selection.positions != selection.positions).sum()
        selection.positions.fill_(7)
    torch.cuda.synchronize()


def test_ten_thousand_replays_with_a_delayed_rank(device: torch.device) -> None:
    """Graphs of three calls (an odd number: parities alternate); one rank is late, another one every time."""
    case = Geometry(2, lens=(9000, 2500, 0, 3000), heads=8)
    ranks, alone = both(Context(case, device), [device] * 2)
    warm(ranks)
    whole = alone.call()
    graphs = Replays(ranks, [0, 1, 2])
    draw = random.Random(1)
    wrong = [torch.zeros(1, dtype=torch.int64, device=device) for _ in ranks]
    for turn in range(10_000):
        graphs.replay(draw.sample([0, 1], 2), {draw.randrange(2): draw.randrange(20_000)})
        if turn % 10 == 0:
            for at, rank in enumerate(ranks):
                with torch.cuda.stream(rank.stream):
                    for selection in graphs.found[at]:
                        wrong[at] += (selection.positions != whole.positions).sum()
                        selection.positions.fill_(7)
    settle(ranks)
    assert [int(w) for w in wrong] == [0, 0]
    for at in range(3):
        graphs.replay([1, 0], {})
        settle(ranks)
        hold(ranks, [found[at] for found in graphs.found], whole)
    assert int(ranks[0].dcp.memory.epoch[0]) == 1 + 3 * 10_003


def test_two_graphs_of_different_rows_alternate(device: torch.device) -> None:
    case = Geometry(2, topn=1056, lens=(9000, 2500, 0, 3000, 4000, 5000), heads=8)
    ranks, alone = both(Context(case, device), [device] * 2)
    warm(ranks)
    warm(ranks, 2)
    whole = alone.call()
    large, small = Replays(ranks, [0]), Replays(ranks, [1, 2, 3], rows=2)
    draw = random.Random(2)
    for turn in range(600):
        which = large if draw.random() < 0.5 else small
        which.replay(draw.sample([0, 1], 2), {0: draw.randrange(9000)} if turn % 3 else {})
    settle(ranks)
    hold(ranks, [found[0] for found in large.found], whole)
    hold(ranks, [found[2] for found in small.found], whole, 2)


def test_lengths_change_between_replays(device: torch.device) -> None:
    """Captured with zero lengths, replayed with long ones, and back."""
    case = Geometry(2, lens=(0, 0, 0), max_context=30000, heads=8)
    full = Geometry(2, lens=(30000, 2048, 12345), heads=8)
    context = Context(full, device)
    ranks, alone = both(context, [device] * 2)
    for rank in ranks:
        rank.lens.zero_()
    warm(ranks)
    graphs = Replays(ranks, [0])
    for lens in (full.lens, case.lens, (1, 29999, 0), full.lens):
        for rank in (*ranks, alone):
            rank.lens.copy_(torch.tensor(lens, dtype=torch.int32))
        torch.cuda.synchronize()
        graphs.replay([0, 1], {})
        settle(ranks)
        hold(ranks, [found[0] for found in graphs.found], alone.call())


def test_lengths_beyond_the_context_leave_their_row_empty(device: torch.device) -> None:
    case = Geometry(2, lens=(3000, 5000), heads=8)
    ranks, alone = both(Context(case, device), [device] * 2)
    for rank in (*ranks, alone):
        rank.lens[1] = 5001
    hold(ranks, step(ranks), alone.call())
    for rank in ranks:
        assert "max_context" in raised(ks.DeviceFault, rank.indexer.check)


def test_a_rank_without_a_block_table_holds_nothing(device: torch.device) -> None:
    """No column of a block table, or of any table, on a rank that owns no key: what one rank selects, and no fault."""
    case = Geometry(2, topk=512, interleave=4096, lens=(4096, 100, 0, 3000), heads=8, max_context=16384)
    ranks, alone = both(Context(case, device), [device] * 2)
    whole = alone.call()
    for tables in (("kv_table",), ("kv_table", "table")):
        for name in tables:
            setattr(ranks[1], name, getattr(ranks[1], name)[:, :0])
        for site in range(3):
            found = step(ranks, site=site)
            hold(ranks, found, whole)
            assert int(found[1].counts.abs().sum()) == 0
        for rank in ranks:
            rank.indexer.check()


@cases(512, 256)
def test_keys_beyond_a_rank_s_block_table_are_offered_to_nobody(device: torch.device, case: int) -> None:
    """Its table has no columns: the others select without it and are not told, in a second round too; it is."""
    shape = Geometry(2, topk=512, topn=case, interleave=64, lens=(5000, 64, 0, 9000), heads=8)
    ranks, _ = both(Context(shape, device), [device] * 2)
    first = ranks[0]
    own = ks.local_seq_lens(first.lens, 2, 0, 64)
    one = ks.DecodeIndexer(first.context.spec, len(shape.lens), first.owned.numel(), device=device)
    kept = one(first.query[0], first.cache, first.weights, own, first.table)
    torch.cuda.synchronize()
    want = torch.where(kept.rows < 0, -1, kept.rows // 64 * 128 + kept.rows % 64)
    ranks[1].kv_table = ranks[1].kv_table[:, :0]
    for site in range(3):
        found = step(ranks, site=site)
        for rank, selection in zip(ranks, found, strict=True):
            assert torch.equal(selection.positions, want), f"rank {rank.dcp.rank}"
        assert torch.equal(found[0].counts, kept.counts)
        assert int(found[1].counts.abs().sum()) == 0
        assert bool((found[1].rows == -1).all())
        first.indexer.check()
        raised(ks.DeviceFault, ranks[1].indexer.check)
    assert int(first.dcp.memory.seq2.max()) == 3 * (case < 512)


def test_known_forms_are_repeated_with_their_site(device: torch.device) -> None:
    """The second call of a form is not checked again; the site is still its own."""
    case = Geometry(1, lens=(3000, 5000), heads=8)
    [rank] = virtual(Context(case, device), [device])
    out = rank.call(site=3)
    again = rank.call(site=4, out=out.rows.clone(), counts=out.counts.clone(), positions=out.positions.clone())
    once_more = rank.call(site=5, out=again.rows, counts=again.counts, positions=again.positions)
    settle([rank])
    assert torch.equal(once_more.rows, out.rows)
    halves = rank.dcp.memory.block.view(torch.int32)
    assert 5 in (
        halves[rank.dcp.memory.layout.slot(1, 0, 0) // 4 :: 2][: 2 * rank.dcp.memory.layout.shape.pairs] & 0xFFFF
    )


FAILING = """
import sys
sys.path[:0] = {paths!r}
import torch
from dcp_ranks import Context, Geometry, virtual
device = torch.device("cuda", 0)
ranks = virtual(Context(Geometry(2, lens=(3000, 5000), heads=8), device), [device] * 2, timeout=2.0)
try:
    {body}
    torch.cuda.synchronize()
except Exception as error:
    pass
for rank in ranks:
    try:
        rank.indexer.check()
    except Exception as error:
        print(type(error).__name__, rank.dcp.rank, str(error).replace(chr(10), " "), flush=True)
try:
    ranks[0].call()
except Exception as error:
    print("next", type(error).__name__, flush=True)
import os
os._exit(0)
"""

SKIPPED = """
with torch.cuda.stream(ranks[0].stream):
        ranks[0].call(site=7)
"""

ANOTHER_SITE = """
for rank in ranks:
        with torch.cuda.stream(rank.stream):
            rank.call(site=rank.dcp.rank + 2)
"""

ANOTHER_LENGTH = """
ranks[1].lens[1] = 4000
    for rank in ranks:
        with torch.cuda.stream(rank.stream):
            rank.call(site=9)
"""

ANOTHER_COUNT = """
for rank in ranks:
        with torch.cuda.stream(rank.stream):
            rank.call(site=9, rows=rank.dcp.rank + 1)
"""


@cases(
    ("a peer that makes no call", SKIPPED, ["rank 0", "site 7", "source rank 1", "expected tag 1", "round 1"]),
    ("another site", ANOTHER_SITE, ["made another call", "site 2", "site 3"]),
    ("another length", ANOTHER_LENGTH, ["made another call", "row 1", "length 4000", "length 5000"]),
    ("another number of rows", ANOTHER_COUNT, ["made another call", "1 rows", "2 rows"]),
)
def test_a_peer_that_does_not_make_the_call_is_named(device: torch.device, case: tuple[str, str, list[str]]) -> None:
    """In a process of its own: a trap takes the context with it."""
    del device
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", FAILING.format(paths=paths, body=case[1].strip())],
        capture_output=True,
        text=True,
        timeout=170,  # beside many processes it takes 40 s to start, and 30 to recover from a trap
        check=False,
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
    )
    lines = done.stdout.splitlines()
    assert any(line.startswith(ExchangeError.__name__) for line in lines), done.stdout + done.stderr[-2000:]
    text = " ".join(lines)
    for part in case[2]:
        assert part in text, f"{part!r} not in {text}"
    assert f"next {ExchangeError.__name__}" in lines or "ExchangeError 1" in text, text
