"""The sm90 scorer: exact values within the derived bound, and bits that depend on nothing but the row and the keys."""

from __future__ import annotations

import random
from dataclasses import replace

import score_cases as sc
import torch
from harness import cases

from keysieve.kernels.flags import FLAG_BAD_LENGTH, FLAG_BAD_PAGE, FLAG_OVERFLOW
from keysieve.kernels.sm90_score_config import KEPT_ROWS
from keysieve.spec import TILE

SHAPES = [
    (8, 1, "compact", "fp8_fp32", "float32"),
    (8, 5, "pitched", "fp8_ue8m0", "bfloat16"),
    (16, 3, "compact", "fp8_ue8m0", "float32"),
    (16, 8, "pitched", "fp8_fp32", "float32"),
    (32, 1, "compact", "fp8_fp32", "float32"),
    (32, 1, "pitched", "fp8_ue8m0", "bfloat16"),
    (32, 2, "compact", "fp8_fp32", "bfloat16"),
    (32, 3, "compact", "fp8_ue8m0", "float32"),
    (32, 4, "compact", "fp8_fp32", "float32"),
    (32, 7, "pitched", "fp8_fp32", "float32"),
    (32, 8, "compact", "fp8_fp32", "float32"),
    (64, 1, "compact", "fp8_ue8m0", "float32"),
    (64, 2, "pitched", "fp8_fp32", "float32"),
    (64, 3, "compact", "fp8_fp32", "bfloat16"),
    (64, 4, "compact", "fp8_fp32", "float32"),
    (64, 5, "compact", "fp8_ue8m0", "float32"),
    (64, 8, "compact", "fp8_fp32", "float32"),
    (8, 1, "compact", "mxfp4", "float32"),
    (8, 3, "compact", "mxfp4", "float32"),
    (8, 7, "pitched", "mxfp4", "float32"),
    (8, 8, "pitched", "mxfp4", "bfloat16"),
    (16, 3, "compact", "mxfp4", "float32"),
    (32, 1, "compact", "mxfp4", "float32"),
    (32, 1, "pitched", "mxfp4", "bfloat16"),
    (32, 2, "compact", "mxfp4", "bfloat16"),
    (32, 4, "compact", "mxfp4", "float32"),
    (32, 7, "pitched", "mxfp4", "float32"),
    (64, 1, "compact", "mxfp4", "float32"),
    (64, 3, "compact", "mxfp4", "bfloat16"),
    (64, 8, "compact", "mxfp4", "float32"),
]
BOTH = ("fp8_fp32", "mxfp4")
EDGES = [0, -3, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 191, 193, 255, 257]


def ragged(rows: int, seed: int, longest: int = 3000) -> list[int]:
    """Row lengths around every edge, empty and negative ones in between, at least one at `longest`."""
    draw = random.Random(seed)
    lengths = [draw.choice([*EDGES, draw.randint(1, longest), draw.randint(1, longest)]) for _ in range(rows)]
    lengths[draw.randrange(rows)] = longest
    return lengths


def same_rows(a: list[torch.Tensor | None], b: list[torch.Tensor | None], what: str) -> None:
    """Bitwise equality of row lists."""
    assert len(a) == len(b)
    for t, (x, y) in enumerate(zip(a, b, strict=True)):
        assert (x is None) == (y is None), f"{what}: row {t} scored in one of the two only"
        if x is not None and y is not None:
            assert torch.equal(x, y), f"{what}: row {t} differs in {int((x != y).sum())} of {len(x)} logits"


@cases(*SHAPES)
def test_bound(device: torch.device, case: tuple[int, int, str, str, str]) -> None:
    """Every logit lies within the derived bound of the exact one; tops, starts and tails are as the contract says."""
    config = sc.config_of(*case)
    p = sc.problem(device, config, ragged(24 * config.next_n, seed=sum(case[:2])), seed=5)
    result = sc.run(p)
    assert result.flag == 0
    sc.assert_frame(p, result)
    sc.assert_within_bound(p, result)


