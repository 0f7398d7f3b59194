"""The demo: it runs, it notices when a selection is wrong, and its verifier is right for reasons of its own."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import keysieve as ks
from clients.test_selection import FORMATS
from keysieve.cli import demo
from keysieve.demo import pictures, recorder, verify
from keysieve.demo.model import read_text
from keysieve.demo.run import Settings
from keysieve.demo.run import run as run_demo

SMALL = ("--bytes", "120", "--steps", "20", "--topk", "48")


def command_line(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers())
    args = parser.parse_args(["demo", *arguments])
    code: int = args.run(args)
    return code


def test_it_runs_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(*SMALL, "--out", str(tmp_path / "new")) == 0
    shown = capsys.readouterr().out
    for expected in ("mismatches", "keys scored", "time in score", "kept_positions.png", "logits_and_ties.png"):
        assert expected in shown
    for name in ("kept_positions.png", "logits_and_ties.png"):
        image = (tmp_path / "new" / name).read_bytes()
        assert image.startswith(b"\x89PNG")
        assert len(image) > 20_000


@pytest.mark.parametrize("key_format", FORMATS)
def test_its_counts_add_up(key_format: str) -> None:
    """150 bytes, three indexing layers of four, topk 48: everything that can be counted by hand."""
    seen: list[int] = []
    settings = Settings(read_text(None)[:150], steps=10, topk=48, key_format=key_format)
    result = run_demo(settings, lambda done, _: seen.append(done))
    totals = result.totals
    assert totals.clean
    assert totals.rows == totals.verified == 3 * 150
    assert totals.scored == 3 * 150 * 151 // 2
    assert totals.selected == 3 * (48 * 49 // 2 + 48 * 102)
    assert totals.attended == 4 * 150
    assert seen == [128, *range(140, 151)]
    assert sorted(result.layers) == [0, 1, 3]
    for trace in result.layers.values():
        assert [len(chosen) for chosen in trace.chosen] == [48] * 10
        assert len(trace.ties) == 10
        assert len(trace.logits) == 150


def test_another_text_and_an_unreadable_one(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(bytes(range(256)))
    assert (
        command_line("--text", str(path), "--bytes", "80", "--steps", "8", "--topk", "64", "--out", str(tmp_path)) == 0
    )
    with pytest.raises(ks.KeysieveError, match="--text"):
        command_line("--text", str(tmp_path / "missing"))
    with pytest.raises(ks.KeysieveError, match="--steps"):
        command_line("--text", str(path), "--bytes", "300", "--steps", "256")


# Each stands for a fault in what is verified: a key too few, a neighbour, the wrong end of a tie, another order.
FAULTS: dict[str, Any] = {
    "one key dropped": lambda p: torch.cat([p[:, :-1], torch.full_like(p[:, :1], -1)], 1),
    "two keys swapped": lambda p: torch.cat([p[:, 1:2], p[:, :1], p[:, 2:]], 1),
    "a key replaced": lambda p: torch.where(p == p[:, -1:], (p + 1).clamp(max=60), p),
}


def break_topk(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Make the public top-k wrong in one place, for decoding steps."""
    real = recorder.topk

    def wrong(logits: torch.Tensor, lengths: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions, counts = real(logits, lengths, k)
        return (FAULTS[fault](positions) if len(positions) == 1 else positions), counts

    monkeypatch.setattr(recorder, "topk", wrong)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_selection_is_counted(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_topk(monkeypatch, fault)
    totals = run_demo(Settings(read_text(None)[:70], steps=6, topk=48)).totals
    assert totals.mismatches == 3 * 6
    assert totals.verified == 3 * 70
    assert not totals.clean


def test_a_wrong_selection_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_topk(monkeypatch, "one key dropped")
    assert command_line(*SMALL, "--out", str(tmp_path)) == 1


def test_an_attention_that_strays_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is handed one id that keysieve did not select: caught by its attention weights."""
    real = recorder.Recorder.__call__

    def astray(self: recorder.Recorder, step: Any) -> tuple[torch.Tensor, torch.Tensor]:
        positions, counts = real(self, step)
        missing = sorted(set(range(step.longest)) - set(positions[-1].tolist()))
        if len(positions) == 1 and missing:
            positions = positions.clone()
            positions[0, 0] = missing[0]
        return positions, counts

    monkeypatch.setattr(recorder.Recorder, "__call__", astray)
    totals = run_demo(Settings(read_text(None)[:100], steps=10, topk=48)).totals
    assert totals.mismatches == 0
    assert totals.strays > 0
    assert not totals.clean


# --- the verifier --------------------------------------------------------------------------------------------------


def test_its_code_tables_are_the_formats_own() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3 = codes.view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(verify._E4M3, e4m3)
    e8m0 = codes.view(torch.float8_e8m0fnu).double().numpy()
    np.testing.assert_array_equal(verify._UE8M0, e8m0)
    np.testing.assert_array_equal(verify._E2M1[:8], [0, 0.5, 1, 1.5, 2, 3, 4, 6])
    np.testing.assert_array_equal(verify._E2M1[8:], -verify._E2M1[:8])


def test_its_rounding_is_torchs_bfloat16() -> None:
    """Random bits, with every special value among them, and all halfway cases of one exponent."""
    random = torch.randint(-(2**31), 2**31, (1 << 17,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    halves = torch.arange(1 << 8, dtype=torch.int32) * 0x8000 + 0x3F800000
    x = torch.cat([random, halves, torch.tensor([0x7F7FFFFF, 0x7F800000, -0x800000, -(2**31), 0], dtype=torch.int32)])
    rounded = x.view(torch.float32).to(torch.bfloat16)
    want = rounded.view(torch.int16).numpy().view(np.uint16).copy()
    want[np.isnan(rounded.float().numpy())] = 0xFFC0
    want[want == 0x8000] = 0
    np.testing.assert_array_equal(verify.bf16_bits(x.view(torch.float32).numpy()), want)


@pytest.mark.parametrize("key_format", FORMATS)
def test_its_logits_are_the_public_scores(key_format: str) -> None:
    """From random keys, through the pages, to bits; with a zero key and heads of both signs."""
    spec = ks.IndexerSpec(heads=8, topk=16, key_format=key_format)
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(150, 128, generator=generator) * torch.logspace(-3, 3, 150)[:, None]
    keys[7] = 0
    cache = ks.IndexCache.empty(spec, pages=5)
    table = torch.tensor([[4, 0, 2]], dtype=torch.int32)
    cache.append(keys, table[0].long()[torch.arange(150) // 64] * 64 + torch.arange(150) % 64)
    query, q_scale = ks.quantize_query(spec, torch.randn(3, 8, 128, generator=generator))
    weights = ks.fold_weights(torch.randn(3, 8, generator=generator), q_scale, 128**-0.5)
    public = ks.score(spec, query, cache, weights, torch.tensor([150, 150, 150], dtype=torch.int32), table, max_len=150)
    codes, words = query if isinstance(query, tuple) else (query, None)
    decoded = verify.decode_query(codes.view(torch.uint8).numpy(), None if words is None else words.numpy())
    stored = verify.Pool(cache.data.numpy(), key_format).keys(table[0].numpy().astype(np.int64), 150)
    own = verify.logits(decoded, weights.numpy(), *stored)
    np.testing.assert_array_equal(own.view(np.uint32), public.float().numpy().view(np.uint32))


def test_its_sort_gives_ties_to_the_lower_position() -> None:
    row = np.array([1, 2, 2, 0, 2, np.nan, -np.inf, 3], np.float32)
    assert verify.best(row, 3).tolist() == [1, 2, 7]
    assert verify.best(row, 7).tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert verify.best(row, 99).tolist() == list(range(8))
    assert verify.tie_at_threshold(row, verify.best(row, 3)) == verify.Tie(2.0, 3, 2)
    assert verify.tie_at_threshold(row, verify.best(row, 3)).cut
    assert not verify.tie_at_threshold(row, verify.best(row, 4)).cut


# --- the pictures' arithmetic --------------------------------------------------------------------------------------


def test_shares_count_only_steps_that_could_see_a_position() -> None:
    """Two prompt bytes and three steps that see 3, 4 and 5 keys; a byte is a key of the step that reads it."""
    trace = recorder.LayerTrace(chosen=[np.array([0, 2]), np.array([0, 3]), np.array([0, 4])])
    mask = pictures.chosen_mask(trace, 5)
    assert pictures.kept_share(mask, prompt=2).tolist() == [1, 0, pytest.approx(1 / 3), 0.5, 1]
    cells, height, width = pictures.cells(mask, prompt=2)
    assert (height, width) == (1, 1)
    assert cells.mask.tolist() == [[False] * 3 + [True] * 2, [False] * 4 + [True], [False] * 5]
    assert cells.filled(-1).tolist() == [[1, 0, 1, -1, -1], [1, 0, 0, 1, -1], [1, 0, 0, 0, 1]]


def test_favourites_are_means_over_a_bytes_positions() -> None:
    share = np.array([0.5, 0.1, 0.7, 0.3, 0.2])
    assert pictures.favourite_bytes(share, b"a a b", least=2) == [("a", pytest.approx(0.6)), ("␣", pytest.approx(0.2))]
