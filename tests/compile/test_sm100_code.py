"""The Blackwell scorer as compiled code: the instructions that matter, their balance, and their order."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from keysieve.compile.build import Built, build
from keysieve.kernels.score_cut import ORDERS, chunks_of
from keysieve.kernels.sm100_score_config import (
    GROUPS,
    KERNEL,
    THREADS,
    WARPS,
    ScoreConfig,
    barriers_of,
    padded,
    shape_of,
    smem_map,
    tensor_map,
)

SOME = [
    (ScoreConfig("fp8_fp32", "bf16", 32, 1, "compact", "float32"), "sm_100a"),
    (ScoreConfig("fp8_ue8m0", "fp32", 8, 3, "pitched", "bfloat16"), "sm_103a"),
    (ScoreConfig("fp8_fp32", "fp32", 64, 8, "compact", "float32"), "sm_100a"),
    (ScoreConfig("mxfp4", "bf16", 64, 5, "compact", "bfloat16"), "sm_103a"),
    (ScoreConfig("mxfp4", "fp32", 32, 2, "pitched", "float32"), "sm_100a"),
]
CASES = pytest.mark.parametrize(("config", "arch"), SOME, ids=[f"{KERNEL.symbol(c)}-{a}" for c, a in SOME])


@cache
def compiled(config: ScoreConfig, arch: str) -> Built:
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
    return build(KERNEL, config, arch)  # refuses spills, stack and too much shared memory


def statements(ptx: str) -> list[str]:
    """PTX statements in order, without comments, labels and braces of scopes."""
    text = re.sub(r"//[^\n]*", "", ptx)
    return [statement.strip() for statement in text.split(";") if statement.strip()]


@CASES
def test_instructions_and_their_balance(config: ScoreConfig, arch: str) -> None:
    built = compiled(config, arch)
    facts, shape = built.facts, shape_of(config)
    chunks, places = chunks_of(config, shape), smem_map(config, shape)
    (launch,), (code,) = facts.launches, facts.kernels
    assert launch.block == (THREADS, 1, 1)
    assert launch.dynamic_shared == places.total
    assert launch.programmatic == "run time"
    assert code.frame_bytes == 0
    assert code.registers * THREADS <= 65536
    assert facts.count(r"griddepcontrol\.wait$") == facts.count(r"griddepcontrol\.launch_dependents$") == 1
    assert "ftz" not in built.ptx, "subnormals must survive"
    # products: along K, for every chunk; of one block, one kind
    kind = "f8f6f4" if config.format.is_fp8 else r"mxf4\.block_scale\.(block32|scale_vec::2X)"
    products = facts.count(r"tcgen05\.mma\.")
    assert products == facts.count(rf"tcgen05\.mma\.cta_group::1\.kind::{kind}") == len(chunks) * config.steps
    assert facts.count(r"tcgen05\.cp\.") == (0 if config.format.is_fp8 else 2 * len(chunks))
    assert facts.count(r"tcgen05\.cp\.cta_group::1\.32x128b\.warpx4$") == facts.count(r"tcgen05\.cp\.")
    # commits: the request's release, the tile's, and one per product
    assert facts.count(r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one") == 2 + len(chunks)
    # tensor memory: what is allocated is given back, once, by as many columns
    sizes = re.findall(r"tcgen05\.(alloc|dealloc)\S*\s[^;]*?,\s*(\d+);", built.ptx)
    assert sizes == [
        ("alloc", str(tensor_map(config, shape).columns)),
        ("dealloc", str(tensor_map(config, shape).columns)),
    ]
    assert facts.count(r"tcgen05\.relinquish_alloc_permit") == 1
    # copies: keys of two pages and their scale words, the rows of a request
    assert facts.count(r"cp\.async\.bulk\.tensor\.3d") == 2 + config.next_n
    assert facts.count(r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier") == 2
    assert facts.count(r"mbarrier\.init") == barriers_of(shape)
    assert facts.count(r"setmaxnreg") == 0


@CASES
def test_loads_are_waited_for_where_they_stand(config: ScoreConfig, arch: str) -> None:
    """The warp has come together right before a tensor-memory load; nothing but other loads stands between a load and
    its wait; all columns are read exactly once."""
    columns = 0
    after_load = together = False
    for statement in statements(compiled(config, arch).ptx):
        load = re.search(r"tcgen05\.ld\.sync\.aligned\.32x32b\.x(\d+)\.b32", statement)
        if load is not None:
            columns += int(load[1])
            assert together, "lanes may have parted since the last meeting"
        elif after_load:
            assert statement.startswith("tcgen05.wait::ld.sync.aligned"), statement[:80]
        after_load = load is not None
        if "bar.warp.sync" in statement:
            together = True
        elif re.search(r"\$L\w+:|\bbra\b", statement):
            together = False
    assert columns == config.columns


@CASES
def test_products_and_commits_stand_under_an_election(config: ScoreConfig, arch: str) -> None:
    """Between an election and the end of its region: every product, copy of scales and commit. None outside."""
    inside = False
    for statement in statements(compiled(config, arch).ptx):
        if "elect.sync" in statement:
            inside = True
        elif re.search(r"\$L\w+:", statement):
            inside = False
        if re.search(r"tcgen05\.(mma|cp|commit)\.", statement):
            assert inside, statement[:100]


@CASES
def test_fences_around_the_hand_over_of_sums(config: ScoreConfig, arch: str) -> None:
    """`fence::after` before every first product into and load of an accumulator, `fence::before` before its release."""
    order = [
        match[1]
        for statement in statements(compiled(config, arch).ptx)
        if (match := re.search(r"(tcgen05\.(?:fence::\w+|mma|ld|dealloc)|mbarrier\.arrive(?!\.expect))", statement))
    ]
    chunks = len(chunks_of(config, shape_of(config)))
    assert order.count("tcgen05.fence::after_thread_sync") == 2 * chunks + 1
    assert order.count("tcgen05.fence::before_thread_sync") == chunks + 1
    for i, what in enumerate(order):
        if what == "tcgen05.fence::before_thread_sync":
            assert order[i - 1] == "tcgen05.ld" or "tcgen05.dealloc" in order[i:], order[i - 1]
            assert order[i + 1] in ("mbarrier.arrive", "tcgen05.fence::after_thread_sync")
        if what in ("tcgen05.mma", "tcgen05.ld"):
            earlier = [w for w in order[:i] if w.startswith("tcgen05.fence") or w == "mbarrier.arrive"]
            assert "tcgen05.fence::after_thread_sync" in earlier


def test_grid_wait_comes_first() -> None:
    """No global access before the wait for the kernels that this one depends on."""
    ptx = compiled(*SOME[0]).ptx
    before = ptx[: ptx.index("griddepcontrol.wait")]
    assert not re.search(r"\b(ld|st|red|atom)\.(?!param|shared)\S*global", before)
    assert "cp.async.bulk" not in before
    assert "tcgen05.alloc" in before


def test_arrival_counts_follow_from_the_roles() -> None:
    """The counts that barriers are initialised with, read from the code, against a count of who arrives."""
    config, arch = SOME[3]
    shape = shape_of(config)
    chunks = len(chunks_of(config, shape))
    found = re.findall(r"mov\.b32\s+(%r\d+), (\d+);", compiled(config, arch).ptx)
    values = dict(found)
    text = compiled(config, arch).ptx
    counts: dict[int, int] = {}
    for register in re.findall(r"mbarrier\.init\.shared\S*\.b64\s+\[[^\]]*\],\s*(%r\d+|\d+)", text):
        count = int(values.get(register, register))
        counts[count] = counts.get(count, 0) + 1
    wanted: dict[int, int] = {}
    for arrivals, barriers in (
        (1, shape.stages),  # key_full: the key warp
        (1 + WARPS * chunks, shape.stages),  # key_empty: the commit; four warps per product
        (1, shape.stages),  # scales_ready: the scale warp
        (2, shape.query_stages),  # query_full: the announced copy; what the warp writes itself
        (1 + WARPS * GROUPS, shape.query_stages),  # query_empty: the commit; every epilogue warp
        (1, shape.accumulators),  # sum_full: the commit
        (WARPS, shape.accumulators),  # sum_empty: the warps of the group
        (1, ORDERS),  # order_full: the key warp
        (1, ORDERS),  # order_empty: the query warp
    ):
        wanted[arrivals] = wanted.get(arrivals, 0) + barriers
    assert counts == wanted


@CASES
def test_the_plan_barrier_has_every_warp_once(config: ScoreConfig, arch: str) -> None:
    """With few requests: the key warp arrives and goes on, the query warp waits, the others wait; nobody else."""
    text = compiled(config, arch).ptx
    arrive = re.findall(r"\bbar(?:rier(?:\.cta)?)?\.arrive(?:\.aligned)?\s+(\S+),\s*(\S+);", text)
    wait = re.findall(r"\bbar(?:rier(?:\.cta)?)?\.sync(?:\.aligned)?\s+(\S+),\s*(\S+);", text)
    plan = [("1", str(THREADS))]
    assert arrive == plan
    assert [pair for pair in wait if pair[0] != "0"] == 2 * plan


@CASES
def test_who_makes_barriers_uses_them_first(config: ScoreConfig, arch: str) -> None:
    """Orders may be given before the block meets: their barriers are made where the key ring's are, by the key warp."""
    shape = shape_of(config)
    own = 3 * shape.stages + 2 * ORDERS
    pieces = [len(re.findall(r"mbarrier\.init\.", piece)) for piece in compiled(config, arch).ptx.split("elect.sync")]
    assert own in pieces, "key ring and orders under one election"
    assert 2 * shape.query_stages in pieces


