"""vLLM's glue: alone, and inside the real `sparse_attn_indexer` and beside the real `SparseIndexerTopk` of a wheel."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import foreign
import pytest
import torch

import keysieve as ks
import keysieve.integrations.vllm as ks_vllm
from keysieve.checks import KeysieveError
from keysieve.reference import score as reference_score

TOPK_MODULE = "vllm.model_executor.layers.indexer_topk"


class Batch:
    """A decode batch as vLLM hands it over: requests of next_n rows, its pages, weights of padding rows too."""

    def __init__(self, lengths: list[int], next_n: int, heads: int = 8, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.spec = ks.IndexerSpec(heads, 64, "fp8_fp32", numerics="fp32")
        requests, pages = len(lengths), sum(-(-n // 64) for n in lengths)
        self.cache = ks.IndexCache.empty(self.spec, pages=pages + 3)
        self.table = torch.full((requests + 1, max(-(-n // 64) for n in lengths) + 2), 10**6, dtype=torch.int32)
        free = torch.randperm(pages + 3)
        for request, n in enumerate(lengths):
            mine, free = free[: -(-n // 64)], free[-(-n // 64) :]
            self.table[request, : len(mine)] = mine.int()
            at = torch.arange(n)
            self.cache.append(torch.randn(n, 128), mine[at // 64] * 64 + at % 64)
        self.next_n, self.rows = next_n, requests * next_n
        self.query, scale = ks.quantize_query(self.spec, torch.randn(self.rows, heads, 128))
        self.weights = torch.cat(
            [ks.fold_weights(torch.randn(self.rows, heads), scale, 0.1), torch.full((2, heads), 9.0)]
        )
        last = torch.tensor(lengths, dtype=torch.int32)
        self.lens = (last[:, None] - next_n + 1 + torch.arange(next_n, dtype=torch.int32)).clamp_min(0)
        self.last = last[:, None]

    def expected(self, k: int) -> torch.Tensor:
        """Positions by a stable sort of the reference's logits."""
        width = self.table.shape[1] * 64
        requests = self.lens.shape[0]
        logits = reference_score(
            self.spec,
            self.query,
            self.cache,
            self.weights[: self.rows],
            self.lens,
            self.table[:requests],
            max_len=width,
        )
        out = torch.full((self.rows, k), -1, dtype=torch.int32)
        for row, length in enumerate(self.lens.reshape(-1).tolist()):
            order = torch.sort(logits[row, :length].float(), descending=True, stable=True).indices[:k]
            out[row, : len(order)] = order.sort().values.int()
        return out

    @property
    def kv_cache(self) -> torch.Tensor:
        return self.cache.data.unsqueeze(2)

    @property
    def q(self) -> torch.Tensor:
        return self.query.view(-1, self.next_n, self.query.shape[1], 128)


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("per_row", [True, False], ids=["a length a row", "a length a request"])
def test_logits_then_topk(next_n: int, per_row: bool) -> None:
    batch = Batch([700, 2, 130, 64], next_n)
    lens = batch.lens if per_row else batch.last
    logits = ks_vllm.paged_logits((batch.q, None), batch.kv_cache, batch.weights, lens, batch.table, None, 4096)
    buffer = torch.full((batch.rows + 2, 80), 7, dtype=torch.int32)
    ks_vllm.Topk()(logits, lens, next_n, buffer[: batch.rows, :64], 64, 700)
    torch.testing.assert_close(buffer[: batch.rows, :64], batch.expected(64), rtol=0, atol=0)
    assert (buffer[batch.rows :] == 7).all()
    assert (buffer[:, 64:] == 7).all()


def test_float32_logits_are_refused() -> None:
    out = torch.full((1, 4), 7, dtype=torch.int32)
    with pytest.raises(KeysieveError, match=r"logits: got torch\.float32"):
        ks_vllm.Topk()(torch.zeros(1, 9), torch.tensor([9], dtype=torch.int32), 1, out, 4, 9)
    assert (out == 7).all()


# ----------------------------------------------------------------------------------------------- the wheel's functions


