"""The engines' patches, ended anywhere by a signal's handler: put back whole, or made whole by the next call."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from interrupts import interrupted

import keysieve.integrations.sglang as ks_sglang
import keysieve.integrations.vllm as ks_vllm

VLLM = ("fp8_fp4_paged_mqa_logits", "as_fp32_logits", "get_indexer_topk", "_merge_dcp_topk_global")
VLLM += ("_select_candidate_blocks", "_apply_candidate_mask")
SGLANG = ("resolve_fp8_paged_mqa_logits_fn", "resolve_paged_mqa_logits_metadata_fn")


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(contents)
    return made


def vllm(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """A module with the names that are replaced, in vLLM's place; where they are."""
    made = module(ks_vllm.MODULE, **{name: object() for name in VLLM})
    monkeypatch.setitem(sys.modules, ks_vllm.MODULE, made)
    return [(made, name) for name in VLLM]


def sglang(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    kind = type("DSATopKBackend", (), {"topk_transform": lambda self: self})
    indexer = module(ks_sglang.INDEXER, **{name: object() for name in SGLANG})
    backend = module(ks_sglang.BACKEND, DSATopKBackend=kind, TopkTransformMethod=None, envs=None)
    monkeypatch.setitem(sys.modules, ks_sglang.INDEXER, indexer)
    monkeypatch.setitem(sys.modules, ks_sglang.BACKEND, backend)
    return [*((indexer, name) for name in SGLANG), (kind, "topk_transform")]


@pytest.mark.parametrize(("engine", "make"), [(ks_vllm, vllm), (ks_sglang, sglang)])
@pytest.mark.parametrize("then", ["patch", "unpatch"])
@pytest.mark.parametrize("during", ["patch", "unpatch"])
def test_what_was_ended_in_the_middle(
    monkeypatch: pytest.MonkeyPatch, engine: Any, make: Any, during: str, then: str
) -> None:
    places = make(monkeypatch)

    def replaced() -> list[bool]:
        return [getattr(owner, name) is not own for (owner, name), own in zip(places, originals, strict=True)]

    originals = [getattr(owner, name) for owner, name in places]
    after, came = 0, True
    while came:
        after += 1
        if during == "unpatch":
            engine.patch()
        came = interrupted(getattr(engine, during), after)
        getattr(engine, then)()
        assert replaced() == [then == "patch"] * len(places), after
        engine.unpatch()
        assert not any(replaced()), after
    assert after > 3
