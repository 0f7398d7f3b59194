"""How much memory a ``DecodeIndexer`` takes, known before there is one; and the checks of what both are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from keysieve.backends import as_device, name_for
from keysieve.checks import refuse, require_int
from keysieve.dcp.base import ContextParallel
from keysieve.inputs import check_spec
from keysieve.plan import Problem, Sharding, make_plan
from keysieve.spec import MAX_NEXT_N, IndexerSpec


def workspace_bytes(
    spec: IndexerSpec,
    max_rows: int,
    max_context: int,
    next_n: int | Sequence[int] = 1,
    device: torch.device | str | None = None,
    backend: str = "auto",
    dcp: ContextParallel | None = None,
    max_total_keys: int | None = None,
) -> int:
    """Bytes that a ``DecodeIndexer`` with these arguments allocates on its device; nothing is allocated.

    The buffers are shared by all layers that use the indexer. ``backend`` may name a GPU backend on a machine that
    has no such GPU: planning needs none.
    """
    where = as_device(device, backend)
    name = backend if backend not in ("auto", "cpu") else name_for(backend, where)
    sharding = None
    if dcp is not None:
        check_dcp(dcp)
        sharding = Sharding(dcp.world, dcp.rank, dcp.interleave, dcp.offered(spec.topk), dcp.sharded)
    counts = next_n_counts(next_n)
    problem = Problem(check_spec(spec), name, max_rows, max_context, counts, max_total_keys, sharding)
    return make_plan(problem).workspace_bytes


def check_dcp(dcp: Any) -> ContextParallel:
    """``dcp`` if it is an exchange of candidates between ranks."""
    if not isinstance(dcp, ContextParallel):
        remedy = "Build ks.dcp.Exchange(group) or ks.dcp.Gather(group)."
        refuse("dcp", got=type(dcp).__name__, accepted="a keysieve.dcp object, or None", remedy=remedy)
    return dcp


def next_n_counts(next_n: int | Sequence[int]) -> tuple[int, ...]:
    """``next_n`` as the sorted tuple of the counts to prepare for."""
    remedy = "Use at most 8 query rows per request (1 + speculative tokens)."
    given = tuple(next_n) if isinstance(next_n, Sequence) else (next_n,)
    if not given:
        refuse("next_n", got="an empty sequence", accepted="an int in 1..8, or several", remedy=remedy)
    return tuple(sorted({require_int("next_n", n, 1, MAX_NEXT_N, remedy) for n in given}))
