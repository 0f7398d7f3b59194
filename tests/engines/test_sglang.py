"""SGLang's glue: alone, and inside the real `Indexer._get_topk_paged` and `DSATopKBackend` of a wheel."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import foreign
import pytest
import torch
from test_vllm import Batch

import keysieve as ks
import keysieve.integrations.sglang as ks_sglang
from keysieve.checks import KeysieveError

DSA = "sglang.srt.layers.attention.dsa"
REAL = (
    ks_sglang.BACKEND,
    f"{DSA}.dsa_indexer_metadata",
    "sglang.kernels.ops.attention.dsa.paged_mqa_logits",
    ks_sglang.INDEXER,
)


def slots(batch: Batch, positions: torch.Tensor) -> torch.Tensor:
    """Positions as token slots of the pool, by the batch's page table."""
    request = torch.arange(batch.rows) // batch.next_n
    entry = batch.table[request[:, None], positions.clamp_min(0).long() // 64]
    return torch.where(positions < 0, -1, entry * 64 + positions % 64).int()


def test_alone() -> None:
    batch = Batch([700, 2, 130, 64], 1)
    logits = ks_sglang.paged_logits(batch.q, batch.kv_cache, batch.weights, batch.lens, batch.table, None, 768)
    lengths = batch.lens.reshape(-1)
    wanted = batch.expected(64)
    torch.testing.assert_close(ks_sglang.positions(logits, lengths, 64), wanted, rtol=0, atol=0)
    got = ks_sglang.topk_paged(logits, lengths, 64, batch.table[:4])
    torch.testing.assert_close(got, slots(batch, wanted), rtol=0, atol=0)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_context_parallel_conventions(world: int) -> None:
    """docs/sglang.md: a replicated index cache, interleave 1, this rank's rows through the same page table.

    Each rank's rows are what SGLang makes of the global slots: those with slot % W == rank, as slot // W.
    """
    batch = Batch([700, 2, 130, 64, 0], 1)
    table, lens = batch.table[:5], batch.lens.reshape(-1)
    whole = slots(batch, batch.expected(64))
    arguments = (batch.spec, batch.query, batch.cache, batch.weights[:5], lens, table)
    logits = ks.score(*arguments, max_len=704)
    offers, local = [], []
    for rank in range(world):
        local.append(ks.local_seq_lens(lens, world, rank, 1))
        offers.append(ks.local_topk(logits[:, rank::world].contiguous(), local[rank], 64)[0])
    for rank in range(world):
        merged = ks.merge(
            torch.stack(offers),
            64,
            rank=rank,
            interleave=1,
            kv_table=table,
            kv_page=64 // world,
            block_rows=64 // world,
        )
        for row in range(5):
            mine = [int(s) // world for s in whole[row] if s >= 0 and s % world == rank]
            assert merged.rows[row].tolist() == mine + [-1] * (64 - len(mine))


# ----------------------------------------------------------------------------------------------- the wheel's functions


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ModuleType]]:
    # Helpers of the module that nothing here calls are decorated with it, and it would look into the stand-ins.
    monkeypatch.setattr(torch, "compile", lambda *functions, **_: functions[0] if functions else lambda f: f)
    given: dict[str, Any] = {
        f"{DSA}.dsa_npu_indexer.DSANPUIndexerMixin": type("Mixin", (), {}),
        "sglang.kernels.fused_op.BaseFusedOp": type("Base", (), {}),
        "sglang.srt.utils.is_hip": lambda: False,
        "sglang.srt.utils.is_xpu": lambda: False,
        "sglang.srt.utils.is_npu": lambda: False,
        "sglang.srt.utils.is_cuda": lambda: True,
        "sglang.srt.utils.custom_op.register_custom_op": lambda *_, **__: lambda function: function,
        "sglang.srt.compilation.compilation_config.register_split_op": lambda *_: lambda function: function,
    }
    with foreign.modules("sglang", REAL, ("triton", "einops", "sgl_kernel", "deep_gemm"), given) as loaded:
        for name in ("deepgemm_paged_mqa_logits_native", "deepgemm_paged_mqa_logits_split"):
            setattr(loaded[3], name, getattr(loaded[2], name))  # the indexer imports them from the package
        yield loaded
        ks_sglang.unpatch()


