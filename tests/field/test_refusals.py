"""Bad input to a step or to the public score: refused by name before anything is written.

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
from field.refusing import TOPK, Change, arguments_of, assert_refused, good_case, tensors_in, with_tensor, with_value
from field.steps import UNSET, assert_fault, check_step, indexer_for, refusal_of, spec_of
from keysieve.testing import assert_bitwise_equal, assert_untouched

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


@pytest.mark.parametrize(
    ("what", "make"),
    [
        ("float32", lambda: torch.zeros(6, 320)),
        ("int16", lambda: torch.zeros(6, 320, dtype=torch.int16)),
        ("too narrow", lambda: torch.zeros(6, 319, dtype=torch.bfloat16)),
        ("a row too few", lambda: torch.zeros(5, 320, dtype=torch.bfloat16)),
        ("column stride", lambda: torch.zeros(6, 640, dtype=torch.bfloat16)[:, ::2]),
        ("rows on top of each other", lambda: torch.zeros(1, 320, dtype=torch.bfloat16).expand(6, -1)),
        ("rows that overlap", lambda: torch.zeros(2000, dtype=torch.bfloat16).as_strided((6, 320), (319, 1))),
        ("a list", lambda: [0.0]),
    ],
)
def test_score_refuses_an_output_it_cannot_fill(what: str, make: Callable[[], Any]) -> None:
    """The caller's logits buffer is checked like the other outputs."""
    del what
    case = good_case()
    arguments = {name: value for name, value in arguments_of(case).items() if name in SCORE_NAMES}
    out = make()
    with assert_untouched(**tensors_in({"out": out})):
        assert_refused(lambda: ks.score(case.spec, **arguments, max_len=320, out=out), "out")


@pytest.mark.parametrize("shift", [0, 1, 8, 15])
def test_outputs_that_share_memory_are_refused(shift: int) -> None:
    """Rows and positions written over each other: whichever comes last wins, silently. Side by side is fine."""
    case = good_case()
    both = torch.full((case.rows, 3 * TOPK), UNSET, dtype=torch.int32)
    indexer = indexer_for(case)
    arguments = arguments_of(case) | {"out": both[:, :TOPK], "positions": both[:, shift : shift + TOPK]}
    with assert_untouched(both=both):
        assert_refused(lambda: indexer(**arguments), "positions|out")
    arguments |= {"positions": both[:, TOPK : 2 * TOPK]}
    indexer(**arguments)
    want = check_step(case)
    assert_bitwise_equal(both[:, :TOPK], want.rows, "rows beside positions")
    assert_bitwise_equal(both[:, TOPK : 2 * TOPK], want.positions, "positions beside rows")
    assert bool((both[:, 2 * TOPK :] == UNSET).all())
