"""The way in and out: what is patched, what is refused, and that nothing is left behind."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from interrupts import interrupted
from torch import nn

from clients.models import FAMILIES
from clients.test_selection import prompt
from clients.test_unchanged import assert_same_bits
from keysieve.checks import KeysieveError, UnsupportedError
from keysieve.integrations.transformers import UNFIT, IndexerStep, patch


def forwards(model: nn.Module) -> list[Any]:
    """The forward that each indexer has of its own, if any."""
    return [vars(m).get("forward") for n, m in model.named_modules() if n.endswith("indexer")]


def test_nothing_is_left_behind() -> None:
    model = FAMILIES["glm_moe_dsa"].build()
    inputs = prompt(40)
    with torch.no_grad():
        before = model(**inputs).logits
        patched = patch(model)
        assert all(forwards(model))
        assert not torch.equal(model(**inputs).logits, before)  # 8-bit keys choose a little differently
        patched.remove()
        patched.remove()
        assert not any(forwards(model))
        assert_same_bits([model(**inputs).logits], [before])


def test_an_error_inside_the_block_unpatches() -> None:
    model = FAMILIES["glm_moe_dsa"].build()
    with pytest.raises(RuntimeError, match="on purpose"), patch(model):
        raise RuntimeError("on purpose")
    assert not any(forwards(model))


class Small(nn.Module):
    """What of an indexer is looked at when it is patched."""

    n_heads, head_dim, index_topk = 8, 128, 16

    def forward(self, x: Any, cache: Any = None) -> Any:
        return x, cache


def test_a_patch_ended_anywhere_can_be_taken_back() -> None:
    """By a signal's handler, while it is made or removed."""
    model = nn.ModuleDict({str(layer): nn.ModuleDict({"indexer": Small()}) for layer in range(2)})
    theirs = dict(model.named_modules())["1.indexer"].forward = lambda x, cache=None: (x, cache)
    after, came = 0, True
    while came:
        after += 1
        made: list[Any] = []

        def on_and_off(made: list[Any] = made) -> None:
            made.append(patch(model))
            made[0].remove()

        came = interrupted(on_and_off, after)
        for patched in made:
            patched.remove()
        assert forwards(model) == [None, theirs], after
    assert after > 50


def test_a_forward_that_was_there_before_comes_back() -> None:
    """Hooks of other libraries replace forward on the instance; theirs is put back, and called meanwhile."""
    model = FAMILIES["deepseek_v32"].build()
    module = dict(model.named_modules())["model.layers.0.self_attn.indexer"]
    calls = 0
    real = module.forward

    @functools.wraps(real)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*args, **kwargs)

    module.forward = theirs
    with torch.no_grad(), patch(model):
        model(**prompt(20))
    assert calls == 1
    assert module.forward is theirs


def test_a_patched_model_is_not_patched_again() -> None:
    model = FAMILIES["deepseek_v32"].build()
    with patch(model):
        with pytest.raises(KeysieveError, match="patched already"):
            patch(model)
        assert all(forwards(model))
    assert not any(forwards(model))


def test_a_later_replacement_comes_off_first() -> None:
    model = FAMILIES["deepseek_v32"].build()
    module = dict(model.named_modules())["model.layers.0.self_attn.indexer"]
    patched = patch(model)
    ours = module.forward
    module.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(KeysieveError, match="reverse order"):
        patched.remove()
    module.forward = ours
    patched.remove()
    assert not any(forwards(model))


@pytest.mark.parametrize("spelling", ["cache", "past_key_values"])
def test_both_spellings_of_the_cache(spelling: str) -> None:
    """Called directly under either name, the indexer's keys end up in the given cache."""
    from transformers import DynamicCache

    model = FAMILIES["deepseek_v32"].build(topk=8)
    module = dict(model.named_modules())["model.layers.0.self_attn.indexer"]
    cache = DynamicCache(config=model.config)
    tokens = 12
    arguments = {
        "hidden_states": torch.randn(1, tokens, 64),
        "q_resid": torch.randn(1, tokens, 32),
        "position_embeddings": (torch.ones(1, tokens, 64), torch.zeros(1, tokens, 64)),
        "attention_mask": torch.ones(tokens, tokens, dtype=torch.bool).tril()[None],
        "position_ids": torch.arange(tokens)[None],
    }
    with patch(model):
        ids = module(**arguments, **{spelling: cache})
    assert ids.shape == (1, tokens, 8)
    assert ids.dtype == torch.int32
    assert cache.layers[0].indexer_keys.shape == (1, tokens, 128)
    # Row t may only name columns up to t, and the rows that see at least topk keys name topk different ones.
    assert (ids[0] <= torch.arange(tokens)[:, None]).all()
    assert all(len(set(row.tolist())) == min(t + 1, 8) for t, row in enumerate(ids[0]))


