"""Rows that break careless selections, the compact layout of logits and maxima, and a stable-sort oracle, in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

KINDS = (
    "gaussian", "relu", "equal", "few", "bucket", "lowdigit", "specials", "ascending", "descending", "clustered",
    "nan", "pairs", "exactk", "planted", "far", "wide", "brink",
)  # fmt: skip


def values(kind: str, rows: int, length: int, k: int, device: torch.device | str, seed: int) -> torch.Tensor:
    """BF16 `[rows, length]` of one kind; -0 and odd NaN payloads included where the kind says so."""
    g = torch.Generator(device=device).manual_seed(seed)
    normal = torch.randn(rows, length, generator=g, device=device)
    x = normal
    if kind == "relu":  # fewer than k positive values, then a plateau of zeros through the threshold
        keep = max(1, k // 2)
        cut = normal.kthvalue(max(1, length - keep), dim=1, keepdim=True).values if length > keep else normal * 0 - 9
        x = (normal - cut).clamp_min(0)
    elif kind == "equal":
        x = torch.full_like(normal, -1.5)
    elif kind == "few":
        x = normal.sign() * (normal.abs() > 1)
    elif kind == "bucket":
        x = 1.0 + torch.randint(0, 8, normal.shape, generator=g, device=device) / 128
    elif kind == "lowdigit":
        bits = 0x4480 + torch.randint(0, 1024, normal.shape, generator=g, device=device)
        return bits.to(torch.int16).view(torch.bfloat16)
    elif kind == "specials":
        pool = torch.tensor([float("inf"), float("-inf"), 0.0, -0.0, 1e-40, -1e-40, float("nan")], device=device)
        x = pool[torch.randint(0, 7, normal.shape, generator=g, device=device)]
    elif kind == "ascending":
        x = torch.arange(length, device=device).expand(rows, length) / 7.0
    elif kind == "descending":
        x = -torch.arange(length, device=device).expand(rows, length) / 7.0
    elif kind == "clustered":  # all winners side by side, at a random place
        x = normal * 0.1
        for row in range(rows):
            at = int(torch.randint(0, max(1, length - k), (1,), generator=g, device=device))
            x[row, at : at + k] += 100
    elif kind == "nan":
        bits = torch.randint(0x7F81, 0x7FFF, normal.shape, generator=g, device=device)
        bits = bits | (normal > 0).to(bits.dtype) << 15
        bits = torch.where(bits >= 0x8000, bits - 0x10000, bits)
        return bits.to(torch.int16).view(torch.bfloat16)
    elif kind == "pairs":  # groups of four equal values
        x = normal[:, : (length + 3) // 4].repeat_interleave(4, dim=1)[:, :length]
    elif kind == "exactk":  # exactly k keys above all others
        x = normal.abs() * -1
        for row in range(rows):
            x[row, torch.randperm(length, generator=g, device=device)[:k]] += 64
    elif kind == "far":  # in one place fewer than k winners, octaves above all others
        at = int(torch.randint(0, max(1, length - k), (1,), generator=g, device=device))
        x[:, at : at + max(1, k // 3)] = 1e30
    elif kind == "wide":  # every octave there is, both signs
        x = normal.sign() * torch.exp2(250 * torch.rand(normal.shape, generator=g, device=device) - 125)
    elif kind == "brink":  # few best keys; the threshold lies half a thousand, or a thousand, values below them
        below = torch.randint(508, 515, normal.shape, generator=g, device=device)
        bits = 0x4480 - below - 512 * (torch.arange(rows, device=device)[:, None] + seed) % 1024
        bits[normal > 3.0] = 0x4480
        return bits.to(torch.int16).view(torch.bfloat16)
    elif kind == "planted":  # few winners in the first percent
        x = normal * 0.01
        x[:, : max(1, length // 100)][:, :16] = 5
    return x.to(torch.bfloat16)


def canonical(x: torch.Tensor) -> torch.Tensor:
    """-0 as +0, every NaN as 0xFFC0."""
    bits = x.view(torch.int16).to(torch.int32) & 0xFFFF
    bits = torch.where((bits & 0x7FFF) > 0x7F80, 0xFFC0, bits)
    bits = torch.where(bits == 0x8000, 0, bits)
    return torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16).view(torch.bfloat16)


def key16(x: torch.Tensor) -> torch.Tensor:
    """int32 key16 of canonical BF16 values."""
    bits = x.view(torch.int16).to(torch.int32) & 0xFFFF
    return torch.where(bits >= 0x8000, bits ^ 0xFFFF, bits ^ 0x8000)


def oracle_positions(x: torch.Tensor, length: int, k: int) -> torch.Tensor:
    """Positions of the row's selection, ascending, -1 filled to k (int32): a stable sort of the row's own key16."""
    out = torch.full((k,), -1, dtype=torch.int32, device=x.device)
    length = max(0, length)
    if length:
        order = torch.sort(key16(canonical(x[:length])), descending=True, stable=True).indices[:k]
        out[: len(order)] = order.sort().values.to(torch.int32)
    return out


@dataclass
class Compact:
    """A step's logits and maxima in the compact layout, and the rows they came from."""

    logits: torch.Tensor
    tops: torch.Tensor
    lens: torch.Tensor
    next_n: int
    rows: list[torch.Tensor]


def compact(rows: list[torch.Tensor], lens: list[int], next_n: int, k: int) -> Compact:
    """Lay out `rows[t][:lens[t]]` as the scorer does. What lies outside of the rows is poison: +inf, largest maxima."""
    device = rows[0].device
    starts, total = [], 0
    for first in range(0, len(rows), next_n):
        longest = max(0, *lens[first : first + next_n])
        tiles = 0 if longest <= k else -(-longest // 128)
        starts += [total + 128 * tiles * j for j in range(next_n)]
        total += 128 * tiles * next_n
    logits = torch.full((max(total, 128),), float("inf"), dtype=torch.bfloat16, device=device)
    tops = torch.full((max(total, 128) // 8,), -1, dtype=torch.int16, device=device)
    for first in range(0, len(rows), next_n):
        if max(0, *lens[first : first + next_n]) <= k:
            continue
        for t in range(first, first + next_n):
            n = max(0, lens[t])
            logits[starts[t] : starts[t] + n] = canonical(rows[t][:n])
            keys = torch.zeros((n + 7) // 8 * 8, dtype=torch.int32, device=device)
            keys[:n] = key16(canonical(rows[t][:n]))
            best = keys.view(-1, 8).amax(dim=1)
            best = torch.where(best >= 0x8000, best - 0x10000, best).to(torch.int16)
            tops[starts[t] // 8 : starts[t] // 8 + len(best)] = best
    lengths = torch.tensor(lens, dtype=torch.int32, device=device)
    return Compact(logits, tops, lengths, next_n, rows)


def physical(positions: torch.Tensor, table: torch.Tensor, kv_page: int, block_rows: int) -> torch.Tensor:
    """Physical rows of one row's positions through its block table; -1 stays -1."""
    entry = table[(positions.clamp_min(0) // kv_page).long()]
    return torch.where(positions < 0, -1, entry * block_rows + positions % kv_page).to(torch.int32)


def tile_starts(lens: list[int], next_n: int, k: int, device: torch.device | str) -> torch.Tensor:
    """int32 [requests + 1]: tiles before each request, as the scorer leaves them."""
    starts = [0]
    for first in range(0, len(lens), next_n):
        longest = max(0, *lens[first : first + next_n])
        starts.append(starts[-1] + (0 if longest <= k else -(-longest // 128)))
    return torch.tensor(starts, dtype=torch.int32, device=device)
