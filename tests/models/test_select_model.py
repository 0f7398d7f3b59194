"""The pass-level model of the selection kernel against a stable sort, on shapes that break careless selections."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keysieve.models import select as model


def oracle(keys: np.ndarray, k: int) -> np.ndarray:
    """First k by (key descending, position ascending), in ascending position."""
    order = np.argsort(-keys.astype(np.int64), kind="stable")[:k]
    return np.sort(order)


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    """Key rows of many shapes: spread, one-bucket, few values, plateaus with few keys above, low digit only."""
    length = draw(st.integers(1, 700))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    kinds = ["spread", "bucket", "few", "plateau", "equal", "high", "specials", "near", "far", "octaves"]
    kind = draw(st.sampled_from(kinds))
    if kind == "spread":
        keys = rng.integers(0x3F, 0x10000, length)
    elif kind == "bucket":
        keys = 0xBF80 + rng.integers(0, 32, length)
    elif kind == "few":
        keys = rng.choice([0x8000, 0x8001, 0xC000], length)
    elif kind == "plateau":
        keys = np.where(rng.random(length) < 0.05, rng.integers(0x8001, 0xFF80, length), 0x8000)
    elif kind == "equal":
        keys = np.full(length, draw(st.sampled_from([0x3F, 0x7F, 0x8000, 0xFF80])))
    elif kind == "near":  # within a few values about zero, about an octave's border
        keys = draw(st.sampled_from([0x3F, 0x7FF0, 0x8001, 0xBF70])) + rng.integers(0, 100, length)
    elif kind == "far":  # a few far above all others
        others = rng.integers(0x7F00, 0x8200, length)
        keys = np.where(rng.random(length) < 0.02, 0xFE00 + rng.integers(0, 9, length), others)
    elif kind == "octaves":  # both signs, every octave
        keys = np.clip(0x8000 + 128 * rng.integers(-250, 250, length) + rng.integers(-3, 4, length), 0x3F, 0xFF80)
    elif kind == "high":
        keys = (rng.integers(1, 2048, length) << 5) | 0x1F
    else:
        keys = rng.choice([0x3F, 0x7F, 0x8000, 0xFF80], length)
    return keys.astype(np.uint16)


@settings(max_examples=300, deadline=None)
@given(
    keys=rows(),
    k=st.integers(1, 720),
    parts=st.integers(1, 8),
    direct=st.sampled_from([8, 64, 16384]),
    head=st.integers(0, 7),
    bins=st.sampled_from([3, 16, 512]),
)
def test_select_row_is_the_stable_sort(keys: np.ndarray, k: int, parts: int, direct: int, head: int, bins: int) -> None:
    got = model.select_row(keys, k, parts=parts, direct=direct, head=head, bins=bins)
    assert got.tolist() == oracle(keys, k).tolist()


@settings(max_examples=200, deadline=None)
@given(keys=rows(), parts=st.integers(1, 8), data=st.data())
def test_two_levels_need_exactly_k_groups(keys: np.ndarray, parts: int, data: st.DataObject) -> None:
    tops = model.tops_of(keys)
    k = data.draw(st.integers(1, len(tops)))
    got = model.select_two_level(keys, k, tops, parts)
    assert got.tolist() == oracle(keys, k).tolist()


@settings(max_examples=200, deadline=None)
@given(keys=rows(), head=st.integers(0, 7), data=st.data())
def test_more_groups_than_k_serve_as_well(keys: np.ndarray, head: int, data: st.DataObject) -> None:
    tops = model.tops_of(keys, head)
    k = data.draw(st.integers(1, len(tops)))
    room = data.draw(st.integers(k, len(tops)))
    taken = model.take_with_room(tops, k, room)
    assert k <= len(taken) <= room
    assert set(model.take([tops], k)[0].tolist()) <= set(taken.tolist())
    assert model.select_two_level(keys, k, tops, 1, head, room).tolist() == oracle(keys, k).tolist()


@settings(max_examples=200, deadline=None)
@given(keys=rows(), parts=st.integers(1, 8), data=st.data())
def test_what_blocks_tell_each_other_gives_the_threshold(keys: np.ndarray, parts: int, data: st.DataObject) -> None:
    cut = [keys[run] for run in model.split(len(keys), parts)]
    want = data.draw(st.integers(1, len(keys)))
    wanted = model.find_threshold(cut, want)
    slots = model.first_slots(model.take(cut, want))
    assert model.find_shared(cut, want) == (wanted, slots)
    for bound in {wanted.key, max(1, wanted.key - 3), data.draw(st.integers(1, wanted.key))}:
        bins = data.draw(st.sampled_from([3, 16, 512]))
        near = model.find_near(cut, want, [bound - 1] * parts, bins)
        assert near == ((wanted, slots) if wanted.key - bound < bins - 2 else None)


@settings(max_examples=300, deadline=None)
@given(keys=rows(), parts=st.integers(2, 8), bins=st.sampled_from([8, 64, 512]), data=st.data())
def test_floors_give_the_threshold_or_nothing(keys: np.ndarray, parts: int, bins: int, data: st.DataObject) -> None:
    cut = [keys[run] for run in model.split(len(keys), parts)]
    want = data.draw(st.integers(1, len(keys)))
    wanted = model.find_threshold(cut, want), model.first_slots(model.take(cut, want))
    floors = [model.floor_of(part, bins=bins) for part in cut]
    assert model.find_near(cut, want, floors, bins) in (wanted, None)
    near = wanted[0].key - max(floors)
    beyond = [own for part, own in zip(cut, floors, strict=True) if (part >= own + bins - 1).any()]
    assert model.find_plateau(cut, want, wanted[0].key) == wanted
    assert model.find_plateau(cut, want) == (wanted if wanted[0].key == model.ZERO else None)
    if 0 < near < bins - 1 - max(floors) + min([max(floors), *beyond]):
        assert model.find_near(cut, want, floors, bins) == wanted


def test_long_rows_are_mostly_settled_by_floors() -> None:
    """And neither one key far above the others nor winners side by side change that."""
    normal = np.random.default_rng(2).standard_normal(60_000).astype(np.float32)
    outlier, clustered = normal.copy(), normal * np.float32(0.01)
    outlier[7] = 1e30
    clustered[50_000:50_900] += 100
    for row in (normal, outlier, clustered):
        keys = model.key16_of_bits((row.view(np.uint32) >> 16).astype(np.uint16))
        cut = [keys[run] for run in model.split(len(keys), 8)]
        found = model.find_near(cut, 800, [model.floor_of(part) for part in cut])
        assert found == (model.find_threshold(cut, 800), model.first_slots(model.take(cut, 800)))


@pytest.mark.parametrize("plateau", [0x8000, 0xC000])
def test_bins_of_more_keys_than_are_told(plateau: int) -> None:
    """A count that is cut is the digit's, or lies below it: nothing else depends on it."""
    keys = np.full(60_000, plateau, np.uint16)
    keys[[5, 31_000, 59_999]] = plateau + 200
    for want in (2, 3, 4, 4096):
        cut = [keys[run] for run in model.split(len(keys), 2)]
        wanted, slots = model.find_threshold(cut, want), model.first_slots(model.take(cut, want))
        assert model.find_shared(cut, want) == (wanted, slots)
        assert plateau == 0x8000 or model.find_near(cut, want, [plateau - 1] * 2) == (wanted, slots)


