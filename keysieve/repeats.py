"""Calls that passed every check, remembered by their form, so that the next one of that form need not pass them again.

What the checks of :mod:`keysieve.inputs` look at is a call's *form*: which arguments are given, their types, and of
every tensor the dtype, device, shape and strides; and of a few addresses the alignment and whether outputs overlap. A
:class:`KnownCall` compares the form with one that passed and looks at those addresses again. In any doubt it declines
and the full checks decide, so a call is refused exactly as if it were the first. Addresses are read anew in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any, Protocol

import torch

from keysieve.cache import IndexCache
from keysieve.inputs import Selection

MOST_FORMS = 8
"""Forms an indexer remembers; a step of another form takes the checked path, and the oldest form is forgotten."""


class Relaunch(Protocol):
    """One checked step's launches, for any tensors of the same form."""

    def launch(
        self,
        codes: torch.Tensor,
        data: torch.Tensor,
        weights: torch.Tensor,
        seq_lens: torch.Tensor,
        index_table: torch.Tensor,
        kv_table: torch.Tensor | None,
        rows: torch.Tensor,
        counts: torch.Tensor,
        positions: torch.Tensor | None,
    ) -> bool:
        """Make the launches; False, with nothing done, where an address is not aligned as the kernels need it."""


class KnownCall:
    """One form of ``DecodeIndexer.__call__`` that passed every check.

    Args:
        arguments: the call's tensors as given: query, cache data, weights, seq_lens, index_table, kv_table, out,
            counts, positions; None for what was not given (positions: also where only a bool was).
        cache: the call's cache.
        kv_page, block_rows: as given.
        positions: as given.
        result: the buffers that were filled.
        relaunch: the step's launches.
    """

    __slots__ = (
        "_absent",
        "_block_rows",
        "_bytes",
        "_given",
        "_key_format",
        "_kv_page",
        "_new",
        "_new_counts",
        "_positions",
        "_relaunch",
        "_same",
    )

    def __init__(
        self,
        arguments: tuple[torch.Tensor | None, ...],
        cache: IndexCache,
        kv_page: int | None,
        block_rows: int | None,
        positions: bool | torch.Tensor,
        result: Selection,
        relaunch: Relaunch,
    ) -> None:
        self._given = tuple(t is not None for t in arguments)
        self._absent = tuple(not given for given in self._given[5:8])
        self._same = same_form(tuple(t for t in arguments if t is not None))
        self._key_format = cache.spec.key_format
        self._kv_page, self._block_rows = (type(kv_page), kv_page), (type(block_rows), block_rows)
        self._positions = type(positions) if isinstance(positions, torch.Tensor) else bool(positions)
        self._new = (tuple(result.rows.shape), torch.int32, result.rows.device)
        self._new_counts = tuple(result.counts.shape)
        self._bytes = tuple(0 if t is None else span_bytes(t) for t in result)
        self._relaunch = relaunch

    def repeat(
        self,
        query: Any,
        cache: Any,
        weights: Any,
        seq_lens: Any,
        index_table: Any,
        kv_table: Any,
        kv_page: Any,
        block_rows: Any,
        positions: Any,
        out: Any,
        counts: Any,
    ) -> Selection | None:
        """Make the call if it has this form, else None with nothing done."""
        if type(cache) is not IndexCache or cache.spec.key_format != self._key_format:
            return None
        if (type(kv_page), kv_page) != self._kv_page or (type(block_rows), block_rows) != self._block_rows:
            return None
        if (kv_table is None, out is None, counts is None) != self._absent:
            return None
        wanted = self._positions
        if positions is not wanted and type(positions) is not wanted:
            return None
        data = cache.data
        tensors = (query, data, weights, seq_lens, index_table, kv_table, out, counts, positions)
        if not self._same(*compress(tensors, self._given)):
            return None
        shape, dtype, device = self._new
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=device)
        if counts is None:
            counts = torch.empty(self._new_counts, dtype=dtype, device=device)
        if wanted is True:
            positions = torch.empty(shape, dtype=dtype, device=device)
        elif wanted is False:
            positions = None
        if self._may_overlap(out, counts, positions):
            return None
        if not self._relaunch.launch(query, data, weights, seq_lens, index_table, kv_table, out, counts, positions):
            return None
        return Selection(out, counts, positions)

    def _may_overlap(self, out: torch.Tensor, counts: torch.Tensor, positions: torch.Tensor | None) -> bool:
        """Whether the byte ranges of the outputs meet. Rows side by side in one allocation do, and are no error."""
        rows_bytes, counts_bytes, positions_bytes = self._bytes
        first, number = out.data_ptr(), counts.data_ptr()
        if first < number + counts_bytes and number < first + rows_bytes:
            return True
        if positions is None:
            return False
        other = positions.data_ptr()
        return (first < other + positions_bytes and other < first + rows_bytes) or (
            number < other + positions_bytes and other < number + counts_bytes
        )


