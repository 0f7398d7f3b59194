"""The sm90 scorer as compiled code: limits of the chip for every configuration, and the instructions that matter."""

from __future__ import annotations

import re

import pytest

from keysieve.compile.build import build
from keysieve.kernels.base import MAX_BLOCK_SHARED
from keysieve.kernels.sm90_score_config import (
    KERNEL,
    PART,
    PITCHED_TOPS,
    REGISTER_FILE,
    SET,
    WARPGROUP,
    ScoreConfig,
    ScoreShape,
    chunks_of,
    shape_of,
    smem_map,
)

CHUNK = SET * PART
ALL = list(KERNEL.admitted("sm_90a"))
SOME = [
    ScoreConfig("fp8_fp32", 32, 1, "compact", "float32"),
    ScoreConfig("fp8_ue8m0", 8, 3, "pitched", "bfloat16"),
    ScoreConfig("fp8_fp32", 64, 2, "compact", "bfloat16"),
    ScoreConfig("fp8_ue8m0", 32, 8, "compact", "float32"),
    ScoreConfig("fp8_fp32", 64, 8, "pitched", "float32"),
    ScoreConfig("fp8_fp32", 32, 1, PITCHED_TOPS, "float32"),
    ScoreConfig("fp8_ue8m0", 64, 4, PITCHED_TOPS, "bfloat16"),
]


def test_a_cut_that_would_wait_for_registers_is_refused() -> None:
    ScoreShape(groups=4, stages=8, query_stages=4, registers=(40, 104))
    with pytest.raises(ValueError, match="more registers than the block starts with"):
        ScoreShape(groups=4, stages=8, query_stages=4, registers=(40, 112))  # 640 threads start with 96 each
    with pytest.raises(ValueError, match="more registers than the block starts with"):
        ScoreShape(groups=2, stages=8, registers=(48, 232))


def test_every_shape_fits_the_chip() -> None:
    assert len(ALL) == 2 * 4 * 8 * 3 * 2
    for config in ALL:
        shape = shape_of(config)
        places = smem_map(config, shape)
        assert shape.per_sm * (places.total + 1024) <= MAX_BLOCK_SHARED + 1024, config
        assert places.keys % 1024 == places.query % 1024 == 0
        offsets = [
            places.keys,
            places.query,
            places.weights,
            places.lengths,
            places.prefix,
            places.descriptors,
            places.scratch,
            places.barriers,
            places.total,
        ]
        assert offsets == sorted(offsets)
        assert places.weights % 16 == places.descriptors % 16 == places.barriers % 8 == 0
        assert shape.threads <= 1024
        assert shape.stages % shape.groups == 0, "a stage would change hands between warpgroups"
        chunks = chunks_of(config, shape)
        assert [start for start, _ in chunks] == [sum(rows for _, rows in chunks[:i]) for i in range(len(chunks))]
        assert sum(rows for _, rows in chunks) == config.next_n
        if shape.by_rows:
            assert config.columns % shape.chunk_columns == 0
            assert shape.chunk_columns in (CHUNK, 2 * CHUNK)
            assert config.next_n % SET == config.heads % PART == 0
        else:
            assert all(config.heads * rows <= 128 for _, rows in chunks)
        # keys in flight per SM: two thirds of the 100 KB that cover the latency, even beside the widest queries
        assert shape.per_sm * shape.stages * 2 * 8448 >= 64 * 1024
        producer, consumer = shape.registers
        if producer:
            entry = REGISTER_FILE // shape.threads // 8 * 8
            assert producer * WARPGROUP + consumer * WARPGROUP * shape.groups <= entry * shape.threads
            assert producer % 8 == consumer % 8 == 0


@pytest.mark.parametrize("config", SOME, ids=KERNEL.symbol)
def test_instructions(config: ScoreConfig) -> None:
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
    built = build(KERNEL, config, "sm_90a")  # refuses spills, stack, shared memory, serialised products
    facts = built.facts
    (launch,), (code,) = facts.launches, facts.kernels
    shape = shape_of(config)
    assert launch.block == (shape.threads, 1, 1)
    assert launch.dynamic_shared == smem_map(config, shape).total
    assert launch.programmatic == "run time"
    assert facts.count(r"griddepcontrol\.wait$") == 1
    assert facts.count(r"griddepcontrol\.launch_dependents$") == 1
    products = [int(n) for n in re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k32\.f32\.e4m3\.e4m3", built.ptx)]
    pages = 2 * 2  # of a tile, in the loop for a request's tiles and in the other
    pages += 2 * shape.early  # the first tile's
    if shape.by_rows:
        wanted = [shape.chunk_columns] * (2 * 4 * (config.columns // shape.chunk_columns))
        assert facts.count(r"cp\.async\.bulk\.tensor\.3d") == pages
        assert facts.count(r"cp\.async\.bulk\.tensor\.4d") == config.columns // CHUNK
    else:
        wanted = [config.heads * rows for _, rows in chunks_of(config, shape) for _ in range(2 * 4)]
        assert facts.count(r"cp\.async\.bulk\.tensor\.3d") == pages + config.next_n
    assert sorted(products) == sorted(wanted), "two pages of every chunk, four instructions each"
    assert code.frame_bytes == 0
    assert -(-code.registers // 8) * 8 * shape.threads * shape.per_sm <= REGISTER_FILE, "blocks that shall share a chip"
    assert "C7512" not in built.notes, "products serialised for want of registers"
    assert "ftz" not in built.ptx, "subnormals must survive"
    if shape.registers[0]:
        assert code.registers * shape.threads >= sum(
            n * WARPGROUP * w for n, w in zip(shape.registers, (1, shape.groups), strict=True)
        )


def test_grid_wait_comes_first() -> None:
    """No global access before the wait for the kernels that this one depends on."""
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
    ptx = build(KERNEL, SOME[0], "sm_90a").ptx
    before = ptx[: ptx.index("griddepcontrol.wait")]
    assert not re.search(r"\b(ld|st|red|atom)\.(?!param|shared)\S*global", before)
    assert "cp.async.bulk" not in before
