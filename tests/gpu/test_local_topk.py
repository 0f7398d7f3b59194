"""Local top-N on the device: candidate rows bit for bit as the reference makes them, pushed and written."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from harness import cases, poison

from keysieve.kernels.flags import FLAG_BAD_LENGTH
from keysieve.kernels.local_topk_config import SHAPES, config_for
from keysieve.kernels.local_topk_host import LocalTopk
from keysieve.launch import Launcher
from keysieve.reference.dcp_maps import local_seq_lens
from keysieve.reference.keys import canonicalize_
from keysieve.reference.local_topk import local_topk
from keysieve.spec import candidate_words, index_planes, pitch_of

LENGTHS = [
    0, 1, 7, 31, 32, 33, 351, 352, 353, 400, 1215, 1216, 1217, 2047, 2048, 2049, 4095, 4096, 4097, 5000, 8191, 8192,
    8193, 9999, 16383, 16384, 16385, 20001, 32768, 32769, 40000, 65535, 65536, -5,
]  # fmt: skip
Shape = tuple[int, int, int]
KINDS = (
    "gaussian", "relu", "equal", "few", "specials", "nan", "wide", "ascending", "descending", "negative", "bursts",
    "ladder",
)  # fmt: skip
NS = (32, 352, 672, 1216, 2048, 2080, 4096)


@lru_cache(maxsize=64)
def kernel(
    device: torch.device, n: int, planes: int, push: bool, shape: Shape | None = None, given: bool = False
) -> LocalTopk:
    config = config_for(n, planes, push, shape, given)
    return LocalTopk(lambda k, c: Launcher(k, c, device), n=n, planes=planes, push=push, config=config)


def values(kind: str, rows: int, width: int, device: torch.device, seed: int) -> torch.Tensor:
    """BF16 [rows, width] of one kind; not canonical."""
    g = torch.Generator(device=device).manual_seed(seed)
    shape = (rows, width)
    x = torch.randn(shape, generator=g, device=device)
    if kind == "relu":
        x = (x - 1.5).clamp_min(0)
    elif kind == "equal":
        x = torch.full(shape, 3.25, device=device)
    elif kind == "few":
        x = torch.randint(0, 3, shape, generator=g, device=device).float()
    elif kind == "wide":  # all magnitudes
        bits = torch.randint(0, 1 << 16, shape, generator=g, device=device, dtype=torch.int32)
        return bits.to(torch.int16).view(torch.bfloat16)
    elif kind == "ascending":
        x = torch.arange(width, device=device).float().expand(shape) / 64
    elif kind == "descending":
        x = -torch.arange(width, device=device).float().expand(shape) / 64
    elif kind == "negative":
        x = -x.abs() - 1
    elif kind == "bursts":  # whole vectors of huge keys among small ones: the bound lies far below the threshold
        high = torch.rand((rows, -(-width // 8)), generator=g, device=device) < 0.03
        x = torch.where(high.repeat_interleave(8, 1)[:, :width], x.abs() * 2.0**60 + 1e30, x.abs() * 2.0**-60)
    elif kind == "ladder":  # octaves: every value far from the next
        x = torch.exp2(torch.randint(-120, 120, shape, generator=g, device=device).float())
    x = x.to(torch.bfloat16)
    if kind == "specials":
        pick = torch.rand(shape, generator=g, device=device)
        for i, value in enumerate((float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-39)):
            x[(pick > 0.1 * i) & (pick < 0.1 * i + 0.08)] = value
        bits = x.view(torch.int16)
        bits[(pick > 0.95) & (pick < 0.97)] = 0x7F81  # a NaN that is not the canonical one
    elif kind == "nan":
        x[:] = float("nan")
        x[:, ::37] = 1.0
    return x


def pitched(x: torch.Tensor, lens: list[int], fill: float = float("nan")) -> torch.Tensor:
    """Rows at a pitch that is a multiple of 512, filled past their lengths."""
    rows, width = x.shape
    out = torch.full((rows, pitch_of(width)), fill, dtype=torch.bfloat16, device=x.device)
    for t, n in enumerate(lens):
        out[t, : max(n, 0)] = x[t, : max(n, 0)]
    return out


def maxima_of(x: torch.Tensor, lens: list[int]) -> torch.Tensor:
    """What the scorer writes beside pitched logits: key16 of the largest of every 8 keys; elsewhere, the largest."""
    bits = x.view(torch.int16).int() & 0xFFFF
    keys = torch.where(bits >= 0x8000, bits ^ 0xFFFF, bits ^ 0x8000)
    for t, n in enumerate(lens):
        keys[t, max(n, 0) :] = 0
    tops = keys.view(len(lens), -1, 8).amax(2)
    for t, n in enumerate(lens):
        tops[t, -(-max(n, 0) // 8) :] = 0xFFFF
    return tops.to(torch.int16)


def want(x: torch.Tensor, lens: list[int], n: int, planes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return local_topk(x.cpu(), torch.tensor(lens, dtype=torch.int32), n, planes)


def run_plain(device: torch.device, x: torch.Tensor, lens: list[int], n: int, planes: int) -> None:
    rows, size = len(lens), candidate_words(n, planes)
    memory = poison((rows, size + 3), torch.int32, device)
    counts = poison((rows + 1,), torch.int32, device)
    flags = torch.zeros(1, dtype=torch.int32, device=device)
    lengths = torch.tensor([[v, 9] for v in lens], dtype=torch.int32, device=device)[:, 0]
    kernel(device, n, planes, False).topk(x, lengths, words=memory[:, :size], counts=counts, flags=flags)
    words, number = want(x, lens, n, planes)
    got = memory[:, :size].cpu()
    for t, length in enumerate(lens):
        wrong = int((got[t] != words[t]).sum())
        assert wrong == 0, f"row {t} of {length} keys, n {n}: {wrong} words differ"
    assert torch.equal(counts[:rows].cpu(), number)
    assert bool((memory[:, size:] == 0x5A5A5A5A).all()), "written beyond the words"
    assert int(counts[rows]) == 0x5A5A5A5A, "written beyond the counts"
    assert int(flags) == 0


class Slots:
    """A stand-in for an exchange's memory: every rank's block is a tensor of this device."""

    def __init__(self, device: torch.device, world: int, max_rows: int, n: int, planes: int, start: int) -> None:
        self.pairs = -(-candidate_words(n, planes) // 2) + 1
        self.world, self.max_rows = world, max_rows
        self.offset = 256
        shape = (world, self.offset // 4 + 2 * world * max_rows * self.pairs * 4 + 64)
        self.blocks = poison(shape, torch.int32, device)
        base, step = self.blocks.data_ptr(), 4 * self.blocks.stride(0)
        addresses = [base + step * r for r in range(world)] + [0] * (16 - world)
        self.peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.epoch = torch.tensor([start] * max_rows, dtype=torch.int64, device=device).to(torch.int32)
        self.tag = (start + 1) & 0xFFFFFFFF

    def slots(self) -> torch.Tensor:
        """int32 [blocks, parity, source, row, pair, 4]."""
        size = 2 * self.world * self.max_rows * self.pairs * 4
        inner = self.blocks[:, self.offset // 4 : self.offset // 4 + size]
        return inner.reshape(self.world, 2, self.world, self.max_rows, self.pairs, 4)


def run_push(
    device: torch.device,
    kind: str,
    lens: list[int],
    n: int,
    world: int,
    rank: int,
    interleave: int,
    start: int,
    shape: Shape | None = None,
    given: bool = False,
) -> None:
    rows = len(lens)
    lengths = torch.tensor(lens, dtype=torch.int32)
    local = local_seq_lens(lengths, world, rank, interleave).tolist()
    width = max(max(local), 1)
    planes = index_planes(width)
    x = canonicalize_(values(kind, rows, width, device, 3))
    memory = Slots(device, world, rows + 2, n, planes, start)
    words = poison((rows, candidate_words(n, planes)), torch.int32, device)
    logits = pitched(x, local)
    kernel(device, n, planes, True, shape, given).push(
        logits, lengths.to(device), tops=maxima_of(logits, local) if given else None, world=world, rank=rank,
        interleave=interleave, peers=memory.peers, slots=memory.offset, max_rows=rows + 2, epoch=memory.epoch, site=77,
        words=words,
    )  # fmt: skip
    expected, _ = want(x, local, n, planes)
    assert torch.equal(words.cpu(), expected)
    found = memory.slots().cpu()
    parity = memory.tag & 1
    tag = memory.tag - (1 << 32) if memory.tag >> 31 else memory.tag
    padded = torch.nn.functional.pad(expected, (0, expected.shape[1] % 2)).view(rows, -1, 2)
    for block in range(world):
        mine = found[block, parity, rank, :rows]
        assert torch.equal(mine[:, :-1, 0::2], padded), f"block {block}"
        assert bool((mine[..., 1::2] == tag).all()), "every half has the call's tag"
        assert torch.equal(mine[:, -1, 0], torch.full((rows,), rows << 16 | 77, dtype=torch.int32))
        assert torch.equal(mine[:, -1, 2], lengths.clamp_min(0))
    size = 2 * world * (rows + 2) * memory.pairs * 4
    inner = memory.blocks[:, memory.offset // 4 : memory.offset // 4 + size]
    inner.view(world, 2, world, rows + 2, memory.pairs, 4)[:, parity, rank, :rows] = 0x5A5A5A5A
    assert bool((memory.blocks == 0x5A5A5A5A).all()), "written beyond the row's own slots"


@cases(*KINDS)
def test_any_values_and_lengths(device: torch.device, case: str) -> None:
    """Planes choose the kernel: 1 to 3 go through vectors' maxima, more through a list of keys."""
    x = values(case, len(LENGTHS), max(LENGTHS), device, 5)
    for n, planes in ((352, 1), (1216, 1), (352, 4), (1216, 3), (1216, 4)):
        run_plain(device, x, LENGTHS, n, planes)


