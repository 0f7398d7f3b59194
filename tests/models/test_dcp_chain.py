"""A chain for measurements merges tagged pairs where it has an exchange's memory, and plain lists where it has none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import keysieve as ks
from keysieve.bench import dcp_chain


class Backend:
    """Compiles nothing."""

    def scorer(self, _spec: Any) -> Any:
        return "scorer", None

    def score_config(self, *parts: Any) -> Any:
        return parts

    def launcher(self, *_: Any) -> Any:
        return lambda *_: None

    def sms(self, _device: Any) -> int:
        return 132


@pytest.mark.parametrize("exchanges", [True, False])
def test_the_merge_is_of_what_is_sent(monkeypatch: pytest.MonkeyPatch, exchanges: bool) -> None:
    monkeypatch.setattr(dcp_chain, "load", lambda _name: Backend())
    here = SimpleNamespace(rank=0, world=2, device=torch.device("cpu"), pool=None)
    memory = SimpleNamespace() if exchanges else None
    chain = dcp_chain.Chain(here, ks.IndexerSpec(32, 2048), 2, 4096, 1216, memory)
    assert chain.merger.config.tagged is exchanges
    assert chain.logits.shape[0] == 2