@cases(*SHAPES)
def test_row_alone_and_in_any_company(device: torch.device, case: tuple[int, int, str, str, str]) -> None:
    """A row has the same bits as one of next_n rows in a batch, as a request of its own, and alone."""
    p = sc.problem(device, sc.config_of(*case), ragged(16 * case[1], seed=3), seed=6)
    together = sc.rows_of(p, sc.run(p))
    every = list(range(len(p.lengths)))
    single = p.rows(every)
    same_rows(together, sc.rows_of(single, sc.run(single)), "next_n and 1")
    for t in every[:: max(1, len(every) // 8)]:
        alone = p.rows([t])
        same_rows([together[t]], sc.rows_of(alone, sc.run(alone)), f"row {t} alone")


@cases((32, 8, 1), (32, 8, 5), (32, 1, 1), (32, 1, 2))
def test_more_results_than_the_cache_keeps(device: torch.device, case: tuple[int, int, int]) -> None:
    """A step of so many rows that L2 is asked to keep a share of its results, or none, and one of few: the same bits.

    case: heads, next_n, and how many times the rows are that L2 may keep.
    """
    requests = 8 if case[1] == 8 else 60
    longest = TILE * (case[2] * KEPT_ROWS // (requests * case[1]) + 2)
    p = sc.problem(device, sc.config_of(*case[:2]), [longest - t % 5 for t in range(requests * case[1])], seed=9)
    result = sc.run(p)
    sc.assert_frame(p, result)
    rows = sc.rows_of(p, result)
    for t in (0, len(rows) // 2, len(rows) - 1):
        alone = p.rows([t])
        same_rows([rows[t]], sc.rows_of(alone, sc.run(alone)), f"row {t} alone")


@cases(*((heads, n, key_format) for key_format in BOTH for heads, n in ((32, 1), (32, 4), (64, 8), (16, 2))))
def test_any_number_of_blocks(device: torch.device, case: tuple[int, int, str]) -> None:
    """The cut into blocks leaves no trace in the bits."""
    p = sc.problem(
        device, sc.config_of(*case[:2], key_format=case[2]), ragged(12 * case[1], seed=8, longest=9000), seed=7
    )
    want = sc.rows_of(p, sc.run(p))
    for blocks in (1, 2, 7, 64, 131, 200):
        same_rows(want, sc.rows_of(p, sc.run(p, blocks=blocks)), f"{blocks} blocks")


@cases(*(("fp8_fp32", n) for n in (8448, 8464, 12304, 38016)), *(("mxfp4", n) for n in (4352, 4368, 8208, 38016)))
def test_page_placement(device: torch.device, case: tuple[str, int]) -> None:
    """Pages elsewhere, with any 16-byte stride between them: the same bits."""
    config, stride = sc.config_of(32, 2, key_format=case[0]), case[1]
    p = sc.problem(device, config, ragged(32, seed=9), seed=8)
    want = sc.rows_of(p, sc.run(p))
    pages = p.cache.shape[0]
    generator = torch.Generator(device=device).manual_seed(stride)
    order = torch.randperm(2 * pages, device=device, generator=generator)[:pages]
    cache = sc.empty_pool(device, 2 * pages, stride, case[0])
    sc.page_bytes(cache)[order] = sc.page_bytes(p.cache)
    real = (p.table >= 0) & (p.table < pages)
    table = torch.where(real, order[p.table.clamp(0, pages - 1).long()].int(), torch.full_like(p.table, -9))
    moved = replace(p, cache=cache, table=table)
    same_rows(want, sc.rows_of(moved, sc.run(moved)), f"stride {stride}")


@cases(*BOTH)
def test_pages_beyond_four_gibibytes(device: torch.device, case: str) -> None:
    """Page offsets pass 2^32 bytes."""
    p = sc.problem(device, sc.config_of(32, 1, key_format=case), [700, 64, 1], seed=9, spare=30)
    want = sc.rows_of(p, sc.run(p))
    pages, stride = p.cache.shape[0], (1 << 28) + 16
    width = p.cache.shape[2]
    raw = torch.empty((pages - 1) * stride + 64 * width, dtype=torch.uint8, device=device)
    cache = raw.as_strided((pages, 64, width), (stride, width, 1))
    sc.page_bytes(cache)[:] = sc.page_bytes(p.cache)
    assert max(int(p.table[0, :11].max()), int(p.table[1, 0]), int(p.table[2, 0])) * stride > 1 << 32
    far = replace(p, cache=cache)
    same_rows(want, sc.rows_of(far, sc.run(far)), "far pages")


@cases((32, 1, 512, "fp8_fp32"), (32, 2, 100, "fp8_fp32"), (64, 4, 2048, "fp8_fp32"), (32, 2, 100, "mxfp4"))
def test_short_requests_are_not_scored(device: torch.device, case: tuple[int, int, int, str]) -> None:
    """Under the compact layout a request whose rows all fit topk is skipped, and no page of it is even looked up."""
    heads, next_n, topk, key_format = case
    lengths = ragged(40 * next_n, seed=11, longest=5000)
    for j in range(next_n):
        lengths[j] = topk - j
        lengths[next_n + j] = topk + 1 if j == 0 else 3
    p = sc.problem(device, sc.config_of(heads, next_n, key_format=key_format), lengths, seed=10)
    p.table[0, :] = sc.POISON_ID
    result = sc.run(p, topk=topk)
    assert result.flag == 0
    sc.assert_frame(p, result, topk)
    rows = sc.rows_of(p, result, topk)
    assert rows[0] is None
    assert rows[next_n] is not None
    for t, row in enumerate(sc.rows_of(p, sc.run(p), 0)):
        if rows[t] is not None and row is not None:
            assert torch.equal(rows[t], row)


@cases((1, 32, "fp8_fp32"), (3, 32, "fp8_fp32"), (5000, 8, "fp8_fp32"), (3, 32, "mxfp4"))
def test_many_small_requests(device: torch.device, case: tuple[int, int, str]) -> None:
    """4,096 requests of a few keys, and ones that are empty for long stretches."""
    seed, heads, key_format = case
    draw = random.Random(seed)
    lengths = [draw.choice([0, 0, draw.randint(1, 300), 5]) for _ in range(4096)]
    lengths[1000:3000] = [0] * 2000
    p = sc.problem(device, sc.config_of(heads, 1, key_format=key_format), lengths, seed=seed)
    result = sc.run(p)
    assert result.flag == 0
    sc.assert_frame(p, result)
    pick = [t for t in range(4096) if lengths[t] > 0][::37]
    rows = sc.rows_of(p, result)
    alone = p.rows(pick)
    same_rows([rows[t] for t in pick], sc.rows_of(alone, sc.run(alone)), "picked rows")


@cases(("compact", "fp8_fp32"), ("pitched", "fp8_fp32"), ("compact", "mxfp4"), ("pitched", "mxfp4"))
def test_bad_page_ids(device: torch.device, case: tuple[str, str]) -> None:
    """Logits of a page outside the pool are the canonical NaN, a flag is raised, the rest is as before."""
    p = sc.problem(device, sc.config_of(32, 2, *case), [900, 870, 333, 500], seed=12)
    want = sc.rows_of(p, sc.run(p))
    table = p.table.clone()
    table[0, 2], table[0, 13], table[1, 7] = -1, p.cache.shape[0], 2**31 - 1
    result = sc.run(replace(p, table=table))
    assert result.flag == 1 << FLAG_BAD_PAGE
    for t, row in enumerate(sc.rows_of(p, result)):
        assert row is not None
        assert want[t] is not None
        spoiled = torch.zeros(len(row), dtype=torch.bool, device=device)
        for page in (2, 13) if t < 2 else (7,):
            spoiled[page * 64 : (page + 1) * 64] = True
        assert bool(((row[spoiled].to(torch.int32) & 0xFFFF) == 0xFFC0).all())
        assert torch.equal(row[~spoiled], want[t][~spoiled])


@cases(("compact", "fp8_fp32"), ("pitched", "fp8_fp32"), ("compact", "mxfp4"))
def test_bad_lengths(device: torch.device, case: tuple[str, str]) -> None:
    """A length beyond the table or max_context makes its row empty, raises a flag and disturbs nobody."""
    p = sc.problem(device, sc.config_of(32, 2, *case), [900, 870, 333, 500, 40, 2], seed=13)
    want = sc.rows_of(p, sc.run(p))
    beyond = replace(p, lengths=(900, p.limit + 1, 333, 500, 2**31 - 1, 2))
    result = sc.run(beyond)
    assert result.flag == 1 << FLAG_BAD_LENGTH
    sc.assert_frame(beyond, result)
    same_rows([want[0], None, want[2], want[3], None, want[5]], sc.rows_of(beyond, result), "lengths")
    bounded = replace(p, max_context=500)
    result = sc.run(bounded)
    assert result.flag == 1 << FLAG_BAD_LENGTH
    same_rows([None, None, *want[2:]], sc.rows_of(bounded, result), "max_context")


@cases(*BOTH)
def test_full_buffer(device: torch.device, case: str) -> None:
    """Requests that do not fit the compact buffer whole are not written, and a flag tells."""
    p = sc.problem(device, sc.config_of(32, 2, key_format=case), [900, 870, 333, 500, 40, 2], seed=14)
    want = sc.rows_of(p, sc.run(p))
    capacity = 2 * 128 * (8 + 4)  # requests 0 and 1 fit exactly
    result = sc.run(p, capacity=capacity)
    assert result.flag == 1 << FLAG_OVERFLOW
    assert bool((result.logits[capacity:] == sc.SENTINEL).all())
    rows = sc.rows_of(p, result)
    same_rows(want[:4], rows[:4], "requests that fit")
    result = sc.run(p, capacity=capacity - 2 * 128)
    assert result.flag == 1 << FLAG_OVERFLOW
    assert bool((result.logits[2 * 128 * 8 :] == sc.SENTINEL).all()), "a request that does not fit whole was written"
    same_rows(want[:2], sc.rows_of(p, result)[:2], "request 0")
