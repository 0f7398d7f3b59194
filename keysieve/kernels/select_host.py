"""From tensors to a launch of the selection kernels. Nothing is checked twice: callers have checked shapes and dtypes.

A `Selector` is made once for a K on a device and called in every step. It imports without CUDA and without cutlass; the
function it is given makes the launches (`lambda kernel, config: keysieve.launch.Launcher(kernel, config, device)`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keysieve.kernels.base import Kernel
from keysieve.kernels.select_config import CLUSTERS, SELECT, TOPK, TOPS, SelectConfig, TopsConfig, k_class_of

Launch = Callable[..., None]
Make = Callable[[Kernel, Any], Launch]

NO_LIMIT = 2**31 - 1
SOLO_KEYS = 8192
"""Rows up to this many keys are one block's work: sharing them costs more than it saves."""

TOPS_CONFIG = TopsConfig()

SPREAD_BYTES = 116 * 1024
"""Shared memory of which an SM of Hopper or Blackwell (228 KB) holds one block's share, not two."""

PAIR_KEYS = 131072
"""With given maxima, rows up to this many keys are not worth two blocks either, unless two small ones hold all keys."""


def config_for(rows: int, max_len: int, k: int, sms: int, maxima: bool) -> SelectConfig:
    """The configuration for a call of `rows` rows of at most `max_len` keys on a device of `sms` SMs.

    Only limits are known on the host; where a row turns out short, its first block works alone. Rows are shared by as
    many blocks as three quarters of the SMs hold (clusters do not pack a whole chip). Blocks of 1024 threads hold
    twice the keys; of blocks of 512 threads two share an SM. Chosen from measurements on one H200, 2026-11-30.
    """
    k_class = k_class_of(k)
    cluster = 1
    if max_len > SOLO_KEYS:
        cluster = max(c for c in CLUSTERS if c == 1 or 4 * rows * c <= 3 * sms)
    held = SelectConfig(k_class, 1, 512, maxima).held_groups
    if cluster == 2 and maxima and max_len <= PAIR_KEYS and (max_len > 16 * held or k > held):
        cluster = 1
    if maxima and k <= held and PAIR_KEYS < max_len <= 2 * PAIR_KEYS and rows <= sms < 2 * rows:
        cluster = 2  # small blocks, two on an SM: a long row's are seldom neighbours of another's
    if not maxima and cluster == 1 and 2 * rows <= sms and 32768 < max_len <= 65536:
        cluster = 2  # two large blocks that hold a row together
    small = SelectConfig(k_class, cluster, 512, maxima)
    large = SelectConfig(k_class, cluster, 1024, maxima)
    part = -(-max_len // cluster)
    if k_class > small.held_groups:
        return large
    if rows * cluster > sms:  # more blocks than SMs: two on each are worth more than large ones, until maxima spill
        return large if part > small.topped_keys else small
    if 8 * small.held_groups < part <= 8 * large.held_groups:
        return large  # keys that only the larger block holds at once
    if not maxima and rows == 1 and 8 * small.held_groups < part <= small.topped_keys:
        return SelectConfig(k_class, cluster, 512, maxima, given=True)
    if part > small.topped_keys or (cluster == 1 and not maxima and part > 8 * small.held_groups):
        return large
    return small


def shared_for(config: SelectConfig, rows: int, sms: int, chained: bool) -> int:
    """Bytes of shared memory a block is given.

    A chained kernel's blocks start as soon as the scorer leaves an SM, and the hardware puts as many as fit on the
    first SMs that are free: two share one while others idle (32 rows of 128K: 4 us). Where all of them fit one an SM,
    they ask for more than half of its shared memory.
    """
    spread = chained and rows * config.cluster <= sms
    return max(config.shared_bytes, SPREAD_BYTES) if spread else config.shared_bytes


def configs_up_to(max_rows: int, max_len: int, k: int, sms: int, maxima: bool) -> list[SelectConfig]:
    """All that `config_for` can answer for 1..max_rows rows: what to load before a graph is captured."""
    turns = {1, 2, sms // 2, sms, *(3 * sms // (4 * c) for c in CLUSTERS), *(sms // c for c in CLUSTERS)}
    edges = {1, max_rows, *turns, *(turn + 1 for turn in turns)}
    found = [config_for(rows, max_len, k, sms, maxima) for rows in sorted(edges) if 1 <= rows <= max_rows]
    return list(dict.fromkeys(found))


def topk_workspace_bytes(rows: int, max_len: int, k: int, sms: int) -> int:
    """Bytes of the workspace of a `topk` call: 0 unless a block's part of a row exceeds its registers, or maxima come
    from a kernel of their own."""
    return rows * _workspace_pitch(max_len, config_for(rows, max_len, k, sms, False))


def _workspace_pitch(max_len: int, config: SelectConfig) -> int:
    """Bytes from row to row of the workspace: uint16 maxima of every 8 keys, in whole 16-byte vectors."""
    if not config.given and -(-(max_len + 7) // config.cluster) + 64 <= config.topped_keys:
        return 0
    return 16 * (-(-(max_len + 7) // 64) + 1)


class Selector:
    """Exact selection of the `k` best keys of every row, as physical rows or positions.

    Args:
        make: makes the launch of a kernel configuration, for the device the tensors will be on.
        k: keys to select, 1..4096.
        max_rows, max_len: the most rows a call may have, and the longest row in keys.
        sms: streaming multiprocessors of the device.
        maxima: True for keysieve's own logits in the compact layout with their maxima (`select`), False for anyone's
            rows (`topk`).
    """

    def __init__(self, make: Make, *, k: int, max_rows: int, max_len: int, sms: int, maxima: bool) -> None:
        kernel = SELECT if maxima else TOPK
        self.k, self.max_len, self.sms, self.maxima = k, max_len, sms, maxima
        self._launches = {config: make(kernel, config) for config in configs_up_to(max_rows, max_len, k, sms, maxima)}
        self._tops = make(TOPS, TOPS_CONFIG) if any(config.given for config in self._launches) else None

    def config(self, rows: int) -> SelectConfig:
        """What runs for a call of `rows` rows."""
        return config_for(rows, self.max_len, self.k, self.sms, self.maxima)

    def select(
        self,
        logits: torch.Tensor,
        tops: torch.Tensor,
        seq_lens: torch.Tensor,
        next_n: int,
        *,
        out: torch.Tensor,
        counts: torch.Tensor,
        positions: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        limit: int = NO_LIMIT,
        kv_table: torch.Tensor | None = None,
        kv_page: int = 64,
        block_rows: int = 64,
        row_request: torch.Tensor | None = None,
        flags: torch.Tensor | None = None,
        release: bool = False,
        chained: bool = False,
        scored: int = 0,
        drop: bool = False,
    ) -> None:
        """Select from logits in the compact layout.

        logits: BF16, canonical, 256-byte aligned; tops: 16-bit, an eighth its elements. seq_lens: int32 [rows],
        contiguous, next_n rows a request. starts: int32 [requests + 1], tiles before each request, as the scorer leaves
        them; without it they are counted from the lengths with `limit`. limit: a longer row is empty and raises a flag.
        out, positions: int32 [rows, k], any row stride; counts: int32 [rows], contiguous. kv_table: int32 [requests,
        blocks], any row stride; row_request: int32 [rows], its row for each row. kv_page: a power of two. flags: int32
        flag word, bits as in `schedule`. release: let the next kernel of a programmatic chain start early. chained:
        launch as a programmatic dependent of the kernel before. scored: the limit the scorer had, where the kernel
        before is that scorer and seq_lens were complete before it started; they are then read while it runs, tiles are
        counted from them, and `starts` is not read. drop: logits and tops are a workspace that is written before it is
        read again: those of a large step are dropped from L2 rather than written to memory, and are undefined after.
        """
        rows = seq_lens.numel()
        if rows == 0:
            return
        if not self.maxima:
            raise ValueError("this Selector was made for rows without maxima: call topk()")
        capacity = min(logits.numel(), tops.numel() * 8)
        config = self.config(rows)
        self._launches[config](
            logits.data_ptr(),
            tops.data_ptr(),
            0,
            capacity,
            0 if scored else _address(starts),
            seq_lens.data_ptr(),
            1,
            rows,
            next_n,
            *self._outputs(limit, out, counts, positions, kv_table, kv_page, block_rows, row_request, flags),
            int(release) | 2 * int(drop),
            scored,
            int(chained),
            shared_for(config, rows, self.sms, chained),
        )

    def topk(
        self,
        logits: torch.Tensor,
        lengths: torch.Tensor,
        *,
        out: torch.Tensor,
        counts: torch.Tensor,
        positions: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        limit: int = NO_LIMIT,
        next_n: int = 1,
        kv_table: torch.Tensor | None = None,
        kv_page: int = 64,
        block_rows: int = 64,
        row_request: torch.Tensor | None = None,
        flags: torch.Tensor | None = None,
        release: bool = False,
        chained: bool = False,
    ) -> None:
        """Select from anyone's rows: BF16 [rows, width], any row stride, unit inner stride, any address and bits.

        lengths: int32 [rows], any stride. limit: beside it, `width` bounds a row. workspace: at least
        `topk_workspace_bytes` bytes, 16-byte aligned, where that is not 0; its contents do not matter and are not kept.
        Other arguments as in `select`; without row_request a row belongs to request `row // next_n`.
        """
        rows, width = logits.shape
        if rows == 0:
            return
        if self.maxima:
            raise ValueError("this Selector was made for logits with maxima: call select()")
        config = self.config(rows)
        pitch = _workspace_pitch(self.max_len, config)
        if pitch and (workspace is None or workspace.numel() * workspace.element_size() < rows * pitch):
            raise ValueError(f"workspace: {rows * pitch} bytes are needed for {rows} rows of up to {self.max_len} keys")
        limit = min(limit, width, self.max_len)
        if config.given:
            assert self._tops is not None
            self._tops(
                logits.data_ptr(),
                _address(workspace),
                logits.stride(0),
                pitch,
                lengths.data_ptr(),
                lengths.stride(0),
                rows,
                -(-(limit + 7) // (8 * TOPS_CONFIG.groups)),
                limit,
                int(chained),
            )
        self._launches[config](
            logits.data_ptr(),
            _address(workspace),
            logits.stride(0),
            pitch,
            0,
            lengths.data_ptr(),
            lengths.stride(0),
            rows,
            next_n,
            *self._outputs(limit, out, counts, positions, kv_table, kv_page, block_rows, row_request, flags),
            int(release),
            0,
            int(chained or config.given),
            config.shared_bytes,
        )

    def _outputs(
        self,
        limit: int,
        out: torch.Tensor,
        counts: torch.Tensor,
        positions: torch.Tensor | None,
        kv_table: torch.Tensor | None,
        kv_page: int,
        block_rows: int,
        row_request: torch.Tensor | None,
        flags: torch.Tensor | None,
    ) -> tuple[int, ...]:
        """The entry's arguments from `k` to `flags`. A row longer than its table holds is empty as well."""
        table_stride = 0
        if kv_table is not None:
            limit = min(limit, kv_table.shape[1] * kv_page)
            table_stride = kv_table.stride(0)
        return (
            self.k,
            limit,
            _address(kv_table),
            table_stride,
            _address(row_request),
            kv_page.bit_length() - 1,
            block_rows,
            out.data_ptr(),
            out.stride(0),
            counts.data_ptr(),
            _address(positions),
            0 if positions is None else positions.stride(0),
            _address(flags),
        )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