@pytest.fixture
def vllm() -> Iterator[list[ModuleType]]:
    real = (ks_vllm.MODULE, TOPK_MODULE)
    given = {"vllm.compilation.breakable_cudagraph.eager_break_during_capture": lambda function: function}
    with foreign.modules("vllm", real, ("triton",), given) as loaded:
        loaded[0].current_platform.is_xpu.return_value = False
        loaded[0]._resolve_layer_name = lambda name: name
        loaded[0].kv_cache_as_quant_view  # noqa: B018  # a name the decode path uses: an AttributeError says it moved
        yield loaded
        ks_vllm.unpatch()


def decode(module: ModuleType, batch: Batch, buffer: torch.Tensor, k: int, lens: torch.Tensor, backend: str) -> None:
    """One call of vLLM's own `sparse_attn_indexer` on a batch of decode requests."""
    module.DeepseekV32IndexerMetadata = SimpleNamespace
    metadata = SimpleNamespace(
        slot_mapping=torch.zeros(batch.rows, dtype=torch.int64),
        num_decodes=len(lens),
        num_prefills=0,
        num_decode_tokens=batch.rows,
        max_seq_len=int(lens.max()),
        decode=SimpleNamespace(
            decode_lens=torch.full((len(lens),), batch.next_n),
            requires_padding=False,
            seq_lens=lens,
            block_table=batch.table,
            schedule_metadata=None,
            indices=None,
            global_seq_lens=None,
        ),
    )
    context = SimpleNamespace(attn_metadata={"layer": metadata}, cudagraph_runtime_mode=module.CUDAGraphMode.FULL)
    module.get_forward_context = lambda: context
    module.mqa_logits_mx_inputs = lambda _codes, scale, weights: (scale, weights)
    module.sparse_attn_indexer(
        hidden_states=torch.zeros(batch.rows, 4),
        k_cache_prefix="layer",
        kv_cache=batch.cache.data,
        q_quant=batch.query,
        q_scale=None,
        k=None,
        weights=batch.weights,
        quant_block_size=128,
        scale_fmt="ue8m0",
        topk_tokens=k,
        head_dim=128,
        max_model_len=4096,
        total_seq_lens=4096,
        topk_indices_buffer=buffer,
        skip_k_cache_insert=True,
        use_pcp=False,
        pcp_shard_decode_requests=False,
        dense_mha_metadata_layer_name="",
        topk_backend=backend,
    )


@pytest.mark.parametrize("next_n", [1, 2])
def test_inside_the_real_indexer(vllm: list[ModuleType], next_n: int) -> None:
    batch = Batch([700, 2, 130, 64], next_n)
    ks_vllm.patch()
    buffer = torch.full((batch.rows + 2, 64), 7, dtype=torch.int32)
    decode(vllm[0], batch, buffer, 64, batch.lens, "auto")
    torch.testing.assert_close(buffer[: batch.rows], batch.expected(64), rtol=0, atol=0)
    assert (buffer[batch.rows :] == 7).all(), "rows past the step's are vLLM's"


def test_the_real_torch_backend_agrees_on_the_same_logits(vllm: list[ModuleType]) -> None:
    """vLLM's reference selection (`sparse_indexer_topk_backend=torch`) of our logits, as sets."""
    batch = Batch([700, 300], 2, seed=3)
    logits = ks_vllm.paged_logits((batch.q, None), batch.kv_cache, batch.weights, batch.lens, batch.table, None, 4096)
    for lens in (batch.lens, batch.last):
        theirs, ours = (torch.full((batch.rows, 64), 7, dtype=torch.int32) for _ in range(2))
        real = vllm[1].SparseIndexerTopk("torch")
        spread = logits.float()
        spread += torch.where(spread.isinf(), 0.0, -torch.arange(spread.shape[1]) * 1e-9)  # ties to the lower position
        real.forward(spread, lens, 2, theirs, 64, 700)
        ks_vllm.Topk()(logits, lens, 2, ours, 64, 700)
        torch.testing.assert_close(theirs.sort(1).values, ours.sort(1).values, rtol=0, atol=0)


