"""The paged copy of a model's indexer keys, against a fresh quantisation of the model's own keys, call by call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interrupts import interrupted

from clients.models import FAMILIES
from clients.test_selection import FORMATS, generate, prompt
from keysieve.cache import IndexCache, slots_of
from keysieve.checks import KeysieveError
from keysieve.integrations.transformers import patch
from keysieve.integrations.transformers_store import LayerStore, Visibility, Work
from keysieve.spec import IndexerSpec


class Mirror:
    """Wraps ``LayerStore.sync``: after every call, each request's pages must hold exactly its alive keys."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls = 0
        self.kept_all: list[bool] = []
        self._real = LayerStore.sync
        mirror = self

        def sync(store: LayerStore, keys: torch.Tensor, view: Visibility, kept: int) -> None:
            mirror._real(store, keys, view, kept)
            mirror.check(store, keys, view)
            mirror.kept_all.append(kept > 0)

        monkeypatch.setattr(LayerStore, "sync", sync)

    def check(self, store: LayerStore, keys: torch.Tensor, view: Visibility) -> None:
        for request in range(store.batch):
            alive = keys[request][view.alive[request]]
            fresh = IndexCache.empty(store.spec, pages=-(-max(len(alive), 1) // 64))
            fresh.append(alive, torch.arange(len(alive)))
            slots = slots_of(store.index_table[request], torch.arange(len(alive)))
            for stored, wanted in zip(store.cache.codes(slots), fresh.codes(torch.arange(len(alive))), strict=True):
                assert torch.equal(stored, wanted)
        self.calls += 1


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Mirror:
    return Mirror(monkeypatch)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams and samples": {"num_beams": 2, "num_return_sequences": 2},
    "static": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("key_format", FORMATS)
def test_pages_follow_generation(mirror: Mirror, way: str, key_format: str) -> None:
    """More than two pages of keys, in every way that generation treats its cache."""
    model = FAMILIES["deepseek_v32"].build(topk=16)
    with patch(model, key_format=key_format) as patched:
        generate(model, prompt(120, 97), 14, **WAYS[way])
    assert mirror.calls == 14 * len(patched.indexers)
    if way in ("greedy", "static"):
        for indexer in patched.indexers:
            assert indexer.work.rebuilds == 0
            # Every real token fed was quantised once, padding never.
            assert indexer.work.appended == 120 + 97 + 2 * 13


def test_pages_follow_rejected_drafts(mirror: Mirror) -> None:
    """Prompt lookup decoding crops the cache; what is written over the cropped keys is what counts."""
    model = FAMILIES["glm_moe_dsa"].build(topk=16)
    ids = torch.arange(2, 12).repeat(6)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with patch(model):
        generate(model, inputs, 30, prompt_lookup_num_tokens=3)
    assert mirror.calls > 0
    assert sum(mirror.kept_all) == mirror.calls - 2  # all but each layer's first call


def test_pages_follow_a_cropped_static_cache(mirror: Mirror) -> None:
    """A static cache is cropped by moving a counter, its tensor stays the same: rewritten columns must be noticed."""
    from transformers import StaticCache

    model = FAMILIES["deepseek_v32"].build(topk=16)
    cache = StaticCache(config=model.config, max_cache_len=96)  # type: ignore[no-untyped-call, unused-ignore]  # untyped
    ids = prompt(80, seed=4)["input_ids"]
    with torch.no_grad(), patch(model) as patched:
        feed(model, cache, ids[:, :50])
        for layer in cache.layers:
            if hasattr(layer, "crop"):  # transformers 5.17 cannot crop a static cache
                layer.crop(-3)
        feed(model, cache, ids[:, 60:63])
        feed(model, cache, ids[:, 63:64])
        # The same object for another text.
        cache.reset()
        feed(model, cache, ids[:, 20:80])
    assert mirror.calls == 4 * len(patched.indexers)


def test_a_cache_whose_batch_is_repeated(mirror: Mirror) -> None:
    """Contrastive and sampling loops repeat the batch inside the cache: another batch, another store."""
    from transformers import DynamicCache

    model = FAMILIES["deepseek_v32"].build(topk=16)
    cache = DynamicCache(config=model.config)
    ids = prompt(30)["input_ids"]
    with torch.no_grad(), patch(model) as patched:
        feed(model, cache, ids)
        cache.batch_repeat_interleave(2)
        feed(model, cache, ids[:, :2].repeat(2, 1))
        cache.batch_select_indices(torch.tensor([1, 0]))
        feed(model, cache, torch.stack([ids[0, 3:5], ids[0, 6:8]]))
    assert mirror.calls == 3 * len(patched.indexers)


def feed(model: Any, cache: Any, ids: torch.Tensor) -> None:
    """One forward with ``cache``, under the name this transformers has for it."""
    import inspect

    names = inspect.signature(model.forward).parameters
    model(input_ids=ids, use_cache=True, **{"cache" if "cache" in names else "past_key_values": cache})


# --- the store by itself -------------------------------------------------------------------------------------------


def whole(columns: int, batch: int = 1) -> Visibility:
    """One query per request that sees all columns."""
    return Visibility.of_mask(torch.ones(batch, 1, columns, dtype=torch.bool), batch)


def test_what_counts_as_the_same_keys() -> None:
    """Only the tensor that was stored last, unwritten, or a front part of it, keeps anything."""
    store = LayerStore(IndexerSpec(heads=8, topk=16), 1, torch.device("cpu"), Work())
    keys = torch.randn(1, 10, 128)
    assert store.kept_columns(keys) == 0
    store.sync(keys, whole(10), 0)
    assert store.kept_columns(keys) == 10
    assert store.kept_columns(keys[:, :-3]) == 7
    assert store.kept_columns(keys[:, 3:]) == 0
    assert store.kept_columns(keys.clone()) == 0
    assert store.kept_columns(None) == 0
    keys[0, 4] = 0
    assert store.kept_columns(keys) == 0


def test_a_store_whose_growth_was_interrupted_still_holds_all_keys() -> None:
    """By a signal's handler, anywhere: the table is never narrower than the pool is taken to be."""
    spec = IndexerSpec(heads=8, topk=16)
    keys = torch.randn(2, 200, 128, generator=torch.Generator().manual_seed(5))
    view = Visibility.of_mask(torch.ones(200, 200, dtype=torch.bool).tril()[None], 2)
    after, came = 0, True
    while came:
        after += 1
        store = LayerStore(spec, 2, torch.device("cpu"), Work())
        came = interrupted(lambda store=store: store.sync(keys, view, 0), after)  # type: ignore[misc]  # bound now
        store.sync(keys, view, 0)
        assert store.index_table.shape == (2, 4)
        fresh = IndexCache.empty(spec, pages=4)
        fresh.append(keys[1], torch.arange(200))
        slots = slots_of(store.index_table[1], torch.arange(200))
        for stored, wanted in zip(store.cache.codes(slots), fresh.codes(torch.arange(200)), strict=True):
            assert torch.equal(stored, wanted)
    assert after > 50


def test_inference_tensors_are_never_trusted() -> None:
    """They have no version counter, so an in-place change could not be seen."""
    store = LayerStore(IndexerSpec(heads=8, topk=16), 1, torch.device("cpu"), Work())
    with torch.inference_mode():
        keys = torch.randn(1, 10, 128)
        store.sync(keys, whole(10), 0)
        assert store.kept_columns(keys) == 0


def test_padding_that_moves_moves_every_position(mirror: Mirror) -> None:
    """A second call that declares stored columns to be padding: what follows them has new positions."""
    store = LayerStore(IndexerSpec(heads=8, topk=16), 1, torch.device("cpu"), Work())
    keys = torch.randn(1, 10, 128, generator=torch.Generator().manual_seed(0))
    store.sync(keys, whole(10), 0)
    store.sync(keys, Visibility.of_mask(mask_of("0011111111"), 1), store.kept_columns(keys))
    store.sync(keys, whole(10), store.kept_columns(keys))
    assert store.work == Work(appended=28, rebuilds=2)
    assert mirror.calls == 3


def mask_of(*rows: str) -> torch.Tensor:
    """A mask of one request from rows of 1 and 0."""
    return torch.tensor([[[c == "1" for c in row] for row in rows]])


def test_visibility_of_padded_masks() -> None:
    view = Visibility.of_mask(mask_of("000000", "001000", "001010", "001011"), 1)
    assert view.lengths.tolist() == [[0, 1, 2, 3]]
    assert view.columns is not None
    assert view.columns.tolist() == [[2, 4, 5]]
    assert view.rank.tolist() == [[0, 0, 1, 0, 2, 3]]
    assert Visibility.of_mask(mask_of("100", "110", "111"), 1).columns is None


@pytest.mark.parametrize("rows", [("1100", "0110"), ("1000", "0100"), ("1011", "1111"), ("110", "101", "111")])
def test_masks_that_are_not_lengths_are_refused(rows: tuple[str, ...]) -> None:
    """A sliding window, packed sequences, holes that later rows fill, a tree of drafts."""
    with pytest.raises(KeysieveError, match="attention_mask"):
        Visibility.of_mask(mask_of(*rows), 1)
