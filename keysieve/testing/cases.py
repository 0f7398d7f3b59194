"""A :class:`Case`: everything one call of the indexer needs, made from a seed, and the scores it must find.

``injected_case`` writes wanted scores into cache bytes, ``random_case`` draws random bytes, ``draw_case`` draws
everything from one seed for fuzzing. The printed form of a case is the expression that builds it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from keysieve.spec import HEADS, PAGE, IndexerSpec
from keysieve.testing.inject import inject_keys, probe_query
from keysieve.testing.paging import make_pool, ragged_lengths, scattered_table, slots_of, write_tokens
from keysieve.testing.random_keys import random_codes, random_query
from keysieve.testing.scores import PATTERNS

if TYPE_CHECKING:
    from keysieve.cache import IndexCache

Query = Tensor | tuple[Tensor, Tensor]
Lengths = Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True, repr=False, eq=False)
class Case:
    """One call, complete.

    Attributes:
        recipe: the expression that builds this case again.
        seed: the seed inside that expression.
        spec: the indexer.
        next_n: query rows per request.
        query: ``[rows, heads, 128]`` float8_e4m3fn, or the MXFP4 pair.
        cache: uint8 ``[pages, 64, width]``, possibly with a padded page stride.
        weights: float32 ``[rows, heads]``.
        seq_lens: int32 ``[rows]`` (or ``[requests, next_n]``).
        index_table: int32 ``[requests, columns]``.
        kv_table: int32 ``[requests, blocks]``, or None: rows are positions.
        kv_page: tokens per block of the attention cache, a power of two.
        block_rows: rows a block spans in the attention cache's view.
        logits: per request, bfloat16 scores of its keys in position order if they are known by construction.
    """

    recipe: str
    seed: int
    spec: IndexerSpec
    next_n: int
    query: Query
    cache: Tensor
    weights: Tensor
    seq_lens: Tensor
    index_table: Tensor
    kv_table: Tensor | None = None
    kv_page: int = PAGE
    block_rows: int = PAGE
    logits: tuple[Tensor, ...] | None = None

    @property
    def requests(self) -> int:
        return self.index_table.shape[0]

    @property
    def rows(self) -> int:
        return self.requests * self.next_n

    @property
    def lengths(self) -> list[int]:
        """``seq_lens`` as a flat list, whatever its shape."""
        return [int(length) for length in self.seq_lens.reshape(-1).tolist()]

    @property
    def max_len(self) -> int:
        """The longest row, at least 1."""
        return max([1, *self.lengths])

    def __repr__(self) -> str:
        lengths = self.lengths
        shown = str(lengths) if len(lengths) <= 12 else f"{str(lengths[:12])[:-1]}, ...]"
        return f"{self.recipe}  # {self.spec.key_format}, {self.requests} x {self.next_n} rows, seq_lens {shown}"

    def index_cache(self) -> IndexCache:
        """The cache wrapped for the public API."""
        from keysieve.cache import IndexCache

        return IndexCache(self.spec, self.cache)

    def paging(self) -> dict[str, Any]:
        """The keyword arguments that turn positions into physical rows; empty without a ``kv_table``."""
        if self.kv_table is None:
            return {}
        return {"kv_table": self.kv_table, "kv_page": self.kv_page, "block_rows": self.block_rows}

    def to(self, device: torch.device | str) -> Case:
        """The same case with its tensors on ``device``; page stride and table strides are kept."""
        query: Query
        if isinstance(self.query, tuple):
            query = (_move(self.query[0], device), _move(self.query[1], device))
        else:
            query = _move(self.query, device)
        return replace(
            self,
            query=query,
            cache=_move(self.cache, device),
            weights=_move(self.weights, device),
            seq_lens=_move(self.seq_lens, device),
            index_table=_move(self.index_table, device),
            kv_table=None if self.kv_table is None else _move(self.kv_table, device),
        )


def _move(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``tensor`` on ``device`` with its strides and offset: the whole storage travels."""
    if tensor.is_contiguous():
        return tensor.to(device)
    whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return torch.as_strided(whole.to(device), tensor.shape, tensor.stride(), tensor.storage_offset())


