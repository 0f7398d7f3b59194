"""The Blackwell scorer's own source, run in Python on a model of the chip: bytes in, logits out, bit for bit.

What is executed is the text of `sm100_score_math`, `sm100_score_feed` and of what they share with Hopper, the producers
included: order of tiles, addresses, descriptors, instruction words, scale orders, tensor-memory columns, head sums,
rounding, barriers and phases. What is modelled (tests/models/sm100_unit.py) is written from the PTX ISA.
"""

from __future__ import annotations

import numpy as np
import pytest
import sm100_unit
from sm100_block import EVERY_LANE, LOGITS_AT, TOPS_AT, Device, by_reference, expected, make_case, name
from sm100_source import KERNELS

from keysieve.kernels.sm100_score_config import ScoreConfig, ScoreShape, shape_of
from keysieve.spec import TILE, key16

ONE_TILE = [
    ScoreConfig("fp8_fp32", "fp32", 8, 3, "pitched", "float32"),  # 24 columns, padded to 32
    ScoreConfig("fp8_ue8m0", "bf16", 32, 2, "pitched", "float32"),
    ScoreConfig("fp8_fp32", "bf16", 64, 5, "pitched", "bfloat16"),  # two products
    ScoreConfig("fp8_ue8m0", "fp32", 16, 1, "pitched", "bfloat16"),
    ScoreConfig("mxfp4", "bf16", 32, 5, "pitched", "float32"),  # two products
    ScoreConfig("mxfp4", "fp32", 8, 1, "pitched", "float32"),
    ScoreConfig("mxfp4", "fp32", 64, 3, "pitched", "bfloat16"),  # two products
]


@pytest.mark.parametrize("config", ONE_TILE, ids=name)
def test_a_tile_bit_for_bit(config: ScoreConfig) -> None:
    """Every lane, every row, every head of one tile, from cache bytes to stored bits."""
    case = make_case(config, (1,), seed=config.columns)
    got = Device(case, shape_of(config), 1, EVERY_LANE).run()
    wanted = by_reference(case) if config.numerics == "bf16" else expected(case)
    np.testing.assert_array_equal(got, wanted)
    assert len(np.unique(got)) > 25, "the case says nothing"


