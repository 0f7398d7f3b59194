"""Score patterns that selections have got wrong: ties, plateaus, crowded radix bins, special values.

Every generator has the signature ``(length, topk, generator) -> float32 [length]`` and draws only from the generator,
so a seed fixes the result. Values need not be exact in BF16: ``tiny``, ``huge`` and ``low_bits`` are meant to collide
when they are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Generator, Tensor

ScorePattern = Callable[[int, int, Generator], Tensor]

DIGIT_SPLITS: Final = (4, 5, 8, 11, 13)
"""Leading bits of key16 that the ``digit`` patterns hold fixed: below, at and above the digits of the usual radix
passes (8 + 8 and 11 + 5 bits)."""


def scores_of_key16(keys: Tensor) -> Tensor:
    """The scores (float32, exact) whose key16 is ``keys`` (int, 0x003F..0xFFFF)."""
    wide = keys.to(torch.int64)
    bits = torch.where(wide >= 0x8000, wide - 0x8000, 0xFFFF - wide)
    return (bits << 16).to(torch.int32).view(torch.float32)


def _normal(length: int, gen: Generator) -> Tensor:
    return torch.randn(length, generator=gen)


def _pick(length: int, count: int, gen: Generator) -> Tensor:
    """``count`` distinct positions below ``length`` (fewer when there are not so many), in no order."""
    return torch.randperm(length, generator=gen)[:count]


def gaussian(length: int, topk: int, gen: Generator) -> Tensor:
    """Plain random scores, rounded to BF16: a long row already has dozens of ties at its threshold."""
    del topk
    return _normal(length, gen).to(torch.bfloat16).float()


def relu_plateau(length: int, topk: int, gen: Generator) -> Tensor:
    """What ReLU makes: a few positive scores (fewer than ``topk``), then zeros through the threshold."""
    scores = torch.zeros(length)
    positive = _pick(length, min(max(topk // 3, 3), length), gen)
    scores[positive] = _normal(positive.numel(), gen).abs().to(torch.bfloat16).float() + 0.0
    return scores


def three_positives(length: int, topk: int, gen: Generator) -> Tensor:
    """Three positive scores and nothing but zeros."""
    del topk
    scores = torch.zeros(length)
    scores[_pick(length, 3, gen)] = 1.0
    return scores


def half_tied(length: int, topk: int, gen: Generator) -> Tensor:
    """Every other key has the median score, which is about where the threshold falls; the rest are random."""
    del topk
    scores = _normal(length, gen).to(torch.bfloat16).float()
    return torch.where(torch.rand(length, generator=gen) < 0.5, torch.full_like(scores, 0.25), scores)


def all_equal(length: int, topk: int, gen: Generator) -> Tensor:
    """One value everywhere: the answer is the lowest positions."""
    del topk
    return scores_of_key16(torch.randint(0x80, 0xFF80, (1,), generator=gen)).expand(length).contiguous()


def one_bucket(length: int, topk: int, gen: Generator) -> Tensor:
    """Random scores that share the top byte of their key16: one bin of a first radix pass holds the whole row."""
    del topk
    top = int(torch.randint(0x10, 0xF0, (1,), generator=gen)) << 8
    return scores_of_key16(top | torch.randint(0, 256, (length,), generator=gen))


def two_values(length: int, topk: int, gen: Generator) -> Tensor:
    """Two adjacent key16 values: the threshold is decided in the last bit."""
    del topk
    low = int(torch.randint(0x1000, 0xF000, (1,), generator=gen))
    return scores_of_key16(low + torch.randint(0, 2, (length,), generator=gen))


def digit_ties(leading_bits: int) -> ScorePattern:
    """Scores whose key16 agree in the first ``leading_bits`` around the threshold and are random below."""

    def pattern(length: int, topk: int, gen: Generator) -> Tensor:
        free = 16 - leading_bits
        prefix = int(torch.randint(1 << leading_bits - 2, 3 << leading_bits - 2, (1,), generator=gen))
        keys = prefix << free | torch.randint(0, 1 << free, (length,), generator=gen)
        above = _pick(length, min(topk // 2, length), gen)  # half the winners are clear of the crowd
        keys[above] = (prefix + 1 << free) + torch.randint(0, 1 << free, (above.numel(),), generator=gen)
        return scores_of_key16(keys.clamp(0x80, 0xFF7F))

    return pattern


def nested_clusters(length: int, topk: int, gen: Generator) -> Tensor:
    """Clusters inside clusters: at every digit split most of what is left agrees with the threshold's digit."""
    del topk
    keys = torch.full((length,), 0xB5A6, dtype=torch.int64)
    rest = torch.randperm(length, generator=gen)
    for leading_bits in DIGIT_SPLITS:
        out = rest[: rest.numel() // 4]
        free = 16 - leading_bits
        flip = torch.randint(0, 1 << free, (out.numel(),), generator=gen)
        keys[out] = (0xB5A6 >> free << free) | flip
        rest = rest[rest.numel() // 4 :]
    return scores_of_key16(keys)


def low_bits(length: int, topk: int, gen: Generator) -> Tensor:
    """float32 scores that differ only in their low ten bits: BF16 sees one value."""
    del topk
    bits = 0x3F800000 | torch.randint(0, 1024, (length,), generator=gen)
    return bits.to(torch.int32).view(torch.float32)


def groups_of_four(length: int, topk: int, gen: Generator) -> Tensor:
    """Every four neighbours share a score: a ``topk`` that four does not divide cuts inside a group."""
    del topk
    pooled = _normal(-(-length // 4), gen).to(torch.bfloat16).float()
    return pooled.repeat_interleave(4)[:length]


def exactly_topk_live(length: int, topk: int, gen: Generator) -> Tensor:
    """Exactly ``topk`` keys lie in bins above all others, which are negative."""
    scores = -1.0 - torch.rand(length, generator=gen).to(torch.bfloat16).float()
    live = _pick(length, topk, gen)
    scores[live] = 64.0 + 64.0 * torch.rand(live.numel(), generator=gen).to(torch.bfloat16).float()
    return scores


def pair_at_threshold(length: int, topk: int, gen: Generator) -> Tensor:
    """``topk - 1`` clear winners and exactly two equal keys that compete for the last place."""
    scores = torch.full((length,), -1.0)
    places = _pick(length, topk + 1, gen)
    scores[places] = 2.0 + torch.rand(places.numel(), generator=gen).to(torch.bfloat16).float()
    scores[places[-2:]] = 1.0
    return scores


def tiny(length: int, topk: int, gen: Generator) -> Tensor:
    """Scores in [1e-7, 2e-7], where a 16-bit half float has almost no resolution left."""
    del topk
    return 1e-7 + 1e-7 * torch.rand(length, generator=gen)


def huge(length: int, topk: int, gen: Generator) -> Tensor:
    """Scores in [7e4, 9e4], above the largest half float."""
    del topk
    return 7e4 + 2e4 * torch.rand(length, generator=gen)


def special_values(length: int, topk: int, gen: Generator) -> Tensor:
    """NaN, both infinities, zeros, the smallest and largest magnitudes, in about equal parts."""
    del topk
    bits = torch.tensor([0xFFC0, 0x7F80, 0xFF80, 0x0000, 0x0001, 0x8001, 0x7F7F, 0xFF7F, 0x0080, 0x8080, 0x3F80])
    pick = bits[torch.randint(0, bits.numel(), (length,), generator=gen)]
    return (pick << 16).to(torch.int32).view(torch.float32)


def few_finite(length: int, topk: int, gen: Generator) -> Tensor:
    """Fewer finite keys than ``topk``; all others are -inf."""
    scores = torch.full((length,), float("-inf"))
    finite = _pick(length, max(topk // 4, 1), gen)
    scores[finite] = _normal(finite.numel(), gen).to(torch.bfloat16).float()
    return scores


def any_bits(length: int, topk: int, gen: Generator) -> Tensor:
    """Uniform over all 65,536 BF16 patterns, NaN payloads and -0 included."""
    del topk
    return (torch.randint(0, 1 << 16, (length,), generator=gen) << 16).to(torch.int32).view(torch.float32)


def ascending(length: int, topk: int, gen: Generator) -> Tensor:
    """Never falling: the winners are the newest keys, with ties among them once the values run out."""
    del topk, gen
    return scores_of_key16(0x0100 + torch.arange(length) * 0xFE00 // max(length, 1))


def descending(length: int, topk: int, gen: Generator) -> Tensor:
    """Never rising: the winners are the oldest keys."""
    return ascending(length, topk, gen).flip(0)


def early_winners(length: int, topk: int, gen: Generator) -> Tensor:
    """A few winners planted in the first hundredth of the row, and newer keys that look better than the old ones."""
    scores = ascending(length, topk, gen).clamp(max=1.0)
    planted = _pick(min(max(length // 100, 1), length), 16, gen)
    scores[planted] = 2.0
    return scores


PATTERNS: Final[dict[str, ScorePattern]] = {
    "gaussian": gaussian,
    "relu_plateau": relu_plateau,
    "three_positives": three_positives,
    "half_tied": half_tied,
    "all_equal": all_equal,
    "one_bucket": one_bucket,
    "two_values": two_values,
    **{f"digit_ties_{bits}": digit_ties(bits) for bits in DIGIT_SPLITS},
    "nested_clusters": nested_clusters,
    "low_bits": low_bits,
    "groups_of_four": groups_of_four,
    "exactly_topk_live": exactly_topk_live,
    "pair_at_threshold": pair_at_threshold,
    "tiny": tiny,
    "huge": huge,
    "special_values": special_values,
    "few_finite": few_finite,
    "any_bits": any_bits,
    "ascending": ascending,
    "descending": descending,
    "early_winners": early_winners,
}
"""Every pattern by name, as ``keysieve check`` and the tests draw them."""
