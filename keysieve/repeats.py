"""Calls that passed every check, remembered by their form, so that the next one of that form need not pass them again.

What the checks of :mod:`keysieve.inputs` look at is a call's *form*: which arguments are given, their types, and of
every tensor the dtype, device, shape and strides; and of a few addresses the alignment and whether outputs overlap. A
:class:`KnownCall` compares the form with one that passed and looks at those addresses again. In any doubt it declines
and the full checks decide, so a call is refused exactly as if it were the first. Addresses are read anew in every call.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from itertools import compress
from typing import Any, Final, Protocol

import torch

from keysieve.cache import IndexCache
from keysieve.forms import same_form
from keysieve.inputs import Selection
from keysieve.launch import capturing
from keysieve.relaunch import GRAPHS_ENV, Launches
from keysieve.usual_forms import given_buffers, new_buffers, selection

MOST_FORMS = 8
"""Forms an indexer remembers; a step of another form takes the checked path, and the oldest form is forgotten."""


def prepared_after(asked: str | None) -> int:
    """Repeats of a form after which its launches are prepared for the driver, where the environment says ``asked``; 0
    for never."""
    return 0 if asked == "0" else 4


PREPARED_AFTER = prepared_after(os.environ.get(GRAPHS_ENV))


ADDRESSES: Final = (
    *("query", "cache", "weights", "seq_lens", "index_table"),
    *("kv_table", "out", "counts", "positions", "words"),
)
"""The addresses of a step's launches, in the order in which :meth:`Relaunch.launch` gets them."""


class Turns(Protocol):
    """Who used a workspace last."""

    stream: int


class Relaunch(Protocol):
    """One checked step's launches, for any tensors of the same form.

    ``direct`` may be called instead of ``launch`` while ``current_device() == index`` and ``raw_stream(index)`` is
    ``turns.stream``: it saves a call of many arguments in the usual case.

    Attributes:
        alignment: what the addresses of query and cache have to be multiples of, a power of two.
        element: any one int32 of the device, [1]: new buffers are made in its likeness.
        direct: takes all of :data:`ADDRESSES` and the stream; None if something has to be done before each launch.
        index: the device's.
        turns: who used the workspace last.
        lock: held while that is looked at and launches are made: threads take turns with the workspace, too.
        current_device, raw_stream: the C functions that say which device is current, and its current stream.
    """

    alignment: int
    element: torch.Tensor
    direct: Callable[..., None] | None
    index: int
    lock: threading.Lock
    current_device: Callable[[], int]
    raw_stream: Callable[[int], int]

    @property
    def turns(self) -> Turns: ...

    def launch(
        self,
        seq_lens: torch.Tensor,
        query: int,
        cache: int,
        weights: int,
        lens: int,
        index_table: int,
        kv_table: int,
        out: int,
        counts: int,
        positions: int,
        words: int,
        site: int,
    ) -> None:
        """Make the launches on the device's current stream.

        Args:
            seq_lens: the lengths as given, for kernels that do not take them as they are.
            query, .. words: the addresses that :data:`ADDRESSES` names, 0 for what is absent.
            site: the call's, for kernels that compare it between ranks.
        """


