"""The device exchange without a device: where everything lies, who can reach whom, what a report becomes."""

from __future__ import annotations

import gc
import itertools
import struct
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import keysieve as ks
from dcp.processes import run_ranks
from keysieve.dcp import ExchangeError, exchange_report
from keysieve.dcp.exchange import Exchange, virtual_ranks
from keysieve.dcp.exchange_memory import ExchangeMemory, VirtualBlocks
from keysieve.dcp.exchange_reach import judged
from keysieve.dcp.layout import ALIGNMENT, ExchangeLayout
from keysieve.dcp.memory import ExchangeShape
from keysieve.device.report import REPORT_MAGIC, REPORT_WORDS, STAGE_FLAG, STAGE_SIGNATURE, STAGE_WORDS
from keysieve.spec import default_topn

SPEC = ks.IndexerSpec(heads=8, topk=64)


# --- layout --------------------------------------------------------------------------------------------------------

SHAPES = [
    ExchangeShape(2, 512, 2048, 1216),
    ExchangeShape(16, 3, 2048, 224, 2),
    ExchangeShape(3, 1, 5, 1),
    ExchangeShape(2, 7, 64, 64),
    ExchangeShape(8, 64, 4096, 672, 10),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_place_is_within_its_part_and_its_own(shape: ExchangeShape) -> None:
    layout = ExchangeLayout(shape)
    taken = []
    for parity in range(2):
        for source in range(shape.world):
            for row in {0, shape.max_rows - 1}:
                at = layout.slot(parity, source, row)
                assert at % 16 == 0
                assert layout.slots <= at
                assert at + layout.slot_bytes <= layout.slots + layout.slots_bytes
                taken.append((at, layout.slot_bytes))
    for row in {0, shape.max_rows - 1}:
        for index in range(layout.rescued):
            at = layout.second_list(row, index)
            assert at % 16 == 0
            assert layout.recv <= at
            assert at + 4 * shape.second_words <= layout.recv + layout.recv_bytes <= layout.flags
            taken.append((at, 4 * shape.second_words))
        for source in range(shape.world):
            at = layout.flag(source, row)
            assert at % 8 == 0
            assert layout.flags <= at
            assert at + 8 <= layout.block_bytes
            taken.append((at, 8))
    taken.sort()
    assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(taken))
    assert layout.block_bytes % ALIGNMENT == 0


def test_slots_have_the_protocol_s_shape() -> None:
    """int32 [2 parities, W sources, max_rows, 4 * pairs], pairs = ceil(words / 2) + 1, from the block's start."""
    shape = ExchangeShape(4, 5, 2048, 672)
    layout = ExchangeLayout(shape)
    assert shape.words == 672 + 21
    assert shape.pairs == 347 + 1
    assert layout.slots == 0
    assert layout.slots_bytes == 4 * (2 * 4 * 5 * 4 * shape.pairs)
    assert layout.slot(1, 2, 3) == 4 * (((1 * 4 + 2) * 5 + 3) * 4 * shape.pairs)
    assert layout.rescued == 3


def test_whole_lists_need_no_room_for_second_ones() -> None:
    assert ExchangeLayout(ExchangeShape(2, 8, 64, 64)).recv_bytes == 0


# --- memory --------------------------------------------------------------------------------------------------------


def test_peers_know_each_other_s_blocks_once_all_ranks_have_theirs() -> None:
    layout = ExchangeLayout(ExchangeShape(3, 4, 64, 40))
    blocks = VirtualBlocks([torch.device("cpu")] * 3)
    first = [blocks.memory(layout, r) for r in range(2)]
    assert not blocks.complete(layout)
    assert first[0].peers.tolist() == [0] * 16
    last = blocks.memory(layout, 2)
    assert blocks.complete(layout)
    assert last.peers.tolist() == [m.block.data_ptr() for m in (*first, last)] + [0] * 13
    assert first[1].peers.tolist() == last.peers.tolist()
    assert blocks.memory(layout, 0) is first[0]


@pytest.mark.parametrize("epoch", [0, 1, 2**31 - 1, 2**31, 2**32 - 5, 2**32])
def test_preset_tags_every_half_with_the_epoch(epoch: int) -> None:
    layout = ExchangeLayout(ExchangeShape(2, 3, 64, 40))
    memory = ExchangeMemory(layout, torch.zeros(layout.block_bytes, dtype=torch.uint8))
    memory.preset(epoch)
    halves = memory.block[: layout.slots_bytes].view(torch.int32).view(-1, 2)
    assert set((halves[:, 1].to(torch.int64) & 0xFFFFFFFF).tolist()) == {epoch % 2**32}
    assert not halves[:, 0].any()
    assert not memory.block[layout.slots_bytes :].any()
    assert set((memory.epoch.to(torch.int64) & 0xFFFFFFFF).tolist()) == {epoch % 2**32}


