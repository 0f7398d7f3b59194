"""vLLM's sparse indexer on keysieve: its paged logits and its decode top-k, replaced where vLLM calls them.

    import keysieve.integrations.vllm as ks_vllm

    ks_vllm.patch()    # before the engine captures graphs; ks_vllm.unpatch() takes it back

vLLM's ``sparse_attn_indexer`` computes decode logits with ``fp8_fp4_paged_mqa_logits`` and hands them to a
``SparseIndexerTopk``. The patch replaces these two, and the conversion to float32 between them, inside
``vllm.model_executor.layers.sparse_attn_indexer``: logits are then keysieve's BF16 ones and the selection is exact,
ascending, with ties to the lower position: the same on every tensor-parallel rank. Prefill stays vLLM's.

Every function is also usable alone: :func:`paged_logits`, :class:`Topk`. An engine that can give up its logits should
call :class:`keysieve.DecodeIndexer` instead, which does both in one call.

Under decode context parallelism vLLM gathers every rank's candidates; the patch does the same and merges them exactly
(:func:`merge_dcp`).

Read against vLLM 0.33.0. Refused: requests picked by ``indices`` and two-level candidate blocks, which need other
logits than these.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from keysieve.api import topk
from keysieve.checks import refuse
from keysieve.compat import deep_gemm
from keysieve.reference.dcp_maps import global_positions
from keysieve.reference.keys import canonicalize_

MODULE = "vllm.model_executor.layers.sparse_attn_indexer"
_originals: dict[str, Any] = {}
_patched = False
"""Whether all of it is: what was ended in the middle, by a signal's handler, is put back before it is tried again."""


def paged_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor | None,
    max_model_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """In place of vLLM's ``fp8_fp4_paged_mqa_logits``: bfloat16 ``[requests * next_n, max_model_len]``.

    Args:
        q: ``(codes, scale words or None)``: E4M3 ``[requests, next_n, heads, 128]``, or MXFP4's bytes ``[.., 64]`` with
            int32 words ``[requests, next_n, heads]``.
        kv_cache: uint8 ``[pages, 64, 1, 132 | 68]``, any 16-byte page stride.
        weights: ``[requests * next_n, heads]``; more rows than there are are ignored.
        context_lens: int32 ``[requests, next_n]`` or ``[requests, 1]``.
        block_tables: int32 ``[requests, columns]``; more rows than there are are ignored.
        schedule_metadata, clean_logits: not read.
        max_model_len: width of the result.

    Raises:
        KeysieveError: what :func:`keysieve.compat.deep_gemm.fp8_fp4_paged_mqa_logits` refuses.
    """
    codes = q[0]
    requests, rows = codes.shape[0], codes.shape[0] * codes.shape[1]
    width = min(max_model_len, block_tables.shape[1] * 64)
    return deep_gemm.fp8_fp4_paged_mqa_logits(
        q,
        kv_cache,
        weights[:rows],
        context_lens,
        block_tables[:requests],
        schedule_metadata,
        width,
        clean_logits,
        indices=indices,
    )


def row_lengths(seq_lens: torch.Tensor, next_n: int, rows: int) -> torch.Tensor:
    """int32 ``[rows]``: vLLM's lengths ``[requests, next_n]`` as they are, or from each request's last row's length."""
    if seq_lens.numel() == rows:
        return seq_lens.reshape(rows)
    return deep_gemm.lengths_up_to(seq_lens, next_n).reshape(rows)


class Topk:
    """In place of vLLM's ``SparseIndexerTopk``: the exact top-k of BF16 decode logits."""

    def __call__(
        self,
        logits: torch.Tensor,
        seq_lens: torch.Tensor,
        next_n: int,
        topk_indices: torch.Tensor,
        topk_tokens: int,
        max_seq_len: int,
    ) -> None:
        """Write positions within each request, ascending, -1 past the winners, into ``topk_indices``.

        Args:
            logits: bfloat16 ``[rows, width]``.
            seq_lens: int32 ``[requests, next_n]``, ``[requests, 1]`` or ``[requests]``.
            topk_indices: int32 ``[rows, topk_tokens]``, any row stride.
            topk_tokens: 1..4096.
            max_seq_len: not read.

        Raises:
            KeysieveError: logits that are not keysieve's BF16 ones, or buffers that do not fit. Nothing was written.
        """
        del max_seq_len
        if logits.dtype != torch.bfloat16:
            refuse(
                "logits",
                got=str(logits.dtype),
                accepted="torch.bfloat16",
                remedy="Patch the logits too (keysieve.integrations.vllm.patch does): a rounding of float32 logits "
                "would make scores equal that are not.",
            )
        rows = logits.shape[0]
        topk(logits, row_lengths(seq_lens, next_n, rows), topk_tokens, out=topk_indices[:rows, :topk_tokens])


