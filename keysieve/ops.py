"""torch.library operators: what ``torch.compile`` sees of keysieve.

All of them write into buffers of the caller (their fakes have nothing to compute) and return nothing, so a compiled
graph keeps each call as one opaque node. The eager path does not go through here: it saves the dispatcher's cost.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from keysieve.backends import load, name_for, resolve
from keysieve.cache import IndexCache
from keysieve.checks import refuse
from keysieve.inputs import Placement, Step
from keysieve.reference.topk import TopkCall
from keysieve.spec import IndexerSpec

_INDEXERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
_next_handle = iter(range(1, 1 << 62)).__next__


def register(indexer: Any) -> int:
    """A handle under which a compiled graph finds ``indexer`` again; it does not keep it alive."""
    handle = _next_handle()
    _INDEXERS[handle] = indexer
    return handle


def flat_spec(spec: IndexerSpec) -> tuple[int, int, str, str]:
    """The fields of a spec as an operator takes them: heads, topk, key_format, numerics ("" for the default)."""
    return spec.heads, spec.topk, spec.key_format, spec.numerics or ""


def _spec_of(heads: int, topk: int, key_format: str, numerics: str) -> IndexerSpec:
    return IndexerSpec(heads, topk, key_format, numerics=numerics or None)


@torch.library.custom_op("keysieve::decode_step", mutates_args=("rows", "counts", "positions"))
def decode_step(
    handle: int,
    codes: torch.Tensor,
    words: torch.Tensor | None,
    data: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    index_table: torch.Tensor,
    kv_table: torch.Tensor | None,
    kv_page: int | None,
    block_rows: int | None,
    site: int,
    rows: torch.Tensor,
    counts: torch.Tensor,
    positions: torch.Tensor | None,
) -> None:
    """``DecodeIndexer.__call__`` of the indexer registered as ``handle``."""
    indexer = _INDEXERS.get(handle)
    if indexer is None:
        remedy = "Keep the DecodeIndexer alive as long as what was compiled with it."
        refuse("indexer", got="one that no longer exists", accepted="a live DecodeIndexer", remedy=remedy)
    indexer(
        codes if words is None else (codes, words),
        IndexCache(indexer.spec, data),
        weights,
        seq_lens,
        index_table,
        kv_table=kv_table,
        kv_page=kv_page,
        block_rows=block_rows,
        positions=False if positions is None else positions,
        out=rows,
        counts=counts,
        site=site,
    )


@torch.library.custom_op("keysieve::score", mutates_args=("logits",))
def score(
    codes: torch.Tensor,
    words: torch.Tensor | None,
    data: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    index_table: torch.Tensor,
    next_n: int,
    heads: int,
    topk: int,
    key_format: str,
    numerics: str,
    logits: torch.Tensor,
) -> None:
    """``keysieve.score`` of checked inputs into ``logits [rows, max_len]``."""
    spec = _spec_of(heads, topk, key_format, numerics)
    step = Step(spec, codes, words, IndexCache(spec, data), weights, seq_lens, index_table, next_n)
    resolve(spec, next_n=next_n, device=codes.device).score(step, logits.shape[1], logits)


@torch.library.custom_op("keysieve::topk", mutates_args=("chosen", "counts"))
def topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    kv_table: torch.Tensor | None,
    row_request: torch.Tensor | None,
    kv_page: int,
    block_rows: int,
    chosen: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """``keysieve.topk`` of checked inputs into ``chosen [rows, k]`` and ``counts [rows]``."""
    call = TopkCall(logits, lengths, chosen.shape[1], Placement(kv_table, kv_page, block_rows), row_request)
    load(name_for("auto", logits.device)).topk(call, chosen, counts)


for _op in (decode_step, score, topk):
    _op.register_fake(lambda *_args, **_kwargs: None)
