"""MXFP4 on Hopper, without a device: the kernel's own bit arithmetic and placement, executed as 32-bit integers."""

from __future__ import annotations

import itertools
import random
import struct
from fractions import Fraction
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")

from keysieve.device import numerics, packed, ptx
from keysieve.kernels import sm90_mxfp4_apart as apart
from keysieve.kernels import sm90_mxfp4_math as wide
from keysieve.kernels import sm90_mxfp4_query as queries
from keysieve.kernels import sm90_mxfp4_scales as scales
from keysieve.kernels import sm90_mxfp4_send as send
from keysieve.kernels.score_cut import ORDERS
from keysieve.kernels.sm90_mxfp4_config import KERNEL, REACH, TOP, shape_of

E2M1 = [Fraction(value) for value in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


class Word(int):
    """A 32-bit register."""

    def __new__(cls, value: int) -> Word:
        return super().__new__(cls, int(value) & 0xFFFFFFFF)


for _name in ("add", "sub", "mul", "and", "or", "xor", "lshift", "rshift", "floordiv"):
    _method = f"__{_name}__"
    setattr(Word, _method, lambda self, other, _m=_method: Word(getattr(int, _m)(int(self), int(other))))


def byte_perm(a: Word, b: Word, selector: Word) -> Word:
    """`prmt.b32`, the replicated sign included."""
    pool = int(a) | int(b) << 32
    out = 0
    for i in range(4):
        nibble = int(selector) >> 4 * i & 15
        byte = pool >> 8 * (nibble & 7) & 255
        out |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * i
    return Word(out)


def high_half(word: Word) -> Word:
    """As the adder of halves copies it: no half may be an infinity or a NaN."""
    half = int(word) >> 16
    assert half & 0x7C00 != 0x7C00
    return Word(half * 0x10001)


def by_halves(choose: Any) -> Any:
    return lambda a, b: Word(choose(a & 0xFFFF, b & 0xFFFF) | choose(int(a) >> 16, int(b) >> 16) << 16)


@pytest.fixture(autouse=True)
def registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions under test shift, mask, add, permute and choose: integers do as well."""
    monkeypatch.setattr(ptx, "byte_perm", byte_perm)
    monkeypatch.setattr(ptx, "max_u16x2", by_halves(max))
    monkeypatch.setattr(packed, "min_u16x2", by_halves(min))
    monkeypatch.setattr(packed, "high_half", high_half)
    monkeypatch.setattr(packed, "multiply_add", lambda a, b, c: Word(int(a) * int(b) + int(c)))
    for module in (scales, queries, apart, wide):
        monkeypatch.setattr(module, "Uint32", Word)
        monkeypatch.setattr(module, "select", lambda condition, yes, no: yes if condition else no, raising=False)
    monkeypatch.setattr(numerics, "bits_float", int)
    for module in (scales, apart):
        monkeypatch.setattr(module, "Int32", int)


def e2m1(code: int) -> Fraction:
    return -E2M1[code & 7] if code & 8 else E2M1[code & 7]


def e4m3(code: int) -> Fraction:
    field, m = code >> 3 & 15, code & 7
    assert code & 0x7F != 0x7F, "NaN"
    size = Fraction(m, 8) * Fraction(2) ** -6 if field == 0 else (1 + Fraction(m, 8)) * Fraction(2) ** (field - 7)
    return -size if code & 0x80 else size


def float32(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def table() -> list[Word]:
    return [Word(word) for word in scales.table_words()]


def test_table_holds_every_code_at_every_exponent() -> None:
    words = scales.table_words()
    assert words[2 * REACH + 2 :] == [scales.HALVES, 2, 0, 0, 0, 0]
    for i, exponent in enumerate(range(TOP - REACH, TOP + 1)):
        for code in range(8):
            byte = words[2 * i + code // 4] >> 8 * (code % 4) & 255
            assert e4m3(byte) == E2M1[code] * Fraction(2) ** exponent


def test_eight_codes_become_eight_negated_numbers() -> None:
    draw = random.Random(1)
    words = table()
    fixed = tuple(words[2 * REACH + 2 :][:2])
    for _ in range(500):
        word, i = Word(draw.getrandbits(32)), draw.randrange(REACH + 1)
        pair = scales.widen_word(word, words[2 * i], words[2 * i + 1], fixed)
        for place in range(8):
            byte = int(pair[place // 4]) >> 8 * (place % 4) & 255
            assert e4m3(byte) == -e2m1(int(word) >> 4 * place & 15) * Fraction(2) ** (i + TOP - REACH)


def placed(codes: list[int], zero: list[bool]) -> tuple[list[int], int, int]:
    """`place_scales`: (exponent of each block, factor bits, apart)."""
    word = Word(sum(code << 8 * i for i, code in enumerate(codes)))
    mask = Word(sum(0xFF << 8 * i for i, none in enumerate(zero) if none))
    offsets, factor, far = scales.place_scales(word, mask)
    exponents = [(int(offsets) >> 8 * i & 255) // 8 + TOP - REACH for i in range(4)]
    assert all(int(offsets) >> 8 * i & 7 == 0 for i in range(4))
    assert all(TOP - REACH <= exponent <= TOP for exponent in exponents)
    return exponents, int(factor), int(far)


def check_placed(codes: list[int], zero: list[bool]) -> int:
    """Elements times factor are the elements times their scales, whatever the scales; returns 1 if apart."""
    exponents, factor, far = placed(codes, zero)
    if 255 in codes:
        assert float32(factor) != float32(factor)
        assert not far
        return 0
    if far:
        assert factor == 0x3F800000
        assert exponents == [0] * 4, "widened as they are"
        return 1
    for exponent, code, none in zip(exponents, codes, zero, strict=True):
        if not none:
            assert Fraction(float32(factor)) * Fraction(2) ** exponent == Fraction(2) ** (code - 127)
    assert 2.0**-46 <= float32(factor) <= 2.0**34
    return 0


def test_scales_of_any_vector() -> None:
    draw = random.Random(2)
    for _ in range(3000):
        near = draw.randrange(256)
        width = draw.choice((1, 4, 15, 16, 30, 256))
        codes = [max(0, min(255, near + draw.randrange(-width, width))) for _ in range(4)]
        check_placed(codes, [draw.random() < draw.choice((0.0, 0.3, 1.0)) for _ in range(4)])


def test_the_reach_is_fourteen_and_zero_blocks_may_lie_beyond() -> None:
    for low, high in itertools.product(range(100, 130), repeat=2):
        far = check_placed([low, high, (low + high) // 2, low], [False] * 4)
        assert far == (abs(high - low) > 14)
        assert not check_placed([low, high, low, low], [True, False, True, True])
    assert not check_placed([1, 1, 1, 1], [True] * 4), "a zero vector with the smallest scale that writers give"
    assert check_placed([1, 1, 1, 1], [True, True, True, False]), "too small for the factor of one product"
    assert check_placed([230, 231, 230, 231], [False] * 4)


def test_shortcut_gives_what_the_whole_rule_gives() -> None:
    """Two keys at once, without a look at their codes, where all scales are near: `near_scales`."""
    draw = random.Random(3)
    taken = 0
    for _ in range(4000):
        words = []
        for _ in range(2):
            near, width = draw.choice((draw.randrange(256), 87, 120, 167)), draw.choice((1, 4, 8, 40))
            codes = [max(0, min(255, near + draw.randrange(-width, width))) for _ in range(4)]
            words.append(Word(sum(code << 8 * i for i, code in enumerate(codes))))
            largest, smallest = scales.spread_of(words[-1])
            assert (int(largest), int(smallest)) == (max(codes) * 0x10001, min(codes) * 0x10001)
        offsets, factors, far = scales.near_scales((words[0], words[1]))
        spreads = [scales.spread_of(word) for word in words]
        assert (far == 0) == all(scales.within_reach(*spread) for spread in spreads)
        if far == 0:
            taken += 1
            for word, spread, *found in zip(words, spreads, offsets, factors, strict=True):
                assert found == [scales.offsets_from(word, spread[0]), scales.factor_bits(spread[0])]
                for zero in (Word(0), Word(0xFF00FF00), Word(0xFFFFFFFF)):
                    assert scales.place_scales(word, zero) == (*found, 0)
    assert taken > 500


def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's lane sets as integers."""
    monkeypatch.setattr(send, "Uint32", Word)
    monkeypatch.setattr(send, "Int32", int)
    monkeypatch.setattr(send.cute.arch, "popc", lambda word: int(word).bit_count())


def test_tiles_that_are_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as have room without a gap; a tile has room when both its lanes have seen it."""
    counted(monkeypatch)
    draw = random.Random(4)
    for _ in range(2000):
        lanes = [draw.random() < draw.choice((0.5, 0.9, 1.0)) for _ in range(2 * send.AT_ONCE)]
        pairs = [lanes[2 * i] and lanes[2 * i + 1] for i in range(send.AT_ONCE)]
        want = pairs.index(False) if False in pairs else len(pairs)
        assert send.tiles_in_a_row(Word(sum(lane << i for i, lane in enumerate(lanes)))) == want


def test_requests_are_numbered_and_ordered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted(monkeypatch)
    draw = random.Random(5)
    for _ in range(500):
        requests = list(itertools.accumulate(draw.choice((0, 0, 1, 3)) for _ in range(16)))
        current = draw.choice((-1, requests[0]))
        begins = [request != before for before, request in zip([current, *requests], requests, strict=False)]
        firsts = Word(sum(begin << 2 * i for i, begin in enumerate(begins)))
        for lane in range(32):
            want = 7 + sum(begins[: lane // 2 + 1])
            assert send.number_of(7, firsts, Word(lane)) == want
        seen = []
        while firsts:
            seen.append(send.lowest_lane(firsts))
            firsts = send.without_lowest(firsts)
        assert seen == [2 * i for i, begin in enumerate(begins) if begin]


def test_queries_are_never_ordered_further_ahead_than_their_ring_holds() -> None:
    """A window's requests are ordered before its first tile is sent, whose predecessors' queries consumers may hold."""
    for config in KERNEL.admitted("sm_90a"):
        shape = shape_of(config)
        taken = shape.query_stages - shape.groups  # behind the first tile's request: the last one the query warp begins
        assert ORDERS + taken + 1 >= send.AT_ONCE, config


def test_powers() -> None:
    """Every power that scales can ask for, the subnormal one included."""
    for exponent in range(-127, 128):
        assert float32(apart.power(exponent)) == 2.0**exponent


def test_a_request_is_widened_to_its_end_and_no_further() -> None:
    for config in KERNEL.admitted("sm_90a"):
        step = queries.TOGETHER * queries.rounds_at_once(config)
        assert config.columns % step == 0, config


@pytest.mark.parametrize("columns", [8, 24, 64])
def test_keys_and_queries_meet_at_the_same_depth(columns: int) -> None:
    """Elements by operand register, as the instruction defines them, against elements by swizzled shared memory."""
    held: dict[int, tuple[int, int]] = {}
    for column in range(columns):
        for block in range(4):
            for s in range(4):
                for h in range(2):
                    at = column * 128 + 4 * block + int(queries.chunk_place(2 * s + h, Word(column % 8)))
                    for j in range(4):
                        assert at + j not in held
                        held[at + j] = (column, 32 * block + 8 * s + 4 * h + j)
    assert sorted(held) == list(range(columns * 128))
    for column in range(columns):
        for quad in range(4):  # the thread's place in its quad, and the block that it widens
            for register in range(16):  # `widen_keys`: words[4 s + 2 h + r]
                s, h = register // 4, register // 2 % 2
                for j in range(4):
                    depth = 32 * s + 16 * h + 4 * quad + j
                    place = column * 128 + ((depth // 16) ^ (column % 8)) * 16 + depth % 16
                    assert held[place] == (column, 32 * quad + 8 * s + 4 * h + j)
