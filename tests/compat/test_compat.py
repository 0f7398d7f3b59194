"""FlashInfer- and DeepGEMM-style names: their signatures, and their semantics beside plain descriptions of theirs."""

from __future__ import annotations

import inspect
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import keysieve as ks
from keysieve.checks import KeysieveError, as_typed
from keysieve.compat import deep_gemm, flashinfer
from keysieve.reference.topk import topk as topk_reference

SIGNATURES: dict[Any, str] = {
    flashinfer.top_k_page_table_transform: "input src_page_table lengths k row_to_batch deterministic tie_break "
    "dsa_graph_safe row_starts page_table_row_starts * page_size out out_raw_indices",
    flashinfer.top_k_ragged_transform: "input offsets lengths k deterministic tie_break dsa_graph_safe row_starts",
    flashinfer.top_k: "input k sorted deterministic tie_break dsa_graph_safe",
    deep_gemm.fp8_paged_mqa_logits: "q kv_cache weights context_lens block_table schedule_meta max_context_len "
    "clean_logits indices",
    deep_gemm.fp8_fp4_paged_mqa_logits: "q kv_cache weights context_lens block_table schedule_meta max_context_len "
    "clean_logits logits_dtype indices",
    deep_gemm.get_paged_mqa_logits_metadata: "context_lens block_kv num_sms indices",
}
"""FlashInfer 0.6.18 and sgl-deep-gemm 0.1.5: names in order, * where keywords begin."""


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_signatures_are_the_originals(function: Any) -> None:
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name)
    assert names == SIGNATURES[function].split()


def test_what_is_not_here_is_told() -> None:
    with pytest.raises(AttributeError, match=r"fp8_mqa_logits.*import deep_gemm too"):
        _ = deep_gemm.fp8_mqa_logits
    with pytest.raises(AttributeError, match=r"sampling.*import flashinfer too"):
        _ = flashinfer.sampling
    assert [int(t) for t in flashinfer.TopKTieBreak] == [0, 1, 2]


