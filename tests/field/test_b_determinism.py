"""Kind B: the same bytes in must give the same bytes out, whatever the batch, the process, the threads or the ties."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle.select import select
from oracle.step import expected_step, injected_bits

import keysieve as ks
from field.steps import (
    FORMATS,
    assert_same_outputs,
    assert_step,
    check_step,
    chosen,
    indexer_for,
    outputs,
    run_step,
    spec_of,
)
from keysieve.testing import (
    Case,
    assert_bitwise_equal,
    injected_case,
    pattern_case,
    random_case,
    relocate,
    take_requests,
)


def test_b1_many_runs_on_half_tied_rows() -> None:
    """Where positions are decided by atomics, runs differ as soon as many keys tie at the threshold."""
    case = pattern_case(spec_of(topk=256), "half_tied", [2000, 700, 257], seed=1)
    indexer = indexer_for(case)
    first = check_step(case, indexer)
    first = {name: tensor.clone() for name, tensor in outputs(first).items()}
    for _ in range(60):
        for name, tensor in outputs(run_step(case, indexer)).items():
            assert_bitwise_equal(tensor, first[name], name)


def test_b2_processes_and_thread_counts_agree() -> None:
    """Ranks that hold the same bytes must pick the same keys: separate processes, 1, 2 and 5 threads, other hash seeds.

    Sums split by thread count change a logit's last bit, and with it the selection.
    """
    script = Path(__file__).with_name("digest_main.py")
    running = []
    for threads in (1, 2, 5):
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), PYTHONHASHSEED=str(threads))
        command = [sys.executable, str(script), str(threads)]
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    digests = [process.communicate(timeout=300)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(digests[0]) == 64
    assert len(set(digests)) == 1


def test_b3_the_order_is_ascending_position() -> None:
    """The same set in another order still corrupts a tensor-parallel engine: the order is fixed, and is key order."""
    case = pattern_case(spec_of(topk=512), "gaussian", [3000, 400, 0, 513], seed=3)
    out = check_step(case)
    for row in range(case.rows):
        count = int(out.counts[row])
        positions = out.positions[row]
        assert bool((positions[:count].diff() > 0).all())
        assert bool((positions[count:] == -1).all())
        assert bool((out.rows[row, count:] == -1).all())


def test_b5_real_rows_have_dozens_of_ties_at_the_threshold() -> None:
    """131,072 random scores in BF16: ties at rank 2,048 are the rule. Every run decides them by position."""
    case = pattern_case(spec_of(), "gaussian", [131072], seed=5)
    assert case.logits is not None
    scores = case.logits[0][:131072].float()
    threshold = scores.sort(descending=True).values[2047]
    assert int((scores == threshold).sum()) > 10
    indexer = indexer_for(case)
    want = expected_step(case)
    for _ in range(3):
        assert_step(run_step(case, indexer), want, case)


def test_b5_twenty_runs_of_the_public_top_k() -> None:
    """The same through the public top-k, on rows that keysieve did not score."""
    scores = torch.randn(1, 131072, generator=torch.Generator().manual_seed(55)).to(torch.bfloat16)
    lengths = torch.tensor([131072], dtype=torch.int32)
    first = ks.topk(scores, lengths, 2048)[0].clone()
    want = torch.tensor(select(scores[0].view(torch.int16).numpy().view("uint16"), 2048), dtype=torch.int32)
    assert_bitwise_equal(first[0], want, "positions")
    for _ in range(20):
        assert_bitwise_equal(ks.topk(scores, lengths, 2048)[0], first, "positions")


def test_b6_two_equal_keys_compete_for_the_last_place() -> None:
    """Exactly one tie at the boundary: the lower position must win on every one of thousands of launches."""
    topk = 64
    generator = torch.Generator().manual_seed(6)
    scores = torch.full((300,), -1.0)
    places = torch.randperm(300, generator=generator)[: topk + 1]
    scores[places] = 2.0 + torch.arange(topk + 1) / 64.0
    scores[places[-2:]] = 1.0
    lower, higher = sorted(places[-2:].tolist())
    row = scores.to(torch.bfloat16)[None]
    lengths = torch.tensor([300], dtype=torch.int32)
    for _ in range(4400):
        positions, _ = ks.topk(row, lengths, topk)
        picked = positions[0].tolist()
        assert lower in picked
        assert higher not in picked


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("seed", range(6))
def test_b6_the_pair_through_the_paged_cache(seed: int, key_format: str) -> None:
    """The two equal keys lie in any two pages, in any order of physical placement: position decides, not address."""
    case = pattern_case(spec_of(key_format, topk=64), "pair_at_threshold", [300, 65, 1000], seed=seed)
    check_step(case)


@pytest.mark.parametrize("topk", [1, 2, 3, 5, 2049, 2050, 2051, 2052])
def test_b9_a_cut_inside_a_group_of_equal_keys(topk: int) -> None:
    """Pooled scores are copied to four cells; a k that four does not divide keeps the lowest positions of a group."""
    case = pattern_case(spec_of(topk=topk), "groups_of_four", [8000, 2053], seed=9)
    out = check_step(case)
    assert case.logits is not None
    kept = set(chosen(out, 0))
    for group in range(2000):
        members = [p for p in range(4 * group, 4 * group + 4) if p in kept]
        assert members == list(range(4 * group, 4 * group + len(members)))


def test_b10_a_row_alone_and_among_thousands() -> None:
    """Launch shapes chosen by the number of rows must not choose other keys: 4,096 rows at once, each as if alone."""
    rows, length, topk = 4096, 200, 50
    generator = torch.Generator().manual_seed(10)
    scores = (torch.randint(-8, 8, (rows, length), generator=generator) / 4.0).to(torch.bfloat16)
    lengths = torch.randint(0, length + 1, (rows,), generator=generator).to(torch.int32)
    positions, counts = ks.topk(scores, lengths, topk)
    for row in range(0, rows, 37):
        alone, count = ks.topk(scores[row : row + 1], lengths[row : row + 1], topk)
        assert_bitwise_equal(alone[0], positions[row], f"row {row}")
        assert_bitwise_equal(count[0], counts[row], f"count of row {row}")
    bits = scores.view(torch.int16).numpy().view("uint16")
    for row in range(0, rows, 101):
        want = select(bits[row, : int(lengths[row])], topk)
        assert positions[row, : len(want)].tolist() == want


def one_row(case: Case, row: int) -> Case:
    """A row of a case as a request of its own: one query row, the request's table."""
    return take_requests(case, [row // case.next_n], rows=[row])


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
@pytest.mark.parametrize("key_format", FORMATS)
def test_b11_a_draft_row_scores_as_if_it_were_alone(key_format: str, numerics: str) -> None:
    """Ties were not to blame: the scores themselves changed with the shape of the product.

    Random query and keys: row j of four, and the same row alone, must have the same logits in every bit and the same
    selection.
    """
    spec = spec_of(key_format, heads=16, topk=128, numerics=numerics)
    case = random_case(spec, [[500, 501, 502, 503], [130, 0, 260, 129]], next_n=4, seed=11)
    together = check_step(case, numerics=numerics)
    arguments = (case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table)
    logits = ks.score(spec, *arguments, max_len=512)
    for row in range(case.rows):
        alone = one_row(case, row)
        arguments = (alone.query, alone.index_cache(), alone.weights, alone.seq_lens, alone.index_table)
        assert_bitwise_equal(ks.score(spec, *arguments, max_len=512)[0], logits[row], f"logits of row {row}")
        out = run_step(alone)
        for name, tensor in outputs(out).items():
            assert_bitwise_equal(tensor[0], outputs(together)[name][row], f"{name} of row {row}")


@pytest.mark.parametrize("key_format", FORMATS)
def test_b11_neighbours_and_page_placement_do_not_reach_a_logit(key_format: str) -> None:
    """The same keys on other pages, beside other requests, in another order of requests: the same bits."""
    case = random_case(spec_of(key_format, heads=32, topk=100), [400, 150], seed=110)
    base = check_step(case)
    backwards = run_step(take_requests(case, [1, 0]))
    assert_bitwise_equal(backwards.positions, base.positions.flip(0), "positions, requests reversed")
    assert_bitwise_equal(backwards.rows, base.rows.flip(0), "rows, requests reversed")
    for seed in range(3):
        moved = relocate(case, seed, spare_pages=1 + seed)
        assert_same_outputs(run_step(moved), base, "pages moved")


def test_b12_one_call_or_two_or_sixty_four() -> None:
    """How queries are sliced over ranks or calls must not matter: 64 rows at once = 2 x 32 = 64 x 1."""
    gen = torch.Generator().manual_seed(12)
    lengths = torch.randint(0, 900, (64,), generator=gen).tolist()
    case = random_case(spec_of(heads=8, topk=128), lengths, seed=12)
    whole = check_step(case)
    for size in (32, 1):
        pieces = [run_step(take_requests(case, list(range(at, at + size)))) for at in range(0, 64, size)]
        for name, tensor in outputs(whole).items():
            assert_bitwise_equal(torch.cat([outputs(piece)[name] for piece in pieces]), tensor, f"{name} by {size}")


def test_b12_rows_of_one_request_sliced_over_calls() -> None:
    """Drafts of one request handed in as one request of eight rows, or as eight requests with a repeated table row."""
    case = random_case(spec_of(heads=8, topk=64), [[200 + j for j in range(8)]], next_n=8, seed=120)
    together = check_step(case)
    expanded = take_requests(case, [0] * 8, rows=list(range(8)))
    assert_same_outputs(run_step(expanded), together, "a table expanded per row")


def test_b_injected_ties_do_not_depend_on_where_the_pages_lie() -> None:
    """Ties broken by physical address look stable until a pool is fragmented."""
    spec = spec_of(topk=100)
    scores = [torch.ones(1000), (torch.arange(1000) // 50 % 2).float()]
    first = run_step(injected_case(spec, scores, seed=1))
    for seed in range(2, 8):
        case = injected_case(spec, scores, seed=seed, spare_pages=seed)
        out = check_step(case)
        assert_bitwise_equal(out.positions, first.positions, f"positions with page placement {seed}")
    assert first.positions[0].tolist() == list(range(100))
    assert select(injected_bits(case, 1), 100) == chosen(first, 1)
