"""The two most frequent forms of a repeated step, each with a function of its own: FP8, a table, no positions.

They do what :meth:`keysieve.repeats.KnownCall.any_form` does. The form's values are the function's own variables and no
branch is left for other forms: a tenth of what Python costs in a step. The two differ in whose buffers are filled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from keysieve.cache import IndexCache
from keysieve.inputs import Selection

if TYPE_CHECKING:
    from keysieve.repeats import KnownCall

selection = tuple.__new__
"""Makes a Selection of its fields in half the time that calling the class takes."""


def given_buffers(form: KnownCall, direct: Callable[..., None]) -> Callable[..., Selection | None]:
    """Of a call that gives rows and counts. direct: makes the launches."""
    same, key_format, page, rows_a_block = form._same, form._key_format, form._kv_page, form._block_rows
    misaligned, rows_bytes, counts_bytes = form._misaligned, form._rows_bytes, form._counts_bytes
    current_device, raw_stream, index, turns = form._current_device, form._raw_stream, form._index, form._turns
    lock, launch = form._lock, form.relaunch.launch

    def repeat(
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
        if type(cache) is not IndexCache or cache._spec.key_format != key_format or positions is not False:
            return None
        if kv_page is not page and (type(kv_page) is not int or kv_page != page):
            return None
        if block_rows is not rows_a_block and (type(block_rows) is not int or block_rows != rows_a_block):
            return None
        data = cache._data
        if not same(query, data, weights, seq_lens, index_table, kv_table, out, counts):
            return None
        codes, pool, first, number = query.data_ptr(), data.data_ptr(), out.data_ptr(), counts.data_ptr()
        if (codes | pool) & misaligned or (first < number + counts_bytes and number < first + rows_bytes):
            return None
        heads, lens, pages, table = (
            weights.data_ptr(),
            seq_lens.data_ptr(),
            index_table.data_ptr(),
            kv_table.data_ptr(),
        )
        # A with statement, though acquire and release would take half the time: an exception of a signal's handler that
        # comes between acquire and try leaves the lock taken.
        with lock:
            if current_device() == index:
                stream = raw_stream(index)
                if stream == turns.stream:
                    direct(codes, pool, heads, lens, pages, table, first, number, 0, 0, stream)
                    return selection(Selection, (out, counts, None))
        launch(seq_lens, codes, pool, heads, lens, pages, table, first, number, 0, 0, site)
        return selection(Selection, (out, counts, None))

    return repeat


def new_buffers(form: KnownCall, direct: Callable[..., None]) -> Callable[..., Selection | None]:
    """Of a call that gives neither. direct: makes the launches."""
    same, key_format, page, rows_a_block = form._same, form._key_format, form._kv_page, form._block_rows
    misaligned, like_rows, like_counts, new = form._misaligned, form._rows, form._numbers, torch.empty_like
    current_device, raw_stream, index, turns = form._current_device, form._raw_stream, form._index, form._turns
    lock, launch = form._lock, form.relaunch.launch

    def repeat(
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
        if out is not None or counts is not None or positions is not False:
            return None
        if type(cache) is not IndexCache or cache._spec.key_format != key_format:
            return None
        if kv_page is not page and (type(kv_page) is not int or kv_page != page):
            return None
        if block_rows is not rows_a_block and (type(block_rows) is not int or block_rows != rows_a_block):
            return None
        data = cache._data
        if not same(query, data, weights, seq_lens, index_table, kv_table):
            return None
        codes, pool = query.data_ptr(), data.data_ptr()
        if (codes | pool) & misaligned:
            return None
        out, counts = new(like_rows), new(like_counts)
        first, number = out.data_ptr(), counts.data_ptr()
        heads, lens, pages, table = (
            weights.data_ptr(),
            seq_lens.data_ptr(),
            index_table.data_ptr(),
            kv_table.data_ptr(),
        )
        with lock:
            if current_device() == index:
                stream = raw_stream(index)
                if stream == turns.stream:
                    direct(codes, pool, heads, lens, pages, table, first, number, 0, 0, stream)
                    return selection(Selection, (out, counts, None))
        launch(seq_lens, codes, pool, heads, lens, pages, table, first, number, 0, 0, site)
        return selection(Selection, (out, counts, None))

    return repeat
