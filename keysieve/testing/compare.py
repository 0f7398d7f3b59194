"""Bitwise comparison and guards: what a test of exact bytes needs to say where they differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

CANARY = 0x5A
_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """The tensor's bit patterns as integers of its element size, on the CPU (NaN payloads and -0 become visible)."""
    plain = tensor.detach().cpu().contiguous()
    return plain.view(_WORD[plain.element_size()])


def assert_bitwise_equal(got: Tensor, want: Tensor, what: object = "tensors") -> None:
    """Raise AssertionError unless dtype, shape and every bit agree; say how many differ and show the first few.

    Args:
        got, want: tensors on any device, any strides.
        what: named in the message; a :class:`~keysieve.testing.cases.Case` prints how to build it again.
    """
    if got.dtype != want.dtype or got.shape != want.shape:
        raise AssertionError(f"{what}: got {got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}")
    have, need = bits_of(got), bits_of(want)
    if torch.equal(have, need):
        return
    where = (have != need).nonzero()
    digits = 2 * got.element_size()
    mask = (1 << 4 * digits) - 1
    lines = []
    for index in where[:8].tolist():
        at = tuple(index)
        lines.append(
            f"  {at}: got {got[at].item()!r} (0x{int(have[at]) & mask:0{digits}X}), "
            f"expected {want[at].item()!r} (0x{int(need[at]) & mask:0{digits}X})"
        )
    more = "" if where.shape[0] <= 8 else f"\n  ... and {where.shape[0] - 8} more"
    rows = ""
    if got.dim() > 1:
        bad = sorted(set(where[:, 0].tolist()))
        rows = f" in rows {bad[:12]}{' ...' if len(bad) > 12 else ''}"
    total = got.numel()
    raise AssertionError(f"{what}: {where.shape[0]} of {total} elements differ{rows}:\n" + "\n".join(lines) + more)


@contextmanager
def assert_untouched(**tensors: Tensor) -> Iterator[None]:
    """Within the block, not one byte of the named tensors may change, nor of the storage they are views of."""
    before = {name: _storage_bytes(t).clone() for name, t in tensors.items()}
    yield
    for name, tensor in tensors.items():
        assert_bitwise_equal(_storage_bytes(tensor), before[name], f"storage of {name} after the call")


def _storage_bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@dataclass(frozen=True)
class GuardedRows:
    """A strided view with canaries around and between its rows.

    Attributes:
        view: ``[rows, width]`` to hand to a call; poisoned, so an element nobody writes shows.
        storage: the whole allocation, uint8.
    """

    view: Tensor
    storage: Tensor

    def assert_canaries(self) -> None:
        """Raise AssertionError when a byte outside the view has changed."""
        probe = self.storage.clone()
        view = self.view
        inside = torch.as_strided(probe.view(view.dtype), view.shape, view.stride(), view.storage_offset())
        canary = torch.full((view.element_size(),), CANARY, dtype=torch.uint8, device=probe.device)
        inside.copy_(canary.view(view.dtype))
        changed = (probe != CANARY).nonzero().flatten().tolist()
        if changed:
            raise AssertionError(f"{len(changed)} canary bytes outside the view changed, first at byte {changed[0]}")


def guarded_rows(
    rows: int,
    width: int,
    *,
    stride: int | None = None,
    offset: int = 8,
    dtype: torch.dtype = torch.int32,
    device: torch.device | str = "cpu",
) -> GuardedRows:
    """A ``[rows, width]`` view with row stride ``stride`` (default ``width + 8``) in an allocation full of canaries.

    The view ends ``offset`` elements before the allocation does, and every byte, in the view too, is 0x5A: no valid
    position, row or count of a test this size.
    """
    step = width + 8 if stride is None else stride
    itemsize = torch.empty(0, dtype=dtype).element_size()
    elements = offset + max(rows - 1, 0) * step + width + offset
    storage = torch.full((elements * itemsize,), CANARY, dtype=torch.uint8, device=device)
    view = torch.as_strided(storage.view(dtype), (rows, width), (step, 1), offset)
    return GuardedRows(view, storage)
