"""SGLang's sparse-attention indexer on keysieve: its paged logits and its top-k, replaced where SGLang calls them.

    import keysieve.integrations.sglang as ks_sglang

    ks_sglang.patch()    # before the engine captures graphs; ks_sglang.unpatch() takes it back

SGLang's ``Indexer._get_topk_paged`` takes decode logits from ``resolve_fp8_paged_mqa_logits_fn()`` and hands them to
``DSATopKBackend.topk_transform``, which selects and, when its top-k is fused, maps to token slots of the KV pool. The
patch replaces both: logits are keysieve's BF16 ones, the selection is exact, ascending, ties to the lower position.
float32 logits (prefill, other backends) keep going to SGLang's own top-k.

Functions are also usable alone: :func:`topk_paged`. An engine that can give up its logits should call
:class:`keysieve.DecodeIndexer` instead, which does both in one call. Read against SGLang 0.5.23.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from keysieve.api import topk
from keysieve.checks import refuse
from keysieve.compat import deep_gemm

INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"
BACKEND = "sglang.srt.layers.attention.dsa.dsa_topk_backend"
PAGE = 64
_originals: list[tuple[Any, str, Any]] = []
_patched = False
"""Whether all of it is: what was ended in the middle, by a signal's handler, is put back before it is tried again."""


def paged_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_metadata: torch.Tensor | None,
    max_len: int,
    clean_logits: bool = False,
) -> torch.Tensor:
    """In place of DeepGEMM's ``fp8_paged_mqa_logits`` in SGLang's indexer: bfloat16 ``[requests * next_n, max_len]``.

    Arguments and errors as :func:`keysieve.compat.deep_gemm.fp8_paged_mqa_logits`; lengths, weights and table may have
    more rows than there are requests (a padded batch), which are ignored.
    """
    requests, rows = q.shape[0], q.shape[0] * q.shape[1]
    return deep_gemm.fp8_paged_mqa_logits(
        q,
        kv_cache,
        weights[:rows],
        context_lens[:requests],
        block_table[:requests],
        schedule_metadata,
        max_len,
        clean_logits,
    )


def topk_paged(logits: torch.Tensor, lengths: torch.Tensor, k: int, page_table: torch.Tensor) -> torch.Tensor:
    """The exact top-k of decode rows as token slots ``page * 64 + position % 64`` of SGLang's KV pool.

    Args:
        logits: bfloat16 ``[rows, width]``.
        lengths: int32 ``[rows]``.
        k: 1..4096.
        page_table: int32 ``[requests, pages]`` of 64-token pages (SGLang's ``real_page_table``); rows of a request are
            consecutive.

    Returns:
        int32 ``[rows, k]``, ascending in position, -1 past a row's winners.

    Raises:
        KeysieveError: an argument that does not fit. Nothing was written.
    """
    return topk(logits, lengths, k, kv_table=page_table, kv_page=PAGE, block_rows=PAGE)[0]


def _transform(original: Any, backend: Any) -> Any:
    """A ``topk_transform`` for BF16 logits; anything else goes to `original`."""

    def topk_transform(
        self: Any,
        logits: torch.Tensor,
        lengths: torch.Tensor,
        topk: int,
        topk_transform_method: Any,
        attn_metadata: Any,
        cu_seqlens_q_topk: torch.Tensor | None = None,
        topk_indices_offset: torch.Tensor | None = None,
        row_starts: torch.Tensor | None = None,
        batch_idx_list: Any = None,
        force_unfused_topk: bool = False,
    ) -> torch.Tensor:
        if logits.dtype != torch.bfloat16:
            result: torch.Tensor = original(
                self,
                logits,
                lengths,
                topk,
                topk_transform_method,
                attn_metadata,
                cu_seqlens_q_topk,
                topk_indices_offset,
                row_starts,
                batch_idx_list,
                force_unfused_topk,
            )
            return result
        if row_starts is not None or batch_idx_list is not None:
            refuse(
                "row_starts" if row_starts is not None else "batch_idx_list",
                got="a value",
                accepted="None for BF16 logits",
                remedy="keysieve's logits are of decode rows, which begin at their request's first key.",
            )
        if force_unfused_topk or not backend.envs.SGLANG_DSA_FUSE_TOPK.get():
            return positions(logits, lengths[: logits.shape[0]], topk)
        if topk_transform_method != backend.TopkTransformMethod.PAGED:
            refuse(
                "topk_transform_method",
                got=str(topk_transform_method),
                accepted="PAGED for BF16 logits",
                remedy="Ragged keys are prefill's: leave those logits to SGLang.",
            )
        table, rows = attn_metadata.real_page_table, logits.shape[0]
        return topk_paged(logits, lengths[:rows], topk, table[:rows])

    return topk_transform


def positions(logits: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """The exact top-k of decode rows as positions within their requests; arguments as in :func:`topk_paged`."""
    return topk(logits, lengths, k)[0]


def patch() -> None:
    """Replace SGLang's paged logits and its top-k of BF16 rows by keysieve's. A second call changes nothing.

    Raises:
        KeysieveError: this SGLang has no such names (another version); nothing was changed.
        ModuleNotFoundError: SGLang is not installed.
    """
    global _patched
    if _patched:
        return
    unpatch()
    indexer, backend = importlib.import_module(INDEXER), importlib.import_module(BACKEND)
    names = ("resolve_fp8_paged_mqa_logits_fn", "resolve_paged_mqa_logits_metadata_fn")
    missing = [name for name in names if not hasattr(indexer, name)]
    missing += [name for name in ("DSATopKBackend", "TopkTransformMethod", "envs") if not hasattr(backend, name)]
    if missing:
        refuse(
            "sglang",
            got=f"a version without {', '.join(missing)}",
            accepted="one whose DSA indexer has them (0.5.23)",
            remedy="Call topk_paged of this module where that version selects.",
        )
    kind = backend.DSATopKBackend
    for owner, name, function in (
        (indexer, names[0], lambda: paged_logits),
        (indexer, names[1], lambda: deep_gemm.get_paged_mqa_logits_metadata),
        (kind, "topk_transform", _transform(kind.topk_transform, backend)),
    ):
        _originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, function)
    _patched = True


def unpatch() -> None:
    """Put SGLang's own functions back. Without a patch nothing happens."""
    global _patched
    _patched = False
    while _originals:
        owner, name, function = _originals[-1]
        setattr(owner, name, function)
        _originals.pop()


__all__ = ["paged_logits", "patch", "positions", "topk_paged", "unpatch"]
