"""The public functions: checks, plan, launch. ``DecodeIndexer`` is in :mod:`keysieve.indexer`.

Every call runs in the same order: tensors are checked, what will run is known from the plan, and only then is anything
written. A refused call leaves outputs and caches as they were.
"""

from __future__ import annotations

from typing import Any

import torch

from keysieve import ops
from keysieve.backends import load, name_for, resolve
from keysieve.checks import refuse
from keysieve.indexer import DecodeIndexer
from keysieve.inputs import Query, check_apart, check_output, check_step
from keysieve.reference import merge as _merge
from keysieve.reference.local_topk import check_local_topk
from keysieve.reference.local_topk import local_topk as local_topk_reference
from keysieve.reference.merge import Merged
from keysieve.reference.score import check_max_len
from keysieve.reference.topk import check_topk
from keysieve.spec import IndexerSpec
from keysieve.workspace import workspace_bytes

__all__ = ["DecodeIndexer", "local_topk", "merge", "score", "topk", "workspace_bytes"]


def score(
    spec: IndexerSpec,
    query: Query,
    cache: Any,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    index_table: torch.Tensor,
    max_len: int | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The indexer's logits of every row over its whole context. Every row is scored, however short.

    Args:
        spec: the model's indexer.
        query: E4M3 ``[rows, heads, 128]`` (``torch.float8_e4m3fn``, or its bytes as uint8); MXFP4: a pair of E2M1
            bytes uint8 ``[rows, heads, 64]`` and UE8M0 scale words int32 ``[rows, heads]``.
        cache: the IndexCache, of the spec's format.
        weights: float32 or bfloat16 ``[rows, heads]``, with all other factors folded in (:func:`fold_weights`).
        seq_lens: int32 ``[rows]`` or ``[requests, next_n]``: keys that a row sees; 0 or less is an empty row.
        index_table: int32 ``[requests, columns]``, page ids; columns past the last needed one are not read. With 2-D
            lengths it may have one row per query row, of which each request's first is used.
        max_len: width of the result, in keys. Without it the lengths are read (a synchronisation on a GPU, refused
            while a CUDA graph is captured).
        out: a bfloat16 ``[rows, max_len]`` buffer of unit inner stride to write into.

    Returns:
        bfloat16 ``[rows, max_len]``: -inf past a row's length. A page id outside the cache gives the canonical NaN; a
        length beyond the table or ``max_len`` leaves its row empty; both are reported, on the CPU by a
        DeviceFaultWarning.

    Raises:
        KeysieveError: an argument of the wrong dtype, shape or device. Nothing was written.
        UnsupportedError: no backend runs this on the tensors' device.
    """
    step = check_step(spec, query, cache, weights, seq_lens, index_table)
    width = check_max_len(max_len)
    compiled = torch.compiler.is_compiling()  # then the operator asks when it runs: a device's answers are not traced
    if not compiled:
        backend = resolve(spec, next_n=step.next_n, device=step.codes.device, cache=cache)
    if out is not None:
        if width is None:
            refuse("max_len", got=None, accepted="an int when out is given", remedy="Pass out.shape[1].")
        check_output("out", out, (step.rows, width), step.codes.device, torch.bfloat16)
    if not compiled:
        return backend.score(step, width, out)
    if width is None:
        refuse("max_len", got=None, accepted="an int under torch.compile", remedy="Pass the width of the result.")
    logits = step.weights.new_empty((step.rows, width), dtype=torch.bfloat16) if out is None else out
    s = step
    ops.score(
        s.codes, s.words, s.cache.data, s.weights, s.seq_lens, s.index_table, s.next_n, *ops.flat_spec(spec), logits
    )
    return logits


def topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    kv_table: torch.Tensor | None = None,
    kv_page: int | None = None,
    block_rows: int | None = None,
    row_request: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact top-k of anyone's BF16 rows: the first by (key16 descending, position ascending).

    -0 counts as +0 and every NaN as the canonical one, which ranks below -inf.

    Args:
        logits: bfloat16 ``[rows, width]``, any row stride, unit inner stride.
        lengths: int32 ``[rows]``: keys of a row; what lies past it is never read. 0 or less is an empty row.
        k: keys to select, 1..4096.
        kv_table: int32 ``[requests, blocks]``, any row stride. With it physical rows are returned. Block ids are not
            checked; ``id * block_rows`` has to fit 32 bits.
        kv_page: tokens per block of the attention cache, a power of two; default 64.
        block_rows: rows a block spans in the cache view; default ``kv_page``.
        row_request: int32 ``[rows]``: the KV table row of every row; default ``row // (rows / requests)``.
        out, counts: int32 buffers ``[rows, k]`` (any row stride) and ``[rows]`` to write into.

    Returns:
        ``(positions or physical rows int32 [rows, k], counts int32 [rows])``: ascending in position, then -1. A
        length beyond ``width`` or the KV table leaves its row empty and is reported.

    Raises:
        KeysieveError: an argument of the wrong dtype, shape or device. Nothing was written.
        UnsupportedError: no backend serves the tensors' device.
    """
    call = check_topk(logits, lengths, k, kv_table, kv_page, block_rows, row_request)
    rows, device = logits.shape[0], logits.device
    compiled = torch.compiler.is_compiling()  # as in score
    if not compiled:
        backend = load(name_for("auto", device))
    if out is not None:
        check_output("out", out, (rows, k), device)
    if counts is not None:
        check_output("counts", counts, (rows,), device)
    check_apart(out=out, counts=counts)
    if not compiled:
        return backend.topk(call, out, counts)
    chosen = lengths.new_empty((rows, k), dtype=torch.int32) if out is None else out
    number = lengths.new_empty((rows,), dtype=torch.int32) if counts is None else counts
    p = call.place
    ops.topk(call.logits, call.lengths, p.kv_table, call.owner, p.kv_page, p.block_rows, chosen, number)
    return chosen, number


def local_topk(
    logits: torch.Tensor, local_lens: torch.Tensor, n: int, planes: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's first ``min(n, local length)`` keys by (key16 descending, local index ascending), as candidate rows.

    A candidate row is what context-parallel ranks send each other: int32 ``[n + planes * ceil(n / 32)]``. Word j < n is
    ``key16 << 16 | (0xFFFF - (l & 0xFFFF))`` for local index l, entries in ascending local index, or 0 when empty; bit
    ``j % 32`` of word ``n + p * ceil(n / 32) + j // 32`` is bit ``16 + p`` of entry j's local index.

    Args:
        logits: bfloat16 ``[rows, width]``, any row stride, unit inner stride; this rank's keys by local index.
        local_lens: int32 or int64 ``[rows]`` or ``[requests, next_n]``: keys of each row on this rank, 0 or less for
            none.
        n: entries of a candidate row, 1..4096.
        planes: bit planes for the local index above its low 16 bits, 1..10, the same on all ranks
            (:func:`keysieve.spec.index_planes` of the longest local length).

    Returns:
        ``(words int32 [rows, n + planes * ceil(n / 32)], counts int32 [rows])``. A row with more keys than ``logits``
        has columns, or than ``planes`` can index, is refused on the CPU; on a GPU it is left empty and reported.

    Raises:
        KeysieveError: an argument of the wrong dtype, shape or device.
        UnsupportedError: no backend serves the tensors' device.
    """
    if isinstance(logits, torch.Tensor) and logits.device.type != "cpu":
        given, lens = check_local_topk(logits, local_lens, n, planes)
        return load(name_for("auto", given.device)).local_topk(given, lens, n, planes)
    return local_topk_reference(logits, local_lens, n, planes)


def merge(
    words: torch.Tensor | list[torch.Tensor],
    k: int,
    *,
    rank: int,
    interleave: int = 1,
    planes: int = 1,
    seq_lens: torch.Tensor | None = None,
    second: torch.Tensor | list[torch.Tensor] | None = None,
    kv_table: torch.Tensor | None = None,
    kv_page: int | None = None,
    block_rows: int | None = None,
    row_request: torch.Tensor | None = None,
) -> Merged:
    """The winners of every row that ``rank`` owns, from the candidate rows of all ranks, and all winners' positions.

    Arguments, result and refusals: see :func:`keysieve.reference.merge`. On a GPU the lists are not held to the
    lengths; a call that could find a saturated rank without its second list synchronises to look.
    """
    one = words[0] if isinstance(words, list | tuple) and words else words
    options: dict[str, Any] = {"rank": rank, "interleave": interleave, "planes": planes}
    options |= {"seq_lens": seq_lens, "second": second}
    if not isinstance(one, torch.Tensor) or one.device.type == "cpu" or row_request is not None:
        place: dict[str, Any] = {"kv_table": kv_table, "kv_page": kv_page, "block_rows": block_rows}
        return _merge(words, k, **options, **place, row_request=row_request)
    backend: Any = load(name_for("auto", one.device))
    found: Merged = backend.merger.merge(words, k, **options, place=(kv_table, kv_page, block_rows))
    return found