def test_an_attention_kernel_gets_minus_one_past_the_count() -> None:
    """eager and sdpa get ids they can scatter; any other attention is handed the ids, and would count a key twice."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    given: list[torch.Tensor] = []

    def kernel(*operands: Any, **options: Any) -> tuple[torch.Tensor, None]:
        _module, query, _key, value, _mask = operands
        given.append(options["indices"])
        batch, heads, tokens, _ = query.shape
        return torch.zeros(batch, tokens, heads, value.shape[-1]), None

    AttentionInterface.register("takes_ids", kernel)
    AttentionMaskInterface.register("takes_ids", sdpa_mask)
    model = FAMILIES["glm_moe_dsa"].build(topk=8, attention="takes_ids")
    with torch.no_grad(), patch(model):
        model(**prompt(12))
    assert len(given) == 3
    for ids in given:
        assert [int((row >= 0).sum()) for row in ids[0]] == [min(t + 1, 8) for t in range(12)]
        assert ids[0, 2].tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
    model = FAMILIES["glm_moe_dsa"].build(topk=8, attention="sdpa")
    chosen: list[torch.Tensor] = []
    with torch.no_grad(), patch(model) as patched:
        patched.indexers[0].module.register_forward_hook(lambda _module, _args, output: chosen.append(output))
        model(**prompt(12))
    assert chosen[0][0, 2].tolist() == [0, 1, 2, 0, 0, 0, 0, 0]


def test_a_selector_of_ones_own() -> None:
    """Whatever selects, the model attends to that: here to the newest keys, by a rule that is not keysieve's."""
    model = FAMILIES["deepseek_v32"].build(topk=4)

    def newest(step: IndexerStep) -> tuple[torch.Tensor, torch.Tensor]:
        counts = step.seq_lens.clamp(max=4)
        positions = step.seq_lens[:, None] - counts[:, None] + torch.arange(4)
        return positions.masked_fill(torch.arange(4) >= counts[:, None], -1).to(torch.int32), counts

    given: list[torch.Tensor] = []
    with torch.no_grad(), patch(model, select=newest) as patched:
        patched.indexers[0].module.register_forward_hook(lambda _module, _args, output: given.append(output))
        model(**prompt(9))
    assert given[0][0, -1].tolist() == [5, 6, 7, 8]
    assert given[0][0, 1].tolist() == [0, 1, 0, 0]


# --- refusals ------------------------------------------------------------------------------------------------------


def test_models_without_an_indexer_are_refused() -> None:
    with pytest.raises(KeysieveError, match="without an indexer"):
        patch(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("options", "what"), [({"heads": 12}, "heads"), ({"heads": 4}, "heads"), ({"topk": 5000}, "topk")]
)
def test_indexers_outside_the_limits_are_refused_whole(options: dict[str, int], what: str) -> None:
    """At once, by the argument's name, and with no layer left patched."""
    model = FAMILIES["deepseek_v32"].build(**options)
    with pytest.raises(KeysieveError, match=what):
        patch(model)
    assert not any(forwards(model))


def test_indexers_of_another_kind_are_refused_at_once() -> None:
    """The classes that transformers has and that do something else: by name, with the reason."""
    for name, reason in UNFIT.items():
        model = nn.Module()
        model.indexer = type(name, (nn.Module,), {})()
        with pytest.raises(UnsupportedError, match=reason):
            patch(model)


def test_unfit_classes_are_still_what_they_were() -> None:
    """Each class that is refused by name exists in transformers: a renamed one would no longer be refused early."""
    import importlib
    import pkgutil

    import transformers.models

    found = set()
    for package in pkgutil.iter_modules(transformers.models.__path__):
        if package.name in ("deepseek_v4", "glm5_next", "minimax_m3_vl", "qwen4_exp"):
            module = importlib.import_module(f"transformers.models.{package.name}.modeling_{package.name}")
            found |= {name for name in UNFIT if hasattr(module, name)}
    assert found == set(UNFIT)


