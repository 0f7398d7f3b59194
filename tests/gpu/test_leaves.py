"""The leaves of keysieve/device run on the device, against NumPy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import cases, poison

from keysieve import spec
from keysieve.device.report import REPORT_BYTES, SpinReport, decode_report
from keysieve.launch import arch_of


def run(name: str, device: torch.device, *args: int) -> None:
    import leaf_kernels

    _, arch = arch_of(device)
    leaf_kernels.compiled(name, arch)(*args, torch.cuda.current_stream(device).cuda_stream)
    torch.cuda.synchronize(device)


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).view(np.int32)).to(device)


def words(count: int, seed: int) -> np.ndarray:
    """Random words; words made of BF16 specials; small float32 and pairs of small BF16, whose sums are often exact."""
    rng = np.random.default_rng(seed)
    special = np.array(
        [0, 0x8000, 0x7F80, 0xFF80, 0x7F81, 0xFFC0, 0x3F80, 0x0001, 0x8001, 0x7F7F, 0x4049], dtype=np.uint32
    )
    pairs = rng.choice(special, count) | (rng.choice(special, count) << 16)
    small = (rng.integers(-2000, 2001, count) * np.exp2(rng.integers(-3, 4, count))).astype(np.float32).view(np.uint32)
    halves = [(rng.integers(-60, 61, count) * 0.25).astype(np.float32).view(np.uint32) >> 16 for _ in range(2)]
    choices = [rng.integers(0, 1 << 32, count), pairs, small, halves[0] | (halves[1] << 16)]
    return np.choose(np.arange(count) % 4, choices).astype(np.uint32)


def bf16(values: np.ndarray) -> np.ndarray:
    """Float64 values rounded to BF16 bits, nearest even (torch does the rounding from float32 exactly)."""
    return torch.from_numpy(values).to(torch.float32).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def equal(found: np.ndarray, expected: np.ndarray, nan: np.ndarray) -> None:
    """Bits equal where `nan` is false; there the expected result is a NaN of any payload, judged by the caller."""
    np.testing.assert_array_equal(found[~nan], expected[~nan])


def test_word_functions(device: torch.device) -> None:
    import leaf_kernels

    n = 100_000
    a, b, c = (words(n, seed) for seed in (1, 2, 3))
    names = list(leaf_kernels.WORD_FUNCTIONS)
    out = poison((len(names), n), torch.int32, device)
    held = [to_device(x, device) for x in (a, b, c)]
    run("words", device, *[x.data_ptr() for x in held], out.data_ptr(), n)
    found = dict(zip(names, out.cpu().numpy().view(np.uint32), strict=True))
    check_integers(found, a, b, c)
    check_floats(found, a, b, c)
    check_packed(found, a, b, c)


def check_integers(found: dict[str, np.ndarray], a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    key = np.array([spec.key16(x) for x in range(65536)], dtype=np.uint32)
    canonical = np.array([spec.canonical_bits(x) for x in range(65536)], dtype=np.uint32)
    np.testing.assert_array_equal(found["key16x2"], key[a & 0xFFFF] | (key[a >> 16] << 16))
    np.testing.assert_array_equal(found["canonical16"], canonical[a & 0xFFFF])
    np.testing.assert_array_equal(found["canonical_bf16x2"], canonical[a & 0xFFFF] | (canonical[a >> 16] << 16))
    maxima = np.maximum(a.view(np.uint16), b.view(np.uint16)).view(np.uint32)
    np.testing.assert_array_equal(found["max_u16x2"], maxima)
    pool = np.stack([a, b], axis=1).copy().view(np.uint8)
    picks = [np.take_along_axis(pool, ((c >> (4 * i)) & 7)[:, None].astype(np.int64), axis=1)[:, 0] for i in range(4)]
    np.testing.assert_array_equal(found["byte_perm"], np.stack(picks, axis=1).copy().view(np.uint32)[:, 0])


def check_floats(found: dict[str, np.ndarray], a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    x, y, z = (w.view(np.float32) for w in (a, b, c))
    canonical = np.array([spec.canonical_bits(v) for v in range(65536)], dtype=np.uint32)
    with np.errstate(all="ignore"):
        rounded = (
            torch.from_numpy(x.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        )
        nan = np.isnan(x)
        equal(found["bf16_bits"], rounded, nan)
        assert ((found["bf16_bits"][nan] & 0x7FFF) > 0x7F80).all()
        np.testing.assert_array_equal(found["logit_bits"], np.where(nan, 0xFFC0, canonical[rounded]))
        high = torch.from_numpy(y.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        equal(found["bf16x2_bits"], rounded | (high << 16), nan | np.isnan(y))
        for name, value in (("mul", x * y), ("mul_then_add", (x * y) + z)):
            equal(found[name], value.view(np.uint32), np.isnan(value))
            assert np.isnan(found[name].view(np.float32)[np.isnan(value)]).all(), name
        product = x.astype(np.float64) * y.astype(np.float64)
        total = product + z.astype(np.float64)
        exact = np.isfinite(total) & (total - product == z) & (total - z == product)
        equal(found["fma"], total.astype(np.float32).view(np.uint32), ~exact)
        assert exact.sum() > 10_000
        either = nan | np.isnan(y)
        assert np.isnan(found["max_nan"].view(np.float32)[either]).all()
        signed_zero = (x == 0) & (y == 0)
        equal(found["max_nan"], np.maximum(x, y).view(np.uint32), either | signed_zero)
        assert (found["max_nan"][signed_zero & (a != b)] == 0).all()  # of -0 and +0 the positive one
        equal(found["max_num"], np.fmax(x, y).view(np.uint32), (nan & np.isnan(y)) | signed_zero)


def check_packed(found: dict[str, np.ndarray], a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        x, y, z = (from_bf16(w.view(np.uint16)).astype(np.float64) for w in (a, b, c))
        product, total = x * y, x * y + z
        # float64 holds the product exactly; keep the sums it holds exactly too, and those float32 can pass on to BF16.
        sums = x + y
        single = sums.astype(np.float32).astype(np.float64) == sums
        packed = found["add_bf16x2"].view(np.uint16)
        equal(packed, bf16(sums), ~(np.isfinite(sums) & single))
        exact = (total - product == z) & (total - z == product) & (total.astype(np.float32).astype(np.float64) == total)
        equal(found["fma_bf16x2"].view(np.uint16), bf16(total), ~(np.isfinite(total) & exact))
        assert exact.sum() > 10_000
        assert single.sum() > 10_000
        lows = (np.isfinite(sums) & single)[0::2]
        np.testing.assert_array_equal(found["add_bf16"][lows], bf16(sums)[0::2][lows])
        assert (found["add_bf16"] >> 16 == 0).all()
        either = np.isnan(x) | np.isnan(y)
        both = found["max_nan_bf16x2"].view(np.uint16)
        assert np.isnan(from_bf16(both)[either]).all()
        zeros = (x == 0) & (y == 0)
        equal(both, bf16(np.maximum(x, y)), either | zeros)


def test_plain_operators_are_contracted(device: torch.device) -> None:
    """Why the pinned forms exist: `x * y + z` in device code is one rounding where the contract may count two."""
    rng = np.random.default_rng(9)
    x, y = (rng.standard_normal(256).astype(np.float32) for _ in range(2))
    z = -(x * y)
    out = poison((256,), torch.int32, device)
    held = [to_device(v, device) for v in (x, y, z)]
    run("contracted", device, *[v.data_ptr() for v in held], out.data_ptr())
    assert (out.cpu().numpy().view(np.float32) != (x * y) + z).any()


def digits_for(kind: str, bins: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(bins + count)
    if kind == "uniform":
        return rng.integers(0, bins, count)
    if kind == "one bin":
        return np.full(count, bins // 3)
    if kind == "ends":
        return rng.choice([0, bins - 1], count)
    return np.minimum((rng.random(count) ** 6 * bins).astype(np.int64), bins - 1)  # skewed


@cases(*[(bins, kind) for bins in (32, 256, 2048) for kind in ("uniform", "one bin", "ends", "skewed", "empty")])
def test_scans_and_digit_search(device: torch.device, case: tuple[int, str]) -> None:
    bins, kind = case
    digits = digits_for(kind, bins, 0 if kind == "empty" else 5000)
    values = np.random.default_rng(7).integers(0, 1 << 20, 256)
    ranks = np.array([1, 2, 31, 32, 33, 2048, 4999, 5000, 5001, 100_000, 0], dtype=np.int32)
    out = poison((257 + 3 * ranks.size,), torch.int32, device)
    held = [to_device(v.astype(np.int32), device) for v in (values, digits, ranks)]
    run(
        f"scans{bins}", device, held[0].data_ptr(), held[1].data_ptr(), digits.size, held[2].data_ptr(), ranks.size,
        out.data_ptr(),
    )  # fmt: skip
    found = out.cpu().numpy()
    np.testing.assert_array_equal(found[:256], np.concatenate([[0], np.cumsum(values)[:-1]]))
    assert found[256] == values.sum()
    histogram = np.bincount(digits, minlength=bins)
    for rank, answer in zip(ranks, found[257:].reshape(-1, 3), strict=True):
        assert tuple(answer) == search(histogram, int(rank)), (case, rank)


def search(histogram: np.ndarray, rank: int) -> tuple[int, int, int]:
    """The bin of the rank-th largest key, the keys above it, the keys in it; bin 0 when there are too few."""
    above = 0
    for digit in range(len(histogram) - 1, -1, -1):
        if digit == 0 or above + histogram[digit] >= rank:
            return digit, above, int(histogram[digit])
        above += int(histogram[digit])
    raise AssertionError("bin 0 always answers")


RINGS = ("ring3x1x2", "ring4x2x1", "ring7x7x1", "ring6x3x2", "ring1x1x1")


@cases(*[(name, tiles) for name in RINGS for tiles in (0, 1, 2, 3, 5, 64, 1001)])
def test_ring_delivers_every_tile(device: torch.device, case: tuple[str, int]) -> None:
    name, tiles = case
    source = to_device(words(256 * (tiles + 1), 11), device)
    out = poison((256 * (tiles + 1),), torch.int32, device)
    for _ in range(20):
        run(name, device, source.data_ptr(), out.data_ptr(), tiles)
        assert torch.equal(out[: 256 * tiles], source[: 256 * tiles])
        assert (out[256 * tiles :] == 0x5A5A5A5A).all()


@cases(1, 7, -1, 0x7FFFFFFF)
def test_tagged_pairs_arrive_whole(device: torch.device, case: int) -> None:
    slots = torch.zeros(256 * 4, dtype=torch.int32, device=device)
    out = poison((256, 2), torch.int32, device)
    report = torch.zeros(REPORT_BYTES, dtype=torch.uint8, pin_memory=True)
    run("pairs", device, slots.data_ptr(), out.data_ptr(), case, 1, 5_000_000_000, report.data_ptr())
    thread = np.arange(256, dtype=np.uint64)
    sent = ((thread * 2654435761 + (case & 0xFFFFFFFF)) & 0xFFFFFFFF).astype(np.uint32)
    found = out.cpu().numpy().view(np.uint32)
    np.testing.assert_array_equal(found[:, 0], sent)
    np.testing.assert_array_equal(found[:, 1], ~sent)
    assert decode_report(report.numpy().tobytes()) is None


LATE = """
import json, sys
sys.path[:0] = [{here!r}]
import torch, leaf_kernels
from keysieve.device.report import REPORT_BYTES, decode_report
from keysieve.launch import arch_of
slots = torch.zeros(1024, dtype=torch.int32, device="cuda")
out = torch.zeros(512, dtype=torch.int32, device="cuda")
report = torch.zeros(REPORT_BYTES, dtype=torch.uint8, pin_memory=True)
entry = leaf_kernels.compiled("pairs", arch_of("cuda")[1])
torch.cuda.synchronize()
entry(slots.data_ptr(), out.data_ptr(), 77, 0, 20_000_000, report.data_ptr(), torch.cuda.current_stream().cuda_stream)
try:
    torch.cuda.synchronize()
    error = ""
