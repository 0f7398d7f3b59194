"""The scorer's cut by rows on Hopper: its queries, weights and sums belong together, and the sums are those of the
other cut, operation for operation. The kernel's own functions run here on names instead of numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from keysieve.device import numerics
from keysieve.kernels import sm90_score_products as products
from keysieve.kernels import sm90_score_rows as rows
from keysieve.kernels.sm90_score_config import PART, SET
from keysieve.kernels.sm90_score_weights import column_by_rows
from keysieve.spec import HEAD_DIM, PAGE

LANES = range(4)


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arithmetic that writes down what is computed; sums of two in one order, as addition is commutative."""
    monkeypatch.setattr(numerics, "twice_relu", lambda a: ("relu", a))
    monkeypatch.setattr(numerics, "mul", lambda a, b: ("mul", a, b))
    monkeypatch.setattr(numerics, "fma", lambda a, b, c: ("fma", a, b, c))
    monkeypatch.setattr(numerics, "add", lambda a, b: ("add", *sorted((a, b), key=repr)))
    monkeypatch.setattr(products, "exchange", lambda low, high, _upper, _distance: (low, high))


class Read(products.Weights):
    """Weights as a lane reads them: four words at a time, each the name of its row and head."""

    def __init__(self, words: list[Any]) -> None:
        self.words = words

    def four(self, pair: int) -> list[Any]:
        return self.words[4 * pair : 4 * pair + 4]

    def pair(self, block: int) -> list[Any]:
        return self.words[2 * block : 2 * block + 2]


def column_in_memory(column: int) -> tuple[int, int]:
    """(row of the set, head of the part) that a copy puts at a column of 128 bytes."""
    places = {
        sum(at * step for at, step in zip((v, q, b), rows.SET_STRIDES, strict=False)): (q, 2 * b + v)
        for v in range(rows.SET_BOX[0])
        for q in range(rows.SET_BOX[1])
        for b in range(rows.SET_BOX[2])
    }
    assert len(places) == rows.CHUNK
    assert rows.SET_STRIDES[3] == 1
    return places[column * HEAD_DIM]


