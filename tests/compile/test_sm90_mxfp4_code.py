"""The sm90 scorer of MXFP4 as compiled code: what it is made of, and that every shape fits the chip."""

from __future__ import annotations

import re
from collections import Counter

import pytest

import keysieve.kernels.sm90_score_config as fp8
from keysieve.compile.build import build
from keysieve.kernels.base import MAX_BLOCK_SHARED
from keysieve.kernels.sm90_mxfp4_config import KERNEL, by_rows, plain_tiles, shape_of, smem_map
from keysieve.kernels.sm90_score_config import ORDERS, ScoreConfig, chunks_of

SOME = [
    ScoreConfig("mxfp4", 32, 1, "compact", "float32"),
    ScoreConfig("mxfp4", 32, 2, "compact", "bfloat16"),
    ScoreConfig("mxfp4", 64, 2, "pitched", "bfloat16"),
    ScoreConfig("mxfp4", 64, 4, "compact", "float32"),
    ScoreConfig("mxfp4", 64, 7, "compact", "float32"),
]


def test_every_shape_fits_the_chip() -> None:
    for config in KERNEL.admitted("sm_90a"):
        shape = shape_of(config)
        places = smem_map(config, shape)
        assert places.total <= MAX_BLOCK_SHARED, config
        assert shape.per_sm == 1, "the launch is made for one"
        assert places.query % 1024 == places.keys % 128 == places.weights % 16 == places.barriers % 8 == 0
        assert places.descriptors % 16 == places.lengths % 16 == places.table % 16 == 0
        producer, consumer = shape.registers
        entry = fp8.REGISTER_FILE // shape.threads // 8 * 8
        assert producer * 128 + consumer * 128 * shape.groups <= entry * shape.threads, "warps would wait for registers"


@pytest.mark.parametrize("config", SOME, ids=KERNEL.symbol)
def test_instructions(config: ScoreConfig) -> None:
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
    built = build(KERNEL, config, "sm_90a")  # refuses spills, stack, shared memory, serialised products
    products = [int(n) for n in re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k32\.f32\.e4m3\.e4m3", built.ptx)]
    chunks = chunks_of(config, shape_of(config))
    ways = 2 if plain_tiles(config, shape_of(config)) else 1  # plain tiles have a loop of their own
    assert sorted(products) == sorted(config.heads * rows for _, rows in chunks for _ in range(ways * 2 * 4))
    assert built.facts.count(r"cp\.async\.bulk\.shared::cluster\.global") == 3, "a copy a lane: first, home, batches"
    assert built.facts.count(r"cp\.async\.bulk\.tensor") == 0
    assert "ftz" not in built.ptx, "factors and logits may be subnormal"
    assert "C7512" not in built.notes
    shape = shape_of(config)
    meetings = Counter(re.findall(r"\bbar\.(sync|arrive)\s+(\d+)(?:, (\d+))?;", built.ptx))
    assert meetings == {  # warps are 4 producers and the consumers; the query warp waits for no plan but at barrier 3
        ("sync", "0", ""): 2,
        ("sync", "1", str(shape.threads - 32)): 3,
        ("sync", "2", "128"): 4,
        ("arrive", "3", "64"): 1,
        ("sync", "3", "64"): 1,
    }
    assert built.facts.count(r"mbarrier\.init") == 2 * (3 * shape.stages + 2 * shape.query_stages + 2 * ORDERS), (
        "few, many"
    )
    # Apart: of a page each, the steps of a chunk's block of eight columns, or of the four that a row's chains want.
    turns = config.next_n if by_rows(config) else len(chunks)
    assert built.facts.count(r"mma\.sync\.aligned\.m16n8k32") == 4 * 2 * turns
