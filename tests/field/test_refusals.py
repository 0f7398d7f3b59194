"""Bad input: refused by name before anything is written, with what was got, what is accepted and what to do.

Each entry changes one argument of a good call. Two names: the arguments then disagree, and either may be named. The
outputs handed in, the cache and every input keep every byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle.step import expected_step

import keysieve as ks
from field.steps import FORMATS, UNSET, assert_fault, check_step, indexer_for, poisoned, refusal_of, spec_of
from keysieve.testing import Case, assert_bitwise_equal, assert_untouched, pattern_case

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


STEP_REFUSALS: list[tuple[str, str, Change]] = [
    ("query", "float32", with_tensor("query", lambda q: q.float())),
    ("query", "int8", with_tensor("query", lambda q: q.view(torch.int8))),
    ("query", "e5m2", with_tensor("query", lambda q: q.view(torch.uint8).view(torch.float8_e5m2))),
    ("query|weights", "fewer rows", with_tensor("query", lambda q: q[:4])),
    ("query", "more heads", with_tensor("query", lambda q: torch.cat([q.view(torch.uint8)] * 2, 1).view(q.dtype))),
    ("query", "fewer heads", with_tensor("query", lambda q: q[:, :4])),
    ("query", "half the head_dim", with_tensor("query", lambda q: q[..., :64])),
    ("query", "one dimension too few", with_tensor("query", lambda q: q[:, 0])),
    ("query", "a pair for FP8", with_tensor("query", lambda q: (q, q))),
    ("query", "a list", with_tensor("query", lambda q: q.float().tolist())),
    ("query", "None", with_value("query", None)),
    ("query|cache", "meta device", with_tensor("query", lambda q: q.to("meta"))),
    ("cache", "the raw tensor", with_tensor("cache", lambda c: c.data)),
    ("cache", "None", with_value("cache", None)),
    ("cache", "MXFP4 cache", with_value("cache", ks.IndexCache.empty(spec_of("mxfp4"), pages=20, device="cpu"))),
    ("cache", "UE8M0 cache", with_value("cache", ks.IndexCache.empty(spec_of("fp8_ue8m0"), pages=20, device="cpu"))),
    ("weights", "float64", with_tensor("weights", lambda w: w.double())),
    ("weights", "float16", with_tensor("weights", lambda w: w.half())),
    ("weights", "int32", with_tensor("weights", lambda w: w.int())),
    ("weights", "fewer rows", with_tensor("weights", lambda w: w[:5])),
    ("weights", "fewer heads", with_tensor("weights", lambda w: w[:, :7])),
    ("weights", "three dimensions", with_tensor("weights", lambda w: w[..., None])),
    ("weights", "a float", with_value("weights", 1.0)),
    ("weights", "meta device", with_tensor("weights", lambda w: w.to("meta"))),
    ("seq_lens", "int16", with_tensor("seq_lens", lambda n: n.short())),
    ("seq_lens", "float", with_tensor("seq_lens", lambda n: n.float())),
    ("seq_lens", "per request", with_tensor("seq_lens", lambda n: n[:3])),
    ("seq_lens|index_table", "another shape", with_tensor("seq_lens", lambda n: n.reshape(1, 6))),
    ("seq_lens|index_table", "the transpose", with_tensor("seq_lens", lambda n: n.reshape(3, 2).t())),
    ("seq_lens", "three dimensions", with_tensor("seq_lens", lambda n: n.reshape(3, 2, 1))),
    ("seq_lens", "a list", with_tensor("seq_lens", lambda n: n.tolist())),
    ("seq_lens", "meta device", with_tensor("seq_lens", lambda n: n.to("meta"))),
    ("index_table", "int64", with_tensor("index_table", lambda t: t.long())),
    ("index_table", "column stride", with_tensor("index_table", lambda t: t[:, ::2])),
    ("index_table", "one dimension", with_tensor("index_table", lambda t: t[0])),
    ("index_table", "a row too many", with_tensor("index_table", lambda t: torch.cat([t, t[:1]]))),
    ("index_table", "None", with_value("index_table", None)),
    ("index_table", "meta device", with_tensor("index_table", lambda t: t.to("meta"))),
    ("kv_table", "int64", with_tensor("kv_table", lambda t: t.long())),
    ("kv_table", "column stride", with_tensor("kv_table", lambda t: t[:, ::2])),
    ("kv_table", "a row too few", with_tensor("kv_table", lambda t: t[:2])),
    ("kv_table", "one dimension", with_tensor("kv_table", lambda t: t[0])),
    ("kv_page", "not a power of two", with_value("kv_page", 96)),
    ("kv_page", "zero", with_value("kv_page", 0)),
    ("kv_page", "negative", with_value("kv_page", -64)),
    ("kv_page", "a float", with_value("kv_page", 64.0)),
    ("block_rows", "a float", with_value("block_rows", 64.0)),
    ("block_rows", "zero", with_value("block_rows", 0)),
    ("block_rows", "negative", with_value("block_rows", -64)),
    ("out", "int64", with_tensor("out", lambda o: o.long())),
    ("out", "too narrow", with_tensor("out", lambda o: o[:, :15])),
    ("out", "too wide", with_tensor("out", lambda o: torch.cat([o, o], 1))),
    ("out", "a row too few", with_tensor("out", lambda o: o[:5])),
    ("out", "column stride", with_tensor("out", lambda o: torch.cat([o, o], 1)[:, ::2])),
    ("out", "rows on top of each other", with_tensor("out", lambda o: o[:1].expand(6, -1))),
    ("out", "rows that overlap", with_tensor("out", lambda o: o.as_strided((6, TOPK), (TOPK - 1, 1)))),
    ("positions", "int64", with_tensor("positions", lambda o: o.long())),
    ("positions", "too narrow", with_tensor("positions", lambda o: o[:, :15])),
    ("positions", "rows on top of each other", with_tensor("positions", lambda o: o[:1].expand(6, -1))),
    ("counts", "int64", with_tensor("counts", lambda o: o.long())),
    ("counts", "too short", with_tensor("counts", lambda o: o[:5])),
    ("counts", "one shared element", with_tensor("counts", lambda o: o[:1].expand(6))),
]


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


@pytest.mark.parametrize(("argument", "what", "change"), STEP_REFUSALS, ids=[f"{a}-{w}" for a, w, _ in STEP_REFUSALS])
def test_a_step_refuses(argument: str, what: str, change: Change) -> None:
    """The step itself: one wrong argument, everything else as it should be."""
    del what
    case = good_case()
    indexer = indexer_for(case)
    arguments = arguments_of(case)
    good = dict(arguments)
    change(arguments)
    with assert_untouched(**tensors_in(good), **{f"changed_{k}": v for k, v in tensors_in(arguments).items()}):
        assert_refused(lambda: indexer(**arguments), argument)
    check_step(case, indexer)  # and the indexer still works


SCORE_NAMES = ("query", "cache", "weights", "seq_lens", "index_table")
SCORE_REFUSALS = [entry for entry in STEP_REFUSALS if entry[0].split("|")[0] in SCORE_NAMES]


@pytest.mark.parametrize(("argument", "what", "change"), SCORE_REFUSALS, ids=[f"{a}-{w}" for a, w, _ in SCORE_REFUSALS])
def test_score_refuses(argument: str, what: str, change: Change) -> None:
    """The public score checks the same arguments by the same rules."""
    del what
    case = good_case()
    arguments = {name: value for name, value in arguments_of(case).items() if name in SCORE_NAMES}
    change(arguments)
    out = torch.full((6, 320), 7.0, dtype=torch.bfloat16)
    with assert_untouched(out=out, **tensors_in(arguments)):
        assert_refused(lambda: ks.score(case.spec, **arguments, max_len=320, out=out), argument)


@pytest.mark.parametrize("max_len", [-1, 2.5, "64"])
def test_score_refuses_an_impossible_width(max_len: object) -> None:
    case = good_case()
    arguments = {name: value for name, value in arguments_of(case).items() if name in SCORE_NAMES}
    assert_refused(lambda: ks.score(case.spec, **arguments, max_len=max_len), "max_len")  # type: ignore[arg-type]  # on purpose


MXFP4_REFUSALS: list[tuple[str, Change]] = [
    ("no scale words", with_tensor("query", lambda q: q[0])),
    ("three parts", with_tensor("query", lambda q: (*q, q[1]))),
    ("bytes of FP8 width", with_tensor("query", lambda q: (torch.cat([q[0], q[0]], -1), q[1]))),
    ("words int64", with_tensor("query", lambda q: (q[0], q[1].long()))),
    ("words float", with_tensor("query", lambda q: (q[0], q[1].float()))),
    ("words of fewer rows", with_tensor("query", lambda q: (q[0], q[1][:5]))),
    ("words of fewer heads", with_tensor("query", lambda q: (q[0], q[1][:, :4]))),
    ("swapped", with_tensor("query", lambda q: (q[1], q[0]))),
    ("codes as E4M3", with_tensor("query", lambda q: (q[0].view(torch.float8_e4m3fn), q[1]))),
]


@pytest.mark.parametrize(("what", "change"), MXFP4_REFUSALS, ids=[w for w, _ in MXFP4_REFUSALS])
def test_an_mxfp4_step_refuses_a_wrong_query(what: str, change: Change) -> None:
    """An MXFP4 query is a pair: bytes [rows, heads, 64] and words [rows, heads]."""
    del what
    case = good_case("mxfp4")
    arguments = arguments_of(case)
    change(arguments)
    indexer = indexer_for(case)
    with assert_untouched(**tensors_in(arguments)):
        assert_refused(lambda: indexer(**arguments), "query")


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


def test_a_refused_step_does_not_poison_the_next() -> None:
    """After every kind of refusal in a row, the same indexer and buffers give the right bytes."""
    case = good_case()
    indexer = indexer_for(case)
    for argument, _, change in STEP_REFUSALS:
        arguments = arguments_of(case)
        change(arguments)
        with pytest.raises(ks.KeysieveError, match=argument):
            indexer(**arguments)
    arguments = arguments_of(case)
    out = indexer(**arguments)
    assert not bool((arguments["out"] == UNSET).any())
    assert_bitwise_equal(out.rows, check_step(replace(case)).rows, "rows")


@pytest.mark.parametrize("value", [(1 << 32) + 5, 1 << 31, 1 << 40, -(1 << 32) + 7, -(1 << 40)])
def test_lengths_of_64_bits_do_not_wrap(value: int) -> None:
    """int64 lengths are served as they are or refused; cut to 32 bits, 2^32 + 5 would become a plausible 5."""
    case = good_case()
    lengths = case.seq_lens.long()
    lengths[1] = value
    want = expected_step(replace(case, seq_lens=torch.where(lengths.abs() < 1 << 30, lengths, 0).int()))
    indexer = indexer_for(case)
    arguments = arguments_of(case) | {"seq_lens": lengths}
    refusal = refusal_of(lambda: indexer(**arguments))
    if refusal is not None:
        assert "seq_lens" in refusal
        assert bool((arguments["out"] == UNSET).all())
        return
    assert_bitwise_equal(arguments["out"], want.rows, "rows")
    assert_bitwise_equal(arguments["counts"], want.counts, "counts")
    if value > 0:
        assert_fault(indexer, "row 1")
