"""What users assemble today, timed beside a step: DeepGEMM's paged logits and their metadata, then somebody's top-k.

Whatever of them is installed is measured; the rest is left out. Each call enqueues one whole step on an input set, so
that it can be captured in a graph as keysieve's is. Names in a record say what was promised: `deterministic` where
ties go to the lower position on every run, `unordered_ties` where the library promises nothing about them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keysieve.bench.score import Case, DeepGemm, Inputs
from keysieve.spec import PAGE

Call = Callable[[int], object]
TopK = Callable[[torch.Tensor, Inputs], object]


def selections(case: Case, k: int, kv_table: torch.Tensor) -> dict[str, TopK]:
    """Top-k of float32 logits [rows, context] by library, as many as can be imported."""
    found: dict[str, TopK] = {"torch_topk_unordered_ties": lambda logits, _: torch.topk(logits, k, dim=1)}
    try:
        import cuda.bindings.driver as cuda
        from cudnn.deepseek_sparse_attention.indexer_top_k import indexer_top_k_wrapper
    except ImportError:
        pass
    else:

        def cudnn(logits: torch.Tensor, x: Inputs) -> object:
            stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
            return indexer_top_k_wrapper(
                logits, x.lens, k, return_val=False, stream=stream, tie_break=1, deterministic=True
            )

        found["cudnn_frontend_deterministic_positions"] = cudnn
    try:
        import flashinfer
    except ImportError:
        pass
    else:
        owner = torch.arange(len(case.lengths), device=kv_table.device, dtype=torch.int32)
        owners = owner.repeat_interleave(case.next_n) if case.next_n > 1 else None

        def transform(logits: torch.Tensor, x: Inputs) -> object:
            return flashinfer.top_k_page_table_transform(
                logits,
                kv_table,
                x.lens,
                k,
                row_to_batch=owners,
                deterministic=True,
                tie_break=1,
                dsa_graph_safe=True,
                page_size=PAGE,
            )

        found["flashinfer_deterministic"] = transform
    return found


def steps(case: Case, pool: torch.Tensor, inputs: list[Inputs], kv_table: torch.Tensor, k: int) -> dict[str, Call]:
    """Whole steps of others by name: logits, their metadata and a top-k. Empty where DeepGEMM is not installed or does
    not serve the case (it has one or two query rows a request)."""
    if case.next_n > 2:
        return {}
    try:
        peer = DeepGemm()
    except ImportError:
        return {}
    lengths = [peer.lengths(case, x) for x in inputs]
    longest = max(case.lengths)

    def step_of(select: TopK) -> Call:
        def step(i: int) -> Any:
            x = inputs[i]
            logits = peer.logits(case, pool, x, lengths[i], peer.metadata(lengths[i]))
            return select(logits[:, :longest], x)

        return step

    return {f"deep_gemm+{name}": step_of(select) for name, select in selections(case, k, kv_table).items()}