@cases(*NS)
def test_any_n(device: torch.device, case: int) -> None:
    lens = [case - 1, case, case + 1, 2 * case, 9 * case + 5, 8 * case, 30_000, 65_536, 0, 12_345]
    for kind in ("gaussian", "relu", "few"):
        run_plain(device, values(kind, len(lens), max(lens), device, case), lens, case, 1)
        run_plain(device, values(kind, len(lens), max(lens), device, case + 1), lens, case, 5)


@cases("gaussian", "relu", "specials", "equal", "bursts")
def test_long_rows_have_planes(device: torch.device, case: str) -> None:
    lens = [65_536, 65_537, 131_072, 131_073, 300_001, 524_288, 70_000, 5]
    x = values(case, len(lens), max(lens), device, 8)
    run_plain(device, x, lens, 1216, index_planes(max(lens)))
    run_plain(device, x, lens, 352, 6)
    run_plain(device, x[:1, :200_000], [199_999], 2048, 10)


@cases(2048, 4096)
def test_pushed_rows_of_every_path(device: torch.device, case: int) -> None:
    """Pushed words of short, long and very long rows, at the N classes' ends, with few and with many planes."""
    for kind in ("gaussian", "few", "bursts"):
        run_push(device, kind, [66_000, 65_537 * 2, 150_000, 9_000, 20_000, 70_001], case, 2, 1, 1, 5)
        run_push(device, kind, [900_000, 1_048_576, 300_000, 5, 66_000], case, 2, 0, 64, 5)
    run_push(device, "relu", [1_100_000, 64_000, 33], case, 2, 0, 64, 5)


