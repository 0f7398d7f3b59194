"""What inspection reads from compiled code is what was asked for, and a bad build is refused."""

from __future__ import annotations

from typing import Any

import pytest

from keysieve.compile import inspect
from keysieve.compile.build import KernelBuildError, bad_notes, build
from keysieve.kernels.base import ARCHS, MAX_BLOCK_SHARED, Kernel
from keysieve.kernels.tile_offsets_config import KERNEL, TileOffsetsConfig

cutlass = pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
probe = pytest.importorskip("probe_kernels")


def probe_kernel(**more: Any) -> Kernel:
    return Kernel("probe", "probe_kernels:build", probe.ProbeConfig, ARCHS, lambda _: [probe.ProbeConfig()], **more)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "config",
    [
        probe.ProbeConfig(threads=96, shared=2048),
        probe.ProbeConfig(threads=256, shared=100_000, programmatic="on"),
        probe.ProbeConfig(threads=512, programmatic="run time"),
    ],
    ids=str,
)
def test_facts_are_those_of_the_configuration(arch: str, config: Any) -> None:
    facts = build(probe_kernel(), config, arch).facts
    (code,) = facts.kernels
    (launch,) = facts.launches
    assert code.threads == (config.threads, 1, 1)
    assert 0 < code.registers <= 64
    assert code.frame_bytes == code.stack_bytes == 0
    assert code.code_bytes > 0
    assert code.parameters == ((0, 8), (8, 4))
    assert launch.block == (config.threads, 1, 1)
    assert launch.dynamic_shared == config.shared
    assert launch.programmatic == {"off": 0, "on": 1, "run time": inspect.RUN_TIME}[config.programmatic]
    assert code.name == launch.kernel
    assert code.name.startswith("probe_")
    assert facts.count(r"griddepcontrol\.wait$") == 1
    assert facts.count(r"st\.global") == 1
    assert facts.count(r"tcgen05") == 0


def test_local_memory_is_refused_and_can_be_looked_at() -> None:
    config = probe.ProbeConfig(indexed_array=True)
    with pytest.raises(KernelBuildError, match="local memory"):
        build(probe_kernel(), config, "sm_90a")
    built = build(probe_kernel(), config, "sm_90a", check=False)
    assert built.facts.kernels[0].frame_bytes >= 4 * probe.ARRAY
    assert built.facts.count(r"ld\.local") > 0


def test_too_much_shared_memory_is_refused() -> None:
    """The compiler itself accepts it and only fails at the launch."""
    build(probe_kernel(), probe.ProbeConfig(shared=MAX_BLOCK_SHARED), "sm_90a")
    with pytest.raises(KernelBuildError, match="dynamic shared memory"):
        build(probe_kernel(), probe.ProbeConfig(shared=MAX_BLOCK_SHARED + 16), "sm_90a")


def test_a_register_bound_is_held() -> None:
    with pytest.raises(KernelBuildError, match="registers a thread, at most 4 allowed"):
        build(probe_kernel(max_registers=4), probe.ProbeConfig(), "sm_90a")


def test_code_that_does_not_compile_says_which_kernel_and_why() -> None:
    with pytest.raises(KernelBuildError, match=r"probe__.*for sm_90a does not compile: (?s:.)*broken on purpose"):
        build(probe_kernel(), probe.ProbeConfig(broken=True), "sm_90a")
    with pytest.raises(KernelBuildError, match="it compiles for sm_90a"):
        build(probe_kernel(), probe.ProbeConfig(), "sm_80")


def test_assembler_notes_that_must_not_pass() -> None:
    good = "ptxas .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 10 registers"
    assert bad_notes(good) == []
    spilled = "    16 bytes stack frame, 120 bytes spill stores, 0 bytes spill loads"
    assert bad_notes(good + "\n" + spilled) == [spilled.strip()]
    assert len(bad_notes("ptxas info : (C7514) Potential Performance Loss: wgmma.mma_async are serialized")) == 1
    assert len(bad_notes("ptxas info : (C7519) wait injected")) == 1


def test_building_is_repeatable() -> None:
    first, again = (build(KERNEL, TileOffsetsConfig(3), "sm_90a") for _ in range(2))
    assert first.cubin == again.cubin
    assert first.ptx == again.ptx
    assert first.facts == again.facts


def test_assembler_notes_are_heard_and_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    built = build(KERNEL, TileOffsetsConfig(1), "sm_90a")
    assert "bytes spill stores" in built.notes
    assert "\x1b" not in built.notes
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("next_n", [1, 8])
def test_the_tile_prefix_sum(arch: str, next_n: int) -> None:
    facts = build(KERNEL, TileOffsetsConfig(next_n), arch).facts
    (code,) = facts.kernels
    assert code.threads == (1024, 1, 1)
    assert code.registers <= 64  # 1,024 threads and 64 Ki registers
    assert facts.launches[0].programmatic == inspect.RUN_TIME
    assert facts.count(r"griddepcontrol\.wait$") == 1
    assert facts.count(r"atom") == 0  # nothing decides a position by arriving first
    assert code.name.startswith(f"tile_offsets_n{next_n}")
