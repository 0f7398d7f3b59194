"""Selects with keysieve, holds each selection to the independent verifier, and keeps what the summary needs."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from keysieve.api import DecodeIndexer, score, topk
from keysieve.demo import verify
from keysieve.inputs import Selection
from keysieve.integrations.transformers import IndexerStep
from keysieve.spec import PAGE


@dataclass
class Totals:
    """Counts and seconds of a run.

    Attributes:
        rows: query rows selected for, over all layers.
        scored: (row, key) pairs whose logit was made.
        selected: keys selected.
        cut_rows: rows where equal keys stood on both sides of the cut.
        most_equal: the most keys of one row that had its threshold's value.
        score_seconds: in :func:`keysieve.score`.
        select_seconds: in :func:`keysieve.topk`.
        step_seconds: in :class:`keysieve.DecodeIndexer`, which does both and gives physical rows.
        verified: selections compared with the independent one.
        mismatches: of those, how many differed; must stay 0.
        attended: (layer, query) pairs whose attention weights were compared with the selection.
        strays: of those, how many attended to a key that was not selected; must stay 0.
    """

    rows: int = 0
    scored: int = 0
    selected: int = 0
    cut_rows: int = 0
    most_equal: int = 0
    score_seconds: float = 0.0
    select_seconds: float = 0.0
    step_seconds: float = 0.0
    verified: int = 0
    mismatches: int = 0
    attended: int = 0
    strays: int = 0

    @property
    def clean(self) -> bool:
        """Whether every selection was right and every attention kept to it."""
        return self.verified > 0 and self.attended > 0 and self.mismatches == 0 and self.strays == 0


@dataclass
class LayerTrace:
    """What one layer did in the decoding steps.

    Attributes:
        chosen: one array of selected positions per step.
        ties: per step with more keys than ``topk``, where its selection was cut.
        logits: the newest row of logits, float32 ``[keys]``.
        threshold: the newest cut, or None while everything is selected.
    """

    chosen: list[verify.Ints] = field(default_factory=list)
    ties: list[verify.Tie] = field(default_factory=list)
    logits: verify.Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    threshold: verify.Tie | None = None


class Recorder:
    """The selector that the demo patches the model with.

    Args:
        max_rows: query rows of one call at most.
        context: keys at most.
        seed: of the attention cache's block placement, which is a random permutation.
    """

    def __init__(self, *, max_rows: int, context: int, seed: int = 0):
        self.totals = Totals()
        self.layers: dict[int, LayerTrace] = {}
        self.decoding = False
        self.digest = hashlib.sha256()
        """Of all selected positions, in order: equal for equal selections, however they were made."""
        self._max_rows, self._context = max_rows, context
        self._indexers: dict[int, DecodeIndexer] = {}
        # Where the attention kernel would find its keys: blocks of 64 tokens, scattered over a pool of twice the size.
        blocks = -(-context // PAGE)
        order = np.random.default_rng(seed).permutation(2 * blocks)[:blocks]
        self._kv_table = torch.from_numpy(order.astype(np.int32))
        self._mask: npt.NDArray[np.bool_] | None = None

    # --- selecting -------------------------------------------------------------------------------------------------

    def __call__(self, step: IndexerStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Select: one call for physical rows, and the two halves again, apart, to time them and to see the logits."""
        k = step.spec.topk
        begun = time.perf_counter()
        out = self.step(step)
        stepped = time.perf_counter()
        lens = step.seq_lens
        logits = score(
            step.spec, step.query, step.cache, step.weights, lens, step.index_table, max_len=max(step.longest, 1)
        )
        scored = time.perf_counter()
        positions, counts = topk(logits, lens, k)
        selected = time.perf_counter()
        totals = self.totals
        totals.step_seconds += stepped - begun
        totals.score_seconds += scored - stepped
        totals.select_seconds += selected - scored
        assert out.positions is not None
        self.digest.update(out.positions.numpy().tobytes())
        self._verify(step, out, positions, counts)
        return out.positions, counts

    def step(self, step: IndexerStep) -> Selection:
        """The call that an engine would make: physical rows, counts and positions."""
        return self._indexer(step)(
            step.query,
            step.cache,
            step.weights,
            step.seq_lens,
            step.index_table,
            kv_table=self._kv_table.expand(step.index_table.shape[0], -1),
            kv_page=PAGE,
            positions=True,
        )

    def _indexer(self, step: IndexerStep) -> DecodeIndexer:
        if step.next_n not in self._indexers:
            self._indexers[step.next_n] = DecodeIndexer(
                step.spec,
                max_rows=max(self._max_rows // step.next_n, 1) * step.next_n,
                max_context=self._context,
                next_n=step.next_n,
                device="cpu",
            )
        return self._indexers[step.next_n]

    # --- verifying -------------------------------------------------------------------------------------------------

    def _verify(self, step: IndexerStep, out: Any, positions: torch.Tensor, counts: torch.Tensor) -> None:
        """Hold all rows of a step to the independent selection, and remember them."""
        query, words = step.query if isinstance(step.query, tuple) else (step.query, None)
        codes = verify.decode_query(query.view(torch.uint8).numpy(), None if words is None else words.numpy())
        weights = step.weights.float().numpy()
        pool = verify.Pool(step.cache.data.numpy(), step.spec.key_format)
        lens, tables, n = step.seq_lens.tolist(), step.index_table.numpy().astype(np.int64), step.next_n
        given = (out.positions.numpy(), out.counts.tolist(), out.rows.numpy(), positions.numpy(), counts.tolist())
        # One text is read, so all requests of a step are groups of its rows over the same pages: decode those once.
        assert (tables == tables[0]).all()
        keys, scales = pool.keys(tables[0, : -(-step.longest // PAGE)], step.longest)
        mask = np.zeros((len(lens), step.longest), bool)
        for first in range(0, len(lens), n):
            rows = slice(first, first + n)
            here = max(lens[rows])
            values = verify.logits(codes[rows], weights[rows], keys[:here], scales[:here])
            for row, length in enumerate(lens[rows], start=first):
                if length > 0:
                    logits = values[row - first, :length]
                    chosen = verify.best(logits, step.spec.topk)
                    self._compare(chosen, given, row)
                    self._count(step, logits, chosen)
                    mask[row, chosen] = True
        self._mask = mask

    def _compare(self, chosen: verify.Ints, given: tuple[Any, ...], row: int) -> None:
        """One row: positions and count of both ways to select, and the physical rows, must be exactly these."""
        out_positions, out_counts, out_rows, positions, counts = given
        table = self._kv_table.numpy()
        want = np.full(positions.shape[1], -1, np.int32)
        want[: len(chosen)] = chosen
        placed = np.full(positions.shape[1], -1, np.int32)
        placed[: len(chosen)] = table[chosen // PAGE] * PAGE + chosen % PAGE
        same = out_counts[row] == counts[row] == len(chosen)
        same = same and np.array_equal(out_positions[row], want) and np.array_equal(positions[row], want)
        same = same and np.array_equal(out_rows[row], placed)
        self.totals.verified += 1
        self.totals.mismatches += not same

    def _count(self, step: IndexerStep, row: verify.Floats, chosen: verify.Ints) -> None:
        totals = self.totals
        totals.rows += 1
        totals.scored += len(row)
        totals.selected += len(chosen)
        trace = self.layers.setdefault(step.layer, LayerTrace())
        trace.logits, trace.threshold = row, None
        if len(row) > step.spec.topk:
            tie = trace.threshold = verify.tie_at_threshold(row, chosen)
            totals.cut_rows += tie.cut
            totals.most_equal = max(totals.most_equal, tie.equal)
            if self.decoding:
                trace.ties.append(tie)
        if self.decoding:
            trace.chosen.append(chosen)

    # --- attention -------------------------------------------------------------------------------------------------

    def watch_attention(self, model: nn.Module) -> list[Any]:
        """Hooks that compare every attention weight with the selection; also on layers that reuse another's."""
        found = [module for name, module in model.named_modules() if name.endswith(".self_attn")]
        return [module.register_forward_hook(self._attended) for module in found]

    def _attended(self, _module: nn.Module, _args: object, output: tuple[Any, ...]) -> None:
        weights: torch.Tensor = output[1]
        assert self._mask is not None
        used = (weights[0] != 0).any(dim=0).numpy()
        allowed = self._mask[: used.shape[0], : used.shape[1]]
        self.totals.attended += used.shape[0]
        self.totals.strays += int((used & ~allowed).any(axis=1).sum())
