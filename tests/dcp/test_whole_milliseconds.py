"""A transport that counts whole milliseconds does not end a wait before its limit."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import keysieve as ks

from .processes import run_ranks


class Exact:
    """A receive that ends at once when its time, cut to whole milliseconds as Gloo cuts it, is up."""

    def wait(self, limit: timedelta) -> None:
        end = time.monotonic() + limit // timedelta(milliseconds=1) / 1000
        while time.monotonic() < end:
            pass
        raise RuntimeError("Timed out waiting for recv operation to complete")


def _unanswered(rank: int, _world: int) -> str:
    group = ks.dcp.Gather(timeout=0.1)
    group.bind(ks.IndexerSpec(heads=8, topk=4), max_rows=1, max_context=64, device="cpu")
    dist.irecv = lambda *_args, **_named: Exact()
    lens = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ks.dcp.ExchangeError) as failure:
        group.select(torch.zeros(1, 1).bfloat16(), group.local_lens(lens), lens)
    return f"{rank}: {failure.value}"


def test_a_silent_rank_is_called_so_and_not_in_the_transports_words() -> None:
    values: list[Any] = [result.value for result in run_ranks(2, _unanswered)]
    for rank, text in enumerate(values):
        assert f"from rank {1 - rank} (silent for 0.1 s)" in text
