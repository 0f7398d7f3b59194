"""A call's arguments, checked: what every backend may rely on before it launches anything.

tensors -> checks -> :class:`Step` (and :class:`Placement`, where selected keys go). Nothing here reads the contents
of a tensor, so nothing synchronises; lengths and page ids are looked at by whoever can see them (the cpu backend on
the host, a kernel on its device).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from keysieve.cache import IndexCache, require_cache
from keysieve.checks import describe, refuse, require_int, require_tensor
from keysieve.spec import MAX_NEXT_N, PAGE, TILE, IndexerSpec, request_tiles, require_spec

Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""E4M3 codes ``[rows, heads, 128]``; MXFP4: ``(E2M1 bytes [rows, heads, 64], UE8M0 words int32 [rows, heads])``."""


@dataclass(frozen=True)
class Step:
    """One step's inputs, checked and brought to one shape.

    Attributes:
        spec: the model's indexer.
        codes: uint8 ``[rows, heads, 128 | 64]``: the query's E4M3 codes, or E2M1 pairs.
        words: int32 ``[rows, heads]`` UE8M0 scale words (MXFP4), else None.
        cache: the index cache, of the spec's format.
        weights: float32 or bfloat16 ``[rows, heads]``.
        seq_lens: int32 or int64 ``[rows]``, any stride.
        index_table: int32 ``[requests, columns]``, any row stride.
        next_n: query rows per request.
    """

    spec: IndexerSpec
    codes: torch.Tensor
    words: torch.Tensor | None
    cache: IndexCache
    weights: torch.Tensor
    seq_lens: torch.Tensor
    index_table: torch.Tensor
    next_n: int

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def requests(self) -> int:
        return self.index_table.shape[0]

    def with_lengths(self, seq_lens: torch.Tensor, index_table: torch.Tensor | None) -> Step:
        """The same step with other lengths and, unless None, another index table."""
        table = self.index_table if index_table is None else index_table
        return replace(self, seq_lens=seq_lens, index_table=table)

    @property
    def table_keys(self) -> int:
        """Keys that the index table has columns for."""
        return self.index_table.shape[1] * PAGE

    def table_limit(self) -> str:
        """What sets ``table_keys``, for messages."""
        return f"index_table ({self.index_table.shape[1]} columns of {PAGE})"


@dataclass(frozen=True)
class Placement:
    """Where selected keys lie in the attention KV cache.

    Attributes:
        kv_table: int32 ``[requests, blocks]``, or None: the output is key positions.
        kv_page: tokens per block, a power of two.
        block_rows: rows a block spans in the cache view.
    """

    kv_table: torch.Tensor | None
    kv_page: int
    block_rows: int

    @property
    def table_keys(self) -> int | None:
        """Keys that the KV block table has columns for, or None without a table."""
        return None if self.kv_table is None else self.kv_table.shape[1] * self.kv_page

    def table_limit(self) -> str:
        """What sets ``table_keys``, for messages."""
        columns = 0 if self.kv_table is None else self.kv_table.shape[1]
        return f"kv_table ({columns} columns of kv_page = {self.kv_page})"


class Selection(NamedTuple):
    """What a step selected.

    Attributes:
        rows: int32 ``[rows, topk]``: physical rows (key positions without a KV block table) of the selected keys, in
            ascending key position, then -1.
        counts: int32 ``[rows]``: how many of them are keys.
        positions: int32 ``[rows, topk]``: key positions, ascending, then -1; None if they were not asked for.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor | None


def check_spec(spec: object) -> IndexerSpec:
    """``spec`` if it is an IndexerSpec."""
    return require_spec(spec)


def query_of(query: Query) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A query as its codes and its scale words (None for FP8), unchecked."""
    if isinstance(query, torch.Tensor):
        return query, None
    codes, words = query
    return codes, words


