"""The selection kernels on a device, bit for bit against a stable sort of the same logits."""

from __future__ import annotations

from typing import Any

import torch
from harness import cases, poison
from select_cases import KINDS, Compact, canonical, compact, oracle_positions, physical, tile_starts, values

from keysieve.kernels.schedule import FLAG_BAD_LENGTH, FLAG_OVERFLOW
from keysieve.kernels.select_config import CLUSTERS
from keysieve.kernels.select_host import Selector, topk_workspace_bytes
from keysieve.launch import Launcher

K = 2048
LENGTHS = [0, 1, K - 1, K, K + 1, K + 9, 5000, 8192, 8193, 16385, 20001, 32769, -3, 131073, 262209]
KS = (1, 511, 513, 705, 1024, 2047, 2048, 2050, 2051, 4095, 4096)

_READY: dict[tuple[Any, ...], Selector] = {}


def sms_for(rows: int, cluster: int) -> int:
    """SMs of a device on which `rows` long rows would be given `cluster` blocks each."""
    return -(-4 * rows * cluster // 3)


def selector(device: torch.device, k: int, rows: int, max_len: int, cluster: int, maxima: bool) -> Selector:
    """A Selector that uses `cluster` blocks a row for `rows` rows."""
    key = (device, k, rows, max_len, cluster, maxima)
    if key not in _READY:
        make = lambda kernel, config: Launcher(kernel, config, device)  # noqa: E731  # one expression, used once
        _READY[key] = Selector(make, k=k, max_rows=rows, max_len=max_len, sms=sms_for(rows, cluster), maxima=maxima)
    return _READY[key]


class Outputs:
    """Poisoned, strided outputs with canaries behind every row."""

    def __init__(self, rows: int, k: int, device: torch.device) -> None:
        self.wide = poison((rows, k + 8), torch.int32, device)
        self.wide_positions = poison((rows, k + 3), torch.int32, device)
        self.out, self.positions = self.wide[:, :k], self.wide_positions[:, :k]
        self.all_counts = poison((rows + 4,), torch.int32, device)
        self.counts = self.all_counts[:rows]
        self.flags = torch.zeros(4, dtype=torch.int32, device=device)
        self.given = {"out": self.out, "counts": self.counts, "positions": self.positions, "flags": self.flags}

    def check(self, rows: list[torch.Tensor], lens: list[int], table: torch.Tensor | None, next_n: int = 1) -> None:
        k = self.out.shape[1]
        for t, (row, length) in enumerate(zip(rows, lens, strict=True)):
            want = oracle_positions(row, length, k)
            assert torch.equal(self.positions[t], want), f"row {t} of {length} keys"
            assert int(self.counts[t]) == min(max(length, 0), k)
            mapped = want if table is None else physical(want, table[t // next_n], 64, 64)
            assert torch.equal(self.out[t], mapped), f"rows of row {t}"
        tails = (self.wide[:, k:], self.wide_positions[:, k:], self.all_counts[len(rows) :])
        assert all(bool((tail == 0x5A5A5A5A).all()) for tail in tails), "written beyond the outputs"


def tables(requests: int, longest: int, device: torch.device) -> torch.Tensor:
    """Random block ids, a row stride wider than the table, and wild ids in the columns that no row needs."""
    width = longest // 64 + 3
    wide = torch.randint(0, 1 << 20, (requests, width + 5), dtype=torch.int32, device=device)
    wide[:, width - 1 :] = -(2**31)
    return wide[:, :width]


def run_select(
    device: torch.device, kind: str, k: int, lens: list[int], next_n: int, cluster: int, counted: bool
) -> None:
    rows = [values(kind, 1, max(1, n), min(k, max(1, n)), device, 11 + t)[0] for t, n in enumerate(lens)]
    step: Compact = compact(rows, lens, next_n, k)
    out = Outputs(len(lens), k, device)
    table = tables(len(lens) // next_n, max(lens), device)
    starts = None if counted else tile_starts(lens, next_n, k, device)
    select = selector(device, k, len(lens), max(lens), cluster, True)
    select.select(step.logits, step.tops, step.lens, next_n, starts=starts, kv_table=table, **out.given)
    out.check(rows, lens, table, next_n)
    assert int(out.flags[0]) == 0


@cases(
    *[(kind, CLUSTERS[i % 4]) for i, kind in enumerate(KINDS)],
    *[(k, c) for k in ("relu", "few") for c in CLUSTERS],
    *[(k, c) for k in ("far", "wide", "brink") for c in CLUSTERS[1:]],
)
def test_select_any_values_and_lengths(device: torch.device, case: tuple[str, int]) -> None:
    run_select(device, case[0], K, LENGTHS, 1, case[1], counted=True)


@cases(*KS)
def test_select_any_k(device: torch.device, case: int) -> None:
    lens = [0, case, case + 1, 4097, 9000, 17, 70001, 0, 3000, 33333, case - 1, 140000]
    for next_n, cluster in ((1, 1), (2, 8), (4, 4)):
        run_select(device, "relu", case, lens, next_n, cluster, counted=next_n == 2)
        run_select(device, "gaussian", case, lens, next_n, cluster, counted=next_n != 2)


def run_topk(
    device: torch.device,
    kind: str,
    k: int,
    lens: list[int],
    cluster: int,
    mapped: bool,
    stride: int,
    at: int,
    width: int = 0,
) -> None:
    rows = [values(kind, 1, max(1, n), min(k, max(1, n)), device, 5 + t)[0] for t, n in enumerate(lens)]
    width = max(width, *lens)
    memory = torch.full((at + len(lens) * (width + stride),), float("inf"), dtype=torch.bfloat16, device=device)
    logits = memory[at:].view(len(lens), width + stride)[:, :width]
    for t, n in enumerate(lens):
        logits[t, : max(0, n)] = rows[t][: max(0, n)]
    out = Outputs(len(lens), k, device)
    table = tables(len(lens), width, device) if mapped else None
    lengths = torch.tensor([[n, 7] for n in lens], dtype=torch.int32, device=device)[:, 0]  # a column: strided
    topk = selector(device, k, len(lens), width, cluster, False)
    assert topk.config(len(lens)).cluster == (cluster if width > 8192 else 1)
    room = poison((topk_workspace_bytes(len(lens), width, k, sms_for(len(lens), cluster)),), torch.uint8, device)
    topk.topk(logits, lengths, workspace=room, kv_table=table, **out.given)
    out.check(rows, lens, table)


@cases(
    *[(kind, CLUSTERS[i % 4]) for i, kind in enumerate(KINDS)],
    *[(k, c) for k in ("specials", "nan") for c in CLUSTERS],
    *[(k, c) for k in ("far", "brink") for c in CLUSTERS[1:]],
)
def test_topk_any_values_and_lengths(device: torch.device, case: tuple[str, int]) -> None:
    for stride, at in ((0, 0), (1, 1), (3, 7)):
        run_topk(device, case[0], K, LENGTHS, case[1], mapped=stride == 1, stride=stride, at=at)


@cases(*KS)
def test_topk_any_k(device: torch.device, case: int) -> None:
    lens = [case, case + 1, 4097, 9000, 17, 70001, 0, case - 1, 140000]
    run_topk(device, "relu", case, lens, 1, mapped=True, stride=5, at=3)
    run_topk(device, "specials", case, lens, 8, mapped=False, stride=1, at=2)


@cases(1, 511, 513, 705, 1024, 2047)
def test_small_blocks_take_more_groups_than_asked_for(device: torch.device, case: int) -> None:
    """Unshared rows beyond 16,384 keys in blocks of 512 threads, whose registers hold more than K groups."""
    lens = [0, case, case + 1, 16_384, 16_385, 17_000, 65_537, 99_999, 100_000, 40_000, 2_049, -1]
    chosen = selector(device, case, len(lens), max(lens), 1, True).config(len(lens))
    assert (chosen.cluster, chosen.threads) == (1, 512)
    assert case < chosen.held_groups
    for kind in ("gaussian", "relu", "few", "pairs", "lowdigit", "ascending"):
        run_select(device, kind, case, lens, 1, 1, counted=kind == "few")


@cases(*[(k, cluster) for k in (1, 2048, 2049, 4096) for cluster in CLUSTERS])
def test_large_blocks(device: torch.device, case: tuple[int, int]) -> None:
    """Blocks of 1,024 threads with every number of blocks a row, for both entries."""
    k, cluster = case
    for maxima in (True, False):
        longest = cluster * (24_000 if not maxima else 150_000 if cluster == 2 else 30_000)
        lens = [longest, longest - 1, 0, k + 1, 33_000 if cluster > 1 else 20_001, 9_000]
        for rows in (1, len(lens)):
            use = selector(device, k, rows, max(lens[:rows]), cluster, maxima).config(rows)
            assert (use.cluster, use.threads) == (cluster, 1024)
        for kind in ("gaussian", "relu", "equal"):
            if maxima:
                run_select(device, kind, k, lens, 1, cluster, counted=kind == "relu")
            else:
                run_topk(device, kind, k, lens, cluster, mapped=kind == "relu", stride=1, at=3)


@cases(1, 4)
def test_topk_parts_beyond_the_registers(device: torch.device, case: int) -> None:
    for kind in ("gaussian", "relu", "few"):
        run_topk(device, kind, K, [1_000_003, 600_000, 200_000], case, mapped=True, stride=1, at=1)
        run_select(device, kind, K, [1_000_003, 600_000, 200_000], 1, case, counted=True)


@cases("gaussian", "relu", "equal", "few", "specials", "nan", "lowdigit", "far", "wide", "brink")
def test_topk_of_one_long_row(device: torch.device, case: str) -> None:
    """A row whose maxima a kernel of its own computes, on all SMs; the row may turn out short."""
    for longest, length, stride, at in (
        (1_000_003, 1_000_003, 1, 1),
        (300_001, 299_990, 5, 3),
        (524_288, 524_288, 0, 0),
        (600_000, 70_001, 1, 2),
        (600_000, 2_049, 3, 3),
        (1 << 20, 2_048, 0, 0),
    ):
        for k in (K, 705):
            assert selector(device, k, 1, longest, 8, False).config(1).given
            run_topk(device, case, k, [length], 8, mapped=stride == 5, stride=stride, at=at, width=longest)


@cases(*[(c, kind) for c in (2, 4, 8) for kind in ("gaussian", "relu", "nan")])
def test_topk_streams_rows(device: torch.device, case: tuple[int, str]) -> None:
    """Parts beyond the registers of two blocks, four or eight, of any alignment; parts that end within a chunk, too."""
    cluster, kind = case
    for longest, stride, at in ((cluster * 33_001, 1, 1), (cluster * 34_567 + 3, 3, 7), (cluster * 65_536, 0, 0)):
        lens = [longest, longest - 1, cluster * 16_500, 2_049, longest - 1023, 16_385, 0, longest - 4097]
        run_topk(device, kind, K, lens, cluster, mapped=stride == 3, stride=stride, at=at)


def test_rows_of_a_batch_and_alone_agree(device: torch.device) -> None:
    x = values("pairs", 64, 20_000, K, device, 3)
    lens = torch.full((64,), 20_000, dtype=torch.int32, device=device)
    whole = Outputs(64, K, device)
    selector(device, K, 64, 20_000, 2, False).topk(x, lens, **whole.given)
    for first, count, cluster in ((0, 32, 4), (32, 32, 1), (7, 1, 2), (63, 1, 8)):
        part = Outputs(count, K, device)
        selector(device, K, count, 20_000, cluster, False).topk(x[first : first + count], lens[:count], **part.given)
        assert torch.equal(part.positions, whole.positions[first : first + count])


def test_foreign_bits_count_as_canonical_ones(device: torch.device) -> None:
    x = values("specials", 4, 9_000, K, device, 8)
    lens = torch.full((4,), 9_000, dtype=torch.int32, device=device)
    one, two = Outputs(4, K, device), Outputs(4, K, device)
    topk = selector(device, K, 4, 9_000, 1, False)
    topk.topk(x, lens, **one.given)
    topk.topk(canonical(x), lens, **two.given)
    assert torch.equal(one.positions, two.positions)


def test_faults_leave_rows_empty_and_raise_flags(device: torch.device) -> None:
    lens = [5000, 9000, 6000, 3000]
    rows = [values("gaussian", 1, n, K, device, t)[0] for t, n in enumerate(lens)]
    step = compact(rows, [5000, 0, 6000, 3000], 1, K)  # the long row is not scored
    step.lens[1] = 9000
    out = Outputs(4, K, device)
    select = selector(device, K, 4, 9000, 2, True)
    select.select(step.logits, step.tops, step.lens, 1, limit=8000, **out.given)
    assert int(out.flags[0]) == 1 << FLAG_BAD_LENGTH
    out.check(rows, [5000, 0, 6000, 3000], None)
    short = Outputs(4, K, device)
    room = 128 * (40 + 47)  # the last request does not fit any more
    select.select(step.logits[:room], step.tops[: room // 8], step.lens, 1, limit=8000, **short.given)
    assert int(short.flags[0]) == 1 << FLAG_BAD_LENGTH | 1 << FLAG_OVERFLOW
    short.check(rows, [5000, 0, 6000, 0], None)


def test_a_narrow_table_leaves_other_rows_where_the_scorer_put_them(device: torch.device) -> None:
    """Tiles are counted by the scorer's limit; a row that its table does not hold is empty, the others are right."""
    for next_n in (1, 2):
        lens = [5000, 9000, 6000, 3000, 0, 8193, 2049, 8192]
        rows = [values("gaussian", 1, max(1, n), K, device, t)[0] for t, n in enumerate(lens)]
        step = compact(rows, lens, next_n, K)
        table = tables(len(lens) // next_n, 8191, device)[:, :128]  # 8,192 keys
        out = Outputs(len(lens), K, device)
        select = selector(device, K, len(lens), 9000, 1, True)
        select.select(step.logits, step.tops, step.lens, next_n, limit=9000, scored=9000, kv_table=table, **out.given)
        assert int(out.flags[0]) == 1 << FLAG_BAD_LENGTH
        out.check(rows, [n if n <= 8192 else 0 for n in lens], table, next_n)


def test_rows_follow_their_request(device: torch.device) -> None:
    x = values("gaussian", 6, 4_000, K, device, 2)
    lens = torch.full((6,), 4_000, dtype=torch.int32, device=device)
    request = torch.tensor([2, 0, 1, 1, 2, 0], dtype=torch.int32, device=device)
    table = tables(3, 4_000, device)
    out = Outputs(6, K, device)
    selector(device, K, 6, 4_000, 1, False).topk(x, lens, kv_table=table, row_request=request, **out.given)
    for t in range(6):
        want = physical(oracle_positions(x[t], 4_000, K), table[int(request[t])], 64, 64)
        assert torch.equal(out.out[t], want)


@cases((1, 1, 1), (16, 640, 7), (4096, 4096, 3), (64, 128, 2))
def test_pages_of_any_power_of_two(device: torch.device, case: tuple[int, int, int]) -> None:
    page, span, seed = case
    x = values("relu", 3, 70_000, K, device, seed)
    lens = torch.tensor([70_000, 100, 69_999], dtype=torch.int32, device=device)
    table = torch.randint(0, 400_000, (3, -(-70_000 // page)), dtype=torch.int32, device=device)
    for cluster in (1, 8):
        out = Outputs(3, K, device)
        topk = selector(device, K, 3, 70_000, cluster, False)
        topk.topk(x, lens, kv_table=table, kv_page=page, block_rows=span, **out.given)
        for t in range(3):
            want = oracle_positions(x[t], int(lens[t]), K)
            assert torch.equal(out.out[t], physical(want, table[t], page, span))
