"""With topk at least as large as the context everything is selected, and a patched model is the model, bit for bit."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from clients.models import FAMILIES
from clients.test_selection import PRESENT, generate, prompt
from keysieve.integrations.transformers import IndexerStep, patch

WITH_ATTENTION = [(name, attention) for name in PRESENT for attention in FAMILIES[name].attentions]


def run(model: nn.Module, inputs: dict[str, torch.Tensor], pieces: tuple[int, ...]) -> list[torch.Tensor]:
    """Logits of a cached forward in pieces of the given sizes, the mask growing with them."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)  # type: ignore[call-arg, unused-ignore]  # transformers is untyped here
    spelling = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    arguments: dict[str, Any] = {spelling: cache, "use_cache": True}
    logits, done = [], 0
    with torch.no_grad():
        for size in pieces:
            ids = inputs["input_ids"][:, done : done + size]
            done += size
            mask = inputs["attention_mask"][:, :done]
            logits.append(model(input_ids=ids, attention_mask=mask, **arguments).logits)
    return logits


def assert_same_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right)
    assert right[-1][:, -1].isfinite().all()
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize(("name", "attention"), WITH_ATTENTION)
def test_logits_are_the_unmodified_models(name: str, attention: str) -> None:
    """A padded batch: a prompt, three rows at once, then single tokens. Padding rows included: they see nothing."""
    model = FAMILIES[name].build(topk=64, attention=attention)
    inputs = prompt(60, 41)
    pieces = (50, 3, 1, 1, 5)
    before = run(model, inputs, pieces)
    with patch(model):
        assert_same_bits(run(model, inputs, pieces), before)
    # And unpatched it is the old model again.
    assert_same_bits(run(model, inputs, pieces), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "attention"), WITH_ATTENTION)
def test_logits_of_half_precision_models(name: str, attention: str, dtype: torch.dtype) -> None:
    """The same in the precisions that models are served in, whose masks hold other "minus infinities"."""
    model = FAMILIES[name].build(topk=64, attention=attention).to(dtype)
    inputs = prompt(60, 41)
    before = run(model, inputs, (50, 3, 1))
    with patch(model):
        after = run(model, inputs, (50, 3, 1))
    assert before[0].dtype == dtype
    assert_same_bits([x.float() for x in after], [x.float() for x in before])


@pytest.mark.parametrize("name", PRESENT)
def test_a_smaller_topk_does_change_the_logits(name: str) -> None:
    """The comparison above can fail: a model that is made to choose gives other logits than one that is not."""
    inputs = prompt(60)
    wide, narrow = (FAMILIES[name].build(topk=k) for k in (64, 16))
    with patch(wide), patch(narrow):
        assert not torch.equal(run(wide, inputs, (60,))[0], run(narrow, inputs, (60,))[0])


@pytest.mark.parametrize("name", PRESENT)
def test_without_a_cache_too(name: str) -> None:
    """``use_cache=False``: the indexer is called without a cache and scores the prompt's own keys."""
    model = FAMILIES[name].build(topk=64)
    inputs = prompt(40)
    with torch.no_grad():
        before = model(**inputs, use_cache=False).logits
        with patch(model):
            after = model(**inputs, use_cache=False).logits
    assert_same_bits([after], [before])


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_a_static_cache_generates_the_same_tokens(name: str) -> None:
    """A preallocated cache hands the indexer more columns than have been written; they are never selected."""
    model = FAMILIES[name].build(topk=128)
    inputs = prompt(20, 33)
    before = generate(model, inputs, 12, cache_implementation="static")
    with patch(model):
        after = generate(model, inputs, 12, cache_implementation="static")
    assert torch.equal(before, after)


@pytest.mark.parametrize("where", ["left", "right", "middle"])
def test_positions_count_real_tokens_and_ids_are_columns(where: str) -> None:
    """Padding anywhere: keysieve's key positions skip it, the ids the model gets name the model's own columns."""
    model = FAMILIES["deepseek_v32"].build(topk=16)
    ids = prompt(39)["input_ids"]
    real = torch.ones(1, 39, dtype=torch.bool)
    real[:, {"left": slice(0, 9), "right": slice(30, 39), "middle": slice(12, 21)}[where]] = False
    columns = real[0].nonzero()[:, 0]
    steps: list[tuple[IndexerStep, torch.Tensor]] = []
    given: list[torch.Tensor] = []
    with torch.no_grad(), patch(model, observer=lambda step, chosen, _: steps.append((step, chosen))) as patched:
        for indexer in patched.indexers:
            indexer.module.register_forward_hook(lambda _module, _args, output: given.append(output[0]))
        model(input_ids=ids, attention_mask=real.long(), position_ids=(real.long().cumsum(-1) - 1).clamp(min=0))
    for (step, chosen), named in zip(steps, given, strict=True):
        # Row t sees the real tokens among the first t + 1 columns, whether it is one itself or not.
        assert step.seq_lens[:39].tolist() == real[0].long().cumsum(-1).tolist()
        for row in range(39):
            picked = chosen[row][chosen[row] >= 0]
            assert sorted(set(named[row].tolist())) == columns[picked.long()].tolist() or not len(picked)
            assert named[row].min() >= 0
