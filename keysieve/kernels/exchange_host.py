"""From tensors to launches of the exchange's kernels. Nothing is checked twice: callers have checked shapes and dtypes.

No cutlass here. `make` turns a kernel and a configuration into what launches it on the tensors' device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keysieve.kernels.exchange_config import MERGE, MergeConfig, divider, merge_config
from keysieve.spec import candidate_words

Make = Callable[[Any, Any], Callable[..., None]]

NO_LIMIT = 2**31 - 1


class Merger:
    """Winners from the candidate rows of all ranks.

    Args:
        make: makes the launch of a kernel configuration.
        k, n, planes: keys to select, entries of a first list, index planes.
        world, rank, interleave: the sharding.
        tagged: whether lists come as tagged pairs in an exchange's slots.
        sms: streaming multiprocessors of the device: rows up to which all blocks run at once.
        config: of the kernel, None for the one that suits; for comparisons.
    """

    def __init__(
        self,
        make: Make,
        *,
        k: int,
        n: int,
        planes: int,
        world: int,
        rank: int,
        interleave: int,
        tagged: bool,
        sms: int,
        config: MergeConfig | None = None,
    ) -> None:
        self.k, self.n, self.planes, self.sms = k, n, planes, sms
        self.world, self.rank, self.interleave = world, rank, interleave
        self.divide = divider(interleave)
        self.config: MergeConfig = config or merge_config(world, candidate_words(n, planes), k, tagged)
        self._launch = make(MERGE, self.config)

    def exchange(
        self,
        memory: Any,
        logits: torch.Tensor,
        seq_lens: torch.Tensor,
        next_n: int,
        *,
        site: int | torch.Tensor,
        limit: int,
        local_limit: int,
        timeout_ns: int,
        out: torch.Tensor,
        counts: torch.Tensor,
        positions: torch.Tensor | None = None,
        kv_table: torch.Tensor | None = None,
        kv_page: int = 64,
        block_rows: int = 64,
        flags: torch.Tensor | None = None,
        release: bool = False,
        chained: bool = False,
    ) -> None:
        """Wait for all ranks' words of this call and merge them.

        memory: this rank's `ExchangeMemory`. logits: what the words were taken from, for a second round. seq_lens:
        int32 [rows], global. limit, local_limit: longest global and local lengths. Other arguments: as for
        `Selector.select`.
        """
        layout = memory.layout
        self._run(
            (
                memory.peers.data_ptr(),
                layout.slots,
                layout.recv,
                layout.flags,
                layout.shape.max_rows,
                layout.recv_pitch,
                layout.rescued,
                memory.epoch.data_ptr(),
                memory.seq2.data_ptr(),
                memory.ticket.data_ptr(),
                *(0, 0, 0, 0, 0, 0),
                logits.data_ptr(),
                row_pitch(logits),
                seq_lens.data_ptr(),
            ),
            seq_lens.numel(),
            next_n,
            (limit, local_limit, site),
            (kv_table, kv_page, block_rows),
            (out, counts, positions, flags),
            (memory.report.data_ptr(), timeout_ns, int(seq_lens.numel() > self.sms), int(release), int(chained)),
        )

    def merge(
        self,
        words: torch.Tensor,
        seq_lens: torch.Tensor | None,
        next_n: int,
        *,
        second: torch.Tensor | None = None,
        out: torch.Tensor,
        counts: torch.Tensor,
        positions: torch.Tensor | None = None,
        kv_table: torch.Tensor | None = None,
        kv_page: int = 64,
        block_rows: int = 64,
        chained: bool = False,
    ) -> None:
        """Merge candidate rows int32 [world, rows, words] (any outer strides) that lie in ordinary memory.

        second: lists of K entries in the same shape, of which those of saturated ranks are used. Without it n has to be
        k, or no rank may be saturated.
        """
        rows = words.shape[1]
        strides = (words.stride(0), words.stride(1), *((0, 0) if second is None else second.stride()[:2]))
        lists = (words.data_ptr(), address(second), *strides)
        self._run(
            (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, *lists, 0, 0, address(seq_lens)),
            rows,
            next_n,
            (NO_LIMIT, NO_LIMIT, 0),
            (kv_table, kv_page, block_rows),
            (out, counts, positions, None),
            (0, 0, 0, 0, int(chained)),
        )

    def _run(
        self,
        source: tuple[int, ...],
        rows: int,
        next_n: int,
        call: tuple[Any, ...],
        place: tuple[torch.Tensor | None, int, int],
        target: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        end: tuple[int, ...],
    ) -> None:
        if rows == 0:
            return
        limit, local_limit, site = call
        table, kv_page, block_rows = place
        out, counts, positions, flags = target
        self._launch(
            *source,
            rows,
            next_n,
            limit,
            local_limit,
            self.k,
            self.n,
            self.planes,
            self.world,
            self.rank,
            self.interleave,
            self.divide,
            site,
            address(table),
            0 if table is None else table.stride(0),
            kv_page.bit_length() - 1,
            block_rows,
            out.data_ptr(),
            out.stride(0),
            counts.data_ptr(),
            address(positions),
            0 if positions is None else positions.stride(0),
            address(flags),
            *end,
        )


def address(tensor: torch.Tensor | None) -> int:
    """Of a tensor's first element; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def row_pitch(tensor: torch.Tensor) -> int:
    """Elements from row to row."""
    return tensor.stride(0) if tensor.shape[0] > 1 else tensor.shape[1]
