"""DeepGEMM's paged indexer logits by keysieve: same names, argument order and shapes.

What differs, all of it deliberate:

* Logits are **bfloat16**, not float32 (another ``logits_dtype`` is refused): rounded once as the contract says, so that
  a top-k of them is the same everywhere. :mod:`keysieve.compat.flashinfer` takes them as they are.
* Everything past a row's length is -inf, whatever ``clean_logits`` says.
* No schedule is needed: ``get_paged_mqa_logits_metadata`` returns an empty plan for code that passes one around, and
  ``schedule_meta`` is not read.
* ``indices`` (requests picked out of a larger table) is refused.
* The scores' bits do not depend on the batch, on ``next_n`` or on the number of SMs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NoReturn

import torch

from keysieve.api import score
from keysieve.cache import IndexCache
from keysieve.checks import describe, refuse, require_tensor
from keysieve.compat.words import speaks
from keysieve.spec import FORMATS, HEAD_DIM, PAGE, IndexerSpec

_speaking = speaks(
    query="q",
    cache="kv_cache",
    tensor="kv_cache",
    seq_lens="context_lens",
    index_table="block_table",
    max_len="max_context_len",
)

MOST_INT32 = 2**31 - 1

__all__ = ["fp8_fp4_paged_mqa_logits", "fp8_paged_mqa_logits", "get_num_sms", "get_paged_mqa_logits_metadata"]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"keysieve.compat.deep_gemm has no {name!r}, only {', '.join(__all__)}: import deep_gemm too "
        "(prefill's logits stay with it)"
    )


@lru_cache(maxsize=64)
def _spec(heads: int, key_format: str) -> IndexerSpec:
    """topk does not matter to logits: nothing is skipped."""
    return IndexerSpec(heads, 1, key_format, numerics="fp32")


@_speaking
def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits of every query row over its request's pages.

    Args:
        q: E4M3 ``[requests, next_n, heads, 128]``.
        kv_cache: uint8 ``[pages, 64, 1, 132]``, planar pages: 64 x 128 key bytes, then 64 float32 scales.
        weights: float32 or bfloat16 ``[requests * next_n, heads]``.
        context_lens: int32 ``[requests, next_n]``: keys of each row; or ``[requests]`` / ``[requests, 1]``: keys of a
            request's last row, the rows before it seeing one key less each.
        block_table: int32 ``[requests, columns]``, page ids.
        schedule_meta: not read.
        max_context_len: width of the result, in keys.
        clean_logits: not read: past a row's length there is always -inf.
        indices: refused unless None.

    Returns:
        bfloat16 ``[requests * next_n, max_context_len]``.

    Raises:
        KeysieveError: an argument of the wrong dtype, shape or device, or ``indices``. Nothing was written.
    """
    requests, next_n, heads = _shape(q, HEAD_DIM, torch.float8_e4m3fn, torch.uint8)
    lengths = _lengths(context_lens, requests, next_n)
    return score(
        _spec(heads, "fp8_fp32"),
        q.reshape(requests * next_n, heads, HEAD_DIM),
        _cache(kv_cache, _spec(heads, "fp8_fp32"), indices),
        weights,
        lengths,
        block_table,
        max_context_len,
    )