except Exception as failure:
    error = str(failure).splitlines()[0]
import dataclasses
found = decode_report(bytes(report.tolist()))
print(json.dumps([error, None if found is None else dataclasses.asdict(found), str(found)]), flush=True)
import os
os._exit(0)  # the context is gone: nothing can be freed
"""


def test_a_peer_that_never_answers_is_reported(device: torch.device) -> None:
    """The spin ends, says who waited for what, and traps. In a process of its own: a trap takes the context with it."""
    del device
    here = str(Path(__file__).resolve().parents[1] / "device")
    paths = [here, str(Path(here).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", LATE.format(here=here)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": ":".join(paths)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    error, found, _ = json.loads(done.stdout.splitlines()[-1])
    assert error, "the trap did not surface as an error"
    assert SpinReport(**found) == SpinReport(rank=3, row=0, source=5, expected=77, seen=0, stage=1)


def test_memory_leaves(device: torch.device) -> None:
    words_in = words(256, 21)
    held = to_device(words_in, device)
    out = poison((8, 64), torch.int32, device)
    counters = torch.zeros(8, dtype=torch.int32, device=device)
    run("memory", device, held.data_ptr(), out.data_ptr(), counters.data_ptr())
    found, counted = (t.cpu().numpy().view(np.uint32) for t in (out, counters))
    mine = words_in[:64]
    np.testing.assert_array_equal(found[0], (mine >> 16) | (mine << 16))
    np.testing.assert_array_equal(found[1], mine & 0xFFFF)
    np.testing.assert_array_equal(found[2].reshape(-1, 2), mine.reshape(-1, 2)[:, ::-1])
    np.testing.assert_array_equal(found[3].reshape(-1, 4), mine.reshape(-1, 4)[:, ::-1])
    np.testing.assert_array_equal(np.sort(found[4]), np.arange(64, 128))
    odd = (mine & 1).reshape(2, 32)
    ranks = np.cumsum(odd, axis=1) - odd
    np.testing.assert_array_equal(found[5].reshape(2, 32), ranks * 100 + odd.sum(axis=1, keepdims=True))
    sums = (mine & 0xFFFF).reshape(2, 32).sum(axis=1, keepdims=True, dtype=np.uint32)
    expected = np.broadcast_to(sums ^ mine.reshape(2, 32).max(axis=1, keepdims=True), (2, 32))
    np.testing.assert_array_equal(found[6].reshape(2, 32), expected)
    np.testing.assert_array_equal(found[7], mine ^ 1)
    assert counted.tolist() == [192, mine.max(), 0xFFFFFFFF, 128, mine.max(), 0xFFFFFFFF, 7, 0]


def test_blocks_of_a_cluster_share_memory(device: torch.device) -> None:
    thread = np.arange(64)
    for _ in range(50):
        out = poison((2, 64), torch.int32, device)
        sums = poison((2,), torch.int32, device)
        run("cluster", device, out.data_ptr(), sums.data_ptr())
        found = out.cpu().numpy()
        np.testing.assert_array_equal(found[0], (thread + 1000) * 10000 + thread)
        np.testing.assert_array_equal(found[1], thread * 10000 + thread + 1000)
        assert sums.tolist() == [2016, 2016]


def test_a_published_word_brings_what_was_written_before_it(device: torch.device) -> None:
    flag = torch.zeros(32, dtype=torch.int32, device=device)
    data = torch.zeros(256, dtype=torch.int32, device=device)
    report = torch.zeros(REPORT_BYTES, dtype=torch.uint8, pin_memory=True)
    want: Any = torch.arange(256, dtype=torch.int32, device=device)
    for value in range(1, 300):
        out = poison((256,), torch.int32, device)
        run("flag", device, flag.data_ptr(), data.data_ptr(), out.data_ptr(), value, report.data_ptr())
        assert torch.equal(out, want + value)
    assert decode_report(report.numpy().tobytes()) is None


@cases("chain_early", "chain_late")
def test_grid_wait_sees_what_the_kernel_before_wrote(device: torch.device, case: str) -> None:
    import leaf_kernels

    entry = leaf_kernels.compiled(case, arch_of(device)[1])
    data = torch.zeros(256, dtype=torch.int32, device=device)
    out = poison((256,), torch.int32, device)
    stream = torch.cuda.current_stream(device).cuda_stream
    want: Any = torch.arange(256, dtype=torch.int32, device=device)
    for value in range(200):
        entry(data.data_ptr(), out.data_ptr(), 1000 * value, 20_000 if value % 2 else 0, stream)
        assert torch.equal(out, want + 1000 * value), value
