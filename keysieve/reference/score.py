"""Logits on the CPU: exact dots, one documented order of every sum, the same bits on every machine.

Exactness. A finite E4M3 value is a multiple of 2^-9 of at most 448, so a product of two is a multiple of 2^-18 of at
most 448^2, and every partial sum of 128 products, in any order, is a multiple of 2^-18 below 128 * 448^2 < 2^25: 43
bits, fewer than float64's 53. A float64 matrix product is therefore exact whatever order, blocking, fused
multiply-add or number of threads a BLAS uses. For MXFP4 the same holds within each block of 32 elements, where all
products share one power-of-two factor: multiples of 2^-2 of at most 36, so 32 of them need 13 bits; the factor lies
within 2^-254..2^254. The four block sums are then added in order, in float64. Either dot is rounded once, to float32.

Order. ``fp32``: for h ascending, ``acc = acc + max(dot, 0) * w``, where product and sum are separate float32 tensor
operations, which nothing can contract to an fma. ``bf16``: see :mod:`keysieve.reference.bf16`. Both go on with the
key's scale in float32 and one rounding to BF16. All of it is elementwise over keys, so neither the batch, nor the
chunking below, nor the thread count can change a bit.
"""

from __future__ import annotations

from typing import Any

import torch

from keysieve.cache import IndexCache
from keysieve.checks import require_int
from keysieve.inputs import Step, check_step
from keysieve.plan import CPU_CHUNK_KEYS
from keysieve.quantize import decode_scales
from keysieve.reference.bf16 import head_sum_bf16
from keysieve.reference.faults import Faults, usable_lengths
from keysieve.reference.keys import canonicalize_
from keysieve.spec import CANONICAL_NAN, HEAD_DIM, MAX_CONTEXT, MX_BLOCK, PAGE, IndexerSpec, KeyFormat

_BLOCKS = HEAD_DIM // MX_BLOCK
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _e4m3_values() -> torch.Tensor:
    """float64 ``[256]``: the value of every E4M3 code."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).to(torch.float64)


def _e2m1_pairs() -> torch.Tensor:
    """complex128 ``[256]``: the two values of every E2M1 byte, the low nibble (even element) as the real part."""
    values = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=torch.float64, device="cpu")
    byte = torch.arange(256, device="cpu")
    return torch.complex(values[byte & 15], values[byte >> 4])


E4M3 = _e4m3_values()
E2M1_PAIRS = _e2m1_pairs()


def decode_codes(codes: torch.Tensor, block_scales: torch.Tensor | None) -> torch.Tensor:
    """float64 ``[n, 128]``: the values of ``n`` keys or queries; MXFP4 with the block scales inside, exactly.

    Args:
        codes: uint8, ``n * 128`` E4M3 codes (without ``block_scales``) or ``n * 64`` E2M1 pairs, contiguous.
        block_scales: float32 ``[n, 4]``, one per 32 elements; MXFP4 only.
    """
    index = codes.reshape(-1).to(torch.int32)
    if block_scales is None:
        return E4M3.index_select(0, index).view(-1, HEAD_DIM)
    pairs = torch.view_as_real(E2M1_PAIRS.index_select(0, index)).view(-1, _BLOCKS, MX_BLOCK)
    return pairs.mul_(block_scales.to(torch.float64).unsqueeze(-1)).view(-1, HEAD_DIM)


def exact_dots(fmt: KeyFormat, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float32 ``[m, n]``: dots of float64 ``query [m, 128]`` and ``keys [n, 128]``, exact and then rounded once."""
    if fmt.is_fp8:
        return torch.mm(query, keys.t()).to(torch.float32)
    total: torch.Tensor | None = None
    for block in range(_BLOCKS):
        part = slice(block * MX_BLOCK, (block + 1) * MX_BLOCK)
        # A product of its own per block: accumulating into the total inside a BLAS would round in an unknown order.
        partial = torch.mm(query[:, part], keys[:, part].t())
        total = partial if total is None else total.add_(partial)
    assert total is not None
    return total.to(torch.float32)


