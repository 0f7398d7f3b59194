"""Problem -> Plan: what was asked, and what will run, before anything runs.

Both are frozen and printable. Layouts and sizes come from here, and ``workspace_bytes`` can be asked before an indexer
is built. (Which compiled configuration of a kernel serves a shape is the business of the kernels' ``*_config`` and
``*_host`` modules.)
"""

from __future__ import annotations

from dataclasses import dataclass

from keysieve.checks import require_choice, require_int
from keysieve.spec import (
    BACKENDS,
    GROUP,
    HEAD_DIM,
    MAX_CONTEXT,
    MAX_NEXT_N,
    MAX_REQUESTS,
    MAX_WORLD,
    PAGE,
    TILE,
    IndexerSpec,
    candidate_words,
    index_planes,
    pitch_of,
)

CPU_CHUNK_KEYS = 2048
"""Keys the cpu backend scores at a time: bounds its scratch whatever the context is, and keeps it in the caches."""


MOST_HELD_KEYS = 32768
MOST_KEYS_BY_MAXIMA = 524288
"""Keys of a rank's row between which the local top-N of a GPU may go by maxima: more than a block's registers hold, and
no more than its shared memory has room for the maxima of."""


@dataclass(frozen=True)
class Sharding:
    """Decode context parallelism as planning sees it: who holds what, and how many candidates a rank offers.

    Attributes:
        world: ranks the context is spread over (W).
        rank: this rank.
        interleave: consecutive positions that lie on one rank (S); position g is on rank ``(g // S) % W``.
        topn: candidates a rank offers per row (N).
        sharded: whether the index cache holds only this rank's keys (else it is replicated).
    """

    world: int
    rank: int
    interleave: int
    topn: int
    sharded: bool = True

    def __post_init__(self) -> None:
        require_int("world", self.world, 1, MAX_WORLD, "Use at most 16 context ranks.")
        require_int("rank", self.rank, 0, self.world - 1, "Pass this process's rank in the group.")
        require_int("interleave", self.interleave, 1, MAX_CONTEXT, "Use the interleave the KV cache is sharded with.")
        require_int("topn", self.topn, 1, 4096, "Offer between K/W and K candidates a row.")

    def max_local_len(self, max_context: int) -> int:
        """The most keys any rank can hold of a context of ``max_context``: what fixes the index planes."""
        whole, rest = divmod(max_context, self.interleave * self.world)
        return whole * self.interleave + min(rest, self.interleave)


@dataclass(frozen=True)
class Problem:
    """What was asked: the limits an indexer is built for.

    Attributes:
        spec: the model's indexer.
        backend: ``"cpu"``, ``"sm90"`` or ``"sm100"``.
        max_rows: query rows a step may have, padding rows included.
        max_context: the longest ``seq_lens`` value, in keys.
        next_n: the numbers of query rows per request that steps may use.
        max_total_keys: bound on the compact logits buffer in elements (``sum of next_n * 128 * tiles``), or None for
            the worst case.
        sharding: decode context parallelism, or None for one GPU / tensor parallel.
        early_release: the last kernel of a step lets the next kernel of the stream start before it has finished.
    """

    spec: IndexerSpec
    backend: str
    max_rows: int
    max_context: int
    next_n: tuple[int, ...] = (1,)
    max_total_keys: int | None = None
    sharding: Sharding | None = None
    early_release: bool = False

    def __post_init__(self) -> None:
        require_choice("backend", self.backend, BACKENDS, "Use backend='auto' to let the device decide.")
        require_int("max_rows", self.max_rows, 1, MAX_REQUESTS * MAX_NEXT_N, "Split larger batches into several calls.")
        require_int("max_context", self.max_context, 1, MAX_CONTEXT, "Give the longest context in keys.")
        for n in self.next_n:
            require_int("next_n", n, 1, MAX_NEXT_N, "Use at most 8 query rows per request (1 + speculative tokens).")
        if self.max_total_keys is not None:
            remedy = "Give elements: the sum of next_n * 128 * tiles over the requests of one step."
            require_int("max_total_keys", self.max_total_keys, TILE, MAX_REQUESTS * MAX_NEXT_N * MAX_CONTEXT, remedy)


