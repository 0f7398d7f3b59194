"""Device-only leaves compile for every target to the instructions they promise, without local memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from keysieve.compile import inspect
from keysieve.device.report import REPORT_BYTES, REPORT_MAGIC, SpinReport, decode_report
from keysieve.kernels.base import ARCHS

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
leaf_kernels = pytest.importorskip("leaf_kernels")

PROMISED: dict[str, tuple[str, ...]] = {
    "words": (
        *(r"fma\.rn\.f32$", r"mul\.rn\.f32$", r"add\.rn\.f32$", r"max\.NaN\.f32$", r"max\.f32$", r"max\.u16x2$"),
        *(r"cvt\.rn\.bf16x2\.f32$", r"cvt\.rn\.bf16\.f32$", r"fma\.rn\.bf16x2$", r"add\.rn\.bf16x2$", r"prmt\.b32$"),
    ),
    "scans": (r"red\.shared\.add\.u32$", r"shfl\.sync\.up", r"vote\.sync\.ballot", r"bar\.sync"),
    "ring": (
        *(r"mbarrier\.init", r"mbarrier\.arrive\.expect_tx", r"mbarrier\.try_wait", r"elect\.sync"),
        r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier",
    ),
    "pairs": (
        *(r"st\.relaxed\.sys\.global\.v2\.b64$", r"ld\.relaxed\.sys\.global\.v2\.b64$"),
        *(r"st\.release\.sys", r"trap$"),
    ),
    "memory": (
        *(r"ld\.global\.nc\.L1::no_allocate\.v4", r"ld\.global\.cg\.v4", r"st\.global\.v4", r"createpolicy\."),
        *(r"cp\.async\.bulk\.global\.shared::cta", r"cp\.async\.bulk\.prefetch", r"fence\.proxy\.async\.shared::cta"),
        *(r"atom\.shared\.exch", r"red\.release\.gpu\.global\.or", r"redux\.sync\.add", r"redux\.sync\.max\.u32"),
        *(r"fence\.acq_rel\.gpu", r"exit$"),
    ),
    "cluster": (r"mapa\.shared::cluster", r"st\.shared::cluster", r"red\.relaxed\.cluster", r"ld\.shared::cluster"),
    "flag": (r"st\.release\.sys\.global", r"ld\.acquire\.sys\.global"),
    "chain": (r"griddepcontrol\.wait$",),
    "contracted": (),  # contracted by the device assembler: the machine code has the fma, the PTX need not
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", sorted(leaf_kernels.ENTRIES))
def test_leaves_compile_to_what_they_promise(name: str, arch: str, tmp_path: Path) -> None:
    compiled = leaf_kernels.compiled(name, arch, f"--keep-ptx --keep-cubin --dump-dir {tmp_path}")
    kernels = inspect.read_cubin(compiled.__cubin__)
    facts = inspect.Facts(kernels, inspect.read_host_ir(str(compiled.ir_module)), inspect.read_ptx(compiled.__ptx__))
    assert all(kernel.frame_bytes == 0 and kernel.stack_bytes == 0 for kernel in facts.kernels)
    family = next(key for key in PROMISED if name.startswith(key))
    for opcode in PROMISED[family]:
        assert facts.count(opcode), f"{opcode} is missing: {sorted(facts.instructions)}"


def test_an_early_launch_is_asked_for_only_where_it_is_written(tmp_path: Path) -> None:
    for name, early in (("chain_early", True), ("chain_late", False)):
        compiled = leaf_kernels.compiled(name, "sm_90a", f"--keep-ptx --keep-cubin --dump-dir {tmp_path}")
        assert ("griddepcontrol.launch_dependents" in compiled.__ptx__) == early
        writer, reader = inspect.read_host_ir(str(compiled.ir_module))
        assert (writer.programmatic, reader.programmatic) == (0, 1)


def test_a_ring_derives_its_counts_and_refuses_depths_that_mislead() -> None:
    from keysieve.device.ring import RingShape

    shape = RingShape(stages=6, stage_bytes=1024, warps=4, groups=3)
    assert shape.barrier_words == 12
    with pytest.raises(ValueError, match="multiple of groups"):
        RingShape(stages=4, stage_bytes=1024, warps=1, groups=7)
    with pytest.raises(ValueError, match="multiple of groups"):
        RingShape(stages=10, stage_bytes=1024, warps=4, groups=3)
    for bad in ({"stages": 0}, {"warps": 0}, {"groups": 0}, {"stage_bytes": 1000}, {"stage_bytes": 1 << 20}):
        with pytest.raises(ValueError, match="RingShape"):
            RingShape(**{"stages": 2, "stage_bytes": 1024, "warps": 1, "groups": 1, **bad})


def test_spin_reports_decode_to_what_was_written() -> None:
    import struct

    words = [REPORT_MAGIC, 3, 70, 5, 0xFFFFFFFF, 2, 1] + [0] * 9
    report = decode_report(struct.pack("<16I", *words))
    assert report == SpinReport(rank=3, row=70, source=5, expected=0xFFFFFFFF, seen=2, stage=1)
    assert "rank 3 waited in vain for rank 5 at row 70" in str(report)
    assert decode_report(bytes(REPORT_BYTES)) is None
    with pytest.raises(ValueError, match="64 bytes"):
        decode_report(b"")
