"""Scoring problems on a device, run through the sm90 kernel, and the exact values to hold them to.

Everything that must not matter is poisoned: unused pages and tokens hold NaN codes, spare table columns hold page ids
outside the pool, outputs hold a sentinel that no kernel writes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from keysieve.bench.caches import page_values, query_values
from keysieve.kernels import score_words_host, sm90_mxfp4_config, sm90_score_config, sm90_score_host
from keysieve.kernels.sm90_score_config import ScoreConfig
from keysieve.launch import Launcher
from keysieve.reference.keys import key16
from keysieve.reference.layouts import CompactLayout, compact_layout
from keysieve.spec import FORMATS, PAGE, pitch_of
from keysieve.testing.score_bound import logit_bound

SENTINEL = 0x7ABC
POISON_ID = 0x7F0F0F0F
BIG = 1 << 26

_launchers: dict[ScoreConfig, Launcher] = {}


def launcher(config: ScoreConfig) -> Launcher:
    """One launcher a configuration for the whole session."""
    if config not in _launchers:
        kernel = sm90_mxfp4_config.KERNEL if config.key_format == "mxfp4" else sm90_score_config.KERNEL
        _launchers[config] = Launcher(kernel, config, "cuda")
    return _launchers[config]


def host_of(config: ScoreConfig) -> Any:
    """The module whose functions launch it."""
    return score_words_host if config.key_format == "mxfp4" else sm90_score_host


def config_of(
    heads: int = 32,
    next_n: int = 1,
    layout: str = "compact",
    key_format: str = "fp8_fp32",
    weights: str = "float32",
) -> ScoreConfig:
    """A configuration, most often with 32 heads and one row a request."""
    return ScoreConfig(key_format, heads, next_n, layout, weights)


@dataclass(frozen=True)
class Problem:
    """Arguments of one call: `lengths` are the row lengths as Python numbers, the rest lies on the device."""

    config: ScoreConfig
    query: torch.Tensor
    cache: torch.Tensor
    weights: torch.Tensor
    table: torch.Tensor
    lengths: tuple[int, ...]
    max_context: int = BIG
    words: torch.Tensor | None = None

    @property
    def limit(self) -> int:
        """Longest usable length."""
        return min(self.max_context, self.table.shape[1] * PAGE)

    @property
    def usable(self) -> tuple[int, ...]:
        """What each row really sees."""
        return tuple(n if 0 < n <= self.limit else 0 for n in self.lengths)

    def rows(self, pick: list[int]) -> Problem:
        """The same rows, one a request, as a problem with next_n 1."""
        n = self.config.next_n
        index = torch.tensor(pick, device=self.query.device)
        return replace(
            self,
            config=replace(self.config, next_n=1),
            query=self.query[index].contiguous(),
            weights=self.weights[index].contiguous(),
            words=None if self.words is None else self.words[index].contiguous(),
            table=self.table[index // n].contiguous(),
            lengths=tuple(self.lengths[i] for i in pick),
        )


@dataclass(frozen=True)
class Result:
    """Raw outputs: BF16 bits as int16 (compact: flat; pitched: [rows, pitch]), tops likewise, starts, flag word."""

    logits: torch.Tensor
    tops: torch.Tensor | None
    starts: torch.Tensor | None
    flag: int


def empty_pool(
    device: torch.device, pages: int, page_stride: int | None = None, key_format: str = "fp8_fp32"
) -> torch.Tensor:
    """uint8 [pages, 64, width] of NaN codes (E2M1 has none) and NaN scales, the gaps between pages as well."""
    width = FORMATS[key_format].width
    stride = PAGE * width if page_stride is None else page_stride
    raw = torch.full(((pages - 1) * stride + PAGE * width,), 0xFF, dtype=torch.uint8, device=device)
    return raw.as_strided((pages, PAGE, width), (stride, width, 1))


def page_bytes(cache: torch.Tensor) -> torch.Tensor:
    """The pages as [pages, page bytes]."""
    return cache.as_strided((cache.shape[0], PAGE * cache.shape[2]), (cache.stride(0), 1))


def random_scale_codes(shape: tuple[int, ...], device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """UE8M0 codes uint8 [*shape, 4]: ordinary ones, and of one vector in fifty four that lie far apart."""
    near = torch.randint(118, 131, (*shape, 4), device=device, generator=generator)
    far = torch.randint(100, 150, (*shape, 4), device=device, generator=generator)
    rare = torch.rand(shape, device=device, generator=generator) < 0.02
    return torch.where(rare.unsqueeze(-1), far, near).to(torch.uint8)


def random_mxfp4_bytes(device: torch.device, pages: int, generator: torch.Generator) -> torch.Tensor:
    """Bytes [pages, 4352]: any codes, `random_scale_codes`, and some blocks of zeros with the smallest scale."""
    codes = torch.randint(0, 256, (pages, PAGE, 4, 16), device=device, generator=generator).to(torch.uint8)
    scales = random_scale_codes((pages, PAGE), device, generator)
    zero = torch.rand(pages, PAGE, 4, device=device, generator=generator) < 0.01
    codes[zero], scales[zero] = 0x80, 1
    return torch.cat((codes.view(pages, -1), scales.view(pages, -1)), dim=1)


def random_page_bytes(device: torch.device, pages: int, key_format: str, generator: torch.Generator) -> torch.Tensor:
    """Bytes [pages, page bytes] of ordinary keys and scales."""
    if key_format == "mxfp4":
        return random_mxfp4_bytes(device, pages, generator)
    out = torch.empty(pages, FORMATS[key_format].page_bytes, dtype=torch.uint8, device=device)
    keys = torch.randn(pages, 64 * 128, device=device, generator=generator)
    out[:, :8192] = keys.to(torch.float8_e4m3fn).view(torch.uint8)
    if key_format == "fp8_fp32":
        scales = torch.rand(pages, PAGE, device=device, generator=generator) * 0.02 + 0.01
        out[:, 8192:] = scales.view(torch.uint8)
    else:
        codes = torch.randint(110, 130, (pages, PAGE, 1), device=device, generator=generator)
        out[:, 8192:] = codes.to(torch.uint8).expand(pages, PAGE, 4).reshape(pages, 256)
    return out


def problem(
    device: torch.device,
    config: ScoreConfig,
    lengths: list[int],
    *,
    seed: int = 1,
    spare: int = 7,
    page_stride: int | None = None,
    spare_columns: int = 3,
    max_context: int = BIG,
) -> Problem:
    """Random rows over a pool that holds exactly the needed pages, at random places among `spare` poisoned ones."""
    generator = torch.Generator(device=device).manual_seed(seed)
    rows, n = len(lengths), config.next_n
    need = [-(-max(0, *lengths[r : r + n]) // PAGE) for r in range(0, rows, n)]
    pages = sum(need) + spare
    cache, fmt = empty_pool(device, pages, page_stride, config.key_format), FORMATS[config.key_format]
    places = torch.randperm(pages, device=device, generator=generator)
    filled = random_page_bytes(device, max(1, sum(need)), config.key_format, generator)
    table = torch.full((len(need), max(need) + spare_columns), POISON_ID, dtype=torch.int32, device=device)
    used = 0
    for request, count in enumerate(need):
        table[request, :count] = places[used : used + count].int()
        tail = max(0, *lengths[request * n : (request + 1) * n]) % PAGE
        if tail:  # tokens past the longest row
            filled[used + count - 1, tail * fmt.key_bytes : fmt.scale_offset] = 0xFF
            filled[used + count - 1, fmt.scale_offset + tail * 4 :] = 0xFF
        page_bytes(cache)[places[used : used + count]] = filled[used : used + count]
        used += count
    words = None
    if fmt.is_fp8:
        query = torch.randn(rows, config.heads, 128, device=device, generator=generator).to(torch.float8_e4m3fn)
    else:
        query = torch.randint(0, 256, (rows, config.heads, 64), device=device, generator=generator).to(torch.uint8)
        words = random_scale_codes((rows, config.heads), device, generator).view(torch.int32).squeeze(-1)
    weights = torch.randn(rows, config.heads, device=device, generator=generator)
    if config.weights == "bfloat16":
        weights = weights.bfloat16()
    return Problem(config, query, cache, weights, table, tuple(lengths), max_context, words)


@dataclass(frozen=True)
class Buffers:
    """Where a launch writes, and what it reads beside the problem's tensors."""

    logits: torch.Tensor
    tops: torch.Tensor | None
    starts: torch.Tensor | None
    flags: torch.Tensor
    lens: torch.Tensor
    capacity: int = 0

    def fill(self) -> None:
        """Sentinels everywhere."""
        self.logits.fill_(SENTINEL)
        if self.tops is not None:
            self.tops.fill_(SENTINEL)