@cases(*KINDS)
def test_pushed_rows_whose_maxima_are_given(device: torch.device, case: str) -> None:
    """Rows about what registers hold of keys, of maxima, and about what shared memory holds of these."""
    lens = [*LENGTHS, 65_528, 65_529, 60_000, 33_333, 36_865]
    run_push(device, case, lens, 1216, 1, 0, 1, 7, given=True)
    run_push(device, case, [2 * x for x in lens], 352, 2, 1, 1, 2**32 - 1, given=True)
    run_push(device, case, lens, 33, 1, 0, 1, 8, given=True)
    run_push(device, case, [70_001, 131_072, 65_537, 66_000, 9], 1216, 1, 0, 1, 5, given=True)
    run_push(device, case, [300_001, 524_288, 65_000], 2048, 1, 0, 1, 5, given=True)


@cases(2080, 4096)
def test_large_n_of_rows_whose_maxima_are_given(device: torch.device, case: int) -> None:
    for kind in ("gaussian", "few", "specials", "bursts"):
        run_push(device, kind, [65_536, 40_000, 32_769, 32_768, 4096], case, 1, 0, 1, 5, given=True)
        run_push(device, kind, [131_072, 65_537, 100_001], case, 1, 0, 1, 5, given=True)


@cases(
    *[(world, rank, s) for world, rank, s in ((2, 0, 1), (2, 1, 64), (3, 2, 16), (8, 5, 1), (16, 15, 64), (16, 0, 1))]
)
def test_push_reaches_every_rank(device: torch.device, case: tuple[int, int, int]) -> None:
    world, rank, interleave = case
    lens = [0, 1, 100, -3, 5_000, 16_384, 131_072, 40_001, 9_999, 64]
    for n, start in ((352, 0), (1216, 41), (96, 2**32 - 1), (33, 2**31 - 1)):
        run_push(device, "relu" if n == 352 else "gaussian", lens, n, world, rank, interleave, start)
    run_push(device, "few", [300_000, 10, 0], 64, world, rank, interleave, 6)


