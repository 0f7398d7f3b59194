"""Rows that two blocks share behind a guessed floor: the kernel's source, executed, held to the reference.

Every case says which ways it is there for; that they are taken is part of the test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from local_topk_source import GUESS, KEPT, LISTED, WHOLE, Cluster, Edits

from keysieve.kernels.local_topk_config import MAX_SHIFT, SAMPLE_BINS, LocalTopkConfig
from keysieve.models.select import Keys, key16_of_bits, tops_of
from keysieve.reference.local_topk import local_topk


class Guessing(LocalTopkConfig):
    """A shape that is too small to be worth it guesses, too."""

    guesses = True


SMALL = Guessing(True, threads=128, held=8, cluster=2, longer=False)
FOUR = Guessing(True, threads=128, held=4, cluster=2, longer=False)
FULL = LocalTopkConfig(True, threads=512, held=8, cluster=2, longer=False)
KEPT_KEYS = 3
"""Listed keys that a lane keeps."""

JUNK = (0x7F80, 0xFFFF, 0, 0xFFC0, 0x8001)
"""What lies behind a row's last key, in its last vector."""


def bits_of(x: Any) -> Keys:
    """Canonical BF16 bits."""
    with np.errstate(invalid="ignore", over="ignore"):
        bits = torch.from_numpy(np.asarray(x, np.float32)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    bits = np.where((bits & 0x7FFF) > 0x7F80, 0xFFC0, bits)
    return np.where(bits == 0x8000, 0, bits).astype(np.uint16)


def sample_of(config: LocalTopkConfig, vectors: int) -> Any:
    """Numbers of the vectors that a guess is made from: of either block every warp's first 32."""
    share = -(-vectors // 2)
    parts = ((0, share), (share, vectors - share))
    return np.array(
        [
            first + place
            for first, count in parts
            for place in range(count)
            if place % (-(-count // config.threads) * 32) < 32
        ]
    )


def sorted_tops(config: LocalTopkConfig, bits: Keys, wanted: int) -> Any:
    """The sample's maxima, the largest first, and zeros behind them."""
    tops = tops_of(key16_of_bits(bits)).astype(int)[sample_of(config, -(-len(bits) // 8))]
    return np.append(np.sort(tops)[::-1], np.zeros(wanted, int))


def check_guess(config: LocalTopkConfig, tops: Any, wanted: int, early: int, floor: int, shift: int) -> None:
    """The floor is the lower edge of the bin of the `wanted`-th largest of the sample's maxima, and the bins from there
    on reach the `early`-th, but not far beyond."""
    assert floor == tops[wanted - 1] // 4 * 4
    far = tops[early - 1] - floor
    assert floor == 0 or shift == MAX_SHIFT or far < 254 << shift
    assert floor == 0 or shift == 0 or far + 4 * SAMPLE_BINS // config.threads >= 254 << shift - 1


def check_plateau(config: LocalTopkConfig, tops: Any, wanted: int, value: int) -> None:
    """Of what lies below a guess three quarters reach the bin; no value in it is commoner, nor as common and higher."""
    edge = tops[wanted - 1] // 4 * 4
    assert 4 * ((tops >= edge).sum() - wanted) > 3 * (2 * config.threads - wanted)
    assert value == max(range(edge, edge + 4), key=lambda one: ((tops == one).sum(), one))


def taken(config: LocalTopkConfig, bits: Keys, n: int, seed: int, edits: Edits = ()) -> set[str]:
    """Run a row and compare; returns the ways that were taken."""
    length = len(bits)
    row = np.full(-(-length // 8) * 8, JUNK[seed % len(JUNK)], np.uint16)
    row[:length] = bits
    cluster = Cluster(config, row.tobytes(), seed, edits)
    guessed, counted = cluster.watch(GUESS, "guess"), cluster.watch(GUESS, "share_reaching")
    listed, plateau = cluster.watch(KEPT, "count_kept"), cluster.watch(WHOLE, "share_plateau")
    searched, again = cluster.watch(GUESS, "search"), cluster.watch(LISTED, "count_bin")
    placed, looked = cluster.watch(LISTED, "place_entries"), cluster.watch(WHOLE, "share")
    (begin, count), (second, rest) = cluster.run(length, n)
    assert (begin, second, count + rest) == (0, count, n)
    got = cluster.words(0, 0, count) + cluster.words(1, count, rest)
    logits = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)[None]
    words, _ = local_topk(logits, torch.tensor([length], dtype=torch.int32), n)
    np.testing.assert_array_equal(np.array(got, np.uint32), words[0, :n].numpy().view(np.uint32))
    wanted, early = map(int, guessed[0][3:5])
    if plateau:
        check_plateau(config, sorted_tops(config, bits, wanted), wanted, int(plateau[0][2]))
    else:
        floor, shift = map(int, counted[0][3:5] if counted else (0, 0))
        check_guess(config, sorted_tops(config, bits, wanted), wanted, early, floor, shift)
    ways = {"search"} if searched else set()
    for _row, hits, turn, shift in listed:
        ways |= {"negative" if turn[2] else "not negative", "bins" if shift else "values"}
        ways |= {f"shift {shift}", *(("many vectors",) if hits > 64 else ())}
    if any(number > 32 * KEPT_KEYS for _row, number, *_ in placed):
        ways.add("many keys")
    ways |= {"again"} if again else set()
    ways |= {"plateau"} if plateau else set()
    if looked:
        ways.add("whole behind a guess" if counted else "whole")
    return ways


Draw = Callable[[np.random.Generator, np.ndarray, np.ndarray], Any]


@dataclass(frozen=True)
class Case:
    """A row: values by (generator, standard normal numbers, indices), or BF16 bits; the ways that it is there for. One
    that does not name them is not looked at whole, nor as a plateau."""

    draw: Draw
    length: int
    n: int
    ways: tuple[str, ...] = ()
    config: LocalTopkConfig = SMALL

    def bits(self, seed: int) -> Keys:
        rng = np.random.default_rng(seed)
        x = self.draw(rng, rng.standard_normal(self.length), np.arange(self.length))
        return x if x.dtype == np.uint16 else bits_of(x)

    def run(self, seed: int, edits: Edits = ()) -> set[str]:
        return taken(self.config, self.bits(seed), self.n, seed, edits)


def gaussian(_rng: Any, x: Any, _at: Any) -> Any:
    return x


def negative(_rng: Any, x: Any, _at: Any) -> Any:
    return -abs(x) - 0.01


def less(by: float) -> Draw:
    return lambda _rng, x, _at: x - by


def mixed(rate: float, value: float) -> Draw:
    return lambda rng, x, _at: np.where(rng.random(len(x)) < rate, value, x)


def equal(value: float) -> Draw:
    return lambda _rng, x, _at: np.full(len(x), value)


def at_zero(least: float) -> Draw:
    """Zero between `least` and 3, and negative below."""
    return lambda _rng, x, _at: np.where(x < least, x - 3, np.maximum(x - 3, 0))


def steep(by: float, sign: int = 1) -> Draw:
    return lambda _rng, x, _at: sign * np.exp(by * x)


def sampled(at: Any) -> Any:
    """Which keys the guess is made from."""
    return np.isin(at // 8, sample_of(SMALL, -(-len(at) // 8)))


def middle(wide: int, value: float, otherwise: float) -> Draw:
    """Equal keys on both sides of the blocks' border."""
    return lambda _rng, x, at: np.where(abs(at - len(x) // 2 + 0.5) < wide, value, otherwise * abs(x))


def beyond(value: float) -> Draw:
    """NaN where the guess looks, but for `value` once; infinities elsewhere."""

    def draw(_rng: Any, _x: Any, at: Any) -> Any:
        out = np.where(sampled(at), np.nan, np.where(at % 3 == 0, np.inf, -1.0))
        out[5] = value
        return out

    return draw


def any_bits(rng: Any, x: Any, _at: Any) -> Any:
    bits = rng.integers(0, 1 << 16, len(x), dtype=np.uint16)
    return np.where((bits & 0x7FFF) > 0x7F80, 0xFFC0, np.where(bits == 0x8000, 0, bits)).astype(np.uint16)


def plateau(value: float, more: float) -> Draw:
    """A key of every vector is `value`, some are `more` than that, others less."""
    return lambda rng, x, at: np.where(at % 8 == 3, value + more * (rng.random(len(x)) < 0.02), value - 0.1 - abs(x))


def crowd(first: int, count: int, by: float) -> Draw:
    """Keys from `first` on, so many, are more."""
    return lambda _rng, x, at: x + by * ((at >= first) & (at < first + count))


VALUES, BINS = ("not negative", "values"), ("not negative", "bins", "again")
UNDER, UNDER_BINS = ("negative", "values"), ("negative", "bins", "again")
MANY = ("many vectors", "many keys")
PLATEAU, WHOLE_ROW, IN_VAIN = ("plateau",), ("whole",), ("whole behind a guess",)

CASES = {
    "gaussian": Case(gaussian, 4096, 40, VALUES),
    "gaussian, all rounds": Case(gaussian, 16384, 700, (*VALUES, *MANY)),
    "gaussian, best": Case(gaussian, 4001, 1, VALUES),
    "threshold above zero": Case(less(2.2), 4096, 40, UNDER_BINS),
    "threshold about zero": Case(less(2.33), 4096, 40, UNDER_BINS),
    "threshold below zero": Case(less(2.5), 4096, 40, ("search", *UNDER_BINS)),
    "threshold zero": Case(at_zero(1.8), 4096, 40, BINS),
    "threshold zero, guess below": Case(at_zero(2.17), 4096, 40, UNDER_BINS),
    "negative": Case(negative, 4099, 40, UNDER_BINS),
    "negative, all rounds": Case(negative, 16383, 352, (*UNDER_BINS, *MANY)),
    "negative, an octave": Case(lambda rng, x, _at: -1 - rng.random(len(x)), 4096, 40, UNDER),
    "negative, threads without a vector": Case(negative, 2057, 40, ("negative",)),
    "zero, threads without a vector": Case(less(2.33), 2057, 20, ("negative",)),
    "minus infinity": Case(
        lambda rng, x, _at: np.where(rng.random(len(x)) < 0.7, -np.inf, -abs(x)), 4096, 100, UNDER_BINS
    ),
    "not a number": Case(
        lambda rng, x, _at: np.where(rng.random(len(x)) < 0.9, np.nan, -abs(x)), 4096, 100, UNDER_BINS
    ),
    "infinity": Case(mixed(0.004, np.inf), 4096, 40, BINS),
    "infinity at the threshold": Case(mixed(0.02, np.inf), 4096, 40, BINS),
    "denormal": Case(lambda _rng, x, _at: x * 1e-39, 4096, 40, VALUES),
    "denormal about zero": Case(lambda _rng, x, _at: (x - 2.33) * 1e-39, 4096, 40, ("negative",)),
    "ties": Case(lambda _rng, x, _at: np.round(4 * x) / 4, 4096, 40, ("not negative",)),
    "ties across the border": Case(middle(30, 5.0, 0.1), 4096, 40, BINS),
    "ties before the border": Case(middle(30, 5.0, 0.1), 4096, 29, BINS),
    "ties across the border, negative": Case(middle(30, -0.5, -8.0), 4096, 40, ("negative",)),
    "all equal": Case(equal(1.0), 2048, 40, PLATEAU),
    "all equal, negative": Case(equal(-1.0), 1001, 100, WHOLE_ROW),
    "all zero": Case(equal(0.0), 1001, 1000, WHOLE_ROW),
    "all not a number": Case(equal(np.nan), 2047, 33, PLATEAU),
    "all not a number, threads without a vector": Case(equal(np.nan), 999, 33, UNDER),
    "zero but for a few": Case(lambda _r, x, _a: np.maximum(x - 2.6, 0), 4096, 40, PLATEAU),
    "zero but for a few, and less": Case(
        lambda _r, x, _a: np.where(x < 0, x - 3, np.maximum(x - 2.6, 0)), 4001, 40, PLATEAU
    ),
    "plateau across the border": Case(plateau(0.0, 0.3), 2048, 200, PLATEAU),
    "plateau across the border, negative": Case(plateau(-7.0, 1.0), 2048, 150, PLATEAU),
    "plateau of two values": Case(lambda rng, x, _a: 1 + (rng.random(len(x)) < 0.03) / 128, 2048, 100, PLATEAU),
    "plateau below enough": Case(
        lambda _r, x, at: abs(x) * (~sampled(at) | (at % 400 == 0)), 4096, 33, (*PLATEAU, *BINS)
    ),
    "plateau below enough, negative": Case(
        lambda _r, x, at: np.where(sampled(at) & (at % 800 > 0), -2.0, -1 - abs(x)), 4096, 33, (*PLATEAU, "negative")
    ),
    "plateau of too few": Case(
        lambda _r, x, at: np.where(sampled(at) & (at % 8 == 2), 5.0, x), 8192, 400, (*PLATEAU, *WHOLE_ROW)
    ),
    "steep": Case(steep(8), 4096, 40, BINS),
    "steep, negative": Case(steep(8, -1), 4096, 40, UNDER_BINS),
    "steep, negative, all rounds": Case(steep(3, -1), 16380, 352, (*UNDER_BINS, *MANY)),
    "every value": Case(any_bits, 4096, 40, ("not negative",)),
    "good ones beside the sample": Case(lambda _r, x, at: x + 3 * ~sampled(at), 8192, 40, (*VALUES, *MANY)),
    "a few good ones beside the sample": Case(
        lambda _r, x, at: x + 9 * ((at % 97 == 0) & ~sampled(at)), 8192, 33, IN_VAIN
    ),
    "good ones in the sample": Case(lambda _r, x, at: x + 3 * sampled(at), 8192, 40, VALUES),
    "good ones in the sample, not enough": Case(lambda _r, x, at: x + 3 * sampled(at), 8192, 500, IN_VAIN),
    "beyond bins of a value": Case(beyond(np.nan), 2057, 40, IN_VAIN),
    "beyond all bins": Case(beyond(1e38), 2057, 40, ("bins", *IN_VAIN)),
    "a crowd in a bin": Case(
        lambda rng, x, at: np.where(abs(at - 1750) < 150, -1 - rng.random(len(x)) / 20, -20 - np.exp(6 * abs(x))),
        4096,
        60,
        (*UNDER_BINS, "many keys"),
    ),
    "good ones in the first block": Case(crowd(0, 2048, 7.0), 4096, 40, VALUES),
    "good ones in the second block": Case(crowd(2048, 2048, 7.0), 4096, 40, VALUES),
    "rising": Case(lambda _r, x, at: x + 6 * at / len(x), 8192, 100, ("not negative",)),
    "sorted": Case(lambda _r, x, _at: np.sort(-abs(x)), 2047, 40, UNDER_BINS),
    "one vector": Case(gaussian, 7, 3, WHOLE_ROW),
    "a vector and a key": Case(gaussian, 9, 8, WHOLE_ROW),
    "fewer vectors than threads": Case(gaussian, 1000, 30, VALUES),
    "fewer vectors than threads, negative": Case(negative, 333, 2, ("negative",)),
    "a key behind a round": Case(gaussian, 2049, 33, VALUES),
    "all but one": Case(gaussian, 1217, 1216, WHOLE_ROW),
    "most": Case(gaussian, 4090, 2048, WHOLE_ROW),
    "four vectors a thread": Case(gaussian, 8192, 352, (*VALUES, *MANY), FOUR),
    "four vectors a thread, negative": Case(steep(3, -1), 8187, 100, UNDER_BINS, FOUR),
    "four vectors a thread, zero but for a few": Case(
        lambda _r, x, _a: np.maximum(x - 2.6, 0), 8001, 70, PLATEAU, FOUR
    ),
    "four vectors a thread, most": Case(gaussian, 8190, 2048, WHOLE_ROW, FOUR),
    "full threads": Case(gaussian, 65536, 352, VALUES, FULL),
    "full threads, negative": Case(negative, 20000, 352, ("negative",), FULL),
    "full threads, equal": Case(equal(2.0), 4300, 600, WHOLE_ROW, FULL),
}


@pytest.mark.parametrize("name", CASES)
def test_words_are_the_references(name: str) -> None:
    check(name)


def check(name: str, edits: Edits = ()) -> None:
    case = CASES[name]
    ways = case.run(sum(map(ord, name)), edits)
    assert {*case.ways} <= ways, f"not what the case is there for: {sorted(ways)}"
    assert {*WHOLE_ROW, *IN_VAIN, *PLATEAU} & ways <= {*case.ways}, f"not what it is meant to be: {sorted(ways)}"


FAULTS: dict[str, tuple[str, str, str]] = {
    "a digit lower": ("below + Uint32(digit)", "below + Uint32(digit) - Uint32(1)", "gaussian"),
    "the other block's sample": ("row.share * (Int32(1) - rank)", "row.share * rank", "gaussian"),
    "guesses differ": ("if best_other > best:", "if best_other > best + best:", "minus infinity"),
    "bins of the second count": ("base = Uint32(floor) +", "base = below +", "negative, threads without a vector"),
    "a copy that nobody waits for": ("exchange_cluster.receive(landed_of(row))", "pass", "gaussian"),
    "a copy beyond the row": ("asked = more * Int32(16)", "asked = (more + Int32(1)) * Int32(16)", "gaussian, best"),
    "keys behind the row": (
        "words = kept.inside(words, row.start, row.end)",
        "pass",
        "negative, threads without a vector",
    ),
    "a row's end among copies": ("if cut and row.lane", "if not cut and row.lane", "steep, negative, all rounds"),
    "a NaN in a half": ("word, word >> Uint32(16)) & ", "word, packed.high_half(word)) & ", "negative"),
    "votes by lane": ("add.u32 b, $2, 1; and.b32 b", "add.u32 b, $2, 0; and.b32 b", "gaussian"),
    "no barrier between counts": ("row.mark(13)\n    cute.arch.sync_threads()", "row.mark(13)", "gaussian"),
    "no barrier between a warp's lanes": (
        "    cute.arch.sync_warp()\n    return listed",
        "    return listed",
        "gaussian",
    ),
    "the third vector of a lane": ("Int32(64) + row.lane, hits", "Int32(96) + row.lane, hits", "gaussian, all rounds"),
    "keys behind those kept": ("row)) + row.lane, listed, 32", "row) + 32) + row.lane, listed, 32", "a crowd in a bin"),
    "equal keys of both blocks": ("if own > need - equal:", "if own > need:", "ties across the border"),
    "a plateau of too few": ("need > Int32(0) and need <=", "need > Int32(0) or need <=", "plateau of too few"),
    "a plateau in two blocks": ("begin = begin + equal", "begin = begin + need", "plateau across the border"),
    "bytes that are announced": ("arm(arrival, 2 * NARROW", "arm(arrival, NARROW", "gaussian"),
}
"""Old text, new text, and the case that notices."""


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(name: str) -> None:
    old, new, case = FAULTS[name]
    with pytest.raises((AssertionError, KeyError)):
        check(case, ((old, new),))
