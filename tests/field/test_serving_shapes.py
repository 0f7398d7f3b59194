"""Lengths and page lists of decode steps as a server really made them: short rows, one long one, pad page 0."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from field.steps import check_step, spec_of
from keysieve.testing import Case, make_pool, random_case

SHAPES: dict[str, Any] = json.loads(Path(__file__).with_name("serving_shapes.json").read_text())
WORKLOADS = {workload["id"]: workload for workload in SHAPES["workloads"]}
POOL_PAGES = 640


def serving_case(workload: dict[str, Any], key_format: str, topk: int, pattern_seed: int) -> Case:
    """The workload's lengths and pages with random bytes; page 0 pads every unneeded column and is poison."""
    lengths: list[int] = workload["seq_lens"]
    spec = spec_of(key_format, heads=SHAPES["heads"], topk=topk)
    base = random_case(spec, lengths, seed=pattern_seed)
    fixed = workload.get("long_row_pages", [])
    taken = {SHAPES["pad_page"], *fixed}
    free = iter([page for page in range(POOL_PAGES) if page not in taken])
    columns = max(-(-length // SHAPES["page"]) for length in lengths) + 3
    table = torch.full((len(lengths), columns), SHAPES["pad_page"], dtype=torch.int32)
    pool = make_pool(spec, POOL_PAGES, poison="winner")
    for request, length in enumerate(lengths):
        count = -(-length // SHAPES["page"])
        pages = fixed if request == workload.get("long_row") else [next(free) for _ in range(count)]
        table[request, :count] = torch.tensor(pages, dtype=torch.int32)
        pool[table[request, :count].long()] = base.cache[base.index_table[request, :count].long()]
    return replace(base, recipe=f"serving workload {workload['id']}", cache=pool, index_table=table)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_serving_shapes_as_captured(workload: int) -> None:
    """64 heads, k = 2,048: most rows fit k and are not scored, the long row of a step is."""
    out = check_step(serving_case(WORKLOADS[workload], "fp8_fp32", SHAPES["topk"], workload))
    expected = [min(length, SHAPES["topk"]) for length in WORKLOADS[workload]["seq_lens"]]
    assert out.counts.tolist() == expected


@pytest.mark.parametrize("key_format", ["fp8_ue8m0", "mxfp4"])
@pytest.mark.parametrize("workload", [12, 36, 67, 104])
def test_serving_shapes_with_every_row_scored(workload: int, key_format: str) -> None:
    """The same lengths with a small k, so that short rows go through score and selection as well."""
    check_step(serving_case(WORKLOADS[workload], key_format, 16, workload))
