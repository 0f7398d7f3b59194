"""What `keysieve bench dcp` runs, by one rank whose peer is itself: both chains, with their gates, on one device."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from harness import cases

import keysieve as ks
from keysieve.bench import dcp
from keysieve.bench.caches import make_pool
from keysieve.bench.dcp_alone import feed_itself
from keysieve.dcp.exchange import virtual_ranks

WORLD = 2


class FedByItself:
    """An exchange of two ranks, of which the second's words are the first's."""

    reason = None

    def __init__(self, topn: int) -> None:
        self.topn = topn

    def bind(self, spec: Any, max_rows: int, max_context: int, device: torch.device) -> None:
        self.ranks = virtual_ranks([device] * WORLD, self.topn)
        feed_itself(self.ranks, spec, max_rows, max_context, device)
        self.memory = self.ranks[0].memory

    def check(self, device: torch.device) -> None:
        self.ranks[0].check(device)


def gather_into(out: torch.Tensor, mine: torch.Tensor) -> None:
    for part in out.view(WORLD, *mine.shape):
        part.copy_(mine)


def gather(outs: list[torch.Tensor], mine: torch.Tensor) -> None:
    for part in outs:
        part.copy_(mine)


@cases(1, 64)
def test_exchange_and_all_gather(device: torch.device, case: int) -> None:
    """The bench raises where positions are not those of all ranks' logits."""
    here = dcp.Here(0, WORLD, device, make_pool(80_000, device), None)
    with (
        mock.patch.object(ks.dcp, "Exchange", FedByItself),
        mock.patch.object(dcp.dist, "barrier"),
        mock.patch.object(torch.distributed, "all_gather_into_tensor", gather_into),
        mock.patch.object(torch.distributed, "all_gather", gather),
    ):
        assert dcp.exchange(here, case) > 0
        assert dcp.exchange(here, case, late=True) > 0
