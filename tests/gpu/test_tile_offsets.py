"""The tile prefix sum on the device against its plain PyTorch form."""

from __future__ import annotations

import torch
from harness import cases, poison

from keysieve.kernels.tile_offsets_config import (
    FLAG_TOO_LONG,
    INFO_EMPTY,
    INFO_REFUSED,
    INFO_SHORT,
    INFO_TILES,
    INFO_WORDS,
    KERNEL,
    TileOffsetsConfig,
)
from keysieve.launch import Launcher
from keysieve.reference.tile_offsets import tile_offsets

MAX_CONTEXT = 1 << 20


class Buffers:
    """Poisoned outputs with a canary behind each, on a device."""

    def __init__(self, requests: int, next_n: int, device: torch.device) -> None:
        self.requests, self.rows = requests, requests * next_n
        self.offsets = poison((requests + 1 + 8,), torch.int32, device)
        self.counts = poison((self.rows + 8,), torch.int32, device)
        self.info = poison((INFO_WORDS + 8,), torch.int32, device)
        self.flags = torch.zeros(64, dtype=torch.int32, device=device)

    def launch(self, launcher: Launcher, lens: torch.Tensor, topk: int, score_all: bool, chained: int = 0) -> None:
        launcher(
            *[x.data_ptr() for x in (lens, self.offsets, self.counts, self.info, self.flags)],
            *(self.requests, 0 if score_all else topk, topk, MAX_CONTEXT, chained),
        )

    def check(self, lens: torch.Tensor, next_n: int, topk: int, score_all: bool) -> None:
        want = tile_offsets(lens.cpu(), next_n, topk, MAX_CONTEXT, score_all=score_all)
        info = self.info.cpu()
        assert torch.equal(self.offsets[: self.requests + 1].cpu(), want.offsets)
        assert torch.equal(self.counts[: self.rows].cpu(), want.counts)
        assert info[INFO_TILES] == want.offsets[-1]
        found = tuple(int(info[i]) for i in (INFO_SHORT, INFO_EMPTY, INFO_REFUSED))
        assert found == (want.short, want.empty, want.refused)
        assert int(self.flags[0]) == (1 << FLAG_TOO_LONG if want.refused else 0)
        for tail in (self.offsets[self.requests + 1 :], self.counts[self.rows :], self.info[INFO_WORDS:]):
            assert (tail == 0x5A5A5A5A).all()


def lengths(kind: str, rows: int, seed: int, device: torch.device) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    if kind == "padding":
        return torch.full((rows,), -1, dtype=torch.int32, device=device)
    values = torch.randint(-3, 6000, (rows,), generator=g)
    if kind == "edges":
        edges = torch.tensor([0, 1, 127, 128, 129, 2047, 2048, 2049, MAX_CONTEXT, -(2**31), -1])
        values = edges[torch.randint(0, len(edges), (rows,), generator=g)]
    elif kind == "refused":
        values[torch.rand(rows, generator=g) < 0.2] = MAX_CONTEXT + 1
        values[-1:] = 2**31 - 1
    elif kind == "long":
        values = torch.randint(0, MAX_CONTEXT + 1, (rows,), generator=g)
    return values.to(torch.int32).to(device)


@cases(*[(r, n) for r in (0, 1, 3, 4, 5, 1023, 1024, 1025, 4095, 4096) for n in (1, 2, 3, 8)])
def test_matches_the_reference(device: torch.device, case: tuple[int, int]) -> None:
    requests, next_n = case
    launcher = Launcher(KERNEL, TileOffsetsConfig(next_n), device)
    for number, kind in enumerate(("random", "edges", "refused", "long", "padding")):
        for topk in (1, 2048):
            for score_all in (False, True):
                lens = lengths(kind, requests * next_n, number, device)
                buffers = Buffers(requests, next_n, device)
                buffers.launch(launcher, lens, topk, score_all)
                buffers.check(lens, next_n, topk, score_all)


def test_repeats_are_bit_equal(device: torch.device) -> None:
    launcher = Launcher(KERNEL, TileOffsetsConfig(2), device)
    lens = lengths("edges", 8192, 1, device)
    first = Buffers(4096, 2, device)
    first.launch(launcher, lens, 2048, False)
    for _ in range(2000):
        again = Buffers(4096, 2, device)
        again.launch(launcher, lens, 2048, False)
        assert torch.equal(again.offsets, first.offsets)
        assert torch.equal(again.counts, first.counts)
        assert torch.equal(again.info, first.info)


def test_chained_launches_see_the_lengths_written_just_before(device: torch.device) -> None:
    launcher = Launcher(KERNEL, TileOffsetsConfig(1), device)
    lens = torch.zeros(4096, dtype=torch.int32, device=device)
    buffers = Buffers(4096, 1, device)
    hog = torch.zeros(1 << 26, dtype=torch.uint8, device=device)
    for step in range(300):
        hog.add_(1)  # keeps memory busy, so that an early read would find the old lengths
        lens.copy_(lengths("random", 4096, step % 7, device))
        buffers.launch(launcher, lens, 2048, False, chained=1)
        if step % 10 == 0:
            buffers.check(lens, 1, 2048, False)
