"""Ties that ReLU makes by itself: with 8 heads that lean the same way many keys get a logit of exactly zero.

Their number exceeds what topk leaves room for, so the cut goes through them, and whoever cuts elsewhere in another
batch or on another rank gets other keys. The rows come from a model; they are then selected for alone, in other
batches and from other pages, and must give the same ids.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from clients.exact import Exact
from clients.models import FAMILIES
from clients.test_selection import FORMATS, generate, prompt
from keysieve.cache import IndexCache
from keysieve.integrations.transformers import IndexerStep, StepSelector, patch


def leaning_steps(name: str, key_format: str) -> tuple[Exact, list[tuple[IndexerStep, torch.Tensor]]]:
    """Steps of a model whose indexer heads share most of their query projection."""
    model = FAMILIES[name].build(heads=8, topk=40)
    exact = Exact(keep=True)
    with torch.no_grad(), patch(model, key_format=key_format, observer=exact) as patched:
        for indexer in patched.indexers:
            weight = indexer.module.wq_b.weight.view(8, 128, -1)  # type: ignore[union-attr, operator]  # a Linear
            weight.copy_(weight[:1] + 0.4 * weight)
        generate(model, prompt(90, 77), 4)
    return exact, exact.steps


def one_row(step: IndexerStep, row: int) -> IndexerStep:
    """A row of a step as a request of its own."""
    cut = slice(row, row + 1)
    query = (step.query[0][cut], step.query[1][cut]) if isinstance(step.query, tuple) else step.query[cut]
    return replace(
        step,
        query=query,
        weights=step.weights[cut],
        seq_lens=step.seq_lens[cut],
        index_table=step.index_table[row // step.next_n][None],
        longest=int(step.seq_lens[row]),
    )


def rows_of(step: IndexerStep, rows: list[int]) -> IndexerStep:
    """Some rows of a step, in any order, as requests of their own."""
    picked = torch.tensor(rows)
    query = (step.query[0][picked], step.query[1][picked]) if isinstance(step.query, tuple) else step.query[picked]
    table = step.index_table[picked // step.next_n]
    return replace(step, query=query, weights=step.weights[picked], seq_lens=step.seq_lens[picked], index_table=table)


def elsewhere(step: IndexerStep) -> IndexerStep:
    """The same step with its pages in other places of a larger pool whose other pages hold winners for everything."""
    old = step.cache.data
    pages = old.shape[0]
    order = torch.randperm(3 * pages, generator=torch.Generator().manual_seed(3))[:pages]
    moved = IndexCache.empty(step.spec, pages=3 * pages)
    moved.append(torch.full((3 * pages * 64, 128), 1e6), torch.arange(3 * pages * 64))
    moved.data[order] = old
    return replace(step, cache=moved, index_table=order[step.index_table.long()].to(torch.int32))


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_zero_plateaus_are_cut_the_same_alone_batched_and_split(name: str, key_format: str) -> None:
    exact, steps = leaning_steps(name, key_format)
    assert exact.zero_cut >= 40, "the model made too few cuts through zeros for this test to mean anything"
    select = StepSelector(max_rows=512, backend="cpu")
    for step, positions in steps:
        rows = positions.shape[0]
        for row in range(rows):
            alone, count = select(one_row(step, row))
            assert torch.equal(alone[0], positions[row])
            assert int(count[0]) == int((positions[row] >= 0).sum())
        backwards = list(range(rows))[::-1]
        assert torch.equal(select(rows_of(step, backwards))[0], positions[backwards])
        half = rows // 2
        first, second = rows_of(step, list(range(half))), rows_of(step, list(range(half, rows)))
        assert torch.equal(torch.cat([select(first)[0].clone(), select(second)[0]]), positions)
        assert torch.equal(select(elsewhere(step))[0], positions)


def test_max_rows_only_cuts_calls_not_results() -> None:
    """A prompt selected for in calls of 16 rows: the same model output as in one call."""
    inputs = prompt(70, 52)
    outputs = []
    for max_rows in (16, 512):
        model = FAMILIES["glm_moe_dsa"].build(topk=24)
        exact = Exact()
        with torch.no_grad(), patch(model, observer=exact, max_rows=max_rows):
            outputs.append(model(**inputs).logits)
        assert exact.rows == 2 * (70 + 52)
    assert torch.equal(*outputs)
