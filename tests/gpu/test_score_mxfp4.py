"""MXFP4 on Hopper: the oracle's bits where sums are exact, every scale, and vectors whose scales lie far apart."""

from __future__ import annotations

from dataclasses import replace

import score_cases as sc
import torch
from harness import cases
from test_score import ragged, same_rows
from test_score_small import test_small as small

import keysieve as ks
from keysieve.bench.caches import page_values, query_values
from keysieve.testing.inject import inject_keys, probe_query
from keysieve.testing.score_bound import UNIT, logit_bound

SHAPES = [
    (8, 1),
    (8, 3),
    (8, 5),
    (8, 8),
    (16, 2),
    (16, 7),
    (16, 8),
    (32, 1),
    (32, 2),
    (32, 4),
    (32, 5),
    (32, 8),
    (64, 1),
    (64, 2),
    (64, 4),
    (64, 8),
]


def oracle(p: sc.Problem) -> list[torch.Tensor | None]:
    """Each row's logits by the cpu backend, int16 [length]."""
    spec = ks.IndexerSpec(p.config.heads, 64, "mxfp4")
    assert p.words is not None
    cache = ks.IndexCache(spec, p.cache.cpu().contiguous())
    lens = torch.tensor(p.usable, dtype=torch.int32)
    logits = ks.score(spec, (p.query.cpu(), p.words.cpu()), cache, p.weights.cpu(), lens, p.table.cpu())
    return [row[:n].view(torch.int16) if n else None for row, n in zip(logits, p.usable, strict=True)]


def on_host(rows: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if row is None else row.cpu() for row in rows]


def small_problem(device: torch.device, heads: int, next_n: int, layout: str = "compact") -> sc.Problem:
    """Codes 0, 1, 2 and their negatives, scales 1 and 2, small integer weights: every sum is an integer that the matrix
    unit and float32 hold exactly."""
    config = sc.config_of(heads, next_n, layout, "mxfp4")
    p = sc.problem(device, config, ragged(12 * next_n, seed=heads + next_n, longest=1000), seed=31)
    generator = torch.Generator(device=device).manual_seed(heads)

    def draw(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, device=device, generator=generator)

    codes = torch.tensor([0, 2, 4, 0, 10, 12, 2, 4], device=device)

    def pairs(shape: tuple[int, ...]) -> torch.Tensor:
        return (codes[draw(0, 8, shape)] | codes[draw(0, 8, shape)] << 4).to(torch.uint8)

    raw = sc.page_bytes(p.cache)
    raw[:, :4096] = pairs((raw.shape[0], 4096))
    raw[:, 4096:] = draw(127, 129, (raw.shape[0], 256)).to(torch.uint8)
    words = draw(127, 129, (*p.query.shape[:2], 4)).to(torch.uint8).view(torch.int32).squeeze(-1)
    weights = draw(-3, 4, tuple(p.weights.shape)).float()
    return replace(p, query=pairs(tuple(p.query.shape)), words=words, weights=weights)


@cases(*SHAPES)
def test_bits_of_the_oracle(device: torch.device, case: tuple[int, int]) -> None:
    """Where float32 sums are exact every logit is the cpu backend's, bit for bit, in both layouts."""
    for layout in ("compact", "pitched"):
        p = small_problem(device, *case, layout)
        same_rows(oracle(p), on_host(sc.rows_of(p, sc.run(p))), f"oracle and device, {layout}")