def merge_dcp(
    gather: Callable[..., torch.Tensor],
    logits: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_tokens: int,
    rank: int,
    world: int,
    interleave: int,
) -> None:
    """Overwrite this rank's best local positions by the exact global top-k of all ranks, the same on each of them.

    Every rank offers its ``topk_tokens`` best with their key16, so one all-gather is enough; what is gathered is
    ordered by (score, then global position). Plain torch operations: they work in a CUDA graph wherever `gather` does.

    Args:
        gather: all-gather of an int64 ``[rows, topk_tokens]`` along ``dim=1``, in rank order.
        logits: bfloat16 ``[rows, width]`` over this rank's keys.
        topk_indices: int32 ``[rows, topk_tokens]``: positions among this rank's keys, -1 past them; afterwards global
            positions, ascending, -1 past them.
        interleave: consecutive positions on one rank.
    """
    local = topk_indices.long()
    offered = local >= 0
    # By arithmetic, not by the reference's table, whose copy to a device cannot be captured.
    bits = canonicalize_(logits.gather(1, local.clamp_min(0))).view(torch.int16).long() & 0xFFFF
    scores = torch.where(bits >= 0x8000, bits ^ 0xFFFF, bits ^ 0x8000)
    order = (0xFFFF - scores) << 32 | global_positions(local, world, rank, interleave)  # the lower, the better
    nothing = 1 << 62
    everyone = gather(torch.where(offered, order, nothing), dim=1)
    best = everyone.sort(dim=1).values[:, :topk_tokens]
    found = torch.where(best < nothing, best & 0xFFFFFFFF, nothing).sort(dim=1).values
    topk_indices.copy_(torch.where(found < nothing, found, -1))


def _ours(logits: torch.Tensor) -> bool:
    """Whether :func:`paged_logits` made them under the patch: prefill's logits stay vLLM's whatever their dtype."""
    return bool(getattr(logits, "keysieve_logits", False))


def _decode_logits(*args: Any, **kwargs: Any) -> torch.Tensor:
    logits = paged_logits(*args, **kwargs)
    logits.keysieve_logits = True  # type: ignore[attr-defined]  # a note for the functions below
    return logits


def _widen(original: Any) -> Any:
    def as_fp32_logits(logits: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
        widened: torch.Tensor = logits if _ours(logits) else original(logits, row_ends)
        return widened

    return as_fp32_logits


def _merge(original: Any, module: Any) -> Any:
    def merge(
        logits: torch.Tensor,
        topk_indices: torch.Tensor,
        topk_tokens: int,
        dcp_rank: int,
        dcp_world_size: int,
        cp_interleave: int,
        row_starts: torch.Tensor | None = None,
    ) -> None:
        if not _ours(logits):
            original(logits, topk_indices, topk_tokens, dcp_rank, dcp_world_size, cp_interleave, row_starts)
        elif dcp_world_size > 1:
            gather = module.get_dcp_group().all_gather
            merge_dcp(gather, logits, topk_indices, topk_tokens, dcp_rank, dcp_world_size, cp_interleave)

    return merge


def _unsupported(what: str) -> Any:
    def refuse_it(*_args: Any, **_kwargs: Any) -> None:
        refuse(
            what,
            got="a call",
            accepted="none while vLLM's indexer is patched",
            remedy="Run it without keysieve.integrations.vllm.patch(), or with keysieve.DecodeIndexer(dcp=...) in its "
            "place.",
        )

    return refuse_it


def patch() -> None:
    """Replace vLLM's decode logits and top-k by keysieve's. A second call changes nothing.

    Raises:
        KeysieveError: this vLLM has no such names (another version); nothing was changed.
        ModuleNotFoundError: vLLM is not installed.
    """
    global _patched
    if _patched:
        return
    unpatch()
    module = importlib.import_module(MODULE)
    chosen = Topk()
    new: dict[str, Any] = {
        "fp8_fp4_paged_mqa_logits": _decode_logits,
        "as_fp32_logits": None,
        "get_indexer_topk": lambda backend: chosen,  # noqa: ARG005  # vLLM's own choice of a backend is not asked
        "_merge_dcp_topk_global": None,
        "_select_candidate_blocks": _unsupported("vLLM's candidate blocks"),
        "_apply_candidate_mask": _unsupported("vLLM's candidate blocks"),
    }
    missing = [name for name in new if not hasattr(module, name)]
    if missing:
        refuse(
            "vllm",
            got=f"a version without {', '.join(missing)}",
            accepted="one whose sparse_attn_indexer has them (0.33)",
            remedy="Call paged_logits and Topk of this module where that version computes logits and selects.",
        )
    new["as_fp32_logits"] = _widen(module.as_fp32_logits)
    new["_merge_dcp_topk_global"] = _merge(module._merge_dcp_topk_global, module)
    for name, function in new.items():
        _originals[name] = getattr(module, name)
        setattr(module, name, function)
    _patched = True


def unpatch() -> None:
    """Put vLLM's own functions back. Without a patch nothing happens."""
    global _patched
    _patched = False
    if not _originals:
        return
    module = importlib.import_module(MODULE)
    for name, function in _originals.items():
        setattr(module, name, function)
    _originals.clear()


__all__ = ["Topk", "merge_dcp", "paged_logits", "patch", "row_lengths", "unpatch"]
