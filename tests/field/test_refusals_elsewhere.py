"""Bad input elsewhere: the public top-k, append, pools, specs, and limits an indexer was made for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import keysieve as ks
from field.refusing import Change, arguments_of, assert_refused, good_case, tensors_in, with_tensor, with_value
from field.steps import FORMATS, check_step, indexer_for, poisoned, spec_of
from keysieve.testing import assert_untouched

TOPK_REFUSALS: list[tuple[str, str, Change]] = [
    ("logits", "float32", with_tensor("logits", lambda x: x.float())),
    ("logits", "float16", with_tensor("logits", lambda x: x.half())),
    ("logits", "one row", with_tensor("logits", lambda x: x[0])),
    ("logits", "column stride", with_tensor("logits", lambda x: x[:, ::2])),
    ("logits", "a list", with_tensor("logits", lambda x: x.tolist())),
    ("logits|lengths", "meta device", with_tensor("logits", lambda x: x.to("meta"))),
    ("lengths", "int16", with_tensor("lengths", lambda n: n.short())),
    ("lengths", "too few", with_tensor("lengths", lambda n: n[:3])),
    ("lengths", "too many", with_tensor("lengths", lambda n: torch.cat([n, n]))),
    ("lengths", "a list", with_tensor("lengths", lambda n: n.tolist())),
    ("k", "zero", with_value("k", 0)),
    ("k", "too large", with_value("k", 4097)),
    ("k", "a float", with_value("k", 4.0)),
    ("out", "too narrow", with_tensor("out", lambda o: o[:, :3])),
    ("out", "int64", with_tensor("out", lambda o: o.long())),
    ("out", "rows on top of each other", with_tensor("out", lambda o: o[:1].expand(4, -1))),
    ("counts", "too short", with_tensor("counts", lambda o: o[:3])),
    ("kv_table", "int64", with_tensor("kv_table", lambda t: t.long())),
    ("kv_table", "rows that do not divide", with_tensor("kv_table", lambda t: torch.cat([t, t[:1]]))),
    ("kv_page", "not a power of two", with_value("kv_page", 24)),
    ("block_rows", "zero", with_value("block_rows", 0)),
    ("row_request", "too short", with_value("row_request", torch.zeros(3, dtype=torch.int32))),
    ("row_request", "float", with_value("row_request", torch.zeros(4))),
]


@pytest.mark.parametrize(("argument", "what", "change"), TOPK_REFUSALS, ids=[f"{a}-{w}" for a, w, _ in TOPK_REFUSALS])
def test_the_public_top_k_refuses(argument: str, what: str, change: Change) -> None:
    """The public top-k: one wrong argument at a time."""
    del what
    arguments: dict[str, Any] = {
        "logits": torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
        "lengths": torch.tensor([64, 0, 5, 63], dtype=torch.int32),
        "k": 4,
        "kv_table": torch.arange(8, dtype=torch.int32).reshape(2, 4),
        "kv_page": 16,
        "block_rows": 16,
        "out": poisoned(4, 4),
        "counts": poisoned(4),
    }
    good = dict(arguments)
    ks.topk(**{**good, "out": None, "counts": None})
    change(arguments)
    with assert_untouched(**tensors_in(good)):
        assert_refused(lambda: ks.topk(**arguments), argument)


APPEND_REFUSALS: list[tuple[str, str, Change]] = [
    ("keys", "float64", with_tensor("keys", lambda k: k.double())),
    ("keys", "float16", with_tensor("keys", lambda k: k.half())),
    ("keys", "half the head_dim", with_tensor("keys", lambda k: k[:, :64])),
    ("keys", "one key without its dimension", with_tensor("keys", lambda k: k[0])),
    ("keys", "meta device", with_tensor("keys", lambda k: k.to("meta"))),
    ("slots", "int32", with_tensor("slots", lambda s: s.int())),
    ("slots", "too few", with_tensor("slots", lambda s: s[:3])),
    ("slots", "two dimensions", with_tensor("slots", lambda s: s[:, None])),
    ("slots", "a list", with_tensor("slots", lambda s: s.tolist())),
    ("slots", "beyond the pool", with_tensor("slots", lambda s: torch.cat([s[:-1], torch.tensor([2 * 64])]))),
    ("slots", "far beyond the pool", with_tensor("slots", lambda s: torch.cat([s[:-1], torch.tensor([1 << 40])]))),
]


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize(
    ("argument", "what", "change"), APPEND_REFUSALS, ids=[f"{a}-{w}" for a, w, _ in APPEND_REFUSALS]
)
def test_append_refuses(argument: str, what: str, change: Change, key_format: str) -> None:
    """A refused append has written nothing, not even the good tokens before the bad one."""
    del what
    cache = ks.IndexCache.empty(spec_of(key_format), pages=2, device="cpu")
    cache.data.fill_(0xA7)
    arguments = {"keys": torch.randn(5, 128), "slots": torch.tensor([3, 70, -1, 127, 0])}
    change(arguments)
    with assert_untouched(data=cache.data):
        assert_refused(lambda: cache.append(**arguments), argument)


def test_append_skips_negative_slots_and_writes_the_rest() -> None:
    """Negative slots are padding, not errors; the refusals above are not simply refusals of everything."""
    cache = ks.IndexCache.empty(spec_of(), pages=2, device="cpu")
    cache.data.fill_(0xA7)
    cache.append(torch.randn(3, 128), torch.tensor([-1, -(1 << 40), -5]))
    assert bool((cache.data == 0xA7).all())
    cache.append(torch.randn(1, 128), torch.tensor([64]))
    assert bool((cache.data[0] == 0xA7).all())
    assert not bool((cache.data[1] == 0xA7).all())


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("max_rows", 0),
        ("max_rows", -4),
        ("max_rows", 1.5),
        ("max_context", 0),
        ("max_context", 1 << 40),
        ("next_n", 0),
        ("next_n", 9),
        ("next_n", (1, 12)),
        ("next_n", ()),
        ("max_total_keys", -1),
        ("max_total_keys", 0),
        ("device", "cpuu"),
        ("backend", "gpu"),
    ],
)
def test_an_indexer_with_impossible_limits_is_refused(argument: str, value: object) -> None:
    """When the indexer is made, and when its size is asked for."""
    limits: dict[str, Any] = {"max_rows": 8, "max_context": 4096, "next_n": 1, "device": "cpu", "backend": "cpu"}
    limits[argument] = value
    assert_refused(lambda: ks.DecodeIndexer(spec_of(), **limits), argument)
    assert_refused(lambda: ks.workspace_bytes(spec_of(), **limits), argument)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("heads", 12), ("heads", "32"), ("topk", 0), ("key_format", "fp8"), ("page", 16), ("numerics", "fp16")],
)
def test_a_spec_with_impossible_values_is_refused(argument: str, value: object) -> None:
    good: dict[str, Any] = {"heads": 32, "topk": 2048, "key_format": "fp8_fp32", "page": 64, "numerics": None}
    ks.IndexerSpec(**good)
    assert_refused(lambda: ks.IndexerSpec(**{**good, argument: value}), argument)


def test_more_rows_than_the_indexer_was_made_for() -> None:
    """A step beyond max_rows is refused with both numbers; the outputs stay as they were."""
    case = good_case()
    indexer = indexer_for(case, max_rows=5)
    arguments = arguments_of(case)
    with assert_untouched(**tensors_in(arguments)), pytest.raises(ks.KeysieveError, match=r"max_rows") as refusal:
        indexer(**arguments)
    assert "6" in str(refusal.value)
    assert "5" in str(refusal.value)


def test_a_next_n_the_indexer_was_not_made_for() -> None:
    """Two rows per request in an indexer for one, or for (1, 3): refused by name."""
    case = good_case()
    for prepared in (1, (1, 3)):
        indexer = indexer_for(case, next_n=prepared)
        arguments = arguments_of(case)
        with assert_untouched(**tensors_in(arguments)), pytest.raises(ks.KeysieveError, match="next_n"):
            indexer(**arguments)


def test_a_step_larger_than_max_total_keys() -> None:
    """The bound on the compact buffer counts ``next_n * 128 * tiles`` of scored requests: one tile more is refused.

    Requests: 101 keys (one tile), 300 (three), 66 (one), two rows each: 2 * 128 * 5 = 1,280 elements.
    """
    case = good_case()
    check_step(case, indexer_for(case, max_total_keys=1280))
    indexer = indexer_for(case, max_total_keys=1152)
    arguments = arguments_of(case)
    with assert_untouched(**tensors_in(arguments)), pytest.raises(ks.KeysieveError, match="max_total_keys") as refusal:
        indexer(**arguments)
    assert "1280" in str(refusal.value).replace(",", "")
    assert "1152" in str(refusal.value).replace(",", "")


@pytest.mark.parametrize("key_format", FORMATS)
def test_caches_that_do_not_fit_their_format(key_format: str) -> None:
    """Wrong dtype, rank, width, inner strides, overlapping pages: each is refused when the tensor is wrapped."""
    spec = spec_of(key_format)
    width = spec.format.width
    good = torch.zeros(4, 64, width, dtype=torch.uint8)
    ks.IndexCache(spec, good)
    bad = {
        "int8": good.view(torch.int8),
        "float8": good.view(torch.float8_e4m3fn),
        "two dimensions": good[0],
        "four dimensions": good[:, :, :, None],
        "token stride": torch.zeros(4, 64, width + 4, dtype=torch.uint8)[:, :, :width],
        "byte stride": torch.zeros(4, 64, 2 * width, dtype=torch.uint8)[:, :, ::2],
        "every other token": torch.zeros(4, 128, width, dtype=torch.uint8)[:, ::2],
        "overlapping pages": good.view(-1).as_strided((3, 64, width), (64 * width - 16, width, 1)),
        "one page repeated": good[:1].expand(4, -1, -1),
        "a list": good.tolist(),
    }
    for what, tensor in bad.items():
        with pytest.raises(ks.KeysieveError) as refusal:
            ks.IndexCache(spec, tensor)
        assert "accepted:" in str(refusal.value), what
