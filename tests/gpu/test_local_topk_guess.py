"""Rows that two blocks share behind a guessed floor: guesses that hold, that do not, and where either ends."""

from __future__ import annotations

import test_local_topk as rows_of
import torch
from harness import cases

SHAPES = ((2, 512, 8), (2, 512, 4), (2, 1024, 4))
"""The first two guess; the last one counts the same rows key by key."""

LENS = (24577, 24575, 24569, 28672, 32768, 32767, 32761, 20000, 12289, 5000, 1216, 1217, 0)
LONG = (65536, 65535, 65529, 49153, 49152, 49145, 40961, 36865, 33000, 32769, 61441, 57345, 24577, 8193)
KINDS = (
    "gaussian", "high", "heavy", "outliers", "crowd", "crowd_behind", "alternate", "between_samples", "in_samples",
    "trend", "few_above", "ties", "runs", "relu", "infinite", "nan_mixed", "ladder", "equal",
    "near_zero", "at_zero", "below_zero", "negative", "one_octave", "steep", "steep_below", "tiny", "few_negative",
    "zeros", "level", "level_below", "level_rough", "level_in_half", "sample_high", "sample_amid",
)  # fmt: skip


AROUND = torch.tensor([1.54, 1.79, 2.09, 2.3, 2.55, 2.7, 3.3])
"""Of 32K and 64K keys 352, 1,216 and 2,048 are about so many deviations above the mean, or fewer."""


def in_sample(length: int, width: int, threads: int, device: torch.device) -> torch.Tensor:
    """Bool [width]: the keys of a row of `length` that both blocks look at first."""
    vector = torch.arange(width, device=device) // 8
    share = (length + 15) // 16
    rounds = (share + threads - 1) // threads
    return (vector % share) % (32 * max(rounds, 1)) < 32


def values(kind: str, rows: int, width: int, device: torch.device, seed: int) -> torch.Tensor:
    """BF16 [rows, width]: distributions that a guess from a sample meets."""
    g = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn((rows, width), generator=g, device=device)
    at = torch.arange(width, device=device)
    if kind == "high":
        x = x + 20
    elif kind == "heavy":
        x = x.abs() ** 6
    elif kind == "outliers":
        x[:, ::9001] = 1000.0
    elif kind == "crowd":
        x[:, 3000:4500] += 50
    elif kind == "crowd_behind":
        x[:, width // 2 + 100 : width // 2 + 1000] += 50
    elif kind == "alternate":
        x = x + 4 * (at // 64 % 7 == 0)
    elif kind == "between_samples":
        x = x + 3 * (at // 256 % 8 != 0)
    elif kind == "in_samples":
        x = x + 3 * (at // 256 % 8 == 0)
    elif kind == "trend":
        x = x + at / width * 6
    elif kind == "near_zero":  # of 32K and 64K keys 352, 1,216 and 2,048 reach about as much
        x = x - AROUND.to(device).repeat(rows)[:rows, None]
    elif kind == "zeros":  # about as many are positive
        x = (x - AROUND.to(device).repeat(rows)[:rows, None]).clamp_min(0)
    elif kind in ("level", "level_below"):
        above = x > AROUND.to(device).repeat(rows)[:rows, None]
        below = torch.rand((rows, width), generator=g, device=device) < 0.1
        level = 2.0 if kind == "level" else -0.375
        x = torch.where(above, level + x.abs(), torch.where(below, level - x.abs(), level))
    elif kind == "level_rough":  # three neighbouring values, and what lies above
        steps = torch.randint(0, 4, (rows, width), generator=g, device=device)
        above = x > AROUND.to(device).repeat(rows)[:rows, None]
        x = torch.where(above, 1.5 + x, 1 + steps.clamp_min(1) / 128)
    elif kind in ("sample_high", "sample_amid"):
        # What the sample shows as a plateau too few keys reach, or more than N lie above it, many bins.
        lens = LONG if width > 32768 else LENS
        inside = torch.stack([in_sample(max(lens[row % len(lens)], 16), width, 512, device) for row in range(rows)])
        rest = -x.abs() if kind == "sample_high" else torch.where(x > 1.5, torch.exp(8 * x), x - 20)
        x = torch.where(inside, torch.where(torch.arange(width, device=device) % 64 < 40, 0.5, -2.0), rest)
    elif kind == "level_in_half":
        x = torch.where(at < width // 2 + 77, x.clamp_min(1.0), -x.abs())
    elif kind == "at_zero":
        x = (x - 2.0) * (x > 2.3)
    elif kind == "below_zero":
        x = x - 3
    elif kind == "negative":
        x = -x.abs() - 0.01
    elif kind == "one_octave":
        x = -1.0 - torch.rand((rows, width), generator=g, device=device)
    elif kind == "steep":
        x = torch.exp(8 * x)
    elif kind == "steep_below":
        x = -torch.exp(8 * x)
    elif kind == "tiny":
        x = x * 1e-38
    elif kind == "few_negative":  # all others are the canonical NaN
        x = torch.where(torch.rand((rows, width), generator=g, device=device) < 0.2, -x.abs(), float("nan"))
    elif kind == "few_above":
        x = torch.where(
            torch.rand((rows, width), generator=g, device=device) < 1300 / max(width, 1), x.abs() + 4, -x.abs() - 1
        )
    elif kind == "ties":
        x = torch.round(x * 4) / 4
    elif kind == "runs":
        x = x.repeat_interleave(8, 1)[:, :width]
    elif kind == "infinite":
        x[torch.rand((rows, width), generator=g, device=device) < 0.01] = float("inf")
    elif kind == "nan_mixed":
        x[torch.rand((rows, width), generator=g, device=device) < 0.05] = float("nan")
    elif kind in ("relu", "ladder", "equal"):
        return VALUES(kind, rows, width, device, seed)
    return x.to(torch.bfloat16)


VALUES = rows_of.values


@cases(*[(*shape, kind) for shape in SHAPES for kind in KINDS])
def test_guessed_rows(device: torch.device, case: tuple[int, int, int, str]) -> None:
    *shape, kind = case
    lens = list(LONG if shape[1] * shape[2] == 4096 else LENS)
    rows_of.values = values
    try:
        for n, world in ((1216, 2), (352, 8), (2048, 2), (33, 3)):
            longest = [length * world for length in lens]  # rank 0 has a share each
            rows_of.run_push(device, kind, longest, n, world, 0, 1, 2**32 - 1 if n == 352 else 5, tuple(shape))
    finally:
        rows_of.values = VALUES


@cases(*SHAPES)
def test_guessed_rows_a_thousand_times(device: torch.device, case: tuple[int, int, int]) -> None:
    """The same words every time, from rows whose guesses hold and do not, side by side on a full chip."""
    lens = list(LONG if case[1] * case[2] == 4096 else LENS) * 5
    x = rows_of.canonicalize_(values("gaussian", len(lens), max(lens), device, 9))
    x[1::5, 3000:4500] += 50
    logits, lengths = rows_of.pitched(x, lens), torch.tensor(lens, dtype=torch.int32, device=device)
    expected, _ = rows_of.want(x, lens, 1216, 1)
    expected = expected.to(device)
    words = rows_of.poison(tuple(expected.shape), torch.int32, device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    run = rows_of.kernel(device, 1216, 1, True, case)
    for _ in range(1000):
        words.fill_(0x5A5A5A5A)
        run.push(logits, lengths, world=1, rank=0, interleave=1, words=words)
        wrong += (words != expected).sum()
    assert int(wrong) == 0
