"""A row of a million keys in a process of its own: exact, and in under 2 GB altogether."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from keysieve.bench import cpu


def test_a_million_keys_in_under_two_gigabytes() -> None:
    command = [sys.executable, "-m", "keysieve.bench.cpu", "--only-memory", "--memory-keys", str(1 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["keys"] == 1 << 20
    assert line["exact"] is True
    # The keys alone are 132 MiB: less would mean that the figure is not this process's.
    assert (132 << 20) < line["peak_bytes"] < 2 << 30


def test_the_benchmark_checks_before_it_times() -> None:
    record = cpu.measure_speed(requests=2, keys=3000, heads=8, topk=64, repeats=1)
    assert record.exact is True
    assert record.extra["ratio"] > 0
    assert record.peers["obvious float32"] > 0
    assert record.arch == "cpu"


def test_the_benchmarks_gate_notices_a_wrong_key(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = cpu.Setup(cpu.IndexerSpec(heads=8, topk=64), 2, 3000)
    assert setup.is_exact()
    right = setup.step()
    right.positions[1, 63] = 2999 - int(right.positions[1, 63] == 2999)
    monkeypatch.setattr(setup, "step", lambda: right)
    assert not setup.is_exact()
