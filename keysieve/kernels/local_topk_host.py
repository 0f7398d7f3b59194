"""From tensors to launches of the local top-N. Nothing is checked twice: callers have checked shapes and dtypes.

No cutlass here. `make` turns a kernel and a configuration into what launches it on the tensors' device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keysieve.kernels.local_topk_config import (
    LOCAL_PUSH,
    LOCAL_TOPK,
    SMALL_N,
    LocalTopkConfig,
    config_for,
    shape_for,
)

Make = Callable[[Any, Any], Callable[..., None]]
Form = tuple[tuple[int, int, int] | None, bool]
"""One of `SHAPES` or None, and whether maxima are read."""

NO_LIMIT = 2**31 - 1
SPREAD_BYTES = 116 * 1024
"""Shared memory of a block that shall have a multiprocessor of its own: more than half of one's."""

KEPT_KEYS = 3 << 20
"""Keys of all rows up to which their logits and maxima stay in L2 wherever they lie: they fill two thirds of what an
H200's driver sets aside. 64 rows of 65,536 keys fill four fifths, and took 128 or 132 us to be scored with maxima,
depending on where the memory was; without, 128."""

VECTOR = 8
"""Keys of a 16-byte vector: rows begin at multiples of it, and their last vector is read whole."""


class LocalTopk:
    """The N best keys of every row as candidate rows: written, and with `push` pushed to every rank's slots.

    Args:
        make: makes the launch of a kernel configuration.
        n, planes: entries of a candidate row, 1..4096, and its index planes, 1..10.
        push: True for `push` (this rank's own canonical logits, global lengths), False for `topk` (anyone's rows, local
            lengths).
        keys: keys that a row may have, if they are known to be few; sms: streaming multiprocessors of the device: with
            both, rows may be shared by blocks. A row of more keys is then a fault.
        given: `push` may be given the vectors' maxima; `takes_maxima` says for which rows it wants them.
        config: for measurements; the one that serves `n` by default.
    """

    def __init__(
        self,
        make: Make,
        *,
        n: int,
        planes: int,
        push: bool,
        keys: int = 0,
        sms: int = 0,
        given: bool = False,
        config: LocalTopkConfig | None = None,
    ) -> None:
        self.n, self.planes, self._keys, self._sms = n, planes, keys, sms
        self.config = config_for(n, planes, push) if config is None else config
        self._measured = config is not None
        self._given = self.config.given
        if not self._measured and given and push:
            self._given = config_for(n, planes, push, given=True).given and keys > self.config.block_keys
        if config is not None and not config.longer:
            self._keys = config.keys
        self._configs: dict[Form, LocalTopkConfig] = {}
        # The form changes no more from there on: blocks cannot be alone, and the maxima of more keys find no room.
        last = sms + 1 if push and keys and sms and not self._measured else 1
        if last > 1 and self._given:
            last = max(last, KEPT_KEYS // keys + 1)
        for rows in range(1, last + 1):
            shape, maxima = form = self._form(rows)
            if form not in self._configs:
                self._configs[form] = config or config_for(n, planes, push, shape, maxima)
        kernel = LOCAL_PUSH if push else LOCAL_TOPK
        self._launch = {form: make(kernel, one) for form, one in self._configs.items()}

    def push(
        self,
        logits: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        tops: torch.Tensor | None = None,
        world: int,
        rank: int,
        interleave: int,
        peers: torch.Tensor | None = None,
        slots: int = 0,
        max_rows: int = 0,
        epoch: torch.Tensor | None = None,
        site: int = 0,
        limit: int = NO_LIMIT,
        local_limit: int = NO_LIMIT,
        words: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        flags: torch.Tensor | None = None,
        settled: bool = False,
        release: bool = False,
        chained: bool = False,
    ) -> None:
        """Push the words of every row, padding and signature included, to the slots of all ranks; without `peers` write
        them only.

        logits: BF16 [rows, width] as the pitched scorer writes them: canonical, 16-byte aligned rows. seq_lens: int32
        [rows], contiguous, global. peers, slots, max_rows, epoch: of an exchange's memory. limit: a longer row,
        local_limit: one with more keys on this rank is pushed as an empty one and raises a flag. words: int32 [rows,
        words], to have them written here as well. settled: the lengths were complete before the kernel in front
        started, and that one triggers only after its own grid dependency. release, chained: as for `select`.
        """
        self._run(
            logits,
            seq_lens,
            (limit, min(local_limit, logits.shape[1], 1 << (16 + self.planes))),
            (words, counts),
            (_address(peers), slots, max_rows, world, rank, interleave, _address(epoch), site),
            flags,
            (int(settled and chained), int(release), int(chained)),
            _address(tops),
        )

    def topk(
        self,
        logits: torch.Tensor,
        local_lens: torch.Tensor,
        *,
        words: torch.Tensor,
        counts: torch.Tensor | None = None,
        limit: int = NO_LIMIT,
        flags: torch.Tensor | None = None,
        release: bool = False,
        chained: bool = False,
    ) -> None:
        """Write candidate rows of anyone's logits: BF16 [rows, width], unit inner stride, any bits.

        local_lens: int32 [rows], any stride. A row longer than `limit` or the width is empty and raises a flag. words:
        int32 [rows, words], any row stride; counts: int32 [rows], contiguous. Rows that do not lie on 16-byte vectors
        are copied first.
        """
        width = logits.shape[1]
        if not on_vectors(logits):
            padded = logits.new_empty((logits.shape[0], -(-width // VECTOR) * VECTOR))
            padded[:, :width] = logits
            logits = padded
        none = (0, 0, 0, 1, 0, 1, 0, 0)
        turn = (0, int(release), int(chained))
        self._run(
            logits,
            local_lens,
            (NO_LIMIT, min(limit, width, 1 << (16 + self.planes))),
            (words, counts),
            none,
            flags,
            turn,
        )

    def _run(
        self,
        logits: torch.Tensor,
        lens: torch.Tensor,
        limits: tuple[int, int],
        out: tuple[torch.Tensor | None, torch.Tensor | None],
        exchange: tuple[int, ...],
        flags: torch.Tensor | None,
        turn: tuple[int, int, int],
        tops: int = 0,
    ) -> None:
        rows = lens.shape[0] if lens.dim() == 1 else lens.numel()
        if rows == 0:
            return
        words, counts = out
        limit, local_limit = limits
        if self._keys:
            local_limit = min(local_limit, self._keys)
        form = self._form(rows)
        self._launch[form](
            logits.data_ptr(),
            tops,
            _pitch(logits),
            lens.data_ptr(),
            lens.stride(0) if lens.dim() == 1 else 1,
            rows,
            self.n,
            self.planes,
            limit,
            local_limit,
            _address(words),
            0 if words is None else _pitch(words),
            _address(counts),
            *exchange,
            _address(flags),
            *turn,
            self._shared_bytes(rows, form, bool(turn[2])),
        )

    def takes_maxima(self, rows: int) -> bool:
        """Does `push` of so many rows read the maxima of their vectors? It does not touch them where it does not."""
        return self._form(rows)[1]

    def serves(self, rows: int) -> LocalTopkConfig:
        """The configuration that is launched for so many rows."""
        return self._configs[self._form(rows)]

    def _form(self, rows: int) -> Form:
        """How so many rows are worked on. Maxima are worth their bytes where their writer finds room for them in L2
        beside the logits, or where few of the vectors are read again."""
        if self._measured:
            return None, self._given
        if not (self._keys and self._sms):
            return None, False
        worth = self._given and (self.n <= SMALL_N or rows * self._keys <= KEPT_KEYS)
        shape = shape_for(rows, self._keys, self._sms, self.n, worth)
        return shape, worth and shape is None

    def _shared_bytes(self, rows: int, form: Form, chained: bool) -> int:
        """Shared memory that a block is given. As the scorer's blocks end, room comes up on some multiprocessors before
        others: if two blocks of this kernel fitted, they would share one, and another would have none."""
        config = self._configs[form]
        spread = chained and rows * config.cluster <= self._sms
        return max(config.shared_bytes, SPREAD_BYTES) if spread else config.shared_bytes


def on_vectors(logits: torch.Tensor) -> bool:
    """Does every row begin at a 16-byte vector, and is the last vector of the last row inside the tensor's memory?"""
    rows, width = logits.shape
    if logits.data_ptr() % 16 or (rows > 1 and logits.stride(0) % VECTOR):
        return False
    last = logits.storage_offset() + (rows - 1) * logits.stride(0) + -(-width // VECTOR) * VECTOR
    return last * logits.element_size() <= logits.untyped_storage().nbytes()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _pitch(tensor: torch.Tensor) -> int:
    """Elements from row to row."""
    return tensor.stride(0) if tensor.shape[0] > 1 else tensor.shape[1]
