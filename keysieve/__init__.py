"""keysieve: exact, deterministic top-k key selection for the lightning indexer of DeepSeek Sparse Attention models."""

from __future__ import annotations

from keysieve.checks import DeviceFault, KeysieveError, UnsupportedError
from keysieve.spec import IndexerSpec

__version__ = "0.1.0"

__all__ = ["DeviceFault", "IndexerSpec", "KeysieveError", "UnsupportedError", "__version__"]
