"""An observer that holds every selection a patched model makes to an exact, independent one."""

from __future__ import annotations

import numpy as np
import torch

from keysieve.demo import verify
from keysieve.integrations.transformers import IndexerStep


def exact_rows(step: IndexerStep) -> tuple[list[verify.Ints], list[verify.Floats]]:
    """For every row of a step, the positions a stable sort selects from the bytes, and the row's logits."""
    query, words = step.query if isinstance(step.query, tuple) else (step.query, None)
    codes = verify.decode_query(query.view(torch.uint8).numpy(), None if words is None else words.numpy())
    weights, tables = step.weights.numpy(), step.index_table.numpy().astype(np.int64)
    pool = verify.Pool(step.cache.data.numpy(), step.spec.key_format)
    lens, n = step.seq_lens.tolist(), step.next_n
    chosen, logits = [], []
    for row, length in enumerate(lens):
        keys, scales = pool.keys(tables[row // n, : -(-length // 64)], length)
        values = verify.logits(codes[row : row + 1], weights[row : row + 1], keys, scales)[0]
        chosen.append(verify.best(values, step.spec.topk))
        logits.append(values)
    return chosen, logits


class Exact:
    """Checks as it observes; keeps counts, so that a test can tell that it was not vacuous.

    Attributes:
        rows: rows with keys that were checked.
        selective: of those, rows with more keys than ``topk``.
        cut: of those, rows whose cut went through equal keys.
        zero_cut: of those, rows where the equal keys had a logit of exactly zero.
        next_n: rows per request that occurred.
        steps: the steps, if asked to keep them.
    """

    def __init__(self, *, keep: bool = False):
        self.rows = self.selective = self.cut = self.zero_cut = 0
        self.next_n: set[int] = set()
        self.layers: set[int] = set()
        self.steps: list[tuple[IndexerStep, torch.Tensor]] = []
        self._keep = keep

    def __call__(self, step: IndexerStep, positions: torch.Tensor, counts: torch.Tensor) -> None:
        chosen, logits = exact_rows(step)
        want = np.full(positions.shape, -1, np.int32)
        for row, found in enumerate(chosen):
            want[row, : len(found)] = found
            self._count(step, found, logits[row])
        assert counts.tolist() == [len(found) for found in chosen]
        np.testing.assert_array_equal(positions.numpy(), want)
        self.next_n.add(step.next_n)
        self.layers.add(step.layer)
        if self._keep:
            self.steps.append((step, positions.clone()))

    def _count(self, step: IndexerStep, found: verify.Ints, row: verify.Floats) -> None:
        self.rows += len(row) > 0
        if len(row) > step.spec.topk:
            self.selective += 1
            tie = verify.tie_at_threshold(row, found)
            self.cut += tie.cut
            self.zero_cut += tie.cut and tie.value == 0
