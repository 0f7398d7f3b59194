"""A good call, ways to spoil one of its arguments, and what every refusal must say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import keysieve as ks
from field.steps import poisoned, spec_of
from keysieve.testing import Case, pattern_case

TOPK = 16


Change = Callable[[dict[str, Any]], None]


def good_case(key_format: str = "fp8_fp32") -> Case:
    return pattern_case(spec_of(key_format, topk=TOPK), "gaussian", [[100, 101], [300, 0], [65, 66]], next_n=2, seed=1)


def arguments_of(case: Case) -> dict[str, Any]:
    """All arguments of a step, with output buffers of the caller."""
    return {
        "query": case.query,
        "cache": case.index_cache(),
        "weights": case.weights,
        "seq_lens": case.seq_lens,
        "index_table": case.index_table,
        **case.paging(),
        "positions": poisoned(case.rows, TOPK),
        "out": poisoned(case.rows, TOPK),
        "counts": poisoned(case.rows),
    }


def with_value(name: str, value: object) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        arguments[name] = value

    return change


def with_tensor(name: str, make: Callable[[Any], Any]) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        arguments[name] = make(arguments[name])

    return change


def assert_refused(call: Callable[[], Any], argument: str) -> None:
    """The call raises KeysieveError whose text names the argument, what was got and what is accepted, and a remedy.

    ``"a|b"``: two arguments that disagree, of which the text may start with either.
    """
    with pytest.raises(ks.KeysieveError) as refusal:
        call()
    text = str(refusal.value)
    assert any(name in text.split(":")[0] for name in argument.split("|")), text
    assert "got" in text, text
    assert "accepted:" in text, text
    remedy = text.split("accepted:")[1].partition(". ")[2]
    assert len(remedy) > 10, text


def tensors_in(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of a call that has bytes, by name."""
    found = {}
    for name, value in arguments.items():
        parts = value if isinstance(value, tuple) else [value.data if isinstance(value, ks.IndexCache) else value]
        for index, part in enumerate(parts):
            if isinstance(part, torch.Tensor) and part.device.type != "meta":
                found[f"{name}_{index}"] = part
    return found