SHARED = [
    4096, 4097, 8192, 8193, 9_001, 16_384, 16_385, 20_001, 32_768, 32_769, 40_007, 65_536, 65_537, 65_560, 0, 33, 1_217,
    12_345,
]  # fmt: skip
"""Local lengths about what is shared, and about what the registers of some blocks hold."""


def held(shape: Shape, lens: list[int]) -> list[int]:
    """Those of the lengths that the blocks' registers hold, and the longest one of these."""
    limit = config_for(1, 1, True, shape).keys
    return [min(limit, max(lens)), *(x for x in lens if x <= limit)]


@cases(*[(*shape, kind) for shape in SHAPES for kind in KINDS])
def test_rows_that_registers_hold(device: torch.device, case: tuple[int, int, int, str]) -> None:
    """Any values: the threshold within reach of the best key, and not (then all keys are counted in two digits)."""
    shape, kind = case[:3], case[3]
    lens = held(shape, SHARED)
    run_push(device, kind, lens, 1216, 1, 0, 1, 7, shape)
    run_push(device, kind, [2 * x for x in lens], 33, 2, 1, 1, 2**32 - 1, shape)
    run_push(device, kind, lens, 2048, 1, 0, 1, 8, shape)


@cases(*[shape for shape in SHAPES if shape[0] == 8 or shape[1:] in ((512, 2), (512, 8))])
def test_large_n_of_rows_that_registers_hold(device: torch.device, case: Shape) -> None:
    for kind in ("gaussian", "few", "specials"):
        run_push(device, kind, held(case, SHARED), 4096, 1, 0, 1, 8, case)


@cases(*[shape for shape in SHAPES if shape[0] == 8])
def test_long_rows_shared_by_blocks(device: torch.device, case: Shape) -> None:
    """Indices of more than 16 bits, whose planes are everybody's."""
    for kind, n in (("gaussian", 1216), ("relu", 352), ("few", 33), ("gaussian", 97)):
        run_push(device, kind, held(case, [131_072, 70_001, 66_001, 100_003, 65_537, 9_000]), n, 1, 0, 1, 5, case)
        run_push(device, kind, held(case, [262_144, 262_143, 66_000]), n, 1, 0, 1, 5, case)