def disassembler() -> str | None:
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        files = []
    own = [str(f.locate()) for f in files if f.name == "nvdisasm"]
    return own[0] if own else shutil.which("nvdisasm")


@CASES
def test_machine_code(config: ScoreConfig, arch: str, tmp_path: Path) -> None:
    """The device assembler made matrix instructions of the products, and touches no local memory."""
    tool = disassembler()
    if tool is None:
        pytest.skip("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm); the PTX is checked above")
    built = compiled(config, arch)
    path = tmp_path / "code.cubin"
    path.write_bytes(built.cubin)
    sass = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True).stdout
    start = sass.index(f".text.{built.facts.kernels[0].name}")
    body = sass[start:]
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)", body)
    chunks = chunks_of(config, shape_of(config))
    matrix = "UTCQMMA" if config.format.is_fp8 else "UTCOMMA"
    assert sum(op.startswith(matrix) for op in opcodes) == len(chunks) * config.steps
    assert sum(op.startswith("UTCCP") for op in opcodes) == (0 if config.format.is_fp8 else 2 * len(chunks))
    assert sum(op.startswith("UTCBAR") for op in opcodes) == 2 + len(chunks)
    assert any(op.startswith("LDTM") for op in opcodes)
    assert any(op.startswith("UTMALDG.3D") for op in opcodes)
    assert not [op for op in opcodes if op.startswith(("LDL", "STL"))]


@CASES
def test_tensor_copies_swizzle_as_the_operands_are_read(config: ScoreConfig, arch: str) -> None:
    """The tensor maps' swizzle is the operand rows' width. The host builds a map from constants; the field was found by
    comparing maps of known layouts (3 is 128 bytes: the Hopper scorer ran with it; 2 is 64 bytes)."""
    numbers = {int(n) for n in re.findall(r"llvm\.mlir\.constant\((\d+) : i64\)", compiled(config, arch).host_ir)}
    fields = {n >> 13 & 3 for n in numbers if n & ~(3 << 13) == 0x40022}
    assert fields == {3 if config.format.is_fp8 else 2}


def test_padded_is_what_the_unit_counts() -> None:
    assert [padded(n) for n in (8, 16, 24, 56, 256)] == [16, 16, 32, 64, 256]