def check_query(spec: IndexerSpec, query: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The query's code bytes and, for MXFP4, its scale words."""
    if spec.format.is_fp8:
        remedy = "Quantise it with ks.quantize_query."
        dtypes = (torch.float8_e4m3fn, torch.uint8)
        codes = require_tensor("query", query, dtypes=dtypes, shape=(None, spec.heads, 128), remedy=remedy)
        return codes.view(torch.uint8), None
    # A tuple of types: torch.compile up to torch 2.9 cannot trace a union of them.
    if not isinstance(query, (tuple, list)) or len(query) != 2:
        refuse(
            "query",
            got=describe(query),
            accepted=f"(uint8 [rows, {spec.heads}, 64], int32 [rows, {spec.heads}]) for key_format 'mxfp4'",
            remedy="Pass both results of ks.quantize_query as a pair.",
        )
    packed = (torch.uint8, torch.float4_e2m1fn_x2)
    codes = require_tensor("query[0]", query[0], dtypes=packed, shape=(None, spec.heads, 64))
    rows = codes.shape[0]
    words = require_tensor("query[1]", query[1], dtypes=(torch.int32,), shape=(rows, spec.heads), device=codes.device)
    return codes.view(torch.uint8), words


def check_shape(rows: int, seq_lens: Any, index_table: Any, device: torch.device) -> tuple[torch.Tensor, int]:
    """Lengths as ``[rows]`` and ``next_n``, from 1-D lengths per row or 2-D lengths ``[requests, next_n]``.

    With 1-D lengths ``next_n = rows // requests``, where ``requests`` is the index table's first dimension; with 2-D
    lengths it is their second dimension, and the table may then have one row per request or one per query row, of which
    each request's first is used.
    """
    table = require_tensor(
        "index_table", index_table, dtypes=(torch.int32,), shape=(None, None), device=device, unit_inner=True
    )
    dims = seq_lens.dim() if isinstance(seq_lens, torch.Tensor) else 1
    shape: tuple[int | None, ...] = (rows,) if dims != 2 else (None, None)
    lens = require_tensor("seq_lens", seq_lens, dtypes=(torch.int32, torch.int64), shape=shape, device=device)
    if dims == 2:
        requests, next_n = lens.shape
        if requests * next_n != rows or (rows == 0 and requests > 0):
            refuse(
                "seq_lens",
                got=f"{list(lens.shape)} for {rows} query rows",
                accepted="[rows], or [requests, next_n] with requests * next_n = rows",
                remedy="Give every query row its length; padding rows have length 0.",
            )
        fits = table.shape[0] in (requests, rows)
    else:
        requests = table.shape[0]
        fits = (rows == 0) if requests == 0 else rows > 0 and rows % requests == 0
        next_n = rows // requests if requests else 1
    if not fits:
        refuse(
            "index_table",
            got=f"{table.shape[0]} rows for {rows} query rows and seq_lens {list(lens.shape)}",
            accepted="one row per request (query rows are a multiple of it), or one per query row",
            remedy="Pad queries, lengths and tables to the same batch.",
        )
    next_n = max(next_n, 1)
    require_int("next_n", next_n, 1, MAX_NEXT_N, "Use at most 8 query rows per request (1 + speculative tokens).")
    return lens.reshape(rows) if dims == 2 else lens, next_n


def per_request(table: torch.Tensor, rows: int, next_n: int) -> torch.Tensor:
    """``table`` with one row per request: a table expanded per query row is narrowed to each request's first row."""
    return table[::next_n] if table.shape[0] == rows else table


def check_step(
    spec: IndexerSpec, query: Any, cache: Any, weights: Any, seq_lens: Any, index_table: Any, *, device: Any = None
) -> Step:
    """Check a step's tensors against the spec and against each other.

    Raises:
        KeysieveError: the first argument that does not fit, with what is accepted.
    """
    check_spec(spec)
    codes, words = check_query(spec, query)
    rows, where = codes.shape[0], codes.device
    if device is not None and where != torch.device(device):
        remedy = "Move it, or build an indexer for that device."
        refuse("query", got=f"a tensor on {where}", accepted=f"a tensor on {device}", remedy=remedy)
    pool = require_cache(spec, cache, where)
    kinds = (torch.float32, torch.bfloat16)
    weights = require_tensor("weights", weights, dtypes=kinds, shape=(rows, spec.heads), device=where)
    lens, next_n = check_shape(rows, seq_lens, index_table, where)
    return Step(spec, codes, words, pool, weights, lens, per_request(index_table, rows, next_n), next_n)


def check_placement(
    kv_table: Any, kv_page: Any, block_rows: Any, *, rows: int, requests: int, next_n: int, device: torch.device
) -> Placement:
    """Check the KV block table and its geometry; the table may have one row per request or one per query row."""
    page = require_int("kv_page", PAGE if kv_page is None else kv_page, 1, 1 << 26, "Give the tokens of a KV block.")
    if page & (page - 1):
        refuse("kv_page", got=page, accepted="a power of two", remedy="Use the kernel's block size, a power of two.")
    span = require_int("block_rows", page if block_rows is None else block_rows, 1, 1 << 30, "Give rows per block.")
    if kv_table is None:
        return Placement(None, page, span)
    table = require_tensor(
        "kv_table", kv_table, dtypes=(torch.int32,), shape=(None, None), device=device, unit_inner=True
    )
    if table.shape[0] not in (requests, rows):
        refuse(
            "kv_table",
            got=f"{table.shape[0]} rows for {requests} requests of {next_n} query rows",
            accepted=f"{requests} rows (one per request) or {rows} (one per query row)",
            remedy="Pad it to the batch of the index table.",
        )
    return Placement(per_request(table, rows, next_n), page, span)


def check_output(
    argument: str,
    buffer: Any,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype = torch.int32,
) -> torch.Tensor:
    """A caller's output buffer: unit inner stride, any row stride that keeps rows apart."""
    out = require_tensor(argument, buffer, dtypes=(dtype,), shape=shape, device=device, unit_inner=len(shape) > 1)
    if out.requires_grad:
        refuse(argument, got="a tensor that requires grad", accepted="a plain buffer", remedy="Pass it detached.")
    width = shape[1] if len(shape) > 1 else 1
    if out.shape[0] > 1 and out.stride(0) < width:
        refuse(
            argument,
            got=describe(out),
            accepted=f"rows that do not overlap (row stride of at least {width})",
            remedy="Allocate the buffer, do not expand it.",
        )
    return out


def check_apart(**buffers: torch.Tensor | None) -> None:
    """Refuse output buffers that share memory; rows side by side in one allocation are apart.

    Args:
        buffers: checked buffers by argument name; None is left out. The later one of a pair is named.
    """
    if torch.compiler.is_compiling():  # tensors without addresses; the operator makes this check when it runs
        return
    given = [(name, buffer) for name, buffer in buffers.items() if buffer is not None and buffer.numel()]
    for at, (name, buffer) in enumerate(given):
        for other_name, other in given[:at]:
            if _meet(buffer, other):
                refuse(
                    name,
                    got=f"memory of {other_name}: {describe(buffer)} and {describe(other)}",
                    accepted=f"a buffer apart from {other_name}",
                    remedy="Allocate one buffer for each output.",
                )


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two buffers of unit inner stride share memory; unlike row strides in one range count as sharing."""
    if a.device != b.device:
        return False
    (first, width, stride, end), (other, other_width, other_stride, other_end) = _extent(a), _extent(b)
    if end <= other or other_end <= first:
        return False
    if stride != other_stride:
        return True
    apart = (other - first) % stride
    return not (width <= apart <= stride - other_width)


def _extent(buffer: torch.Tensor) -> tuple[int, int, int, int]:
    """First byte, bytes of a row, bytes from row to row, and the byte after the last, of a non-empty buffer."""
    size, first = buffer.element_size(), buffer.data_ptr()
    width = size * (buffer.shape[1] if buffer.dim() > 1 else 1)
    stride = max(size * buffer.stride(0), width) if buffer.shape[0] > 1 else width
    return first, width, stride, first + stride * (buffer.shape[0] - 1) + width


def compact_elements(lengths: list[int], next_n: int, topk: int) -> int:
    """Elements of the compact logits layout that a step with these per-row ``lengths`` needs."""
    tiles = (request_tiles(max(lengths[r : r + next_n]), topk) for r in range(0, len(lengths), next_n))
    return next_n * TILE * sum(tiles)
