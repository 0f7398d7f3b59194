"""One selection of a patched model as data, and what selects by default.

A step is what :class:`keysieve.DecodeIndexer` is called with; a :data:`Selector` turns it into key positions. The
seam is public so that a sharded context, or a test, can select in another way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from keysieve.api import DecodeIndexer
from keysieve.cache import IndexCache
from keysieve.spec import IndexerSpec

Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class IndexerStep:
    """Everything one selection starts from: the arguments of a :class:`keysieve.DecodeIndexer` call.

    Attributes:
        layer: the model's layer number.
        spec: the layer's indexer.
        query: quantised query of ``rows`` rows, as :func:`keysieve.quantize_query` gives it.
        weights: float32 ``[rows, heads]`` with the query scales and the softmax scale folded in.
        cache: the layer's paged keys.
        seq_lens: int32 ``[rows]``: keys each row sees; 0 for rows that only fill up the last request.
        index_table: int32 ``[requests, pages]``; ``rows // requests`` rows are scored together.
        longest: the largest of ``seq_lens``.
    """

    layer: int
    spec: IndexerSpec
    query: Query
    weights: torch.Tensor
    cache: IndexCache
    seq_lens: torch.Tensor
    index_table: torch.Tensor
    longest: int

    @property
    def next_n(self) -> int:
        """Rows per request."""
        return self.seq_lens.shape[0] // self.index_table.shape[0]


Selector = Callable[[IndexerStep], tuple[torch.Tensor, torch.Tensor]]
"""Gives key positions int32 ``[rows, topk]`` (ascending, -1 past the count) and counts int32 ``[rows]``."""

Observer = Callable[[IndexerStep, torch.Tensor, torch.Tensor], None]
"""Is shown each step with the positions and counts selected for it."""


class StepSelector:
    """The default selector: one :class:`keysieve.DecodeIndexer` per number of rows per request, grown on demand.

    An engine allocates once for its largest context; here nobody says how long a text will get, so the indexer is
    rebuilt with twice the room whenever a context outgrows it.
    """

    def __init__(self, *, max_rows: int, backend: str, first_context: int = 4096):
        self.max_rows, self.backend, self._context = max_rows, backend, first_context
        self._indexers: dict[tuple[IndexerSpec, int, torch.device], DecodeIndexer] = {}

    def __call__(self, step: IndexerStep) -> tuple[torch.Tensor, torch.Tensor]:
        if step.longest > self._context:
            self._context = max(step.longest, 2 * self._context)
            self._indexers.clear()
        device = step.weights.device
        key = (step.spec, step.next_n, device)
        if key not in self._indexers:
            rows = max(self.max_rows // step.next_n, 1) * step.next_n
            self._indexers[key] = DecodeIndexer(
                step.spec,
                max_rows=rows,
                max_context=self._context,
                next_n=step.next_n,
                device=device,
                backend=self.backend,
            )
        out = self._indexers[key](step.query, step.cache, step.weights, step.seq_lens, step.index_table)
        return out.rows, out.counts


def part_of(step: IndexerStep, requests: slice, rows: slice) -> IndexerStep:
    """Some requests of a step and their rows."""
    query = step.query
    cut: Query = (query[0][rows], query[1][rows]) if isinstance(query, tuple) else query[rows]
    return replace(
        step,
        query=cut,
        weights=step.weights[rows],
        seq_lens=step.seq_lens[rows],
        index_table=step.index_table[requests],
    )