def head_sum_fp32(dots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """float32 ``[n, keys]``: ``sum_h max(dots[h], 0) * weights[h]``, ascending h, multiply then add. Changes ``dots``.

    Args:
        dots: float32 ``[heads, n, keys]``; a NaN makes the sum NaN (clamp_min keeps NaN).
        weights: float32 ``[heads, n]``.
    """
    products = dots.clamp_min_(0.0).mul_(weights[:, :, None])
    total = products[0].clone()
    for h in range(1, products.shape[0]):
        total.add_(products[h])
    return total


def read_pages(cache: IndexCache, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys float64 ``[64 * n, 128]`` and (FP8) their scales float32 ``[64 * n]``, of the pages ``ids [n]``."""
    codes, scales = cache.page_codes(ids), cache.page_scales(ids)
    if cache.format.is_fp8:
        return decode_codes(codes, None), scales.view(-1)
    return decode_codes(codes, scales.view(-1, _BLOCKS)), None


class Scorer:
    """Scores the requests of one step.

    Args:
        step: the checked inputs, on the CPU.
        numerics: ``"fp32"`` or ``"bf16"``.
    """

    def __init__(self, step: Step, numerics: str) -> None:
        self._step = step
        self._fmt = step.spec.format
        self._bf16 = numerics == "bf16"

    def _query(self, request: int) -> torch.Tensor:
        """float64 ``[heads * next_n, 128]`` of one request, heads outermost."""
        n = self._step.next_n
        rows = slice(request * n, (request + 1) * n)
        words, scales = self._step.words, None
        if words is not None:
            scales = decode_scales(self._fmt, words[rows].contiguous().view(torch.uint8).view(-1, _BLOCKS))
        values = decode_codes(self._step.codes[rows].contiguous(), scales).view(n, -1, HEAD_DIM)
        return values.transpose(0, 1).reshape(-1, HEAD_DIM)

    def _weights(self, request: int) -> torch.Tensor:
        """``[heads, next_n]`` of one request: float32, or bfloat16 for bf16 numerics."""
        n = self._step.next_n
        weights = self._step.weights[request * n : (request + 1) * n].t()
        return weights.to(torch.bfloat16 if self._bf16 else torch.float32).contiguous()

    def score_request(self, request: int, lengths: list[int], out: torch.Tensor, faults: Faults) -> None:
        """Write the logits of one request's rows into ``out`` (bfloat16 ``[next_n, >= max(lengths)]``).

        Only columns below a row's length are meaningful; what stands beyond it is unspecified.

        Args:
            request: which request of the step.
            lengths: keys of each of its ``next_n`` rows, within the index table.
            out: written up to the longest length.
            faults: page ids outside the pool are reported here; their keys' logits are the canonical NaN.
        """
        longest = max(lengths)
        if longest <= 0:
            return
        query, weights = self._query(request), self._weights(request)
        ids = self._step.index_table[request, : -(-longest // PAGE)].to(torch.int64)
        outside = (ids < 0) | (ids >= self._step.cache.pages)
        if bool(outside.any()):
            column = int(torch.nonzero(outside)[0])
            faults.add(
                f"request {request}: index_table column {column} holds page {int(ids[column])}, outside the "
                f"{self._step.cache.pages} pages of the cache; its keys got NaN logits"
            )
        step = max(1, CPU_CHUNK_KEYS // PAGE)
        for first in range(0, ids.numel(), step):
            end = min((first + step) * PAGE, longest)
            part, hidden = ids[first : first + step], outside[first : first + step]
            self._score_pages(query, weights, part, hidden, out[:, first * PAGE : end])

    def _score_pages(
        self, query: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, outside: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Logits of the keys of pages ``ids`` into ``out [next_n, <= 64 * len(ids)]``."""
        wrong = bool(outside.any())
        if wrong and self._step.cache.pages == 0:
            out.view(torch.int16).fill_(CANONICAL_NAN - 0x10000)
            return
        keys, scale = read_pages(self._step.cache, ids.masked_fill(outside, 0) if wrong else ids)
        keys = keys[: out.shape[1]]
        dots = exact_dots(self._fmt, query, keys).view(*weights.shape, out.shape[1])
        total = head_sum_bf16(dots, weights) if self._bf16 else head_sum_fp32(dots, weights)
        if scale is not None:
            total.mul_(scale[: out.shape[1]])
        out.copy_(canonicalize_(total.to(torch.bfloat16)))
        if wrong:
            hidden = outside.repeat_interleave(PAGE)[: out.shape[1]]
            out.view(torch.int16)[:, hidden] = CANONICAL_NAN - 0x10000


def score_step_(step: Step, numerics: str, lengths: list[int], logits: torch.Tensor, faults: Faults) -> torch.Tensor:
    """Fill BF16 ``logits [rows, width]`` of a checked step, -inf past each row's length; lengths are usable ones."""
    scorer = Scorer(step, numerics)
    for request in range(step.requests):
        rows = slice(request * step.next_n, (request + 1) * step.next_n)
        scorer.score_request(request, lengths[rows], logits[rows], faults)
        for length, row in zip(lengths[rows], logits[rows], strict=True):
            row[length:] = -torch.inf
    return logits


def check_max_len(max_len: Any) -> int | None:
    """``max_len`` of the public score: None, or the width of the result."""
    if max_len is None:
        return None
    return require_int("max_len", max_len, 0, MAX_CONTEXT, "Give the width of the result in keys, or None.")


@torch.no_grad()
def score_checked(step: Step, max_len: int | None, faults: Faults) -> torch.Tensor:
    """BF16 ``[rows, max_len]`` of a checked step; ``max_len`` None: the longest length.

    A row longer than ``max_len`` or than its index table is empty (all -inf), with a fault.
    """
    limits = [(step.table_keys, step.table_limit())]
    if max_len is not None:
        limits.append((max_len, "max_len"))
    lengths = usable_lengths(step.seq_lens.tolist(), limits, faults)
    width = max(lengths, default=0) if max_len is None else max_len
    logits = torch.empty(step.rows, width, dtype=torch.bfloat16, device="cpu")
    return score_step_(step, step.spec.numerics_on("cpu"), lengths, logits, faults)


def score(
    spec: IndexerSpec,
    query: Any,
    cache: Any,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    index_table: torch.Tensor,
    max_len: int | None = None,
    *,
    out: torch.Tensor | None = None,
    faults: Faults | None = None,
) -> torch.Tensor:
    """Logits of every row over its whole context, on the CPU; see :func:`keysieve.score` for the arguments.

    Returns:
        bfloat16 ``[rows, max_len]``: -inf past a row's length. Without ``max_len``: the longest length.
    """
    step = check_step(spec, query, cache, weights, seq_lens, index_table, device="cpu")
    found = Faults() if faults is None else faults
    result = score_checked(step, check_max_len(max_len), found)
    if faults is None:
        found.warn()
    return result if out is None else out.copy_(result)
