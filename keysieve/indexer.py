"""``DecodeIndexer``: the whole step of one model's indexer.

Checks, plan, launch, in this order; a refused call has written nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from keysieve import ops
from keysieve.backends import as_device, resolve
from keysieve.checks import refuse, require_int
from keysieve.dcp.base import ContextParallel
from keysieve.inputs import (
    Placement,
    Query,
    Selection,
    Step,
    check_apart,
    check_output,
    check_placement,
    check_spec,
    check_step,
    query_of,
)
from keysieve.plan import Plan, Problem, make_plan
from keysieve.reference.rows import physical_rows
from keysieve.repeats import MOST_FORMS, AnyForm, UsualForm, known_call, repeatable
from keysieve.spec import IndexerSpec
from keysieve.workspace import check_dcp, next_n_counts

_traced = torch.compiler.is_dynamo_compiling
"""Costs an eager step a third of what torch.compiler.is_compiling does, which is asked once no known form fits."""

_MAX_SITE = (1 << 16) - 1
"""The signature of a context-parallel call packs rows and site into one word, 16 bits each."""


class DecodeIndexer:
    """The whole step: for every query row the exact top-k keys, as physical rows of the attention KV cache.

    One object serves all layers of a model. Its buffers are allocated here, never in a step (a graph that the driver
    makes of an eager step that comes back is its own: docs/step.md). Threads that call one object take turns. It cannot
    be copied or pickled.

    Args:
        spec: the model's indexer.
        max_rows: query rows a step may have, padding rows included.
        max_context: the longest length of a row, in keys.
        next_n: query rows per request (1 + speculative tokens): an int, or all that steps may use.
        device: where the tensors lie; default ``"cuda"``, or ``"cpu"`` with ``backend="cpu"``.
        backend: ``"auto"`` (the device decides), ``"cpu"``, ``"sm90"`` or ``"sm100"``.
        dcp: ``ks.dcp.Exchange`` or ``ks.dcp.Gather`` for decode context parallelism; None for one GPU or tensor
            parallel.
        max_total_keys: bound on the logits buffer in elements (``next_n * 128 * tiles`` summed over the requests of a
            step), where fewer can occur than ``max_rows * max_context``.
        early_release: on a GPU, let the next kernel of the stream start while the selection still writes, if that
            kernel was launched as a programmatic dependent. Only for consumers that wait for their grid dependency
            before they read the result.

    Raises:
        UnsupportedError: no backend runs this on the device; never a fallback to another device.
        KeysieveError: an argument is out of range.
    """

    def __init__(
        self,
        spec: IndexerSpec,
        max_rows: int,
        max_context: int,
        next_n: int | Sequence[int] = 1,
        device: torch.device | str | None = None,
        backend: str = "auto",
        dcp: ContextParallel | None = None,
        max_total_keys: int | None = None,
        early_release: bool = False,
    ) -> None:
        self.spec = check_spec(spec)
        self.device = as_device(device, backend)
        self.next_n = next_n_counts(next_n)
        self._backend = resolve(spec, next_n=self.next_n[-1], backend=backend, device=self.device)
        self.dcp = dcp
        sharding = None
        if dcp is not None:
            sharding = check_dcp(dcp).bind(spec, max_rows=max_rows, max_context=max_context, device=self.device)
        problem = Problem(
            spec, self._backend.name, max_rows, max_context, self.next_n, max_total_keys, sharding, bool(early_release)
        )
        self._runner: Any = self._backend.runner(make_plan(problem), self.device, dcp)
        self._known: tuple[AnyForm | UsualForm, ...] = ()
        self._handle = ops.register(self)

    @property
    def plan(self) -> Plan:
        """What runs and what it takes; printable."""
        plan: Plan = self._runner.plan
        return plan

    @property
    def backend(self) -> str:
        """The backend in use: ``"cpu"``, ``"sm90"`` or ``"sm100"``."""
        return self._backend.name

    @property
    def path(self) -> str:
        """What a step runs, in words: the backend, its kernels, and the exchange of context-parallel ranks."""
        exchange = "" if self.dcp is None else f"; candidates {self.dcp.path}"
        return f"{self.backend}: {self._runner.path}{exchange}"

    @property
    def workspace_bytes(self) -> int:
        """Bytes of all buffers this indexer owns."""
        return self.plan.workspace_bytes

    def check(self) -> None:
        """Report what no host could see when a step was launched; on a GPU this waits for it.

        Such a step has safe results: a row whose length is beyond the tables or ``max_context`` is empty, the keys of
        a page id outside the pool have NaN logits, and nothing outside the pool was read.

        Raises:
            DeviceFault: since the last check a step met such a row or page; the text names the first ones.
            KeysieveError: the current stream of a GPU is being captured into a graph.
        """
        self._runner.check()

    def __reduce__(self) -> NoReturn:
        """Refused: a copy would share, or name in another process, what compiled graphs know this indexer by."""
        remedy = "Build another DecodeIndexer, in the process that uses it."
        refuse("indexer", got="a DecodeIndexer to copy or pickle", accepted="nothing of the kind", remedy=remedy)

    def __repr__(self) -> str:
        return f"DecodeIndexer({self.spec}, {self.plan})"

    def __call__(
        self,
        query: Query,
        cache: Any,
        weights: torch.Tensor,
        seq_lens: torch.Tensor,
        index_table: torch.Tensor,
        *,
        kv_table: torch.Tensor | None = None,
        kv_page: int | None = None,
        block_rows: int | None = None,
        positions: bool | torch.Tensor = False,
        out: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        site: int = 0,
    ) -> Selection:
        """Select the keys of one layer and step: for each row the exact top-k by (score, then position).

        A row that sees at most ``topk`` keys takes them all, and a request of such rows alone is not scored. On a GPU
        the inputs must be complete when the step starts there and stay unchanged until it has ended: lengths that
        another stream changes meanwhile can end in a launch failure (``docs/step.md``).

        Args:
            query: E4M3 ``[rows, heads, 128]``; MXFP4: ``(uint8 [rows, heads, 64], int32 [rows, heads])``. Row ``t``
                belongs to request ``t // next_n``.
            cache: the IndexCache, of the spec's format, on the indexer's device.
            weights: float32 or bfloat16 ``[rows, heads]``, every other factor folded in (:func:`fold_weights`).
            seq_lens: int32 or int64 ``[rows]`` or ``[requests, next_n]``: keys that a row sees, 0 or less for a padding
                row. With ``dcp`` the lengths are global; cache and tables are this rank's.
            index_table: int32 ``[requests, columns]`` (with 2-D lengths also one row per query row), page ids; columns
                past the last needed one are not read.
            kv_table: int32 ``[requests, blocks]`` (or one row per query row), any row stride: block ids of the
                attention cache. Without it the output rows are key positions (with ``dcp``: local indices). The ids
                are the caller's: they are not checked, and ``id * block_rows`` has to fit 32 bits.
            kv_page: tokens per block, a power of two; default 64.
            block_rows: rows a block spans in the cache view; default ``kv_page``.
            positions: True for the key positions as well, or an int32 ``[rows, topk]`` buffer for them.
            out: int32 ``[rows, topk]`` buffer for the rows, any row stride that keeps rows apart. Output buffers must
                lie apart from each other (checked) and from the inputs (not checked).
            counts: int32 ``[rows]`` buffer; on a GPU without gaps.
            site: the layer or call site, for the signature that context-parallel ranks compare.

        Returns:
            Selection: ``rows`` int32 ``[rows, topk]``, ``counts`` int32 ``[rows]`` and ``positions`` int32 ``[rows,
            topk]`` (None if not asked for), ascending in position; every entry is defined: -1 past the count, count 0
            for a padding row. With ``dcp`` positions are all winners' global positions. Equal inputs give equal bytes,
            whatever the batch (``docs/contract.md``).

        Raises:
            KeysieveError: an argument is wrong, or the step exceeds ``max_rows`` or ``max_total_keys``. Nothing was
                written.
            ExchangeError: with ``dcp``: peers made another call, did not answer in time, or an earlier call failed.
        """
        if not _traced():
            if self.dcp is not None:
                self.dcp.raise_failure()
            if site.__class__ is int and 0 <= site <= _MAX_SITE:
                for known in self._known:
                    result = known.repeat(
                        query,
                        cache,
                        weights,
                        seq_lens,
                        index_table,
                        kv_table,
                        kv_page,
                        block_rows,
                        positions,
                        out,
                        counts,
                        site,
                    )
                    if result is not None:
                        return result
        way = self._compiled if torch.compiler.is_compiling() else self._checked
        return way(
            query, cache, weights, seq_lens, index_table, kv_table, kv_page, block_rows, positions, out, counts, site
        )

    def _checked(
        self,
        query: Query,
        cache: Any,
        weights: torch.Tensor,
        seq_lens: torch.Tensor,
        index_table: torch.Tensor,
        kv_table: torch.Tensor | None,
        kv_page: int | None,
        block_rows: int | None,
        positions: bool | torch.Tensor,
        out: torch.Tensor | None,
        counts: torch.Tensor | None,
        site: int,
    ) -> Selection:
        """A call of a form that is not known yet: every check, the step, and the form remembered if it can recur."""
        with self._peers_told():
            step = check_step(self.spec, query, cache, weights, seq_lens, index_table, device=self.device)
            place = check_placement(
                kv_table,
                kv_page,
                block_rows,
                rows=step.rows,
                requests=step.requests,
                next_n=step.next_n,
                device=step.codes.device,
            )
            self._check_limits(step, site)
            result = self._outputs(step.rows, step.codes.device, positions, out, counts)
            if self.dcp is not None and self._backend.name == "cpu":
                step = self._runner.within_limits(step)
                self._runner.check_local(self.dcp.local_lens(step.seq_lens), place)
                self._exchange(self.dcp, step, self._own_logits(self.dcp, step), place, result, site)
            elif self.dcp is not None and step.rows:
                relaunch = self._runner.run(step, place, result, site)
        if step.rows and (self.dcp is None or self._backend.name != "cpu"):
            if self.dcp is None:
                relaunch = self._runner.run(step, place, result)
            if (
                relaunch is not None
                and isinstance(query, torch.Tensor | tuple)
                and repeatable(cache, seq_lens, kv_page, block_rows)
            ):
                given = positions if isinstance(positions, torch.Tensor) else None
                codes, words = query_of(query)
                tensors = (codes, cache.data, weights, seq_lens, index_table, kv_table, out, counts, given, words)
                self._remember(known_call(tensors, cache, kv_page, block_rows, positions, result, relaunch))
        return result

    def _remember(self, known: AnyForm | UsualForm) -> None:
        """The newest form is looked at first; the oldest is forgotten."""
        self._known = (known, *self._known[: MOST_FORMS - 1])

    @contextmanager
    def _peers_told(self) -> Iterator[None]:
        """Context-parallel peers of a call that ends before the exchange are told, so that all stay in step.

        Whatever ended it: after an interrupt or an allocator's error, too, this rank's next call would be merged in
        the place of this one. Once begun, ``select`` keeps the group's state itself, as its count of calls shows.
        """
        begun = None if self.dcp is None else self.dcp.calls
        try:
            yield
        except BaseException:
            if self.dcp is not None and self.dcp.calls == begun:
                self.dcp.refused()
            raise

    def _check_limits(self, step: Step, site: int) -> None:
        limit = self.plan.problem.max_rows
        if step.rows > limit:
            remedy = "Build the indexer with a larger max_rows, or split the batch."
            refuse("query", got=f"{step.rows} rows", accepted=f"at most max_rows = {limit}", remedy=remedy)
        if step.rows and step.next_n not in self.next_n:
            refuse(
                "next_n",
                got=f"{step.next_n} ({step.rows} query rows, {step.requests} requests)",
                accepted=f"one of {self.next_n}, as the indexer was built for",
                remedy="Build the indexer with next_n=(...) of all counts that steps use.",
            )
        require_int("site", site, 0, _MAX_SITE, "Pass the layer number.")

    def _outputs(
        self,
        rows: int,
        device: torch.device,
        positions: bool | torch.Tensor,
        out: torch.Tensor | None,
        counts: torch.Tensor | None,
    ) -> Selection:
        """The caller's buffers, checked, and new ones for what was not given."""
        shape = (rows, self.spec.topk)
        chosen = _buffer("out", out, shape, device)
        number = _buffer("counts", counts, (rows,), device)
        if isinstance(positions, torch.Tensor):
            check_output("positions", positions, shape, device)
            check_apart(out=chosen, counts=number, positions=positions)
            return Selection(chosen, number, positions)
        check_apart(out=chosen, counts=number)
        return Selection(chosen, number, torch.empty(shape, dtype=torch.int32, device=device) if positions else None)

    def _own_logits(self, dcp: ContextParallel, step: Step) -> torch.Tensor:
        """BF16 ``[rows, any]``: the scores of the keys that lie on this rank, by local index."""
        table = None if dcp.sharded else dcp.own_table(step.index_table)
        if dcp.sharded or table is not None:
            own: torch.Tensor = self._runner.local_logits(step.with_lengths(dcp.local_lens(step.seq_lens), table))
            return own
        return dcp.own_columns(self._runner.local_logits(step))

    def _exchange(
        self, dcp: ContextParallel, step: Step, logits: torch.Tensor, place: Placement, out: Selection, site: int
    ) -> None:
        """Candidates to the peers, own winners back. Also with zero rows: the peers wait for it."""
        won = dcp.select(logits, dcp.local_lens(step.seq_lens), step.seq_lens, site=site)
        chosen = won.local
        if place.kv_table is not None:
            chosen = physical_rows(chosen, place.kv_table, kv_page=place.kv_page, block_rows=place.block_rows)
        out.rows.copy_(chosen)
        out.counts.copy_(won.counts)
        if out.positions is not None:
            out.positions.copy_(won.positions)

    def _compiled(
        self,
        query: Query,
        cache: Any,
        weights: torch.Tensor,
        seq_lens: torch.Tensor,
        index_table: torch.Tensor,
        kv_table: torch.Tensor | None,
        kv_page: int | None,
        block_rows: int | None,
        positions: bool | torch.Tensor,
        out: torch.Tensor | None,
        counts: torch.Tensor | None,
        site: int,
    ) -> Selection:
        """Under torch.compile: one opaque operator, which makes the same checks when it runs."""
        codes, words = query_of(query)
        result = self._outputs(codes.shape[0], codes.device, positions, out, counts)
        ops.decode_step(
            self._handle,
            codes,
            words,
            cache.data,
            weights,
            seq_lens,
            index_table,
            kv_table,
            kv_page,
            block_rows,
            site,
            result.rows,
            result.counts,
            result.positions,
        )
        return result


def _buffer(argument: str, given: torch.Tensor | None, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """``given`` if it fits, else a new int32 buffer."""
    if given is not None:
        return check_output(argument, given, shape, device)
    return torch.empty(shape, dtype=torch.int32, device=device)
