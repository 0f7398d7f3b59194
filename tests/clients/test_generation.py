"""Generation through keysieve: 200 tokens, speculative steps with rollbacks, beams; every selection is verified."""

from __future__ import annotations

import pytest
import torch

from clients.exact import Exact
from clients.models import FAMILIES
from clients.test_selection import PRESENT, generate, prompt
from clients.test_unchanged import run
from keysieve.integrations.transformers import patch


@pytest.mark.parametrize("name", PRESENT)
def test_two_hundred_tokens(name: str) -> None:
    """One request from 10 to 210 keys; from the 33rd on every step has to choose."""
    family = FAMILIES[name]
    model = family.build(topk=32)
    exact = Exact()
    with patch(model, observer=exact):
        tokens = generate(model, prompt(10), 200)
    assert tokens.shape == (1, 210)
    # The last token is generated and not fed.
    assert exact.rows == family.indexers * 209
    assert exact.selective == family.indexers * (209 - 32)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_generation_repeats(name: str) -> None:
    """The same prompt twice, with a fresh patch and with a used one: the same tokens."""
    model = FAMILIES[name].build(topk=16)
    inputs = prompt(40, 31)
    with patch(model):
        first, again = (generate(model, inputs, 20) for _ in range(2))
    with patch(model):
        fresh = generate(model, inputs, 20)
    assert torch.equal(first, again)
    assert torch.equal(first, fresh)


@pytest.mark.parametrize("name", PRESENT)
def test_speculative_steps_of_three_rows(name: str) -> None:
    """Three rows a step (one token and two drafts), each seeing one key more than the row before it."""
    family = FAMILIES[name]
    model = family.build(topk=24)
    exact = Exact(keep=True)
    with patch(model, observer=exact):
        run(model, prompt(60, 48), (30, 3, 3, 3, 3, 3))
    assert exact.next_n == {8, 3}
    for step, _ in exact.steps:
        if step.next_n == 3:
            lens = step.seq_lens.view(-1, 3)
            assert (lens[:, 1:] - lens[:, :-1] == 1).all()


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_prompt_lookup_decoding_rolls_back(name: str) -> None:
    """transformers' own speculative decoding: two drafts a step, the cache cropped after every rejection."""
    model = FAMILIES[name].build(topk=24)
    # A repetitive prompt, so that there are drafts to look up.
    ids = torch.arange(2, 12).repeat(6)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    exact = Exact()
    with patch(model, observer=exact) as patched:
        tokens = generate(model, inputs, 30, prompt_lookup_num_tokens=2)
    assert tokens.shape == (1, 90)
    assert 3 in exact.next_n
    for indexer in patched.indexers:
        # Fed more rows than there are tokens: some were rejected and written again. None forced a rebuild.
        assert indexer.work.appended > 89
        assert indexer.work.rebuilds == 0


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_beams_reorder_the_cache(name: str) -> None:
    """Beam search reorders the cached keys between steps; the pages follow."""
    model = FAMILIES[name].build(topk=16)
    exact = Exact()
    with patch(model, observer=exact) as patched:
        generate(model, prompt(30, 22), 10, num_beams=3)
    assert exact.selective > 0
    assert all(indexer.work.rebuilds > 0 for indexer in patched.indexers)