@_speaking
def fp8_fp4_paged_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.bfloat16,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`fp8_paged_mqa_logits` with ``q = (codes, scales)``: scales None means FP8, else MXFP4.

    MXFP4: codes uint8 or int8 ``[requests, next_n, heads, 64]`` (two E2M1 a byte), scales int32
    ``[requests, next_n, heads]`` (four UE8M0 bytes), kv_cache uint8 ``[pages, 64, 1, 68]``.
    """
    if logits_dtype != torch.bfloat16:
        refuse(
            "logits_dtype",
            got=str(logits_dtype),
            accepted="torch.bfloat16",
            remedy="Leave it out: keysieve's logits are rounded to bfloat16 once, by contract.",
        )
    # A tuple of types, as in keysieve.inputs.
    if not isinstance(q, (tuple, list)) or len(q) != 2:
        refuse("q", got=describe(q), accepted="(codes, scales or None)", remedy="Pass FP8 queries as (q, None).")
    codes, scales = q
    if scales is None:
        return fp8_paged_mqa_logits(
            codes, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits, indices
        )
    width = HEAD_DIM // 2
    requests, next_n, heads = _shape(codes, width, torch.uint8, torch.int8)
    rows = requests * next_n
    words = require_tensor("q[1]", scales, dtypes=(torch.int32,), shape=(requests, next_n, heads), device=codes.device)
    spec = _spec(heads, "mxfp4")
    return score(
        spec,
        (codes.view(torch.uint8).reshape(rows, heads, width), words.reshape(rows, heads)),
        _cache(kv_cache, spec, indices),
        weights,
        _lengths(context_lens, requests, next_n),
        block_table,
        max_context_len,
    )


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """An empty int32 plan ``[0, 2]``: keysieve balances its work in the scoring kernel. block_kv has to be 64."""
    if block_kv != PAGE:
        refuse("block_kv", got=block_kv, accepted=str(PAGE), remedy="Index pages hold 64 tokens.")
    return context_lens.new_empty((0, 2), dtype=torch.int32)


def get_num_sms() -> int:
    """Multiprocessors of the current CUDA device; 1 without one."""
    if not torch.cuda.is_available():
        return 1
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def _shape(q: torch.Tensor, width: int, *dtypes: torch.dtype) -> tuple[int, int, int]:
    remedy = "Pass quantised queries [requests, next_n, heads, bytes], every request with a dimension of its own."
    require_tensor("q", q, dtypes=dtypes, shape=(None, None, None, width), remedy=remedy)
    return q.shape[0], q.shape[1], q.shape[2]


def _lengths(context_lens: torch.Tensor, requests: int, next_n: int) -> torch.Tensor:
    """[requests, next_n] or, where only the last row's is given, derived from it."""
    given = isinstance(context_lens, torch.Tensor)
    if given and tuple(context_lens.shape) == (requests, next_n):
        return context_lens
    if not given or context_lens.numel() != requests or context_lens.dim() not in (1, 2):
        refuse(
            "context_lens",
            got=describe(context_lens),
            accepted=f"[{requests}, {next_n}] or [{requests}]",
            remedy="Pass one length a row, or each request's last one.",
        )
    if context_lens.dtype not in (torch.int32, torch.int64):
        refuse("context_lens", got=describe(context_lens), accepted="int32 or int64", remedy="Convert the lengths.")
    return lengths_up_to(context_lens, next_n)


def lengths_up_to(last: torch.Tensor, next_n: int) -> torch.Tensor:
    """int32 ``[requests, next_n]``: lengths of the rows of requests whose last rows have ``last`` keys each."""
    before = torch.arange(1 - next_n, 1, dtype=torch.int32, device=last.device)
    # Into 32 bits first: a length beyond them stays beyond every limit, and one far below 0 stays below it.
    return (last.reshape(-1, 1).clamp(0, MOST_INT32).to(torch.int32) + before).clamp_min(0)


def _cache(kv_cache: torch.Tensor, spec: IndexerSpec, indices: torch.Tensor | None) -> IndexCache:
    if indices is not None:
        refuse(
            "indices", got=describe(indices), accepted="None", remedy="Gather the block table's rows before the call."
        )
    width = FORMATS[spec.key_format].width
    remedy = "View the pool as uint8 [pages, 64, 1, bytes of a token]; nothing is copied."
    require_tensor("kv_cache", kv_cache, dtypes=(torch.uint8,), shape=(None, PAGE, 1, width), remedy=remedy)
    return IndexCache(spec, kv_cache.squeeze(2))
