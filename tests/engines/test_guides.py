"""The engine guides: their code runs on a CPU, and every name of keysieve on them and in the table of names exists."""

from __future__ import annotations

import importlib.util
import inspect
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import keysieve as ks

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ("vllm.md", "sglang.md", "coming-from.md")
TOPK, HEADS, REQUESTS, COLUMNS = 64, 8, 4, 12


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def blocks(name: str) -> list[str]:
    """The Python on a page."""
    return re.findall(r"```python\n(.*?)```", page(name), re.DOTALL)


def block_with(name: str, words: str) -> str:
    (found,) = (block for block in blocks(name) if words in block)
    return found


def named(text: str) -> set[str]:
    """What follows ``ks.``, ``ks_vllm.``, ``ks_sglang.`` or ``keysieve.`` in a text's code."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text))
    return set(re.findall(r"\b((?:ks|ks_vllm|ks_sglang|keysieve)(?:\.[A-Za-z_]\w*)+)", code))


def resolved(name: str) -> Any:
    head, *path = name.split(".")
    where = {"ks": "keysieve", "keysieve": "keysieve"}.get(head, f"keysieve.integrations.{head.removeprefix('ks_')}")
    found: Any = importlib.import_module(where)
    for part in path:
        where = f"{where}.{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(where)
    return found


@pytest.mark.parametrize("guide", GUIDES)
def test_every_name_of_keysieve_exists(guide: str) -> None:
    names = named(page(guide))
    assert len(names) >= 3
    for name in sorted(names):
        try:
            resolved(name)
        except (ImportError, AttributeError):
            pytest.fail(f"docs/{guide} names {name}, which does not exist")


def test_a_name_that_does_not_exist_is_noticed() -> None:
    assert named("`ks.supports(spec)`\n```python\nks.dcp.Nothing()\n```") == {"ks.supports", "ks.dcp.Nothing"}
    for name in ("ks.nothing", "ks.dcp.Nothing", "ks_vllm.nothing"):
        with pytest.raises((ImportError, AttributeError)):
            resolved(name)


def test_every_call_in_the_table_of_names_has_those_arguments() -> None:
    """Keyword arguments of each call in coming-from's right column are parameters of what it calls."""
    lines = [line for line in page("coming-from.md").splitlines() if line.startswith("| `")]
    assert len(lines) >= 10
    checked = 0
    for line in lines:
        for name, given in re.findall(r"`(ks(?:\.\w+)+|indexer)\((.*?)\)`", line.split("|")[2]):
            target = ks.DecodeIndexer.__call__ if name == "indexer" else resolved(name)
            signature = inspect.signature(target)
            words = [word.strip() for word in given.split(",") if word.strip() not in ("", "...")]
            keywords = [word.partition("=")[0] for word in words if "=" in word]
            if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
                assert set(keywords) <= set(signature.parameters), f"{name}: {keywords}"
            plain = [word for word in words if "=" not in word]
            places = [n for n, p in signature.parameters.items() if p.kind is not p.KEYWORD_ONLY and n != "self"]
            assert len(plain) <= len(places) or "args" in signature.parameters, f"{name}: {plain}"
            checked += 1
    assert checked >= 9