def _rows_of(lengths: Lengths, next_n: int) -> list[list[int]]:
    """Lengths as ``[requests][next_n]``; a flat list gives every row of a request the same length."""
    return [[row] * next_n if isinstance(row, int) else [int(n) for n in row] for row in lengths]


def _tables(
    needed: list[int], gen: torch.Generator, spare_pages: int, kv_page: int, spare: str
) -> tuple[int, Tensor, Tensor]:
    """Pool size, index table and KV block table for requests of ``needed`` keys."""
    pages = [-(-n // PAGE) for n in needed]
    blocks = [-(-n // kv_page) for n in needed]
    pool = sum(pages) + spare_pages
    table = scattered_table(pages, pool, gen, spare=spare)
    return pool, table, scattered_table(blocks, sum(blocks) + 3, gen, spare=spare)


def injected_case(
    spec: IndexerSpec,
    scores: Sequence[Tensor],
    *,
    next_n: int = 1,
    lengths: Lengths | None = None,
    seed: int = 0,
    recipe: str | None = None,
    spare_pages: int = 3,
    spare: str = "out_of_range",
    poison: str = "mixed",
    page_stride: int | None = None,
    kv_page: int = PAGE,
    block_rows: int | None = None,
) -> Case:
    """A case whose keys score what ``scores`` says.

    Args:
        spec: the indexer.
        scores: per request, float ``[keys]``: the score of each key of its context.
        next_n: query rows per request.
        lengths: ``seq_lens`` as ``[requests]`` or ``[requests][next_n]``; default: every row sees all its request's
            keys. Shorter lengths leave the keys past them in the cache, where they must not matter.
        seed: fixes page placement and table contents.
        spare_pages, spare, poison, page_stride: see :mod:`keysieve.testing.paging`.
        kv_page, block_rows: of the attention cache; ``block_rows`` defaults to ``kv_page``.
    """
    gen = torch.Generator().manual_seed(seed)
    keys = [inject_keys(spec.key_format, request) for request in scores]
    needed = [int(request.numel()) for request in scores]
    per_row = _rows_of(needed if lengths is None else lengths, next_n)
    pool, table, kv_table = _tables(needed, gen, spare_pages, kv_page, spare)
    cache = make_pool(spec, pool, page_stride=page_stride, poison=poison)
    for request, key in enumerate(keys):
        write_tokens(spec, cache, slots_of(table[request], needed[request]), key.codes, key.scales)
    probe = probe_query(spec, len(scores) * next_n)
    return Case(
        recipe=recipe or f"injected_case({spec!r}, <scores of {needed}>, next_n={next_n}, seed={seed})",
        seed=seed,
        spec=spec,
        next_n=next_n,
        query=probe.query,
        cache=cache,
        weights=probe.weights,
        seq_lens=torch.tensor(per_row, dtype=torch.int32).reshape(-1),
        index_table=table,
        kv_table=kv_table,
        kv_page=kv_page,
        block_rows=kv_page if block_rows is None else block_rows,
        logits=tuple(key.logits for key in keys),
    )


def pattern_case(
    spec: IndexerSpec, pattern: str, lengths: Lengths, *, next_n: int = 1, seed: int = 0, **options: Any
) -> Case:
    """:func:`injected_case` with the scores of a named pattern (see :data:`~keysieve.testing.scores.PATTERNS`).

    Each request's context holds as many keys as its longest row sees, and a few more that no row sees.
    """
    gen = torch.Generator().manual_seed(seed)
    per_row = _rows_of(lengths, next_n)
    scores = []
    for row in per_row:
        longest = max(0, *row)
        seen = PATTERNS[pattern](longest, spec.topk, gen)
        unseen = torch.full((int(torch.randint(0, 5, (1,), generator=gen)),), 3e38)
        scores.append(torch.cat([seen, unseen]))
    extra = "".join(f", {name}={value!r}" for name, value in options.items())
    recipe = f"pattern_case({spec!r}, {pattern!r}, {lengths!r}, next_n={next_n}, seed={seed}{extra})"
    return injected_case(spec, scores, next_n=next_n, lengths=per_row, seed=seed, recipe=recipe, **options)


def random_case(
    spec: IndexerSpec,
    lengths: Lengths,
    *,
    next_n: int = 1,
    seed: int = 0,
    copies: float = 0.25,
    spare_pages: int = 3,
    spare: str = "out_of_range",
    poison: str = "mixed",
    page_stride: int | None = None,
    kv_page: int = PAGE,
    block_rows: int | None = None,
) -> Case:
    """A case of random query, weight and key bytes; the scores have to be computed.

    ``copies`` is the share of keys that repeat an earlier key's bytes, which makes exact ties at every score.
    """
    gen = torch.Generator().manual_seed(seed)
    per_row = _rows_of(lengths, next_n)
    needed = [max(0, *row) for row in per_row]
    pool, table, kv_table = _tables(needed, gen, spare_pages, kv_page, spare)
    cache = make_pool(spec, pool, page_stride=page_stride, poison=poison)
    for request, length in enumerate(needed):
        codes, scales = random_codes(spec.key_format, length, gen, copies=copies)
        write_tokens(spec, cache, slots_of(table[request], length), codes, scales)
    query, weights = random_query(spec, len(per_row) * next_n, gen)
    return Case(
        recipe=f"random_case({spec!r}, {lengths!r}, next_n={next_n}, seed={seed})",
        seed=seed,
        spec=spec,
        next_n=next_n,
        query=query,
        cache=cache,
        weights=weights,
        seq_lens=torch.tensor(per_row, dtype=torch.int32).reshape(-1),
        index_table=table,
        kv_table=kv_table,
        kv_page=kv_page,
        block_rows=kv_page if block_rows is None else block_rows,
    )


def draw_case(
    seed: int,
    *,
    key_format: str | None = None,
    heads: int | None = None,
    topk: int | None = None,
    next_n: int | None = None,
    numerics: str | None = None,
    max_context: int = 4096,
    max_requests: int = 6,
) -> Case:
    """One case of anything: what is not given is drawn from the seed. For fuzzing; any seed is a case."""
    gen = torch.Generator().manual_seed(seed)

    def below(count: int) -> int:
        return int(torch.randint(0, count, (1,), generator=gen))

    def choose(*choices: Any) -> Any:
        return choices[below(len(choices))]

    given = {"key_format": key_format, "heads": heads, "topk": topk, "next_n": next_n, "numerics": numerics}
    drawn_format = choose("fp8_fp32", "fp8_ue8m0", "mxfp4")
    drawn_heads, drawn_next_n = choose(*HEADS), choose(1, 1, 2, 3, 4, 5, 6, 7, 8)
    drawn_topk = choose(1, 2, 7, 8, 9, 31, 63, 64, 65, 500, 512, 1024, 2047, 2048, 4095, 4096)
    spec = IndexerSpec(
        heads=heads or drawn_heads,
        topk=topk or drawn_topk,
        key_format=key_format or drawn_format,
        numerics=numerics,
    )
    rows = next_n or drawn_next_n
    requests = 1 + below(max_requests)
    lengths = ragged_lengths(requests, rows, max_context, spec.topk, gen)
    common: dict[str, Any] = {
        "next_n": rows,
        "seed": seed,
        "spare_pages": 1 + below(8),
        "spare": choose("out_of_range", "unused", "zero"),
        "poison": choose("winner", "nan", "mixed"),
        "page_stride": choose(None, None, -(-spec.format.page_bytes // 16) * 16 + 16 * below(64)),
        "kv_page": choose(1, 16, 64, 64, 128, 1024),
    }
    common["block_rows"] = common["kv_page"] * choose(1, 1, 1, 3)
    pattern = choose("random", *PATTERNS)
    if pattern == "random":
        case = random_case(spec, lengths, **common)
    else:
        case = pattern_case(spec, pattern, lengths, **common)
    options = "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)
    limits = f", max_context={max_context}, max_requests={max_requests}"
    return replace(case, recipe=f"draw_case({seed}{options}{limits})")
