"""keysieve: exact, deterministic top-k key selection for the lightning indexer of DeepSeek Sparse Attention models."""

from __future__ import annotations

from keysieve import dcp, reference
from keysieve.api import DecodeIndexer, local_topk, merge, score, topk, workspace_bytes
from keysieve.backends import supports
from keysieve.cache import IndexCache
from keysieve.checks import DeviceFault, DeviceFaultWarning, KeysieveError, UnsupportedError
from keysieve.inputs import Selection
from keysieve.quantize import fold_weights, quantize_query
from keysieve.reference.dcp_maps import local_seq_lens
from keysieve.residency import keep_results_in_l2
from keysieve.spec import IndexerSpec

__version__ = "0.1.0"

__all__ = [
    "DecodeIndexer",
    "DeviceFault",
    "DeviceFaultWarning",
    "IndexCache",
    "IndexerSpec",
    "KeysieveError",
    "Selection",
    "UnsupportedError",
    "__version__",
    "dcp",
    "fold_weights",
    "keep_results_in_l2",
    "local_seq_lens",
    "local_topk",
    "merge",
    "quantize_query",
    "reference",
    "score",
    "supports",
    "topk",
    "workspace_bytes",
]
