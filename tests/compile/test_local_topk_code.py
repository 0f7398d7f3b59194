"""The local top-N as compiled code: limits of the chip, the instructions that matter, what a call launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keysieve.compile.build import build
from keysieve.kernels.base import ARCHS, MAX_BLOCK_SHARED, Kernel
from keysieve.kernels.local_topk_config import LOCAL_PUSH, LOCAL_TOPK, LocalMap, LocalTopkConfig, config_for
from keysieve.kernels.local_topk_host import LocalTopk, on_vectors

ARGUMENTS = 26  # of the entry, without the stream


@pytest.mark.parametrize("kernel", [LOCAL_PUSH, LOCAL_TOPK], ids=lambda kernel: kernel.name)
def test_every_shared_memory_map_is_sound(kernel: Kernel) -> None:
    for config in kernel.admitted("sm_90a"):
        places = LocalMap.of(config)
        assert config.shared_bytes == places.total <= MAX_BLOCK_SHARED
        offsets = [
            places.first, places.second, places.low, places.cleared, places.found, places.sums, places.words,
            places.tops, places.list, places.list_tops, places.maxima, places.received, places.floors, places.total,
        ]  # fmt: skip
        assert offsets == sorted(offsets)
        assert all(place % 16 == 0 for place in offsets)
        if config.longer:
            assert config.share * config.threads == config.listed >= 2 * config.n_class
            assert not config.room or config.threads * config.held >= config.n_class, "listed vectors fit registers"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", [LOCAL_PUSH, LOCAL_TOPK], ids=lambda kernel: kernel.name)
def test_code(kernel: Kernel, arch: str) -> None:
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
    config = config_for(1216 if arch == "sm_90a" else 4096, 1, kernel is LOCAL_PUSH)
    facts = build(kernel, config, arch).facts
    (code,) = facts.kernels
    assert code.frame_bytes == code.stack_bytes == 0
    assert code.threads == (config.threads, 1, 1)
    assert code.registers * config.threads <= 65536
    (launch,) = facts.launches
    assert launch.dynamic_shared == "run time"
    assert launch.programmatic == "run time"
    assert facts.count(r"griddepcontrol\.wait") == 2, "settled lengths are read before it, others after"
    assert facts.count(r"atom\.") == 0, "no atomic's result may decide a position"
    assert facts.count(r"red\.(relaxed\.gpu\.)?global") == 1, "the flag word only"
    pushes = facts.count(r"st\.relaxed\.sys\.global\.v2\.b64")
    assert (pushes > 0) == config.push
    assert facts.count(r"fence\.|membar") == 0, "a tagged pair needs no fence"


class Recorder:
    """Stands for a launcher: keeps what was launched with which configuration."""

    def __init__(self) -> None:
        self.calls: list[tuple[LocalTopkConfig, tuple[int, ...]]] = []

    def make(self, kernel: Kernel, config: LocalTopkConfig) -> Any:
        assert config in list(kernel.admitted("sm_90a"))
        return lambda *args: self.calls.append((config, args))


def test_a_push_passes_what_the_entry_takes() -> None:
    seen = Recorder()
    use = LocalTopk(seen.make, n=352, planes=2, push=True)
    logits = torch.zeros(3, 1024, dtype=torch.bfloat16)
    lens = torch.tensor([5, 6, 7], dtype=torch.int32)
    peers, epoch = torch.zeros(16, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    use.push(
        logits, lens, world=8, rank=3, interleave=64, peers=peers, slots=256, max_rows=4, epoch=epoch, site=9,
        limit=9000, local_limit=4096, settled=True, release=True, chained=True,
    )  # fmt: skip
    ((config, args),) = seen.calls
    assert (config.push, config.n_class, len(args)) == (True, 2048, ARGUMENTS)
    assert args[1:3] == (0, 1024)
    assert args[4:10] == (1, 3, 352, 2, 9000, 1024), "a row cannot have more keys than columns"
    assert args[10:13] == (0, 0, 0)
    assert args[13:21] == (peers.data_ptr(), 256, 4, 8, 3, 64, epoch.data_ptr(), 9)
    assert args[21:] == (0, 1, 1, 1, config.shared_bytes)
    use.push(logits, lens[:0], world=8, rank=3, interleave=64)
    assert len(seen.calls) == 1, "no rows, no launch"


def test_maxima_are_taken_where_rows_are_long_and_blocks_alone() -> None:
    """And where they stay in L2 beside the logits, or few vectors are read again."""
    seen = Recorder()
    tops = torch.zeros(8, 64, dtype=torch.int16)

    def made(n: int, keys: int, planes: int = 2, given: bool = True) -> LocalTopk:
        return LocalTopk(seen.make, n=n, planes=planes, push=True, keys=keys, sms=132, given=given)

    for n, keys, taken in (
        (352, 32_768, range(0)),
        (352, 32_769, range(67, 140)),
        (352, 131_072, range(13, 140)),
        (1216, 65_536, range(0)),
        (2080, 65_536, range(25, 49)),
        (1216, 1 << 19, range(1, 7)),
    ):
        assert [rows for rows in range(1, 140) if made(n, keys).takes_maxima(rows)] == list(taken), (n, keys)
    use = made(352, 65_536)
    logits, lens = torch.zeros(70, 8, dtype=torch.bfloat16), torch.zeros(70, dtype=torch.int32)
    use.push(logits, lens, tops=tops, world=1, rank=0, interleave=1)
    ((config, args),) = seen.calls
    assert config == use.serves(70)
    assert config.given
    assert args[1] == tops.data_ptr()
    assert not made(2080, 65_536, planes=4).takes_maxima(30), "no room for maxima"
    assert not made(2080, 65_536, given=False).takes_maxima(30)


@pytest.mark.parametrize("sms", [16, 60, 78, 132])
@pytest.mark.parametrize("n", [352, 1216])
def test_every_number_of_rows_has_a_configuration(sms: int, n: int) -> None:
    """On small GPUs and parts of one as well: maxima may be taken for more rows than there are multiprocessors."""
    for keys in (4_096, 32_776, 49_152, 65_536, 131_072, 1 << 19):
        use = LocalTopk(Recorder().make, n=n, planes=2, push=True, keys=keys, sms=sms, given=True)
        for rows in (*range(1, 300), 1_000, 100_000):
            assert use.serves(rows).given == use.takes_maxima(rows)


def test_rows_off_16_bytes_are_copied_first() -> None:
    seen = Recorder()
    use = LocalTopk(seen.make, n=4096, planes=1, push=False)
    memory = torch.zeros(4096, dtype=torch.bfloat16)
    lens = torch.tensor([[5, 0], [6, 0]], dtype=torch.int32)[:, 0]
    words = torch.zeros(2, 4300, dtype=torch.int32)[:, :4224]
    for at, pitch, width, direct in (
        (0, 1024, 1000, True),
        (8, 1024, 1001, True),
        (1, 1024, 8, False),
        (0, 1023, 9, False),
    ):
        logits = memory[at : at + 2 * pitch].view(2, pitch)[:, :width]
        assert on_vectors(logits) == direct
        use.topk(logits, lens, words=words)
        _, args = seen.calls[-1]
        assert len(args) == ARGUMENTS
        assert (args[0] == logits.data_ptr()) == direct
        assert args[2] == (1024 if direct else -(-width // 8) * 8)
        assert (args[4], args[9], args[11]) == (2, width, 4300)
    assert not on_vectors(memory[:4095].clone().view(1, 4095)), "the last vector would be read past the memory"
