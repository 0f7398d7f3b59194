"""FlashInfer's top-k functions by keysieve: same names, argument order and shapes.

What differs, all of it deliberate:

* Rows are **bfloat16**. float32 and float16 rows are refused, because rounding them here would silently merge scores
  that differ; logits of :mod:`keysieve.compat.deep_gemm` are bfloat16 already.
* The result is always deterministic and ascending in position, with ties to the smaller index: ``deterministic`` and
  ``dsa_graph_safe`` are not read, ``tie_break=2`` (larger indices first) is refused.
* NaN ranks below -inf, -0 equals +0.
* ``row_starts`` and ``page_table_row_starts`` are refused: pass a view that begins where the row begins.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NoReturn

import torch

from keysieve.api import topk
from keysieve.checks import describe, refuse, require_tensor
from keysieve.compat.words import speaks
from keysieve.inputs import check_apart, check_output

_speaking = speaks(
    logits="input", kv_table="src_page_table", kv_page="page_size", block_rows="page_size", row_request="row_to_batch"
)

__all__ = ["TopKTieBreak", "top_k", "top_k_page_table_transform", "top_k_ragged_transform"]


class TopKTieBreak(IntEnum):
    """Values of ``tie_break``; keysieve's ties always go to the smaller index."""

    NONE = 0
    SMALL = 1
    LARGE = 2


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"keysieve.compat.flashinfer has no {name!r}, only {', '.join(__all__)}: import flashinfer too"
    )


@_speaking
def top_k_page_table_transform(
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: torch.Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
    page_table_row_starts: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    out: torch.Tensor | None = None,
    out_raw_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """The exact top-k of every row as physical indices ``table[request, i // page_size] * page_size + i % page_size``.

    Args:
        input: bfloat16 ``[rows, max_len]``, any row stride.
        src_page_table: int32 ``[requests, entries]``.
        lengths: int32 ``[rows]``.
        k: 1..4096.
        row_to_batch: int32 ``[rows]``: the table row of every row; default: its own number.
        page_size: positions a table entry stands for, a power of two.
        out: int32 ``[rows, k]`` to write into. out_raw_indices: the same for positions; it costs a second selection.
        deterministic, dsa_graph_safe: not read, the result always is. tie_break: 0 or 1.

    Returns:
        int32 ``[rows, k]``, ascending in position, -1 past a row's winners.

    Raises:
        KeysieveError: an argument that is refused (see the module's text) or does not fit. Nothing was written.
    """
    _refuse_options(tie_break, row_starts, page_table_row_starts)
    _check_rows(input)
    rows = input.shape[0]
    table = require_tensor(
        "src_page_table", src_page_table, dtypes=(torch.int32,), shape=(None, None), device=input.device
    )
    if row_to_batch is None and table.shape[0] != rows:
        refuse(
            "src_page_table",
            got=describe(src_page_table),
            accepted=f"{rows} rows, one for each of input",
            remedy="Pass row_to_batch.",
        )
    if out_raw_indices is not None:
        check_output("out_raw_indices", out_raw_indices, (rows, k), input.device)
        check_apart(out=out, out_raw_indices=out_raw_indices)
    chosen, _ = topk(
        input,
        lengths,
        k,
        kv_table=src_page_table,
        kv_page=page_size,
        block_rows=page_size,
        row_request=row_to_batch,
        out=out,
    )
    if out_raw_indices is not None:
        topk(input, lengths, k, out=out_raw_indices)
    return chosen


@_speaking
def top_k_ragged_transform(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The exact top-k of every row as ``position + offsets[row]``; int32 ``[rows, k]``, -1 past a row's winners.

    Args and errors as in :func:`top_k_page_table_transform`; offsets: int32 ``[rows]``.
    """
    _refuse_options(tie_break, row_starts, None)
    _check_rows(input)
    remedy = "Pass one offset a row."
    require_tensor(
        "offsets", offsets, dtypes=(torch.int32,), shape=(input.shape[0],), device=input.device, remedy=remedy
    )
    chosen, _ = topk(input, lengths, k)
    return torch.where(chosen >= 0, chosen + offsets[:, None], chosen)


@_speaking
def top_k(
    input: torch.Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(values, indices int64)``, both ``[rows, k]``, of the exact top-k of whole rows; k at most their width.

    Ascending in position; with ``sorted`` by value, largest first, equal values by position.
    """
    _refuse_options(tie_break, None, None)
    _check_rows(input)
    rows, width = input.shape
    if k > width:
        refuse("k", got=k, accepted=f"1..{width}, the width of input", remedy="Ask for fewer.")
    lengths = torch.full((rows,), width, dtype=torch.int32, device=input.device)
    indices = topk(input, lengths, k)[0].long()
    values = input.gather(1, indices)
    if sorted:
        last = torch.where(values.isnan(), float("-inf"), values.float())
        order = torch.sort(last, dim=1, descending=True, stable=True).indices
        # NaN ranks below -inf: among the equal ones it goes behind
        nan = values.gather(1, order).isnan()
        order = order.gather(1, torch.sort(nan.to(torch.uint8), dim=1, stable=True).indices)
        values, indices = values.gather(1, order), indices.gather(1, order)
    return values, indices


def _check_rows(input: torch.Tensor) -> None:
    if not isinstance(input, torch.Tensor) or input.dtype != torch.bfloat16 or input.dim() != 2:
        refuse(
            "input",
            got=describe(input),
            accepted="bfloat16 [rows, max_len]",
            remedy="Take logits from keysieve.compat.deep_gemm or keysieve.score; or round them yourself with "
            ".bfloat16(), knowing that scores which differ may become equal.",
        )


def _refuse_options(
    tie_break: int, row_starts: torch.Tensor | None, page_table_row_starts: torch.Tensor | None
) -> None:
    if int(tie_break) not in (0, 1):
        refuse("tie_break", got=int(tie_break), accepted="0 or 1", remedy="keysieve's ties go to the smaller index.")
    for name, value in (("row_starts", row_starts), ("page_table_row_starts", page_table_row_starts)):
        if value is not None:
            refuse(name, got=describe(value), accepted="None", remedy="Pass views that begin where the rows begin.")