def test_ties_inside_a_group_and_across_groups() -> None:
    # Two groups tie by their tops; the wanted keys are spread over both, and the later group holds more of them.
    keys = np.array([5, 9, 1, 1, 1, 1, 1, 1, 9, 9, 9, 9, 9, 9, 9, 9], np.uint16) + 0x8000
    assert model.select_two_level(keys, 1, model.tops_of(keys)).tolist() == [1]
    assert model.select_two_level(keys, 2, model.tops_of(keys)).tolist() == [1, 8]


@pytest.mark.parametrize("wrong", ["value_only", "last_group"])
def test_the_oracle_sees_a_wrong_choice_of_groups(wrong: str) -> None:
    """A group choice that ignores positions among equal tops loses winners: the property above is not vacuous."""
    keys = np.full(64, 0x8000, np.uint16)
    tops = model.tops_of(keys)
    chosen = np.array([7, 6]) if wrong == "value_only" else np.array([1, 7])
    assert (tops[chosen] == tops.max()).all()
    positions = (chosen[:, None] * 8 + np.arange(8)).reshape(-1)
    assert np.sort(positions)[:2].tolist() != oracle(keys, 2).tolist()


@settings(max_examples=100, deadline=None)
@given(keys=rows(), parts=st.integers(1, 8), k=st.integers(1, 64))
def test_slots_of_parts_are_consecutive(keys: np.ndarray, parts: int, k: int) -> None:
    k = min(k, len(keys))
    taken = model.take([keys[run] for run in model.split(len(keys), parts)], k)
    slots = model.first_slots(taken)
    assert [slots[i] + len(taken[i]) for i in range(parts - 1)] == slots[1:]
    assert slots[-1] + len(taken[-1]) == k


