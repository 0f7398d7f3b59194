"""A step whose form is known is refused, and launched, exactly as a first call: on a faked device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from faked_gpu import SPEC, Device, arguments, build, call, moved
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keysieve as ks
from keysieve import IndexerSpec, forms, repeats
from keysieve import indexer as indexer_module
from keysieve.relaunch import Launches

Change = Callable[[Any], Any]


@pytest.fixture(params=["torch compares forms", "python compares forms", "launches are prepared at once"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A faked device, under both ways of comparing the form of tensors."""
    made = Device()
    if request.param.startswith("launches"):
        monkeypatch.setattr(repeats, "PREPARED_AFTER", 1)
        monkeypatch.setattr(Launches, "prepared", lambda launches, *_: launches.function)
    if request.param.startswith("python"):
        monkeypatch.setattr(forms, "_works", False)
    else:
        assert forms._torch_compares(), "this torch is one that the comparison was written for"
    made.install(monkeypatch)
    return made


def stretched(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with gaps between the elements of the last dimension."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with a gap between rows."""
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


OF_TENSORS: dict[str, Change] = {
    "another of the same form": lambda t: t.clone(),
    "a parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "a view of itself": lambda t: t[:],
    "None": lambda _: None,
    "a list": lambda t: bytes_of(t).tolist(),
    "an array": lambda t: bytes_of(t).numpy(),
    "on meta": lambda t: t.to("meta"),
    "one row less": lambda t: t[:-1],
    "one row more": lambda t: torch.cat([bytes_of(t), bytes_of(t)[:1]]).view(t.dtype),
    "no rows": lambda t: t[:0],
    "one column less": lambda t: t[..., :-1],
    "one dimension more": lambda t: t[None],
    "flat": lambda t: t.reshape(-1),
    "stretched": lambda t: stretched(bytes_of(t)).view(t.dtype) if t.element_size() == 1 else stretched(t),
    "padded": lambda t: padded(bytes_of(t)).view(t.dtype),
    "expanded": lambda t: t[:1].expand(t.shape),
    "int64": lambda t: bytes_of(t).to(torch.int64),
    "int16": lambda t: bytes_of(t).to(torch.int16),
    "uint32": lambda t: bytes_of(t).to(torch.int64).to(torch.uint32),
    "float16": lambda t: bytes_of(t).to(torch.float16),
    "bfloat16": lambda t: bytes_of(t).to(torch.bfloat16),
    "float64": lambda t: bytes_of(t).to(torch.float64),
    "uint8": lambda t: bytes_of(t).to(torch.uint8),
    **{f"moved by {by}": lambda t, by=by: moved(t, by) for by in (4, 8, 12, 16, 48)},
    "moved by a byte": lambda t: moved(t, 1) if t.element_size() == 1 else t,
}
OF_INTS: dict[str, Change] = {
    **{repr(v): lambda _, v=v: v for v in (None, True, False, 0, 1, -1, 63, 128, 1 << 31, 64.0, "64", 32)},
    "numpy": lambda _: np.int64(64),
    "a tensor": lambda _: torch.tensor(64),
}
OF_CACHES: dict[str, Change] = {
    "another pool": lambda c: ks.IndexCache(SPEC, c.data.clone()),
    "equal spec": lambda c: ks.IndexCache(IndexerSpec(heads=8, topk=16), c.data),
    "other heads": lambda c: ks.IndexCache(IndexerSpec(heads=64, topk=5), c.data),
    "another format": lambda c: ks.IndexCache(IndexerSpec(heads=8, topk=16, key_format="fp8_ue8m0"), c.data),
    "mxfp4": lambda _: ks.IndexCache.empty(IndexerSpec(heads=8, topk=16, key_format="mxfp4"), 9),
    "more pages": lambda _: ks.IndexCache.empty(SPEC, 10),
    "no pages": lambda _: ks.IndexCache.empty(SPEC, 0),
    "wide pages": lambda _: ks.IndexCache(
        SPEC, torch.zeros(9, 9000, dtype=torch.uint8).as_strided((9, 64, 132), (8464, 132, 1))
    ),
    "a tensor": lambda c: c.data,
    "None": lambda _: None,
    "a subclass": lambda c: type("Mine", (ks.IndexCache,), {})(SPEC, c.data),
    "on meta": lambda c: ks.IndexCache(SPEC, c.data.to("meta")),
}
OF_POSITIONS: dict[str, Change] = {
    **{repr(v): lambda _, v=v: v for v in (True, False, 1, 0)},
    "Tensor": lambda _: torch.Tensor,
}
CHANGES: list[tuple[str, str, Change]] = [
    *(
        (name, what, change)
        for name in ("query", "weights", "seq_lens", "index_table", "kv_table", "positions", "out", "counts")
        for what, change in OF_TENSORS.items()
    ),
    *((name, what, change) for name in ("kv_page", "block_rows", "site") for what, change in OF_INTS.items()),
    *(("cache", what, change) for what, change in OF_CACHES.items()),
    *(("positions", what, change) for what, change in OF_POSITIONS.items()),
    ("seq_lens", "two dimensions", lambda t: t.view(-1, 2)),
    ("seq_lens", "two dimensions with gaps", lambda t: stretched(t.view(-1, 2))),
    ("seq_lens", "two dimensions, int64", lambda t: t.view(-1, 2).long()),
    ("seq_lens", "[rows, 1]", lambda t: t.view(-1, 1)),
    ("index_table", "a row per query row", lambda t: t.repeat_interleave(2, 0)),
    ("kv_table", "a row per query row", lambda t: t.repeat_interleave(2, 0)),
    ("query", "a pair", lambda t: (t, torch.zeros(t.shape[:2], dtype=torch.int32))),
]
MEETINGS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "counts in out": lambda a: {"counts": a["out"].view(-1)[: a["counts"].numel()]},
    "positions are out": lambda a: {"positions": a["out"]},
    "positions begin in out": lambda a: {"positions": a["out"].view(-1).as_strided(a["out"].shape, (16, 1))},
    "counts in positions": lambda a: {"counts": a["positions"].view(-1)[-a["counts"].numel() :]},
    "the tables are one": lambda a: {"kv_table": a["index_table"]},
}