def buffers(p: Problem, *, topk: int = 0, capacity: int | None = None) -> Buffers:
    """Sentinel-filled buffers for `p`. capacity: elements of the compact buffer (default: what is needed)."""
    device = p.query.device
    lens = torch.tensor(p.lengths, dtype=torch.int32, device=device)
    flags = torch.zeros(1, dtype=torch.int32, device=device)
    if p.config.layout == "pitched":
        pitch = pitch_of(max(1, *p.usable))
        logits = torch.full((len(p.lengths), pitch), SENTINEL, dtype=torch.int16, device=device)
        return Buffers(logits, None, None, flags, lens)
    layout = compact_layout(p.usable, p.config.next_n, topk if topk else 0)
    size = max(layout.elements, 128 * p.config.next_n) if capacity is None else capacity
    logits = torch.full((size + 1024,), SENTINEL, dtype=torch.int16, device=device)
    tops = torch.full((size // 8 + 128,), SENTINEL, dtype=torch.int16, device=device)
    starts = torch.full((p.table.shape[0] + 1,), -7, dtype=torch.int32, device=device)
    return Buffers(logits, tops, starts, flags, lens, size)


def launch(p: Problem, into: Buffers, *, topk: int = 0, blocks: int = 132) -> None:
    """One launch of the scorer on the current stream; nothing waits for it."""
    common = (launcher(p.config), p.config, p.query, p.cache, p.weights, into.lens, p.table)
    host = host_of(p.config)
    if into.tops is None:
        out = into.logits.view(torch.bfloat16)
        host.score_pitched(
            *common, max_context=p.max_context, logits=out, flags=into.flags, blocks=blocks, words=p.words
        )
        return
    host.score_compact(
        *common,
        topk=topk,
        max_context=p.max_context,
        logits=into.logits[: into.capacity].view(torch.bfloat16),
        tops=into.tops[: into.capacity // 8],
        starts=into.starts,
        flags=into.flags,
        blocks=blocks,
        words=p.words,
    )


def run(p: Problem, *, topk: int = 0, blocks: int = 132, capacity: int | None = None) -> Result:
    """Score `p` into sentinel-filled buffers. capacity: elements of the compact buffer (default: what is needed)."""
    into = buffers(p, topk=topk, capacity=capacity)
    launch(p, into, topk=topk, blocks=blocks)
    return Result(into.logits, into.tops, into.starts, int(into.flags.item()))


def layout_of(p: Problem, topk: int) -> CompactLayout:
    """Where the rows lie."""
    return compact_layout(p.usable, p.config.next_n, topk)


def rows_of(p: Problem, result: Result, topk: int = 0) -> list[torch.Tensor | None]:
    """Each row's logits, int16 [length]; None for rows that were not scored."""
    if p.config.layout == "pitched":
        return [result.logits[t, :n] if n else None for t, n in enumerate(p.usable)]
    layout = layout_of(p, topk)
    return [
        result.logits[start : start + n] if n and layout.scored(t) else None
        for t, (start, n) in enumerate(zip(layout.starts, p.usable, strict=True))
    ]


def assert_frame(p: Problem, result: Result, topk: int = 0) -> None:
    """Tops are those of the stored logits, starts are the prefix, and nothing outside the rows was written."""
    keep = torch.ones_like(result.logits, dtype=torch.bool)
    if p.config.layout == "pitched":
        for t, n in enumerate(p.usable):
            keep[t, :n] = False
        assert bool((result.logits[keep] == SENTINEL).all()), "a store outside the rows"
        return
    assert result.tops is not None
    assert result.starts is not None
    layout = layout_of(p, topk)
    keep_tops = torch.ones_like(result.tops, dtype=torch.bool)
    for t, row in enumerate(rows_of(p, result, topk)):
        if row is None:
            continue
        start, n = layout.starts[t], len(row)
        keep[start : start + n] = False
        keep_tops[start // 8 : start // 8 + -(-n // 8)] = False
        ranks = torch.nn.functional.pad(key16(row.view(torch.bfloat16)), (0, -n % 8)).view(-1, 8).amax(1)
        stored = result.tops[start // 8 : start // 8 + len(ranks)].to(torch.int32) & 0xFFFF
        assert torch.equal(ranks, stored), f"tops of row {t}"
    assert bool((result.logits[keep] == SENTINEL).all()), "a logit outside the rows"
    assert bool((result.tops[keep_tops] == SENTINEL).all()), "a top outside the rows"
    want = torch.cumsum(torch.tensor((0, *layout.tiles)), 0).tolist()
    assert result.starts.tolist() == want, "starts"


def assert_within_bound(p: Problem, result: Result) -> None:
    """Every logit lies within the derived bound of the exact one, and much nearer on ordinary data."""
    for t, row in enumerate(rows_of(p, result)):
        if row is None:
            continue
        got = row.view(torch.bfloat16).double()
        exact, magnitude = exact_row(p, t)
        excess = (got - exact).abs() - logit_bound(exact, magnitude, p.config.heads)
        assert bool((excess <= 0).all()), f"row {t}: {float(excess.max())} above the bound"
        # The bound is a worst case; what the hardware does on ordinary data is two orders nearer.
        near = (got - exact).abs() - exact.abs() * 2.0**-8
        # (Block scales that lie apart within a vector put more of it below the bits that the unit keeps.)
        share = 2.0**-12 if p.config.key_format != "mxfp4" else 2.0**-9
        assert bool((near <= magnitude * share).all()), f"row {t}: far from the exact logits"


def exact_row(p: Problem, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 (logits, magnitudes) of a row; magnitude: |scale| * sum_h |w_h| * sum_d |q_hd k_d|."""
    length = p.usable[row]
    pages = p.table[row // p.config.next_n, : -(-length // PAGE)].long()
    keys, scale = (t[:length] for t in page_values(page_bytes(p.cache)[pages], p.config.key_format))
    query = query_values(p.query[row], None if p.words is None else p.words[row])
    weights = p.weights[row].double()[:, None]
    dots = (query @ keys.T).clamp_min(0.0)
    magnitude = (query.abs() @ keys.abs().T * weights.abs()).sum(0) * scale.abs()
    return (dots * weights).sum(0) * scale, magnitude
