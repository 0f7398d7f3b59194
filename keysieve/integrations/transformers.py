"""Run the selection of a transformers DSA model through keysieve.

::

    from keysieve.integrations.transformers import patch

    with patch(model, key_format="fp8_fp32"):
        model.generate(**inputs)

Each full indexer of the model keeps its own projections, norms and RoPE; its scoring and its top-k are done by
keysieve over a paged, quantised copy of the layer's keys (:mod:`keysieve.integrations.transformers_store`). Leaving
the context, or :meth:`Patched.remove`, puts the model back exactly as it was. ``docs/transformers.md`` lists the
model classes this was tried with and those it does not fit.
"""

from __future__ import annotations

import inspect
import weakref
from types import TracebackType
from typing import Any

import torch
from torch import nn

from keysieve.checks import UnsupportedError, message, refuse
from keysieve.integrations.transformers_scores import EXPRESSION, DeferredKeys, Scoring
from keysieve.integrations.transformers_step import IndexerStep, Observer, Selector, StepSelector, part_of
from keysieve.integrations.transformers_store import LayerStore, Visibility, Work, first_written, own_keys
from keysieve.quantize import quantize_query
from keysieve.spec import MAX_NEXT_N, IndexerSpec

__all__ = ["IndexerStep", "Observer", "Patched", "PatchedIndexer", "Selector", "StepSelector", "patch"]

TRIED = (
    "AXK2Indexer",
    "DeepseekV32Indexer",
    "Dots3NoteTextIndexer",
    "GlmMoeDsaIndexer",
    "HYV4Indexer",
    "HYV4VLIndexer",
    "MistralLarge4TextIndexer",
)
"""Indexer classes of transformers that the tests run. Others that evaluate the same expression work unnamed."""

UNFIT = {
    "DeepseekV4Indexer": "it scores compressed windows of tokens, not tokens",
    "Glm5NextTextIndexer": "it scores pools of tokens and expands them",
    "MiniMaxM3VLIndexer": "it selects blocks of keys per head from the largest score in each",
    "Qwen4ExpTextQSAIndexer": "it scores compressed blocks of keys and returns a mask",
}


class _Tap:
    """Stands for the model's cache inside one indexer call: passes new keys on, hands back a stand-in for all keys."""

    def __init__(self, indexer: PatchedIndexer, cache: Any):
        self._indexer, self._cache = indexer, cache
        self.selected = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_indexer(self, keys: torch.Tensor, layer: int) -> DeferredKeys:
        """What the indexer calls with its new keys ``[batch, tokens, 128]``."""
        if self._cache is None:
            store, full, kept = self._indexer.new_store(keys), keys, 0
        else:
            store = self._indexer.store_of(self._cache, keys)
            kept = store.kept_columns(own_keys(self._cache, layer))
            start = first_written(self._cache, layer)
            full = self._cache.update_indexer(keys, layer)
            kept = kept if start is None else min(kept, start)

        def select(scoring: Scoring) -> torch.Tensor:
            self.selected = True
            view = self._indexer.owner.visibility(scoring.visible, full.shape[0])
            store.sync(full, view, kept)
            return self._indexer.select(scoring, view, store)

        return DeferredKeys(self._indexer.name, full.shape[1], select)