class Step:
    """A decode step as both guides have it."""

    def __init__(self, next_n: int) -> None:
        torch.manual_seed(6)
        self.spec = ks.IndexerSpec(HEADS, TOPK, "fp8_fp32")
        self.lengths = torch.tensor([700, 2, 130, 64], dtype=torch.int32)
        self.cache = ks.IndexCache.empty(self.spec, pages=REQUESTS * COLUMNS)
        self.cache.append(torch.randn(REQUESTS * COLUMNS * 64, 128), torch.arange(REQUESTS * COLUMNS * 64))
        self.table = torch.randperm(REQUESTS * COLUMNS).view(REQUESTS, COLUMNS).int()
        rows = REQUESTS * next_n
        self.query, scale = ks.quantize_query(self.spec, torch.randn(rows, HEADS, 128))
        self.weights = ks.fold_weights(torch.randn(rows, HEADS), scale, 0.1)
        self.lens = (self.lengths[:, None] + 1 - next_n + torch.arange(next_n)).clamp_min(0).int()

    def wanted(self, **more: Any) -> ks.Selection:
        indexer = ks.DecodeIndexer(self.spec, len(self.query), COLUMNS * 64, len(self.query) // REQUESTS, device="cpu")
        return indexer(self.query, self.cache, self.weights, self.lens, self.table, **more)


def on_cpu() -> SimpleNamespace:
    """keysieve with indexers on the CPU, where a guide means its GPU."""
    return SimpleNamespace(**vars(ks) | {"DecodeIndexer": partial(ks.DecodeIndexer, device="cpu")})


def test_vllms_one_call_runs_and_selects() -> None:
    step = Step(next_n=2)
    rows = len(step.query)
    buffer = torch.full((rows + 2, TOPK + 5), -7, dtype=torch.int32)
    given = {
        "ks": on_cpu(),
        "spec": step.spec,
        "max_rows": rows,
        "max_model_len": COLUMNS * 64,
        "speculative_tokens": 1,
        "padded_q_quant_cast": step.query.view(REQUESTS, 2, HEADS, 128),
        "heads": HEADS,
        "kv_cache": step.cache.data,
        "weights": torch.cat([step.weights, torch.zeros(2, HEADS)]),
        "num_padded_tokens": rows,
        "seq_lens": step.lens,
        "decode_metadata": SimpleNamespace(block_table=step.table),
        "topk_indices_buffer": buffer,
        "topk_tokens": TOPK,
    }
    exec(compile(block_with("vllm.md", "topk_indices_buffer"), "vllm.md", "exec"), given)
    assert torch.equal(buffer[:rows, :TOPK], step.wanted().rows)
    assert (buffer[rows:] == -7).all()
    assert (buffer[:, TOPK:] == -7).all()


def test_sglangs_one_call_runs_and_gives_token_slots() -> None:
    step = Step(next_n=1)
    out = torch.full((REQUESTS, TOPK), -7, dtype=torch.int32)
    given = {
        "ks": ks,
        "spec": step.spec,
        "indexer": ks.DecodeIndexer(step.spec, REQUESTS, COLUMNS * 64, device="cpu"),
        "q_fp8": step.query,
        "buffer": step.cache.data.view(-1, 64 * 132),
        "weights": step.weights.unsqueeze(2),
        "metadata": SimpleNamespace(get_seqlens_expanded=lambda: step.lens.view(-1)),
        "page_table": step.table,
        "topk_result": out,
    }
    exec(compile(block_with("sglang.md", "topk_result"), "sglang.md", "exec"), given)
    wanted = step.wanted(kv_table=step.table, positions=True)
    assert torch.equal(out, wanted.rows)
    assert wanted.positions is not None
    at = wanted.positions.clamp_min(0).long()
    slots = step.table.gather(1, at // 64) * 64 + at % 64
    assert torch.equal(out, torch.where(wanted.positions < 0, -1, slots.int()))


def test_sglangs_context_parallel_calls_run(tmp_path: Path) -> None:
    """One rank of one; what several select is in test_sglang.py."""
    step = Step(next_n=1)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    given = {
        "ks": on_cpu(),
        "group": dist.group.WORLD,
        "spec": step.spec,
        "max_rows": REQUESTS,
        "max_context": COLUMNS * 64,
        "q": step.query,
        "cache": step.cache,
        "weights": step.weights,
        "lens": step.lens,
        "page_table": step.table,
        "W": 1,
        "layer": 3,
    }
    try:
        exec(compile(block_with("sglang.md", "Exchange"), "sglang.md", "exec"), given)
    finally:
        dist.destroy_process_group()
    wanted = step.wanted(kv_table=step.table)
    assert torch.equal(given["out"].rows, wanted.rows)
    assert torch.equal(given["out"].counts, wanted.counts)


@pytest.mark.parametrize("guide", ["vllm.md", "sglang.md"])
def test_patching_is_refused_by_name_without_the_engine(guide: str) -> None:
    """The block with ``patch()`` runs as far as the engine's own module, which tests/engines give it."""
    engine = guide.removesuffix(".md")
    if importlib.util.find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed: tests/engines patch it")
    with pytest.raises(ModuleNotFoundError, match=engine):
        exec(compile(block_with(guide, f"ks_{engine}.patch()"), guide, "exec"), {})