class KnownCall:
    """One form of ``DecodeIndexer.__call__`` that passed every check.

    Args:
        arguments: the call's tensors as given: query, cache data, weights, seq_lens, index_table, kv_table, out,
            counts, positions, the query's scale words; None for what was not given (positions: also where only a bool
            was).
        cache: the call's cache.
        kv_page, block_rows: as given.
        positions: as given.
        result: the buffers that were filled.
        relaunch: the step's launches.
    """

    __slots__ = (
        *("_absent", "_block_rows", "_counts_bytes", "_current_device", "_direct", "_given", "_index"),
        *(
            "_key_format",
            "_kv_page",
            "_lock",
            "_misaligned",
            "_numbers",
            "_paired",
            "_positions",
            "_positions_bytes",
            "_raw_stream",
            "_rows",
            "_rows_bytes",
        ),
        *("__weakref__", "_same", "_turns", "relaunch"),
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
        absent = tuple(not given for given in self._given[5:8])
        self._absent = absent if any(absent) else None  # where all are given, None among them has no form
        self._same = same_form(tuple(t for t in arguments if t is not None))
        self._key_format = cache.spec.key_format
        self._kv_page, self._block_rows = kv_page, block_rows
        self._paired = self._given[9]
        self._positions = type(positions) if isinstance(positions, torch.Tensor) else bool(positions)
        # empty_like of an expanded element takes little more than half the time that empty does.
        shape, element = result.rows.shape, relaunch.element
        self._rows, self._numbers = element.expand(shape), element.expand(shape[:1])
        self._rows_bytes, self._counts_bytes = span_bytes(result.rows), span_bytes(result.counts)
        self._positions_bytes = 0 if result.positions is None else span_bytes(result.positions)
        self._misaligned = relaunch.alignment - 1
        self.relaunch, self._direct, self._index, self._turns = (
            relaunch,
            relaunch.direct,
            relaunch.index,
            relaunch.turns,
        )
        if isinstance(relaunch.direct, Launches):
            self._direct = _Warming(self, relaunch.direct) if PREPARED_AFTER else relaunch.direct.function
        self._lock = relaunch.lock
        self._current_device, self._raw_stream = relaunch.current_device, relaunch.raw_stream

    def launch_by(self, direct: Callable[..., None]) -> None:
        """Make the launches with ``direct`` from now on, where nothing has to be done before them."""
        self._direct = direct

    def any_form(
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
        site: int,
    ) -> Selection | None:
        """Make the call if it has this form, else None with nothing done."""
        # The attributes behind the properties spec and data, which cost as much as a tensor's comparison.
        if type(cache) is not IndexCache or cache._spec.key_format != self._key_format:
            return None
        # An int beside the type: True == 1 and 64.0 == 64, but neither is accepted.
        if kv_page is not self._kv_page and (type(kv_page) is not int or kv_page != self._kv_page):
            return None
        if block_rows is not self._block_rows and (type(block_rows) is not int or block_rows != self._block_rows):
            return None
        if self._absent is not None and (kv_table is None, out is None, counts is None) != self._absent:
            return None
        wanted = self._positions
        if positions is not wanted and type(positions) is not wanted:
            return None
        words = None
        if self._paired:
            if type(query) is not tuple or len(query) != 2:
                return None
            query, words = query
        data = cache._data
        tensors = (query, data, weights, seq_lens, index_table, kv_table, out, counts, positions, words)
        if not self._same(*compress(tensors, self._given)):
            return None
        if out is None:
            out = torch.empty_like(self._rows)
        if counts is None:
            counts = torch.empty_like(self._numbers)
        codes, pool, first, number = query.data_ptr(), data.data_ptr(), out.data_ptr(), counts.data_ptr()
        if (codes | pool) & self._misaligned:
            return None
        # Byte ranges that meet may still be apart, as rows side by side in one allocation are: the checks look closer.
        if first < number + self._counts_bytes and number < first + self._rows_bytes:
            return None
        other = 0
        if wanted is False:
            positions = None
        else:
            if wanted is True:
                positions = torch.empty_like(self._rows)
            other = positions.data_ptr()
            end = other + self._positions_bytes
            if first < end and other < first + self._rows_bytes:
                return None
            if number < end and other < number + self._counts_bytes:
                return None
        table = 0 if kv_table is None else kv_table.data_ptr()
        scale = 0 if words is None else words.data_ptr()
        heads, lens, pages, index = weights.data_ptr(), seq_lens.data_ptr(), index_table.data_ptr(), self._index
        with self._lock:
            if self._current_device() == index:
                stream = self._raw_stream(index)
                if stream == self._turns.stream and self._direct is not None:
                    self._direct(codes, pool, heads, lens, pages, table, first, number, other, scale, stream)
                    return selection(Selection, (out, counts, positions))
        self.relaunch.launch(seq_lens, codes, pool, heads, lens, pages, table, first, number, other, scale, site)
        return selection(Selection, (out, counts, positions))


class AnyForm(KnownCall):
    """A known call that is repeated by looking at everything."""

    __slots__ = ()

    repeat = KnownCall.any_form  # a method: kept in the instance it would keep the instance, and a workspace, alive


class UsualForm(KnownCall):
    """A known call of one of the two most frequent forms, with a function of its own."""

    __slots__ = ("repeat",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert self._direct is not None
        self.repeat = self.function(self._direct)

    def launch_by(self, direct: Callable[..., None]) -> None:
        super().launch_by(direct)
        self.repeat = self.function(direct)

    def function(self, direct: Callable[..., None]) -> Callable[..., Selection | None]:
        """What :meth:`any_form` does for this form, by ``direct``."""
        return (given_buffers if self._absent is None else new_buffers)(self, direct)


class _Warming:
    """The launches of a form that is new: when it has come back a few times, they are prepared, and made that way.

    Not before: it takes as long as some dozen steps, and many forms never come back.
    """

    def __init__(self, form: KnownCall, launches: Launches) -> None:
        self._form, self._launches, self._left = weakref.ref(form), launches, PREPARED_AFTER

    def __call__(self, *args: int) -> None:
        self._launches.function(*args)
        if self._left > 1:
            self._left -= 1
            return
        if not self._left or capturing():  # 0: prepared, by a thread that this one waited for
            return
        self._left = 0
        form = self._form()
        if form is not None:
            form.launch_by(self._launches.function)  # first: whatever comes of it, a form is prepared once
            aligned = tuple(form.relaunch.alignment if name in ("query", "cache") else 2 for name in ADDRESSES)
            made = self._launches.prepared(args[: len(ADDRESSES)], aligned, form.relaunch.index)
            if made is not None:
                form.launch_by(made)
            if self._launches.failed:
                self._tell(form.relaunch.lock)

    def _tell(self, lock: threading.Lock) -> None:
        """Warn without the lock that the caller holds: what shows warnings may take a step. This one is launched."""
        try:
            lock.release()
            self._launches.tell()
        finally:
            lock.acquire()


def known_call(
    arguments: tuple[torch.Tensor | None, ...],
    cache: IndexCache,
    kv_page: int | None,
    block_rows: int | None,
    positions: bool | torch.Tensor,
    result: Selection,
    relaunch: Relaunch,
) -> AnyForm | UsualForm:
    """A :class:`KnownCall` of these arguments: ``repeat`` makes the call again if it has this form."""
    table, out, counts, _, words = arguments[5:]
    buffers = (out is None) == (counts is None)
    usual = relaunch.direct is not None and table is not None and buffers and words is None and positions is False
    return (UsualForm if usual else AnyForm)(arguments, cache, kv_page, block_rows, positions, result, relaunch)


def repeatable(cache: object, seq_lens: torch.Tensor, kv_page: object, block_rows: object) -> bool:
    """Whether a checked call can be known by its form.

    Not: a subclass of the cache, geometry in anything but ints, and 2-D lengths with gaps (the checks flatten them,
    perhaps into a copy, so the launches do not read the caller's).
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