def without(*names: str) -> Callable[[], dict[str, Any]]:
    """A good call in which these arguments are left out."""
    return lambda: arguments() | {name: False if name == "positions" else None for name in names}


GOOD: dict[str, Callable[[], dict[str, Any]]] = {
    "all given": arguments,
    "rows and counts": without("positions"),
    "nothing given": without("positions", "out", "counts"),
    "no table": without("kv_table", "positions"),
    "defaults": without("kv_page", "block_rows", "positions"),
    "new positions": lambda: arguments() | {"positions": True},
    "64-bit lengths": lambda: arguments() | {"seq_lens": torch.full((4,), 100, dtype=torch.int64)},
    "bfloat16 weights": lambda: arguments(dtype=torch.bfloat16),
}


class Outcome:
    """What a call did: its refusal, or its launches with the addresses of what it returned named."""

    def __init__(self, device: Device, indexer: ks.DecodeIndexer, given: dict[str, Any]) -> None:
        device.launched.clear()
        buffers = {name: given[name] for name in ("out", "counts", "positions")}
        before = {n: t.clone() for n, t in buffers.items() if isinstance(t, torch.Tensor) and not t.is_meta}
        self.error: tuple[type, str] | None = None
        self.launched: list[Any] = []
        try:
            result = call(indexer, given)
        except Exception as error:
            self.error = type(error), str(error)
            assert not device.launched, "launched, then refused"
        else:
            self.launched = named(device.launched, result, buffers)
            self.returned = [None if t is None else (t.dtype, t.shape, t.stride()) for t in result]
            assert all(
                buffers[n] is t for n, t in zip(("out", "counts"), result, strict=False) if buffers[n] is not None
            )
        for name, content in before.items():
            assert torch.equal(bits(buffers[name]), bits(content)), f"{name} was written by the host"

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"{self.error or self.launched}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def named(launched: list[Any], result: ks.Selection, buffers: dict[str, Any]) -> list[Any]:
    """Launches in which the addresses of buffers that the call allocated are named: they differ from call to call."""
    new = {
        t.data_ptr(): f"new {name}"
        for name, t in zip(("out", "counts", "positions"), result, strict=True)
        if t is not None and t is not buffers[name] and t.numel()
    }
    return [(label, tuple(new.get(a, a) if a > 4096 else a for a in args)) for label, args in launched]


def same_as_first(device: Device, indexer: ks.DecodeIndexer, given: dict[str, Any]) -> Outcome:
    """The outcome of a call beside that of the same call by an indexer that knows no forms; fails if they differ."""
    now = Outcome(device, indexer, given)
    known, indexer._known = indexer._known, ()
    first = Outcome(device, indexer, given)
    indexer._known = known
    assert now == first
    return now


@pytest.mark.parametrize("good", GOOD)
def test_a_changed_argument_meets_what_it_meets_first(device: Device, good: str) -> None:
    """Any one argument changed after a good call: the refusal, or the launches, of a first call; nothing written."""
    refused = accepted = 0
    for name, _, change in CHANGES:
        indexer, given = build(), GOOD[good]()
        if not isinstance(given[name], torch.Tensor) and name in ("positions", "out", "counts", "kv_table"):
            continue
        assert Outcome(device, indexer, given).error is None
        try:
            changed = given | {name: change(given[name])}
        except (RuntimeError, TypeError, ks.KeysieveError):
            continue  # the change itself is impossible for this tensor
        if same_as_first(device, indexer, changed).error is None:
            accepted += 1
        else:
            refused += 1
        assert same_as_first(device, indexer, given).error is None  # and the good call is still one
    assert refused > 60
    assert accepted > 25