class PatchedIndexer:
    """One indexer module of a patched model: its spec, its stores, its forward."""

    def __init__(self, module: nn.Module, name: str, owner: Patched, key_format: str, numerics: str | None):
        self.module, self.owner = module, owner
        self.name = f"{name} ({type(module).__name__})"
        self.layer = int(getattr(module, "layer_idx", 0))
        self.spec = _spec_of(module, self.name, key_format, numerics)
        self.work = Work()
        """Keys quantised so far and stores rebuilt, over all caches; for reports and tests."""
        self._stores: weakref.WeakKeyDictionary[Any, LayerStore] = weakref.WeakKeyDictionary()
        self._had_own_forward = "forward" in vars(module)
        self._original = module.forward
        if isinstance(getattr(self._original, "__self__", None), PatchedIndexer):
            refuse(
                self.name,
                got="a module that is patched already",
                accepted="one patch of a model at a time",
                remedy="Remove the other patch first.",
            )
        self._signature = inspect.signature(self._original)
        names = [n for n in ("cache", "past_key_values") if n in self._signature.parameters]
        if not names:
            refuse(
                self.name,
                got=f"forward{self._signature}",
                accepted="an indexer whose forward takes cache= or past_key_values=",
                remedy="Only indexers that keep their keys in a transformers cache can be patched.",
            )
        self._cache_name = names[0]

    def install(self) -> None:
        """Take the module's forward over."""
        self.module.forward = self._forward

    def remove(self) -> None:
        """Put the module's forward back; nothing where it is back, or was never taken over."""
        if vars(self.module).get("forward") == (self._original if self._had_own_forward else None):
            return
        if vars(self.module).get("forward") != self._forward:
            refuse(
                self.name,
                got="a forward that something else has replaced since",
                accepted="replacements removed in the reverse order of their making",
                remedy="Undo the later replacement first.",
            )
        if self._had_own_forward:
            self.module.forward = self._original
        else:
            del self.module.forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        # Both spellings are taken whatever this version of transformers calls the argument.
        for other in ("cache", "past_key_values"):
            if other in kwargs and other != self._cache_name:
                kwargs[self._cache_name] = kwargs.pop(other)
        bound = self._signature.bind(*args, **kwargs)
        tap = _Tap(self, bound.arguments.get(self._cache_name))
        bound.arguments[self._cache_name] = tap
        with torch.no_grad():
            result = self._original(*bound.args, **bound.kwargs)
        if not tap.selected:
            got = "a forward that never took a top-k of its scores"
            raise UnsupportedError(message(self.name, got=got, accepted=EXPRESSION, remedy="Do not patch this model."))
        return result

    def new_store(self, keys: torch.Tensor) -> LayerStore:
        """An empty store for keys ``[batch, tokens, 128]``."""
        return LayerStore(self.spec, keys.shape[0], keys.device, self.work)

    def store_of(self, cache: Any, keys: torch.Tensor) -> LayerStore:
        """The store that follows ``cache``; a new one if its batch or device has changed."""
        store = self._stores.get(cache)
        if store is None or store.batch != keys.shape[0] or store.device != keys.device:
            store = self._stores[cache] = self.new_store(keys)
        return store

    def select(self, scoring: Scoring, view: Visibility, store: LayerStore) -> torch.Tensor:
        """Selected columns int32 ``[batch, tokens, k]`` for the model to scatter into its mask."""
        batch, tokens, heads, width = scoring.query.shape
        # Up to 8 tokens of a request are scored together, as rows of one request: longer prompts become several
        # requests that share pages. Batch invariance makes the choice invisible.
        next_n = min(tokens, MAX_NEXT_N)
        groups = -(-tokens // next_n)
        fill = groups * next_n - tokens

        def rows(x: torch.Tensor) -> torch.Tensor:
            padded = nn.functional.pad(x.flatten(2) if x.dim() > 2 else x[..., None], (0, 0, 0, fill))
            return padded.reshape(batch * groups * next_n, -1)

        query, q_scale = quantize_query(self.spec, rows(scoring.query).view(-1, heads, width))
        # The model's weights already carry heads**-0.5, so fold_weights, which multiplies it in, is not used.
        weights = rows(scoring.weights.float())
        weights = (weights if q_scale is None else weights * q_scale) * scoring.scale
        step = IndexerStep(
            layer=self.layer,
            spec=self.spec,
            query=query,
            weights=weights,
            cache=store.cache,
            seq_lens=rows(view.lengths).flatten(),
            index_table=store.index_table.repeat_interleave(groups, dim=0),
            longest=int(view.lengths.max()),
        )
        positions = self.owner.run(step)
        positions = positions.view(batch, groups * next_n, -1)[:, :tokens, : scoring.k]
        return self._as_columns(positions, view)

    def _as_columns(self, positions: torch.Tensor, view: Visibility) -> torch.Tensor:
        """Key positions as columns of the model's mask, with the -1 past each count made harmless."""
        empty = positions < 0
        columns = positions.long().masked_fill(empty, 0)
        if view.columns is not None:
            columns = view.columns[:, None, :].expand(-1, positions.shape[1], -1).gather(2, columns)
        if self.owner.scatters:
            # eager and sdpa scatter the ids into a mask, where -1 is an error on the CPU and undefined on a GPU.
            # Naming the row's first key again changes nothing there. A row that sees nothing names a column that
            # its own causal mask keeps out anyway.
            columns = torch.where(empty, columns[..., :1], columns)
        else:
            columns = columns.masked_fill(empty, -1)
        return columns.to(torch.int32)


class Patched:
    """A patched model: made by :func:`patch`, active until :meth:`remove` or the end of its ``with`` block.

    Attributes:
        indexers: the patched modules, in layer order; they stay here after :meth:`remove`.
    """

    def __init__(self, model: nn.Module, select: Selector, observer: Observer | None, max_rows: int):
        self._select, self._observer, self._max_rows = select, observer, max_rows
        self._config = getattr(model, "config", None)
        self._mask: tuple[torch.Tensor, int, Visibility] | None = None
        self.indexers: list[PatchedIndexer] = []
        self._active: list[PatchedIndexer] = []

    def add(self, indexer: PatchedIndexer) -> None:
        """Patch an indexer. It is known here first: whatever ends this, :meth:`remove` puts it back."""
        self.indexers.append(indexer)
        self._active.append(indexer)
        indexer.install()

    @property
    def scatters(self) -> bool:
        """Whether the model scatters the ids into a mask (eager, sdpa) rather than handing them to a kernel."""
        config = self._config
        text = getattr(config, "get_text_config", None)
        config = text() if callable(text) else config
        return getattr(config, "_attn_implementation", "eager") in ("eager", "sdpa", None)

    def visibility(self, mask: torch.Tensor, batch: int) -> Visibility:
        """:meth:`Visibility.of_mask`, worked out once per step: all layers of a step come with equal masks."""
        if self._mask is not None:
            seen, for_batch, view = self._mask
            if for_batch == batch and seen.shape == mask.shape and torch.equal(seen, mask):
                return view
        view = Visibility.of_mask(mask, batch)
        self._mask = (mask.clone(), batch, view)
        return view

    def run(self, step: IndexerStep) -> torch.Tensor:
        """Positions int32 ``[rows, topk]`` selected for ``step``, worked out at most ``max_rows`` rows at a time."""
        requests, next_n = step.index_table.shape[0], step.next_n
        size = max(self._max_rows // next_n, 1)
        parts = []
        for first in range(0, requests, size):
            part = part_of(step, slice(first, first + size), slice(first * next_n, (first + size) * next_n))
            positions, counts = self._select(part)
            if self._observer is not None:
                self._observer(part, positions, counts)
            # A selector may give its own buffers, to be overwritten by its next call.
            parts.append(positions.clone())
        return torch.cat(parts)

    def remove(self) -> None:
        """Unpatch the model. Doing it twice is no error."""
        while self._active:
            self._active[-1].remove()
            self._active.pop()

    def __enter__(self) -> Patched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def patch(
    model: nn.Module,
    *,
    key_format: str = "fp8_fp32",
    numerics: str | None = None,
    backend: str = "auto",
    max_rows: int = 512,
    select: Selector | None = None,
    observer: Observer | None = None,
) -> Patched:
    """Route the selection of every full indexer of ``model`` through keysieve, until the result is removed.

    Args:
        model: a transformers DSA model, or any module that contains its attention layers.
        key_format: the format its keys are quantised to: ``"fp8_fp32"``, ``"fp8_ue8m0"`` or ``"mxfp4"``.
        numerics: as in :class:`keysieve.IndexerSpec`.
        backend: as in :class:`keysieve.DecodeIndexer`.
        max_rows: query rows per keysieve call; longer prompts are cut into several calls with the same results.
        select: replaces the default selector, a :class:`StepSelector`; for sharded contexts and for tests.
        observer: is shown every step with what was selected for it.

    Returns:
        A :class:`Patched`, already active; usable as a context manager.

    Raises:
        KeysieveError: the model has no indexer, or its heads, head_dim or top-k are outside keysieve's limits.
        UnsupportedError: the model's indexer is of another kind; at once for those known, else at its first call.
    """
    selector = select or StepSelector(max_rows=max_rows, backend=backend)
    patched = Patched(model, selector, observer, max_rows)
    found = [(name, module) for name, module in model.named_modules() if _looks_like_indexer(name, module)]
    if not found:
        refuse(
            "model",
            got=f"{type(model).__name__} without an indexer module",
            accepted="a transformers model with DeepSeek Sparse Attention",
            remedy="See docs/transformers.md for the model classes that were tried.",
        )
    try:
        for name, module in found:
            patched.add(PatchedIndexer(module, name, patched, key_format, numerics))
    except BaseException:
        patched.remove()
        raise
    return patched


def _looks_like_indexer(name: str, module: nn.Module) -> bool:
    return name.rpartition(".")[2] == "indexer" or type(module).__name__.endswith("Indexer")


def _spec_of(module: nn.Module, name: str, key_format: str, numerics: str | None) -> IndexerSpec:
    """The module's indexer as a spec; refuses the kinds known to be something else."""
    reason = UNFIT.get(type(module).__name__)
    if reason is not None:
        raise UnsupportedError(message(name, got=reason, accepted=EXPRESSION, remedy="Do not patch this model."))
    values = {attribute: getattr(module, attribute, None) for attribute in ("n_heads", "index_topk", "head_dim")}
    missing = [attribute for attribute, value in values.items() if value is None]
    if missing:
        refuse(
            name,
            got=f"a module without {', '.join(missing)}",
            accepted="an indexer with n_heads, head_dim and index_topk",
            remedy="Only transformers' DSA indexers can be patched.",
        )
    heads, topk, head_dim = (int(str(value)) for value in values.values())
    return IndexerSpec(heads=heads, topk=topk, head_dim=head_dim, key_format=key_format, numerics=numerics)