def paged(sglang: list[ModuleType], batch: Batch, k: int, *, fused: bool, verify: bool, pad: int = 0) -> torch.Tensor:
    """SGLang's own `_get_topk_paged`, metadata and backend on a decode batch. verify: several rows a request."""
    backend, metadata_module, _, module = sglang
    rows = batch.rows
    backend.envs.SGLANG_DSA_FUSE_TOPK.get = lambda: fused
    backend.envs.SGLANG_OPT_USE_TOPK_V2.get = lambda: True
    table = batch.table[: len(batch.lens)].repeat_interleave(batch.next_n, 0)
    attention = SimpleNamespace(
        cache_seqlens_int32=batch.last.reshape(-1) if verify else batch.lens.reshape(-1),
        dsa_seqlens_expanded=batch.lens.reshape(-1),
        real_page_table=table,
        page_table_1=None,
        dsa_extend_seq_lens_list=[1] * rows,
        cu_seqlens_q=None,
        topk_indices_offset=None,
    )
    metadata = metadata_module.DSAIndexerMetadata(
        attn_metadata=attention,
        topk_transform_method=backend.TopkTransformMethod.PAGED,
        topk_backend=backend.DSATopKBackend.SGL_KERNEL,
        paged_mqa_ctx_lens_2d=batch.lens if verify else batch.lens.reshape(-1, 1),
    )
    module.get_token_to_kv_pool = lambda: SimpleNamespace(index_page_size=64)
    indexer = SimpleNamespace(
        _get_index_k_read_buffer=lambda _pool, _layer: batch.cache.data.reshape(len(batch.cache.data), -1),
        paged_mqa_logits_backend=SimpleNamespace(is_cutedsl=lambda: False, is_aiter=lambda: False),
        sm_count=132,
        index_topk=k,
        num_init_tokens=0,
        num_local_tokens=0,
        n_heads=batch.spec.heads,
    )
    indexer._mask_init_and_local_tokens = lambda *a: module.Indexer._mask_init_and_local_tokens(indexer, *a)
    mode = SimpleNamespace(is_target_verify=lambda: verify, is_draft_extend_v2=lambda: False)
    query = torch.cat([batch.query, batch.query[:pad]]) if pad else batch.query
    weights = batch.weights[: rows + pad].unsqueeze(2)
    result: torch.Tensor = module.Indexer._get_topk_paged(
        indexer, SimpleNamespace(forward_mode=mode), 0, query, weights, metadata
    )
    return result


@pytest.mark.parametrize("fused", [True, False], ids=["slots", "positions"])
@pytest.mark.parametrize(("next_n", "verify"), [(1, False), (3, True)])
def test_inside_the_real_indexer(sglang: list[ModuleType], fused: bool, next_n: int, verify: bool) -> None:
    batch = Batch([700, 20, 130, 64], next_n)
    ks_sglang.patch()
    got = paged(sglang, batch, 64, fused=fused, verify=verify)
    wanted = batch.expected(64)
    torch.testing.assert_close(got, slots(batch, wanted) if fused else wanted, rtol=0, atol=0)


def test_padding_rows_stay_sglangs(sglang: list[ModuleType]) -> None:
    batch = Batch([700, 20, 130], 1)
    ks_sglang.patch()
    got = paged(sglang, batch, 64, fused=True, verify=False, pad=2)
    torch.testing.assert_close(got[:3], slots(batch, batch.expected(64)), rtol=0, atol=0)
    assert (got[3:] == -1).all()


def test_float32_logits_stay_with_sglang(sglang: list[ModuleType]) -> None:
    backend = sglang[0]
    backend.envs.SGLANG_DSA_FUSE_TOPK.get = lambda: False
    ks_sglang.patch()
    logits = torch.randn(2, 100)
    got = backend.DSATopKBackend.TORCH.topk_transform(
        logits, torch.tensor([100, 100], dtype=torch.int32), 8, backend.TopkTransformMethod.PAGED, None
    )
    wanted = logits.topk(8).indices
    torch.testing.assert_close(got.sort(1).values.long(), wanted.sort(1).values, rtol=0, atol=0)


def test_ragged_rows_are_refused(sglang: list[ModuleType]) -> None:
    backend = sglang[0]
    backend.envs.SGLANG_DSA_FUSE_TOPK.get = lambda: True
    ks_sglang.patch()
    rows, lengths = torch.zeros(1, 9).bfloat16(), torch.tensor([9], dtype=torch.int32)
    transform = backend.DSATopKBackend.SGL_KERNEL.topk_transform
    with pytest.raises(KeysieveError, match="topk_transform_method"):
        transform(rows, lengths, 4, backend.TopkTransformMethod.RAGGED, None)
    with pytest.raises(KeysieveError, match="row_starts"):
        transform(rows, lengths, 4, backend.TopkTransformMethod.PAGED, None, row_starts=lengths)


def test_unpatch_gives_everything_back(sglang: list[ModuleType]) -> None:
    backend, _, _, indexer = sglang
    before = indexer.resolve_fp8_paged_mqa_logits_fn, backend.DSATopKBackend.topk_transform
    ks_sglang.patch()
    ks_sglang.patch()
    assert indexer.resolve_fp8_paged_mqa_logits_fn is not before[0]
    ks_sglang.unpatch()
    assert (indexer.resolve_fp8_paged_mqa_logits_fn, backend.DSATopKBackend.topk_transform) == before


def test_another_version_is_refused_and_left_alone(sglang: list[ModuleType]) -> None:
    backend, _, _, indexer = sglang
    kept = backend.DSATopKBackend.topk_transform
    del backend.TopkTransformMethod
    with pytest.raises(KeysieveError, match="TopkTransformMethod"):
        ks_sglang.patch()
    assert backend.DSATopKBackend.topk_transform is kept
    assert indexer.resolve_fp8_paged_mqa_logits_fn is not None
