"""Descriptors and instruction words of the Blackwell scorer, field by field.

The tables below are written from the PTX ISA (tcgen05: "Shared memory descriptor", "Instruction descriptor", "Block
scaling", matrix shapes), not from the code. A second opinion comes from the CuTe DSL: the words that its own atoms put
into compiled code for the same operands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from keysieve.kernels import sm100_score_words as words
from keysieve.kernels.score_cut import chunks_of
from keysieve.kernels.sm100_score_config import KERNEL, ScoreConfig, padded, shape_of, smem_map, tensor_map
from keysieve.spec import HEADS, MAX_NEXT_N


@dataclass(frozen=True)
class Field:
    first: int
    last: int
    value: int
    meaning: str


def check(word: int, width: int, fields: list[Field]) -> None:
    """Every bit of the word belongs to exactly one field, and every field has its value."""
    seen = 0
    for f in fields:
        mask = (1 << f.last - f.first + 1) - 1
        assert seen & mask << f.first == 0, f"{f.meaning}: fields overlap"
        seen |= mask << f.first
        assert word >> f.first & mask == f.value, f.meaning
    assert seen == (1 << width) - 1, "some bits belong to no field"
    assert word >> width == 0


def constants(ptx: str) -> set[int]:
    """Integers of four digits and more that stand as operands in PTX text."""
    return {int(text) for text in re.findall(r"(?<![\w%.$])-?\d{4,}\b(?!\.)", ptx)}


def encode(x: int) -> int:
    """matrix-descriptor-encode of the ISA."""
    return (x & 0x3FFFF) >> 4


@pytest.mark.parametrize(("row_bytes", "mode"), [(128, 2), (64, 4)])
@pytest.mark.parametrize("address", [0x400, 0x12400, 0x38400])
def test_operand_descriptor(row_bytes: int, mode: int, address: int) -> None:
    """Shared memory descriptor, 64 bits. K-major with a swizzle as wide as a row; 8 rows are one repetition."""
    fields = [
        Field(0, 13, encode(address), "matrix start address"),
        Field(14, 15, 0, "reserved"),
        Field(16, 29, 1, "leading dimension byte offset: unused by swizzled K-major layouts, 1 by convention"),
        Field(30, 31, 0, "reserved"),
        Field(32, 45, encode(8 * row_bytes), "stride dimension byte offset: from 8 rows to the next 8"),
        Field(46, 48, 0b001, "fixed constant"),
        Field(49, 51, 0, "matrix base offset: the pattern begins at a multiple of its repetition"),
        Field(52, 52, 0, "leading dimension stride mode: relative"),
        Field(53, 60, 0, "fixed constant"),
        Field(61, 63, mode, "swizzle: 2 is 128 bytes, 4 is 64 bytes"),
    ]
    check(words.operand_descriptor(row_bytes) + words.encoded(address), 64, fields)


def test_scale_descriptor() -> None:
    fields = [
        Field(0, 13, encode(0x2C400), "matrix start address"),
        Field(14, 15, 0, "reserved"),
        Field(16, 29, 1, "leading dimension byte offset: one core matrix wide, unused"),
        Field(30, 31, 0, "reserved"),
        Field(32, 45, encode(8 * 16), "stride dimension byte offset: core matrices of 8 rows of 16 bytes"),
        Field(46, 48, 0b001, "fixed constant"),
        Field(49, 60, 0, "base offset, stride mode, fixed constant"),
        Field(61, 63, 0, "no swizzle"),
    ]
    check(words.scale_descriptor() + words.encoded(0x2C400), 64, fields)


@pytest.mark.parametrize("n", range(16, 257, 16))
def test_f8_instruction_word(n: int) -> None:
    """Instruction descriptor of kind::f8f6f4, 32 bits."""
    fields = [
        Field(0, 1, 0, "sparsity selector"),
        Field(2, 2, 0, "dense"),
        Field(3, 3, 0, "saturation, integers only"),
        Field(4, 5, 1, "D is F32"),
        Field(6, 6, 0, "reserved"),
        Field(7, 9, 0, "A is E4M3"),
        Field(10, 12, 0, "B is E4M3"),
        Field(13, 14, 0, "neither negated"),
        Field(15, 16, 0, "neither transposed: both K-major"),
        Field(17, 22, n >> 3, "N without its three low bits"),
        Field(23, 23, 0, "reserved"),
        Field(24, 28, 128 >> 4, "M without its four low bits"),
        Field(29, 29, 0, "reserved"),
        Field(30, 31, 0, "no shift, .ws only"),
    ]
    check(words.f8_word(n), 32, fields)


@pytest.mark.parametrize("n", range(16, 129, 16))
@pytest.mark.parametrize("step", [0, 1])
def test_mxf4_instruction_word(n: int, step: int) -> None:
    """Instruction descriptor of kind::mxf4, 32 bits. With two scales a step (K = 64) the ID is 0 or 2."""
    fields = [
        Field(0, 1, 0, "reserved"),
        Field(2, 2, 0, "dense"),
        Field(3, 3, 0, "reserved"),
        Field(4, 5, 2 * step, "scale factor data ID of B"),
        Field(6, 6, 0, "reserved"),
        Field(7, 9, 1, "A is E2M1"),
        Field(10, 11, 1, "B is E2M1"),
        Field(12, 12, 0, "reserved"),
        Field(13, 14, 0, "neither negated"),
        Field(15, 16, 0, "neither transposed"),
        Field(17, 22, n >> 3, "N without its three low bits"),
        Field(23, 23, 1, "scales are UE8M0"),
        Field(24, 26, 0, "reserved"),
        Field(27, 28, 128 >> 7, "M without its seven low bits"),
        Field(29, 30, 2 * step, "scale factor data ID of A"),
        Field(31, 31, 0, "K = 64"),
    ]
    check(words.mxf4_word(n, 2 * step), 32, fields)


def test_words_refuse_what_the_unit_cannot_do() -> None:
    for n in (0, 8, 24, 272):
        with pytest.raises(ValueError, match="multiple of 16"):
            words.f8_word(n)
    with pytest.raises(ValueError, match="0 or 2"):
        words.mxf4_word(32, 1)


def test_every_cut_fits_the_unit() -> None:
    """Limits of the ISA and the chip for every configuration: N, tensor columns, alignments, rings."""
    for config in KERNEL.admitted("sm_100a"):
        shape = shape_of(config)
        tensor, places, chunks = tensor_map(config, shape), smem_map(config, shape), chunks_of(config, shape)
        limit = 256 if config.format.is_fp8 else 128
        assert all(16 <= padded(rows * config.heads) <= limit for _, rows in chunks), config
        assert [start for start, _ in chunks] == [sum(r for _, r in chunks[:i]) for i in range(len(chunks))]
        assert sum(rows for _, rows in chunks) == config.next_n
        assert tensor.columns in (32, 64, 128, 256, 512), "an allocation is a power of two from 32 to 512"
        used = shape.accumulators * (tensor.pitch + (0 if config.format.is_fp8 else 8))
        assert used <= tensor.columns
        assert tensor.scales % 4 == 0
        repeat = 8 * config.row_bytes
        assert places.keys % repeat == places.query % repeat == places.tile_bytes % repeat == 0
        assert places.query_bytes % repeat == 0
        assert all(start * config.heads * config.row_bytes % repeat == 0 for start, _ in chunks)
        assert places.scales % 16 == places.weights % 16 == places.descriptors % 16 == places.barriers % 8 == 0
        assert places.key_scales % 128 == places.query_scales % 128 == 0
        assert places.total <= 227 * 1024
        assert shape.stages * places.tile_bytes >= 64 * 1024, "keys in flight cover the latency"
        last = max(start * config.heads + padded(rows * config.heads) for start, rows in chunks)
        assert last * config.row_bytes <= places.query_bytes, "a product reads past its query stage"
    assert len(list(KERNEL.admitted("sm_100a"))) == 3 * 2 * len(HEADS) * MAX_NEXT_N * 2 * 2


# ------------------------------------------------------------------------------------------ the DSL's own atoms


@pytest.mark.parametrize("kind", ["f8", "mxf4"])
@pytest.mark.parametrize("n", [32, 128])
def test_the_dsl_says_the_same(kind: str, n: int) -> None:
    """Constants of descriptors and instruction words, as CuTe's atoms compile them for the same operands."""
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
    from sm100_atoms import compile_atoms

    ptx = compile_atoms(kind, n)
    found = constants(ptx)
    row_bytes = 128 if kind == "f8" else 64
    signed = words.operand_descriptor(row_bytes)
    signed -= 1 << 64 if signed >> 63 else 0
    assert found & {signed + words.encoded(32 * step) for step in range(2)}, "operand descriptor"
    if kind == "f8":
        assert words.f8_word(n) in found
    else:
        assert words.mxf4_word(n, 0) in found
        assert words.scale_descriptor() in found
        assert "block_scale" in ptx


@pytest.mark.parametrize(
    "config",
    [
        ScoreConfig("fp8_fp32", "bf16", 64, 5, "pitched", "float32"),
        ScoreConfig("mxfp4", "bf16", 64, 5, "pitched", "float32"),
    ],
    ids=lambda config: config.key_format,
)
def test_compiled_code_holds_the_words(config: ScoreConfig) -> None:
    """The words above are what the compiled scorer hands to the unit."""
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
    from keysieve.compile.build import build

    ptx = build(KERNEL, config, "sm_100a").ptx
    found = constants(ptx)
    sizes = {padded(rows * config.heads) for _, rows in chunks_of(config, shape_of(config))}
    signed = words.operand_descriptor(config.row_bytes)
    signed -= 1 << 64 if signed >> 63 else 0
    wanted: set[Any] = {signed}
    if config.format.is_fp8:
        wanted |= {words.f8_word(n) for n in sizes}
    else:
        wanted |= {words.mxf4_word(n, scale_id) for n in sizes for scale_id in (0, 2)} | {words.scale_descriptor()}
    assert wanted <= found, sorted(hex(word) for word in wanted - found)
    assert not re.search(r"cta_group::2", ptx)