@given(bits=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=50))
def test_key16_orders_like_the_values(bits: list[int]) -> None:
    words = np.array(bits, np.uint16)
    values = (words.astype(np.uint32) << 16).view(np.float32)
    keys = model.key16_of_bits(words)
    nan = np.isnan(values)
    assert (keys[nan] == 0x3F).all()
    assert (keys > 0).all()
    clean, order = values[~nan], keys[~nan].astype(np.int64)
    assert ((clean[:, None] < clean[None, :]) == (order[:, None] < order[None, :])).all()
    assert ((clean[:, None] == clean[None, :]) == (order[:, None] == order[None, :])).all()


SPECIAL_BITS = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7F81, 0xFFC0, 0x7FFF, 0xFFFF, 0x0001, 0x8001, 0x7F7F, 0xFF7F]


@given(bits=st.lists(st.integers(0, 0xFFFF) | st.sampled_from(SPECIAL_BITS), min_size=1, max_size=50))
def test_nans_are_settled_after_counting(bits: list[int]) -> None:
    words = np.array(bits, np.uint16)
    shift = 16 - model.HIGH_BITS
    raw, wanted = model.settled_bits(words), model.key16_of_bits(words)
    count = lambda some: np.bincount(some >> shift, minlength=1 << model.HIGH_BITS)  # noqa: E731  # used twice, below
    numbers, counts = model.settle_nans(raw, count(raw))
    assert model.key16_of_bits(numbers).tolist() == wanted.tolist()
    assert counts.tolist() == count(numbers).tolist()
    assert counts[model.number_order()][::-1].tolist() == count(wanted).tolist()


@given(rows(), st.integers(0, 2**32 - 1))
def test_numbers_give_what_their_keys_give(keys: np.ndarray, seed: int) -> None:
    keys = model.key16_of_bits(keys ^ np.uint16(0x8000))  # of a row of keysieve's own: one NaN, no -0
    bits = np.where(keys & 0x8000, keys ^ 0x8000, keys ^ 0xFFFF).astype(np.uint16)
    want = int(np.random.default_rng(seed).integers(1, len(keys) + 1))
    digit, above, inside = model.find_high([keys], want)
    assert model.find_high_of_numbers([bits], want) == (digit, above, inside)
    assert np.array_equal(model.low_of_numbers(bits, digit), keys[keys >> 5 == digit] & 31)
    threshold = model.find_threshold([keys], want).key
    higher, equal = model.number_masks(bits, threshold)
    assert np.array_equal(higher, keys > threshold)
    assert np.array_equal(equal, keys == threshold)


def test_row_starts_of_the_compact_layout() -> None:
    lengths = np.array([5000, 100, 0, 0, 2048, 2049, -3, 300], np.int64)
    starts = model.row_starts(lengths, 2, 2048)
    # Tiles: 40 (5000), 0 (empty), 17 (2049), 0 (300 fits).
    assert starts.tolist() == [0, 40 * 128, 80 * 128, 80 * 128, 80 * 128, 97 * 128, 114 * 128, 114 * 128]
