"""Running a case through the public API and holding every output to the brute force, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle.step import Expected, expected_step
from torch import Tensor

import keysieve as ks
from keysieve.testing import Case, assert_bitwise_equal

FORMATS = ("fp8_fp32", "fp8_ue8m0", "mxfp4")
UNSET = 0x5A5A5A5A


def spec_of(key_format: str = "fp8_fp32", *, heads: int = 8, topk: int = 2048, **options: Any) -> ks.IndexerSpec:
    """A spec with few heads by default: selection does not depend on them, and tests should be quick."""
    return ks.IndexerSpec(heads=heads, topk=topk, key_format=key_format, **options)


def indexer_for(case: Case, **options: Any) -> ks.DecodeIndexer:
    """An indexer that is just large enough for the case, on the cpu backend."""
    limits: dict[str, Any] = {"max_rows": max(case.rows, 1), "max_context": case.max_len, "next_n": case.next_n}
    return ks.DecodeIndexer(case.spec, device="cpu", backend="cpu", **(limits | options))


def run_step(case: Case, indexer: ks.DecodeIndexer | None = None, **options: Any) -> Any:
    """One call of the indexer on the case, physical rows and positions asked for."""
    runner = indexer if indexer is not None else indexer_for(case)
    arguments: dict[str, Any] = {"positions": True, **case.paging(), **options}
    return runner(case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table, **arguments)


def assert_step(out: Any, want: Expected, what: object) -> None:
    """Counts, positions and physical rows must agree in every bit."""
    assert_bitwise_equal(out.counts, want.counts, f"counts of {what}")
    assert_bitwise_equal(out.positions, want.positions, f"positions of {what}")
    assert_bitwise_equal(out.rows, want.rows, f"rows of {what}")


def check_step(case: Case, indexer: ks.DecodeIndexer | None = None, numerics: str = "fp32") -> Any:
    """Run the case and hold it to the brute force."""
    out = run_step(case, indexer)
    assert_step(out, expected_step(case, numerics), case)
    return out


def outputs(out: Any) -> dict[str, Tensor]:
    """The tensors of a step's result by name."""
    return {"rows": out.rows, "counts": out.counts, "positions": out.positions}


def assert_same_outputs(got: Any, want: Any, what: object) -> None:
    """Two results of the same step, bit by bit."""
    for name, tensor in outputs(got).items():
        assert_bitwise_equal(tensor, outputs(want)[name], f"{name} of {what}")


def chosen(out: Any, row: int) -> list[int]:
    """Positions a row selected."""
    return [int(p) for p in out.positions[row, : int(out.counts[row])].tolist()]


def refusal_of(call: Callable[[], Any]) -> str | None:
    """The text with which a call is refused, or None when it runs: for what may be served or refused."""
    try:
        call()
    except ks.KeysieveError as refusal:
        return str(refusal)
    return None


def assert_fault(indexer: ks.DecodeIndexer, *parts: str) -> None:
    """The next host check reports a device fault that names all of ``parts``, and only once."""
    with pytest.raises(ks.DeviceFault) as fault:
        indexer.check()
    for part in parts:
        assert part in str(fault.value)
    indexer.check()


def poisoned(*shape: int) -> Tensor:
    """An int32 output buffer full of a value that no test can produce."""
    return torch.full(shape, UNSET, dtype=torch.int32)


def distinct_scores(length: int, seed: int) -> Tensor:
    """``length`` different BF16 values in random order."""
    keys = 0x0100 + torch.randperm(0xFE00, generator=torch.Generator().manual_seed(seed))[:length]
    return ((torch.where(keys >= 0x8000, keys - 0x8000, 0xFFFF - keys)) << 16).to(torch.int32).view(torch.float32)