@cases(*SHAPES)
def test_held_rows_a_thousand_times(device: torch.device, case: Shape) -> None:
    lens = held(case, [16_384, 30_000, 65_536, 8_193, 8_000, 100, 0, 40_000])
    for kind in ("gaussian", "relu"):
        x = pitched(canonicalize_(values(kind, len(lens), max(lens), device, 4)), lens)
        wanted, _ = want(x, lens, 1216, 1)
        lengths = torch.tensor(lens, dtype=torch.int32, device=device)
        differs, wanted = torch.zeros((), dtype=torch.int64, device=device), wanted.to(device)
        words = torch.empty_like(wanted)
        for _ in range(1000):
            words.fill_(7)
            kernel(device, 1216, 1, True, case).push(x, lengths, world=1, rank=0, interleave=1, words=words)
            differs += (words != wanted).sum()
        assert int(differs) == 0


@cases(*[shape for shape in SHAPES if shape[1] * shape[2] <= 1024])
def test_rows_beyond_the_registers_are_faults(device: torch.device, case: Shape) -> None:
    """A kernel for rows that registers hold makes a longer one empty."""
    limit = config_for(352, 1, True, case).keys
    lens = [limit + 1, limit, 9]
    x = pitched(canonicalize_(values("gaussian", 3, limit + 1, device, 4)), lens)
    words = poison((3, candidate_words(352, 1)), torch.int32, device)
    flags = torch.zeros(1, dtype=torch.int32, device=device)
    lengths = torch.tensor(lens, dtype=torch.int32, device=device)
    kernel(device, 352, 1, True, case).push(x, lengths, world=1, rank=0, interleave=1, words=words, flags=flags)
    assert int(flags) == 1 << FLAG_BAD_LENGTH
    assert torch.equal(words.cpu(), want(x, [0, limit, 9], 352, 1)[0])


def test_faults_leave_rows_empty_and_raise_flags(device: torch.device) -> None:
    x = values("gaussian", 4, 5_000, device, 1)
    words = poison((4, candidate_words(352, 1)), torch.int32, device)
    flags = torch.zeros(1, dtype=torch.int32, device=device)
    lens = torch.tensor([5_000, 5_001, 4_000, 2**31 - 1], dtype=torch.int32, device=device)
    kernel(device, 352, 1, False).topk(x, lens, words=words, flags=flags)
    assert int(flags) == 1 << FLAG_BAD_LENGTH
    assert torch.equal(words.cpu(), want(x, [5_000, 0, 4_000, 0], 352, 1)[0])
    flags.zero_()
    kernel(device, 352, 1, False).topk(x, lens[:1], words=words, flags=flags, limit=4_999)
    assert int(flags) == 1 << FLAG_BAD_LENGTH
    assert not bool(words[0].any())


@cases((1, 0), (3, 1), (8, 0), (5, 7))
def test_rows_at_any_address(device: torch.device, case: tuple[int, int]) -> None:
    extra, at = case
    lens = [9_001, 0, 4_321, 353]
    memory = torch.full((at + 4 * (9_001 + extra),), float("inf"), dtype=torch.bfloat16, device=device)
    x = memory[at:].view(4, 9_001 + extra)[:, :9_001]
    x.copy_(values("specials", 4, 9_001, device, 2))
    run_plain(device, x, lens, 352, 1)


def test_a_thousand_times_the_same(device: torch.device) -> None:
    lens = [16_384, 30_000, 5_000, 65_536, 1_217, 8_192, 100, 0]
    for kind in ("gaussian", "relu", "bursts"):
        x = canonicalize_(values(kind, len(lens), max(lens), device, 4))
        first, lengths = None, torch.tensor(lens, dtype=torch.int32, device=device)
        differs = torch.zeros((), dtype=torch.int64, device=device)
        use: Any = kernel(device, 1216, 1, False)
        for _ in range(1000):
            words = torch.empty(len(lens), candidate_words(1216, 1), dtype=torch.int32, device=device)
            use.topk(x, lengths, words=words)
            if first is None:
                first = words
            differs += (words != first).sum()
        assert int(differs) == 0
