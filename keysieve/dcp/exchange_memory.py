"""The memory of one rank of the device exchange: its block, which peers write, and what it keeps to itself.

Blocks come from ``torch.distributed`` symmetric memory, one rank a process (:func:`symmetric`), or from ordinary
memory of this process's devices, for ranks that live in one process (:class:`VirtualBlocks`: for tests and ``keysieve
check``). Either way a kernel sees addresses only, and peers are reached by plain stores to them: multicast is not used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch

from keysieve.checks import UnsupportedError, message, refuse
from keysieve.dcp.layout import TICKET_WORDS, ExchangeLayout
from keysieve.device.report import REPORT_BYTES
from keysieve.spec import MAX_WORLD

_MASK: Final = 0xFFFFFFFF


class ExchangeMemory:
    """One rank's buffers on its device.

    Attributes:
        layout: offsets within the block, the same on all ranks.
        block: uint8, what peers write; ``layout.block_bytes`` long.
        peers: int64 ``[16]`` on the device: the address of each rank's block as this device sees it, then zeros.
        epoch: int32 ``[max_rows]``: the completed calls of each row, modulo 2^32.
        seq2: int64 ``[max_rows]``: the completed rescues of each row.
        ticket: int32 ``[64]``: row numbers handed to blocks; the last word is claimed by the thread that reports.
        report: uint8 ``[64]`` of pinned host memory; see ``device/report.py``.
    """

    def __init__(self, layout: ExchangeLayout, block: torch.Tensor, owner: Any = None) -> None:
        if block.numel() < layout.block_bytes or block.data_ptr() % 16:
            refuse(
                "block",
                got=f"{block.numel()} bytes at {block.data_ptr():#x}",
                accepted=f"{layout.block_bytes} bytes, 16-byte aligned",
                remedy="Allocate it with the layout's block_bytes.",
            )
        device, rows = block.device, layout.shape.max_rows
        self.layout, self.block, self._owner = layout, block, owner
        with torch.inference_mode(False):
            self.peers = torch.zeros(MAX_WORLD, dtype=torch.int64, device=device)
            self.epoch = torch.zeros(rows, dtype=torch.int32, device=device)
            self.seq2 = torch.zeros(rows, dtype=torch.int64, device=device)
            self.ticket = torch.zeros(TICKET_WORDS, dtype=torch.int32, device=device)
            self.report = torch.zeros(REPORT_BYTES, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")

    def set_peers(self, addresses: Sequence[int]) -> None:
        """Say where every rank's block is."""
        known = [a if a < 1 << 63 else a - (1 << 64) for a in addresses]
        table = torch.tensor(known + [0] * (MAX_WORLD - len(known)), dtype=torch.int64, device="cpu")
        self.peers.copy_(table)

    def keep_for_ever(self) -> None:
        """Never free this memory: the CUDA context is lost.

        Freeing symmetric memory then throws where C++ cannot catch it, and the process would end at the first frame
        that an exception leaves, before anybody has read what a merge reported.
        """
        for kept in (self.block, self._owner):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def preset(self, epoch: int) -> None:
        """As after ``epoch`` completed calls of every row: epochs, and the tags of this rank's slots.

        Every rank does it between the same two calls, with a barrier before and after.
        """
        layout = self.layout
        tag = _signed(epoch)
        halves = self.block[layout.slots : layout.slots + layout.slots_bytes].view(torch.int32)
        halves[1::2] = tag
        self.epoch.fill_(tag)


def _signed(value: int) -> int:
    """The int32 of the same bits as ``value`` modulo 2^32."""
    value &= _MASK
    return value - (1 << 32) if value >> 31 else value


# ----------------------------------------------------------------------------------------------- one rank a process


def symmetric(layout: ExchangeLayout, device: torch.device, group: Any) -> ExchangeMemory:
    """This rank's memory, its block mapped by all ranks of ``group``; collective. Zeroed, and everybody's zeroing seen.

    Raises:
        UnsupportedError: symmetric memory cannot be had; the text says why. (Ranks may differ: the caller compares.)
    """
    try:
        import torch.distributed._symmetric_memory as symmetric_memory

        # A device index is needed: symmetric memory does not take "the current one".
        block = symmetric_memory.empty(layout.block_bytes, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(block, group)
        addresses = [int(a) for a in handle.buffer_ptrs]
        offset = block.data_ptr() - addresses[handle.rank]
    except (ImportError, AttributeError, RuntimeError, ValueError, TypeError) as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UnsupportedError(
            message(
                "group",
                got=f"no symmetric memory on {device}: {text}",
                accepted="ranks whose devices can map each other's memory",
                remedy="Use keysieve.dcp.Gather.",
            )
        ) from error
    # One allocation may hold several tensors; all ranks allocate alike, so the offset is the same everywhere.
    memory = ExchangeMemory(layout, block, owner=handle)
    block.zero_()
    memory.set_peers([address + offset for address in addresses])
    torch.cuda.synchronize(device)
    return memory


# ----------------------------------------------------------------------------------------------- ranks of one process


class VirtualBlocks:
    """The blocks of ranks that live in one process, on one device or several that can reach each other.

    Args:
        devices: of each rank, in rank order.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self._made: dict[ExchangeLayout, dict[int, ExchangeMemory]] = {}

    @property
    def world(self) -> int:
        return len(self.devices)

    def memory(self, layout: ExchangeLayout, rank: int) -> ExchangeMemory:
        """Rank ``rank``'s memory for this layout, made once; peers know it as soon as the last rank has asked."""
        made = self._made.setdefault(layout, {})
        if rank not in made:
            device = self.devices[rank]
            with torch.inference_mode(False):
                block = torch.zeros(layout.block_bytes, dtype=torch.uint8, device=device)
            made[rank] = ExchangeMemory(layout, block)
            if len(made) == self.world:
                self._introduce([made[r] for r in range(self.world)])
        return made[rank]

    def complete(self, layout: ExchangeLayout) -> bool:
        """Have all ranks their memory?"""
        return len(self._made.get(layout, {})) == self.world

    def _introduce(self, ranks: list[ExchangeMemory]) -> None:
        for device in set(self.devices):
            for other in set(self.devices) - {device}:
                # A copy makes torch open the way between two devices; kernels use it from then on.
                torch.zeros(1, device=other).copy_(torch.zeros(1, device=device))
        for memory in ranks:
            memory.set_peers([m.block.data_ptr() for m in ranks])
        for device in set(self.devices):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
