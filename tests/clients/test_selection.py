"""On the same quantised bytes, every model's every row selects exactly what a stable sort selects."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from clients.exact import Exact
from clients.models import FAMILIES, VOCABULARY
from keysieve.integrations.transformers import TRIED, IndexerStep, patch

FORMATS = ("fp8_fp32", "fp8_ue8m0", "mxfp4")
PRESENT = [name for name, family in FAMILIES.items() if family.present]


def prompt(*lengths: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Left-padded random prompts of the given lengths, with their attention mask."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(2, VOCABULARY, (len(lengths), longest), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : longest - length] = 0
        mask[row, : longest - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: nn.Module, inputs: dict[str, torch.Tensor], new: int, **options: Any) -> torch.Tensor:
    """Greedy generation of exactly ``new`` tokens."""
    tokens: torch.Tensor = model.generate(**inputs, max_new_tokens=new, do_sample=False, **options)  # type: ignore[operator]  # GenerationMixin
    return tokens


def test_the_installed_transformers_has_the_models_that_5_24_has() -> None:
    """A class that went missing would silently leave every test here."""
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    assert len(PRESENT) == len(FAMILIES) if version >= (5, 24) else len(PRESENT) >= 4


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("name", PRESENT)
def test_every_row_and_step_is_exact(name: str, key_format: str) -> None:
    """A padded batch of two: prompts longer and shorter than topk, then eight decoding steps."""
    family = FAMILIES[name]
    model = family.build(topk=24)
    exact = Exact()
    with patch(model, key_format=key_format, observer=exact) as patched:
        assert len(patched.indexers) == family.indexers
        assert all(type(i.module).__name__ in TRIED for i in patched.indexers)
        generate(model, prompt(50, 37), 9)
    assert exact.layers == {indexer.layer for indexer in patched.indexers}
    assert exact.rows == family.indexers * (50 + 37 + 2 * 8)
    assert exact.selective == family.indexers * (26 + 13 + 2 * 8)


@pytest.mark.parametrize("name", PRESENT)
def test_the_model_attends_to_what_was_selected_and_to_nothing_else(name: str) -> None:
    """Attention weights of every layer, those that reuse a selection included, against the positions selected."""
    model = FAMILIES[name].build(topk=24)
    selected: list[torch.Tensor] = []
    compared = 0

    def observe(step: IndexerStep, positions: torch.Tensor, counts: torch.Tensor) -> None:
        mask = torch.zeros(positions.shape[0], step.longest + 1, dtype=torch.bool)
        # -1 lands in the extra column.
        mask[torch.arange(len(mask))[:, None], positions.long()] = True
        selected.append(mask[:, :-1])
        assert mask[:, :-1].sum(1).tolist() == counts.tolist()

    def attended(module: nn.Module, _: object, output: tuple[Any, ...]) -> None:
        nonlocal compared
        if getattr(module, "sliding_window", None) is not None:
            return
        used = (output[1][0] > 0).any(0)
        assert torch.equal(used, selected[-1][: used.shape[0], : used.shape[1]])
        compared += 1

    for path, module in model.named_modules():
        if path.endswith("self_attn") and "vis" not in path:
            module.register_forward_hook(attended)
    with patch(model, observer=observe):
        generate(model, prompt(40), 4)
    sliding = 1 if name == "dots3_note" else 0
    assert compared == 4 * (FAMILIES[name].layers - sliding)


@pytest.mark.parametrize("name", PRESENT)
def test_queries_keys_and_weights_are_the_models_own_bits(name: str) -> None:
    """What keysieve quantises is what the unmodified model multiplies: seen by watching its matrix products."""
    from keysieve.quantize import quantize_query

    model = FAMILIES[name].build(topk=24)
    inputs = prompt(30)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    real = torch.matmul

    def matmul(left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
        if left.dim() == 4 and left.shape[-2:] == (8, 128):
            seen.append((left, right))  # query [1, 30, 8, 128], keys [1, 1, 128, 30]
        elif left.dim() == 4 and left.shape[-2:] == (1, 8):
            seen.append((left, right))  # weights [1, 30, 1, 8], scores
        return real(left, right, **options)

    with torch.no_grad(), mock.patch.object(torch, "matmul", matmul):
        model(**inputs)
    steps: list[IndexerStep] = []
    with torch.no_grad(), patch(model, observer=lambda step, *_: steps.append(step)) as patched:
        model(**inputs)
    # Later layers see what earlier layers attended to, so only the first has the same hidden states in both runs.
    (query, keys), (weights, _) = seen[0], seen[1]
    step, module = steps[0], patched.indexers[0].module
    codes, q_scale = quantize_query(step.spec, query[0])
    assert torch.equal(step.query[:30].view(torch.uint8), codes.view(torch.uint8))  # type: ignore[union-attr]  # FP8
    in_weights = name.startswith("hy_v4")  # these models put the softmax scale into the weights themselves
    scale = 1.0 if in_weights else float(module.softmax_scale)  # type: ignore[arg-type]  # a float attribute
    assert torch.equal(step.weights[:30], weights[0, :, 0] * q_scale * scale)
    reread = step.cache.read(torch.arange(30))
    fresh = type(step.cache).empty(step.spec, pages=1)
    fresh.append(keys[0, 0].T.contiguous(), torch.arange(30))
    assert torch.equal(reread, fresh.read(torch.arange(30)))
