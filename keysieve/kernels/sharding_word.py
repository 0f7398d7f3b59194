"""The sharding of a context in one 64-bit word, as the pitched scorer takes it. No cutlass here."""

from keysieve.spec import MAX_CONTEXT, MAX_WORLD


def sharding_word(world: int, rank: int, interleave: int, limit: int) -> int:
    """`world | rank << 5 | interleave << 10 | limit << 37` as a signed 64-bit integer; limit: longest global length."""
    if not (1 <= world <= MAX_WORLD and 0 <= rank < world):
        raise ValueError(f"world {world}, rank {rank}: 1..{MAX_WORLD} ranks")
    if not (1 <= interleave <= MAX_CONTEXT and 0 <= limit <= MAX_CONTEXT):
        raise ValueError(f"interleave {interleave}, limit {limit}: up to {MAX_CONTEXT}")
    word = world | rank << 5 | interleave << 10 | limit << 37
    return word - (1 << 64) if word >> 63 else word
