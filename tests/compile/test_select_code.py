"""Selection as compiled code: limits of the chip, the instructions that matter, what a call launches."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch

from keysieve.compile.build import build
from keysieve.kernels.base import MAX_BLOCK_SHARED, Kernel
from keysieve.kernels.select_config import (
    CLUSTERS,
    COPIES,
    OCTAVE_BITS,
    SELECT,
    TOPK,
    TOPS,
    TOPS_VECTORS,
    VECTORS,
    SelectConfig,
    SharedMap,
    TopsConfig,
)
from keysieve.kernels.select_host import (
    SPREAD_BYTES,
    Selector,
    config_for,
    configs_up_to,
    shared_for,
    topk_workspace_bytes,
)

ARGUMENTS = 26  # of the entry, without the stream
SMS = 132


@pytest.mark.parametrize("kernel", [SELECT, TOPK], ids=lambda kernel: kernel.name)
def test_every_shared_memory_map_is_sound(kernel: Kernel) -> None:
    for config in kernel.admitted("sm_90a"):
        places = SharedMap.of(config)
        assert config.shared_bytes <= MAX_BLOCK_SHARED
        assert config.alignment % (4 << config.high_bits(0)) == 0, "bins are addressed by bin * 4 | base"
        assert places.high[0] % (4 << config.high_bits(0)) == places.high[1] % (4 << config.high_bits(1)) == 0
        octaves = 4 << OCTAVE_BITS
        assert places.high[1] % octaves == 0, "bins of octaves are addressed by bin * 4 | base as well"
        assert config.cluster == 1 or (4 << config.high_bits(1)) >= COPIES * octaves
        assert places.cleared == places.low[1] + places.low[1] - places.low[0]
        assert places.cleared % 16 == places.arrivals % 8 == places.scratch % 16 == places.edges % 16 == 0
        offsets = [
            *places.high, *places.low, *places.chunks, *places.octaves, *places.values, *places.found, *places.sums,
            places.arrivals, places.tiles, places.edges, places.landings, places.scratch, places.table, places.groups,
            places.picks, places.total,
        ]  # fmt: skip
        assert offsets == sorted(offsets)
        assert places.picks - places.groups == 4 * config.held_groups
        assert places.total - places.picks >= 4 * config.k_class
        assert places.groups - places.table == 4 * config.table_words
        assert places.scratch - places.landings >= 8 * config.chunks * config.warps
        assert places.landings % 8 == places.ring % 16 == 0
        rings = 16 * config.chunk_groups * config.chunks * config.warps
        assert places.ring == places.groups, "lists and picks come after the row has streamed through"
        assert places.total - places.ring >= rings > 64 << 10 or not config.streamed
        assert config.held_groups >= config.k_class, "the second level must hold the keys of K groups"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("kernel", "config"),
    [
        (SELECT, SelectConfig(2048, 1, 512)),
        (SELECT, SelectConfig(2048, 8, 1024)),
        (TOPK, SelectConfig(4096, 1, 1024, maxima=False)),
        (TOPK, SelectConfig(2048, 8, 512, maxima=False)),
        (TOPK, SelectConfig(2048, 8, 512, maxima=False, given=True)),
    ],
    ids=["select-alone", "select-shared", "topk-alone", "topk-shared", "topk-given"],
)
def test_code(kernel: Kernel, config: SelectConfig, arch: str) -> None:
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
    facts = build(kernel, config, arch).facts
    (code,) = facts.kernels
    assert code.frame_bytes == code.stack_bytes == 0
    assert code.threads == (config.threads, 1, 1)
    threads = 512 if config.streamed and config.threads == 512 else 1024
    assert -(-code.registers // 8) * 8 * threads <= 65536, "1024 threads of an SM, be it one block or two"
    (launch,) = facts.launches
    assert launch.dynamic_shared == "run time"
    assert launch.programmatic == "run time"
    ways = 2 + (config.cluster > 1)  # through the kernel: short rows, long rows, blocks that a shared row spares
    waits = 1 + ways if config.maxima else ways if config.given else 1
    assert facts.count(r"griddepcontrol\.wait") == waits
    assert facts.count(r"griddepcontrol\.launch_dependents") == ways
    assert facts.count(r"atom\.") == 0, "no atomic's result may decide a position"
    assert facts.count(r"red\.(relaxed\.gpu\.)?global") == 1, "the flag word only"
    assert facts.count(r"ld\.global\.(nc\.)?.*v4") >= VECTORS
    shared_rows = config.cluster > 1
    assert (facts.count(r"cp\.async\.bulk") > 0) == config.streamed
    assert (facts.count(r"st\.async") > 0) == shared_rows
    assert facts.count(r"fence\.acq_rel|membar") == 0, (
        "a cluster barrier with fences costs a trip to L2 in every thread"
    )


@pytest.mark.parametrize("kernel", [SELECT, TOPK], ids=lambda kernel: kernel.name)
def test_no_block_reads_from_another_one(kernel: Kernel) -> None:
    """A block may end while others still run: whatever they want of it, it has sent. Each of the two stages sends
    twice, and the second one up to twice before, and waits after each time; there is a barrier in memory for each,
    armed once with what will arrive."""
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
    config = SelectConfig(2048, 4, 512, maxima=kernel is SELECT)
    ptx = build(kernel, config, "sm_90a").ptx
    assert not re.search(r"ld\.shared::cluster|atom\.shared::cluster|red\.shared::cluster", ptx)
    armed = [int(n) for n in re.findall(r"expect_tx[^;]*, (\d+)", ptx)]
    assert sorted(armed) == sorted(config.cluster * n for n in (1024, 256, 1024, 256, 1028, 4))
    marks = {r"st\.async": "send", r"mbarrier\.try_wait": "wait"}
    pattern = re.compile("|".join(f"(?P<{name}>{text})" for text, name in marks.items()))
    order = [match.lastgroup for match in pattern.finditer(ptx)]
    changes = [name for index, name in enumerate(order) if index == 0 or order[index - 1] != name]
    chunks = ["wait"] * config.streamed  # of a row that streams in, before anything is sent
    assert changes == chunks + ["send", "wait"] * 6


@pytest.mark.parametrize(("cluster", "given"), [(1, False), (8, False), (8, True)])
def test_bins_are_clear_for_all_before_a_foreign_key_is_counted(cluster: int, given: bool) -> None:
    """A barrier follows the first loads at once, before the ways part: whoever counts then, in whichever stage, knows
    that every thread has cleared its bins. (Of `select` that is true since it has a row's length.)"""
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
    ptx = build(TOPK, SelectConfig(2048, cluster, 512, maxima=False, given=given), "sm_90a").ptx
    loads = [match.end() for match in re.finditer(r"ld\.global\.L1::no_allocate", ptx)]
    behind = ptx[loads[VECTORS - 1] :]
    barrier = re.search(r"\bbar(rier)?(\.cta)?\.sync\b", behind)
    assert barrier is not None
    assert not re.search(r"\bbra\b|red\.shared", behind[: barrier.start()])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_maxima_of_a_row_are_a_kernel_of_their_own(arch: str) -> None:
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
    facts = build(TOPS, TopsConfig(), arch).facts
    (code,) = facts.kernels
    assert code.frame_bytes == code.stack_bytes == 0
    (launch,) = facts.launches
    assert launch.programmatic == "run time"
    assert facts.count(r"griddepcontrol\.wait") == facts.count(r"griddepcontrol\.launch_dependents") == 1
    assert facts.count(r"ld\.global\.nc.*v4") == TOPS_VECTORS, "all of a thread's keys are asked for at once"
    assert facts.count(r"st\.global") == TOPS_VECTORS


def test_two_small_blocks_fit_an_sm() -> None:
    for kernel in (SELECT, TOPK):
        for config in kernel.admitted("sm_90a"):
            if config.threads == 512 and not config.streamed:
                assert 2 * (config.shared_bytes + 1024) <= 228 * 1024


class Recorder:
    """Stands for a launcher: keeps what was launched with which configuration."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[int, ...]]] = []

    def make(self, kernel: Kernel, config: Any) -> Any:
        assert config in list(kernel.admitted("sm_90a"))
        return lambda *args: self.calls.append((config, args))


def outputs(rows: int, k: int) -> dict[str, torch.Tensor]:
    return {
        "out": torch.zeros(rows, k + 4, dtype=torch.int32)[:, :k],
        "counts": torch.zeros(rows, dtype=torch.int32),
    }


def test_a_select_call_passes_what_the_entry_takes() -> None:
    seen = Recorder()
    use = Selector(seen.make, k=100, max_rows=8, max_len=50_000, sms=SMS, maxima=True)
    lens = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    logits, tops = torch.zeros(1024, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int16)
    table = torch.zeros(2, 12, dtype=torch.int32)[:, :10]
    use.select(logits, tops, lens, 2, limit=9000, kv_table=table, kv_page=16, block_rows=20, **outputs(4, 100))
    ((config, args),) = seen.calls
    assert config.cluster == 8
    assert len(args) == ARGUMENTS
    assert all(type(value) is int for value in args)
    assert args[3] == 512, "the smaller of logits and eight times the maxima"
    assert (args[7], args[8], args[9], args[10]) == (4, 2, 100, 160), "rows, next_n, k, what ten blocks of 16 hold"
    assert args[12:16] == (12, 0, 4, 20)
    assert args[17] == 104
    assert args[22:] == (0, 0, 0, config.shared_bytes), "release, scored, chained, shared memory"


def test_behind_a_scorer_select_counts_tiles_by_its_limit() -> None:
    """What a table holds makes rows empty; where the others lie depends on the scorer's own limit."""
    seen = Recorder()
    use = Selector(seen.make, k=100, max_rows=8, max_len=50_000, sms=SMS, maxima=True)
    lens = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    logits, tops = torch.zeros(1024, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int16)
    table, starts = torch.zeros(2, 10, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    given = outputs(4, 100) | {"limit": 9000, "kv_table": table, "kv_page": 16, "starts": starts, "chained": True}
    use.select(logits, tops, lens, 2, scored=9000, **given)
    use.select(logits, tops, lens, 2, **given)
    (_, ahead), (_, behind) = seen.calls
    assert (ahead[4], ahead[10], ahead[22:]) == (0, 160, (0, 9000, 1, SPREAD_BYTES))
    assert (behind[4], behind[10], behind[22:]) == (starts.data_ptr(), 160, (0, 0, 1, SPREAD_BYTES))


@pytest.mark.parametrize("rows", [1, 16, 33, 66, 132, 133, 200, 400])
def test_blocks_of_a_chained_selection_have_an_sm_each_while_there_are_enough(rows: int) -> None:
    """A block's share of an SM's 228 KB (1 KB of it the system's) then leaves no room for a second one."""
    for max_len in (4096, 32768, 1 << 20):
        config = config_for(rows, max_len, 2048, SMS, True)
        enough = rows * config.cluster <= SMS
        given = shared_for(config, rows, SMS, chained=True)
        assert config.shared_bytes <= given <= MAX_BLOCK_SHARED
        assert (2 * (given + 1024) > 228 * 1024) == (enough or 2 * (config.shared_bytes + 1024) > 228 * 1024)
        assert shared_for(config, rows, SMS, chained=False) == config.shared_bytes


def test_a_topk_call_passes_what_the_entry_takes() -> None:
    seen = Recorder()
    use = Selector(seen.make, k=100, max_rows=200, max_len=5_000, sms=SMS, maxima=False)
    logits = torch.zeros(200, 5_001, dtype=torch.bfloat16)[:, 1:]
    lens = torch.zeros(200, 3, dtype=torch.int32)[:, 1]
    use.topk(logits, lens, **outputs(200, 100))
    ((config, args),) = seen.calls
    assert (config.cluster, config.threads) == (1, 512)
    assert len(args) == ARGUMENTS
    assert args[:4] == (logits.data_ptr(), 0, 5_001, 0)
    assert (args[6], args[7], args[10]) == (3, 200, 5_000)


def test_the_maxima_of_one_long_row_come_from_a_kernel_in_front() -> None:
    seen = Recorder()
    use = Selector(seen.make, k=100, max_rows=1, max_len=600_000, sms=SMS, maxima=False)
    logits = torch.zeros(1, 500_003, dtype=torch.bfloat16)[:, 3:]
    lens = torch.zeros(1, dtype=torch.int32)
    need = topk_workspace_bytes(1, 600_000, 100, SMS)
    assert need >= 600_007 // 8 * 2
    room = torch.empty(need, dtype=torch.uint8)
    use.topk(logits, lens, workspace=room, **outputs(1, 100))
    use.topk(logits, lens, workspace=room, chained=True, **outputs(1, 100))
    (front, first), (behind, second), (_, chained), (_, last) = seen.calls
    assert isinstance(front, TopsConfig)
    assert behind.given
    assert first[:4] == second[:4] == (logits.data_ptr(), room.data_ptr(), 500_003, need)
    assert first[4:] == (lens.data_ptr(), 1, 1, -(-500_007 // (8 * front.groups)), 500_000, 0)
    assert (second[10], len(second)) == (500_000, ARGUMENTS)
    assert (second[24], chained[9], last[24]) == (1, 1, 1), "the second kernel may always start early"


def test_nothing_is_launched_for_no_rows() -> None:
    seen = Recorder()
    use = Selector(seen.make, k=7, max_rows=4, max_len=100, sms=SMS, maxima=False)
    use.topk(torch.zeros(0, 100, dtype=torch.bfloat16), torch.zeros(0, dtype=torch.int32), **outputs(0, 7))
    assert seen.calls == []


def test_a_missing_workspace_is_refused() -> None:
    use = Selector(Recorder().make, k=7, max_rows=400, max_len=2_000_000, sms=SMS, maxima=False)
    need = topk_workspace_bytes(400, 2_000_000, 7, SMS)
    assert need >= 400 * 2_000_000 // 8 * 2
    rows = torch.zeros(400, 1, dtype=torch.bfloat16).expand(400, 2_000_000)
    with pytest.raises(ValueError, match=str(need)):
        use.topk(rows, torch.zeros(400, dtype=torch.int32), **outputs(400, 7))


@pytest.mark.parametrize("k", [1, 2048, 2049, 4096])
@pytest.mark.parametrize("max_len", [64, 8192, 32768, 131072, 1 << 20, 1 << 26])
def test_what_may_be_asked_for_is_loaded_beforehand(k: int, max_len: int) -> None:
    for max_rows, maxima in product((1, 2, 7, 16, 17, 33, 66, 67, 132, 133, 512), (True, False)):
        loaded = configs_up_to(max_rows, max_len, k, SMS, maxima)
        assert {config_for(rows, max_len, k, SMS, maxima) for rows in range(1, max_rows + 1)} <= set(loaded)
        for config in loaded:
            assert config in list((SELECT if maxima else TOPK).admitted("sm_90a"))
            assert config.cluster in CLUSTERS
            assert config.k_class >= k


def test_rows_are_shared_while_the_chip_has_room() -> None:
    def shape(rows: int, keys: int) -> tuple[int, int]:
        config = config_for(rows, keys, 2048, SMS, True)
        return config.cluster, config.threads

    assert shape(1, 4096) == shape(512, 8192) == (1, 512)
    assert shape(1, 131072) == shape(12, 131072) == (8, 512)
    assert shape(1, 1 << 20) == (8, 512)
    assert shape(16, 131072) == (4, 1024)
    assert shape(32, 131072) == shape(64, 65536) == (1, 512)
    assert shape(32, 1 << 20) == (2, 1024)
    assert shape(128, 32768) == (1, 1024)
    assert shape(128, 262144) == (2, 512), "lengths may differ: two small blocks a row"
    assert shape(128, 1 << 20) == (1, 1024)
    assert shape(32, 32768) == (2, 512), "two small blocks hold all keys of a row"
    assert shape(512, 65536) == (1, 512), "many rows: two blocks an SM"
    assert config_for(32, 131072, 2048, SMS, False).cluster == 2, "every key is read: two SMs read faster"
    pair = config_for(64, 65536, 2048, SMS, False)
    assert (pair.cluster, pair.threads) == (2, 1024), "two large blocks hold all keys of a foreign row"
    assert config_for(1, 1 << 20, 2048, SMS, False).given
    assert not config_for(2, 1 << 20, 2048, SMS, False).given, "two rows' own blocks are as fast"
