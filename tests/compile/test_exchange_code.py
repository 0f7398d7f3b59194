"""What the merge's machine code does before it waits for the kernel in front, and what only behind that."""

from __future__ import annotations

import pytest

from keysieve.compile.build import build
from keysieve.kernels.exchange_config import MERGE, MergeConfig

WAIT = "griddepcontrol.wait"
POLL = "ld.relaxed.sys.global.v2.b64"


def ptx_of(config: MergeConfig) -> str:
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
    return build(MERGE, config, "sm_90a").ptx


def test_words_are_polled_for_before_the_wait_and_nothing_weak_is_read() -> None:
    """The kernel in front may still run, and no wait has dropped old lines of the first cache: what earlier kernels
    wrote is read from L2. The epoch, which that kernel reads, is stored behind the wait; so are rescue lists read and
    sent."""
    ptx = ptx_of(MergeConfig(True, 3072, 2048, rounds=3))
    first, last = ptx.index(WAIT), ptx.rindex(WAIT)
    assert ptx.count(WAIT + ";") == 2, "before a second round, and where a block ends"
    assert ptx.index(POLL) < first
    before = ptx[:first]
    assert before.count("ld.global") == 1, "the address of this rank's own block, which never changes"
    assert before.count("ld.relaxed.gpu.global.b32") >= 2, "the length and the epoch"
    for later in ("ld.global.v4.b32", "st.global.v4.b32", "st.release.sys.global.b64"):
        assert later not in before, f"{later}: logits, second lists and their flags belong behind the wait"
    behind = ptx[last:]
    assert behind.count("st.global.b32") == 1, "the epoch"
    assert "griddepcontrol.launch_dependents" in behind
    assert "griddepcontrol.launch_dependents" not in ptx[:last]


@pytest.mark.parametrize(
    "config",
    [MergeConfig(True, 4096, 2048), MergeConfig(False, 3072, 2048, rounds=3)],
    ids=["shared memory", "ordinary lists"],
)
def test_the_other_forms_wait_where_they_begin(config: MergeConfig) -> None:
    ptx = ptx_of(config)
    assert ptx.count(WAIT + ";") == 1
    before = ptx[: ptx.index(WAIT)]
    assert before.count("ld.global") == int(config.tagged)
    assert "ld.relaxed" not in before