def test_addresses_above_the_signed_range_are_kept_bit_for_bit() -> None:
    layout = ExchangeLayout(ExchangeShape(2, 1, 64, 40))
    memory = ExchangeMemory(layout, torch.zeros(layout.block_bytes, dtype=torch.uint8))
    memory.set_peers([0x7FFF00000000, 0xFFFF800000001000])
    assert [a & (2**64 - 1) for a in memory.peers.tolist()][:3] == [0x7FFF00000000, 0xFFFF800000001000, 0]


def test_a_block_that_is_too_small_is_refused() -> None:
    layout = ExchangeLayout(ExchangeShape(2, 1, 64, 40))
    with pytest.raises(ks.KeysieveError, match="block_bytes"):
        ExchangeMemory(layout, torch.zeros(layout.block_bytes - 1, dtype=torch.uint8))


# --- limits --------------------------------------------------------------------------------------------------------


def test_virtual_ranks_share_limits_and_widen_them() -> None:
    ranks = virtual_ranks(["cpu"] * 2, interleave=4)
    small = [r.bind(SPEC, max_rows=2, max_context=128, device="cpu") for r in ranks]
    assert [s.rank for s in small] == [0, 1]
    assert small[0].topn == default_topn(64, 2)
    before = ranks[0].memory
    assert before is not None
    ranks[0].bind(SPEC, max_rows=1, max_context=64, device="cpu")
    assert ranks[0].memory is before, "smaller limits fit in what is there"
    assert ranks[0].workspace_bytes == before.block.numel() + before.layout.private_bytes
    ranks[0].bind(SPEC, max_rows=9, max_context=64, device="cpu")
    after = ranks[0].memory
    assert after is not None
    assert after.layout.shape.max_rows == 9
    assert before.block.numel() == before.layout.block_bytes, "an older indexer keeps what it was built with"
    with pytest.raises(ks.KeysieveError, match="one dcp object per topk"):
        ranks[0].bind(replace(SPEC, topk=65), max_rows=1, max_context=64, device="cpu")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"topn": 0}, "topn"),
        ({"topn": 4097}, "topn"),
        ({"topn": 2.5}, "topn"),
        ({"interleave": 0}, "interleave"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": None}, "timeout"),
    ],
)
def test_bad_arguments_are_refused_by_name(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ks.KeysieveError, match=what):
        virtual_ranks(["cpu"], **options)


def test_more_than_sixteen_ranks_and_none_are_refused() -> None:
    for count in (0, 17):
        with pytest.raises(ks.KeysieveError, match="devices"):
            virtual_ranks(["cpu"] * count)


def test_more_candidates_than_topk_are_refused() -> None:
    [one] = virtual_ranks(["cpu"], topn=65)
    with pytest.raises(ks.KeysieveError, match="at most topk = 64"):
        one.bind(SPEC, max_rows=1, max_context=64, device="cpu")


def test_an_exchange_serves_one_device() -> None:
    [one] = virtual_ranks(["cpu"])
    one.bind(SPEC, max_rows=1, max_context=64, device="cpu")
    with pytest.raises(ks.KeysieveError, match="one Exchange per device"):
        one.bind(SPEC, max_rows=1, max_context=64, device="meta")


# --- who can reach whom --------------------------------------------------------------------------------------------


def test_why_ranks_cannot_exchange() -> None:
    good = [("host", "cuda:0", "a", None), ("host", "cuda:1", "b", None)]
    assert judged(good) is None
    assert judged(good, {"a": True, "b": True}) is None
    assert judged(good, {"a": True}) is None, "a device that is not seen here is left to the attempt"
    assert "2 hosts" in str(judged([good[0], ("other", "cuda:0", "b", None)]))
    assert "ranks 0 and 1 share one device" in str(judged([good[0], ("host", "cuda:0", "a", None)]))
    assert "rank 1 (cuda:1) has no peer access" in str(judged(good, {"a": True, "b": False}))
    assert "rank 1 on cpu: no memory" in str(judged([good[0], ("host", "cpu", "c", "no memory")]))


# --- reports -------------------------------------------------------------------------------------------------------


def report(*fields: int) -> torch.Tensor:
    words = [REPORT_MAGIC, *fields] + [0] * (REPORT_WORDS - 1 - len(fields))
    return torch.frombuffer(bytearray(struct.pack(f"<{REPORT_WORDS}I", *words)), dtype=torch.uint8).clone()