@pytest.mark.parametrize("meeting", MEETINGS)
def test_outputs_that_meet_after_a_good_call(device: Device, meeting: str) -> None:
    indexer, given = build(), arguments()
    assert Outcome(device, indexer, given).error is None
    met = same_as_first(device, indexer, given | MEETINGS[meeting](given))
    assert (met.error is None) == (meeting == "the tables are one")


def test_buffers_side_by_side_are_apart(device: Device) -> None:
    """Rows and positions interleaved in one allocation are accepted, known form or not."""
    indexer, both = build(), torch.zeros(4, 32, dtype=torch.int32)
    beside = arguments() | {"out": both[:, :16], "positions": both[:, 16:]}
    apart = arguments() | {"out": torch.zeros(4, 32, dtype=torch.int32)[:, :16]}
    apart["positions"] = torch.zeros(4, 32, dtype=torch.int32)[:, 16:]
    for buffers in (apart, beside, apart, beside):
        assert same_as_first(device, indexer, buffers).error is None


@pytest.mark.parametrize("good", GOOD)
def test_a_repeated_form_is_not_checked_again(device: Device, good: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the other tests here would compare the checked path with itself. New tensors, addresses read anew."""
    indexer = build()
    assert Outcome(device, indexer, GOOD[good]()).error is None
    again = GOOD[good]()
    first = Outcome(device, build(), again)
    monkeypatch.setattr(indexer_module, "check_step", None)  # calling it would be an error
    known = Outcome(device, indexer, again)
    assert known.error is None
    assert len(known.launched) == len(first.launched) == 2
    given = {v.data_ptr() for v in again.values() if isinstance(v, torch.Tensor)} | {again["cache"].data.data_ptr()}
    if good == "64-bit lengths":
        given.remove(again["seq_lens"].data_ptr())  # converted into the indexer's own
    used = {a for _, args in known.launched for a in args}
    assert given <= used
    for (label, now), (first_label, then) in zip(known.launched, first.launched, strict=True):
        assert label == first_label
        # All but the workspace, which is each indexer's own: sizes, the caller's addresses, names of new buffers.
        assert [a for a in now if ours(a, given)] == [a for a in then if ours(a, given)]


def ours(argument: int | str, addresses: set[int]) -> bool:
    return isinstance(argument, str) or argument < 4096 or argument in addresses


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],  # this list is the whole one
)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(sorted(GOOD)),
            st.one_of(st.none(), st.integers(0, len(CHANGES) - 1)),
            st.sampled_from([2, 4, 6, 8, 10]),
            st.sampled_from([1, 2]),
            st.sampled_from([1, 6, 7]),
        ),
        min_size=2,
        max_size=14,
    )
)
def test_any_history_of_calls(device: Device, steps: list[tuple[str, int | None, int, int, int]]) -> None:
    """Good and bad calls of many forms, more than are remembered: each ends as it would on a fresh indexer."""
    indexer = build()
    for good, change, rows, next_n, columns in steps:
        given = GOOD[good]()
        fresh = arguments(rows, next_n=next_n, columns=columns)
        given |= {n: fresh[n] for n, v in given.items() if isinstance(v, torch.Tensor | ks.IndexCache)}
        if change is not None:
            name, _, changed = CHANGES[change]
            try:
                given[name] = changed(given[name])
            except (RuntimeError, TypeError, AttributeError, IndexError, ks.KeysieveError):
                continue
        outcome = same_as_first(device, indexer, given)
        assert (outcome.error is None) or rows > 8 or change is not None
    assert len(indexer._known) <= repeats.MOST_FORMS


def test_a_tensor_changed_in_place_is_seen(device: Device) -> None:
    """The same objects with another form or other memory: what a tensor is now counts, not which object it is."""
    indexer, given = build(), arguments()
    assert Outcome(device, indexer, given).error is None
    given["weights"].resize_(3, 8)
    assert same_as_first(device, indexer, given).error is not None
    given["weights"].resize_(4, 8)
    given["index_table"].set_(torch.zeros(2, 6, dtype=torch.int32))
    given["cache"].data.set_(torch.zeros(9, 64, 132, dtype=torch.uint8))
    outcome = same_as_first(device, indexer, given)
    assert given["cache"].data.data_ptr() in outcome.launched[0][1]
    aligned = given["cache"].data.clone()
    given["cache"].data.set_(moved(aligned, 4))
    assert same_as_first(device, indexer, given).error is not None
    given["cache"].data.set_(aligned)
    given["out"].t_()
    assert same_as_first(device, indexer, given).error is not None


def test_no_tensor_of_a_call_is_kept(device: Device) -> None:
    """A form holds sizes and addresses of the workspace, not the caller's memory: that may be freed and used anew."""
    indexer, given = build(), arguments()
    assert Outcome(device, indexer, given).error is None
    assert Outcome(device, indexer, given | {"seq_lens": given["seq_lens"].long()}).error is None
    alive = [weakref.ref(v) for v in given.values() if isinstance(v, torch.Tensor | ks.IndexCache)]
    assert len(alive) == 9
    del given
    gc.collect()
    assert [ref() for ref in alive] == [None] * 9
    assert len(indexer._known) == 2


@pytest.mark.parametrize("good", GOOD)
def test_a_dropped_indexer_gives_its_workspace_back_at_once(device: Device, good: str) -> None:
    """Known forms hold the runner; were they part of a cycle, gigabytes would wait for the garbage collector."""
    indexer = build()
    for _ in range(2):
        assert Outcome(device, indexer, GOOD[good]()).error is None
    assert indexer._known
    workspace = weakref.ref(indexer._runner)
    gc.collect()
    gc.disable()
    try:
        del indexer
        assert workspace() is None
    finally:
        gc.enable()


def test_formats_at_the_same_addresses_are_told_apart(device: Device) -> None:
    """Two FP8 formats have pools of one shape: a plan that ignored the format would read the wrong scales."""
    indexer, given = build(), arguments()
    assert Outcome(device, indexer, given).error is None
    other = ks.IndexCache(IndexerSpec(8, 16, "fp8_ue8m0"), given["cache"].data)
    error = same_as_first(device, indexer, given | {"cache": other}).error
    assert error is not None
    assert "fp8_fp32" in error[1]


def test_two_dimensional_lengths_with_gaps_are_never_read_in_place(device: Device) -> None:
    """The checks flatten them into a copy; a kernel handed the caller's address would read the gaps."""
    indexer, given = build(), arguments()
    given["seq_lens"] = stretched(given["seq_lens"].view(2, 2))
    for _ in range(3):
        assert same_as_first(device, indexer, given).error is None
        call(indexer, given)
        assert all(given["seq_lens"].data_ptr() not in args for _, args in device.launched)


OF_PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    "another pair": lambda codes, words: (codes.clone(), words.clone()),
    "a list": lambda codes, words: [codes, words],
    "codes alone": lambda codes, _: codes,
    "codes in a tuple": lambda codes, _: (codes,),
    "three": lambda codes, words: (codes, words, words),
    "no words": lambda codes, _: (codes, None),
    "swapped": lambda codes, words: (words, codes),
    "wide words": lambda codes, words: (codes, words.long()),
    "words of one row less": lambda codes, words: (codes, words[:-1]),
    "words with gaps": lambda codes, words: (codes, stretched(words)),
    "codes moved by 4": lambda codes, words: (moved(codes, 4), words),
    "words moved by 4": lambda codes, words: (codes, moved(words, 4)),
    "codes of another width": lambda _, words: (torch.zeros(4, SPEC.heads, 128, dtype=torch.uint8), words),
}