def repeatable(cache: object, seq_lens: torch.Tensor, kv_page: object, block_rows: object) -> bool:
    """Whether a checked call can be known by its form.

    Not: a subclass of the cache, geometry in anything but ints, and 2-D lengths with gaps (the checks
    flatten them, perhaps into a copy, so the launches do not read the caller's).
    """
    if type(cache) is not IndexCache:
        return False
    if {type(kv_page), type(block_rows)} - {int, type(None)}:
        return False
    return seq_lens.dim() == 1 or seq_lens.is_contiguous()


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first byte to the one after its last; strides are not negative."""
    if not tensor.numel():
        return 0
    return tensor.element_size() * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))


# ---------------------------------------------------------------------------------------------------- form of tensors


def same_form(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    """A function of as many objects: do they have these tensors' types, dtypes, devices, shapes and strides?

    It may say no where the answer is yes, never the other way round.
    """
    compared = _compared_by_torch(tensors)
    return compared if compared is not None else _compared_here(tensors)


def _compared_here(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    wanted = [_form(t) for t in tensors]

    def same(*given: object) -> bool:
        return [_form(t) for t in given] == wanted

    return same


def _form(tensor: object) -> object:
    if not isinstance(tensor, torch.Tensor):
        return None
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _guards_of(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    """torch's own comparison of tensor forms, as torch.compile uses it: all tensors in one call, in C++.

    Not a public interface: :func:`_torch_compares` tries it before it is relied on.
    """
    from torch._C._dynamo.guards import TensorGuards

    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _compared_by_torch(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool] | None:
    """torch's comparison, or None where it cannot be used: it also wants the objects to be different ones."""
    if not _torch_compares():
        return None
    check = _guards_of(tensors)
    return check if check(*tensors) else None


_works: bool | None = None


def _torch_compares() -> bool:
    """Does this torch's comparison see every difference that matters? Tried once, on small tensors of the CPU."""
    global _works
    if _works is None:
        try:
            _works = _tried()
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
            _works = False
    return _works


def _tried() -> bool:
    with torch.inference_mode(False):
        base = torch.zeros(8, 8, dtype=torch.int32)
    check = _guards_of((base[:4, :4], base[0]))
    others: list[object] = [
        base[:4, :5],
        base[:3, :4],
        base.t()[:4, :4],
        base.view(4, 16)[:, :4],
        base.view(torch.float32)[:4, :4],
        base.view(torch.uint32)[:4, :4],
        base[:4, :4].to("meta").as_strided((4, 4), (8, 1)),
        base[0],
        base[:4, :4].tolist(),
        None,
    ]
    return (
        bool(check(base[:4, :4], base[0]))
        and bool(check(base[4:, 4:], base[1]))
        and not any(check(other, base[0]) for other in others)
        and not check(base[:4, :4], base[:, 0])
    )
