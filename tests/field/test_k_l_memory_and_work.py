"""Kinds K6 and L2: memory of a very long row, and rows short enough that nothing has to be read."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracle.step import expected_step

import keysieve as ks
from field.steps import FORMATS, assert_step, check_step, chosen, indexer_for, run_step, spec_of
from keysieve.testing import OUT_OF_RANGE_IDS, assert_bitwise_equal, make_pool, pattern_case, random_case


@pytest.mark.slow
def test_k6_a_million_keys_in_two_gigabytes() -> None:
    """A reference that makes [rows, heads, keys] needs 256 MB a head: the whole process stays below 2 GB.

    64 heads, the step, the public score and the public top-k, measured as the peak resident size.
    """
    script = Path(__file__).with_name("peak_memory_main.py")
    command = [sys.executable, str(script), "1048576", "64"]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    peak, grown, workspace = (int(number) for number in done.stdout.split())
    assert peak < 2 * 10**9
    assert grown < 10**9
    assert workspace < 10**9


@pytest.mark.parametrize("key_format", FORMATS)
def test_l2_rows_that_fit_topk_read_nothing(key_format: str) -> None:
    """L <= k takes every key: no key byte is read, so a pool of NaN and a table of impossible ids change nothing."""
    spec = spec_of(key_format)
    lengths = [[2048, 2047], [1, 64], [0, 2000], [65, -1]]
    case = pattern_case(spec, "gaussian", lengths, next_n=2, seed=2)
    want = expected_step(case)
    nowhere = torch.tensor(OUT_OF_RANGE_IDS, dtype=torch.int32).repeat(4, 9)
    unread = replace(case, cache=make_pool(spec, 1, poison="nan"), index_table=nowhere)
    indexer = indexer_for(unread)
    out = run_step(unread, indexer)
    assert_step(out, want, "rows that fit topk")
    indexer.check()  # nothing was read, so no id was found to be impossible
    assert chosen(out, 0) == list(range(2048))


@pytest.mark.parametrize("key_format", FORMATS)
def test_l2_short_and_long_requests_mixed(key_format: str) -> None:
    """Requests that are not scored lie between requests that are: offsets of what is scored must not slip."""
    spec = spec_of(key_format, topk=256)
    lengths = [[256, 255], [257, 3], [1, 1], [3000, 3001], [0, 256], [300, 0], [128, 64]]
    check_step(random_case(spec, lengths, next_n=2, seed=20))
    check_step(pattern_case(spec, "relu_plateau", lengths, next_n=2, seed=21))


def test_l2_a_request_is_scored_when_one_of_its_rows_needs_it() -> None:
    """One draft row passes k: its short sister rows still take every key, the long one is exact."""
    spec = spec_of(topk=100)
    for lengths in ([[99, 100, 101]], [[101, 100, 99]], [[0, 500, 0]]):
        check_step(pattern_case(spec, "descending", lengths, next_n=3, seed=22))


@pytest.mark.parametrize("key_format", FORMATS)
def test_l2_the_public_score_always_scores(key_format: str) -> None:
    """Only the step leaves out short rows; ``score`` gives their logits too, and the step agrees with its top-k."""
    spec = spec_of(key_format, topk=2048)
    case = pattern_case(spec, "gaussian", [100, 2048, 1], seed=23)
    arguments = (case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table)
    logits = ks.score(spec, *arguments, max_len=2048)
    assert case.logits is not None
    for row, length in enumerate(case.lengths):
        assert_bitwise_equal(logits[row, :length], case.logits[row][:length], f"logits of row {row}")
    positions, counts = ks.topk(logits, case.seq_lens, 2048)
    out = check_step(case)
    assert_bitwise_equal(positions, out.positions, "positions")
    assert_bitwise_equal(counts, out.counts, "counts")