@dataclass(frozen=True)
class Plan:
    """What will run, and what it takes.

    Attributes:
        problem: the limits this plan serves.
        layout: ``"compact"`` (TP: only needed tiles, with ``tops``) or ``"pitched"`` (DCP).
        logits_elements: BF16 elements of the logits buffer.
        tops_elements: uint16 elements of the maxima buffer: of the pitched layout those that local top-N reads, pitched
            as well and behind the logits in the same memory, 0 where it reads none.
        pitch: elements from row to row of the pitched layout, else 0.
        planes: index planes of a candidate row, else 0.
        words: int32 words of a candidate row, else 0.
        parts: named byte counts that make up the workspace.
    """

    problem: Problem
    layout: str
    logits_elements: int
    tops_elements: int
    pitch: int
    planes: int
    words: int
    parts: tuple[tuple[str, int], ...]

    @property
    def workspace_bytes(self) -> int:
        """Bytes of all buffers that an indexer with this plan owns, shared by all layers of a device."""
        return sum(size for _, size in self.parts)

    def __str__(self) -> str:
        p = self.problem
        parts = ", ".join(f"{name} {size:,} B" for name, size in self.parts)
        return (
            f"{p.backend}: up to {p.max_rows} rows x {p.max_context} keys, next_n {p.next_n}, {self.layout} logits"
            f"{', early release' if p.early_release else ''}; "
            f"workspace {self.workspace_bytes:,} B ({parts})"
        )


def rounded_context(max_context: int) -> int:
    """``max_context`` rounded up to whole tiles of 128 keys."""
    return -(-max_context // TILE) * TILE


def make_plan(problem: Problem) -> Plan:
    """The plan for ``problem``; pure arithmetic, nothing is allocated."""
    if problem.backend == "cpu":
        return _plan_cpu(problem)
    return _plan_compact(problem) if problem.sharding is None else _plan_pitched(problem)


def _plan_compact(problem: Problem) -> Plan:
    """TP on a GPU: compact logits bounded by ``max_total_keys`` and their per-8 maxima."""
    worst = problem.max_rows * rounded_context(problem.max_context)
    elements = worst if problem.max_total_keys is None else min(worst, problem.max_total_keys)
    elements = -(-elements // TILE) * TILE
    tops = elements // GROUP
    lens = 4 * problem.max_rows
    parts = (("logits", 2 * elements), ("tops", 2 * tops), ("starts", lens + 4), ("lengths", 3 * lens), ("flags", 256))
    return Plan(problem, "compact", elements, tops, 0, 0, 0, parts)


def _plan_pitched(problem: Problem) -> Plan:
    """DCP on a GPU: one pitched row per query row; by all-gather (N = K) everybody's candidate rows and signatures.

    What an exchange keeps is its own and shared by indexers: `Exchange.workspace_bytes`.
    """
    assert problem.sharding is not None
    local = problem.sharding.max_local_len(problem.max_context)
    pitch, planes = pitch_of(local), index_planes(local)
    words = candidate_words(problem.sharding.topn, planes)
    elements = problem.max_rows * pitch
    tops = elements // GROUP if _offers_by_maxima(problem, local) else 0
    parts = [("logits", 2 * elements), ("lengths", 12 * problem.max_rows), ("flags", 256)]
    if tops:
        parts.insert(1, ("tops", 2 * tops))
    if problem.sharding.topn == problem.spec.topk:
        parts.append(("candidates", 4 * problem.max_rows * (words + 2) * (problem.sharding.world + 1)))
    return Plan(problem, "pitched", elements, tops, pitch, planes, words, tuple(parts))


def _offers_by_maxima(problem: Problem, local: int) -> bool:
    """May local top-N go by maxima that the scorer writes? Of rows too long for a block's registers, where maxima fit
    its shared memory; by the one scorer that writes pitched ones."""
    assert problem.sharding is not None
    fits = MOST_HELD_KEYS < local <= MOST_KEYS_BY_MAXIMA
    return fits and problem.sharding.sharded and problem.backend == "sm90" and problem.spec.format.is_fp8


def _plan_cpu(problem: Problem) -> Plan:
    """The cpu backend works request by request; under DCP it keeps the logits of all rows for the second round."""
    local, planes, words = rounded_context(problem.max_context), 0, 0
    wide = max(problem.next_n)
    rows = wide
    if problem.sharding is not None:
        shard = problem.sharding.max_local_len(problem.max_context)
        # A replicated cache whose pages are shared by ranks is scored whole, and this rank's columns are taken out.
        whole = not problem.sharding.sharded and bool(problem.sharding.interleave % PAGE)
        local, rows = rounded_context(problem.max_context if whole else shard), problem.max_rows
        planes = index_planes(shard)
        words = candidate_words(problem.sharding.topn, planes)
    elements = rows * local
    # Temporary tensors of one chunk: the keys as bytes, int32 and float64, and the dots in float64 and float32.
    per_key = HEAD_DIM * (1 + 4 + 8) + wide * problem.spec.heads * (2 * 8 + 4)
    # Selecting from one row: its keys as int32 twice, masks and the positions found, and a histogram of all key16.
    selection = 13 * local + 2 * 8 * 65536
    scratch = min(CPU_CHUNK_KEYS, local) * per_key
    parts = [("logits", 2 * elements), ("scratch", scratch), ("selection", selection)]
    if words:
        parts.append(("candidates", 4 * problem.max_rows * words))
    return Plan(problem, "pitched" if words else "compact", elements, 0, 0, planes, words, tuple(parts))