def test_what_is_not_served_is_refused_by_the_patch(vllm: list[ModuleType]) -> None:
    ks_vllm.patch()
    with pytest.raises(KeysieveError, match="candidate blocks"):
        vllm[0]._select_candidate_blocks(None)


def test_prefill_logits_are_still_widened_by_vllm(vllm: list[ModuleType]) -> None:
    """BF16 logits that are not keysieve's (prefill on Blackwell) go to vLLM's own functions."""
    calls: list[str] = []
    vllm[0].as_fp32_logits = lambda *_: calls.append("widen") or torch.zeros(1)
    vllm[0]._merge_dcp_topk_global = lambda *_: calls.append("merge")
    ks_vllm.patch()
    foreign_logits = torch.zeros(1, 9).bfloat16()
    assert vllm[0].as_fp32_logits(foreign_logits, torch.tensor([9])).dtype == torch.float32
    vllm[0]._merge_dcp_topk_global(foreign_logits, torch.zeros(1, 2).int(), 2, 0, 2, 1)
    assert calls == ["widen", "merge"]


class Ranks:
    """An all-gather between ranks that run one after another: a first round collects, a second one has everything."""

    def __init__(self) -> None:
        self.offers: list[torch.Tensor] = []
        self.collecting = True

    def all_gather(self, offer: torch.Tensor, dim: int) -> torch.Tensor:
        if self.collecting:
            self.offers.append(offer)
            return offer
        return torch.cat(self.offers, dim)


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 16), (4, 64)])
@pytest.mark.parametrize("patched", [False, True], ids=["alone", "in the module"])
def test_context_parallel_candidates_merge_exactly(
    request: pytest.FixtureRequest, patched: bool, world: int, interleave: int
) -> None:
    """All ranks end with the positions that one rank selects on the whole rows: ties, NaN, infinities, short rows."""
    torch.manual_seed(world)
    lengths, k = [500, 3, 0, 130], 32
    rows = (torch.randn(4, 500) * 2).round().bfloat16()
    rows[0, ::7], rows[0, 5], rows[3, :110] = float("nan"), float("inf"), float("-inf")
    rows[3, 1::2] = -0.0
    wanted = ks.topk(rows, torch.tensor(lengths, dtype=torch.int32), k)[0]
    module = request.getfixturevalue("vllm")[0] if patched else None
    group = Ranks()
    if module is not None:
        ks_vllm.patch()
        module.get_dcp_group = lambda: group
    for group.collecting in (True, False):
        for rank in range(world):
            mine = torch.tensor([p for p in range(500) if p // interleave % world == rank])
            logits = rows[:, mine].contiguous()
            local = torch.tensor([int((mine < n).sum()) for n in lengths], dtype=torch.int32)
            found = torch.full((4, k), 7, dtype=torch.int32)
            ks_vllm.Topk()(logits, local[:, None], 1, found, k, 500)
            if module is not None:
                logits.keysieve_logits = True  # type: ignore[attr-defined]
                module._merge_dcp_topk_global(logits, found, k, rank, world, interleave)
            else:
                ks_vllm.merge_dcp(group.all_gather, logits, found, k, rank, world, interleave)
            if not group.collecting:
                torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_unpatch_gives_everything_back(vllm: list[ModuleType]) -> None:
    names = ("fp8_fp4_paged_mqa_logits", "as_fp32_logits", "get_indexer_topk", "_merge_dcp_topk_global")
    before = [getattr(vllm[0], name) for name in names]
    ks_vllm.patch()
    ks_vllm.patch()
    assert all(getattr(vllm[0], name) is not old for name, old in zip(names, before, strict=True))
    ks_vllm.unpatch()
    assert all(getattr(vllm[0], name) is old for name, old in zip(names, before, strict=True))


def test_another_version_is_refused_and_left_alone(vllm: list[ModuleType]) -> None:
    kept: Any = vllm[0].fp8_fp4_paged_mqa_logits
    del vllm[0].as_fp32_logits
    with pytest.raises(KeysieveError, match="as_fp32_logits"):
        ks_vllm.patch()
    assert vllm[0].fp8_fp4_paged_mqa_logits is kept
