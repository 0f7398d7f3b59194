"""The rules of the contract in plain Python, slowly and obviously: lists of ``(key16, position)``, sorted.

Shares the scalar key16 with the package (it is tested exhaustively on its own) and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from keysieve.spec import canonical_bits, key16

Entry = tuple[int, int]
"""(key16, index): a candidate; the index is local or global, as the function says."""


def keys_of(logits: torch.Tensor) -> list[int]:
    """key16 of every BF16 logit of a row."""
    bits = logits.view(torch.int16).tolist()
    return [key16(canonical_bits(b & 0xFFFF)) for b in bits]


def best(entries: list[Entry], n: int) -> list[Entry]:
    """The first ``n`` by (key descending, index ascending), in ascending index."""
    return sorted(sorted(entries, key=lambda e: (-e[0], e[1]))[:n], key=lambda e: e[1])


def pack(entries: list[Entry], n: int, planes: int) -> list[int]:
    """A candidate row as unsigned 32-bit words, built bit by bit from the contract's sentence."""
    groups = (n + 31) // 32
    words = [0] * (n + planes * groups)
    for j, (key, local) in enumerate(entries):
        words[j] = key << 16 | (0xFFFF - (local & 0xFFFF))
        for p in range(planes):
            if local >> (16 + p) & 1:
                words[n + p * groups + j // 32] |= 1 << (j % 32)
    return words


def signed(words: list[int]) -> list[int]:
    return [w - (1 << 32) if w >= 1 << 31 else w for w in words]


@dataclass(frozen=True)
class Sharded:
    """One row spread over ranks: ``lists[r]`` are the (key16, global position) that rank r holds, in order."""

    lists: list[list[Entry]]

    @classmethod
    def of(cls, keys: list[int], world: int, interleave: int) -> Sharded:
        lists: list[list[Entry]] = [[] for _ in range(world)]
        for position, key in enumerate(keys):
            lists[position // interleave % world].append((key, position))
        return cls(lists)

    def offered(self, n: int) -> list[list[Entry]]:
        return [best(held, n) for held in self.lists]

    def merged(self, n: int, k: int, saturated: set[int]) -> list[Entry]:
        """The K best of the unsaturated ranks' first lists and the saturated ranks' second lists."""
        first, second = self.offered(n), self.offered(k)
        pool = [e for r in range(len(self.lists)) for e in (second[r] if r in saturated else first[r])]
        return best(pool, k)

    def saturated(self, n: int, k: int) -> set[int]:
        """The rule: full, shorter than k and than what the rank holds, and every entry among the K best offered."""
        if n >= k:
            return set()
        top = set(best([e for offer in self.offered(n) for e in offer], k))
        return {
            r for r, offer in enumerate(self.offered(n)) if len(offer) == n < len(self.lists[r]) and set(offer) <= top
        }

    def strictly_saturated(self, n: int, k: int) -> set[int]:
        """A weaker rule that looks sensible: every entry strictly above the K-th score of what was offered."""
        pool = best([e for offer in self.offered(n) for e in offer], k)
        threshold = min(key for key, _ in pool) if len(pool) == k else 0
        return {
            r
            for r, offer in enumerate(self.offered(n))
            if len(offer) == n < len(self.lists[r]) and all(key > threshold for key, _ in offer)
        }
