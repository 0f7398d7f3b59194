"""A paged index cache that follows a transformers cache layer, and the view of an attention mask as lengths.

transformers keeps an indexer's keys as ``[batch, columns, 128]`` in the model's dtype, pads inside them, and lets
generation crop, reorder and repeat them. keysieve wants quantised pages and, per row, a number of keys. Two small
classes bridge that: :class:`Visibility` turns a mask into lengths over the columns that hold real tokens, and
:class:`LayerStore` quantises each such column once and notices when the columns it has seen are no longer the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from keysieve.cache import IndexCache
from keysieve.checks import refuse
from keysieve.spec import PAGE, IndexerSpec


@dataclass(frozen=True)
class Visibility:
    """What the queries of one call may see, in keysieve's terms.

    Attributes:
        alive: bool ``[batch, columns]``: columns that some query of this call sees, that is, real tokens.
        rank: int64 ``[batch, columns]``: an alive column's key position plus 1; 0 elsewhere.
        lengths: int32 ``[batch, tokens]``: keys each query sees: the first so many alive columns of its request.
        columns: int64 ``[batch, keys]``, key position to column, or None where the two are equal (no padding).
    """

    alive: torch.Tensor
    rank: torch.Tensor
    lengths: torch.Tensor
    columns: torch.Tensor | None

    @classmethod
    def of_mask(cls, visible: torch.Tensor, batch: int) -> Visibility:
        """Read a bool mask ``[batch or 1, tokens, columns]``.

        Raises:
            KeysieveError: a query sees something other than the first keys of its request (a sliding window, packed
                sequences, a tree of drafts): such masks are not lengths.
        """
        visible = visible.expand(batch, -1, -1)
        alive = visible.any(dim=1)
        rank = alive.long().cumsum(-1) * alive
        lengths = visible.sum(-1, dtype=torch.int32)
        prefix = alive[:, None, :] & (rank[:, None, :] <= lengths[..., None])
        if not torch.equal(prefix, visible):
            refuse(
                "attention_mask",
                got="a mask in which some query does not see exactly the first keys of its request",
                accepted="causal masks, with padding on either side",
                remedy="Run packed, tree-shaped or sliding-window batches without keysieve, or as separate requests.",
            )
        positions = torch.arange(alive.shape[1], device=alive.device)
        if torch.equal(rank, (positions + 1) * alive):
            return cls(alive, rank, lengths, None)
        longest = int(alive.sum(-1).max())
        # A stable sort of "not alive" puts the alive columns first and keeps their order.
        columns = torch.sort((~alive).to(torch.uint8), dim=-1, stable=True).indices[:, :longest]
        return cls(alive, rank, lengths, columns)


@dataclass
class Work:
    """What following the model's caches took.

    Attributes:
        appended: keys quantised, those of rebuilds included.
        rebuilds: times a store was written anew because the model's keys had changed under it.
    """

    appended: int = 0
    rebuilds: int = 0


class LayerStore:
    """The quantised keys of one indexer layer for one transformers cache: pages, their table, and what they mirror.

    Page ``p`` of request ``b`` is page id ``p * batch + b``, so the pool grows for all requests without renumbering.
    """

    def __init__(self, spec: IndexerSpec, batch: int, device: torch.device, work: Work):
        self.spec, self.batch, self.device = spec, batch, device
        self.pages_per_request = 0
        self.cache = IndexCache.empty(spec, pages=batch, device=device)
        self.index_table = torch.empty((batch, 0), dtype=torch.int32, device=device)
        self.work = work
        self._rank: torch.Tensor | None = None
        self._source: torch.Tensor | None = None
        self._version = -1

    def kept_columns(self, current: torch.Tensor | None) -> int:
        """Columns of the model's own key tensor, before its next update, whose keys are still what was mirrored.

        ``current`` must be the very tensor that the last update returned, unwritten since, or a view of its front
        (a crop). Anything else, a reordered or repeated batch for example, keeps nothing: 0.
        """
        source = self._source
        if source is None or current is None or current.is_inference() or current._version != self._version:
            return 0
        # The source is held, so its memory cannot have been given to another tensor of the same address.
        same = current.data_ptr() == source.data_ptr() and current.stride() == source.stride()
        same = same and current.dtype == source.dtype and current.shape[0] == source.shape[0]
        return min(current.shape[1], source.shape[1]) if same else 0

    def sync(self, keys: torch.Tensor, view: Visibility, kept: int) -> None:
        """Quantise the alive columns of ``keys`` ``[batch, columns, 128]`` that are not stored yet.

        Args:
            keys: the model's keys after its update.
            view: which columns are alive.
            kept: columns at the front that have not changed since the last call: those below the first one that the
                update wrote, and not more than :meth:`kept_columns` allows.
        """
        stored = torch.zeros_like(view.rank)
        if self._rank is not None and kept > 0:
            width = min(kept, self._rank.shape[1], stored.shape[1])
            stored[:, :width] = self._rank[:, :width]
        if not torch.equal(torch.where(stored > 0, view.rank, 0), stored):
            # Padding has moved, so positions have: everything is written anew.
            stored.zero_()
            self.work.rebuilds += 1
        elif self._rank is not None and kept == 0:
            self.work.rebuilds += 1
        fresh = view.alive & (stored == 0)
        request, column = fresh.nonzero(as_tuple=True)
        position = view.rank[request, column] - 1
        self._grow(int(view.rank.max()))
        page = position // PAGE * self.batch + request
        # float() loses nothing and lets float16 models in, whose keys the cache would not take as they are.
        self.cache.append(keys[request, column].float(), page * PAGE + position % PAGE)
        self.work.appended += int(request.numel())
        self._rank = view.rank
        self._source = keys
        self._version = -1 if keys.is_inference() else keys._version

    def _grow(self, longest: int) -> None:
        """Room for ``longest`` keys per request: the pool doubles, pages keep their ids."""
        needed = max(1, -(-longest // PAGE))
        if needed <= self.pages_per_request:
            return
        pages = max(needed, 2 * self.pages_per_request)
        grown = IndexCache.empty(self.spec, pages=pages * self.batch, device=self.device)
        old = self.pages_per_request * self.batch
        grown.data[:old] = self.cache.data[:old]
        ids = torch.arange(pages, dtype=torch.int32, device=self.device) * self.batch
        table = ids + torch.arange(self.batch, dtype=torch.int32, device=self.device)[:, None]
        # All at once, with no call in between: an interrupt would leave a table that is too narrow for good.
        self.cache, self.index_table, self.pages_per_request = grown, table, pages


def own_keys(cache: Any, layer: int) -> torch.Tensor | None:
    """The indexer keys a transformers cache holds for ``layer`` just now, or None where they cannot be looked at."""
    layers = getattr(cache, "layers", None)
    if layers is None or layer >= len(layers):
        return None
    keys = getattr(layers[layer], "indexer_keys", None)
    return keys if isinstance(keys, torch.Tensor) else None


def first_written(cache: Any, layer: int) -> int | None:
    """The column that the next update of ``layer`` writes first, or None if keys are appended at the end."""
    layers = getattr(cache, "layers", None)
    if layers is None or layer >= len(layers):
        return None
    length = getattr(layers[layer], "indexer_cumulative_length", None)
    return None if length is None else int(length)
