"""Bad calls: refused with argument, got, accepted and remedy, and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keysieve as ks
from keysieve import DecodeIndexer, IndexCache, IndexerSpec, KeysieveError
from keysieve.inputs import check_apart
from keysieve.testing import assert_untouched, random_case

SPEC = IndexerSpec(heads=8, topk=16)
CASE = random_case(SPEC, [[100, 101], [40, 0]], next_n=2, seed=51, kv_page=32)
FOUR_PARTS = re.compile(r"^\S.*: got .+; accepted: .+\. \S.+", re.DOTALL)


def good() -> dict[str, Any]:
    """A call that is accepted."""
    return {
        "query": CASE.query,
        "cache": CASE.index_cache(),
        "weights": CASE.weights,
        "seq_lens": CASE.seq_lens,
        "index_table": CASE.index_table,
        "kv_table": CASE.kv_table,
        "kv_page": 32,
        "block_rows": 40,
        "positions": torch.full((4, 16), 77, dtype=torch.int32),
        "out": torch.full((4, 16), 77, dtype=torch.int32),
        "counts": torch.full((4,), 77, dtype=torch.int32),
    }


def indexer(**options: Any) -> DecodeIndexer:
    return DecodeIndexer(SPEC, **{"max_rows": 4, "max_context": 512, "next_n": 2, "device": "cpu", **options})


def assert_refused(call: Callable[[], object], argument: str, **untouched: torch.Tensor) -> str:
    with assert_untouched(**untouched), pytest.raises(KeysieveError) as refusal:
        call()
    text = str(refusal.value)
    assert text.startswith(argument), text
    assert FOUR_PARTS.match(text), text
    return text


UE8M0 = IndexCache.empty(IndexerSpec(heads=8, topk=16, key_format="fp8_ue8m0"), pages=4, device="cpu")
MXFP4 = IndexCache.empty(IndexerSpec(heads=8, topk=16, key_format="mxfp4"), pages=4, device="cpu")

WRONG = {
    "query of another dtype": ("query", lambda a: a["query"].to(torch.bfloat16)),
    "query of other heads": ("query", lambda a: a["query"][:, :4]),
    "query of another head_dim": ("query", lambda a: a["query"][..., :64]),
    "query without rows": ("query", lambda a: a["query"][0]),
    "query as a pair": ("query", lambda a: (a["query"], a["query"])),
    "no query": ("query", lambda _: None),
    "cache tensor": ("cache", lambda _: CASE.cache),
    "cache of another format, same width": ("cache", lambda _: UE8M0),
    "cache of another width": ("cache", lambda _: MXFP4),
    "weights of another dtype": ("weights", lambda a: a["weights"].double()),
    "weights of fewer rows": ("weights", lambda a: a["weights"][:3]),
    "weights of other heads": ("weights", lambda a: a["weights"][:, :4]),
    "weights of one row": ("weights", lambda a: a["weights"][0]),
    "float lengths": ("seq_lens", lambda a: a["seq_lens"].float()),
    "lengths of fewer rows": ("seq_lens", lambda a: a["seq_lens"][:3]),
    "lengths of more rows": ("seq_lens", lambda a: torch.cat([a["seq_lens"]] * 2)),
    "lengths as a list": ("seq_lens", lambda _: [1, 2, 3, 4]),
    "3-D lengths": ("seq_lens", lambda a: a["seq_lens"].view(1, 2, 2)),
    "2-D lengths of other rows": ("seq_lens", lambda a: a["seq_lens"].view(2, 2).repeat(1, 2)),
    "int64 table": ("index_table", lambda a: a["index_table"].long()),
    "1-D table": ("index_table", lambda a: a["index_table"][0]),
    "table of strided columns": ("index_table", lambda a: a["index_table"][:, ::2]),
    "table that does not divide the rows": ("index_table", lambda a: a["index_table"][[0, 1, 1]]),
    "table without rows": ("index_table", lambda a: a["index_table"][:0]),
    "more requests than rows": ("index_table", lambda a: a["index_table"].repeat(4, 1)),
    "int64 KV table": ("kv_table", lambda a: a["kv_table"].long()),
    "KV table of other requests": ("kv_table", lambda a: a["kv_table"][[0, 1, 1]]),
    "KV table of strided columns": ("kv_table", lambda a: a["kv_table"][:, ::2]),
    "kv_page no power of two": ("kv_page", lambda _: 48),
    "kv_page zero": ("kv_page", lambda _: 0),
    "kv_page a float": ("kv_page", lambda _: 32.0),
    "block_rows zero": ("block_rows", lambda _: 0),
    "out of another dtype": ("out", lambda a: a["out"].long()),
    "out of another width": ("out", lambda a: a["out"][:, :8]),
    "out of fewer rows": ("out", lambda a: a["out"][:3]),
    "out with strided columns": ("out", lambda _: torch.zeros(4, 32, dtype=torch.int32)[:, ::2]),
    "out whose rows overlap": ("out", lambda _: torch.zeros(16, dtype=torch.int32).expand(4, 16)),
    "positions of another width": ("positions", lambda a: a["positions"][:, :8]),
    "positions the same as out": ("positions", lambda a: a["out"]),
    "counts of another dtype": ("counts", lambda a: a["counts"].long()),
    "counts of fewer rows": ("counts", lambda a: a["counts"][:3]),
    "tensors on another device": ("query", lambda a: a["query"].view(torch.uint8).to("meta")),
    "weights on another device": ("weights", lambda a: a["weights"].to("meta")),
    "site out of range": ("site", lambda _: 1 << 16),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_argument_is_named_and_nothing_is_written(name: str) -> None:
    argument, make = WRONG[name]
    call = good()
    buffers = {key: call[key] for key in ("out", "positions", "counts")}
    call[argument] = make(call)
    step = indexer()
    assert_refused(lambda: step(**call), argument, cache=CASE.cache, **buffers)
    step(**good())  # and the indexer is as good as before


def test_the_good_call_is_good() -> None:
    out = indexer()(**good())
    assert out.counts.tolist() == [16, 16, 16, 0]


def test_mxfp4_queries_are_pairs() -> None:
    spec = IndexerSpec(heads=8, topk=16, key_format="mxfp4")
    codes, words = torch.zeros(1, 8, 64, dtype=torch.uint8), torch.zeros(1, 8, dtype=torch.int32)
    rest = (MXFP4, torch.zeros(1, 8), torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32))
    for query, argument in (
        (codes, "query"),
        ((codes,), "query"),
        ((codes.to(torch.int8), words), "query[0]"),
        ((codes[:, :4], words), "query[0]"),
        ((codes, words.long()), "query[1]"),
        ((codes, words[:0]), "query[1]"),
        ((codes, words.view(torch.uint8).view(1, 8, 4)), "query[1]"),
    ):
        assert_refused(lambda query=query: ks.score(spec, query, *rest), argument)
    assert ks.score(spec, (codes, words), *rest).shape == (1, 1)
    assert ks.score(spec, [codes, words], *rest).shape == (1, 1)


def test_too_many_rows_and_other_next_n() -> None:
    call = good()
    text = assert_refused(lambda: indexer(max_rows=3)(**call), "query", out=call["out"])
    assert "max_rows = 3" in text
    text = assert_refused(lambda: indexer(next_n=(1, 4))(**call), "next_n", out=call["out"])
    assert "(1, 4)" in text
    nine = random_case(SPEC, [[9] * 8], next_n=8, seed=52)
    query, weights = (torch.cat([t, t[:1]]) for t in (nine.query.view(torch.uint8), nine.weights))
    lens = torch.full((9,), 9, dtype=torch.int32)
    step = indexer(max_rows=16)
    assert_refused(lambda: step(query, nine.index_cache(), weights, lens, nine.index_table), "next_n")


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"max_rows": 0}, "max_rows"),
        ({"max_rows": 1 << 20}, "max_rows"),
        ({"max_context": 0}, "max_context"),
        ({"max_context": 1 << 27}, "max_context"),
        ({"next_n": 0}, "next_n"),
        ({"next_n": 9}, "next_n"),
        ({"next_n": (1, 9)}, "next_n"),
        ({"next_n": ()}, "next_n"),
        ({"next_n": 1.0}, "next_n"),
        ({"max_total_keys": 0}, "max_total_keys"),
        ({"backend": "cuda"}, "backend"),
        ({"device": "nowhere"}, "device"),
        ({"dcp": object()}, "dcp"),
    ],
)
def test_an_indexer_is_refused_what_it_cannot_be(options: dict[str, Any], argument: str) -> None:
    assert_refused(lambda: indexer(**options), argument)
    if set(options) & {"max_rows", "max_context", "max_total_keys", "dcp", "next_n"}:
        asked = {"max_rows": 4, "max_context": 512, "next_n": 2, "device": "cpu", **options}
        assert_refused(lambda: ks.workspace_bytes(SPEC, **asked), argument)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"heads": 12}, "heads"),
        ({"heads": 128}, "heads"),
        ({"heads": 0}, "heads"),
        ({"topk": 0}, "topk"),
        ({"topk": 4097}, "topk"),
        ({"topk": True}, "topk"),
        ({"key_format": "fp8"}, "key_format"),
        ({"page": 128}, "page"),
        ({"head_dim": 64}, "head_dim"),
        ({"numerics": "fp16"}, "numerics"),
    ],
)
def test_a_spec_is_refused_what_no_backend_has(options: dict[str, Any], argument: str) -> None:
    assert_refused(lambda: IndexerSpec(**{"heads": 8, "topk": 16, **options}), argument)


def test_something_else_than_a_spec() -> None:
    assert_refused(lambda: DecodeIndexer("glm", 1, 1, device="cpu"), "spec")  # type: ignore[arg-type]  # on purpose
    assert_refused(lambda: ks.score(8, *list(good().values())[:5]), "spec")  # type: ignore[arg-type]  # on purpose


def test_score_refuses_a_wrong_width_or_buffer() -> None:
    args = (SPEC, CASE.query, CASE.index_cache(), CASE.weights, CASE.seq_lens, CASE.index_table)
    out = torch.zeros(4, 128, dtype=torch.bfloat16)
    for max_len, buffer, argument in (
        (-1, None, "max_len"),
        (128.5, None, "max_len"),
        (None, out, "max_len"),
        (127, out, "out"),
        (128, out.float(), "out"),
        (128, torch.zeros(4, 256, dtype=torch.bfloat16)[:, ::2], "out"),
        (128, [0], "out"),
    ):
        assert_refused(lambda w=max_len, b=buffer: ks.score(*args, w, out=b), argument, out=out)


def test_topk_refuses_wrong_arguments() -> None:
    logits = torch.zeros(4, 100, dtype=torch.bfloat16)
    lengths = torch.full((4,), 100, dtype=torch.int32)
    table = torch.zeros(2, 4, dtype=torch.int32)
    out = torch.zeros(4, 8, dtype=torch.int32)
    wrong: list[tuple[str, tuple[Any, Any, Any], dict[str, Any]]] = [
        ("logits", (logits.float(), lengths, 8), {}),
        ("logits", (logits[0], lengths, 8), {}),
        ("logits", (logits.t().contiguous().t(), lengths, 8), {}),
        ("lengths", (logits, lengths[:3], 8), {}),
        ("lengths", (logits, lengths.float(), 8), {}),
        ("k", (logits, lengths, 0), {}),
        ("k", (logits, lengths, 4097), {}),
        ("k", (logits, lengths, 2.0), {}),
        ("kv_table", (logits, lengths, 8), {"kv_table": table.long()}),
        ("kv_table", (logits, lengths, 8), {"kv_table": table[[0, 1, 1]]}),
        ("kv_page", (logits, lengths, 8), {"kv_table": table, "kv_page": 3}),
        ("row_request", (logits, lengths, 8), {"row_request": lengths}),
        ("row_request", (logits, lengths, 8), {"kv_table": table, "row_request": lengths[:2]}),
        ("out", (logits, lengths, 9), {"out": out}),
        ("counts", (logits, lengths, 8), {"counts": lengths[:2]}),
    ]
    for argument, args, options in wrong:
        assert_refused(lambda a=args, o=options: ks.topk(*a, **o), argument, out=out, lengths=lengths)


def test_the_reference_refuses_as_the_api_does() -> None:
    args = [CASE.query, CASE.index_cache(), CASE.weights, CASE.seq_lens, CASE.index_table]
    for at, value, argument in ((0, CASE.query.float(), "query"), (2, CASE.weights[:1], "weights")):
        bad = [*args[:at], value, *args[at + 1 :]]
        for score in (ks.score, ks.reference.score):
            assert_refused(lambda s=score, b=bad: s(SPEC, *b), argument)


@settings(max_examples=200)
@given(st.data())
def test_outputs_that_share_memory_are_refused(data: st.DataObject) -> None:
    """Against the set of elements each buffer covers; buffers of unlike strides may be refused beyond it."""
    rows = data.draw(st.integers(1, 4))
    memory = torch.zeros(400, dtype=torch.int32)
    buffers, cells = {}, {}
    for name in ("out", "positions"):
        width, gap, offset = (data.draw(st.integers(low, high)) for low, high in ((1, 9), (0, 12), (0, 90)))
        buffers[name] = memory.as_strided((rows, width), (width + gap, 1), offset)
        cells[name] = {offset + r * (width + gap) + c for r in range(rows) for c in range(width)}
    alike = buffers["out"].stride(0) == buffers["positions"].stride(0)
    shared = bool(cells["out"] & cells["positions"])
    if shared:
        assert_refused(lambda: check_apart(**buffers), "positions", memory=memory)
    elif alike:
        check_apart(**buffers)


def test_buffers_of_one_allocation_side_by_side_are_accepted() -> None:
    call, memory = good(), torch.full((4, 33), 77, dtype=torch.int32)
    call |= {"out": memory[:, :16], "positions": memory[:, 16:32], "counts": memory[:, 32]}
    want = indexer()(**good())
    indexer()(**call)
    assert torch.equal(memory, torch.cat([want.rows, want.positions, want.counts[:, None]], 1))
    for name, view in (("positions", memory[:, 8:24]), ("counts", memory[:, 3])):
        assert_refused(lambda n=name, v=view: indexer()(**{**call, n: v}), name, out=memory)
    args = (SPEC, CASE.query, CASE.index_cache(), CASE.weights, CASE.seq_lens, CASE.index_table, 128)
    overlapping = torch.zeros(600, dtype=torch.bfloat16).as_strided((4, 128), (127, 1))
    assert_refused(lambda: ks.score(*args, out=overlapping), "out", out=overlapping)
