"""Candidate rows merged on a GPU by stateless calls: ``ks.merge`` of CUDA tensors.

The refusals are those of the CPU's function, in its words. Kernels are loaded when a form is first asked for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from keysieve.checks import refuse, require_int, require_tensor
from keysieve.inputs import Placement, check_placement
from keysieve.kernels.exchange_host import Merger
from keysieve.launch import capturing
from keysieve.reference.dcp_maps import check_sharding
from keysieve.reference.local_topk import entries_of, require_candidates, require_planes
from keysieve.reference.merge import Merged, saturated_ranks
from keysieve.sm90_step import narrow
from keysieve.spec import MAX_TOPK, candidate_words

if TYPE_CHECKING:
    from keysieve.gpu import GpuBackend

_INTEGERS = (torch.int32, torch.int64)


class ListMerger:
    """The merges of one backend's stateless calls, by form."""

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend
        self.merging = lru_cache(maxsize=64)(self._merging)

    def _make(self, device: torch.device) -> Any:
        return lambda kernel, config: self._backend.launcher(device, kernel, config)

    def _merging(
        self, device: torch.device, k: int, n: int, planes: int, world: int, rank: int, interleave: int
    ) -> Merger:
        sms = self._backend.sms(device)
        sharding: dict[str, Any] = {"world": world, "rank": rank, "interleave": interleave}
        return Merger(self._make(device), k=k, n=n, planes=planes, **sharding, tagged=False, sms=sms)

    def merge(
        self,
        words: torch.Tensor | list[torch.Tensor],
        k: int,
        rank: int,
        interleave: int,
        planes: int,
        seq_lens: torch.Tensor | None,
        second: torch.Tensor | list[torch.Tensor] | None,
        place: tuple[torch.Tensor | None, int | None, int | None],
    ) -> Merged:
        """See :func:`keysieve.reference.merge`."""
        words = require_candidates("words", words)
        world, rows, length = words.shape
        require_int("k", k, 1, MAX_TOPK, "Select fewer keys per row.")
        check_sharding(world, rank, interleave)
        require_planes(planes)
        n = entries_of(length, planes)
        if n > k:
            refuse(
                "words", got=f"lists of {n} candidates for k={k}", accepted="n <= k", remedy="Offer at most k a rank."
            )
        lens = self._lengths(seq_lens, rows, words.device)
        device = words.device
        if second is None and n < k and capturing():
            accepted = "second lists, or first ones of k entries, while a CUDA graph is captured"
            remedy = "Pass second= as well: without it every call looks, on the host, whether one is needed."
            refuse("second", got=None, accepted=accepted, remedy=remedy)
        saturated = saturated_ranks(words, k, interleave=interleave, planes=planes, seq_lens=lens)
        if second is None and n < k and bool(saturated.any()):
            source, row = (int(i) for i in saturated.nonzero()[0])
            refuse(
                "second",
                got=f"None, but rank {source} is saturated in row {row}",
                accepted="the local top-k candidate rows of the saturated ranks",
                remedy="Offer local_topk(logits, local_lens, k) of the rows that saturated_ranks() names; or n = k.",
            )
        if second is not None:
            second = require_candidates("second", second)
            if second.shape != (world, rows, candidate_words(k, planes)) or second.device != device:
                refuse(
                    "second",
                    got=f"{list(second.shape)} on {second.device}",
                    accepted=f"[{world}, {rows}, {candidate_words(k, planes)}] on {device}",
                    remedy="Make the second lists with n = k for the same rows.",
                )
        table, placement = self._placed(place, rows, device)
        out = torch.empty(rows, k, dtype=torch.int32, device=device)
        counts = torch.empty(rows, dtype=torch.int32, device=device)
        positions = torch.empty(rows, k, dtype=torch.int32, device=device)
        self.merging(device, k, n, planes, world, rank, interleave).merge(
            words if words.stride(2) == 1 else words.contiguous(),
            lens,
            1 if table is None else max(rows // max(table.shape[0], 1), 1),
            second=None if second is None else second.contiguous(),
            out=out,
            counts=counts,
            positions=positions,
            kv_table=table,
            kv_page=placement.kv_page,
            block_rows=placement.block_rows,
        )
        return Merged(out, counts, positions, saturated)

    def _lengths(self, seq_lens: torch.Tensor | None, rows: int, device: torch.device) -> torch.Tensor | None:
        if seq_lens is None:
            return None
        if isinstance(seq_lens, torch.Tensor) and seq_lens.dim() == 2 and seq_lens.numel() == rows:
            seq_lens = seq_lens.reshape(-1)
        lens = require_tensor("seq_lens", seq_lens, dtypes=_INTEGERS, shape=(rows,), device=device)
        return narrow(lens).contiguous()

    def _placed(
        self, place: tuple[torch.Tensor | None, int | None, int | None], rows: int, device: torch.device
    ) -> tuple[torch.Tensor | None, Placement]:
        """The table, checked, and where it puts local indices."""
        table, kv_page, block_rows = place
        requests = table.shape[0] if isinstance(table, torch.Tensor) and table.dim() else rows
        if table is not None and (requests == 0 or rows % requests):
            remedy = "Pass this rank's own KV block table, a row for every request."
            refuse("kv_table", got=f"{requests} rows for {rows} rows", accepted="a divisor of the rows", remedy=remedy)
        found = check_placement(table, kv_page, block_rows, rows=requests, requests=requests, next_n=1, device=device)
        return found.kv_table, found