@pytest.mark.parametrize("key_format", ["fp8_ue8m0", "mxfp4"])
def test_compact_rows_and_the_maxima_of_eight(key_format: str) -> None:
    """Two requests, all lanes at once: rows where the layout puts them, and the largest key16 of each 8 keys."""
    config = ScoreConfig(key_format, "bf16", 8, 3, "compact", "float32")
    case = make_case(config, (2, 1), seed=3)
    device = Device(case, shape_of(config), 1, EVERY_LANE)
    device.run_warps()
    wanted = by_reference(case)
    row = 0
    for request, tiles in enumerate(case.tiles):
        before = sum(case.tiles[:request])
        for j in range(config.next_n):
            element = TILE * (config.next_n * before + j * tiles)
            keys = tiles * TILE
            np.testing.assert_array_equal(device.stored(LOGITS_AT + 2 * element, keys), wanted[row, :keys])
            ranks = np.array([-1 if bits < 0 else key16(int(bits)) for bits in wanted[row, :keys]])
            tops = device.stored(TOPS_AT + 2 * (element // 8), keys // 8)
            np.testing.assert_array_equal(tops, ranks.reshape(-1, 8).max(1))
            row += 1


RINGS = [
    (ScoreConfig("fp8_fp32", "bf16", 8, 1, "pitched", "float32"), ScoreShape(3, 2, 256, 4)),
    (ScoreConfig("fp8_fp32", "bf16", 64, 5, "pitched", "float32"), ScoreShape(2, 2, 256, 2)),
    (ScoreConfig("mxfp4", "bf16", 64, 5, "pitched", "float32"), ScoreShape(3, 2, 128, 2)),  # three products
    (ScoreConfig("mxfp4", "bf16", 16, 1, "pitched", "float32"), ScoreShape(5, 3, 128, 4)),
]


@pytest.mark.parametrize(("config", "shape"), RINGS, ids=lambda value: name(value) if hasattr(value, "heads") else "")
@pytest.mark.parametrize("seed", range(3))
def test_rings_over_many_laps(config: ScoreConfig, shape: ScoreShape, seed: int) -> None:
    """Many requests and tiles through small rings, matrix unit late at random: right bits for lane 0 of every warp."""
    rng = np.random.default_rng(seed)
    tiles = tuple(int(n) for n in rng.choice([1, 1, 1, 2, 3, 7], size=12))
    case = make_case(config, tiles, seed)
    device = Device(case, shape, seed, (0,))
    got = device.run()
    wanted = by_reference(case)
    columns = np.arange(wanted.shape[1]) % 32 == 0
    np.testing.assert_array_equal(got[:, columns], wanted[:, columns])
    assert (got[:, ~columns] == -1).all()
    assert device.unit.counts["products"] == sum(tiles) * len(device.kernel.chunks) * config.steps
    copies = 0 if config.format.is_fp8 else 2 * sum(tiles) * len(device.kernel.chunks)
    assert device.unit.counts["scale copies"] == copies


FAULTS = {
    "a step along K forgotten": ("K_BYTES * step", "0 * step"),
    "first step accumulates": ("step > 0)", "True)"),
    "scale bytes of the wrong half": ("words.mxf4_word(n, 2 * step)", "words.mxf4_word(n, 2 - 2 * step)"),
    "scale order of the page": ("scale_offset(Uint32(lane))", "16 * Uint32(lane) // 4"),
    "wrong quarter of the lanes": (
        "(Uint32(warp * Int32(32)) << Uint32(16))",
        "(Uint32(warp * Int32(16)) << Uint32(16))",
    ),
    "sum read from the next column": ("Uint32(slot), at), count", "Uint32(slot), at) + 1, count"),
    "bf16 pairs split otherwise": ("parts[i % 2])", "parts[i // 2])"),
    "query chunk begins elsewhere": ("places, start, Uint32(query_stage)", "places, 0, Uint32(query_stage)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_model_notices(fault: str) -> None:
    """Each fault, put into the source, changes bits or trips the model: the tests above can fail."""
    old, new = FAULTS[fault]
    sources = [(KERNELS / f"sm100_score_{part}.py").read_text() for part in ("math", "feed")]
    assert any(old in source for source in sources), "the source no longer has the text that this fault changes"
    config = ScoreConfig("mxfp4", "bf16", 64, 3, "pitched", "float32")
    case = make_case(config, (1,), seed=5)
    try:
        got = Device(case, shape_of(config), 1, (0,), edits=((old, new),)).run()
    except AssertionError:
        return
    columns = np.arange(TILE) % 32 == 0
    assert (got[:, columns] != by_reference(case)[:, columns]).any()


@pytest.mark.parametrize(
    ("shape", "why"), [((4, 2, 256, 3), "multiple"), ((1, 2, 256, 2), "tile before"), ((4, 1, 256, 2), "other group")]
)
def test_cuts_that_could_go_wrong_are_refused(shape: tuple[int, int, int, int], why: str) -> None:
    """Accumulators change groups; a stage comes round too soon; a query has no place."""
    with pytest.raises(ValueError, match=why):
        ScoreShape(*shape)


LOOK = "owner, tile, sequence = next_tile(shared, stage, phase)\n                if"
HANGS = {
    "a group waits for its product before it looks at the tile": (
        (1,) * 6,
        LOOK,
        f"sync.wait_barrier(shared.sum_full + slot, slot_phase)\n                {LOOK}",
    ),
    "a group keeps requests that it has no product of": (
        (1,) * 6,
        "if request > Int32(0):  # those it",
        "if request == held + Int32(1) and request > Int32(0):  # those it",
    ),
    "the matrix warp keeps a first request without a tile": (
        (0, *(1,) * 5),
        "if request > Int32(0):\n                with",
        "if held >= Int32(0):\n                with",
    ),
}


@pytest.mark.parametrize("fault", HANGS)
def test_a_query_held_too_long_stops_everything(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one tile and two query places: whoever keeps a request for too long waits for himself."""
    monkeypatch.setattr(sm100_unit, "DEADLINE", 2.0)
    config = ScoreConfig("fp8_fp32", "bf16", 8, 1, "pitched", "float32")
    tiles, old, new = HANGS[fault]
    assert (KERNELS / "sm100_score_math.py").read_text().count(old) == 1
    with pytest.raises(TimeoutError):
        Device(make_case(config, tiles, 0), ScoreShape(3, 2, 256, 4), 0, (0,), edits=((old, new),)).run()