@dataclass
class Operands:
    """What a made-up indexer scores with: query, stand-in for the keys, weights, mask; and the usual products."""

    query: Any
    keys: Any
    weights: Any
    mask: Any

    @property
    def dots(self) -> Any:
        return torch.matmul(self.query, self.keys.transpose(-1, -2).float().unsqueeze(1))

    def summed(self, scores: Any) -> Any:
        return torch.matmul(self.weights.unsqueeze(-2), scores).squeeze(-2)

    @property
    def logits(self) -> Any:
        return self.summed(self.dots.relu())


class OtherIndexer(nn.Module):
    """An indexer in the shape of the others that returns whatever ``expression`` makes of its operands."""

    def __init__(self, expression: Any):
        super().__init__()
        self.n_heads, self.head_dim, self.index_topk, self.layer_idx = 8, 128, 4, 0
        self.expression = expression

    def forward(self, operands: Operands, cache: Any = None) -> Any:
        operands.keys = cache.update_indexer(operands.keys, 0)
        return self.expression(operands)


def chosen(e: Operands, logits: Any) -> Any:
    return torch.topk(logits.masked_fill(~e.mask, float("-inf")), 4, dim=-1).indices


def usual(e: Operands) -> Any:
    return chosen(e, e.summed(torch.relu(0.5 * e.dots)))


OTHER_EXPRESSIONS = {
    "sigmoid": lambda e: torch.sigmoid(e.dots),
    "no relu": lambda e: chosen(e, e.summed(e.dots)),
    "negative scale": lambda e: chosen(e, e.summed((e.dots * -0.5).relu())),
    "scale tensor": lambda e: e.dots * torch.ones(8, 1),
    "no mask": lambda e: e.logits.topk(4, dim=-1),
    "bias": lambda e: e.logits + torch.linspace(-1, 0, 6).expand(1, 2, 6),
    "two masks": lambda e: chosen(e, e.logits + torch.zeros(1, 2, 6)),
    "block maximum": lambda e: e.dots.view(1, 2, 8, 3, 2).amax(-1),
    "indexed keys": lambda e: e.keys[..., -1],
    "head mean": lambda e: e.dots.relu().mean(2),
    "softmax": lambda e: torch.softmax(e.dots, dim=-1),
    "wrong weights": lambda e: chosen(e, torch.matmul(e.weights, e.dots.relu())),
    "sum": lambda e: e.dots + 1,
    "keys times two": lambda e: e.keys * 2,
    "nothing at all": lambda _: torch.zeros(1, 2, 4),
}


def call(expression: Any, observer: Any = None) -> Any:
    model = nn.Module()
    model.indexer = OtherIndexer(expression)
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(1, 2, 8, 128, generator=generator), torch.randn(1, 6, 128, generator=generator)
    weights, mask = torch.randn(1, 2, 8, generator=generator), torch.ones(1, 2, 6, dtype=torch.bool)
    with patch(model, observer=observer):
        return model.indexer(Operands(query, keys, weights, mask))


def test_the_usual_expression_is_recognised_whatever_its_class() -> None:
    assert call(usual).shape == (1, 2, 4)


def test_scales_on_both_sides_of_the_rectifier_multiply() -> None:
    steps: list[IndexerStep] = []
    for expression in (usual, lambda e: chosen(e, e.summed((0.5 * e.dots * 4.0).relu() * 3.0))):
        call(expression, lambda step, *_: steps.append(step))
    # 0.5 in the usual expression, 6 in the other: a ratio of 12, and half an ulp for each product.
    torch.testing.assert_close(steps[1].weights, 12 * steps[0].weights, rtol=2**-22, atol=0)


@pytest.mark.parametrize("kind", OTHER_EXPRESSIONS)
def test_other_expressions_are_refused_not_approximated(kind: str) -> None:
    with pytest.raises(UnsupportedError, match="indexer"):
        call(OTHER_EXPRESSIONS[kind])


def test_importing_the_integration_imports_no_framework() -> None:
    """It works on the objects it is given, so transformers is imported by whoever has a model."""
    code = (
        "import sys, keysieve.integrations.transformers as t; "
        "assert not {'transformers', 'matplotlib', 'rich', 'cutlass'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