def accumulators(lane: int, chunk: int, heads: int) -> list[Any]:
    """Names of a thread's accumulators of a chunk: (row, head, r)."""
    of_set, part = divmod(chunk, heads // PART)
    found: list[Any] = []
    for index in range(rows.CHUNK // 2):
        block, r, v = index // 4, index // 2 % 2, index % 2
        row, head = column_in_memory(8 * block + 2 * lane + v)
        found.append((SET * of_set + row, PART * part + head, r))
    return found


def weights_of(lane: int, heads: int, next_n: int) -> Read:
    """What lane `lane` of a quad reads of all chunks, 16 bytes of each 64."""
    words: list[Any] = []
    for chunk in range(heads * next_n // rows.CHUNK):
        for pair in range(PART // 4):
            for j in range(4):
                word = rows.CHUNK * chunk + 16 * pair + 4 * lane + j
                words.append(divmod(column_by_rows(word, chunk, heads), heads))
    return Read(words)


def other_sum(row: int, heads: int, r: int) -> Any:
    """The head sum of one row as the other cut forms it: its own functions, and the two exchanges in a quad."""
    halves = []
    for lane in LANES:
        acc: list[Any] = [None] * (heads // 2)
        words: list[Any] = []
        for block in range(heads // 8):
            for v in range(2):
                head = 8 * block + 2 * lane + v
                words.append((row, head))
                for half in range(2):
                    acc[4 * block + 2 * half + v] = (row, head, half)
        kernel = SimpleNamespace(chunks=[(0, 1)], config=SimpleNamespace(heads=heads))
        halves.append(products.head_sums(kernel, acc, 0, Read(words), lane)[0][r])
    return numerics.add(numerics.add(halves[0], halves[1]), numerics.add(halves[2], halves[3]))


@pytest.mark.parametrize(("heads", "next_n"), [(32, 4), (32, 8), (64, 4), (64, 8)])
def test_a_lane_sums_its_own_row_as_the_other_cut_does(heads: int, next_n: int) -> None:
    seen = set()
    for lane in LANES:
        weights = weights_of(lane, heads, next_n)
        for of_set in range(next_n // SET):
            chains: list[Any] = []
            for part in range(heads // PART):
                chunk = of_set * (heads // PART) + part
                acc = accumulators(lane, chunk, heads)
                chains = rows.extend_chains(acc, 0, chains, chunk, weights)
            for r in range(2):
                assert rows.joined(chains[8 * r : 8 * r + 8]) == other_sum(SET * of_set + lane, heads, r)
            seen.add(SET * of_set + lane)
    assert seen == set(range(next_n))


def test_the_names_would_show_another_head_or_order() -> None:
    right = other_sum(0, 32, 0)
    assert right != other_sum(1, 32, 0)
    assert right != other_sum(0, 32, 1)
    acc = accumulators(0, 0, 32)
    acc[0], acc[4] = acc[4], acc[0]
    assert rows.joined(rows.extend_chains(acc, 0, [], 0, weights_of(0, 32, 4))[:8]) != right


def byte_perm(a: Any, b: Any, selector: Any) -> Any:
    """`prmt.b32` on 32 lanes."""
    both = np.broadcast_to(np.int64(b), (32,)) << 32 | np.broadcast_to(np.int64(a), (32,))
    return sum((both >> (8 * (selector >> 4 * i & 7)) & 0xFF) << 8 * i for i in range(4))


def test_lanes_gather_four_keys_and_the_maximum_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchanges, on 32 lanes at a time; a key's number stands for its logit."""
    lane = np.arange(32)
    for name in ("Int32", "Uint32", "Int64"):
        monkeypatch.setattr(rows, name, np.int64)
    monkeypatch.setattr(rows, "Uint32", lambda value: value)
    monkeypatch.setattr(rows, "select", np.where)
    monkeypatch.setattr(rows, "ptx", SimpleNamespace(byte_perm=byte_perm))
    monkeypatch.setattr(rows, "row_lengths", lambda _place, count: [np.int64(1000)] * count)
    arch = SimpleNamespace(shuffle_sync_bfly=lambda word, distance: word[lane ^ distance])
    monkeypatch.setattr(rows, "cute", SimpleNamespace(arch=arch))
    products_by_rows: Any = rows.RowProducts
    some = SimpleNamespace(logits=np.int64(0), tops=np.int64(0))
    for sets in (1, 2):
        made = SimpleNamespace(sets=sets, places_of=lambda warp, at: products_by_rows.places_of(None, warp, at))
        for warp in range(4):
            key, first = made.places_of(warp, lane)

            def number(of_set: int, page: int, key: Any) -> Any:
                return 4096 * of_set + 1024 * (lane & 3) + page * PAGE + key

            words = [[number(s, page, key) | number(s, page, key + 8) << 16 for page in range(2)] for s in range(sets)]
            logit, apart, top, whole, selector, half = products_by_rows.request_places(
                made, some, np.int64(0), np.int64(1 << 20), None, warp, lane
            )
            found = rows.fours(words, selector, lane)
            for s in range(sets):
                for at in range(4):
                    number_there = found[2 * s + at // 2] >> (16 * (at % 2)) & 0xFFFF
                    assert (number_there == number(s, 0, first + at)).all()
            assert (logit == 2 * ((lane & 3) << 20) + 2 * first).all()
            assert apart == 2 * 4 << 20
            assert whole == 1000 // 128
            own = rows.best_of(found, half, pairwise_larger)
            of_set = lane // 16 if sets == 2 else 0
            assert (own == number(0, 0, first // 8 * 8 + 7) + 4096 * of_set).all()
            assert (top == (((4 * of_set + (lane & 3)) << 20) + first) // 8 * 2).all()


def pairwise_larger(a: Any, b: Any) -> Any:
    """Maximum of each half."""
    return np.maximum(a >> 16, b >> 16) << 16 | np.maximum(a & 0xFFFF, b & 0xFFFF)
