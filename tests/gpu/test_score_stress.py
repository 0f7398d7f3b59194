"""The sm90 scorer under repetition, replay and special values, and what the matrix unit does with small addends."""

from __future__ import annotations

import os
from dataclasses import replace

import score_cases as sc
import torch
from harness import cases
from test_score import ragged, same_rows

from keysieve.testing.score_bound import ACCUMULATOR_BITS

REPEATS = int(os.environ.get("KEYSIEVE_REPEATS", "10000"))
"""Bitwise repeats of each configuration."""

IN_A_GRAPH = 100
"""Launches of a captured graph, each with the comparison of its results."""

LAYOUTS = ("compact", "pitched")


@cases(
    *((h, n, layout, "fp8_fp32") for h in (8, 16, 32, 64) for n in (1, 2, 4, 8) for layout in LAYOUTS),
    *((h, n, layout, "fp8_ue8m0") for h, n in ((32, 1), (64, 2), (32, 8)) for layout in LAYOUTS),
    *((h, n, "compact", "fp8_fp32") for h, n in ((16, 3), (32, 3), (32, 5), (32, 7), (64, 3), (64, 6))),
    *((h, n, "compact", "mxfp4") for h, n in ((32, 1), (32, 2), (32, 8), (64, 1), (64, 8), (16, 3))),
)
def test_repeats(device: torch.device, case: tuple[int, int, str, str]) -> None:
    """Thousands of launches, back to back and beside other traffic in memory, always the same bits."""
    heads, next_n, layout, key_format = case
    config = sc.config_of(heads, next_n, layout, key_format)
    p = sc.problem(device, config, ragged(40 * next_n, seed=21, longest=4000), seed=20)
    want = sc.run(p)
    into = sc.buffers(p)
    bad = torch.zeros((), dtype=torch.int64, device=device)
    noise = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    hog, stream = torch.cuda.Stream(), torch.cuda.Stream()

    def compared() -> None:
        sc.launch(p, into)
        bad.add_(torch.ne(into.logits, want.logits).any())
        if into.tops is not None:
            bad.add_(torch.ne(into.tops, want.tops).any())

    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        into.fill()
        for _ in range(IN_A_GRAPH):
            compared()
    rounds = -(-REPEATS // IN_A_GRAPH)
    for _ in range(rounds):
        graph.replay()
        with torch.cuda.stream(hog):
            noise.add_(1)
    torch.cuda.synchronize()
    assert int(into.flags.item()) == 0
    assert int(bad) == 0, f"{int(bad)} of {rounds * IN_A_GRAPH} launches differ"


@cases("fp8_fp32", "mxfp4")
def test_replay_with_other_lengths(device: torch.device, case: str) -> None:
    """Captured with empty rows, replayed with long ones, other tables and back: lengths and ids come from memory."""
    config = sc.config_of(32, 2, key_format=case)
    p = sc.problem(device, config, ragged(24, seed=22, longest=20000), seed=21)
    want = sc.rows_of(p, sc.run(p))
    into = sc.buffers(p)
    assert into.tops is not None
    assert into.starts is not None
    logits, starts, lens = into.logits, into.starts, into.lens
    lens.zero_()
    table = torch.full_like(p.table, sc.POISON_ID)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        sc.launch(replace(p, table=table), into)
    graph.replay()
    assert int(starts[-1]) == 0
    assert bool((logits == sc.SENTINEL).all())
    lens.copy_(torch.tensor(p.lengths, dtype=torch.int32))
    table.copy_(p.table)
    graph.replay()
    same_rows(want, sc.rows_of(p, sc.Result(logits, into.tops, starts, 0)), "long replay")
    lens.zero_()
    before = logits.clone()
    graph.replay()
    assert int(starts[-1]) == 0
    assert torch.equal(before, logits)
    assert int(into.flags.item()) == 0


def _bits(row: torch.Tensor | None) -> list[int]:
    assert row is not None
    return [int(v) & 0xFFFF for v in row.tolist()]


def test_special_values(device: torch.device) -> None:
    """NaN keys, scales and queries give the canonical NaN; -0 is stored as +0; overflow gives infinities."""
    p = sc.problem(device, sc.config_of(8, 1), [70, 70], seed=23)
    raw, keys = sc.page_bytes(p.cache), p.table[:, :2].long()
    query = torch.zeros_like(p.query)
    query[0, 0, 0] = 1.0
    query[1, 0, 0] = 1.0
    weights = torch.zeros_like(p.weights)
    weights[0, 0], weights[1, 0] = 2.0, -2.0
    one = torch.zeros(128, device=device)
    one[0] = 1.0
    code = one.to(torch.float8_e4m3fn).view(torch.uint8)
    for request in range(2):
        first = raw[keys[request, 0]].clone()
        first[:8192] = code.repeat(64)
        scales = torch.ones(64, device=device)
        scales[1], scales[2], scales[3], scales[4] = 3e38, float("nan"), float("inf"), 1e-39
        first[8192:] = scales.view(torch.uint8)
        first[5 * 128 + 7] = 0x7F  # a NaN code at element 7, which the query multiplies by zero
        first[6 * 128] = 0  # the dot is 0: times -2 it is -0
        first[7 * 128] = 0xB8  # the dot is -1: the ReLU makes it 0
        raw[keys[request, 0]] = first
    p = replace(p, query=query, weights=weights)
    rows = sc.rows_of(p, sc.run(p))
    plus, minus = _bits(rows[0])[:8], _bits(rows[1])[:8]
    assert plus[0] == 0x4000
    assert minus[0] == 0xC000
    assert plus[1] == 0x7F80
    assert minus[1] == 0xFF80
    assert plus[2] == minus[2] == 0xFFC0
    assert plus[3] == 0x7F80
    assert plus[4] != 0, "a subnormal logit is kept"
    assert plus[5] == minus[5] == 0xFFC0
    assert plus[6] == minus[6] == 0x0000
    assert plus[7] == minus[7] == 0x0000
    spoiled = query.clone()
    spoiled[0, 3, 5] = float("nan")
    rows = sc.rows_of(p, sc.run(replace(p, query=spoiled)))
    assert set(_bits(rows[0])) == {0xFFC0}
    assert _bits(rows[1])[:8] == minus


def test_ue8m0_ends(device: torch.device) -> None:
    """Scale byte 0 is 2^-127, 254 is 2^127, 255 is NaN; the lowest of the four bytes counts."""
    p = sc.problem(device, sc.config_of(8, 1, key_format="fp8_ue8m0"), [4], seed=24)
    page = int(p.table[0, 0])
    raw = sc.page_bytes(p.cache)[page]
    one = torch.zeros(128, device=device)
    one[0] = 1.0
    raw[:512] = one.to(torch.float8_e4m3fn).view(torch.uint8).repeat(4)
    raw[8192:8208] = torch.tensor([0] * 4 + [254] * 4 + [255] * 4 + [127, 1, 2, 3], dtype=torch.uint8, device=device)
    query = torch.zeros_like(p.query)
    query[0, 0, 0] = 1.0
    weights = torch.zeros_like(p.weights)
    weights[0, 0] = 1.0
    p = replace(p, query=query, weights=weights)
    (row,) = sc.rows_of(p, sc.run(p))
    assert _bits(row) == [0x0040, 0x7F00, 0xFFC0, 0x3F80]


@cases((0, 1, 2), (0, 31, 16), (16, 0, 31), (0, 40, 100), (0, 127, 64), (40, 0, 80))
def test_accumulator_bits(device: torch.device, case: tuple[int, int, int]) -> None:
    """256 + 2^-j - 256 keeps 2^-j as long as it lies within ACCUMULATOR_BITS of the largest addend.

    case: the elements of the dot that hold the three products; some lie in other instructions than others.
    """
    exponents = list(range(-7, ACCUMULATOR_BITS - 8 + 1))
    p = sc.problem(device, sc.config_of(8, 1), [64], seed=25)
    keys = torch.zeros(64, 128)
    for row, j in enumerate(exponents):
        keys[row, case[0]], keys[row, case[1]], keys[row, case[2]] = 256.0, 2.0**-j, -256.0
    raw = sc.page_bytes(p.cache)[int(p.table[0, 0])]
    raw[:8192] = keys.to(torch.float8_e4m3fn).view(torch.uint8).flatten().to(device)
    raw[8192:] = torch.ones(64).view(torch.uint8).to(device)
    weights = torch.zeros_like(p.weights)
    weights[0, 0] = 1.0
    p = replace(p, query=torch.ones_like(p.query), weights=weights)
    (row,) = sc.rows_of(p, sc.run(p))
    assert row is not None
    got = row.view(torch.bfloat16).float().tolist()[: len(exponents)]
    assert got == [2.0**-j for j in exponents]
