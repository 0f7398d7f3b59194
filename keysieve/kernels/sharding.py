"""Global lengths turned into a context-parallel rank's own, where a kernel reads them: no kernel of its own does it.

Position g lies on rank `(g // S) % W`, S being the interleave, so of the first `length` positions rank r holds
`length // (S W) * S + clamp(length % (S W) - r S, 0, S)`.
"""

from typing import Any

from cutlass import Int32, Int64, Uint32

from keysieve.device import ptx

TOO_LONG = 0x7FFFFFFF
"""Length given for one beyond the global limit: beyond every local limit, so that its row is empty and flagged."""

_COUNT_BITS, _KEYS_BITS = 5, 27
_COUNT, _KEYS = (1 << _COUNT_BITS) - 1, (1 << _KEYS_BITS) - 1


def local_length(length: Int32, world: Uint32, rank: Uint32, interleave: Uint32) -> Int32:
    """Keys of a row of `length` keys (0 or more) on rank `rank`; world and interleave at least 1."""
    stripe = world * interleave
    whole = Uint32(length) // stripe
    rest = Int32(Uint32(length) - whole * stripe) - Int32(rank * interleave)
    rest = rest * Int32(rest > Int32(0))
    over = rest - Int32(interleave)
    return Int32(whole * interleave) + rest - over * Int32(over > Int32(0))


class ShardedLengths:
    """Lengths in memory, read as a rank's own. word: `sharding_word`'s, 0 for lengths that are local already."""

    def __init__(self, addr: Int64, word: Int64) -> None:
        self.addr = addr
        self.world = Uint32(word & Int64(_COUNT))
        self.rank = Uint32((word >> Int64(_COUNT_BITS)) & Int64(_COUNT))
        self.interleave = Uint32((word >> Int64(2 * _COUNT_BITS)) & Int64(_KEYS))
        self.limit = Int32((word >> Int64(2 * _COUNT_BITS + _KEYS_BITS)) & Int64(_KEYS))
        self.plain = Int32(self.world == Uint32(0))
        self.world = self.world + Uint32(self.plain)
        self.interleave = self.interleave + Uint32(self.plain)

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> "ShardedLengths":
        return self

    def own(self, length: Int32) -> Int32:
        """What is this rank's of a global length: 0 of an empty row's, TOO_LONG for one beyond the global limit."""
        length = length * Int32(length > Int32(0))
        local = local_length(length, self.world, self.rank, self.interleave)
        long = Int32(length > self.limit) * (Int32(1) - self.plain)
        return local * (Int32(1) - long) + Int32(TOO_LONG) * long


def raw_length(lens: Any, offset: Int64) -> Int32:
    """What stands at byte `offset` of `lens`, an address or `ShardedLengths`; see `own_length`."""
    return ptx.load((lens.addr if isinstance(lens, ShardedLengths) else lens) + offset, Int32)


def own_length(lens: Any, raw: Int32) -> Int32:
    """The length meant by what `raw_length` read."""
    return lens.own(raw) if isinstance(lens, ShardedLengths) else raw


def read_length(lens: Any, offset: Int64) -> Int32:
    """The length at byte `offset` of `lens`: an address, or `ShardedLengths`."""
    return own_length(lens, raw_length(lens, offset))
