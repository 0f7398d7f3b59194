"""The reference: every operation in plain PyTorch on the CPU. It is the cpu backend and the oracle of the others."""

from __future__ import annotations

from keysieve.cache import IndexCache
from keysieve.quantize import fold_weights, quantize_query
from keysieve.reference.dcp_maps import local_seq_lens
from keysieve.reference.local_topk import local_topk
from keysieve.reference.merge import merge
from keysieve.reference.score import score
from keysieve.reference.topk import topk

__all__ = [
    "IndexCache",
    "fold_weights",
    "local_seq_lens",
    "local_topk",
    "merge",
    "quantize_query",
    "score",
    "topk",
]