def winners(row: torch.Tensor, length: int, k: int) -> list[int]:
    """By value, then by position; no NaN in these rows."""
    order = sorted(range(length), key=lambda i: (-float(row[i]), i))
    return sorted(order[:k])


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("mapped", [False, True])
def test_page_table_transform(page_size: int, mapped: bool) -> None:
    torch.manual_seed(page_size)
    lengths = torch.tensor([300, 5, 0, 64], dtype=torch.int32)
    rows = (torch.randn(4, 300) * 2).round().bfloat16()  # many ties
    table = torch.randint(0, 1000, (2 if mapped else 4, 300), dtype=torch.int32)
    owner = torch.tensor([1, 0, 0, 1], dtype=torch.int32) if mapped else None
    out, raw = (torch.full((4, 16), 7, dtype=torch.int32) for _ in range(2))
    got = flashinfer.top_k_page_table_transform(
        rows, table, lengths, 16, owner, True, 1, True, page_size=page_size, out=out, out_raw_indices=raw
    )
    assert got is out
    for row in range(4):
        positions = winners(rows[row], int(lengths[row]), 16)
        entries = table[int(owner[row]) if owner is not None else row]
        slots = [int(entries[p // page_size]) * page_size + p % page_size for p in positions]
        assert raw[row].tolist() == positions + [-1] * (16 - len(positions))
        assert out[row].tolist() == slots + [-1] * (16 - len(slots))


def test_ragged_transform_and_top_k() -> None:
    torch.manual_seed(0)
    rows = (torch.randn(3, 200) * 2).round().bfloat16()
    lengths, offsets = torch.tensor([200, 7, 0]).int(), torch.tensor([1000, 2000, 3000]).int()
    got = flashinfer.top_k_ragged_transform(rows, offsets, lengths, 8)
    for row in range(3):
        positions = winners(rows[row], int(lengths[row]), 8)
        assert got[row].tolist() == [p + int(offsets[row]) for p in positions] + [-1] * (8 - len(positions))
    values, indices = flashinfer.top_k(rows, 8)
    assert indices.dtype == torch.int64
    assert indices.tolist() == [winners(row, 200, 8) for row in rows]
    torch.testing.assert_close(values, rows.gather(1, indices), rtol=0, atol=0)


def test_sorted_top_k_is_by_value_then_position_with_nan_last() -> None:
    row = torch.tensor([[1.0, float("nan"), 3.0, 3.0, float("-inf"), 2.0]]).bfloat16()
    values, indices = flashinfer.top_k(row, 6, sorted=True)
    assert indices.tolist() == [[2, 3, 5, 0, 4, 1]]
    assert values[0, :5].tolist() == [3.0, 3.0, 2.0, 1.0, float("-inf")]
    assert values[0, 5].isnan()


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"input": torch.zeros(1, 9)}, "input"),
        ({"tie_break": 2}, "tie_break"),
        ({"row_starts": torch.zeros(1, dtype=torch.int32)}, "row_starts"),
        ({"page_table_row_starts": torch.zeros(1, dtype=torch.int32)}, "page_table_row_starts"),
        ({"src_page_table": torch.zeros(2, 9, dtype=torch.int32)}, "src_page_table"),
        ({"out_raw_indices": torch.zeros(1, 3, dtype=torch.int32)}, "out_raw_indices"),
        ({"input": "logits"}, "input"),
        ({"input": torch.zeros(9).bfloat16()}, "input"),
        ({"src_page_table": [[0]]}, "src_page_table"),
        ({"src_page_table": torch.zeros(1, 18, dtype=torch.int32)[:, ::2]}, "src_page_table"),
        ({"page_size": 3}, "page_size"),
        ({"page_size": 0}, "page_size"),
        ({"row_to_batch": torch.zeros(2, dtype=torch.int32)}, "row_to_batch"),
        ({"lengths": torch.zeros(2, dtype=torch.int32)}, "lengths"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_write_nothing(change: dict[str, Any], argument: str) -> None:
    out = torch.full((1, 4), 7, dtype=torch.int32)
    arguments: dict[str, Any] = {
        "input": torch.zeros(1, 9).bfloat16(),
        "src_page_table": torch.zeros(1, 9, dtype=torch.int32),
        "lengths": torch.tensor([9], dtype=torch.int32),
        "k": 4,
        "out": out,
    }
    with pytest.raises(KeysieveError, match=f"{argument}: got"):
        flashinfer.top_k_page_table_transform(**arguments | change)
    assert (out == 7).all()


# ------------------------------------------------------------------------------------------------------------ DeepGEMM


def described(query: torch.Tensor, cache: ks.IndexCache, weights: torch.Tensor, lens: list[int], table: Any) -> Any:
    """float64 logits as DeepGEMM describes them: sum over heads of relu(q . k) * w, times the key's scale."""
    rows = []
    for row, length in enumerate(lens):
        position = torch.arange(length)
        request = row * table.shape[0] // len(lens)
        keys = cache.read(table[request, position // 64].long() * 64 + position % 64).double()  # scaled
        dots = (query[row].double() @ keys.T).clamp_min(0)
        rows.append((dots * weights[row].double()[:, None]).sum(0))
    return rows


@pytest.mark.parametrize("form", ["per row", "last row", "last row, 2-D"])
def test_paged_logits(form: str) -> None:
    torch.manual_seed(1)
    spec = ks.IndexerSpec(32, 1, "fp8_fp32", numerics="fp32")
    cache = ks.IndexCache.empty(spec, pages=9)
    cache.append(torch.randn(576, 128), torch.arange(576))
    table = torch.tensor([[3, 1, 8, 0], [2, 7, 5, 6]], dtype=torch.int32)
    query, scale = ks.quantize_query(spec, torch.randn(6, 32, 128))
    weights = ks.fold_weights(torch.randn(6, 32), scale, 0.1)
    lens = [198, 199, 200, 0, 0, 1]
    given = {
        "per row": torch.tensor(lens, dtype=torch.int32).view(2, 3),
        "last row": torch.tensor([200, 1], dtype=torch.int32),
        "last row, 2-D": torch.tensor([[200], [1]], dtype=torch.int32),
    }[form]
    plan = deep_gemm.get_paged_mqa_logits_metadata(given, 64, deep_gemm.get_num_sms())
    logits = deep_gemm.fp8_paged_mqa_logits(
        query.view(2, 3, 32, 128), cache.data.unsqueeze(2), weights, given, table, plan, 256
    )
    assert logits.shape == (6, 256)
    for row, exact in enumerate(described(query, cache, weights, lens, table)):
        assert logits[row, lens[row] :].isneginf().all()
        bound = exact.abs() * 2.0**-8 + 1e-3
        assert ((logits[row, : lens[row]].double() - exact).abs() <= bound).all()


def test_mxfp4_takes_codes_and_scales() -> None:
    torch.manual_seed(2)
    spec = ks.IndexerSpec(16, 1, "mxfp4", numerics="fp32")
    cache = ks.IndexCache.empty(spec, pages=2)
    cache.append(torch.randn(100, 128), torch.arange(100))
    (codes, words), _ = ks.quantize_query(spec, torch.randn(2, 16, 128))
    weights = torch.randn(2, 16)
    lens, table = torch.tensor([[99, 100]], dtype=torch.int32), torch.tensor([[0, 1]], dtype=torch.int32)
    got = deep_gemm.fp8_fp4_paged_mqa_logits(
        (codes.view(torch.int8).view(1, 2, 16, 64), words.view(1, 2, 16)),
        cache.data.unsqueeze(2),
        weights,
        lens,
        table,
        None,
        128,
    )
    wanted = ks.score(spec, (codes, words), cache, weights, lens, table, max_len=128)
    torch.testing.assert_close(got.view(torch.int16), wanted.view(torch.int16), rtol=0, atol=0)


def test_a_script_of_both_libraries_runs_by_its_imports_alone() -> None:
    """DeepGEMM's logits, then FlashInfer's selection, as they are typed today."""
    torch.manual_seed(3)
    spec = ks.IndexerSpec(32, 64, "fp8_fp32", numerics="fp32")
    cache = ks.IndexCache.empty(spec, pages=10)
    cache.append(torch.randn(640, 128), torch.arange(640))
    q, scale = ks.quantize_query(spec, torch.randn(1, 32, 128))
    weights = ks.fold_weights(torch.randn(1, 32), scale, 0.1)
    lens, table = torch.tensor([600], dtype=torch.int32), torch.randperm(10).view(1, 10).int()
    metadata = deep_gemm.get_paged_mqa_logits_metadata(lens.view(-1, 1), 64, deep_gemm.get_num_sms())
    logits = deep_gemm.fp8_paged_mqa_logits(
        q.unsqueeze(1), cache.data.view(-1, 64, 1, 132), weights, lens.view(-1, 1), table, metadata, 640
    )
    slots = flashinfer.top_k_page_table_transform(
        logits, table, lens, 64, deterministic=True, tie_break=1, dsa_graph_safe=True, page_size=64
    )
    step = ks.DecodeIndexer(spec, max_rows=1, max_context=640, device="cpu")
    wanted = step(q, cache, weights, lens, table, kv_table=table).rows
    torch.testing.assert_close(slots, wanted, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_script_is_one_graph() -> None:
    torch.manual_seed(3)
    spec = ks.IndexerSpec(32, 64, "fp8_fp32", numerics="fp32")
    cache = ks.IndexCache.empty(spec, pages=10)
    cache.append(torch.randn(640, 128), torch.arange(640))
    q, scale = ks.quantize_query(spec, torch.randn(1, 32, 128))
    weights = ks.fold_weights(torch.randn(1, 32), scale, 0.1)
    lens, table = torch.tensor([600], dtype=torch.int32), torch.randperm(10).view(1, 10).int()

    def script(pool: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        logits = deep_gemm.fp8_paged_mqa_logits(q[:, None], pool, weights, lens.view(-1, 1), table, None, 640)
        return flashinfer.top_k_page_table_transform(logits, table, lens, 64, page_size=64)

    pool = cache.data.view(-1, 64, 1, 132)
    got = torch.compile(script, fullgraph=True, backend="eager")(pool, weights)
    torch.testing.assert_close(got, script(pool, weights), rtol=0, atol=0)


def pair_of(change: dict[str, Any]) -> dict[str, Any]:
    return {"q": (change["q"], None)} if "q" in change else change


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"q": torch.zeros(1, 32, 128)}, "q"),
        ({"kv_cache": torch.zeros(2, 64, 132, dtype=torch.uint8)}, "kv_cache"),
        ({"indices": torch.zeros(1, dtype=torch.int32)}, "indices"),
        ({"context_lens": torch.zeros(3, dtype=torch.int32)}, "context_lens"),
        ({"context_lens": [9]}, "context_lens"),
        ({"context_lens": torch.zeros(1, 1)}, "context_lens"),
        ({"q": torch.zeros(1, 1, 32, 128)}, "q"),
        ({"kv_cache": torch.zeros(2, 64, 1, 132)}, "kv_cache"),
        (
            {"kv_cache": torch.zeros(2 * 8449, dtype=torch.uint8)[2:].as_strided((2, 64, 1, 132), (8448, 132, 132, 1))},
            "kv_cache address",
        ),
        ({"weights": torch.zeros(2, 32)}, "weights"),
        ({"block_table": torch.zeros(1, 2)}, "block_table"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, "block_table"),
        ({"max_context_len": -1}, "max_context_len"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_logits_refusals(change: dict[str, Any], argument: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(1, 1, 32, 128).to(torch.float8_e4m3fn),
        "kv_cache": torch.zeros(2, 64, 1, 132, dtype=torch.uint8),
        "weights": torch.zeros(1, 32),
        "context_lens": torch.tensor([[9]], dtype=torch.int32),
        "block_table": torch.zeros(1, 2, dtype=torch.int32),
        "schedule_meta": None,
        "max_context_len": 128,
    }
    with pytest.raises(KeysieveError, match=f"{argument}: got"):
        deep_gemm.fp8_paged_mqa_logits(**arguments | change)
    with pytest.raises(KeysieveError, match="logits_dtype: got"):
        deep_gemm.fp8_fp4_paged_mqa_logits(**arguments | {"q": (arguments["q"], None)}, logits_dtype=torch.float32)
    with pytest.raises(KeysieveError, match=f"{argument}: got"):
        deep_gemm.fp8_fp4_paged_mqa_logits(**arguments | {"q": (arguments["q"], None)} | pair_of(change))
    with pytest.raises(KeysieveError, match="block_kv: got"):
        deep_gemm.get_paged_mqa_logits_metadata(arguments["context_lens"], 128, 132)


def test_mxfp4_refusals_name_the_pair_and_its_parts() -> None:
    lens, table = torch.tensor([[9]], dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    codes, cache = torch.zeros(1, 1, 16, 64, dtype=torch.uint8), torch.zeros(2, 64, 1, 68, dtype=torch.uint8)
    for q, argument in (
        (codes, "q"),
        ((codes,), "q"),
        ((codes.float(), torch.zeros(1, 1, 16, dtype=torch.int32)), "q"),
        ((codes, torch.zeros(1, 1, 15, dtype=torch.int32)), r"q\[1\]"),
        ((codes, torch.zeros(1, 1, 16)), r"q\[1\]"),
    ):
        with pytest.raises(KeysieveError, match=f"^{argument}: got"):
            deep_gemm.fp8_fp4_paged_mqa_logits(q, cache, torch.zeros(1, 16), lens, table, None, 128)


# ----------------------------------------------------------------------- where and in whose words a mistake is told


def told(call: Any) -> tuple[str, str, int]:
    """Text, file and line of the one warning of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # of a file that an earlier test forgot
        call()
    assert [w.category for w in found] == [ks.DeviceFaultWarning]
    return str(found[0].message), found[0].filename, found[0].lineno


def test_warnings_stand_at_the_callers_line_in_his_words() -> None:
    rows, table = torch.zeros(1, 300).bfloat16(), torch.zeros(1, 5, dtype=torch.int32)
    lengths, owner = torch.tensor([300], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    cache = torch.zeros(2, 64, 1, 132, dtype=torch.uint8)
    q, weights = torch.zeros(1, 1, 32, 128).to(torch.float8_e4m3fn), torch.zeros(1, 32)
    logits = partial(deep_gemm.fp8_paged_mqa_logits, q, cache, weights, lengths)
    spec = ks.IndexerSpec(32, 1, "fp8_fp32", numerics="fp32")

    for expected, call in (
        ("src_page_table (5 columns of page_size = 1)",
         lambda: flashinfer.top_k_page_table_transform(rows, table, lengths, 4)),
        ("row_to_batch 4 is outside the 1 rows of src_page_table",
         lambda: flashinfer.top_k_page_table_transform(rows, table, lengths, 4, owner, page_size=64)),
        ("the 0 keys of", lambda: flashinfer.top_k_ragged_transform(rows[:, :0], lengths, lengths, 4)),
        ("block_table (2 columns of 64)", lambda: logits(table[:, :2], None, 300)),
        ("max_context_len", lambda: logits(table, None, 200)),
        ("kv_table (5 columns of kv_page = 1)", lambda: ks.topk(rows, lengths, 4, kv_table=table, kv_page=1)),
        ("index_table (2 columns of 64)",
         lambda: ks.score(spec, q[0], ks.IndexCache(spec, cache[:, :, 0]), weights, lengths, table[:, :2], 300)),
        ("the 299 keys", lambda: topk_reference(rows[:, :299], lengths, 4)),
    ):  # fmt: skip
        text, file, line = told(call)
        assert expected in text
        assert file == __file__
        first = call.__code__.co_firstlineno
        assert line == first


def test_only_the_call_itself_is_told_in_those_words() -> None:
    """After an alias, and in another thread during one, keysieve's own names stand."""
    with pytest.raises(KeysieveError, match="src_page_table: got"):
        flashinfer.top_k_page_table_transform(torch.zeros(1, 9).bfloat16(), "x", torch.zeros(1).int(), 4)
    with pytest.raises(KeysieveError, match="kv_table: got"):
        ks.topk(torch.zeros(1, 9).bfloat16(), torch.zeros(1).int(), 4, kv_table=torch.zeros(1, 9))
    with as_typed({"k": "number", "kv_table": "pages"}), ThreadPoolExecutor(1) as pool:
        other = pool.submit(ks.topk, torch.zeros(1, 9).bfloat16(), torch.zeros(1).int(), 0)
        with pytest.raises(KeysieveError, match=r"^k: got"):
            other.result()
        with pytest.raises(KeysieveError, match=r"^number: got"):
            ks.topk(torch.zeros(1, 9).bfloat16(), torch.zeros(1).int(), 0)