def test_no_report_is_no_failure() -> None:
    empty = torch.zeros(64, dtype=torch.uint8)
    assert not exchange_report.written(empty)
    assert exchange_report.failure(empty, 1.0) is None


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        (
            (2, 70, 5, 0xFFFFFFFF, 0xFFFFFFFD, STAGE_WORDS, 128 << 16 | 61, 0, 9000, 0, 0xFFFFFFFF),
            [
                "rank 2, row 70, call 4294967295 (128 rows, site 61, length 9000)",
                *("source rank 5", "seen 4294967293", "within 1.5 s (round 1)", "look at its log"),
            ],
        ),
        (
            (0, 3, 1, 9, 8, STAGE_FLAG, 4 << 16, 0, 100, 0, 17),
            ["rank 0, row 3, call 17", "no second list from source rank 1: expected flag 9, seen 8", "(round 2)"],
        ),
        (
            (1, 0, 0, 6, 6, STAGE_SIGNATURE, 4 << 16 | 2, 5 << 16 | 3, 100, 99, 6),
            ["call 6: source rank 0 made another call: 5 rows, site 3, length 99; this rank: 4 rows, site 2,"],
        ),
    ],
)
def test_a_report_names_rank_row_call_source_and_round(fields: tuple[int, ...], parts: list[str]) -> None:
    left = report(*fields)
    assert exchange_report.written(left)
    text = exchange_report.failure(left, 1.5)
    assert text is not None
    for part in parts:
        assert part in text, text


# --- without peer memory: all-gather -------------------------------------------------------------------------------


def _falls_back(rank: int, _world: int) -> tuple[str, str, list[int]]:
    dcp = ks.dcp.Exchange(topn=40)
    indexer = ks.DecodeIndexer(SPEC, 2, 256, device="cpu", dcp=dcp)
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(256, 128, generator=draw)
    cache = ks.IndexCache.empty(SPEC, pages=2, device="cpu")
    cache.append(keys[rank::2], torch.arange(128))
    query, scale = ks.quantize_query(SPEC, torch.randn(2, 8, 128, generator=draw))
    weights = ks.fold_weights(torch.rand(2, 8, generator=draw), scale, 1.0)
    lens = torch.tensor([256, 200], dtype=torch.int32)
    table = torch.tensor([[0, 1]] * 2, dtype=torch.int32)
    out = indexer(query, cache, weights, lens, table, positions=True)
    assert out.positions is not None
    return str(dcp.reason), dcp.path, out.positions.flatten().tolist()


def test_ranks_on_cpus_gather_and_say_why() -> None:
    results = run_ranks(2, _falls_back)
    assert [r.error for r in results] == [None, None]
    (reason, path, first), (_, _, second) = (r.value for r in results)
    assert "rank 0 on cpu" in reason
    assert path.startswith("all-gather of K candidates")
    assert first == second
    assert len(set(first[:64])) == 64


def _forced_off(_rank: int, _world: int) -> str:
    try:
        ks.DecodeIndexer(SPEC, 2, 256, device="cpu", dcp=ks.dcp.Exchange(gather=False))
    except ks.UnsupportedError as error:
        return str(error)
    return "no error"


def test_an_exchange_that_may_not_gather_is_refused_with_the_reason() -> None:
    for result in run_ranks(2, _forced_off):
        assert "rank 0 on cpu" in result.value


def test_outside_a_group_the_refusal_says_what_to_do() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ks.KeysieveError, match="init_process_group"):
        Exchange()


@pytest.mark.parametrize("reported", [False, True])
def test_memory_is_not_freed_once_a_merge_has_reported(reported: bool) -> None:
    """Freeing symmetric memory in a lost context ends the process, and nobody reads the error that is on its way."""
    ranks = virtual_ranks(["cpu"] * 2)
    for one in ranks:
        one.bind(SPEC, max_rows=2, max_context=300, device="cpu")
    memory = ranks[0].memory
    assert memory is not None
    block = weakref.ref(memory.block)
    if reported:
        memory.report.copy_(report(0, 3, 1, 17, 15, STAGE_WORDS, 4 << 16, 0, 100, 0, 17))
        with pytest.raises(ExchangeError, match="row 3, call 17"):
            ranks[0].raise_failure()
        with pytest.raises(ExchangeError, match="row 3, call 17"):
            ranks[0].check(torch.device("cpu"))
    else:
        ranks[0].raise_failure()
    del ranks, one, memory
    gc.collect()
    assert (block() is not None) == reported
