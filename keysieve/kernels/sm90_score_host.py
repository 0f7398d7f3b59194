"""From tensors to a launch of a scorer. Nothing is checked twice: callers have checked shapes and dtypes.

`launch` is a `keysieve.launch.Launcher` made with `sm90_score_config.KERNEL` and the configuration (or anything that
takes the entry's integers without the stream). What only the scorers need, alignment and strides, is checked here.
`score_words_host` calls these functions for scorers that take the queries' scale words as well: one address in front.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from keysieve.checks import describe, refuse
from keysieve.kernels.sm90_score_config import KEPT_ROWS, PITCHED_TOPS
from keysieve.spec import FORMATS, PAGE, TILE

Launch = Callable[..., None]

MOST_BLOCKS = 1023
"""Multiprocessors that a scorer is launched for. With two blocks on each, `schedule_homes.reciprocal` stays exact."""


class Config(Protocol):
    """What is asked of a scorer's configuration."""

    @property
    def key_format(self) -> str: ...
    @property
    def next_n(self) -> int: ...
    @property
    def layout(self) -> str: ...


def score_compact(
    launch: Launch,
    config: Config,
    query: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    index_table: torch.Tensor,
    *,
    topk: int,
    max_context: int,
    logits: torch.Tensor,
    tops: torch.Tensor,
    starts: torch.Tensor,
    flags: torch.Tensor,
    blocks: int,
    chained: bool = False,
    words: torch.Tensor | None = None,
    kept: int = KEPT_ROWS,
) -> None:
    """Score every request that has a row longer than `topk` into the compact layout (topk 0: every request).

    query: E4M3 (or its bytes) [rows, heads, 128], contiguous. cache: uint8 [pages, 64, 132], any page stride that is a
    multiple of 16. weights: [rows, heads], contiguous, of the configuration's dtype. seq_lens: int32 [rows],
    contiguous. index_table: int32 [requests, width], any row stride. logits: BF16, `tops` uint16 or int16 of an eighth
    its elements. starts: int32 [requests + 1], filled with the tiles before each request. flags: the int32 flag word,
    bits as in `schedule`. blocks: the device's SMs (any number gives the same bits). chained: launch as a programmatic
    dependent of the kernel before. words: none; see `score_words_host`. kept: tile rows whose results L2 is asked to
    keep until they are read (the results do not depend on it).
    """
    del words
    _require_layout(config, "compact")
    _require_blocks(blocks)
    requests = index_table.shape[0]
    if requests == 0:
        return
    capacity = min(logits.numel(), tops.numel() * 8) // (TILE * config.next_n)
    common = _common(config, query, cache, weights, seq_lens, index_table, max_context)
    pointers, strides, sizes = common
    launch(
        *pointers,
        logits.data_ptr(),
        tops.data_ptr(),
        starts.data_ptr(),
        flags.data_ptr(),
        *strides,
        kept,
        *sizes,
        topk,
        min(capacity, 2**30 - 1),
        blocks,
        int(chained),
    )


def score_pitched(
    launch: Launch,
    config: Config,
    query: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    index_table: torch.Tensor,
    *,
    max_context: int,
    logits: torch.Tensor,
    flags: torch.Tensor,
    blocks: int,
    chained: bool = False,
    words: torch.Tensor | None = None,
    sharding: int = 0,
    tops: torch.Tensor | None = None,
) -> None:
    """Score every request into BF16 `logits` [rows, >= longest usable length], row t at `t * logits.stride(0)`.

    The row stride is the pitch. Lengths beyond `max_context` make a row empty, so `max_context` is at most the pitch.
    sharding: `sharding_word.sharding_word` where lengths are global and the cache is one context-parallel rank's; the
    limits are then local. tops: uint16 or int16 [rows, pitch / 8], contiguous, for the maxima of each 8 keys, if the
    configuration's layout has them. Other arguments as in `score_compact`; nothing is written past a row's length.
    """
    del words
    _require_layout(config, "pitched" if tops is None else PITCHED_TOPS)
    _require_blocks(blocks)
    requests = index_table.shape[0]
    if requests == 0:
        return
    pitch = logits.stride(0) if logits.shape[0] > 1 else logits.shape[1]
    pointers, strides, sizes = _common(config, query, cache, weights, seq_lens, index_table, min(max_context, pitch))
    # The sharding is in the place of compact maxima, and pitched ones in that of the tiles before each request.
    outputs = (logits.data_ptr(), sharding, 0 if tops is None else tops.data_ptr(), flags.data_ptr())
    launch(*pointers, *outputs, *strides, pitch, *sizes, 0, 2**30 - 1, blocks, chained)


def _require_blocks(blocks: int) -> None:
    if not 0 < blocks <= MOST_BLOCKS:
        raise ValueError(f"blocks: {blocks} multiprocessors; the scorers' home tiles are exact for 1 to {MOST_BLOCKS}")


def _require_layout(config: Config, layout: str) -> None:
    if config.layout != layout:
        remedy = "Use the kernel that was compiled for this layout."
        refuse("config", got=f"layout {config.layout!r}", accepted=repr(layout), remedy=remedy)


def _common(
    config: Config,
    query: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    index_table: torch.Tensor,
    max_context: int,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(addresses of the inputs, page and table strides, pool pages, requests and the longest usable length)."""
    for name, tensor in (("query", query), ("weights", weights), ("seq_lens", seq_lens)):
        if not tensor.is_contiguous():
            refuse(name, got=describe(tensor), accepted="a contiguous tensor", remedy="Call .contiguous() on it.")
    if query.data_ptr() % 16 or cache.data_ptr() % 16:
        name, tensor = ("query", query) if query.data_ptr() % 16 else ("cache", cache)
        refuse(
            name, got=f"address {tensor.data_ptr():#x}", accepted="16-byte alignment", remedy="Copy or re-allocate it."
        )
    page_bytes = FORMATS[config.key_format].page_bytes
    page_stride = cache.stride(0) if cache.shape[0] > 1 else page_bytes
    if page_stride % 16 or page_stride < page_bytes:
        refuse(
            "cache",
            got=f"page stride {page_stride} bytes",
            accepted=f"a multiple of 16, at least {page_bytes}",
            remedy="Pad pages.",
        )
    requests, width = index_table.shape
    table_stride = index_table.stride(0) if requests > 1 else width
    limit = min(max_context, width * PAGE)
    pointers = (cache.data_ptr(), query.data_ptr(), weights.data_ptr(), seq_lens.data_ptr(), index_table.data_ptr())
    return pointers, (page_stride, table_stride), (cache.shape[0], requests, limit)