def one_element(device: torch.device, elements: list[tuple[int, int, int]]) -> sc.Problem:
    """8 heads, one row; key i is zero but for element (place, code, scale code), the query of head 0 is all ones."""
    p = sc.problem(device, sc.config_of(8, 1, "compact", "mxfp4"), [len(elements)], seed=32)
    raw = sc.page_bytes(p.cache)[p.table[0, : -(-len(elements) // 64)].long()]
    raw[:, :4096], raw[:, 4096:] = 0, 127
    for key, (place, code, scale) in enumerate(elements):
        page, token = divmod(key, 64)
        raw[page, 64 * token + place // 2] = code << 4 * (place % 2)
        raw[page, 4096 + 4 * token + place // 32] = scale
    sc.page_bytes(p.cache)[p.table[0, : raw.shape[0]].long()] = raw
    query = torch.zeros_like(p.query)
    query[0, 0] = 0x22
    words = torch.full(p.query.shape[:2], 0x7F7F7F7F, dtype=torch.int32, device=device)
    weights = torch.zeros_like(p.weights)
    weights[0, 0] = 1.0
    return replace(p, query=query, words=words, weights=weights)


def test_every_code_with_every_scale(device: torch.device) -> None:
    """16 codes times 255 scales, at places all over the vector: the cpu backend's bits, subnormal logits included."""
    elements = [((7 * scale + 37 * code) % 128, code, scale) for scale in range(255) for code in range(16)]
    for first in range(0, len(elements), 1024):
        p = one_element(device, elements[first : first + 1024])
        same_rows(oracle(p), on_host(sc.rows_of(p, sc.run(p))), f"elements from {first}")


@cases(8, 32, 64)
def test_every_score_through_injected_keys(device: torch.device, case: int) -> None:
    """Keys written so that the exact logit is each of BF16's 65,536 patterns: every one of them comes out."""
    scores = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    keys, probe = inject_keys("mxfp4", scores), probe_query(ks.IndexerSpec(case, 64, "mxfp4"), 1)
    p = sc.problem(device, sc.config_of(case, 1, "compact", "mxfp4"), [len(scores)], seed=37)
    raw = torch.cat((keys.codes.view(-1, 4096), keys.scales.view(-1, 256)), dim=1).to(device)
    sc.page_bytes(p.cache)[p.table[0, : len(raw)].long()] = raw
    codes, words = probe.query
    p = replace(p, query=codes.to(device), words=words.to(device), weights=probe.weights.to(device))
    want = keys.logits.view(torch.int16)
    same_rows([want], on_host(sc.rows_of(p, sc.run(p))), "injected scores")


def _bits(p: sc.Problem) -> list[int]:
    (row,) = sc.rows_of(p, sc.run(p))
    assert row is not None
    return [int(v) & 0xFFFF for v in row.tolist()]


def test_special_values(device: torch.device) -> None:
    """A NaN scale makes the logit NaN even over zero codes, in key and query; -0 is stored as +0."""
    p = one_element(device, [(0, 2, 127), (40, 0, 255), (40, 2, 255), (5, 10, 127), (100, 8, 1), (127, 7, 120)])
    assert _bits(p) == [0x3F80, 0xFFC0, 0xFFC0, 0x0000, 0x0000, 0x3D40]
    minus = replace(p, weights=-p.weights)
    assert _bits(minus) == [0xBF80, 0xFFC0, 0xFFC0, 0x0000, 0x0000, 0xBD40]
    assert p.words is not None
    for head in (0, 5):  # head 5 has zero codes and weight
        words = p.words.clone()
        words[0, head] = 0x7F7FFF7F
        assert set(_bits(replace(p, words=words))) == {0xFFC0}


@cases(*SHAPES)
def test_far_scales(device: torch.device, case: tuple[int, int]) -> None:
    """All vectors' scales lie anywhere: each block is exact then, so only float32 and BF16 roundings are left."""
    p = sc.problem(device, sc.config_of(*case, "pitched", "mxfp4"), ragged(6 * case[1], seed=33, longest=700), seed=33)
    generator = torch.Generator(device=device).manual_seed(34)
    raw = sc.page_bytes(p.cache)
    shape = (raw.shape[0], 64, 4)
    scales = torch.randint(60, 190, shape, device=device, generator=generator).to(torch.uint8)
    scales[..., 1] = scales[..., 0].clamp_max(170) + 15  # never within reach
    raw[:, 4096:] = scales.view(raw.shape[0], 256)
    raw[:, :4096].view(raw.shape[0], 256, 16)[..., 0] = 0x21  # no block is zero
    for t, row in enumerate(sc.rows_of(p, sc.run(p))):
        if row is None:
            continue
        exact, magnitude = sc.exact_row(p, t)
        before = magnitude * (p.config.heads // 8 + 3 + 4) * UNIT  # multiply-adds, exchanges, sums of blocks
        error = (row.view(torch.bfloat16).double() - exact).abs()
        bound = before + (exact.abs() + before) * 2.0**-8 + 2.0**-134
        assert bool((error <= bound).all()), f"row {t}: {float((error / bound).max())} of the bound"


ENDS = [
    (127, 127, 127, 127),
    (254, 100, 127, 90),
    (0, 254, 1, 127),
    (1, 0, 254, 200),
    (160, 160, 160, 160),
    (60, 254, 250, 3),
]
"""Scale codes of a query: together, with one block at an end of the range, and all near the end of one product."""


def test_every_scale_with_the_ends_of_a_query(device: torch.device) -> None:
    """Keys of one element with every scale, against queries and weights at the ends of the range: the cpu backend's
    bits, infinities exactly where it has them."""
    elements = [((7 * scale + 37 * code) % 128, code, scale) for scale in range(255) for code in (1, 2, 7, 15)]
    p = one_element(device, elements)
    assert p.words is not None
    for codes in ENDS:
        words = p.words.clone()
        words[0, 0] = torch.tensor(codes, dtype=torch.uint8, device=device).view(torch.int32)
        for weight in (1.0, -(2.0**-100), 2.0**-130, 2.0**-149, 2.0**97, -3.0e38):
            moved = replace(p, words=words, weights=torch.where(p.weights != 0, weight, 0.0))
            same_rows(
                oracle(moved), on_host(sc.rows_of(moved, sc.run(moved))), f"query scales {codes}, weight {weight}"
            )


def ends_of_range(p: sc.Problem, seed: int) -> sc.Problem:
    """`p` with block scales and weights from all over float32's range, whole rows and keys of a kind."""
    gen = torch.Generator().manual_seed(seed)

    def codes(shape: tuple[int, ...], kinds: torch.Tensor) -> torch.Tensor:
        parts = ((112, 135), (85, 95), (160, 169), (0, 12), (235, 255), (0, 255))
        drawn = torch.stack([torch.randint(*part, (*shape, 4), generator=gen) for part in parts])
        drawn[1:3, ..., 0] = torch.where(torch.rand(shape, generator=gen) < 0.2, 254, drawn[1:3, ..., 0])
        return drawn.gather(0, kinds.expand(shape)[None, ..., None].expand(1, *shape, 4))[0].to(torch.uint8)

    raw = sc.page_bytes(p.cache).clone()
    pages, rows, heads = raw.shape[0], len(p.lengths), p.config.heads
    raw[:, 4096:] = codes((pages, 64), torch.randint(0, 6, (pages, 64), generator=gen)).view(pages, 256).to(raw.device)
    words = codes((rows, heads), torch.randint(0, 6, (rows, 1), generator=gen)).view(torch.int32).squeeze(-1)
    some = torch.rand(rows, heads, generator=gen) < 0.1
    words = torch.where(some, torch.tensor([254, 120, 120, 120], dtype=torch.uint8).view(torch.int32), words)
    exponents = torch.tensor([0, 0, -60, -100, -126, -140, 60, 95, 110])
    power = torch.exp2(exponents[torch.randint(0, 9, (rows, 1), generator=gen)].double())
    weights = (torch.randn(rows, heads, generator=gen).double() * power).float()
    device = p.query.device
    return replace(p, cache=raw.view(-1, 64, 68), words=words.to(device), weights=weights.to(device))


def held_to_range(p: sc.Problem, rows: list[torch.Tensor | None]) -> tuple[int, int]:
    """Finite and within the bound wherever neither a dot nor a sum of magnitudes leaves float32's range; returns the
    number of such logits, and of those whose dots do if their key's factor is left for later."""
    tame_ones = late_ones = 0
    for t, row in enumerate(rows):
        if row is None:
            continue
        exact, magnitude = sc.exact_row(p, t)
        pages = p.table[t // p.config.next_n, : -(-len(row) // 64)].long()
        keys = page_values(sc.page_bytes(p.cache)[pages], "mxfp4")[0][: len(row)]
        assert p.words is not None
        largest = (query_values(p.query[t], p.words[t]) @ keys.T).abs().amax(0)
        tame = (magnitude < 2.0**127) & (largest < 2.0**127)
        subnormal = (p.weights[t].double().abs().sum() * 8 + p.config.heads) * 2.0**-149
        got = row.view(torch.bfloat16).double()
        error = (got - exact).abs() - logit_bound(exact, magnitude, p.config.heads) - subnormal
        bad = tame & ~(error <= 0)
        at = int(bad.int().argmax())
        assert not bool(bad.any()), f"row {t}[{at}]: {float(got[at])}, exact {float(exact[at])}, {float(magnitude[at])}"
        top = sc.page_bytes(p.cache)[pages][:, 4096:].reshape(-1, 4).amax(1)[: len(row)].double()
        tame_ones += int(tame.sum())
        late_ones += int((tame & (top >= 87) & (top < 133) & (largest * torch.exp2(133 - top) >= 2.0**128)).sum())
    return tame_ones, late_ones


@cases(*SHAPES)
def test_ends_of_the_range(device: torch.device, case: tuple[int, int]) -> None:
    """Scales from 2^-127 to 2^127, weights from 2^-140 to 2^110: no infinity and no zero but where the contract's
    float32 makes one, and rows have the same bits alone."""
    tame = late = 0
    for seed in (41, 42, 43):
        lengths = ragged(8 * case[1], seed=seed, longest=600)
        p = ends_of_range(sc.problem(device, sc.config_of(*case, "pitched", "mxfp4"), lengths, seed=seed), seed)
        rows = sc.rows_of(p, sc.run(p))
        found = held_to_range(p, rows)
        tame, late = tame + found[0], late + found[1]
        pick = list(range(0, len(lengths), 3))
        single = p.rows(pick)
        same_rows([rows[t] for t in pick], sc.rows_of(single, sc.run(single)), "rows alone")
    assert tame > 500
    assert late > 10


@cases(*SHAPES)
def test_far_neighbours(device: torch.device, case: tuple[int, int]) -> None:
    """Keys and rows whose scales lie far apart change nothing for the others of their tile and request."""
    heads, next_n = case
    p = sc.problem(device, sc.config_of(heads, next_n, "compact", "mxfp4"), ragged(8 * next_n, seed=35), seed=35)
    want = sc.rows_of(p, sc.run(p))
    generator = torch.Generator(device=device).manual_seed(36)
    raw = sc.page_bytes(p.cache).clone()
    hit = torch.rand(raw.shape[0], 64, device=device, generator=generator) < 0.03
    far = torch.tensor([60, 190, 127, 100], dtype=torch.uint8, device=device)
    scales = raw[:, 4096:].reshape(-1, 64, 4)
    scales[hit] = far
    raw[:, 4096:] = scales.view(-1, 256)
    moved = replace(p, cache=raw.view(-1, 64, 68))
    for t, row in enumerate(sc.rows_of(moved, sc.run(moved))):
        before = want[t]
        if row is None or before is None:
            continue
        other = hit[p.table[t // next_n, : -(-len(row) // 64)].long()].view(-1)[: len(row)]
        assert torch.equal(row[~other], before[~other]), f"row {t}: a neighbour changed"
    assert p.words is not None
    words = p.words.clone()
    rows = torch.arange(len(p.lengths), device=device) % 3 == 1
    words[rows, heads // 2] = far.view(torch.int32)
    for t, row in enumerate(sc.rows_of(p, sc.run(replace(p, words=words)))):
        before = want[t]
        if row is not None and before is not None and not bool(rows[t]):
            assert torch.equal(row, before), f"row {t}: another row of its request changed it"


@cases(
    (32, 1, "compact", "mxfp4", "float32"),
    (8, 2, "pitched", "mxfp4", "bfloat16"),
    (32, 2, "compact", "mxfp4", "float32"),
    (64, 1, "pitched", "mxfp4", "float32"),
    (16, 4, "compact", "mxfp4", "float32"),
    (16, 8, "pitched", "mxfp4", "float32"),
    (32, 4, "compact", "mxfp4", "float32"),
    (64, 2, "compact", "mxfp4", "float32"),
    (64, 4, "compact", "mxfp4", "float32"),
    (32, 8, "pitched", "mxfp4", "float32"),
    (64, 8, "compact", "mxfp4", "float32"),
)
def test_small_mxfp4(device: torch.device, case: tuple[int, int, str, str, str]) -> None:
    """As `test_score_small`, for every cut of this kernel: small enough for memcheck and racecheck."""
    small(device, case)


@cases((8, 1), (32, 2))
def test_many_short_requests(device: torch.device, case: tuple[int, int]) -> None:
    """Each tile is another request's, more than are ordered ahead: any number of blocks gives the same bits."""
    heads, next_n = case
    for requests, longest in ((3, 130), (40, 128), (300, 200)):
        lengths = [1 + (37 * t + t // 11) % longest for t in range(requests * next_n)]
        p = sc.problem(device, sc.config_of(heads, next_n, "compact", "mxfp4"), lengths, seed=38)
        first = sc.run(p, blocks=1)
        assert first.flag == 0
        sc.assert_frame(p, first)
        sc.assert_within_bound(p, first)
        for blocks in (2, 7, 132):
            assert torch.equal(sc.run(p, blocks=blocks).logits, first.logits), f"{requests} requests, {blocks} blocks"


@cases((8, 1), (32, 1), (32, 2), (16, 4))
def test_even_lengths(device: torch.device, case: tuple[int, int]) -> None:
    """Blocks that keep to a request, whose tiles they score by turns and, behind sixteen, in runs: any number of blocks
    gives the same bits."""
    heads, next_n = case
    for requests, longest in ((1, 9000), (3, 7800), (31, 4096)):
        lengths = [longest - t % next_n for t in range(requests * next_n)]
        p = sc.problem(device, sc.config_of(heads, next_n, "compact", "mxfp4"), lengths, seed=39)
        first = sc.run(p, blocks=200)
        assert first.flag == 0
        sc.assert_frame(p, first)
        sc.assert_within_bound(p, first)
        for blocks in (1, requests, 2 * requests, 3 * requests + 1, 132):
            assert torch.equal(sc.run(p, blocks=blocks).logits, first.logits), f"{requests} requests, {blocks} blocks"