@pytest.mark.parametrize("change", OF_PAIRS)
def test_a_query_of_two_tensors_is_known_as_well(device: Device, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MXFP4: codes and scale words. A repeated form is not checked; any change meets what it meets first."""
    spec = IndexerSpec(SPEC.heads, SPEC.topk, "mxfp4")
    indexer = ks.DecodeIndexer(spec, 8, 384, next_n=(1, 2), device="cpu")
    codes = torch.zeros(4, SPEC.heads, 64, dtype=torch.uint8)
    words = torch.full((4, SPEC.heads), 0x7F7F7F7F, dtype=torch.int32)
    good = arguments() | {"query": (codes, words), "cache": ks.IndexCache.empty(spec, 9)}
    assert Outcome(device, indexer, good).error is None
    changed = good | {"query": OF_PAIRS[change](codes, words)}
    outcome = same_as_first(device, indexer, changed)
    assert (outcome.error is None) == (change in ("another pair", "a list", "words moved by 4"))
    if outcome.error is None:
        assert changed["query"][1].data_ptr() in outcome.launched[0][1]
    monkeypatch.setattr(indexer_module, "check_step", None)  # calling it would be an error
    assert Outcome(device, indexer, good).error is None


@pytest.mark.parametrize("many", [False, True])
def test_strided_counts_are_refused(device: Device, many: bool) -> None:
    """The kernels write counts side by side."""
    indexer, given = build(), arguments()
    if many:
        assert Outcome(device, indexer, given).error is None
    error = same_as_first(device, indexer, given | {"counts": torch.zeros(4, 2, dtype=torch.int32)[:, 0]}).error
    assert error is not None
    assert "counts" in error[1]
